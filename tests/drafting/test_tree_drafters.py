"""Trees drawn from a draft model: how they grow, what is committed by each rule, and what is kept in the drafter's cache.

Tests of: drafting.growth, drafting.tree_model, drafting.shapes, drafting.draft.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from enumeration import chain_rule, chi_square
from laws import PAIRS, table
from shoal.api import Shoal
from shoal.config import Limits, Sampling
from shoal.drafting import growth
from shoal.drafting.draft import read_draft
from shoal.drafting.growth import Growth, Node, Shape
from shoal.drafting.protocol import DraftInputs
from shoal.drafting.shapes import DySpec, RsdC, RsdS, shape_of
from shoal.drafting.tree_model import TreeDrafter
from shoal.engine.engine import Engine
from shoal.errors import UnsupportedModel
from shoal.lookahead.controller import Fixed
from shoal.models.loading import wrap
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Coupled, Rejection
from shoal.testing import tiny_model
from shoal.testing.drafters import check_drafter
from shoal.testing.scripted import hashed, scripted, table_model
from shoal.types.requests import Request, Row
from tree_laws import DIFFERENT, EXACT, HORIZON, Tree, committed
from tree_runs import V, run

SHAPES: dict[str, Shape] = {
    "rsd-c": shape_of("rsd-c", 2, 7),
    "rsd-s": shape_of("rsd-s", 3, 8),
    "dyspec": shape_of("dyspec", 0, 4),
    "k-seq": shape_of("k-seq", 3, 12),
}


def drafter(shape: Shape, model: Runner, vocab: int = V) -> TreeDrafter:
    return TreeDrafter(model.fork(), vocab, shape)


# ── how they grow ───────────────────────────────────────────────────────────────────────────────────────────────────


def grown(inputs: DraftInputs, shape: Shape, q: Tensor, by_q: bool = True) -> Growth:
    """Trees drawn from a Markov table."""
    made = Growth(inputs, shape, by_q)
    while asked := made.nodes_without_q():
        made.know(asked, q[[node.token for node in asked]])
        made.grow()
    return made


def inputs_of(
    length: int, sampler: Callable[[Tensor, Tensor], Tensor], *, rows: int = 1, seed: int = 0, **of: Any
) -> DraftInputs:
    request = Request((0,), rows, Sampling(**of))
    every = [Row(request, 0, b, b + 10 * seed, [0], frozenset(), 99) for b in range(rows)]
    return DraftInputs(every, [length] * rows, torch.zeros(rows, length + 1, 3, dtype=torch.float64), sampler)


def as_drafted(shape: Shape, q: Tensor, seed: int) -> Callable[[Tree], None]:
    """The trees that a drafter grows, draw by draw; whatever else it draws by is fixed."""

    def grow(tree: Tree) -> None:
        def picked(weights: Tensor, uniforms: Tensor) -> Tensor:
            return torch.tensor([tree.pick(own.tolist()) for own in weights])

        drafted, (nodes,) = grown(inputs_of(2, picked, seed=seed), shape, q).tree(0)
        if nodes:
            assert drafted.siblings is not None
            tree.tokens, tree.parents, tree.draws = (
                drafted.drafts[0],
                list(drafted.parents[0]),
                list(drafted.siblings.draws[0]),
            )
            tree.last += tree.tokens

    return grow


SMALL: dict[str, Shape] = {
    "rsd-c": RsdC(2, 3), "rsd-s": RsdS(2, 4), "dyspec": DySpec(3), "k-seq": shape_of("k-seq", 2, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_what_is_committed_has_the_law_of_the_target(name: str) -> None:
    """Enumerated, with the real growth, decisions and residuals; the waiting times of a beam are those of some seeds."""
    for seed, (p, q) in enumerate([PAIRS["random"](3, 5), PAIRS["zeros in q"](3, 8), DIFFERENT]):
        if name == "k-seq" and p is DIFFERENT[0]:
            continue  # too many trees
        law, accepted = committed(p, q, as_drafted(SMALL[name], q, seed), name == "k-seq")
        torch.testing.assert_close(law, chain_rule(p, HORIZON), rtol=0, atol=EXACT)
        assert accepted > 0.3


class Fated(DySpec):
    """Chooses among nodes by what was drawn."""

    def chosen(self, nodes: Sequence[Node]) -> list[Node]:
        by_fate = [(node, node.value if node.is_place else node.accepted) for node in nodes]
        kept = [node for node, _ in sorted(by_fate, key=lambda pair: (-pair[1], pair[0].depth))][: self.nodes]
        return [node for node in kept if _is_whole(node, kept)]


def _is_whole(node: Node, kept: Sequence[Node]) -> bool:
    """Whether its parent and elder siblings are kept as well."""
    parent = node.parent
    assert parent is not None
    elders = parent.draws[: parent.draws.index(node)] if node in parent.draws else parent.draws
    return all(elder in kept for elder in elders) and (not parent.depth or (parent in kept and _is_whole(parent, kept)))


def test_a_heap_that_knows_what_was_drawn_shows() -> None:
    p, q = DIFFERENT
    assert (committed(p, q, as_drafted(Fated(2), q, 0))[0] - chain_rule(p, HORIZON)).abs().max() > 1e-3


def sequential(q: Tensor, depth: int, nodes: int) -> list[tuple[int, ...]]:
    """DySpec node by node, with the most probable token in place of a drawn one; paths in the order of their values."""
    heap: list[tuple[float, tuple[int, ...], tuple[int, ...]]] = [(1.0, (), ())]  # value, path of the parent, elder siblings
    found: list[tuple[int, ...]] = []
    while heap and len(found) < nodes:
        heap.sort(key=lambda place: (-place[0], len(place[1])))
        value, path, elders = heap.pop(0)
        left = q[path[-1] if path else 0].clone()
        left[list(elders)] = 0.0
        if not left.sum():
            continue
        token = int(left.argmax())
        share = float(left[token] / left.sum())
        found.append((*path, token))
        heap.append((value * (1 - share), path, (*elders, token)))
        if len(path) + 1 < depth:
            heap.append((value * share, (*path, token), ()))
    return found


@pytest.mark.parametrize("nodes", [1, 2, 5, 9, 20])
def test_growth_by_levels_is_growth_node_by_node(nodes: int) -> None:
    for seed in range(4):
        q = table(4, seed)
        made = grown(inputs_of(3, lambda weights, _: weights.argmax(-1), temperature=0.0), DySpec(nodes), q)
        paths = {tuple(node.path()) for node in made.nodes if node in made._shape.chosen(made.nodes) and not node.is_place}
        assert paths == set(sequential(q, 3, nodes))


def test_one_budget_for_all_rows() -> None:
    """A row whose drafter is sure gets deeper trees, one whose is not gets wider ones, and some get none."""
    sure = torch.eye(4, dtype=torch.float64).roll(1, dims=1) * 0.96 + 0.01
    unsure = torch.full((4, 4), 0.25, dtype=torch.float64)
    inputs = inputs_of(6, lambda weights, _: weights.argmax(-1), rows=2, temperature=0.0)
    made = Growth(inputs, DySpec(4), by_q=False)
    while asked := made.nodes_without_q():
        made.know(asked, torch.stack([(sure if node.row == 0 else unsure)[node.token] for node in asked]))
        made.grow()
    tree, _ = made.tree(0)
    counts = list(map(len, tree.drafts))
    assert sum(counts) == 8
    assert counts[0] > counts[1]
    assert max(tree.depths[0]) == 6 > max(tree.depths[1])


def pairs_of_paths(q: Tensor, rows: int = 1500) -> Tensor:
    """Counts of the first two paths of two tokens, in the order of arrival."""
    first = torch.zeros(9, 9, dtype=torch.float64)
    made = grown(inputs_of(2, Rejection.draw, rows=rows), RsdS(2, 4), q)
    level: list[list[Node]] = [[] for _ in range(rows)]
    for node in sorted((n for n in made._shape.chosen(made.nodes) if n.depth == 2), key=lambda n: n.time):
        level[node.row].append(node)
    for nodes in level:
        one, other = (3 * node.path()[0] + node.path()[1] for node in nodes)
        first[one, other] += 1
    return first


def test_a_beam_is_a_sample_of_paths_without_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against draws one after the other from all paths; draws of a row that share their uniforms show."""
    q = table(3, 3)
    joint = (q[0][:, None] * q).flatten()
    expected = (joint[:, None] * joint / (1 - joint[:, None])).fill_diagonal_(0.0)
    assert chi_square(pairs_of_paths(q), expected) > 1e-4
    real = growth.tree_uniforms
    monkeypatch.setattr(growth, "tree_uniforms", lambda seeds, firsts, draws: real(seeds, firsts, [0] * len(draws)))
    assert chi_square(pairs_of_paths(q), expected) < 1e-6


