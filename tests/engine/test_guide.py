"""Guided targets: the law of p' whoever drafts, and a guide that reads what the target reads, whatever becomes of the rows.

Scripts say something else after any change of their history, so that a guide with a stale, lost or foreign token says another p'.

Tests of: engine.guide, engine.verify, engine.running_rows, sampling.guidance, drafting.draft_slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from enumeration import chain_rule, chi_square, committed_distribution
from guides import (
    EXPERT,
    GUIDE,
    MADE,
    NEGATIVE,
    TARGET,
    Made,
    V,
    as_decoded,
    by_hand,
    engine_of,
    greedy_ids,
    played,
    request,
)
from laws import ALPHA, EXACT, P, Q, joint, table
from prompt_tokens import scripted_tokens
from shoal.config import Limits, Sampling
from shoal.constraints.protocol import Allowed, Constraint
from shoal.drafting.model import ModelDrafter
from shoal.drafting.ppd import PpdDrafter
from shoal.drafting.protocol import Drafter
from shoal.drafting.shapes import shape_of
from shoal.drafting.suffix import SuffixDrafter
from shoal.drafting.tree_model import TreeDrafter
from shoal.engine import joint_rows, verify
from shoal.engine.engine import Engine
from shoal.engine.guide import Guide
from shoal.errors import BadLogits, InternalError, RequestError, UnsupportedModel
from shoal.lookahead.controller import Fixed
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.sampling.guidance import apply_guidance
from shoal.testing import VOCABULARY, tiny_model
from shoal.testing.scripted import runner, scripted, table_model
from shoal.types.requests import Request, Row
from tree_laws import Tree, bushy, committed

SETTINGS = [(0.7, 0.0), (1.5, 0.3), (-0.5, 0.0), (-1.0, 0.0)]

# ── the transform ───────────────────────────────────────────────────────────────────────────────────────────────────


def of_tables(p: Tensor, g: Tensor, guidance: float, plausibility: float, e: Tensor | None = None) -> Tensor:
    """The table of p', by the code that the engine runs."""
    sampling = [Sampling(guidance=guidance, plausibility=plausibility)] * len(p)
    own, said, expert = (None if one is None else one.log().view(len(p), -1, p.shape[-1]) for one in (p, g, e))
    assert own is not None
    assert said is not None
    return apply_guidance(own, said, sampling, expert).view_as(p).softmax(-1)


@pytest.mark.parametrize(("guidance", "plausibility"), SETTINGS)
def test_the_transform_is_that_of_probabilities(guidance: float, plausibility: float) -> None:
    for zeros in (0.0, 0.4):
        p, g = table(6, 1, zeros=zeros), table(6, 2, zeros=zeros)
        g = torch.where(p > 0, g.clamp(min=1e-3 if zeros else 0), g)  # some token is left
        g /= g.sum(-1, keepdim=True)
        e = torch.where(p > 0, table(6, 3, zeros=zeros).clamp(min=1e-3 if zeros else 0), 0.0)
        e /= e.sum(-1, keepdim=True)
        for expert in (None, e):
            law = by_hand(p, g, guidance, plausibility, expert)
            torch.testing.assert_close(of_tables(p, g, guidance, plausibility, expert), law)


def test_other_rows_keep_their_logits_and_missing_ids_are_impossible() -> None:
    logits, said = torch.randn(3, 2, 6), torch.randn(2, 2, 4)
    off, on = Sampling(), Sampling(guidance=2.0)
    found = apply_guidance(logits, said, [on, off, on])
    assert torch.equal(found[1], logits[1])
    assert bool((found[[0, 2]][..., 4:] == -torch.inf).all())
    assert bool(found[[0, 2]][..., :4].isfinite().all())
    more = torch.cat([torch.randn(2, 2, 6), torch.full((2, 2, 3), 50.0)], dim=-1)
    assert torch.allclose(
        apply_guidance(logits, more, [on, off, on])[0], apply_guidance(logits[:1], more[:1, :, :6], [on])[0], atol=1e-5
    )  # ids that the target lacks do not count
    away = apply_guidance(logits[:1], torch.randn(1, 2, 6), [Sampling(guidance=-1.0)], said[:1])
    assert bool((away[..., 4:] == -torch.inf).all())  # what the expert excludes, although it is led away from


