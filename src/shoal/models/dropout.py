"""The settings that make a model random in training mode, and a context of evaluation mode."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from shoal.errors import RequestError

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
