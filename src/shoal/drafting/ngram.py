"""N-grams of a row's own text: prompt lookup, and tables of tri-grams.

Prompt lookup proposes the tokens that followed an earlier occurrence of a row's last tokens. After
Saxena, "Prompt Lookup Decoding" (2023). The longest match counts, and the last one of several; a
row is matched with itself alone.

A tri-gram table proposes the tokens that followed a row's last two tokens, in the row's text or by
the target's distributions. After Liu et al., "ADED: adaptive draft-verification" (2024, arXiv
2407.12021): counts of tri-grams stand for the target's distribution, are updated by each
verification, and are searched by playouts that explore. It is token recycling
(`shoal.drafting.recycling`) with another table: two tokens of context, and counts that add up in
place of the last distribution. Pairs of tokens that were never seen are looked up by the last token
alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count, islice, pairwise
from math import log, sqrt
from sys import getsizeof

from shoal.drafting.protocol import Keeps
from shoal.drafting.recycling import NUMBERS_BYTES, PLACE_BYTES, SHARED, RecyclingDrafter
from shoal.drafting.text import (
    FLOOR,
    NOTHING,
    Following,
    Guess,
    Place,
    TextDrafter,
    number_bytes,
    probable,
)
from shoal.types.requests import Request, Row

Positions = dict[tuple[int, ...], int]
"""A map from n-grams to the position of the token that followed each last time."""

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
    """Returns `length` tokens from a place on; beyond the end the copied tokens are repeated."""
    copy = list(tokens[place : place + length])
    period = len(copy)
    while len(copy) < length:
        copy.append(copy[-period])
    return copy


UNSEEN = 0.5
"""The count of tokens never seen."""
BACKED_OFF = 0.4
"""The factor of probabilities by the last token alone: "stupid backoff" (Brants et al. 2007)."""
COUNT_BYTES = getsizeof(0.0)
Context = tuple[int, ...]
"""The last two tokens, or the last."""


class Trigrams:
    """The counts in `table`, context -> token -> count; the context updated last is the last."""

    def __init__(self, k: int, limit: int) -> None:
        self._k, self._limit = k, limit
        self.table: dict[Context, dict[int, float]] = {}

    def read(self, tokens: Sequence[int], start: int) -> None:
        """Counts the tokens of a text from `start` on."""
        for position in range(start, len(tokens)):
            self._add(
                tuple(tokens[max(position - 2, 0) : position]),
                tokens[position : position + 1],
                (1.0,),
            )

    def hear(self, context: Context, tokens: Sequence[int], chances: Sequence[float]) -> None:
        """Adds the target's probabilities of the tokens after a context."""
        self._add(context, tokens, chances)

    def _add(self, context: Context, tokens: Sequence[int], counts: Sequence[float]) -> None:
        for part in {context, context[-1:]}:
            known = self.table.pop(part, None) or {}
            for token, seen in zip(tokens, counts, strict=True):
                known[token] = known.get(token, 0.0) + seen
            if len(known) > 2 * self._k:
                known = dict(sorted(known.items(), key=lambda pair: -pair[1])[: self._k])
            self.table[part] = known
        if len(self.table) > self._limit:
            self.table = dict(list(self.table.items())[-(self._limit // 2) :])

    def bytes(self, texts: Iterable[Sequence[int]]) -> int:
        """Returns the memory that the table takes, in bytes, to a few percent.

        Args:
            texts: texts that are kept elsewhere, whose numbers do not count.
        """
        known = self.table.values()
        tables = (
            getsizeof(self.table) + sum(map(getsizeof, self.table)) + sum(map(getsizeof, known))
        )
        numbers = number_bytes((*self.table, *known), elsewhere=texts)
        return tables + COUNT_BYTES * sum(map(len, known)) + numbers


class TrigramDrafter(RecyclingDrafter):
    """A drafter that follows the tokens that came after the last two tokens most often.

    Args:
        scope: see `RecyclingDrafter`.
        k: see `RecyclingDrafter`.
        nodes: see `RecyclingDrafter`.
        limit: the contexts of a table; a full one keeps the half that was updated last.
        playouts: the number of playouts by which trees are searched; 0 = the most probable paths.
    """

    name = "trigrams"

    def __init__(
        self,
        scope: str = "group",
        k: int = 8,
        nodes: int = 8,
        limit: int = 1 << 15,
        playouts: int = 0,
    ) -> None:
        super().__init__(scope, k, nodes)
        self._limit, self._playouts = limit, playouts
        counted = dict.fromkeys(range(2 * k), 0.0)
        most = PLACE_BYTES + getsizeof((0, 0)) + getsizeof(counted) + 2 * k * NUMBERS_BYTES
        self.keeps = Keeps(2 * most, tokens=limit, always=most * limit if scope in SHARED else 0)

    def _new(self) -> Trigrams:
        return Trigrams(self._k, self._limit)

    def guess(self, row: Row, length: int) -> Guess:
        table = self._of(row)
        assert isinstance(table, Trigrams)
        following, place = partial(likeliest, table.table), tuple(row.tokens[-2:])
        if self._playouts and self.max_nodes:
            return explored(place, following, length, self.max_nodes, self._playouts)
        return probable(place, following, length, self.max_nodes)


def likeliest(
    table: dict[Context, dict[int, float]], context: Context
) -> Iterator[tuple[int, float, Context]]:
    """Yields the tokens that followed, the most frequent first, of equal ones the first seen."""
    known, factor = table.get(context), 1.0
    if known is None:
        known, factor = table.get(context[-1:], {}), BACKED_OFF
    share = factor / (sum(known.values()) + UNSEEN)
    for token, seen in sorted(known.items(), key=lambda pair: -pair[1]):
        yield token, share * seen, (context[-1], token)


BONUS = 1.25
"""The c1 of the search: the weight of the bonus, before it grows with the logarithm of playouts."""
GROWTH = 19652
"""The c2 of the search."""


@dataclass
class _Node:
    """A node: one more token.

    Attributes:
        token: the token.
        chance: its probability after its parent.
        path: its probability from the root on.
        depth: its depth.
        visits: the number of playouts through it.
        worth: the mean value of the playouts through it.
        children: its children; None = not searched yet.
    """

    token: int
    chance: float
    path: float
    depth: int
    visits: int = 0
    worth: float = 0.0
    children: list[_Node] | None = None


def explored(
    place: Place, following: Following[Place], length: int, nodes: int, playouts: int
) -> Guess:
    """Returns a tree of the nodes that most playouts went through.

    The search is that of ADED and AlphaZero: the worth of a child is the mean of the playouts
    through it, and a bonus for its probability that shrinks as it is tried. The search is
    deterministic.

    Args:
        place: see `shoal.drafting.text.probable`.
        following: see `shoal.drafting.text.probable`.
        length: the most tokens of a path.
        nodes: the most nodes of the tree.
        playouts: the number of paths that are tried.
    """
    root = _Node(-1, 1.0, 1.0, 0)
    places: dict[int, Place] = {id(root): place}
    for _ in range(playouts):
        path = [root]
        while path[-1].depth < length:
            node = path[-1]
            if node.children is None:
                node.children = []
                for token, sure, after in islice(following(places[id(node)]), nodes):
                    if node.path * sure >= FLOOR:
                        node.children.append(
                            child := _Node(token, sure, node.path * sure, node.depth + 1)
                        )
                        places[id(child)] = after
            if not node.children:
                break
            tried = sum(child.visits for child in node.children)
            scale = sqrt(tried + 1) * (BONUS + log((tried + GROWTH + 1) / GROWTH))
            path.append(
                max(
                    node.children,
                    key=lambda child: child.worth + child.chance * scale / (1 + child.visits),
                )
            )
        # A path is worth the tokens that it is expected to bring.
        value = sum(node.path for node in path[1:])
        for node in path:
            node.visits += 1
            node.worth += (value - node.worth) / node.visits
    return _most_visited(root, length, nodes)


def _most_visited(root: _Node, length: int, nodes: int) -> Guess:
    tokens: list[int] = []
    parents: list[int] = []
    reached = [1.0] + [0.0] * length
    numbers = count()
    heap: list[tuple[int, float, int, int, _Node]] = []

    def push(children: list[_Node] | None, parent: int) -> None:
        for child in children or ():
            if child.visits:
                heappush(heap, (-child.visits, -child.path, next(numbers), parent, child))

    push(root.children, -1)
    while heap and len(tokens) < nodes:
        *_, parent, node = heappop(heap)
        tokens.append(node.token)
        parents.append(parent)
        reached[node.depth] += node.path
        push(node.children, len(tokens) - 1)
    confidence = [min(after / before, 1.0) for before, after in pairwise(reached) if after]
    return Guess(tokens, confidence, parents) if tokens else NOTHING
