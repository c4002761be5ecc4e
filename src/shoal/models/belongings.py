"""A store for objects that are made once for a model. It lies in the model and is freed with it.

A `WeakKeyDictionary` does not do this. It frees a value with its key, but here values lead to their
keys (a runner holds its model), and a value that the dictionary holds keeps such a key alive for
ever. A value that hangs on the model is part of a cycle, which Python collects.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

from torch import nn

Value = TypeVar("Value")


class _Belongings(dict[str, Any]):
    """The stored objects of one model. Copies and pickles of the model begin without them."""

    def __init__(self, owner: nn.Module | None = None) -> None:
        self.owner = (lambda: None) if owner is None else weakref.ref(owner)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Belongings:
        return _Belongings()

    def __reduce__(self) -> tuple[type[_Belongings], tuple[()]]:
        return _Belongings, ()


class Belongings(Generic[Value]):
    """The objects that are stored in models, by model and key.

    Args:
        name: the name of this store, different from the names of all other stores.
    """

    ATTRIBUTE = "_shoal_belongings"

    def __init__(self, name: str) -> None:
        self._name = name

    def of(self, model: nn.Module) -> dict[Hashable, Value]:
        """Returns the objects of a model, by key.

        Do not use a model as a key: it would not be freed. Use `weakref.ref(model)`, or store the
        object in that model.
        """
        found = vars(model).get(self.ATTRIBUTE)
        if not isinstance(found, _Belongings) or found.owner() is not model:
            found = vars(model)[self.ATTRIBUTE] = _Belongings(model)
        known: dict[Hashable, Value] = found.setdefault(self._name, {})
        return known
