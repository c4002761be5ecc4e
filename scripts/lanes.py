"""Runs the suite, at reduced size, in surroundings other than this machine's own.

    make lane LANE=python-3.10     one lane
    make lanes                     all of them, one after another
    scripts/lanes.py list          their names
    scripts/lanes.py turn          the lane whose turn it is today, or those named, as small as CI
                                   has time for

An environment of its own is made under .lanes by scripts/setup.sh. Where a Python has no CPU build
of torch, its lane says so and runs what can be run without: every command's --help. Where the
processor lacks the instructions of a lane's kernels, the lane says so and runs nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
PINS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")

QUICK = (
    "cli/test_generate_stream.py models/test_executors.py sampling/test_acceptance.py "
    "integrations/test_integrations_transformers.py"
)
KERNELS = (
    "kernels/test_native.py kernels/test_panels.py kernels/test_quantize.py kernels/test_lean.py "
    "sampling/test_draw_kernels.py"
)
ROOMS = (
    f"{QUICK} bench/test_bench.py cli/test_cli.py constraints/test_constraints.py "
    "docs/test_groups.py drafting/test_specs.py drafting/test_trees.py engine/test_ends.py "
    "engine/test_invariance.py evaluation/test_eval.py lookahead/test_auto.py "
    "kernels/test_lean.py models/test_cache.py models/test_checkpoints.py "
    "sampling/test_distributions.py serve/test_serve_api.py train/test_train_heads.py"
)
"""About three minutes of processor time that touch each room."""
LANGUAGES = "evaluation/test_execution.py evaluation/test_sandbox.py cli/test_cli.py"
TOOLS = (
    "pytest>=9", "pytest-xdist>=3.8", "hypothesis>=6.130", "scipy>=1.14", "httpx>=0.28",
    "openai>=2", "jsonschema>=4.20", "-e", ".[eval,grammar,members,serve,syntax]",
)  # fmt: skip
SECONDS = 1500
"""Most time of one command."""
NO_TORCH = 3
"""The exit code of scripts/setup.sh where it finds no CPU build of torch."""


class Failed(Exception):
    """A lane found something wrong; the message says where."""


@dataclass(frozen=True)
class Lane:
    """Surroundings, and what is run in them.

    Attributes:
        python: the version of an interpreter for an environment of its own; "here" = this one;
            empty = this one's environment itself.
        pins: replace those of constraints.txt, by name; an empty one takes the newest release.
        variables: of the environment.
        tests: files under tests.
        quick: those of them that CI has time for.
    """

    python: str = ""
    pins: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    tests: str = ""
    quick: str = ""


def turn(number: int) -> int:
    """Whose turn it is today, 0 to number - 1: each day the next one's."""
    return date.today().toordinal() % number


def promised(name: str) -> str:
    """The oldest release of a package that pyproject.toml promises."""
    bound = re.search(rf'"{name}>=(\d+\.\d+)', PROJECT)
    assert bound
    return f"{name}=={bound[1]}.0"


PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
ENDS = {PYTHONS[0]: ROOMS, PYTHONS[-1]: ROOMS}
OLDEST = {name: promised(name) for name in ("torch", "transformers")}
LANES = {
    **{f"python-{version}": Lane(version, tests=ENDS.get(version, "")) for version in PYTHONS},
    # each torch asks for a Triton of its own
    "oldest": Lane("here", {**OLDEST, "triton": ""}, tests=ROOMS, quick=QUICK),
    "newest": Lane("here", {"transformers": ""}, tests=ROOMS, quick=QUICK),
    "no-compiler": Lane("", {}, {"CC": "/bin/false", "SHOAL_MARCH": "native"}, f"{ROOMS} {KERNELS}", QUICK),
    "x86-64-v2": Lane("", {}, {"SHOAL_MARCH": "x86-64-v2"}, KERNELS, "kernels/test_native.py"),
    "x86-64-v3": Lane("", {}, {"SHOAL_MARCH": "x86-64-v3", "ONEDNN_MAX_CPU_ISA": "AVX2"}, KERNELS, "kernels/test_native.py"),
    "x86-64-v4": Lane(
        "", {}, {"SHOAL_MARCH": "x86-64-v4", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, KERNELS, "kernels/test_native.py"
    ),
    "locale-c": Lane("", {}, {"LC_ALL": "C", "PYTHONUTF8": "0"}, LANGUAGES, "cli/test_cli.py"),
}


def say(text: str) -> None:
    print(f"lanes: {text}", flush=True)


def run(command: Sequence[str | Path], **variables: str) -> None:
    """Runs a command in the repository. Raises Failed."""
    environment = os.environ | variables
    words = [str(word) for word in command]
    try:
        subprocess.run(words, cwd=ROOT, env=environment, timeout=SECONDS, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        raise Failed(str(error)[-400:]) from error


def interpreter(version: str) -> str | None:
    """A Python of that version: on the PATH, or pyenv's."""
    if version == "here":
        return sys.executable
    pyenv = Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
    for place in [shutil.which(f"python{version}"), *pyenv]:
        works = [place or "false", "-c", "import ensurepip"]
        if not subprocess.run(works, stderr=subprocess.DEVNULL).returncode:
            return str(place)
    return None


def lacking(lane: Lane) -> str:
    """The instructions that a lane's kernels need and this processor lacks; empty if it has them.

    Without them there are no kernels, and most of the tests skip themselves.
    """
    from shoal.native import build

    return build.lacked(lane.variables.get("SHOAL_MARCH", ""))


def installed(name: str, lane: Lane, python: str) -> bool:
    """Makes the lane's environment; False: without torch, of which there is no CPU build for it.

    Raises:
        Failed: something cannot be installed, or the extra `dev` never could with the lane's pins.
    """
    venv, pins = ROOT / ".lanes" / name, ROOT / ".lanes" / f"{name}.txt"
    venv.parent.mkdir(exist_ok=True)
    kept = [line for line in PINS.splitlines() if line.partition("==")[0] not in lane.pins]
    pins.write_text("\n".join([*kept, *filter(None, lane.pins.values())]) + "\n", encoding="utf-8")
    pip = [venv / "bin/python", "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    has_torch = True
    try:
        run(["scripts/setup.sh", "core"], PYTHON=python, VENV=str(venv), CONSTRAINTS=str(pins))
    except Failed as failure:
        if getattr(failure.__cause__, "returncode", 0) != NO_TORCH:
            raise
        run([*pip, "typer>=0.29", "rich>=13.9"])
        run([*pip, "--no-deps", "-e", "."])
        has_torch = False
    else:
        run([*pip, "-c", pins, *TOOLS])
    if lane.pins:
        run([*pip, "uv"])
        uv = [venv / "bin/uv", "pip", "compile", "-q", "--python", venv / "bin/python"]
        run([*uv, "--extra", "dev", "-c", pins, "-o", os.devnull, "pyproject.toml"])
    return has_torch


LIST = """
import typer.main
from shoal.cli import app
def walk(command, path):
    print(*path)
    for name, each in getattr(command, "commands", {}).items():
        walk(each, [*path, name])
walk(typer.main.get_command(app), [])
"""


def try_commands(python: Path, demo: bool) -> None:
    """Every command's --help, and `shoal demo`. Raises Failed."""
    listed = subprocess.run([python, "-c", LIST], capture_output=True, encoding="utf-8")
    if listed.returncode or len(listed.stdout.splitlines()) < 10:
        raise Failed(f"the commands cannot be listed: {listed.stderr}")
    for line in listed.stdout.splitlines():
        command = [python, "-m", "shoal", *line.split(), "--help"]
        done = subprocess.run(command, capture_output=True, encoding="utf-8")
        if done.returncode or "Usage: shoal" not in done.stdout:
            raise Failed(f"shoal {line} --help: {done.stderr[-2000:]}")
    if demo:
        run([python, "-m", "shoal", "demo"])


def run_lane(name: str, quick: bool) -> str:
    """Runs one lane; returns the sentence that sums it up. Raises Failed."""
    lane, python = LANES[name], Path(sys.executable)
    if lacked := lacking(lane):
        return f"not run: this processor has no {lacked}"
    if lane.python:
        base = interpreter(lane.python)
        if base is None:
            return f"not run: no Python {lane.python} on the PATH or in pyenv"
        python = ROOT / ".lanes" / name / "bin/python"
        if not installed(name, lane, base):
            try_commands(python, demo=False)
            torch = lane.pins.get("torch", "torch")
            return f"every command's --help, and no more: no CPU build of {torch} was found for it"
        try_commands(python, demo=True)
    files = (lane.quick if quick else lane.tests).split()
    if files:
        options = ["-m", "not slow", "-n", "auto", "--dist", "worksteal", "--durations=5"]
        places = [f"tests/{file}" for file in files]
        run([python, "-m", "pytest", *options, *places], **lane.variables)
    return f"passed: {'commands, demo, ' * bool(lane.python)}{len(files)} files of tests"


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("what", choices=("list", "run", "turn"))
    parser.add_argument("lanes", nargs="*", metavar="LANE", help="all, if none is named")
    asked = parser.parse_args()
    unknown = set(asked.lanes) - LANES.keys()
    if unknown:
        parser.error(f"there is no lane {', '.join(unknown)}; there are {', '.join(LANES)}")
    names = list(LANES)
    if asked.what == "turn":
        names = [names[turn(len(names))]]
    names = asked.lanes or names
    if asked.what == "list":
        print("\n".join(names))
        return 0
    said = {}
    for name in names:
        began = time.monotonic()
        say(f"lane {name} begins")
        try:
            said[name] = run_lane(name, quick=asked.what == "turn")
        except Failed as reason:
            said[name] = f"FAILED: {reason}"
        said[name] += f" ({time.monotonic() - began:.0f} s)"
        say(f"lane {name}: {said[name]}")
    if len(said) > 1:
        print("\n".join(f"{name:14} {text}" for name, text in said.items()))
    return int(any(text.startswith("FAILED") for text in said.values()))


if __name__ == "__main__":
    sys.exit(main())
