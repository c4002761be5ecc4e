"""Prompts -> filled caches: a group's prompt is computed once, and stored once or copied.

All prompt tokens but the last are computed here. The last one is the first token of the row's first
round, as the last committed token is in any other round. The tokens of a row that was paused are a
prompt of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.drafting.protocol import KeyValueMemory
from shoal.engine.prefix_cache import PrefixCache
from shoal.engine.prefix_store import check_policy
from shoal.models.prompt_passes import feed_prefix, feed_prompts
from shoal.models.runner import Runner
from shoal.types.schedule import Admission, PrefillChunk, PromptOrigin, Round


def policy_for(prefix_sharing: str, models: Sequence[KeyValueMemory]) -> str:
    """Returns the policy of `shoal.engine.prefix_store` that these models allow.

    It is "copied" unless all of them take shared prompts. "auto" is "copied" also if captured
    rounds do not take them, and "grouped" if all models read them in the one call of their
    attention: each pass then reads a prompt once for all its rows, from the processor's cache, at
    no other cost.

    Raises:
        RequestError: the name is unknown.
    """
    check_policy(prefix_sharing)
    if not all(model.shares for model in models):
        return "copied"
    if prefix_sharing != "auto":
        return prefix_sharing
    if any(model.captures_without_prefixes for model in models):
        return "copied"
    return "grouped" if all(model.attends_in_one_call for model in models) else "auto"


def prefill(
    target: Runner,
    round_: Round,
    hidden: list[Tensor] | None = None,
    kept: PrefixCache | None = None,
) -> int:
    """Carries out a round's admissions and moves in the target's cache.

    Args:
        target: the target, with the engine's cache.
        round_: the round.
        hidden: receives the hidden states of each of the round's chunks, [tokens, features], if the
            target keeps any.
        kept: the store of the tokens that admissions restore.

    Returns:
        The number of prompt tokens that were computed.
    """
    cache, admissions, chunks = target.cache, round_.admissions, round_.chunks
    computed = _copy(target, admissions, PromptOrigin.COPY)
    for admission in admissions:
        if admission.origin in (PromptOrigin.COMPUTE, PromptOrigin.SHARED):
            cache.enter(admission.row.slot, admission.row.prefix)
        if kept is not None and admission.restored:
            kept.restore(admission.row, admission.restored)
    by_slot: dict[int, Tensor] = {}
    stored: dict[int, list[Tensor]] = {}
    computed += feed_prompts(
        target,
        [(chunk.slot, _tokens(chunk)) for chunk in chunks if chunk.row.prefix is None],
        by_slot,
    )
    for number, chunk in enumerate(chunks):
        if chunk.row.prefix is not None:
            block = torch.tensor([_tokens(chunk)], device=target.device)
            computed += feed_prefix(
                target, chunk.row.prefix, chunk.start, block, stored.setdefault(number, [])
            )
    if hidden is not None and target.hidden_layers:
        nothing = torch.empty(0, 0, device=target.device)
        for number, chunk in enumerate(chunks):
            pieces = stored.get(number)
            hidden.append(
                by_slot.get(chunk.slot, nothing)
                if pieces is None
                else torch.cat(pieces)
                if pieces
                else nothing
            )
    for chunk in chunks:
        groups = [row.group for row in round_.in_slots]
        if chunk.row.request.n > groups.count(chunk.row.group):  # the others come later
            cache.hold(chunk.slot)
    computed += _copy(target, admissions, PromptOrigin.COPY_AFTER_COMPUTE)
    for move in round_.moves:
        cache.copy(move.source, move.target, cache.lengths[move.source])
    return computed


def _copy(runner: Runner, admissions: Sequence[Admission], origin: PromptOrigin) -> int:
    """Copies the prompts of the admissions with this origin.

    A prompt is computed if its source cannot go back to it. Returns the number of tokens that were
    computed.
    """
    cache, lacking = runner.cache, []
    for admission in admissions:
        if admission.origin is origin and admission.source is not None:
            row, length = admission.row, admission.row.entry_length - 1
            if cache.reaches(admission.source, length):
                cache.copy(admission.source, row.slot, length)
            else:
                cache.enter(row.slot)
                lacking.append((row.slot, row.tokens[:length]))
    return feed_prompts(runner, lacking)


def _tokens(chunk: PrefillChunk) -> Sequence[int]:
    return chunk.row.tokens[chunk.start : chunk.stop]
