"""What the layers of a model must do by the kernels: the same as its modules, in rounds and for prompts, with weights of one byte
too; and in how many launches. On the device at hand, as `layers_cases.py`, and run as that is.

Tests of: models.layers.triton_decoder, models.layers, models.executor, models.selfcheck.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from layer_shapes import DEVICE, INTERPRETED, MANY_PROCESSORS, Case, processors
from shoal.models import loading
from shoal.models.attention import fused_kernels as attention_kernels
from shoal.models.executor import MODULES, TRITON_LAYERS
from shoal.models.layers import (
    MOST_TOKENS,
    SHARE,
    TOKENS,
    WeightOnly8Bit,
    layer_kernels,
    product,
    silu_mul,
)
from shoal.models.layers import triton_decoder as layer_decoder
from shoal.models.layers.triton_decoder import PlanState, WeightOnlyMatrix, fused_layers_of, matrix_of_8_bit
from shoal.models.passes import use_fused_layers
from shoal.models.prompt_passes import feed_prompts
from shoal.models.quantize import _weight_only
from shoal.models.runner import Runner
from shoal.models.selfcheck import _largest, _reference, _sharing, largest_error
from shoal.testing import tiny_model
from shoal.types.requests import Prefix

if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("neither a CUDA device nor TRITON_INTERPRET=1", allow_module_level=True)


def runner(architecture: str, attention: str = "pad", **options: Any) -> Runner:
    """Attends by the padded call: the kernel has tests of its own."""
    shape = {"layers": 1, "vocab_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}  # the interpreter is slow
    return loading.wrap(tiny_model(architecture, **(shape | options)).to(DEVICE), "tiny", attention, checked=False)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_fused_layers_are_the_model(architecture: str) -> None:
    """By the check of every load: ragged blocks, a rollback, a draft tree. The parameters keep their values, in one matrix."""
    several: dict[str, int] = {"layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    made = runner(architecture, **(several if architecture == "llama" else {}))
    before = {name: value.clone() for name, value in made.hf.state_dict().items()}
    made.bridge.layers = fused_layers_of(made.hf)
    assert made.bridge.layers is not None
    assert largest_error(made) < 1e-8
    assert all(torch.equal(value, before[name]) for name, value in made.hf.state_dict().items())
    layer = made.hf.model.layers[0]
    for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        first, *rest = [getattr(layer.self_attn if name[0] in "qkv" else layer.mlp, name).weight for name in names]
        assert all(other.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for other in rest)


class Launches(TorchDispatchMode):
    """Counts what a GPU would launch: operations that compute or copy, and the kernels, which are not run."""

    IDLE = ("empty", "new_empty", "detach", "alias", "lift", "_unsafe_view", "prim::device", "arange")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        for module in (layer_kernels, attention_kernels):
            for name in ("add_norm", "heads", "silu_mul", "eight_bit_product", "join", "attend", "combine"):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, _Noted(name, self.names))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = func.name().removeprefix("aten::"), func(*args, **(kwargs or {}))
        if not name.startswith(self.IDLE) and not (func.is_view and _shares_storage(result, args)):
            self.names.append(name)
        return result


def _shares_storage(result: Any, args: Any) -> bool:
    """Whether a view really is one: reshapes and casts may be copies."""
    places = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves(args) if isinstance(tensor, Tensor)}
    return all(tensor.untyped_storage().data_ptr() in places for tensor in tree_leaves(result) if isinstance(tensor, Tensor))


class _Noted:
    """Stands for a kernel: notes its launches."""

    def __init__(self, name: str, names: list[str]) -> None:
        self.name, self.names = name, names

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *_, **__: self.names.append(self.name)


Feed = Callable[[Runner, Launches], None]


def pass_of(counts: list[int], want_logits: bool = True) -> Feed:
    """A pass of two rows."""

    def feed(made: Runner, counting: Launches) -> None:
        tokens = torch.ones(2, max(counts), dtype=torch.long, device=DEVICE)
        made.feed([0, 1], tokens[:, :1], [1, 1])  # makes the layers of its cache
        counting.names.clear()
        with counting:
            made.feed([0, 1], tokens, counts, want_logits=want_logits)

    return feed


TOKEN = pass_of([1, 1])


def launches_per_layer(
    dtype: torch.dtype,
    fused: bool,
    monkeypatch: pytest.MonkeyPatch,
    feed: Feed = TOKEN,
    quantised: bool = False,
    **shape: int,
) -> Counter[str]:
    """Of a pass with the attention kernel: those of a model of three layers without those of one of two."""
    found = []
    for layers in (2, 3):
        hf = tiny_model("llama", layers=layers, **shape).to(DEVICE, dtype)
        made = loading.wrap(_weight_only(hf, torch.int8) if quantised else hf, "tiny", "fused", checked=False)
        if fused:
            made.bridge.layers = fused_layers_of(made.hf)
        made.memory.reserve(2, 20)
        with monkeypatch.context() as patch, torch.inference_mode():
            counting = Launches(patch)
            feed(made, counting)
        found.append(Counter(counting.names))
    return found[1] - found[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_is_nine_launches(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget; by the modules of the model they are about four times as many."""
    fused = launches_per_layer(dtype, True, monkeypatch)
    assert fused.total() <= 9
    assert {"heads", "attend", "silu_mul"} <= fused.keys()
    assert launches_per_layer(dtype, False, monkeypatch).total() > fused.total()


