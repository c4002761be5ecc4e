"""The products and small kernels of a pass at the shapes of real models: error against float64, time, share of a copy's bandwidth.

A line is one operation at a number of tokens. Times are of a CUDA graph that launches it over several sets of weights in turn, so
that none is found in the cache of the GPU, divided by their number: the gaps between kernels of a graph are part of it. The error
is ||found - right|| / ||right||, of draws the share of tokens that are others.

Run by benchmarks/gpu/run.sh, or alone: python benchmarks/gpu/products.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from common import arguments, deliver, device_or_exit, microseconds
from shoal.bench.work import ceilings
from shoal.models.attention.fused import available
from shoal.models.layers.gpu_draws import on_device, softmax, softmax_runs
from shoal.sampling import drawing
from shoal.sampling.uniforms import BUCKETS

TOKENS = (8, 56)
"""Plain decoding of eight rows, and verifying six drafts of each."""
PRODUCTS = {
    "cuda": {
        "qkv of 7.8B": (4096, 12288), "out of 7.8B": (4096, 4096), "gate and up of 7.8B": (4096, 27648),
        "down of 7.8B": (13824, 4096), "head of 7.8B": (4096, 51200), "qkv of 310M": (2048, 6144), "out of 310M": (2048, 2048),
        "gate and up of 310M": (2048, 11264), "down of 310M": (5632, 2048), "head of 310M": (2048, 51200),
        "head of Llama 3 8B": (4096, 128256),
    },
    "cpu": {"small": (48, 96)},
}  # fmt: skip
WIDTHS = {"cuda": (4096, 5120, 8192), "cpu": (48,)}
"""Features of a token between the products of 7B, 13B and 70B."""
MLP = {"cuda": 13824, "cpu": 96}
"""Features of a token in the MLP of 7.8B."""
VOCABULARIES = {"cuda": (32000, 51200, 151936), "cpu": (600,)}
CACHE = 256 << 20
"""Bytes of the sets of weights together, several times the cache of a GPU."""
MOST_SETS = {"cuda": 16, "cpu": 2}
LIMIT = 1e-2
"""The largest error that rounding in 16 bit explains; another token among 56 is more."""
Call = Callable[[], Tensor]
Line = dict[str, Any]


class Operation(NamedTuple):
    """An operation over several sets of weights.

    Attributes:
        name: for the table.
        calls: one per set.
        right: what the first should give, in float64, or tokens; None: it has no right value of its own.
        bytes: that one call must move.
    """

    name: str
    calls: Sequence[Call]
    right: Tensor | None
    bytes: float


def sets_of(size: int, device: torch.device) -> int:
    return max(2, min(MOST_SETS[device.type], -(-CACHE // size)))


def products(device: torch.device, dtype: torch.dtype, tokens: int) -> Iterator[Operation]:
    """Matrices in the model's format, and in bytes by the kernel where it runs."""
    for name, (inputs, outputs) in PRODUCTS[device.type].items():
        x = torch.randn(tokens, inputs, device=device, dtype=dtype)
        weights = [
            torch.randn(outputs, inputs, device=device, dtype=dtype) / inputs**0.5
            for _ in range(sets_of(outputs * inputs * dtype.itemsize, device))
        ]
        right = x.double() @ weights[0].double().t()
        moved = (weights[0].numel() + x.numel() + tokens * outputs) * dtype.itemsize
        yield Operation(
            f"{name}, {str(dtype).removeprefix('torch.')}", [partial(F.linear, x, w) for w in weights], right, moved
        )
        if available(x):
            yield from bytes_of(name, x, weights)


def bytes_of(name: str, x: Tensor, weights: Sequence[Tensor]) -> Iterator[Operation]:
    """The product kernel over weights of one byte, and torch's product of fp8 with rounded activations beside it."""
    from shoal.models.layers import product

    scales = torch.full((len(weights[0]),), 1 / 448, device=x.device)
    moved = weights[0].numel() + (x.numel() + len(x) * len(weights[0])) * x.element_size()
    for form in (torch.int8, torch.float8_e4m3fn):
        # twice as many sets, as they are half as large
        small = [(weight.float() * 100).to(form) for weight in weights for _ in range(2)]
        right = x.double() @ (small[0].double() * scales.double()[:, None]).t()
        yield Operation(
            f"{name}, {str(form).removeprefix('torch.')}",
            [partial(product, x, w, scales, None) for w in small],
            right,
            moved,
        )
        if form is torch.float8_e4m3fn and x.is_cuda:
            rounded = partial(_rounded_product, x, scales)
            yield Operation(f"{name}, fp8 by torch", [partial(rounded, w) for w in small], None, moved)


def _rounded_product(x: Tensor, scales: Tensor, weight: Tensor) -> Tensor:
    """torch's product of fp8: the activations are rounded to it, too."""
    one = torch.ones(len(x), 1, device=x.device)
    return torch._scaled_mm(x.to(weight.dtype), weight.t(), scale_a=one, scale_b=scales[None, :], out_dtype=x.dtype)


