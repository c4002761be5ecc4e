"""Drafts that a grammar forces: fewer rounds, the same tokens, and the law of the masked target.

Tests of: drafting.recycling, drafting.grafting, constraints.grammar, constraints.masks, engine.accounting.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from constrained_laws import agreement, law_of, rows_of
from enumeration import chain_rule, committed_distribution
from grammars import TARGET, TOKENIZER, commit, encode, possible
from shoal.api import Shoal
from shoal.config import Grammar, Limits, Sampling
from shoal.constraints import masks
from shoal.constraints.compiler import grammars_of
from shoal.constraints.protocol import Allowed, Constraint
from shoal.drafting import recycling
from shoal.drafting.grafting import ForcedTokens
from shoal.drafting.model import ModelDrafter
from shoal.drafting.protocol import Drafter, DraftInputs
from shoal.drafting.recycling import Habits, habits_of
from shoal.drafting.suffix import SuffixDrafter
from shoal.drafting.sums import SumDrafter
from shoal.drafting.tree_model import tree_drafter
from shoal.engine.engine import Engine
from shoal.lookahead.controller import Fixed
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.sampling.distributions import Scores, probabilities
from shoal.testing import END, VOCABULARY
from shoal.testing.scripted import hashed, mixed, says, scripted, table_model
from shoal.types.requests import Request, Row
from shoal.types.rounds import Outcome
from shoal.types.stats import Stats
from shoal.types.trees import DraftTree, Positions, Verdict

PROMPT = (1, 2, 3)

# ── the law ─────────────────────────────────────────────────────────────────────────────────────────────────────────

LETTERS = [*encode("abc"), END]
SMALL = Grammar("regex", "(ab|ba|aac|cc?)b?")


class Guessing(Constraint[int]):
    """Allows everything, and says that "ab" must follow, which may be wrong: forced drafts that are not certain."""

    def begin(self, row: Row) -> int:
        return 0

    def advance(self, state: int, token: int) -> int:
        return state + 1

    def mask(self, states: Sequence[int], vocab_size: int, device: torch.device) -> Allowed:
        return Allowed(torch.ones(len(states), vocab_size, dtype=torch.bool), torch.ones(len(states), dtype=torch.bool))

    def forced(self, state: int, draft: Sequence[int]) -> tuple[int, Sequence[int]]:
        return len(draft), LETTERS[:2]


def table(seed: int) -> Tensor:
    """A random Markov table over a, b, c and EOS within the whole vocabulary."""
    weights = torch.rand(4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.05
    whole = torch.full((VOCABULARY, VOCABULARY), 1e-3, dtype=torch.float64)
    whole[torch.tensor(LETTERS)[:, None], torch.tensor(LETTERS)] = weights / weights.sum(-1, keepdim=True)
    return whole / whole.sum(-1, keepdim=True)


def following(new: tuple[int, ...]) -> dict[int, float]:
    kept = table(0)[new[-1] if new else LETTERS[0]] * possible(SMALL, new)
    return {token: float(kept[token]) for token in kept.nonzero().flatten().tolist()}


def compiled(grammar: Grammar = SMALL) -> Constraint[Any]:
    return grammars_of(TOKENIZER, VOCABULARY).constraint(grammar)


def row_of(new: Sequence[int], *constraints: Constraint[Any]) -> Row:
    row = Row(Request((LETTERS[0],)), 0, 0, 0, [LETTERS[0]], frozenset([END]), 99)
    masks.begin(row, constraints)
    commit(row, new)
    return row


HORIZON = 2


def enumerated() -> tuple[Tensor, Tensor, Tensor]:
    """Tables over texts of nothing, a, b, c, EOS: p by its definition, p of the engine, and q of rounds with forced drafts."""
    tables = [torch.zeros([5] * (HORIZON + 1), dtype=torch.float64) for _ in range(3)]
    for each in tables:
        each[..., 4] = 1.0  # after an EOS, and off the grammar
    for depth in range(HORIZON):
        for places in itertools.product(range(3), repeat=depth):
            new = [LETTERS[place] for place in places]
            if masks.certain_tokens(row_of([], compiled()), new, VOCABULARY)[0] < depth:
                continue
            row, last = row_of(new, compiled(), Guessing()), new[-1] if new else LETTERS[0]
            token = masks.certain_tokens(row, [], VOCABULARY)[1][0]
            laws = (
                table(0)[last] * possible(SMALL, new),
                probabilities(table(0)[last].log()[None, None], Positions([row], [()]))[0, 0],
                torch.eye(VOCABULARY, dtype=torch.float64)[token],
            )
            for into, law in zip(tables, laws, strict=True):
                said = torch.cat([torch.zeros(1), law[torch.tensor(LETTERS)]])
                into[(0,) * (HORIZON - depth) + tuple(place + 1 for place in places)] = said / said.sum()
    p, real, q = tables
    return p, real, q


def test_the_law_of_two_tokens_is_that_of_the_masked_target_exactly() -> None:
    """Every way that rounds of forced drafts can go, right and wrong ones, enumerated through the real acceptance code."""
    p, real, q = enumerated()
    exact = chain_rule(p, HORIZON)
    for lengths in ([1], [2], [2, 0, 1]):
        torch.testing.assert_close(committed_distribution(real, q, HORIZON, lengths), exact, rtol=1e-9, atol=1e-12)
    # The control: forced drafts are accepted without verification.
    assert (committed_distribution(q, q, HORIZON, [2]) - exact).abs().max() > 0.05


class Unverified(Rejection):
    """Accepts forced drafts whatever the target says of them, unless they are impossible."""

    def decide(self, tree: DraftTree, scores: Scores, uniforms: Tensor) -> Verdict:
        p, logits = scores.p(), scores.logits.clone()
        for b, (draft, count) in enumerate(zip(tree.drafts, tree.forced or [0] * len(tree.drafts), strict=True)):
            for node in range(len(draft) - count, len(draft)):
                if p[b, node, draft[node]] > 0:
                    logits[b, node, draft[node]] = 1e4
        return super().decide(tree, replace(scores, logits=logits), uniforms)


def counted(rule: Rule, drafter: bool, *guessing: Constraint[Any]) -> tuple[float, Stats]:
    """The p-value of rows of an engine, and its counts."""
    other = table_model(table(1)) if drafter else None
    rows, stats = rows_of(
        table_model(table(0)), other, 1, rule, 1000, 8, END, guessing, prompt=(LETTERS[0],), tokenizer=TOKENIZER, seed=1,
        grammar=SMALL,
    )  # fmt: skip
    return agreement(rows, law_of(following, 8, END)), stats


@pytest.mark.slow(but=["Rejection-False", "Coupled-False"])
@pytest.mark.parametrize("drafter", [False, True])
@pytest.mark.parametrize("rule", [Rejection, Coupled])
def test_the_law_counted_through_the_engine(rule: type[Rejection | Coupled], drafter: bool) -> None:
    value, stats = counted(rule(), drafter, Guessing())
    assert value > 1e-6
    forced = stats.by_drafter["grammar"]
    assert 200 < forced.accepted < forced.drafted - 200


@pytest.mark.slow(but=["False"])
@pytest.mark.parametrize("drafter", [False, True])
def test_forced_drafts_that_are_not_verified_are_caught(drafter: bool) -> None:
    assert counted(Unverified(), drafter, Guessing())[0] < 1e-6


# ── the same tokens in fewer rounds ─────────────────────────────────────────────────────────────────────────────────

SCHEMA = Grammar(
    "json_schema",
    {
        "type": "object", "required": ["name", "count"], "additionalProperties": False,
        "properties": {"name": {"enum": ["ab", "cd"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    },
    whitespace="compact",
)  # fmt: skip
LIKE = mixed(TARGET, hashed(VOCABULARY, 1, spread=3.0), every=3)


def model() -> ModelDrafter:
    return ModelDrafter(scripted(LIKE, VOCABULARY), VOCABULARY)


DRAFTERS: dict[str, Any] = {
    "none": lambda: None,
    "model": model,
    "suffix": SuffixDrafter,
    "suffix trees": lambda: SuffixDrafter(nodes=8),
    "sum": lambda: SumDrafter([SuffixDrafter()], model()),
    "sum of trees": lambda: SumDrafter([SuffixDrafter(nodes=4)], model()),
    "model trees": lambda: tree_drafter(scripted(TARGET, VOCABULARY), model=model(), tree="rsd-s", width=2, nodes=8),
}


def decoded(
    drafter: Drafter | None, *, k: int = 5, rule: Rule | None = None, requests: Sequence[Request] | None = None
) -> tuple[Engine, list[list[int]]]:
    """An engine that has decoded three rows with a grammar and two without, greedy and not."""
    engine = Engine(scripted(TARGET, VOCABULARY), drafter, Fixed(k), tokenizer=TOKENIZER, eos=(END,), rule=rule or Coupled())
    groups = engine.submit_all(
        requests or [asked(0.0), asked(0.9, n=2), replace(asked(0.9, n=2), sampling=Sampling(seed=1))]
    )
    while engine.step():
        pass
    return engine, [row.tokens for rows in groups for row in rows]


def asked(temperature: float, n: int = 1) -> Request:
    return Request(PROMPT, n, Sampling(grammar=SCHEMA, temperature=temperature, seed=2), Limits(max_new_tokens=40))


def without(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ForcedTokens, "joined", lambda self, rows, tree: tree)


@pytest.mark.parametrize("name", DRAFTERS)
def test_rows_have_the_same_tokens_in_fewer_rounds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        without(patch)
        before, tokens = decoded(DRAFTERS[name]())
    after, same = decoded(DRAFTERS[name]())
    assert same == tokens
    counts = after.stats.by_drafter["grammar"]
    assert 0 < counts.accepted <= counts.drafted
    assert "grammar" not in before.stats.by_drafter
    assert after.stats.row_rounds < before.stats.row_rounds
    assert sum(each.drafted for each in after.stats.by_drafter.values()) == after.stats.drafted


@pytest.mark.parametrize("name", ["model", "sum", "sum of trees", "model trees"])
def test_greedy_rows_keep_their_tokens_where_drafts_have_a_q(name: str) -> None:
    requests = [asked(0.0), replace(asked(0.0), prompt_ids=(3, 2, 1))]
    _, tokens = decoded(None, k=0, requests=requests)
    engine, same = decoded(DRAFTERS[name](), rule=Rejection(), requests=requests)
    assert same == tokens
    assert engine.stats.by_drafter["grammar"].accepted > 0


def test_rounds_of_a_document_are_those_of_its_choices() -> None:
    """A token is a byte: "a" or "c", the digits and the end of the number are the model's."""
    text = '{"name":"cd","count":7}'
    target = says([(*PROMPT, *encode(text), END)], VOCABULARY)
    engine = Engine(scripted(target, VOCABULARY), None, Fixed(5), tokenizer=TOKENIZER, eos=(END,))
    (row,) = engine.submit(asked(0.0))
    sizes = []
    while commits := engine.step():
        sizes += [TOKENIZER.decode(done.tokens) for done in commits]
    assert sizes == ['{"name":"c', 'd","count":7', "}", "<|end|>"]
    assert row.finish_reason == "eos"
    assert (engine.stats.drafted, engine.stats.accepted) == (20, 20)
    assert row.by_drafter["grammar"].accepted == 20


