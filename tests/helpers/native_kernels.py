"""Definitions of the attention that native kernels compute, and their tolerances."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from attending import exact, row_of, used
from shoal.models.attention import AttentionInputs
from shoal.models.attention.unfused import native
from shoal.native.build import missing
from tree_masks import path_of

NAN, INF = float("nan"), float("inf")
needs_compiler = pytest.mark.skipif(bool(missing()), reason=f"needs compiler: {missing()}")


def tokens_seen(inputs: AttentionInputs, row: int, column: int) -> list[int]:
    """Tokens of the row that a column sees: those before the block and its path, of them as many of the last as the window has."""
    plan = inputs.plan
    path = range(column + 1) if plan.parents is None else path_of(plan.parents[row], column)
    return [*range(plan.starts[row]), *(plan.starts[row] + c for c in path)][-(inputs.window or 0) :]


def definition(inputs: AttentionInputs) -> Tensor:
    """Softmax over exactly the keys that each column sees, in float64; [rows, q, heads, value dim], zero in unused columns."""
    exactly = exact(inputs)
    plan, query = inputs.plan, exactly.query
    out = query.new_zeros(plan.rows, plan.q, query.shape[1], exactly.value.shape[-1])
    for row, count in enumerate(plan.counts):
        keys, values = (t.repeat_interleave(exactly.group, 0) for t in row_of(exactly, row))
        for column in range(count):
            seen = tokens_seen(inputs, row, column)
            scores = (keys[:, seen] @ query[row, :, column, :, None])[..., 0] * inputs.scale
            if inputs.softcap is not None:
                scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
            if exactly.sinks is not None:
                scores = torch.cat([scores, exactly.sinks[:, None]], 1)
            out[row, column] = (scores.softmax(-1)[:, None, : len(seen)] @ values[:, seen])[:, 0]
    return out


def tolerance(inputs: AttentionInputs, truth: Tensor) -> float:
    """What sums in float32 can do, and one rounding of the output.

    A score is off by an eps of the sum of its products' sizes, an exponential by two units in the last place, a sum by an eps for
    each of its terms; an error d of the scores moves the output by at most 2 d max|value|.
    """
    stores = [t for t in (inputs.key, inputs.shared_key) if t is not None], [inputs.value, inputs.shared_value]
    largest = max(float(t.double().abs().sum(-1).amax()) for t in stores[0])
    sizes = float(inputs.query.double().abs().amax()) * largest * inputs.scale
    steps = math.sqrt(max(inputs.plan.lengths) + inputs.query.shape[-1])
    eps, value = torch.finfo(torch.float32).eps, max(float(t.double().abs().max()) for t in stores[1] if t is not None)
    return eps * (4 * sizes + steps + 8) * value + torch.finfo(inputs.query.dtype).eps * float(
        used(inputs, truth).abs().max()
    )


def excess(inputs: AttentionInputs) -> float:
    """The kernel's error in units of the tolerance; infinite if anything is NaN or an unused column is not zero."""
    truth, out = definition(inputs), native(inputs)
    assert (out.shape, out.dtype) == (truth.shape, inputs.query.dtype)
    if any(out[row, count:].any() for row, count in enumerate(inputs.plan.counts)):
        return INF
    return float((out.double() - truth).abs().max().nan_to_num(INF)) / tolerance(inputs, truth)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
