"""Compiles the kernels in C that a wheel carries, for machines without a compiler.

Hatchling runs this when it builds a wheel, and so for `pip install .` and in place, which `make` does. There is a library for each
level of instructions (`shoal.native.compiling.LEVELS`) in src/shoal/native/carried, and the wheel is one of the platform. Without a
compiler it has none, and is one for every platform.

SHOAL_CARRY=none builds that one; SHOAL_CARRY=aarch64 CC=aarch64-linux-gnu-gcc one with NEON on another machine.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

OLDEST_GLIBC = 17
"""That of PyTorch's own oldest wheels: manylinux_2_17."""


class CarriedKernels(BuildHookInterface):  # type: ignore[type-arg]
    """The hook that Hatchling calls."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root, machine = Path(self.root), os.environ.get("SHOAL_CARRY") or platform.machine()
        compiling = module_of(root)
        try:
            made = carry(root, machine, compiling)
        except compiling.NotBuilt as reason:
            print(f"shoal: no kernels are carried: {reason}", file=sys.stderr)
            return
        if made and version != "editable":
            build_data["artifacts"] += [f"/{place.relative_to(root).as_posix()}" for place in made]
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag(machine, [place.read_bytes() for place in made])}"


def module_of(root: Path) -> Any:
    """`shoal.native.compiling`, without the package around it, which needs PyTorch."""
    place = root / "src/shoal/native/compiling.py"
    spec = importlib.util.spec_from_file_location("compiling", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def carry(root: Path, machine: str, compiling: Any) -> list[Path]:
    """Compiles what is not there yet for a machine; removes what is of other sources; returns all libraries for it.

    Raises:
        NotBuilt: there is no compiler, or it failed.
    """
    folder, texts = root / "src/shoal/native/carried", compiling.sources()
    folder.mkdir(parents=True, exist_ok=True)

    def library(level: str) -> Path:
        stem = f"{level}-{compiling.digest_of(texts)}"
        there = [place for place in folder.glob(f"{level}-*.so") if place.stem.rsplit("-", 2)[0] == level]
        for place in there:
            if place.stem == f"{stem}-{compiling.digest(place.read_bytes())}":
                return place
            place.unlink()
        with tempfile.TemporaryDirectory(dir=folder) as work:
            compiling.keep(compiled(compiling, texts, Path(work), level), folder, stem)
        (place,) = folder.glob(f"{stem}-*.so")
        return place

    with ThreadPoolExecutor() as pool:
        return list(pool.map(library, compiling.LEVELS.get(machine, ())))


def compiled(compiling: Any, texts: Mapping[str, bytes], work: Path, level: str) -> Path:
    """Compiles for a level; OpenMP's functions are those of the library that PyTorch brings."""
    command = compiling.compiler()
    for name, text in texts.items():
        (work / name).write_bytes(text)
    part, made = work / "kernels.o", work / "kernels.so"
    flags = [*compiling.FLAGS, f"-march={level}", "-c", str(work / "kernels.c"), "-o", str(part)]
    run = partial(compiling.output_of, temporary=work)
    try:
        run([*command, *flags, "-fopenmp"])
    except compiling.NotBuilt:
        run([*command, *flags])
    run([*command, "-shared", str(part), "-lm", "-o", str(made)])
    if b"__kmpc_" in made.read_bytes():
        raise compiling.NotBuilt(f"{command[0]} has another OpenMP than PyTorch: take gcc")
    return made


def platform_tag(machine: str, libraries: Sequence[bytes]) -> str:
    """The platform of a wheel with these libraries: with glibc, the oldest one that has all functions that they call."""
    if sys.platform == "darwin":
        return re.sub(r"\W", "_", sysconfig.get_platform())
    versions = [int(number) for library in libraries for number in re.findall(rb"GLIBC_2\.(\d+)", library)]
    return f"manylinux_2_{max(OLDEST_GLIBC, *versions)}_{machine}" if versions else f"linux_{machine}"
