"""Drafters for tests: random trees, and what every drafter must keep to."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from torch import Tensor

from shoal.config import Limits, Sampling
from shoal.drafting.protocol import Drafter, DraftInputs
from shoal.engine.engine import Engine
from shoal.lookahead.fixed import Fixed
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.sampling.scores import Scores
from shoal.testing.scripted import hashed, scripted
from shoal.types.requests import Request, Row
from shoal.types.rounds import Verdict
from shoal.types.schedule import PrefillChunk
from shoal.types.trees import DraftTree

Guess = Callable[[Sequence[int]], int]
"""The tokens before a node -> its token."""


class RandomTrees(Drafter):
    """Proposes trees of random shapes, whose tokens are drawn at random or guessed.

    Args:
        vocab_size: of the tokens. seed: of shapes and tokens. max_nodes: most nodes of a tree.
        guess: of a node's token, taken for half of the nodes; None = all tokens are drawn at random.

    Attributes:
        proposed: every tree so far: (drafts, parents) of each row.
    """

    def __init__(self, vocab_size: int, seed: int = 0, max_nodes: int = 12, guess: Guess | None = None) -> None:
        self.vocab_size, self.max_nodes, self.guess = vocab_size, max_nodes, guess
        self.proposed: list[list[tuple[list[int], list[int]]]] = []
        self._random = random.Random(seed)

    def propose(self, inputs: DraftInputs) -> DraftTree:
        trees = [self._tree(row, length) for row, length in zip(inputs.rows, inputs.lengths, strict=True)]
        self.proposed.append(trees)
        return DraftTree.of(
            [drafts for drafts, _ in trees], [parents for _, parents in trees], device=inputs.uniforms.device
        )

    def _tree(self, row: Row, most: int) -> tuple[list[int], list[int]]:
        drafts: list[int] = []
        parents: list[int] = []
        paths: list[list[int]] = [[]]
        for _ in range(self._random.randint(0, self.max_nodes) if most else 0):
            parent = self._random.choice([node for node, path in enumerate(paths) if len(path) < most])
            token = self._token([*row.tokens, *paths[parent]])
            parents.append(parent - 1)
            drafts.append(token)
            paths.append([*paths[parent], token])
        return drafts, parents

    def _token(self, history: Sequence[int]) -> int:
        if self.guess is not None and self._random.random() < 0.5:
            return self.guess(history)
        return self._random.randrange(self.vocab_size)


class _Recorded(Drafter):
    """A drafter whose calls are recorded: which rows it was told of, and how many tokens it proposed."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.max_nodes, self.memory = inner, inner.max_nodes, inner.memory
        self.hidden_layers = inner.hidden_layers
        self.present: set[Row] = set()
        self.nodes = 0

    def begin(self, rows: Sequence[Row]) -> None:
        self.present |= set(rows)
        self.inner.begin(rows)

    def prepare(self, chunks: Sequence[PrefillChunk]) -> None:
        self.inner.prepare(chunks)

    def read_prompts(self, chunks: Sequence[PrefillChunk], hidden: Sequence[Tensor]) -> None:
        assert [len(states) for states in hidden] == [chunk.stop - chunk.start for chunk in chunks]
        self.inner.read_prompts(chunks, hidden)

    def propose(self, inputs: DraftInputs) -> DraftTree:
        before = [list(row.tokens) for row in inputs.rows]
        tree = self.inner.propose(inputs)
        assert [row.tokens for row in inputs.rows] == before, "a drafter must not change rows"
        assert tree.q is None or not tree.branches, "a tree that branches has no q"
        assert not tree.branches or max(map(len, tree.drafts)) <= self.max_nodes, "more nodes than max_nodes"
        self.nodes += sum(map(len, tree.drafts))
        return tree

    def observe(self, rows: Sequence[Row], scores: Scores, verdict: Verdict) -> None:
        assert set(rows) <= self.present, "rows that the drafter was not told of"
        self.inner.observe(rows, scores, verdict)

    def end(self, rows: Sequence[Row]) -> None:
        self.present -= set(rows)
        self.inner.end(rows)


def check_drafter(make: Callable[[], Drafter], vocab_size: int, lookahead: int = 4) -> int:
    """Runs a drafter as the engine does: rows that join, end, and are cancelled; greedy, and sampled by both rules.

    Args:
        make: a new drafter for a target of `vocab_size` tokens, whose continuations look random.

    Returns:
        How many tokens it proposed.

    Raises:
        AssertionError: it changes tokens that it must not change, or breaks a rule of the protocol.
        InternalError: it proposes longer paths than it may.
    """
    nodes = 0
    for rule, temperature in ((Coupled(), 1.0), (Coupled(), 0.0), (Rejection(), 0.0)):
        recorded = _Recorded(make())
        found = _tokens(recorded, rule, vocab_size, lookahead, temperature)
        assert not recorded.present, "rows have left that the drafter was not told of"
        assert found == _tokens(None, rule, vocab_size, 0, temperature), "a drafter must not change seeded or greedy tokens"
        nodes += recorded.nodes
    return nodes


def _tokens(drafter: Drafter | None, rule: Rule, vocab_size: int, lookahead: int, temperature: float) -> list[list[int]]:
    """Those of rows that join in turn, three at a time; one of them is cancelled."""
    engine = Engine(scripted(hashed(vocab_size), vocab_size), drafter, Fixed(lookahead), max_batch=3, rule=rule)
    rows: list[Row] = []
    for length in range(1, 5):
        prompt, sampling = tuple(i % vocab_size for i in range(length)), Sampling(temperature=temperature, seed=length)
        rows += engine.submit(Request(prompt, 2, sampling, Limits(max_new_tokens=5 * length)))
        engine.step()
    engine.cancel(rows[-1:])
    while engine.step():
        pass
    return [row.tokens for row in rows[:-1]]
