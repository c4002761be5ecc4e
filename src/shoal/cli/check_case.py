"""The case that `shoal check` works on: a model, the task, and runs that several checks share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any

from shoal.bench.measure import Costs, interleave
from shoal.cli.check_prompts import PromptSet

if TYPE_CHECKING:
    from shoal.api import Shoal
    from shoal.bench.decoding_methods import Method
    from shoal.types.samples import Result

LONGEST = 8  # draft lengths 1..LONGEST are predicted
TEMPERATURE = 0.8
WARM_UP_TOKENS = 16
PLAIN, TRANSFORMERS = "off", "hf"


@dataclass(frozen=True)
class Measured:
    """The measurements of decoding methods.

    The methods run in turns on the same rows to the same number of tokens.

    Attributes:
        k: the draft length of the speculative method.
        runs: the number of runs of each method.
        rows: the number of rows of a run.
        tokens: the number of new tokens of a row.
        seconds: the seconds of all runs of a method together, by name; a method that could not run
            is in `unavailable`.
        committed: the number of tokens that all rows of a method committed, by name.
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
        """Returns a method's seconds over the speculative one's; None if it could not run."""
        return (
            self.seconds[method] / self.seconds[f"fixed:{self.k}"]
            if method in self.seconds
            else None
        )


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

    @property
    def draft_context(self) -> int:
        """The most tokens of a row that the drafter reads.

        It is the context of the draft model; without a draft model there is no limit.
        """
        return sys.maxsize if self.model.draft_model is None else self.model.draft_model.context

    def drafted(self) -> CheckCase:
        """Returns the case with only those prompts that fit in the drafter's context.

        Nothing is drafted for longer prompts.
        """
        return replace(
            self, sets=[held for one in self.sets if (held := one.within(self.draft_context))]
        )

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

    @cached_property
    def acceptance(self) -> list[dict[float, Result]]:
        """The speculative runs by temperature, set by set."""
        self.say("measuring acceptance ...")
        return [
            {t: self.run(self.k, one.ids, temperature=t) for t in (TEMPERATURE, 0.0)}
            for one in self.sets
        ]

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

    def measured(self, one: PromptSet, k: int) -> Measured:
        """Measures draft length k, plain decoding and Transformers' batched `generate`.

        Each decodes n rows of a prompt, prompt after prompt.
        """
        from shoal.bench.decoding_methods import baseline_method, shoal_method
        from shoal.bench.work import Work

        plain, speculative = (
            shoal_method(self.model, lookahead) for lookahead in (PLAIN, f"fixed:{k}")
        )
        methods = [plain, baseline_method(self.model, TRANSFORMERS), speculative]
        tokens = min(self.max_new_tokens, self.model.target.context - one.longest)
        turns = -(-self.repeats // len(self.prompts))  # at least `repeats` runs in all
        works = [
            Work((ids,), self.n, TEMPERATURE, tokens, seed)
            for seed, ids in enumerate(one.ids * turns)
        ]
        self.say("warming up ...")
        short = Work(one.ids[:1], self.n, TEMPERATURE, min(WARM_UP_TOKENS, tokens), 0)
        unavailable = {
            method.name: reason
            for method in methods
            if (reason := _refusal(method, short)) is not None
        }
        seconds: dict[str, float] = {
            method.name: 0.0 for method in methods if method.name not in unavailable
        }
        committed = dict.fromkeys(seconds, 0)
        for number, work in enumerate(works, 1):
            self.say(
                f"measuring plain, speculative and Transformers' decoding, {number} of "
                f"{len(works)} ..."
            )
            for method in methods[:: -1 if number % 2 else 1]:
                if method.name in seconds:
                    run = method.run(work)
                    seconds[method.name] += run.seconds
                    committed[method.name] += run.committed
        return Measured(
            k,
            len(works),
            self.n,
            tokens=tokens,
            seconds=seconds,
            committed=committed,
            unavailable=unavailable,
        )


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
