"""The compilation of the kernels with the system's C compiler, once per machine.

The library is kept on disk, as compiling takes seconds. The file name has two digests. The first is
of the sources, the compiler with its flags and the processor's instructions, so that another
machine that shares the folder compiles its own library. The second is of the file's own bytes: a
file that a crash has damaged would end the process. SHOAL_MARCH=x86-64-v3 (a value of a compiler's
-march) makes kernels for other processors than this one.

A process that is forked from a process that has computed has none of its parent's threads, and
OpenMP of gcc waits for them for ever: a worker of gunicorn with --preload, or of a DataLoader. So
the child computes on one thread (`expect_forks`).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path

import torch

from shoal.durable import cache_folder
from shoal.native.structs import (
    AttentionStruct,
    DraftStepStruct,
    DrawsStruct,
    HeadsStruct,
    PassStruct,
    ProductStruct,
    VerdictsStruct,
)


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Returns the CPU flags in lower case.

    The flags are torch's own where this version can tell them, else those that Linux lists, else
    none.
    """
    query = getattr(torch.cpu, "get_capabilities", None)
    if query is not None:
        return {name for name, value in query().items() if value is True}
    return _listed(cpuinfo)


def instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Returns all instructions that torch or Linux know of the processor, spelt alike.

    A compiler may use instructions that one of the two leaves out.
    """
    return frozenset(flag.replace("_", "") for flag in cpu_flags(cpuinfo) | _listed(cpuinfo))


def _listed(cpuinfo: Path) -> set[str]:
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    return {
        flag
        for line in lines
        if line.lower().startswith(("flags", "features"))
        for flag in line.lower().split()
    }


FLAGS = (
    "-O3",
    "-std=c11",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
)
SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""The dtypes that the kernels compute in, and their names for them.

Sums and softmax are always float32.
"""
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
ROOM = 16 * 2**20
"""The number of bytes that must be free in the compiler's folder."""
NEEDED = {"x86-64-v2": "sse42", "x86-64-v3": "avx2", "x86-64-v4": "avx512bw"}
"""An instruction set that kernels of a level need.

Without it the kernels would end the process.
"""


class NotBuilt(Exception):
    """An error: there are no kernels here; the message gives the reason."""


def library() -> ctypes.CDLL:
    """Returns the kernels.

    Raises:
        NotBuilt: there is no compiler, or it failed.
    """
    found = _attempt()
    if isinstance(found, str):
        raise NotBuilt(found)
    return found


def missing() -> str:
    """Returns the reason why there are no kernels here; empty if there are kernels."""
    found = _attempt()
    return found if isinstance(found, str) else ""


@lru_cache(maxsize=1)
def _attempt() -> ctypes.CDLL | str:
    """Returns the kernels, or the reason why there are none.

    A build that failed is not tried again in the process.
    """
    try:
        return _kept_or_made()
    except (NotBuilt, OSError) as reason:
        return str(reason)


def _kept_or_made() -> ctypes.CDLL:
    """Returns the kernels that an earlier process has left, or new ones."""
    command, texts, flags = compiler(), sources(), machine_flags()
    facts = "|".join(
        [_run([*command, "--version"]), platform.machine(), *flags, *sorted(instructions())]
    )
    folder, stem = (
        cache_folder(),
        f"kernels-{_digest(b'|'.join([*texts.values(), facts.encode()]))}",
    )
    kept = None if folder is None else _kept(folder, stem)
    if kept is not None:
        return kept
    with tempfile.TemporaryDirectory(dir=_workplace(folder), prefix="kernels-") as work:
        place = compiled(texts, Path(work), command, flags)
        made = loaded(place)
        if folder is not None:
            with suppress(OSError):  # the next process compiles again
                place.replace(folder / f"{stem}-{_digest(place.read_bytes())}.so")
    return made


def machine_flags() -> tuple[str, ...]:
    """Returns the compiler's flags on this machine.

    Raises:
        NotBuilt: SHOAL_MARCH names instructions that the processor lacks.
    """
    march = os.environ.get("SHOAL_MARCH") or "native"
    if NEEDED.get(march, "") not in {"", *instructions()}:
        raise NotBuilt(f"SHOAL_MARCH={march}: this processor has no {NEEDED[march]}")
    return (*FLAGS, f"-march={march}")


