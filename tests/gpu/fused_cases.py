"""What the fused kernel must do, on the device at hand: a CUDA GPU, or the CPU through Triton's interpreter.

Not collected by itself: `test_fused.py` runs this file in a process of its own, because TRITON_INTERPRET=1 must be set before
Triton is imported, and `benchmarks/gpu/run.sh` runs it on CUDA. In the interpreter a program of the grid takes tens of
milliseconds, on a GPU every new shape is compiled for seconds; hence small cases, and few.

Tests of: models.attention.fused, models.attention.fused_kernels, models.attention, models.attention.methods.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mutants import mutant, wrong_ones
from shoal import Limits, Sampling
from shoal.errors import RequestError
from shoal.lookahead.controller import by_name
from shoal.models import loading
from shoal.models.attention import AttentionInputs, Masks, fused_kernels, methods
from shoal.models.attention.fused import Card, Tiling, attend, fused, tiling
from shoal.models.cache import Plan
from shoal.testing import tiny_model
from shoal.testing.drafters import engine_of
from shoal.types.requests import Prefix, Request
from tree_masks import path_of, random_tree

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("neither a CUDA device nor TRITON_INTERPRET=1", allow_module_level=True)

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
NAN = float("nan")
SMALL = Tiling(queries=16, keys=16, splits=1)
H100 = Card(processors=132, shared=227 * 1024)


@dataclass(frozen=True)
class Row:
    """start: tokens before the pass. count: tokens fed. group: index of the prompt it shares, or None."""

    start: int
    count: int
    group: int | None = None


@dataclass(frozen=True)
class Case:
    """One ragged pass; `prompts` are the lengths of the shared prompts, which rows of a group have at their beginning. With `trees`
    rows feed random draft trees."""

    rows: tuple[Row, ...]
    prompts: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    kv_heads: int = 2
    group: int = 2
    dim: int = 16
    value_dim: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    cut: Tiling = SMALL
    seed: int = 0
    trees: bool = False

    @property
    def scale(self) -> float:
        return 1.3 * self.dim**-0.5


@dataclass(frozen=True)
class Data:
    """A case filled in: the inputs as the kernel gets them, NaN wherever no token lies, and each row's keys laid out plainly."""

    inputs: AttentionInputs
    keys: list[Tensor]  # per row [length, kv heads, dim]
    values: list[Tensor]


