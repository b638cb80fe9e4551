#!/usr/bin/env bash
# Correctness of every kernel on the GPU at hand, then a table of throughput; at most six minutes. Needs torch,
# Triton and pytest, and downloads nothing.
#   bash scripts/gpu_check.sh           on a GPU
#   bash scripts/gpu_check.sh --dry     the same at tiny sizes on CPU, through Triton's interpreter
# Everything is written under $OUT, or gpu_check/. Exits with 1 on any wrong number.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${OUT:-gpu_check}
python=${PYTHON:-python3}
[ -x .venv/bin/python ] && [ -z "${PYTHON:-}" ] && python=.venv/bin/python
dry=()
case ${1:-} in
    "") export TRITON_INTERPRET=0 ;;
    --dry) dry=(--dry); export TRITON_INTERPRET=1 DAPO_GPU_DRY=1 OMP_NUM_THREADS=1 ;;
    *) echo "usage: bash scripts/gpu_check.sh [--dry]" >&2; exit 2 ;;
esac
if ! { [ ${#dry[@]} -gt 0 ] || "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; }; then
    echo "torch finds no GPU here; bash scripts/gpu_check.sh --dry runs without one" >&2
    exit 2
fi
mkdir -p "$out"
status=0
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
"$python" -m pytest -rs -p no:cacheprovider tests/test_gpu.py > "$out/correctness.txt" 2>&1 || status=1
[ $status -eq 0 ] || grep -E '^(E  |FAILED|ERROR)' "$out/correctness.txt" | head -n 20
"$python" -m bench.gpu_check "${dry[@]}" --out "$out" 2> "$out/warnings.txt" || { status=1; tail -n 5 "$out/warnings.txt"; }
echo "correctness: $(tail -n 1 "$out/correctness.txt")"
exit $status
