"""What is made for a model once, kept in the model: it is freed when the model is.

A `WeakKeyDictionary` does not do this. It frees a value with its key, but here values lead to their
keys (a runner holds its model), and what the dictionary holds keeps such a key alive for ever. What
hangs on the model is a cycle, which Python collects.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

from torch import nn

Value = TypeVar("Value")


class _Belongings(dict[str, Any]):
    """Of one model: copies and pickles of the model begin without them."""

    def __init__(self, owner: nn.Module | None = None) -> None:
        self.owner = (lambda: None) if owner is None else weakref.ref(owner)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Belongings:
        return _Belongings()

    def __reduce__(self) -> tuple[type[_Belongings], tuple[()]]:
        return _Belongings, ()


class Belongings(Generic[Value]):
    """What belongs to models, by model and key.

    Args:
        name: under which it is kept, unlike those of others.
    """

    ATTRIBUTE = "_shoal_belongings"

    def __init__(self, name: str) -> None:
        self._name = name

    def of(self, model: nn.Module) -> dict[Hashable, Value]:
        """What is kept of a model. A model is no key that frees itself: give `weakref.ref(model)`,
        or keep it with that model."""
        found = vars(model).get(self.ATTRIBUTE)
        if not isinstance(found, _Belongings) or found.owner() is not model:
            found = vars(model)[self.ATTRIBUTE] = _Belongings(model)
        known: dict[Hashable, Value] = found.setdefault(self._name, {})
        return known