def test_not_a_number_leaves_no_finite_score() -> None:
    for place in (0, 1, 2):
        all_ = [torch.randn(1, 1, 5) for _ in range(3)]
        all_[place][0, 0, 2] = torch.nan
        found = apply_guidance(all_[0], all_[1], [Sampling(guidance=1.0, plausibility=0.5)], all_[2])
        assert not bool(found.isfinite().any())
        assert not found.amax().isfinite()


# ── the law ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("guidance", "plausibility"), SETTINGS)
def test_two_tokens_by_enumeration_over_chains(guidance: float, plausibility: float) -> None:
    """All drafts, outcomes and replacements of rejection sampling, with draft lengths 0 and 1."""
    p, g, q, e = (table(4, seed) for seed in (1, 2, 3, 4))
    for expert in (None, e):
        law = chain_rule(by_hand(p, g, guidance, plausibility, expert), 2)
        found = committed_distribution(of_tables(p, g, guidance, plausibility, expert), q, 2, (0, 1))
        torch.testing.assert_close(found, law, rtol=0, atol=EXACT)
        assert (law - chain_rule(p, 2)).abs().max() > 1e-2


@pytest.mark.parametrize("independent", [False, True], ids=["rsd", "k-seq"])
@pytest.mark.parametrize(("guidance", "plausibility"), SETTINGS[:2])
def test_a_round_by_enumeration_over_trees(guidance: float, plausibility: float, independent: bool) -> None:
    p, g, q = (table(3, seed) for seed in (1, 2, 3))
    shape: Callable[[Tree], None] = bushy
    found, _ = committed(of_tables(p, g, guidance, plausibility), q, shape, independent)
    torch.testing.assert_close(found, chain_rule(by_hand(p, g, guidance, plausibility), found.dim()), rtol=0, atol=EXACT)


G = table(4, 7, order=2)
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "model": lambda: ModelDrafter(table_model(Q), 4),
    "trees": lambda: TreeDrafter(table_model(Q), 4, shape_of("rsd-s", 2, 6)),
    "sequences": lambda: TreeDrafter(table_model(Q), 4, shape_of("k-seq", 2, 6)),
    "siblings": lambda: SuffixDrafter("group", nodes=5),
}


@pytest.mark.slow(but=["model-Rejection", "model-Coupled"])
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("model", Rejection()),
        ("model", Coupled()),
        ("trees", Rejection()),
        pytest.param("siblings", Rejection(), marks=pytest.mark.slow),
        pytest.param("sequences", Rejection(), marks=pytest.mark.slow),
        pytest.param("trees", Coupled(), marks=pytest.mark.slow),
    ],
    ids=lambda one: one if isinstance(one, str) else type(one).__name__,
)
def test_four_tokens_have_the_joint_law(name: str, rule: Rule) -> None:
    engine = Engine(table_model(P), DRAFTERS[name](), Fixed(2), max_batch=120, rule=rule, guide=table_model(G))
    sampling = Sampling(seed=3, guidance=0.8, plausibility=0.05)
    rows = engine.submit(Request((0, 0), 1200, sampling, Limits(max_new_tokens=4)))
    while engine.step():
        pass
    assert chi_square(joint(rows, 4), chain_rule(by_hand(P, G, 0.8, 0.05), 4)) > ALPHA
    assert chi_square(joint(rows, 4), chain_rule(P, 4)) < ALPHA  # the test sees the guide
    assert 0 < engine.stats.accepted < engine.stats.drafted
    assert engine.stats.guide_passes == engine.stats.rounds


@pytest.mark.parametrize("rule", [Rejection(), Coupled()], ids=lambda one: type(one).__name__)
def test_four_tokens_of_a_target_led_to_an_expert(rule: Rule) -> None:
    """Proxy tuning: p (e / g), whoever drafts."""
    expert = table(4, 11, order=2)
    engine = Engine(
        table_model(P),
        DRAFTERS["model"](),
        Fixed(2),
        max_batch=120,
        rule=rule,
        guide=table_model(G),
        expert=table_model(expert),
    )
    rows = engine.submit(Request((0, 0), 1200, Sampling(seed=3, guidance=1.0), Limits(max_new_tokens=4)))
    while engine.step():
        pass
    assert chi_square(joint(rows, 4), chain_rule(by_hand(P, G, 1.0, 0.0, expert), 4)) > ALPHA
    assert chi_square(joint(rows, 4), chain_rule(by_hand(P, G, 1.0), 4)) < ALPHA  # the test sees the expert
    assert 0 < engine.stats.accepted < engine.stats.drafted
    assert engine.stats.guide_passes == 2 * engine.stats.rounds


