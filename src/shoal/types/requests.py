"""A request (`Request`) and the engine's data of each sequence (`Row`).

A prefix is the place in the prefix store of a prompt that all rows of its group share.
"""

from __future__ import annotations

import copy
import itertools
import re
import sys
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from shoal.config import Limits, Sampling
from shoal.errors import ShoalError
from shoal.types.samples import TopLogprobs
from shoal.types.stats import DraftCounts, TokenCounts

Closing = str | re.Pattern[str] | None
"""The end of a part of a text; see `Request.unstopped`."""


@dataclass(frozen=True)
class Request:
    """A request for n samples of one prompt: a group of n rows.

    Attributes:
        prompt_ids: the prompt's token ids, at least one.
        n: the number of rows, >= 1.
        prompt: the prompt's text, if it was given as text.
        top_logprobs: the number of most probable tokens to report per committed token, before and
            after processing.
        keep_logits: keep the target's raw logits [vocab] of every committed token.
        occurrence: the number of earlier copies of the same prompt in the call with its seed; it
            keys the uniforms, with the prompt and the seed.
        max_draft: the largest draft length of its rows, whatever the controller asks for; 0 = plain
            decoding; None = no limit.
        criteria: Transformers stopping criteria, called once per committed token with the ids so
            far [1, length].
        constraints: limits of the tokens that may follow, beside `Sampling.grammar`: constraints
            (`shoal.constraints.protocol.Constraint`), grammars, filters
            (`shoal.constraints.filters`), or checks of single tokens after all other controls
            (`shoal.constraints.protocol.Check`).
        removed: tokens taken from the prompt, whose text the new tokens write again
            (`shoal.constraints.alignment`).
        removed_from: the place of these tokens in the prompt.
        weighted: samples report the weight that makes them samples of p conditioned on the
            constraints.
        resampled: rows of small weight become copies of other rows while they run
            (`shoal.engine.joint_rows`).
        estimated: rows draw by estimates of the continuations of their beginnings
            (`shoal.constraints.estimates`).
        distinct: rows draw whole texts without replacement (`shoal.engine.joint_rows`).
        owner: the owner of the request; prefixes that are kept of one owner's rows are not used for
            another owner's.
        weight: the share of the slots beside other calls, see `shoal.engine.waiting`; > 0, equal
            for all requests of a call.
        shown_tokens: special tokens that the text shows; the token that ends a row is left out.
        shows_end: the token that ends a row is shown as well, if it is one of `shown_tokens`.
        shown_stops: the stop strings that the text shows where they end it.
        unstopped: parts of the text in which stop strings end nothing: regular expressions of their
            openings, and the texts behind them, or expressions of these; "" = the rest of the text,
            None = the opening alone. Behind a part that begins the text (`\\A`) blanks end nothing
            either. Nor does a stop string within a closing, or within an opening that is an escaped
            text (behind `\\A`, `\\s*`), unless it holds the mark as a whole.
        shows_cut: the text begins with a character that the prompt cuts, completed or not.
        ends: tokens that end the text beside those of its limits, and are not shown.
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
    distinct: bool = False
    owner: str = ""
    weight: float = 1.0
    shown_tokens: frozenset[int] = frozenset()
    shows_end: bool = False
    shown_stops: frozenset[str] = frozenset()
    unstopped: tuple[tuple[str, Closing], ...] = ()
    shows_cut: bool = False
    ends: frozenset[int] = frozenset()
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
    """Counts each prompt's (or prompt and seed's) earlier copies; see `Request.occurrence`."""
    seen: Counter[Hashable] = Counter()
    places = []
    for prompt in prompts:
        places.append(seen[prompt])
        seen[prompt] += 1
    return places


_serials = itertools.count()
_OWN = ("detokenizer", "counts", "output_counts")
"""The fields of a row's text that are no copies of another row's: they go on by themselves."""


@dataclass(eq=False, slots=True, kw_only=True)
class RowText:
    """The fields of a row that belong to its text: the text's state and the counts of its rounds.

    Attributes:
        prefix: the place of its prompt in the prefix store, if the prompt is shared.
        drafters: for each new token, the name of the drafter that proposed it; None for a
            replacement or bonus.
        constraints: its constraints (`shoal.constraints.protocol`), each with its state after the
            committed tokens.
        checks: the checks of its request, each with its state after the committed tokens.
        end_logprobs: the natural log of the probability that the target gives to the row's EOS
            tokens before each new token, if there is such a check.
        drafted_by: the number of drafted tokens, by the name of the drafter.
        log_allowed: the natural log of the product of the probabilities that p gave to the allowed
            tokens, if `Request.weighted`.
        beginning: the node of its new tokens in the trie of all rows of its prompt, if
            `Request.estimated` or `Request.distinct` (see `shoal.constraints.estimates`). With
            estimates it is None also once no constraint binds the tokens.
        class_odds: the natural log of the expert's probability of the new tokens over the guide's,
            if `Sampling.posterior`.
        detokenizer: None without a tokenizer.
        needs_text: the detokenizer gets every token at once (stop strings, streaming).
        counts: the counts of the tokens in prompt and output.
        output_counts: the counts of the tokens in the output. Updated when penalties read them.
        visible_from: the number of characters of the new text that the user's prompt already has
            (`Request.removed`); the user's text follows.
    """

    prefix: Prefix | None = None
    logprobs: list[float] = field(default_factory=list)
    processed_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    logits: list[Any] = field(default_factory=list)
    drafters: list[str | None] = field(default_factory=list)
    constraints: list[tuple[Any, Any]] = field(default_factory=list)
    checks: list[tuple[Any, Any]] = field(default_factory=list)
    end_logprobs: list[float] = field(default_factory=list)
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_by: dict[str, int] = field(default_factory=dict)
    target_passes: int = 0
    log_allowed: float = 0.0
    beginning: Any = None
    class_odds: float = 0.0
    detokenizer: Any = None
    needs_text: bool = False
    visible_from: int = 0
    counts: TokenCounts = field(default_factory=TokenCounts, repr=False)
    output_counts: TokenCounts = field(init=False, repr=False)

    def take_text(self, other: RowText) -> None:
        """Takes the text, its state and the counts of its rounds from another row of the group."""
        for own in fields(RowText):
            if own.name not in _OWN:
                setattr(self, own.name, copy.copy(getattr(other, own.name)))
        self.detokenizer = None if other.detokenizer is None else other.detokenizer.copy()

    def recount(self, prompt_length: int) -> None:
        """Drops the counts of tokens, which are counted anew for a new text."""
        self.counts, self.output_counts = TokenCounts(), TokenCounts(prompt_length)

    @property
    def by_drafter(self) -> dict[str, DraftCounts]:
        """The numbers of drafted and accepted tokens, by the name of the drafter."""
        return {
            name: DraftCounts(count, self.drafters.count(name))
            for name, count in self.drafted_by.items()
        }


@dataclass(eq=False, slots=True)
class Row(RowText):
    """One sequence being generated.

    Attributes:
        group: the number of the row's group. Rows with the same group number have the same tokens
            when they enter the caches. The n rows of a request form one group. A paused row
            (`shoal.engine.waiting`) gets a group of its own.
        index: the number of the row in its request.
        tokens: ids of the prompt and of committed tokens; only appended to.
        seed: the seed of its uniforms.
        eos: ids that end it.
        max_length: the most tokens that it may hold.
        deadline: seconds of the engine's clock, or None.
        slot: its slot of the caches, while it runs; -1 before.
        call: the number of the call that it came with.
        paused_at: the number of its tokens when it was last paused; 0 = it never was.
        restored: the number of prompt tokens whose keys and values were copied from an earlier row
            (`shoal.engine.prefix_cache`).
        cutting: the one of the checks that finds the place to cut an unfinished text, if there is
            one.
        error: the reason of its failure, if it failed.
        started_at: the time when it first got a slot, by the engine's clock; None before.
        held_at: the time when its text ended, while the row waits for others of its prompt to be
            drawn beside it (`shoal.engine.joint_rows`); None otherwise.
        serial: a number that no other row of the process has, rows that have ended included; the
            key for data that may outlive the row.
        log_weight: the natural log of the row's weight, which is `log_allowed` until the row is
            resampled (`shoal.engine.joint_rows`), or its text drawn (`shoal.engine.joint_rows`).
        draft_context: the most tokens of the row that its drafter can read and has memory for. A
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
    call: int = 0
    paused_at: int = 0
    restored: int = 0
    cutting: Any = None
    finish_reason: str | None = None
    error: ShoalError | None = None
    started_at: float | None = None
    held_at: float | None = None
    log_weight: float = 0.0
    draft_context: int = sys.maxsize
    serial: int = field(default_factory=_serials.__next__)

    def __post_init__(self) -> None:
        self.recount(self.prompt_length)

    def become(self, other: Row, seed: int) -> None:
        """Takes text, states and counts of another row of its group, and goes on by another seed.

        The row keeps its slot; the caller copies the contents of the slot. The row gets a new
        serial, so data kept under the old one is no longer found.
        """
        self.tokens[:] = other.tokens
        self.take_text(other)
        self.recount(self.prompt_length)
        self.seed, self.serial = seed, next(_serials)

    def pause(self, group: int) -> None:
        """Notes that the row leaves the caches for now.

        The row will enter them again with all its tokens, alone in a group with a new number.
        """
        self.paused_at, self.group = len(self.tokens), group

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def entry_length(self) -> int:
        """The number of tokens with which the row enters the caches.

        The last one is included; the row's first round there feeds it.
        """
        return max(self.prompt_length, self.paused_at)

    @property
    def new_tokens(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def reads_history(self) -> bool:
        """True if the allowed tokens or the scores depend on the tokens before a position."""
        return self.request.sampling.reads_history or bool(self.constraints or self.beginning)

    @property
    def remaining(self) -> int:
        """The number of tokens that this row may still commit."""
        request = self.request
        return min(request.limits.max_new_tokens + len(request.prompt_ids), self.max_length) - len(
            self.tokens
        )

    @property
    def max_draft_length(self) -> int:
        """The largest draft length of the coming round.

        It is one less than the row may still commit, at most `Request.max_draft`, and counts only
        tokens that the drafter can draw within `draft_context`.
        """
        most = min(self.remaining - 1, self.draft_context - len(self.tokens) + 1)
        limit = self.request.max_draft
        return max(most if limit is None else min(most, limit), 0)

    @property
    def draft_reach(self) -> int:
        """The most tokens of the row that its drafter reads; 0 if the prompt is longer."""
        return self.draft_context if self.prompt_length <= self.draft_context else 0


@dataclass(frozen=True)
class Prefix:
    """A prompt that is stored once, in slots base .. base + length - 1 of the store.

    Attributes:
        base: the first token slot.
        length: the number of tokens.
        drafted: True if the drafter's cache stores the prompt, too.
    """

    base: int
    length: int
    drafted: bool = True


def token_slots(prefixes: Iterable[Prefix]) -> int:
    """Returns the number of token slots that these prompts need: up to the end of the last one."""
    return max((prefix.base + prefix.length for prefix in prefixes), default=0)