def test_nobody_who_asks_for_plain_decoding_gets_drafts() -> None:
    for k, most in ((0, None), (5, 0)):
        engine, _ = decoded(None, k=k, requests=[replace(asked(0.0), max_draft=most)])
        assert engine.stats.drafted == 0
        assert engine.stats.row_rounds == engine.stats.committed
    engine, _ = decoded(None, requests=[replace(asked(0.0), max_draft=2)])
    assert engine.stats.drafted > 0
    assert engine.stats.committed <= 3 * engine.stats.row_rounds


# ── usual tokens behind forced ones ─────────────────────────────────────────────────────────────────────────────────

SPACED = replace(SCHEMA, whitespace="bounded")
SPACED_TEXT = '{ "name": "cd", "count": 7 }'


def spaced(rule: Rule, drafter: Drafter | None = None) -> tuple[list[str], Engine]:
    """The tokens of each round of a model that writes white space where none is needed."""
    target = says([(*PROMPT, *encode(SPACED_TEXT), END)], VOCABULARY)
    model = scripted(target, VOCABULARY)
    request = replace(asked(0.0), sampling=Sampling(grammar=SPACED, temperature=0.0))
    for _ in range(3):
        engine = Engine(model, drafter, Fixed(5), tokenizer=TOKENIZER, eos=(END,), rule=rule)
        engine.submit(request)
        rounds = []
        while commits := engine.step():
            rounds += [TOKENIZER.decode(done.tokens) for done in commits]
        assert "".join(rounds) == SPACED_TEXT + "<|end|>"
    return rounds, engine


