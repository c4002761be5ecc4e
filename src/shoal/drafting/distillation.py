"""The distillation of a target into its drafter: the losses, and the weights that learn by them.

Training (`shoal.train`) writes the texts itself and makes many steps;
`shoal.drafting.following` makes a few on rollouts that are there anyway.

Layers that draft from states learn by the states they will get (`drafted_passes`): Li et al. 2025
(arXiv 2503.01840), section 3.2, "training-time test". A window is passed n times. In the first pass
all states are the target's. In each further pass a token's state is the layer's output for the
token before it in the previous pass, and attention sees the target's states up to the place where a
draft would have begun, then those of the draft. EAGLE-3 heads learn so, and the
multi-token-prediction layers of a checkpoint: where there are several, each pass is the next
layer's, as each drafts one token, and behind the last layer the last one goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LABEL_WEIGHT = 0.05  # of the cross-entropy with the text itself
OVERLAP_WEIGHT = 0.5  # of the share of drafts that the target would reject
DECAY = 0.8  # the weight of a position's loss beside the loss of the position before


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Computes logits (batch, length - 1, vocabulary) of tokens (batch, length) but the first."""
    return model(input_ids=tokens[:, :-1], use_cache=False).logits


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Computes the mean cross-entropy, in nats, of tokens (batch, length)."""
    return F.cross_entropy(logits(model, tokens).flatten(0, 1), tokens[:, 1:].flatten())


def acceptance(p_logits: Tensor, q_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Computes sum_x min(p, q) over the last dimension: the chance that a drafted token is kept."""
    p = (p_logits / temperature).softmax(-1)
    q = (q_logits / temperature).softmax(-1)
    return torch.minimum(p, q).sum(-1)


