"""The pairs of published shapes with random weights, made on the device.

They are for timing, where weights do not matter. Layers, widths and vocabularies are taken from
BASS's pairs (Qian et al. 2024); the layers are Llama's, so the width of the MLP is set by the
published number of parameters. Every head has its own keys and values, as in those models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers

from shoal.api import Shoal
from shoal.errors import RequestError
from shoal.models import loading, weights
from shoal.models.passes import choose_passes
from shoal.models.quantize import parse as parse_formats
from shoal.models.quantize import quantized


@dataclass(frozen=True)
class LlamaShape:
    """A Llama: width of the residual stream, of the MLP; `tied`: one matrix embeds and predicts."""

    layers: int
    width: int
    heads: int
    mlp: int
    vocabulary: int
    tied: bool = True

    def config(self) -> Any:
        """Returns the config for Transformers; no token ends a row."""
        return transformers.LlamaConfig(
            num_hidden_layers=self.layers,
            hidden_size=self.width,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            intermediate_size=self.mlp,
            vocab_size=self.vocabulary,
            tie_word_embeddings=self.tied,
            max_position_embeddings=16384,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )


SHAPES: dict[str, tuple[LlamaShape, LlamaShape]] = {
    "7.8b/310m": (LlamaShape(32, 4096, 32, 13824, 51200), LlamaShape(4, 2048, 16, 5632, 51200)),
    "16b/350m": (
        LlamaShape(34, 6144, 24, 16384, 51200, tied=False),
        LlamaShape(20, 1024, 16, 2736, 51200, tied=False),
    ),
    "13b/125m": (LlamaShape(40, 5120, 40, 13656, 50272), LlamaShape(12, 768, 12, 2048, 50272)),
    "tiny": (LlamaShape(3, 64, 4, 128, 512), LlamaShape(1, 32, 4, 64, 512)),
}
"""The shapes of target and drafter: BASS's own code model, CodeGen-Mono, OPT; and one for tests."""


def shaped_pair(
    name: str,
    *,
    dtype: str,
    device: str,
    max_batch: int,
    seed: int = 0,
    attention: str = "auto",
    compile: str = "auto",
    quantize: str = "off",
) -> Shoal:
    """Makes a pair of that shape, never on disk.

    Args:
        dtype: "auto" is bfloat16 on an accelerator; the other arguments are as for `shoal.load`.

    Raises:
        RequestError: for an unknown shape.
    """
    if name not in SHAPES:
        raise RequestError(f"shape must be one of {', '.join(SHAPES)}, got {name!r}")
    place, formats, runners = loading.resolve_device(device), parse_formats(quantize), []
    if dtype == "auto":
        dtype = "float32" if place.type == "cpu" else "bfloat16"
    for i, (role, shape) in enumerate(zip(("target", "draft"), SHAPES[name], strict=True)):
        hf = _random(shape.config(), loading.DTYPES[dtype], place, seed + i)
        order = weights.lay_out(
            hf, weights.without_packing if formats[role] != "off" else weights.by_facts
        )
        hf, how = quantized(hf, formats[role])
        runner = loading.wrap(hf, f"{name} {role}, random weights", attention)
        runner.notes |= {"quantize": how, "weights": order}
        choose_passes(runner, compile, owned=True)
        runners.append(runner)
    return Shoal(*runners, max_batch=max_batch)


def _random(config: Any, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
