"""Ragged attention: every method against the definition, and the definition against a loop over single queries.

Tests of: models.attention.unfused, models.attention.methods, models.bridge, models.attention.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import ragged
from attending import CELLS, CPU, PROMPTS, build, exact, one_by_one, used
from shoal.errors import InternalError, RequestError
from shoal.models import bridge
from shoal.models.attention import AttentionInputs, Masks, methods
from shoal.models.attention.methods import METHODS, reference
from shoal.models.cache import Plan
from shoal.testing import tiny_model
from shoal.types.requests import Prefix

split_module = importlib.import_module("shoal.models.attention.unfused")  # the name in the package is the function


WAYS = METHODS
FAST = [
    name for name in WAYS if name not in ("reference", "fused", "native", "strict")
]  # the last three have tests of their own
POISON = {torch.float64: 1e4, torch.float32: 1e4, torch.bfloat16: 1e4, torch.float16: 30.0}  # float16 ends at 65504


@st.composite
def some_inputs(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...]) -> AttentionInputs:
    rows = draw(st.integers(1, 5))
    prefixes: list[Prefix | None] = [None] * rows
    if draw(st.booleans()):
        prefixes = draw(st.lists(st.sampled_from([None, *PROMPTS]), min_size=rows, max_size=rows))
    tails = draw(st.lists(st.integers(0, 14), min_size=rows, max_size=rows))
    widths = draw(st.lists(st.integers(1, draw(st.sampled_from([4, 9]))), min_size=rows, max_size=rows))
    starts = [tail + (prefix.length if prefix else 0) for tail, prefix in zip(tails, prefixes, strict=True)]
    return build(
        starts, widths, draw(st.sampled_from(dtypes)), prefixes=prefixes, packed=draw(st.booleans()),
        kv_heads=draw(st.sampled_from([1, 2, 3])), group=draw(st.sampled_from([1, 2, 4])), value_dim=draw(st.sampled_from([8, 5])),
        window=draw(st.sampled_from([None, 1, 3, 8, 100])), softcap=draw(st.sampled_from([None, 2.0])),
        sinks=draw(st.booleans()), seed=draw(st.integers(0, 1000)),
    )  # fmt: skip


def error(inputs: AttentionInputs, out: Tensor) -> float:
    truth = reference(exact(inputs))
    return float((used(inputs, out).double() - used(inputs, truth)).abs().max())


def _stores(inputs: AttentionInputs) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
    return (inputs.key, inputs.shared_key), (inputs.value, inputs.shared_value)


def tolerance(inputs: AttentionInputs) -> float:
    """Twice the error of plain arithmetic in the same dtype, plus what rounding can do where that one was lucky.

    A score is a sum of products, off by at most eps times the sum of their sizes; an error d of the scores moves the output by at
    most 2 d max|value|; rounding the weights and the output costs at most 2 eps max|value|.
    """
    eps = torch.finfo(inputs.query.dtype).eps
    keys, values = ([t for t in pair if t is not None] for pair in _stores(inputs))
    largest = max(float(t.double().abs().sum(-1).amax()) for t in keys)
    sizes = float(inputs.query.double().abs().amax()) * largest * inputs.scale
    rounding = 2 * eps * (sizes + 1) * max(float(t.double().abs().max()) for t in values)
    return 2 * error(inputs, one_by_one(inputs)) + rounding


@given(some_inputs((torch.float64,)))
def test_the_reference_is_the_definition(inputs: AttentionInputs) -> None:
    difference = used(inputs, reference(inputs)) - used(inputs, one_by_one(inputs))
    assert float(difference.abs().max()) < 1e-12


@pytest.mark.parametrize("name", FAST)
@given(some_inputs((torch.float32, torch.float64)))
def test_a_method_is_the_reference(name: str, inputs: AttentionInputs) -> None:
    out = WAYS[name](inputs)
    assert out.shape == (inputs.plan.rows, inputs.plan.q, inputs.query.shape[1], inputs.value.shape[-1])
    assert error(inputs, out) <= tolerance(inputs)


@pytest.mark.parametrize("name", [*FAST, "reference"])
@given(some_inputs((torch.bfloat16, torch.float16)))
def test_a_method_is_the_reference_in_half_the_bits(name: str, inputs: AttentionInputs) -> None:
    out = WAYS[name](inputs)
    assert out.dtype == inputs.query.dtype
    assert error(inputs, out) <= tolerance(inputs)


def poisoned(inputs: AttentionInputs) -> AttentionInputs:
    """The same inputs with other values wherever no token lies: beyond each row's tail, in unused query columns, and in cells
    of the shared store that are no prompt of these rows."""
    query, key, value = (t.clone() for t in (inputs.query, inputs.key, inputs.value))
    size = POISON[query.dtype]
    for b, (tail, count) in enumerate(zip(inputs.plan.tails, inputs.plan.counts, strict=True)):
        key[b, :, tail:], value[b, :, tail:] = size, -size
        query[b, :, count:] = size
    return replace(inputs, query=query, key=key, value=value, **poisoned_store(inputs, size))


def poisoned_store(inputs: AttentionInputs, size: float) -> dict[str, Tensor]:
    if inputs.shared_key is None or inputs.shared_value is None:
        return {}
    key, value = inputs.shared_key.clone(), inputs.shared_value.clone()
    held = {cell for p in inputs.plan.prefixes if p is not None for cell in range(p.base, p.base + p.length)}
    free = [cell for cell in range(CELLS) if cell not in held]
    key[free], value[free] = size, -size
    return {"shared_key": key, "shared_value": value}


@pytest.mark.parametrize("name", [*FAST, "reference"])
@given(some_inputs((torch.float32, torch.bfloat16, torch.float64, torch.float16)))
def test_what_lies_beyond_a_row_does_not_matter(name: str, inputs: AttentionInputs) -> None:
    clean, dirty = (used(p, WAYS[name](p)) for p in (inputs, poisoned(inputs)))
    assert torch.equal(clean, dirty)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize(
    "wrong",
    [{"window": 3}, {"window": None}, {"softcap": None}, {"scale": 1.0}, {"sinks": torch.zeros(4)}],
    ids=lambda change: next(iter(change)),
)
def test_the_tolerance_notices(name: str, wrong: dict[str, object]) -> None:
    """Negative control: a method that gets one thing wrong is far outside the tolerance."""
    inputs = build([9, 2], [2, 4], torch.float32, window=4, softcap=2.0, sinks=True)
    assert error(inputs, WAYS[name](replace(inputs, **wrong))) > 100 * tolerance(inputs)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FAST)
def test_one_token_too_many_is_noticed(name: str) -> None:
    inputs = build([9, 5], [1, 1], torch.float32)
    plan = Plan([0, 1], [9, 6], [1, 1], CPU)
    assert error(inputs, WAYS[name](replace(inputs, masks=Masks(plan)))) > 100 * tolerance(inputs)


# ── which method ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("method", "kernels", "dtype"), [
    ("native", True, torch.float32), ("pad", False, torch.float32), ("pad", True, torch.float64)
])  # fmt: skip
def test_auto_takes_the_kernel_where_there_is_one(
    method: str, kernels: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[AttentionInputs] = []
    monkeypatch.setattr(methods, method, asked.append)
    monkeypatch.setattr("shoal.models.attention.unfused.missing", lambda: "" if kernels else "no C compiler")
    inputs = build([5, 9], [1, 1], dtype)
    methods.auto(inputs)
    assert asked == [inputs]


def test_unknown_method() -> None:
    with pytest.raises(RequestError, match=r"attention must be one of auto, pad, split, .*, got 'flash'"):
        methods.method_named("flash")


def test_outside_of_a_pass_the_registered_name_explains_itself() -> None:
    hf = tiny_model("llama")
    hf.set_attn_implementation(bridge.NAME)
    with pytest.raises(InternalError, match="outside of a planned forward pass"):
        hf(torch.tensor([[1, 2, 3]]))


# ── masks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_no_mask_where_nothing_is_hidden() -> None:
    assert Masks(Plan([0, 1], [4, 4], [1, 1], CPU)).bias(torch.float32) is None
    assert Masks(Plan([0, 1], [4, 4], [1, 1], CPU)).bias(torch.float32, window=5) is None  # exactly the 5 keys there are
    assert Masks(Plan([0, 1], [4, 4], [1, 1], CPU)).bias(torch.float32, window=4) is not None
    assert Masks(Plan([0, 1], [4, 3], [1, 1], CPU)).bias(torch.float32) is not None
    assert Masks(Plan([0, 1], [4, 4], [2, 2], CPU)).bias(torch.float32) is not None


def test_no_mask_for_what_sees_everything_that_it_is_given() -> None:
    inputs = build([9, 4, 5], [1, 1, 1], torch.float32)
    for window, expected in ((None, None), (5, None), (4, [[[[torch.finfo(torch.float32).min, 0, 0, 0, 0]] * 2]])):
        bias = split_module._row_bias(replace(inputs, window=window), 1)
        assert (None if bias is None else bias.tolist()) == expected


def test_masks_are_made_once_per_pass() -> None:
    masks = Masks(Plan([0, 1], [4, 3], [2, 1], CPU))
    assert masks.bias(torch.float32, 3) is masks.bias(torch.float32, 3)
    assert masks.bias(torch.float32, 99) is masks.bias(torch.float32)
    assert masks.bias(torch.float32, 3) is not masks.bias(torch.float32)
    assert masks.bias(torch.bfloat16).dtype == torch.bfloat16  # type: ignore[union-attr]
    inputs = build([4, 3], [2, 1], torch.float32)
    assert split_module._row_bias(inputs, 0) is split_module._row_bias(inputs, 0)


def test_visible_keys_by_hand() -> None:
    masks = Masks(Plan([0, 1], [2, 0], [2, 1], CPU))
    assert masks.visible().int().tolist() == [[[1, 1, 1, 0], [1, 1, 1, 1]], [[1, 0, 0, 0], [1, 1, 0, 0]]]
    assert masks.visible(2).int().tolist() == [[[0, 1, 1, 0], [0, 0, 1, 1]], [[1, 0, 0, 0], [1, 1, 0, 0]]]
    assert masks.bias(torch.float32, fold=3).shape == (2, 1, 6, 4)  # type: ignore[union-attr]
    assert math.isclose(float(masks.bias(torch.float32).min()), torch.finfo(torch.float32).min)  # type: ignore[union-attr]


# ── the benchmark ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_benchmark_measures_every_mix_by_every_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragged, "LONG", 150)
    lines = ragged.measured(rows=2, positions=2, repeats=1)
    assert [line["lengths"] for line in lines] == list(ragged.mixes(2))
    assert all(line["difference"] < 1e-3 and min(line[method] for method in ragged.METHODS) > 0 for line in lines)
    assert any(line["difference"] > 0 for line in lines)  # methods that really differ


def test_what_a_call_costs_is_read_off_the_lines() -> None:
    lines = [{"lengths": "all short", "pad": 10.0, "split": 40.0}, {"lengths": "all long", "pad": 10.0 + 4 * 700 / 100}]
    assert math.isclose(ragged.call_keys(lines, 4), 1000)  # 10 ms for each of 3 calls, 0.01 ms for a key
