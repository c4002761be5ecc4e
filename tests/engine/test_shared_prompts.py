"""A group's prompt stored once: the same tokens as with copies, m_c + n * m_d token slots, and every one given back.

Tests of: engine.prefix_cache, engine.admission, engine.memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import prompts as bench
from attention_paths import KINDS, UNSHARED, prompt
from by_pairs import by_pairs
from shoal.config import Limits, Sampling
from shoal.engine.admission import MIN_SAVED_TOKENS, POLICIES, PrefixStore
from shoal.engine.engine import Engine
from shoal.engine.memory import grade
from shoal.engine.prefix_cache import policy_for
from shoal.errors import InternalError, RequestError
from shoal.lookahead.controller import Fixed
from shoal.models import loading
from shoal.models.cache import SlotCache
from shoal.models.runner import Runner
from shoal.native.build import missing
from shoal.testing import ARCHITECTURES, VOCABULARY, tiny_model
from shoal.testing.architectures import WINDOW
from shoal.testing.drafters import engine_of, runners_of
from shoal.testing.scripted import hashed, mixed, scripted
from shoal.types.requests import Prefix, Request, Row, token_slots

ERROR = 1e-4  # of the logits' standard deviation, see test_architectures.py
K = 3


# ── token slots ─────────────────────────────────────────────────────────────────────────────────────────────────────

groups = st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=30)


@given(groups)
def test_no_two_prompts_share_a_cell(asked: Sequence[tuple[int, bool]]) -> None:
    """Groups come and go; nothing is moved, nothing overlaps, and the store is as large as it had to be."""
    store = PrefixStore("shared")
    living: dict[int, Prefix] = {}
    for group, (length, leaves) in enumerate(asked):
        before = token_slots(store.prefixes.values())
        store = store.add(group, 1, length)
        prefix = store.prefixes[group]
        assert prefix.length == length
        taken = sorted((p.base, p.base + p.length) for p in [*living.values(), prefix])
        assert all(end <= base for (_, end), (base, _) in pairwise(taken))
        assert token_slots(store.prefixes.values()) == max(before, prefix.base + length)
        living[group] = prefix
        if leaves:
            del living[min(living)]
        store = store.without(set(range(group + 1)) - set(living))
        assert store.prefixes == living


def test_holes_are_used_again() -> None:
    store = PrefixStore("shared")
    for group in range(3):
        store = store.add(group, 1, 10)
    assert store.prefixes == {0: Prefix(0, 10), 1: Prefix(10, 10), 2: Prefix(20, 10)}
    store = store.without([1]).add(3, 1, 4).add(4, 1, 6).add(5, 1, 1)
    assert [store.prefixes[group] for group in (3, 4, 5)] == [Prefix(10, 4), Prefix(14, 6), Prefix(30, 1)]
    store = store.without(range(6)).add(6, 1, 31)
    assert store.prefixes == {6: Prefix(0, 31)}
    assert token_slots(store.prefixes.values()) == 31


@pytest.mark.parametrize(
    ("policy", "rows", "length", "shared"),
    [
        ("auto", 2, MIN_SAVED_TOKENS, True),
        ("auto", 2, MIN_SAVED_TOKENS - 1, False),
        ("auto", 4, 2047, True),
        ("auto", 1 + MIN_SAVED_TOKENS, 1, True),
        ("auto", 1, 100 * MIN_SAVED_TOKENS, False),
        ("shared", 1, 1, True),
        ("shared", 1, 0, False),
        ("copied", 64, 9999, False),
    ],
)
def test_who_shares(policy: str, rows: int, length: int, shared: bool) -> None:
    assert (0 in PrefixStore(policy).add(0, rows, length).prefixes) is shared


def test_auto_keeps_to_captured_rounds() -> None:
    """Unless they know shared prompts; "shared" is obeyed, except by what cannot."""
    llama = loading.wrap(tiny_model("llama"), "llama", checked=False)
    static = llama.fork()
    static.capture_rounds("eager")
    assert static.captures is not None
    assert not static.captures.knows_prefixes  # without a kernel
    models = [llama.memory, static.memory]
    assert [policy_for(p, models) for p in POLICIES] == ["copied", "shared", "copied"]
    static.captures.knows_prefixes = True
    assert [policy_for(p, models) for p in POLICIES] == [
        "auto" if missing() else "grouped",
        "shared",
        "copied",
    ]
    strict = loading.wrap(hf_of("llama"), "llama", "strict", checked=False)
    assert [policy_for(p, [llama.memory, strict.memory]) for p in POLICIES] == ["copied"] * 3


def test_an_unknown_policy() -> None:
    target = scripted(hashed(VOCABULARY), VOCABULARY)
    with pytest.raises(RequestError, match="prefix_sharing must be one of auto, shared, copied, got 'twice'"):
        engine_of(target, None, Fixed(0), prefix_sharing="twice")


# ── the cache ───────────────────────────────────────────────────────────────────────────────────────────────────────


@lru_cache(maxsize=1)
def hf_of(architecture: str) -> object:
    return tiny_model(architecture)


def logits_of(runner: Runner, prefixes: Sequence[Prefix | None], starts: Sequence[int], *, wrong: int = 0) -> list[Tensor]:
    """Two passes, of several and of one token, by rows that begin with two prompts; `wrong`: added to where they look for them."""
    ids = [prompt(30, 1), prompt(30, 2)]
    which = [0, 0, 1, 1, 0]
    runner.memory.reserve(len(which), 40, 40)
    for slot, (prefix, start, of) in enumerate(zip(prefixes, starts, which, strict=True)):
        runner.cache.enter(slot)
        if prefix is None:
            runner.feed([slot], torch.tensor([ids[of][:start]]), [start], want_logits=False)
        else:
            runner.feed_prefix(prefix, 0, torch.tensor([ids[of][: prefix.length]]))
            runner.cache.enter(slot, Prefix(prefix.base + wrong, prefix.length))
            if start > prefix.length:
                runner.feed(
                    [slot], torch.tensor([ids[of][prefix.length : start]]), [start - prefix.length], want_logits=False
                )
    seen = []
    positions = list(starts)
    for slots, counts in (([0, 1, 2, 3, 4], [3, 1, 4, 4, 2]), ([4, 2, 0], [1, 1, 1])):
        block = torch.zeros(len(slots), max(counts), dtype=torch.long)
        for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            block[row, :count] = torch.tensor(ids[which[slot]][positions[slot] : positions[slot] + count])
            positions[slot] += count
        logits = runner.feed(slots, block, counts)
        seen += [logits[row, :count] for row, count in enumerate(counts)]
    assert runner.cache.lengths == positions
    return seen


SHARED: list[Prefix | None] = [Prefix(1, 13), Prefix(1, 13), Prefix(14, 17), Prefix(14, 17), None]
STARTS = [13, 18, 17, 20, 11]


@pytest.mark.parametrize("architecture", [name for name in KINDS if name in ARCHITECTURES.keys() - UNSHARED])
def test_a_stored_prompt_is_as_good_as_copies(architecture: str) -> None:
    """Two prompts, rows that have begun and rows that have not, one row without; windows end within the prompts."""
    assert WINDOW < 13
    runner = loading.wrap(hf_of(architecture), architecture)
    assert runner.shares
    expected = logits_of(runner.fork(), [None] * 5, STARTS)
    spread = float(torch.cat(expected).std())
    for method in (runner, loading.wrap(hf_of(architecture), architecture, "reference", checked=False)):
        found = logits_of(method.fork(), SHARED, STARTS)
        assert max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) < ERROR * spread


@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_wrong_base_shows(wrong: int) -> None:
    """Negative control for the test above."""
    runner = loading.wrap(hf_of("llama"), "llama")
    expected = logits_of(runner.fork(), [None] * 5, STARTS)
    found = logits_of(runner.fork(), SHARED, STARTS, wrong=wrong)
    spread = float(torch.cat(expected).std())
    differences = [float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)]
    assert min(differences[:4]) > 0.1 * spread
    assert differences[4] < ERROR * spread  # the row that has its own copy


@pytest.mark.parametrize("architecture", ["deepseek-v3", "mpt"])
def test_models_that_cannot_share_get_copies(architecture: str) -> None:
    runner = loading.wrap(hf_of(architecture), architecture)
    assert not runner.shares
    engine, _, _ = run(runner, None, [(prompt(9), 3, 4)], prefix_sharing="shared")
    assert engine.target.cache.cells == 0
    assert engine.stats.prefills == 1


def test_long_prompts_are_stored_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = loading.wrap(hf_of("llama"), "llama")
    fed: list[int] = []
    real = Runner.feed_prefix

    def feed_prefix(self: Runner, prefix: Prefix, start: int, tokens: Tensor) -> None:
        fed.append(tokens.shape[1])
        real(self, prefix, start, tokens)

    monkeypatch.setattr(Runner, "feed_prefix", feed_prefix)
    whole = run(runner, None, [(prompt(24), 2, 6)])[1]
    monkeypatch.setattr("shoal.models.prompt_passes.MAX_PASS_WIDTH", 10)
    pieces = run(runner, None, [(prompt(24), 2, 6)])[1]
    assert fed == [23, 10, 10, 3]
    assert pieces == whole


def test_a_stored_prompt_cannot_be_rolled_back() -> None:
    cache = SlotCache()
    cache.reserve(1, 8, 8)
    cache.enter(0, Prefix(0, 5))
    cache.rollback(0, 5)
    with pytest.raises(InternalError, match="cannot roll slot 0 of length 5 back to 4, 5 of them shared"):
        cache.rollback(0, 4)


def test_a_prompt_that_does_not_fit() -> None:
    runner = loading.wrap(hf_of("llama"), "llama").fork()
    runner.memory.reserve(1, 8, 8)
    with pytest.raises(InternalError, match="shared store of 8 cells got 3 tokens at 6"):
        runner.feed_prefix(Prefix(6, 3), 0, torch.tensor([[1, 2, 3]]))


# ── through the engine ──────────────────────────────────────────────────────────────────────────────────────────────

Asked = Sequence[tuple[Sequence[int], int, int]]
"""Prompt, n, new tokens."""


def run(
    target: Runner, drafter: Runner | None, asked: Asked, *, prefix_sharing: str = "shared", max_batch: int = 8,
    temperature: float = 0.0,
) -> tuple[Engine, list[list[int]], list[Row]]:  # fmt: skip
    """The engine afterwards, and all rows' new tokens."""
    engine = engine_of(target, drafter, Fixed(K if drafter else 0), max_batch=max_batch, prefix_sharing=prefix_sharing)
    rows = submitted(engine, asked, temperature)
    while engine.step():
        check(engine)
    return engine, [row.tokens[row.prompt_length :] for row in rows], rows


