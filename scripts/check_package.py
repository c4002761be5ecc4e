"""Builds shoal's wheel and source distribution, and checks what users will install:  make package

Twine reads the metadata, the lists of files are compared with the repository, and the wheel is used: installed in a temporary
directory, or, with --python, in another environment, it runs `shoal demo` and `shoal serve` in an empty directory, without a C
compiler and without kernels of earlier runs: by those that it carries.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from carried_kernels import module_of

ROOT = Path(__file__).resolve().parents[1]
LEVELS = module_of(ROOT).LEVELS
SECONDS = 240
"""Longest wait for a command that is used; it takes ten seconds on an idle core."""

NEEDED = (
    "shoal/py.typed", "shoal/native/kernels.c", "shoal/native/*.h", "shoal/constraints/syntax/json.lark",
    "shoal/data/pair/*/model.safetensors", "shoal/data/pair/*/tokenizer.json", "shoal/data/pair/LICENSE.md",
    "shoal/data/problems/*.json.gz", "shoal/data/programs/guard.*",
    "shoal/data/repository/custom_generate/generate.py", "shoal/serve/playground/index.html", "shoal/serve/playground/*.js",
    "shoal/serve/playground/*.css", "*.dist-info/entry_points.txt", "*.dist-info/licenses/LICENSE",
    "*.dist-info/licenses/src/shoal/data/pair/LICENSE.md", "shoal/serve/playground/vendor/LICENSE-*",
)  # fmt: skip
"""Beside modules, what a wheel has, whatever the repository has."""
NEEDED_SOURCES = (
    "PKG-INFO", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "DESIGN.md", "constraints.txt", "Makefile",
    "Dockerfile", "deploy/*", "docs/*.md", "scripts/setup.sh", "tests/*/test_*.py", "benchmarks/*.py",
)  # fmt: skip
CARRIED = "shoal/native/carried/"
NEON = "aarch64-linux-gnu-gcc"
"""A compiler for another machine; where it is there, a wheel with NEON is built, too."""
REFUSED_SOURCES = (".git/*", ".venv/*", "build/*", "dist/*", "*.pyc", "*/__pycache__/*")


def wheel_faults(names: Collection[str], package: Collection[str]) -> Iterator[str]:
    """What is wrong with the files of a wheel.

    Args:
        package: the files of the package in the repository, as `shoal/...`.
    """
    own = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    yield from (f"the wheel has no {name}" for name in sorted(set(package) - own))
    more = {name for name in own - set(package) if not fnmatch(name, f"{CARRIED}*.so")}
    yield from (f"the wheel has {name}, which is no file of the package" for name in sorted(more))
    yield from (f"the wheel has nothing like {pattern}" for pattern in NEEDED if not _matching(names, pattern))


def carried_faults(names: Collection[str], machine: str) -> Iterator[str]:
    """The levels of instructions that a wheel for a machine should carry kernels for, and does not; and what it should not."""
    levels = LEVELS.get(machine, ())
    yield from (
        f"the wheel has no kernels for {level}" for level in levels if not _matching(names, f"{CARRIED}{level}-*.so")
    )
    yield from (f"the wheel has {name}" for name in _matching(names, f"{CARRIED}*")[len(levels) :])


def source_faults(names: Collection[str], package: Collection[str]) -> Iterator[str]:
    """What is wrong with the files of a source distribution, named without its first folder."""
    yield from (f"the sources have no {name}" for name in sorted({f"src/{name}" for name in package} - set(names)))
    yield from (f"the sources have nothing like {pattern}" for pattern in NEEDED_SOURCES if not _matching(names, pattern))
    yield from (f"the sources have {name}" for pattern in REFUSED_SOURCES for name in _matching(names, pattern))


def _matching(names: Collection[str], pattern: str) -> list[str]:
    return [name for name in names if fnmatch(name, pattern)]


def package_files(root: Path = ROOT) -> set[str]:
    """The files of the package in the repository, without what was compiled, as `shoal/...`."""
    source, made = root / "src", {"__pycache__", "carried"}
    files = (file for file in (source / "shoal").rglob("*") if file.is_file() and made.isdisjoint(file.parts))
    return {file.relative_to(source).as_posix() for file in files}


def build(place: Path) -> tuple[Path, Path]:
    """Builds both distributions, the wheel from the sources: returns the wheel and the sources."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(place), str(ROOT)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8")
    if done.returncode:
        raise SystemExit(f"{done.stdout}\ncheck_package: the build failed")
    (wheel,), (sources,) = place.glob("*.whl"), place.glob("*.tar.gz")
    return wheel, sources


