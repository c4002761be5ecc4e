"""8-bit copies: the owner's model untouched, rows independent, the law kept whatever the drafter's precision.

Tests of: models.weights.panels, models.quantize, models.formats, native.build.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import shoal
from mutants import wrong_ones
from native_kernels import needs_compiler
from noisy_heads import noisy
from shoal.config import Limits, Sampling
from shoal.engine.engine import Engine
from shoal.errors import RequestError
from shoal.lookahead.controller import by_name
from shoal.models.loading import wrap
from shoal.models.quantize import Int8Linear, byte_matrix_of, parse, quantized
from shoal.models.weights import panels
from shoal.models.weights.panels import Int8Matrix, Int8PanelMatrix
from shoal.testing import VOCABULARY, save_pair, tiny_model
from shoal.testing.drafters import engine_of
from shoal.types.requests import Request, Row
from wrong_kernels import wrong_kernels

NEW = 20
LINEARS = 2 * 7 + 1


def layers(hf: Any, kind: type[nn.Module]) -> list[Any]:
    return [module for module in hf.modules() if type(module) is kind]


# ── what may be asked ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("asked", "target", "draft"),
    [
        ("off", "off", "off"),
        ("target=int8", "int8", "off"),
        ("target=int8, draft=off", "int8", "off"),
        ({"draft": "int8"}, "off", "int8"),
    ],
)
def test_formats_by_role(asked: Any, target: str, draft: str) -> None:
    assert parse(asked) == {"target": target, "draft": draft}


@pytest.mark.parametrize(
    "asked", ["int8", "auto", "target=auto", "draft=auto", "drafter=int8", "target=int4", {"draft": "q4"}, "target"]
)
def test_nonsense_is_refused_before_anything_is_loaded(asked: Any) -> None:
    with pytest.raises(RequestError, match="quantize must be"):
        shoal.load(quantize=asked)


def test_fp8_is_refused_on_a_cpu() -> None:
    with pytest.raises(RequestError, match=r"fp8 needs a CUDA device.*int8"):
        quantized(tiny_model("llama"), "fp8")


# ── the copy ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_owners_model_stays_as_it_is() -> None:
    hf = tiny_model("llama", tie_word_embeddings=True)
    before = {name: weight.clone() for name, weight in hf.state_dict().items()}
    ours, how = quantized(hf, "int8")
    assert how == "int8"
    assert (len(layers(ours, Int8Linear)), len(layers(ours, nn.Linear))) == (LINEARS, 0)
    assert (len(layers(hf, Int8Linear)), len(layers(hf, nn.Linear))) == (0, LINEARS)
    assert hf.state_dict().keys() == before.keys()
    assert all(torch.equal(weight, before[name]) for name, weight in hf.state_dict().items())
    assert ours.model.embed_tokens.weight is hf.model.embed_tokens.weight  # what is not quantised is shared
    assert ours.config is not hf.config
    assert wrap(ours, "tiny").parameter_bytes < wrap(hf, "tiny").parameter_bytes


def test_off_is_the_model_itself() -> None:
    hf = tiny_model("llama")
    assert quantized(hf, "off") == (hf, "off")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_a_layer_is_close_to_the_one_it_replaces(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(96, 40, bias=bias).to(dtype)
    x = torch.randn(3, 5, 96).to(dtype)
    found, exact = Int8Linear(layer)(x), layer(x)
    assert (found.shape, found.dtype) == (exact.shape, dtype)
    # Each of 96 products is off by at most half a step of its weight.
    bound = layer.weight.float().abs().amax(1) / 254 * x.float().abs().sum(-1, keepdim=True)
    slack = 0 if dtype == torch.float32 else 0.02 * float(exact.float().abs().max())
    assert bool(((found - exact).float().abs() <= bound + slack + 1e-6).all())
    assert float((found - exact).float().abs().max()) > 0  # it did round


PACKINGS = [pytest.param(Int8PanelMatrix, marks=needs_compiler)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@needs_compiler
@torch.no_grad()
def test_rows_do_not_influence_each_other(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for width, out in ((64, 48), (577, 33)):
        layer = Int8Linear(nn.Linear(width, out).to(dtype), Int8PanelMatrix)
        x = (torch.randn(40, width) * torch.logspace(-3, 3, 40)[:, None]).to(dtype)
        alone = torch.cat([layer(x[row : row + 1]) for row in range(40)])
        for tokens in (2, 5, 8, 9, 16, 17, 40):
            assert torch.equal(layer(x[:tokens]), alone[:tokens])
        assert torch.equal(layer(torch.zeros(2, width, dtype=dtype)), layer.bias.expand(2, -1))


def is_near(packing: type[Int8Matrix], dtype: torch.dtype) -> bool:
    """Whether packed layers compute what the definition says, in float64, up to rounding. Some inputs are infinite, or NaN."""
    torch.manual_seed(0)
    for width, out, bias in ((96, 40, True), (1024, 257, False), (33, 5, True)):
        linear = nn.Linear(width, out, bias=bias).to(dtype)
        packed = Int8Linear(linear, packing)
        weight = packed.weight.double() * packed.scales.double()[:, None]
        assert torch.equal(packed.weight, Int8Linear(linear).weight)
        for tokens in (0, 1, 3, 8, 40):
            x = (100 * torch.randn(tokens, width) * torch.logspace(-2, 2, tokens)[:, None]).to(dtype)
            own = linear.bias.double() if bias else torch.zeros(out)
            right, size = x.double() @ weight.t() + own, x.double().abs() @ weight.abs().t() + own.abs()
            found = packed(x)
            if bool(((found - right).abs() > 4 * torch.finfo(dtype).eps * size).any()):
                return False
            if tokens == 8:
                x[3, 4], x[4, 5] = torch.inf, torch.nan
                strange = packed(x)
                sound = [row for row in range(8) if row not in (3, 4)]
                if (
                    strange[3].isfinite().any()
                    or not strange[4].isnan().all()
                    or not torch.equal(strange[sound], found[sound])
                ):
                    return False
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@needs_compiler
@torch.no_grad()
def test_packed_bytes_compute_what_their_layer_says(dtype: torch.dtype) -> None:
    assert is_near(Int8PanelMatrix, dtype)


WRONG_BYTES = wrong_ones("bytes")


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", WRONG_BYTES)
@torch.no_grad()
def test_wrong_kernels_of_bytes_are_caught(name: str) -> None:
    made = wrong_kernels(WRONG_BYTES[name])
    with patch.object(panels, "library", lambda: made):
        assert not is_near(Int8PanelMatrix, torch.float32)


@needs_compiler
@torch.no_grad()
def test_bytes_and_activations_of_other_formats() -> None:
    layer, x = nn.Linear(96, 40), 10 * torch.randn(3, 96)
    for dtype in (torch.float16, torch.float64):
        other = copy.deepcopy(layer).to(dtype)
        plain, packed = Int8Linear(other)(x.to(dtype)), Int8Linear(other, Int8PanelMatrix)(x.to(dtype))
        assert packed.dtype == dtype
        torch.testing.assert_close(packed, plain, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("packing", PACKINGS)
@torch.no_grad()
def test_a_matrix_of_bytes_computes_as_its_layer(packing: type[Int8Matrix]) -> None:
    layer = Int8Linear(nn.Linear(64, 48), packing)
    matrix, x, other = layer.weight.matrix, torch.randn(3, 64), torch.randn(3, 48)  # type: ignore[attr-defined]
    y = layer(x)
    torch.testing.assert_close(matrix.linear(x, "silu"), nn.functional.silu(y))
    assert torch.equal(matrix.linear_add(x, other), y + other)
    assert torch.equal(matrix.linear_mul(x, other), y * other)
    twin = copy.deepcopy(layer)
    twin.weight.data.zero_()  # type: ignore[operator]
    assert torch.equal(layer(x), y)
    assert torch.equal(twin(x), layer.bias.expand(3, -1))
    other_twin = copy.deepcopy(layer)
    other_twin.scales.mul_(4)  # its own, which its products read
    layer.scales.mul_(2)
    torch.testing.assert_close(other_twin(x) - layer.bias, 4 * (y - layer.bias))
    torch.testing.assert_close(layer(x) - layer.bias, 2 * (y - layer.bias))


@pytest.mark.parametrize("packing", [None, *PACKINGS])
@torch.no_grad()
def test_layers_of_bytes_with_one_input_get_one_matrix(packing: type[Int8Matrix] | None) -> None:
    """Nothing is stored twice, and what they compute stays the same. The owner's biases stay where they are."""
    plain = [nn.Linear(64, out) for out in (32, 16, 5)]
    made, x = [Int8Linear(layer, packing) for layer in plain], torch.randn(3, 64)
    before, kept = [layer(x) for layer in made], [layer.bias.data_ptr() for layer in plain]
    matrix = byte_matrix_of(made)
    assert packing is None or byte_matrix_of(made) is matrix
    assert torch.equal(matrix.linear(x), torch.cat(before, dim=1))
    assert all(map(torch.equal, before, [layer(x) for layer in made]))
    assert [layer.bias.data_ptr() for layer in plain] == kept
    made[1].weight.data.zero_()  # type: ignore[operator]
    made[2].scales.mul_(2)
    assert torch.equal(matrix.linear(x)[:, 32:48], made[1].bias.expand(3, -1))
    torch.testing.assert_close(matrix.linear(x)[:, 48:] - made[2].bias, 2 * (before[2] - made[2].bias))
    with pytest.raises(ValueError, match="same input"):
        byte_matrix_of([Int8Linear(nn.Linear(64, 8), packing), Int8Linear(nn.Linear(64, 8, bias=False), packing)])