def _kept(folder: Path, stem: str) -> ctypes.CDLL | None:
    """Returns the first undamaged library of that name; None if there is none.

    Damaged libraries are removed; libraries that another user wrote are not run.
    """
    for place in sorted(folder.glob(f"{stem}-*.so")):
        with suppress(NotBuilt, OSError):
            if place.stat().st_uid not in (os.geteuid(), 0):
                continue
            if place.stem.endswith(_digest(place.read_bytes())):
                return loaded(place)
            place.unlink()
    return None


def _workplace(folder: Path | None) -> Path:
    """Returns the directory to compile in: the folder, or the one of temporary files.

    A library compiled in the folder can be moved into it.

    Raises:
        NotBuilt: there is no space, or files that are written there cannot be run.
    """
    places = [] if folder is None else [folder]
    with suppress(OSError):  # there is none that is writable
        places.append(Path(tempfile.gettempdir()))
    for place in places:
        with suppress(OSError):
            facts = os.statvfs(place)
            runs = not facts.f_flag & getattr(os, "ST_NOEXEC", 0)
            if (
                place.is_dir()
                and os.access(place, os.W_OK)
                and runs
                and facts.f_bavail * facts.f_frsize >= ROOM
            ):
                return place
    raise NotBuilt(
        f"no place to compile in: {' or '.join(map(str, places))} must be writable, and neither "
        f"full nor noexec"
    )


def _digest(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=12).hexdigest()


def compiler() -> list[str]:
    """Returns the command of the C compiler.

    Raises:
        NotBuilt: there is none.
    """
    found = (
        os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    )
    if sys.platform not in ("linux", "darwin") or not found:
        raise NotBuilt("no C compiler (cc, gcc or clang)")
    return shlex.split(found)


def sources() -> dict[str, bytes]:
    """Returns the sources of the kernels in C, by file name."""
    return {name: (resources.files(__package__) / name).read_bytes() for name in SOURCES}


def compiled(
    texts: Mapping[str, bytes], folder: Path, command: Sequence[str], flags: Sequence[str]
) -> Path:
    """Compiles sources into a library in that folder.

    Raises:
        NotBuilt: the compiler failed.
    """
    for name, text in texts.items():
        Path(folder, name).write_bytes(text)
    made = Path(folder, "kernels.so")
    whole = [*command, *flags, str(Path(folder, "kernels.c")), "-lm", "-o", str(made)]
    try:
        _run([*whole, "-fopenmp"], folder)
    except NotBuilt:
        _run(whole, folder)  # a compiler without OpenMP: one thread
    return made


def _run(command: list[str], temporary: Path | None = None) -> str:
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


def loaded(place: Path) -> ctypes.CDLL:
    """Loads the library, with the functions' types for Python.

    Raises:
        NotBuilt: it does not load, or lacks a function.
    """
    try:
        made = ctypes.CDLL(str(place))
        for suffix in SUFFIXES.values():
            for name, arguments in SIGNATURES.items():
                function = getattr(made, f"{name}_{suffix}")
                function.argtypes, function.restype = (
                    arguments,
                    ctypes.c_int if name in ("product", "attend", "decode") else None,
                )
            getattr(made, f"draft_{suffix}").argtypes = [ctypes.POINTER(DraftStepStruct)]
            getattr(made, f"draft_{suffix}").restype = ctypes.c_int64
        made.team.argtypes, made.team.restype = [ctypes.c_int64], ctypes.c_int64
        made.judge_team.argtypes, made.judge_team.restype = [ctypes.c_int64] * 2, None
        made.draw.argtypes, made.draw.restype = [ctypes.POINTER(DrawsStruct)], ctypes.c_int64
        made.verify.argtypes, made.verify.restype = [ctypes.POINTER(VerdictsStruct)], ctypes.c_int64
    except (OSError, AttributeError) as error:
        raise NotBuilt(f"{place}: {error}") from error
    return made


SIGNATURES = {
    "product": [ctypes.POINTER(ProductStruct)],
    "attend": [ctypes.POINTER(AttentionStruct)],
    "heads": [ctypes.POINTER(HeadsStruct)],
    "decode": [ctypes.POINTER(PassStruct)],
    "rms_norm": [
        *[ctypes.c_void_p] * 3,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_double,
        ctypes.c_int64,
    ],
}


@cache
def expect_forks() -> None:
    """Prepares the process, once, for children that are forked from now on."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_compute_alone)


def _compute_alone() -> None:
    torch.set_num_threads(1)
