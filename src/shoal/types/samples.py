"""The results of a run: `Sample`, `Output`, `Result`, and the `Increment`s of a stream."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

from shoal.types.stats import DraftCounts

if TYPE_CHECKING:
    import torch

    from shoal.types.rollouts import Rollouts
    from shoal.types.stats import Stats

FINISH_REASONS = ("eos", "stop", "length", "time", "not started", "cancelled", "error")
"""The reasons for the end of a row: an EOS token; a stop string (or a stopping criterion, or a
complete text of the grammar if there is no EOS); max_new_tokens or the target's context; the time
budget; the time budget before the row's first round, so that it is empty; a cancellation; an error
of this row alone."""


@dataclass(frozen=True)
class TopLogprobs:
    """The most probable tokens at one position, as (token id, log-probability) pairs.

    Attributes:
        raw: the pairs before processing.
        processed: the pairs after processing.
    """

    raw: tuple[tuple[int, float], ...]
    processed: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Sample:
    """One finished (or cut) row.

    Attributes:
        text: the new text, without the prompt, special tokens and anything from a stop string on.
        token_ids: the new tokens; an EOS that ended the row is the last one.
        logprobs: natural-log probability of each token under the target's own distribution,
            *before* processing (temperature 1, no penalties, no truncation).
        processed_logprobs: natural-log probability of each token under the declared distribution p,
            *after* processing; 0.0 everywhere if greedy.
        mean_logprob: mean of `logprobs`; the ranking rule of BASS. NaN when there are no tokens.
        finish_reason: one of `FINISH_REASONS`.
        error: the message, if `finish_reason` is "error"; the tokens before the error are valid.
        finished_at: seconds from submission to the end of the round that ended the row.
        in_time: False if the row ended after its deadline. Such a row keeps its `finish_reason`, as
            its text is complete.
        rounds: the number of the row's rounds.
        drafted: the number of tokens drafted for the row.
        accepted: the number of its accepted drafts.
        target_passes: the number of target passes of the row; the prompt's pass is not counted.
        drafters: per token, the name of the drafter whose draft was accepted; None for a
            replacement or bonus.
        by_drafter: tokens drafted and accepted, by the name of the drafter.
        top_logprobs: the most probable tokens at each token, if asked for.
        log_weight: natural log of the sample's weight, if weights were asked for (`exact=True`).
            Weighted by exp(log_weight), the samples follow p conditioned on the constraint.
        log_allowed: natural log of the product of the probabilities that p gave to the allowed
            tokens. With exact="asap" it also contains the correction from the proposal back to p.
            Equal to `log_weight` unless rows were resampled (`exact="smc"`), or texts were drawn
            without replacement (`exact="distinct"`).
        restored: the number of prompt tokens that were copied from an earlier row
            (`shoal.engine.prefix_cache`); 0 if a row of the same group computed the prompt.
        syntax: the result of a syntax check; None without a check. "complete": the row ended by
            itself, and parses. "cut": the row did not end by itself, and `text` is cut, with its
            tokens, at the best place where it parses, by the mean log-probability of the tokens
            before the place and of an EOS there. "incomplete": the text parses nowhere.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    processed_logprobs: tuple[float, ...]
    mean_logprob: float
    finish_reason: str
    finished_at: float
    rounds: int
    drafted: int
    accepted: int
    target_passes: int
    drafters: tuple[str | None, ...]
    top_logprobs: tuple[TopLogprobs, ...] = ()
    error: str | None = None
    in_time: bool = True
    by_drafter: Mapping[str, DraftCounts] = field(default_factory=dict)
    log_weight: float | None = None
    log_allowed: float | None = None
    restored: int = 0
    syntax: str | None = None

    @property
    def ranking_logprob(self) -> float:
        """The score by which samples are ranked.

        It is `mean_logprob`; with a weight, the mean log-probability under the declared
        distribution without the constraint: the sum of `processed_logprobs` and `log_allowed`, per
        token.
        """
        if self.log_allowed is None or not self.token_ids:
            return self.mean_logprob
        return (sum(self.processed_logprobs) + self.log_allowed) / len(self.token_ids)

    @property
    def from_draft(self) -> tuple[bool, ...]:
        """The origin of each token: True = an accepted draft, False = a replacement or bonus."""
        return tuple(name is not None for name in self.drafters)

    @property
    def finished(self) -> bool:
        """False if the time budget, a cancellation or an error cut the row, or if it ended late.

        Rankings and counts of samples use this property.
        """
        return self.in_time and self.finish_reason not in (
            "time",
            "not started",
            "cancelled",
            "error",
        )

    def __repr__(self) -> str:
        shown = (
            _short(self.text)
            if self.text or not self.token_ids
            else f"token_ids {_short(self.token_ids)}"
        )
        score = f"mean_logprob={self.mean_logprob:.3f}"
        return f"Sample({shown}, {self.finish_reason}, {len(self.token_ids)} tokens, {score})"