def fill(case: Case) -> Data:
    generator = torch.Generator().manual_seed(case.seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(case.dtype)

    def nan(*shape: int) -> Tensor:
        return torch.full(shape, NAN, dtype=case.dtype)

    bases = [3]  # nothing begins at the beginning
    for length in case.prompts:
        bases.append(bases[-1] + length + 2)
    prefixes = [None if row.group is None else Prefix(bases[row.group], case.prompts[row.group]) for row in case.rows]
    first = 1
    plan = Plan(
        range(first, first + len(case.rows)), [row.start for row in case.rows], [row.count for row in case.rows], DEVICE,
        prefixes=prefixes, parents=[random_tree(row.count - 1, generator) for row in case.rows] if case.trees else None,
    )  # fmt: skip

    def store(width: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Slots [rows + 2, capacity, kv heads, width], the shared store [cells, kv heads, width], and each row's own sequence."""
        slots, cells = nan(len(case.rows) + 2, plan.kv + 3, case.kv_heads, width), nan(bases[-1] + 1, case.kv_heads, width)
        for base, length in zip(bases, case.prompts, strict=False):
            cells[base : base + length] = random(length, case.kv_heads, width)
        sequences = []
        for slot, prefix, length, tail in zip(plan.slots, prefixes, plan.lengths, plan.tails, strict=True):
            slots[slot, :tail] = random(tail, case.kv_heads, width)
            shared = cells[:0] if prefix is None else cells[prefix.base : prefix.base + prefix.length]
            sequences.append(torch.cat([shared, slots[slot, :tail]]))
            assert len(sequences[-1]) == length
        return slots.to(DEVICE), cells.to(DEVICE), sequences

    (keys, shared_keys, key_rows), (values, shared_values, value_rows) = store(case.dim), store(case.value_dim)
    query = nan(len(case.rows), plan.q, case.kv_heads * case.group, case.dim)
    for b, count in enumerate(plan.counts):
        query[b, :count] = random(count, *query.shape[2:])
    span = slice(first, first + len(case.rows))
    inputs = AttentionInputs(
        query.to(DEVICE).transpose(1, 2), keys[span, : plan.kv].transpose(1, 2), values[span, : plan.kv].transpose(1, 2),
        Masks(plan), case.scale, case.window, case.softcap, random(query.shape[2]).to(DEVICE) if case.sinks else None,
        *((shared_keys, shared_values) if case.prompts else (None, None)),
    )  # fmt: skip
    return Data(inputs, key_rows, value_rows)


def tokens_seen(p: AttentionInputs, row: int, column: int) -> list[int]:
    """Tokens of the row that a column sees: those before the block and its path, of them as many of the last as the window has."""
    start = p.plan.starts[row]
    path = range(column + 1) if p.plan.parents is None else path_of(p.plan.parents[row], column)
    return [*range(start), *(start + c for c in path)][-(p.window or 0) :]


def plainly(data: Data, dtype: torch.dtype) -> Tensor:
    """The definition, one query at a time in `dtype`; [rows, q, heads, value dim], zero in unused columns."""
    p = data.inputs
    out = torch.zeros(*p.query.transpose(1, 2).shape[:3], p.value.shape[-1], dtype=dtype)
    for b, (row_keys, row_values) in enumerate(zip(data.keys, data.values, strict=True)):
        for j in range(p.plan.counts[b]):
            seen = tokens_seen(p, b, j)
            keys, values = (t[seen].to(dtype).repeat_interleave(p.group, dim=1) for t in (row_keys, row_values))
            scores = torch.einsum("hd,khd->hk", p.query[b, :, j].cpu().to(dtype), keys) * p.scale
            if p.softcap is not None:
                scores = p.softcap * torch.tanh(scores / p.softcap)
            if p.sinks is not None:
                scores = torch.cat([scores, p.sinks.cpu().to(dtype)[:, None]], dim=1)
            out[b, j] = torch.einsum("hk,khv->hv", scores.softmax(-1)[:, : len(seen)], values)
    return out


def tolerance(data: Data, truth: Tensor) -> float:
    """Twice the error of plain arithmetic in the same dtype, and what rounding can do where that one was lucky: weights and output
    are rounded to the dtype, and softcap's tanh, made of an exponential, is off by an eps of its range."""
    dtype, p = data.inputs.query.dtype, data.inputs
    plain = float((plainly(data, dtype).double() - truth).abs().max())
    eps = 2 * torch.finfo(dtype).eps + 2 * torch.finfo(torch.float32).eps * (p.softcap or 0)
    return 2 * plain + eps * float(torch.cat([values.abs().flatten() for values in data.values]).max())


def run(data: Data, cut: Tiling) -> Tensor:
    return attend(data.inputs, cut).cpu()


def excess(case: Case) -> float:
    """The kernel's error in units of the tolerance; infinite if anything is NaN or an unused column is not zero."""
    data = fill(case)
    truth = plainly(data, torch.float64)
    out = run(data, case.cut)
    assert out.dtype == case.dtype
    assert out.shape == truth.shape
    if any(out[b, count:].any() for b, count in enumerate(data.inputs.plan.counts)):
        return torch.inf
    error = (out.double() - truth).abs().max()
    return float(error.nan_to_num(torch.inf)) / tolerance(data, truth)


# ── the kernel is the definition ────────────────────────────────────────────────────────────────────────────────────


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype, several: bool) -> Case:
    """Random passes of a dtype; several: their keys are shared out."""
    prompts = draw(st.sampled_from([(), (), (5,), (33, 16)]))
    rows = []
    splits = draw(st.sampled_from([2, 3, 4])) if several else 1
    for _ in range(draw(st.integers(1, 3 if splits == 1 else 2))):
        group = draw(st.sampled_from([None, *range(len(prompts))]))
        start = draw(st.integers(0, 40)) + (0 if group is None else prompts[group])
        rows.append(Row(start, draw(st.integers(1, 9)), group))
    dim = draw(st.sampled_from([8, 16, 24, 80]))
    return Case(
        tuple(rows), prompts, dtype,
        kv_heads=draw(st.sampled_from([1, 2])) if splits == 1 else 1,
        group=draw(st.sampled_from([1, 2, 3, 8] if splits == 1 else [1, 3])), dim=dim,
        value_dim=draw(st.sampled_from([dim, 40])), window=draw(st.sampled_from([None, None, 1, 7, 30])),
        softcap=draw(st.sampled_from([None, 2.0, 30.0])), sinks=draw(st.booleans()),
        cut=Tiling(draw(st.sampled_from([16, 32])), draw(st.sampled_from([16, 32])), splits),
        seed=draw(st.integers(0, 1000)), trees=draw(st.booleans()),
    )  # fmt: skip


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_is_the_definition(dtype: torch.dtype, several: bool) -> None:
    """In parts, so that processes share them out: on a GPU nearly every case is compiled for seconds."""

    @settings(max_examples=5)
    @given(cases(dtype, several))
    def check(case: Case) -> None:
        assert excess(case) <= 1

    check()


BRANCHING = Case((Row(40, 9), Row(0, 12), Row(37, 1), Row(33, 7, 0)), (33,), kv_heads=1, trees=True, seed=4)


@pytest.mark.parametrize(("window", "splits"), [(None, 3), (1, 1), (4, 3), (30, 1)])
def test_trees(window: int | None, splits: int) -> None:
    """Windows that end in the tree, in the row's own keys and in its prompt."""
    case = replace(BRANCHING, window=window, softcap=2.0, sinks=True, cut=Tiling(16, 16, splits))
    assert fill(case).inputs.plan.parents is not None
    assert excess(case) <= 1


def test_a_tree_of_all_bits_over_several_tiles() -> None:
    assert excess(Case((Row(5, 64), Row(3, 2)), kv_heads=1, group=1, window=4, trees=True)) <= 1


LONG = Case((Row(70, 3), Row(0, 1), Row(45, 2)), sinks=True)
SHARED = Case((Row(40, 2, 0), Row(20, 1), Row(33, 3, 1), Row(45, 1, 0)), (37, 33), kv_heads=1)


@pytest.mark.parametrize("splits", [3, 7])
@pytest.mark.parametrize("case", [replace(LONG, kv_heads=1, window=50), SHARED], ids=["own", "shared"])
def test_keys_are_shared_out_without_a_trace(case: Case, splits: int) -> None:
    """More splits than blocks too: then some programs have nothing to do."""
    assert excess(replace(case, cut=Tiling(16, 16, splits))) <= 1


@pytest.mark.parametrize(
    "case",
    [
        Case((Row(0, 40), Row(7, 33)), kv_heads=1),
        Case((Row(5, 40, 0), Row(30, 21, 0)), (5,), kv_heads=1, window=12),
        Case((Row(0, 30),), kv_heads=1, group=3, cut=Tiling(32, 16, 2), softcap=2.0),
    ],
)
def test_prompts_are_cut_into_tiles_of_queries(case: Case) -> None:
    """Among them tiles that begin within a column and tiles in which no column is real."""
    assert excess(case) <= 1


def test_the_shapes_decide_the_cut_if_nobody_does() -> None:
    data = fill(Case((Row(300, 2), Row(599, 1)), kv_heads=1, dim=64, value_dim=64))
    truth = plainly(data, torch.float64)
    assert float((fused(data.inputs).cpu().double() - truth).abs().max()) <= tolerance(data, truth)


REAL = {
    "Llama-2 7B, verifying": Case((Row(130, 7), Row(61, 2)), kv_heads=1, group=1),
    "Llama-3 8B, plain": Case((Row(300, 1), Row(20, 1)), kv_heads=1, group=4),
    "Llama-3 8B, 17 columns, two tiles of 64": Case((Row(70, 17), Row(9, 3)), kv_heads=1, group=4),
    "Llama-2 70B, verifying": Case((Row(65, 7),), kv_heads=1, group=8),
    "Qwen2 7B, a shared prompt": Case((Row(90, 7, 0), Row(75, 2, 0)), (70,), kv_heads=1, group=7),
    "Qwen3 8B, a tree": Case((Row(90, 9),), kv_heads=1, group=4, trees=True),
    "Gemma 2 27B, verifying": Case((Row(66, 7),), kv_heads=2, group=2, softcap=50.0, window=64),
    "Falcon 7B, plain": Case((Row(100, 1),), kv_heads=1, group=71, dim=64, value_dim=64),
    "DeepSeek-V3, latents": Case((Row(40, 2),), kv_heads=1, group=16, dim=576, value_dim=512),
}
"""Passes of real models, as the card cuts them: heads of 128, their ratios of queries to keys, tiles of 64 queries."""


@pytest.mark.parametrize("name", REAL)
def test_heads_of_real_models(name: str) -> None:
    case = REAL[name]
    dims = (case.dim, case.value_dim) if case.dim != 16 else (128, 128)
    case = replace(case, dim=dims[0], value_dim=dims[1], dtype=torch.bfloat16)
    inputs = fill(case).inputs
    span = inputs.key.shape[2] + (0 if inputs.shared_key is None else inputs.shared_key.shape[0])
    made = tiling(inputs.query, inputs.key, case.value_dim, span, H100)
    assert (made.queries >= 64) is (case.group * max(row.count for row in case.rows) > 32)
    assert excess(replace(case, cut=made)) <= 1


FAR, BEHIND = 1 << 20, 1 << 31
"""Numbers between two cells of a row of more than 2^31, few of whose pages are touched; and those in front of it, where an offset
of 32 bits leads."""
FAR_ROW = Case((Row(2055, 2),), kv_heads=1, group=1, dim=8, value_dim=8, window=3, dtype=torch.float16)
FAR_PROMPT = replace(FAR_ROW, rows=(Row(2080, 2, 0),), prompts=(2060,), window=30)


def beyond_32_bits(case: Case) -> tuple[AttentionInputs, Tensor]:
    """The inputs of a case of one row and one head, their cells `FAR` numbers apart; and what the kernel makes of near ones."""
    p = fill(case).inputs
    assert (p.plan.lengths[0] - 3) * FAR > BEHIND
    memory = torch.empty(BEHIND + (p.plan.lengths[0] + 10) * FAR, dtype=case.dtype, device=DEVICE)

    def apart(tensor: Tensor | None, place: int) -> Tensor | None:
        if tensor is None:
            return None
        strides = (0,) * (tensor.dim() - 3) + ((0, FAR, 1) if tensor.dim() == 4 else (FAR, 0, 1))
        return memory.as_strided(tensor.shape, strides, BEHIND + place).copy_(tensor)

    stores = {name: getattr(p, name) for name in ("key", "value", "shared_key", "shared_value")}
    moved = {name: apart(store, 32 * place) for place, (name, store) in enumerate(stores.items())}
    return replace(p, **moved), attend(p, SMALL)


@pytest.mark.skipif(not INTERPRETED, reason="takes gigabytes of a card")
@pytest.mark.parametrize("case", [FAR_ROW, FAR_PROMPT], ids=["own", "shared"])
def test_rows_beyond_32_bits(case: Case) -> None:
    """A row, or a prompt in front of one, of more numbers than 32 bits count, as 128k tokens of DeepSeek-V3 are."""
    inputs, right = beyond_32_bits(case)
    assert torch.equal(attend(inputs, SMALL), right)
    assert excess(case) <= 1


@pytest.mark.parametrize("start", [1, 7, 16])
def test_a_block_of_keys_lies_across_spans(start: int) -> None:
    """Places are counted from the last multiple of 1,024 tokens; a block may begin before one and end behind it."""
    span = fused_kernels.SPAN.value
    case = replace(FAR_ROW, rows=(Row(3 * span + start, 2),), window=15)
    assert excess(case) <= 1
    assert excess(replace(case, rows=(Row(span + start, 9, 0),), prompts=(span - 5,), window=40)) <= 1


def test_the_poison_is_there() -> None:
    """Negative control: a method that reads beyond a row's length, if only under a mask, meets NaN."""
    data = fill(Case((Row(9, 2), Row(3, 1))))
    assert run(data, SMALL).isfinite().all()
    assert methods.METHODS["pad"](data.inputs).isnan().any()


# ── it does not look at lengths before it is launched ───────────────────────────────────────────────────────────────


class Launches:
    """Stands for a kernel: notes the grid and every argument, then launches it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.seen = kernel, []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(**arguments: Any) -> None:
            kept = {
                name: arg if not isinstance(arg, Tensor) else (tuple(arg.shape), arg.stride())
                for name, arg in arguments.items()
            }
            self.seen.append((grid, kept))
            self.kernel[grid](**arguments)

        return launch


def test_launches_of_trees_depend_on_shapes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any tree in the same buffers is the same launch."""
    spy = Launches(fused_kernels.attend)
    monkeypatch.setattr(fused_kernels, "attend", spy)
    for seed in (1, 2):
        assert excess(replace(BRANCHING, seed=seed)) <= 1
    assert len(spy.seen) == 2
    assert all(a == b for a, b in pairwise(spy.seen))


def test_launches_depend_on_shapes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CUDA graph needs: other lengths in the same buffers are the same launch, and give the right result."""
    spy = Launches(fused_kernels.attend)
    monkeypatch.setattr(fused_kernels, "attend", spy)
    long = fill(replace(LONG, kv_heads=1))
    short = Plan(long.inputs.plan.slots, [50, 2, 7], [1, 3, 2], DEVICE)
    for masks in (long.inputs.masks, Masks(short)):
        out = attend(replace(long.inputs, masks=masks), Tiling(16, 16, 2)).cpu()
    assert len(spy.seen) == 2
    assert all(a == b for a, b in pairwise(spy.seen))
    assert not out[0, 1:].any()


@pytest.mark.skipif(INTERPRETED, reason="needs CUDA")
def test_a_captured_launch_follows_its_buffers() -> None:
    data = fill(replace(SHARED, cut=Tiling(16, 16, 2)))
    bounds = data.inputs.masks.bounds
    assert data.inputs.shared_key is not None

    def launch() -> Tensor:
        return attend(data.inputs, Tiling(16, 16, 2))

    launch()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch()
    for shorter in (0, 1):
        bounds[0] -= shorter
        graph.replay()
        assert torch.equal(out, launch())


# ── negative controls: kernels with one thing wrong ─────────────────────────────────────────────────────────────────

MUTANTS = wrong_ones("Triton: attention")
TREE_MUTANTS = wrong_ones("Triton: attention of trees")
WEAK = Case(
    (Row(40, 3, 0), Row(37, 2), Row(20, 3, 1)),
    (17, 9),
    kv_heads=1,
    window=30,
    softcap=2.0,
    sinks=True,
    cut=Tiling(16, 16, 2),
)
WEAK_TREE = replace(WEAK, rows=(Row(40, 9, 0), Row(37, 2), Row(20, 9, 1)), window=24, trees=True)


@pytest.mark.skipif(not INTERPRETED, reason="the checks themselves are checked in the interpreter")
@pytest.mark.parametrize("name", [*MUTANTS, *TREE_MUTANTS])
def test_a_wrong_kernel_is_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = (MUTANTS | TREE_MUTANTS)[name]
    wrong_kernels = mutant(fused_kernels, right, wrong, tmp_path)
    for kernel in ("attend", "combine"):
        monkeypatch.setattr(fused_kernels, kernel, getattr(wrong_kernels, kernel))
    assert excess(WEAK if name in MUTANTS else WEAK_TREE) > 100


FAR_MUTANTS = wrong_ones("Triton: attention of long rows")


@pytest.mark.skipif(not INTERPRETED, reason="the checks themselves are checked in the interpreter")
@pytest.mark.parametrize("name", FAR_MUTANTS)
def test_an_offset_of_32_bits_is_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, right = beyond_32_bits(FAR_ROW)
    monkeypatch.setattr(fused_kernels, "attend", mutant(fused_kernels, *FAR_MUTANTS[name], tmp_path).attend)
    assert not torch.equal(attend(inputs, SMALL), right)


@pytest.mark.parametrize("case", [WEAK, WEAK_TREE], ids=["chains", "trees"])
def test_the_same_case_with_the_right_kernel(case: Case) -> None:
    assert excess(case) <= 1


# ── in the engine ───────────────────────────────────────────────────────────────────────────────────────────────────


def decode(architecture: str, drafter_seed: int, method: str, prefix_sharing: str) -> tuple[list[list[int]], dict[str, Any]]:
    """Ids of three rows of two prompts, sampled and greedy, and the counts. The target itself has seed 0."""
    target, drafter = (
        loading.wrap(tiny_model(architecture, seed=seed).to(DEVICE), "tiny", method, checked=False)
        for seed in (0, drafter_seed)
    )
    engine = engine_of(target, drafter, by_name("fixed:3"), max_batch=4, prefix_sharing=prefix_sharing)
    requests = [
        Request((5, 9, 200, 31, 7, 7), 2, Sampling(temperature=0.9, seed=1), Limits(max_new_tokens=3)),
        Request((77, 12), 1, Sampling(temperature=0), Limits(max_new_tokens=2)),
    ]
    rows = [row for request in requests for row in engine.submit(request)]
    while engine.step():
        pass
    counts = {name: value for name, value in asdict(engine.stats).items() if not name.startswith("seconds")}
    return [row.tokens for row in rows], counts


@pytest.mark.parametrize(
    ("architecture", "drafter_seed", "prefix_sharing"),
    [("llama", 0, "copied"), ("gemma2", 1, "copied"), ("gpt-oss", 0, "shared")],
)
def test_the_engine_says_the_same_with_it(
    architecture: str, drafter_seed: int, prefix_sharing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GQA; a sliding layer, soft-capped; sinks; shared prompts: ids as with `pad`, by the same rounds, one launch wherever it was
    called."""
    pad, called = methods.METHODS["pad"], []

    def noted(inputs: AttentionInputs) -> Tensor:
        called.append(inputs)
        return pad(inputs)

    monkeypatch.setitem(methods.METHODS, "pad", noted)
    spy = Launches(fused_kernels.attend)
    monkeypatch.setattr(fused_kernels, "attend", spy)
    padded, counts = decode(architecture, drafter_seed, "pad", prefix_sharing)
    assert not spy.seen
    assert decode(architecture, drafter_seed, "fused", prefix_sharing) == (padded, counts)
    assert len(spy.seen) == len(called) > 2 * counts["target_passes"]  # two layers
    with_shared_keys = sum(arguments["shared_key"] is not None for _, arguments in spy.seen)
    assert (with_shared_keys > 2 * counts["target_passes"]) is (prefix_sharing == "shared")
    assert counts["committed"] == 8
    assert counts["drafted"] > 0
    assert (counts["accepted"] == counts["drafted"]) is (drafter_seed == 0)


def test_float64_is_refused() -> None:
    data = fill(Case((Row(3, 1),), dtype=torch.float64))
    with pytest.raises(RequestError, match=r"float32, bfloat16 or float16; got \w+, torch.float64; attention='auto'"):
        fused(data.inputs)
