"""Chunks of long prompts in the passes of running rows: the same tokens of every row, fewer passes, nobody else's failures.

Tests of: engine.verify, engine.scheduler, models.prompt_passes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from native_kernels import needs_compiler
from shoal.config import Limits, Sampling
from shoal.drafting.model import ModelDrafter
from shoal.drafting.protocol import Drafter
from shoal.drafting.shapes import shape_of
from shoal.drafting.suffix import SuffixDrafter
from shoal.drafting.tree_model import TreeDrafter
from shoal.engine import scheduler, verify
from shoal.engine.batch_size import AutoBatchSize
from shoal.engine.engine import Engine
from shoal.engine.prefix_cache import PrefixMemory
from shoal.errors import OutOfMemory
from shoal.lookahead.controller import Fixed
from shoal.models import formats, weights
from shoal.models.executor import C_DECODER
from shoal.models.loading import wrap
from shoal.models.passes import choose_passes
from shoal.models.prompt_passes import carries_prompts
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Coupled
from shoal.testing import tiny_model
from shoal.testing.scripted import runner
from shoal.types.requests import Request, Row
from shoal.types.rounds import Outcome, PrefillChunk
from shoal.types.samples import Sample

PIECE = 5
"""The tokens that ride in a pass."""
CHUNK = 7
"""The tokens of a pass of their own while rows run; longer prompts ride."""
SHORT = (9, 8, 7)
LONG = tuple(1 + i * i % 11 for i in range(41))
RIDES = 7
"""The pieces of LONG that ride: of its 40 tokens, the last 5 are computed in a pass of their own."""
OTHER = tuple(1 + i % 7 for i in range(23))


@pytest.fixture(autouse=True)
def _rides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every target carries prompts: the modules compute the logits of pieces too, and nobody reads them."""
    monkeypatch.setattr(scheduler, "RIDING", PIECE)
    monkeypatch.setattr(verify, "carries_prompts", lambda target: True)


def target() -> Runner:
    return runner(tiny_model("llama"), 256)


def draft() -> Runner:
    return runner(tiny_model("llama", seed=1, layers=1), 256)


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "plain": lambda: None,
    "model": lambda: ModelDrafter(draft(), 256),
    "trees": lambda: TreeDrafter(draft(), 256, shape_of("rsd-s", 2, 6)),
    "siblings": lambda: SuffixDrafter("group", nodes=8),
}


def engine(drafter: str = "plain", **options: Any) -> Engine:
    options = {"max_batch": 8, "rule": Coupled(), "prefix_sharing": "copied", "chunk": CHUNK, **options}
    return Engine(target(), DRAFTERS[drafter](), Fixed(3), **options)


def ask(of: Engine, prompt: Sequence[int], n: int = 1, new: int = 10, **limits: Any) -> list[Row]:
    sampling = Sampling(seed=len(prompt), temperature=0.0 if n == 1 else 1.0)
    return of.submit(Request(tuple(prompt), n, sampling, Limits(max_new_tokens=new, eos=(), **limits)))


def finish(of: Engine) -> None:
    while of.step():
        pass
    assert of.scheduler.idle


def new_tokens(rows: Sequence[Row]) -> list[list[int]]:
    return [row.tokens[row.prompt_length :] for row in rows]


def alone(prompt: Sequence[int], n: int = 1, new: int = 10) -> list[list[int]]:
    of = engine()
    rows = ask(of, prompt, n, new)
    finish(of)
    assert of.stats.fused_chunks == 0
    return new_tokens(rows)


def under_way(drafter: str = "plain", new: int = 60, **options: Any) -> tuple[Engine, list[Row]]:
    """An engine with one row that runs."""
    of = engine(drafter, **options)
    rows = ask(of, SHORT, new=new)
    of.step()
    return of, rows


