"""`python benchmarks/peers.py`: shoal beside the engines that a CPU user would take instead, in turns on the same work.

    python benchmarks/peers.py --python PEERS/bin/python --prepare            # PEERS: an environment with the extra `peers`
    python benchmarks/peers.py --python PEERS/bin/python --json FILE.json
    python benchmarks/peers.py --render FILE.json --plot FILE.png

Every cell of the table is an engine in a process of its own (`engines/`), loaded and warmed up before the row is timed. The engines
take turns, those that wait are stopped, and each turn begins on a quiet machine or is marked as disturbed. First shoal's greedy
ids, in float32, are compared with those of Transformers; a difference ends the run. The file is written after every run, and
a second call goes on where the first one ended. What is not installed is named as absent.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import command
from engines import tables
from engines.models import directory
from engines.process import HELD, Worker, make_models, prepare
from engines.results import Cell, Results
from engines.rows import LOCAL, Row, chosen
from engines.tasks import PLAIN, Absent, Setup
from provenance import require_place
from shoal.bench import first_difference, in_turns
from shoal.bench.machine import QuietGate, machine
from shoal.cli.progress import duration
from shoal.errors import InternalError, RequestError

CACHE = Path.home() / ".cache" / "shoal-peers"
WAIT = 600.0  # seconds for a quiet machine, in all


def say(text: str) -> None:
    """Progress goes to stderr, a line at a time: it is read in logs."""
    print(text, file=sys.stderr, flush=True)


@dataclass
class Comparer:
    """Measures the cells of rows one row after another.

    Args:
        results: grow, and are saved to `place`. python: of the engines outside this environment. cache: models and conversions.
        check: whether greedy ids of peers are compared as well.
        isa: the instruction set that engines are held to, "" = the processor's.
    """

    results: Results
    place: Path | None
    python: str
    cache: Path
    threads: int
    repeats: int
    check: bool
    gate: QuietGate
    isa: str = ""
    reference: dict[str, list[list[int]]] = field(default_factory=dict)

    def measure(self, row: Row, wanted: list[tuple[str, str]]) -> None:
        """The wanted cells of a row that are not finished. Raises InternalError if ids differ, or an engine decodes too little."""
        cells = [self.results.cell(row, *key) for key in wanted]
        todo = [cell for cell in cells if not cell.absent and len(cell.runs) < self.repeats]
        if not todo:
            return
        make_models(row.model, self.cache, self._log("models"))
        for cell in todo:
            self._check_identity(row, cell)
        with ExitStack() as running:
            workers = {}
            for cell in todo:
                worker = self._started(row, cell)
                if worker is not None:
                    workers[cell.name] = running.enter_context(worker)
            self._in_turns(row, [cell for cell in todo if cell.name in workers], workers)

    def _in_turns(self, row: Row, cells: list[Cell], workers: dict[str, Worker]) -> None:
        seconds = {}
        for cell in cells:
            say(f"{cell.name}: warming up")
            seconds[cell.name] = self._run(row, workers[cell.name], seed=0)["seconds"]
        by_name = {cell.name: cell for cell in cells}
        for repeat, name in in_turns(list(by_name), self.repeats):
            cell = by_name[name]
            if len(cell.runs) > repeat:  # of an earlier call
                continue
            self.gate.wait()
            with self.gate.watch() as seen:
                answer = self._run(row, workers[name], seed=repeat + 1)
            known = {key: answer[key] for key in ("seconds", "drafted", "accepted", "acceptance_length")}
            busy = None if seen.busy is None else [vars(one) for one in seen.busy]
            cell.runs.append(known | {"tokens": sum(map(len, answer["ids"])), "busy": busy})
            self.results.save(self.place)
            left = sum(seconds[one.name] * (self.repeats - len(one.runs)) for one in cells)
            mark = ", disturbed" if seen.busy else ""
            say(
                f"{name}: {cell.rates[-1]:.1f} tokens/s, {repeat + 1} of {self.repeats}{mark}; this row {duration(left)} left"
            )

    def _run(self, row: Row, worker: Worker, seed: int, *, greedy: bool = False) -> dict[str, Any]:
        answer = worker.run(row.task(seed, greedy=greedy))
        lengths = {len(ids) for ids in answer["ids"]}
        if len(answer["ids"]) != row.rows or lengths != {row.new_tokens}:
            found = f"{len(answer['ids'])} rows of {sorted(lengths)} tokens"
            raise InternalError(f"{worker.setup.engine} decoded {found}, not {row.rows} of {row.new_tokens}")
        return answer

    def prepare(self, row: Row, wanted: list[tuple[str, str]]) -> None:
        """Makes the row's models and what the engines convert them to; nothing is timed."""
        make_models(row.model, self.cache, self._log("models"))
        for engine, method in wanted:
            if engine not in LOCAL:
                say(f"{row.name}/{engine}/{method}: preparing")
                try:
                    prepare(
                        self.python, self._setup(row, engine, method, row.dtype), self._log(f"{row.name}-{engine}-prepare")
                    )
                except (Absent, InternalError) as error:
                    say(f"{row.name}/{engine}/{method}: absent: {error}")

    # ── processes ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _setup(self, row: Row, engine: str, method: str, dtype: str) -> Setup:
        drafter = row.drafter and (engine == "shoal" or method != PLAIN)
        target, draft = (str(directory(self.cache, f"{row.model}-{part}")) for part in ("target", "drafter"))
        own = row.own if engine == "shoal" else None
        length = max(map(len, row.task(0).prompts)) + row.new_tokens
        return Setup(
            engine,
            method,
            target,
            draft if drafter else own,
            dtype,
            self.threads,
            str(self.cache),
            row.rows,
            length,
            self.isa,
        )

    def _worker(self, setup: Setup, name: str) -> Worker:
        python = sys.executable if setup.engine in LOCAL else self.python
        if setup.engine not in LOCAL:
            prepare(python, setup, self._log(f"{name}-prepare"))
        return Worker(python, setup, self._log(name))

    def _log(self, name: str) -> Path:
        return self.cache / "logs" / f"{name.replace('/', '-').replace(':', '')}.txt"

    def _started(self, row: Row, cell: Cell) -> Worker | None:
        """The cell's worker, its greedy ids compared if that is asked for; None, with the reason noted, where there is none.

        Raises:
            InternalError: shoal or Transformers failed; of other engines that is a reason, too.
        """
        say(f"{cell.name}: loading")
        try:
            worker = self._worker(self._setup(row, cell.engine, cell.method, row.dtype), cell.name)
        except (Absent, InternalError) as error:
            if isinstance(error, InternalError) and cell.engine in LOCAL:
                raise
            cell.absent = (
                str(error) if isinstance(error, Absent) else "it failed where this was measured"
            )  # no paths in results
            say(f"{cell.name}: absent: {error}")
            self.results.save(self.place)
            return None
        cell.version, cell.settings = worker.about["version"], worker.about["settings"]
        if self.check and cell.engine != "shoal" and cell.leading is None:
            found = self._run(row, worker, 0, greedy=True)["ids"]
            cell.leading = (min(_leading(found, self._expected(row))), row.new_tokens)
            say(f"{cell.name}: {cell.leading[0]} of {cell.leading[1]} leading greedy ids are those of Transformers")
        return worker

    # ── identity ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _check_identity(self, row: Row, cell: Cell) -> None:
        """Greedy ids of shoal in float32. Raises InternalError where one differs."""
        if cell.engine != "shoal" or cell.identity is not None:
            return
        say(f"{cell.name}: greedy identity")
        rounded = row.dtype not in ("float32", "bfloat16")
        exact = f"{row.dtype}-float32" if rounded else "float32"
        expected = self._greedy(row, "shoal", PLAIN, exact) if rounded else self._expected(row)
        found = self._greedy(row, "shoal", cell.method, exact)
        same = sum(length == row.new_tokens for length in _leading(found, expected))
        if same < row.rows:
            raise InternalError(f"{cell.name}: greedy ids differ from the reference in {row.rows - same} of {row.rows} rows")
        cell.identity = {"rows": row.rows, "same": same}
        self.results.save(self.place)

    def _expected(self, row: Row) -> list[list[int]]:
        """Of Transformers in float32, each prompt by itself, for each of its rows."""
        return self._greedy(row, "transformers", PLAIN, "float32")

    def _greedy(self, row: Row, engine: str, method: str, dtype: str) -> list[list[int]]:
        key = f"{row.model}-{row.prompts}x{row.n}-{row.new_tokens}-{engine}-{method}-{dtype}"
        if key not in self.reference:
            with self._worker(self._setup(row, engine, method, dtype), f"greedy-{key}") as worker:
                if engine == "shoal":
                    self.reference[key] = self._run(row, worker, 0, greedy=True)["ids"]
                else:
                    task = row.task(0, greedy=True)
                    alone = [worker.run(replace(task, prompts=[prompt], n=1))["ids"][0] for prompt in task.prompts]
                    self.reference[key] = [ids for ids in alone for _ in range(row.n)]
        return self.reference[key]


