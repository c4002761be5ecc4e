"""The lean pass layer by layer: tokens in, logits out, over the slot cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from shoal.models.attention.methods import Method
from shoal.models.cache import Plan, SlotCache
from shoal.models.lean.decoder import Decoder
from shoal.models.lean.native_operations import NativeKernels
from shoal.models.lean.whole import WholePass
from shoal.models.vectors import embedded


def known_tokens(plan: Plan, tokens: Tensor, vocabulary: int) -> Tensor:
    """Returns the plan's columns of `tokens` with ids that the drafter has.

    A drafter may lack ids of a wider target. Such ids become its last id, so it drafts for the row
    as if the row held that token.
    """
    return tokens[:, : plan.q].clamp(max=vocabulary - 1)


class LeanPass:
    """The passes of a model without its modules, layer by layer.

    Args:
        kernels: the kernels for the operations between the products.

    Attributes:
        decoder: the model.
        whole: the passes in one call, for those passes that it can compute; None if it cannot
            compute this decoder.
        no_whole: the reason why there is no `whole`.
    """

    def __init__(
        self,
        decoder: Decoder,
        kernels: NativeKernels,
        whole: WholePass | None = None,
        no_whole: str = "it was not made",
    ) -> None:
        self.decoder = decoder
        self.whole, self.no_whole = whole, no_whole
        self._kernels = kernels

    def of(self, decoder: Decoder) -> LeanPass:
        """Makes the passes of another decoder, of the same layers or some of them."""
        whole = None if self.whole is None else self.whole.of(decoder)
        return LeanPass(decoder, self._kernels.of(decoder), whole, self.no_whole)

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
        """Computes a pass over the plan's tokens.

        Args:
            tokens: [rows, q] int64, or more columns; ids beyond the embedding stand for the last
                one.
            cache: a cache that the plan was announced to (`SlotCache.begin`).
            method: the method that attends if the kernels cannot.
            hidden_layers: the numbers of the hidden states to return
                (`shoal.models.runner.Runner`).
            vectors: the vectors that negative ids stand for (`shoal.models.vectors`).

        Returns:
            Logits [rows, q, vocab]; without `want_logits`, a tensor of no use.
            Hidden states [rows, q, layers * width], or packed [1, tokens, layers * width]; None
            without `hidden_layers`.
        """
        decoder, tokens = (
            self.decoder,
            plan.pack(known_tokens(plan, tokens, len(self.decoder.embedding))),
        )
        do = self._kernels(plan, cache, method)
        x = embedded(tokens.flatten(), partial(decoder.embedding.index_select, 0), vectors)
        # Copied: the next layer may overwrite its input.
        kept = {0: x.clone()} if 0 in hidden_layers else {}
        for index, layer in enumerate(decoder.layers):
            states = layer.states.linear(do.norm(x, layer.attention_norm))
            x = layer.out.linear_add(do.attend(states, index), x)
            h = do.norm(x, layer.mlp_norm)
            x = layer.down.linear_add(
                layer.up.linear_mul(h, layer.gate.linear(h, decoder.activation)), x
            )
            if index + 1 in hidden_layers:
                kept[index + 1] = x.clone()
        last = (
            do.norm(x, decoder.norm) if want_logits or len(decoder.layers) in hidden_layers else x
        )
        kept |= {len(decoder.layers): last} if hidden_layers else {}
        hidden = (
            torch.cat([kept[layer] for layer in hidden_layers], dim=-1).view(*tokens.shape, -1)
            if hidden_layers
            else None
        )
        return plan.unpack(
            decoder.head.linear(last).view(*tokens.shape, -1)
        ) if want_logits else x, hidden
