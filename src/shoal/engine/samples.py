"""Rows that have ended -> samples, and the text of rows that may be shown while they run."""

from __future__ import annotations

import math

from shoal.types.requests import Row
from shoal.types.samples import Sample


def visible_text(row: Row) -> str:
    """New text of a row that may be shown now; "" if it is not needed (`Row.needs_text`)."""
    return str(row.detokenizer.take(final=row.finish_reason is not None)) if row.needs_text else ""


def finish(row: Row, now: float) -> Sample:
    """The sample of a row that has ended; its text and tokens are cut where the stop string begins.

    Args:
        now: seconds at the end of the round, by the clock of the row's deadline.
    """
    row.finished_at = now - row.request.submitted_at
    text, kept = "", row.new_tokens
    if row.detokenizer is not None:
        text, kept = row.detokenizer.finished([] if row.needs_text else row.tokens[row.prompt_length :], kept)
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
        restored=row.restored,
    )
