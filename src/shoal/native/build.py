"""The kernels of this machine: those that an earlier process has left, carried ones, or new ones.

A library that is compiled here is kept on disk, as compiling takes seconds. The file name has two
digests. The first is of the sources, the compiler with its flags and the processor's instructions,
so that another machine that shares the folder compiles its own library. The second is of the file's
own bytes: a file that a crash has damaged would end the process.

A wheel carries kernels for some levels of instructions (`scripts/carried_kernels.py`). Those of the
best level that the processor has compute where there is no compiler; with a compiler they compute
in the first process, while the machine's own are compiled in the background for the next.
SHOAL_MARCH=x86-64-v3 (a value of a compiler's -march) takes or makes kernels of that level and no
others; SHOAL_MARCH=native waits for the machine's own.

A process that is forked from a process that has computed has none of its parent's threads, and
OpenMP of gcc waits for them for ever: a worker of gunicorn with --preload, or of a DataLoader. So
the child computes on one thread (`expect_forks`).
"""

from __future__ import annotations

import ctypes
import os
import platform
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch

from shoal.durable import cache_folder
from shoal.native import (
    AttentionStruct,
    DraftStepStruct,
    DrawsStruct,
    HeadsStruct,
    PassStruct,
    ProductStruct,
    VerdictsStruct,
)
from shoal.native.compiling import (
    FLAGS,
    LEVELS,
    NEEDED,
    NotBuilt,
    compiled,
    compiler,
    digest,
    digest_of,
    keep,
    output_of,
    sources,
    start_in_background,
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


SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""The dtypes that the kernels compute in, and their names for them.

Sums and softmax are always float32.
"""
ROOM = 16 * 2**20
"""The number of bytes that must be free in the compiler's folder."""
CARRIED = Path(__file__).with_name("carried")
"""The folder of carried kernels: LEVEL-SOURCES-BYTES.so, with two digests."""


def library() -> ctypes.CDLL:
    """Returns the kernels; raises NotBuilt if there are none."""
    attempt = _attempt()
    if isinstance(attempt, str):
        raise NotBuilt(attempt)
    return attempt[0]


def missing() -> str:
    """Returns the reason why there are no kernels here; empty if there are kernels."""
    attempt = _attempt()
    return attempt if isinstance(attempt, str) else ""


def remark() -> str:
    """Returns words about kernels that are not simply the machine's own, else an empty text.

    They name the level of carried kernels, and the reasons why others are not used.
    """
    attempt = _attempt()
    return "" if isinstance(attempt, str) else attempt[1]


@lru_cache(maxsize=1)
def _attempt() -> tuple[ctypes.CDLL, str] | str:
    """Returns the kernels with a remark, or why there are none; a failed build is not repeated."""
    try:
        return _chosen()
    except (NotBuilt, OSError) as reason:
        return str(reason)


def _chosen() -> tuple[ctypes.CDLL, str]:
    """Returns the kernels of this machine with a remark; starts to compile better ones if need be.

    Raises:
        NotBuilt: none can be had.
    """
    asked, faults = os.environ.get("SHOAL_MARCH", ""), list[str]()
    carried = _carried([asked], faults) if asked else None
    own: _Own | None = None
    try:
        if carried is None:
            own = _Own.here()
            kept = own.load_kept()
            if kept is not None:
                return kept, ""
    except NotBuilt as reason:
        faults.insert(0, str(reason))
    if not asked:
        carried = _carried(LEVELS.get(platform.machine(), ()), faults)
    if carried is not None:
        if own is not None:
            own.make_in_background()
        made, level = carried
        return made, f"carried, {level}" + f" ({'; '.join(faults)})" * bool(faults)
    if own is None:
        raise NotBuilt("; ".join(faults))
    return own.compile(), "; ".join(faults)


def _carried(levels: Iterable[str], faults: list[str]) -> tuple[ctypes.CDLL, str] | None:
    """Returns the carried kernels of the first level that this processor has, with the level.

    Args:
        faults: receives the reasons why carried kernels that would do are not used.
    """
    places = {place.stem.rsplit("-", 2)[0]: place for place in sorted(CARRIED.glob("*.so"))}
    for level in levels:
        if level not in places or lacked(level):
            continue
        *_, of_sources, of_bytes = places[level].stem.rsplit("-", 2)
        if of_sources != digest_of(sources()):
            faults.append(f"carried kernels for {level} are of other sources")
        elif of_bytes != digest(places[level].read_bytes()):
            faults.append(f"carried kernels for {level} are damaged")
        else:
            _offer_openmp()
            try:
                return loaded(places[level]), level
            except NotBuilt as reason:
                faults.append(str(reason))
    return None


@cache
def _offer_openmp() -> None:
    """Lets carried kernels find the functions of OpenMP, best of PyTorch's own library."""
    packages = Path(torch.__file__).parents[1]
    libraries = sorted(
        place
        for folder in ("torch/lib", "torch.libs")
        for place in packages.glob(f"{folder}/libgomp*")
    )
    for place in (*map(str, libraries), "libgomp.so.1"):
        with suppress(OSError):
            ctypes.CDLL(place, mode=ctypes.RTLD_GLOBAL)
            return


def lacked(level: str) -> str:
    """Returns the instructions that kernels of a level need and this processor lacks."""
    return ", ".join(sorted(NEEDED.get(level, frozenset()) - instructions()))


def machine_flags() -> tuple[str, ...]:
    """Returns the compiler's flags on this machine.

    Raises:
        NotBuilt: SHOAL_MARCH names instructions that the processor lacks.
    """
    march = os.environ.get("SHOAL_MARCH") or "native"
    if lacked(march):
        raise NotBuilt(f"SHOAL_MARCH={march}: this processor has no {lacked(march)}")
    return (*FLAGS, f"-march={march}")


@dataclass(frozen=True)
class _Own:
    """The kernels that this machine compiles for itself, or for SHOAL_MARCH.

    Attributes:
        texts: the sources.
        command: the compiler.
        flags: the compiler's flags.
        folder: the folder where libraries are kept, or None.
        stem: the name of the library there, without the digest of its bytes.
    """

    texts: Mapping[str, bytes]
    command: Sequence[str]
    flags: Sequence[str]
    folder: Path | None
    stem: str

    @classmethod
    def here(cls) -> _Own:
        """Returns those of this process. Raises NotBuilt if there is no compiler."""
        command, texts, flags = compiler(), sources(), machine_flags()
        # Of an unknown processor the machine's name stands for it.
        processor = sorted(instructions()) or [platform.node()]
        facts = [output_of([*command, "--version"]), platform.machine(), *flags, *processor]
        text = b"|".join([*texts.values(), "|".join(facts).encode()])
        return cls(texts, command, flags, cache_folder(), f"kernels-{digest(text)}")

    def load_kept(self) -> ctypes.CDLL | None:
        """Returns the first undamaged library of that name; None if there is none.

        Damaged libraries are removed; libraries that another user wrote are not run.
        """
        if self.folder is None:
            return None
        for place in sorted(self.folder.glob(f"{self.stem}-*.so")):
            with suppress(NotBuilt, OSError):
                if place.stat().st_uid not in (os.geteuid(), 0):
                    continue
                if place.stem.endswith(digest(place.read_bytes())):
                    return loaded(place)
                place.unlink()
        return None

    def compile(self) -> ctypes.CDLL:
        """Compiles the library, and keeps it if possible."""
        workplace = _workplace(self.folder)
        with tempfile.TemporaryDirectory(dir=workplace, prefix="kernels-") as work:
            place = compiled(self.texts, Path(work), self.command, self.flags)
            made = loaded(place)
            if self.folder is not None:
                with suppress(OSError):  # the next process compiles again
                    keep(place, self.folder, self.stem)
        return made

    def make_in_background(self) -> None:
        """Starts to compile the library for later processes, where it can be kept."""
        with suppress(NotBuilt):
            if self.folder is not None and _workplace(self.folder) == self.folder:
                start_in_background(self.folder, self.stem, self.texts, self.flags)


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
                function.argtypes = arguments
                function.restype = ctypes.c_int if name in ("product", "attend", "decode") else None
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