def test_white_space_that_the_model_mostly_writes_is_drafted() -> None:
    """What it wrote in other calls: never by rejection sampling, where drafts decide which token is drawn."""
    rounds, engine = spaced(Coupled())
    plain, without_habits = spaced(Rejection())
    assert len(rounds) <= len(plain) - 3
    assert (plain[0], rounds[0]) == ("{ ", '{ "name":')
    assert without_habits.stats.accepted == without_habits.stats.drafted
    assert engine.stats.accepted > without_habits.stats.accepted


def test_usual_tokens_are_those_that_the_grammar_allows() -> None:
    """A path of them ends where it is no longer likely, and where the draft has no room."""
    habits = Habits()
    row = row_of([], compiled(Grammar("regex", "a[bc] ?x[yz]{9}")))
    forced = ForcedTokens(8, VOCABULARY, "none", habits)
    drafts = lambda: TOKENIZER.decode(forced.joined([row], DraftTree.empty(1, torch.device("cpu"))).drafts[0])  # noqa: E731
    assert drafts() == "a"
    for text in ("ab", "ab", "ac", "bd"):
        habits.learn(encode(text))
    assert drafts() == "ab"  # what follows "b" was seen once
    for _ in range(9):
        habits.learn(encode("b xyz"))
    assert drafts() == "ab xyz"  # 2/4 of the first, 9/11 and 9/10 of the others
    habits.learn(encode("zyzyzyzyzyzy"))
    assert drafts() == "ab xyzyz"  # the next one would be accepted with less than `LIKELY`
    for _ in range(40):
        habits.learn(encode("bq"))
    assert drafts() == "ab"  # q is refused
    row.max_length = len(row.tokens) + 2
    assert drafts() == "a"