def submitted(engine: Engine, asked: Asked, temperature: float) -> list[Row]:
    sampling = Sampling(temperature=temperature, seed=5)
    requests = [Request(tuple(ids), n, sampling, Limits(max_new_tokens=new)) for ids, n, new in asked]
    return [row for request in requests for row in engine.submit(request)]


def check(engine: Engine) -> None:
    """Every running row finds its prompt where it was put, rows of a group in the same token slots, other groups in others."""
    found = {row.group: row.prefix for row in engine.scheduler.running}
    for model in runners_of(engine):
        for row in engine.scheduler.running:
            assert model.cache.prefixes[row.slot] == row.prefix == found[row.group]
    taken = sorted((p.base, p.base + p.length) for p in found.values() if p is not None)
    assert all(end <= base for (_, end), (base, _) in pairwise(taken))


PAIRS = [(prompt(20), 3, 9), (prompt(2), 2, 12), (prompt(1), 2, 5), (prompt(33), 5, 7), (prompt(12), 1, 11)]
"""Several groups, of one row too and of one token too, and more rows than run at once."""


@lru_cache(maxsize=1)
def pair() -> tuple[Runner, Runner]:
    """A target, and a drafter that is right now and then."""
    script = hashed(VOCABULARY, 0)
    return scripted(script, VOCABULARY), scripted(mixed(script, hashed(VOCABULARY, 1)), VOCABULARY)