def small_kernels(device: torch.device, dtype: torch.dtype, tokens: int) -> Iterator[Operation]:
    """What stands between the products of a layer, and the draws of a step."""
    both, sets = torch.randn(tokens, 2 * MLP[device.type], device=device, dtype=dtype), MOST_SETS[device.type]
    if available(both):
        from shoal.models.layers import silu_mul

        for width in WIDTHS[device.type]:
            yield from norms(*torch.randn(2, tokens, width, device=device, dtype=dtype))
        gate, up = both.double().chunk(2, dim=1)
        yield Operation("silu and product", [lambda: silu_mul(both)] * sets, F.silu(gate) * up, 1.5 * both.nbytes)
    for vocabulary in VOCABULARIES[device.type]:
        logits = torch.randn(tokens, vocabulary, device=device, dtype=dtype)
        moved, right = logits.nbytes + 4 * logits.numel(), logits.double().softmax(-1)
        yield Operation(f"softmax of {vocabulary}", [partial(torch.softmax, logits, -1, torch.float32)] * 4, right, moved)
        if softmax_runs(logits):
            yield Operation(f"softmax of {vocabulary}, kernels", [partial(_softmax, logits)] * 4, right, moved)
        weights = logits.float().softmax(-1)
        uniforms = torch.rand(tokens, 1 + BUCKETS, device=device, dtype=torch.float64)
        for draw in (drawing.inverse_transform, drawing.exponential_race):
            yield from draws(draw, weights, uniforms if draw is drawing.exponential_race else uniforms[:, :1].contiguous())


def norms(x: Tensor, other: Tensor) -> Iterator[Operation]:
    """The norm of a layer, alone and after the residual sum."""
    from shoal.models.layers import add_norm
    from shoal.models.lean import Norm

    norm, width, sets = Norm(torch.randn_like(x[0]), 1e-6), x.shape[1], MOST_SETS[x.device.type]

    def right(wide: Tensor) -> Tensor:
        return wide / (wide.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()

    yield Operation(f"norm of {width}", [lambda: add_norm(x, None, norm)] * sets, right(x.double()), 2 * x.nbytes)
    total = right(x.double() + other.double())
    yield Operation(f"norm and sum of {width}", [lambda: add_norm(x.clone(), other, norm)] * sets, total, 6 * x.nbytes)


def _softmax(logits: Tensor) -> Tensor | None:
    """The distribution of a step by the kernels."""
    return softmax(logits, None, logits.shape[1]).probs


def draws(draw: Any, weights: Tensor, uniforms: Tensor) -> Iterator[Operation]:
    """A draw by the operations of torch, and by the kernels where they run."""
    right, name = draw(weights, uniforms), f"{draw.__name__} of {weights.shape[1]}"
    made = on_device(draw, weights)
    if made is not draw:
        yield Operation(f"{name}, kernels", [lambda: made(weights, uniforms)] * 4, right, weights.nbytes)
    yield Operation(f"{name}, torch", [lambda: draw(weights, uniforms)] * 4, right, weights.nbytes)


def error_of(found: Tensor, right: Tensor) -> float:
    """Of tokens the share that are others: their numbers say nothing of how near they are."""
    if not right.is_floating_point():
        return float((found != right).double().mean())
    return float((found.double() - right).norm() / right.norm().clamp(min=1e-12))


def line_of(operation: Operation, device: torch.device, tokens: int, bandwidth: float, repeats: int) -> Line:
    """An operation that fails is told, and does not keep the next from running."""
    line: Line = {"operation": operation.name, "tokens": tokens}
    try:
        found, right = operation.calls[0](), operation.right
        error = None if right is None else error_of(found, right)
        taken = microseconds(operation.calls, device, repeats)
    except Exception as failure:  # a shape that a library refuses
        return {
            **line,
            "microseconds": "-",
            "of bandwidth": "-",
            "error": str(failure).partition("\n")[0][:60],
            "verified": False,
        }
    return {
        **line, "microseconds": taken, "of bandwidth": operation.bytes / (taken / 1e6) / bandwidth,
        "error": "-" if error is None else error, "verified": "-" if error is None else error <= LIMIT,
    }  # fmt: skip


@torch.inference_mode()
def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    device = device_or_exit(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    bandwidth, lines = ceilings(device, dtype).bytes, []
    for tokens in TOKENS:
        for make in (products, small_kernels):
            lines += [
                line_of(operation, device, tokens, bandwidth, options.repeats) for operation in make(device, dtype, tokens)
            ]
    title = f"products and small kernels, {dtype}; a copy moves {bandwidth / 1e9:.0f} GB/s"
    deliver(title, list(lines[0]), lines, device, options.results, "products")
    raise SystemExit(0 if all(line["verified"] in (True, "-") for line in lines) else 1)


if __name__ == "__main__":
    main()
