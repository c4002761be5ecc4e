"""A record of rounds with drafts, from which the acceptance is learned later."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import TypeVar

from shoal.lookahead.acceptance import Tried

Kind = TypeVar("Kind")


class Record:
    """The rounds that drafted for some rows, and went on as rows ended.

    Attributes:
        rows: the serial numbers of the rows at the beginning.
        tried: the outcomes of each round, for all of these rows.
        seconds: the seconds of the rounds in which none of the rows had ended.
        tokens: the tokens of these rounds, weighted as planned.
        full: the number of these rounds.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = list(rows)
        self.tried: list[Tried] = []
        self.seconds = self.tokens = 0.0
        self.full = 0
        # The indices in `rows` of the rows that are left; None = all.
        self._places: list[int] | None = None

    def narrow(self, rows: Sequence[int]) -> None:
        """Keeps only these of the rows, in this order."""
        places = {row: place for place, row in enumerate(self.rows)}
        self._places = [places[row] for row in rows]

    def add(self, tried: Tried, seconds: float, tokens: float) -> None:
        """Adds a round of the rows that are left."""
        if self._places is None:
            self.seconds, self.tokens, self.full = (
                self.seconds + seconds,
                self.tokens + tokens,
                self.full + 1,
            )
        else:
            drafted, accepted, confidence = tried
            tried = Tried(
                self._spread(drafted, 0),
                self._spread(accepted, 0),
                [self._spread(sure, nan) for sure in confidence],
            )
        self.tried.append(tried)

    def _spread(self, values: Sequence[Kind], absent: Kind) -> list[Kind]:
        """Returns a value for each row at the beginning; `absent` for rows that have ended."""
        assert self._places is not None
        spread = [absent] * len(self.rows)
        for place, value in zip(self._places, values, strict=True):
            spread[place] = value
        return spread
