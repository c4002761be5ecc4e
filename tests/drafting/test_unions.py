"""Trees of text joined to what a model drafts: the law by enumeration and by counting, what is kept, and names.

Tests of: drafting.grafting, drafting.draft, drafting.tree_model,
drafting.shapes, drafting.ngram.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from drafts import passes_of
from enumeration import chain_rule, chi_square
from laws import ALPHA, PAIRS, P, Q, joint
from shoal.config import Limits, Sampling
from shoal.drafting import grafting, growth
from shoal.drafting.grafting import grafted
from shoal.drafting.model import ModelDrafter
from shoal.drafting.ngram import TrigramDrafter
from shoal.drafting.protocol import Drafter, DraftInputs
from shoal.drafting.shapes import shape_of
from shoal.drafting.suffix import SuffixDrafter
from shoal.drafting.sums import SumDrafter
from shoal.drafting.text import NOTHING, Guess, TextDrafter, with_point_masses
from shoal.drafting.tree_model import TreeDrafter
from shoal.engine.engine import Engine
from shoal.lookahead.controller import by_name
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.sampling.acceptance.rejection import accept_recursively
from shoal.testing.drafters import check_drafter
from shoal.testing.scripted import hashed, scripted, table_model
from shoal.types.requests import Request, Row
from shoal.types.trees import DraftTree, Siblings
from tree_laws import DIFFERENT, EXACT, HORIZON, Tree, bushy, by_depths_below, committed, nothing
from tree_runs import run

V = 7


# ── one round, enumerated ───────────────────────────────────────────────────────────────────────────────────────────

GUESSES = {
    "a chain": Guess((1, 2), (0.5, 0.5)),
    "a tree": Guess((2, 0, 1, 1, 0), (0.5, 0.5), (-1, -1, 0, 1, 0)),
    "nothing": NOTHING,
}


def joined(shape: Callable[[Tree], None], guess: Guess) -> Callable[[Tree], None]:
    """Trees of a shape that a guess was joined to, by the real code."""

    def grow(tree: Tree) -> None:
        shape(tree)
        contexts = [[last if draws else -1 for last, draws in zip(tree.last, tree.draws, strict=True)]]
        own = replace(DraftTree.of([tree.tokens], [tree.parents]), siblings=Siblings(tree.q, contexts, [tree.draws]))
        found = grafted(own, [guess], 0)
        assert found.siblings is not None
        assert found.siblings.sampled is not None
        assert found.drafts[0][: len(tree.tokens)] == tree.tokens
        tree.last += found.drafts[0][len(tree.tokens) :]
        tree.tokens, tree.parents = found.drafts[0], list(found.parents[0])
        tree.draws, tree.sampled = list(found.siblings.draws[0]), [list(found.siblings.sampled[0])]

    return grow


@pytest.mark.parametrize(
    ("shape", "guess", "choices"),
    [
        (bushy, "a chain", 10),
        (by_depths_below, "a tree", 10),
        (by_depths_below, "a tree", 1),
        (nothing, "a tree", 10),
        (bushy, "nothing", 10),
    ],
)
def test_what_a_round_commits_has_the_law_of_the_target(
    shape: Callable[[Tree], None], guess: str, choices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever q leaves out of the guess."""
    monkeypatch.setattr(grafting, "CHOICES", choices)
    for pair in ("random", "zeros in both"):
        p, q = PAIRS[pair](3, 5)
        law, accepted = committed(p, q, joined(shape, GUESSES[guess]))
        torch.testing.assert_close(law, chain_rule(p, HORIZON), rtol=0, atol=EXACT)
        if pair == "random" and choices == 10:
            assert accepted >= committed(p, q, shape)[1]


def test_a_guess_raises_acceptance() -> None:
    p, q = PAIRS["random"](3, 5)
    for shape in (nothing, by_depths_below):
        assert committed(p, q, joined(shape, GUESSES["a tree"]))[1] > committed(p, q, shape)[1] + 0.02


def elder(tree: Tree) -> None:
    """What was joined is said to be drawn, too."""
    joined(bushy, GUESSES["a tree"])(tree)
    assert tree.sampled is not None
    tree.sampled = [list(map(len, tree.draws))]


