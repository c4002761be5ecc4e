"""Speculative equals plain, id for id, under every sampling control; log-probabilities are those of a forward from scratch.

Greedy rows equal plain decoding with any drafter. Sampled rows do when the drafter is the target, since both draw a token with the
same uniform. Plain decoding is `shoal.testing.reference`: one row, no cache, no batch, a stock Transformers model.

Tests of: engine.commit, engine.logprobs, types.trees, engine.engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from noisy_heads import noisy
from shoal.config import Limits, Sampling
from shoal.engine.engine import Engine
from shoal.engine.logprobs import _raw
from shoal.lookahead.controller import Fixed, Lookahead
from shoal.sampling.distributions import probabilities
from shoal.testing import reference, tiny_model
from shoal.testing.drafters import engine_of
from shoal.testing.scripted import ScriptedModel, hashed, mixed, runner
from shoal.types.requests import Request, Row
from shoal.types.samples import Sample
from shoal.types.trees import Positions

NEW = 12
EOS = (17, 200)

ERROR = 5e-5
"""As in tests/models/test_cache.py: logits reach 10, float32 sums in another order differ by 1e-6 of that, and CPUs differ."""


def alternate(ids: Tensor, scores: Tensor) -> Tensor:
    """A caller's own processor: even and odd ids take turns, by the length of the history."""
    odd = torch.arange(scores.shape[-1]) % 2 == ids.shape[-1] % 2
    return scores.masked_fill(odd, -torch.inf)


CONTROLS: dict[str, dict[str, Any]] = {
    "none": {},
    "cool": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "typical_p": {"typical_p": 0.6},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "logit_bias": {"logit_bias": {3: 6.0, 7: 5.0, 9: -100.0}},
    "bad_words": {"bad_words": [[3], [7, 9], [1, 2, 3]]},
    "min_new_tokens": {"min_new_tokens": 9, "logit_bias": {EOS[0]: 8.0}},
    "no_repeat_ngram": {"no_repeat_ngram": 2, "logit_bias": {3: 9.0, 7: 8.5}},
    "no repeat at all": {"no_repeat_ngram": 1, "logit_bias": {3: 9.0, 7: 8.5}},
    "processors": {"processors": [alternate]},
    "Transformers processors": {"processors": [RepetitionPenaltyLogitsProcessor(1.5), MinPLogitsWarper(0.05)]},
    "everything": {
        "temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.95, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {3: 2.0}, "bad_words": [[7, 9]], "min_new_tokens": 4,
        "no_repeat_ngram": 3, "processors": [alternate],
    },
}  # fmt: skip
GREEDY = [name for name in CONTROLS if name not in ("cool", "hot", "top_k", "top_p", "min_p", "typical_p")]


@cache
def target() -> Any:
    return tiny_model("llama", seed=3)


@cache
def drafter() -> Any:
    """The target with noise on its head: right now and then."""
    return noisy(target(), 0.3)


PROMPTS = ((5, 3, 7, 3, 7), (9,), tuple(range(40, 63)))


def requests(name: str, n: int = 2, **changes: Any) -> list[Request]:
    """Ragged prompts under one control."""
    top = changes.pop("top_logprobs", 0)
    sampling = Sampling(**{"seed": 11, **CONTROLS[name], **changes})
    return [Request(prompt, n, sampling, Limits(max_new_tokens=NEW), top_logprobs=top) for prompt in PROMPTS]


def decode(asked: Sequence[Request], draft: Any, k: int, max_batch: int = 4) -> tuple[Engine, list[Row], list[Sample]]:
    engine = engine_of(runner(target(), 128), runner(draft, 128), Fixed(k), max_batch=max_batch, eos=EOS)
    rows = [row for request in asked for row in engine.submit(request)]
    samples = {}
    while commits := engine.step():
        samples.update({id(c.row): c.sample for c in commits if c.sample is not None})
    return engine, rows, [samples[id(row)] for row in rows]


def plain(asked: Sequence[Request]) -> list[list[int]]:
    return [reference.decode(target(), request, i, EOS) for request in asked for i in range(request.n)]


