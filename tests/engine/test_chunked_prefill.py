"""Long prompts in chunks between rounds, and rows admitted by the memory they need: the same tokens, no running row stalled.

Tests of: engine.scheduler, models.prompt_passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.config import Limits, Sampling
from shoal.engine.engine import Engine
from shoal.engine.scheduler import CHUNK, Scheduler
from shoal.errors import RequestError
from shoal.lookahead.controller import Fixed
from shoal.models import prompt_passes
from shoal.models.runner import Runner
from shoal.models.runner_parts import CacheMemory
from shoal.sampling.acceptance import Coupled
from shoal.testing import VOCABULARY, tiny_model
from shoal.testing.drafters import engine_of, runners_of
from shoal.testing.scripted import hashed, mixed, runner, scripted
from shoal.types.requests import Prefix, Request, Row, token_slots
from shoal.types.rounds import PrefillChunk

VOCAB = 12
LONG = tuple(1 + i * i % 11 for i in range(41))
OTHER = tuple(1 + i % 7 for i in range(30))


def pair(real: bool) -> tuple[Runner, Runner]:
    if real:
        return runner(tiny_model("llama"), 128), runner(tiny_model("llama", seed=1, layers=1), 128)
    return scripted(hashed(VOCAB, 0), VOCAB), scripted(mixed(hashed(VOCAB, 0), hashed(VOCAB, 1)), VOCAB)


def chunking(
    chunk: int = CHUNK, prefix_sharing: str = "copied", k: int = 3, max_batch: int = 8, real: bool = False, **more: int
) -> Engine:
    return engine_of(
        *pair(real), Fixed(k), max_batch=max_batch, rule=Coupled(), prefix_sharing=prefix_sharing, chunk=chunk, **more
    )


def ask(engine: Engine, prompt: Sequence[int], n: int = 1, new: int = 12) -> list[Row]:
    return engine.submit(Request(tuple(prompt), n, Sampling(seed=len(prompt)), Limits(max_new_tokens=new)))


def finish(engine: Engine) -> None:
    while engine.step():
        pass
    assert engine.scheduler.idle


def new_tokens(rows: Sequence[Row]) -> list[list[int]]:
    return [row.tokens[row.prompt_length :] for row in rows]


def alone(prompt: Sequence[int], n: int = 1, new: int = 12, real: bool = False) -> list[list[int]]:
    engine = chunking(real=real, k=0)
    rows = ask(engine, prompt, n, new)
    finish(engine)
    return new_tokens(rows)


# ── passes ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.inference_mode()
def test_padding_stays_in_its_slot_and_passes_within_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slot 0 has no room for the longest piece."""
    hf = tiny_model("llama")
    made, shapes = runner(hf, 64), []
    made.memory.reserve(4, 16)
    feed = made.feed

    def noted(slots: Sequence[int], tokens: Tensor, *rest: Any, **more: Any) -> Tensor:
        shapes.append((sorted(slots), tokens.shape[1]))
        return feed(slots, tokens, *rest, **more)

    monkeypatch.setattr(made, "feed", noted)
    monkeypatch.setattr(prompt_passes, "MAX_PASS_TOKENS", 20)
    prompts = [LONG[:14], LONG[3:13], LONG[5:10], LONG[7:11]]
    prompt_passes.feed_prompts(made, [(0, prompts[0][:8])])
    prompt_passes.feed_prompts(made, [(0, prompts[0][8:]), *enumerate(prompts[1:], 1)])
    assert shapes == [([0], 8), ([1, 2], 10), ([0, 3], 6)]
    found = made.feed([0, 1, 2, 3], torch.full((4, 1), 5), [1] * 4)[:, 0]
    right = [hf(torch.tensor([[*prompt, 5]]), use_cache=False).logits[0, -1] for prompt in prompts]
    torch.testing.assert_close(found, torch.stack(right))


