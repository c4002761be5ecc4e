"""Captured rounds of a model: sizes and buffers, caches, whole runs, settings, and what fails.

Tests of: models.compiled, models.compiled.transfer, models.compiled.block,
models.compiled, models.compiled.captures, models.attention.fused.
"""

from __future__ import annotations

import copy
import gc
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from captured_models import (
    ARCHITECTURES,
    CPU,
    NEW,
    PROMPTS,
    K,
    decode,
    hf,
    ids,
    pair,
    rows_of,
    runner,
)
from recorder import Recorder
from shoal.api import Shoal
from shoal.config import Limits, Sampling
from shoal.drafting.captured_kinds import RoundKinds
from shoal.errors import OutOfMemory, RequestError
from shoal.lookahead.controller import Fixed
from shoal.models import loading
from shoal.models.attention import AttentionInputs
from shoal.models.attention.methods import METHODS
from shoal.models.cache import Plan
from shoal.models.compiled import EXECUTORS, Executor, Run, captures, executor_for, obstacle
from shoal.models.compiled.block import MOST_LAYOUTS, Block, Bucket, keys_for, reservation, step_up
from shoal.models.compiled.captures import CAPTURED, MOST_KINDS, PATIENCE, Captures, Failures, compare
from shoal.models.executor import MODULES
from shoal.models.load_report import described
from shoal.sampling.distributions import probabilities, pure_probabilities
from shoal.testing import save_pair, tiny_model
from shoal.testing.drafters import engine_of, runners_of
from shoal.types.requests import Prefix, Request, Row
from shoal.types.trees import Positions

# ── sizes and buffers ───────────────────────────────────────────────────────────────────────────────────────────────


def test_sizes_step_up_by_half_at_most() -> None:
    assert [step_up(n) for n in range(1, 18)] == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16, 16, 16, 16, 24]
    assert all(n <= step_up(n) <= 1.5 * n for n in range(1, 1000))


def test_keys_are_a_power_of_two_that_the_cache_has() -> None:
    assert [keys_for(keys, 512) for keys in (1, 64, 65, 200, 500)] == [64, 64, 128, 256, 512]
    assert [keys_for(keys, 96) for keys in (1, 64, 65)] == [64, 64, 96]


def test_room_for_padding_and_the_scratch_slot() -> None:
    assert reservation(5, 40, by_kernel=False) == (7, 64)
    assert reservation(8, 130, by_kernel=False) == (9, 192)
    assert reservation(8, 0, by_kernel=True) == (9, 0)
    found = [reservation(8, tokens, by_kernel=True) for tokens in (1, 256, 257, 2100)]
    assert found == [(9, 256), (9, 256), (9, 512), (9, 2304)]
    assert reservation(8, 2100, by_kernel=False) == (9, 3072)


def test_the_scratch_slot_is_counted_before_rows_are_admitted() -> None:
    """The bytes by which rows are admitted are those that are then reserved, with the slot for padding and the steps of sizes."""
    made = loading.wrap(tiny_model("llama"), "tiny", checked=False)
    made.capture_rounds("eager")
    for rows, tokens in ((1, 40), (5, 100), (8, 130)):
        need, (slots, capacity) = made.memory.cache_bytes(rows, tokens), reservation(rows, tokens, by_kernel=False)
        made.memory.reserve(rows, tokens)
        assert made.memory.allocated_bytes == need == slots * capacity * made.memory.token_bytes
        assert rows < slots <= 1 + 1.5 * rows


