"""Weights packed for the product kernel in C: right products, whose bits do not depend on the batch; weights come back exactly.

Tests of: models.weights.layers, models.weights.panels, models.weights.matrix, models.formats,
native.build.
"""

from __future__ import annotations

import copy
import ctypes
import pickle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import shoal
from native_kernels import needs_compiler
from shoal.models import formats
from shoal.models.weights import panels
from shoal.models.weights.layers import packing
from shoal.models.weights.matrix import PACKED, Matrix
from shoal.models.weights.panels import PanelMatrix
from shoal.testing import save_pair
from wrong_kernels import compiled_as_wrong_ones_are, wrong_kernels

pytestmark = needs_compiler
TYPES = (torch.float32, torch.bfloat16)


def some(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(found: Tensor, right: Tensor, size: Tensor | None = None) -> float:
    """Largest difference in units of the dtype's rounding of `size`: of the terms that were added, as sums may cancel."""
    size = right if size is None else size
    return float((found.double() - right).abs().max() / size.abs().amax().clamp(min=1e-9)) / torch.finfo(found.dtype).eps


@given(st.sampled_from(TYPES), st.integers(1, 70), st.integers(1, 70), st.integers(1, 20), st.booleans(), st.integers(0, 99))
def test_products(dtype: torch.dtype, out: int, inputs: int, tokens: int, biased: bool, seed: int) -> None:
    weight, x, other = (
        some(*shape, dtype=dtype, seed=seed + i) for i, shape in enumerate([(out, inputs), (tokens, inputs), (tokens, out)])
    )
    bias = some(out, dtype=dtype, seed=seed + 3) if biased else None
    matrix = PanelMatrix(weight, bias)
    right = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    size = x.double().abs() @ weight.double().abs().t() + (0 if bias is None else bias.double().abs())
    assert torch.equal(matrix.dense(), weight)
    assert error(matrix.linear(x), right, size) < 8
    assert error(matrix.linear(x, "silu"), F.silu(right), size) < 8
    assert error(matrix.linear(x, "gelu"), F.gelu(right), size) < 16
    assert error(matrix.linear_add(x, other), right + other.double(), size + other.abs()) < 8
    assert error(matrix.linear_mul(x, other), right * other.double(), size * other.abs().amax()) < 8


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("out", "inputs"), [(48, 64), (33, 31), (256, 640)])
def test_the_bits_of_a_token_do_not_depend_on_the_others(dtype: torch.dtype, out: int, inputs: int) -> None:
    matrix, x, other = PanelMatrix(some(out, inputs, dtype=dtype)), some(43, inputs, dtype=dtype), some(43, out, dtype=dtype)
    alone = [matrix.linear_mul(x[i : i + 1], other[i : i + 1]) for i in range(43)]
    for tokens in (2, 3, 5, 7, 8, 13, 17, 43):
        assert torch.equal(matrix.linear_mul(x[:tokens].clone(), other[:tokens].clone()), torch.cat(alone[:tokens]))
    threads = torch.get_num_threads()
    try:
        for many in (1, 2):
            torch.set_num_threads(many)
            assert torch.equal(matrix.linear_mul(x, other), torch.cat(alone))
    finally:
        torch.set_num_threads(threads)


def test_control_libraries_round_by_the_shape_of_the_product() -> None:
    """Else the test above shows nothing: the same numbers by a matrix library, alone and together."""
    weight, x = some(256, 640, dtype=torch.float32), some(43, 640, dtype=torch.float32)
    assert not torch.equal(F.linear(x, weight), torch.cat([F.linear(x[i : i + 1], weight) for i in range(43)]))


@pytest.mark.parametrize("dtype", TYPES)
def test_nan_and_infinity_stay_with_their_token(dtype: torch.dtype) -> None:
    matrix, x = PanelMatrix(some(40, 24, dtype=dtype)), some(5, 24, dtype=dtype)
    x[1, 3], x[3, 0] = torch.nan, torch.inf
    y = matrix.linear(x, "silu")
    assert y[1].isnan().all()
    assert not y[3].isfinite().all()
    assert y[[0, 2, 4]].isfinite().all()


