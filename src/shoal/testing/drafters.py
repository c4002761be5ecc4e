"""The drafters for tests: random trees, and the rules that every drafter must keep.

The engines of two runners are made here too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from operator import ne
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.config import Limits, Sampling
from shoal.constraints.protocol import Allowed, Constraint
from shoal.drafting.model import ModelDrafter
from shoal.drafting.protocol import Drafter, DraftInputs
from shoal.engine.engine import Engine
from shoal.engine.prefix_cache import PrefixMemory
from shoal.lookahead.controller import Controller, Fixed, Lookahead
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.sampling.distributions import Scores
from shoal.testing.scripted import hashed, scripted
from shoal.types.requests import Request, Row
from shoal.types.rounds import PrefillChunk
from shoal.types.trees import DraftTree, Verdict

Guess = Callable[[Sequence[int]], int]
"""The tokens before a node -> its token."""


class RandomTrees(Drafter):
    """A drafter that proposes trees of random shapes with tokens drawn at random or guessed.

    Args:
        vocab_size: the number of the tokens.
        seed: the seed of shapes and tokens.
        max_nodes: the most nodes of a tree.
        guess: guesses a node's token, taken for half of the nodes; None = all tokens are drawn at
            random.

    Attributes:
        proposed: every tree so far: (drafts, parents) of each row.
    """

    def __init__(
        self, vocab_size: int, seed: int = 0, max_nodes: int = 12, guess: Guess | None = None
    ) -> None:
        self.vocab_size, self.max_nodes, self.guess = vocab_size, max_nodes, guess
        self.proposed: list[list[tuple[list[int], list[int]]]] = []
        self._random = random.Random(seed)

    def propose(self, inputs: DraftInputs) -> DraftTree:
        trees = [
            self._tree(row, length) for row, length in zip(inputs.rows, inputs.lengths, strict=True)
        ]
        self.proposed.append(trees)
        return DraftTree.of(
            [drafts for drafts, _ in trees],
            [parents for _, parents in trees],
            device=inputs.uniforms.device,
        )

    def _tree(self, row: Row, most: int) -> tuple[list[int], list[int]]:
        drafts: list[int] = []
        parents: list[int] = []
        paths: list[list[int]] = [[]]
        for _ in range(self._random.randint(0, self.max_nodes) if most else 0):
            parent = self._random.choice(
                [node for node, path in enumerate(paths) if len(path) < most]
            )
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
    """A drafter that records the rows it is told of and the number of tokens it proposes."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.max_nodes, self.memory = inner, inner.max_nodes, inner.memory
        self.hidden_layers = inner.hidden_layers
        self.present: set[Row] = set()
        self.nodes = 0

    def attach(self, target: Runner) -> None:
        self.inner.attach(target)
        self.memory, self.hidden_layers = self.inner.memory, self.inner.hidden_layers

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
        assert not tree.branches or max(map(len, tree.drafts)) <= self.max_nodes, (
            "more nodes than max_nodes"
        )
        self.nodes += sum(map(len, tree.drafts))
        return tree

    def observe(self, rows: Sequence[Row], scores: Scores, verdict: Verdict) -> None:
        assert set(rows) <= self.present, "rows that the drafter was not told of"
        self.inner.observe(rows, scores, verdict)

    def pause(self, rows: Sequence[Row]) -> None:
        assert set(rows) <= self.present, "rows that the drafter was not told of"
        self.inner.pause(rows)

    def end(self, rows: Sequence[Row]) -> None:
        self.present -= set(rows)
        self.inner.end(rows)


def check_drafter(
    make: Callable[[], Drafter], vocab_size: int, lookahead: int = 4, target: Runner | None = None
) -> int:
    """Runs a drafter as the engine does, and checks its tokens.

    Rows join, end, are cancelled and cut by a time budget; prompts come in chunks, one row has a
    constraint. Decoding is greedy, and sampled by both rules.

    Args:
        make: makes a new drafter for a target of `vocab_size` tokens with continuations that look
            random.
        target: the target for drafters that need a certain one.

    Returns:
        The number of tokens it proposed.

    Raises:
        AssertionError: it changes tokens that it must not change, or breaks a rule of the protocol.
        InternalError: it proposes longer paths than it may.
    """
    nodes = 0
    model = scripted(hashed(vocab_size), vocab_size) if target is None else target
    for rule, temperature in (
        (Coupled(), 1.0),
        (Coupled(), 0.0),
        (Rejection(), 0.0),
        (Rejection(), 1.0),
    ):
        recorded = _Recorded(make())
        tokens_of_run = _tokens(model, recorded, rule, lookahead, temperature)
        assert not recorded.present, "rows have left that the drafter was not told of"
        if target is None:
            expected = _plain_tokens(vocab_size, isinstance(rule, Coupled), temperature)
        else:
            expected = _tokens(target, None, rule, 0, temperature)
        if (
            isinstance(rule, Coupled) or not temperature
        ):  # else a q may change the tokens of a seed, never their distribution
            assert tokens_of_run.whole == expected.whole, (
                "a drafter must not change seeded or greedy tokens"
            )
            for one, other in zip(tokens_of_run.cut, expected.cut, strict=True):
                shorter = min(len(one), len(other))
                assert one[:shorter] == other[:shorter], (
                    "a drafter must not change the tokens of rows that are cut"
                )
        assert list(map(len, tokens_of_run.whole)) == list(map(len, expected.whole)), (
            "a drafter must not change where rows end"
        )
        nodes += recorded.nodes
    return nodes


