"""An evaluation for readers elsewhere: one HTML file, and the files of two other harnesses.

The HTML file has the figure, the table, and each problem with its samples. It has no script, and
loads nothing from elsewhere.

EvalPlus and the BigCode evaluation harness get whole programs, prompt included, so neither has to
know the prompt that the model got. EvalPlus finds the problem of a program by its task id, the
BigCode harness by its place in the list: the list has to begin with the first problem and to leave
none out.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.errors import RequestError
from shoal.evaluation.figure import LABELS, columns, findings, legend, metric_name, rows, title
from shoal.evaluation.language import text_of
from shoal.evaluation.problems import Problem
from shoal.evaluation.summary import Results
from shoal.evaluation.tasks import PASSED

Programs = Mapping[str, Sequence[str]]
"""The whole programs by task id, in the order of the evaluator's problems."""


@dataclass(frozen=True)
class EvaluatorSet:
    """An evaluator's problem set: its task ids are `prefix` and a number below `size`."""

    prefix: str
    size: int

    def place(self, task_id: str) -> int | None:
        """Returns the number of a problem; None for the id of another set."""
        match = re.fullmatch(rf"{re.escape(self.prefix)}(0|[1-9]\d*)", task_id)
        return int(match[1]) if match and int(match[1]) < self.size else None


@dataclass(frozen=True)
class ExportFormat:
    """The format of the files that an evaluator reads.

    Attributes:
        tool: the evaluator's name for messages.
        suffix: the ending of its files.
        sets: its problem sets, by the set of `shoal eval`.
        write: programs -> the text of a file.
        command: the command that evaluates them; a format string with file, set, problems, and
            samples per problem.
        by_place: programs have no task ids.
        whole: it evaluates the whole set, or nothing.
    """

    tool: str
    suffix: str
    sets: Mapping[str, EvaluatorSet]
    write: Callable[[Programs], str]
    command: str
    by_place: bool = False
    whole: bool = False

    def check(self, set_name: str, problems: Sequence[Problem]) -> None:
        """Raises RequestError, before anything is computed, if the evaluator lacks the problems."""
        known = self.sets.get(set_name)
        if known is None:
            raise RequestError(
                f"{self.tool} has no task with the problems of {set_name}: "
                f"{', '.join(self.sets)} can be exported"
            )
        places = {problem.task_id: known.place(problem.task_id) for problem in problems}
        if foreign := [task_id for task_id, place in places.items() if place is None]:
            raise RequestError(
                f"{self.tool} has no problem {foreign[0]!r}: its ids are {known.prefix}0 to "
                f"{known.size - 1}"
            )
        missing = set(range(len(places))) - set(places.values())
        if self.by_place and missing:
            raise RequestError(
                f"{self.tool} finds problems by their places, and {known.prefix}{min(missing)} "
                f"is missing in the file of the set"
            )

    def render(self, set_name: str, programs: Programs) -> str:
        """Returns the text of a file, in the order of the evaluator's problems."""
        known = self.sets[set_name]
        return self.write(
            dict(sorted(programs.items(), key=lambda item: known.place(item[0]) or 0))
        )

    def hint(self, set_name: str, file: str, programs: Programs) -> str:
        """Tells how the evaluator is called on a file, and which problems it will miss."""
        many, size = len(programs), self.sets[set_name].size
        samples = max(map(len, programs.values()))
        said = self.command.format(set=set_name, file=file, problems=many, samples=samples)
        if self.whole and many < size:
            return f"{said} ({many} of its {size} problems: it needs all)"
        return said


def _solutions(programs: Programs) -> str:
    return "".join(
        json.dumps({"task_id": task_id, "solution": program}) + "\n"
        for task_id, samples in programs.items()
        for program in samples
    )


def _generations(programs: Programs) -> str:
    return json.dumps([list(samples) for samples in programs.values()]) + "\n"


