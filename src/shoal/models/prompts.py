"""Prompts through a model: in passes of bounded size, those of similar lengths together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.models.runner import Runner
from shoal.types.prefix import Prefix

MAX_PASS_WIDTH = 512
"""Prompt tokens per row and pass: bounds the memory of a long prompt's attention."""
MAX_PASS_TOKENS = 4096
"""Tokens per pass over all rows, padding included."""


def feed_prompts(runner: Runner, prompts: Sequence[tuple[int, Sequence[int]]]) -> int:
    """Appends tokens to slots, in as few passes as hold them; returns how many there were.

    Args:
        prompts: (slot, tokens) pairs; those without tokens are passed over.
    """
    todo = sorted((pair for pair in prompts if pair[1]), key=lambda pair: -len(pair[1]))
    while todo:
        longest = len(todo[0][1])
        rows = max(1, MAX_PASS_TOKENS // min(longest, MAX_PASS_WIDTH))
        # Padding up to the longest must not reach beyond the end of a slot that is nearly full.
        batch = [pair for pair in todo if _free(runner, pair[0]) >= longest][:rows]
        taken = {slot for slot, _ in batch}
        todo = [pair for pair in todo if pair[0] not in taken]
        for first in range(0, longest, MAX_PASS_WIDTH):
            part = [(slot, tokens[first : first + MAX_PASS_WIDTH]) for slot, tokens in batch if len(tokens) > first]
            width = max(len(tokens) for _, tokens in part)
            # Padding repeats a token of the row's own: what spoils another row's keys must not come in that way.
            padded = [[*tokens, *[tokens[-1]] * (width - len(tokens))] for _, tokens in part]
            block = torch.tensor(padded, device=runner.device)
            runner.feed([slot for slot, _ in part], block, [len(tokens) for _, tokens in part], want_logits=False)
    return sum(len(tokens) for _, tokens in prompts)


def _free(runner: Runner, slot: int) -> int:
    """Tokens that there is room for in the slot."""
    prefix, length = runner.cache.prefixes[slot], runner.cache.lengths[slot]
    return runner.cache.capacity - length + (0 if prefix is None else prefix.length)


def feed_prefix(runner: Runner, prefix: Prefix, start: int, tokens: Tensor) -> int:
    """Appends tokens [1, q] int64 from position `start` on to a prompt in the shared store; returns how many there were."""
    for first in range(0, tokens.shape[1], MAX_PASS_WIDTH):
        runner.feed_prefix(prefix, start + first, tokens[:, first : first + MAX_PASS_WIDTH])
    return tokens.shape[1]
