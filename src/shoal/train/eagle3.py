"""The training of EAGLE-3 heads.

They learn their target's distribution from its hidden states, and from their own where they will
have no others. Li et al. 2025 (arXiv 2503.01840), section 3.2: "training-time test". A window is
passed n times. In the first pass all states are the target's. In each further pass a token's state
is the layer's output for the token before it in the previous pass, and attention sees the target's
states up to the place where a draft would have begun, then those of the draft. The loss of a pass
counts 0.8 times the loss of the pass before. The target's matrix to the vocabulary stays as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.drafting.distillation import acceptance
from shoal.drafting.eagle3 import FILES
from shoal.models.eagle3_layer import Eagle3Heads, layer_config, published_layers
from shoal.train.stages import DECAY, HeadsTrainer

MOST_DRAFTED = 32_000
"""The most tokens of a larger vocabulary that are drafted; the target writes them most."""


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

    def _passes(self, heads: Any, tokens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields each pass's logits over the draft vocabulary, and the target's of the same ids.

        Both are (batch, positions, ids).
        """
        with torch.no_grad():
            found = self.target(input_ids=tokens, use_cache=False, output_hidden_states=True)
            right = found.logits[:, 1:].index_select(-1, heads.target_ids)
        states = heads.fc(
            torch.cat([found.hidden_states[layer] for layer in self.reads], dim=-1)[:, :-1]
        )
        positions = torch.arange(tokens.shape[1] - 1, device=tokens.device)[None]
        attention = DraftedAttention()
        for number in range(self.training.heads):
            out = heads(tokens[:, 1:], states, positions, attention)
            yield heads.lm_head(heads.norm(out))[:, number:], right[:, number:]
            states = F.pad(out, (0, 0, 1, 0))[:, :-1]

    def loss(self, heads: nn.Module, tokens: Tensor) -> Tensor:
        losses = [
            F.cross_entropy(q.flatten(0, 1), p.flatten(0, 1).softmax(-1))
            for q, p in self._passes(heads, tokens)
        ]
        return torch.stack([DECAY**i * loss for i, loss in enumerate(losses)]).sum()

    def said(self, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
        return list(self._passes(self.model, tokens))

    def accepted(self, q_logits: Tensor, p_logits: Tensor) -> Tensor:
        """Computes sum min(p, q): the probability that a draft drawn from q is accepted."""
        return acceptance(p_logits, q_logits)

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


class DraftedAttention:
    """The attention of each pass over a window, as a draft of as many tokens would see.

    Position i of pass n sees the keys of pass 0 up to i - n, and of pass m the key of position i -
    n + m.
    """

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attends over the drafted passes.

        It takes [batch, heads, positions, dim] and returns [batch, positions, heads, dim].
        """
        groups, number = query.shape[1] // key.shape[1], len(self._keys)
        self._keys.append(key.repeat_interleave(groups, 1))
        self._values.append(value.repeat_interleave(groups, 1))
        positions = torch.arange(query.shape[2], device=query.device)
        hidden = positions[None] > positions[:, None] - number
        scores = [(query @ self._keys[0].mT).masked_fill(hidden, -torch.inf)]
        later = range(1, number + 1)
        scores += [(query * _back(self._keys[m], number - m)).sum(-1, keepdim=True) for m in later]
        weights = (torch.cat(scores, dim=-1) * query.shape[-1] ** -0.5).softmax(-1)
        first = weights[..., : len(positions)] @ self._values[0]
        drafted = [
            weights[..., len(positions) + m - 1, None] * _back(self._values[m], number - m)
            for m in later
        ]
        return torch.stack([first, *drafted]).sum(0).transpose(1, 2)


def _back(states: Tensor, positions: int) -> Tensor:
    """Shifts states [batch, heads, positions, dim] to the right; zeros stand at the start."""
    return states if not positions else F.pad(states, (0, 0, positions, 0))[:, :, :-positions]
