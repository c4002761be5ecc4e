"""Prompt lookup: proposes the tokens that followed an earlier occurrence of a row's last tokens.

After Saxena, "Prompt Lookup Decoding" (2023). The longest match counts, and the last one of
several; a row is matched with itself alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from sys import getsizeof

from shoal.drafting.protocol import Keeps
from shoal.drafting.text import NOTHING, Guess, TextDrafter
from shoal.types.requests import Request, Row

Positions = dict[tuple[int, ...], int]
"""A map from n-grams to the position of the token that followed each last time."""

PLACE_BYTES = 120
"""The most bytes of an entry of a dictionary, which grows to six times its content."""
INTEGER_BYTES = 28


class NGramDrafter(TextDrafter):
    """A drafter that looks up the last tokens of a row in the row itself.

    Args:
        min: the fewest tokens that must match.
        max: the most tokens that are compared.
    """

    name = "ngram"

    def __init__(self, min: int = 2, max: int = 4) -> None:
        super().__init__()
        self._least, self._most = min, max
        tuples = sum(getsizeof((0,) * n) for n in range(min, max + 1))
        self.keeps = Keeps(tuples + (max - min + 1) * PLACE_BYTES + INTEGER_BYTES)
        # By the identity of the request, which is held so that no other takes it; the same for all
        # its rows.
        self._prompts: dict[int, tuple[Request, Positions]] = {}
        # N-grams that end behind the prompt, and how many tokens were read.
        self._rows: dict[Row, tuple[Positions, int]] = {}

    def read(self, rows: Sequence[Row]) -> int:
        read = 0
        for row in rows:
            if id(row.request) not in self._prompts:
                prompt: Positions = {}
                self._prompts[id(row.request)] = row.request, prompt
                self._add(prompt, row.tokens, 1, row.prompt_length)
                read += row.prompt_length
            own, known = self._rows.get(row, ({}, row.prompt_length))
            self._add(own, row.tokens, known, len(row.tokens))
            self._rows[row] = own, len(row.tokens)
            read += len(row.tokens) - known
        return read

    def _add(self, table: Positions, tokens: Sequence[int], start: int, stop: int) -> None:
        """Adds the n-grams that the tokens start..stop-1 follow."""
        for position in range(start, stop):
            for n in range(self._least, min(self._most, position) + 1):
                table[tuple(tokens[position - n : position])] = position

    def guess(self, row: Row, length: int) -> Guess:
        """Guesses by the longest match.

        A match of n tokens has confidence n / (n + 1): a longer match is surer, by an unknown
        amount, and `auto` learns the worth of each confidence.
        """
        tokens, own, (_, prompt) = row.tokens, self._rows[row][0], self._prompts[id(row.request)]
        for n in range(min(self._most, len(tokens)), self._least - 1, -1):
            last = tuple(tokens[-n:])
            place = own.get(last) or prompt.get(last)
            if place is not None:
                return Guess(copied(tokens, place, length), [n / (n + 1)] * length)
        return NOTHING

    def end(self, rows: Sequence[Row]) -> None:
        """Forgets rows, and the prompt of a request with its last row that was drafted for."""
        for row in rows:
            if self._rows.pop(row, None) is not None and not any(
                other.request is row.request for other in self._rows
            ):
                del self._prompts[id(row.request)]

    @property
    def table_bytes(self) -> int:
        tables = [table for _, table in self._prompts.values()] + [
            table for table, _ in self._rows.values()
        ]
        places = sum(len(set(table.values())) for table in tables)
        return INTEGER_BYTES * places + sum(
            getsizeof(table) + sum(map(getsizeof, table)) for table in tables
        )


def copied(tokens: Sequence[int], place: int, length: int) -> list[int]:
    """Returns `length` tokens from a place on.

    Beyond the end the copied tokens are repeated, as in a text that repeats itself.
    """
    found = list(tokens[place : place + length])
    period = len(found)
    while len(found) < length:
        found.append(found[-period])
    return found