def test_a_block_holds_a_plan_and_its_padding_stands_aside() -> None:
    block = Block(Bucket(3, 3, 64), scratch=400, device=CPU)
    assert block.cells.tolist() == [400] * 9
    numbers = block.placed(Plan([0, 1], [7, 20], [3, 1], CPU), capacity=100)
    positions, words, cells = numbers[:27].reshape(3, 3, 3).tolist()
    assert positions == [[7, 8, 9], [20, 20, 20], [0, 0, 0]]
    assert words == [[1, 3, 7], [1, 1, 1], [1, 1, 1]]
    assert cells == [[7, 8, 9], [120, 400, 400], [400, 400, 400]]
    assert numbers[27:].reshape(4, 3).tolist() == [[7, 20, 0], [3, 1, 0], [0, 0, 0], [0, 0, 0]]


def test_what_a_block_keeps_of_a_plan_is_right_for_the_next() -> None:
    """Rows move on, feed other numbers of tokens, leave and get prefixes; the kept layouts are those of a new block."""
    bucket, generator = Bucket(3, 3, 64), torch.Generator().manual_seed(0)
    kept, prefix = Block(bucket, scratch=400, device=CPU), Prefix(6, 4)
    for _ in range(3 * MOST_LAYOUTS):
        counts = torch.randint(1, 4, (int(torch.randint(1, 4, (), generator=generator)),), generator=generator).tolist()
        starts = torch.randint(5, 90, (len(counts),), generator=generator).tolist()
        prefixes = [prefix if start % 2 else None for start in starts]
        plan = Plan(range(len(counts)), starts, counts, CPU, prefixes=prefixes)
        new = Block(bucket, scratch=400, device=CPU).placed(plan, capacity=100)
        assert kept.placed(plan, capacity=100).tolist() == new.tolist()
        assert len(kept._layouts) <= MOST_LAYOUTS


def test_a_block_of_one_column_moves_its_real_rows_on() -> None:
    block = Block(Bucket(3, 1, 64), scratch=400, device=CPU)
    block._numbers.copy_(torch.from_numpy(block.placed(Plan([0, 1], [7, 20], [1, 1], CPU), capacity=100)))
    block.advance()
    assert block.positions.tolist() == [[8], [21], [0]]
    assert block.cells.tolist() == [8, 121, 400]
    assert block.bounds[0].tolist() == [8, 21, 0]


def test_rows_that_a_round_can_pad() -> None:
    fork = runner(hf()).fork()
    fork.memory.reserve(3, 60)
    assert fork.captures is not None

    def covers(slots: list[int], starts: list[int], counts: list[int], ahead: int = 0) -> bool:
        assert fork.captures is not None
        return fork.captures.covers(Plan(slots, starts, counts, CPU), fork.cache, ahead)

    assert not covers([0], [0], [1])  # the cache has no layer yet
    fork.feed([0, 1], torch.ones(2, 4, dtype=torch.long), [4, 4])
    assert covers([0, 1], [4, 4], [1, 1])
    assert covers([0, 1, 2], [4, 4, 4], [1, 1, 1])
    assert not covers([1, 0], [4, 4], [1, 1])  # out of order
    assert not covers([1, 2], [4, 4], [1, 1])
    assert not covers([0, 1, 2, 3], [4] * 4, [1] * 4)  # no scratch slot behind them
    assert covers([0], [fork.cache.capacity - 4], [2], ahead=2)
    assert not covers([0], [fork.cache.capacity - 4], [2], ahead=3)


def test_models_and_methods_without_captured_rounds() -> None:
    mpt = runner(hf("mpt"))
    assert (mpt.captures, mpt.absent[CAPTURED]) == (None, "the model attends by its own code")
    split = loading.wrap(hf(), "tiny", "split", checked=False)
    split.capture_rounds("eager")
    assert (split.captures, split.absent[CAPTURED]) == (None, "attention='split'")
    split.capture_rounds(None)
    assert split.absent == {}


