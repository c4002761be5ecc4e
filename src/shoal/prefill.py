"""Prompts -> filled caches: a group's prompt is computed once and copied to its other rows.

All prompt tokens but the last are fed; the last one opens the row's first round, like the last committed token of any other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.runner import Runner
from shoal.schedule import Round

CHUNK = 512
"""Prompt tokens per row and pass: bounds the memory of a long prompt's attention."""
BUDGET = 4096
"""Tokens per pass over all rows, padding included."""


def prefill(runner: Runner, round_: Round) -> int:
    """Carries out a round's admissions and moves in one model's cache; returns how many prompt tokens were computed."""
    cache = runner.cache
    fresh = [a for a in round_.admissions if a.source is None]
    for admission in round_.admissions:
        if admission.source is not None and not admission.fresh:
            cache.copy(admission.source, admission.row.slot, admission.row.prompt_length - 1)
    computed = compute(runner, [a.row.slot for a in fresh], [a.row.request.prompt_ids[:-1] for a in fresh])
    for admission in round_.admissions:
        if admission.source is not None and admission.fresh:
            cache.copy(admission.source, admission.row.slot, admission.row.prompt_length - 1)
    for move in round_.moves:
        cache.copy(move.source, move.target, cache.lengths[move.source])
    return computed


def compute(runner: Runner, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> int:
    """Feeds each prompt into its slot from the start, in padded passes of rows of similar lengths."""
    for slot in slots:
        runner.cache.rollback(slot, 0)
    todo = sorted(((len(p), slot, p) for slot, p in zip(slots, prompts, strict=True) if p), reverse=True)
    while todo:
        rows = max(1, BUDGET // min(todo[0][0], CHUNK))
        batch, todo = todo[:rows], todo[rows:]
        for start in range(0, batch[0][0], CHUNK):
            part = [(slot, p[start : start + CHUNK]) for _, slot, p in batch if len(p) > start]
            width = max(len(piece) for _, piece in part)
            block = torch.tensor([[*piece, *[0] * (width - len(piece))] for _, piece in part], device=runner.device)
            runner.feed([slot for slot, _ in part], block, [len(piece) for _, piece in part], want_logits=False)
    return sum(map(len, prompts))