# ── what the guide holds ────────────────────────────────────────────────────────────────────────────────────────────


JOINING: list[dict[str, Any]] = [{"quantum": 4, "max_batch": 3}, {"prefix_sharing": "shared"}, {"chunk": 3}, {}]


@pytest.mark.slow(but=["model-{'quantum': 4, 'max_batch': 3}"])
@pytest.mark.parametrize(
    ("name", "options"),
    [(name, options) for name in MADE for options in JOINING[: None if name == "model" else 2]],
    ids=str,
)
def test_rows_that_join_move_pause_and_leave(name: str, options: dict[str, Any]) -> None:
    """With negative prompts, which only the guide reads, in place of the prompt and before the new tokens; with an expert, which
    reads the prompt, or a positive one; and without either."""
    engine, rows = played(MADE[name], negative=True, expert=scripted(EXPERT, V), **options)
    assert as_decoded(rows, expert=EXPERT)
    assert not as_decoded(rows)
    assert (engine.stats.pauses > 0) == ("quantum" in options)
    assert 0 < engine.stats.guide_passes <= 2 * engine.stats.rounds
    assert set(engine.stats.executors) >= {"guide", "expert"}
    _, both = played(MADE[name], negative=True, positive=True, expert=scripted(EXPERT, V), **options)
    assert as_decoded(both, expert=EXPERT)
    assert [row.tokens for row in both] != [row.tokens for row in rows]
    _, alone = played(MADE[name], negative=True, **options)
    assert as_decoded(alone)
    engine, plain = played(MADE[name], **options)
    assert as_decoded(plain)
    assert (engine.stats.pauses > 0) == ("quantum" in options)
    assert 0 < engine.stats.guide_passes <= engine.stats.rounds == engine.stats.target_passes
    assert name == "plain" or 0 < engine.stats.accepted < engine.stats.drafted
    tokens = [[row.tokens for row in found if row.request.prompt_ids == request(2).prompt_ids] for found in (alone, plain)]
    assert tokens[0] != tokens[1]


def test_a_prompt_without_the_last_token_of_the_negative_one() -> None:
    """A first round feeds the guide the last token of its own prompt, a later one the row's; prompts of one token, too."""
    for negative in ((3,), (3, 1), (5, 0, 3)):
        for prompt in ((1,), (2, 5, 6)):
            engine = engine_of(MADE["model"])
            asked = replace(request(0, 2, guidance=0.9, negative_prompt=negative), prompt_ids=prompt)
            rows = engine.submit(asked)
            while engine.step():
                pass
            assert as_decoded(rows)


@pytest.mark.parametrize("name", ["negative_prompt", "positive_prompt"])
def test_the_memory_of_a_long_prompt_of_a_guide(name: str) -> None:
    """A limit is that of the longer prompt: what fits runs, what does not is refused before anything is computed."""
    long = tuple(i % V for i in range(40))
    asked = replace(request(0, 2, new=6, guidance=0.9, **{name: long}), prompt_ids=(1, 2))
    guides: dict[str, Any] = {"guide": GUIDE, "expert": EXPERT} if name == "positive_prompt" else {"guide": GUIDE}
    rows = 0
    for tokens in (45, 46, 47, 48):
        engine = engine_of(
            MADE["plain"],
            kv_bytes=(1 + len(guides)) * scripted(GUIDE, V).memory.token_bytes * tokens,
            **{role: scripted(script, V, 64) for role, script in guides.items()},
        )
        try:
            found = engine.submit(asked)
        except RequestError as error:
            assert "KV cache" in str(error)  # noqa: PT017
            continue
        while engine.step():
            pass
        assert as_decoded(found, **({"expert": EXPERT} if "expert" in guides else {}))
        rows += 1
    assert 0 < rows < 4


