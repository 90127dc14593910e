#!/usr/bin/env bash
# Everything that needs several GPUs, in parts; results as JSON in benchmark/results/.
#
#   scripts/run_multi_gpu.sh [PART ...]
#
#   test                 consistency: chain and tree, with overlap and without, against plain EAGLE on one GPU; three
#                        and four stages talk through NCCL if there are as many GPUs, and share the first one if not
#   faults               wrong frames, a dead stage, the abort policy; with less than four GPUs, those of two stages
#                        alone (15 minutes)
#   soak soak_tree       nine minutes of random arrivals, long prompts and aborts (stages of one GPU each, whatever TP)
#   round round_large    ms per round at batch sizes 1, 8, 32: ours with overlap and without, with one slot, built-in and
#                        its depth 1, one stage on all GPUs (TP), with 1.2 and with 26 billion parameters (there 64 too,
#                        which fills two slots of the built-in)
#   long                 TTFT, TPOT and tokens per second at 8K prompts, the same arms
#   *_no_p2p             the same without peer access (NCCL_P2P_DISABLE=1: transfers through host memory), and without
#                        SGLang's custom all-reduce, which would use it all the same
#   *_tight              the same with so little room in NCCL's channels that a wrong order of operations hangs
#
# Without arguments: test faults soak round round_large long, then test, soak_tree and round without peer access, then
# soak with tight channels. PYTHON names the interpreter (default: scripts/setup.sh's), MODEL a folder with target/ and
# draft/ for round and long (default: random weights, 24 layers x 2048, made on the spot), GPUS the number of GPUs
# (default 2), TP the tensor-parallel size of a stage (default 1), MINUTES the length of a soak (default 9), TOGETHER how
# many servers start at once (default 3): round_large needs about 60 GB for each, over all GPUs. ARMS names the arms of
# round, round_large and long (benchmark.gpu_round has the list), SIZES the batch sizes.
# On a machine without a GPU the soaks rehearse on the CPU engine, with GPUS stages; results under TMPDIR.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$(scripts/setup.sh)}
gpus=${GPUS:-2}
tp=${TP:-1}
pp=$((gpus / tp))
if [ $((gpus % tp)) -ne 0 ] || [ "$pp" -lt 2 ]; then
    echo "$gpus GPUs are not two or more stages of $tp" >&2
    exit 2
fi
export PYTHONUNBUFFERED=1
. scripts/gpu_models.sh
results=benchmark/results
if ! command -v nvidia-smi >/dev/null; then
    results=${TMPDIR:-/tmp}/pp_spec_rehearsal # what GPUs measured stays
fi

measure() { # MODEL NAME SIZES [ARGUMENT ...]
    [ -n "$1" ] || return 1
    "$python" -m benchmark.gpu_round --model "$1/target" --draft "$1/draft" --gpus "$gpus" --tp "$tp" \
        --arms "${ARMS:-ours,builtin,tp_all_overlap,ours_sync,builtin_depth1,ours_one_slot,tp_all}" \
        --batch-sizes "${SIZES:-$3}" --together "${TOGETHER:-3}" --repeat 2 --tokens 96 "--server-args=$server_args" \
        --json "$results/gpu_round_${gpus}gpu_tp${tp}_$2.json" "${@:4}"
}

soak() { # NAME [ARGUMENT ...]
    "$python" -m benchmark.soak --pp "$pp" --minutes "${MINUTES:-9}" --json "$results/soak_pp${pp}_$1.json" "${@:2}"
}

part() { # NAME, whose suffixes are already taken care of, and the full name for results
    case $1 in
        test) "$python" -m pytest test/gpu -q -s ;;
        faults) "$python" -m pytest test/registered/pp/test_faults.py -q -k "not Noise" ;;
        soak) soak "$2" ;;
        soak_tree) soak "$2" --topk 2 ;;
        round) measure "$(small_model)" "$2" 1,8,32 ;;
        round_large)
            server_args+=" --load-format dummy"
            measure "$(large_model 64)" "$2" 1,8,32,64 --excerpt-ms 80
            ;;
        long) measure "$(small_model)" "$2" 1,8,32 --long-prompt 8192 ;;
        *)
            echo "unknown part $2; see the head of $0" >&2
            exit 2
            ;;
    esac
}

run() ( # NAME in an environment of its own
    name=$1 server_args=
    case $1 in
        *_no_p2p) export NCCL_P2P_DISABLE=1 && name=${1%_no_p2p} server_args=--disable-custom-all-reduce ;;
        *_tight) export NCCL_BUFFSIZE=65536 NCCL_MAX_NCHANNELS=1 && name=${1%_tight} ;;
    esac
    part "$name" "$1"
)

if [ $# -eq 0 ]; then
    set -- test faults soak round round_large long test_no_p2p soak_tree_no_p2p round_no_p2p soak_tight
fi
failed=()
for one in "$@"; do
    echo "== $one"
    run "$one" || failed+=("$one")
done
echo "failed: ${failed[*]:-none}"
[ ${#failed[@]} -eq 0 ]
