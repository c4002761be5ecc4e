"""Packed weights as tensors: whatever torch, Transformers and users do to a parameter is in the products, or is refused by name.

Tests of: models.weights.layers, models.weights.parameter, models.weights, models.weights.matrix,
models.formats.
"""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from by_pairs import by_pairs
from shoal.models import formats, weights
from shoal.models.loading import wrap
from shoal.models.weights.matrix import PACKED, Matrix
from shoal.models.weights.parameter import PackedWeight
from shoal.testing import tiny_model

OUT, IN = 12, 6
X = torch.randn(5, IN, generator=torch.Generator().manual_seed(1))
IDS = torch.arange(24).view(2, 12)


def pack(hf: nn.Module) -> str:
    return weights.lay_out(hf, lambda keys: dict.fromkeys(keys, PACKED))


class Tied(nn.Module):
    """An embedding and a head with one weight, as language models tie them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(OUT, IN), nn.Linear(IN, OUT, bias=False)
        self.head.weight = self.embedding.weight


def makers() -> dict[str, Callable[[], nn.Module]]:
    def single() -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleDict({"head": nn.Linear(IN, OUT, bias=False)})

    def fused() -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleDict({name: nn.Linear(IN, OUT, bias=False) for name in ("before", "head", "after")})

    return {"single": single, "tied": Tied, "fused": fused}


@pytest.fixture(params=makers())
def model(request: pytest.FixtureRequest) -> Any:
    """A model whose packed `head` is alone, tied to an embedding, or the middle one of three layers in one matrix."""
    made = makers()[request.param]()
    pack(made)
    if request.param == "fused":
        weights.matrix_of(list(made.children()))  # type: ignore[arg-type]
    return made


def check(model: Any, expected: Tensor) -> None:
    """The head's weights are these, for all who read or multiply."""
    head = model.head
    assert isinstance(head.weight, PackedWeight)
    assert torch.equal(head.weight, expected)
    assert torch.equal(head.weight.matrix.dense()[head.weight.start :][:OUT], expected)
    with torch.no_grad():
        torch.testing.assert_close(head(X), F.linear(X, expected), atol=1e-5, rtol=1e-5)
    if isinstance(model, Tied):
        assert model.embedding.weight is head.weight
        assert torch.equal(model.embedding(torch.arange(OUT)), expected)


def merged(weight: Tensor) -> None:
    weight.data += torch.ones(OUT, 1) @ torch.ones(1, IN)


def stepped(weight: Tensor) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.5).step()


def out_of(weight: Tensor) -> None:
    torch.add(weight.detach().clone(), 1, out=weight.data)


WRITES: dict[str, Callable[[Any], object]] = {
    "add_": lambda w: w.add_(1),
    "mul_ of data": lambda w: w.data.mul_(2),
    "copy_": lambda w: w.copy_(torch.ones(OUT, IN)),
    "copy_ of detached": lambda w: w.detach().copy_(torch.ones(OUT, IN)),
    "copy_ from packed": lambda w: w.copy_(w * 3),
    "fill_ and zero_": lambda w: w.fill_(3).zero_().add_(1),
    "a row": lambda w: w[0].zero_(),
    "rows": lambda w: w[2:5].mul_(4),
    "an element": lambda w: w.__setitem__((3, 2), 9.0),
    "by indices": lambda w: w.__setitem__(torch.tensor([1, 1, 4]), 5.0),
    "by a mask": lambda w: w.masked_fill_(w > 0, -1),
    "a transposed view": lambda w: w.t()[1].add_(7),
    "a flat view": lambda w: w.view(-1)[::7].fill_(2),
    "a view of a view": lambda w: w.data[1:].narrow(1, 0, 2).chunk(2)[1].neg_(),
    "each row": lambda w: [row.add_(i) for i, row in enumerate(w)],
    "two views in turn": lambda w: [(a.add_(1), b.mul_(2)) for a, b in [(w[0], w.t()[0])]],
    "swapped rows": lambda w: w[0].copy_(w[1]),
    "foreach": lambda w: torch._foreach_mul_([w, torch.ones(2)], 2),
    "out=": out_of,
    "an optimizer": stepped,
    "a merge": merged,
    "normal_ of init": lambda w: nn.init.constant_(w, 0.5),
    "a clip": lambda w: w.data.clamp_(-0.1, 0.1),
}


@pytest.mark.parametrize("write", WRITES)
@torch.no_grad()
def test_every_write_reaches_products_and_readers(model: Any, write: str) -> None:
    ordinary = nn.Parameter(model.head.weight.detach().clone())
    check(model, ordinary.detach())
    kept = model.head.weight
    WRITES[write](ordinary)
    WRITES[write](model.head.weight)
    assert model.head.weight is kept
    check(model, ordinary.detach())
    for name in ("before", "after"):  # their rows stay
        if hasattr(model, name):
            torch.manual_seed(0)
            assert torch.equal(getattr(model, name).weight, makers()["fused"]()[name].weight)  # type: ignore[index]


