"""Runs of `shoal bench` at the smallest size: a tiny pair, prompts, and ceilings of the machine that nobody measures."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO

import pytest
from rich.console import Console

from shoal.api import Shoal
from shoal.bench import job_runner as bench_runner
from shoal.bench import random_pairs, report_views
from shoal.bench.decoding_methods import Job
from shoal.bench.job_runner import BenchmarkRunner
from shoal.bench.machine import QuietGate
from shoal.bench.report import Report
from shoal.bench.work import Ceilings

POOL = [tuple(range(5 + i, 11 + 2 * i)) for i in range(8)]


@pytest.fixture(scope="module")
def pair() -> Shoal:
    return random_pairs.shaped_pair("tiny", dtype="float32", device="cpu", max_batch=8)


@pytest.fixture(scope="module", autouse=True)
def quick_ceilings() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_runner, "ceilings", lambda *_: Ceilings(1e9, 1e9))
        yield


def measured(pair: Shoal, job: Job, gate: QuietGate | None = None) -> Report:
    """A whole run; identity is checked where no gate says that time is the subject."""
    runner = BenchmarkRunner(pair, job, POOL, gate=gate) if gate else BenchmarkRunner(pair, job, POOL)
    if gate is None:
        runner.check()
    runner.warm_up()
    list(runner.measure())
    return runner.report


def printed(report: Report) -> list[str]:
    """The lines of a report's tables."""
    text = StringIO()
    report_views.show(report, Console(file=text, width=report_views.WIDTH))
    return text.getvalue().splitlines()
