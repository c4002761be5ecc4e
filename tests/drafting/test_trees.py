"""Draft trees through the engine: the tokens of plain decoding, and its distribution, whatever trees are proposed.

Tests of: models.cache.pass_plan, drafting.model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from enumeration import chain_rule, chi_square
from shoal.api import Shoal
from shoal.config import Limits, Sampling
from shoal.drafting.model import ModelDrafter
from shoal.drafting.protocol import Drafter, DraftInputs
from shoal.engine.engine import Engine
from shoal.errors import InternalError, UnsupportedModel
from shoal.lookahead.controller import Bass, Fixed, by_name
from shoal.models.bridge import cache_name
from shoal.models.cache import SlotCache, pass_plan
from shoal.models.loading import wrap
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Coupled, Rejection, Rule, exact_match
from shoal.testing import VOCABULARY, tiny_model, tiny_tokenizer
from shoal.testing.drafters import RandomTrees, check_drafter
from shoal.testing.scripted import hashed, scripted, table_model
from shoal.types.requests import Request, Row
from shoal.types.trees import DraftTree, Positions, Verdict

V = 5
PROMPTS = ((1,), (4, 2, 0, 3), (2, 2, 1, 0, 4, 3, 1, 2, 0))
NEW = 16


def run(
    target: Runner, drafter: Drafter | None, *, rule: Rule | None = None, k: Any = 4, new: int = NEW, n: int = 2, **options: Any
) -> tuple[Engine, list[Row]]:  # fmt: skip
    """An engine that is done, and its rows: n of each prompt."""
    engine_options = {name: options.pop(name) for name in ("prefix_sharing", "max_batch", "tokenizer") if name in options}
    controller = k if not isinstance(k, (int, str)) else by_name(k)
    engine = Engine(target, drafter, controller, rule=rule or Coupled(), **{"max_batch": 4, **engine_options})
    limits = Limits(max_new_tokens=new, **{name: options.pop(name) for name in ("eos", "stop") if name in options})
    sampling = Sampling(**{"temperature": 1.0, "seed": 7, **options})
    rows = [row for prompt in PROMPTS for row in engine.submit(Request(prompt, n, sampling, limits))]
    while engine.step():
        pass
    assert engine.scheduler.idle
    return engine, rows


def said(rows: Sequence[Row]) -> list[tuple[list[int], str | None]]:
    return [(row.tokens[row.prompt_length :], row.finish_reason) for row in rows]


def known(rows: Sequence[Row]) -> Callable[[Sequence[int]], int]:
    """What some row says after a history; 0 after others."""
    following = {tuple(row.tokens[:i]): row.tokens[i] for row in rows for i in range(1, len(row.tokens))}
    return lambda history: following.get(tuple(history), 0)


def counted_moves(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The cells that caches have moved, filled as a run goes on."""
    moved: list[list[int]] = []
    real = SlotCache.gather

    def gather(self: SlotCache, slot: int, start: int, cells: Sequence[int]) -> None:
        moved.append(list(cells))
        real(self, slot, start, cells)

    monkeypatch.setattr(SlotCache, "gather", gather)
    return moved


