"""8-bit copies: the owner's model untouched, rows independent, the law kept whatever the drafter's precision."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.config import Limits, Sampling
from shoal.engine.engine import Engine
from shoal.errors import RequestError
from shoal.lookahead.controller import by_name
from shoal.models.formats import cpu as formats_of_this_cpu
from shoal.models.loading import wrap
from shoal.models.quantize import Int8Linear, parse, quantized
from shoal.testing import VOCABULARY, save_pair, tiny_model
from shoal.testing.engines import engine_of
from shoal.types.requests import Request, Row

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
    # Each of 96 products is off by at most half a step of either factor.
    weight, steps = layer.weight.float(), x.float().abs().amax(-1, keepdim=True) / 127
    bound = steps / 2 * weight.abs().sum(1) + weight.abs().amax(1) / 254 * x.float().abs().sum(-1, keepdim=True) * (
        1 + 1 / 127
    )
    slack = 0 if dtype == torch.float32 else 0.02 * float(exact.float().abs().max())
    assert bool(((found - exact).float().abs() <= bound + slack + 1e-6).all())
    assert float((found - exact).float().abs().max()) > 0  # it did round


BYTES = torch.int8 in formats_of_this_cpu().packs
"""Whether oneDNN multiplies bytes here by instructions that keep the sums exact."""
PACKINGS = [False, pytest.param(True, marks=pytest.mark.skipif(not BYTES, reason="needs AVX512-VNNI, AVX-VNNI or AMX"))]


@pytest.mark.parametrize("pack", PACKINGS)
def test_rows_do_not_influence_each_other(pack: bool) -> None:
    torch.manual_seed(0)
    layer = Int8Linear(nn.Linear(64, 48), pack)
    x = torch.randn(40, 64) * torch.logspace(-3, 3, 40)[:, None]  # one scale for all would leave nothing of the small rows
    together = layer(x)
    for row in range(40):
        assert torch.equal(layer(x[row : row + 1])[0], together[row])
    assert torch.equal(layer(torch.zeros(2, 64)), layer.bias.expand(2, -1))


@pytest.mark.skipif(not BYTES, reason="needs AVX512-VNNI, AVX-VNNI or AMX")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_packed_bytes_give_the_same_bits(dtype: torch.dtype) -> None:
    for width, out, bias in ((96, 40, True), (1024, 257, False), (33, 5, True)):
        linear = nn.Linear(width, out, bias=bias).to(dtype)
        plain, packed = Int8Linear(linear), Int8Linear(linear, pack=True)
        assert torch.equal(packed.weight, plain.weight)
        for tokens in (0, 1, 8, 40):
            x = (100 * torch.randn(tokens, width)).to(dtype)
            assert torch.equal(packed(x), plain(x))


@pytest.mark.skipif(not BYTES, reason="needs AVX512-VNNI, AVX-VNNI or AMX")
@torch.no_grad()
def test_a_matrix_of_bytes_computes_as_its_layer() -> None:
    layer = Int8Linear(nn.Linear(64, 48), pack=True)
    matrix, x, other = layer.weight.matrix, torch.randn(3, 64), torch.randn(3, 48)  # type: ignore[attr-defined]
    y = layer(x)
    assert torch.equal(matrix.linear(x, "silu"), nn.functional.silu(y))
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


# ── decoding ────────────────────────────────────────────────────────────────────────────────────────────────────────


@cache
def pair() -> tuple[Any, Any]:
    """A target, and the same with a little noise on its head."""
    target = tiny_model("llama", seed=3)
    drafter = copy.deepcopy(target)
    head = drafter.get_output_embeddings().weight.data
    head.add_(0.05 * float(head.std()) * torch.randn(head.shape, generator=torch.Generator().manual_seed(7)))
    return target, drafter


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