def no_repack(matrix: Matrix, weight: Tensor) -> None:
    matrix.epoch += 1


def no_table(matrix: Matrix, weight: Tensor) -> None:
    matrix.epoch += 1
    matrix._keep(weight.clone(), table=False)
    matrix.table = torch.zeros(matrix.shape)


def lost_view(weight: Tensor, dense: Tensor) -> Tensor:
    return dense.as_strided(weight.shape, weight.stride(), weight.storage_offset()).clone()


@pytest.mark.parametrize(
    ("owner", "name", "sabotage"),
    [(Matrix, "write", no_repack), (Matrix, "write", no_table), (PackedWeight, "of", lost_view)],
    ids=["not packed again", "table not refreshed", "write into a copy"],
)
@torch.no_grad()
def test_control_the_check_sees_a_lost_write(owner: type, name: str, sabotage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Tied()
    pack(made)
    expected = made.head.weight * 2
    monkeypatch.setattr(owner, name, sabotage)
    made.head.weight[:].mul_(2)
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        check(made, expected)


@torch.no_grad()
def test_a_view_taken_before_a_write_reads_what_was_written(model: Any) -> None:
    view, state = model.head.weight[1:3], model.state_dict()
    assert torch.equal(view, model.head.weight[1:3])
    model.head.weight.fill_(4)
    assert bool((view == 4).all())
    assert bool((state["head.weight"] == 4).all())
    view.zero_()
    assert int((model.head.weight == 0).sum()) == 2 * IN
    assert int((state["head.weight"] == 0).sum()) == 2 * IN


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "another memory": (lambda w: w.detach().set_(torch.zeros(OUT, IN)), "assign weight.data"),
    "another size": (lambda w: w.detach().resize_(2, IN), "assign weight.data"),
    "another dtype in place": (lambda w: w.detach().view(torch.int32), "clone"),
    "an address": (lambda w: w.data_ptr(), "no address"),
    "a file of addresses": (lambda w: save_file({"w": w.detach()}, "never.safetensors"), "no address"),
    "an array": (lambda w: w.detach().numpy().fill(0), "read-only"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_kept_is_refused_by_name(model: Any, what: str) -> None:
    before = model.head.weight.detach().clone()
    function, message = REFUSED[what]
    with pytest.raises((RuntimeError, ValueError), match=message):
        function(model.head.weight)
    check(model, before)


@torch.no_grad()
def test_a_parameter_that_gets_other_data_has_them(model: Any) -> None:
    kept, matrix = model.head.weight, model.head.weight.matrix
    other = torch.ones(OUT, IN)
    kept.data = other
    check(model, other)
    other.mul_(2)  # it is that tensor, not a copy
    kept[0] = 7.0
    check(model, other)
    assert matrix.stale
    assert float(other[0, 0]) == 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16])
@torch.no_grad()
def test_casts_keep_ties_and_compute_in_the_new_dtype(model: Any, dtype: torch.dtype) -> None:
    expected = model.head.weight.detach().clone().to(dtype)
    model.to(dtype)
    assert model.head.weight.dtype == dtype
    assert torch.equal(model.head.weight, expected)
    assert torch.equal(model.head(X.to(dtype)), F.linear(X.to(dtype), expected))
    if isinstance(model, Tied):
        assert model.embedding.weight is model.head.weight
        assert torch.equal(model.embedding(torch.arange(OUT)), expected)
    model.to(dtype)
    model.head.weight.mul_(2)
    assert torch.equal(model.head(X.to(dtype)), F.linear(X.to(dtype), 2 * expected))


def test_replaced_parameters_are_what_the_layer_computes_by(model: Any) -> None:
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()}, assign=True)
    with torch.no_grad():
        torch.testing.assert_close(model.head(X), X.sum(1, keepdim=True).expand(-1, OUT))
    model.head.weight = nn.Parameter(torch.zeros(OUT, IN))
    with torch.no_grad():
        assert not model.head(X).any()


def test_gradients_are_those_of_ordinary_weights(model: Any) -> None:
    ordinary = copy.deepcopy(model.head.weight.detach().clone()).requires_grad_()
    F.linear(X, ordinary).square().sum().backward()
    model.head(X).square().sum().backward()
    torch.testing.assert_close(model.head.weight.grad, ordinary.grad)
    for parameter in (ordinary, model.head.weight):
        torch.optim.AdamW([parameter], lr=0.1).step()
    with torch.no_grad():
        torch.testing.assert_close(model.head(X), F.linear(X, ordinary), atol=1e-4, rtol=1e-4)


def test_autocast_casts(model: Any) -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        x = X.bfloat16()
        expected = F.linear(x, model.head.weight.detach().clone())
        assert model.head(x).dtype == torch.bfloat16
        torch.testing.assert_close(model.head(x), expected, atol=0.05, rtol=0.05)


