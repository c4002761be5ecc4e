"""The compilation of the kernels by a C compiler, with nothing but Python's own library.

So a build of the package, which has no PyTorch, can use it (`scripts/carried_kernels.py`), and a
process in the background can be this file alone: compiling.py FOLDER STEM DIGEST FLAG...
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

FLAGS = (
    "-O3",
    "-std=c11",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
)
SOURCES = (
    "kernels.c",
    "team.h",
    "tile.h",
    "pairs.h",
    "typed.h",
    "attend.h",
    "decode.h",
    "drawing.h",
    "drafting.h",
    "kernels.h",
)
SECONDS = 120
"""The most seconds that the compiler may take."""
LEVELS = {"x86_64": ("x86-64-v4", "x86-64-v3"), "aarch64": ("armv8-a",), "arm64": ("armv8-a",)}
"""The levels of instructions that a wheel carries kernels for, the best first, by machine.

They are values of the compiler's -march; armv8-a has NEON.
"""
_V3 = frozenset({"abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
_V4 = frozenset({"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"})
NEEDED = {"x86-64-v2": frozenset({"sse42"}), "x86-64-v3": _V3, "x86-64-v4": _V3 | _V4}
"""The instructions that kernels of a level need, as Linux spells them but for underscores.

Without them the kernels would end the process.
"""


class NotBuilt(Exception):
    """An error: there are no kernels here; the message gives the reason."""


def digest(text: bytes) -> str:
    """Returns the digest that stands in the names of libraries."""
    return hashlib.blake2b(text, digest_size=12).hexdigest()


def sources() -> dict[str, bytes]:
    """Returns the sources of the kernels in C, by file name."""
    return {name: Path(__file__).with_name(name).read_bytes() for name in SOURCES}


def digest_of(texts: Mapping[str, bytes]) -> str:
    """Returns the digest of sources."""
    return digest(b"|".join([*texts.values(), *(flag.encode() for flag in FLAGS)]))


def compiler() -> list[str]:
    """Returns the command of the C compiler; raises NotBuilt if there is none."""
    candidates = (
        os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    )
    if sys.platform not in ("linux", "darwin") or not candidates:
        raise NotBuilt("no C compiler (cc, gcc or clang)")
    return shlex.split(candidates)


def compiled(
    texts: Mapping[str, bytes], folder: Path, command: Sequence[str], flags: Sequence[str]
) -> Path:
    """Compiles sources into a library in that folder; raises NotBuilt if that fails."""
    for name, text in texts.items():
        Path(folder, name).write_bytes(text)
    made = Path(folder, "kernels.so")
    whole = [*command, *flags, str(Path(folder, "kernels.c")), "-lm", "-o", str(made)]
    try:
        output_of([*whole, "-fopenmp"], folder)
    except NotBuilt:
        output_of(whole, folder)  # a compiler without OpenMP: one thread
    return made


def output_of(command: list[str], temporary: Path | None = None) -> str:
    """Runs a command and returns its output.

    Args:
        temporary: the folder of its temporary files.

    Raises:
        NotBuilt: it failed.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **({} if temporary is None else {"TMPDIR": str(temporary)})},
        )
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "").strip().splitlines()
        raise NotBuilt(f"{command[0]} failed: {said[0] if said else error.returncode}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotBuilt(f"{command[0]} failed: {error}") from error
    return done.stdout


def keep(made: Path, folder: Path, stem: str) -> None:
    """Moves a library into the folder of libraries, under a name with the digest of its bytes."""
    made.replace(folder / f"{stem}-{digest(made.read_bytes())}.so")


def start_in_background(
    folder: Path, stem: str, texts: Mapping[str, bytes], flags: Sequence[str]
) -> None:
    """Starts a process that compiles the sources and keeps the library; does not wait for it."""
    command = [sys.executable, "-I", __file__, str(folder), stem, digest_of(texts), *flags]
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS,
            check=False,
        )


def _work_in_background(folder: Path, stem: str, of_sources: str, *flags: str) -> None:
    """Compiles in a process of its own, unless another one does or has done it.

    The process that the caller waits for ends at once.
    """
    import fcntl  # not on Windows

    if os.fork():
        os._exit(0)
    os.setsid()
    os.nice(19)
    with Path(folder, "compiling.lock").open("w", encoding="utf-8") as lock, suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for left in folder.glob("compiling-*"):  # by a process that was ended
            shutil.rmtree(left, ignore_errors=True)
        texts = sources()
        if any(folder.glob(f"{stem}-*.so")) or digest_of(texts) != of_sources:
            return
        with (
            tempfile.TemporaryDirectory(dir=folder, prefix="compiling-") as work,
            suppress(NotBuilt),
        ):
            keep(compiled(texts, Path(work), compiler(), flags), folder, stem)


if __name__ == "__main__":
    _work_in_background(Path(sys.argv[1]), *sys.argv[2:])
