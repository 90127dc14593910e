#!/usr/bin/env bash
# Lint, formatting and types: ruff over everything, mypy strict over the half that knows nothing of SGLang.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(scripts/setup.sh)
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
