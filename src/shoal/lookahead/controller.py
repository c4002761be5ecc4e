"""Draft length controllers: how many tokens to propose next. They see counts and prices, never tensors.

`by_name` turns what a user writes into one. A simple controller (`Lookahead`: two methods) knows one length for the whole batch;
`Auto` gives every row its own. `as_controller` makes the engine's kind of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from shoal.errors import RequestError
from shoal.lookahead.auto import Auto
from shoal.lookahead.bass import Bass
from shoal.lookahead.costs import PairCosts
from shoal.lookahead.fixed import Fixed
from shoal.lookahead.heuristic import Heuristic
from shoal.lookahead.uniform import Lookahead, Uniform
from shoal.types.requests import Row
from shoal.types.rounds import Outcome

__all__ = [
    "Auto",
    "Bass",
    "Controller",
    "Fixed",
    "Heuristic",
    "PairCosts",
    "Lookahead",
    "Uniform",
    "as_controller",
    "by_name",
]


@runtime_checkable
class Controller(Protocol):
    """What the engine asks.

    Attributes:
        limit: the longest draft it will ever ask for; caches are sized by it.
        adaptive: its decisions depend on drafts that were later thrown away (their confidences, the time they took). Noise
            must then be new in every round, see `shoal.types.requests.Row.noise`.
        shorten: None, or asked before each draft position is drawn: how long each row's draft may still become, given the
            position and the drafter's highest probability there, one per row.
        may_speculate: False if a run that starts now may do without the drafter altogether, prompts included.
    """

    @property
    def limit(self) -> int: ...

    @property
    def adaptive(self) -> bool: ...

    @property
    def may_speculate(self) -> bool: ...

    @property
    def shorten(self) -> Callable[[int, Sequence[float]], Sequence[int]] | None: ...

    def lengths(self, rows: Sequence[Row], waiting: int) -> list[int]:
        """Longest draft of each row in the coming round, 0..row.max_draft_length; `waiting`: how many rows have no slot yet."""
        ...

    def learn(self, outcome: Outcome) -> None:
        """Hears what became of it."""
        ...


def by_name(name: object, pair_costs: PairCosts | None = None) -> Lookahead | Controller:
    """ "auto" -> Auto(pair_costs); 4, "4", "fixed:4" -> Fixed(4); 0, "off" -> Fixed(0); "bass" -> Bass(); "heuristic" ->
    Heuristic(); a controller object -> itself.

    Args:
        pair_costs: what `Auto` starts from and adds to; without it, from nothing.

    Raises:
        RequestError: for anything else.
    """
    if isinstance(name, int) and not isinstance(name, bool):
        return Fixed(name)
    if isinstance(name, str):
        if name in _NAMES:
            return _NAMES[name](pair_costs)
        digits = name.removeprefix("fixed:")
        if digits.isdecimal():
            return Fixed(int(digits))
    elif isinstance(name, (Lookahead, Controller)):
        return name
    raise RequestError(f"lookahead must be 'auto', a draft length, 'fixed:K', 'bass', 'heuristic' or 'off', got {name!r}")


_NAMES: dict[str, Callable[[PairCosts | None], Lookahead | Controller]] = {
    "auto": lambda pair_costs: Auto(pair_costs or PairCosts(packed=True)),
    "bass": lambda _: Bass(),
    "heuristic": lambda _: Heuristic(),
    "off": lambda _: Fixed(0),
}


def as_controller(lookahead: Lookahead | Controller) -> Controller:
    """A simple controller as the engine asks it."""
    return Uniform(lookahead) if isinstance(lookahead, Lookahead) else lookahead