def test_what_a_guide_cannot_hold_is_refused_and_ends_rows() -> None:
    engine = engine_of(MADE["plain"], guide=scripted(GUIDE, V, 24))
    long = tuple(i % V for i in range(24))
    with pytest.raises(RequestError, match=r"the negative prompt has 24 tokens; .* holds 24"):
        engine.submit(request(2, 1, guidance=0.9, negative_prompt=long))
    (row,) = engine.submit(request(2, 1, guidance=0.9, negative_prompt=long[:20]))
    while engine.step():
        pass
    assert row.new_tokens == 4
    for settings, words in (
        ({"negative_prompt": (9,), "guidance": 0.5}, r"negative prompt ids must be in 0\.\.6"),
        ({"negative_prompt": (1, 9, 2), "guidance": 0.5}, r"negative prompt ids must be in 0\.\.6 for .*, got 9"),
        ({"negative_prompt": (1,), "guidance": 0.0}, "negative_prompt goes with guidance"),
        ({"positive_prompt": (1,), "guidance": 0.0}, "positive_prompt goes with guidance"),
        ({"positive_prompt": (1,), "guidance": 0.5}, "positive_prompt needs an expert"),
    ):
        with pytest.raises(RequestError, match=words):
            engine.submit(request(2, 1, **settings))
    with pytest.raises(RequestError, match="does not go with align"):
        engine.submit(replace(request(2, 1, guidance=0.5, negative_prompt=(1,)), removed=(1,), removed_from=3))
    led = engine_of(MADE["plain"], guide=scripted(GUIDE, V, 64), expert=scripted(EXPERT, V, 24))
    with pytest.raises(RequestError, match=r"the positive prompt has 24 tokens; .* holds 24"):
        led.submit(request(2, 1, guidance=0.9, positive_prompt=long))
    with pytest.raises(RequestError, match=r"positive prompt ids must be in 0\.\.6"):
        led.submit(request(2, 1, guidance=0.9, positive_prompt=(9,)))
    for name in ("negative_prompt", "positive_prompt"):
        with pytest.raises(RequestError, match=f"{name} must be a list of token ids"):
            Sampling(**{name: (1, -2)})


def test_one_batch_of_eight_strengths_and_each_alone() -> None:
    """Rows with 0 are those of an engine without a guide, whatever their neighbours ask for."""
    settings = [(0.0, 0.0), (0.3, 0.0), (-0.5, 0.0), (2.0, 0.1), (0.0, 0.0), (1.0, 1.0), (-1.0, 0.0), (0.3, 0.4)]
    requests = [request(number % 4, 1, guidance=g, plausibility=c) for number, (g, c) in enumerate(settings)]
    engine = engine_of(MADE["model"], max_batch=8)
    rows = [row for one in requests for row in engine.submit(one)]
    while engine.step():
        pass
    assert as_decoded(rows)
    assert max(row.rounds for row in rows) <= engine.stats.rounds < sum(row.rounds for row in rows)
    for one, row in zip(requests, rows, strict=True):
        alone = engine_of(MADE["plain"], guide=None if not one.sampling.guidance else scripted(GUIDE, V))
        (other,) = alone.submit(one)
        while alone.step():
            pass
        assert other.tokens == row.tokens
        assert other.logprobs == pytest.approx(row.logprobs)


def test_log_probabilities_are_those_of_the_guided_target() -> None:
    engine = engine_of(MADE["model"])
    (row,) = engine.submit(replace(request(2, 1, guidance=0.9, plausibility=0.2), top_logprobs=2, keep_logits=True))
    while engine.step():
        pass
    for place, token in enumerate(row.tokens[row.prompt_length :]):
        before = tuple(row.tokens[: row.prompt_length + place])
        p, g = (script(before).double().softmax(-1) for script in (TARGET, GUIDE))
        law = by_hand(p, g, 0.9, 0.2)
        assert row.logprobs[place] == pytest.approx(float(law[token].log()))
        torch.testing.assert_close(row.logits[place].softmax(-1), law.float())
        hot = law ** (1 / 0.8)
        assert row.processed_logprobs[place] == pytest.approx(float((hot[token] / hot.sum()).log()), abs=1e-6)
        assert row.top_logprobs[place].raw[0][1] == pytest.approx(float(law.max().log()))


