"""What was asked (`Request`), what the engine knows (`Row`), what comes back (`Sample`, `Output`, `Result`)."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

from shoal.config import Limits, Sampling
from shoal.errors import ShoalError
from shoal.types.counts import TokenCounts
from shoal.types.prefix import Prefix

if TYPE_CHECKING:
    from shoal.types.stats import Stats

FINISH_REASONS = ("eos", "stop", "length", "time", "not started", "cancelled", "error")
"""Why a row ended: an EOS token; a stop string (or a stopping criterion, or a complete text of the grammar where there is no
EOS); max_new_tokens or the target's context; the time budget; the time budget before the row had a round, so that it is empty; a
cancellation; a fault of this row alone."""


@dataclass(frozen=True)
class Request:
    """n samples of one prompt: a group of n rows.

    Attributes:
        prompt_ids: the prompt's token ids, at least one.
        n: rows wanted, >= 1.
        prompt: the prompt's text, if it was given as text.
        top_logprobs: how many of the most probable tokens to report per committed token, before and after processing.
        keep_logits: keep the target's raw logits [vocab] of every committed token.
        occurrence: how often the same prompt stands before it in the same call; with the prompt and the seed it keys the noise.
        max_draft: longest draft of its rows, whatever the controller would like; 0 = they are decoded plainly; None = no limit.
        criteria: Transformers stopping criteria, called once per committed token with the ids so far [1, length].
    """

    prompt_ids: tuple[int, ...]
    n: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    limits: Limits = field(default_factory=Limits)
    prompt: str | None = None
    top_logprobs: int = 0
    keep_logits: bool = False
    occurrence: int = 0
    max_draft: int | None = None
    criteria: Sequence[Any] = ()
    submitted_at: float = field(default_factory=time.perf_counter)


def _short(value: Any) -> str:
    """Its repr in one line of at most 50 characters."""
    shown = repr(value)
    return shown if len(shown) <= 50 else f"{shown[:49]}…"


def occurrences(prompts: Iterable[tuple[int, ...]]) -> list[int]:
    """For each prompt of a call, how often the same one stands before it; see `Request.occurrence`."""
    seen: Counter[tuple[int, ...]] = Counter()
    found = []
    for prompt in prompts:
        found.append(seen[prompt])
        seen[prompt] += 1
    return found


@dataclass(eq=False, slots=True)
class Row:
    """One sequence being generated.

    Attributes:
        tokens: prompt + committed; nothing in it is ever taken back.
        seed: of this row's noise. eos: ids that end it. max_length: most tokens it may hold. deadline: perf_counter seconds.
        slot: where its keys and values live while it runs. prefix: where those of its prompt do, if they are shared.
        detokenizer: None without a tokenizer. needs_text: its text is needed token by token (stop strings, streaming).
        constraint: where it is in its grammar (`shoal.constraints.grammar`), if it has one. error: why it failed, if it did.
        serial: unlike any other row's of the process, also of rows that are gone; what may outlive the row knows it by this.
        counts: of the tokens in prompt and output. output_counts: of those in the output. Brought up to date where penalties
            ask for them.
        draft_context: most tokens of the row that its drafter can read, and has memory for. A longer row is decoded plainly.
    """

    request: Request
    group: int
    index: int
    seed: int
    tokens: list[int]
    eos: frozenset[int]
    max_length: int
    deadline: float | None = None
    slot: int = -1
    prefix: Prefix | None = None
    logprobs: list[float] = field(default_factory=list)
    processed_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    logits: list[Any] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    detokenizer: Any = None
    needs_text: bool = False
    constraint: Any = None
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    target_passes: int = 0
    finish_reason: str | None = None
    error: ShoalError | None = None
    finished_at: float | None = None
    draft_context: int = sys.maxsize
    serial: int = field(default_factory=itertools.count().__next__)
    counts: TokenCounts = field(default_factory=TokenCounts, repr=False)
    output_counts: TokenCounts = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.output_counts = TokenCounts(self.prompt_length)

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def new_tokens(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens this row may still commit."""
        return min(self.request.limits.max_new_tokens - self.new_tokens, self.max_length - len(self.tokens))

    @property
    def max_draft_length(self) -> int:
        """The longest draft that it may be given: one token less than it may still commit, no more than was asked for, and no
        token that the drafter would have to draw after more than it can read."""
        limits = [self.remaining - 1, self.draft_context - len(self.tokens) + 1]
        if self.request.max_draft is not None:
            limits.append(self.request.max_draft)
        return max(min(limits), 0)

    @property
    def draft_reach(self) -> int:
        """Most tokens of the row that its drafter reads: nothing of a prompt that it cannot hold."""
        return self.draft_context if self.prompt_length <= self.draft_context else 0


