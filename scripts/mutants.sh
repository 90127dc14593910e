#!/usr/bin/env bash
# Puts one wrong line at a time into a copy of the tree and runs the test that must notice; see test/mutants/run.py.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(scripts/setup.sh)
exec "$python" test/mutants/run.py "$@"
