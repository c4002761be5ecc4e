"""The samples of programs that were cut inside a token.

They are continued as they are, aligned, and from where the cut token begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from statistics import mean, median
from typing import Any

from shoal.api import Shoal
from shoal.evaluation.cuts import Cut
from shoal.evaluation.endings import ending
from shoal.evaluation.grading import PASSED, Grade, Grader

NAIVE, ALIGNED, UNCUT = "naive", "aligned", "uncut"
VARIANTS = (NAIVE, ALIGNED, UNCUT)
"""The ways to continue a cut program.

Naively from the cut; from the cut with `align=True`; and from where the cut token begins, which
gives the model less of the program.
"""


@dataclass(frozen=True)
class Written:
    """The samples that a variant wrote for a cut.

    Attributes:
        cut: the cut.
        variant: the name of the variant.
        completions: the completions of the problem.
        seconds: the seconds of its call, prompt included.
    """

    cut: Cut
    variant: str
    completions: Sequence[str]
    seconds: float


def written(
    pair: Shoal, cuts: Sequence[Cut], n: int, options: Mapping[str, Any]
) -> Iterator[list[Written]]:
    """Writes n samples of each cut in each variant, and yields a list of variants per cut.

    The variants take turns in being first; the first cut warms up.

    Args:
        options: the options of `Shoal.generate`. A problem with a suffix is filled in before it.
    """
    orders = list(permutations(VARIANTS))
    for place, cut in enumerate(cuts):
        if not place:
            for variant in VARIANTS:
                _write(pair, cut, variant, n, options)
        found = {
            variant: _write(pair, cut, variant, n, options)
            for variant in orders[place % len(orders)]
        }
        yield [found[variant] for variant in VARIANTS]


def _write(pair: Shoal, cut: Cut, variant: str, n: int, options: Mapping[str, Any]) -> Written:
    problem, end = cut.problem, ending(cut.problem.language)
    text = cut.given(whole_tokens=variant == UNCUT)
    middle: dict[str, Any] = {"suffix": problem.suffix} if problem.suffix else {"stop": end.stops}
    result = pair.generate(text, n, align=variant == ALIGNED, **{**options, **middle})
    begun = text[len(problem.prompt) :]
    completions = [
        begun
        + (
            sample.text
            if problem.suffix
            else end.cut(text, sample.text, sample.finish_reason == "stop")
        )
        for sample in result[0].samples
    ]
    return Written(cut, variant, completions, result.stats.seconds)


def graded(found: Sequence[Written], grader: Grader) -> Iterator[tuple[Written, list[Grade]]]:
    """Yields each variant's samples with the grades of their completions."""
    asked: Iterable[tuple[str, str]] = [
        (each.cut.problem.task_id, text) for each in found for text in each.completions
    ]
    grades = iter(grader(asked))
    for each in found:
        yield each, [next(grades) for _ in each.completions]


def summary(found: Sequence[tuple[Written, Sequence[Grade]]]) -> list[dict[str, Any]]:
    """Summarizes the samples by kind of cut.

    Returns:
        The number of cuts, and for each variant the share of samples that pass, the share that do
        not parse, and the median of its seconds over those of `uncut`, which writes the same text
        but has nothing to align.
    """
    kinds = list(dict.fromkeys(each.cut.kind for each, _ in found))
    return [
        {"kind": kind, **_of_kind([one for one in found if one[0].cut.kind == kind])}
        for kind in kinds
    ]


def _of_kind(found: Sequence[tuple[Written, Sequence[Grade]]]) -> dict[str, Any]:
    uncut = {each.cut: each.seconds for each, _ in found if each.variant == UNCUT}
    variants: dict[str, Any] = {}
    for variant in VARIANTS:
        own = [(each, grades) for each, grades in found if each.variant == variant]
        variants[variant] = {
            "passed": mean(grade.scores[PASSED] for _, grades in own for grade in grades),
            "syntax_errors": mean(
                grade.outcome == "syntax" for _, grades in own for grade in grades
            ),
            "latency": median(each.seconds / uncut[each.cut] for each, _ in own),
        }
    return {
        "cuts": len(uncut),
        "samples": sum(len(grades) for each, grades in found if each.variant == NAIVE),
        "variants": variants,
    }