@by_pairs({"max_batch": [1, 4, 16], "temperature": [0.0, 1.0], "speculative": [False, True]})
def test_ids_are_those_of_copied_prompts(max_batch: int, temperature: float, speculative: bool) -> None:
    """By a model that says something else after any other history, and checks the position of each cell it sees."""
    target, drafter = pair()
    draft = drafter if speculative else None
    copied, expected, _ = run(target, draft, PAIRS, prefix_sharing="copied", max_batch=max_batch, temperature=temperature)
    shared, ids, rows = run(target, draft, PAIRS, max_batch=max_batch, temperature=temperature)
    assert ids == expected
    assert [row.prefix is not None for row in rows] == [len(p) > 1 for p, n, _ in PAIRS for _ in range(n)]
    assert shared.stats.prefills == copied.stats.prefills == len(PAIRS)
    assert shared.stats.prefill_tokens == copied.stats.prefill_tokens == sum(len(p) - 1 for p, _, _ in PAIRS)
    assert (shared.stats.rounds, shared.stats.accepted) == (copied.stats.rounds, copied.stats.accepted)
    if speculative:
        assert 0 < shared.stats.accepted < shared.stats.drafted


@pytest.mark.slow(but=["llama"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2-sliding", "gpt-bigcode-mqa", "gpt-oss", "gemma2"])
def test_ids_of_a_real_pair(architecture: str) -> None:
    target = loading.wrap(tiny_model(architecture), architecture)
    drafter = loading.wrap(tiny_model(architecture, seed=0), architecture)
    for temperature in (0.0, 1.0):
        expected = run(target, drafter, PAIRS, prefix_sharing="copied", max_batch=4, temperature=temperature)[1]
        engine, ids, _ = run(target, drafter, PAIRS, max_batch=4, temperature=temperature)
        assert ids == expected
        assert all(model.cache.cells > 0 for model in runners_of(engine))


def test_captured_rounds_leave_shared_prompts_to_ordinary_passes() -> None:
    target = loading.wrap(tiny_model("llama"), "llama")
    expected = run(target, target, PAIRS, prefix_sharing="copied", max_batch=4)[1]
    target.capture_rounds("eager")
    engine, ids, _ = run(target, target, PAIRS, max_batch=4)
    assert ids == expected
    assert engine.target.cache.cells > 0
    assert target.captures is not None
    assert target.captures.failures == []


def test_a_wrong_base_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control for the tests above: the second group's rows look one cell beside their prompt."""
    real = SlotCache.enter

    def enter(self: SlotCache, slot: int, prefix: Prefix | None = None) -> None:
        real(self, slot, Prefix(prefix.base - 1, prefix.length) if prefix is not None and prefix.base else prefix)

    monkeypatch.setattr(SlotCache, "enter", enter)
    engine = engine_of(pair()[0], None, Fixed(0), max_batch=8, prefix_sharing="shared")
    submitted(engine, PAIRS, 0.0)
    with pytest.raises(AssertionError, match="sees in cell 0 what was written at position 18"):
        engine.step()


# ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def tensor_bytes(cache: SlotCache) -> int:
    tensors = [t for layer in cache._layers for t in (*layer.tensors(), layer.shared_keys, layer.shared_values)]
    return sum(t.untyped_storage().nbytes() for t in tensors)


@pytest.mark.parametrize("n", [1, 4, 8])
def test_bytes_are_one_prompt_and_n_tails(n: int) -> None:
    """m_c + n * m_d token slots against n * (m_c + m_d)."""
    target = loading.wrap(hf_of("llama"), "llama")
    length, new = 50, 6
    shared, copied = (
        run(target, None, [(prompt(length), n, new)], prefix_sharing=p)[0].target.cache for p in ("shared", "copied")
    )
    assert (
        tensor_bytes(shared) == shared.nbytes() == (grade(length - 1) + grade(n) * grade(new + 2)) * shared.bytes_per_token()
    )
    assert tensor_bytes(copied) == copied.nbytes() == grade(n) * grade(length + new + 1) * copied.bytes_per_token()


def test_the_measured_cases_are_what_they_say() -> None:
    """The benchmark of shared against copied prompts: the same logits from caches of the sizes told, and none too large."""
    model = bench.random_llama(2, 32, 4, 2, "float32", "cpu")
    size = model.cache.bytes_per_token()
    line = bench.measure(model, bench.Case(length=30, rows=3, tail=4, q=2), repeats=2, most_bytes=1 << 30)
    assert (line.shared_bytes, line.copied_bytes) == ((30 + 3 * 6) * size, 3 * 36 * size)
    assert line.difference is not None
    assert line.difference < ERROR
    assert line.copied_ms is not None
    tight = bench.measure(model, bench.Case(30, 3, 4, 2), repeats=2, most_bytes=48 * size)
    assert (tight.copied_bytes, tight.copied_ms, tight.speedup) == (line.copied_bytes, None, None)
    with pytest.raises(RequestError, match="does not fit into"):
        bench.measure(model, bench.Case(30, 3, 4, 2), repeats=2, most_bytes=47 * size)


def test_the_store_is_no_larger_than_what_was_needed_at_once() -> None:
    """Ten groups, one after the other, in the token slots of the longest."""
    asked = [(prompt(5 + i % 4), 2, 3) for i in range(10)]
    engine, _, rows = run(pair()[0], None, asked, max_batch=2)
    assert engine.target.cache.cells == 7
    assert {row.prefix.base for row in rows if row.prefix} == {0}


# ── rows that end early ─────────────────────────────────────────────────────────────────────────────────────────────


def test_cancelled_and_late_rows_give_their_prompts_back() -> None:
    target, drafter = pair()
    now = time.perf_counter()
    engine = engine_of(target, drafter, Fixed(K), max_batch=4, prefix_sharing="shared", clock=lambda: now)
    first, second = (
        engine.submit(Request(prompt(n), 3, Sampling(temperature=0), Limits(max_new_tokens=20))) for n in (20, 14)
    )
    late = engine.submit(Request(prompt(30), 2, Sampling(temperature=0), Limits(max_new_tokens=20, time_budget=60.0)))
    stored = lambda: engine.scheduler.slots.store.prefixes  # noqa: E731
    engine.step()
    assert stored() == {0: Prefix(0, 19), 1: Prefix(19, 13)}
    engine.cancel(first)
    assert 0 not in stored()
    engine.step()  # the late ones join, and do not fit where the first were
    check(engine)
    assert stored() == {1: Prefix(19, 13), 2: Prefix(32, 29)}
    now += 61.0
    engine.step()
    assert [row.finish_reason for row in late] == ["time", "not started"]
    assert 2 not in stored()
    again = engine.submit(Request(prompt(9), 1, Sampling(temperature=0), Limits(max_new_tokens=20)))
    while engine.step():
        check(engine)
    assert again[0].prefix == Prefix(0, 8)
    assert stored() == {}
    assert engine.scheduler.idle
    alone = [run(target, None, [(prompt(n), 1, 20)], prefix_sharing="copied")[1][0] for n in (14, 9)]
    assert [row.tokens[row.prompt_length :] for row in (*second, *again)] == [alone[0]] * 3 + [alone[1]]


def test_a_waiting_row_finds_the_prompt_after_all_others_have_gone() -> None:
    engine = engine_of(pair()[0], None, Fixed(0), max_batch=2, prefix_sharing="shared")
    rows = submitted(engine, [(prompt(10), 3, 4)], 0.0)
    engine.step()
    engine.cancel(rows[:2])
    while engine.step():
        check(engine)
    assert engine.stats.prefills == 1
    assert rows[2].tokens == [*prompt(10), *run(pair()[0], None, [(prompt(10), 1, 4)], prefix_sharing="copied")[1][0]]