def test_views_that_are_read_share_one_unpacked_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    made = makers()["single"]()
    pack(made)
    unpacked: list[int] = []
    dense = Matrix.dense
    monkeypatch.setattr(Matrix, "dense", lambda matrix: (unpacked.append(1), dense(matrix))[1])
    rows = made.head.weight.detach().unbind()  # type: ignore[operator, union-attr]
    assert float(sum(row.sum() for row in rows)) == pytest.approx(float(made.head.weight.detach().sum()), abs=1e-5)  # type: ignore[operator, union-attr]
    assert len(unpacked) == 2  # for all rows, and for the sum


def test_marks_on_a_parameter_stay() -> None:
    made = makers()["single"]()
    made.head.weight._is_hf_initialized = True  # type: ignore[union-attr]
    pack(made)
    assert made.head.weight._is_hf_initialized  # type: ignore[union-attr]


def test_readers_get_exact_weights(model: Any) -> None:
    exact = model.head.weight.matrix.dense()[model.head.weight.start :][:OUT]
    weight = model.head.weight.detach()
    assert weight.tolist() == exact.tolist()
    assert (weight.numpy() == exact.numpy()).all()
    assert repr(weight) == repr(exact)
    assert (weight.shape, weight.dtype, str(weight.device), weight.is_contiguous()) == (
        exact.shape,
        exact.dtype,
        "cpu",
        True,
    )
    assert type(weight.clone()) is type(weight + 1) is type(weight.to(torch.float64)) is Tensor
    stored = io.BytesIO()
    torch.save(model.state_dict(), stored)
    stored.seek(0)
    assert torch.equal(torch.load(stored)["head.weight"], exact)


# ── models ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.inference_mode()
def logits(hf: Any) -> Tensor:
    return hf(IDS).logits  # type: ignore[no-any-return]


@by_pairs({"tied": [True, False], "dtype": [torch.float32, torch.bfloat16], "kind": ["llama", "qwen2", "gpt2"]})
def test_a_packed_model_says_the_same(kind: str, dtype: torch.dtype, tied: bool) -> None:
    if dtype not in formats.cpu().packs:
        pytest.skip("this CPU packs no bfloat16")
    hf = tiny_model(kind, tie_word_embeddings=tied).to(dtype)
    packed = copy.deepcopy(hf)
    note = pack(packed)
    heads_only = kind == "gpt2"  # its layers are Conv1D and stay as they are
    assert note == "packed"
    count = sum(isinstance(p, PackedWeight) for p in packed.parameters())
    assert count == 1 if heads_only else count > 2
    scale = float(logits(hf).float().std())
    difference = float((logits(packed).float() - logits(hf).float()).abs().max()) / scale
    assert difference <= (1e-4 if dtype == torch.float32 else 0.1)
    left, right = packed.state_dict(), hf.state_dict()
    assert left.keys() == right.keys()
    assert all(torch.equal(tensor, right[name]) for name, tensor in left.items())
    assert (packed.device, packed.dtype) == (hf.device, hf.dtype)
    assert [(n, p.shape, p.dtype) for n, p in packed.named_parameters()] == [
        (n, p.shape, p.dtype) for n, p in hf.named_parameters()
    ]
    packed.tie_weights()
    assert (packed.get_output_embeddings().weight is packed.get_input_embeddings().weight) == tied
    assert wrap(packed, "tiny").self_check_error is not None


@pytest.mark.parametrize("tied", [True, False])
def test_one_copy_of_the_weights_remains(tied: bool) -> None:
    hf = tiny_model("llama", tie_word_embeddings=tied)
    ordinary = {name: p.nbytes for name, p in hf.named_parameters()}
    linear = [module for module in hf.modules() if isinstance(module, nn.Linear)]
    before = [weakref.ref(layer.weight) for layer in linear]
    gc.collect()
    gc.disable()
    try:
        pack(hf)
        assert not any(reference() is not None for reference in before)
    finally:
        gc.enable()
    matrices = [layer.weight.matrix for layer in linear]  # type: ignore[union-attr]
    assert [matrix.table is not None for matrix in matrices] == [tied and layer is hf.lm_head for layer in linear]
    others = sum(p.nbytes for p in hf.parameters() if not isinstance(p, PackedWeight))
    own = sum(torch.ops.mkldnn._nbytes(matrix._weight) for matrix in matrices)
    table = ordinary["model.embed_tokens.weight"] if tied else 0
    assert wrap(hf, "tiny").parameter_bytes == others + own + table
    assert own >= sum(layer.in_features * layer.out_features * 4 for layer in linear)


def test_layers_with_one_weight_and_unlike_biases_stay_as_they_are() -> None:
    made = nn.ModuleList([nn.Linear(IN, OUT), nn.Linear(IN, OUT)])
    made[1].weight = made[0].weight  # type: ignore[assignment]
    expected = [layer(X) for layer in made]
    assert pack(made) == "as-is"
    assert all(torch.equal(layer(X), y) for layer, y in zip(made, expected, strict=True))
