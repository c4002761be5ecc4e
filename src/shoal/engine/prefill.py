"""Prompts -> filled caches: a group's prompt is computed once, and stored once or copied to its other rows.

All prompt tokens but the last are fed; the last one opens the row's first round, like the last committed token of any other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.engine.prefix_store import check_policy
from shoal.models.runner import Runner
from shoal.types.schedule import Admission, PrefillChunk, Round

MAX_PASS_WIDTH = 512
"""Prompt tokens per row and pass: bounds the memory of a long prompt's attention."""
MAX_PASS_TOKENS = 4096
"""Tokens per pass over all rows, padding included."""


def policy_for(prefix_sharing: str, models: Sequence[Runner]) -> str:
    """The policy of `shoal.engine.prefix_store` that these models allow: all must know shared prompts, and "auto" keeps to
    static passes.

    Raises:
        RequestError: for an unknown name.
    """
    check_policy(prefix_sharing)
    lost = prefix_sharing == "auto" and any(model.static is not None and not model.static.knows_prefixes for model in models)
    return prefix_sharing if all(model.shares for model in models) and not lost else "copied"


def prefill(runner: Runner, round_: Round, drafting: bool = False) -> int:
    """Carries out a round's admissions and moves in one model's cache; returns how many prompt tokens were computed.

    Args:
        drafting: the model is the drafter. Of prompts that it does not hold (`Row.draft_reach`) nothing is computed: their rows
            are in its cache with no tokens.
    """
    cache, admissions, chunks = runner.cache, round_.admissions, round_.chunks
    if drafting:
        for admission in admissions:
            if not admission.row.draft_reach:
                cache.enter(admission.row.slot)
        admissions = [admission for admission in admissions if admission.row.draft_reach]
        chunks = [chunk for chunk in chunks if chunk.row.draft_reach]
    copied = [a for a in admissions if a.row.prefix is None]
    for admission in copied:
        if admission.source is not None and not admission.fresh:
            _copy(runner, admission)
    for admission in admissions:
        if admission.computes or admission.row.prefix is not None:
            cache.enter(admission.row.slot, admission.row.prefix)
    computed = compute(runner, [chunk for chunk in chunks if chunk.row.prefix is None])
    computed += sum(store(runner, chunk) for chunk in chunks if chunk.row.prefix is not None)
    for admission in copied:
        if admission.fresh:
            _copy(runner, admission)
    for move in round_.moves:
        cache.copy(move.source, move.target, cache.lengths[move.source])
    return computed


def _copy(runner: Runner, admission: Admission) -> None:
    assert admission.source is not None
    runner.cache.copy(admission.source, admission.row.slot, admission.row.prompt_length - 1)


def compute(runner: Runner, chunks: Sequence[PrefillChunk]) -> int:
    """Feeds chunks of prompts to their rows' slots, those of similar lengths together; returns the number of tokens."""
    todo = sorted((chunk for chunk in chunks if chunk.stop > chunk.start), key=lambda p: p.start - p.stop)
    while todo:
        longest = todo[0].stop - todo[0].start
        rows = max(1, MAX_PASS_TOKENS // min(longest, MAX_PASS_WIDTH))
        batch, todo = todo[:rows], todo[rows:]
        for first in range(0, longest, MAX_PASS_WIDTH):
            part = [(chunk.slot, tokens) for chunk in batch if (tokens := _tokens(chunk, first))]
            width = max(len(tokens) for _, tokens in part)
            # Padding is a token of the row's own: what spoils another row's keys must not come in that way.
            block = torch.tensor(
                [[*tokens, *[tokens[-1]] * (width - len(tokens))] for _, tokens in part], device=runner.device
            )
            runner.feed([slot for slot, _ in part], block, [len(tokens) for _, tokens in part], want_logits=False)
    return sum(chunk.stop - chunk.start for chunk in chunks)


def store(runner: Runner, chunk: PrefillChunk) -> int:
    """Feeds a chunk of a prompt into its cells of the shared store; returns the number of tokens."""
    assert chunk.row.prefix is not None
    for first in range(0, chunk.stop - chunk.start, MAX_PASS_WIDTH):
        block = torch.tensor([_tokens(chunk, first)], device=runner.device)
        runner.feed_prefix(chunk.row.prefix, chunk.start + first, block)
    return chunk.stop - chunk.start


def _tokens(chunk: PrefillChunk, first: int) -> Sequence[int]:
    """At most MAX_PASS_WIDTH tokens of a chunk from its `first` on."""
    return chunk.row.request.prompt_ids[chunk.start + first : min(chunk.start + first + MAX_PASS_WIDTH, chunk.stop)]