# ── ids ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_with_any_drafter(name: str) -> None:
    asked = requests(name, n=1, temperature=0)
    engine, _, samples = decode(asked, drafter(), 4)
    assert [list(sample.token_ids) for sample in samples] == plain(asked)
    assert 0 < engine.stats.accepted < engine.stats.drafted


@pytest.mark.parametrize("name", CONTROLS)
def test_sampled_with_the_target_as_its_own_drafter(name: str) -> None:
    asked = requests(name)
    engine, _, samples = decode(asked, target(), 4)
    assert [list(sample.token_ids) for sample in samples] == plain(asked)
    # A draft can only be wasted behind an EOS.
    wasted = sum(sample.drafted - sample.accepted for sample in samples if sample.finish_reason != "eos")
    assert wasted == 0 < engine.stats.accepted


@pytest.mark.parametrize("name", ["none", "everything"])
def test_sampled_without_speculation(name: str) -> None:
    asked = requests(name)
    engine, _, samples = decode(asked, target(), 0)
    assert [list(sample.token_ids) for sample in samples] == plain(asked)
    assert engine.stats.drafted == engine.stats.draft_passes == 0


def test_all_controls_in_one_batch() -> None:
    """Rows of different settings, greedy ones among them, side by side."""
    asked = [request for name in CONTROLS for request in requests(name, n=1)[:2]]
    asked += [request for name in GREEDY for request in requests(name, n=1, temperature=0)[:1]]
    _, _, samples = decode(asked, target(), 3, max_batch=len(asked))
    assert [list(sample.token_ids) for sample in samples] == plain(asked)


# ── log-probabilities ───────────────────────────────────────────────────────────────────────────────────────────────


def from_scratch(row: Row) -> tuple[Tensor, Tensor]:
    """(raw, processed) log-probabilities [new, vocab] of a row, from one stock forward over all of it."""
    start = row.prompt_length
    with torch.inference_mode():
        logits = target()(torch.tensor([row.tokens]), use_cache=False).logits[0, start - 1 : -1].double()
    processed = []
    for t in range(row.new_tokens):
        before = Row(row.request, 0, 0, 0, row.tokens[: start + t], row.eos, row.max_length)
        processed.append(probabilities(logits[None, t, None], Positions([before], [[]]))[0, 0].log())
    return logits.log_softmax(dim=-1), torch.stack(processed)


@pytest.mark.parametrize("name", CONTROLS)
@pytest.mark.parametrize("k", [0, 4])
def test_logprobs_before_and_after_processing(name: str, k: int) -> None:
    _, rows, samples = decode(requests(name), drafter(), k)
    for row, sample in zip(rows, samples, strict=True):
        raw, processed = from_scratch(row)
        ids = torch.tensor(sample.token_ids)[:, None]
        assert sample.logprobs == pytest.approx(raw.gather(1, ids).squeeze(1).tolist(), abs=ERROR)
        assert sample.processed_logprobs == pytest.approx(processed.gather(1, ids).squeeze(1).tolist(), abs=ERROR)
        assert sample.mean_logprob == pytest.approx(sum(sample.logprobs) / len(sample.logprobs))
        assert len(sample.logprobs) == len(sample.processed_logprobs) == len(sample.token_ids)


def test_logprobs_of_16_bit_logits_have_32() -> None:
    logits = torch.randn(2, 2, 9, generator=torch.Generator().manual_seed(1)).bfloat16()
    (one, other) = _raw(logits, [[3, 4], [5]], [[0, 1], [0]])
    exact = logits.float().log_softmax(-1)
    assert [*one, *other] == pytest.approx([float(exact[0, 0, 3]), float(exact[0, 1, 4]), float(exact[1, 0, 5])], abs=1e-6)