# ── tokens ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", [Coupled, Rejection])
def test_the_tokens_are_those_of_plain_decoding(
    rule: Callable[[], Rule], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by rejection sampling: without a q it is exact match, and draws what plain decoding draws."""
    target = scripted(hashed(V), V)
    plain, rows = run(target, None, rule=rule(), temperature=temperature)
    moved = counted_moves(monkeypatch)
    drafter = RandomTrees(V, guess=known(rows))
    engine, trees = run(target, drafter, rule=rule(), temperature=temperature)
    assert said(trees) == said(rows)
    assert engine.stats.rounds < plain.stats.rounds
    assert engine.stats.target_passes == engine.stats.rounds
    assert 0 < engine.stats.accepted < engine.stats.drafted == sum(len(d) for round_ in drafter.proposed for d, _ in round_)
    assert moved, "no accepted path lay apart from the beginning of its block"
    assert any(len(set(parents)) < len(parents) for round_ in drafter.proposed for _, parents in round_), "nothing branched"


CONTROLS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "presence and frequency": {"presence_penalty": 0.9, "frequency_penalty": 0.7},
    "n-grams": {"no_repeat_ngram": 2},
    "bad words": {"bad_words": ((1, 2), (3, 0, 4))},
    "min new tokens": {"min_new_tokens": 7, "eos": (0, 1)},
    "an early end": {"eos": (3,)},
    "processors": {"processors": (RepetitionPenaltyLogitsProcessor(2.5), MinPLogitsWarper(0.001))},
    "greedy with penalties": {"temperature": 0.0, "repetition_penalty": 1.7, "frequency_penalty": 0.7},
    "truncated": {"top_k": 3, "top_p": 0.9},
}


@pytest.mark.parametrize("name", CONTROLS)
def test_controls_follow_the_branches(name: str) -> None:
    target = scripted(hashed(V), V)
    rows = run(target, None, **CONTROLS[name])[1]
    engine, trees = run(target, RandomTrees(V, guess=known(rows)), **CONTROLS[name])
    assert said(trees) == said(rows)
    assert engine.stats.accepted > 0


@pytest.mark.parametrize("new", [1, 2, 5])
def test_rows_end_inside_a_tree(new: int) -> None:
    target = scripted(hashed(V), V)
    rows = run(target, None, new=new)[1]
    assert said(run(target, RandomTrees(V, guess=known(rows)), new=new)[1]) == said(rows)


@pytest.mark.parametrize("max_batch", [1, 2])
def test_wide_trees_of_rows_with_little_left(max_batch: int) -> None:
    """A tree takes a cell per node, however few tokens the row may still commit."""
    target = scripted(hashed(V), V)
    rows = run(target, None, new=3)[1]
    engine, trees = run(target, RandomTrees(V, guess=known(rows), max_nodes=40), new=3, max_batch=max_batch)
    assert said(trees) == said(rows)
    assert max(len(drafts) for round_ in engine.drafter.proposed for drafts, _ in round_) > 20  # type: ignore[union-attr]


def test_lengths_that_change_from_round_to_round() -> None:
    target = scripted(hashed(V), V)
    rows = run(target, None)[1]
    for k in (Bass(), "heuristic", 1, 9):
        assert said(run(target, RandomTrees(V, guess=known(rows)), k=k)[1]) == said(rows)


# ── models and passes ───────────────────────────────────────────────────────────────────────────────────────────────

PASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "gpt2": ("gpt2", {}),
    "sliding": ("qwen2-sliding", {}),
    "gemma2": ("gemma2", {}),
    "latent": ("deepseek-v3", {}),
    "by a mask": ("falcon", {}),
    **{f"{method}": ("llama", {"attention": method}) for method in ("reference", "pad", "split", "bifurcated")},
    "split, sliding": ("qwen2-sliding", {"attention": "split"}),
    "strict": ("llama", {"strict": True}),
    "shared prompts": ("llama", {"prefix_sharing": "shared"}),
    "shared prompts, sliding": ("qwen2-sliding", {"prefix_sharing": "shared"}),
}


def wrapped(architecture: str, attention: str = "auto", strict: bool = False) -> Runner:
    model = tiny_model(architecture)
    made = wrap(model.float() if architecture == "deepseek-v3" else model.double(), "tiny", attention, strict=strict)
    return made


@pytest.mark.parametrize("name", PASSES)
def test_every_kind_of_pass(name: str) -> None:
    architecture, options = PASSES[name]
    engine_options = {key: value for key, value in options.items() if key == "prefix_sharing"}
    target = wrapped(architecture, **{key: value for key, value in options.items() if key not in engine_options})
    rows = run(wrapped(architecture), None, new=10)[1]
    engine, trees = run(target, RandomTrees(VOCABULARY, guess=known(rows), max_nodes=10), new=10, **engine_options)
    assert said(trees) == said(rows)
    assert 0 < engine.stats.accepted < engine.stats.drafted
    assert engine.stats.rounds < max(map(len, (row.tokens for row in rows)))


def test_a_model_without_positions_takes_chains_only() -> None:
    target = wrapped("mpt")
    with pytest.raises(UnsupportedModel, match="takes no position for each token"):
        run(target, RandomTrees(VOCABULARY))
    rows = run(target, None, new=6)[1]
    engine, chains = run(target, Follows(known(rows)), new=6)
    assert said(chains) == said(rows)
    assert engine.stats.accepted > 0


class Follows(Drafter):
    """Proposes chains of point masses: what a guess says, token after token."""

    def __init__(self, guess: Callable[[Sequence[int]], int]) -> None:
        self.guess = guess

    def propose(self, inputs: DraftInputs) -> DraftTree:
        drafts: list[list[int]] = []
        for row, length in zip(inputs.rows, inputs.lengths, strict=True):
            history = list(row.tokens)
            for _ in range(length):
                history.append(self.guess(history))
            drafts.append(history[len(row.tokens) :])
        return DraftTree.of(drafts, device=inputs.uniforms.device)


def test_generate_takes_any_drafter() -> None:
    pair = Shoal(wrapped("llama"), None, tiny_tokenizer())
    plain = pair.generate([list(PROMPTS[1])], 3, seed=1, lookahead=0, max_new_tokens=12)
    tokens = {tuple(PROMPTS[1]) + s.token_ids[:i]: s.token_ids[i] for s in plain[0].samples for i in range(12)}
    drafter = Follows(lambda history: tokens.get(tuple(history), 0))
    for lookahead in (4, "auto"):
        found = pair.generate([list(PROMPTS[1])], 3, seed=1, lookahead=lookahead, drafter=drafter, max_new_tokens=12)
        assert [s.token_ids for s in found[0].samples] == [s.token_ids for s in plain[0].samples]
        assert found.stats.accepted > 0 or lookahead == "auto"  # which goes by the clock
        assert found.stats.draft_passes == 0
    streamed = pair.stream([list(PROMPTS[1])], 3, seed=1, lookahead=4, drafter=drafter, max_new_tokens=12)
    assert {i.accepted for i in streamed} > {0}


# ── the distribution ────────────────────────────────────────────────────────────────────────────────────────────────

HORIZON = 4
SHAPES: tuple[tuple[tuple[int, int], ...], ...] = (  # (parent, token) of the nodes
    ((-1, 0), (-1, 1)),
    ((-1, 2), (0, 0), (0, 1), (-1, 0)),
    ((-1, 1), (0, 1), (1, 1)),
    (),
    ((-1, 0), (-1, 0), (0, 2), (1, 1)),  # two siblings with the same token
    ((-1, 2), (-1, 1), (1, 0), (2, 2)),
)


def table(seed: int, vocab: int = 3) -> Tensor:
    """A Markov chain of order 2 with some zeros."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(vocab, vocab, vocab, generator=generator, dtype=torch.float64)
    p[p < 0.2] = 0
    p[..., 0] += 0.05
    return p / p.sum(-1, keepdim=True)


def tree_of(history: Sequence[int]) -> DraftTree:
    """A tree for a row with these new tokens: a function of them alone, as in a drafter without chance."""
    nodes = SHAPES[sum((i + 1) * token for i, token in enumerate(history)) % len(SHAPES)]
    return DraftTree.of([[token for _, token in nodes]], [[parent for parent, _ in nodes]])


def follow(tree: DraftTree, drawn: Tensor) -> Verdict:
    return exact_match(tree, drawn, torch.ones(drawn.shape))


def committed(p: Tensor, decide: Callable[[DraftTree, Tensor], Verdict] = follow) -> Tensor:
    """The distribution of the first tokens committed over repeated rounds, by enumeration of what is drawn at every column."""
    vocab = p.shape[-1]
    law = torch.zeros([vocab] * HORIZON, dtype=torch.float64)
    pending: dict[tuple[int, ...], float] = {(): 1.0}
    while pending:
        history, mass = pending.popitem()
        tree = tree_of(history)
        columns = range(tree.m + 1)
        row = Row(Request((0, 0)), 0, 0, 0, [0, 0, *history], frozenset(), 99)
        contexts = [Positions.of([row], tree).history(0, column)[-2:] for column in columns]
        for drawn in itertools.product(range(vocab), repeat=tree.m + 1):
            weight = mass
            for column in columns:
                weight *= float(p[tuple(contexts[column])][drawn[column]])
            if weight:
                (path,), (token,) = decide(tree, torch.tensor([drawn])).lists
                new = (*history, *(tree.drafts[0][node] for node in path), token)[:HORIZON]
                if len(new) == HORIZON:
                    law[new] += weight
                else:
                    pending[new] = pending.get(new, 0.0) + weight
    return law


@pytest.mark.parametrize("seed", range(3))
def test_the_distribution_by_enumeration(seed: int) -> None:
    p = table(seed)
    torch.testing.assert_close(committed(p), chain_rule(p, HORIZON), rtol=0, atol=1e-12)


def test_a_wrong_decision_shows_in_the_enumeration() -> None:
    """A sibling that is taken because its own token is drawn a second time, and a path followed one node too far."""

    def any_sibling(tree: DraftTree, drawn: Tensor) -> Verdict:
        verdict = follow(tree, drawn)
        first = next((node for node, parent in enumerate(tree.parents[0]) if parent == -1), None)
        if int(verdict.accepted[0]) == 0 and first is not None and tree.branches:
            last = drawn[:, first + 1]
            return replace(verdict, accepted=torch.ones_like(verdict.accepted), token=last, path=torch.tensor([[first]]))
        return verdict

    def bonus_of_the_parent(tree: DraftTree, drawn: Tensor) -> Verdict:
        verdict = follow(tree, drawn)
        return replace(verdict, token=drawn[:, 0])

    p = table(0)
    for wrong in (any_sibling, bonus_of_the_parent):
        assert not torch.allclose(committed(p, wrong), chain_rule(p, HORIZON), rtol=0, atol=1e-3)


@pytest.mark.slow(but=["Coupled", "Rejection"])
@pytest.mark.parametrize("rule", [Coupled, Rejection])
def test_the_distribution_by_counting(rule: Callable[[], Rule]) -> None:
    p = table(1)
    engine = Engine(table_model(p), RandomTrees(3, max_nodes=6), Fixed(3), max_batch=250, rule=rule())
    rows = engine.submit(Request((0, 0), 900, Sampling(seed=3), Limits(max_new_tokens=3)))
    while engine.step():
        pass
    assert engine.stats.accepted > 140
    counts = torch.zeros(3, 3, 3)
    for row in rows:
        counts[tuple(row.tokens[2:])] += 1
    assert chi_square(counts, chain_rule(p, 3)) > 1e-4


# ── negative controls ───────────────────────────────────────────────────────────────────────────────────────────────


def differs(target: Runner, **options: Any) -> bool:
    """Whether trees now change tokens, or a scripted model finds cells in the wrong place."""
    rows = run(target, None, **options)[1]
    try:
        return said(run(target, RandomTrees(target.vocab_size, guess=known(rows), max_nodes=10), **options)[1]) != said(rows)
    except AssertionError:
        return True


def test_a_visible_sibling_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = pass_plan.layout

    def layout(parents: Sequence[Sequence[int]], counts: Sequence[int]) -> Any:
        depths, words = real(parents, counts)
        for row, nodes in zip(words, parents, strict=True):
            for node, parent in enumerate(nodes):
                sibling = next((other for other in range(node) if nodes[other] == parent), None)
                row[node + 1] |= 0 if sibling is None else 1 << sibling + 1
        return depths, words

    target = wrapped("llama", "pad")
    assert not differs(target, new=10)
    monkeypatch.setattr("shoal.models.cache.pass_plan.layout", layout)
    assert differs(target, new=10)


def test_positions_by_column_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    target = wrapped("llama")
    forward, cache = target.hf.forward, cache_name(target.hf)

    def by_column(tokens: Tensor, position_ids: Tensor, **options: Any) -> Any:
        plan = options[cache].plan
        if plan.parents is not None:
            columns = torch.tensor(plan.starts)[:, None] + torch.arange(plan.q)
            position_ids = plan.pack(columns)
        return forward(tokens, position_ids=position_ids, **options)

    assert not differs(target, new=10)
    by_column.__signature__ = None  # type: ignore[attr-defined]
    monkeypatch.setattr(target.hf, "forward", by_column)
    assert differs(target, new=10)


def test_cells_kept_in_the_wrong_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SlotCache.gather
    swapped = []

    def gather(self: SlotCache, slot: int, start: int, cells: Sequence[int]) -> None:
        swapped.append(len(cells) > 1)
        real(self, slot, start, [*reversed(cells)])

    target = scripted(hashed(V), V)
    assert not differs(target)
    monkeypatch.setattr(SlotCache, "gather", gather)
    assert differs(target)
    assert any(swapped)


@pytest.mark.parametrize("kept", [0, 1])
def test_cells_that_do_not_move_are_noticed(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of an accepted path, or all of it but its first node."""
    real = SlotCache.gather

    def gather(self: SlotCache, slot: int, start: int, cells: Sequence[int]) -> None:
        if kept:
            real(self, slot, start, cells[:kept])

    monkeypatch.setattr(SlotCache, "gather", gather)
    assert differs(scripted(hashed(V), V))


@pytest.mark.parametrize("name", ["repetition", "presence and frequency", "n-grams", "bad words", "processors"])
def test_the_history_of_a_sibling_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Positions.path

    def path(self: Positions, row: int, column: int) -> list[int]:
        if self.parents is not None and column:
            above = self.parents[row][column - 1]
            column = next(i + 1 for i, parent in enumerate(self.parents[row]) if parent == above)
        return real(self, row, column)

    vocab = 40 if name in ("repetition", "processors") else V  # of few tokens all have soon been said
    target = scripted(hashed(vocab), vocab)
    assert not differs(target, new=30, **CONTROLS[name])
    monkeypatch.setattr(Positions, "path", path)
    assert differs(target, new=30, **CONTROLS[name])


# ── faults ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_branch_without_a_distribution_ends_the_row_only_where_it_leads_there() -> None:
    """Controls that leave nothing possible after some histories: the row ends there, as by plain decoding, and nowhere else."""
    banned = {"bad_words": tuple((3, token) for token in range(V))}  # nothing may follow a 3
    target = scripted(hashed(V), V)
    rows = run(target, None, **banned)[1]
    ends = {row.finish_reason for row in rows}
    assert ends == {"error", "length"} or ends == {"error"}
    engine, trees = run(target, RandomTrees(V, guess=known(rows)), **banned)
    assert said(trees) == said(rows)
    assert [str(row.error).split(": ", 1)[1] for row in trees if row.error] == [
        str(row.error).split(": ", 1)[1] for row in rows if row.error
    ]
    assert engine.stats.accepted > 0


# ── the protocol ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_drafters_of_ours_keep_to_the_protocol() -> None:
    assert check_drafter(lambda: RandomTrees(V), V) > 100
    assert check_drafter(lambda: Follows(lambda history: history[-1]), V) > 100
    assert check_drafter(lambda: ModelDrafter(scripted(hashed(V, 1), V).fork(), V), V) > 100


class TooLong(RandomTrees):
    def propose(self, inputs: DraftInputs) -> DraftTree:
        return DraftTree.of([[0] * (length + 1) for length in inputs.lengths])


class Meddles(RandomTrees):
    def propose(self, inputs: DraftInputs) -> DraftTree:
        inputs.rows[0].tokens.append(0)
        return super().propose(inputs)


class Bushy(RandomTrees):
    def propose(self, inputs: DraftInputs) -> DraftTree:
        nodes = self.max_nodes + 1
        return DraftTree.of([[0] * nodes] * len(inputs.rows), [[-1] * nodes] * len(inputs.rows))


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (TooLong, InternalError, "asked for paths of at most"),
        (Meddles, AssertionError, "must not change rows"),
        (Bushy, AssertionError, "more nodes than max_nodes"),
    ],
)
def test_drafters_that_break_it_are_told(kind: type[RandomTrees], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_drafter(lambda: kind(V), V)


@pytest.mark.parametrize("parents", [[0], [-2], [-1, 1], [-1]])
def test_parents_come_before_their_children(parents: list[int]) -> None:
    with pytest.raises(InternalError, match="need a parent each that comes before it"):
        DraftTree.of([[1] * (2 if len(parents) == 2 or parents == [-1] else 1)], [parents])


def test_a_tree_has_at_most_63_nodes() -> None:
    assert DraftTree.of([[0] * 63], [[-1] * 63]).branches
    with pytest.raises(InternalError, match="at most 63 nodes"):
        DraftTree.of([[0] * 64], [[-1] * 64])
    assert not DraftTree.of([[0] * 64], [list(range(-1, 63))]).branches