# ── decoding ────────────────────────────────────────────────────────────────────────────────────────────────────────


@cache
def pair() -> tuple[Any, Any]:
    """A target, and the same with a little noise on its head."""
    target = tiny_model("llama", seed=3)
    return target, noisy(target, 0.05)


def decode(target: Any, draft: Any, k: int, max_batch: int = 6, **sampling: Any) -> tuple[Engine, list[list[int]]]:
    """New tokens of three ragged prompts, two rows each."""
    engine = engine_of(wrap(target, "target"), wrap(draft, "draft"), by_name(k), max_batch=max_batch)
    rows: list[Row] = []
    for i in range(3):
        prompt = torch.randint(0, VOCABULARY, (3 + 9 * i,), generator=torch.Generator().manual_seed(i)).tolist()
        rows += engine.submit(Request(tuple(prompt), 2, Sampling(seed=i, **sampling), Limits(max_new_tokens=NEW)))
    while engine.step():
        pass
    return engine, [row.tokens[row.prompt_length :] for row in rows]


@pytest.mark.parametrize("k", [1, 4, 6])
def test_an_int8_drafter_costs_no_exactness(k: int) -> None:
    target, drafter = pair()
    plain, expected = decode(target, drafter, 0, temperature=0)
    engine, found = decode(target, quantized(drafter, "int8")[0], k, temperature=0)
    assert found == expected
    assert engine.stats.drafted > 0
    assert 0 < engine.stats.accepted < engine.stats.drafted  # it is right often, not always: both branches ran
    assert engine.stats.target_passes < plain.stats.target_passes


