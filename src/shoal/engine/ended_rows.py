"""Rows that have ended -> samples, the text of running rows that may be shown, and stop strings.

Stop strings end nothing in some parts of a row's text.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
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
        finished_at=now - row.request.submitted_at,
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
    tokens = row.tokens[row.prompt_length :][:kept]
    scores = end_scores(row.logprobs[:kept], row.end_logprobs)
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


@dataclass(frozen=True)
class Stops:
    """The stop strings of a row.

    Attributes:
        texts: the strings.
        least: the number of tokens before which they end nothing.
        unstopped: see `shoal.types.requests.Request`.
        shown: those of the strings that the text shows.
    """

    texts: Sequence[str] = ()
    least: int = 0
    unstopped: tuple[tuple[str, str], ...] = ()
    shown: frozenset[str] = frozenset()


NO_STOPS = Stops()


class Passage:
    """The parts between two marks of a text that grows; each character is looked at once.

    Args:
        opening: a regular expression of the text before a part.
        closing: the text behind it; empty if the part goes on to the end. Blanks behind the closing
            of a part that begins the text belong to it: they are no part of the answer.
    """

    def __init__(self, opening: str, closing: str) -> None:
        self._opening, self._closing = re.compile(opening), closing
        self._first_only, self._longest = opening.startswith(r"\A"), len(opening)
        self._inside, self._over, self._at = False, False, 0
        self._behind: int | None = None

    def covers(self, text: str, sure: int, start: int, end: int) -> bool:
        """Returns True if a place of the text is within such a part.

        Args:
            text: the text, which goes on with the text read before.
            sure: the number of its characters that stay as they are.
            start: the place, never before an earlier one.
            end: the end of the place.
        """
        while self._inside or self._opened(text, sure, start):
            close = text.find(self._closing, self._at) if self._closing else -1
            if close < 0:
                self._at = max(self._at, sure - len(self._closing) + 1)
            if close < 0 or close >= end:
                return True
            self._inside, self._over, self._at = False, self._first_only, close
            self._behind = close + len(self._closing)
        answer = self._behind if self._first_only else None
        return answer is not None and answer <= start and text[answer:end].isspace()

    def _opened(self, text: str, sure: int, start: int) -> bool:
        """Returns True if a part begins before a place."""
        if self._over:
            return False
        if self._first_only:
            found = self._opening.match(text, 0, start)
        else:
            found = self._opening.search(text, self._at, start)
        if found is None:
            self._at = max(self._at, min(start, sure) - self._longest)
            return False
        self._inside, self._at = True, found.end()
        return True


class Passages:
    """The parts of one text in which stop strings end nothing; see `Stops`."""

    def __init__(self, stops: Stops) -> None:
        self._parts = [Passage(*marks) for marks in stops.unstopped]

    def copy(self) -> Passages:
        """Returns the same parts, of a text that goes on by itself."""
        other = copy.copy(self)
        other._parts = [copy.copy(part) for part in self._parts]
        return other

    def cover(self, text: str, sure: int, start: int, end: int) -> bool:
        """Returns True if a place is within one of the parts; see `Passage.covers`."""
        return any(part.covers(text, sure, start, end) for part in self._parts)


class RowStops:
    """The stop strings of a row, and the parts of its texts in which they end nothing.

    Args:
        stops: the stop strings.

    Attributes:
        stops: the stop strings.
        passages: those parts of the text, and of the text that spells special tokens out (True).
    """

    def __init__(self, stops: Stops) -> None:
        self.stops = stops
        self.passages = {marked: Passages(stops) for marked in (False, True)}

    def copy(self) -> RowStops:
        """Returns the same of a row that goes on by itself."""
        other = copy.copy(self)
        other.passages = {marked: one.copy() for marked, one in self.passages.items()}
        return other
