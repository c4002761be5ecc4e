"""The kernels in C are their definitions: attention, rotary embedding with the write to the cache, RMS norm, the exponential.

Negative controls compile the sources with one thing wrong, and the same comparisons must notice. How the kernels are built, and
what happens where they cannot be, is at the end.

Tests of: native, models.attention.unfused, models.attention,
models.attention.methods, native.build.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attending import CELLS, PROMPTS, build, exact, one_by_one, used
from mutants import wrong_ones
from native_kernels import INF, NAN, definition, excess, needs_compiler, threads, tokens_seen
from shoal.errors import RequestError
from shoal.models.attention import AttentionInputs
from shoal.models.attention import unfused as native_attention
from shoal.models.attention.methods import METHODS
from shoal.models.attention.unfused import MOST_COLUMNS, SUFFIXES, native
from shoal.native import HeadsStruct
from shoal.native import build as building
from shoal.native.build import compiled
from shoal.types.requests import Prefix
from tree_masks import path_of, random_tree
from wrong_kernels import compiled_as_wrong_ones_are, wrong_kernels

pytestmark = needs_compiler
DTYPES = tuple(SUFFIXES)


# ── attention: the definition ───────────────────────────────────────────────────────────────────────────────────────


@st.composite
def some_inputs(draw: st.DrawFn, trees: bool | None = None) -> AttentionInputs:
    rows = draw(st.integers(1, 5))
    prefixes: list[Prefix | None] = [None] * rows
    if draw(st.booleans()):
        prefixes = draw(st.lists(st.sampled_from([None, *PROMPTS]), min_size=rows, max_size=rows))
    tails = draw(st.lists(st.integers(0, draw(st.sampled_from([3, 40]))), min_size=rows, max_size=rows))
    counts = draw(st.lists(st.integers(1, draw(st.sampled_from([1, 4, 9, 64]))), min_size=rows, max_size=rows))
    starts = [tail + (prefix.length if prefix else 0) for tail, prefix in zip(tails, prefixes, strict=True)]
    seed, dim = draw(st.integers(0, 1000)), draw(st.sampled_from([8, 12, 16, 20, 40, 64, 72, 128]))
    generator = torch.Generator().manual_seed(seed)
    branching = draw(st.booleans()) if trees is None else trees
    return build(
        starts, counts, draw(st.sampled_from(DTYPES)), prefixes=prefixes, packed=draw(st.booleans()),
        kv_heads=draw(st.integers(1, 3)), group=draw(st.integers(1, 7)), dim=dim,
        value_dim=draw(st.sampled_from([dim, 5, 24, 80])), window=draw(st.sampled_from([None, 1, 3, 8, 30, 100])),
        softcap=draw(st.sampled_from([None, 2.0])), sinks=draw(st.booleans()), seed=seed,
        parents=[random_tree(count - 1, generator) for count in counts] if branching else None,
    )  # fmt: skip


@given(some_inputs())
def test_the_kernel_is_the_definition(inputs: AttentionInputs) -> None:
    assert excess(inputs) <= 1


@given(some_inputs(trees=False))
def test_the_definition_is_that_of_the_other_methods(inputs: AttentionInputs) -> None:
    truth, same = definition(inputs), one_by_one(exact(inputs))
    assert float((used(inputs, truth) - used(inputs, same)).abs().max()) < 1e-12


WIDE = [random_tree(63, torch.Generator().manual_seed(1)), random_tree(30, torch.Generator().manual_seed(2)), []]
CASES: dict[str, dict[str, Any]] = {
    "rows of one key": {"starts": [0, 0], "counts": [1, 1]},
    "thousands of keys": {"starts": [4999, 0, 2990], "counts": [1, 1, 4], "dim": 64, "value_dim": 64},
    "thousands of keys, a window": {"starts": [4999, 0, 2990], "counts": [1, 1, 4], "dim": 64, "window": 1000},
    "64 columns": {"starts": [0, 100, 3], "counts": [64, 1, 33], "group": 7, "kv_heads": 1},
    "a tree of all bits": {"starts": [5, 40, 3], "counts": [64, 31, 1], "parents": WIDE},
    "a tree of all bits, a window": {"starts": [5, 40, 3], "counts": [64, 31, 1], "parents": WIDE, "window": 9},
    "one head of many queries": {"starts": [90, 9], "counts": [5, 2], "kv_heads": 1, "group": 71},
    "large scores": {"starts": [50, 3], "counts": [2, 2], "dim": 128, "scale": 30.0},
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_is_the_definition_at_the_edges(case: str, dtype: torch.dtype) -> None:
    options = dict(CASES[case])
    scale = options.pop("scale", None)
    inputs = build(options.pop("starts"), options.pop("counts"), dtype, sinks=True, **options)
    assert excess(inputs if scale is None else replace(inputs, scale=scale)) <= 1


def some_together(dtype: torch.dtype = torch.float32, **options: Any) -> AttentionInputs:
    """Rows that share a prompt, most of them neighbours, and rows of a prompt that begins or ends elsewhere, or of none."""
    prefixes = [*[Prefix(12, 18)] * 2, Prefix(12, 10), Prefix(12, 18), Prefix(13, 18), None, *[Prefix(12, 18)] * 9]
    starts = [18 + 5 * row % 37 for row in range(len(prefixes))]
    counts = [(1, 1, 3, 1, 2)[row % 5] for row in range(len(prefixes))]
    return build(
        starts, counts, dtype, prefixes=prefixes, **{"dim": 20, "value_dim": 12, "kv_heads": 3, "sinks": True, **options}
    )


TOGETHER: dict[str, dict[str, Any]] = {
    "chains": {},
    "a soft cap": {"softcap": 2.0, "group": 1},
    "many queries": {"group": 9, "kv_heads": 1, "dim": 64, "value_dim": 80},
    "trees": {"parents": [random_tree((0, 0, 2, 0, 1)[row % 5], torch.Generator().manual_seed(row)) for row in range(15)]},
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", TOGETHER)
def test_rows_that_share_a_prompt_have_the_bits_they_have_alone(case: str, dtype: torch.dtype) -> None:
    """With a window, though it be longer than all rows, each row reads the prompt by itself."""
    inputs = some_together(dtype, **TOGETHER[case])
    assert excess(inputs) <= 1
    for count in (1, 2):
        with threads(count):
            assert torch.equal(native(inputs), native(replace(inputs, window=10**6)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [9, 30])
def test_rows_that_share_a_prompt_read_what_their_windows_show(window: int, dtype: torch.dtype) -> None:
    """Some of them nothing of the prompt."""
    assert excess(some_together(dtype, window=window)) <= 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 3, 9, 40])
@pytest.mark.parametrize("start", [0, 5, 16, 43])
def test_a_node_of_a_tree_has_the_bits_of_a_chain(start: int, window: int | None, dtype: torch.dtype) -> None:
    tree = random_tree(24, torch.Generator().manual_seed(start))
    inputs = build([start], [25], dtype, window=window, parents=[tree], sinks=True)
    found = native(inputs)
    for column in range(25):
        path = path_of(tree, column)
        keys = [*range(start), *(start + node for node in path)]
        chain = build([start], [len(path)], dtype, window=window, sinks=True)
        alone = replace(
            chain,
            query=inputs.query[:, :, path],
            key=inputs.key[:, :, keys],
            value=inputs.value[:, :, keys],
            sinks=inputs.sinks,
        )
        assert torch.equal(native(alone)[0, -1], found[0, column])


# ── attention: what it does not look at ─────────────────────────────────────────────────────────────────────────────


def poisoned(inputs: AttentionInputs, poison: float) -> AttentionInputs:
    """The same inputs with `poison` wherever no column of a row looks: beyond the row, before every window, in unused columns,
    in cells of the shared store that no row sees."""
    query, key, value = (t.clone() for t in (inputs.query, inputs.key, inputs.value))
    cells: set[int] = set()
    for row, (count, offset, prefix) in enumerate(
        zip(inputs.plan.counts, inputs.plan.offsets, inputs.plan.prefixes, strict=True)
    ):
        seen = {token for column in range(count) for token in tokens_seen(inputs, row, column)}
        blind = [i for i in range(key.shape[2]) if i + offset not in range(min(seen), max(seen) + 1)]
        key[row, :, blind], value[row, :, blind] = poison, poison
        query[row, :, count:] = poison
        cells |= {prefix.base + token for token in seen if token < offset} if prefix is not None else set()
    if inputs.shared_key is None or inputs.shared_value is None:
        return replace(inputs, query=query, key=key, value=value)
    stores = inputs.shared_key.clone(), inputs.shared_value.clone()
    for store in stores:
        store[[cell for cell in range(CELLS) if cell not in cells]] = poison
    return replace(inputs, query=query, key=key, value=value, shared_key=stores[0], shared_value=stores[1])


@given(some_inputs(), st.sampled_from([NAN, INF, -INF]))
def test_hidden_cells_are_not_read(inputs: AttentionInputs, poison: float) -> None:
    assert torch.equal(native(inputs), native(poisoned(inputs, poison)))


def test_the_poison_is_there() -> None:
    """Negative control: a method that reads hidden cells, if only under a mask, meets it."""
    inputs = poisoned(build([9, 3], [2, 1], torch.float32), NAN)
    assert native(inputs).isfinite().all()
    assert used(inputs, METHODS["pad"](inputs)).isnan().any()


@pytest.mark.parametrize("poison", [NAN, INF])
@pytest.mark.parametrize("store", ["key", "value"])
@given(some_inputs(), st.data())
def test_nan_in_a_visible_key_is_that_rows(store: str, poison: float, inputs: AttentionInputs, data: st.DataObject) -> None:
    """The columns that see it are NaN, or infinite where a value is; other rows have the same bits as ever."""
    clean, row = native(inputs), data.draw(st.integers(0, inputs.plan.rows - 1))
    bad = getattr(inputs, store).clone()
    last = inputs.plan.tails[row] - 1  # always in the row's last column
    bad[row, :, last] = poison
    out = native(replace(inputs, **{store: bad}))
    others = [other for other in range(inputs.plan.rows) if other != row]
    assert torch.equal(out[others], clean[others])
    hit = out[row, inputs.plan.counts[row] - 1]
    if store == "value":
        assert not hit.isfinite().any()
    elif math.isnan(poison):
        assert hit.isnan().all()
    else:  # a score of infinite size, of either sign: NaN, or a weight of 0, as in the definition
        truth = definition(replace(inputs, **{store: bad}))[row, inputs.plan.counts[row] - 1]
        assert torch.equal(hit.isnan(), truth.isnan())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [8, 20, 24, 28])
def test_what_another_pass_left_in_memory_is_not_read(dim: int, dtype: torch.dtype) -> None:
    """Heads that fill no whole number of lanes, after a pass that was NaN everywhere."""
    before = build([90], [9], dtype, dim=128, value_dim=128)
    assert native(replace(before, query=torch.full_like(before.query, NAN))).isnan().all()
    assert excess(build([5, 40], [1, 3], dtype, dim=dim, value_dim=dim)) <= 1


def test_nan_in_a_shared_prompt_is_that_of_its_rows() -> None:
    inputs = build([9, 9, 12], [1, 2, 1], torch.float32, prefixes=[PROMPTS[0], None, PROMPTS[1]])
    assert inputs.shared_key is not None
    shared = inputs.shared_key.clone()
    shared[PROMPTS[0].base] = NAN
    out = native(replace(inputs, shared_key=shared))
    assert out[0, 0].isnan().all()
    assert torch.equal(out[1:], native(inputs)[1:])


# ── attention: layouts and threads ──────────────────────────────────────────────────────────────────────────────────


def strided(tensor: Tensor, dim: int) -> Tensor:
    """The same numbers, with gaps between them along a dimension."""
    return torch.stack([tensor, torch.full_like(tensor, NAN)], dim + 1).select(dim + 1, 0)


@given(some_inputs())
def test_layouts_do_not_matter(inputs: AttentionInputs) -> None:
    """Queries and keys as models and the cache have them, with gaps, and with the features apart."""
    expected = native(inputs)
    as_kept = {
        name: getattr(inputs, name).transpose(1, 2).contiguous().transpose(1, 2) for name in ("query", "key", "value")
    }
    assert torch.equal(native(replace(inputs, **as_kept)), expected)
    for dim in range(4):
        assert torch.equal(native(replace(inputs, **{name: strided(t, dim) for name, t in as_kept.items()})), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_threads_give_the_bits_of_one(dtype: torch.dtype) -> None:
    inputs = build(
        [900, 0, 300, 77], [1, 9, 3, 2], dtype, kv_heads=3, dim=64, value_dim=64, prefixes=[PROMPTS[2], *[None] * 3]
    )
    case, x, weight = some_heads(dtype, tokens=200), torch.randn(300, 512).to(dtype), torch.randn(512).to(dtype)
    results = []
    for count in (1, 2):
        with threads(count):
            results.append([native(inputs), *heads(case), rms_norm(x, weight, 1e-6)])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_prompts_are_left_to_whole_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    monkeypatch.setattr(native_attention, "attend", lambda *_: called.append(1))
    for columns in (MOST_COLUMNS, MOST_COLUMNS + 1):
        native(build([3], [columns], torch.float32))
    assert called == [1]


def test_what_the_kernel_does_not_have_is_refused() -> None:
    with pytest.raises(RequestError, match=r"needs a CPU, a C compiler and float32 or bfloat16; got cpu, torch\.float64; "):
        native(build([3], [1], torch.float64))


def test_no_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def attend_float32(self, _: Any) -> int:
            return 1

    monkeypatch.setattr(native_attention, "library", Failing)
    with pytest.raises(MemoryError, match="no memory for the scores"):
        native(build([3], [1], torch.float32))


# ── heads and norms ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class HeadsCase:
    """States [tokens, heads + 2 kv heads, dim], tables [positions, rotary], positions and cells [tokens], norms [dim] or None."""

    states: Tensor
    cos: Tensor
    sin: Tensor
    positions: Tensor
    cells: Tensor
    kv_heads: int
    query_norm: Tensor | None
    key_norm: Tensor | None
    eps: float = 1e-3
    room: int = 300


def some_heads(
    dtype: torch.dtype, tokens: int = 5, kv_heads: int = 2, group: int = 3, dim: int = 20, rotary: int | None = None,
    norms: bool = True, seed: int = 0,
) -> HeadsCase:  # fmt: skip
    """Unlike cosines in both halves, so that exchanging them shows; small states, so that eps shows."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    tables = [random(40, dim if rotary is None else rotary) for _ in range(2)]
    norm = [random(dim).to(dtype) if norms else None for _ in range(2)]
    return HeadsCase(
        (0.1 * random(tokens, kv_heads * (group + 2), dim)).to(dtype), tables[0], tables[1],
        torch.randint(0, 40, (tokens,), generator=generator), torch.randperm(300, generator=generator)[:tokens], kv_heads, *norm,
    )  # fmt: skip


