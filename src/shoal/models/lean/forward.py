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

    def __call__(self, plan: Plan, cache: SlotCache, method: Method) -> Operations: ...

    def of(self, decoder: Decoder) -> Begin:
        """The same for another decoder with the same rotary positions."""
        ...


def known_tokens(plan: Plan, tokens: Tensor, vocabulary: int) -> Tensor:
    """A drafter may lack ids of a wider target; a row that holds one is drafted for as if it held another."""
    return tokens[:, : plan.q].clamp(max=vocabulary - 1)


class LeanPass:
    """Computes the passes of a model.

    Args:
        decoder: the model. begin: makes the operations of one pass. whole: computes passes at once, those that it can.
    """

    def __init__(self, decoder: Decoder, begin: Begin, whole: WholePass | None = None) -> None:
        self.decoder = decoder
        self._begin, self.whole = begin, whole

    def of(self, decoder: Decoder) -> LeanPass:
        """The passes of another decoder, of the same layers or some of them."""
        return LeanPass(decoder, self._begin.of(decoder), None if self.whole is None else self.whole.of(decoder))

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
            hidden_layers: hidden states wanted (`shoal.models.runner.Runner`). A pass in one call has none.
            vectors: what negative ids stand for (`shoal.models.vectors`).

        Returns:
            Logits [rows, q, vocab]; without `want_logits`, nothing of use. Hidden states, [rows, q, layers * width], or packed
            [1, tokens, layers * width]; None where none are wanted.
        """
        logits = None if self.whole is None or hidden_layers else self.whole(plan, tokens, cache, want_logits, vectors)
        if logits is not None:
            return logits, None
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
