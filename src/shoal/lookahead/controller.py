"""Draft length controllers, which see counts and costs, and never tensors.

There are two protocols. A `Lookahead` (two methods) has one draft length for the whole batch. A
`Controller` has one for each row, and is the protocol that the engine calls: `as_controller` makes
one of a `Lookahead`. `by_name` finds the controller that a user names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from shoal.errors import RequestError
from shoal.lookahead.auto import Auto
from shoal.lookahead.bass import Bass, Fixed, Heuristic, Lookahead, Uniform
from shoal.lookahead.choosing import AutoChoice, Choices
from shoal.lookahead.costs import PairCosts
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
    """A controller that decides, before each round, how many tokens to draft for each row.

    Give an object of this protocol as `lookahead`. In every round the engine calls `lengths` once;
    `shorten`, if there is one, once per draft position; and `learn` once, with the rows in the
    order in which `lengths` got them. Rows join and leave between rounds: keep data of a row under
    `row.serial`, which no other row of the process has. An example is `Stepwise` in
    tests/lookahead/test_lookahead.py.

    Attributes:
        limit: the longest draft that the controller ever asks for; 0 = plain decoding. The caches
            are sized for it. Must not change.
        adaptive: True if a decision may depend on rejected drafts or on times, which are the
            confidence that `shorten` got and `Outcome.seconds`. False if it depends on
            `Outcome.accepted` and own decisions alone. If True, rejection sampling draws new
            uniforms in every round instead of one set per position: otherwise the tokens would not
            follow the target's distribution.
        may_speculate: read once, when an engine is made. False = the run does without the drafter
            altogether: not even the prompts are fed to it.
        shorten: None, or (position, confidence) -> lengths. It is called for each draft position
            from 0 on, with the drafter's highest probability there, 0..1, for each row. It returns
            the length that each row's draft may still reach, without knowing the token: `position`
            or less ends the draft before this token. A draft never becomes longer than `lengths`
            said.

    A controller may also have `steady`: True if lengths change with the limits of the rows alone,
    so that those of the next round are known before this one is over. And it may have
    `plain_rounds`: if the last lengths were all 0, the number of rounds from this one on that may
    be plain as well, as long as the rows are the same. The engine may then compute them in one go,
    and `learn` gets one outcome of several rounds (`Outcome.rounds`).
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
        """Returns the longest draft of each row, 0..min(limit, row.max_draft_length).

        Args:
            rows: the rows of the coming round; the order and the rows may differ from round to
                round.
            waiting: the number of rows that have no slot yet.
        """
        ...

    def learn(self, outcome: Outcome) -> None:
        """Learns the drafts, the acceptance and the costs of a round; called only after a round."""
        ...


def by_name(
    name: object, pair_costs: PairCosts | None = None, choices: Choices | None = None
) -> Lookahead | Controller:
    """Returns the controller that a user names.

    "auto" -> Auto(pair_costs); 4, "4", "fixed:4" -> Fixed(4); 0, "off" -> Fixed(0); "bass" ->
    Bass(); "heuristic" -> Heuristic(); a controller object -> itself.

    Args:
        name: the name, the draft length or the object.
        pair_costs: the costs that `Auto` begins with, and adds to; None = no costs yet.
        choices: the drafter; "auto" chooses among the ways that it names. None = there is one way.

    Raises:
        RequestError: the name is none of these.
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
    """Returns a `Lookahead` as a `Controller`, and a controller as it is."""
    return Uniform(lookahead) if isinstance(lookahead, Lookahead) else lookahead
