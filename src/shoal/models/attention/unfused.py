"""The attention methods without Triton: the two of BASS, bifurcated attention, and a kernel in C.

BASS-PAD reads the longest row's keys for all rows in one padded call, and masks the tails of
shorter rows. BASS-SPLIT has a call per row at its exact length: it reads no padding, at the price
of more calls.

Bifurcated attention (Athiwaratkun et al., ICML 2024, arXiv 2403.08845): a prompt's keys and values
are read once per pass, by the queries of all rows of its group together, and never repeated. Each
query attends to its group's prompt and to its own row's tail in two calls. Each result is a mean
over its keys; the two are weighted by their softmax denominators (log-sum-exp). The sum is exact
for any number of queries per row, windows and sinks.

The method "native" is for a CPU: one call of the C kernel computes a whole ragged pass, and reads
every row at its exact length.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from shoal.errors import RequestError
from shoal.models.attention import AttentionInputs, additive
from shoal.models.cache.pass_plan import Plan
from shoal.native import AttentionStruct
from shoal.native.build import SUFFIXES, library, missing
from shoal.types.requests import Prefix

Part = tuple[Tensor, Tensor]
"""The attention to some of the keys, [..., q, value dim], and the logarithm of its denominator.

The logarithm is [..., q], float32 at least.
"""


@dataclass(frozen=True)
class Shared:
    """The part of one prompt that some query of its group sees.

    Attributes:
        rows: index of the group's rows in the pass.
        base: position p is cell base + p of the shared store.
        first: first cell of the part.
        end: cell behind the last cell of the part.
    """

    rows: slice | Tensor
    base: int
    first: int
    end: int


def bifurcated(inputs: AttentionInputs) -> Tensor:
    """Attends in one call for all tails and one per prompt: [rows, q, heads, value dim]."""
    rows, heads, q, dim = inputs.query.shape
    kv_heads, fold = inputs.key.shape[1], inputs.group
    query = inputs.query.reshape(rows, kv_heads, fold * q, dim)
    out, log = _part(
        query, inputs.key, inputs.value, inputs.masks.bias(query.dtype, inputs.window, fold), inputs
    )
    for shared in inputs.masks.once(("groups", inputs.window), lambda: _groups(inputs)):
        prompt = _prompt(query[shared.rows], shared, inputs)
        out[shared.rows], log[shared.rows] = _merged((out[shared.rows], log[shared.rows]), prompt)
    if inputs.sinks is not None:
        sinks = inputs.sinks.to(log.dtype).view(1, kv_heads, fold).repeat_interleave(q, dim=2)
        out = out * torch.sigmoid(log - sinks)[..., None].to(out.dtype)
    return out.reshape(rows, heads, q, -1).transpose(1, 2)


def _prompt(query: Tensor, shared: Shared, inputs: AttentionInputs) -> Part:
    """Attends from one group's query, [rows, kv heads, fold * q, dim], to the group's prompt."""
    assert inputs.shared_key is not None
    assert inputs.shared_value is not None
    rows, kv_heads, folded, dim = query.shape
    fold = inputs.group
    key, value = (
        t[shared.first : shared.end].transpose(0, 1)[None]
        for t in (inputs.shared_key, inputs.shared_value)
    )
    bias = inputs.masks.once(
        ("prompt", shared.first, query.dtype, inputs.window, fold),
        lambda: _prompt_bias(inputs, shared),
    )
    together = query.transpose(0, 1).reshape(1, kv_heads, rows * folded, dim)
    out, log = _part(together, key, value, bias, inputs)
    return out.view(kv_heads, rows, folded, -1).transpose(0, 1), log.view(
        kv_heads, rows, folded
    ).transpose(0, 1)


def _groups(inputs: AttentionInputs) -> list[Shared]:
    """Returns the prompts of the pass, each with its rows.

    A prompt that all queries have left behind a sliding window is missing.
    """
    of: dict[Prefix, list[int]] = {}
    for row, prefix in enumerate(inputs.plan.prefixes):
        if prefix is not None:
            of.setdefault(prefix, []).append(row)
    shares = [_shared(inputs, prefix, rows) for prefix, rows in of.items()]
    return [shared for shared in shares if shared.first < shared.end]


def _shared(inputs: AttentionInputs, prefix: Prefix, rows: list[int]) -> Shared:
    plan, window = inputs.plan, inputs.window
    oldest = 0 if window is None else max(0, min(plan.starts[row] for row in rows) - window + 1)
    side_by_side = rows[-1] - rows[0] == len(rows) - 1
    index = slice(rows[0], rows[-1] + 1) if side_by_side else torch.tensor(rows, device=plan.device)
    return Shared(index, prefix.base, prefix.base + oldest, prefix.base + prefix.length)


def _prompt_bias(inputs: AttentionInputs, shared: Shared) -> Tensor | None:
    """Returns the additive mask over a prompt for all queries of its group.

    Returns:
        [1, 1, rows * group * q, end - first], 0 where visible; None when every query sees the whole
        prompt, as without a window.
    """
    if inputs.window is None:
        return None
    positions = inputs.plan.positions[shared.rows]  # [rows, q]
    keys = torch.arange(
        shared.first - shared.base, shared.end - shared.base, device=positions.device
    )
    mask = keys > positions[..., None] - inputs.window
    together = mask.repeat(1, inputs.group, 1).flatten(0, 1)[None]
    return None if bool(mask.all()) else additive(together, inputs.query.dtype)


def _merged(one: Part, other: Part) -> Part:
    (out, log), (other_out, other_log) = one, other
    weight = torch.sigmoid(other_log - log)[..., None].to(out.dtype)
    return torch.lerp(out, other_out, weight), torch.logaddexp(log, other_log)


def _part(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, inputs: AttentionInputs
) -> Part:
    """Attends to some of the keys.

    Args:
        query: [b, kv heads, q, dim].
        key: [b, kv heads, kv, dim].
        value: [b, kv heads, kv, value dim].
        bias: [b, 1, q, kv] or None.
    """
    if query.device.type == "cpu" and inputs.softcap is None and key.shape[-1] == value.shape[-1]:
        # `scaled_dot_product_attention` calls this on a CPU, but does not return the denominator.
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=bias, scale=inputs.scale
        )
    scores = _scores(query, key, bias, inputs)
    log = scores.logsumexp(dim=-1)
    return (scores - log[..., None]).exp().to(value.dtype) @ value, log


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, inputs: AttentionInputs) -> Tensor:
    """Computes the scores before the softmax, soft-capped, float32 at least."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = (query @ key.transpose(-1, -2)).to(wide) * inputs.scale
    if inputs.softcap is not None:
        scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
    return scores if bias is None else scores + bias


