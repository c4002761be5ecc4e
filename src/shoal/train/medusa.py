"""The training of Medusa heads.

They learn the target's distribution further on, from its own samples; the target stays as it is
(Medusa-1). Cai et al. 2024 (arXiv 2401.10774), section 2.2.1, with the target's distribution at
each position in place of the token that was sampled there: it says more per position. Head i counts
0.8^i of the first. Heads share the target's matrix to the vocabulary, which keeps them small.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.drafting.medusa import FILES, MedusaHeads
from shoal.train.stages import DECAY, HeadsTrainer


class MedusaTrainer(HeadsTrainer):
    """A trainer of Medusa heads; at first all heads predict the target's next position."""

    file = FILES[0]

    def made(self) -> nn.Module:
        return MedusaHeads(
            self.training.heads,
            self.training.layers,
            self.width,
            0,
            self.target.get_output_embeddings(),
        )

    def _said(self, heads: nn.Module, tokens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the logits of each head, and the target's at the same positions."""
        with torch.no_grad():
            found = self.target(input_ids=tokens, use_cache=False, output_hidden_states=True)
        for i, said in enumerate(heads(found.hidden_states[-1][:, : -self.training.heads])):
            yield said, found.logits[:, i + 1 : i + 1 + said.shape[1]]

    def loss(self, heads: nn.Module, tokens: Tensor) -> Tensor:
        passes = self._said(heads, tokens)
        losses = [
            F.cross_entropy(said.flatten(0, 1), right.softmax(-1).flatten(0, 1))
            for said, right in passes
        ]
        return torch.stack([DECAY**i * loss for i, loss in enumerate(losses)]).sum()

    def said(self, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
        return list(self._said(self.model, tokens))

    def accepted(self, q_logits: Tensor, p_logits: Tensor) -> Tensor:
        """Returns p of a head's most probable token: the chance that this draft is accepted."""
        return p_logits.softmax(-1).gather(-1, q_logits.argmax(-1, keepdim=True)).squeeze(-1)

    @property
    def config(self) -> dict[str, Any]:
        return {
            "model_type": "medusa",
            "medusa_num_heads": self.training.heads,
            "medusa_num_layers": self.training.layers,
            "hidden_size": self.width,
            "vocab_size": self.vocab_size,
        }
