"""Prompts -> filled caches: a group's prompt is computed once, and stored once or copied to its other rows.

All prompt tokens but the last are fed; the last one opens the row's first round, like the last committed token of any other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.runner import Runner
from shoal.schedule import Admission, Round
from shoal.sharing import Prefix, check_policy

CHUNK = 512
"""Prompt tokens per row and pass: bounds the memory of a long prompt's attention."""
BUDGET = 4096
"""Tokens per pass over all rows, padding included."""


def policy_for(prompts: str, models: Sequence[Runner]) -> str:
    """The policy of `shoal.sharing` that these models allow: all must know shared prompts, and "auto" keeps to static passes.

    Raises:
        RequestError: for an unknown name.
    """
    check_policy(prompts)
    lost = prompts == "auto" and any(model.static is not None and not model.static.knows_prefixes for model in models)
    return prompts if all(model.shares for model in models) and not lost else "copied"


def prefill(runner: Runner, round_: Round) -> int:
    """Carries out a round's admissions and moves in one model's cache; returns how many prompt tokens were computed."""
    cache = runner.cache
    copied = [a for a in round_.admissions if a.row.prefix is None]
    for admission in copied:
        if admission.source is not None and not admission.fresh:
            _copy(runner, admission)
    computed = compute(runner, [(a.row.slot, a.row.request.prompt_ids[:-1]) for a in copied if a.computes])
    for admission in round_.admissions:
        if admission.row.prefix is not None:
            if admission.computes:
                computed += store(runner, admission.row.prefix, admission.row.request.prompt_ids[:-1])
            cache.enter(admission.row.slot, admission.row.prefix)
    for admission in copied:
        if admission.fresh:
            _copy(runner, admission)
    for move in round_.moves:
        cache.copy(move.source, move.target, cache.lengths[move.source])
    return computed


def _copy(runner: Runner, admission: Admission) -> None:
    assert admission.source is not None
    runner.cache.copy(admission.source, admission.row.slot, admission.row.prompt_length - 1)


def compute(runner: Runner, prompts: Sequence[tuple[int, Sequence[int]]]) -> int:
    """Feeds each (slot, prompt) from the start, rows of similar lengths together; returns the number of tokens."""
    for slot, _ in prompts:
        runner.cache.enter(slot)
    todo = sorted(((len(p), slot, p) for slot, p in prompts if p), reverse=True)
    while todo:
        rows = max(1, BUDGET // min(todo[0][0], CHUNK))
        batch, todo = todo[:rows], todo[rows:]
        for start in range(0, batch[0][0], CHUNK):
            part = [(slot, p[start : start + CHUNK]) for _, slot, p in batch if len(p) > start]
            width = max(len(piece) for _, piece in part)
            block = torch.tensor([[*piece, *[0] * (width - len(piece))] for _, piece in part], device=runner.device)
            runner.feed([slot for slot, _ in part], block, [len(piece) for _, piece in part], want_logits=False)
    return sum(len(p) for _, p in prompts)


def store(runner: Runner, prefix: Prefix, prompt: Sequence[int]) -> int:
    """Feeds a prompt into its cells of the shared store; returns the number of tokens."""
    for start in range(0, len(prompt), CHUNK):
        piece = torch.tensor([prompt[start : start + CHUNK]], device=runner.device)
        runner.feed_prefix(prefix, start, piece)
    return len(prompt)
