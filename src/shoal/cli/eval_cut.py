"""`shoal eval SET --cut KIND`: programs that are cut inside a token and continued.

Each is continued as it is, aligned, and uncut.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.cli.console import EXIT_INTERRUPTED, plain_table, stderr, stdout
from shoal.cli.eval_output import with_progress
from shoal.cli.eval_set import EvalSet, SandboxOptions
from shoal.cli.options import ModelSource
from shoal.errors import RequestError


def evaluate_cuts(
    eval_set: EvalSet,
    kind: str,
    n: int,
    options: Mapping[str, Any],
    source: ModelSource,
    programs: SandboxOptions,
    *,
    as_json: bool,
) -> int:
    """Draws samples, grades them and reports. After Ctrl-C there is no report.

    Raises:
        RequestError: no solution of the set has such a place to cut, or the model has no tokenizer.
    """
    require_solutions(eval_set)
    from shoal.evaluation import cut_samples
    from shoal.evaluation.cuts import KINDS, cuts
    from shoal.evaluation.grading import code_grader

    pair = source.load()
    if pair.tokenizer is None:
        raise RequestError("an evaluation needs a tokenizer, and this model has none")
    kinds = KINDS if kind == "all" else (kind,)
    asked = cuts(eval_set.problems, pair.tokenizer, kinds, options.get("seed") or 0)
    if not asked:
        raise RequestError(f"no solution of the set has a place for a cut of kind {kind}")
    try:
        with programs.open() as sandbox:
            grader = code_grader([cut.problem for cut in asked], sandbox, programs.workers)
            rows = list(
                with_progress("sampling", cut_samples.written(pair, asked, n, options), len(asked))
            )
            written = [each for row in rows for each in row]
            found = list(
                with_progress("executing", cut_samples.graded(written, grader), len(written))
            )
    except KeyboardInterrupt:
        stderr().print("interrupted: nothing was kept")
        return EXIT_INTERRUPTED
    summary = cut_samples.summary(found)
    if as_json:
        print(json.dumps({"set": eval_set.name, "n": n, "options": dict(options), "cuts": summary}))
    else:
        show(summary, cut_samples.VARIANTS)
    return 0


def require_solutions(eval_set: EvalSet) -> None:
    """Refuses sets without published solutions and chats: solutions are cut, and continued as code.

    Raises:
        RequestError: the set has no solutions, or is asked in a chat.
    """
    if not any(problem.canonical for problem in eval_set.problems):
        raise RequestError(
            f"the problems of {eval_set.name} have no solutions that could be cut: leave out --cut"
        )
    if eval_set.chat:
        raise RequestError("a cut program is continued, not asked for in a chat: leave out --chat")


def show(summary: Sequence[Mapping[str, Any]], variants: Sequence[str]) -> None:
    """Prints a table of all kinds and variants."""
    heads = "passed, %", "syntax errors, %", "time over uncut"
    table = plain_table("cut", "cuts", "samples", "variant", *heads)
    for row in summary:
        for variant in variants:
            own = row["variants"][variant]
            shares = (
                f"{100 * own['passed']:.1f}",
                f"{100 * own['syntax_errors']:.1f}",
                f"{own['latency']:.2f}",
            )
            table.add_row(row["kind"], str(row["cuts"]), str(row["samples"]), variant, *shares)
    stdout().print(table)