def test_an_int8_copy_of_the_target_drafts_nearly_as_well_as_the_target() -> None:
    target, _ = pair()
    engine, _ = decode(target, quantized(target, "int8")[0], 4, temperature=0)
    assert engine.stats.accepted > 0.6 * engine.stats.drafted


@pytest.mark.parametrize("batch", [1, 6])
def test_an_int8_target_is_decoded_losslessly_with_respect_to_itself(batch: int) -> None:
    target, drafter = pair()
    eight = quantized(target, "int8")[0]
    plain, expected = decode(eight, drafter, 0, temperature=0)
    engine, found = decode(eight, drafter, 4, batch, temperature=0)
    assert found == expected
    assert engine.stats.accepted > 0
    assert engine.stats.row_rounds < plain.stats.row_rounds
    assert found != decode(target, drafter, 0, temperature=0)[1]  # control: it is another model than the float one


def test_load_quantises_by_role(tmp_path: Any) -> None:
    loaded = shoal.load(*save_pair(tmp_path), quantize="target=int8,draft=off")
    assert loaded.draft_model is not None
    assert len(layers(loaded.target.hf, Int8Linear)) == LINEARS
    assert not layers(loaded.draft_model.hf, Int8Linear)
    assert (loaded.target.notes["quantize"], loaded.draft_model.notes["quantize"]) == ("int8", "off")
    result = loaded.generate("ab", 2, temperature=0, max_new_tokens=8, eos=(), lookahead=3)
    assert result.stats.drafted > 0
    assert result.stats.committed == 16
