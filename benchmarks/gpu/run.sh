#!/usr/bin/env bash
# Checks the kernels on this machine's GPU, then measures, and ends with a verdict; --quick and --stages run a part.
#
#   benchmarks/gpu/run.sh [PYTHON] [--quick] [--stages NAME,...]
#
# PYTHON (default: python3) has a CUDA build of torch, Transformers and Triton; nothing is installed. Results go to $RESULTS
# (default: benchmarks/results). More in run.py.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=python3
if [[ ${1:-} && ${1:-} != -* ]]; then
    python=$1
    shift
fi
export PYTHONPATH=$PWD/src TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1 PYTHONUNBUFFERED=1
unset TRITON_INTERPRET
exec "$python" benchmarks/gpu/run.py "$@"