# ── chunks ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("prefix_sharing", ["copied", "shared"])
@pytest.mark.parametrize("chunk", [1, 7, 16, CHUNK])
def test_rows_run_on_while_a_long_prompt_is_computed(chunk: int, prefix_sharing: str) -> None:
    """Every step commits to the running row and computes at most a chunk; the tokens are those of prompts computed whole."""
    engine = chunking(chunk, prefix_sharing)
    first = ask(engine, (1, 2, 3), new=200)
    engine.step()
    joined = [*ask(engine, LONG, n=3), *ask(engine, OTHER, n=2)]
    before = engine.stats.prefill_tokens
    while not all(row.target_passes for row in joined):
        computed, length = engine.stats.prefill_tokens, first[0].new_tokens
        engine.step()
        assert engine.stats.prefill_tokens - computed <= chunk
        assert first[0].new_tokens > length
    engine.cancel(first)
    finish(engine)
    assert new_tokens(joined) == alone(LONG, 3) + alone(OTHER, 2)
    assert engine.stats.prefills == 3
    assert engine.stats.prefill_tokens - before == len(LONG) - 1 + len(OTHER) - 1
    tokens = len(LONG) + len(OTHER) - 2
    least = -(-tokens // chunk)
    assert 1 + max(2, least) <= engine.stats.prefill_chunks <= 1 + least + 1  # chunks of both prompts may share a round
    assert (engine.stats.prefill_chunks > engine.stats.prefills) == (chunk < tokens)
    assert engine.stats.accepted > 0


@pytest.mark.parametrize("prefix_sharing", ["copied", "shared"])
def test_ids_of_a_real_pair(prefix_sharing: str) -> None:
    engine = chunking(5, prefix_sharing, real=True)
    rows = [*ask(engine, (9, 8, 7), 2, 20)]
    engine.step()
    rows += [*ask(engine, range(30, 70), 2), *ask(engine, (4, 5), 1), *ask(engine, range(100, 125), 1)]
    finish(engine)
    expected = [alone(range(30, 70), 2, real=True), alone((4, 5), real=True), alone(range(100, 125), real=True)]
    assert new_tokens(rows) == alone((9, 8, 7), 2, 20, real=True) + [row for rows in expected for row in rows]
    assert engine.stats.prefill_chunks > engine.stats.prefills == 4
    assert VOCABULARY > 125


def test_with_nobody_waiting_for_a_round_prompts_are_computed_whole() -> None:
    engine = chunking(4)
    rows = [*ask(engine, LONG), *ask(engine, OTHER)]
    engine.step()
    assert engine.stats.prefill_chunks == engine.stats.prefills == 2
    finish(engine)
    assert new_tokens(rows) == alone(LONG) + alone(OTHER)


@pytest.mark.parametrize("prefix_sharing", ["copied", "shared"])
@pytest.mark.parametrize("cancelled", [[0], [0, 1], [1]])
def test_a_row_leaves_in_the_middle_of_its_prompt(cancelled: list[int], prefix_sharing: str) -> None:
    """Its siblings start again, or never; what is incomplete is never taken for a prompt."""
    engine = chunking(6, prefix_sharing)
    running = ask(engine, (1, 2, 3), new=40)
    engine.step()
    long = ask(engine, LONG, n=2)
    other = ask(engine, OTHER)
    engine.step()
    engine.step()
    assert engine.stats.prefill_tokens == 2 + 12
    assert len(engine.scheduler.running) == 1
    engine.cancel([long[i] for i in cancelled])
    finish(engine)
    kept = [i for i in range(2) if i not in cancelled]
    assert new_tokens([long[i] for i in kept]) == [alone(LONG, 2)[i] for i in kept]
    assert all(long[i].new_tokens == 0 for i in cancelled)
    assert new_tokens([*running, *other]) == alone((1, 2, 3), new=40) + alone(OTHER)
    restarted = 12 if cancelled == [0] else 0
    wasted = 12 if cancelled == [0, 1] else len(LONG) - 1 + restarted
    assert engine.stats.prefill_tokens == 2 + wasted + len(OTHER) - 1


def test_a_prompt_that_nobody_waits_for_any_more_ends_between_two_pieces() -> None:
    """A server's client that leaves is seen between two pieces, also where no row runs; see `Waiting.interrupted`."""
    engine, asked = chunking(chunk=4), iter([False, True, True])
    engine.scheduler.waiting.interrupted = lambda: next(asked, False)
    limits = Limits(max_new_tokens=12, time_budget=1000.0)  # deadlines are looked at between pieces as well
    (row,) = engine.submit(Request(LONG, 1, Sampling(seed=1), limits))
    assert (engine.step(), engine.stats.prefill_chunks, engine.scheduler.slots.filling) == ([], 2, row)
    assert (engine.step(), engine.stats.prefill_chunks, engine.scheduler.idle) == ([], 3, False)
    engine.cancel([row])
    assert engine.scheduler.idle
    others = ask(engine, OTHER)
    finish(engine)
    assert new_tokens(others) == alone(OTHER)
    assert engine.stats.prefill_tokens == 3 * 4 + len(OTHER) - 1


def test_a_full_batch_with_a_hole_waits_one_round_for_the_slot_above(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a round lie side by side even while a prompt is being computed beside them."""
    engine = chunking(6, max_batch=3)
    rows = [ask(engine, (1, 2, i), new=new)[0] for i, new in ((3, 60), (4, 1), (5, 60))]
    long = ask(engine, LONG)
    rounds, next_round = [], engine.scheduler.next_round
    monkeypatch.setattr(engine.scheduler, "next_round", lambda: rounds.append(next_round()) or rounds[-1])
    places = []
    for _ in range(5):
        engine.step()
        places.append(([row.slot for row in rounds[-1].rows], rounds[-1].prefilling and rounds[-1].prefilling.slot))
    assert places == [([0, 1, 2], None), ([0, 1], None), ([0, 1], 2), ([0, 1], 2), ([0, 1], 2)]
    finish(engine)
    assert new_tokens(long) == alone(LONG)
    assert new_tokens(rows) == [alone((1, 2, i), new=new)[0] for i, new in ((3, 60), (4, 1), (5, 60))]


@pytest.mark.parametrize("chunk", [0, -3])
def test_a_chunk_of_nothing(chunk: int) -> None:
    with pytest.raises(RequestError, match=f"chunk must be >= 1, got {chunk}"):
        chunking(chunk)


# ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def bytes_of(tokens: int, rows: int, shared: int = 0) -> int:
    """Bytes of both models' caches: 16 per token (an id and a place in float32, twice), and 4 unused columns per slot for k = 3."""
    engine = chunking(kv_bytes=1 << 20)
    per_token = sum(model.cache.bytes_per_token() for model in runners_of(engine))
    assert per_token == 16
    return per_token * (rows * (tokens + 4) + shared)


@pytest.mark.parametrize("fit", [1, 2, 5])
def test_rows_wait_for_memory(fit: int) -> None:
    """As many rows run as fit, whatever max_batch; the caches never take more than they may."""
    engine = chunking(kv_bytes=bytes_of(3 + 12, fit))
    rows = [row for i in range(7) for row in ask(engine, (1, 2, i))]
    most = 0
    while engine.step():
        most = max(most, len(engine.scheduler.running))
        assert engine.memory.used <= bytes_of(3 + 12, fit)
    assert most == fit
    assert new_tokens(rows) == [alone((1, 2, i))[0] for i in range(7)]
    assert engine.stats.accepted > 0


def test_one_byte_less_is_one_row_less() -> None:
    engine = chunking(kv_bytes=bytes_of(15, 3) - 1)
    ask(engine, (1, 2, 3), n=3)
    engine.step()
    assert len(engine.scheduler.running) == 2


def test_a_shared_prompt_counts_once() -> None:
    """Four rows of one prompt in memory that holds little more than one copy of it."""
    tail = 1 + 12
    memory = bytes_of(tail, 4, len(LONG) - 1)
    for prefix_sharing, together in (("shared", 4), ("copied", 1)):
        engine = chunking(prefix_sharing=prefix_sharing, kv_bytes=memory)
        rows = ask(engine, LONG, n=4)
        engine.step()
        assert len(engine.scheduler.running) == together
        finish(engine)
        assert new_tokens(rows) == alone(LONG, 4)
        assert engine.memory.used <= memory
        assert engine.stats.prefills == 1


def test_a_request_that_never_fits_is_refused_with_figures() -> None:
    memory = 8 * (20 + 1)  # of the target alone
    engine = chunking(kv_bytes=memory)
    ask(engine, (1, 2, 3), new=17)
    message = rf"a row of up to 21 tokens takes {8 * 22} bytes of KV cache, and there are {memory}: shorten the prompt"
    with pytest.raises(RequestError, match=message):
        ask(engine, (1, 2, 3), new=18)
    finish(engine)


@pytest.mark.parametrize("trims", [True, False])
def test_what_many_short_rows_took_is_given_back_for_a_long_one(trims: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches keep their size while that is no harm; slots of the short rows times the length of the long one would be."""
    memory = bytes_of(len(LONG) + 12, 1)
    engine = chunking(kv_bytes=memory)
    short = [row for i in range(3) for row in ask(engine, (1, i), new=3)]
    finish(engine)
    assert engine.target.cache.slots == 3
    if not trims:
        monkeypatch.setattr(CacheMemory, "trim", lambda *_: None)
    long = ask(engine, LONG)
    finish(engine)
    assert (engine.memory.used <= memory) is trims
    assert new_tokens(long) == alone(LONG)
    assert new_tokens(short) == [alone((1, i), new=3)[0] for i in range(3)]


def test_free_slots_take_no_memory_from_a_row_that_follows_them() -> None:
    """Three short rows end in one round while a long one waits: it gets one slot, not the length of a long row in three slots."""
    memory = bytes_of(len(LONG) + 12, 1)
    engine = chunking(kv_bytes=memory)
    short = [row for i in range(3) for row in ask(engine, (1, i), new=3)]
    long = ask(engine, LONG)
    while engine.step():
        assert engine.memory.used <= memory
    assert new_tokens(long) == alone(LONG)
    assert new_tokens(short) == [alone((1, i), new=3)[0] for i in range(3)]


def test_a_prompt_stored_too_far_up_is_stored_again() -> None:
    """What was below it has gone; its last row is alone now, and fits only with its prompt at the bottom."""
    most = 12
    scheduler = Scheduler(
        2, prefix_sharing="shared", fits=lambda rows, slots, prefixes: token_slots(prefixes.values()) <= most
    )
    low, high = Request((1,) * 7), Request((2,) * 7, 2)
    rows = [
        Row(request, group, i, 0, list(request.prompt_ids), frozenset(), 99)
        for group, request in enumerate((low, high)) for i in range(request.n)
    ]  # fmt: skip
    scheduler.add(rows)
    assert list(scheduler.next_round().rows) == rows[:2]
    assert [row.prefix for row in rows[:2]] == [Prefix(0, 6), Prefix(6, 6)]
    scheduler.remove(rows[:2])
    most = 6
    last = scheduler.next_round()
    assert (list(last.rows), last.prefixes, rows[2].prefix) == (rows[2:], {1: Prefix(0, 6)}, Prefix(0, 6))
    assert list(last.chunks) == [PrefillChunk(rows[2], 0, 0, 6)]


def test_the_caches_of_all_models_count() -> None:
    plain = engine_of(pair(False)[0], None, Fixed(0), rule=Coupled(), kv_bytes=1 << 20)
    both = chunking(kv_bytes=1 << 20)
    assert [len(runners_of(engine)) for engine in (plain, both)] == [1, 2]
    rows = ask(plain, (1, 2, 3))
    finish(plain)
    assert plain.memory.used == 8 * (15 + 1)
    assert plain.stats.target_passes == 12  # the pass that found out what a token takes is no part of the run
    assert new_tokens(rows) == alone((1, 2, 3))


@pytest.mark.parametrize("prefix_sharing", ["copied", "shared"])
def test_the_drafter_keeps_pace_with_a_long_prompt(prefix_sharing: str) -> None:
    """It computes no more of it at once than the target does, and drafts as soon as the row runs."""
    engine = chunking(6, prefix_sharing, real=True)
    drafter, sizes = runners_of(engine)[1], []
    feed, feed_prefix = drafter.feed, drafter.feed_prefix

    def counted(slots: Sequence[int], tokens: Tensor, counts: Sequence[int], **options: Any) -> Tensor:
        sizes.append(sum(counts) if not options.get("want_logits", True) else 0)
        return feed(slots, tokens, counts, **options)

    def counted_prefix(prefix: Prefix, start: int, tokens: Tensor) -> None:
        sizes.append(tokens.shape[1])
        feed_prefix(prefix, start, tokens)

    drafter.feed, drafter.feed_prefix = counted, counted_prefix  # type: ignore[method-assign]
    ask(engine, OTHER[:4], new=30)
    engine.step()
    (row, *_) = ask(engine, LONG, 2)
    while row.rounds < 1:
        engine.step()
    assert sum(sizes) >= len(LONG) - 1
    assert max(sizes) <= 6
    assert row.drafted > 0
    while engine.step():
        pass
    plain = chunking(6, prefix_sharing, k=0, real=True)
    ask(plain, OTHER[:4], new=30)
    (other, *_) = ask(plain, LONG, 2)
    while plain.step():
        pass
    assert row.tokens == other.tokens