def test_what_padding_costs_is_told_to_those_who_plan() -> None:
    """A captured round computes the padding of ragged drafts: `auto` must price it."""
    for executor, packed in ((None, True), ("eager", False)):
        made = Shoal(runner(hf(), executor), runner(hf(seed=1), executor))
        assert made.pair_costs.packed is packed
        assert made.pair_costs.positions([0, 3]) == (5 if packed else 8)


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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_is_captured_as_it_is(architecture: str) -> None:
    """The first round of each kind is compared with ordinary passes, position by position."""
    samplings = [Sampling(temperature=0.0), Sampling(0.8, seed=1), Sampling(0.8, seed=2)]
    made = engine_of(runner(hf(architecture)), runner(hf(architecture, seed=1)), Fixed(2), max_batch=4)
    found = rows_of(made, samplings)
    target = made.target.captures
    assert target is not None
    assert target.failures == []
    assert target.ran.total() == made.stats.target_passes
    plain = engine_of(runner(hf(architecture), None), runner(hf(architecture, seed=1), None), Fixed(2))
    assert rows_of(plain, samplings) == found


SETTINGS: tuple[dict[str, Any], ...] = ({"rule": "rejection"}, {"lookahead": "off"}, {"lookahead": "bass"})


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_tokens_are_those_of_ordinary_passes(options: dict[str, Any]) -> None:
    expected, made = decode(pair(None, 1), **options), pair("eager", 1)
    result = decode(made, **options)
    assert ids(result) == ids(expected)
    for count in ("rounds", "drafted", "accepted", "target_passes"):
        assert getattr(result.stats, count) == getattr(expected.stats, count)
    assert result.stats.executors["target"].keys() == {CAPTURED, MODULES}  # rounds, and prompts
    assert result.stats.executors["target"][CAPTURED] == result.stats.target_passes


@pytest.mark.parametrize(
    ("second", "captured"),
    [(Sampling(temperature=0.7, seed=2), True), (Sampling(top_k=5, seed=2), False)],
    ids=["alike", "unlike"],
)
def test_rows_of_several_settings(second: Sampling, captured: bool) -> None:
    """Temperatures may differ within a round; what cuts the tail may not, and then the stages do the work."""
    samplings = [Sampling(temperature=0.0), second, Sampling(temperature=1.2, seed=5)]
    made = [engine_of(runner(hf(), e), runner(hf(seed=1, layers=1), e), Fixed(K)) for e in (None, "eager")]
    expected, found = (rows_of(engine, samplings) for engine in made)
    assert found == expected
    target = made[1].target.captures
    assert target is not None
    assert (target.ran.total() == made[1].stats.target_passes) is captured


def test_rounds_outlive_a_run_and_caches_are_handed_on() -> None:
    made = pair("eager")
    assert made.draft_model is not None
    every = [made.target.captures, made.draft_model.captures]
    decode(made)
    gc.collect()
    built = [copy.copy(one.built) for one in every if one is not None]
    assert ids(decode(made)) == ids(decode(pair(None)))
    assert [one.built for one in every if one is not None] == built
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
    expected = model(torch.tensor([[1, 2, 3]])).logits
    for _ in stream:
        assert model.config._attn_implementation == before
        assert torch.equal(model(torch.tensor([[1, 2, 3]])).logits, expected)
    assert made.captures is not None
    assert made.captures.ran.total() > NEW / 2


# ── capturing, without a GPU ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def _graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXECUTORS, "graphed", Recorder)
    monkeypatch.setattr(Recorder, "log", [])


@pytest.mark.usefixtures("_graphs")
def test_a_function_is_captured_once_and_replayed_after() -> None:
    made = pair("graphed", draft_seed=1)
    for _ in range(2):
        assert ids(decode(made)) == ids(decode(pair(None, draft_seed=1)))
        gc.collect()
    target = made.target.captures
    assert target is not None
    (generation,) = target._of.values()
    functions = sum(len(one.built) for one in generation.rounds.values())
    assert Recorder.log.count("capture") == functions
    assert Recorder.log.count("replay") > 3 * functions