def heads(case: HeadsCase) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernel leaves: queries [tokens, heads, dim], keys and values [cells, kv heads, dim]; 7 where nothing was written."""
    states = case.states.clone()
    keys, values = (torch.full((case.room, case.kv_heads, states.shape[-1]), 7.0, dtype=states.dtype) for _ in range(2))
    count = states.shape[1] - 2 * case.kv_heads
    norms = (None if norm is None else norm.data_ptr() for norm in (case.query_norm, case.key_norm))
    pointers = (t.data_ptr() for t in (case.cos, case.sin, case.positions, case.cells))
    getattr(building.library(), f"heads_{SUFFIXES[states.dtype]}")(
        HeadsStruct(
            len(states), count, case.kv_heads, states.shape[-1], case.cos.shape[1], torch.get_num_threads(), 0, case.eps,
            *pointers, *norms, states.data_ptr(), keys.data_ptr(), values.data_ptr(),
        )
    )  # fmt: skip
    return states[:, :count], keys, values


def heads_by_definition(case: HeadsCase) -> tuple[Tensor, Tensor, Tensor]:
    """Llama's formulas with a rounding to the dtype where the kernel has one: after the norm, its weight, and the rotation."""
    states, kv_heads = case.states, case.kv_heads
    query, key, value = states.split([states.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)

    def turned(x: Tensor, norm: Tensor | None) -> Tensor:
        x = x if norm is None else norm_by_definition(x, norm, case.eps)
        rotary = case.cos.shape[1]
        cos, sin = (table[case.positions][:, None].double() for table in (case.cos, case.sin))
        first = x[..., :rotary].double()
        half = torch.cat([-first[..., rotary // 2 :], first[..., : rotary // 2]], -1)
        return torch.cat([(first * cos + half * sin).to(x.dtype), x[..., rotary:]], -1)

    keys, values = (torch.full((case.room, kv_heads, states.shape[-1]), 7.0, dtype=states.dtype) for _ in range(2))
    keys[case.cells], values[case.cells] = turned(key, case.key_norm), value
    return turned(query, case.query_norm), keys, values


def norm_by_definition(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """LlamaRMSNorm, in float64 up to the rounding before the weight."""
    wide = x.double()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out, suffix = torch.empty_like(x), SUFFIXES[x.dtype]
    getattr(building.library(), f"rms_norm_{suffix}")(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), *x.shape, eps, torch.get_num_threads()
    )
    return out


def distance(ours: Sequence[Tensor], expected: Sequence[Tensor], roundings: int = 3) -> float:
    """The largest difference, in units of so many roundings of the largest number."""
    differences = [float((a.double() - b.double()).abs().max().nan_to_num(INF)) for a, b in zip(ours, expected, strict=True)]
    eps = torch.finfo(ours[0].dtype).eps
    return max(
        error / (roundings * eps * max(float(b.abs().max()), 1.0)) for error, b in zip(differences, expected, strict=True)
    )


@given(st.data())
def test_heads_are_turned_and_written(data: st.DataObject) -> None:
    dim = data.draw(st.sampled_from([8, 12, 20, 64, 80, 128]))
    tokens, kv_heads, group = (data.draw(st.integers(1, most)) for most in (9, 3, 7))
    case = some_heads(
        data.draw(st.sampled_from(DTYPES)), tokens, kv_heads, group, dim, data.draw(st.sampled_from([None, 4, dim - 2])),
        data.draw(st.booleans()), data.draw(st.integers(0, 1000)),
    )  # fmt: skip
    ours, expected = heads(case), heads_by_definition(case)
    assert distance(ours, expected) <= 1
    assert torch.equal(ours[2], expected[2])
    rotary = case.cos.shape[1]
    if case.query_norm is None:
        assert all(torch.equal(a[..., rotary:], b[..., rotary:]) for a, b in zip(ours, expected, strict=True))


@given(
    st.sampled_from(DTYPES), st.integers(1, 5), st.sampled_from([1, 8, 20, 33, 512, 1000]), st.sampled_from([1e-6, 1e-3]),
    st.sampled_from([1e-3, 1.0, 1e3]),
)  # fmt: skip
def test_a_norm_is_that_of_llama(dtype: torch.dtype, tokens: int, width: int, eps: float, size: float) -> None:
    generator = torch.Generator().manual_seed(tokens + width)
    x = (size * torch.randn(tokens, width, generator=generator)).to(dtype)
    weight = torch.randn(width, generator=generator).to(dtype)
    out = rms_norm(x, weight, eps)
    assert distance([out], [norm_by_definition(x, weight, eps)]) <= 1
    if dtype == torch.bfloat16:  # a sum in another order moves few of the roundings
        assert (out != norm_by_definition(x, weight, eps)).float().mean() < 0.02 or out.numel() < 100


def test_nan_in_a_token_is_that_tokens() -> None:
    for dtype in DTYPES:
        x, weight = torch.randn(3, 40).to(dtype), torch.ones(40, dtype=dtype)
        x[1, 7] = NAN
        out = rms_norm(x, weight, 1e-6)
        assert out[1].isnan().all()
        assert out[[0, 2]].isfinite().all()


# ── the exponential, and rounding to bfloat16 ───────────────────────────────────────────────────────────────────────

PROBE = b"""
void probe_exponential(float *x, int64_t n) {
    for (int64_t i = 0; i < n; i += WIDTH) put_float32(x + i, exponential(some_float32(x + i)));
}
void probe_narrow(const float *x, uint16_t *to, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = narrow_bfloat16(x[i]);
}
"""


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    texts = building.sources()
    texts["kernels.c"] += PROBE
    flags = ["-O1" if flag == "-O3" else flag for flag in building.machine_flags()]
    return ctypes.CDLL(str(compiled(texts, tmp_path_factory.mktemp("probe"), building.compiler(), flags)))


def exponentials(probe: ctypes.CDLL, x: Tensor) -> Tensor:
    out = torch.cat([x, x.new_zeros(-len(x) % 16)])
    probe.probe_exponential(ctypes.c_void_p(out.data_ptr()), ctypes.c_int64(len(out)))
    return out[: len(x)]


@pytest.mark.slow
def test_the_exponential_is_right_to_two_units_in_the_last_place(probe: ctypes.CDLL) -> None:
    """Between -87 and 0; from there on to the smallest float it is 0, and of NaN and -infinity what it should be."""
    x = torch.cat([torch.linspace(-87, 0, 1_000_001), -torch.logspace(-30, 1, 10_001), torch.tensor([-87.0, -0.0, 0.0])])
    truth = x.double().exp()
    assert float(((exponentials(probe, x).double() - truth) / truth).abs().max()) < 2 * torch.finfo(torch.float32).eps
    assert exponentials(probe, torch.tensor([0.0, -0.0, -87.5, -1e4, -3e38, -INF])).tolist() == [1, 1, 0, 0, 0, 0]
    assert exponentials(probe, torch.tensor([NAN])).isnan().all()


def test_rounding_to_bfloat16_is_that_of_torch(probe: ctypes.CDLL) -> None:
    """Every upper half with lower halves around the ties; NaN stays NaN."""
    upper, lower = torch.arange(2**16, dtype=torch.int64) << 16, torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (upper[:, None] + lower).flatten()
    x = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)
    out = torch.empty(len(x), dtype=torch.bfloat16)
    probe.probe_narrow(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()), ctypes.c_int64(len(x)))
    number = ~x.isnan()
    assert out[~number].isnan().all()
    assert torch.equal(out[number].view(torch.int16), x[number].to(torch.bfloat16).view(torch.int16))


# ── negative controls: kernels with one thing wrong ─────────────────────────────────────────────────────────────────

ATTENTION_MUTANTS = wrong_ones("attention")
TOGETHER_MUTANTS = wrong_ones("attention of rows together")
TREE_MUTANTS = wrong_ones("attention of trees")
HEADS_MUTANTS = wrong_ones("heads")


def weak(**options: Any) -> list[AttentionInputs]:
    """Inputs in which everything matters: ragged rows, prompts, windows, sinks, with and without a soft cap, and large scores."""
    common = {
        "prefixes": [PROMPTS[0], None, PROMPTS[2]],
        "kv_heads": 2,
        "group": 3,
        "dim": 20,
        "value_dim": 12,
        "sinks": True,
    }
    made = [
        build([30, 21, 40], [3, 5, 1], torch.float32, **{**common, "window": window, "softcap": softcap, **options})
        for window, softcap in ((None, None), (12, 2.0))
    ]
    return [*made, replace(made[0], scale=40.0)]


def weak_trees() -> list[AttentionInputs]:
    return [*weak(parents=[[-1, -1], [-1, 0, 0, -1], []]), *weak(parents=[[-1, 0], [-1, -1, 1, 2], []])]


HEADS_CASES = [some_heads(torch.float32, rotary=rotary, norms=norms) for rotary in (None, 12) for norms in (True, False)]


def heads_excess() -> float:
    return max(distance(heads(case), heads_by_definition(case)) for case in HEADS_CASES)


COMPARED: dict[str, Callable[[], float]] = {
    **dict.fromkeys(ATTENTION_MUTANTS, lambda: max(map(excess, weak()))),
    **dict.fromkeys(TOGETHER_MUTANTS, lambda: excess(some_together())),
    **dict.fromkeys(TREE_MUTANTS, lambda: max(map(excess, weak_trees()))),
    **dict.fromkeys(HEADS_MUTANTS, heads_excess),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPARED)
def test_a_wrong_kernel_is_caught(name: str) -> None:
    made = wrong_kernels((ATTENTION_MUTANTS | TOGETHER_MUTANTS | TREE_MUTANTS | HEADS_MUTANTS)[name])
    with patch.object(building, "library", lambda: made), patch.object(native_attention, "library", lambda: made):
        assert COMPARED[name]() > 50


@pytest.mark.parametrize("name", ["sink forgotten", "word ignored", "eps forgotten", "queries forgotten"])
def test_the_same_comparisons_pass_the_right_kernels(name: str) -> None:
    made = compiled_as_wrong_ones_are()
    with patch.object(building, "library", lambda: made), patch.object(native_attention, "library", lambda: made):
        assert COMPARED[name]() <= 1
