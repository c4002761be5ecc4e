"""Passes of fixed shape: the same logits and the same tokens as passes made to measure, built once and run often.

Tests of: models.compiled.capturable, models.compiled.results, models.compiled.view,
models.compiled, models.compiled.block, models.compiled.passes, models.attention.fused.
"""

from __future__ import annotations

import copy
import gc
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pretend
import shoal
from shoal.api import Shoal
from shoal.config import Limits, Sampling
from shoal.errors import RequestError
from shoal.lookahead.controller import Fixed
from shoal.models import loading
from shoal.models.attention import fused, methods
from shoal.models.attention.inputs import AttentionInputs
from shoal.models.attention.methods import METHODS
from shoal.models.cache import Plan
from shoal.models.compiled import Passes, drafting, executor_for, obstacle
from shoal.models.compiled.block import Block
from shoal.models.compiled.buckets import COLUMNS, Bucket, bucket_for, reservation, step_up
from shoal.models.compiled.executors import EXECUTORS, Executor, Run
from shoal.models.compiled.passes import compare
from shoal.models.compiled.view import View
from shoal.models.load_report import described
from shoal.sampling.distributions import probabilities, pure_probabilities
from shoal.testing import save_pair, tiny_model
from shoal.testing.engines import engine_of, runners_of
from shoal.types.requests import Request, Row
from shoal.types.trees import Positions
from static_passes import (
    ARCHITECTURES,
    CPU,
    DEVICE,
    NEW,
    PRETENDED,
    PROMPTS,
    STATIC,
    FakeGraphs,
    K,
    Twins,
    decode,
    hf,
    ids,
    on_device,
    pair,
    rows_of,
    runner,
)

ERROR = 5e-5
"""As in tests/models/test_cache.py: logits reach 10, float32 sums in another order differ by 1e-6 of that."""


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The pretended one, for as long as a test runs."""
    if not PRETENDED:
        yield
        return
    with torch.inference_mode(), pretend.Pretend() as made:
        monkeypatch.setitem(EXECUTORS, "graphed", made.executor)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 33, 1 << 34))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        monkeypatch.setattr(fused, "available", lambda query: False)
        monkeypatch.setattr(methods, "available", lambda query: False)
        yield


def by_stages(model: Shoal) -> Shoal:
    """Without rounds that are captured whole (tests/gpu/test_static_rounds.py)."""
    for one in (model.target, model.draft_model):
        if one is not None and one.static is not None:
            one.static.rounds_failure = "not wanted"
    return model


# ── sizes and buffers ───────────────────────────────────────────────────────────────────────────────────────────────


def test_sizes_step_up_by_half_at_most() -> None:
    assert [step_up(n) for n in range(1, 18)] == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16, 16, 16, 16, 24]
    assert all(n <= step_up(n) <= 1.5 * n for n in range(1, 1000))


@pytest.mark.parametrize(
    ("asked", "bucket"),
    [
        ((1, 1, 1, 96), Bucket(1, 1, 64)),
        ((5, 4, 65, 96), Bucket(6, 5, 96)),
        ((9, 17, 100, 512), Bucket(12, 17, 128)),
        ((2, COLUMNS[-1] + 1, 100, 512), None),
    ],
)
def test_the_smallest_bucket_that_holds_a_pass(asked: tuple[int, int, int, int], bucket: Bucket | None) -> None:
    assert bucket_for(*asked) == bucket


def test_room_for_a_bucket_and_the_scratch_slot() -> None:
    assert reservation(5, 40) == (7, 64)
    assert reservation(8, 130) == (9, 192)


def test_a_block_holds_a_plan_and_its_padding_stands_aside() -> None:
    block = Block(Bucket(3, 3, 64), scratch=400, device=CPU)
    assert block.cells.tolist() == [400] * 9
    block.place(Plan([0, 1], [7, 20], [3, 1], CPU), capacity=100)
    assert block.positions.tolist() == [[7, 8, 9], [20, 20, 20], [0, 0, 0]]
    assert block.cells.view(3, 3).tolist() == [[7, 8, 9], [120, 400, 400], [400, 400, 400]]
    assert block.bounds.tolist() == [[7, 20, 0], [3, 1, 0], [0, 0, 0], [0, 0, 0]]


def test_a_block_of_one_column_moves_its_real_rows_on() -> None:
    block = Block(Bucket(3, 1, 64), scratch=400, device=CPU)
    block.place(Plan([0, 1], [7, 20], [1, 1], CPU), capacity=100)
    block.advance()
    assert block.positions.tolist() == [[8], [21], [0]]
    assert block.cells.tolist() == [8, 121, 400]
    assert block.bounds[0].tolist() == [8, 21, 0]


# ── the logits of any schedule ──────────────────────────────────────────────────────────────────────────────────────

Blocks = Sequence[Sequence[int]]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_ordinary_passes(architecture: str) -> None:
    twins = Twins(hf(architecture))
    if STATIC == "graphed" and obstacle(hf(architecture)) is not None:
        assert twins.made.static is None
        return
    twins.life()
    passes = twins.made.static
    assert passes is not None
    assert passes.failure is None
    assert twins.worst < ERROR
    # Before the cache grew: 3 and 1 columns (2 rounds share), 5 columns, then two rows; after it: 64 and 128 keys.
    assert passes.built == {
        Bucket(3, 3, 64): 1, Bucket(3, 1, 64): 1, Bucket(3, 5, 64): 1, Bucket(2, 3, 64): 1,
        Bucket(2, 5, 64): 1, Bucket(2, 5, 128): 1,
    }  # fmt: skip
    assert passes.ran.total() == 19


def test_padding_that_is_not_set_aside_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: padding writes into row 0's first cell."""
    place = Block.place

    def wrong(self: Block, plan: Plan, capacity: int) -> None:
        self._scratch = 0
        place(self, plan, capacity)

    monkeypatch.setattr(Block, "place", wrong)
    twins = Twins(hf())
    twins.life()
    assert twins.worst > 0.1