def test_a_layer_of_bytes_is_nine_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    found = launches_per_layer(torch.bfloat16, True, monkeypatch, quantised=True)
    assert found.total() <= 9
    assert found["eight_bit_product"]
    with processors(MANY_PROCESSORS):  # the inputs of `down` have several programs, whose sums the next norm joins
        found = launches_per_layer(torch.bfloat16, True, monkeypatch, quantised=True, intermediate_size=2 * SHARE)
        assert found.total() <= 9
        assert not found["join"]
        by_modules = launches_per_layer(torch.bfloat16, False, monkeypatch, quantised=True, intermediate_size=2 * SHARE)
        assert by_modules["join"] == 1


@pytest.mark.parametrize(("counts", "most"), [([8, 8], 9), ([8, 3], 11)], ids=["alike", "packed"])
def test_a_layer_of_prompts_is_nine_launches(counts: list[int], most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of different lengths lie side by side, without padding, but for their attention."""
    fused = launches_per_layer(torch.bfloat16, True, monkeypatch, pass_of(counts, want_logits=False))
    assert fused.total() <= most
    assert launches_per_layer(torch.bfloat16, False, monkeypatch, pass_of(counts, want_logits=False)).total() > fused.total()


def keys_and_values(made: Runner, fused: bool, feed: Callable[[Runner], None]) -> list[Tensor]:
    """What the cells of a cache hold after passes of prompts, the fused ones or those of the modules."""
    runner_ = made.fork()
    layers, runner_.bridge.layers = runner_.bridge.layers, runner_.bridge.layers if fused else None
    try:
        with torch.inference_mode():
            feed(runner_)
    finally:
        runner_.bridge.layers = layers
    return [tensor for stores in runner_.cache.stores() for tensor in stores]


def several(made: Runner) -> None:
    """Prompts in slots that are not side by side, one in two chunks, beside one in the shared store that a row goes on from."""
    tokens = torch.arange(40, device=DEVICE).view(2, 20) * 7 % made.vocab_size
    prefix = Prefix(3, 9)
    made.memory.reserve(4, 40, 16)
    made.feed_prefix(prefix, 0, tokens[:1, :5])
    made.feed_prefix(prefix, 5, tokens[:1, 5:9])
    feed_prompts(made, [(2, tokens[0].tolist()), (0, tokens[1, :7].tolist())])
    feed_prompts(made, [(0, tokens[1, 7:19].tolist()), (1, tokens[0, 3:5].tolist())])
    made.cache.enter(3, prefix)
    feed_prompts(made, [(3, tokens[0, 9:14].tolist())])


@pytest.mark.parametrize(("architecture", "attention"), [("mistral", "pad"), ("qwen3", "fused")])
def test_prompts_by_fused_layers_leave_the_keys_of_the_model(architecture: str, attention: str) -> None:
    made = runner(architecture, attention, layers=2)  # of the last layer of prompts only keys and values are computed
    made.bridge.layers = fused_layers_of(made.hf)
    assert made.bridge.layers is not None
    found, right = (keys_and_values(made, fused, several) for fused in (True, False))
    for ours, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        assert bool((ours != 0).any())


WRONG_PROMPTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "results": ("packed", lambda real: lambda self, attended: real(self, attended).roll(1, 0)),
    "cells": ("cells", lambda real: property(lambda self: real.fget(self).roll(1, 0))),
    "queries": ("unpacked", lambda real: lambda self, query: real(self, query.flip(0))),
    "keys": ("rows", lambda real: lambda self, layer: tuple(part.roll(1, 2) for part in real(self, layer))),
}


@pytest.mark.parametrize("name", WRONG_PROMPTS)
def test_wrong_prompts_are_noticed_at_load(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attribute, wrong = WRONG_PROMPTS[name]
    monkeypatch.setattr(PlanState, attribute, wrong(getattr(PlanState, attribute)))
    made = runner("llama", layers=2)
    use_fused_layers(made)
    assert made.bridge.layers is None
    assert "fused layers diverge" in caplog.text


@pytest.mark.parametrize("counts", [[9, 8], [9, 3]], ids=["padded", "packed"])
def test_padding_of_prompts_is_never_seen(counts: list[int]) -> None:
    """Whatever stands in unused columns, and in cells that are not a row's, the tokens that follow get the same logits."""
    made = runner("llama", "fused", layers=2)
    made.bridge.layers = fused_layers_of(made.hf)
    tokens = torch.arange(18, device=DEVICE).view(2, 9) * 5 % made.vocab_size
    found = []
    for junk in (1, 90):
        one = made.fork()
        one.memory.reserve(3, 20)
        one.feed([0, 2], tokens[:, :1], [1, 1])
        with torch.inference_mode():
            for tensor in [tensor for stores in one.cache.stores() for tensor in stores[:2]]:
                tensor.fill_(junk)
        one.cache.clear()
        block = tokens.clone()
        block[1, counts[1] :] = junk
        one.feed([2, 0], block, counts, want_logits=False)
        found.append(one.feed([0, 2], tokens[:, :2], [2, 2]))
    assert torch.equal(*found)


def test_fused_layers_read_shared_prompts_with_the_kernel() -> None:
    """Attention by the kernel of ours as well: then rows whose prompt is stored once take part."""
    made = runner("llama", "fused")
    made.bridge.layers = fused_layers_of(made.hf)
    assert made.bridge.layers is not None
    ids, plain = _reference(made)
    with torch.inference_mode():
        assert _largest(_sharing(made, ids, plain)) < 1e-8
    assert made.counts.take_executors() == {TRITON_LAYERS: 2}


def test_a_wrong_layer_is_noticed_at_load(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from shoal.models.layers import triton_decoder

    monkeypatch.setattr(triton_decoder, "silu_mul", lambda both: silu_mul(both) * 1.05)
    made = runner("llama")
    use_fused_layers(made)
    assert made.bridge.layers is None
    assert "its modules compute passes: fused layers diverge" in caplog.text


def test_writes_into_parameters_count_and_the_modules_compute_after_others() -> None:
    made = runner("llama")
    made.bridge.layers = fused_layers_of(made.hf)
    layer = made.hf.model.layers[0].mlp
    with torch.no_grad():
        layer.up_proj.weight.mul_(3)
    assert largest_error(made) < 1e-8  # the model is compared with itself
    layer.up_proj.weight.data = layer.up_proj.weight.detach().clone()
    assert made.bridge.layers is not None
    assert made.bridge.layers.stale
    twin = made.fork()
    twin.memory.reserve(2, 20)
    tokens = torch.ones(2, 2, dtype=torch.long, device=DEVICE)
    twin.feed([0, 1], tokens, [2, 2])
    assert twin.counts.take_executors() == {MODULES: 1}
    assert f"not {TRITON_LAYERS}: weights or layers of the model were replaced" in str(twin.explain([0], [1]))


def test_products_of_many_tokens_are_those_of_few() -> None:
    """The kernel up to its limit, and beyond it the library's product. Padding of tokens and rows beside a row change nothing."""
    case = Case(tokens=MOST_TOKENS + 1, width=200)
    x, weight = case.random(case.tokens, case.width), (30 * case.random(40, case.width, salt=1)).to(torch.int8)
    scales = case.random(40, salt=2).abs()
    many = product(x, weight, scales, None)
    for tokens in (1, 17, TOKENS, TOKENS + 1, MOST_TOKENS):
        torch.testing.assert_close(product(x[:tokens].clone(), weight, scales, None), many[:tokens], rtol=1e-4, atol=1e-3)


def quantised(architecture: str, form: torch.dtype = torch.int8, **options: Any) -> tuple[Any, Runner]:
    """A model, and a runner of its copy with weights of one byte."""
    hf = tiny_model(architecture, **{"layers": 1, "vocab_size": 64} | options).to(DEVICE)
    return hf, loading.wrap(_weight_only(hf, form), "tiny", "pad", checked=False)


def unpacked(hf: Any, ours: Any) -> Any:
    """The model with the weights that the copy has, as floating numbers."""
    wide = copy.deepcopy(hf)
    for name, layer in ours.named_modules():
        if isinstance(layer, WeightOnly8Bit):
            weight = layer.weight.detach().float() * layer.scales.detach()[:, None]
            wide.get_submodule(name).weight = nn.Parameter(weight.to(hf.dtype))  # also where it was tied
    return wide


@pytest.mark.parametrize(
    ("architecture", "form", "most"), [("llama", torch.float8_e4m3fn, 0.2), ("qwen2", torch.int8, 0.05)], ids=str
)
def test_fused_layers_of_bytes_are_the_unpacked_model(architecture: str, form: torch.dtype, most: float) -> None:
    """With tied embeddings, and with a bias (Qwen2); in rounds and for prompts. The owner's model stays as it was."""
    hf, made = quantised(architecture, form, tie_word_embeddings=architecture == "llama")
    before = {name: (value.data_ptr(), value.clone()) for name, value in hf.named_parameters()}
    made.bridge.layers = fused_layers_of(made.hf)
    assert made.bridge.layers is not None
    right, own = unpacked(hf, made.hf), made.bridge.plain_states
    made.bridge.plain_states = lambda tokens, layers: (right(tokens, use_cache=False).logits, None)  # type: ignore[method-assign]
    assert largest_error(made) < 1e-8
    made.bridge.plain_states = own  # type: ignore[method-assign]
    ids = torch.arange(8, device=DEVICE)[None]
    with torch.inference_mode():
        exact, found = hf(ids).logits, own(ids, ())[0]
    assert 0 < float((exact - found).std()) < most * float(exact.std())
    assert type(hf.model.layers[0].mlp.up_proj) is nn.Linear
    for name, value in hf.named_parameters():
        assert (value.data_ptr(), True) == (before[name][0], torch.equal(value, before[name][1]))
    layer = made.hf.model.layers[0]
    for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        first, *rest = [getattr(layer.self_attn if name[0] in "qkv" else layer.mlp, name) for name in names]
        for part in ("weight", "scales"):
            place = getattr(first, part).untyped_storage().data_ptr()
            assert all(getattr(other, part).untyped_storage().data_ptr() == place for other in rest)


WRONG_BYTES: dict[str, Callable[[Any], None]] = {
    "scales of another layer": lambda made: made.scales.copy_(made.scales.flip(0)),
    "weights exchanged": lambda made: made._weight.copy_(made._weight.flip(0)),
}


@pytest.mark.parametrize("name", WRONG_BYTES)
def test_wrong_bytes_are_noticed_at_load(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In common tensors of their own, so that the modules still have the right ones."""

    def wrong(layers: Any) -> Any:
        right = matrix_of_8_bit(layers)
        made = WeightOnlyMatrix(right.dense().clone(), right.scales.clone(), right.bias)
        WRONG_BYTES[name](made)
        return made

    monkeypatch.setattr(layer_decoder, "matrix_of_8_bit", wrong)
    _, made = quantised("llama")
    use_fused_layers(made)
    assert made.bridge.layers is None
    assert "fused layers diverge" in caplog.text


def test_replaced_bytes_are_for_the_modules() -> None:
    _, made = quantised("llama")
    made.bridge.layers = fused_layers_of(made.hf)
    assert made.bridge.layers is not None
    layer = made.hf.model.layers[0].mlp.down_proj
    with torch.no_grad():
        layer.scales.mul_(2)
    assert not made.bridge.layers.stale
    layer.scales.data = layer.scales.detach().clone()
    assert made.bridge.layers.stale


def test_fused_layers_join_the_sums_of_shares_as_modules_do() -> None:
    """Inputs of `down` that have several programs: the same logits, bit for bit, as with one program for all of them."""
    found = []
    for count in (1, MANY_PROCESSORS):
        _, made = quantised("qwen2", intermediate_size=2 * SHARE)
        made.bridge.layers = fused_layers_of(made.hf)
        assert made.bridge.layers is not None
        with processors(count), torch.inference_mode():
            made.memory.reserve(2, 20)
            found.append(made.feed([0, 1], torch.arange(6, device=DEVICE).view(2, 3), [3, 3]))
    assert torch.equal(*(torch.as_tensor(logits) for logits in found))


def test_some_layers_of_bytes_keep_their_modules() -> None:
    hf, made = quantised("llama", layers=2)
    made.hf.model.layers[1].mlp.up_proj = copy.deepcopy(hf.model.layers[1].mlp.up_proj)
    use_fused_layers(made)
    assert made.bridge.layers is None


@pytest.mark.parametrize("architecture", ["gemma2", "gpt2", "mixtral"])
def test_other_models_keep_their_modules(architecture: str) -> None:
    assert fused_layers_of(tiny_model(architecture).to(DEVICE)) is None