def test_probes_of_a_drafter_are_no_columns_of_the_guide() -> None:
    """Prompt tokens ride in the target's pass behind the nodes; the guide gets the nodes alone."""
    count = 3
    weights = torch.zeros(4 + count, 4 + count, 4, dtype=torch.float64)
    weights[:4, :4] = P
    weights[:, 4:] = P.mean((0, 1))
    engine = Engine(
        table_model(weights), PpdDrafter(scripted_tokens(4), 8), Fixed(3), max_batch=60, rule=Coupled(), guide=table_model(G)
    )
    rows = engine.submit(Request((0, 0), 600, Sampling(seed=3, guidance=0.8), Limits(max_new_tokens=3)))
    while engine.step():
        pass
    assert chi_square(joint(rows, 4), chain_rule(by_hand(P, G, 0.8), 3)) > ALPHA
    assert engine.stats.accepted > 0


class OddAfterZero(Constraint[int]):
    """A limit that makes weights unequal."""

    def begin(self, row: Row) -> int:
        return row.tokens[-1]

    def advance(self, state: int, token: int) -> int:
        return token

    def mask(self, states: Sequence[int], vocab_size: int, device: torch.device) -> Allowed:
        odd = torch.arange(vocab_size) % 2 == 1
        return Allowed(torch.stack([odd | (state != 0) for state in states]), torch.ones(len(states), dtype=torch.bool))


@pytest.mark.parametrize("negative", [(), NEGATIVE[2]], ids=["prompt", "negative"])
def test_rows_that_become_copies(monkeypatch: pytest.MonkeyPatch, negative: tuple[int, ...]) -> None:
    """After a resampling the guide reads the tokens that a row has now: at each round it holds them, of each row."""
    monkeypatch.setattr(joint_rows, "LEAST", 0.999)
    engine = engine_of(MADE["model"], max_batch=6)
    own = request(2, 6, new=14, negative_prompt=negative)
    asked = replace(own, weighted=True, resampled=True, constraints=(OddAfterZero(),))
    real, checked = Guide.logits, 0

    def held(self: Guide, rows: Sequence[Row], block: Any) -> Tensor | None:
        nonlocal checked
        found = real(self, rows, block)
        for row in self._own(rows):
            slot = self.slots.of(row)
            cells = self.runner.cache._layers[0].keys[slot, : len(row.tokens), 0, 0].long().tolist()
            assert cells == row.tokens
            assert cells[: row.prompt_length] == list(negative or own.prompt_ids)
            checked += 1
        return found

    monkeypatch.setattr(Guide, "logits", held)
    engine.submit(asked)
    while engine.step():
        pass
    assert engine.stats.resampled > 0
    assert checked == engine.stats.row_rounds


def test_passes_of_prompts_are_computed_once_a_group() -> None:
    engine = engine_of(MADE["plain"], max_batch=4)
    rows = engine.submit(request(2, 4))
    while engine.step():
        pass
    stats = engine.stats
    assert stats.executors["guide"].total() == stats.guide_passes + 1 == stats.rounds + 1
    assert stats.executors["target"] == stats.executors["guide"]
    assert as_decoded(rows)


def test_without_guidance_the_guide_computes_nothing() -> None:
    engine = engine_of(MADE["model"])
    rows = engine.submit(request(1))
    while engine.step():
        pass
    assert as_decoded(rows)
    assert engine.guides[0].runner.hf.forwards == engine.stats.guide_passes == 0
    assert "guide" not in engine.stats.executors


# ── sabotage ────────────────────────────────────────────────────────────────────────────────────────────────────────


def fails(made: Made, **options: Any) -> bool:
    """Whether a run ends with other tokens, or finds its own caches wrong."""
    try:
        return not as_decoded(played(made, **options)[1])
    except (AssertionError, InternalError):
        return True


def of_its_neighbour(self: Guide, rows: Sequence[Row], block: Any) -> Tensor | None:
    tokens, counts, parents = block
    return LOGITS(self, rows, (tokens.roll(1, 0), counts, parents))


def cut_by_the_guide(logits: Tensor, said: Tensor, samplings: Sequence[Sampling], *_: None) -> Tensor:
    found = apply_guidance(logits, said, [replace(one, plausibility=0.0) for one in samplings])
    own = [b for b, one in enumerate(samplings) if one.guidance]
    for place, b in enumerate(own):
        g = said[place].softmax(-1)
        found[b] = found[b].masked_fill(g < samplings[b].plausibility * g.amax(-1, keepdim=True), -torch.inf)
    return found