def test_what_no_bucket_covers_is_left_to_ordinary_passes() -> None:
    fork = runner(hf()).fork()
    fork.reserve(3, 60)
    fork.feed([0, 1, 2], torch.ones(3, 4, dtype=torch.long, device=DEVICE), [4, 4, 4])  # no layer yet
    fork.feed([0], torch.ones(1, COLUMNS[-1] + 1, dtype=torch.long, device=DEVICE), [COLUMNS[-1] + 1])  # too wide
    fork.feed([1, 0], torch.ones(2, 1, dtype=torch.long, device=DEVICE), [1, 1])  # rows out of order
    assert fork.static is not None
    assert fork.static.ran.total() == 0
    assert fork.passes == 3
    fork.feed([0, 1], torch.ones(2, 1, dtype=torch.long, device=DEVICE), [1, 1])
    assert fork.static.ran.total() == 1


def test_models_and_methods_without_static_passes() -> None:
    assert runner(hf("mpt")).static is None  # attends by its own code
    split = loading.wrap(hf(), "tiny", "split", checked=False)
    split.use_static_passes("eager")
    assert split.static is None


def test_what_padding_costs_is_told_to_those_who_plan() -> None:
    """A pass of fixed shape computes the padding of ragged drafts: `auto` must price it."""
    for executor, packed in ((None, True), (STATIC, False)):
        pair = Shoal(runner(hf(), executor), runner(hf(seed=1), executor))
        assert pair.pair_costs.packed is packed
        assert pair.pair_costs.positions([0, 3]) == (5 if packed else 8)


# ── the drafter's distribution ──────────────────────────────────────────────────────────────────────────────────────

