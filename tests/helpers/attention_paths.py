"""Architectures of the tests by the way in which Transformers computes their attention."""

from __future__ import annotations

import transformers
from packaging.version import Version

from shoal.testing import RECURRENT

MASK_PATH = {"falcon", "mpt"}
"""Models that attend by their own eager code under a mask."""
RECURRENT_HERE = sorted(RECURRENT)
"""Models with recurrent states that this Transformers keeps in its common cache."""
if Version(transformers.__version__) < Version("5.24"):
    MASK_PATH |= {"codegen", "gptj"}
    RECURRENT_HERE = []