# ── through the engine ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow(but=["dyspec"])
@pytest.mark.parametrize("name", ["rsd-s", "dyspec", "k-seq"])
def test_drafters_keep_to_the_protocol(name: str) -> None:
    near = scripted(lambda ids: hashed(V)(ids) + 0.5 * hashed(V, 1)(ids), V)
    assert check_drafter(lambda: drafter(SHAPES[name], near), V) > 100


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("max_batch", [1, 9])
def test_tokens_are_those_of_plain_decoding(name: str, max_batch: int) -> None:
    """Greedy by both rules, and sampled by the coupled rule."""
    target = scripted(hashed(V), V)
    near = scripted(lambda ids: hashed(V)(ids) + 0.5 * hashed(V, 1)(ids), V)
    for rule, temperature in ((Coupled(), 0.8), (Rejection(), 0.0)):
        of: dict[str, Any] = {"n": min(max_batch, 3), "temperature": temperature}
        plain = run(target, None, 0, rule, max_batch, **of)[1]
        engine, rows = run(target, drafter(SHAPES[name], near), 4, rule, max_batch, **of)
        assert [row.tokens for row in rows] == [row.tokens for row in plain]
        assert engine.stats.committed == engine.stats.row_rounds + engine.stats.accepted
        assert engine.stats.accepted > engine.stats.row_rounds / 2
        assert engine.stats.drafted <= SHAPES[name].most * engine.stats.row_rounds
        assert 0 < engine.stats.draft_passes <= 4 * engine.stats.rounds


