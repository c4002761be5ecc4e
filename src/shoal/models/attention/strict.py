"""The attention of `strict=True` on a CPU: its bits depend on nothing but the query's own row.

A kernel's rounding depends on the shapes it is given. So every call here has the same shapes:
queries come in tiles of `TILE` positions moved to the batch axis, and keys in whole blocks of
`KV_BLOCK`, the unit in which the library's kernel walks over keys. A block that is masked as a
whole changes no bit of the kernel's running softmax. So longer neighbours change no bit either.

A key's place in its block does change bits. So each query of a draft tree gets a copy of its row's
keys in which its path lies as it would in a chain: q times the memory traffic, which `strict`
accepts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad as zero_pad

from shoal.errors import InternalError, UnsupportedModel
from shoal.models.attention.inputs import AttentionInputs, additive, seen_in_chains
from shoal.models.attention.pad import attend_folded

TILE = 4
"""The number of query positions per tile.

1 is best for plain decoding, 8 for verifying; 4 costs both a little.
"""
KV_BLOCK = 512
"""The number of keys per block of torch's CPU kernel.

The length of cache views is a multiple of it (`Plan`).
"""


def strict(inputs: AttentionInputs) -> Tensor:
    """Attends by tiles: all tiles of a row, or one tile of all rows, per call.

    Of the two, the one that needs fewer calls is taken. Returns [rows, q, heads, value dim].
    """
    query, key, value, plan = inputs.query, inputs.key, inputs.value, inputs.plan
    if inputs.softcap is not None or inputs.sinks is not None or key.shape[-1] != value.shape[-1]:
        raise UnsupportedModel(
            "strict needs plain attention: no soft-capped scores, no sinks, values as wide as keys"
        )
    if plan.kv % KV_BLOCK or plan.shares:
        raise InternalError(f"strict attention got {plan.kv} keys, or a shared prompt")
    if plan.parents is not None:
        return torch.stack([_paths(inputs, row) for row in range(plan.rows)])
    tiles = -(-plan.q // TILE)
    fill = tiles * TILE - plan.q
    # The kernel rounds differently without a mask.
    bias = inputs.masks.explicit_bias(query.dtype, inputs.window)
    # [rows, tiles, 1, TILE, kv]
    bias = zero_pad(bias, (0, 0, 0, fill)).unflatten(2, (tiles, TILE)).transpose(1, 2)
    bias = bias.repeat(1, 1, 1, inputs.group, 1)
    # [rows, tiles, heads, TILE, dim]
    query = zero_pad(query, (0, 0, 0, fill)).unflatten(2, (tiles, TILE)).transpose(1, 2)
    if plan.rows <= tiles:
        spread = (tiles, -1, -1, -1)
        # The tensors of each row: [tiles, ...], its keys and values [1, ...].
        own = zip(query, key[:, None], value[:, None], bias, strict=True)
        out = torch.stack(
            [
                attend_folded(q, k.expand(spread), v.expand(spread), mask, inputs)
                for q, k, v, mask in own
            ]
        )
    else:
        out = torch.stack(
            [attend_folded(query[:, t], key, value, bias[:, t], inputs) for t in range(tiles)],
            dim=1,
        )
    return out.flatten(1, 2)[:, : plan.q]


def _paths(inputs: AttentionInputs, row: int) -> Tensor:
    """Attends with each column of one row in a tile of its own, over the keys of the column's path.

    Returns:
        [q, heads, value dim].
    """
    plan = inputs.plan
    # [q, heads, TILE, dim]
    query = zero_pad(inputs.query[row].transpose(0, 1)[:, :, None], (0, 0, 0, TILE - 1))
    # Each query's visible keys in the order of positions, then its hidden ones; [rows, q, kv].
    order = inputs.masks.once(
        "paths", lambda: (~inputs.masks.visible()).byte().argsort(dim=-1, stable=True)
    )
    key, value = (t[row][:, order[row]].transpose(0, 1) for t in (inputs.key, inputs.value))
    keys = torch.arange(plan.kv, device=plan.device)
    seen = seen_in_chains(keys, plan.places[row][:, None, None], inputs.window).expand(-1, TILE, -1)
    return attend_folded(query, key, value, additive(seen, query.dtype, inputs.group), inputs)[:, 0]
