"""The cuts of solutions inside a token, by kind of the part that is left.

The kinds are taken from Athiwaratkun et al., Token Alignment, 2024, section 4.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from shoal.constraints.token_bytes import token_bytes
from shoal.evaluation.problems import Problem

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
    found = []
    for problem in problems:
        whole = problem.prompt + (problem.canonical or "")
        by_kind = places(tokenizer, whole, len(problem.prompt))
        for kind in kinds:
            if by_kind[kind]:
                chosen = random.Random(f"{seed} {kind} {problem.task_id}").choice(by_kind[kind])
                found.append(Cut(problem, kind, *chosen))
    return found


def places(tokenizer: Any, whole: str, first: int) -> dict[str, list[tuple[int, int]]]:
    """Finds the places of cuts by kind.

    A place is the end of the text that is left, and the start of the cut token.

    Args:
        first: the place from which cuts are of interest, in characters: the length of a prompt.
    """
    vocabulary = {spelled for spelled in token_bytes(tokenizer) if spelled}
    found: dict[str, list[tuple[int, int]]] = {kind: [] for kind in KINDS}
    for start, end in tokens_of(tokenizer, whole):
        token = whole[start:end]
        if start < first:
            continue
        if re.fullmatch(r" ?\w+", token):
            found["word"] += [(cut, start) for cut in range(start + 1 + token.startswith(" "), end)]
        if re.fullmatch(r" \S+", token):
            found["space"].append((start + 1, start))
        if re.fullmatch(r" ?[^\w\s]{2,}", token):
            found["punctuation"] += [
                (cut, start) for cut in range(start + 1 + token.startswith(" "), end)
            ]
        if token.isspace() and "\n" not in token and whole[start - 1] == "\n":
            found["prefix-indent"] += [(cut, start) for cut in range(start + 1, end)]
        if SIGNS.fullmatch(token) and any(
            len(own) > len(token) and own.startswith(token.encode()) for own in vocabulary
        ):
            found["prefix-sep"].append((end, end))
    return found


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
