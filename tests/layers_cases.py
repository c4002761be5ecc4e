"""What the kernels of a decoder layer must do, on the device at hand: a CUDA GPU, or the CPU through Triton's interpreter.

Not collected by itself: `test_layers.py` runs this file in a process of its own, as `test_fused.py` does with `fused_cases.py`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mutants import mutant
from shoal.models import loading
from shoal.models.attention import kernels as attention_kernels
from shoal.models.compiled.buckets import Bucket
from shoal.models.layers import kernels
from shoal.models.layers.decoder import fused_layers_of
from shoal.models.layers.int8 import MOST_TOKENS, WeightOnlyInt8, product
from shoal.models.layers.operations import COLUMNS, add_norm, heads, silu_mul
from shoal.models.layers.prompt import Prompt
from shoal.models.lean.decoder import Norm
from shoal.models.passes import use_fused_layers
from shoal.models.prompts import feed_prompts
from shoal.models.quantize import _weight_only_int8
from shoal.models.runner import Runner
from shoal.models.selfcheck import _reference, _sharing_error, static_error
from shoal.testing import tiny_model
from shoal.types.prefix import Prefix

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("neither a CUDA device nor TRITON_INTERPRET=1", allow_module_level=True)

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """Shapes of a layer; normed: heads are normalised (Qwen3). rotary: features that are rotated."""

    tokens: int = 3
    width: int = 24
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    rotary: int = 16
    normed: bool = False
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def random(self, *shape: int, scale: float = 1.0, salt: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(31 * self.seed + salt)
        return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(self.dtype).to(DEVICE)

    def norm(self, width: int, salt: int) -> Norm:
        return Norm(1 + self.random(width, scale=0.3, salt=salt), 0.05)


def error(found: Tensor, truth: Tensor) -> float:
    """In units of what rounding may do: half a dozen roundings of the largest number. Infinite for NaN."""
    assert found.shape == truth.shape
    eps = torch.finfo(found.dtype).eps if found.dtype != torch.float32 else 4 * torch.finfo(torch.float32).eps
    worst = (found.double() - truth).abs().max() / (4 * eps * truth.abs().max().clamp(min=1))
    return float(worst.nan_to_num(torch.inf))


def normed(x: Tensor, norm: Norm) -> Tensor:
    """The definition, in float64."""
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()


def of_add_norm(case: Case) -> float:
    x, other, norm = (
        case.random(case.tokens, case.width, salt=1),
        case.random(case.tokens, case.width, salt=2),
        case.norm(case.width, 3),
    )
    worst = error(add_norm(x.clone(), None, norm), normed(x.double(), norm))
    total = x.double() + other.double()
    kept = x.clone()
    return max(worst, error(add_norm(kept, other, norm), normed(total, norm)), error(kept, total))


def of_silu_mul(case: Case) -> float:
    both = case.random(case.tokens, 2 * case.width, scale=3.0)
    gate, up = both.double().chunk(2, dim=1)
    return error(silu_mul(both), torch.nn.functional.silu(gate) * up)


def of_heads(case: Case) -> float:
    """Queries as they should be; keys and values in their cells, and nothing else written."""
    n, kv = case.heads, case.kv_heads
    states = case.random(case.tokens, (n + 2 * kv) * case.dim, salt=1)
    norms = (case.norm(case.dim, 2), case.norm(case.dim, 3)) if case.normed else None
    half = torch.arange(case.rotary // 2, dtype=torch.float64)
    angle = (torch.arange(case.tokens + 1, dtype=torch.float64)[:, None] + 5) * 0.7**half  # one more than there are tokens
    angle = torch.cat([angle, angle], dim=1).to(DEVICE)
    cos, sin = angle.cos().float(), angle.sin().float()
    angle = angle[: case.tokens]
    slots, capacity = 3, case.tokens + 1
    stores = [torch.full((slots, capacity, kv, case.dim), NAN, dtype=case.dtype, device=DEVICE) for _ in range(2)]
    cells = torch.randperm(slots * capacity - 1, generator=torch.Generator().manual_seed(case.seed))[: case.tokens].to(
        DEVICE
    )
    query = heads(states, (cos[: case.tokens], sin[: case.tokens]), norms, (stores[0], stores[1]), cells)

    parts = list(states.double().view(case.tokens, -1, case.dim).split([n, kv, kv], dim=1))
    if norms is not None:
        parts[:2] = [normed(part, norm) for part, norm in zip(parts, norms, strict=False)]
    parts[:2] = [_rotated(part, angle) for part in parts[:2]]
    worst = error(query, parts[0])
    unwritten = torch.ones(slots * capacity, dtype=torch.bool, device=DEVICE)
    unwritten[cells] = False
    for store, part in zip(stores, parts[1:], strict=True):
        flat = store.view(-1, kv, case.dim)
        worst = max(worst, error(flat[cells], part))
        if not flat[unwritten].isnan().all():
            return torch.inf
    return worst


def _rotated(x: Tensor, angle: Tensor) -> Tensor:
    turned, rest = x[..., : angle.shape[-1]], x[..., angle.shape[-1] :]
    a, b = turned.chunk(2, dim=-1)
    return torch.cat([turned * angle.cos()[:, None] + torch.cat([-b, a], dim=-1) * angle.sin()[:, None], rest], dim=-1)


def of_int8_product(case: Case) -> float:
    """With a bias where heads are normalised, without it elsewhere."""
    outputs = 40
    x, wide = case.random(case.tokens, case.width, salt=1), case.random(outputs, case.width, salt=2)
    layer = nn.Linear(case.width, outputs, bias=case.normed, device=DEVICE, dtype=case.dtype)
    with torch.no_grad():
        layer.weight.copy_(wide * torch.arange(1, outputs + 1, device=DEVICE, dtype=case.dtype)[:, None] / outputs)
    made = WeightOnlyInt8(layer)
    exact = x.double() @ (made.weight.detach().double() * made.scales.detach().double()[:, None]).t()
    with torch.no_grad():
        found = made(x[None])[0]
    return error(found, exact if layer.bias is None else exact + layer.bias.detach().double())


# ── the kernels are the definitions ─────────────────────────────────────────────────────────────────────────────────

OPERATIONS: dict[str, Callable[[Case], float]] = {
    "add_norm": of_add_norm,
    "heads": of_heads,
    "silu_mul": of_silu_mul,
    "int8_product": of_int8_product,
}


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype) -> Case:
    dim = draw(st.sampled_from([8, 16, 24, 80]))
    return Case(
        draw(st.integers(1, 5)), draw(st.sampled_from([16, 24, 100, COLUMNS + 40])), draw(st.sampled_from([1, 3, 4])),
        draw(st.sampled_from([1, 2])), dim, draw(st.sampled_from([dim, dim // 2])), draw(st.booleans()), dtype,
        draw(st.integers(0, 1000)),
    )  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_is_the_definition(name: str, dtype: torch.dtype) -> None:
    @settings(max_examples=6)
    @given(cases(dtype))
    def check(case: Case) -> None:
        assert OPERATIONS[name](case) <= 1

    check()


# ── negative controls: kernels with one thing wrong, none of which leaves its tensors ───────────────────────────────

MUTANTS = {
    "add_norm": {
        "epsilon outside of the root": (
            "tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)",
            "(tl.rsqrt(tl.sum(wide * wide, 0) / width) + eps)",
        ),
        "epsilon forgotten": (" / width + eps)", " / width)"),
        "sum instead of mean": ("tl.sum(wide * wide, 0) / width + eps", "tl.sum(wide * wide, 0) + eps"),
        "mean over the block": ("tl.sum(wide * wide, 0) / width + eps", "tl.sum(wide * wide, 0) / BLOCK + eps"),
        "residual not written": ("        tl.store(x + place, row, mask=inside)\n", ""),
        "residual not added": (
            "(row.to(tl.float32) + tl.load(other + place, mask=inside, other=0.0).to(tl.float32)).to(row.dtype)",
            "row",
        ),
        "residual of another row": ("tl.load(other + place", "tl.load(other + column"),
        "norm written to the residual": ("tl.store(out + place, (norm", "tl.store(x + place, (norm"),
        "weight forgotten": ("norm.to(row.dtype).to(tl.float32) * scale", "norm.to(row.dtype).to(tl.float32)"),
        "row stride wrong": ("place = token * width + column\n    row", "place = token * (width - 8) + column\n    row"),
    },
    "heads": {
        "halves swapped": ("tl.where(feature < half, -s, s)", "tl.where(feature < half, s, -s)"),
        "neighbours turned": ("tl.where(feature < half, feature + half, feature - half)", "feature ^ 1"),
        "angles of token 0": ("angle = token * ROTARY + feature", "angle = feature"),
        "keys not rotated": ("tl.store(keys + place * DIM + feature, rotated", "tl.store(keys + place * DIM + feature, x"),
        "keys a cell late": (
            "tl.load(cells + token) * KV_HEADS + head - HEADS\n",
            "(tl.load(cells + token) + 1) * KV_HEADS + head - HEADS\n",
        ),
        "values a cell late": (
            "tl.load(cells + token) * KV_HEADS + head - HEADS - KV_HEADS",
            "(tl.load(cells + token) + 1) * KV_HEADS + head - HEADS - KV_HEADS",
        ),
        "values where keys are": ("tl.store(values + place", "tl.store(keys + place"),
        "another head": (
            "tl.store(query + (token * HEADS + head) * DIM",
            "tl.store(query + (token * HEADS + (head + 1) % HEADS) * DIM",
        ),
        "row stride of the queries": (
            "(token * (HEADS + 2 * KV_HEADS) + head) * DIM",
            "(token * (HEADS + KV_HEADS) + head) * DIM",
        ),
        "all features turned": ("turned = feature < ROTARY", "turned = feature < DIM"),
        "partner not normalised": (
            "y = ((y.to(tl.float32) * factor).to(y.dtype).to(tl.float32) * other.to(tl.float32)).to(y.dtype)",
            "y = y",
        ),
        "weights of queries for keys": ("own = tl.load(key_weight + feature", "own = tl.load(query_weight + feature"),
    },
    "silu_mul": {
        "sigmoid": ("wide * tl.sigmoid(wide)", "tl.sigmoid(wide)"),
        "halves swapped": ("both + token * 2 * width + column, mask", "both + token * 2 * width + width + column, mask"),
        "row stride of one half": ("both + token * 2 * width + width + column", "both + token * width + width + column"),
        "not multiplied": ("active.to(tl.float32) * up.to(tl.float32)", "active.to(tl.float32)"),
    },
    "int8_product": {
        "scale of another output": ("tl.load(scales + output", "tl.load(scales + output // 2"),
        "scale forgotten": ("total *= tl.load(scales + output, mask=there, other=0.0)[None, :]", "total *= 1.0"),
        "bias forgotten": ("total += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)[None, :]", "total += 0.0"),
        "last step lost": ("range(0, inputs, BLOCK_K)", "range(0, inputs - BLOCK_K, BLOCK_K)"),
        "unsigned bytes": ("right.to(tl.float32)", "right.to(tl.uint8).to(tl.float32)"),
        "row stride of the weights": (
            "output.to(tl.int64)[None, :] * inputs",
            "output.to(tl.int64)[None, :] * (inputs - 1)",
        ),
        "row stride of the inputs": ("x + token[:, None] * inputs", "x + token[:, None] * (inputs - 1)"),
        "sums of one step": ("total += tl.dot(left.to", "total = tl.dot(left.to"),
    },
}
WEAK = Case(tokens=4, width=COLUMNS + 40, dim=24, rotary=16, normed=True)
"""Sees all of them."""


@pytest.mark.skipif(not INTERPRETED, reason="the checks themselves are checked in the interpreter")
@pytest.mark.parametrize(("kernel", "name"), [(kernel, name) for kernel, mutants in MUTANTS.items() for name in mutants])
def test_a_wrong_kernel_is_caught(kernel: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = MUTANTS[kernel][name]
    wrong_kernels = mutant(kernels, right, wrong, tmp_path)
    monkeypatch.setattr(kernels, kernel, getattr(wrong_kernels, kernel))
    assert OPERATIONS[kernel](WEAK) > 30


@pytest.mark.parametrize("kernel", OPERATIONS)
def test_the_same_case_with_the_right_kernel(kernel: str) -> None:
    for dtype in DTYPES:
        assert OPERATIONS[kernel](replace(WEAK, dtype=dtype)) <= 1


# ── in a model ──────────────────────────────────────────────────────────────────────────────────────────────────────


def runner(architecture: str, attention: str = "pad", **options: Any) -> Runner:
    """One whose static passes are launched one by one, attention by the padded call: the kernel has tests of its own."""
    made = loading.wrap(tiny_model(architecture, **options).to(DEVICE), "tiny", attention, checked=False)
    made.use_static_passes("eager")
    return made


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_fused_layers_are_the_model(architecture: str) -> None:
    """By the check of every load: ragged blocks, a rollback, a draft tree. The parameters keep their values, in one matrix."""
    made = runner(architecture)
    before = {name: value.clone() for name, value in made.hf.state_dict().items()}
    use_fused_layers(made)
    assert made.fused_layers is not None
    assert static_error(made) < 1e-4
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
        for module in (kernels, attention_kernels):
            for name in ("add_norm", "heads", "silu_mul", "attend", "combine"):
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


def captured_pass(made: Runner, counting: Launches) -> None:
    """A token of two rows."""
    made.feed([0, 1], torch.ones(2, 1, dtype=torch.long, device=DEVICE), [1, 1])  # makes the layers of its cache
    passes, bucket = made.static, Bucket(2, 1, 20)
    assert passes is not None
    prepared = passes.prepared(bucket, bucket, made.cache, lambda: passes.forward)
    prepared.block.place(made.plan([0, 1], [1, 1]), made.cache.capacity)
    counting.names.clear()
    with counting:
        passes.run(bucket, prepared)


def prompts_of(counts: list[int]) -> Feed:
    """A pass of the prompts of two rows."""

    def feed(made: Runner, counting: Launches) -> None:
        tokens = torch.ones(2, max(counts), dtype=torch.long, device=DEVICE)
        made.feed([0, 1], tokens[:, :1], [1, 1])
        counting.names.clear()
        with counting:
            made.feed([0, 1], tokens, counts, want_logits=False)

    return feed


def launches_per_layer(
    dtype: torch.dtype, fused: bool, monkeypatch: pytest.MonkeyPatch, feed: Feed = captured_pass
) -> Counter[str]:
    """Of a pass with the attention kernel: those of a model of three layers without those of one of two."""
    found = []
    for layers in (2, 3):
        made = loading.wrap(tiny_model("llama", layers=layers).to(DEVICE, dtype), "tiny", "fused", checked=False)
        made.use_static_passes("eager")
        if fused:
            made.fused_layers = fused_layers_of(made.hf)
        made.reserve(2, 20)
        with monkeypatch.context() as patch, torch.inference_mode():
            counting = Launches(patch)
            feed(made, counting)
        found.append(Counter(counting.names))
    return found[1] - found[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_is_nine_launches(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget. By the modules of the model they are 36, with casts 40 in bfloat16; other versions of Transformers may differ."""
    fused = launches_per_layer(dtype, True, monkeypatch)
    assert fused == {"add_norm": 2, "heads": 1, "attend": 1, "silu_mul": 1, "linear": 4}
    assert launches_per_layer(dtype, False, monkeypatch).total() > 30


