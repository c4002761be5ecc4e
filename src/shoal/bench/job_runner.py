"""The measurement of a job.

Greedy identity comes first, then interleaved runs of every method on the same work. There are three
passes over all cases. *check* compares greedy speculation with greedy plain decoding at each batch
size, layout, draft length and number format that will be timed; in float32 a difference raises.
*warm_up* runs every method once, finds the methods that are not available here, and counts peak
memory. *measure* makes the repeats; the methods take turns, every other turn in reverse order.

The peak memory of tensors is counted. It is not guessed from the process size, which holds Python,
torch and its code pages.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from shoal.api import Shoal
from shoal.bench import in_turns
from shoal.bench.decoding_methods import (
    PLAIN,
    IdentityCheck,
    Job,
    Method,
    baseline_method,
    shoal_method,
)
from shoal.bench.machine import QuietGate, machine
from shoal.bench.random_pairs import imposing
from shoal.bench.report import Report, ReportLine, line
from shoal.bench.work import Case, Ids, Load, Run, Work, ceilings, rates, timed, work_of
from shoal.errors import InternalError, RequestError
from shoal.models.load_report import described
from shoal.models.runner import Runner
from shoal.models.sources import bundled


def peak_tensor_bytes(work: Callable[[], object]) -> int:
    """Counts, under the profiler, the most bytes of CPU tensors that `work` had at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    alive = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak


def peak_device_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Returns the most bytes that torch held on CUDA during `work`, with those held before it."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    return torch.cuda.max_memory_allocated(device)


EXACT = (torch.float32, torch.float64)
COUNTED_TOKENS = (
    64  # over which memory is counted on a CPU: the profiler keeps gigabytes of events in long runs
)


