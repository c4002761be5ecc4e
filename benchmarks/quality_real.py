"""Quality within a time budget of a real model (BASS, figures 3 to 5): HumanEval, 200 problems of MBPP, and summaries.

    python benchmarks/quality_real.py --model DIR --humaneval FILE --mbpp FILE --plan         # says what is to be done
    python benchmarks/quality_real.py --model DIR --humaneval FILE --mbpp FILE --minutes 40   # the runs that say most first

DIR is SmolLM2-135M-Instruct as a directory, the sets are .jsonl or .jsonl.gz. Hours in all: with `--minutes` it stops after so
many, in the middle of a run too, and exits with 3 while there is more to do; the same command goes on, problem by problem.
`quality_tables.py` makes docs/measurements/quality.md show the runs that have ended. Runs are timed: leave the machine alone.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BUDGETS = "0.25,0.5,0.75,1,1.5,2,3,4,6,8,12,inf"
TOKENS, SUMMARY_TOKENS = 256, 96
"""New tokens of a program and of a summary, at most."""
LIMIT = 200
"""Problems of MBPP: the first ones."""
AT_ONCE, ONE_BY_ONE = ("plain", "batched"), ("plain-single", "single")
ENGINES = ("llamacpp", "openvino")
SETS = ("humaneval", "mbpp", "humaneval-chat", "mbpp-chat", "summaries")
ROWS = (8, 1, 4, 16, 32)
PROBLEMS = {"humaneval": 164, "mbpp": LIMIT, "summaries": 100}
LENGTH = {"humaneval": 85, "mbpp": 85, "humaneval-chat": 80, "mbpp-chat": 85, "summaries": 60}
"""Tokens of a sample that estimates suppose, before a run has told; HumanEval's are those of a run."""
RATES = {1: 110, 4: 140, 8: 195, 16: 390, 32: 720}
"""Tokens per second that estimates suppose, by rows that are decoded at once; that of 8 rows is of a run with its sandbox."""
GRACE = 60
"""Seconds that a run has to end after it was interrupted."""


@dataclass(frozen=True)
class Run:
    """One run: one set, one number of samples, and methods that take turns.

    Attributes:
        part: the name of the methods in the directory's name; "" for those at once.
    """

    set_: str
    n: int
    methods: tuple[str, ...]
    part: str = ""

    @property
    def name(self) -> str:
        return f"{self.set_}-{self.n}{self.part and f'-{self.part}'}"

    @property
    def problems(self) -> int:
        return PROBLEMS[self.set_.partition("-")[0]]

    def seconds(self, directory: Path) -> float:
        """Estimates how long the rest takes: by the problems that were sampled, or by the supposed rates."""
        entries = entries_of(directory / self.name)
        left = self.problems - len(entries)
        timed = [sum(one["seconds"] for one in entry["attempts"].values()) for entry in entries]
        if timed:
            return left * sum(timed) / len(timed)
        rates = [RATES[1 if method in ONE_BY_ONE else self.n] for method in self.methods]
        return left * self.n * LENGTH[self.set_] * sum(1 / rate for rate in rates)


def entries_of(place: Path) -> list[dict[str, Any]]:
    """Reads the problems that a run has sampled; a line that a kill has cut short is none."""
    file, entries = place / "samples.jsonl", []
    for line in file.read_text("utf-8").splitlines() if file.exists() else []:
        try:
            entries.append(json.loads(line))
        except ValueError:
            break
    return entries


def runs(sets: Sequence[str], rows: Sequence[int], engines: Sequence[str]) -> Iterator[Run]:
    """Yields the runs, those that say most first: a set's comparison at 8 rows, then its other numbers of samples."""
    for name in sets:
        for n in rows:
            yield Run(name, n, AT_ONCE)
            if n == 8:
                yield Run(name, n, ONE_BY_ONE, "single")
                for engine in engines if name != "summaries" else ():
                    yield Run(name, n, (engine,), engine)


