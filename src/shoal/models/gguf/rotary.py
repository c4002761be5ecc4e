"""The rotary positions of a GGUF file, in the terms of Transformers.

llama.cpp divides all frequencies by one factor ("linear"), mixes divided and undivided ones and
makes cosines larger ("yarn"; Peng et al. 2023, arXiv 2309.00071), or divides each by a factor of
its own, a tensor of the file (Llama 3.1). Transformers computes the same of the same numbers. What
else a file may ask for goes to llama.cpp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.errors import UnsupportedModel
from shoal.models.gguf.contents import Header

FACTORS = "rope_freqs.weight"
"""The name of the tensor of factors, [features of a head / 2] float32."""
NEUTRAL = {"attn_factor": 1, "yarn_ext_factor": 1, "yarn_attn_factor": 1, "yarn_log_multiplier": 0}
"""The values of those numbers of a scaling that Transformers' families have no word for."""
BETAS = (("beta_fast", "yarn_beta_fast", 32.0), ("beta_slow", "yarn_beta_slow", 1.0))
"""The bounds of the mixture, in Transformers and in files, and their usual values."""


def rotary_parameters(header: Header, family: str, context: int) -> dict[str, Any]:
    """Returns the `rope_parameters` of a Transformers config.

    Args:
        context: the number of positions of the file.

    Raises:
        UnsupportedModel: llama.cpp computes other positions.
    """

    def value(key: str, otherwise: Any) -> Any:
        found = header.value(f"{family}.rope.{key}")
        if found is None and header.has(f"{family}.rope.{key}"):
            raise UnsupportedModel(f"its {family}.rope.{key} is a list")
        return otherwise if found is None else found

    scaled = value("scaling.factor", value("scale_linear", 0)) or 1
    kind = value("scaling.type", "linear")  # as llama.cpp reads a file that names none
    made: dict[str, Any] = {"rope_theta": value("freq_base", 1e4)}
    for key, neutral in NEUTRAL.items():
        if value(f"scaling.{key}", neutral) != neutral:
            raise UnsupportedModel(f"it has {family}.rope.scaling.{key}")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModel(f"it has {family}.rope.scaling.type {kind!r}")
    if kind == "none" or (kind == "linear" and scaled == 1):
        return made | {"rope_type": "default"}
    if FACTORS in header.tensors:
        raise UnsupportedModel(f"it has {FACTORS} beside {family}.rope.scaling.type {kind!r}")
    made |= {"rope_type": kind, "factor": scaled}
    if kind == "yarn":
        made["original_max_position_embeddings"] = value("scaling.original_context_length", context)
        made |= {name: value(f"scaling.{key}", otherwise) for name, key, otherwise in BETAS}
    return made


def divide(rotary: Any, factors: Tensor) -> None:
    """Divides the frequencies of a rotary module of Transformers by a file's factors.

    Raises:
        UnsupportedModel: there are more or fewer factors than frequencies.
    """
    if factors.shape != rotary.inv_freq.shape:
        raise UnsupportedModel(
            f"it has {len(factors)} factors of {len(rotary.inv_freq)} rotary frequencies"
        )
    with torch.no_grad():
        rotary.inv_freq = rotary.inv_freq / factors
        rotary.original_inv_freq = rotary.inv_freq.clone()