def _leading(found: list[list[int]], expected: list[list[int]]) -> list[int]:
    """How many ids of each row are as expected before the first that is not."""
    differences = (first_difference(a, b) for a, b in zip(found, expected, strict=True))
    return [len(row) if place is None else place for place, row in zip(differences, expected, strict=True)]


def main(
    only: Annotated[
        str, typer.Option(metavar="NAME,...", help="Rows or cells: llama-8, bundled-8/openvino, */shoal/auto.")
    ] = "",
    python: Annotated[str, typer.Option(help="Of the environment with the extra `peers`.")] = sys.executable,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each cell; medians are shown.")] = 5,
    new_tokens: Annotated[int, typer.Option(min=0, help="Per row; 0: as each row says.")] = 0,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    isa: Annotated[str, typer.Option(help=f"Hold the engines to less than the processor has: {', '.join(HELD)}.")] = "",
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for a quiet machine, in all at most.")] = WAIT,
    check: Annotated[
        bool, typer.Option("--check", help="Compare greedy ids of the peers with those of Transformers.")
    ] = False,
    cache: Annotated[Path, typer.Option(help="Directory for models and what engines convert them to.")] = CACHE,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Only make the models, and what engines convert them to.")
    ] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Keep all runs there, and go on from it.")] = None,
    render: Annotated[Path | None, typer.Option(help="Show such a file instead of measuring.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a plot (.png, .svg).")] = None,
) -> None:
    """Measures shoal and its peers on a CPU: the table of docs/measurements/performance.md."""
    require_place(json_path)
    if isa and isa not in HELD:
        raise RequestError(f"--isa {isa}: engines can be held to {', '.join(HELD)}")
    if render is not None:
        results = Results.read(render)
    else:
        config = {"threads": threads, "new_tokens": new_tokens} | ({"isa": isa} if isa else {})
        about = machine(torch.device("cpu")) | {"threads": threads}
        results = Results.resume(json_path, config, about)
        comparer = Comparer(
            results, json_path, python, cache.resolve(), threads, repeats, check, QuietGate(timeout=wait, say=say), isa
        )
        _measure(comparer, chosen(only), new_tokens, prepare)
    if prepare:
        return
    if plot is not None:
        tables.plot(results, plot)
    print(tables.pages(results), end="")


def _measure(comparer: Comparer, cells: dict[Row, list[tuple[str, str]]], new_tokens: int, preparing: bool) -> None:
    """Row by row; says what is left by what the rows so far took. Ctrl-C ends it, and what there is is shown."""
    started = time.monotonic()
    try:
        for number, (row, wanted) in enumerate(cells.items()):
            spent = time.monotonic() - started
            left = f", about {duration(spent / number * (len(cells) - number))} left" if number else ""
            say(f"row {number + 1} of {len(cells)}{left}: {row.title}")
            do = comparer.prepare if preparing else comparer.measure
            do(replace(row, new_tokens=new_tokens) if new_tokens else row, wanted)
    except KeyboardInterrupt:
        say("interrupted: the same command goes on from here" if comparer.place else "interrupted")


if __name__ == "__main__":
    command.run(main)
