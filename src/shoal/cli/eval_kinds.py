"""The kinds of `shoal eval` beside plain problems: cut programs, schemas, given solutions.

`--cut KIND` continues programs that are cut inside a token, each as it is, aligned, and uncut.
`jsonschema` tells which schemas are accepted, and whether documents fit their schema.
`--solutions` executes and counts completions that no model here wrote.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.console import EXIT_INTERRUPTED, plain_table, printable, stderr, stdout
from shoal.cli.eval_options import show_solutions, with_progress
from shoal.cli.eval_set import EvalSet, SandboxOptions, digest
from shoal.cli.options import ModelSource
from shoal.errors import RequestError

if TYPE_CHECKING:
    from shoal.evaluation.sandbox import Sandbox


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
    from shoal.evaluation import cuts as cut_programs
    from shoal.evaluation.cuts import KINDS, cuts
    from shoal.evaluation.tasks import code_grader

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
                with_progress("sampling", cut_programs.written(pair, asked, n, options), len(asked))
            )
            written = [each for row in rows for each in row]
            found = list(
                with_progress("executing", cut_programs.graded(written, grader), len(written))
            )
    except KeyboardInterrupt:
        stderr().print("interrupted: nothing was kept")
        return EXIT_INTERRUPTED
    summary = cut_programs.summary(found)
    if as_json:
        print(json.dumps({"set": eval_set.name, "n": n, "options": dict(options), "cuts": summary}))
    else:
        show_cuts(summary, cut_programs.VARIANTS)
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


def show_cuts(summary: Sequence[Mapping[str, Any]], variants: Sequence[str]) -> None:
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


def evaluate_schemas(
    folder: Path,
    limit: int | None,
    n: int,
    options: Mapping[str, Any],
    source: ModelSource,
    *,
    as_json: bool,
) -> int:
    """Draws samples and reports; after Ctrl-C it reports the schemas that were tried by then.

    Raises:
        RequestError: the directory has no schemas, or llguidance or jsonschema is missing.
    """
    from shoal.bench.machine import machine
    from shoal.evaluation import schemas

    asked = schemas.read_schemas(folder)[:limit]
    pair, found, code = source.load(), list[schemas.TriedSchema](), 0
    try:
        for one in with_progress("schemas", schemas.tried(pair, asked, n, options), len(asked)):
            found.append(one)
    except KeyboardInterrupt:
        stderr().print(f"interrupted: {len(found)} of {len(asked)} schemas tried")
        code = EXIT_INTERRUPTED
    if not found:
        return code
    summary = schemas.summary(found)
    if as_json:
        where = {"machine": machine(pair.target.device), "loaded": pair.loaded}
        print(json.dumps({**where, "n": n, "options": dict(options), **summary}))
    else:
        show_schemas(summary)
    return code


def show_schemas(summary: Mapping[str, Any]) -> None:
    """Prints the refused schemas, and a table."""
    for one in summary["schemas"]:
        if one["refused"]:
            stdout().print(
                printable(f"{one['name']}: {one['refused']}"), markup=False, soft_wrap=True
            )
    tested = any(summary["all"]["tests"].values())
    heads = ["declared", "empirical", "compliance", "valid/invalid/cut", "compile, ms", "mask, ms"]
    heads += ["tests right/strict/lax"] if tested else []
    table = plain_table("schemas", "tried", *heads)
    groups = dict(summary["groups"])
    for name, own in (*groups.items(), *([("all", summary["all"])] if len(groups) > 1 else [])):
        shares = (_share(own[share]) for share in ("declared", "empirical", "compliance"))
        counts = "/".join(str(own["samples"][verdict]) for verdict in ("valid", "invalid", "cut"))
        times = (_shown(own["compile_ms"], 1), _shown(own["mask_ms_per_token"], 3))
        tests = ["/".join(map(str, own["tests"].values()))] if tested else []
        table.add_row(name, str(own["schemas"]), *shares, counts, *times, *tests)
    stdout().print(table)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _shown(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def execute_solutions(
    eval_set: EvalSet, solutions: str, programs: SandboxOptions, directory: Path, *, as_json: bool
) -> int:
    """Judges given completions; prints how many passed, and which did not.

    After Ctrl-C it reports the completions judged by then.
    """
    from shoal.evaluation.execution import read_solutions
    from shoal.evaluation.journal import Solutions

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
