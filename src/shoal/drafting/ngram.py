"""Prompt lookup: the last tokens of a row stood somewhere before, and what followed them there is
proposed.

After Saxena, "Prompt Lookup Decoding" (2023). The longest match counts, and of those the last; a
row is matched with itself alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from sys import getsizeof

from shoal.drafting.protocol import Keeps
from shoal.drafting.text import NOTHING, Guess, TextDrafter
from shoal.types.requests import Request, Row

Positions = dict[tuple[int, ...], int]
"""n-grams -> where the token stands that followed each last time."""

PLACE_BYTES = 120
"""Most bytes of a place in a dictionary, which grows to six times what it holds."""
INTEGER_BYTES = 28


class NGramDrafter(TextDrafter):
    """Looks up the last tokens of a row in the row itself.

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
        """The n-grams that the tokens start..stop-1 follow."""
        for position in range(start, stop):
            for n in range(self._least, min(self._most, position) + 1):
                table[tuple(tokens[position - n : position])] = position

    def guess(self, row: Row, length: int) -> Guess:
        """A match of more tokens is surer, though nothing says how much: `auto` learns what each is
        worth."""
        tokens, own, (_, prompt) = row.tokens, self._rows[row][0], self._prompts[id(row.request)]
        for n in range(min(self._most, len(tokens)), self._least - 1, -1):
            last = tuple(tokens[-n:])
            place = own.get(last) or prompt.get(last)
            if place is not None:
                return Guess(copied(tokens, place, length), [n / (n + 1)] * length)
        return NOTHING

    def end(self, rows: Sequence[Row]) -> None:
        """What was read of a row goes with it, and its prompt with the last row of the request that
        was drafted for."""
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
    """So many tokens from a place on; beyond the end what has been copied goes on, as a text that
    repeats itself does."""
    found = list(tokens[place : place + length])
    period = len(found)
    while len(found) < length:
        found.append(found[-period])
    return found
