"""The passes over a text in which layers that draft from states learn by those they will get.

Li et al. 2025 (arXiv 2503.01840), section 3.2: "training-time test". A window is passed n times. In
the first pass all states are the target's. In each further pass a token's state is the layer's
output for the token before it in the previous pass, and attention sees the target's states up to
the place where a draft would have begun, then those of the draft. EAGLE-3 heads learn so, and the
multi-token-prediction layers of a checkpoint: where there are several, each pass is the next
layer's, as each drafts one token, and behind the last layer the last one goes on.

Beside them: the settings that make a model random in training mode, and a context of evaluation
mode.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd
from transformers import AttentionInterface

from shoal.errors import RequestError

DRAFTED_NAME = "shoal-drafted"
"""The attention implementation of Transformers' modules in such a pass."""


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


def drafted_passes(
    heads: Any, tokens: Tensor, states: Tensor, count: int
) -> Iterator[tuple[Tensor, int]]:
    """Yields the logits of each drafted token of windows, over the ids that the heads draft.

    Args:
        heads: `shoal.models.eagle3_layer.Eagle3Heads`, or others with their methods.
        tokens: [batch, length].
        states: the hidden states of the target that the heads read, [batch, length, features].
        count: the number of passes.

    Yields:
        The logits [batch, places, ids], and the position of the first place: place i has
        the target's logits at position first + i.
    """
    states = heads.read(states[:, :-1])
    positions = torch.arange(tokens.shape[1] - 1, device=tokens.device)[None]
    attention = [DraftedAttention(first) for first in range(heads.depth)]
    for number in range(min(count, tokens.shape[1] - 1)):
        layer = min(number, heads.depth - 1)
        out = heads(tokens[:, 1:], states, positions, attention[layer], layer)
        yield heads.drafted(out)[:, number:], number + 1
        states = F.pad(out, (0, 0, 1, 0))[:, :-1]


_attention: ContextVar[DraftedAttention] = ContextVar("shoal_drafted_attention")


@contextmanager
def attending_by(attention: DraftedAttention, config: Any) -> Iterator[None]:
    """Switches Transformers' modules with that config to an attention within the context."""
    before, config._attn_implementation = config._attn_implementation, DRAFTED_NAME
    token = _attention.set(attention)
    try:
        yield
    finally:
        _attention.reset(token)
        config._attn_implementation = before


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    return _attention.get()(query, key, value, options.get("scaling")), None


AttentionInterface.register(DRAFTED_NAME, _attend)


RANDOM = re.compile(r"drop|jitter", re.IGNORECASE)
"""The pattern of the names of settings that make a model random.

They are a probability of dropout (`attention_dropout`, `resid_pdrop`, `layerdrop`, ...) or an
amount of noise (`router_jitter_noise`).
"""
UNUSED = re.compile(r"classif|summary", re.IGNORECASE)
"""The pattern of the names of dropouts in a head for classification.

A language model does not have such a head.
"""


def random_settings(hf: nn.Module) -> list[str]:
    """Returns the settings that make a model random in training mode, as "name=value".

    The list is empty if there are none.
    """
    found = {
        f"{name}.p={m.p:g}": None
        for name, m in hf.named_modules()
        if isinstance(m, _DropoutNd) and m.p > 0
    }
    for owner in (getattr(hf, "config", None), *hf.modules()):
        found |= {f"{name}={value:g}": None for name, value in _numbers(owner) if value > 0}
    return list(found)


def _numbers(owner: Any) -> Iterator[tuple[str, float]]:
    """Yields the attributes of a module or a config that are numbers and named like a dropout."""
    values: Mapping[str, Any] = vars(owner) if owner is not None else {}
    for name, value in values.items():
        if (
            RANDOM.search(name)
            and not UNUSED.search(name)
            and isinstance(value, (int, float))
            and not isinstance(value, bool)
        ):
            yield name, value


@contextmanager
def evaluating(*models: tuple[Any, str]) -> Iterator[None]:
    """Puts (model, name) pairs in evaluation mode within the context.

    Afterwards each module is in its former mode. Without dropout both modes compute the same
    logits, except with gradient checkpointing: in training mode it takes the cache away from the
    layers.

    Raises:
        RequestError: a model in training mode has a dropout above 0, so its logits are random.
    """
    training = [module for model, _ in models for module in model.modules() if module.training]
    for model, name in models:
        settings = (
            random_settings(model) if any(module.training for module in model.modules()) else []
        )
        if settings:
            raise RequestError(
                f"{name} is in training mode, where dropout makes its logits random "
                f"({', '.join(settings[:3])}): "
                "call model.eval() first, or set every dropout to 0"
            )
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