@pytest.mark.usefixtures("_graphs")
def test_a_cache_that_grows_lets_go_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds know the tensors they are over; while they lived on, the old tensors took memory beside the new ones."""
    made = engine_of(runner(hf(), "graphed"), runner(hf(seed=1, layers=1), "graphed"), Fixed(K), max_batch=3)
    rows_of(made, [Sampling(seed=i) for i in range(3)])
    cache, target = made.target.cache, made.target.captures
    assert target is not None
    assert target.generation(cache).rounds
    old = [weakref.ref(tensor) for stores in cache.stores() for tensor in stores[:2]]
    seen, resize = [], cache._resize

    def watched(*size: int) -> None:
        seen.append(cache in target._of)
        resize(*size)

    monkeypatch.setattr(cache, "_resize", watched)
    made.target.memory.reserve(3, 400)
    assert seen == [False]
    assert [ref() is None for ref in old] == [True] * len(old)


@pytest.mark.slow
@pytest.mark.usefixtures("_graphs")
def test_two_engines_in_threads_on_one_pair() -> None:
    """Each has rounds, pools and results of its own; the model itself computes one pass at a time."""
    target, draft = runner(hf(), "graphed"), runner(hf(seed=1, layers=1), "graphed")
    samplings = [[Sampling(temperature=0.8, seed=3 * i + j) for j in range(3)] for i in range(4)]
    alone = [rows_of(engine_of(runner(hf(), None), runner(hf(seed=1, layers=1), None), Fixed(K)), own) for own in samplings]
    engines = [engine_of(target, draft, Fixed(K)) for _ in samplings]
    with ThreadPoolExecutor(len(engines)) as pool:
        together = list(pool.map(rows_of, engines, samplings))
    assert together == alone
    for model in (target, draft):
        assert model.captures is not None
        assert model.captures.failures == []
        generations = list(model.captures._of.values())
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
        one.captures = Captures(one.bridge, one.name, "eager", "fused")
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
        assert one.captures is not None
        assert one.captures.failures == []
        assert one.captures.ran.total() > NEW


# ── what fails ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Fails:
    """An executor whose next captures fail.

    Attributes:
        errors: of the captures to come, None for one that goes well; without any, all go well.
        tried: number of captures.
    """

    def __init__(self, *errors: Exception | None) -> None:
        self.errors, self.tried = list(errors), 0

    def __call__(self, device: torch.device) -> Executor:
        def execute(run: Run) -> Run:
            self.tried += 1
            error = self.errors.pop(0) if self.errors else None
            if error is not None:
                raise error
            return run

        return execute


def decoded(fails: Fails, monkeypatch: pytest.MonkeyPatch, calls: int = 1, **options: Any) -> tuple[Shoal, list[str], Any]:
    """Plain decoding whose captures fail: the pair, the warnings and the counts by executor."""
    monkeypatch.setitem(EXECUTORS, "fails", fails)
    made = Shoal(runner(hf(), "fails"), max_batch=6)
    expected = ids(decode(pair(None), lookahead="off", **options))
    counts: dict[str, int] = {}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(calls):
            result = decode(made, lookahead="off", **options)
            assert ids(result) == expected
            counts = {name: counts.get(name, 0) + count for name, count in result.stats.executors["target"].items()}
            gc.collect()
    return made, [str(warning.message) for warning in seen if warning.category is RuntimeWarning], counts


def failures_of(made: Shoal) -> list[str]:
    assert made.target.captures is not None
    return made.target.captures.failures


def test_one_failure_ends_one_kind_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row never ends because a capture failed, and rounds of other sizes and settings are captured as before."""
    fails = Fails(RuntimeError("no kernel image\nand a long trace"))
    made, told, counts = decoded(fails, monkeypatch)
    reason = "RuntimeError: no kernel image"
    assert told == [f"tiny: no more captured rounds of this kind ({reason}); their stages do the work"]
    assert failures_of(made) == [f"some kinds of rounds are not captured: {reason}"]
    assert set(counts) == {MODULES}
    found = decode(made, lookahead="off", temperature=0.0)
    assert found.stats.executors["target"][CAPTURED] == found.stats.target_passes
    assert made.target.capture_failure is None