CUTS: tuple[dict[str, Any], ...] = (
    {}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2}, {"typical_p": 0.7}, {"top_k": 9, "top_p": 0.9},
)  # fmt: skip


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_the_pure_distribution_is_the_declared_one(cut: dict[str, Any]) -> None:
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(0)).mul_(2).round(decimals=1)  # with ties
    samplings = [Sampling(temperature=t, **cut) for t in (0.0, 0.7, 1.0, 1.3)]
    rows = [
        Row(Request((1,), 1, sampling, Limits()), 0, i, 0, [1], frozenset(), 100, None)
        for i, sampling in enumerate(samplings)
    ]
    expected = probabilities(logits[:, None], Positions(rows, [[]] * 4))[:, 0]
    heat = torch.tensor([sampling.temperature for sampling in samplings])
    torch.testing.assert_close(
        pure_probabilities(logits, heat, Sampling(**cut), None, 1024)[0], expected, rtol=1e-6, atol=1e-9
    )
    assert torch.equal(pure_probabilities(logits[:1], heat[:1], Sampling(**cut), True, 1024)[0], expected[:1])
    torch.testing.assert_close(
        pure_probabilities(logits[1:], heat[1:], Sampling(**cut), False, 1024)[0], expected[1:], rtol=1e-6, atol=1e-9
    )


# ── whole runs ──────────────────────────────────────────────────────────────────────────────────────────────────────


SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0}, {"temperature": 0.8}, {"top_k": 5}, {"temperature": 0.9, "top_p": 0.9}, {"rule": "rejection"},
    {"lookahead": "off"}, {"lookahead": "bass"}, {"repetition_penalty": 1.3},
)  # fmt: skip


@pytest.mark.parametrize(("draft_seed", "options"), [*((1, options) for options in SETTINGS), (0, SETTINGS[0])], ids=str)
def test_tokens_are_those_of_ordinary_passes(draft_seed: int, options: dict[str, Any]) -> None:
    expected, made = decode(pair(None, draft_seed), **options), pair(STATIC, draft_seed)
    result = decode(made, **options)
    assert ids(result) == ids(expected)
    for count in ("rounds", "drafted", "accepted", "target_passes"):
        assert getattr(result.stats, count) == getattr(expected.stats, count)
    assert result.stats.draft_passes >= expected.stats.draft_passes
    target, draft = made.target.static, made.draft_model.static  # type: ignore[union-attr]
    assert target is not None
    assert draft is not None
    assert (target.failure, draft.failure) == (None, None)
    assert target.ran.total() == result.stats.target_passes
    assert 0 < target.built.total() < target.ran.total()
    drawn = sum(count for key, count in draft.ran.items() if not isinstance(key, Bucket))
    reads_history = "repetition_penalty" in options
    assert drawn == (0 if reads_history else result.stats.draft_passes)


@pytest.mark.parametrize(
    ("second", "static"),
    [(Sampling(temperature=0.7, seed=2), True), (Sampling(top_k=5, seed=2), False)],
    ids=["alike", "unlike"],
)
def test_rows_of_several_settings(second: Sampling, static: bool) -> None:
    """Temperatures may differ within a step; what cuts the tail may not."""
    samplings = [Sampling(temperature=0.0), second, Sampling(temperature=1.2, seed=5)]
    drafts = [runner(hf(seed=1, layers=1), executor) for executor in (None, STATIC)]
    expected, found = (rows_of(engine_of(runner(hf(), None), draft, Fixed(K)), samplings) for draft in drafts)
    assert found == expected
    passes = drafts[1].static
    assert passes is not None
    assert static == any(not isinstance(key, Bucket) for key in passes.ran)


def test_confidence_stops_static_drafting_too() -> None:
    made = pair(STATIC)
    for _ in range(3):
        result = decode(made, lookahead="auto", temperature=0.0)
    assert ids(result) == ids(decode(pair(None), lookahead="off", temperature=0.0))
    assert made.draft_model is not None
    assert made.draft_model.static is not None
    assert made.draft_model.static.failure is None


