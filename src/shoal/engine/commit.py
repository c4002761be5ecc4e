"""Commits accepted tokens to their rows, and makes samples of the rows that end.

A row ends by EOS, a stop string, a criterion, a limit or a fault; the earliest end wins, also
inside a block. The text of running rows that may be shown is taken here, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from shoal.constraints import masks
from shoal.engine.logprobs import Logprobs, logprobs_of
from shoal.errors import RequestError, ShoalError
from shoal.sampling.distributions import Scores
from shoal.sampling.processors import name_of
from shoal.types.requests import Row
from shoal.types.rounds import Commit, Faults
from shoal.types.samples import Sample
from shoal.types.trees import DraftTree, PlainRun, Verdict


def commit(
    rows: Sequence[Row],
    tree: DraftTree,
    scores: Scores,
    verdict: Verdict,
    drafter: str,
    clock: Callable[[], float],
) -> list[Commit]:
    """Appends each row's accepted drafts and its replacement or bonus.

    A row that ends gets no tokens after the one that ends it. A row whose accepted path leads to a
    fault ends before the fault. The round ends when all rows have their tokens: that moment is the
    end of every row that ends in it.

    Args:
        drafter: the name of the engine's drafter.
        clock: returns the time in seconds.
    """
    paths, following = verdict.lists
    blocks = [
        [*(draft[: len(path)] if isinstance(path, range) else map(draft.__getitem__, path)), last]
        for draft, path, last in zip(tree.drafts, paths, following, strict=True)
    ]
    failing = _first_faults(rows, paths, scores.faults) if scores.faults else {}
    for b, (depth, _) in failing.items():
        blocks[b] = blocks[b][:depth]
    columns = verdict.columns(blocks)
    # What is reported of the tokens may depend on those before them, so it is taken before any is
    # appended.
    reported = logprobs_of(rows, blocks, columns, scores, verdict)
    appended = []
    for b, (row, block) in enumerate(zip(rows, blocks, strict=True)):
        row.rounds += 1
        row.target_passes += 1
        names = [drafter] * len(tree.drafts[b]) if tree.drafters is None else tree.drafters[b]
        row.drafted += len(names)
        for name in set(names):
            row.drafted_by[name] = row.drafted_by.get(name, 0) + names.count(name)
        count = _append(row, block, scores.logits.shape[-1])
        if b in failing and row.finish_reason is None:
            row.finish_reason, row.error = "error", failing[b][1]
        length = min(len(paths[b]), count)
        row.accepted += length
        row.drafters += [names[node] for node in paths[b][:length]] + [None] * (count - length)
        reported[b].add(row, count)
        if row.request.keep_logits:
            row.logits += [scores.logits[b, column].clone() for column in columns[b][:count]]
        appended.append((row, block[:count], tree.drafts[b], names, paths[b][:length]))
    now = clock()
    return [_commit(*each, now) for each in appended]


def commit_run(
    rows: Sequence[Row], run: PlainRun, vocab_size: int, clock: Callable[[], float]
) -> list[Commit]:
    """Appends the tokens of several plain rounds to each row, up to the one that ends it."""
    appended = []
    for row, tokens, raw, processed in zip(rows, run.tokens, run.raw, run.processed, strict=True):
        count = _append(row, tokens, vocab_size)
        row.rounds += count
        row.target_passes += count
        row.drafters += [None] * count
        Logprobs(raw, processed).add(row, count)
        appended.append((row, tokens[:count]))
    now = clock()
    return [_commit(row, tokens, (), (), (), now) for row, tokens in appended]


def _commit(
    row: Row,
    tokens: list[int],
    drafts: Sequence[int],
    drafters: Sequence[str],
    path: Sequence[int],
    now: float,
) -> Commit:
    """Returns the commit of a row.

    The sample is made before the text is taken: all text of a row is known once it has ended. The
    sample of a row that may begin again is made later (`shoal.engine.joint_rows`).
    """
    if row.request.distinct and row.finish_reason not in (None, "error"):
        row.held_at = now
    sample = finish(row, now) if row.finish_reason and row.held_at is None else None
    return Commit(
        row,
        tokens,
        len(path),
        text=visible_text(row, sample),
        sample=sample,
        drafts=drafts,
        drafters=drafters,
        path=path,
    )


def _first_faults(
    rows: Sequence[Row], paths: Sequence[Sequence[int]], faults: Faults
) -> dict[int, tuple[int, ShoalError]]:
    """Returns the first fault (depth, reason) of each row's accepted path, by batch index."""
    reached: dict[int, tuple[int, ShoalError]] = {}
    for b, row in enumerate(rows):
        columns = (0, *(node + 1 for node in paths[b])) if row in faults else ()
        for depth, column in enumerate(columns):
            if column in faults[row]:
                reached.setdefault(b, (depth, faults[row][column]))
    return reached


def _append(row: Row, block: Sequence[int], vocab_size: int) -> int:
    """Commits tokens until the row ends; returns their number.

    A row whose check or criterion fails ends with that token, "error".
    """
    left, request = row.remaining, row.request
    if not (row.needs_text or row.checks or row.constraints or request.criteria):
        tokens = block[:left]
        if row.eos.isdisjoint(tokens):
            row.tokens += tokens
            row.finish_reason = "length" if len(tokens) == left else None
            return len(tokens)
    for count, token in enumerate(block, start=1):
        row.tokens.append(token)
        try:
            row.finish_reason = _end(row, token, vocab_size) or (
                "length" if count >= left else None
            )
        except RequestError as error:  # of a check or criterion that a user wrote
            row.finish_reason, row.error = "error", error
        if row.finish_reason in ("eos", "length") and row.needs_text and row.detokenizer.settle():
            row.finish_reason = "stop"
        if row.finish_reason:
            return count
    return len(block)