@dataclass(frozen=True)
class TopLogprobs:
    """The most probable tokens at one position: (token id, log-probability) pairs, before and after processing."""

    raw: tuple[tuple[int, float], ...]
    processed: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Sample:
    """One finished (or cut) row.

    Attributes:
        text: the new text, without the prompt, special tokens and anything from a stop string on.
        token_ids: the new tokens; an EOS that ended the row is the last one.
        logprobs: natural-log probability of each token under the target's own distribution, *before* processing
            (temperature 1, no penalties, no truncation).
        processed_logprobs: the same under the declared distribution p, *after* processing; 0.0 everywhere if greedy.
        mean_logprob: mean of `logprobs`; the ranking rule of BASS. NaN when there are no tokens.
        finish_reason: one of `FINISH_REASONS`. error: what went wrong, if that is "error"; the tokens before it stand.
        finished_at: seconds from submission to the end of the round that ended the row.
        in_time: that was no later than its deadline. A row that comes to its end in the round in which its time is over keeps its
            reason, as its text is whole; but it has not finished within its budget.
        rounds, drafted, accepted, target_passes: what it took; the prompt's pass is not counted.
        from_draft: per token, True for an accepted draft, False for a replacement or bonus.
        top_logprobs: per token, when asked for.
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
    from_draft: tuple[bool, ...]
    top_logprobs: tuple[TopLogprobs, ...] = ()
    error: str | None = None
    in_time: bool = True

    @property
    def finished(self) -> bool:
        """False when the time budget, a cancellation or a fault cut the row, or when it ended after its deadline: what ranks and
        counts samples goes by this."""
        return self.in_time and self.finish_reason not in ("time", "not started", "cancelled", "error")

    def __repr__(self) -> str:
        shown = _short(self.text) if self.text or not self.token_ids else f"token_ids {_short(self.token_ids)}"
        score = f"mean_logprob={self.mean_logprob:.3f}"
        return f"Sample({shown}, {self.finish_reason}, {len(self.token_ids)} tokens, {score})"


def ranked(samples: Iterable[Sample]) -> list[Sample]:
    """Best first: finished before unfinished, then by mean log-probability per token (BASS, mean-logP); an empty
    sample, whose mean is NaN, comes last of its kind. Ties keep row order."""

    def key(sample: Sample) -> tuple[bool, float]:
        mean = sample.mean_logprob
        return (not sample.finished, math.inf if math.isnan(mean) else -mean)

    return sorted(samples, key=key)


@dataclass(frozen=True)
class Output:
    """The n samples of one prompt, in row order."""

    prompt: str | None
    prompt_ids: tuple[int, ...]
    samples: tuple[Sample, ...]

    @property
    def ranked(self) -> list[Sample]:
        """Finished samples first, then by mean log-probability, best first (BASS's rule)."""
        return ranked(self.samples)

    def __repr__(self) -> str:
        shown = f"prompt_ids {_short(self.prompt_ids)}" if self.prompt is None else _short(self.prompt)
        return f"Output({shown}, {len(self.samples)} samples, {sum(s.finished for s in self.samples)} finished)"


@dataclass(frozen=True)
class Result(Sequence[Output]):
    """One `Output` per prompt, in prompt order, and what it took."""

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
        return f"Result({len(self)} prompts, {len(samples)} samples, {sum(s.finished for s in samples)} finished, {self.stats!r})"

    def __len__(self) -> int:
        return len(self.outputs)

    def __iter__(self) -> Iterator[Output]:
        return iter(self.outputs)


@dataclass(frozen=True)
class Increment:
    """What one round added to one row, as `stream()` yields it; joined texts equal the sample's text exactly.

    Attributes:
        prompt: index of the prompt. sample: index of the row in its group.
        text: new text; never ends inside a UTF-8 character or inside what may become a stop string. May be "".
        token_ids: tokens committed in this round. accepted: how many of them (the first ones) were drafted.
        finish_reason: set on the row's last increment, which also carries the `Sample`.
    """

    prompt: int
    sample: int
    text: str
    token_ids: tuple[int, ...]
    accepted: int
    finish_reason: str | None = None
    result: Sample | None = None