def test_passes_outlive_a_run_and_caches_are_handed_on() -> None:
    made = pair(STATIC)
    assert made.draft_model is not None
    passes = [made.target.static, made.draft_model.static]
    decode(made)
    gc.collect()
    built = [copy.copy(one.built) for one in passes if one is not None]
    assert ids(decode(made)) == ids(decode(pair(None)))
    assert [one.built for one in passes if one is not None] == built
    together = [made.stream(PROMPTS, 1, lookahead=K, max_new_tokens=NEW, seed=i) for i in (1, 2)]  # two caches at a time
    for increments in zip(*together, strict=False):
        assert all(increments)
    alone = [pair(None).generate(PROMPTS, 1, lookahead=K, max_new_tokens=NEW, seed=i) for i in (1, 2)]
    for stream in together:
        for _ in stream:
            pass
    assert [ids(stream.result()) for stream in together] == [ids(result) for result in alone]


def test_the_model_is_its_owners_between_passes() -> None:
    model = hf()
    made = runner(model)
    before = model.config._attn_implementation
    stream = Shoal(made).stream(PROMPTS, 1, max_new_tokens=NEW, temperature=0.0)
    expected = model(torch.tensor([[1, 2, 3]], device=DEVICE)).logits
    for _ in stream:
        assert model.config._attn_implementation == before
        assert torch.equal(model(torch.tensor([[1, 2, 3]], device=DEVICE)).logits, expected)
    assert made.static is not None
    assert made.static.ran.total() > NEW / 2


# ── capturing, without a GPU ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("options", [*SETTINGS[:2], {"rule": "rejection"}], ids=str)
def test_a_graph_is_captured_once_per_bucket_and_replayed_after(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setitem(EXECUTORS, "graphed", FakeGraphs)
    monkeypatch.setattr(FakeGraphs, "log", [])
    made = by_stages(pair("graphed", draft_seed=1))
    assert made.draft_model is not None
    for _ in range(2):
        assert ids(decode(made, **options)) == ids(decode(pair(None, draft_seed=1), **options))
        gc.collect()
    log, passes = FakeGraphs.log, [model.static for model in (made.target, made.draft_model) if model.static is not None]
    assert log.count("capture") == sum(one.built.total() for one in passes) == sum(len(one.built) for one in passes)
    assert log.count("replay") == sum(one.ran.total() for one in passes) > 3 * log.count("capture")


def test_a_cache_that_grew_is_captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXECUTORS, "graphed", FakeGraphs)
    twins = Twins(hf(), "graphed")
    twins.life()
    assert twins.worst < ERROR
    assert twins.made.static is not None
    assert twins.made.static.built[Bucket(2, 5, 128)] == 1
    twins.reserve(3, 200)
    for _ in range(2):
        twins.feed([5, 3])
    assert twins.made.static.built[Bucket(2, 5, 128)] == 2
    assert twins.worst < ERROR


def test_a_cache_that_grows_lets_go_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes know the tensors they are over; while they lived on, the old tensors took memory beside the new ones."""
    monkeypatch.setitem(EXECUTORS, "graphed", FakeGraphs)
    twins = Twins(hf(), "graphed")
    twins.life()
    cache = twins.forks[0].cache
    old = [weakref.ref(tensor) for stores in cache.stores() for tensor in stores[:2]]
    seen = []
    resize = cache._resize

    def watched(*size: int) -> None:
        assert twins.made.static is not None
        seen.append(cache in twins.made.static._of)
        resize(*size)

    monkeypatch.setattr(cache, "_resize", watched)
    twins.reserve(3, 200)
    assert seen == [False]
    assert [ref() for ref in old] == [None] * len(old)


@pytest.mark.skipif(PRETENDED, reason="the pretended device is that of one thread")
def test_two_engines_in_threads_on_one_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has passes, pools and results of its own; the model itself computes one pass at a time."""
    monkeypatch.setitem(EXECUTORS, "graphed", FakeGraphs)
    target, draft = runner(hf(), "graphed"), runner(hf(seed=1, layers=1), "graphed")
    samplings = [[Sampling(temperature=0.8, seed=3 * i + j) for j in range(3)] for i in range(4)]
    alone = [rows_of(engine_of(runner(hf(), None), runner(hf(seed=1, layers=1), None), Fixed(K)), own) for own in samplings]
    engines = [engine_of(target, draft, Fixed(K)) for _ in samplings]
    with ThreadPoolExecutor(len(engines)) as pool:
        together = list(pool.map(rows_of, engines, samplings))
    assert together == alone
    for model in (target, draft):
        assert model.static is not None
        assert model.static_failure is None
        generations = list(model.static._of.values())
        assert len({id(one.execute) for one in generations}) == len(generations) == len(engines)