def after_temperature(logits: Tensor, said: Tensor, samplings: Sequence[Sampling], *_: None) -> Tensor:
    return apply_guidance(logits / samplings[0].temperature, said, samplings) * samplings[0].temperature


def of_all_columns(self: Guide, rows: Sequence[Row], columns: Sequence[Sequence[int]], faults: Any) -> None:
    KEEP(self, rows, [range(len(one)) for one in columns], faults)


LOGITS, KEEP = Guide.logits, Guide.keep
SABOTAGES: dict[str, tuple[str, Any, str, Any]] = {
    "a rejected draft is kept": ("model", Guide, "keep", lambda *_: None),
    "the first columns of a tree are kept": ("trees", Guide, "keep", of_all_columns),
    "tokens of another row": ("model", Guide, "logits", of_its_neighbour),
    "plausibility by the guide": ("model", verify, "apply_guidance", cut_by_the_guide),
    "guidance after temperature": ("model", verify, "apply_guidance", after_temperature),
    "a guide that is not asked": ("plain", verify, "apply_guidance", lambda logits, *_: logits),
    "rows that left are not forgotten": ("plain", Guide, "leave", lambda *_: None),
    "rows that paused are not forgotten": ("plain", Guide, "pause", lambda *_: None),
}


@pytest.mark.parametrize("name", SABOTAGES)
def test_a_wrong_guide_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts, *patch = SABOTAGES[name]
    options = {"quantum": 4, "max_batch": 3} if "paused" in name else {}
    assert not fails(MADE[drafts], **options)
    monkeypatch.setattr(*patch)
    assert fails(MADE[drafts], **options)


# ── faults, limits and memory ───────────────────────────────────────────────────────────────────────────────────────


def test_a_guide_without_finite_logits_ends_its_row_alone() -> None:
    def damaged(ids: tuple[int, ...]) -> Tensor:
        return GUIDE(ids) * (torch.nan if ids[0] == 5 and len(ids) > 4 else 1.0)

    engine = engine_of(MADE["model"], guide=scripted(damaged, V))
    bad = replace(request(0, 1, guidance=0.6), prompt_ids=(5, 1))
    rows = [row for one in (request(2, 2), bad, request(3, 1)) for row in engine.submit(one)]
    while engine.step():
        pass
    failed = rows.pop(2)
    assert failed.finish_reason == "error"
    assert isinstance(failed.error, BadLogits)
    assert failed.new_tokens == 3
    assert as_decoded(rows)


def test_requests_that_no_guide_can_serve() -> None:
    with pytest.raises(RequestError, match="guidance needs a guide, and there is none"):
        engine_of(MADE["plain"], guide=None).submit(request(0))
    with pytest.raises(RequestError, match="plausibility goes with guidance"):
        engine_of(MADE["plain"]).submit(request(1, plausibility=0.1))
    with pytest.raises(RequestError, match="guidance must be a finite number"):
        Sampling(guidance=float("nan"))
    short = engine_of(MADE["plain"], guide=scripted(GUIDE, V, context=8))
    with pytest.raises(RequestError, match="the prompt has 11 tokens; scripted holds 8"):
        short.submit(request(2))
    (guided_row,), (other,) = short.submit(request(0, 1)), short.submit(request(1, 1))
    while short.step():
        pass
    assert (len(guided_row.tokens), guided_row.finish_reason) == (8, "length")
    assert other.new_tokens == 13  # rows without guidance have the target's context


def test_a_guide_must_take_the_drafters_trees() -> None:
    guide = scripted(GUIDE, V)
    guide.takes_trees = False
    with pytest.raises(UnsupportedModel, match="cannot verify draft trees"):
        engine_of(MADE["trees"], guide=guide)
    engine_of(MADE["model"], guide=guide)