def _end(row: Row, token: int, vocab_size: int) -> str | None:
    """Returns the reason for which the row ends with this token; None if it does not end.

    The row's length is checked elsewhere.
    """
    if row.needs_text:
        row.detokenizer.push(token)
    if row.needs_text and row.detokenizer.stopped:
        return "stop"  # even if the token is an EOS as well: it is cut off with its text
    if token in row.eos:
        return "eos"
    if row.checks:
        row.checks = [(check, _after(check, state, token)) for check, state in row.checks]
    if row.constraints:
        masks.advance(row, token)
    if row.constraints and not row.eos and masks.is_complete(row, vocab_size):
        return "stop"
    if row.request.criteria and _meets_criterion(row):
        return "stop"
    return None


def _after(check: Any, state: Any, token: int) -> Any:
    """Returns a check's state after a token that passed it; raises RequestError if it fails now."""
    try:
        after = check.after(state, token)
    except Exception as error:
        raise RequestError(f"check {type(check).__name__} failed: {error!r:.200}") from error
    if after is None:
        raise RequestError(
            f"check {type(check).__name__} let token {token} pass, and refused it when it was "
            f"asked again"
        )
    return after


def _meets_criterion(row: Row) -> bool:
    """Returns True if a stopping criterion ends the row; raises RequestError if one fails."""
    ids = torch.tensor([row.tokens])
    for criterion in row.request.criteria:
        try:
            met = bool(torch.as_tensor(criterion(ids, None)).any())
        except Exception as error:
            raise RequestError(
                f"stopping criterion {name_of(criterion)} failed: {error!r:.200}"
            ) from error
        if met:
            return True
    return False


def visible_text(row: Row, sample: Sample | None) -> str:
    """Returns the new text of a row that may be shown now.

    Returns "" if the text is not needed (`Row.needs_text`). A row that may be cut anywhere, become
    a copy of another or begin again is shown once it has ended.

    Args:
        sample: the row's sample, if it has ended.
    """
    request = row.request
    if row.needs_text and (row.cutting is not None or request.resampled or request.distinct):
        return "" if sample is None else sample.text
    return str(row.detokenizer.take(final=row.finish_reason is not None)) if row.needs_text else ""


def finish(row: Row, now: float) -> Sample:
    """Returns the sample of a row that has ended.

    Its text and tokens are cut at the beginning of the stop string.

    Args:
        now: the seconds at the end of the round, by the clock of the row's deadline.
    """
    text, count = "", row.new_tokens
    if row.detokenizer is not None:
        text, count = row.detokenizer.final_text(
            [] if row.needs_text else row.tokens[row.prompt_length :], count
        )
    text, count, syntax = _cut(row, text, count)
    logprobs = row.logprobs[:count]
    return Sample(
        text=text,
        token_ids=tuple(row.tokens[row.prompt_length :][:count]),
        logprobs=tuple(logprobs),
        processed_logprobs=tuple(row.processed_logprobs[:count]),
        mean_logprob=sum(logprobs) / len(logprobs) if logprobs else math.nan,
        finish_reason=row.finish_reason or "cancelled",
        finished_at=now - row.request.submitted_at,
        rounds=row.rounds,
        drafted=row.drafted,
        accepted=row.accepted,
        target_passes=row.target_passes,
        drafters=tuple(row.drafters[:count]),
        top_logprobs=tuple(row.top_logprobs[:count]),
        error=None if row.error is None else str(row.error),
        in_time=row.deadline is None or now <= row.deadline,
        by_drafter=row.by_drafter,
        log_weight=row.log_weight if row.request.weighted else None,
        log_allowed=row.log_allowed if row.request.weighted else None,
        restored=row.restored,
        syntax=syntax,
    )


def _cut(row: Row, text: str, length: int) -> tuple[str, int, str | None]:
    """Returns the text of a row, the number of its tokens, and `Sample.syntax`.

    A row that did not end by itself is cut at its best end.
    """
    if row.cutting is None:
        return text, length, None
    if row.finish_reason == "eos":
        return text, length, "complete"
    tokens = row.tokens[row.prompt_length :][:length]
    scores = end_scores(row.logprobs[:length], row.end_logprobs)
    best_end = row.cutting.best_end(tokens, scores, len(text))
    if best_end is None or row.finish_reason == "error":
        return text, length, "incomplete"
    size, count = best_end
    return text[:size], count, "cut"


def end_scores(logprobs: Sequence[float], ends: Sequence[float]) -> list[float]:
    """Returns the score of an end before all tokens, and within or behind each of them.

    The score is the mean log-probability of the tokens up to the end and of an EOS (Melcer et al.,
    arXiv 2402.17988).

    Args:
        logprobs: the log-probabilities of the tokens.
        ends: the log-probabilities of an EOS in the place of each token, at least as many. The one
            behind the last token is known only if more tokens were written; otherwise this place
            comes last.
    """
    sums = [0.0, *accumulate(logprobs)]
    return [(sums[i] + ends[i]) / (i + 1) if i < len(ends) else -math.inf for i in range(len(sums))]