# ── shared prompts, as the kernel reads them ────────────────────────────────────────────────────────────────────────


def by_bounds(inputs: AttentionInputs) -> Tensor:
    """Stands in for the fused kernel: attends by nothing but the bounds and the stores, row by row."""
    outputs = []
    for row, (start, count, offset, base) in enumerate(inputs.masks.bounds.T.tolist()):
        pieces = []
        for own, shared in ((inputs.key, inputs.shared_key), (inputs.value, inputs.shared_value)):
            tail = own[row, :, : start + count - offset]
            assert shared is not None
            pieces.append(torch.cat([shared[base : base + offset].transpose(0, 1), tail], dim=1))
        key, value = (piece.repeat_interleave(inputs.group, dim=0) for piece in pieces)
        places = torch.arange(start, start + count, device=inputs.query.device)
        hidden = torch.arange(start + count, device=inputs.query.device) > places[:, None]
        scores = (inputs.query[row, :, :count] @ key.transpose(-1, -2) * inputs.scale).masked_fill(hidden, -torch.inf)
        out = inputs.query.new_zeros(inputs.query.shape[2], inputs.query.shape[1], value.shape[-1])
        out[:count] = (scores.softmax(-1) @ value).transpose(0, 1)
        outputs.append(out)
    return torch.stack(outputs)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_shared_prompts_by_a_method_that_reads_bounds(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    monkeypatch.setitem(METHODS, "fused", by_bounds)
    made = [loading.wrap(model, "tiny", checked=False) for model in (hf(), hf(seed=1, layers=1))]
    for one in made:
        one.static = Passes(one._bridge, one.name, "eager", "fused")
    options: dict[str, Any] = {"temperature": temperature}
    results = []
    for models_ in (made, [runner(hf(), None), runner(hf(seed=1, layers=1), None)]):
        engine = engine_of(models_[0], models_[1], Fixed(K), max_batch=5, prefix_sharing="shared")
        requests = [Request(tuple(p), 3, Sampling(seed=4, **options), Limits(max_new_tokens=NEW)) for p in PROMPTS]
        rows = [row for request in requests for row in engine.submit(request)]
        while engine.step():
            pass
        assert max(model.cache.cells for model in runners_of(engine)) >= sum(len(p) - 1 for p in PROMPTS[:2])
        results.append([row.tokens for row in rows])
    assert results[0] == results[1]
    for one in made:
        assert one.static is not None
        assert one.static.failure is None
        assert one.static.ran.total() > NEW


# ── what fails ──────────────────────────────────────────────────────────────────────────────────────────────────────


def failing_after(runs: int, error: Exception) -> Callable[[torch.device], Executor]:
    """An executor whose functions run so often and then raise."""

    def execute(run: Run) -> Run:
        left = iter(range(runs))

        def runs_out() -> Any:
            if next(left, None) is None:
                raise error
            return run()

        return runs_out

    return lambda device: execute


@pytest.mark.parametrize("runs", [0, 3])
def test_a_failure_is_a_warning_and_ordinary_passes_go_on(monkeypatch: pytest.MonkeyPatch, runs: int) -> None:
    monkeypatch.setitem(EXECUTORS, "failing", failing_after(runs, RuntimeError("no kernel image\nand a long trace")))
    made = by_stages(pair("failing", draft_seed=1))
    assert made.draft_model is not None
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = decode(made)
        assert ids(decode(made)) == ids(result)
    assert ids(result) == ids(decode(pair(None, draft_seed=1)))
    told = [str(warning.message) for warning in seen if warning.category is RuntimeWarning]
    told_once = "tiny: no more failing passes, ordinary ones do the work (RuntimeError: no kernel image)"
    assert told == [told_once] * 2  # by each model
    for model in (made.target, made.draft_model):
        assert model.static is not None
        assert model.static.failure == "RuntimeError: no kernel image"


def test_wrong_logits_are_found_at_the_first_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def execute(run: Run) -> Run:
        return lambda: run() * 1.01

    monkeypatch.setitem(EXECUTORS, "wrong", lambda device: execute)
    made = by_stages(Shoal(runner(hf(), "wrong")))
    with pytest.warns(RuntimeWarning, match="logits diverge by .* nats"):
        result = decode(made, lookahead="off")
    assert ids(result) == ids(decode(pair(None), lookahead="off"))
    assert made.target.static is not None
    assert made.target.static.ran.total() == 1


def wrong_position(self: Block, plan: Plan, capacity: int) -> None:
    place(self, plan, capacity)
    self.positions[0] += 1


def wrong_cell(self: Block, plan: Plan, capacity: int) -> None:
    place(self, plan, capacity)
    self.cells[0] -= 1


def wrong_layer(self: View, store: Tensor, states: Tensor) -> Tensor:
    return written(self, store, states.roll(1, dims=-1) if self._layer == 1 else states)


place, written = Block.place, View._written
SABOTAGES: tuple[tuple[Any, str, Any], ...] = (
    (Block, "place", wrong_position), (Block, "place", wrong_cell), (View, "_written", wrong_layer),
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sabotage", [None, *SABOTAGES], ids=lambda s: "none" if s is None else s[2].__name__)
def test_the_first_pass_of_a_bucket_shows_what_is_wrong(
    sabotage: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = runner(copy.deepcopy(hf()).to(dtype)).fork()
    made.reserve(3, 60)
    made.feed([0, 1], torch.arange(24, device=DEVICE).view(2, 12), [12, 7], want_logits=False)
    if sabotage is not None:
        monkeypatch.setattr(*sabotage)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        made.feed([0, 1], torch.arange(6, device=DEVICE).view(2, 3), [3, 2])
    assert [f"{warning.message}" for warning in seen if "logits diverge" in str(warning.message)] == [
        f"{warning.message}" for warning in seen
    ]
    assert len(seen) == (sabotage is not None)
    assert (made.static_failure is None) == (sabotage is None)


@pytest.mark.parametrize("sabotage", SABOTAGES[:2], ids=lambda s: s[2].__name__)
def test_a_drafters_first_steps_are_compared_too(sabotage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*sabotage)
    made = Shoal(runner(hf(), None), runner(hf(seed=1, layers=1)), max_batch=6)
    with pytest.warns(RuntimeWarning, match="logits diverge"):
        result = decode(made)
    assert ids(result) == ids(decode(pair(None, draft_seed=1)))


def test_a_step_that_draws_what_is_impossible_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Shoal(runner(hf(), None), runner(hf(seed=1, layers=1)), max_batch=6)
    step = drafting._Step.__call__

    def wrong(self: drafting._Step, view: View) -> Any:
        found = step(self, view)
        return found._replace(tokens=found.q.argmin(-1))

    monkeypatch.setattr(drafting._Step, "__call__", wrong)
    with pytest.warns(RuntimeWarning, match="does not draw from the distribution of its logits"):
        decode(made, top_k=5)


def test_rounding_of_a_few_logits_is_no_fault() -> None:
    """The largest of a million differences in 16 bits says nothing; a position whose logits are those of another does."""
    logits = torch.randn(40, 30000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    rounded = logits + 0.02 * torch.randn_like(logits)
    rounded[3, 5] += 2  # an outlier of 2 deviations
    compare(rounded, logits)
    swapped = logits.clone()
    swapped[3] = logits[4]
    with pytest.raises(ArithmeticError, match="logits diverge"):
        compare(swapped, logits)
    with pytest.raises(ArithmeticError, match="diverge by nan"):
        compare(torch.where(torch.arange(30000) == 7, torch.nan, logits), logits)


def test_nan_from_a_drafter_ends_drafts_and_no_row() -> None:
    broken = tiny_model("llama", seed=1, layers=1)
    broken.lm_head.weight.data[5] = torch.nan
    result = decode(Shoal(runner(hf()), runner(on_device(broken))))
    assert ids(result) == ids(decode(pair(None), lookahead="off"))
    assert result.stats.drafted == 0 < result.stats.draft_passes


# ── settings ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("mode", "cpu", "cuda"), [("auto", None, "graphed"), ("on", None, "graphed"), ("off", None, None)])
def test_what_a_setting_means(mode: str, cpu: str | None, cuda: str | None) -> None:
    assert executor_for(mode, CPU) == cpu
    assert executor_for(mode, torch.device("cuda")) == cuda


def test_loading_with_a_setting(tmp_path: Path) -> None:
    target, draft = save_pair(tmp_path)
    for mode in ("auto", "off", "on"):
        made = shoal.load(target, draft, compile=mode)
        assert made.draft_model is not None
        assert [model.static for model in (made.target, made.draft_model)] == [None, None]
    with pytest.raises(RequestError, match="compile must be 'auto', 'on', 'off' or 'modules', got 'yes'"):
        shoal.load(target, draft, compile="yes")


def test_the_bytes_of_a_cache_are_foretold() -> None:
    made = loading.wrap(hf(), "tiny")  # the self-check tells the size of a token
    made.use_static_passes("eager")
    fork = made.fork()
    fork.reserve(5, 70)
    fork.feed([0], torch.ones(1, 4, dtype=torch.long, device=DEVICE), [4], want_logits=False)
    assert made.cache_bytes(5, 70) == fork.cache.nbytes()


def test_building_is_told_and_on_no_stage_clock(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def slow(run: Run) -> Run:
        time.sleep(0.2)
        return run

    monkeypatch.setitem(EXECUTORS, "slow", lambda device: slow)
    made = by_stages(Shoal(runner(hf(), "slow")))
    with caplog.at_level("INFO", logger="shoal"):
        stats = made.generate([[1, 2, 3]], 1, lookahead="off", max_new_tokens=3).stats
    assert caplog.messages == ["tiny: building a pass of 1 x 1 tokens over 64 keys (slow) ..."]
    assert made.target.seconds_building >= 0.2
    assert (
        max(stats.seconds_rounds, stats.seconds_verify, stats.seconds_target) <= stats.seconds - made.target.seconds_building
    )


# ── what cannot be captured ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("architecture", "options", "reason"),
    [
        ("llama", {}, None),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("phi3", {"rope_parameters": {"type": "longrope"}}, "longrope"),
        ("mixtral", {"_experts_implementation": "eager"}, "experts are looked up on the host"),
        ("mixtral", {"_experts_implementation": "grouped_mm"}, "experts' sizes are read on the host"),
        ("mixtral", {"_experts_implementation": "batched_mm"}, None),
        ("gpt-oss", {"_experts_implementation": "eager"}, "experts are looked up on the host"),
        ("deepseek-v3", {"_experts_implementation": "eager"}, "experts are looked up on the host"),
    ],
    ids=str,
)
def test_a_model_that_cannot_be_captured_is_known_by_name(
    architecture: str, options: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []
    monkeypatch.setitem(EXECUTORS, "graphed", tried.append)
    made = loading.wrap(hf(architecture), "tiny", checked=False)
    for name, value in options.items():
        monkeypatch.setattr(hf(architecture).config, name, value)
    made.use_static_passes("graphed")
    assert (made.static is None) == (reason is not None)
    assert reason is None or reason in described(made)["passes"]
    assert not tried


@pytest.mark.parametrize(("capability", "found"), [((8, 0), True), ((9, 0), False), ((10, 0), False)])
def test_grouped_products_are_one_kernel_from_hopper_on(
    capability: tuple[int, int], found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    model = copy.deepcopy(hf("mixtral")).to(torch.bfloat16)
    model.config._experts_implementation = "grouped_mm"
    assert (obstacle(model) is not None) == found