class _Tokens(NamedTuple):
    """The tokens of rows that came to their end, and of rows that were cut."""

    whole: list[list[int]]
    cut: list[list[int]]


@cache
def _plain_tokens(vocab_size: int, coupled: bool, temperature: float) -> _Tokens:
    """Decodes the scripted target without a drafter, once for all checks."""
    return _tokens(
        scripted(hashed(vocab_size), vocab_size),
        None,
        Coupled() if coupled else Rejection(),
        0,
        temperature,
    )


class _NoRepeats(Constraint[int]):
    """A constraint by which no token follows itself. A state is the last token."""

    def begin(self, row: Row) -> int:
        return row.tokens[-1]

    def advance(self, state: int, token: int) -> int:
        return token

    def mask(self, states: Sequence[int], vocab_size: int, device: torch.device) -> Allowed:
        allowed = torch.ones(len(states), vocab_size, dtype=torch.bool)
        allowed[torch.arange(len(states)), torch.tensor(states)] = False
        return Allowed(allowed, torch.ones(len(states), dtype=torch.bool))


def _tokens(
    target: Runner, drafter: Drafter | None, rule: Rule, lookahead: int, temperature: float
) -> _Tokens:
    """Decodes rows that join in turn, three at a time, and pause for each other.

    The third request has a constraint; two rows are cut.
    """
    rounds = count()
    engine = Engine(
        target,
        drafter,
        Fixed(lookahead),
        max_batch=3,
        rule=rule,
        chunk=2,
        quantum=4,
        clock=lambda: float(next(rounds)),
    )
    late = Limits(max_new_tokens=50, time_budget=60.0)  # seconds are how often the clock was asked
    cut = engine.submit(
        Request((1, 0), 1, Sampling(temperature=temperature, seed=9), late, submitted_at=0.0)
    )
    rows: list[Row] = []
    for length in range(1, 5):
        prompt = tuple(i % target.vocab_size for i in range(length))
        sampling = Sampling(temperature=temperature, seed=length)
        constraints = (_NoRepeats(),) if length == 3 else ()
        rows += engine.submit(
            Request(prompt, 2, sampling, Limits(max_new_tokens=5 * length), constraints=constraints)
        )
        engine.step()
    cut.append(rows.pop())
    engine.cancel(cut[1:])
    while engine.step():
        pass
    for row in rows:
        assert not row.request.constraints or all(
            map(ne, row.tokens[row.prompt_length - 1 :], row.tokens[row.prompt_length :])
        )
    assert cut[0].finish_reason == "time"
    assert engine.stats.pauses
    return _Tokens([row.tokens for row in rows], [row.tokens for row in cut])


def engine_of(
    target: Runner, draft: Runner | None, lookahead: Lookahead | Controller, **options: Any
) -> Engine:
    """Makes an engine whose drafter is a model of its own, or that decodes plainly.

    Options are those of `Engine`, its settings included, and `prefix_bytes`.
    """
    prefix_bytes = options.pop("prefix_bytes", 0)
    if prefix_bytes:
        options["prefixes"] = PrefixMemory(target, draft, prefix_bytes)
    drafter = None if draft is None else ModelDrafter(draft.fork(), target.vocab_size)
    return Engine(target, drafter, lookahead, **options)


def drafted_by(engine: Engine) -> Runner:
    """Returns the draft model of such an engine."""
    assert isinstance(engine.drafter, ModelDrafter)
    return engine.drafter.runner


def runners_of(engine: Engine) -> list[Runner]:
    """Returns the models of such an engine, target first."""
    return [engine.target] if engine.drafter is None else [engine.target, drafted_by(engine)]