HUMANEVAL = {"humaneval": EvaluatorSet("HumanEval/", 164)}
FORMATS: Mapping[str, ExportFormat] = {
    "evalplus": ExportFormat(
        "EvalPlus",
        ".jsonl",
        HUMANEVAL,
        _solutions,
        "evalplus.evaluate --dataset {set} --samples {file}",
        whole=True,
    ),
    "bigcode": ExportFormat(
        "the BigCode evaluation harness",
        ".json",
        HUMANEVAL,
        _generations,
        "main.py --tasks {set} --limit {problems} --n_samples {samples} --load_generations_path "
        "{file} --allow_code_execution",
        by_place=True,
    ),
}


def programs_of(
    problems: Sequence[Problem], entries: Mapping[str, Mapping[str, Any]], method: str, n: int
) -> dict[str, list[str]]:
    """Returns n programs of each problem from a journal of samples.

    A problem that was refused has its prompt n times: evaluators want whole sets, and it counts as
    failed, as in the summary.
    """
    programs = {}
    for problem in problems:
        attempt = entries[problem.task_id]["attempts"].get(method)
        completions = (
            [""] * n if attempt is None else [sample["completion"] for sample in attempt["samples"]]
        )
        programs[problem.task_id] = [
            f"{problem.prompt}{completion}{problem.suffix}" for completion in completions
        ]
    return programs


CONTROLS = dict.fromkeys(
    (*range(9), *range(11, 32), *range(127, 160), *range(0xD800, 0xE000)), "\ufffd"
)
MARKS = {True: "✓", False: "✗", None: "–"}
"""The marks of a sample that passed, one that failed, and an unfinished one."""
LEGENDS = {True: "✓ passed, ✗ not, – not finished", False: "its score, – not finished"}

STYLE = "\n" + text_of("export.css")
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(
    summary: Mapping[str, Any], results: Results, prompts: Mapping[str, str], figure: str | None
) -> str:
    """Returns the whole file.

    Args:
        prompts: the problems' prompts, for people.
        figure: an <svg> element, or None.
    """
    problems = "\n".join(_problem(results, name, prompts[name]) for name in results.names)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{text(title(summary))}</title><style>{STYLE}</style></head><body>
