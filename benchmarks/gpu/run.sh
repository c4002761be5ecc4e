#!/usr/bin/env bash
# Checks the kernels on this machine's GPU against float64, then measures; made to take less than nine minutes on an H100 or H200.
#
#   benchmarks/gpu/run.sh           makes .venv first, if need be
#   benchmarks/gpu/run.sh PYTHON    uses a Python that has a CUDA build of torch and what the extras dev and bench name
#
# Writes into benchmarks/results/. Exit code 3: no CUDA device. A step that takes too long is stopped; what it has measured stays.
set -euo pipefail
cd "$(dirname "$0")/../.."

python=${1:-}
if [[ -z $python ]]; then
    command -v nvidia-smi >/dev/null || {
        echo "benchmarks/gpu/run.sh: no CUDA device (nvidia-smi is not there): nothing was measured" >&2
        exit 3
    }
    make .venv/done-dev
    python=.venv/bin/python
fi
export PYTHONPATH=$PWD/src TOKENIZERS_PARALLELISM=false
unset TRITON_INTERPRET

"$python" - <<'CHECK'
import sys
import torch

if not torch.cuda.is_available():
    sys.exit(print("benchmarks/gpu/run.sh: torch finds no CUDA device: nothing was measured", file=sys.stderr) or 3)
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
CHECK

results=benchmarks/results
mkdir -p "$results"
step() { # seconds, what it does, command
    local limit=$1 what=$2
    shift 2
    printf '\n── %s (at most %s s) ──\n' "$what" "$limit"
    timeout --signal=INT --kill-after=15 "$limit" "$@"
}

step 180 "the kernel against float64" "$python" -m pytest -q -p no:cacheprovider tests/fused_cases.py
failed=0
step 60 "attention alone" "$python" benchmarks/gpu/attention.py --results "$results" || failed=1
step 90 "passes with PAD, SPLIT and the kernel" "$python" benchmarks/gpu/passes.py --results "$results" || failed=1
step 200 "speculative against plain decoding, acceptance imposed" "$python" -m shoal bench \
    --shape 7.8b/310m --acceptance 0.8 --dtype bfloat16 --device cuda --batch-sizes 1,2,4,8,16,32,64 \
    --lookahead off,fixed:6,auto --baselines hf --temperature 0.8 --max-new-tokens 64 --repeats 2 \
    --results "$results" || failed=1
exit "$failed"
