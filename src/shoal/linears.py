"""How fast this CPU multiplies a few tokens by a weight matrix, measured: which number format, which order in memory.

A decoding pass is small products [tokens, in] x [in, out]. Libraries keep weights as [out, in] and repack them in every product of
more than about ten tokens, which costs more than the product (MKL, float32). Kept input-major they need no repacking: the same
numbers under the same shape, only the strides change. Nothing is decided by a CPU's name; a few milliseconds per shape tell.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

TOKENS = (1, 8, 16, 56)
"""Tokens of the passes that are timed: plain decoding of a row and of eight, verifying a few rows and eight."""
WIDEST = 2048
"""Larger matrices are judged by their corner."""
GAIN = 1.1
"""A choice that is not the usual one must be that many times faster ..."""
CLEARLY = 1.3
"""... and bfloat16, which costs exactness, that many times, in `TAKES` measurements out of as many."""
TAKES = 3

Shape = tuple[int, int]
"""Features in, features out."""


@lru_cache(maxsize=256)
def seconds(shape: Shape, tokens: int, dtype: torch.dtype, input_major: bool = False, take: int = 0) -> float:
    """Best time of F.linear on [tokens, in] with a weight of that shape, format and order in memory; each take anew."""
    features_in, features_out = (min(size, WIDEST) for size in shape)
    weight = torch.ones(features_out, features_in, dtype=dtype)
    if input_major:
        weight = transposed(weight)
    x = torch.ones(tokens, features_in, dtype=dtype)
    return best(lambda: linear(x, weight))


def best(work: Any, budget: float = 0.004) -> float:
    """Least seconds of `work()` over runs that take about `budget` seconds together, at least three."""
    least, runs, ends = float("inf"), 0, time.perf_counter() + budget
    while runs < 3 or time.perf_counter() < ends:
        started = time.perf_counter()
        work()
        least, runs = min(least, time.perf_counter() - started), runs + 1
    return least


def transposed(weight: Tensor) -> Tensor:
    """The same matrix [out, in], laid out in memory as [in, out]."""
    return weight.t().contiguous().t()


def _total(shapes: Iterable[Shape], dtype: torch.dtype, input_major: bool = False, take: int = 0) -> float:
    return sum(seconds(shape, tokens, dtype, input_major, take) for shape in shapes for tokens in TOKENS)


@torch.inference_mode()
def number_format(config: Any) -> tuple[torch.dtype, str]:
    """float32, or bfloat16 where this CPU is clearly faster with it, for a model with this Transformers config; and why."""
    hidden, vocabulary = config.hidden_size, config.vocab_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    shapes = [(hidden, hidden), (hidden, inner), (inner, hidden), (hidden, vocabulary)]
    for take in range(TAKES):
        single = min(_total(shapes, torch.float32, order, take) for order in (False, True))
        half = _total(shapes, torch.bfloat16, take=take)
        dtype = torch.bfloat16 if half * CLEARLY < single else torch.float32
        if dtype == torch.float32:
            break
    took = f"its linear layers take {1000 * single:.2f} ms in float32, {1000 * half:.2f} ms in bfloat16"
    return dtype, f"{str(dtype).removeprefix('torch.')}: {took}"


@torch.no_grad()
def lay_out(hf: nn.Module) -> str:
    """Keeps the weights of a model's linear layers input-major if its passes are faster so; returns what was done.

    All or none, so that one disturbed measurement decides little. Changes strides only, of a model that is ours: shapes,
    values and names stay, tied weights stay tied. (Transformers' own `save_pretrained` wants tied weights back in the usual order.)
    """
    layers = [layer for layer in hf.modules() if type(layer) is nn.Linear and layer.weight.device.type == "cpu"]
    weights = {id(layer.weight): layer.weight for layer in layers if layer.weight.is_floating_point()}.values()
    kinds = {((weight.shape[1], weight.shape[0]), weight.dtype) for weight in weights}
    usual, swapped = (1000 * sum(_total([shape], dtype, order) for shape, dtype in kinds) for order in (False, True))
    pays = swapped * GAIN < usual
    if pays:
        for weight in weights:
            weight.data = transposed(weight.data)
    order = "input-major" if pays else "as they are"
    return f"{order}: a product of each shape takes {usual:.2f} ms as they are, {swapped:.2f} ms input-major"
