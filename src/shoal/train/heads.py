"""The training of Medusa heads and of EAGLE-3 heads.

Medusa heads learn the target's distribution further on, from its own samples; the target stays as
it is (Medusa-1). Cai et al. 2024 (arXiv 2401.10774), section 2.2.1, with the target's distribution
at each position in place of the token that was sampled there: it says more per position. Head i
counts 0.8^i of the first. Heads share the target's matrix to the vocabulary, which keeps them
small.

EAGLE-3 heads learn their target's distribution from its hidden states, and from their own where
they will have no others (`shoal.models.drafted_passes`). The target's matrix to the vocabulary
stays as it is.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from shoal.drafting.distillation import Learner
from shoal.drafting.eagle3 import FILES, layer_learner
from shoal.drafting.medusa import FILES as MEDUSA_FILES
from shoal.drafting.medusa import MedusaHeads
from shoal.models.eagle3_layer import Eagle3Heads, layer_config, published_layers
from shoal.train.stages import HeadsTrainer

MOST_DRAFTED = 32_000
"""The most tokens of a larger vocabulary that are drafted; the target writes them most."""


class MedusaTrainer(HeadsTrainer):
    """A trainer of Medusa heads; at first all heads predict the target's next position."""

    file = MEDUSA_FILES[0]

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


class Eagle3Trainer(HeadsTrainer):
    """A trainer of EAGLE-3 heads with a layer like the target's."""

    file = FILES[0]

    def made(self) -> nn.Module:
        self.reads = self._reads()
        heads = Eagle3Heads(
            layer_config(self.config),
            len(self.reads) * self.width,
            self._drafted,
            self.vocab_size,
            self.target.get_input_embeddings(),
        )
        if self._drafted < self.vocab_size:
            counts = Counter(self.samples.tokens(held_out=False).tolist())
            often = sorted(range(self.vocab_size), key=lambda token: -counts[token])[
                : self._drafted
            ]
            heads.target_ids.copy_(torch.tensor(sorted(often)))
        layer: Any = heads.midlayer
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
            nn.init.zeros_(module.weight)
        heads.fc.weight.data.zero_()
        heads.fc.weight.data[:, -self.width :] = torch.eye(self.width)
        heads.lm_head.weight.data.copy_(
            self.target.get_output_embeddings().weight[heads.target_ids]
        )
        heads.lm_head.requires_grad_(False)
        return heads

    def _reads(self) -> tuple[int, ...]:
        """Returns the published choice of layers, or all layers of a target with few."""
        layers = self.target.config.get_text_config().num_hidden_layers
        found = published_layers({}, layers)
        return found if layers >= 6 else (0, layers // 2, layers)

    @property
    def _drafted(self) -> int:
        return min(self.vocab_size, MOST_DRAFTED)

    def learner(self, heads: Eagle3Heads) -> Learner:
        return layer_learner(heads, self.reads, self.training.heads)

    def tensors(self) -> dict[str, Tensor]:
        ids = self.model.target_ids
        assert isinstance(ids, Tensor)
        drafted = torch.zeros(self.vocab_size, dtype=torch.bool, device=ids.device).scatter(
            0, ids, True
        )
        return super().tensors() | {
            "d2t": ids - torch.arange(len(ids), device=ids.device),
            "t2d": drafted,
        }

    @property
    def config(self) -> dict[str, Any]:
        text = self.target.config.get_text_config()
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_size": self.width,
            "intermediate_size": 2 * self.width,
            "num_attention_heads": text.num_attention_heads,
            "num_key_value_heads": getattr(text, "num_key_value_heads", None)
            or text.num_attention_heads,
            "head_dim": getattr(text, "head_dim", None) or self.width // text.num_attention_heads,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": text.max_position_embeddings,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self._drafted,
            "eagle_aux_hidden_state_layer_ids": list(self._reads()),
        }
