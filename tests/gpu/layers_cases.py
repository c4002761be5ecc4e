"""What the kernels of a decoder layer must do, on the device at hand: a CUDA GPU, or the CPU through Triton's interpreter.

Not collected by itself: `test_layers.py` runs this file in a process of its own, as `test_fused.py` does with `fused_cases.py`.

Tests of: models.layers, models.layers.layer_kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from layer_shapes import DEVICE, INTERPRETED, MANY_PROCESSORS, Case, normed, processors
from mutants import mutant, wrong_ones
from shoal.models import layers
from shoal.models.layers import (
    COLUMNS,
    FEW,
    MOST_TOKENS,
    SHARE,
    TOKENS,
    Sums,
    WeightOnly8Bit,
    add_norm,
    begin,
    heads,
    layer_kernels,
    product,
    product_or_sums,
    silu_mul,
)

if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("neither a CUDA device nor TRITON_INTERPRET=1", allow_module_level=True)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAN = float("nan")


def error(found: Tensor, truth: Tensor) -> float:
    """In units of what rounding may do: half a dozen roundings of the largest number. Infinite for NaN."""
    assert found.shape == truth.shape
    eps = torch.finfo(found.dtype).eps if found.dtype != torch.float32 else 4 * torch.finfo(torch.float32).eps
    worst = (found.double() - truth).abs().max() / (4 * eps * truth.abs().max().clamp(min=1))
    return float(worst.nan_to_num(torch.inf))


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


def of_begin(case: Case) -> float:
    """Tokens of two rows that are part of longer ones; positions as far on as the longest contexts."""
    vocabulary, columns, scaling = 50, case.tokens, 1.5
    table, norm = case.random(vocabulary, case.width, salt=1), case.norm(case.width, 2)
    generator = torch.Generator().manual_seed(case.seed)
    tokens = torch.randint(vocabulary, (2, columns + 3), generator=generator)[:, :columns].to(DEVICE)
    positions = torch.randint(1 << 17, (2, columns), generator=generator).to(DEVICE)
    frequencies = (0.7 ** torch.arange(case.rotary // 2)).to(DEVICE)
    x, out, (cos, sin) = begin(tokens, positions, table, (frequencies, scaling), norm)
    rows = table.double()[tokens.flatten()]
    angle = (positions.flatten()[:, None].float() * frequencies).double()  # rounded, as in the model's module
    angle = torch.cat([angle, angle], dim=1)
    worst = max(error(x, rows), error(out, normed(rows, norm)))
    return max(worst, error(cos, angle.cos() * scaling), error(sin, angle.sin() * scaling))


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


def of_eight_bit_product(case: Case) -> float:
    """With a bias where heads are normalised, without it elsewhere; also of more tokens than a program has, and in fp8."""
    worst = max(_eight_bit_product(case), _eight_bit_product(replace(case, tokens=TOKENS + case.tokens)))
    return worst if worst > 1 else max(worst, _eight_bit_product(case, torch.float8_e4m3fn))


def _eight_bit_product(case: Case, form: torch.dtype = torch.int8) -> float:
    outputs = 40
    x, wide = case.random(case.tokens, case.width, salt=1), case.random(outputs, case.width, salt=2)
    layer = nn.Linear(case.width, outputs, bias=case.normed, device=DEVICE, dtype=case.dtype)
    with torch.no_grad():
        layer.weight.copy_(wide * torch.arange(1, outputs + 1, device=DEVICE, dtype=case.dtype)[:, None] / outputs)
    made = WeightOnly8Bit(layer, form)
    assert made.weight.dtype == form
    exact = x.double() @ (made.weight.detach().double() * made.scales.detach().double()[:, None]).t()
    with torch.no_grad():
        found = made(x[None])[0]
    return error(found, exact if layer.bias is None else exact + layer.bias.detach().double())


def of_sums(case: Case) -> float:
    """Products whose inputs have several programs, joined by a kernel of their own or with the residual sum of the next norm."""
    outputs = 40
    case = replace(case, width=2 * SHARE + case.width)
    wide, x = case.random(outputs, case.width, salt=2), case.random(case.tokens, case.width, salt=1)
    layer = nn.Linear(case.width, outputs, bias=case.normed, device=DEVICE, dtype=case.dtype)
    with torch.no_grad():
        layer.weight.copy_(wide)
        made = WeightOnly8Bit(layer)
        exact = x.double() @ (made.weight.double() * made.scales.double()[:, None]).t()
        exact += 0 if layer.bias is None else layer.bias.double()
        arguments = x, made.weight, made.scales, layer.bias
        with processors(MANY_PROCESSORS):
            sums = product_or_sums(*arguments)
            assert isinstance(sums, Sums)
            assert len(sums.parts) > 1
            worst = error(product(*arguments), exact)
        rest, norm = case.random(case.tokens, outputs, salt=3), case.norm(outputs, 4)
        kept = rest.clone()
        found = add_norm(kept, sums, norm)
        total = rest.double() + exact
        return max(worst, error(kept, total), error(found, normed(total, norm)))


# ── the kernels are the definitions ─────────────────────────────────────────────────────────────────────────────────

OPERATIONS: dict[str, Callable[[Case], float]] = {
    "begin": of_begin,
    "add_norm": of_add_norm,
    "heads": of_heads,
    "silu_mul": of_silu_mul,
    "eight_bit_product": of_eight_bit_product,
    "sums by share": of_sums,
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


REAL = {
    "Llama-2 7B": Case(width=4096, heads=32, kv_heads=32, dim=128, rotary=128),
    "Llama-2 13B": Case(width=5120, heads=40, kv_heads=40, dim=128, rotary=128),
    "Llama-3 70B": Case(width=8192, heads=64, kv_heads=8, dim=128, rotary=128),
    "Qwen3 8B": Case(width=4096, heads=32, kv_heads=8, dim=128, rotary=128, normed=True),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("model", REAL)
def test_layers_of_real_models(model: str, name: str) -> None:
    """At the widths and heads of the layers that users compute; eight rows that verify six drafts on a card."""
    assert OPERATIONS[name](replace(REAL[model], tokens=2 if INTERPRETED else 56, dtype=torch.bfloat16)) <= 1


# ── negative controls: kernels with one thing wrong, none of which leaves its tensors ───────────────────────────────

MUTANTS = {name: wrong_ones(f"Triton: {name}") for name in OPERATIONS}
WEAK = Case(tokens=4, width=COLUMNS + 40, dim=24, rotary=16, normed=True)
"""Sees all of them."""


@pytest.mark.skipif(not INTERPRETED, reason="the checks themselves are checked in the interpreter")
@pytest.mark.parametrize(("kernel", "name"), [(kernel, name) for kernel, mutants in MUTANTS.items() for name in mutants])
def test_a_wrong_kernel_is_caught(kernel: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = MUTANTS[kernel][name]
    wrong_kernels = mutant(layer_kernels, right, wrong, tmp_path)
    for other in ("eight_bit_product", "join", "add_norm") if kernel == "sums by share" else (kernel,):
        monkeypatch.setattr(layer_kernels, other, getattr(wrong_kernels, other))
    assert OPERATIONS[kernel](WEAK) > 30


@pytest.mark.parametrize("kernel", OPERATIONS)
def test_the_same_case_with_the_right_kernel(kernel: str) -> None:
    for dtype in DTYPES:
        assert OPERATIONS[kernel](replace(WEAK, dtype=dtype)) <= 1


# ── a token's product is the same in all batches ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("inputs", "outputs", "dtype"),
    [
        (3 * SHARE + 24, 40, torch.bfloat16), (2 * SHARE, 96, torch.bfloat16), (2 * SHARE, 40, torch.float16),
        (SHARE, 40, torch.bfloat16),
    ],
)  # fmt: skip
def test_a_product_does_not_depend_on_the_number_of_tokens(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    """Bit for bit: with programs for shares of the inputs or one for all, by a kernel of their own or within the next norm.

    The numbers of a step are integers of one scale, so that its sum is exact. Those of the first step are large, and a late one
    takes them away again: the order in which steps are added decides which bits of the others are left."""
    case, size = Case(tokens=MOST_TOKENS, dtype=dtype), layers.NARROW.inputs
    x = case.random(MOST_TOKENS, inputs, scale=16.0).round() / 1024
    late = slice((inputs // size - 1) * size, inputs // size * size)
    x[:, :size] *= 1 << 18
    x[:, late] = -x[:, :size]
    layer = nn.Linear(inputs, outputs, device=DEVICE, dtype=dtype)
    with torch.no_grad():
        layer.weight[:, late] = layer.weight[:, :size]
    made, norm = WeightOnly8Bit(layer), case.norm(outputs, 1)
    rest = case.random(MOST_TOKENS, outputs, salt=2)
    with torch.no_grad():
        weights = made.weight, made.scales, made.bias
        with processors(1):
            right = product(x, *weights)
        right_norm = add_norm(rest.clone(), right, norm)
        for tokens in (1, FEW, FEW + 1, TOKENS, TOKENS + 1, MOST_TOKENS):
            for count in (1, MANY_PROCESSORS):
                with processors(count):
                    few = x[-tokens:]
                    assert torch.equal(product(few, *weights), right[-tokens:]), (tokens, count)
                    found = add_norm(rest[-tokens:].clone(), product_or_sums(few, *weights), norm)
                    assert torch.equal(found, right_norm[-tokens:]), (tokens, count)
