"""The models whose passes cannot be captured, by their configs.

Configs are read before any capture is tried, as a failed capture costs seconds and may leave the
device in disorder.
"""

from __future__ import annotations

from typing import Any

import torch

from shoal.models.capabilities import ROPES_BY_LENGTH, rope_parameters

GROUPED_FROM = (9, 0)
"""The compute capability from which PyTorch multiplies groups of bfloat16 rows in one kernel.

Elsewhere the host reads the sizes of the groups.
"""


def obstacle(hf: Any) -> str | None:
    """Returns the reason why no pass of a Transformers model can be captured into a CUDA graph.

    Returns None where no reason is known.
    """
    config = hf.config.get_text_config()
    for parameters in rope_parameters(config):
        kind = parameters.get("rope_type", parameters.get("type"))
        if kind in ROPES_BY_LENGTH:
            return f"its rotary embedding ({kind}) reads positions on the host"
    if any(
        getattr(config, name, None)
        for name in ("num_experts", "num_local_experts", "n_routed_experts")
    ):
        return _of_experts(getattr(config, "_experts_implementation", None), hf.device, hf.dtype)
    return None


def _of_experts(implementation: str | None, device: torch.device, dtype: torch.dtype) -> str | None:
    if implementation in (None, "eager"):
        return "its experts are looked up on the host (experts_implementation 'eager')"
    if implementation == "grouped_mm" and (
        dtype != torch.bfloat16 or torch.cuda.get_device_capability(device) < GROUPED_FROM
    ):
        return (
            "its experts' sizes are read on the host: grouped products are one kernel for "
            "bfloat16 on Hopper or later only"
        )
    return None