<h1>Quality within a time budget</h1>
<p>{text(title(summary))}</p>
<div class="wide">{figure or ""}</div>
{_table(summary)}
<p><small>{text(legend(summary))}</small></p>
<ul>{"".join(f"<li>{text(line)}</li>" for line in findings(summary))}</ul>
{_settings(summary)}
<h2>Problems</h2>
<p>Behind each problem its samples, best rank first: {LEGENDS[results.scores[0] == PASSED]}.
In the texts, <span class="accepted">accepted draft tokens</span> and
<span class="drawn">tokens drawn from the target</span>
(replacement and bonus; all tokens of plain decoding);
<span class="cut">what follows the completion was cut</span>.</p>
{problems}
</body></html>
"""


def text(value: object) -> str:
    """Returns a value as HTML text without markup or control characters."""
    return html.escape(str(value).translate(CONTROLS))


def _table(summary: Mapping[str, Any]) -> str:
    head = "".join(f"<th>{text(name)}</th>" for name in columns(summary))
    body = "".join(
        "<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>"
        for row in rows(summary)
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide">{table}</div>'


def _settings(summary: Mapping[str, Any]) -> str:
    """Returns the settings and the machine, without empty values."""
    known = {
        **summary["settings"],
        **summary.get("machine", {}),
        "sandbox": summary.get("isolation"),
    }
    body = "".join(
        f"<dt>{text(name)}<dd>{text(value)}"
        for name, value in known.items()
        if value not in (None, "", False)
    )
    return f"<details><summary>Settings and machine</summary><dl>{body}</dl></details>"


def _problem(results: Results, name: str, prompt: str) -> str:
    attempts, error = results.attempts[name]["attempts"], results.attempts[name]["error"]
    if error:
        return (
            f"<details><summary>{text(name)} <span class=failed>not asked: "
            f"{text(error)}</span></summary></details>"
        )
    parts = [
        _method(results, name, method, shown=place == 0)
        for place, method in enumerate(reversed(list(attempts)))
    ]
    last = list(attempts)[-1]
    marks = "".join(_mark(grade, results.scores[0]) for _, _, grade in _ranked(results, name, last))
    return (
        f"<details><summary>{text(name)} <span class=marks>{marks}</span></summary>"
        f"<pre>{text(prompt)}</pre>{''.join(parts)}</details>"
    )


def _method(results: Results, name: str, method: str, shown: bool) -> str:
    attempt = results.attempts[name]["attempts"][method]
    samples = "".join(
        _sample(results, rank, place, sample, grade)
        for rank, (place, sample, grade) in enumerate(_ranked(results, name, method), 1)
    )
    head = (
        f"{LABELS[method]}: {attempt['seconds']:.3f} s, acceptance length "
        f"{attempt['stats']['acceptance_length']:.2f}"
    )
    return f"<details{' open' if shown else ''}><summary>{text(head)}</summary>{samples}</details>"


def _ranked(
    results: Results, name: str, method: str
) -> list[tuple[int, Mapping[str, Any], Mapping[str, Any] | None]]:
    """Returns (row number, sample, grade) with the best rank first.

    Finished samples come first, then the order is by mean log-probability.
    """
    samples = results.attempts[name]["attempts"][method]["samples"]
    ranking = list(
        zip(
            range(1, len(samples) + 1), samples, results.grades[name]["grades"][method], strict=True
        )
    )

    def key(item: tuple[int, Mapping[str, Any], Any]) -> tuple[bool, float]:
        mean = item[1]["mean_logprob"]
        return (item[2] is None, math.inf if mean is None else -mean)

    return sorted(ranking, key=key)


def _mark(grade: Mapping[str, Any] | None, score: str) -> str:
    if grade is None:
        return MARKS[None]
    if score != PASSED:
        return f"{grade['scores'][score]:.2f} "
    passed = grade["scores"][score] == 1
    return f'<span class="{"passed" if passed else "failed"}">{MARKS[passed]}</span>'


def _sample(
    results: Results,
    rank: int,
    place: int,
    sample: Mapping[str, Any],
    grade: Mapping[str, Any] | None,
) -> str:
    score = results.scores[0]
    outcome = (sample["error"] or "not finished") if grade is None else grade["outcome"]
    if grade is not None and score != PASSED:
        outcome = ", ".join(
            f"{metric_name(name, '')[:-1]} {value:.3f}" for name, value in grade["scores"].items()
        )
    mean = "none" if sample["mean_logprob"] is None else f"{sample['mean_logprob']:.3f}"
    head = (
        f"rank {rank}, sample {place}: ready at {sample['finished_at']:.3f} s "
        f"({sample['finish_reason']}), mean log-probability {mean}, {len(sample['token_ids'])} "
        f"tokens in {sample['rounds']} rounds, {sample['accepted']} of {sample['drafted']} drafts "
        "accepted: "
    )
    kind = (
        ""
        if grade is None
        else "passed"
        if grade["outcome"] in ("passed", "compared")
        else "failed"
    )
    detail = (
        f'<pre class="error">{text(grade["detail"])}</pre>'
        if grade is not None and grade["detail"]
        else ""
    )
    return (
        f"<p><small>{text(head)}<b "
        f'class="{kind}">{text(outcome)}</b></small></p>'
        f"<pre>{''.join(_spans(sample))}</pre>{detail}"
    )


def _spans(sample: Mapping[str, Any]) -> Iterator[str]:
    """Yields the text coloured by drafter and target, dimmed behind the end of the completion."""
    kept = (
        len(sample["completion"])
        if sample["text"].startswith(sample["completion"])
        else len(sample["text"])
    )
    place = 0
    for piece, drafted in sample["spans"]:
        border = max(0, min(len(piece), kept - place))
        for part, cut in ((piece[:border], ""), (piece[border:], " cut")):
            if part:
                yield f'<span class="{"accepted" if drafted else "drawn"}{cut}">{text(part)}</span>'
        place += len(piece)