def ranked(samples: Iterable[Sample]) -> list[Sample]:
    """Returns the samples, best first.

    Finished samples come before unfinished ones, then the order is by mean log-probability per
    token (BASS, mean-logP; with weights `Sample.ranking_logprob`). An empty sample, whose mean is
    NaN, comes last among the finished or the unfinished. Ties keep row order.
    """

    def key(sample: Sample) -> tuple[bool, float]:
        mean = sample.ranking_logprob
        return (not sample.finished, math.inf if math.isnan(mean) else -mean)

    return sorted(samples, key=key)


def log_mean(logs: Sequence[float]) -> float:
    """Returns the natural log of the mean of at least one number given by logs; -inf is 0."""
    largest = max(logs)
    if largest == -math.inf:
        return largest
    return largest + math.log(sum(math.exp(each - largest) for each in logs) / len(logs))


def effective(logs: Sequence[float]) -> float:
    """Returns the effective sample size of weights given by their logs, in 0..their number."""
    mean = log_mean(logs)
    if mean == -math.inf:
        return 0.0
    return len(logs) * math.exp(2 * mean - log_mean([2 * each for each in logs]))


@dataclass(frozen=True)
class Output:
    """The n samples of one prompt, in row order."""

    prompt: str | None
    prompt_ids: tuple[int, ...]
    samples: tuple[Sample, ...]

    @property
    def ranked(self) -> list[Sample]:
        """The samples, finished ones first, then by mean log-probability (BASS's rule)."""
        return ranked(self.samples)

    @property
    def effective_samples(self) -> float | None:
        """The effective sample size, (sum of weights)² / sum of squares (Kong 1992).

        It is at most n; 0 if all weights are 0; None without weights.
        """
        weights = self._weights()
        return None if weights is None else effective(weights)

    @property
    def log_mass(self) -> float | None:
        """The natural log of the mean weight; None without weights.

        The mean weight is an unbiased estimate of the probability that p gives to the allowed
        texts.
        """
        weights = self._weights()
        return None if weights is None else log_mean(weights)

    def _weights(self) -> list[float] | None:
        weights = [sample.log_weight for sample in self.samples if sample.log_weight is not None]
        return weights or None

    def __repr__(self) -> str:
        shown = (
            f"prompt_ids {_short(self.prompt_ids)}" if self.prompt is None else _short(self.prompt)
        )
        return (
            f"Output({shown}, {len(self.samples)} samples, {sum(s.finished for s in self.samples)} "
            "finished)"
        )


@dataclass(frozen=True)
class Result(Sequence[Output]):
    """One `Output` per prompt, in prompt order, and the statistics of the run."""

    outputs: tuple[Output, ...]
    stats: Stats

    @overload
    def __getitem__(self, index: int) -> Output: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Output, ...]: ...

    def __getitem__(self, index: int | slice) -> Output | tuple[Output, ...]:
        return self.outputs[index]

    def __repr__(self) -> str:
        samples = [sample for output in self.outputs for sample in output.samples]
        return (
            f"Result({len(self)} prompts, {len(samples)} samples, "
            f"{sum(s.finished for s in samples)} finished, {self.stats!r})"
        )

    def __len__(self) -> int:
        return len(self.outputs)

    def __iter__(self) -> Iterator[Output]:
        return iter(self.outputs)

    def tensors(self, pad_id: int, device: torch.device | str = "cpu") -> Rollouts:
        """Returns all samples as padded tensors for training: ids, masks and log-probabilities.

        Args:
            pad_id: the id where a row has no token.

        Raises:
            RequestError: `pad_id` is no integer.
        """
        from shoal.types.rollouts import rollouts

        return rollouts(self.outputs, pad_id, device)


@dataclass(frozen=True)
class Increment:
    """The text and tokens that one round added to one row, as `stream()` yields them.

    The texts of a row's increments, joined, are the sample's text.

    Attributes:
        prompt: the index of the prompt.
        sample: the index of the row in its group.
        text: the new text, maybe "". It never ends inside a UTF-8 character or inside the beginning
            of a stop string.
        token_ids: the tokens committed in this round, or in several plain ones.
        accepted: the number of these tokens, the first ones, that were drafted.
        finish_reason: set on the row's last increment.
        result: the `Sample`, set on the row's last increment.
    """

    prompt: int
    sample: int
    text: str
    token_ids: tuple[int, ...]
    accepted: int
    finish_reason: str | None = None
    result: Sample | None = None

    @property
    def rounds(self) -> int:
        """The rounds that these tokens took: each has one that was not drafted, or ends the row.

        There may be several (`shoal.engine.multi_step`).
        """
        return max(len(self.token_ids) - self.accepted, min(len(self.token_ids), 1))


def _short(value: Any) -> str:
    """Returns the value's repr in one line of at most 50 characters."""
    shown = repr(value)
    return shown if len(shown) <= 50 else f"{shown[:49]}…"
