"""The kinds of `shoal eval` beside plain problems, and the tables and exports of all kinds.

`--cut KIND` continues programs that are cut inside a token, each as it is, aligned, and uncut.
`jsonschema` tells which schemas are accepted, and whether documents fit their schema.
`--solutions` executes and counts completions that no model here wrote.

Tables are on stdout; `--export FORMAT:FILE` writes the samples for another evaluator.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from shoal.cli.console import EXIT_INTERRUPTED, plain_table, printable, stderr, stdout
from shoal.cli.eval_options import EvalSet, SandboxOptions, digest
from shoal.cli.files import require_writable, write_whole
from shoal.cli.options import ModelSource
from shoal.cli.progress import with_progress
from shoal.errors import RequestError

if TYPE_CHECKING:
    from rich.table import Table

    from shoal.evaluation.exports import ExportFormat
    from shoal.evaluation.journal import Evaluation
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
            all_cuts = list(
                with_progress("executing", cut_programs.graded(written, grader), len(written))
            )
    except KeyboardInterrupt:
        stderr().print("interrupted: nothing was kept")
        return EXIT_INTERRUPTED
    summary = cut_programs.summary(all_cuts)
    if as_json:
        from shoal.bench.machine import machine

        where = {"machine": machine(pair.target.device), "set": eval_set.name, "n": n}
        print(json.dumps({**where, "options": dict(options), "cuts": summary}))
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
    pair, tried_schemas, code = source.load(), list[schemas.TriedSchema](), 0
    try:
        for one in with_progress("schemas", schemas.tried(pair, asked, n, options), len(asked)):
            tried_schemas.append(one)
    except KeyboardInterrupt:
        stderr().print(f"interrupted: {len(tried_schemas)} of {len(asked)} schemas tried")
        code = EXIT_INTERRUPTED
    if not tried_schemas:
        return code
    summary = schemas.summary(tried_schemas)
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


UNBOUNDED = 10_000
"""The columns of a table that is never folded."""


def show_summary(summary: dict[str, Any], directory: Path | None) -> None:
    """Prints the table of a summary, then its findings."""
    from shoal.evaluation.figure import columns, findings, legend, rows, title

    console = stdout()
    console.print(title(summary), style="bold", markup=False)
    show_table(console, columns(summary), list(rows(summary)))
    for line in (legend(summary), *findings(summary)):
        console.print(printable(line), markup=False)
    if directory is not None:
        console.print(f"written to {directory}", markup=False)


def show_table(console: Console, heads: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Prints a line per budget and method, headed by its first cells.

    A terminal that is too narrow gets a table per budget, with a column per method.
    """
    table = plain_table(*heads)
    table.columns[1].justify = "left"
    for line in lines:
        table.add_row(*line)
    if show_wide(console, table):
        return
    for budget in dict.fromkeys(line[0] for line in lines):
        chosen = [line for line in lines if line[0] == budget]
        table = plain_table(f"budget: {budget}", *(line[1] for line in chosen))
        for place, head in enumerate(heads[2:], 2):
            table.add_row(head, *(line[place] for line in chosen))
        console.print(table)
        console.print()


def show_wide(console: Console, table: Table) -> bool:
    """Prints a table in its full width; returns False instead if the terminal is too narrow."""
    wide = stdout()
    wide.width = UNBOUNDED
    widest = wide.measure(table).maximum
    if widest > console.width and console.is_terminal:
        return False
    wide.width = max(console.width, widest)
    wide.print(table)
    return True


def show_solutions(summary: dict[str, Any]) -> None:
    """Prints the failures, then a table of the languages."""
    console = stdout()
    for failure in summary["failures"]:
        console.print(
            printable(f"{failure['task_id']}: {failure['outcome']}: {failure['headline']}"),
            markup=False,
            soft_wrap=True,
        )
    table = plain_table("language", "problems", "without a solution", "passed", "of", "per cent")
    for name, counts in summary["languages"].items():
        share = f"{100 * counts['passed'] / counts['total']:.1f}" if counts["total"] else "–"
        columns = ("problems", "without_solution", "passed", "total")
        table.add_row(name, *(str(counts[column]) for column in columns), share)
    console.print(table)


@dataclass(frozen=True)
class Export:
    """A file to write."""

    format: ExportFormat
    file: Path

    def write(self, evaluation: Evaluation, eval_set: EvalSet) -> None:
        """Writes the samples of a complete evaluation, and names the evaluator's command.

        Raises:
            RequestError: the file cannot be written.
        """
        from shoal.evaluation.exports import programs_of
        from shoal.evaluation.sampling import KNOWN

        config = evaluation.config
        method = max(config.methods, key=KNOWN.index)  # batched, or the method closest to it
        programs = programs_of(eval_set.problems, evaluation.samples.entries, method, config.n)
        write_whole(self.file, self.format.render(eval_set.name, programs))
        said = (
            f"{method} samples for {self.format.tool}: "
            f"{self.format.hint(eval_set.name, str(self.file), programs)}"
        )
        stderr().print(said, markup=False, soft_wrap=True)


def read_exports(texts: Sequence[str], eval_set: EvalSet) -> list[Export]:
    """Reads the --export options of a command line.

    Raises:
        RequestError: a format is unknown, a file cannot be written or would not be read by the
            evaluator, or the format does not fit the set.
    """
    from shoal.evaluation.exports import FORMATS

    exports: list[Export] = []
    for text in texts:
        name, _, file = text.partition(":")
        if name not in FORMATS or not file:
            raise RequestError(
                f"--export must be FORMAT:FILE with a format of {', '.join(FORMATS)}; got {text!r}"
            )
        form, path = FORMATS[name], Path(file)
        if path.suffix != form.suffix:
            raise RequestError(
                f"{form.tool} reads {form.suffix} files: --export {name}:FILE{form.suffix}; "
                f"got {text!r}"
            )
        if path in (other.file for other in exports):
            raise RequestError(f"two exports would be written to {file!r}")
        form.check(eval_set.name, eval_set.problems)
        require_writable(path)
        exports.append(Export(form, path))
    return exports
