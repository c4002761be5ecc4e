"""The order of weights: chosen by facts, without changing a number, and what users may do to a model still works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shoal import formats, linears
from shoal.models import wrap
from shoal.testing import tiny_model

LINEARS = 2 * 7 + 1
"""Of a tiny Llama: seven per layer, and the head."""
IDS = torch.arange(24).view(2, 12)


def layers(hf: Any) -> list[nn.Linear]:
    return [layer for layer in hf.modules() if isinstance(layer, nn.Linear)]


def moved(hf: Any) -> int:
    return sum(layer.weight.t().is_contiguous() for layer in layers(hf))


@torch.inference_mode()
def logits(hf: Any) -> torch.Tensor:
    return hf(IDS).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("dtype", "mkl", "expected"),
    [(torch.float32, True, LINEARS), (torch.float32, False, 0), (torch.bfloat16, True, 0), (torch.float64, True, 0)],
)
def test_float32_weights_move_where_mkl_multiplies_them(
    dtype: torch.dtype, mkl: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "cpu", lambda: formats.Cpu(mkl=mkl))
    hf = tiny_model("llama").to(dtype)
    before = {name: weight.clone() for name, weight in hf.named_parameters()}
    assert linears.lay_out(hf) == ("input-major" if expected else "output-major")
    assert moved(hf) == expected
    assert all(torch.equal(weight, before[name]) for name, weight in hf.named_parameters())
    assert hf.model.embed_tokens.weight.is_contiguous()


def test_tied_weights_stay_tied_and_the_model_says_the_same() -> None:
    hf = tiny_model("llama", tie_word_embeddings=True)
    expected = logits(hf)
    linears.lay_out(hf)
    assert hf.lm_head.weight is hf.model.embed_tokens.weight
    assert hf.lm_head.weight.t().is_contiguous()
    torch.testing.assert_close(logits(hf), expected, rtol=0, atol=1e-4)
    assert wrap(hf, "tiny").self_check_error is not None