def test_kinds_that_failed_are_not_tried_again_and_several_end_all(monkeypatch: pytest.MonkeyPatch) -> None:
    fails = Fails(*[ValueError("a host read")] * 100)
    made, told, _ = decoded(fails, monkeypatch)
    for options in ({"temperature": 0.0}, {"top_k": 5}, {"top_k": 7}, {"top_k": 9}):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            assert set(decode(made, lookahead="off", **options).stats.executors["target"]) == {MODULES}  # type: ignore[arg-type]
        told += [str(warning.message) for warning in seen]
    assert fails.tried == len(told) == MOST_KINDS
    assert told[-1] == "tiny: no more captured rounds (ValueError: a host read); their stages do the work"
    assert failures_of(made) == ["no captured rounds: ValueError: a host read"]
    assert made.target.capture_failure == "ValueError: a host read"
    assert described(made.target)["passes"] == "modules (no captured rounds: ValueError: a host read)"


@pytest.mark.slow(but=["error0"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), OutOfMemory("none left"), MemoryError()])
def test_where_memory_was_short_rounds_are_captured_again_later(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "PATIENCE", 5)
    fails = Fails(error, error)
    made, told, counts = decoded(fails, monkeypatch, calls=3)
    assert [text.split(" rounds (")[0] for text in told] == [
        "tiny: no captured rounds for the next 5",
        "tiny: no captured rounds for the next 10",
    ]
    assert counts[CAPTURED] > 0
    assert counts[MODULES] >= 1 + 5 + 1 + 10  # the rounds that failed and waited, and prompts
    assert failures_of(made) == []


def test_rounds_let_go_of_their_memory_where_it_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs over a cache share a pool, which comes back as a whole."""
    fails = Fails()
    made, *_ = decoded(fails, monkeypatch)
    target = made.target.captures
    assert target is not None
    (generation,) = target._of.values()
    assert generation.rounds
    fails.errors = [torch.OutOfMemoryError("CUDA out of memory")]
    with pytest.warns(RuntimeWarning, match=f"no captured rounds for the next {PATIENCE} rounds"):
        decode(made, lookahead="off", temperature=0.0)
    assert generation.rounds == {}
    assert not target._of


def test_failures_by_kind_and_in_words() -> None:
    made = Failures()
    assert not made.refuses("a")
    assert not made.waits()
    made.note("a", ValueError(""))
    assert made.refuses("a")
    assert not made.refuses("b")
    assert not made.pause
    assert made.reasons == ["some kinds of rounds are not captured: ValueError: no reason given"]
    made.note("a", ValueError("again"))
    made.note("b", MemoryError())
    assert made.pause
    assert not made.refuses("b")
    assert [made.waits() for _ in range(PATIENCE + 1)] == [True] * PATIENCE + [False]
    assert made.end is None


def test_another_capture_of_a_failed_kind_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: kinds that failed are asked for again in each round."""
    monkeypatch.setattr(RoundKinds, "_failed", lambda self, kind: False)
    fails = Fails(*[ValueError("a host read")] * 2)
    _, told, _ = decoded(fails, monkeypatch)
    assert len(told) > 1


