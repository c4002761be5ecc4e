"""The parts of a generated function: templates, conditions and operations.

Templates are combined from conditions and operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Constants = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Template:
    """A format string for each part of a function, and the constants they may name.

    Every string may use ``{a0}``, ``{a1}`` (argument names) and the keys of `constants`.
    """

    key: str
    name: str
    docs: tuple[str, ...]
    body: str
    kinds: tuple[str, ...]
    constants: Constants
    params: tuple[str, ...] = ()


@dataclass(frozen=True)
class Condition:
    """A predicate on ``{x}``.

    It has its noun in docstrings, its part of function names, and its expression.
    """

    key: str
    noun: str
    suffix: str
    expr: str
    constants: Constants
    param: str = ""


@dataclass(frozen=True)
class Operation:
    """A function body over the elements for which a condition ``{p}`` holds, and its docstrings."""

    key: str
    docs: tuple[str, ...]
    body: str


@dataclass(frozen=True)
class Expression:
    """An expression in ``{x}``, its phrase in docstrings and its part of function names."""

    key: str
    phrase: str
    suffix: str
    expr: str
    constants: Constants


def integers(low: int, high: int) -> tuple[int, ...]:
    return tuple(range(low, high + 1))


Single = tuple[str, str, tuple[str, ...], Constants, str]
"""A template that is no combination: name, docstring, kinds of arguments, constants, body."""

NONE: Constants = {}
SMALL: Constants = {"k": tuple(range(2, 10))}
WIDE: Constants = {"k": tuple(range(2, 41))}
MARKS: Constants = {"k": ("-", "_", "+", "/", "*", ".", ":", "#")}