def test_logprobs_are_equal_whatever_the_draft_length() -> None:
    asked = requests("repetition_penalty", temperature=0, top_logprobs=3)
    expected = decode(asked, drafter(), 0)[2]
    for k in (1, 4, 9):
        for sample, right in zip(decode(asked, drafter(), k)[2], expected, strict=True):
            assert sample.token_ids == right.token_ids
            assert sample.logprobs == pytest.approx(right.logprobs, abs=ERROR)
            assert sample.processed_logprobs == (0.0,) * len(sample.token_ids)
            for top, other in zip(sample.top_logprobs, right.top_logprobs, strict=True):
                assert [t for t, _ in top.raw] == [t for t, _ in other.raw]


@pytest.mark.parametrize("name", ["none", "top_k", "everything"])
@pytest.mark.parametrize("k", [0, 4])
def test_top_logprobs(name: str, k: int) -> None:
    _, rows, samples = decode(requests(name, top_logprobs=6), drafter(), k)
    for row, sample in zip(rows, samples, strict=True):
        assert len(sample.top_logprobs) == len(sample.token_ids)
        raw, processed = from_scratch(row)
        for t, top in enumerate(sample.top_logprobs):
            assert_top(top.raw, raw[t])
            assert_top(top.processed, processed[t])


def assert_top(top: Sequence[tuple[int, float]], right: Tensor) -> None:
    """The six most probable of what is possible, best first."""
    values, ids = right.topk(min(6, int((right > -math.inf).sum())))
    assert [token for token, _ in top] == ids.tolist()
    assert [value for _, value in top] == pytest.approx(values.tolist(), abs=ERROR)


def test_greedy_tokens_lead_the_top() -> None:
    _, _, samples = decode(requests("none", temperature=0, top_logprobs=1), drafter(), 4)
    for sample in samples:
        assert [top.raw[0][0] for top in sample.top_logprobs] == list(sample.token_ids)
        assert [top.raw[0][1] for top in sample.top_logprobs] == pytest.approx(list(sample.logprobs))
        assert [top.processed for top in sample.top_logprobs] == [((token, 0.0),) for token in sample.token_ids]


def test_kept_logits_are_those_of_the_committed_positions() -> None:
    """Also of rows that end within a block."""
    engine = engine_of(runner(target(), 128), runner(target(), 128), Fixed(4))
    limits = Limits(max_new_tokens=NEW, eos=tuple(range(0, 256, 6)))
    rows = engine.submit(Request(PROMPTS[0], 5, Sampling(seed=1), limits, keep_logits=True))
    while engine.step():
        pass
    assert sum(row.finish_reason == "eos" for row in rows) > 2
    for row in rows:
        kept = torch.stack(row.logits).log_softmax(-1).double()
        torch.testing.assert_close(kept, from_scratch(row)[0], rtol=0, atol=5e-5)


# ── any schedule ────────────────────────────────────────────────────────────────────────────────────────────────────

VOCAB = 7
SCRIPT = hashed(VOCAB, 0)
TARGET = ScriptedModel(SCRIPT, VOCAB)
WAVERING = ScriptedModel(mixed(SCRIPT, hashed(VOCAB, 1)), VOCAB)

token = st.integers(0, VOCAB - 1)
samplings = st.fixed_dictionaries(
    {"seed": st.integers(0, 3)},
    optional={
        "temperature": st.sampled_from([0.0, 0.7, 1.5]),
        "top_k": st.integers(1, VOCAB),
        "top_p": st.sampled_from([0.5, 0.9]),
        "min_p": st.sampled_from([0.05, 0.3]),
        "typical_p": st.sampled_from([0.5, 0.9]),
        "repetition_penalty": st.sampled_from([0.8, 2.0]),
        "presence_penalty": st.sampled_from([-1.0, 1.0]),
        "frequency_penalty": st.sampled_from([-0.5, 0.7]),
        "min_new_tokens": st.integers(0, 6),
        "bad_words": st.lists(st.lists(token, min_size=2, max_size=3), max_size=2),
        "logit_bias": st.dictionaries(token, st.sampled_from([-3.0, 2.0]), max_size=2),
    },
).map(lambda options: Sampling(**options))
limits = st.builds(Limits, max_new_tokens=st.integers(1, 12), eos=st.lists(token, max_size=2).map(tuple))
any_request = st.builds(Request, st.lists(token, min_size=1, max_size=9).map(tuple), st.integers(1, 4), samplings, limits)
actions = st.one_of(
    any_request,
    st.integers(1, 4),  # rounds
    st.lists(st.integers(0, 30), min_size=1, max_size=3).map(tuple),  # rows to cancel
)