def for_what_was_drawn(tree: Tree) -> None:
    """The model's own node is left out where a guess is there, for what it is."""
    tree.draw(0)
    if tree.last[1] != 2:
        tree.draws[0] = []
        tree.tokens, tree.parents, tree.draws, tree.last = [2], [-1], [[0], []], [0, 2]
        tree.sampled = [[0, 0]]
    else:
        tree.sampled = [[1, 0]]


@pytest.mark.parametrize("shape", [elder, for_what_was_drawn])
def test_wrong_unions_show(shape: Callable[[Tree], None]) -> None:
    p, q = DIFFERENT
    assert (committed(p, q, shape)[0] - chain_rule(p, HORIZON)).abs().max() > 1e-3


def test_a_residual_by_q_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sabotage: after a point mass was rejected, q is taken off p."""
    p, q = DIFFERENT
    law = committed(p, q, joined(bushy, GUESSES["a tree"]))[0]
    torch.testing.assert_close(law, chain_rule(p, HORIZON), rtol=0, atol=EXACT)

    def wrong(p: Tensor, q: Tensor, tokens: Tensor, uniforms: Tensor, sampled: Tensor) -> Any:
        return accept_recursively(p, q, tokens, uniforms)

    monkeypatch.setattr("shoal.sampling.acceptance.rejection.accept_recursively", wrong)
    assert (committed(p, q, joined(bushy, GUESSES["a tree"]))[0] - chain_rule(p, HORIZON)).abs().max() > 1e-3


# ── joining ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_paths_that_both_have_share_their_nodes() -> None:
    own = DraftTree.of([[5, 6, 7], []])
    guess = Guess((5, 6, 8, 9, 6), (1, 1, 1), (-1, 0, 1, -1, 3))
    tree = grafted(own, [guess, Guess((1, 2), (1, 1))], 3)
    assert tree.drafts == [[5, 6, 7, 8, 9, 6], [1, 2]]
    assert list(map(list, tree.parents)) == [[-1, 0, 1, 1, -1, 4], [-1, 0]]
    assert tree.siblings is tree.q is None


def test_no_tree_has_more_nodes_than_a_pass_can_tell_apart() -> None:
    own = DraftTree.of([list(range(60))])
    guess = Guess(tuple(range(100, 110)), (1.0,) * 10)
    assert grafted(own, [guess], 0).drafts == [[*range(60), 100, 101, 102]]
    assert grafted(DraftTree.of([list(range(70))]), [guess], 0).drafts == [list(range(70))]


def test_unlikely_tokens_are_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a node of the model, that is: elsewhere there is no q."""
    monkeypatch.setattr(grafting, "CHOICES", 2)
    q = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    own = replace(DraftTree.of([[3, 2]]), q=[q, q])
    guess = Guess((3, 0, 1, 2, 0), (1, 1, 1), (-1, 0, 1, -1, 3))
    tree = grafted(own, [guess], 0)
    assert (tree.drafts, tree.parents) == ([[3, 2, 2, 0]], [[-1, 0, -1, 2]])
    assert tree.siblings is not None
    assert tree.siblings.draws == [[[0, 2], [1], [], [3], []]]
    assert tree.siblings.sampled == [[1, 1, 0, 0, 0]]


# ── through the engine ──────────────────────────────────────────────────────────────────────────────────────────────


class Told(TextDrafter):
    """Is told what to propose: trees of tokens after those of a row."""

    name = "told"

    def __init__(self, say: Callable[[Sequence[int]], int], nodes: int = 8) -> None:
        super().__init__()
        self.say, self.max_nodes = say, nodes

    def read(self, rows: Sequence[Row]) -> int:
        return 0

    def guess(self, row: Row, length: int) -> Guess:
        ids = list(row.tokens)
        for _ in range(length):
            ids.append(self.say(ids))
        return Guess(ids[len(row.tokens) :], (0.9,) * length)

    @property
    def table_bytes(self) -> int:
        return 0


def near() -> Runner:
    return scripted(lambda ids: hashed(V)(ids) + 0.5 * hashed(V, 1)(ids), V)


