"""Draft length controllers: how many tokens to draft next. They see counts and costs, never
tensors.

There are two protocols. A `Lookahead` (two methods) has one draft length for the whole batch. A
`Controller` has one for each row, and is what the engine asks: `as_controller` makes one of a
`Lookahead`. `by_name` finds the controller that a user names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from shoal.errors import RequestError
from shoal.lookahead.auto import Auto
from shoal.lookahead.bass import Bass
from shoal.lookahead.choosing import AutoChoice, Choices
from shoal.lookahead.costs import PairCosts
from shoal.lookahead.fixed import Fixed
from shoal.lookahead.heuristic import Heuristic
from shoal.lookahead.uniform import Lookahead, Uniform
from shoal.types.requests import Row
from shoal.types.rounds import Outcome

__all__ = [
    "Auto",
    "AutoChoice",
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
    """Decides, before each round, how many tokens to draft for each row. Give an object of this
    protocol as `lookahead`.

    The engine calls, in every round: `lengths` once; `shorten`, if there is one, once per draft
    position; `learn` once, with the rows in the order that `lengths` got them. Rows join and leave
    between rounds: what is kept of a row is kept under `row.serial`, which no other row of the
    process has. An example is `Stepwise` in tests/lookahead/test_lookahead.py.

    Attributes:
        limit: the longest draft that it ever asks for, 0 = plain decoding. The caches are sized for
            it. Must not change.
        adaptive: whether a decision may depend on drafts that were rejected, or on times: on the
            confidence that `shorten` got, or on `Outcome.seconds`. False = on `Outcome.accepted`
            and own decisions alone. With True, rejection sampling draws new uniforms in every round
            instead of one set per position: the tokens would otherwise not follow the target's
            distribution.
        may_speculate: asked once, when an engine is made. False = its run does without the drafter
            altogether: not even the prompts are fed to it.
        shorten: None, or (position, confidence) -> lengths, called for each draft position from 0
            on, with the drafter's highest probability there, 0..1, for each row. Returns how long
            each row's draft may still become, without knowing the token: `position` or less ends it
            before this token. A draft never becomes longer than `lengths` said.
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
        """Longest draft of each row in the coming round, 0..min(limit, row.max_draft_length).

        Args:
            rows: those that run; the order and the rows may differ from round to round.
            waiting: how many rows have no slot yet.
        """
        ...

    def learn(self, outcome: Outcome) -> None:
        """What the round drafted, accepted and cost. Not called without a round."""
        ...


def by_name(
    name: object, pair_costs: PairCosts | None = None, choices: Choices | None = None
) -> Lookahead | Controller:
    """ "auto" -> Auto(pair_costs); 4, "4", "fixed:4" -> Fixed(4); 0, "off" -> Fixed(0); "bass" ->
    Bass(); "heuristic" -> Heuristic(); a controller object -> itself.

    Args:
        pair_costs: what `Auto` knows of the pair at first, and adds to; None = nothing.
        choices: the drafter; "auto" chooses among the ways that it names. None = there is one way.

    Raises:
        RequestError: for anything else.
    """
    if isinstance(name, int) and not isinstance(name, bool):
        return Fixed(name)
    if isinstance(name, str):
        if name == "auto" and choices is not None and choices.choices:
            return AutoChoice(pair_costs or PairCosts(packed=True), choices)
        if name in _NAMES:
            return _NAMES[name](pair_costs)
        digits = name.removeprefix("fixed:")
        if digits.isdecimal():
            return Fixed(int(digits))
    elif isinstance(name, (Lookahead, Controller)):
        return name
    raise RequestError(
        f"lookahead must be 'auto', a draft length, 'fixed:K', 'bass', 'heuristic' or 'off', "
        f"got {name!r}"
    )


_NAMES: dict[str, Callable[[PairCosts | None], Lookahead | Controller]] = {
    "auto": lambda pair_costs: Auto(pair_costs or PairCosts(packed=True)),
    "bass": lambda _: Bass(),
    "heuristic": lambda _: Heuristic(),
    "off": lambda _: Fixed(0),
}


def as_controller(lookahead: Lookahead | Controller) -> Controller:
    """A `Lookahead` as a `Controller`; a controller as it is."""
    return Uniform(lookahead) if isinstance(lookahead, Lookahead) else lookahead
