"""The option `strict=True`: a token's logits have the same bits in every pass, on a CPU.

Matrix libraries choose their order of summation by the shape of the whole product, so a row's last
bits depend on the number of rows beside it. In 16 bit that turns ties between the two best tokens.
Strict passes give every kernel one shape only: attention by `shoal.models.attention.methods`,
linear layers and activations (whose loops end in scalar code, which rounds differently) in blocks
of `BLOCK` tokens. The other parts of a decoder, norms and embeddings, take one token at a time.
`prove` shows on the model itself that the bits agree, or refuses the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from shoal.errors import UnsupportedModel
from shoal.models.attention.methods import KV_BLOCK
from shoal.models.runner import Runner

BLOCK = 16
"""The number of tokens per product of a linear layer.

Fewer tokens waste time in 16 bit, more tokens in passes of few tokens.
"""
PROOF = (2, 9, 21)
"""The numbers of tokens of the three rows that `prove` decodes."""


def make_strict(runner: Runner, rowwise: Collection[type[nn.Module]]) -> Runner:
    """Switches the runner's passes to fixed shapes and proves that the bits agree.

    The runner's attention must be "strict" already.

    Args:
        rowwise: the types of layers that map [..., features] to [..., features] row by row.

    Raises:
        UnsupportedModel: other layers have matrices of their own, or see `prove`.
    """
    for module in runner.hf.modules():
        own = [p for p in module.parameters(recurse=False) if p.dim() > 1]
        if own and type(module) not in rowwise and not isinstance(module, nn.Embedding):
            raise UnsupportedModel(
                f"{runner.name} cannot be strict: {type(module).__name__} multiplies matrices "
                f"in its own way, whose rounding may "
                "depend on the other rows"
            )
    layers = [module for module in runner.hf.modules() if type(module) in rowwise]
    runner.forward_context = lambda: _in_blocks(layers)
    prove(runner)
    return runner


@contextmanager
def _in_blocks(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Lets the layers compute in blocks within the context.

    Afterwards it puts a `forward` back that an owner had set on a layer.
    """
    owned = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        # Past nn.Module.__setattr__, which is slow.
        layer.__dict__["forward"] = _blocked(layer.forward)
    try:
        yield
    finally:
        for layer, before in zip(layers, owned, strict=True):
            if before is None:
                del layer.__dict__["forward"]
            else:
                layer.__dict__["forward"] = before


def _blocked(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wraps `forward` for [..., features] so that it is always called with [BLOCK, features].

    The last block is filled up with zeros.
    """

    def blocked(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        blocks = pad(rows, (0, 0, 0, -len(rows) % BLOCK)).split(BLOCK)
        out = (
            torch.cat([forward(block) for block in blocks])
            if len(blocks) > 1
            else forward(blocks[0])
        )
        return out[: len(rows)].view(*x.shape[:-1], out.shape[-1])

    return blocked


@torch.inference_mode()
def prove(runner: Runner) -> None:
    """Decodes three rows one by one, token by token, then together in three variants.

    All logits must be equal to the last bit.

    Raises:
        UnsupportedModel: a variant changed the logits; the message names it.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = [min(length, runner.context - 1) for length in PROOF]
    ids = [
        torch.randint(0, runner.vocab_size, (n,), generator=generator).to(runner.device)
        for n in lengths
    ]
    single = [_decode(runner, [row], [1])[0] for row in ids]
    variants = {
        "rows side by side": [1],
        "blocks of several tokens": [3, 1, 7, 2],
        "prompts as a whole": [max(lengths)],
    }
    for variant, steps in variants.items():
        for row, expected, found in zip(
            ids, single, _decode(runner, ids, steps, neighbour=True), strict=False
        ):
            if not torch.equal(expected, found):
                worst = float((expected - found).abs().max())
                raise UnsupportedModel(
                    f"{runner.name} cannot be strict here: {variant} moved the logits of a row "
                    f"of {len(row)} tokens by up to "
                    f"{worst:.1e}; without strict, greedy ids are the same in float32 all the "
                    f"same, save for near-ties"
                )
    runner.notes["strict"] = (
        f"{sum(lengths)} positions bit-equal in {len(variants) + 1} ways of computing them"
    )


def _decode(
    runner: Runner, ids: Sequence[Tensor], steps: Sequence[int], neighbour: bool = False
) -> list[Tensor]:
    """Computes the logits [length, vocab] of each row, fed in ragged blocks.

    The r-th block of row b has steps[(b + r) % len(steps)] tokens.

    Args:
        neighbour: True adds a row that needs one more block of keys. Its earlier keys are zeros,
            which no pass computed.
    """
    rows = (
        [*ids, torch.zeros(max(map(len, ids)), dtype=torch.int64, device=runner.device)]
        if neighbour
        else list(ids)
    )
    late = min(KV_BLOCK, runner.context - len(rows[-1]))
    runner.memory.reserve(len(rows), KV_BLOCK + max(map(len, rows)))
    cache = runner.cache
    cache.lengths = [0] * cache.slots
    if neighbour:
        cache.lengths[len(rows) - 1] = late
    fed, logits = [0] * len(rows), [list[Tensor]() for _ in rows]
    turn = 0
    while active := [b for b, row in enumerate(rows) if fed[b] < len(row)]:
        counts = [min(steps[(b + turn) % len(steps)], len(rows[b]) - fed[b]) for b in active]
        parts = [rows[b][fed[b] : fed[b] + count] for b, count in zip(active, counts, strict=True)]
        out = runner.feed(active, torch.nn.utils.rnn.pad_sequence(parts, batch_first=True), counts)
        for i, (b, count) in enumerate(zip(active, counts, strict=True)):
            logits[b].append(out[i, :count])
            fed[b] += count
        turn += 1
    cache.lengths = [0] * cache.slots
    return [torch.cat(row) for row in logits]
