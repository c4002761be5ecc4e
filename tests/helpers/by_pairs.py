"""Few cases instead of all combinations of several parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations, product
from typing import Any

import pytest


def covering(sizes: list[int]) -> list[tuple[int, ...]]:
    """Choices of one value for each parameter, in which every two values of two parameters meet (greedy)."""
    columns = list(combinations(range(len(sizes)), 2))
    rest = {(i, a, j, b) for i, j in columns for a in range(sizes[i]) for b in range(sizes[j])}
    cases, chosen = list(product(*map(range, sizes))), []
    while rest:
        case = max(cases, key=lambda case: sum((i, case[i], j, case[j]) in rest for i, j in columns))
        rest -= {(i, case[i], j, case[j]) for i, j in columns}
        chosen.append(case)
    return sorted(chosen)


def by_pairs(parameters: Mapping[str, Iterable[Any]]) -> pytest.MarkDecorator:
    """Parametrises a test by names and their values; "a, b" names two, whose values are pairs."""
    values = [list(each) for each in parameters.values()]
    names = [name.strip() for key in parameters for name in key.split(",")]
    cases, labels = [], []
    for case in covering([len(each) for each in values]):
        parts = [each[choice] for each, choice in zip(values, case, strict=True)]
        cases.append([one for key, part in zip(parameters, parts, strict=True) for one in (part if "," in key else [part])])
        labels.append("-".join(_label(part) for part in parts))
    return pytest.mark.parametrize(names, cases, ids=labels)


def _label(value: Any) -> str:
    if isinstance(value, (str, int, float, tuple, list, dict)) or value is None:
        return str(value)
    return str(getattr(value, "__name__", type(value).__name__))
