"""Several linear layers as one matrix: the same products, and whatever is written into a layer is in the matrix.

Tests of: models.weights.layers, models.weights, models.weights.matrix.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.models.weights import lay_out, matches, matrix_of, nbytes
from shoal.models.weights.matrix import AS_IS, FORMS, INPUT_MAJOR, PACKED
from shoal.models.weights.panels import PanelMatrix
from shoal.testing import tiny_model

SIZES = (12, 5, 5)
"""Outputs of three layers."""
X = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))


def layers(form: str, bias: bool = True) -> list[nn.Linear]:
    torch.manual_seed(0)
    made = nn.ModuleList(nn.Linear(16, size, bias=bias) for size in SIZES)
    lay_out(made, lambda keys: dict.fromkeys(keys, form))
    return list(made)  # type: ignore[arg-type]


def expected(each: list[nn.Linear]) -> Tensor:
    return torch.cat([F.linear(X, layer.weight, layer.bias) for layer in each], 1)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_one_product_is_that_of_each(form: str, bias: bool) -> None:
    each = layers(form, bias)
    before = [layer.weight.clone() for layer in each]
    wanted, size = expected(each), nbytes([layer.weight for layer in each])
    matrix = matrix_of(each)
    assert matrix.shape == (sum(SIZES), 16)
    close(matrix.linear(X), wanted)
    for layer, weight in zip(each, before, strict=True):
        assert torch.equal(layer.weight, weight)
        close(layer(X), F.linear(X, weight, layer.bias))
    assert nbytes([layer.weight for layer in each]) <= size  # stored once: blocks of one matrix pad less than those of three
    assert matches(matrix, each)
    again = matrix_of(each)  # another pass over the same model shares them
    assert matches(matrix, each)
    close(again.linear(X), wanted)
    if form == INPUT_MAJOR:
        assert matrix.dense().t().is_contiguous()


@pytest.mark.parametrize(("sizes", "packings"), [((32, 16, 5), 3), ((16, 5, 32), 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_full_panels_are_joined_as_they_are(
    dtype: torch.dtype, sizes: Sequence[int], packings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.models.weights.layers.packing", lambda dtype: PanelMatrix)
    packs, pack = list[int](), PanelMatrix._packed
    monkeypatch.setattr(PanelMatrix, "_packed", lambda self, weight: packs.append(len(weight)) or pack(self, weight))
    torch.manual_seed(0)
    made: Any = nn.ModuleList(nn.Linear(16, size, dtype=dtype) for size in sizes)
    lay_out(made, lambda keys: dict.fromkeys(keys, PACKED))
    before = [layer.weight.clone() for layer in made]
    matrix: Any = matrix_of(list(made))
    assert len(packs) == packings  # one for each layer, and one more where panels have gaps
    assert torch.equal(matrix.panels, PanelMatrix(torch.cat(before)).panels)
    assert matches(matrix, list(made))
    assert all(torch.equal(layer.weight, weight) for layer, weight in zip(made, before, strict=True))
    made[1].weight.mul_(3)  # writes reach the joined panels
    assert torch.equal(matrix.dense()[sizes[0] : sizes[0] + sizes[1]], before[1] * 3)
    assert matrix.shape == (sum(sizes), 16)


def test_a_model_is_packed_by_threads_that_do_not_wait_for_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.models.weights.layers.packing", lambda dtype: PanelMatrix)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    names, pack, copies = set[str](), PanelMatrix._packed, list[int]()

    def noted(self: PanelMatrix, weight: Tensor) -> Tensor:
        names.add(threading.current_thread().name.rpartition("_")[0])
        return pack(self, weight)

    monkeypatch.setattr(PanelMatrix, "_packed", noted)
    made: Any = nn.ModuleList(nn.Linear(16, 32) for _ in range(8))
    before = [layer.weight.detach().clone() for layer in made]
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "copy_", lambda *_: copies.append(1))  # which all threads of torch would do
        lay_out(made, lambda keys: dict.fromkeys(keys, PACKED))
    assert names == {"shoal-packing"}
    assert copies == []
    assert [layer.weight.matrix.shape for layer in made] == [(32, 16)] * 8
    assert all(torch.equal(layer.weight, weight) for layer, weight in zip(made, before, strict=True))
    with torch.no_grad():
        made[0].weight.mul_(2)
    assert torch.equal(made[0].weight, before[0] * 2)


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_writes_into_a_layer_reach_the_matrix(form: str) -> None:
    each = layers(form)
    matrix = matrix_of(each)
    each[1].weight.mul_(3)
    each[2].weight[1] = 7.0
    each[0].bias.fill_(2)
    each[1].load_state_dict({"weight": torch.ones(5, 16), "bias": torch.zeros(5)})
    close(matrix.linear(X), expected(each))
    assert matches(matrix, each)
    close(matrix.linear(X)[:, 12:17], X.sum(1, keepdim=True).expand(3, 5))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "weight", nn.Parameter(torch.ones(5, 16))),
        lambda layer: setattr(layer.weight, "data", torch.ones(5, 16)),
        lambda layer: setattr(layer.bias, "data", torch.ones(5)),
        lambda layer: layer.double(),
        lambda layer: layer.load_state_dict({"weight": torch.ones(5, 16), "bias": torch.ones(5)}, assign=True),
    ],
    ids=["weight", "data", "bias", "dtype", "assigned"],
)
@torch.no_grad()
def test_a_replaced_parameter_is_noticed(form: str, change: Any) -> None:
    each = layers(form)
    matrix = matrix_of(each)
    change(each[1])
    assert not matches(matrix, each)
    close(each[0](X), F.linear(X, each[0].weight, each[0].bias))
    x = X.to(each[1].weight.dtype)
    torch.testing.assert_close(each[1](x), F.linear(x, each[1].weight, each[1].bias), atol=1e-5, rtol=1e-5)
    if each[1].weight.dtype == torch.float32:
        close(matrix_of(each).linear(X), expected(each))


@torch.no_grad()
def test_layers_of_unlike_forms_take_that_of_the_first() -> None:
    for first, other in ((PACKED, AS_IS), (AS_IS, PACKED)):
        each = [*layers(first)[:1], *layers(other)[1:]]
        wanted = expected(each)
        matrix = matrix_of(each)
        assert matrix.form == first
        assert matches(matrix, each)
        close(matrix.linear(X), wanted)
        close(torch.cat([layer(X) for layer in each], 1), wanted)


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_the_order_of_layers_matters(bias: bool) -> None:
    for form in FORMS:
        each = layers(form, bias)
        matrix = matrix_of(each)
        other = [each[0], each[2], each[1]]
        assert not matches(matrix, other)
        close(matrix_of(other).linear(X), expected(other))


@torch.no_grad()
def test_one_layer_has_its_own_matrix() -> None:
    for form in FORMS:
        layer = layers(form)[0]
        matrix = matrix_of([layer])
        layer.weight.mul_(2)
        layer.bias.mul_(2)
        close(matrix.linear(X), F.linear(X, layer.weight, layer.bias))
        assert matches(matrix, [layer])


def test_layers_that_cannot_be_one_are_refused() -> None:
    each = layers(AS_IS)
    for other in (nn.Linear(16, 3, bias=False), nn.Linear(8, 3), nn.Linear(16, 3).double()):
        with pytest.raises(ValueError, match="need the same input"):
            matrix_of([*each, other])


@torch.no_grad()
def test_a_copy_of_fused_layers_is_its_own() -> None:
    for form in FORMS:
        each = layers(form)
        matrix_of(each)
        wanted = expected(each)
        other = copy.deepcopy(nn.ModuleList(each))
        for layer in other:
            layer.weight.zero_()  # type: ignore[operator, union-attr]
        close(matrix_of(each).linear(X), wanted)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_with_fused_layers_saves_and_comes_back_equal(form: str, tied: bool, tmp_path: Path) -> None:
    hf = tiny_model("qwen2", tie_word_embeddings=tied)  # its layers have biases
    before = {name: value.clone() for name, value in hf.state_dict().items()}
    lay_out(hf, lambda keys: dict.fromkeys(keys, form))
    for layer in hf.model.layers:
        matrix_of([layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj])
    hf.save_pretrained(tmp_path)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for state in (hf.state_dict(), back.state_dict()):
        assert state.keys() == before.keys()
        assert all(torch.equal(value, before[name]) for name, value in state.items())