@pytest.mark.parametrize("dtype", TYPES)
def test_writes_and_copies(dtype: torch.dtype) -> None:
    weight, x = some(37, 33, dtype=dtype), some(3, 33, dtype=dtype)
    matrix = PanelMatrix(weight.clone(), None, PACKED, table=True)
    for other in (copy.deepcopy(matrix), pickle.loads(pickle.dumps(matrix))):
        assert type(other) is PanelMatrix
        assert torch.equal(other.linear(x), matrix.linear(x))
    before = matrix.linear(x)
    matrix.write(weight * 2)
    assert torch.equal(matrix.dense(), weight * 2)
    assert torch.equal(matrix.linear(x), before * 2)
    assert matrix.table is not None
    assert torch.equal(matrix.table, weight * 2)


def test_inputs_of_any_strides_and_dimensions() -> None:
    matrix, x = PanelMatrix(some(32, 48, dtype=torch.float32)), some(48, 6, 2, dtype=torch.float32).permute(1, 2, 0)
    assert torch.equal(matrix.linear(x).flatten(0, 1), matrix.linear(x.reshape(-1, 48).contiguous()))
    assert matrix.linear(x[:0]).shape == (0, 2, 32)


def test_which_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    both = frozenset(TYPES)
    monkeypatch.setattr(formats, "cpu", lambda: formats.Cpu(packs=both))
    assert [packing(dtype) for dtype in (*TYPES, torch.float64)] == [PanelMatrix, PanelMatrix, None]
    monkeypatch.setattr(formats, "cpu", lambda: formats.Cpu({torch.bfloat16: "AMX-BF16"}, packs=both))
    assert [packing(dtype) for dtype in TYPES] == [PanelMatrix, PanelMatrix]
    monkeypatch.setattr("shoal.models.weights.layers.missing", lambda: "no C compiler")
    assert [packing(dtype) for dtype in TYPES] == [Matrix, Matrix]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "packed"),
        ({"strict": True}, "input-major"),
        ({"compile": "off"}, "packed"),
        ({"quantize": "target=int8"}, "input-major"),
    ],
)
def test_models_are_packed_where_passes_can_use_it(
    options: dict[str, Any], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "cpu", lambda: formats.Cpu(mkl=True, packs=frozenset(TYPES)))
    target, _ = save_pair(tmp_path / "pair")
    assert shoal.load(target, **options).target.notes["weights"] == expected


def sums_are_wrong(made: ctypes.CDLL) -> bool:
    weight, bias = some(88, 24, dtype=torch.float32), some(88, dtype=torch.float32)
    x, other = some(11, 24, dtype=torch.float32), some(11, 88, dtype=torch.float32)
    expected = x.double() @ weight.double().t() + bias.double() + other.double()

    def spoiled(self: Tensor, *shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=self.dtype)  # not what an earlier product left there

    with patch.object(panels, "library", lambda: made), patch.object(Tensor, "new_empty", spoiled):
        matrix = PanelMatrix(weight, bias)
        last = matrix.linear_add(x[10:], other[10:])  # few registers hold several panels of one token only
        return not (error(matrix.linear_add(x, other), expected) < 8 and error(last, expected[10:]) < 8)


@pytest.mark.slow
@pytest.mark.parametrize(("right", "wrong"), [
    ("sum[i][p] += feature * weights[p]", "sum[i][p] += feature * weights[0]"),
    ("sums_of(m, n, w, panel, x,", "sums_of(1, n, w, panel, x,"),
    ("panel < end; panel += n)", "panel + n <= end; panel += n)"),
    ("? first + n * LANES : a->outputs;", "? first + n * LANES : a->outputs / LANES * LANES;"),
    ("if (a->kind == NAME(ADD)) sums += NAME(some_left)((const T *)a->other + place, n);", ""),
    ("if (a->bias) sums += NAME(some_left)((const T *)a->bias + first, n);", ""),
    ("x + from * by.row", "x"),
    ("place_of)(a, token + i);\n        const float", "place_of)(a, token);\n        const float"),
])  # fmt: skip
def test_sabotage_is_seen(right: str, wrong: str) -> None:
    assert sums_are_wrong(wrong_kernels((right, wrong)))


def test_the_same_sums_pass_the_right_kernels() -> None:
    assert not sums_are_wrong(compiled_as_wrong_ones_are())