class Lengths:
    """Draft lengths that come as they come; each row is still the same."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.limit, self._lengths, self._round = max(lengths), lengths, 0

    def next_length(self) -> int:
        self._round += 1
        return self._lengths[self._round % len(self._lengths)]

    def update(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        assert len(drafted) == len(accepted)
        assert all(0 <= a <= d for a, d in zip(accepted, drafted, strict=True))


def follow(engine: Engine, schedule: Sequence[Any]) -> tuple[list[Row], dict[int, Sample], set[int]]:
    """Submits, steps and cancels as told, then runs dry; (rows, samples, cancelled ones)."""
    rows: list[Row] = []
    samples: dict[int, Sample] = {}
    cancelled: set[int] = set()

    def take(commits: Sequence[Any]) -> None:
        for commit in commits:
            if commit.sample is not None:
                assert id(commit.row) not in samples  # a row ends once
                samples[id(commit.row)] = commit.sample

    for action in schedule:
        if isinstance(action, Request):
            rows += engine.submit(action)
        elif isinstance(action, int):
            for _ in range(action):
                take(engine.step())
        else:
            chosen = [rows[i] for i in action if i < len(rows)]
            cancelled |= {id(row) for row in chosen if row.finish_reason is None}
            take(engine.cancel(chosen))
    while commits := engine.step():
        take(commits)
    return rows, samples, cancelled


def assert_plain(rows: Sequence[Row], samples: dict[int, Sample], cancelled: set[int]) -> None:
    """Every row says what plain decoding says, or as much of it as it was given time for."""
    for row in rows:
        sample = samples[id(row)]
        right = reference.decode(TARGET, row.request, row.index, tuple(row.eos))
        if id(row) in cancelled:
            assert sample.finish_reason == "cancelled"
            assert list(sample.token_ids) == right[: len(sample.token_ids)]
        else:
            assert list(sample.token_ids) == right
            assert sample.finish_reason == ("eos" if right[-1] in row.eos else "length")
        assert len(sample.logprobs) == len(sample.token_ids) == row.accepted + row.rounds or sample.finish_reason == "eos"


def assert_run(make: Callable[[], Lookahead], draft: ScriptedModel, capacity: int, schedule: Sequence[Any]) -> None:
    engine = engine_of(runner(TARGET), runner(draft), make(), max_batch=capacity)
    rows, samples, cancelled = follow(engine, schedule)
    assert_plain(rows, samples, cancelled)
    stats = engine.stats
    assert stats.committed == sum(len(sample.token_ids) for sample in samples.values())
    assert stats.drafted == sum(sample.drafted for sample in samples.values())
    assert stats.accepted == sum(sample.accepted for sample in samples.values())
    assert stats.row_rounds == sum(sample.target_passes for sample in samples.values())
    assert stats.prefills <= len({row.group for row in rows})
    assert engine.scheduler.idle


@settings(max_examples=80)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(1, 6), st.lists(actions, max_size=12))
def test_any_schedule_sampled(lengths: Sequence[int], capacity: int, schedule: Sequence[Any]) -> None:
    """Prompts, n, controls, capacity, draft lengths, late arrivals and cancellations, with the target as its own drafter."""
    assert_run(lambda: Lengths(lengths), TARGET, capacity, schedule)


@settings(max_examples=80)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(1, 6), st.lists(actions, max_size=12))
def test_any_schedule_greedy(lengths: Sequence[int], capacity: int, schedule: Sequence[Any]) -> None:
    """The same, greedily, with a drafter that is right now and then."""
    greedy = [
        Request(a.prompt_ids, a.n, Sampling(**{**vars(a.sampling), "temperature": 0.0}), a.limits)
        if isinstance(a, Request)
        else a
        for a in schedule
    ]
    assert_run(lambda: Lengths(lengths), WAVERING, capacity, greedy)
