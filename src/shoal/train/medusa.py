"""The training of Medusa heads.

They learn the target's distribution further on, from its own samples; the target stays as it is
(Medusa-1). Cai et al. 2024 (arXiv 2401.10774), section 2.2.1, with the target's distribution at
each position in place of the token that was sampled there: it says more per position. Head i counts
0.8^i of the first. Heads share the target's matrix to the vocabulary, which keeps them small.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from shoal.drafting.distillation import Learner
from shoal.drafting.medusa import FILES, MedusaHeads
from shoal.train.stages import HeadsTrainer


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

    def learner(self, heads: MedusaHeads) -> Learner:
        return heads.learner(self.target.config.get_text_config().num_hidden_layers)

    @property
    def config(self) -> dict[str, Any]:
        return {
            "model_type": "medusa",
            "medusa_num_heads": self.training.heads,
            "medusa_num_layers": self.training.layers,
            "hidden_size": self.width,
            "vocab_size": self.vocab_size,
        }
