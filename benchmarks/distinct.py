"""`python benchmarks/distinct.py`: what `exact="distinct"` brings, measured by programs of held-out problems with and without it.

Each problem gets 8 samples at once from the bundled pair, of p at a temperature, without truncation. "pass@k" of independent
samples is the usual estimate; of draws without replacement it is that of the first k, in the order of the draws. "programs" counts
the different completions of a problem after the cut at its end, "mass" is what p gives to the texts of a problem together.
"""

from __future__ import annotations

import math
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import command
import shoal
from provenance import require_place, write_results
from shoal.bench.machine import machine
from shoal.evaluation.sandbox import Sandbox
from shoal.evaluation.tasks import PASSED, code_grader, code_tasks, function_problems

N = 8
KINDS: dict[str, bool | str] = {"independent": False, "distinct": "distinct"}


def main(
    problems: Annotated[int, typer.Option(min=1)] = 200,
    temperature: float = 0.2,
    to: Annotated[Path | None, typer.Option("--json", help="write the figures")] = None,
) -> None:
    """Prints a table."""
    require_place(to)
    asked, figures = function_problems(problems), dict[str, Any]()
    pair, sandbox = shoal.load(max_batch=N), Sandbox()
    grader = code_grader(asked, sandbox)
    table = Table("", "pass@1", "pass@2", "pass@4", f"pass@{N}", "programs", "mass", "passes", "tokens", "begun again")
    for kind, exact in KINDS.items():
        stats, masses, written = shoal.Stats(), list[float](), list[list[str]]()
        for task in track(code_tasks(asked), kind):
            result = pair.generate(
                task.prompt,
                N,
                exact=exact,
                temperature=temperature,
                stop=task.stops,
                seed=1,
                lookahead=3,
                max_new_tokens=128,
            )
            stats, samples = stats + result.stats, result[0].samples
            written.append([task.complete(sample.text, sample.finish_reason == "stop") for sample in samples])
            logs = {one.token_ids: sum(one.processed_logprobs) + (one.log_allowed or 0.0) for one in samples}
            masses.append(sum(map(math.exp, logs.values())))
        pairs = dict.fromkeys((one.task_id, text) for one, texts in zip(asked, written, strict=True) for text in texts)
        grades = {pair: grade.scores[PASSED] for pair, grade in zip(pairs, grader(pairs), strict=True)}
        passed = [[grades[one.task_id, text] for text in texts] for one, texts in zip(asked, written, strict=True)]
        found = figures[kind] = {
            **{f"pass@{k}": mean(estimate(own, k, bool(exact)) for own in passed) for k in (1, 2, 4, N)},
            "programs": mean(len(set(texts)) for texts in written),
            "mass": mean(masses),
            "target passes": stats.target_passes,
            "tokens": stats.committed,
            "restarted": stats.restarted,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "any": [bool(any(own)) for own in passed],
        }
        rates = [f"{100 * found[f'pass@{k}']:.1f} %" for k in (1, 2, 4, N)]
        counts = [str(found[name]) for name in ("target passes", "tokens", "restarted")]
        table.add_row(kind, *rates, f"{found['programs']:.2f}", f"{found['mass']:.3f}", *counts)
    Console(width=120).print(table)
    if to is not None:
        settings = {"problems": problems, "temperature": temperature}
        write_results(to, {"machine": machine(torch.device("cpu")), **settings, "figures": figures})


def estimate(passed: list[float], k: int, in_order: bool) -> float:
    """The probability that one of k samples passes."""
    if in_order:
        return max(passed[:k])
    return 1 - math.comb(len(passed) - round(sum(passed)), k) / math.comb(len(passed), k)


if __name__ == "__main__":
    command.run(main)
