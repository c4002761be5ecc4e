"""Number format and weight order: chosen by measurement only, and without changing a number."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shoal import linears
from shoal.linears import number_format
from shoal.models import wrap
from shoal.testing import tiny_model

LINEARS = 2 * 7 + 1
"""Of a tiny Llama: seven per layer, and the head."""


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[torch.dtype, bool], float]:
    """Seconds that every product shall seem to take, by dtype and order."""
    table = {(torch.float32, False): 1.0, (torch.float32, True): 1.0, (torch.bfloat16, False): 1.0}
    monkeypatch.setattr(linears, "seconds", lambda shape, tokens, dtype, input_major, take: table[dtype, input_major])
    return table


def config(**options: Any) -> Any:
    return SimpleNamespace(hidden_size=32, vocab_size=260, **options)


@pytest.mark.parametrize(
    ("single", "swapped", "half", "chosen"),
    [
        (1.0, 1.0, 0.5, torch.bfloat16),
        (1.0, 1.0, 0.8, torch.float32),  # not clearly faster: exactness decides
        (1.0, 0.5, 0.6, torch.float32),  # against the best that float32 can do
        (1.0, 1.0, 6.0, torch.float32),
    ],
)
def test_the_number_format_is_the_measured_one(
    times: dict[Any, float], single: float, swapped: float, half: float, chosen: torch.dtype
) -> None:
    times[torch.float32, False], times[torch.float32, True], times[torch.bfloat16, False] = single, swapped, half
    dtype, why = number_format(config(intermediate_size=48))
    assert dtype == chosen
    products = 4 * len(linears.TOKENS)
    assert why.startswith(str(chosen).removeprefix("torch."))
    assert f"{1000 * products * min(single, swapped):.2f} ms in float32, {1000 * products * half:.2f} ms in bfloat16" in why


def test_a_config_without_an_inner_size_will_do(times: dict[Any, float]) -> None:
    assert number_format(config())[0] == torch.float32


def test_one_disturbed_measurement_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour that holds up the first take of float32 does not make it bfloat16."""
    takes: list[int] = []

    def seconds(shape: Any, tokens: int, dtype: torch.dtype, input_major: bool, take: int) -> float:
        takes.append(take)
        return 100.0 if dtype == torch.float32 and take == 0 else 1.0

    monkeypatch.setattr(linears, "seconds", seconds)
    assert number_format(config())[0] == torch.float32
    assert set(takes) == {0, 1}


@pytest.mark.parametrize(("swapped", "moved"), [(0.5, LINEARS), (0.95, 0), (2.0, 0)])
def test_weights_move_only_where_it_pays(times: dict[Any, float], swapped: float, moved: int) -> None:
    hf = tiny_model("llama")
    before = {name: weight.clone() for name, weight in hf.named_parameters()}
    times[torch.float32, True] = swapped
    order, _, why = linears.lay_out(hf).partition(": ")
    assert order == ("input-major" if moved else "as they are")
    products = (
        1000 * len(linears.TOKENS) * len({layer.weight.shape for layer in hf.modules() if isinstance(layer, nn.Linear)})
    )
    assert why == f"a product of each shape takes {products:.2f} ms as they are, {products * swapped:.2f} ms input-major"
    layers = [layer for layer in hf.modules() if isinstance(layer, nn.Linear)]
    assert sum(layer.weight.t().is_contiguous() for layer in layers) == moved
    assert all(torch.equal(weight, before[name]) for name, weight in hf.named_parameters())
    assert hf.model.embed_tokens.weight.is_contiguous()


def test_tied_weights_stay_tied_and_the_model_says_the_same(times: dict[Any, float]) -> None:
    hf = tiny_model("llama", tie_word_embeddings=True)
    ids = torch.arange(24).view(2, 12)
    with torch.inference_mode():
        expected = hf(ids).logits
        times[torch.float32, True] = 0.1
        linears.lay_out(hf)
        assert hf.lm_head.weight is hf.model.embed_tokens.weight
        assert hf.lm_head.weight.t().is_contiguous()
        torch.testing.assert_close(hf(ids).logits, expected, rtol=0, atol=1e-4)
    assert wrap(hf, "tiny").self_check_error is not None


def test_products_are_timed_once_per_process() -> None:
    linears.seconds.cache_clear()
    first = linears.seconds((32, 48), 8, torch.float32)
    assert first > 0
    assert linears.seconds((32, 48), 8, torch.float32) == first
    assert linears.seconds.cache_info().misses == 1
    linears.seconds((1 << 20, 16), 1, torch.float32)  # judged by its corner: a whole one would take gigabytes
    assert linears.seconds.cache_info().misses == 2