# ── the same tokens in fewer passes ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow(but=["plain", "model"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_are_those_of_rows_alone(drafter: str) -> None:
    """A greedy and a sampled prompt ride one after the other, beside rows that draft or do not."""
    of, rows = under_way(drafter, new=100)
    rows += [*ask(of, LONG, 2), *ask(of, OTHER)]
    while not all(row.rounds for row in rows):
        before = of.stats.rounds, rows[0].new_tokens
        of.step()
        assert (of.stats.rounds, rows[0].new_tokens > before[1]) == (before[0] + 1, True)
    stats = of.stats
    assert (stats.fused_chunks, stats.prefill_chunks) == (RIDES + 4, 1 + RIDES + 1 + 4 + 1)
    assert (stats.prefills, stats.prefill_tokens) == (3, 2 + 40 + 22)
    assert stats.target_passes == stats.rounds
    assert stats.executors["target"].total() == stats.rounds + 3  # the last piece of each prompt has a pass of its own
    finish(of)
    assert new_tokens(rows) == alone(SHORT, new=100) + alone(LONG, 2) + alone(OTHER)
    assert (stats.accepted > 0) == (drafter != "plain")


def test_a_row_joins_as_early_as_by_passes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """By pieces of the same size: the last of them is computed before the round that the row joins."""
    rounds = []
    for carries in (True, False):
        monkeypatch.setattr(verify, "carries_prompts", lambda target, carries=carries: carries)
        of, _ = under_way(chunk=PIECE)
        (row,) = ask(of, LONG)
        while not row.rounds:
            of.step()
        rounds.append((of.stats.rounds, of.stats.executors["target"].total()))
        assert of.stats.fused_chunks == (RIDES if carries else 0)
    assert rounds == [(9, 9 + 1 + 1), (9, 9 + 1 + 1 + RIDES)]


@pytest.mark.parametrize(("length", "fused"), [(CHUNK + 1, 0), (CHUNK + 2, 1), (2 * PIECE + 1, 1), (2 * PIECE + 2, 2)])
def test_prompts_that_fit_into_a_chunk_and_last_pieces_do_not_ride(length: int, fused: int) -> None:
    of, _ = under_way()
    rows = ask(of, LONG[:length])
    finish(of)
    assert of.stats.fused_chunks == fused
    assert new_tokens(rows) == alone(LONG[:length])


def told(of: Engine) -> list[tuple[int, int]]:
    """Receives the pieces that the drafter is told to compute from now on."""
    pieces: list[tuple[int, int]] = []
    drafter = of.drafter
    assert drafter is not None
    prepare = drafter.prepare

    def noted(chunks: Sequence[PrefillChunk]) -> None:
        pieces.extend((chunk.start, chunk.stop) for chunk in chunks)
        prepare(chunks)

    drafter.prepare = noted  # type: ignore[method-assign]
    return pieces


def test_the_drafter_keeps_pace() -> None:
    """It computes each piece once, between the rounds, and drafts in the first round of the row."""
    of, _ = under_way("model")
    pieces = told(of)
    (row,) = ask(of, LONG)
    while not row.rounds:
        of.step()
    assert pieces == [(start, start + PIECE) for start in range(0, 40, PIECE)]
    assert row.drafted > 0


def test_the_drafter_does_not_hear_of_a_row_that_has_left() -> None:
    of, _ = under_way("model")
    pieces = told(of)
    rows = ask(of, LONG)
    of.step()
    of.step()
    of.cancel(rows)
    finish(of)
    assert of.stats.fused_chunks == 2
    assert pieces == [(0, PIECE)]


# ── who may ride ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_prompt_in_the_shared_store_does_not_ride() -> None:
    of, _ = under_way(prefix_sharing="shared")
    rows = ask(of, LONG, 2)
    finish(of)
    assert rows[0].prefix is not None
    assert of.stats.fused_chunks == 0
    assert new_tokens(rows) == alone(LONG, 2)


