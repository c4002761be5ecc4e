"""The cuts of solutions inside a token, by kind of the part that is left.

The kinds are taken from Athiwaratkun et al., Token Alignment, 2024, section 4.

Such programs are continued as they are, aligned, and from where the cut token begins.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, permutations
from statistics import mean, median
from typing import Any

from shoal.api import Shoal
from shoal.constraints.token_bytes import token_bytes
from shoal.evaluation.endings import ending
from shoal.evaluation.problems import Problem
from shoal.evaluation.tasks import PASSED, Grade, Grader

KINDS = ("word", "space", "punctuation", "prefix-sep", "prefix-indent")
"""The kinds of cuts.

`word` is inside the letters of a token, `space` between a space and the rest of the same token,
`punctuation` inside a token of several signs, `prefix-indent` inside the blanks of an indent, and
`prefix-sep` behind a whole token of signs that longer tokens begin with, so that no token is cut.
"""
SIGNS = re.compile(r"[^\w\s]+")


@dataclass(frozen=True)
class Cut:
    """A problem and the place of the cut in its program.

    Attributes:
        kind: one of `KINDS`.
        end: the number of characters of prompt and solution that are left.
        start: the place at which the cut token begins.
    """

    problem: Problem
    kind: str
    end: int
    start: int

    def given(self, *, whole_tokens: bool) -> str:
        """Returns the text that a model continues: up to the cut, or up to the cut token."""
        return (self.problem.prompt + (self.problem.canonical or ""))[
            : self.start if whole_tokens else self.end
        ]


def cuts(
    problems: Sequence[Problem], tokenizer: Any, kinds: Sequence[str], seed: int = 0
) -> list[Cut]:
    """Makes one cut of each kind in each problem whose solution has such a place.

    Seed and problem decide which place is cut.
    """
    cuts_of_text = []
    for problem in problems:
        whole = problem.prompt + (problem.canonical or "")
        by_kind = places(tokenizer, whole, len(problem.prompt))
        for kind in kinds:
            if by_kind[kind]:
                chosen = random.Random(f"{seed} {kind} {problem.task_id}").choice(by_kind[kind])
                cuts_of_text.append(Cut(problem, kind, *chosen))
    return cuts_of_text


def places(tokenizer: Any, whole: str, first: int) -> dict[str, list[tuple[int, int]]]:
    """Finds the places of cuts by kind.

    A place is the end of the text that is left, and the start of the cut token.

    Args:
        first: the place from which cuts are of interest, in characters: the length of a prompt.
    """
    vocabulary = {spelled for spelled in token_bytes(tokenizer) if spelled}
    by_kind: dict[str, list[tuple[int, int]]] = {kind: [] for kind in KINDS}
    for start, end in tokens_of(tokenizer, whole):
        token = whole[start:end]
        if start < first:
            continue
        if re.fullmatch(r" ?\w+", token):
            by_kind["word"] += [
                (cut, start) for cut in range(start + 1 + token.startswith(" "), end)
            ]
        if re.fullmatch(r" \S+", token):
            by_kind["space"].append((start + 1, start))
        if re.fullmatch(r" ?[^\w\s]{2,}", token):
            by_kind["punctuation"] += [
                (cut, start) for cut in range(start + 1 + token.startswith(" "), end)
            ]
        if token.isspace() and "\n" not in token and whole[start - 1] == "\n":
            by_kind["prefix-indent"] += [(cut, start) for cut in range(start + 1, end)]
        if SIGNS.fullmatch(token) and any(
            len(own) > len(token) and own.startswith(token.encode()) for own in vocabulary
        ):
            by_kind["prefix-sep"].append((end, end))
    return by_kind


def tokens_of(tokenizer: Any, text: str) -> list[tuple[int, int]]:
    """Returns the first and last place of each token of an ASCII text; other texts give none."""
    if not text.isascii():
        return []
    spelled = token_bytes(tokenizer)
    pieces = [spelled[token] or b"" for token in tokenizer.encode(text, add_special_tokens=False)]
    if b"".join(pieces) == b" " + text.encode():  # the tokenizer writes a space before a text
        pieces[0] = pieces[0][1:]
    ends = list(accumulate(map(len, pieces)))
    return [place for place in zip([0, *ends], ends, strict=False) if place[0] < place[1]]


NAIVE, ALIGNED, UNCUT = "naive", "aligned", "uncut"
VARIANTS = (NAIVE, ALIGNED, UNCUT)
"""The ways to continue a cut program.

Naively from the cut; from the cut with `align=True`; and from where the cut token begins, which
gives the model less of the program.
"""


@dataclass(frozen=True)
class VariantSamples:
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
) -> Iterator[list[VariantSamples]]:
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
        samples = {
            variant: _write(pair, cut, variant, n, options)
            for variant in orders[place % len(orders)]
        }
        yield [samples[variant] for variant in VARIANTS]


def _write(
    pair: Shoal, cut: Cut, variant: str, n: int, options: Mapping[str, Any]
) -> VariantSamples:
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
    return VariantSamples(cut, variant, completions, result.stats.seconds)


def graded(
    samples: Sequence[VariantSamples], grader: Grader
) -> Iterator[tuple[VariantSamples, list[Grade]]]:
    """Yields each variant's samples with the grades of their completions."""
    texts: Iterable[tuple[str, str]] = [
        (each.cut.problem.task_id, text) for each in samples for text in each.completions
    ]
    grades = iter(grader(texts))
    for each in samples:
        yield each, [next(grades) for _ in each.completions]


def summary(pairs: Sequence[tuple[VariantSamples, Sequence[Grade]]]) -> list[dict[str, Any]]:
    """Summarizes the samples by kind of cut.

    Returns:
        The number of cuts, and for each variant the share of samples that pass, the share that do
        not parse, and the median of its seconds over those of `uncut`, which writes the same text
        but has nothing to align.
    """
    kinds = list(dict.fromkeys(each.cut.kind for each, _ in pairs))
    return [
        {"kind": kind, **_of_kind([one for one in pairs if one[0].cut.kind == kind])}
        for kind in kinds
    ]


def _of_kind(pairs: Sequence[tuple[VariantSamples, Sequence[Grade]]]) -> dict[str, Any]:
    uncut = {each.cut: each.seconds for each, _ in pairs if each.variant == UNCUT}
    variants: dict[str, Any] = {}
    for variant in VARIANTS:
        own = [(each, grades) for each, grades in pairs if each.variant == variant]
        variants[variant] = {
            "passed": mean(grade.scores[PASSED] for _, grades in own for grade in grades),
            "syntax_errors": mean(
                grade.outcome == "syntax" for _, grades in own for grade in grades
            ),
            "latency": median(each.seconds / uncut[each.cut] for each, _ in own),
        }
    return {
        "cuts": len(uncut),
        "samples": sum(len(grades) for each, grades in pairs if each.variant == NAIVE),
        "variants": variants,
    }