def command(run: Run, asked: argparse.Namespace) -> list[str]:
    """Returns the command of a run."""
    tokens = SUMMARY_TOKENS if run.set_ == "summaries" else TOKENS
    match run.set_.partition("-")[0]:
        case "summaries":
            chosen = ["summarize", "--data", str(asked.summaries), "--chat"]
        case "humaneval":
            chosen = ["humaneval", "--data", str(asked.humaneval)]
        case _:
            chosen = ["mbxp", "--data", str(asked.mbpp), "--limit", str(LIMIT)]
    chosen += ["--chat"] if run.set_.endswith("-chat") else []
    sampling = ["-n", str(run.n), "--temperature", "0.2", "--top-p", "0.95", "--max-new-tokens", str(tokens), "--seed", "1"]
    rest = [*sampling, "--time-budget", BUDGETS, "--output", str(asked.directory / run.name)]
    if run.part in ENGINES:
        engine = ["--engine", run.part, "--python", str(asked.python)]
        return [sys.executable, str(HERE / "quality_engines.py"), *chosen, "--model", str(asked.model), *engine, *rest]
    models = ["--model", str(asked.model), "--draft", asked.draft, "--methods", ",".join(run.methods)]
    return [*asked.shoal.split(), "eval", *chosen, *models, *rest]


def bounded(words: Sequence[str], ends: float | None) -> int:
    """Runs a command until the time is over, which ends it as Ctrl-C does; returns its code, 130 if it was interrupted."""
    if ends is not None and time.monotonic() >= ends:
        return 130
    # a shell's background job ignores Ctrl-C, and its children would
    started = subprocess.Popen(words, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    try:
        return started.wait(None if ends is None else max(0.0, ends - time.monotonic()))
    except subprocess.TimeoutExpired:
        started.send_signal(signal.SIGINT)
    except KeyboardInterrupt:  # which the command got, too
        pass
    try:
        started.wait(GRACE)
    finally:
        if started.poll() is None:
            started.kill()
            started.wait()
    return 130


def minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--humaneval", type=Path, required=True)
    parser.add_argument("--mbpp", type=Path, required=True)
    parser.add_argument(
        "--summaries", type=Path, help="the file that summaries.py makes; without it there are programs alone"
    )
    parser.add_argument("--directory", type=Path, default=Path("build/quality-real"), help="of all runs")
    parser.add_argument("--minutes", type=float, help="stop after so many")
    parser.add_argument("--plan", action="store_true", help="only say what is to be done")
    parser.add_argument("--sets", default=",".join(SETS), metavar="SET,...")
    parser.add_argument("--rows", type=numbers, default=list(ROWS), metavar="N,...")
    parser.add_argument("--draft", default="self:int4")
    parser.add_argument(
        "--python", type=Path, help="that of the environment with the extra `peers`; without it no other engine runs"
    )
    parser.add_argument("--shoal", default=f"{sys.executable} -m shoal", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 once all runs are there, 3 if the time was over before, 130 after Ctrl-C, or the code of a run that failed."""
    asked = parsed(arguments)
    ends = None if asked.minutes is None else time.monotonic() + 60 * asked.minutes
    sets = [name for name in asked.sets.split(",") if name != "summaries" or asked.summaries is not None]
    planned = list(runs(sets, asked.rows, ENGINES if asked.python is not None else ()))
    missing = [run for run in planned if not (asked.directory / run.name / "summary.json").exists()]
    total = 0.0
    print(f"{len(planned) - len(missing)} of {len(planned)} runs are there; the others, in this order:", file=sys.stderr)
    for run in missing:
        seconds = run.seconds(asked.directory)
        total += seconds
        sampled = len(entries_of(asked.directory / run.name))
        went = f", {sampled} of {run.problems} problems are there" if sampled else ""
        print(f"  {run.name}: {', '.join(run.methods)}{went}: {minutes(seconds)}, {minutes(total)} so far", file=sys.stderr)
    if asked.plan:
        return 0
    for place, run in enumerate(missing):
        print(
            f"run {place + 1} of {len(missing)}: {run.name}, about {minutes(run.seconds(asked.directory))}", file=sys.stderr
        )
        code = bounded(command(run, asked), ends)
        if code == 130 and ends is not None and time.monotonic() >= ends:
            print(f"time is over in {run.name}: the same command goes on", file=sys.stderr)
            return 3
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