def pad(inputs: AttentionInputs) -> Tensor:
    """Attends in one batched call; returns [rows, q, heads, value dim]."""
    if inputs.shared_key is not None:
        return bifurcated(inputs)
    bias = inputs.masks.bias(inputs.query.dtype, inputs.window, inputs.group)
    return attend_folded(inputs.query, inputs.key, inputs.value, bias, inputs)


def attend_folded(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, inputs: AttentionInputs
) -> Tensor:
    """Attends with each GQA group folded into the query axis.

    K and V are not repeated, which is up to 8 times faster on a CPU.

    Args:
        query: [rows, heads, q, dim].
        key: [rows, kv heads, kv, dim].
        value: [rows, kv heads, kv, value dim].
        bias: additive mask [rows, 1, group * q, kv] or None.
        inputs: has the scale, the softcap and the sinks.

    Returns:
        [rows, q, heads, value dim].
    """
    rows, heads, q, dim = query.shape
    kv_heads = key.shape[1]
    folded = query.reshape(rows, kv_heads, (heads // kv_heads) * q, dim)
    if inputs.softcap is None and inputs.sinks is None:
        out = scaled_dot_product_attention(folded, key, value, attn_mask=bias, scale=inputs.scale)
    else:
        out = _explicit(folded, key, value, bias, inputs, q)
    return out.reshape(rows, heads, q, value.shape[-1]).transpose(1, 2)


def _explicit(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, inputs: AttentionInputs, q: int
) -> Tensor:
    """Computes the folded call with soft-capped scores and sinks; the library's kernel has none."""
    scores = _scores(query, key, bias, inputs)
    if inputs.sinks is not None:
        # sinks [heads] -> [1, kv heads, group * q, 1], in the order of the folded query axis
        sinks = (
            inputs.sinks.to(scores.dtype).view(1, key.shape[1], -1, 1).repeat_interleave(q, dim=2)
        )
        scores = torch.cat([scores, sinks.expand(scores.shape[0], -1, -1, -1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[2]].to(value.dtype)
    return weights @ value


def split(inputs: AttentionInputs) -> Tensor:
    """Attends row by row at exact lengths: [rows, q, heads, value dim], unused columns zero."""
    if inputs.shared_key is not None:
        return bifurcated(inputs)
    plan = inputs.plan
    out = inputs.query.new_zeros(plan.rows, plan.q, inputs.query.shape[1], inputs.value.shape[-1])
    for b, (count, length) in enumerate(zip(plan.counts, plan.lengths, strict=True)):
        query = inputs.query[b : b + 1, :, :count]
        key, value = inputs.key[b : b + 1, :, :length], inputs.value[b : b + 1, :, :length]
        out[b, :count] = attend_folded(query, key, value, _row_bias(inputs, b), inputs)[0]
    return out


def _row_bias(inputs: AttentionInputs, row: int) -> Tensor | None:
    """Returns the additive mask over one row's own tokens and keys, [1, 1, group * count, length].

    Returns None when every key is seen. The row must not have a prefix.
    """
    count, length, window = inputs.plan.counts[row], inputs.plan.lengths[row], inputs.window
    if window is not None and window >= length:
        window = None
    if count == 1 and window is None:
        return None

    def made() -> Tensor:
        mask = inputs.masks.visible(window, length, slice(row, row + 1))
        return additive(mask[:, :count], inputs.query.dtype, inputs.group)

    return inputs.masks.once(("row", row, inputs.query.dtype, window, inputs.group), made)


MOST_COLUMNS = 64
"""The largest number of tokens per row that the kernel takes.

For prompts, products of whole matrices are faster.
"""


def available(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns True if the kernels run on the device, in the dtype."""
    return device.type == "cpu" and dtype in SUFFIXES and not missing()


def takes(plan: Plan) -> bool:
    """Returns True if the kernel attends in this pass; False for long prompts."""
    return plan.q <= MOST_COLUMNS


def native(inputs: AttentionInputs) -> Tensor:
    """Attends by the kernel, or by `split` where the kernel does not take the pass.

    Returns:
        [rows, q, heads, value dim]; unused query columns are zero.

    Raises:
        RequestError: not on a CPU, no C compiler, or a dtype that the kernel does not have.
    """
    query, plan = inputs.query, inputs.plan
    _require_available(query)
    if not takes(plan):
        return split(inputs)
    rows, heads, q, dim = query.shape
    query = query.transpose(1, 2).contiguous()
    key, value = _dense(inputs.key), _dense(inputs.value)
    tree = inputs.masks.tree(inputs.window)
    sinks = None if inputs.sinks is None else inputs.sinks.float().contiguous()
    out = query.new_zeros(rows, q, heads, value.shape[-1])
    # The name keeps the arrays for as long as the kernel runs.
    starts = [np.arange(rows) * step for step in (q, key.stride(0), value.stride(0))]
    shared_key, shared_value = _dense_shared(inputs, key, value)
    attention = AttentionStruct(
        rows=rows,
        heads=heads,
        kv_heads=key.shape[1],
        dim=dim,
        value_dim=value.shape[-1],
        threads=torch.get_num_threads(),
        scale=inputs.scale,
        softcap=inputs.softcap or 0.0,
        window=inputs.window or 0,
        bounds=plan.bounds.data_ptr(),
        query_rows=starts[0].ctypes.data,
        key_rows=starts[1].ctypes.data,
        value_rows=starts[2].ctypes.data,
        positions=None if tree is None else tree[0].data_ptr(),
        words=None if tree is None else tree[1].data_ptr(),
        columns=q,
        sinks=None if sinks is None else sinks.data_ptr(),
        query=query.data_ptr(),
        key=key.data_ptr(),
        value=value.data_ptr(),
        shared_key=shared_key.data_ptr(),
        shared_value=shared_value.data_ptr(),
        query_token=heads * dim,
        query_head=dim,
        key_token=key.stride(2),
        key_head=key.stride(1),
        value_token=value.stride(2),
        value_head=value.stride(1),
        shared_key_token=shared_key.stride(0),
        shared_key_head=shared_key.stride(1),
        shared_value_token=shared_value.stride(0),
        shared_value_head=shared_value.stride(1),
        out=out.data_ptr(),
    )
    attend(query.dtype, attention)
    return out


def _require_available(query: Tensor) -> None:
    """Raises RequestError if the kernel does not run for this query."""
    if not available(query.device, query.dtype):
        raise RequestError(
            "attention='native' needs a CPU, a C compiler and float32 or bfloat16; got "
            f"{query.device.type}, {query.dtype}{', ' * bool(missing())}{missing()}; "
            f"attention='auto' runs anywhere"
        )


def attend(dtype: torch.dtype, attention: AttentionStruct) -> None:
    """Calls the kernel; raises MemoryError if there is no memory for the scores."""
    if getattr(library(), f"attend_{SUFFIXES[dtype]}")(ctypes.byref(attention)):
        raise MemoryError("no memory for the scores of attention")


def _dense_shared(inputs: AttentionInputs, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns keys and values of shared prompts, or stand-ins that no row reads."""
    if inputs.shared_key is None or inputs.shared_value is None:
        return key[0].transpose(0, 1), value[0].transpose(0, 1)  # every offset is 0
    return inputs.shared_key, inputs.shared_value


def _dense(tensor: Tensor) -> Tensor:
    """Returns the tensor with a last stride of 1; the kernel takes any other strides."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
