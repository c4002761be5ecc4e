"""Architectures of the tests by the way in which Transformers computes their attention, and what it says with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from packaging.version import Version

from shoal.testing import ARCHITECTURES, RECURRENT, VOCABULARY

MASK_PATH = {"falcon", "mpt"}
"""Models that attend by their own eager code under a mask."""
RECURRENT_HERE = sorted(RECURRENT)
"""Models with recurrent states that this Transformers keeps in its common cache."""
ARCHITECTURES_HERE = set(ARCHITECTURES)
"""Models without such states that this Transformers computes by its common cache: Gemma 4 read a field of its own once."""
if Version(transformers.__version__) < Version("5.24"):
    MASK_PATH |= {"codegen", "gptj"}
    RECURRENT_HERE = []
    ARCHITECTURES_HERE -= {"gemma4"}
UNSHARED = MASK_PATH | {"deepseek-v3", "gemma4"}
"""Models on the attention path "mask", DeepSeek, which caches something smaller than its keys and values, and Gemma 4, some of
whose layers read the keys of others."""
KINDS = (
    "llama", "qwen2-moe-sliding", "gemma2", "gpt2", "gpt-oss", "deepseek-v3", "codegen", "falcon", "mpt",
    *(name for name in ("qwen3-next", "jamba") if name in RECURRENT_HERE),
)  # fmt: skip
"""Rotary and learned positions and none, windows in some layers, soft caps, experts, sinks, MLA, recurrent states, and those that
attend by their own code: whatever of a cache and of a pass an architecture can do in its own way."""


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Returns random ids, the same for the same length and seed."""
    ids = torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(100 * seed + length))
    return tuple(ids.tolist())


def greedy_ids(hf: Any, ids: Sequence[int], new: int) -> tuple[int, ...]:
    """Greedy ids of Transformers' own `generate`, one prompt alone.

    States that modules keep in themselves are forgotten before: `generate` lets a prompt of one token begin with the
    convolution's inputs of the call before it (RecurrentGemma, 5.24).
    """
    for module in hf.modules():
        for name in {"conv1d_state", "recurrent_states"} & vars(module).keys():
            setattr(module, name, None)
    block = torch.tensor([ids])
    everything = torch.ones_like(block)  # without it, ids that equal a pad id would be hidden
    out = hf.generate(block, attention_mask=everything, max_new_tokens=new, do_sample=False)
    return tuple(out[0, len(ids) :].tolist())
