"""Measures a job: greedy identity first, then interleaved runs of every method on the same work.

Three passes over all cases. *check* compares greedy speculation with greedy plain decoding at each batch size, layout, draft length
and number format that will be timed; in float32 a difference raises. *warm_up* runs every method once, finds the methods that are
not available here, and counts peak memory. *measure* makes the repeats; the methods take turns, every other turn in reverse order.
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

from shoal.api import Shoal
from shoal.bench.imposed import imposing
from shoal.bench.job import Job
from shoal.bench.machine import machine
from shoal.bench.measure import Identity, compared, first_difference, in_turns
from shoal.bench.memory import peak_device_bytes, peak_tensor_bytes
from shoal.bench.methods import PLAIN, Method, baseline_method, shoal_method
from shoal.bench.report import Checked, Line, Report, line
from shoal.bench.roofline import ceilings, rates
from shoal.bench.work import Case, Ids, Run, Work, timed, work_of
from shoal.errors import InternalError, RequestError
from shoal.models.load_report import described
from shoal.models.loading import bundled
from shoal.models.runner import Runner

EXACT = (torch.float32, torch.float64)
CONTROL_ROWS = 8  # rows that the 16-bit control decodes one by one
COUNTED_TOKENS = 64  # over which memory is counted on a CPU: the profiler keeps gigabytes of events in long runs


@dataclass
class BenchmarkRunner:
    """Measures one job on one pair.

    Args:
        pair: the models; `max_batch` must hold the largest batch. pool: prompts as ids.
        step: called before every run, with its name.

    Attributes:
        report: grows while it is measured.
    """

    pair: Shoal
    job: Job
    pool: Sequence[Ids]
    step: Callable[[str], None] = lambda _: None
    report: Report = field(init=False)

    def __post_init__(self) -> None:
        self._measured = self.pair if self.job.acceptance is None else imposing(self.pair, self.job.acceptance)
        self.methods = [shoal_method(self._measured, name, self.job.rule) for name in self.job.lookaheads]
        self.methods += [baseline_method(self.pair, name) for name in self.job.baselines]
        if self.pair.draft_model is None and len(self.job.lookaheads) > 1:
            raise RequestError("there is no drafter to compare plain decoding with: give --draft, or --lookahead off")
        self.report = Report(self._config(), machine(self.pair.target.device))
        self._checked: dict[tuple[str, int, str], Checked] = {}
        self._peaks: dict[tuple[str, int, str], int] = {}
        self._single: dict[Ids, Ids] = {}
        self._refused: set[tuple[Case, str]] = set()
        for case in self.job.cases:
            self._work(case, 0)  # a case that cannot be filled is refused before anything is measured

    @property
    def steps(self) -> int:
        """How often `step` will be called at most."""
        checks = len({(case.layout, case.batch) for case in self.job.cases}) * len(self.job.lookaheads)
        return checks + len(self.job.cases) * len(self.methods) * (1 + self.job.repeats)

    def _config(self) -> dict[str, Any]:
        models = {"target": self.pair.target, "draft": self.pair.draft_model}
        described = {role: None if model is None else _described(model) for role, model in models.items()}
        dtype = str(self.pair.target.dtype).removeprefix("torch.")
        lengths = [len(ids) for ids in self.pool]
        return described | vars(self.job) | {"dtype": dtype, "prompt_tokens": [min(lengths), max(lengths)]}

    def _work(self, case: Case, repeat: int) -> Work:
        job = self.job
        return work_of(case, self.pool, repeat, max_new_tokens=job.max_new_tokens, seed=job.seed, eos=job.eos)

    # ── identity ────────────────────────────────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Greedy identity of every configuration, by the real rule.

        Raises:
            InternalError: for a difference in float32 or float64, with its place.
        """
        exact = self.pair.target.dtype in EXACT
        for case in {(c.layout, c.batch): c for c in self.job.cases}.values():
            work = self._work(case, 0).greedy()
            self.step(f"greedy identity, {_name(case)}: plain")
            plain = shoal_method(self.pair, PLAIN, self.job.rule).run(work)
            control = None if exact else self._control(work, plain)
            for name in self.job.lookaheads[1:]:
                self.step(f"greedy identity, {_name(case)}: {name}")
                run = shoal_method(self.pair, name, self.job.rule).run(work)
                drafted = run.stats.drafted if run.stats else 0
                found = compared(work.by_prompt(plain.ids), work.by_prompt(run.ids), drafted)
                if exact and found.same < found.rows:
                    raise InternalError(self._difference(case, name, found.place))
                self._checked[case.layout, case.batch, name] = Checked.of(found, control)

    def _difference(self, case: Case, name: str, place: str) -> str:
        return (
            f"greedy decoding with lookahead {name} differs from plain decoding, {self.report.config['dtype']}, "
            f"{_name(case)}: first at {place}; nothing that follows would be worth measuring"
        )

    def _control(self, work: Work, plain: Run) -> Identity:
        """Some rows of the plain run against the same rows decoded one by one: in 16 bit, batching changes ties by itself."""
        first = {prompt: row for row, prompt in reversed(list(enumerate(work.rows)))}
        rows = sorted(first.values())[:CONTROL_ROWS]
        single = [self._decoded_by_itself(replace(work, prompts=(work.rows[row],), n=1)) for row in rows]
        return compared([[ids] for ids in single], [[plain.ids[row]] for row in rows], drafted=0)

    def _decoded_by_itself(self, work: Work) -> Ids:
        """One prompt decoded greedily by itself, once."""
        (prompt,) = work.prompts
        if prompt not in self._single:
            (self._single[prompt],) = shoal_method(self.pair, PLAIN, self.job.rule).run(work).ids
        return self._single[prompt]

    # ── timing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def warm_up(self) -> float:
        """Runs every method once; returns the seconds that `measure` will take at most."""
        seconds = 0.0
        for case, method in product(self.job.cases, self.methods):
            self.step(f"warming up, {_name(case)}: {method.name}")
            work = self._work(case, 0)
            try:
                spent = self._first_run(case, method, work)
            except Exception as error:
                if not method.baseline:
                    raise
                self._refuse(case, method, error)
                continue
            seconds += spent * self.job.repeats
        return seconds

    def _first_run(self, case: Case, method: Method, work: Work) -> float:
        """Seconds that it took. Notes peak memory: on a CPU in a run of its own, from whose slow motion `auto` must not learn."""
        device, key = self.pair.target.device, (case.layout, case.batch, method.name)
        with timed(device) as watch:
            if device.type == "cuda":
                self._peaks[key] = peak_device_bytes(partial(method.run, work), device)
            else:
                method.run(work)
        if device.type == "cpu" and method.countable and key not in self._peaks:
            pair_costs, self._measured.pair_costs = self._measured.pair_costs, copy.deepcopy(self._measured.pair_costs)
            try:
                short = replace(work, max_new_tokens=min(work.max_new_tokens, COUNTED_TOKENS))
                self._peaks[key] = self._weights() + peak_tensor_bytes(partial(method.run, short))
            finally:
                self._measured.pair_costs = pair_costs
        return watch.seconds

    def _weights(self) -> int:
        models = [self.pair.target] + ([self.pair.draft_model] if self.pair.draft_model else [])
        return sum(model.parameter_bytes for model in models)

    def _refuse(self, case: Case, method: Method, error: Exception) -> None:
        """A baseline that cannot run is listed with its reason."""
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

    def measure(self) -> Iterator[Line]:
        """The lines, case by case; the report has them too, also those of a case that was interrupted.

        Raises:
            InternalError: if greedy timed runs of an exact format differ.
        """
        device, dtype = self.pair.target.device, self.pair.target.dtype
        self.report.machine["ceilings_before"] = vars(ceilings(device, dtype))
        for case in self.job.cases:
            runs: dict[str, list[Run]] = defaultdict(list)
            try:
                self._repeat(case, runs)
            finally:
                found = self._lines(case, runs)
                self.report.lines += found
            yield from found
        self.report.machine["ceilings_after"] = vars(ceilings(device, dtype))
        self.report.complete = True

    def _repeat(self, case: Case, runs: dict[str, list[Run]]) -> None:
        methods = {method.name: method for method in self.methods if (case, method.name) not in self._refused}
        for repeat, name in in_turns(list(methods), self.job.repeats):
            self.step(f"measuring, {_name(case)}: {name}, {repeat + 1} of {self.job.repeats}")
            runs[name].append(methods[name].run(self._work(case, repeat)))
        if case.temperature == 0 and self.job.acceptance is None and self.pair.target.dtype in EXACT:
            self._compare(case, runs)

    def _compare(self, case: Case, runs: dict[str, list[Run]]) -> None:
        """The timed runs themselves are greedy: they must agree as well."""
        for name, (repeat, plain) in product(self.job.lookaheads[1:], enumerate(runs[PLAIN])):
            for row, (a, b) in enumerate(zip(plain.ids, runs[name][repeat].ids, strict=True)):
                position = first_difference(a, b)
                if position is not None:
                    runs.clear()
                    raise InternalError(
                        self._difference(case, name, f"repeat {repeat + 1}, row {row + 1}, token {position + 1}")
                    )

    def _lines(self, case: Case, runs: dict[str, list[Run]]) -> list[Line]:
        """Of the repeats that a method and plain decoding both completed."""
        lines = []
        for method in self.methods:
            whole = min(len(runs[method.name]), len(runs[PLAIN]))
            if not whole:
                continue
            used = [rates(self.pair, self._work(case, i), run) for i, run in enumerate(runs[method.name][:whole])]
            lines.append(
                line(
                    case, method.name, method.baseline, runs[method.name][:whole], runs[PLAIN][:whole],
                    rates=[rate for rate in used if rate is not None],
                    imposed=None if method.baseline or method.name == PLAIN else self.job.acceptance,
                    peak_bytes=self._peaks.get((case.layout, case.batch, method.name)),
                    identity=self._checked.get((case.layout, case.batch, method.name)),
                )
            )  # fmt: skip
        return lines


def _described(model: Runner) -> dict[str, Any]:
    """A model's name as the user wrote it, but of a directory the last part: results are shared, paths are not. Its size; what
    was decided when it was loaded."""
    path = Path(model.name)
    name = path.name if path.is_dir() else model.name
    name = f"bundled {name}" if path.parent == bundled("target").parent else name
    parameters = sum(parameter.numel() for parameter in model.hf.parameters())
    return {"name": name, "parameters": parameters, "bytes": model.parameter_bytes, **described(model)}


def _name(case: Case) -> str:
    return f"{case.batch} rows, layout {case.layout}"
