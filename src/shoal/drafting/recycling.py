"""Token recycling: proposes the tokens that the target found most probable after a token before.

After Luo et al., "Token Recycling" (ACL 2025, arXiv 2408.08696): a table of k successors for each
token, updated by the target's distribution at every verified position, and a draft tree along them.
Here the tree follows their probabilities in place of a fixed template, and tokens that a row has
read are successors from the start. Updates go from row to row and from the root of a tree down, so
that of several nodes with the same token the last decides, in every run alike.

The drafter hears every round, also those without drafts, which a controller may choose for long.

Scopes: "row", a table for each row; "group", one for the rows of a request, the default; "engine",
one for all rows; "model", one for all rows of all engines of the target. With the last one drafts,
and so the shapes of passes, depend on earlier calls.

The tokens that followed others in texts under constraints (`Habits`) follow a grammar's forced
tokens, with any drafter (`shoal.drafting.grafting`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from operator import itemgetter
from sys import getsizeof
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn

from shoal.constraints import masks
from shoal.drafting.protocol import Keeps
from shoal.drafting.text import Guess, TextDrafter, probable
from shoal.models.runner import Runner
from shoal.sampling.distributions import Scores
from shoal.types.requests import Request, Row
from shoal.types.trees import Positions, Verdict

SHARED = ("engine", "model")
"""The scopes with one table for all rows."""
READ = 0.3
"""The probability of a token that was read, without a probability from the target."""
PAIR_BYTES = getsizeof((0, 0.0))
NUMBERS_BYTES = 28 + 24
"""The bytes of the token and the probability of a successor that the target named."""
PLACE_BYTES = 120
"""The most bytes of a token in the dictionary, which grows to six times its content."""


class Successors:
    """The successors and probabilities of each token in `table`, the most probable first."""

    def __init__(self, k: int) -> None:
        self._k = k
        self.table: dict[int, list[tuple[int, float]]] = {}

    def read(self, tokens: Sequence[int], start: int) -> None:
        """Reads the tokens of a text from `start` on as successors.

        A token that is no successor yet becomes one, with probability `READ`.
        """
        for position in range(start, len(tokens)):
            known = self.table.setdefault(tokens[position - 1], [])
            if all(token != tokens[position] for token, _ in known):
                known.insert(0, (tokens[position], READ))
                known.sort(key=lambda pair: -pair[1])
                del known[self._k :]

    def hear(
        self, context: tuple[int, ...], tokens: Sequence[int], chances: Sequence[float]
    ) -> None:
        """Takes the target's most probable tokens after some tokens, of which the last counts."""
        self.table[context[-1]] = list(zip(tokens, chances, strict=True))

    def bytes(self, texts: Iterable[Sequence[int]]) -> int:
        """Returns the memory that the table takes, in bytes, to a few percent.

        The numbers of tokens that were read are elsewhere.
        """
        lists = self.table.values()
        heard = sum(chance is not READ for known in lists for _, chance in known)
        pairs = PAIR_BYTES * sum(map(len, lists)) + NUMBERS_BYTES * heard
        return getsizeof(self.table) + sum(map(getsizeof, lists)) + pairs


class Table(Protocol):
    """A table of tokens that may follow, for a row, for the rows of a request, or for all rows."""

    def read(self, tokens: Sequence[int], start: int) -> None:
        """Reads the tokens of a text from `start` on."""
        ...

    def hear(
        self, context: tuple[int, ...], tokens: Sequence[int], chances: Sequence[float]
    ) -> None:
        """Takes the target's most probable tokens after some tokens, the last two of a text."""
        ...

    def bytes(self, texts: Iterable[Sequence[int]]) -> int:
        """Returns the size of the table in bytes; `texts` that are kept elsewhere do not count."""
        ...


Tables = dict[int, Table]
"""Tables by the identity of a row or a request; one for all rows is at 0."""
# By the options of the drafters: "model" is the scope that outlives an engine.
_of_models: WeakKeyDictionary[Any, dict[tuple[Any, ...], Tables]] = WeakKeyDictionary()