CONTROLS: dict[str, dict[str, Any]] = {
    "history": {"repetition_penalty": 1.4, "bad_words": ((1, 2), (3,))},
    "truncation": {"top_k": 3, "top_p": 0.9},
}


@pytest.mark.parametrize(("name", "controls"), list(zip(SHAPES, itertools.cycle(CONTROLS), strict=False)))
def test_controls_along_branches(name: str, controls: str) -> None:
    """A drafter that is the target agrees with it everywhere only if it knows what stands above each node."""
    target = scripted(hashed(V), V)
    plain = run(target, None, 0, temperature=0.8, **CONTROLS[controls])[1]
    engine, rows = run(target, drafter(SHAPES[name], target), 3, temperature=0.8, **CONTROLS[controls])
    assert [row.tokens for row in rows] == [row.tokens for row in plain]
    assert engine.stats.accepted >= (2.2 if name in ("rsd-c", "k-seq") else 1.2) * engine.stats.row_rounds


def test_many_nodes_that_were_dropped_again() -> None:
    """The drafter's cache takes trees of 63 nodes: what a better place has replaced is not fed."""
    target, flat = scripted(hashed(V), V), scripted(hashed(V, 1, spread=2.5), V)
    plain = run(target, None, 0, n=1)[1]
    engine, rows = run(target, drafter(DySpec(63), flat), 10, n=1)
    assert [row.tokens for row in rows] == [row.tokens for row in plain]
    assert engine.stats.drafted > 40 * engine.stats.row_rounds


@pytest.mark.parametrize("name", SHAPES)
def test_greedy_and_sampled_rows_in_one_batch(name: str) -> None:
    """A greedy row's tokens are those of plain decoding, and its trees what is most probable."""
    target = scripted(hashed(V), V)
    near = scripted(lambda ids: hashed(V)(ids) + 0.5 * hashed(V, 1)(ids), V)
    found = []
    for made in (None, drafter(SHAPES[name], near)):
        engine = Engine(target, made, Fixed(3), max_batch=4, rule=Rejection())
        rows = [
            engine.submit(Request((1, b), 1, Sampling(temperature=0.9 * (b % 2), seed=b), Limits(max_new_tokens=12)))[0]
            for b in range(4)
        ]
        while engine.step():
            pass
        found.append([row.tokens for row in rows[::2]])
    assert found[0] == found[1]
    assert all(row.accepted >= row.rounds / 2 for row in rows[::2])


@pytest.mark.parametrize("name", SHAPES)
def test_a_drafter_without_a_distribution_somewhere(name: str) -> None:
    """The tree ends there, and the row goes on."""
    real = hashed(V)
    target = scripted(real, V)
    broken = scripted(lambda ids: real(ids) * (torch.nan if sum(ids) % 5 == 0 else 1.0), V)
    plain = run(target, None, 0)[1]
    engine, rows = run(target, drafter(SHAPES[name], broken), 3)
    assert [row.tokens for row in rows] == [row.tokens for row in plain]
    assert engine.stats.accepted > engine.stats.row_rounds / 2


