"""The task that every decoding method is given, and the result of one run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch

from shoal.bench.machine import BusyProcess
from shoal.errors import RequestError
from shoal.types.stats import Stats

LAYOUTS = ("different", "same", "grouped")
"""The layouts: a prompt per row; one prompt for all rows; groups with n rows each."""

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A group of lines of the table: `batch` rows, `samples` of each prompt."""

    layout: str
    temperature: float
    batch: int
    samples: int

    @staticmethod
    def of(layout: str, temperature: float, batch: int, n: int) -> Case:
        """Makes a case of a layout.

        Raises:
            RequestError: the layout is unknown, or groups of n rows do not fill the batch.
        """
        if layout not in LAYOUTS:
            raise RequestError(
                f"layout must be one of {', '.join(LAYOUTS)} or both, got {layout!r}"
            )
        samples = {"different": 1, "same": batch, "grouped": min(n, batch)}[layout]
        if batch < 1 or samples < 1 or batch % samples:
            raise RequestError(f"a batch of {batch} rows cannot be filled with groups of {samples}")
        return Case(layout, temperature, batch, samples)

    @property
    def name(self) -> str:
        """The name for messages and progress."""
        return f"{self.batch} rows, layout {self.layout}"


@dataclass(frozen=True)
class Work:
    """The task of one run: n samples of each prompt.

    Attributes:
        prompts: the token ids of each prompt.
        eos: the ids that end a row; () lets every row run to `max_new_tokens`.
    """

    prompts: tuple[Ids, ...]
    n: int
    temperature: float
    max_new_tokens: int
    seed: int
    eos: Ids = ()

    @property
    def rows(self) -> list[Ids]:
        """The prompt of every row, in order."""
        return [prompt for prompt in self.prompts for _ in range(self.n)]

    def greedy(self) -> Work:
        """Returns the work, decoded greedily."""
        return replace(self, temperature=0.0)

    def by_prompt(self, ids: Sequence[Ids]) -> list[Sequence[Ids]]:
        """Groups the rows' ids by prompt."""
        return [ids[i : i + self.n] for i in range(0, len(ids), self.n)]


def work_of(
    case: Case,
    pool: Sequence[Ids],
    repeat: int,
    *,
    max_new_tokens: int,
    seed: int = 0,
    eos: Ids = (),
) -> Work:
    """Makes the task of one repeat: it takes the next prompts of the pool and a seed of its own."""
    count = case.batch // case.samples
    if count > len(pool):
        raise RequestError(
            f"{count} different prompts are needed for {case.batch} rows, and {len(pool)} were "
            f"given"
        )
    prompts = tuple(pool[(repeat * count + i) % len(pool)] for i in range(count))
    return Work(prompts, case.samples, case.temperature, max_new_tokens, seed + 1000 * repeat, eos)


@dataclass(frozen=True)
class Run:
    """The outcome of a run.

    Attributes:
        seconds: the seconds from submission until everything was there.
        ended: the seconds from submission until each row was there.
        ids: the tokens of every row up to its end, EOS included.
        stats: the counts of passes and positions, if they are known.
        busy: other processes that were busy meanwhile; None: not known.
    """

    seconds: float
    ended: tuple[float, ...]
    ids: tuple[Ids, ...]
    stats: Stats | None = None
    busy: tuple[BusyProcess, ...] | None = None

    @property
    def committed(self) -> int:
        """The number of tokens over all rows, each counted up to its end."""
        return sum(map(len, self.ids))

    @property
    def tokens_per_second(self) -> float:
        return self.committed / self.seconds

    @property
    def row_ms(self) -> tuple[float, float, float]:
        """The milliseconds per token of the first row to end, the mean row, and the last to end."""
        order = sorted(range(len(self.ids)), key=lambda row: self.ended[row])
        times = [1000 * self.ended[row] / max(1, len(self.ids[row])) for row in order]
        return times[0], fmean(times), times[-1]

    def to_dict(self) -> dict[str, Any]:
        """Returns an object for JSON, without the tokens, and without `loaded`.

        A report has `loaded` once.
        """
        counts = replace(self.stats, loaded={}).to_dict() if self.stats else None
        busy = None if self.busy is None else [vars(one) for one in self.busy]
        tokens = list(map(len, self.ids))
        return {
            "seconds": self.seconds,
            "ended": list(self.ended),
            "tokens": tokens,
            "stats": counts,
            "busy": busy,
        }


class TimedBlock:
    """The seconds of a block, set when the `timed` block is left."""

    seconds: float = 0.0


@contextmanager
def timed(device: torch.device) -> Iterator[TimedBlock]:
    """Measures the wall clock of a block, with the device's queue empty at both ends."""
    watch = TimedBlock()
    _synchronise(device)
    started = time.perf_counter()
    yield watch
    _synchronise(device)
    watch.seconds = time.perf_counter() - started


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
