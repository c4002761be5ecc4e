"""The kernels in C with one text replaced by another, for negative controls.

They are compiled for float32 only, without optimisation and with nothing inline, which takes a twentieth of the time.
Their sums are then rounded in another way: compare them with definitions by tolerance, or bit by bit with right kernels
that were compiled as they were, `compiled_as_wrong_ones_are`.
"""

from __future__ import annotations

import ctypes
import tempfile
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch

from mutants import replaced
from shoal.native import build


def wrong_kernels(*changes: tuple[str, str]) -> ctypes.CDLL:
    """Compiles the kernels with each right text, which must stand in the sources once, replaced by a wrong one."""
    texts = {file: text.decode() for file, text in build.sources().items()}
    for change in changes:
        texts = replaced(texts, *change)
    changed = {file: text.encode() for file, text in texts.items()}
    flags = ["-O0" if flag == "-O3" else flag for flag in build.machine_flags()]
    flags += ["-DINLINE=static inline", "-DONLY_FLOAT32"]
    with (
        tempfile.TemporaryDirectory() as folder,  # a library that is loaded stays when its file is gone
        patch.object(build, "SUFFIXES", {torch.float32: "float32"}),
    ):
        return build.loaded(build.compiled(changed, Path(folder), build.compiler(), flags))


@cache
def compiled_as_wrong_ones_are() -> ctypes.CDLL:
    """The right kernels."""
    return wrong_kernels()
