"""`shoal eval --solutions`: completions that no model here wrote, executed and counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.console import EXIT_INTERRUPTED, stderr
from shoal.cli.eval_output import show_solutions, with_progress
from shoal.cli.eval_set import EvalSet, SandboxOptions, digest
from shoal.errors import RequestError

if TYPE_CHECKING:
    from shoal.evaluation.sandbox import Sandbox


def execute_solutions(
    eval_set: EvalSet, solutions: str, programs: SandboxOptions, directory: Path, *, as_json: bool
) -> int:
    """Judges given completions; prints how many passed, and which did not.

    After Ctrl-C it reports the completions judged by then.
    """
    from shoal.evaluation.execution import read_solutions
    from shoal.evaluation.solutions import Solutions

    if not eval_set.problems:
        raise RequestError("summaries are not judged: leave out --solutions")
    pairs = read_solutions(solutions, eval_set.problems)
    code = 0
    with programs.open() as sandbox:
        held = Solutions(directory, pairs, _settings(eval_set, solutions, sandbox))
        try:
            held.execute(sandbox, programs.workers, with_progress)
        except KeyboardInterrupt:
            stderr().print(
                f"interrupted: {len(held.results)} of {len(pairs)} judged; with --output, the "
                f"same command goes on"
            )
            code = EXIT_INTERRUPTED
    summary = held.report(eval_set.problems, {"isolation": sandbox.isolation})
    if as_json:
        print(json.dumps(summary))
    else:
        show_solutions(summary)
    return code


def _settings(eval_set: EvalSet, solutions: str, sandbox: Sandbox) -> dict[str, Any]:
    """Returns all settings that the verdicts depend on."""
    fingerprint = "" if solutions == "canonical" else digest(Path(solutions))
    return {
        "set": eval_set.name,
        "file": eval_set.file,
        "fingerprint": eval_set.fingerprint,
        "problems": len(eval_set.problems),
        "solutions": solutions,
        "solutions_fingerprint": fingerprint,
        "sandbox": sandbox.backend,
    }
