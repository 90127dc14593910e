#!/usr/bin/env bash
# Everything that needs several GPUs, in parts of under ten minutes each; results as JSON in benchmark/results/.
#
#   scripts/run_multi_gpu.sh [PART ...]     parts: test round round_no_p2p; all of them without arguments
#
# PYTHON names the interpreter (default: scripts/setup.sh's), MODEL a folder with target/ and draft/ (default: random
# weights, 24 layers x 2048, made on the spot), GPUS the number of GPUs to use (default 2).
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$(scripts/setup.sh)}
gpus=${GPUS:-2}
model=${MODEL:-${TMPDIR:-/tmp}/pp_spec_random_24x2048}
export PYTHONUNBUFFERED=1

[ -d "$model/target" ] || "$python" -m benchmark.random_model "$model" --layers 24 --hidden 2048

round() { # NAME [ENV=VALUE ...]
    local name=$1
    shift
    env "$@" timeout 590 "$python" -m benchmark.gpu_round --model "$model/target" --draft "$model/draft" \
        --gpus "$gpus" --arms builtin,ours,tp_all --repeat 3 --json "benchmark/results/gpu_round_${gpus}gpu_$name.json"
}

for part in "${@:-test round round_no_p2p}"; do
    for name in $part; do
        case $name in
            test) timeout 590 "$python" -m pytest test/gpu -q -s ;;
            round) round nccl ;;
            round_no_p2p) round nccl_no_p2p NCCL_P2P_DISABLE=1 ;;
            *)
                echo "unknown part $name" >&2
                exit 2
                ;;
        esac
    done
done
