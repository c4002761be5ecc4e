"""One weight matrix in three forms: the same products, the same weights back to the last bit.

Tests of: models.weights.matrix, models.formats.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.models import formats
from shoal.models.weights.matrix import ACTIVATIONS, AS_IS, FORMS, FUSED, INPUT_MAJOR, PACKED, Matrix

SHAPES = [(1, 1), (24, 16), (100, 70), (33, 257)]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.06}
"""Largest difference of products of unit size: bfloat16 rounds before or after the fused operation."""


def can_hold(form: str, dtype: torch.dtype) -> bool:
    """Not every CPU packs bfloat16."""
    packs = dtype == torch.float32 and torch.backends.mkldnn.is_available()  # whatever the pretended CPU would pack
    return form != PACKED or packs or dtype in formats.cpu().packs


def weights(out: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(out * 1000 + width)
    weight = torch.randn(out, width, generator=generator) / width**0.5
    return weight.to(dtype), torch.randn(out, generator=generator).to(dtype)


def test_activations_have_one_list_of_names() -> None:
    assert FUSED.keys() == {"none", *ACTIVATIONS}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("biased", [True, False])
@torch.no_grad()
def test_every_form_computes_the_same(form: str, dtype: torch.dtype, biased: bool) -> None:
    if not can_hold(form, dtype):
        pytest.skip("this CPU packs no bfloat16")
    for out, width in SHAPES:
        weight, bias = weights(out, width, dtype)
        matrix = Matrix(weight, bias if biased else None, form)
        assert (matrix.shape, matrix.dtype, matrix.form) == ((out, width), dtype, form)
        for tokens in (0, 1, 8, 40):
            x, other = torch.randn(tokens, width).to(dtype), torch.randn(tokens, out).to(dtype)
            wide = F.linear(x.double(), weight.double(), bias.double() if biased else None)
            expected = {name: function(wide) for name, function in ACTIVATIONS.items()} | {"none": wide}
            found = {name: matrix.linear(x, name) for name in expected}
            expected |= {"add": wide + other.double(), "mul": wide * other.double()}
            found |= {"add": matrix.linear_add(x, other), "mul": matrix.linear_mul(x, other)}
            for name, y in found.items():
                assert y.dtype == dtype
                assert y.is_contiguous()
                torch.testing.assert_close(y.double(), expected[name], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("table", [True, False])
def test_weights_come_back_exactly_and_updates_reach_the_products(form: str, table: bool) -> None:
    for dtype in (dtype for dtype in TOLERANCE if can_hold(form, dtype)):
        weight, bias = weights(100, 70, dtype)
        kept = weight.clone()
        matrix = Matrix(weight, bias, form, table=table)
        assert torch.equal(matrix.dense(), kept)
        assert (matrix.table is not None) == table
        x, before = torch.randn(3, 70).to(dtype), matrix.linear
        matrix.write(2 * kept)
        assert torch.equal(matrix.dense(), 2 * kept)
        if matrix.table is not None:
            assert torch.equal(matrix.table, 2 * kept)
        torch.testing.assert_close(matrix.linear(x), F.linear(x, 2 * kept, bias), atol=0.1, rtol=0.02)
        if form != PACKED:
            assert matrix.linear is before  # written in place
        dense = matrix.dense()
        dense.mul_(2)
        matrix.write(dense)  # its own tensor, changed in place
        assert torch.equal(matrix.dense(), 4 * kept)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda matrix: pickle.loads(pickle.dumps(matrix))], ids=["deepcopy", "pickle"]
)
def test_copies_are_their_own(form: str, copied: object) -> None:
    weight, bias = weights(24, 16, torch.float32)
    matrix = Matrix(weight, bias, form, table=True)
    x = torch.randn(3, 16)
    expected = matrix.linear(x)
    other = copied(matrix)  # type: ignore[operator]
    assert other.form == form
    assert other.table is not None
    assert torch.equal(other.linear(x), expected)
    other.write(torch.zeros(24, 16))
    assert torch.equal(matrix.linear(x), expected)
    assert not other.linear(x).sub(bias).any()


def test_bytes_are_those_in_memory() -> None:
    weight, _ = weights(64, 64, torch.float32)
    assert [Matrix(weight, form=form).nbytes() for form in (AS_IS, INPUT_MAJOR)] == [64 * 64 * 4] * 2
    size = Matrix(weight, form=PACKED).nbytes()
    assert 64 * 64 * 4 <= size <= 64 * 64 * 4 + 4096
    assert Matrix(weight, form=PACKED, table=True).nbytes() == size + 64 * 64 * 4
    assert Matrix(weight, form=AS_IS, table=True).nbytes() == 64 * 64 * 4


def test_updates_within_inference_mode_work_outside_of_it() -> None:
    weight, bias = weights(24, 16, torch.float32)
    for form in FORMS:
        with torch.inference_mode():
            matrix = Matrix(weight.clone(), bias, form)
            matrix.write(weight.neg())
        assert torch.equal(matrix.dense(), -weight)
        torch.testing.assert_close(matrix.linear(torch.eye(16)), bias - weight.t(), atol=1e-5, rtol=0)
