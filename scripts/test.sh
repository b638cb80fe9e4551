#!/usr/bin/env bash
# Sets everything up and runs the linter and the tests.
#   bash scripts/test.sh           what a change needs before it is pushed
#   bash scripts/test.sh --all     also those marked `slow`: real models and real training; what CI runs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/install.sh

all=false
for argument in "$@"; do
    case $argument in
        --all) all=true ;;
        *) echo "usage: bash scripts/test.sh [--all]" >&2; exit 2 ;;
    esac
done

install_environment train,dev
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
# One thread a worker: the tests' tensors are too small to share.
OMP_NUM_THREADS=1 "$VENV/bin/python" -m pytest -n 2 -m "not slow"
if $all; then
    install_model
    install_vllm
    "$VENV/bin/python" -m pytest -m slow
fi
