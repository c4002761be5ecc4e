"""The training of Medusa heads, of EAGLE-3 heads and of PPD's prompt tokens.

Medusa heads learn the target's distribution further on, from its own samples; the target stays as
it is (Medusa-1). Cai et al. 2024 (arXiv 2401.10774), section 2.2.1, with the target's distribution
at each position in place of the token that was sampled there: it says more per position. Head i
counts 0.8^i of the first. Heads share the target's matrix to the vocabulary, which keeps them
small.

EAGLE-3 heads learn their target's distribution from its hidden states, and from their own where
they will have no others (`shoal.drafting.distillation`). The target's matrix to the vocabulary
stays as it is.

Prompt tokens learn the target's distribution further on, as Medusa heads do.
Chen et al. 2024 (arXiv 2405.18628), section 3.2: prompt tokens stand at many places of a window,
each time behind all tokens before. The target's logits at the i-th are compared with its logits i
positions on, where it sees the tokens that were there. The prompt tokens of one place see none of
another. The loss of the i-th counts 0.8^i of the first. Only the vectors learn: the window itself
is computed once without gradients, and its keys and values are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.drafting.distillation import Learner, chance_of_most_probable
from shoal.drafting.eagle3 import FILES, layer_learner
from shoal.drafting.medusa import FILES as MEDUSA_FILES
from shoal.drafting.medusa import MedusaHeads
from shoal.drafting.ppd import FILE, TENSOR
from shoal.drafting.text import CHOICES
from shoal.models.bridge import cache_name
from shoal.models.eagle3_layer import Eagle3Heads, layer_config, published_layers
from shoal.train import HeadsTrainer, Stage

MOST_DRAFTED = 32_000
"""The most tokens of a larger vocabulary that are drafted; the target writes them most."""


class MedusaTrainer(HeadsTrainer):
    """A trainer of Medusa heads; at first all heads predict the target's next position."""

    file = MEDUSA_FILES[0]

    def make_model(self) -> nn.Module:
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

    def make_model(self) -> nn.Module:
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
        layers_read = published_layers({}, layers)
        return layers_read if layers >= 6 else (0, layers // 2, layers)

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


LR = 10.0
"""The factor on the usual learning rate.

The usual rate is made for whole tables: a few vectors have to go further.
"""
PLACES = 64
"""The number of places of a window, evenly spread, where prompt tokens stand.

There are fewer in short windows.
"""


class PpdTrainer(HeadsTrainer):
    """A trainer of prompt tokens; at first they are the tokens that the target writes most."""

    file = FILE

    def make_model(self) -> nn.Module:
        embedding = self.target.get_input_embeddings()
        ids, counts = np.unique(self.samples.tokens(held_out=False), return_counts=True)
        often = ids[np.argsort(-counts, kind="stable")][np.arange(self.training.heads) % len(ids)]
        with torch.no_grad():
            ids_of_often = torch.from_numpy(often.astype(np.int64)).to(self.device)
            first: Tensor = embedding(ids_of_often)  # type: ignore[operator]
        return nn.Embedding.from_pretrained(first.clone(), freeze=False)

    def compared(self, prompts: nn.Module, tokens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Returns each prompt token's logits at all places, and the target's at the same positions.

        Both are (batch, places, vocab).
        """
        count, (batch, length) = self.training.heads, tokens.shape
        stride = max(1, -(-(length - count) // PLACES))
        places = torch.arange(
            int(tokens.sum()) % stride, length - count, stride, device=tokens.device
        )
        with torch.no_grad():
            output = self.target(input_ids=tokens, use_cache=True)
        vectors = prompts(torch.arange(count, device=tokens.device)).repeat(len(places), 1)
        cache = cache_name(self.target)
        said = self.target(
            inputs_embeds=vectors[None].expand(batch, -1, -1),
            use_cache=True,
            **{cache: output[cache]},
            attention_mask=hidden_but_own(places, count, length)
            .to(vectors.dtype)
            .expand(batch, -1, -1, -1),
            position_ids=(places[:, None] + 1 + torch.arange(count, device=tokens.device))
            .flatten()[None]
            .expand(batch, -1),
        ).logits.unflatten(1, (len(places), count))
        for i in range(count):
            yield said[:, :, i], output.logits[:, places + 1 + i]

    def planned(self) -> Sequence[Stage]:
        return [replace(stage, lr=LR) for stage in super().planned()]

    def accepted(self, q_logits: Tensor, p_logits: Tensor) -> Tensor:
        return chance_of_most_probable(p_logits, q_logits)

    def tensors(self) -> dict[str, Tensor]:
        assert isinstance(self.model, nn.Embedding)
        return {TENSOR: self.model.weight.detach()}

    @property
    def config(self) -> dict[str, Any]:
        return {
            "model_type": "ppd",
            "hidden_size": self.width,
            "vocab_size": self.vocab_size,
            "accuracies": [
                [round(chance, 4) for chance in row] for row in self.accuracies().tolist()
            ],
        }

    @torch.inference_mode()
    def accuracies(self) -> Tensor:
        """Measures how often the target draws each prompt token's guesses, by rank of the guess.

        The result is [m, guesses], on samples that were not learned from. The sizes of trees are
        chosen by it.
        """
        windows = self._windows(self.samples.tokens(held_out=True))
        rates = []
        for step in range(len(windows.rows) // windows.batch_size):
            pairs = self.logit_pairs(torch.from_numpy(windows[step]).to(self.device))
            rates.append(torch.stack([_by_rank(q, p) for q, p in pairs]))
        return torch.stack(rates).mean(0)


def _by_rank(q: Tensor, p: Tensor) -> Tensor:
    """Returns the target's mean probabilities of the guesses, most probable first, [guesses]."""
    guesses = q.topk(min(CHOICES, q.shape[-1]), dim=-1).indices
    return p.softmax(-1).gather(-1, guesses).flatten(0, 1).mean(0)


def hidden_but_own(places: Tensor, count: int, length: int) -> Tensor:
    """Returns the additive mask of `count` prompt tokens behind each place of a window.

    Its shape is [1, 1, places * count, length + places * count], over the window of `length` tokens
    and the prompt tokens themselves. Each prompt token sees the window up to its place, and the
    prompt tokens of its place up to itself.
    """
    places, number = (
        places.repeat_interleave(count),
        torch.arange(len(places) * count, device=places.device),
    )
    window = torch.arange(length, device=places.device) <= places[:, None]
    own = (places[:, None] == places) & (number[:, None] >= number)
    seen = torch.cat([window, own], dim=1)
    return torch.zeros(seen.shape, device=places.device).masked_fill(
        ~seen, torch.finfo(torch.float32).min
    )[None, None]


TRAINERS: dict[str, type[HeadsTrainer]] = {
    "medusa": MedusaTrainer,
    "eagle3": Eagle3Trainer,
    "ppd": PpdTrainer,
}
"""The trainers by the name of the drafter."""