class RecyclingDrafter(TextDrafter):
    """A drafter that follows the tokens that the target found most probable.

    Args:
        scope: "row", "group", "engine" or, by `for_target`, "model".
        k: the number of successors of a token.
        nodes: the nodes of a tree; 0 = chains.
    """

    name = "recycling"

    def __init__(self, scope: str = "group", k: int = 8, nodes: int = 8) -> None:
        super().__init__()
        self.max_nodes = nodes
        self._scope, self._k = scope, k
        self.keeps = Keeps(PLACE_BYTES + getsizeof([0] * k) + 8 + k * (PAIR_BYTES + NUMBERS_BYTES))
        self._tables: Tables = {}
        # The request of each table, held so that no other takes its identity; the rows that left.
        self._groups: dict[int, tuple[Request, int]] = {}
        # The number of tokens read of each row.
        self._read: dict[Row, int] = {}
        # The last two tokens of each row as of the round before.
        self._roots: dict[Row, tuple[int, ...]] = {}

    @classmethod
    def for_target(cls, target: Runner, *, nodes: int = 8, **options: Any) -> RecyclingDrafter:
        drafter = cls(nodes=nodes if target.takes_trees else 0, **options)
        if drafter._scope == "model":
            of_model = _of_models.setdefault(target.hf, {})
            drafter._tables = of_model.setdefault((cls.name, *sorted(options.items())), {})
        return drafter

    def _key(self, row: Row) -> int:
        return {"row": id(row), "group": id(row.request)}.get(self._scope, 0)

    def _new(self) -> Table:
        return Successors(self._k)

    def _of(self, row: Row) -> Table:
        key = self._key(row)
        if key not in self._tables:
            self._tables[key] = self._new()
            if self._scope == "group":
                self._groups.setdefault(key, (row.request, 0))
        return self._tables[key]

    def begin(self, rows: Sequence[Row]) -> None:
        self._roots |= {row: tuple(row.tokens[-2:]) for row in rows}

    def read(self, rows: Sequence[Row]) -> int:
        count = 0
        for row in rows:
            start = self._read.get(row, 1)
            self._of(row).read(row.tokens, start)
            self._read[row] = len(row.tokens)
            count += len(row.tokens) - start
        return count

    def guess(self, row: Row, length: int) -> Guess:
        table = self._of(row)
        assert isinstance(table, Successors)
        return probable(row.tokens[-1], partial(_following, table.table), length, self.max_nodes)

    def observe(self, rows: Sequence[Row], scores: Scores, verdict: Verdict) -> None:
        """Learns from every round; logits that are not finite are skipped."""
        roots = [self._roots[row] for row in rows]
        self.begin(rows)
        drafts = scores.positions.drafts
        columns = [(b, column) for b in range(len(rows)) for column in range(1 + len(drafts[b]))]
        index = torch.tensor(columns, device=scores.logits.device)
        logits = scores.logits[index[:, 0], index[:, 1]].float()
        top = logits.topk(min(self._k, logits.shape[-1]), dim=-1)
        probs = (top.values - logits.logsumexp(-1, keepdim=True)).exp()
        for (b, column), tokens, chances in zip(
            columns, top.indices.tolist(), probs.tolist(), strict=True
        ):
            if all(0 <= chance <= 1 for chance in chances):
                before = (*roots[b], *_last(scores.positions, b, column))
                self._of(rows[b]).hear(before[-2:], tokens, chances)

    def replace(self, copies: Sequence[tuple[Row, Row]]) -> None:
        for row, parent in copies:
            self._read.pop(row, None)
            self._roots[row] = tuple(parent.tokens[-2:])

    def end(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._read.pop(row, None)
            self._roots.pop(row, None)
            key = self._key(row)
            request, left = self._groups.pop(key, (row.request, 0))
            if self._scope == "group" and left + 1 < request.n:
                self._groups[key] = request, left + 1
            elif self._scope not in SHARED:
                self._tables.pop(key, None)

    @property
    def table_bytes(self) -> int:
        texts = [row.tokens for row in self._read]
        return sum(table.bytes(texts) for table in self._tables.values())


def _last(positions: Positions, row: int, column: int) -> list[int]:
    """Returns the last two drafted tokens before a column, or fewer if there are not as many."""
    tokens: list[int] = []
    while column and len(tokens) < 2:
        tokens.insert(0, positions.drafts[row][column - 1])
        column = positions.parent(row, column)
    return tokens


def _following(
    table: dict[int, list[tuple[int, float]]], token: int
) -> Iterator[tuple[int, float, int]]:
    for following, chance in table.get(token, ()):
        yield following, min(chance, 0.999), following


LIKELY = 0.25
"""The least estimate of the probability that all usual tokens of a path are accepted."""
MOST_PAIRS = 1 << 16
"""The most pairs of tokens that are counted; then the counts begin anew."""


class Habits:
    """The tokens that followed each token in the texts of a model's rows under constraints.

    They say which of the white space that a grammar allows a model writes. What they say of a row
    depends on the texts of others, so no rule may let a draft decide which token is drawn.
    """

    def __init__(self) -> None:
        self._followers: dict[int, Counter[int]] = {}
        self._pairs = 0

    def learn(self, tokens: Sequence[int]) -> None:
        """Counts the pairs of neighbours."""
        for before, token in pairwise(tokens):
            followers = self._followers.setdefault(before, Counter())
            self._pairs += token not in followers
            followers[token] += 1
        if self._pairs > MOST_PAIRS:
            self._followers, self._pairs = {}, 0

    def after(self, token: int) -> tuple[int, float]:
        """Returns the token that followed most often, and its rate; the rate is 0 without data."""
        each = list(self._followers.get(token, {}).items())  # other engines may add some meanwhile
        if (total := sum(count for _, count in each)) < 2:
            return -1, 0.0
        usual, count = max(each, key=itemgetter(1))
        return usual, count / (total + 1)

    def extend(
        self, row: Row, head: Sequence[int], run: list[int], room: int, vocab_size: int
    ) -> None:
        """Adds the usual tokens to a run behind a draft, each with the tokens forced behind it.

        Rows that are resampled get none: the rounds after which they are would depend on others.
        """
        if row.request.resampled:
            return
        sure = 1.0
        while len(run) < room:
            path = [*head, *run]
            token, rate = self.after(path[-1] if path else row.tokens[-1])
            sure *= rate
            if sure < LIKELY:
                break
            count, forced = masks.certain_tokens(row, [*path, token], vocab_size)
            if count <= len(path):
                break
            run += [token, *forced]


_habits: WeakKeyDictionary[nn.Module, Habits] = WeakKeyDictionary()


def habits_of(model: nn.Module) -> Habits:
    """Returns the habits of a model, which live on between engines."""
    return _habits.setdefault(model, Habits())
