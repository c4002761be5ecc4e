"""The measurements of `shoal bench`: timing in turns, greedy identity, and results from costs.

Runs are interleaved, so that a machine that warms up or runs other programs affects all methods
alike; medians are shown. The figures of docs/measurements/performance.md come from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from shoal.api import Shoal
    from shoal.types.samples import Result, Sample


Run = TypeVar("Run")
"""The result of one timed run."""


@dataclass(frozen=True)
class Speed:
    """The medians over repeated runs of one decoding method.

    Attributes:
        ms_per_token_first: the milliseconds from submission to the end of the row that ended first,
            per token of it.
        ms_per_token_mean: the mean of such times over rows.
        ms_per_token_last: the time of the row that ended last.
    """

    tokens_per_second: float
    seconds: float
    ms_per_token_first: float
    ms_per_token_mean: float
    ms_per_token_last: float
    acceptance_length: float
    target_passes: int
    rounds: int
    drafted: int
    accepted: int
    committed: int

    @staticmethod
    def of(results: Sequence[Result]) -> Speed:
        """Computes the medians; counts differ between runs only if seeds do."""
        stats = [result.stats for result in results]
        first, mean, last = (median(times) for times in zip(*map(_row_times, results), strict=True))

        def middle(name: str) -> Any:
            return median(getattr(one, name) for one in stats)

        counts = {
            name: round(middle(name))
            for name in ("target_passes", "rounds", "drafted", "accepted", "committed")
        }
        return Speed(
            tokens_per_second=middle("tokens_per_second"),
            seconds=middle("seconds"),
            ms_per_token_first=first,
            ms_per_token_mean=mean,
            ms_per_token_last=last,
            acceptance_length=middle("acceptance_length"),
            **counts,
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns an object for JSON."""
        return asdict(self)


def _row_times(result: Result) -> tuple[float, float, float]:
    """Returns milliseconds per token of the first row to end, the mean row, and the last to end."""
    rows = sorted(rows_of(result), key=lambda sample: sample.finished_at)
    times = [1000 * sample.finished_at / max(1, len(sample.token_ids)) for sample in rows]
    return times[0], fmean(times), times[-1]


def rows_of(result: Result) -> list[Sample]:
    """Returns all samples of all prompts, in order."""
    return [sample for output in result for sample in output.samples]


def in_turns(methods: Sequence[str], repeats: int) -> Iterator[tuple[int, str]]:
    """Yields (repeat, method); the methods take turns, every other turn in reverse order."""
    for repeat in range(repeats):
        for name in methods[:: -1 if repeat % 2 else 1]:
            yield repeat, name


def interleave(
    methods: Mapping[str, Callable[[], Run]],
    repeats: int,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, list[Run]]:
    """Runs every method `repeats` times, in turns."""
    results: dict[str, list[Run]] = {name: [] for name in methods}
    for repeat, name in in_turns(list(methods), repeats):
        say(f"measuring {name}, {repeat + 1} of {repeats} ...")
        results[name].append(methods[name]())
    return results


@dataclass(frozen=True)
class Identity:
    """The comparison of greedy speculation with greedy plain decoding.

    Attributes:
        rows: the number of rows compared.
        same: the number of equal rows.
        drafted: the drafted tokens of the speculative run; 0 proves nothing.
        difference: prompt, row and position of the first difference.
    """

    rows: int
    same: int
    drafted: int
    difference: tuple[int, int, int] | None

    @property
    def holds(self) -> bool:
        """True if every row is the same, and speculation took part."""
        return self.same == self.rows and self.drafted > 0

    @property
    def summary(self) -> str:
        """The word "yes", or "no" with the reason."""
        if self.drafted == 0:
            return "no (nothing was drafted, so nothing was tested)"
        if self.difference is None:
            return "yes"
        return f"no (first difference: {self.place})"

    @property
    def place(self) -> str:
        """The place of the first difference, counted from 1; "" if there is none."""
        if self.difference is None:
            return ""
        prompt, row, position = self.difference
        return f"prompt {prompt + 1}, row {row + 1}, token {position + 1}"


def greedy_identity(
    model: Shoal,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    n: int,
    lookahead: str | int,
    **options: Any,
) -> Identity:
    """Decodes greedily, plainly and speculatively, and compares the token ids of all rows."""
    plain = model.generate(prompts, n, temperature=0.0, lookahead="off", **options)
    speculative = model.generate(prompts, n, temperature=0.0, lookahead=lookahead, **options)
    return compared(token_ids(plain), token_ids(speculative), speculative.stats.drafted)


def token_ids(result: Result) -> list[list[tuple[int, ...]]]:
    """Returns the tokens of all samples, by prompt."""
    return [[sample.token_ids for sample in output.samples] for output in result]


def compared(
    left: Sequence[Sequence[Sequence[int]]], right: Sequence[Sequence[Sequence[int]]], drafted: int
) -> Identity:
    """Compares the token ids of two runs, prompt by prompt and row by row."""
    positions = {
        (prompt, row): first_difference(a, b)
        for prompt, rows in enumerate(zip(left, right, strict=True))
        for row, (a, b) in enumerate(zip(*rows, strict=True))
    }
    differing = [
        (prompt, row, position)
        for (prompt, row), position in positions.items()
        if position is not None
    ]
    return Identity(
        len(positions), len(positions) - len(differing), drafted, min(differing, default=None)
    )


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Returns the first position at which two sequences differ; None for equal ones."""
    for position, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))


@dataclass(frozen=True)
class Costs:
    """The measured milliseconds with all rows of a batch running.

    Attributes:
        rounds: draft length -> one round: target pass, draft passes and bookkeeping together; has 0
            and one more.
        target: draft length -> the target pass within it.
        draft: one draft pass.
    """

    rounds: Mapping[int, float]
    target: Mapping[int, float]
    draft: float

    def overhead(self, k: int) -> float:
        """Computes the bookkeeping: the time of a measured round beside its passes."""
        return self.rounds[k] - self.target[k] - k * self.draft

    def round(self, k: int) -> float:
        """Returns the time of a round at any draft length.

        It is measured, or on the line through the nearest two lengths that were measured.
        """
        known = sorted(self.rounds)
        right = next((length for length in known[1:] if length >= k), known[-1])
        left = known[known.index(right) - 1]
        slope = (self.rounds[right] - self.rounds[left]) / (right - left)
        return self.rounds[left] + slope * (k - left)


def per_position(rate: float, k: int) -> float:
    """Computes the probability a with which each next draft token is accepted.

    The rate is accepted / drafted at draft length k. Drafts are kept up to the first rejection, so
    the rate is (a + a^2 + ... + a^k) / k; solved by bisection.
    """
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if sum(middle**i for i in range(1, k + 1)) / k < rate:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def predicted_speedup(acceptance: float, k: int, costs: Costs) -> float:
    """Computes tokens per round over the cost of a round compared with a plain one.

    A round commits (1 - a^(k+1)) / (1 - a) tokens, where a is `acceptance`.
    """
    tokens = sum(acceptance**i for i in range(k + 1))
    return tokens * costs.round(0) / costs.round(k)
