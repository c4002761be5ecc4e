"""Prompts -> filled caches: the prompt of a group is computed once, and stored once or copied to its other rows.

All prompt tokens but the last are computed here. The last one is the first token of the row's first round, as the last committed
token is in any other round.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.engine.prefix_store import check_policy
from shoal.models.runner import Runner
from shoal.types.schedule import Admission, PrefillChunk, PromptOrigin, Round

MAX_PASS_WIDTH = 512
"""Prompt tokens per row and pass: bounds the memory of a long prompt's attention."""
MAX_PASS_TOKENS = 4096
"""Tokens per pass over all rows, padding included."""


def policy_for(prefix_sharing: str, models: Sequence[Runner]) -> str:
    """The policy of `shoal.engine.prefix_store` that these models allow: "copied" unless all of them know shared prompts, and
    instead of "auto" also where static passes do not know them.

    Raises:
        RequestError: for an unknown name.
    """
    check_policy(prefix_sharing)
    loses_static = prefix_sharing == "auto" and any(
        model.static is not None and not model.static.knows_prefixes for model in models
    )
    return prefix_sharing if all(model.shares for model in models) and not loses_static else "copied"


def prefill(runner: Runner, round_: Round, drafting: bool = False) -> int:
    """Carries out a round's admissions and moves in one model's cache; returns how many prompt tokens were computed.

    Args:
        drafting: the model is the drafter. It computes nothing of prompts that it does not hold (`Row.draft_reach`): their rows
            are in its cache without tokens.
    """
    cache, admissions, chunks = runner.cache, round_.admissions, round_.chunks
    if drafting:
        for admission in admissions:
            if not admission.row.draft_reach:
                cache.enter(admission.row.slot)
        admissions = [admission for admission in admissions if admission.row.draft_reach]
        chunks = [chunk for chunk in chunks if chunk.row.draft_reach]
    _copy(runner, admissions, PromptOrigin.COPY)
    for admission in admissions:
        if admission.origin in (PromptOrigin.COMPUTE, PromptOrigin.SHARED):
            cache.enter(admission.row.slot, admission.row.prefix)
    computed = compute(runner, [chunk for chunk in chunks if chunk.row.prefix is None])
    computed += sum(store(runner, chunk) for chunk in chunks if chunk.row.prefix is not None)
    _copy(runner, admissions, PromptOrigin.COPY_AFTER_COMPUTE)
    for move in round_.moves:
        cache.copy(move.source, move.target, cache.lengths[move.source])
    return computed


def _copy(runner: Runner, admissions: Sequence[Admission], origin: PromptOrigin) -> None:
    """Copies the prompts of the admissions with this origin."""
    for admission in admissions:
        if admission.origin is origin and admission.source is not None:
            runner.cache.copy(admission.source, admission.row.slot, admission.row.prompt_length - 1)


def compute(runner: Runner, chunks: Sequence[PrefillChunk]) -> int:
    """Computes chunks of prompts in their rows' slots, those of similar lengths together; returns the number of tokens."""
    todo = sorted((chunk for chunk in chunks if chunk.stop > chunk.start), key=lambda chunk: chunk.start - chunk.stop)
    while todo:
        longest = todo[0].stop - todo[0].start
        rows = max(1, MAX_PASS_TOKENS // min(longest, MAX_PASS_WIDTH))
        batch, todo = todo[:rows], todo[rows:]
        for first in range(0, longest, MAX_PASS_WIDTH):
            _feed(runner, [(chunk.slot, tokens) for chunk in batch if (tokens := _tokens(chunk, first))])
    return sum(chunk.stop - chunk.start for chunk in chunks)


def _feed(runner: Runner, part: Sequence[tuple[int, Sequence[int]]]) -> None:
    """One pass over the tokens of several slots. Padding repeats a row's own token, so that a NaN from one row cannot reach the
    keys of another."""
    width = max(len(tokens) for _, tokens in part)
    block = torch.tensor([[*tokens, *[tokens[-1]] * (width - len(tokens))] for _, tokens in part], device=runner.device)
    runner.feed([slot for slot, _ in part], block, [len(tokens) for _, tokens in part], want_logits=False)


def store(runner: Runner, chunk: PrefillChunk) -> int:
    """Computes a chunk of a prompt in its token slots of the prefix store; returns the number of tokens."""
    assert chunk.row.prefix is not None
    for first in range(0, chunk.stop - chunk.start, MAX_PASS_WIDTH):
        block = torch.tensor([_tokens(chunk, first)], device=runner.device)
        runner.feed_prefix(chunk.row.prefix, chunk.start + first, block)
    return chunk.stop - chunk.start


def _tokens(chunk: PrefillChunk, first: int) -> Sequence[int]:
    """At most MAX_PASS_WIDTH tokens of a chunk, from its token `first` on."""
    start = chunk.start + first
    return chunk.row.request.prompt_ids[start : min(start + MAX_PASS_WIDTH, chunk.stop)]
