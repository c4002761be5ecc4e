"""Compiles the kernels with the system's C compiler, once per machine: the library is kept on disk.

Compiling takes about a second. The file name has a digest of the sources, the compiler and the processor, so that another machine
that shares the folder compiles its own.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from importlib import resources
from pathlib import Path

from shoal.durable import cache_folder
from shoal.models.formats import cpu_flags
from shoal.models.native.structs import Attention, Heads

FLAGS = ("-O3", "-march=native", "-std=c11", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
SOURCES = ("kernels.c", "typed.h", "kernels.h")
SECONDS = 120
"""Most time that the compiler may take."""


class NotBuilt(Exception):
    """There are no kernels here; the message says why."""


def library() -> ctypes.CDLL:
    """The kernels. Raises NotBuilt: there is no compiler, or it failed."""
    found = _attempt()
    if isinstance(found, str):
        raise NotBuilt(found)
    return found


def missing() -> str:
    """Why there are no kernels here; empty if there are."""
    found = _attempt()
    return found if isinstance(found, str) else ""


@lru_cache(maxsize=1)
def _attempt() -> ctypes.CDLL | str:
    """The kernels, or why there are none. A build that failed is not tried again in the process."""
    try:
        return _loaded(_built())
    except NotBuilt as reason:
        return str(reason)


def _built() -> Path:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if sys.platform not in ("linux", "darwin") or not compiler:
        raise NotBuilt("no C compiler (cc, gcc or clang)")
    sources = {name: (resources.files(__package__) / name).read_bytes() for name in SOURCES}
    version = _run([compiler, "--version"])
    facts = [*sources.values(), version.encode(), platform.machine().encode(), " ".join(sorted(cpu_flags())).encode()]
    folder = cache_folder() or Path(tempfile.mkdtemp(prefix="shoal-"))
    place = folder / f"kernels-{hashlib.blake2b(b'|'.join(facts), digest_size=12).hexdigest()}.so"
    return place if place.exists() else _compile(compiler, sources, place)


def _compile(compiler: str, sources: dict[str, bytes], place: Path) -> Path:
    """Compiles in a folder of its own and moves the result into place, so that processes may do it at the same time."""
    with tempfile.TemporaryDirectory(dir=place.parent) as work:
        for name, text in sources.items():
            Path(work, name).write_bytes(text)
        made = Path(work, "kernels.so")
        command = [compiler, *FLAGS, str(Path(work, "kernels.c")), "-lm", "-o", str(made)]
        try:
            _run([*command, "-fopenmp"])
        except NotBuilt:
            _run(command)  # a compiler without OpenMP: one thread
        made.replace(place)
    return place


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True, stdin=subprocess.DEVNULL)
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "").strip().splitlines()
        raise NotBuilt(f"{command[0]} failed: {said[0] if said else error.returncode}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotBuilt(f"{command[0]} failed: {error}") from error
    return done.stdout


def _loaded(place: Path) -> ctypes.CDLL:
    try:
        made = ctypes.CDLL(str(place))
        for suffix in ("float32", "bfloat16"):
            for name, arguments in SIGNATURES.items():
                function = getattr(made, f"{name}_{suffix}")
                function.argtypes, function.restype = arguments, ctypes.c_int if name == "attend" else None
    except (OSError, AttributeError) as error:
        raise NotBuilt(f"{place}: {error}") from error
    return made


SIGNATURES = {
    "attend": [ctypes.POINTER(Attention)],
    "heads": [ctypes.POINTER(Heads)],
    "rms_norm": [*[ctypes.c_void_p] * 3, ctypes.c_int64, ctypes.c_int64, ctypes.c_double, ctypes.c_int64],
}