@pytest.mark.parametrize(("counts", "more"), [([8, 8], {}), ([8, 3], {"index_select": 2})], ids=["alike", "packed"])
def test_a_layer_of_prompts_is_nine_launches(
    counts: list[int], more: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of different lengths lie side by side, without padding, but for their attention. By modules there are over thirty."""
    fused = launches_per_layer(torch.bfloat16, True, monkeypatch, prompts_of(counts))
    assert fused == Counter({"add_norm": 2, "heads": 1, "attend": 1, "silu_mul": 1, "linear": 4} | more)
    assert launches_per_layer(torch.bfloat16, False, monkeypatch, prompts_of(counts)).total() > 30


def keys_and_values(made: Runner, fused: bool, feed: Callable[[Runner], None]) -> list[Tensor]:
    """What the cells of a cache hold after passes of prompts, the fused ones or those of the modules."""
    runner_ = made.fork()
    layers, runner_.fused_layers = runner_.fused_layers, runner_.fused_layers if fused else None
    try:
        with torch.inference_mode():
            feed(runner_)
    finally:
        runner_.fused_layers = layers
    return [tensor for stores in runner_.cache.stores() for tensor in stores]


def several(made: Runner) -> None:
    """Prompts in slots that are not side by side, one in two chunks, beside one in the shared store that a row goes on from."""
    tokens = torch.arange(40, device=DEVICE).view(2, 20) * 7 % made.vocab_size
    prefix = Prefix(3, 9)
    made.reserve(4, 40, 16)
    made.feed_prefix(prefix, 0, tokens[:1, :5])
    made.feed_prefix(prefix, 5, tokens[:1, 5:9])
    feed_prompts(made, [(2, tokens[0].tolist()), (0, tokens[1, :7].tolist())])
    feed_prompts(made, [(0, tokens[1, 7:19].tolist()), (1, tokens[0, 3:5].tolist())])
    made.cache.enter(3, prefix)
    feed_prompts(made, [(3, tokens[0, 9:14].tolist())])


@pytest.mark.parametrize("attention", ["pad", "fused"])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3"])
def test_prompts_by_fused_layers_leave_the_keys_of_the_model(architecture: str, attention: str) -> None:
    made = runner(architecture, attention)
    made.fused_layers = fused_layers_of(made.hf)
    assert made.fused_layers is not None
    found, right = (keys_and_values(made, fused, several) for fused in (True, False))
    for ours, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        assert bool((ours != 0).any())


WRONG_PROMPTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "results": ("packed", lambda real: lambda self, attended: real(self, attended).roll(1, 0)),
    "cells": ("cells", lambda real: property(lambda self: real.fget(self) + 1)),
    "queries": ("unpacked", lambda real: lambda self, query: real(self, query.flip(0))),
    "keys": ("rows", lambda real: lambda self, layer: tuple(part.roll(1, 2) for part in real(self, layer))),
}


@pytest.mark.parametrize("name", WRONG_PROMPTS)
def test_wrong_prompts_are_noticed_at_load(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing else than prompts meets these."""
    attribute, wrong = WRONG_PROMPTS[name]
    monkeypatch.setattr(Prompt, attribute, wrong(getattr(Prompt, attribute)))
    made = runner("llama")
    use_fused_layers(made)
    assert made.fused_layers is None
    assert "fused layers differ" in caplog.text


@pytest.mark.parametrize("counts", [[9, 8], [9, 3]], ids=["padded", "packed"])
def test_padding_of_prompts_is_never_seen(counts: list[int]) -> None:
    """Whatever stands in unused columns, and in cells that are not a row's, the tokens that follow get the same logits."""
    made = runner("llama", "fused")
    made.fused_layers = fused_layers_of(made.hf)
    tokens = torch.arange(18, device=DEVICE).view(2, 9) * 5 % made.vocab_size
    found = []
    for junk in (1, 90):
        one = made.fork()
        one.reserve(3, 20)
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
    made = runner("llama", "fused", layers=1, num_attention_heads=2, num_key_value_heads=1)
    assert made.static is not None
    assert made.static.knows_prefixes
    made.fused_layers = fused_layers_of(made.hf)
    assert made.fused_layers is not None
    ids, plain = _reference(made)
    for _ in range(2):  # the first pass of a size returns what the ordinary one has computed
        with torch.inference_mode():
            assert _sharing_error(made, ids, plain) < 1e-4
        made.cache.clear()
    assert made.static.failure is None
    assert made.static.ran.total() == 2


def test_a_wrong_layer_is_noticed_at_load(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from shoal.models.layers import decoder

    monkeypatch.setattr(decoder, "silu_mul", lambda both: silu_mul(both) * 1.05)
    made = runner("llama")
    use_fused_layers(made)
    assert made.fused_layers is None
    assert "its modules compute passes: fused layers differ" in caplog.text


def test_writes_into_parameters_count_and_others_end_static_passes() -> None:
    made = runner("llama")
    use_fused_layers(made)
    layer = made.hf.model.layers[0].mlp
    with torch.no_grad():
        layer.up_proj.weight.mul_(3)
    assert static_error(made) < 1e-4  # the model is compared with itself
    layer.up_proj.weight.data = layer.up_proj.weight.detach().clone()
    assert made.fused_layers is not None
    assert made.fused_layers.stale
    twin = made.fork()
    twin.reserve(2, 20)
    tokens = torch.ones(2, 2, dtype=torch.long, device=DEVICE)
    twin.feed([0, 1], tokens, [2, 2])  # makes the layers of its cache
    with pytest.warns(RuntimeWarning, match="weights of the model were replaced"):
        twin.feed([0, 1], tokens, [2, 2])
    assert twin.static is not None
    assert "replaced" in str(twin.static.failure)


def test_products_of_many_tokens_are_those_of_few() -> None:
    """The kernel up to its limit, and beyond it the library's product."""
    case = Case(tokens=MOST_TOKENS + 1, width=200)
    x, weight = case.random(case.tokens, case.width), (30 * case.random(40, case.width, salt=1)).to(torch.int8)
    scales = case.random(40, salt=2).abs()
    many = product(x, weight, scales, None)
    for tokens in (1, 17, MOST_TOKENS):
        torch.testing.assert_close(product(x[:tokens].clone(), weight, scales, None), many[:tokens], rtol=1e-4, atol=1e-3)


def test_a_quantised_model_keeps_to_the_model() -> None:
    """Static passes of it too; its layers are no linear layers, so that its modules compute."""
    hf = tiny_model("llama").to(DEVICE)
    ours = _weight_only_int8(hf)
    made = loading.wrap(ours, "tiny", "pad", checked=False)
    made.use_static_passes("eager")
    assert static_error(made) < 1e-4
    use_fused_layers(made)
    assert made.fused_layers is None
    ids = torch.arange(8, device=DEVICE)[None]
    with torch.inference_mode():
        right, found = hf(ids).logits, ours(ids).logits
    assert 0 < float((right - found).std()) < 0.05 * float(right.std())
    assert type(hf.model.layers[0].mlp.up_proj) is nn.Linear  # the owner's model is as it was


@pytest.mark.parametrize("architecture", ["gemma2", "gpt2", "mixtral"])
def test_other_models_keep_their_modules(architecture: str) -> None:
    assert fused_layers_of(tiny_model(architecture).to(DEVICE)) is None
