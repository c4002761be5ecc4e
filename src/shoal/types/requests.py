"""What was asked (`Request`) and what the engine knows of each sequence (`Row`)."""

from __future__ import annotations

import copy
import itertools
import sys
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.config import Limits, Sampling
from shoal.errors import ShoalError
from shoal.types.counts import DraftCounts, TokenCounts
from shoal.types.prefix import Prefix
from shoal.types.samples import TopLogprobs


@dataclass(frozen=True)
class Request:
    """n samples of one prompt: a group of n rows.

    Attributes:
        prompt_ids: the prompt's token ids, at least one.
        n: rows wanted, >= 1.
        prompt: the prompt's text, if it was given as text.
        top_logprobs: how many of the most probable tokens to report per committed token, before and
            after processing.
        keep_logits: keep the target's raw logits [vocab] of every committed token.
        occurrence: how often the same prompt occurs before it in the call with its seed; it keys
            the uniforms, with both.
        max_draft: longest draft of its rows, whatever the controller asks for; 0 = plain decoding;
            None = no limit.
        criteria: Transformers stopping criteria, called once per committed token with the ids so
            far [1, length].
        constraints: what limits the tokens that may follow
            (`shoal.constraints.protocol.Constraint`), beside `Sampling.grammar`; grammars and
            filters (`shoal.constraints.filters`); or what is asked about single tokens
            (`shoal.constraints.check.Check`), after all other controls.
        removed: tokens taken from the prompt, whose text the new tokens write again
            (`shoal.constraints.alignment`).
        removed_from: where in the prompt they were.
        weighted: samples report the weight that makes them samples of p given what the constraints
            allow.
        resampled: rows of small weight become copies of others while they run
            (`shoal.engine.resampling`).
        estimated: rows draw by what is known of how their beginnings go on
            (`shoal.constraints.estimates`).
        owner: whose request it is; prefixes that are kept of one owner's rows are not used for
            another's.
        weight: share of the slots beside other calls, see `shoal.engine.fairness`; > 0, the same
            for all requests of a call.
        shown_tokens: special tokens that the text shows; the one that ends a row is left out in any
            case.
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
    constraints: Sequence[Any] = ()
    removed: tuple[int, ...] = ()
    removed_from: int = 0
    weighted: bool = False
    resampled: bool = False
    estimated: bool = False
    owner: str = ""
    weight: float = 1.0
    shown_tokens: frozenset[int] = frozenset()
    submitted_at: float = field(default_factory=time.perf_counter)

    @property
    def asked_ids(self) -> tuple[int, ...]:
        """The prompt as it was given, with the tokens that were removed; it keys the uniforms."""
        return (
            *self.prompt_ids[: self.removed_from],
            *self.removed,
            *self.prompt_ids[self.removed_from :],
        )


def occurrences(prompts: Iterable[Hashable]) -> list[int]:
    """For each prompt of a call, or prompt and seed, how often the same one occurs before it; see
    `Request.occurrence`."""
    seen: Counter[Hashable] = Counter()
    found = []
    for prompt in prompts:
        found.append(seen[prompt])
        seen[prompt] += 1
    return found


_serials = itertools.count()
_OF_A_TEXT = (
    "prefix",
    "logprobs",
    "processed_logprobs",
    "top_logprobs",
    "logits",
    "drafters",
    "constraints",
    "checks",
    "end_logprobs",
    "rounds",
    "drafted",
    "accepted",
    "drafted_by",
    "target_passes",
    "log_allowed",
    "beginning",
)
"""Fields of a row that say what its text is, and how it came to be."""


@dataclass(eq=False, slots=True)
class Row:
    """One sequence being generated.

    Attributes:
        group: the rows of a group enter the caches with the same tokens: those of a request with
            its prompt, and a row that was paused (`shoal.engine.fairness`) with its own.
        index: of the row in its request.
        tokens: ids of the prompt and of committed tokens; only appended to.
        seed: of its uniforms.
        eos: ids that end it.
        max_length: most tokens it may hold.
        deadline: seconds of the engine's clock, or None.
        slot: of the caches, while it runs; -1 before.
        prefix: place of its prompt in the prefix store, if it is shared.
        call: number of the call that it came with.
        paused_at: tokens that it had when it was last paused; 0 = it never was.
        restored: tokens of its prompt that an earlier row's keys and values were copied for
            (`shoal.engine.prefix_cache`).
        detokenizer: None without a tokenizer.
        needs_text: the detokenizer gets every token at once (stop strings, streaming).
        constraints: those that hold for it (`shoal.constraints.protocol`), each with its state
            after the committed tokens.
        checks: those of its request, each with its state after the committed tokens.
        cutting: the check among them that says where a text that did not end by itself may be cut,
            if one does.
        beginning: its new tokens among those that rows of its prompt have written, if
            `Request.estimated` (`shoal.constraints.estimates.Node`); None also once they are bound
            by nothing.
        end_logprobs: natural log of what the target gives to its EOS tokens before each new token,
            if there is such a check.
        drafters: of each new token, the name of the drafter that proposed it; None for a
            replacement or bonus.
        drafted_by: tokens drafted, by the name of the drafter.
        error: why it failed, if it did.
        started_at: when it first got a slot, by the engine's clock; None before.
        serial: a number that no other row of the process has, rows that have ended included; the
            key for data that may outlive it.
        counts: of the tokens in prompt and output.
        output_counts: of those in the output. Updated when penalties read them.
        visible_from: characters of the new text that the user's prompt has already
            (`Request.removed`); the user's text follows.
        log_allowed: natural log of the product of what p gave to the allowed tokens, if
            `Request.weighted`.
        log_weight: of the row's weight, which is that product until the row is resampled
            (`shoal.engine.resampling`).
        draft_context: most tokens of the row that its drafter can read, and has memory for. A
            longer row is decoded plainly.
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
    call: int = 0
    paused_at: int = 0
    restored: int = 0
    logprobs: list[float] = field(default_factory=list)
    processed_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    logits: list[Any] = field(default_factory=list)
    drafters: list[str | None] = field(default_factory=list)
    detokenizer: Any = None
    needs_text: bool = False
    constraints: list[tuple[Any, Any]] = field(default_factory=list)
    checks: list[tuple[Any, Any]] = field(default_factory=list)
    cutting: Any = None
    beginning: Any = None
    end_logprobs: list[float] = field(default_factory=list)
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_by: dict[str, int] = field(default_factory=dict)
    target_passes: int = 0
    finish_reason: str | None = None
    error: ShoalError | None = None
    started_at: float | None = None
    finished_at: float | None = None
    visible_from: int = 0
    log_allowed: float = 0.0
    log_weight: float = 0.0
    draft_context: int = sys.maxsize
    serial: int = field(default_factory=_serials.__next__)
    counts: TokenCounts = field(default_factory=TokenCounts, repr=False)
    output_counts: TokenCounts = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.output_counts = TokenCounts(self.prompt_length)

    def become(self, other: Row, seed: int) -> None:
        """Takes the text of another row of its group, with the states and counts that belong to it,
        and goes on by another seed.

        Its slot stays; what is in it is the caller's to copy. Whatever was kept of the row by its
        serial is of no use any more.
        """
        self.tokens[:] = other.tokens
        for name in _OF_A_TEXT:
            setattr(self, name, copy.copy(getattr(other, name)))
        self.detokenizer = None if other.detokenizer is None else other.detokenizer.copy()
        self.counts, self.output_counts = TokenCounts(), TokenCounts(self.prompt_length)
        self.seed, self.serial = seed, next(_serials)

    def pause(self, group: int) -> None:
        """Leaves the caches for now. It will enter them with all its tokens, alone in a group of a
        new number."""
        self.paused_at, self.group, self.prefix = len(self.tokens), group, None

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def entry_length(self) -> int:
        """Tokens that it enters the caches with, the last one included, which its first round there
        feeds."""
        return max(self.prompt_length, self.paused_at)

    @property
    def new_tokens(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def by_drafter(self) -> dict[str, DraftCounts]:
        """Tokens drafted and accepted, by the name of the drafter."""
        return {
            name: DraftCounts(count, self.drafters.count(name))
            for name, count in self.drafted_by.items()
        }

    @property
    def reads_history(self) -> bool:
        """Whether what may follow depends on the tokens before a position, not on its scores
        alone."""
        return self.request.sampling.reads_history or bool(self.constraints)

    @property
    def remaining(self) -> int:
        """Tokens this row may still commit."""
        request = self.request
        return min(request.limits.max_new_tokens + len(request.prompt_ids), self.max_length) - len(
            self.tokens
        )

    @property
    def max_draft_length(self) -> int:
        """Longest draft of the coming round: one token less than the row may still commit, at most
        `Request.max_draft`, and only tokens that the drafter can draw within `draft_context`."""
        limits = [self.remaining - 1, self.draft_context - len(self.tokens) + 1]
        if self.request.max_draft is not None:
            limits.append(self.request.max_draft)
        return max(min(limits), 0)

    @property
    def draft_reach(self) -> int:
        """Most tokens of the row that its drafter reads; 0 if the prompt is longer than that."""
        return self.draft_context if self.prompt_length <= self.draft_context else 0
