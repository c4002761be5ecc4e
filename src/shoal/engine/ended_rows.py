"""Rows that have ended -> samples, and the text of running rows that may be shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from shoal.types.requests import Row
from shoal.types.samples import Sample


def visible_text(row: Row, sample: Sample | None) -> str:
    """Returns the new text of a row that may be shown now.

    Returns "" if the text is not needed (`Row.needs_text`). A row that may be cut anywhere, become
    a copy of another or begin again is shown once it has ended.

    Args:
        row: the row.
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
        row: the row.
        now: the seconds at the end of the round, by the clock of the row's deadline.
    """
    row.finished_at = now - row.request.submitted_at
    text, kept = "", row.new_tokens
    if row.detokenizer is not None:
        text, kept = row.detokenizer.finished(
            [] if row.needs_text else row.tokens[row.prompt_length :], kept
        )
    text, kept, syntax = _cut(row, text, kept)
    logprobs = row.logprobs[:kept]
    return Sample(
        text=text,
        token_ids=tuple(row.tokens[row.prompt_length :][:kept]),
        logprobs=tuple(logprobs),
        processed_logprobs=tuple(row.processed_logprobs[:kept]),
        mean_logprob=sum(logprobs) / len(logprobs) if logprobs else math.nan,
        finish_reason=row.finish_reason or "cancelled",
        finished_at=row.finished_at,
        rounds=row.rounds,
        drafted=row.drafted,
        accepted=row.accepted,
        target_passes=row.target_passes,
        drafters=tuple(row.drafters[:kept]),
        top_logprobs=tuple(row.top_logprobs[:kept]),
        error=None if row.error is None else str(row.error),
        in_time=row.deadline is None or now <= row.deadline,
        by_drafter=row.by_drafter,
        log_weight=row.log_weight if row.request.weighted else None,
        log_allowed=row.log_allowed if row.request.weighted else None,
        restored=row.restored,
        syntax=syntax,
    )


def _cut(row: Row, text: str, kept: int) -> tuple[str, int, str | None]:
    """Returns the text of a row, the number of its tokens, and `Sample.syntax`.

    A row that did not end by itself is cut at its best end.
    """
    if row.cutting is None:
        return text, kept, None
    if row.finish_reason == "eos":
        return text, kept, "complete"
    tokens, scores = (
        row.tokens[row.prompt_length :][:kept],
        end_scores(row.logprobs[:kept], row.end_logprobs),
    )
    found = row.cutting.best_end(tokens, scores, len(text))
    if found is None or row.finish_reason == "error":
        return text, kept, "incomplete"
    size, count = found
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