@dataclass
class BenchmarkRunner:
    """A runner that measures one job on one pair.

    Args:
        pair: the models; `max_batch` must hold the largest batch.
        pool: the prompts as ids.
        step: called before every run, with its name.
        gate: waits for a quiet machine before runs are timed, and watches them.

    Attributes:
        report: grows while it is measured.
        expected: the seconds that each method took for a case when it was warmed up, for the runs
            that are still to come.
    """

    pair: Shoal
    job: Job
    pool: Sequence[Ids]
    step: Callable[[str], None] = lambda _: None
    gate: QuietGate = field(default_factory=lambda: QuietGate(timeout=0))
    report: Report = field(init=False)

    def __post_init__(self) -> None:
        self._measured = (
            self.pair if self.job.acceptance is None else imposing(self.pair, self.job.acceptance)
        )
        self.methods = [
            shoal_method(self._measured, name, self.job.rule, self.job.guided)
            for name in self.job.lookaheads
        ]
        self.methods += [baseline_method(self.pair, name) for name in self.job.baselines]
        if self.pair.drafter_name is None and len(self.job.lookaheads) > 1:
            raise RequestError(
                "there is no drafter to compare plain decoding with: give --draft, or "
                "--lookahead off"
            )
        self.report = Report(self._config(), machine(self.pair.target.device))
        exact = self.pair.target.dtype in EXACT
        decode = lambda name: shoal_method(  # noqa: E731
            self.pair, name, self.job.rule, self.job.guided
        )
        self.identity = IdentityCheck(decode, self.report.config["dtype"], exact, self.step)
        self.expected: dict[tuple[Case, str], list[float]] = {}
        self._peaks: dict[tuple[str, int, str], int] = {}
        self._refused: set[tuple[Case, str]] = set()
        self._drafter_load = Load.of_drafter(self.pair)
        for case in self.job.cases:
            self._work(
                case, 0
            )  # a case that cannot be filled is refused before anything is measured

    @property
    def seconds_left(self) -> float | None:
        """The seconds of the timed runs still to come, by the warm-up; None before it."""
        return sum(map(sum, self.expected.values())) if self.expected else None

    @property
    def steps(self) -> int:
        """The most calls of `step`."""
        checks = len({(case.layout, case.batch) for case in self.job.cases}) * len(
            self.job.lookaheads
        )
        return checks + len(self.job.cases) * len(self.methods) * (1 + self.job.repeats)

    def _config(self) -> dict[str, Any]:
        models = {"target": self.pair.target, "draft": self.pair.draft_model}
        guides = {"guide": self.pair.guide, "expert": self.pair.expert}
        models |= {role: one for role, one in guides.items() if one is not None}
        described = {
            role: None if model is None else _described(model) for role, model in models.items()
        }
        if self.pair.drafting is not None:
            described["draft"] = {"name": self.pair.drafting.name} | (described["draft"] or {})
        dtype = str(self.pair.target.dtype).removeprefix("torch.")
        lengths = [len(ids) for ids in self.pool]
        return (
            described
            | vars(self.job)
            | {"dtype": dtype, "prompt_tokens": [min(lengths), max(lengths)]}
        )

    def _work(self, case: Case, repeat: int) -> Work:
        job = self.job
        return work_of(
            case, self.pool, repeat, max_new_tokens=job.max_new_tokens, seed=job.seed, eos=job.eos
        )

    def check(self) -> None:
        """Checks the greedy identity of every configuration, by the real rule (`IdentityCheck`)."""
        for case in {(c.layout, c.batch): c for c in self.job.cases}.values():
            self.identity.check(case, self._work(case, 0).greedy(), self.job.lookaheads[1:])

    # ── timing ────────────────────────────────────────────────────────────────────────────────────

    def warm_up(self) -> float:
        """Runs every method once; returns the seconds that `measure` will take at most."""
        expected = {}
        for case, method in product(self.job.cases, self.methods):
            self.step(f"warming up, {case.name}: {method.name}")
            work = self._work(case, 0)
            try:
                spent = self._first_run(case, method, work)
            except Exception as error:
                if not method.baseline:
                    raise
                self._refuse(case, method, error)
                continue
            expected[case, method.name] = [spent] * self.job.repeats
            self._require_passes()
        self.expected = expected
        return self.seconds_left or 0.0

    def _require_passes(self) -> None:
        """Checks that ordinary passes have not taken over from captured ones.

        Raises:
            InternalError: they have, so that the times are not those that were asked for.
        """
        for model in (self.pair.target, self.pair.draft_model):
            if model is not None and model.capture_failure is not None:
                what = f"{model.name}: its {described(model)['passes']} compute passes now"
                raise InternalError(f"{what}: no times are shown; --compile off measures these")

    def _note_passes(self) -> None:
        """Notes which executors compute passes by now.

        Rounds that should have been captured may have been left to their stages.
        """
        for role, model in (("target", self.pair.target), ("draft", self.pair.draft_model)):
            if model is not None:
                failures = [] if model.captures is None else model.captures.failures
                self.report.config[role] |= {
                    "passes": described(model)["passes"],
                    "failures": failures,
                }

    def _first_run(self, case: Case, method: Method, work: Work) -> float:
        """Runs a method once, and returns its seconds; notes its peak memory.

        On a CPU, peak memory is measured in a run of its own. That run is slow, and `auto` must not
        learn from it.
        """
        device, key = self.pair.target.device, (case.layout, case.batch, method.name)
        with timed(device) as watch:
            if device.type == "cuda":
                self._peaks[key] = peak_device_bytes(partial(method.run, work), device)
            else:
                method.run(work)
        if device.type == "cpu" and method.countable and key not in self._peaks:
            pair_costs = self._measured.pair_costs
            self._measured.pair_costs = copy.deepcopy(self._measured.pair_costs)
            try:
                short = replace(work, max_new_tokens=min(work.max_new_tokens, COUNTED_TOKENS))
                self._peaks[key] = self._weights() + peak_tensor_bytes(partial(method.run, short))
            finally:
                self._measured.pair_costs = pair_costs
        return watch.seconds

    def _weights(self) -> int:
        pair = self.pair
        models = {pair.target, pair.draft_model, pair.guide, pair.expert}
        return sum(model.parameter_bytes for model in models if model is not None)

    def _refuse(self, case: Case, method: Method, error: Exception) -> None:
        """Lists a baseline that cannot run, with its reason."""
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        self._refused.add((case, method.name))
        self.report.unavailable.append(
            {
                "layout": case.layout,
                "temperature": case.temperature,
                "batch": case.batch,
                "setting": method.name,
                "reason": reason,
            }
        )

    def measure(self) -> Iterator[ReportLine]:
        """Yields the lines, case by case.

        The report has them too, also those of a case that was interrupted.

        Raises:
            InternalError: greedy timed runs of an exact format differ.
        """
        device, dtype = self.pair.target.device, self.pair.target.dtype
        self.report.machine["ceilings_before"] = vars(ceilings(device, dtype))
        for case in self.job.cases:
            runs: dict[str, list[Run]] = defaultdict(list)
            try:
                self._repeat(case, runs)
            finally:
                self._note_passes()
                lines = self._lines(case, runs)
                self.report.lines += lines
            yield from lines
        self.report.machine["ceilings_after"] = vars(ceilings(device, dtype))
        self.report.complete = True

    def _repeat(self, case: Case, runs: dict[str, list[Run]]) -> None:
        methods = {
            method.name: method
            for method in self.methods
            if (case, method.name) not in self._refused
        }
        for repeat, name in in_turns(list(methods), self.job.repeats):
            self.step(f"measuring, {case.name}: {name}, {repeat + 1} of {self.job.repeats}")
            runs[name].append(self._timed_run(case, methods[name], repeat))
            try:
                self._require_passes()
            except InternalError:
                runs.clear()
                raise
        if case.temperature == 0 and self.job.acceptance is None and self.identity.exact:
            try:
                for name in self.job.lookaheads[1:]:
                    self.identity.compare(case, name, runs[name], runs[PLAIN])
            except InternalError:
                runs.clear()  # shows none of them
                raise

    def _timed_run(self, case: Case, method: Method, repeat: int) -> Run:
        """Runs one repeat, and notes in it the other processes that were busy."""
        self.gate.wait()
        with self.gate.watch() as seen:
            run = method.run(self._work(case, repeat))
        if (expected := self.expected.get((case, method.name))) is not None:
            expected.pop()
        return replace(run, busy=seen.busy)

    def _lines(self, case: Case, runs: dict[str, list[Run]]) -> list[ReportLine]:
        """Makes the lines of the repeats that a method and plain decoding both completed."""
        lines = []
        for method in self.methods:
            whole = min(len(runs[method.name]), len(runs[PLAIN]))
            if not whole:
                continue
            used = [
                rates(self.pair, self._work(case, i), run, self._drafter_load)
                for i, run in enumerate(runs[method.name][:whole])
            ]
            lines.append(
                line(
                    case,
                    method.name,
                    method.baseline,
                    runs[method.name][:whole],
                    runs[PLAIN][:whole],
                    rates=[rate for rate in used if rate is not None],
                    imposed=None
                    if method.baseline or method.name == PLAIN
                    else self.job.acceptance,
                    peak_bytes=self._peaks.get((case.layout, case.batch, method.name)),
                    identity=self.identity.findings.get((case.layout, case.batch, method.name)),
                )
            )
        return lines


def _described(model: Runner) -> dict[str, Any]:
    """Describes a model: its name, its size, and the choices made when it was loaded.

    The name is as the user wrote it, but of a directory only the last part: results are shared,
    paths are not.
    """
    path = Path(model.name)
    name = path.name if path.is_dir() else model.name
    name = f"bundled {name}" if path.parent == bundled("target").parent else name
    parameters = model.parameter_count
    return {
        "name": name,
        "parameters": parameters,
        "bytes": model.parameter_bytes,
        **described(model),
    }
