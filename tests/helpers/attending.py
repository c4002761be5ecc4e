"""Models and prompts for methods of attention, with the exact results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shoal.models.attention import AttentionInputs, Masks
from shoal.models.cache import Plan
from shoal.models.cache.pass_plan import PACK_FROM, Parents
from shoal.types.requests import Prefix

CPU = torch.device("cpu")
PROMPTS = [Prefix(2, 7), Prefix(9, 1), Prefix(12, 18)]
CELLS = 31


def build(
    starts: list[int], counts: list[int], dtype: torch.dtype = torch.float64, *, kv_heads: int = 2, group: int = 2, dim: int = 8,
    value_dim: int = 8, window: int | None = None, softcap: float | None = None, sinks: bool = False, seed: int = 0,
    prefixes: Sequence[Prefix | None] | None = None, packed: bool = False, parents: Parents | None = None,
) -> AttentionInputs:  # fmt: skip
    """Random inputs; scores of a few units, so that softmax is neither flat nor one-hot."""
    plan = Plan(
        range(len(starts)), starts, counts, CPU, prefixes=prefixes, pack_from=PACK_FROM if packed else None, parents=parents
    )
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    query = random(plan.rows, kv_heads * group, plan.q, dim)
    key, value = random(plan.rows, kv_heads, plan.kv, dim), random(plan.rows, kv_heads, plan.kv, value_dim)
    sink = random(kv_heads * group) if sinks else None
    shared = (random(CELLS, kv_heads, dim), random(CELLS, kv_heads, value_dim)) if plan.shares else (None, None)
    return AttentionInputs(query, key, value, Masks(plan), 1.3 * dim**-0.5, window, softcap, sink, *shared)


def exact(inputs: AttentionInputs) -> AttentionInputs:
    """The same inputs in float64."""
    tensors = {name: getattr(inputs, name) for name in ("query", "key", "value", "sinks", "shared_key", "shared_value")}
    return replace(inputs, **{name: t.double() for name, t in tensors.items() if t is not None})


def one_by_one(inputs: AttentionInputs) -> Tensor:
    """Softmax over exactly the keys that each query sees, one query of one head at a time, in the dtype of the inputs."""
    plan = inputs.plan
    out = inputs.query.new_zeros(plan.rows, plan.q, inputs.query.shape[1], inputs.value.shape[-1])
    for b, (start, count) in enumerate(zip(plan.starts, plan.counts, strict=True)):
        whole = row_of(inputs, b)
        for i in range(count):
            end = start + i + 1
            first = 0 if inputs.window is None else max(0, end - inputs.window)
            for h in range(inputs.query.shape[1]):
                keys, values = (t[h // inputs.group, first:end] for t in whole)
                out[b, i, h] = softmax_mix(inputs, keys @ inputs.query[b, h, i] * inputs.scale, h, values)
    return out


def row_of(inputs: AttentionInputs, b: int) -> tuple[Tensor, Tensor]:
    """All keys and values of a row, [kv heads, length, dim]: its prompt's, then its own."""
    prefix = inputs.plan.prefixes[b]
    if prefix is None:
        return inputs.key[b], inputs.value[b]
    assert inputs.shared_key is not None
    assert inputs.shared_value is not None
    pairs = (inputs.shared_key, inputs.key), (inputs.shared_value, inputs.value)
    cells = slice(prefix.base, prefix.base + prefix.length)
    key, value = (torch.cat([shared[cells].transpose(0, 1), own[b]], dim=1) for shared, own in pairs)
    return key, value


def softmax_mix(inputs: AttentionInputs, scores: Tensor, head: int, values: Tensor) -> Tensor:
    if inputs.softcap is not None:
        scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
    weights = scores.exp()
    sink = 0.0 if inputs.sinks is None else inputs.sinks[head].exp()
    return (weights @ values) / (weights.sum() + sink)


def used(inputs: AttentionInputs, out: Tensor) -> Tensor:
    """The outputs that mean something, [tokens, heads, value dim]."""
    return torch.cat([out[b, :count] for b, count in enumerate(inputs.plan.counts)])
