#!/usr/bin/env bash
# The same questions to plain EAGLE, to PP x EAGLE through the plugin and to SGLang's own PP x EAGLE.
# Arguments go to the demo: --pp N, --questions N, --topk K, --json FILE.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1
python=$(scripts/setup.sh)
exec "$python" -m sglang_pp_spec.demo "$@"
