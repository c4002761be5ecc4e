"""What was asked (`Request`) and what the engine knows of each sequence (`Row`)."""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.config import Limits, Sampling
from shoal.errors import ShoalError
from shoal.types.counts import TokenCounts
from shoal.types.prefix import Prefix
from shoal.types.samples import TopLogprobs


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
