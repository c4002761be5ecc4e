"""The case that `shoal check` works on: a model, the task, and runs that several checks share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any

from shoal.bench import Costs, interleave
from shoal.cli.check_prompts import PromptSet

if TYPE_CHECKING:
    from shoal.api import Shoal
    from shoal.bench.decoding_methods import Method
    from shoal.types.samples import Result

LONGEST = 8  # draft lengths 1..LONGEST are predicted
TEMPERATURE = 0.8
WARM_UP_TOKENS = 8  # of a row, before runs are timed
BASELINE_TOKENS = 8  # of a row of Transformers' generate, which may take ten times as long
SECONDS = 35.0
"""The seconds for all measurements, so that a check takes a minute with loading."""
DRAFTED = 2
"""The time of a run with drafts where they do not pay, in runs of plain decoding."""
LEAST_TOKENS = 16
"""The fewest tokens of a row that are measured where seconds are short."""


@dataclass(frozen=True)
class Effort:
    """The amount of work of the runs that are measured.

    Attributes:
        kinds: the number of kinds of prompts.
        prompts: the number of prompts of a kind.
        repeats: the number of timed runs.
        tokens: the number of new tokens of a row.
    """

    kinds: int
    prompts: int
    repeats: int
    tokens: int

    def within(
        self, passes: float, runs: Callable[[Effort], int], least: int = LEAST_TOKENS
    ) -> Effort:
        """Returns an effort of at most that many passes, if possible: less, then shorter.

        Args:
            passes: the passes of plain decoding that there is time for.
            runs: computes the time of an effort's runs, in runs of plain decoding.
            least: the fewest tokens of a row.
        """
        few = replace(self, prompts=1, repeats=1)
        for one in (self, few):
            if runs(one) * one.tokens <= passes:
                return one
        for one in (few, replace(few, kinds=1)):
            tokens = int(passes / runs(one))
            if tokens >= least:
                return replace(one, tokens=min(tokens, self.tokens))
        return replace(few, kinds=1, tokens=min(least, self.tokens))


PLAIN, TRANSFORMERS = "off", "hf"


@dataclass(frozen=True)
class MethodTimings:
    """The measurements of decoding methods.

    The methods run in turns on the same rows to the same number of tokens.

    Attributes:
        k: the draft length of the speculative method.
        runs: the number of runs of each method.
        rows: the number of rows of a run.
        tokens: the number of new tokens of a row.
        seconds: the seconds of all runs of a method together, by name; a method that could not run
            is in `unavailable`.
        committed: the number of tokens that all rows of a method committed, by name; Transformers'
            rows have `BASELINE_TOKENS` in one run.
        unavailable: the reasons that methods could not run, by name.
    """

    k: int
    runs: int
    rows: int
    tokens: int
    seconds: dict[str, float]
    committed: dict[str, int]
    unavailable: dict[str, str]

    def over(self, method: str) -> float | None:
        """Returns a method's seconds per token over the drafting one's; None if it cannot run."""
        each = {name: self.seconds[name] / self.committed[name] for name in self.seconds}
        return each[method] / each[f"fixed:{self.k}"] if method in each else None


@dataclass
class CheckCase:
    """A model and the task it is checked on."""

    model: Shoal
    sets: Sequence[PromptSet]
    n: int
    max_new_tokens: int
    k: int
    repeats: int
    say: Callable[[str], None] = field(repr=False)
    _accepted: dict[int, dict[float, Result]] = field(default_factory=dict, init=False)

    @property
    def draft_context(self) -> int:
        """The most tokens of a row that the drafter reads: the context of its model, if any."""
        return sys.maxsize if self.model.draft_model is None else self.model.draft_model.context

    def drafted(self) -> CheckCase:
        """Returns the case with only those prompts that fit in the drafter's context."""
        return replace(
            self, sets=[held for one in self.sets if (held := one.within(self.draft_context))]
        )

    def with_effort(self, effort: Effort) -> CheckCase:
        """Returns the case with less work."""
        sets = [one.first(effort.prompts) for one in self.sets[: effort.kinds]]
        return replace(self, sets=sets, repeats=effort.repeats, max_new_tokens=effort.tokens)

    @property
    def effort(self) -> Effort:
        """The amount of work of the case."""
        prompts = max(len(one.ids) for one in self.sets)
        return Effort(len(self.sets), prompts, self.repeats, self.max_new_tokens)

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """The token ids of all prompts."""
        return [ids for one in self.sets for ids in one.ids]

    @property
    def longest(self) -> int:
        """The number of tokens of the longest prompt."""
        return max(one.longest for one in self.sets)

    def run(
        self, lookahead: str | int, prompts: Sequence[tuple[int, ...]], **options: Any
    ) -> Result:
        """Draws samples with a fixed seed."""
        defaults: dict[str, Any] = {"temperature": TEMPERATURE, "seed": 0, "rule": "rejection"}
        defaults["max_new_tokens"] = self.max_new_tokens
        return self.model.generate(prompts, self.n, lookahead=lookahead, **defaults | options)

    @property
    def acceptance(self) -> list[dict[float, Result]]:
        """The speculative runs by temperature, set by set."""
        return [self.acceptance_on(place) for place in range(len(self.sets))]

    def acceptance_on(self, place: int) -> dict[float, Result]:
        """Returns the speculative runs of a set by temperature; they are made once."""
        if place not in self._accepted:
            self.say("measuring acceptance ...")
            self._accepted[place] = {
                t: self.run(self.k, self.sets[place].ids, temperature=t) for t in (TEMPERATURE, 0.0)
            }
        return self._accepted[place]

    @cached_property
    def timed(self) -> dict[int, list[Result]]:
        """The runs of the first prompt in turns, by draft length; all rows run to the end."""
        lengths = sorted({0, 1, self.k, LONGEST})
        self.say("warming up ...")
        for k in lengths:
            self.run(
                k, self.prompts[:1], eos=(), max_new_tokens=min(WARM_UP_TOKENS, self.max_new_tokens)
            )
        methods = {
            f"draft length {k}": lambda k=k: self.run(k, self.prompts[:1], eos=()) for k in lengths
        }
        return dict(zip(lengths, interleave(methods, self.repeats, self.say).values(), strict=True))

    @cached_property
    def costs(self) -> Costs:
        """The milliseconds per round and per pass, medians over the runs."""
        stats = {k: [result.stats for result in results] for k, results in self.timed.items()}
        return Costs(
            rounds={
                k: median(_per(s.seconds_rounds, s.rounds) for s in runs)
                for k, runs in stats.items()
            },
            target={
                k: median(_per(s.seconds_target, s.target_passes) for s in runs)
                for k, runs in stats.items()
            },
            draft=median(
                _per(s.seconds_draft, s.draft_passes)
                for k, runs in stats.items()
                if k
                for s in runs
            ),
        )

    @cached_property
    def seconds_of_round(self) -> float:
        """The seconds of a round of plain decoding: the least of some runs, the first warms up."""
        self.say("timing a pass ...")
        tokens = min(WARM_UP_TOKENS, self.max_new_tokens)
        runs = [
            self.run(PLAIN, self.prompts[:1], eos=(), max_new_tokens=tokens).stats for _ in range(3)
        ]
        return min(stats.seconds_rounds / max(1, stats.rounds) for stats in runs)

    @cached_property
    def baseline(self) -> tuple[float, int, str | None]:
        """Transformers' `generate` on the first prompt: its seconds, tokens and a refusal."""
        from shoal.bench.decoding_methods import baseline_method
        from shoal.bench.work import Work

        method = baseline_method(self.model, TRANSFORMERS)
        tokens = min(BASELINE_TOKENS, self.max_new_tokens)
        work = Work(tuple(self.prompts[:1]), self.n, TEMPERATURE, tokens, 0)
        self.say("measuring Transformers' decoding ...")
        reason = _refusal(method, replace(work, max_new_tokens=1))
        if reason is not None:
            return 0.0, 0, reason
        run = method.run(work)
        return run.seconds, run.committed, None

    def measured(self, one: PromptSet, k: int) -> MethodTimings:
        """Measures draft length k and plain decoding, in turns, and Transformers' `generate` once.

        The first two decode n rows of a prompt, prompt after prompt.
        """
        from shoal.bench.decoding_methods import shoal_method
        from shoal.bench.work import Work

        methods = [shoal_method(self.model, lookahead) for lookahead in (PLAIN, f"fixed:{k}")]
        tokens = min(self.max_new_tokens, self.model.target.context - one.longest)
        turns = self.turns(len(self.prompts))
        works = [
            Work((ids,), self.n, TEMPERATURE, tokens, seed)
            for seed, ids in enumerate(one.ids * turns)
        ]
        self.say("warming up ...")
        short = Work(one.ids[:1], self.n, TEMPERATURE, min(WARM_UP_TOKENS, tokens), 0)
        for method in methods:
            method.run(short)
        seconds = {method.name: 0.0 for method in methods}
        committed = dict.fromkeys(seconds, 0)
        for number, work in enumerate(works, 1):
            self.say(f"measuring plain and speculative decoding, {number} of {len(works)} ...")
            for method in methods[:: -1 if number % 2 else 1]:
                run = method.run(work)
                seconds[method.name] += run.seconds
                committed[method.name] += run.committed
        took, made, reason = self.baseline
        if reason is None:
            seconds[TRANSFORMERS], committed[TRANSFORMERS] = took, made
        return MethodTimings(
            k,
            len(works),
            self.n,
            tokens,
            seconds=seconds,
            committed=committed,
            unavailable={} if reason is None else {TRANSFORMERS: reason},
        )

    def turns(self, prompts: int) -> int:
        """Returns the runs of each of so many prompts, of which there are at least `repeats`."""
        return -(-self.repeats // prompts)


def _refusal(method: Method, work: Any) -> str | None:
    """Runs a method once to warm it up.

    Returns:
        The reason if a method of Transformers cannot run here. Errors of our own methods are
        raised.
    """
    try:
        method.run(work)
    except Exception as error:
        if not method.baseline:
            raise
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return None


def _per(seconds: float, count: int) -> float:
    """Returns the milliseconds of one pass or round."""
    return 1000 * seconds / max(1, count)