def test_memory_counts_the_guide() -> None:
    made = [engine_of(MADE["plain"], guide=guide, kv_bytes=20_000) for guide in (None, scripted(GUIDE, V))]
    for engine in made:
        engine.submit(request(1, 3))
        while engine.step():
            pass
    alone, both = made
    assert both.memory.used == 2 * alone.memory.used > 0
    asked = request(3, 1, new=4)
    need = (asked.limits.max_new_tokens + len(asked.prompt_ids) + 1) * 8  # a float32 id and a position for each cell
    for kv_bytes, fits in ((2 * need - 1, False), (2 * need, True)):
        one = engine_of(MADE["plain"], kv_bytes=kv_bytes)
        with nullcontext() if fits else pytest.raises(RequestError, match=f"takes {2 * need} bytes of KV cache"):
            one.submit(asked)
    engine_of(MADE["plain"], guide=None, kv_bytes=need).submit(request(3, 1, new=4, guidance=0.0))
    target, together = (engine.memory.models[0] for engine in made)
    assert together.grown_bytes(64, 512) == 2 * target.grown_bytes(64, 512) > 0
    before = together.allocated_bytes
    for one in (target, together):
        one.trim(1, 8)
    assert before > together.allocated_bytes == 2 * target.allocated_bytes
    unshared = scripted(GUIDE, V)
    unshared.shares = False
    assert [engine_of(MADE["plain"], guide=one).memory.models[0].shares for one in (unshared, scripted(GUIDE, V))] == [
        False,
        True,
    ]


# ── Transformers models ─────────────────────────────────────────────────────────────────────────────────────────────


@cache
def models() -> tuple[Any, Any, Any]:
    """A target, a guide and a drafter that mostly agrees with neither."""
    shape = {"max_position_embeddings": 512}
    return tuple(tiny_model("llama", seed=seed, layers=layers, **shape) for seed, layers in ((0, 2), (1, 1), (0, 1)))  # type: ignore[return-value]


PROMPTS = [[7], list(range(20, 51)), [1, 2, 3, 4, 5]]


@cache
def stock(guidance: float, plausibility: float) -> list[list[int]]:
    target, guide, _ = models()
    return [greedy_ids(target, guide, prompt, 120, guidance, plausibility) for prompt in PROMPTS]


def drafters() -> dict[str, Callable[[], Drafter | None]]:
    def draft() -> Any:
        return runner(models()[2], 512).fork()

    return {
        "plain": lambda: None,
        "model": lambda: ModelDrafter(draft(), VOCABULARY),
        "suffix": lambda: SuffixDrafter("group", nodes=8),
        "trees": lambda: TreeDrafter(draft(), VOCABULARY, shape_of("rsd-s", 2, 6)),
    }


@pytest.mark.slow(but=["suffix"])
@pytest.mark.parametrize(
    "name", ["model", "suffix", *(pytest.param(name, marks=pytest.mark.slow) for name in ("plain", "trees"))]
)
def test_greedy_ids_are_those_of_a_loop_over_transformers(name: str) -> None:
    target, guide, _ = models()
    made = drafters()[name]()
    engine = Engine(runner(target, 512), made, Fixed(4 if made else 0), max_batch=7, guide=runner(guide, 512))
    sampling = Sampling(temperature=0, guidance=0.5, plausibility=0.1)
    rows = [row for ids in PROMPTS for row in engine.submit(Request(tuple(ids), 3, sampling, Limits(max_new_tokens=120)))]
    while engine.step():
        pass
    for row in rows:
        assert row.tokens[row.prompt_length :] == stock(0.5, 0.1)[PROMPTS.index(list(row.request.prompt_ids))]
    assert engine.stats.guide_passes == engine.stats.rounds
    assert name == "plain" or engine.stats.accepted > 0


def test_greedy_ids_are_those_of_transformers_own_guidance() -> None:
    """Its processor leads away from a model's logits after `unconditional_ids`: here the guide's, after the same prompt."""
    from transformers import LogitsProcessorList, UnbatchedClassifierFreeGuidanceLogitsProcessor

    target, guide, _ = models()
    for ids in PROMPTS:
        prompt = torch.tensor([ids])
        own = UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, guide, unconditional_ids=prompt)
        out = target.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False,
            logits_processor=LogitsProcessorList([own]),
        )  # fmt: skip
        assert out[0, len(ids) :].tolist() == greedy_ids(target, guide, ids, 40, 0.5)


def test_no_round_with_guidance_is_captured() -> None:
    from shoal.models.compiled.draft_functions import style_of

    draw = Rejection().draw
    assert style_of([Sampling(), Sampling()], 8, draw) is not None
    assert style_of([Sampling(), Sampling(guidance=0.1)], 8, draw) is None