def test_nothing_rides_where_no_row_runs() -> None:
    """The row beside it ends: the rest is computed in one go."""
    of, first = under_way(new=4)
    rows = ask(of, LONG)
    finish(of)
    assert of.stats.fused_chunks == 3
    assert of.stats.prefill_chunks == 1 + 3 + 1
    assert new_tokens([*first, *rows]) == alone(SHORT, new=4) + alone(LONG)


def lean(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """A model whose ordinary passes the C decoder computes."""
    monkeypatch.setattr(formats, "cpu", lambda: formats.Cpu(packs=frozenset((torch.float32, torch.bfloat16))))
    hf = copy.deepcopy(tiny_model("llama", max_position_embeddings=512)).to(dtype)
    weights.lay_out(hf, lambda keys: dict.fromkeys(keys, weights.matrix.PACKED))
    made = wrap(hf, "tiny", checked=False)
    choose_passes(made, "on", owned=True)
    return made


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_c_decoder_carries_prompts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of the size that is served: of 399 tokens six ride, and 15 are computed before the row's first round."""
    monkeypatch.undo()
    made = lean(dtype, monkeypatch)
    prompt = [1 + i * i % 200 for i in range(400)]
    found = []
    for company in (True, False):
        of = Engine(made, None, Fixed(0), rule=Coupled(), chunk=128)
        if company:
            ask(of, SHORT, new=60)
            of.step()
        rows = ask(of, prompt)
        finish(of)
        found.append(new_tokens(rows))
        assert of.stats.fused_chunks == (6 if company else 0)
        assert of.stats.executors["target"].keys() == {C_DECODER} if company else True
    assert found[0] == found[1]


@needs_compiler
def test_passes_that_carry_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafters that read hidden states have other executors."""
    assert carries_prompts(lean(torch.bfloat16, monkeypatch))
    assert not carries_prompts(target())
    reading, captured, replaced = (lean(torch.float32, monkeypatch) for _ in range(3))
    reading.hidden_layers = (1,)
    captured.captures = object()  # type: ignore[assignment]
    replaced.hf.lm_head.weight = torch.nn.Parameter(torch.zeros(replaced.vocab_size, replaced.hf.config.hidden_size))
    assert not any(map(carries_prompts, (reading, captured, replaced)))


# ── rows that leave on the way, and passes that fail ────────────────────────────────────────────────────────────────


@pytest.mark.slow(but=["cancelled0-plain"])
@pytest.mark.parametrize(("cancelled", "drafter"), [([0], "plain"), ([0], "model"), ([0, 1], "model"), ([1], "model")])
def test_the_row_is_cancelled_while_its_prompt_rides(cancelled: list[int], drafter: str) -> None:
    """Its sibling starts again; what is incomplete is never taken for a prompt."""
    of, running = under_way(drafter, new=100)
    long, other = ask(of, LONG, 2), ask(of, OTHER)
    of.step()
    of.step()
    assert of.stats.fused_chunks == 2
    of.cancel([long[i] for i in cancelled])
    finish(of)
    kept = [i for i in range(2) if i not in cancelled]
    assert new_tokens([long[i] for i in kept]) == [alone(LONG, 2)[i] for i in kept]
    assert all(long[i].new_tokens == 0 for i in cancelled)
    assert new_tokens([*running, *other]) == alone(SHORT, new=100) + alone(OTHER)
    wasted = 0 if 0 not in cancelled else 2
    assert of.stats.fused_chunks == (0 if cancelled == [0, 1] else RIDES) + wasted + 4


def test_its_deadline_passes_on_the_way() -> None:
    now = [0.0]
    of, running = under_way(clock=lambda: now[0])
    of.submit(Request(LONG, 1, Sampling(seed=1), Limits(max_new_tokens=4, time_budget=1.0), submitted_at=0.0))
    of.step()
    now[0] = 2.0
    ended = [done for done in of.step() if done.sample is not None]
    assert [(done.sample.finish_reason, done.row.new_tokens) for done in ended if done.sample] == [("not started", 0)]
    finish(of)
    assert of.stats.fused_chunks == 1
    assert new_tokens(running) == alone(SHORT, new=60)


def test_the_tokens_of_a_paused_row_ride() -> None:
    """Its prompt fits into a chunk; it rides with what it has written, when it comes back."""
    of = engine("model", quantum=16, max_batch=2)
    rows = [*ask(of, SHORT, 2, 60)]
    for _ in range(3):
        of.step()
    rows += ask(of, OTHER[:CHUNK], 1, 60)
    finish(of)
    assert of.stats.pauses > 0
    assert of.stats.fused_chunks > 0
    assert new_tokens(rows) == alone(SHORT, 2, 60) + alone(OTHER[:CHUNK], 1, 60)


def test_a_failed_pass_is_computed_without_the_piece() -> None:
    """No other piece rides; the prompt's own pass works here, so nobody ends."""
    of, running = under_way()
    feed, asked = of.target.feed, []

    def scarce(slots: Sequence[int], tokens: Tensor, counts: Sequence[int], *, riding: int = 0, **more: Any) -> Tensor:
        asked.append(riding)
        if riding and asked.count(1) == 3:
            raise OutOfMemory("no memory")
        return feed(slots, tokens, counts, riding=riding, **more)

    of.target.feed = scarce  # type: ignore[method-assign]
    rows = ask(of, LONG)
    finish(of)
    assert asked.count(1) == 3
    assert of.stats.fused_chunks == 2
    assert new_tokens([*running, *rows]) == alone(SHORT, new=60) + alone(LONG)


def test_the_prompt_whose_pass_fails_ends_alone() -> None:
    of, running = under_way()
    feed, slot = of.target.feed, 1

    def failing(slots: Sequence[int], *arguments: Any, **more: Any) -> Tensor:
        if slot in slots and len(of.scheduler.running) == 1:
            raise OutOfMemory("no memory")
        return feed(slots, *arguments, **more)

    of.target.feed = failing  # type: ignore[method-assign]
    (row,) = ask(of, LONG)
    samples: list[Sample] = []
    while commits := of.step():
        samples += [done.sample for done in commits if done.sample is not None]
    assert [sample.finish_reason for sample in samples] == ["error", "length"]
    assert isinstance(row.error, OutOfMemory)
    assert of.stats.fused_chunks == 0
    assert new_tokens(running) == alone(SHORT, new=60)


# ── prompts that are known in part, and what is learned ─────────────────────────────────────────────────────────────


def test_a_ride_begins_behind_kept_tokens() -> None:
    made = target()
    of = Engine(made, None, Fixed(0), rule=Coupled(), chunk=CHUNK, prefixes=PrefixMemory(made, None, 1 << 20))
    earlier = [1 + i * i % 50 for i in range(100)]
    ask(of, earlier)
    finish(of)
    ask(of, SHORT, new=60)
    of.step()
    before, prompt = of.stats.prefill_tokens, [*earlier[:90], *range(60, 83)]
    rows = ask(of, prompt)
    finish(of)
    known = of.stats.restored_tokens
    assert known > 60
    assert of.stats.prefill_tokens - before == 112 - known
    assert of.stats.fused_chunks == -(-(112 - known) // PIECE) - 1
    assert new_tokens(rows) == alone(prompt)


def test_the_controller_hears_of_the_piece_and_the_batch_size_learns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[Outcome] = []
    learned: list[int] = []
    of, _ = under_way(max_batch=AutoBatchSize())
    monkeypatch.setattr(of.lookahead, "learn", outcomes.append)
    monkeypatch.setattr(of.batch_size, "learn", lambda rows, committed, seconds: learned.append(rows))
    ask(of, LONG)
    for _ in range(RIDES + 2):
        of.step()
    assert [outcome.riding for outcome in outcomes] == [PIECE] * RIDES + [0, 0]
    assert learned == [2, 2]
