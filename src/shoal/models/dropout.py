"""What makes a model's logits random in training mode, and evaluation mode for the length of a
call."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from shoal.errors import RequestError

RANDOM = re.compile(r"drop|jitter", re.IGNORECASE)
"""In the name of a setting that is a probability of dropout (`attention_dropout`, `resid_pdrop`,
`layerdrop`, ...) or an amount of noise (`router_jitter_noise`)."""
UNUSED = re.compile(r"classif|summary", re.IGNORECASE)
"""In the name of a dropout that belongs to a head for classification, which a language model does
not have."""


def random_settings(hf: nn.Module) -> list[str]:
    """The settings of a model that make it random in training mode, as "name=value"; empty if there
    is none."""
    found = {
        f"{name}.p={m.p:g}": None
        for name, m in hf.named_modules()
        if isinstance(m, _DropoutNd) and m.p > 0
    }
    for owner in (getattr(hf, "config", None), *hf.modules()):
        found |= {f"{name}={value:g}": None for name, value in _numbers(owner) if value > 0}
    return list(found)


def _numbers(owner: Any) -> Iterator[tuple[str, float]]:
    """The attributes of a module or a config that are numbers and named like a dropout."""
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
    """These (model, name) pairs are in evaluation mode meanwhile; afterwards each module is in the
    mode it was in.

    Without dropout both modes compute the same logits, but for gradient checkpointing: in training
    mode it takes the cache away from the layers.

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
