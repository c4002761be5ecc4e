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
UNSHARED = MASK_PATH | {"deepseek-v3"}
"""Models on the attention path "mask", and DeepSeek, which caches something smaller than its keys and values."""
KINDS = (
    "llama", "qwen2-moe-sliding", "gemma2", "gpt2", "gpt-oss", "deepseek-v3", "codegen", "falcon", "mpt",
    *(name for name in ("qwen3-next", "jamba") if name in RECURRENT_HERE),
)  # fmt: skip
"""Rotary and learned positions and none, windows in some layers, soft caps, experts, sinks, MLA, recurrent states, and those that
attend by their own code: whatever of a cache and of a pass an architecture can do in its own way."""
