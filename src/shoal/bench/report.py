"""The results of a benchmark.

There is one `ReportLine` per case and setting, and a `Report` that goes to a JSON file and comes
back the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, NamedTuple

from shoal.bench import Identity
from shoal.bench.work import Case, Run
from shoal.types.stats import Stats

FORMAT = 1
"""The format of the file; a reader refuses files of another one."""


class Spread(NamedTuple):
    """The median, the lowest and the highest value over the repeats."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(median(values), min(values), max(values))


@dataclass(frozen=True)
class GreedyIdentity:
    """The greedy identity of a configuration.

    Attributes:
        rows: the number of rows compared.
        same: the number of rows equal to plain decoding.
        drafted: the tokens drafted meanwhile.
        control_rows: in 16 bit, the number of rows of plain decoding that were also decoded alone;
            else None.
        control_same: in 16 bit, the number of those rows that are the same alone; else None.
    """

    rows: int
    same: int
    drafted: int
    control_rows: int | None = None
    control_same: int | None = None

    @staticmethod
    def of(identity: Identity, control: Identity | None) -> GreedyIdentity:
        controls = (control.rows, control.same) if control else (None, None)
        return GreedyIdentity(identity.rows, identity.same, identity.drafted, *controls)


@dataclass(frozen=True)
class ReportLine:
    """The medians over the repeats of one setting of one case.

    A field that does not apply to the setting is None.

    Attributes:
        imposed: the acceptance rate that was imposed, None if the real rule decided.
        speedup: the speed-up over plain decoding (shoal's k = 0) of the same repeat.
        ms_first: the milliseconds from submission to the end of the row that ended first, per token
            of it.
        ms_mean: the mean of such times over rows.
        ms_last: the time of the row that ended last.
        committed: the committed tokens of one run.
        drafted: the drafted tokens of one run.
        accepted: the accepted tokens of one run.
        rounds: the rounds of one run.
        stages: the milliseconds per round in draft, verify, accept, commit, other.
        prefill: the milliseconds of prefill of a run.
        decoding: the tokens per second of a run's rounds, without its prompts.
        flops: the operations per second that the models must do (see `shoal.bench.work`).
        bytes: the bytes per second that the models must move.
        peak_bytes: the weights and all tensors alive at once.
        runs: every repeat.
    """

    layout: str
    temperature: float
    batch: int
    samples: int
    setting: str
    baseline: bool
    tokens_per_second: Spread
    speedup: Spread
    ms_first: float
    ms_mean: float
    ms_last: float
    committed: float
    imposed: float | None = None
    acceptance_length: float | None = None
    drafted: float | None = None
    accepted: float | None = None
    rounds: float | None = None
    stages: dict[str, float] = field(default_factory=dict)
    prefill: float | None = None
    decoding: float | None = None
    flops: float | None = None
    bytes: float | None = None
    peak_bytes: int | None = None
    identity: GreedyIdentity | None = None
    runs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def disturbed(self) -> int:
        """The number of repeats beside which another process was busy, as far as that is known."""
        return sum(bool(run.get("busy")) for run in self.runs)

    @property
    def label(self) -> str:
        """The setting, and that its acceptance was imposed if so."""
        return f"{self.setting} imposed" if self.imposed is not None else self.setting

    @property
    def case(self) -> tuple[str, float]:
        """The layout and temperature that a table shows."""
        return self.layout, self.temperature


def line(
    case: Case,
    setting: str,
    baseline: bool,
    runs: Sequence[Run],
    plain: Sequence[Run],
    rates: Sequence[tuple[float, float]] = (),
    **more: Any,
) -> ReportLine:
    """Computes the medians.

    Args:
        plain: the runs of plain decoding in the same repeats.
        more: fields that are known already.
    """
    first, mean, last = (median(times) for times in zip(*(run.row_ms for run in runs), strict=True))
    counts = {} if baseline else _counts([run.stats for run in runs if run.stats is not None])
    flops, moved = (
        (median(values) for values in zip(*rates, strict=True)) if rates else (None, None)
    )
    return ReportLine(
        case.layout,
        case.temperature,
        case.batch,
        case.samples,
        setting,
        baseline,
        tokens_per_second=Spread.of([run.tokens_per_second for run in runs]),
        speedup=Spread.of(
            [a.tokens_per_second / b.tokens_per_second for a, b in zip(runs, plain, strict=True)]
        ),
        ms_first=first,
        ms_mean=mean,
        ms_last=last,
        committed=median(run.committed for run in runs),
        flops=flops,
        bytes=moved,
        runs=[run.to_dict() for run in runs],
        **counts,
        **more,
    )


def _counts(stats: Sequence[Stats]) -> dict[str, Any]:
    names = ("acceptance_length", "drafted", "accepted", "rounds")
    stages = [_stages(one) for one in stats]
    return {name: median(getattr(one, name) for one in stats) for name in names} | {
        "stages": {name: median(one[name] for one in stages) for name in stages[0]},
        "prefill": median(1000 * one.seconds_prefill for one in stats),
        "decoding": median(
            one.committed / one.seconds_rounds if one.seconds_rounds else 0.0 for one in stats
        )
        or None,
    }


def _stages(stats: Stats) -> dict[str, float]:
    """Computes milliseconds per round.

    Work on an accelerator is queued: the stage that waits for it pays for it.
    """
    names = {"draft": "propose", "verify": "verify", "accept": "accept", "commit": "commit"}
    spent = {name: getattr(stats, f"seconds_{field}") for name, field in names.items()}
    spent["other"] = stats.seconds - stats.seconds_prefill - sum(spent.values())
    return {name: 1000 * seconds / stats.rounds for name, seconds in spent.items()}


@dataclass
class Report:
    """A report of all measurements, the machine, and the settings that could not run.

    Attributes:
        config: the settings of the job.
        machine: the machine and the versions.
        unavailable: setting -> reason, by case.
        complete: False if it was interrupted.
    """

    config: dict[str, Any]
    machine: dict[str, Any]
    lines: list[ReportLine] = field(default_factory=list)
    unavailable: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = False

    def tables(self) -> dict[tuple[str, float], list[ReportLine]]:
        """Groups the lines by layout and temperature, in the order measured."""
        tables: dict[tuple[str, float], list[ReportLine]] = {}
        for one in self.lines:
            tables.setdefault(one.case, []).append(one)
        return tables

    def ceiling(self, what: str) -> float | None:
        """Returns "flops" or "bytes" per second of the machine, the higher of two measurements."""
        measured = [
            self.machine[when][what]
            for when in ("ceilings_before", "ceilings_after")
            if when in self.machine
        ]
        return max(measured, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Returns an object for JSON."""
        return {"format": FORMAT} | asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Report:
        """Restores a report from `to_dict`, also after JSON; other formats raise ValueError."""
        data = dict(data)
        if data.pop("format", None) != FORMAT:
            raise ValueError(f"not a results file of format {FORMAT}")
        return Report(**data | {"lines": [_line_from(one) for one in data["lines"]]})


def _line_from(data: dict[str, Any]) -> ReportLine:
    spreads = {name: Spread(*data[name]) for name in ("tokens_per_second", "speedup")}
    identity = GreedyIdentity(**data["identity"]) if data["identity"] else None
    return ReportLine(**data | spreads | {"identity": identity})
