"""Checkpoints whose weights another library quantised, and which of them cannot be read.

Transformers computes them, or writes them out in a floating-point format, or asks for a package.
Where it knows neither the method nor that there is one, it reads the whole numbers of the weights
as if they were the weights themselves, and leaves the scales beside them. Such checkpoints are
refused here by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from shoal.errors import UnsupportedModel

INSTEAD = "take the checkpoint that it was made from, which quantize='target=int8' quantises"
SCALES = re.compile(
    r"(\.weight_?(scale|zero_point|packed|shape|global_scale)|\.(qweight|qzeros|scales|g_idx|SCB)$"
    r"|\.weight\.(absmax|quant_map|quant_state)|_(blocks|scales)$)"
)
"""The names of tensors that stand beside, or in place of, quantised weights."""


def method_of(config: Any) -> str | None:
    """Returns the name of the method that quantised a checkpoint; None if its config names none.

    Args:
        config: the model's config from Transformers.
    """
    found = _quantization(config)
    if found is None:
        return None
    fields = found if isinstance(found, dict) else vars(found)
    name = fields.get("quant_method")
    if name is None and any(fields.get(f"load_in_{bits}bit") for bits in (4, 8)):
        name = "bitsandbytes"
    return str(getattr(name, "value", name or "an unnamed method"))


def _quantization(config: Any) -> Any:
    """Returns the entry about quantised weights, of the model or of its text half."""
    text = config.get_text_config(decoder=True)
    return getattr(config, "quantization_config", None) or getattr(
        text, "quantization_config", None
    )


def require_known_method(source: object, config: Any) -> None:
    """Raises UnsupportedModel if Transformers does not know the method: it would pass over it."""
    name = method_of(config)
    known = {
        one.removesuffix("_4bit").removesuffix("_8bit") for one in AUTO_QUANTIZATION_CONFIG_MAPPING
    }
    if name is not None and name not in known:
        raise UnsupportedModel(
            f"{source} was quantised by {name}, which Transformers does not read: {INSTEAD}"
        )


def require_no_scales(source: object, hf: Any, left: Iterable[str]) -> None:
    """Raises UnsupportedModel if a model without a quantiser has left scales in its checkpoint.

    Args:
        source: the checkpoint.
        hf: the loaded model.
        left: the names of tensors that Transformers has not used.
    """
    names = sorted(name for name in left if SCALES.search(name))
    if names and getattr(hf, "hf_quantizer", None) is None:
        raise UnsupportedModel(
            f"{source} holds quantised weights ({names[0]} and {len(names) - 1} more such "
            f"tensors), and its config.json has no quantization_config that says how to read "
            f"them: {INSTEAD}"
        )