def test_habits_are_of_one_model_and_do_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    assert habits_of(first) is habits_of(first) is not habits_of(second)
    monkeypatch.setattr(recycling, "MOST_PAIRS", 3)
    habits = Habits()
    habits.learn([1, 2, 1, 2, 1, 3])
    assert habits.after(1) == (2, 0.5)
    assert habits.after(2) == (1, pytest.approx(2 / 3))
    assert habits.after(3) == (-1, 0.0)
    habits.learn([3, 4])
    assert habits.after(1) == (-1, 0.0)
    habits.learn([1, 2])
    assert habits.after(1) == (-1, 0.0)  # once is no habit
    habits.learn([1, 2, 1, 2])
    assert habits.after(1) == (2, 0.75)  # the counts that began anew begin without pairs


# ── joined with others ──────────────────────────────────────────────────────────────────────────────────────────────


class Says(Drafter):
    """Proposes one chain, whatever the row is."""

    def __init__(self, *chain: int) -> None:
        self.chain = chain

    def propose(self, inputs: DraftInputs) -> DraftTree:
        return DraftTree.of([self.chain[:length] for length in inputs.lengths])


def first_round(drafter: Drafter, request: Request | None = None) -> tuple[list[int], list[str], Outcome]:
    """The drafts of the first round with their drafters, and what the controller is told."""
    engine = Engine(scripted(TARGET, VOCABULARY), drafter, Fixed(7), tokenizer=TOKENIZER, eos=(END,))
    told: list[Outcome] = []
    engine.lookahead.learn = told.append  # type: ignore[method-assign]
    engine.submit(request or asked(0.0))
    (done,) = engine.step()
    return list(done.drafts), list(done.drafters), told[0]


@pytest.mark.parametrize(
    ("chain", "own"),
    [("", 0), ('{"n', 3), ('{"nxyz', 3), ("xyz", 0), ('{"name":"', 7)],
)
def test_a_chain_goes_on_with_what_is_forced(chain: str, own: int) -> None:
    """And what the grammar refuses gives way; the controller is told of the chain alone."""
    tokens, names, told = first_round(Says(*encode(chain)))
    assert tokens == encode('{"name":"')
    assert names == ["Says"] * own + ["grammar"] * (9 - own)
    assert (told.drafted, told.accepted, told.forced) == ([own], [own], [9 - own])


def test_an_eos_too_early_gives_way() -> None:
    tokens, names, _ = first_round(Says(*encode('{"n'), END, *encode("ame")))
    assert tokens == encode('{"name":"')
    assert names == ["Says"] * 3 + ["grammar"] * 6


class Branches(Drafter):
    """Two chains, of which the grammar refuses one."""

    max_nodes = 4

    def propose(self, inputs: DraftInputs) -> DraftTree:
        return DraftTree.of([[*encode("{x"), *encode('"n')]] * len(inputs.rows), [[-1, 0, 0, 2]] * len(inputs.rows))


def test_a_tree_goes_on_behind_its_leaves() -> None:
    tokens, names, told = first_round(Branches())
    assert tokens == encode('{x"name":"')
    assert names == ["Branches"] * 4 + ["grammar"] * 6
    assert (told.drafted, told.accepted, told.nodes, told.forced) == ([3], [3], [4], [6])


