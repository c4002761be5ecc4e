"""Draft length controllers: how many tokens to propose next. They see counts, never tensors.

A controller is any object with two methods, and `by_name` turns what a user writes into one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from shoal.errors import RequestError
from shoal.lookahead.bass import Bass
from shoal.lookahead.fixed import Fixed

__all__ = ["Bass", "Fixed", "Lookahead", "by_name"]


@runtime_checkable
class Lookahead(Protocol):
    """Decides the draft length of the whole batch; a row never gets more than it may still commit, minus one."""

    limit: int
    """The longest draft it will ever ask for; caches are sized by it."""

    def next_length(self) -> int:
        """Draft length of the coming round; 0 = plain decoding."""
        ...

    def update(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Hears, after each round, what each row drafted and accepted (replacement and bonus not counted)."""
        ...


def by_name(name: object) -> Lookahead:
    """4, "4", "fixed:4" -> Fixed(4); 0, "off" -> Fixed(0); "bass" -> Bass(); a controller object -> itself.

    Raises:
        RequestError: for anything else.
    """
    if isinstance(name, int) and not isinstance(name, bool):
        return Fixed(name)
    if isinstance(name, str):
        if name == "off":
            return Fixed(0)
        if name == "bass":
            return Bass()
        digits = name.removeprefix("fixed:")
        if digits.isdecimal():
            return Fixed(int(digits))
    elif isinstance(name, Lookahead):
        return name
    raise RequestError(f"lookahead must be a draft length, 'fixed:K', 'bass' or 'off', got {name!r}")
