"""Accepted tokens -> rows: EOS, stop strings, criteria, limits, faults. The earliest end wins, also inside a block."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.constraints import masks
from shoal.engine.samples import finish, visible_text
from shoal.errors import ShoalError
from shoal.types.requests import Row
from shoal.types.rounds import Commit, Faults, Scores, Verdict
from shoal.types.samples import TopLogprobs
from shoal.types.trees import DraftTree


def commit(
    rows: Sequence[Row], tree: DraftTree, scores: Scores, verdict: Verdict, clock: Callable[[], float]
) -> list[Commit]:  # fmt: skip
    """Appends each row's accepted drafts and its replacement or bonus, up to and including the token that ends the row.

    A row whose accepted path leads to a fault ends before it. The round ends when all rows have their tokens: that moment of the
    `clock`, in seconds, is the end of every row that ends in it.
    """
    paths, following = verdict.lists
    scores = scores.along(verdict)
    blocks = [[*(d[i] for i in path), last] for d, path, last in zip(tree.drafts, paths, following, strict=True)]
    failing = _reached(rows, paths, scores.faults)
    for b, (depth, _) in failing.items():
        blocks[b] = blocks[b][:depth]
    logprobs = _logprobs(scores, blocks)
    appended = []
    for b, (row, block) in enumerate(zip(rows, blocks, strict=True)):
        row.rounds += 1
        row.target_passes += 1
        row.drafted += len(tree.drafts[b])
        taken = _append(row, block, scores.p.shape[-1])
        if b in failing and row.finish_reason is None:
            row.finish_reason, row.error = "error", failing[b][1]
        kept = min(len(paths[b]), taken)
        row.accepted += kept
        row.from_draft += [True] * kept + [False] * (taken - kept)
        _report(row, b, taken, scores, logprobs)
        appended.append((row, block[:taken], kept))
    now = clock()
    return [_commit(row, tokens, kept, now) for row, tokens, kept in appended]


def _report(row: Row, b: int, taken: int, scores: Scores, logprobs: tuple[list[list[float]], list[list[float]]]) -> None:
    """Adds to the row what is reported of its tokens, the b-th row of the scores."""
    raw, processed = logprobs
    row.logprobs += raw[b][:taken]
    row.processed_logprobs += processed[b][:taken]
    if row.request.top_logprobs:
        row.top_logprobs += _top(scores, b, taken, row.request.top_logprobs)
    if row.request.keep_logits:
        row.logits += [logits.clone() for logits in scores.logits[b, :taken]]


def _commit(row: Row, tokens: list[int], accepted: int, now: float) -> Commit:
    """What the round added to a row. The sample is made before the text is taken: all text of a row is known once it has ended."""
    sample = finish(row, now) if row.finish_reason else None
    return Commit(row, tokens, accepted, visible_text(row), sample)


def _reached(rows: Sequence[Row], paths: Sequence[Sequence[int]], faults: Faults) -> dict[int, tuple[int, ShoalError]]:
    """The first fault on each row's accepted path: its depth and the reason, by the row's place in the batch."""
    reached: dict[int, tuple[int, ShoalError]] = {}
    for b, row in enumerate(rows):
        for depth, column in enumerate((0, *(node + 1 for node in paths[b])) if row in faults else ()):
            if column in faults[row]:
                reached.setdefault(b, (depth, faults[row][column]))
    return reached


def _append(row: Row, block: Sequence[int], vocab_size: int) -> int:
    """Commits tokens until the row ends; returns how many."""
    for count, token in enumerate(block, start=1):
        row.tokens.append(token)
        row.finish_reason = _end(row, token, vocab_size)
        if row.finish_reason:
            return count
    return len(block)


def _end(row: Row, token: int, vocab_size: int) -> str | None:
    """Why the row ends with this token, if it does."""
    if row.needs_text:
        row.detokenizer.push(token)
    if row.needs_text and row.detokenizer.stopped:
        return "stop"  # even if the token is an EOS as well: it is cut off with its text
    if token in row.eos:
        return "eos"
    if row.constraints:
        masks.advance(row, token)
    if row.constraints and not row.eos and masks.is_complete(row, vocab_size):
        return "stop"
    if row.request.criteria and _criteria_met(row):
        return "stop"
    return "length" if row.remaining <= 0 else None


def _criteria_met(row: Row) -> bool:
    ids = torch.tensor([row.tokens])
    return any(bool(torch.as_tensor(criterion(ids, None)).any()) for criterion in row.request.criteria)


def _logprobs(scores: Scores, blocks: Sequence[Sequence[int]]) -> tuple[list[list[float]], list[list[float]]]:
    """Natural-log probabilities of the blocks' tokens, before and after processing."""
    width = max(len(block) for block in blocks)
    padded = [[*block, *[0] * (width - len(block))] for block in blocks]
    index = torch.tensor(padded, dtype=torch.long, device=scores.p.device)[..., None]
    logits = scores.logits[:, :width].gather(-1, index).squeeze(-1)
    raw = logits.to(scores.normaliser.dtype) - scores.normaliser[:, :width]
    processed = scores.p[:, :width].gather(-1, index).squeeze(-1).log()
    return raw.tolist(), processed.tolist()


def _top(scores: Scores, row: int, taken: int, n: int) -> list[TopLogprobs]:
    """The n most probable tokens at each committed position; fewer after processing if fewer are possible."""
    raw = scores.logits[row, :taken].to(scores.normaliser.dtype) - scores.normaliser[row, :taken, None]
    tops = [_pairs(raw, n), _pairs(scores.p[row, :taken].log(), n)]
    return [TopLogprobs(before, after) for before, after in zip(*tops, strict=True)]


def _pairs(logprobs: Tensor, n: int) -> list[tuple[tuple[int, float], ...]]:
    top = logprobs.topk(n)
    return [
        tuple((token, value) for token, value in zip(ids, values, strict=True) if value > -math.inf)
        for ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]
