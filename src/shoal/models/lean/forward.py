"""The pass: tokens in, logits out, over the slot cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from shoal.models.attention.methods import Method
from shoal.models.cache import Plan, SlotCache
from shoal.models.lean.decoder import Decoder, Norm
from shoal.models.lean.whole import WholePass
from shoal.models.vectors import embedded


class Operations(Protocol):
    """What a layer does between its products; for the length of a pass."""

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """[tokens, width] -> the same, normalised. The result is good until the next call."""

    def attend(self, states: Tensor, index: int) -> Tensor:
        """Queries, keys and values of layer `index`, [tokens, (heads + 2 kv heads) * dim] -> [tokens, heads * dim].

        Rotates queries and keys, writes keys and values to the cache, attends. `states` is overwritten.
        """


class Begin(Protocol):
    """Makes the operations of one pass of a decoder."""

    @property
    def operations(self) -> str:
        """The word for whoever computes them."""
        ...

    def __call__(self, plan: Plan, cache: SlotCache, method: Method) -> Operations: ...

    def of(self, decoder: Decoder) -> Begin:
        """The same for another decoder with the same rotary positions."""
        ...


def known_tokens(plan: Plan, tokens: Tensor, vocabulary: int) -> Tensor:
    """A drafter may lack ids of a wider target; a row that holds one is drafted for as if it held another."""
    return tokens[:, : plan.q].clamp(max=vocabulary - 1)


class LeanPass:
    """The passes of a model without its modules, layer by layer.

    Attributes:
        decoder: the model.
        whole: computes passes in one call, those that it can; None if it cannot compute this decoder.
        no_whole: the reason why there is no `whole`.
    """

    def __init__(
        self, decoder: Decoder, begin: Begin, whole: WholePass | None = None, no_whole: str = "no kernels in C"
    ) -> None:
        """Args: begin makes the operations of one pass."""
        self.decoder = decoder
        self.whole, self.no_whole = whole, no_whole
        self._begin = begin

    @property
    def operations(self) -> str:
        """The word for whoever computes what lies between the products."""
        return self._begin.operations

    def of(self, decoder: Decoder) -> LeanPass:
        """Makes the passes of another decoder, of the same layers or some of them."""
        whole = None if self.whole is None else self.whole.of(decoder)
        return LeanPass(decoder, self._begin.of(decoder), whole, self.no_whole)

    def __call__(
        self,
        plan: Plan,
        tokens: Tensor,
        cache: SlotCache,
        method: Method,
        want_logits: bool,
        hidden_layers: Sequence[int] = (),
        vectors: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """A pass over the plan's tokens.

        Args:
            tokens: [rows, q] int64, or more columns; ids beyond the embedding stand for the last one.
            cache: announced the plan (`SlotCache.begin`). method: attends where the operations cannot.
            hidden_layers: hidden states wanted (`shoal.models.runner.Runner`).
            vectors: what negative ids stand for (`shoal.models.vectors`).

        Returns:
            Logits [rows, q, vocab]; without `want_logits`, nothing of use. Hidden states, [rows, q, layers * width], or packed
            [1, tokens, layers * width]; None where none are wanted.
        """
        decoder, tokens = self.decoder, plan.pack(known_tokens(plan, tokens, len(self.decoder.embedding)))
        do = self._begin(plan, cache, method)
        x = embedded(tokens.flatten(), partial(decoder.embedding.index_select, 0), vectors)
        kept = {0: x.clone()} if 0 in hidden_layers else {}  # the next layer may overwrite its input
        for index, layer in enumerate(decoder.layers):
            states = layer.states.linear(do.norm(x, layer.attention_norm))
            x = layer.out.linear_add(do.attend(states, index), x)
            h = do.norm(x, layer.mlp_norm)
            x = layer.down.linear_add(layer.up.linear_mul(h, layer.gate.linear(h, decoder.activation)), x)
            if index + 1 in hidden_layers:
                kept[index + 1] = x.clone()
        last = do.norm(x, decoder.norm) if want_logits or len(decoder.layers) in hidden_layers else x
        kept |= {len(decoder.layers): last} if hidden_layers else {}
        hidden = (
            torch.cat([kept[layer] for layer in hidden_layers], dim=-1).view(*tokens.shape, -1) if hidden_layers else None
        )
        return plan.unpack(decoder.head.linear(last).view(*tokens.shape, -1)) if want_logits else x, hidden