@pytest.mark.slow(but=["target"])
@pytest.mark.parametrize("role", ["target", "drafter"])
def test_replaced_weights_end_captured_rounds(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay reads the tensors that it was captured with, and never runs Python that could look."""
    monkeypatch.setitem(EXECUTORS, "graph", Recorder)
    models = [copy.deepcopy(hf()), copy.deepcopy(hf(seed=1, layers=1))]
    made = Shoal(*(runner(model, "graph") for model in models), max_batch=6)
    decode(made)
    weight = models[role == "drafter"].model.layers[0].mlp.up_proj.weight
    weight.data = 2 * weight.detach().clone()
    with pytest.warns(RuntimeWarning, match="no more captured rounds .ReplacedWeights: weights or layers"):
        found = decode(made)
    assert ids(found) == ids(decode(Shoal(*(runner(model, None) for model in models), max_batch=6)))
    assert CAPTURED not in found.stats.executors["target"]
    assert made.target.capture_failure is not None


def test_replaced_weights_that_nobody_looks_at_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without the question of each round, the replay goes on."""
    monkeypatch.setattr(Captures, "require_same_weights", lambda self: None)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test_replaced_weights_end_captured_rounds("target", monkeypatch)


def test_rounding_of_a_few_logits_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest of a million differences in 16 bits says nothing; a position whose logits are those of another does."""
    logits = torch.randn(40, 30000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    rounded = logits + 0.02 * torch.randn_like(logits)
    rounded[3, 5] += 2  # an outlier of 2 deviations
    swapped = logits.clone()
    swapped[33] = logits[4]
    for at_once in (captures.AT_ONCE, 7 * 30000):
        monkeypatch.setattr(captures, "AT_ONCE", at_once)
        compare(rounded, logits)
        with pytest.raises(ArithmeticError, match="logits diverge"):
            compare(swapped, logits)
        with pytest.raises(ArithmeticError, match="diverge by inf"):
            compare(torch.where(torch.arange(30000) == 7, torch.nan, logits), logits)
    compare(logits[:0], logits[:0])


def test_a_comparison_takes_a_slice_of_the_logits_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies in float64 of all logits of a large batch are gigabytes."""
    sizes: list[int] = []
    real = captures.divergences

    def noted(logits: Tensor, right: Tensor) -> Tensor:
        sizes.append(logits.numel())
        return real(logits, right)

    monkeypatch.setattr(captures, "divergences", noted)
    monkeypatch.setattr(captures, "AT_ONCE", 1000)
    logits = torch.randn(50, 100)
    compare(logits, logits)
    assert sizes == [1000] * 5


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
        assert [model.captures for model in (made.target, made.draft_model)] == [None, None]
    with pytest.raises(RequestError, match="compile must be 'auto', 'on', 'off' or 'modules', got 'yes'"):
        shoal.load(target, draft, compile="yes")


def test_the_bytes_of_a_cache_are_foretold() -> None:
    made = loading.wrap(hf(), "tiny")  # the self-check tells the size of a token
    made.capture_rounds("eager")
    fork = made.fork()
    fork.memory.reserve(5, 70)
    fork.feed([0], torch.ones(1, 4, dtype=torch.long), [4], want_logits=False)
    assert made.memory.cache_bytes(5, 70) == fork.cache.nbytes()
    assert fork.memory.grown_bytes(5, 70) == fork.cache.nbytes()  # it has that room
    grown = fork.memory.grown_bytes(8, 100)
    fork.memory.reserve(8, 100)
    assert grown == fork.cache.nbytes()


def test_building_is_told_and_on_no_stage_clock(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def slow(run: Run) -> Run:
        time.sleep(0.2)
        return run

    monkeypatch.setitem(EXECUTORS, "slow", lambda device: slow)
    made = Shoal(runner(hf(), "slow"))
    with caplog.at_level("INFO", logger="shoal"):
        stats = made.generate([[1, 2, 3]], 1, lookahead="off", max_new_tokens=3).stats
    assert caplog.messages == ["tiny: building a round of 1 rows, verify 0 (slow) ..."]
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
    tried: list[torch.device] = []
    monkeypatch.setitem(EXECUTORS, "graphed", tried.append)
    made = loading.wrap(hf(architecture), "tiny", checked=False)
    for name, value in options.items():
        monkeypatch.setattr(hf(architecture).config, name, value)
    made.capture_rounds("graphed")
    assert (made.captures is None) == (reason is not None)
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
