"""Draft lengths by controllers that see counts and costs, never tensors; their two protocols.

A `Lookahead` (two methods) has one draft length for the whole batch: Fixed, Bass, Heuristic and
simple own objects. A `Controller` has one for each row, and the engine calls it.

The modules import neither torch nor the engine nor a drafter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from shoal.types.requests import Row

if TYPE_CHECKING:
    from shoal.types.rounds import Outcome


@runtime_checkable
class Lookahead(Protocol):
    """A controller that decides one draft length for the whole batch.

    A row near its end gets a shorter draft (`Row.max_draft_length`).
    """

    limit: int
    """The longest draft that the controller ever asks for; caches are sized for it."""

    def next_length(self) -> int:
        """Returns the draft length of the coming round; 0 = plain decoding."""

    def update(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Learns from a round.

        Args:
            drafted: the number of tokens that each row was asked to draft.
            accepted: the number of tokens accepted of them, without replacement and bonus.
        """


class Controller(ABC):
    """A controller that decides, before each round, how many tokens to draft for each row.

    Give an object of a class that derives from this one as `lookahead`: only `limit`, `lengths` and
    `learn` have no default. In every round the engine calls `lengths` or `repeat` once; `shorten`,
    if there is one, once per draft position; and `learn` once, with the rows in the order in which
    `lengths` got them. Rows join and leave between rounds: keep data of a row under `row.serial`,
    which no other row of the process has. An example is `Stepwise` in
    tests/lookahead/test_lookahead.py.

    Attributes:
        limit: the longest draft that the controller ever asks for; 0 = plain decoding. The caches
            are sized for it. Must not change.
        adaptive: True if a decision may depend on rejected drafts or on times, which are the
            confidence that `shorten` got and `Outcome.seconds`. False if it depends on
            `Outcome.accepted` and own decisions alone. If True, rejection sampling draws new
            uniforms in every round instead of one set per position: otherwise the tokens would not
            follow the target's distribution.
    """

    limit: int
    adaptive: bool = False

    @property
    def may_speculate(self) -> bool:
        """False if the run does without the drafter altogether: it is not even fed the prompts.

        It is read once, when an engine is made.
        """
        return True

    @property
    def shorten(self) -> Callable[[int, Sequence[float]], Sequence[int]] | None:
        """None, or a function (position, confidence) -> lengths that ends drafts early.

        It is called for each draft position from 0 on, with the drafter's highest probability
        there, 0..1, for each row. It returns the length that each row's draft may still reach,
        without knowing the token: `position` or less ends the draft before this token. A draft
        never becomes longer than `lengths` said.
        """
        return None

    @property
    def steady(self) -> bool:
        """True if the next round has the lengths of this round, for any outcome of this round.

        Rows may end, and limits of rows may make lengths shorter. The engine may then launch the
        next round before this round is over, and asks `repeat` for the lengths.
        """
        return False

    @property
    def plain_rounds(self) -> int:
        """The number of rounds, from the one on whose lengths were all 0, that may be plain.

        It holds as long as the rows are the same. The engine may compute these rounds in one go;
        `learn` then gets one outcome of several rounds (`Outcome.rounds`).
        """
        return 1

    @abstractmethod
    def lengths(self, rows: Sequence[Row], waiting: int) -> list[int]:
        """Returns the longest draft of each row, 0..min(limit, row.max_draft_length).

        Args:
            rows: the rows of the coming round; the order and the rows may differ from round to
                round.
            waiting: the number of rows that have no slot yet.
        """

    def repeat(self, rows: Sequence[Row]) -> list[int]:
        """Returns the lengths of a round that was launched ahead, as `steady` allowed.

        Args:
            rows: the rows that are left of the last round.
        """
        return self.lengths(rows, 0)

    @abstractmethod
    def learn(self, outcome: Outcome) -> None:
        """Learns the drafts, the acceptance and the costs of a round; called only after a round."""
