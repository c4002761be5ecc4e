"""Architectures of the tests by the way in which Transformers computes their attention."""

from __future__ import annotations

import transformers
from packaging.version import Version

MASK_PATH = {"falcon", "mpt"}
"""Models that attend by their own eager code under a mask."""
if Version(transformers.__version__) < Version("5.24"):
    MASK_PATH |= {"codegen", "gptj"}
