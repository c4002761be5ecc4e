"""The choice among several drafters, or several ways of one, by measured costs.

Each choice (one of the drafters, all of them together, or chains and trees of one model) has an
`Auto` of its own, which knows the costs and the acceptance of its drafts, and plans its draft
lengths. The choices are compared by the rates that they promise for the running rows; plain
decoding is compared as well. All choices share the costs of the target's passes and the account
that bounds the loss by drafting, so several choices lose no more than one alone.

A choice is kept for some rounds. From time to time another one gets a few rounds, so that its
estimates do not grow old. If no choice promises a gain, they take turns with the trials that the
account allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from shoal.lookahead import Controller
from shoal.lookahead.acceptance import LIMIT
from shoal.lookahead.auto import FIRST_ROUNDS, TOGETHER, Auto
from shoal.lookahead.costs import PairCosts
from shoal.lookahead.plan import trial_is_due
from shoal.types.requests import Row

if TYPE_CHECKING:
    from shoal.types.rounds import Outcome

HELD = 8
"""The number of rounds for which a choice is kept while its plan pays."""
AGAIN = 64
"""The number of rounds until another choice is tried though the present one pays.

It doubles each time, up to `MOST`.
"""
MOST = 1024
TRIED = 2
"""The number of rounds that such a trial has."""
BETTER = 1.02
"""The factor by which another choice's promise must be greater."""
KNOWN = len(FIRST_ROUNDS) - 1
"""The number of first rounds that drafters after the first one skip.

One trial tells the costs and the acceptance of drafts.
"""


class Choices(Protocol):
    """A drafter, or a sum, with several ways of drafting.

    Attributes:
        choices: the names of the ways, the cheapest first.
        choices_join: see `shoal.drafting.protocol.Drafter`.
    """

    @property
    def choices(self) -> Sequence[str]: ...

    @property
    def choices_join(self) -> bool: ...

    def use(self, choice: int) -> None:
        """Sets the choice that drafts in the next rounds."""


class AutoChoice(Controller):
    """The controller that `lookahead="auto"` names if there are several ways of drafting.

    Args:
        costs: the costs and acceptance rates of the pair.
        choices: the ways of drafting.

    Attributes:
        rounds: the number of rounds that each choice had, by its name.
    """

    limit = LIMIT
    adaptive = True

    def __init__(self, costs: PairCosts, choices: Choices) -> None:
        self._choices, self._account = choices, costs
        names = list(choices.choices)
        self.rounds = dict.fromkeys(names, 0)
        last = len(names) - 1
        self._autos = [
            Auto(
                costs.of(
                    name,
                    mixed=choices.choices_join and place == last,
                    one_memory=not choices.choices_join,
                )
            )
            for place, name in enumerate(names)
        ]
        if not choices.choices_join:
            for auto in self._autos[1:]:
                auto.unfed = self._autos[0].unfed
        for auto in self._autos[1:]:  # they learn nothing from plain rounds
            auto.costs.rounds = max(auto.costs.rounds, KNOWN)
        self._current = self._best = 0
        self._rounds_left = 0  # rounds that the choice still holds
        self._pays = False  # True if some choice promised a gain in the last comparison
        self._wait, self._until_trial = AGAIN, AGAIN
        self._rows: set[int] = set()  # serial numbers of the last round

    @property
    def may_speculate(self) -> bool:
        """True if some choice may speculate."""
        return any(auto.may_speculate for auto in self._autos)

    def lengths(self, rows: Sequence[Row], waiting: int) -> list[int]:
        """Returns the longest draft of each row, by the choice of this round."""
        serials = {row.serial for row in rows}
        if serials.isdisjoint(self._rows):
            self._rounds_left = 0
        self._rows = serials
        choice = self._next(rows)
        if choice != self._current and self._choices.choices_join:
            self._autos[self._current].pause(rows)
        self._current = choice
        self._choices.use(choice)
        self.rounds[self._choices.choices[choice]] += 1
        return self._autos[choice].lengths(rows, waiting)

    def repeat(self, rows: Sequence[Row]) -> list[int]:
        """Returns the lengths of the last round for its rows that have not ended."""
        self._rows = {row.serial for row in rows}
        self._until_trial -= 1
        self._rounds_left -= 1
        self.rounds[self._choices.choices[self._current]] += 1
        return self._autos[self._current].repeat(rows)

    @property
    def steady(self) -> bool:
        """True if the next round has the lengths of this one, see `Auto.steady`."""
        return self._autos[self._current].steady

    @property
    def plain_rounds(self) -> int:
        """The number of plain rounds that may come in one go, see `Auto.plain_rounds`."""
        return min(max(self._rounds_left, TOGETHER), self._autos[self._current].plain_rounds)

    def _next(self, rows: Sequence[Row]) -> int:
        """Returns the choice of the coming round."""
        self._until_trial -= 1
        self._rounds_left -= 1
        if self._rounds_left > 0:
            return self._current
        learning = next(
            (choice for choice in range(len(self._autos)) if self._is_to_learn(choice, len(rows))),
            None,
        )
        if learning is not None:
            return learning
        choices = [
            choice
            for choice, auto in enumerate(self._autos)
            if auto.costs.rounds >= len(FIRST_ROUNDS)
        ]
        promises = {choice: self._autos[choice].promise(rows) for choice in choices}
        best = max(promises, key=lambda choice: promises[choice])
        self._pays = promises[best] > 0
        if not self._pays:
            self._best = next((choice for choice in choices if choice > self._best), choices[0])
            self._rounds_left = HELD
            return self._best
        if promises[best] <= BETTER * promises.get(self._best, 0.0):
            best = self._best
        self._best, self._rounds_left = best, HELD
        if self._until_trial <= 0:
            self._wait = min(2 * self._wait, MOST)
            self._until_trial, self._rounds_left = self._wait, TRIED
            others = [choice for choice in choices if choice != best]
            return min(
                others, key=lambda choice: self.rounds[self._choices.choices[choice]], default=best
            )
        return best

    def _is_to_learn(self, choice: int, rows: int) -> bool:
        """Returns True if a choice is hardly known and the account allows a trial.

        All drafters together are tried once one of them pays.
        """
        costs = self._autos[choice].costs
        if costs.rounds >= len(FIRST_ROUNDS) or (choice and not self._account.credit.allows_plans):
            return False
        if self._choices.choices_join and choice == len(self._autos) - 1:
            return self._pays
        unknown = not costs.start.known and self._choices.choices_join
        return not choice or unknown or trial_is_due(rows, 0, costs)

    @property
    def shorten(self) -> Callable[[int, Sequence[float]], list[int]] | None:
        """The rule that ends drafts by confidence, see `shoal.lookahead.auto.Auto.shorten`."""
        return self._autos[self._current].shorten

    def learn(self, outcome: Outcome) -> None:
        """Learns the costs and the outcome of a round, for its choice.

        The account pays for the first rounds of all choices but the first.
        """
        auto, account = self._autos[self._current], self._account
        self.rounds[self._choices.choices[self._current]] += outcome.rounds - 1
        self._rounds_left -= outcome.rounds - 1
        self._until_trial -= outcome.rounds - 1
        first = auto.costs.rounds < len(FIRST_ROUNDS) and outcome.steps > 0
        pays = self._current > 0 and first and not outcome.riding
        auto.learn(outcome)
        if pays:
            rows = len(outcome.drafted)
            plain = account.seconds_plain(rows)
            total = outcome.seconds + outcome.seconds_preparing
            account.credit.drafted(plain, total, (1 + sum(outcome.accepted) / rows) * plain - total)
