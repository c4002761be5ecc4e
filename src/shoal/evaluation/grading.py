"""The grading of completions.

Programs are executed, summaries are compared with reference summaries.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shoal.errors import RequestError
from shoal.evaluation.execution import execute_all
from shoal.evaluation.problems import Problem
from shoal.evaluation.sandbox import Sandbox
from shoal.evaluation.tasks import Document
from shoal.evaluation.toolchains import require

PASSED = "passed"
ROUGE = ("rougeL", "rouge1", "rouge2")

Completions = Iterable[tuple[str, str]]
"""The task ids and completions."""


@dataclass(frozen=True)
class Grade:
    """The grade of a completion.

    Attributes:
        scores: the scores by name, 0..1 each.
        outcome: one word, "syntax" for a syntax error.
        detail: a text for the report, such as the error.
    """

    scores: dict[str, float]
    outcome: str
    detail: str = ""


Grader = Callable[[Completions], Iterator[Grade]]
"""A function that grades completions in their order."""


def code_grader(
    problems: Sequence[Problem], sandbox: Sandbox, workers: int | None = None
) -> Grader:
    """Makes a grader that executes each completion's program, `workers` at a time.

    Raises:
        RequestError: at once, if a language cannot be run here; the message names the packages to
            install.
    """
    require(problems, sandbox)
    known = {problem.task_id: problem for problem in problems}

    def grade(completions: Completions) -> Iterator[Grade]:
        for result in execute_all(
            ((known[task_id], text) for task_id, text in completions), sandbox, workers
        ):
            yield Grade({PASSED: float(result.passed)}, result.outcome, result.detail)

    return grade


def rouge_grader(documents: Sequence[Document]) -> Grader:
    """Makes a grader that computes F1 of ROUGE-1, ROUGE-2 and ROUGE-L (Lin 2004).

    Words are stemmed and compared with the documents' summaries.

    Raises:
        RequestError: without the rouge-score package.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise RequestError(
            "summaries are compared by the rouge-score package: pip install '.[eval]'"
        ) from None
    scorer, references = (
        RougeScorer(list(ROUGE), use_stemmer=True),
        {d.task_id: d.summary for d in documents},
    )

    def grade(completions: Completions) -> Iterator[Grade]:
        for task_id, text in completions:
            scores = scorer.score(references[task_id], text)
            yield Grade({name: float(scores[name].fmeasure) for name in ROUGE}, "compared")

    return grade


def grade_entries(
    entries: Sequence[Mapping[str, Any]], grader: Grader
) -> Generator[dict[str, Any], None, None]:
    """Yields an entry for the journal of grades per entry of samples, in order.

    Unfinished samples get no grade; equal completions of a problem are graded once, whichever
    methods wrote them.
    """
    wanted = [(entry["task_id"], text) for entry in entries for text in _completions(entry)]
    grades = iter(grader(wanted))
    for entry in entries:
        found = {text: asdict(next(grades)) for text in _completions(entry)}
        yield {
            "task_id": entry["task_id"],
            "grades": {
                method: [
                    found[sample["completion"]] if sample["finished"] else None
                    for sample in attempt["samples"]
                ]
                for method, attempt in entry["attempts"].items()
            },
        }


def _completions(entry: Mapping[str, Any]) -> list[str]:
    """Returns the different completions of a problem that finished, in order."""
    samples = [sample for attempt in entry["attempts"].values() for sample in attempt["samples"]]
    return list(dict.fromkeys(sample["completion"] for sample in samples if sample["finished"]))