def check_neon(place: Path) -> None:
    """Builds the wheel for another machine, where there is a compiler for it. Raises SystemExit if it lacks kernels."""
    if shutil.which(NEON) is None:
        print(f"no wheel with NEON is built: there is no {NEON}")
        return
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(place), str(ROOT)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "CC": NEON, "SHOAL_CARRY": "aarch64"})
    (wheel,) = place.glob("*aarch64.whl")
    with zipfile.ZipFile(wheel) as opened:
        if faults := list(carried_faults(opened.namelist(), "aarch64")):
            raise SystemExit("\n".join(["check_package: wrong kernels", *faults]))
    print(f"{wheel.name}: {_mb(wheel.stat().st_size)}")


def check_files(wheel: Path, sources: Path) -> None:
    """Prints sizes. Raises SystemExit for files that are missing, or that should not be there."""
    package = package_files()
    with zipfile.ZipFile(wheel) as opened:
        sizes = {info.filename: info.file_size for info in opened.infolist()}
    with tarfile.open(sources) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    faults = [*wheel_faults(sizes, package), *source_faults(names, package)]
    if shutil.which("cc"):
        faults += carried_faults(sizes, platform.machine())
    if faults:
        raise SystemExit("\n".join(["check_package: wrong files", *faults]))
    weights = sum(size for name, size in sizes.items() if name.endswith(".safetensors"))
    print(f"{wheel.name}: {_mb(wheel.stat().st_size)}, {len(sizes)} files, {_mb(sum(sizes.values()))} unpacked")
    kernels = sum(size for name, size in sizes.items() if name.startswith(CARRIED))
    print(f"    of these {_mb(weights)} are weights of the bundled pair, {_mb(kernels)} kernels in C")
    print(f"{sources.name}: {_mb(sources.stat().st_size)}, {len(names)} files")


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


