"""Token recycling: proposes the tokens that the target found most probable after a token before.

After Luo et al., "Token Recycling" (ACL 2025, arXiv 2408.08696): a table of k successors for each
token, updated by the target's distribution at every verified position, and a draft tree along them.
Here the tree follows their probabilities in place of a fixed template, and tokens that a row has
read are successors from the start. Updates go from row to row and from the root of a tree down, so
that of several nodes with the same token the last decides, in every run alike.

Scopes: "row", a table for each row; "group", one for the rows of a request, the default; "engine",
one for all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from sys import getsizeof
from typing import Any, Protocol

import torch

from shoal.drafting.protocol import DraftInputs, Keeps
from shoal.drafting.text import Guess, TextDrafter, probable
from shoal.models.runner import Runner
from shoal.sampling.scores import Scores
from shoal.types.requests import Request, Row
from shoal.types.rounds import Verdict
from shoal.types.trees import Positions

READ = 0.3
"""The probability of a token that was read, without a probability from the target."""
PAIR_BYTES = getsizeof((0, 0.0))
NUMBERS_BYTES = 28 + 24
"""The bytes of the token and the probability of a successor that the target named."""
PLACE_BYTES = 120
"""The most bytes of a token in the dictionary, which grows to six times its content."""


class Successors:
    """The tokens that may follow each token.

    Attributes:
        request: the request, held so that no other takes its identity.
        left: the number of its rows that have left.
        table: token -> successors and their probabilities, the most probable first.
        read: the number of tokens read of each row.
    """

    def __init__(self, request: Request, k: int) -> None:
        self.request, self.left, self._k = request, 0, k
        self.table: dict[int, list[tuple[int, float]]] = {}
        self.read: dict[Row, int] = {}

    def read_on(self, row: Row) -> int:
        """Reads the new tokens of a row as successors.

        A token that is no successor yet becomes one, with probability `READ`.

        Returns:
            The number of tokens read.
        """
        tokens, table, start = row.tokens, self.table, self.read.get(row, 1)
        for position in range(start, len(tokens)):
            known = table.setdefault(tokens[position - 1], [])
            if all(token != tokens[position] for token, _ in known):
                known.insert(0, (tokens[position], READ))
                known.sort(key=lambda pair: -pair[1])
                del known[self._k :]
        self.read[row] = len(tokens)
        return len(tokens) - start

    def hear(
        self, context: tuple[int, ...], tokens: Sequence[int], chances: Sequence[float]
    ) -> None:
        """Takes the target's most probable tokens after some tokens, of which the last counts."""
        self.table[context[-1]] = list(zip(tokens, chances, strict=True))

    @property
    def bytes(self) -> int:
        """The memory that the table takes, in bytes, to a few percent.

        The numbers of tokens that were read are elsewhere.
        """
        lists = self.table.values()
        heard = sum(chance is not READ for known in lists for _, chance in known)
        pairs = PAIR_BYTES * sum(map(len, lists)) + NUMBERS_BYTES * heard
        return getsizeof(self.table) + sum(map(getsizeof, lists)) + pairs


class Table(Protocol):
    """A table of tokens that may follow, for a row, for the rows of a request, or for all rows."""

    left: int
    read: dict[Row, int]

    def read_on(self, row: Row) -> int:
        """Reads the new tokens of a row; returns their number."""
        ...

    def hear(
        self, context: tuple[int, ...], tokens: Sequence[int], chances: Sequence[float]
    ) -> None:
        """Takes the target's most probable tokens after some tokens, the last two of a text."""
        ...

    @property
    def bytes(self) -> int: ...


class RecyclingDrafter(TextDrafter):
    """A drafter that follows the tokens that the target found most probable.

    Args:
        scope: "row", "group" or "engine".
        k: the number of successors of a token.
        nodes: the nodes of a tree; 0 = chains.
    """

    name = "recycling"

    def __init__(self, scope: str = "group", k: int = 8, nodes: int = 8) -> None:
        super().__init__()
        self.max_nodes = nodes
        self._scope, self._k = scope, k
        self.keeps = Keeps(PLACE_BYTES + getsizeof([0] * k) + 8 + k * (PAIR_BYTES + NUMBERS_BYTES))
        # By the identity of the request or the row; one for the engine.
        self._tables: dict[int, Table] = {}
        # The last two tokens of each row of the round.
        self._roots: dict[Row, tuple[int, ...]] = {}

    @classmethod
    def for_target(cls, target: Runner, *, nodes: int = 8, **options: Any) -> RecyclingDrafter:
        return cls(nodes=nodes if target.takes_trees else 0, **options)

    def _key(self, row: Row) -> int:
        return {"row": id(row), "group": id(row.request), "engine": 0}[self._scope]

    def _new(self, request: Request) -> Table:
        return Successors(request, self._k)

    def _of(self, row: Row) -> Table:
        key = self._key(row)
        if key not in self._tables:
            self._tables[key] = self._new(row.request)
        return self._tables[key]

    def read(self, rows: Sequence[Row]) -> int:
        return sum(self._of(row).read_on(row) for row in rows)

    def guess(self, row: Row, length: int) -> Guess:
        table = self._of(row)
        assert isinstance(table, Successors)
        return probable(row.tokens[-1], partial(_following, table.table), length, self.max_nodes)

    def guesses(self, inputs: DraftInputs) -> list[Guess]:
        self._roots = {row: tuple(row.tokens[-2:]) for row in inputs.rows}
        return super().guesses(inputs)

    def observe(self, rows: Sequence[Row], scores: Scores, verdict: Verdict) -> None:
        """Learns from rounds with drafts; logits that are not finite are skipped."""
        roots, self._roots = self._roots, {}
        if not roots:
            return
        drafts = scores.positions.drafts
        columns = [
            (b, column)
            for b, row in enumerate(rows)
            if row in roots
            for column in range(1 + len(drafts[b]))
        ]
        index = torch.tensor(columns, device=scores.logits.device)
        logits = scores.logits[index[:, 0], index[:, 1]].float()
        top = logits.topk(min(self._k, logits.shape[-1]), dim=-1)
        probs = (top.values - logits.logsumexp(-1, keepdim=True)).exp()
        for (b, column), tokens, chances in zip(
            columns, top.indices.tolist(), probs.tolist(), strict=True
        ):
            if all(0 <= chance <= 1 for chance in chances):
                before = (*roots[rows[b]], *_last(scores.positions, b, column))
                self._of(rows[b]).hear(before[-2:], tokens, chances)

    def replace(self, copies: Sequence[tuple[Row, Row]]) -> None:
        for row, _ in copies:
            self._of(row).read.pop(row, None)

    def end(self, rows: Sequence[Row]) -> None:
        for row in rows:
            table = self._of(row)
            table.read.pop(row, None)
            self._roots.pop(row, None)
            table.left += 1
            if self._scope == "row" or (self._scope == "group" and table.left == row.request.n):
                del self._tables[self._key(row)]

    @property
    def table_bytes(self) -> int:
        return sum(table.bytes for table in self._tables.values())


def _last(positions: Positions, row: int, column: int) -> list[int]:
    """Returns the last two drafted tokens before a column, or fewer if there are not as many."""
    found: list[int] = []
    while column and len(found) < 2:
        found.insert(0, positions.drafts[row][column - 1])
        column = positions.parent(row, column)
    return found


def _following(
    table: dict[int, list[tuple[int, float]]], token: int
) -> Iterator[tuple[int, float, int]]:
    for following, chance in table.get(token, ()):
        yield following, min(chance, 0.999), following
