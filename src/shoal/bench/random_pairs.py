"""The pairs of published shapes with random weights, made on the device.

They are for timing, where weights do not matter. Layers, widths and vocabularies are taken from
BASS's pairs (Qian et al. 2024); the layers are Llama's, so the width of the MLP is set by the
published number of parameters. Every head has its own keys and values, as in those models; in Llama
3, whose shapes are here too, four query heads share them.

An acceptance rate is imposed on their compute, so that large shapes can be timed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor

from shoal.api import Shoal
from shoal.errors import RequestError
from shoal.lookahead.controller import PairCosts
from shoal.models import loading, weights
from shoal.models.passes import choose_passes
from shoal.models.quantize import parse as parse_formats
from shoal.models.quantize import quantized
from shoal.sampling.acceptance import Rejection, by_rejection, rejection_by_tensors
from shoal.sampling.distributions import Sampler, Scores
from shoal.sampling.uniforms import Purpose
from shoal.types.trees import DraftTree, Verdict


@dataclass(frozen=True)
class LlamaShape:
    """A Llama: width of the residual stream, of the MLP; `tied`: one matrix embeds and predicts.

    Attributes:
        kv_heads: heads of keys and values; 0 = as many as of queries.
    """

    layers: int
    width: int
    heads: int
    mlp: int
    vocabulary: int
    tied: bool = True
    kv_heads: int = 0

    @property
    def kv_width(self) -> int:
        """The features of a token's keys in a layer."""
        return self.width // self.heads * (self.kv_heads or self.heads)

    def config(self) -> Any:
        """Returns the config for Transformers; no token ends a row."""
        return transformers.LlamaConfig(
            num_hidden_layers=self.layers,
            hidden_size=self.width,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads or self.heads,
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
    "8b/1.24b": (
        LlamaShape(32, 4096, 32, 14336, 128256, tied=False, kv_heads=8),
        LlamaShape(16, 2048, 32, 8192, 128256, kv_heads=8),
    ),
    "tiny": (LlamaShape(3, 64, 4, 128, 512), LlamaShape(1, 32, 4, 64, 512)),
}
"""The shapes of the pairs: BASS's code model, CodeGen-Mono, OPT, Llama 3; one for tests."""


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


@dataclass(unsafe_hash=True)
class Imposed(Rejection):
    """A rejection sampling in which each draft is accepted with probability `rate`.

    The rate holds for any p and q. The rule computes all that the real rule does, so that it costs
    the same; the text means nothing. The row's own uniforms decide.

    Raises:
        RequestError: the rate is outside of 0..1.
    """

    rate: float
    matches_greedy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise RequestError(f"an acceptance rate is in 0..1, got {self.rate}")

    def decide(self, tree: DraftTree, scores: Scores, uniforms: Tensor) -> Verdict:
        """Decides by the real rule, on uniforms that accept always or never."""
        biased = self._biased(uniforms)
        if tree.m and tree.q is None:  # greedy rows: point masses
            one_hot = scores.logits.new_zeros(*tree.tokens.shape, scores.logits.shape[-1]).scatter_(
                -1, tree.tokens[..., None], 1.0
            )
            tree = replace(tree, q=one_hot.unbind(1))
        greedy = any(row.request.sampling.greedy for row in scores.positions.rows)
        return (rejection_by_tensors if greedy else by_rejection)(tree, scores, biased)

    def decide_chains(
        self,
        drafts: Tensor,
        lengths: Tensor,
        q: Sequence[Tensor],
        p: Tensor,
        uniforms: Tensor,
        sampler: Sampler | None = None,
    ) -> Verdict:
        """Decides as a function of tensors."""
        return super().decide_chains(drafts, lengths, q, p, self._biased(uniforms), sampler)

    def _biased(self, uniforms: Tensor) -> Tensor:
        """Replaces the uniforms: u = -1 accepts every draft that q can draw, u = infinity none."""
        biased, column = uniforms.clone(), Purpose.ACCEPT - 1
        biased[..., column] = torch.where(uniforms[..., column] < self.rate, -1.0, torch.inf)
        return biased


def imposing(pair: Shoal, rate: float) -> Shoal:
    """Returns the same models under the imposed rule.

    The costs that `auto` measured under the real rule are not carried over.
    """
    other = copy.copy(pair)
    other.rule = Imposed(rate)
    other.pair_costs = PairCosts(packed=pair.pair_costs.packed)
    return other