class Installed:
    """shoal as a user has it: commands run in an empty directory, and find the package in `place`."""

    def __init__(self, python: str, place: Path | None, empty: Path) -> None:
        self._python, self._empty = python, empty
        self._environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        self._environment |= {"CC": "/bin/false", "XDG_CACHE_HOME": str(empty.parent / "cache"), "SHOAL_MARCH": ""}
        self._environment.pop("PYTHONPATH", None)
        if place is not None:
            self._environment["PYTHONPATH"] = str(place)
        where = Path(self._run("-c", "import shoal; print(shoal.__file__)").strip())
        if ROOT in where.parents or (place is not None and place not in where.parents):
            raise SystemExit(f"check_package: {python} does not use the wheel, but {where}")
        self.carries = any((where.parent / "native/carried").glob("*.so"))

    def _run(self, *arguments: str) -> str:
        command = [self._python, *arguments]
        done = subprocess.run(
            command, cwd=self._empty, env=self._environment, capture_output=True, encoding="utf-8", timeout=SECONDS
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{done.stderr}\ncheck_package: {' '.join(arguments)} ended with {done.returncode}")
        return done.stdout

    def demo(self) -> dict[str, Any]:
        """What `shoal demo --json` prints, for few tokens."""
        arguments = "demo --json -n 4 -k 4 --max-new-tokens 32 --repeats 1".split()
        return json.loads(self._run("-m", "shoal", *arguments))

    @contextmanager
    def serving(self) -> Iterator[str]:
        """A running `shoal serve`; its address without a slash at the end."""
        command = [self._python, "-m", "shoal", "serve", "--json", "--port", "0", "--log-level", "warning", "-k", "4"]
        with (
            tempfile.TemporaryFile("w+", encoding="utf-8") as said,
            subprocess.Popen(
                command, cwd=self._empty, env=self._environment, stdout=subprocess.PIPE, stderr=said, encoding="utf-8"
            ) as process,
        ):
            assert process.stdout is not None
            try:
                if line := process.stdout.readline():
                    yield json.loads(line)["url"].removesuffix("/v1")
            finally:
                process.terminate()
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
            if process.wait() or not line:
                said.seek(0)
                raise SystemExit(f"{said.read()}\ncheck_package: shoal serve ended with {process.returncode}")


def check_demo(shown: dict[str, Any], carried: bool) -> None:
    """Prints what the demo counted. Raises SystemExit if it did not speculate, or not exactly.

    Args:
        carried: True if the wheel carries kernels, which must have computed.
    """
    plain, drafted = shown["plain"], shown["speculative"]
    counts = {name: drafted[name] for name in ("rounds", "drafted", "accepted", "committed")}
    print(f"shoal demo: {counts}, plain decoding {plain['rounds']} rounds, greedy identical {shown['greedy_identical']}")
    if not (
        shown["greedy_identical"] and shown["greedy"]["drafted"] > 0 and plain["rounds"] == plain["target_passes"] == 32
        and 0 < drafted["rounds"] < 32 and 0 < drafted["accepted"] <= drafted["drafted"]
        and drafted["committed"] == plain["committed"]
    ):  # fmt: skip
        raise SystemExit("check_package: the demo did not do what it should")
    target = shown["loaded"]["target"]
    used = {name: target.get(name, "") for name in ("attention", "passes", "kernels")}
    print(f"    by {used}")
    if carried and not (used["passes"] == "C decoder" and used["kernels"].startswith("carried, ")):
        raise SystemExit(f"check_package: the wheel carries kernels, and it computed by {used}")


def check_server(url: str) -> None:
    """Asks a server for its pages and for samples. Raises SystemExit for wrong answers."""
    folder = ROOT / "src" / "shoal" / "serve" / "playground"
    types = (".html", ".css", ".js", ".svg")
    parts = [part.relative_to(folder).as_posix() for part in folder.rglob("*") if part.suffix in types]
    pages = {
        "": "index.html",
        "chat": "chat.html",
        "editor": "editor.html",
        **{f"playground/{name}": name for name in parts},
    }
    for path, name in pages.items():
        if _get(f"{url}/{path}") != (folder / name).read_bytes():
            raise SystemExit(f"check_package: /{path} is not {name}")
    body = {"prompt": "def add(a, b):\n", "n": 2, "max_tokens": 16, "seed": 0}
    answer = json.loads(_get(f"{url}/v1/completions", json.dumps(body).encode()))
    took = answer["usage"]["choices"]
    print(f"shoal serve: {len(parts)} files of the playground; of each sample "
          f"{[{name: one[name] for name in ('rounds', 'drafted', 'accepted')} for one in took]}")  # fmt: skip
    fine = [one["completion_tokens"] == 16 and one["rounds"] < 16 and 0 < one["accepted"] <= one["drafted"] for one in took]
    if fine != [True, True]:
        raise SystemExit("check_package: the server did not do what it should")


def _get(url: str, body: bytes | None = None) -> bytes:
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return bytes(answer.read())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where the distributions are written")
    parser.add_argument(
        "--python", help="the Python of an environment in which the wheel is installed with its extra 'serve'"
    )
    arguments = parser.parse_args()
    began = time.monotonic()
    if arguments.python is None:
        shutil.rmtree(arguments.dist, ignore_errors=True)
        wheel, sources = build(arguments.dist)
        subprocess.run([sys.executable, "-m", "twine", "--no-color", "check", "--strict", wheel, sources], check=True)
        check_files(wheel, sources)
        check_neon(arguments.dist)
    with tempfile.TemporaryDirectory() as temporary:
        place, empty = Path(temporary, "unpacked"), Path(temporary, "empty")
        empty.mkdir()
        if arguments.python is None:
            pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
            subprocess.run([*pip, "--target", place, wheel], check=True)  # refuses a wheel for another platform
        shoal = Installed(arguments.python or sys.executable, None if arguments.python else place, empty)
        check_demo(shoal.demo(), shoal.carries)
        with shoal.serving() as url:
            check_server(url)
        if left := [file.name for file in empty.iterdir()]:
            raise SystemExit(f"check_package: the commands left {left} in the directory where they ran")
    print(f"the package is fine, after {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