# ── constraints of other kinds, and tokens of several bytes ─────────────────────────────────────────────────────────


class Failing(Guessing):
    def forced(self, state: int, draft: Sequence[int]) -> tuple[int, Sequence[int]]:
        raise ZeroDivisionError


def test_what_all_constraints_let_follow_is_kept() -> None:
    """The longest run counts; EOS ids, and tokens that the model does not have, end it."""
    row = row_of([], Failing(), compiled(Grammar("regex", "abcde")))
    assert masks.certain_tokens(row, [], VOCABULARY) == (0, encode("abcde"))
    assert masks.certain_tokens(row, encode("abx"), VOCABULARY) == (2, encode("cde"))
    assert masks.certain_tokens(row, [*encode("a"), END], VOCABULARY) == (1, encode("bcde"))
    assert masks.certain_tokens(row, encode("abcde"), VOCABULARY) == (5, [])
    assert masks.certain_tokens(row, [], encode("c")[0]) == (0, encode("ab"))
    row.eos = frozenset(encode("d"))
    assert masks.certain_tokens(row, [], VOCABULARY) == (0, encode("abc"))
    assert masks.certain_tokens(row_of([], Guessing(), compiled(Grammar("regex", "xy"))), encode("xz"), VOCABULARY) == (
        1,
        LETTERS[:2],
    )
    others = (compiled(Grammar("regex", text)) for text in ("abdefg", "abcde"))  # the first has one draft more
    assert masks.certain_tokens(row_of([], *others), encode("abdx"), VOCABULARY) == (2, encode("defg"))
    lost = row_of(encode("x"), compiled(Grammar("regex", "abcde")))
    assert masks.certain_tokens(lost, encode("a"), VOCABULARY) == (0, [])


def test_a_text_is_over_where_all_constraints_let_it_end() -> None:
    """Where one of them wants more and the others allow nothing, it is at a loss."""
    for other, over in (("a", True), ("ab", False)):
        row = row_of(encode("a"), *(compiled(Grammar("regex", text)) for text in ("a", other)))
        assert masks.is_complete(row, VOCABULARY) is over


def test_forced_tokens_are_the_only_ones_that_the_mask_allows(bundled: Shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a text is certain, masks allow the tokenizer's own tokens alone: none of these drafts can be rejected."""
    monkeypatch.setattr(Habits, "after", lambda *_: (-1, 0.0))
    grammar = grammars_of(bundled.tokenizer, bundled.target.vocab_size).constraint(SCHEMA)
    row = Row(Request(PROMPT), 0, 0, 0, list(PROMPT), frozenset(bundled.eos), 99)
    masks.begin(row, [grammar])
    kept, run = masks.certain_tokens(row, [], bundled.target.vocab_size)
    assert bundled.tokenizer.decode(run) == '{"name":"'
    mask = masks.allowed_tokens(Positions([row], [run]), torch.empty(1, len(run) + 1, bundled.target.vocab_size))
    assert mask is not None
    assert mask[0, :-1].sum(-1).tolist() == [1] * len(run)
    assert kept == 0 < len(run)
    options: dict[str, Any] = {"n": 4, "grammar": SCHEMA, "seed": 3, "max_new_tokens": 40, "drafter": SuffixDrafter()}
    plain, drafted = (bundled.generate("record = ", lookahead=k, **options) for k in ("off", 4))
    assert [s.token_ids for s in plain[0].samples] == [s.token_ids for s in drafted[0].samples]
    counts = drafted.stats.by_drafter["grammar"]
    assert 0 < counts.accepted == counts.drafted


# ── the controller and the memory ───────────────────────────────────────────────────────────────────────────────────


def test_rows_with_a_constraint_have_room_for_longer_blocks() -> None:
    """Padding as wide as a neighbour's forced tokens fits behind each row, whatever the draft length."""
    engine = Engine(scripted(TARGET, VOCABULARY), None, Fixed(1), tokenizer=TOKENIZER, eos=(END,))
    text = Grammar("regex", "abcdefghijklmnopqrstuvw[0-9]")
    long = replace(asked(0.0), sampling=Sampling(grammar=text), limits=Limits(max_new_tokens=25))
    short = Request(PROMPT, 1, Sampling(temperature=0.0), Limits(max_new_tokens=2, eos=()))
    engine.submit_all([long, replace(short, limits=Limits(max_new_tokens=22, eos=())), short])
    sizes = []
    while commits := engine.step():
        sizes.append([len(done.tokens) for done in commits])
    assert sizes[:2] == [[17, 1, 1], [7, 1, 1]]
