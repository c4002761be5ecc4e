"""Numbers and lists of other libraries as Python's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

OWN = (type(None), bool, int, float, str, bytes)


def plain(value: Any) -> Any:
    """NumPy scalars and arrays, tensors and whatever else has a `tolist` as numbers or nested lists; iterators (generators) as
    lists; inside lists, tuples and mappings too. Anything else as it is."""
    if type(value) in OWN:
        return value
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Iterator):
        value = list(value)
    if isinstance(value, (list, tuple)):
        items = [plain(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value
