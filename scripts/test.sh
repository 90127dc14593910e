#!/usr/bin/env bash
# Installs what is missing, lints, and runs every test that needs no GPU, cheapest folder first.
#
#   scripts/test.sh                              everything
#   scripts/test.sh -k frame                     arguments go to pytest
#   scripts/test.sh test/unit/test_checkpoint.py a path replaces the list of folders
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1

python=$(scripts/setup.sh)
scripts/lint.sh

paths=()
for folder in unit contract ring dist registered; do
    if [ -d "test/$folder" ]; then paths+=("test/$folder"); fi
done
for argument in "$@"; do
    if [ -e "${argument%%::*}" ]; then paths=(); fi
done
exec "$python" -m pytest "${paths[@]}" "$@"