def model(shape: str, runner: Runner, vocab: int = V) -> Drafter:
    if not shape:
        return ModelDrafter(runner.fork(), vocab)
    return TreeDrafter(runner.fork(), vocab, shape_of(shape, 2, 6))


UNIONS: dict[str, Callable[[], Drafter]] = {
    "tree and chain": lambda: SumDrafter([SuffixDrafter("engine", nodes=6)], model("", near())),
    "tree and tree": lambda: SumDrafter([TrigramDrafter(nodes=6)], model("rsd-s", near())),
    "a row each, with trees": lambda: SumDrafter([SuffixDrafter()], model("dyspec", near())),
    "all kinds": lambda: SumDrafter([SuffixDrafter(), TrigramDrafter(nodes=6)], model("", near())),
}


@pytest.mark.slow(but=["tree and chain"])
@pytest.mark.parametrize("name", UNIONS)
def test_unions_keep_to_the_protocol(name: str) -> None:
    assert check_drafter(UNIONS[name], V) > 100


@pytest.mark.slow(but=["tree and chain"])
@pytest.mark.parametrize("name", UNIONS)
def test_tokens_are_those_of_plain_decoding(name: str) -> None:
    target = scripted(hashed(V), V)
    for rule, temperature in ((Coupled(), 0.8), (Rejection(), 0.0)):
        plain = run(target, None, 0, rule, 33, n=11, temperature=temperature)[1]
        engine, rows = run(target, UNIONS[name](), 4, rule, 33, n=11, temperature=temperature)
        assert [row.tokens for row in rows] == [row.tokens for row in plain]
        for one, other in zip(rows, plain, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
            assert one.processed_logprobs == pytest.approx(other.processed_logprobs, abs=1e-5)
        assert engine.stats.accepted > engine.stats.row_rounds / 2
        assert sum(counts.drafted for counts in engine.stats.by_drafter.values()) == engine.stats.drafted


@pytest.mark.parametrize("shape", ["", "rsd-s", "dyspec"])
def test_whoever_is_right_is_followed(shape: str) -> None:
    """A model that is wrong half of the time, and a text that is always right; and the other way round."""
    target = scripted(hashed(V), V)
    half = scripted(half_right, V)

    def right(ids: Sequence[int]) -> int:
        return int(hashed(V)(ids).argmax())

    for text, drawn in ((right, half), (lambda ids: (right(ids) + 1) % V, target)):
        made = SumDrafter([Told(text)], model(shape, drawn))
        engine, rows = run(target, made, 3, Rejection(), n=1, temperature=0.0, new=13)
        assert {row.accepted for row in rows} == (
            {9} if shape != "dyspec" or text is right else {row.accepted for row in rows}
        )
        taken = engine.stats.by_drafter
        assert taken["told" if text is right else made.name].accepted > 10


def half_right(ids: Sequence[int]) -> Tensor:
    return hashed(V, len(ids) % 2)(ids)


class Checked(ModelDrafter):
    """Asserts that its drafts follow from the rows' tokens: scripted models read them from the keys in their caches."""

    def propose(self, inputs: DraftInputs) -> DraftTree:
        tree = super().propose(inputs)
        for row, draft in zip(inputs.rows, tree.drafts, strict=True):
            assert draft[:1] in ([], [int(half_right(row.tokens).argmax())])
        return tree


def test_a_chain_that_was_left_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the drafter's cache keeps what was not accepted."""
    target, half = scripted(hashed(V), V), scripted(half_right, V)

    def accepted() -> float:
        made = SumDrafter([Told(lambda ids: int(hashed(V)(ids).argmax()))], Checked(half.fork(), V))
        return run(target, made, 3, n=1, temperature=0.0, new=13)[0].stats.accepted

    assert accepted() > 20
    monkeypatch.setattr(ModelDrafter, "roll_back", lambda self, row, tokens: None)
    with pytest.raises(AssertionError):
        accepted()


def counted(shape: str, rule: Rule, lookahead: int | str, rows: int = 400) -> tuple[Engine, Tensor]:
    """Joint counts of three tokens."""
    made = SumDrafter([SuffixDrafter("group", nodes=4)], model(shape, table_model(Q), 4))
    target = table_model(P)
    engine = Engine(target, made, by_name(lookahead), max_batch=50, rule=rule, clock=passes_of(target))
    found = engine.submit(Request((0, 0), rows, Sampling(seed=3), Limits(max_new_tokens=3)))
    while engine.step():
        pass
    return engine, joint(found, 4)


@pytest.mark.slow(but=["-Rejection()-2", "-Coupled()-2"])
@pytest.mark.parametrize(
    ("shape", "rule", "lookahead"),
    [("", Rejection(), 2), ("", Rejection(), "auto"), ("", Coupled(), 2), ("rsd-s", Rejection(), 2)],
    ids=str,
)
def test_unions_have_the_joint_distribution(shape: str, rule: Rule, lookahead: int | str) -> None:
    engine, counts = counted(shape, rule, lookahead)
    assert chi_square(counts, chain_rule(P, 3)) > ALPHA
    assert len(engine.stats.by_drafter) == 2 or lookahead == "auto"
    assert all(counts.accepted > 0 for counts in engine.stats.by_drafter.values())


def test_chosen_tokens_are_point_masses_and_the_models_q_stays() -> None:
    q = torch.tensor([[[0.1, 0.2, 0.3, 0.4], [0.25] * 4], [[0.4, 0.3, 0.2, 0.1], [0.7, 0.1, 0.1, 0.1]]])
    before = q.clone()
    first, second, third = with_point_masses(list(q), [[], [3, 1, 2]])
    assert torch.equal(first, torch.stack([q[0, 0], torch.eye(4)[3]]))
    assert torch.equal(second, torch.stack([q[1, 0], torch.eye(4)[1]]))
    assert torch.equal(third, torch.stack([torch.zeros(4), torch.eye(4)[2]]))
    assert torch.equal(q, before)


def test_a_node_has_the_q_of_its_own_row_and_column() -> None:
    q = torch.arange(24.0).view(2, 3, 4)  # two columns of three rows
    own = replace(DraftTree.of([[1, 2], [3], [0, 1]]), q=list(q))
    siblings = grafted(own, [NOTHING] * 3, 0).siblings
    assert siblings is not None
    for row, draft in enumerate(own.drafts):
        for column in range(len(draft)):
            assert torch.equal(siblings.q[siblings.contexts[row][column]], q[column, row])


def test_no_two_rounds_grow_trees_by_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws below a node may decide on its further children: their numbers must not come back."""
    keys: list[tuple[int, ...]] = []
    real = growth.tree_uniforms

    def noted(*arguments: Any) -> Any:
        keys.extend(zip(*arguments, strict=True))
        return real(*arguments)

    monkeypatch.setattr(growth, "tree_uniforms", noted)
    made = TreeDrafter(table_model(Q), 4, shape_of("rsd-s", 2, 6))
    engine = Engine(table_model(P), made, by_name(3), rule=Rejection())
    engine.submit(Request((0, 0), 2, Sampling(seed=3), Limits(max_new_tokens=20)))
    while engine.step():
        pass
    assert len(set(keys)) == len(keys) > 50


def test_no_two_rounds_draw_chains_by_the_same_numbers() -> None:
    """A node may be joined for the sake of tokens that are rejected: their numbers must not come back (`_of_rounds`)."""
    numbers: list[float] = []

    class Noting(ModelDrafter):
        def propose(self, inputs: DraftInputs) -> DraftTree:
            numbers.extend(inputs.uniforms[0, :, 0].tolist())
            return super().propose(inputs)

    made = SumDrafter([SuffixDrafter("group", nodes=4)], Noting(table_model(Q), 4))
    engine = Engine(table_model(P), made, by_name(3), rule=Rejection())
    engine.submit(Request((0, 0), 1, Sampling(seed=3), Limits(max_new_tokens=30)))
    while engine.step():
        pass
    assert len(set(numbers)) == len(numbers) > 30


def test_what_is_joined_as_if_it_was_drawn_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = grafting._extend
    monkeypatch.setattr(grafting, "_extend", lambda siblings, rows: replace(real(siblings, rows), sampled=None))
    assert chi_square(counted("", Rejection(), 2, 1000)[1], chain_rule(P, 3)) < ALPHA