def chance_of_most_probable(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Returns p of the drafter's most probable token: the chance that this draft is kept."""
    return p_logits.softmax(-1).gather(-1, q_logits.argmax(-1, keepdim=True)).squeeze(-1)


def decaying(losses: Sequence[Tensor]) -> Tensor:
    """Computes the sum of the losses of drafted positions, each weighing `DECAY` of the last."""
    return torch.stack([DECAY**i * loss for i, loss in enumerate(losses)]).sum()


def distance(p_logits: Tensor, q_logits: Tensor, tokens: Tensor) -> Tensor:
    """Computes KL(p||q) and shares of the rejection rate and of the cross-entropy.

    The rejection rate is 1 - sum min(p, q).

    Args:
        p_logits: the target's logits, [tokens, vocabulary].
        q_logits: the drafter's logits, [tokens, vocabulary].
        tokens: the tokens of the text, [tokens].
    """
    divergence = F.kl_div(
        q_logits.log_softmax(-1), p_logits.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    rejection = 1 - acceptance(p_logits, q_logits).mean()
    labels = F.cross_entropy(q_logits, tokens)
    return divergence + OVERLAP_WEIGHT * rejection + LABEL_WEIGHT * labels


def distillation_loss(teacher: nn.Module) -> Callable[[nn.Module, Tensor], Tensor]:
    """Makes a loss of windows of tokens (batch, length): their mean `distance` to a teacher."""

    def loss(student: nn.Module, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            p = logits(teacher, tokens).flatten(0, 1)
        return distance(p, logits(student, tokens).flatten(0, 1), tokens[:, 1:].flatten())

    return loss


Passes = Iterator[tuple[Tensor, int]]
"""The logits [batch, places, ids] of each drafted token, and the position of the first place.

Place i says what the target says at position first + i.
"""


@dataclass(frozen=True)
class Learner:
    """A drafter's weights, and the passes over a text in which they learn.

    Attributes:
        weights: the weights.
        passes: a function of (the weights or a copy of them, tokens [batch, length], hidden states
            of the target [batch, length, features]).
        kept: a function of (the target's logits, the drafter's) that computes the chance that a
            draft is kept, at temperature 1.
        reads: the target's layers whose hidden states it reads; without any, it is given none.
        ids: the target's ids that it drafts, [ids]; None = the first of all.
        refusal: the reason why the weights cannot be trained here, if there is one.
    """

    weights: nn.Module
    passes: Callable[[Any, Tensor, Any], Passes]
    kept: Callable[[Tensor, Tensor], Tensor] = acceptance
    reads: Sequence[int] = ()
    ids: Tensor | None = None
    refusal: str | None = None

    def compared(
        self, weights: nn.Module, tokens: Tensor, p_logits: Tensor, states: Tensor | None
    ) -> Iterator[tuple[Tensor, Tensor, slice]]:
        """Yields the logits of each drafted token, the target's, and the positions of both.

        Args:
            weights: the weights, or a copy of them.
            tokens: [batch, length].
            p_logits: the target's logits, [batch, length, vocabulary].
            states: the target's hidden states, [batch, length, features].
        """
        right = p_logits if self.ids is None else p_logits.index_select(-1, self.ids)
        for q, first in self.passes(weights, tokens, states):
            places = slice(first, first + q.shape[1])
            yield q, right[:, places, : q.shape[-1]], places


def model_learner(hf: nn.Module, width: int, refusal: str | None) -> Learner:
    """Returns a draft model with its pass.

    Args:
        hf: the model.
        width: the number of the target's first ids, which it drafts.
        refusal: see `Learner`.
    """

    def passes(model: Any, tokens: Tensor, states: None) -> Passes:
        yield model(input_ids=tokens, use_cache=False).logits[..., :width], 0

    return Learner(hf, passes, refusal=refusal)


class DraftedAttention:
    """The attention of each pass of a layer over a window, as a draft of as many tokens would see.

    Position i of pass n sees the keys of pass 0 up to i - n, and of pass m the key of position i -
    n + m.

    Args:
        first: the first position that has a state: those before are seen by themselves alone.
    """

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None
    ) -> Tensor:
        """Attends over the drafted passes.

        It takes [batch, heads, positions, dim] and returns [batch, positions, heads, dim].
        """
        groups, number = query.shape[1] // key.shape[1], len(self._keys)
        self._keys.append(key.repeat_interleave(groups, 1))
        self._values.append(value.repeat_interleave(groups, 1))
        positions = torch.arange(query.shape[2], device=query.device)
        hidden = positions[None] > positions[:, None] - number
        hidden |= (positions < self._first) & (positions != positions[:, None])
        scores = [(query @ self._keys[0].mT).masked_fill(hidden, -torch.inf)]
        later = range(1, number + 1)
        scores += [(query * _back(self._keys[m], number - m)).sum(-1, keepdim=True) for m in later]
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        weights = (torch.cat(scores, dim=-1) * scale).softmax(-1)
        first = weights[..., : len(positions)] @ self._values[0]
        drafted = [
            weights[..., len(positions) + m - 1, None] * _back(self._values[m], number - m)
            for m in later
        ]
        return torch.stack([first, *drafted]).sum(0).transpose(1, 2)


def _back(states: Tensor, positions: int) -> Tensor:
    """Shifts states [batch, heads, positions, dim] to the right; zeros stand at the start."""
    return states if not positions else F.pad(states, (0, 0, positions, 0))[:, :, :-positions]


def drafted_passes(heads: Any, tokens: Tensor, states: Tensor, count: int) -> Passes:
    """Yields the logits of each drafted token of windows, over the ids that the heads draft.

    Args:
        heads: `shoal.models.eagle3_layer.Eagle3Heads`, or others with their methods.
        tokens: [batch, length].
        states: the hidden states of the target that the heads read, [batch, length, features].
        count: the number of passes.
    """
    states = heads.read(states[:, :-1])
    positions = torch.arange(tokens.shape[1] - 1, device=tokens.device)[None]
    attention = [DraftedAttention(first) for first in range(heads.depth)]
    for number in range(min(count, tokens.shape[1] - 1)):
        layer = min(number, heads.depth - 1)
        out = heads(tokens[:, 1:], states, positions, attention[layer], layer)
        yield heads.drafted(out)[:, number:], number + 1
        states = F.pad(out, (0, 0, 1, 0))[:, :-1]
