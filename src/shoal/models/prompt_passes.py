"""The computation of prompts: passes of bounded size, with prompts of similar lengths together.

A piece of a prompt may also ride in a pass of rows that are decoded, as one more row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.models.attention.unfused import MOST_COLUMNS
from shoal.models.runner import Runner
from shoal.types.requests import Prefix
from shoal.types.trees import Block

MAX_PASS_WIDTH = 512
"""The largest number of prompt tokens per row and pass.

It bounds the memory of a long prompt's attention.
"""
MAX_PASS_TOKENS = 4096
"""The largest number of tokens per pass over all rows, padding included."""


def pass_width(runner: Runner) -> int:
    """Returns the number of tokens per row and pass.

    Kernels compute a pass in one call up to `MOST_COLUMNS` tokens of a row, with the same bits in
    whatever passes a prompt comes. Wider passes go operation by operation, and are not faster.
    """
    whole = runner.lean is not None and runner.lean.whole is not None and not runner.hidden_layers
    return MOST_COLUMNS if whole else MAX_PASS_WIDTH


def feed_prompts(
    runner: Runner,
    prompts: Sequence[tuple[int, Sequence[int]]],
    hidden: dict[int, Tensor] | None = None,
) -> int:
    """Appends tokens to slots in as few passes as hold them, and returns the number of the tokens.

    Args:
        prompts: (slot, tokens) pairs; pairs without tokens are skipped.
        hidden: a dict that receives the hidden states of each slot's tokens, [tokens, features], if
            the runner keeps any.
    """
    todo = sorted((pair for pair in prompts if pair[1]), key=lambda pair: -len(pair[1]))
    width = pass_width(runner)
    while todo:
        longest = len(todo[0][1])
        rows = max(1, MAX_PASS_TOKENS // min(longest, width))
        # Padding up to the longest must not reach beyond the end of a slot that is nearly full.
        batch = [pair for pair in todo if _free(runner, pair[0]) >= longest][:rows]
        slots = {slot for slot, _ in batch}
        todo = [pair for pair in todo if pair[0] not in slots]
        pieces: dict[int, list[Tensor]] = {}
        first = 0
        while first < longest:
            left = [(slot, tokens) for slot, tokens in batch if len(tokens) > first]
            stop = first + min(width, *(_to_end_of_block(runner, slot) for slot, _ in left))
            part = [(slot, tokens[first:stop]) for slot, tokens in left]
            first = stop
            most = max(len(tokens) for _, tokens in part)
            # Padding repeats a token of the row's own: a token that spoils another row's keys must
            # not come in by padding.
            padded = [[*tokens, *[tokens[-1]] * (most - len(tokens))] for _, tokens in part]
            block = torch.tensor(padded, device=runner.device)
            runner.feed(
                [slot for slot, _ in part],
                block,
                [len(tokens) for _, tokens in part],
                want_logits=False,
            )
            if runner.hidden is not None:
                for (slot, tokens), states in zip(part, runner.hidden, strict=True):
                    pieces.setdefault(slot, []).append(states[: len(tokens)])
        if hidden is not None:
            hidden |= {slot: torch.cat(states) for slot, states in pieces.items()}
    return sum(len(tokens) for _, tokens in prompts)


def carries_prompts(runner: Runner) -> bool:
    """Returns True if `feed_carrying` costs less than two passes, and changes no id.

    A captured round has one shape, and hidden states are read from other executors' passes. Padding
    up to the length of the piece would be written behind the ends of rows.
    """
    ragged = runner.packs and runner.captures is None and not runner.hidden_layers
    return ragged and runner.lean is not None and runner.lean.carries_prompts


def feed_carrying(
    runner: Runner, slots: Sequence[int], block: Block, slot: int, prompt: Sequence[int]
) -> Tensor:
    """Appends a block to its rows, and a piece of a prompt to a slot of its own, in one pass.

    Args:
        block: the block, with draft trees or without.
        prompt: the tokens, at most `MOST_COLUMNS`.

    Returns:
        The logits of the block, as of `Runner.feed`.
    """
    tokens, counts, parents = block
    rows, columns = tokens.shape
    # Padding is a token of the row's own, as in all blocks.
    joined = tokens[:, :1].repeat(1, max(columns, len(prompt)))
    joined[:, :columns] = tokens
    padded = [*prompt, *[prompt[-1]] * (joined.shape[1] - len(prompt))]
    joined = torch.cat([joined, torch.tensor([padded], device=tokens.device)])
    trees = None if parents is None else [*parents, range(-1, len(prompt) - 2)]
    logits = runner.feed([*slots, slot], joined, [*counts, len(prompt)], parents=trees, riding=1)
    return logits[:rows, :columns]


def _to_end_of_block(runner: Runner, slot: int) -> int:
    """Returns the most tokens of a slot's next pass, which does not go beyond a block's end."""
    block = runner.memory.block
    return block - runner.cache.lengths[slot] % block if block else MAX_PASS_WIDTH


def _free(runner: Runner, slot: int) -> int:
    """Returns the number of tokens for which the slot has room."""
    prefix, length = runner.cache.prefixes[slot], runner.cache.lengths[slot]
    return runner.cache.capacity - length + (0 if prefix is None else prefix.length)


def feed_prefix(
    runner: Runner, prefix: Prefix, start: int, tokens: Tensor, hidden: list[Tensor] | None = None
) -> int:
    """Appends tokens to a prompt in the shared store, and returns their number.

    Args:
        start: the position of the first token.
        tokens: [1, q] int64.
        hidden: a list that receives the hidden states of the tokens, [tokens, features], if the
            runner keeps any.
    """
    width = pass_width(runner)
    for first in range(0, tokens.shape[1], width):
        runner.feed_prefix(prefix, start + first, tokens[:, first : first + width])
        if hidden is not None and runner.hidden is not None:
            hidden.append(runner.hidden[0])
    return tokens.shape[1]
