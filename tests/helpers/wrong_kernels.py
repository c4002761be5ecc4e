"""The kernels in C with one text replaced by another, for negative controls.

They are compiled for float32 only, without optimisation, with nothing inline and with the system's headers parsed once a process,
which takes a thirtieth of the time.
Their sums are then rounded in another way: compare them with definitions by tolerance, or bit by bit with right kernels
that were compiled as they were, `compiled_as_wrong_ones_are`.
"""

from __future__ import annotations

import atexit
import ctypes
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch

from mutants import replaced
from shoal.native import build

HEADERS = "#define _GNU_SOURCE\n" + "".join(
    f"#include <{name}.h>\n" for name in ("stdint", "math", "stdlib", "string", "time")
)
HEADERS += "#ifdef _OPENMP\n#include <omp.h>\n#endif\n#ifdef __SSE2__\n#include <immintrin.h>\n#endif\n"


@cache
def compiler_and_flags() -> tuple[list[str], list[str]]:
    """The command, and flags that bring the headers of the system ahead of the sources, which include them again."""
    command, folder = build.compiler(), tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    flags = ["-O0" if flag == "-O3" else flag for flag in build.machine_flags()]
    flags += ["-DINLINE=static inline", "-DONLY_FLOAT32"]
    header = Path(folder.name, "system.h")
    header.write_text(HEADERS, encoding="utf-8")
    made = [
        *command,
        *flags,
        "-fopenmp",
        "-x",
        "c-header",
        str(header),
        "-o",
        f"{header}.gch",
    ]  # clang reads the header itself
    subprocess.run(made, capture_output=True, check=False)
    return command, [*flags, "-include", str(header)]


@cache
def wrong_kernels(*changes: tuple[str, str]) -> ctypes.CDLL:
    """Compiles the kernels with each right text, which must stand in the sources once, replaced by a wrong one."""
    texts = {file: text.decode() for file, text in build.sources().items()}
    for change in changes:
        texts = replaced(texts, *change)
    changed = {file: text.encode() for file, text in texts.items()}
    command, flags = compiler_and_flags()
    with (
        tempfile.TemporaryDirectory() as folder,  # a library that is loaded stays when its file is gone
        patch.object(build, "SUFFIXES", {torch.float32: "float32"}),
    ):
        return build.loaded(build.compiled(changed, Path(folder), command, flags))


def compiled_as_wrong_ones_are() -> ctypes.CDLL:
    """The right kernels."""
    return wrong_kernels()