def test_passes_of_a_real_model() -> None:
    """Tiny Llamas with shared prompts."""
    target = wrap(tiny_model("llama").double(), "tiny")
    vocab = target.vocab_size
    rows = [
        run(target, made, 3, new=10, prefix_sharing="shared")
        for made in (None, TreeDrafter(target.fork(), vocab, RsdC(2, 6)))
    ]
    assert [row.tokens for row in rows[0][1]] == [row.tokens for row in rows[1][1]]
    assert {row.rounds for row in rows[1][1]} == {3}
    assert rows[1][0].stats.draft_passes < 3 * rows[1][0].stats.rounds


@pytest.mark.parametrize("name", ["rsd-c", "rsd-s", "k-seq"])
def test_a_drafter_that_is_the_target_is_always_right(name: str) -> None:
    """The first draw is accepted for certain where q is p: so what the cache keeps of accepted paths is what belongs there."""
    target = scripted(hashed(V), V)
    for temperature in (0.0, 0.9):
        engine, rows = run(target, drafter(SHAPES[name], target), 3, Rejection(), temperature=temperature, new=13)
        assert {row.rounds for row in rows} == {math.ceil(13 / 4)}
        assert {row.accepted for row in rows} == {3 * 3}
        assert engine.stats.draft_passes == 3 * engine.stats.rounds * 3 / 4  # every fourth round commits a row's last token


P, Q = table(3, 1, power=1.5), table(3, 2, power=1.5)


def counted(shape: Shape, rows: int, *, max_batch: int = 100, new: int = 3, **options: Any) -> tuple[Engine, Tensor]:
    """Joint counts of so many tokens."""
    engine = Engine(table_model(P), drafter(shape, table_model(Q), 3), Fixed(2), max_batch=max_batch, rule=Rejection())
    found = engine.submit(Request((0,), rows, Sampling(seed=5, **options), Limits(max_new_tokens=new)))
    while engine.step():
        pass
    counts = torch.zeros([3] * new)
    for row in found:
        counts[tuple(row.tokens[1:])] += 1
    return engine, counts


@pytest.mark.slow(but=["rsd-c"])
@pytest.mark.parametrize("name", SMALL)
def test_the_law_by_counting(name: str) -> None:
    engine, counts = counted(SMALL[name], 400)
    assert engine.stats.accepted > 150
    assert chi_square(counts, chain_rule(P, 3)) > 1e-4


def test_draws_from_another_q_show(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Rejection.draw
    monkeypatch.setattr(Rejection, "draw", lambda _, q, uniforms: real(q**3, uniforms))
    assert chi_square(counted(SMALL["rsd-s"], 300)[1], chain_rule(P, 3)) < 1e-6


# ── by name ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_trees_of_a_pair() -> None:
    models = [wrap(tiny_model("llama").double(), "tiny") for _ in range(2)]
    with Shoal(*models, max_batch=2, drafting=read_draft("some/dir:tree=rsd-s,width=2,nodes=6")) as pair:
        assert pair.drafter_name == "model:tree=rsd-s,width=2,nodes=6"
        plain = pair.generate([[1, 2, 3]], 2, seed=1, max_new_tokens=12, lookahead=0)
        for lookahead in (3, "auto"):
            found = pair.generate([[1, 2, 3]], 2, seed=1, max_new_tokens=12, lookahead=lookahead)
            assert [s.token_ids for s in found[0].samples] == [s.token_ids for s in plain[0].samples]
            assert found.stats.draft_passes > 0 or lookahead == "auto"


# ── negative controls ───────────────────────────────────────────────────────────────────────────────────────────────


def accepted_of(made: TreeDrafter, target: Runner) -> set[int]:
    """Drafts accepted of the rows; none if a scripted model finds cells in the wrong place."""
    try:
        return {row.accepted for row in run(target, made, 3, Rejection(), new=13)[1]}
    except AssertionError:
        return set()


def test_a_drafter_that_keeps_other_columns_shows() -> None:
    target = scripted(hashed(V), V)
    assert accepted_of(drafter(SHAPES["rsd-s"], target), target) == {9}
    made = drafter(SHAPES["rsd-s"], target)
    keep = made.runner.cache.keep
    made.runner.cache.keep = lambda slot, length, columns: keep(slot, length, range(len(columns)))  # type: ignore[method-assign]
    assert accepted_of(made, target) != {9}


def test_a_draft_model_without_positions_drafts_chains_only() -> None:
    with pytest.raises(UnsupportedModel, match="it can draft chains"):
        TreeDrafter(wrap(tiny_model("mpt"), "tiny"), V, SHAPES["rsd-s"])
