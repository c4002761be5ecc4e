"""Masks and checks in one request: a filter, a grammar, members and Python's parser; the law by enumeration and counting.

Tests of: engine.checks, constraints.protocol, constraints.filters, constraints.members,
constraints.syntax.python.
"""

from __future__ import annotations

import ast
import itertools
import re
from functools import cache
from typing import Any

import pytest
from torch import Tensor

from constrained_laws import agreement, law_of, rows_of
from member_lists import analyser, passes
from shoal.config import Grammar
from shoal.constraints.filters import matching, without
from shoal.constraints.members import Members
from shoal.constraints.syntax.python import PythonMiddle
from shoal.engine import checks
from shoal.sampling.acceptance import Coupled, Rejection
from shoal.testing import END, VOCABULARY, tiny_tokenizer
from shoal.testing.scripted import hashed, scripted
from shoal.types.requests import Row

TOKENIZER = tiny_tokenizer()
LETTERS = "ab.()"
TOKENS = [TOKENIZER.encode(letter, add_special_tokens=False)[0] for letter in LETTERS]
OWN = [*TOKENS, END]
LEFT, LONGEST = "a", 3
PROMPT = (TOKENS[0],)


def target(seed: int) -> Any:
    """Most of the mass is on the tokens of `LETTERS` and the end; they are told apart by what is before."""
    inner = hashed(VOCABULARY, seed, spread=0.9)

    def scores(history: Any) -> Tensor:
        found = inner(history).double().clone()
        found[OWN] += 5.0
        return found

    return scores


TARGET, DRAFTER = target(1), target(2)


@cache
def begins(text: str) -> bool:
    """Whether a program begins so: with up to two letters, or an "and" that it begins, and closing brackets it is one."""
    letters = ["".join(end) for n in range(3) for end in itertools.product(LETTERS, repeat=n)]
    return any(parses(text + word + end + ")" * n) for word in ("", "nd a") for end in letters for n in range(4))


@cache
def parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def masked(text: str) -> list[int]:
    """By the definitions of the filter and the grammar: letters that may follow, and the end."""
    allowed = [
        t for t, c in zip(TOKENS, LETTERS, strict=True) if "bb" not in text + c and not (text + c).startswith((")", "a"))
    ]
    return [*allowed, END] if not re.fullmatch("b*", text) else allowed


def checked(text: str, token: int) -> bool:
    if token == END:
        return passes(LEFT + text, True) and parses(LEFT + text)
    grown = text + LETTERS[TOKENS.index(token)]
    return passes(LEFT + grown, False) and begins(LEFT + grown)


def law(top_k: int) -> dict[tuple[int, ...], float]:
    """The mask goes before truncation, checks come after it; where they leave nothing of it, the best score that passes."""

    def following(new: tuple[int, ...]) -> dict[int, float]:
        text = "".join(LETTERS[TOKENS.index(token)] for token in new)
        scores = TARGET((*PROMPT, *new))
        allowed = sorted(masked(text), key=lambda token: -float(scores[token]))
        right = [token for token in allowed[: top_k or None] if checked(text, token)]
        right = right or [token for token in allowed if checked(text, token)][:1]
        return dict(zip(right, scores[right].softmax(-1).tolist(), strict=True))

    return law_of(following, LONGEST, END)


def run(rule: Any, k: int, top_k: int = 0, n: int = 600) -> list[Row]:
    constraints = (
        Members(TOKENIZER, LEFT, analyser=analyser), without("bb"), Grammar("regex", "([b.(][ab.()]*)?"),
        PythonMiddle(TOKENIZER, LEFT, ""), ~matching("b*"),
    )  # fmt: skip
    models = scripted(TARGET, VOCABULARY), scripted(DRAFTER, VOCABULARY)
    return rows_of(*models, k, rule, n, LONGEST, END, constraints, prompt=PROMPT, tokenizer=TOKENIZER, top_k=top_k)[0]


@pytest.mark.slow(but=["plain, truncated", "rejection, truncated", "coupled"])
@pytest.mark.parametrize(
    ("rule", "k", "top_k"),
    [(Rejection(), 0, 3), (Rejection(), 2, 0), (Rejection(), 2, 3), (Coupled(), 2, 0)],
    ids=["plain, truncated", "rejection", "rejection, truncated", "coupled"],
)
def test_the_law_counted_through_the_engine(rule: Any, k: int, top_k: int) -> None:
    assert agreement(run(rule, k, top_k), law(top_k)) > 1e-3


def test_the_coupled_rule_writes_what_is_written_without_drafts() -> None:
    plain, drafted = (run(Coupled(), k, 3, 60) for k in (0, 2))
    assert [row.tokens for row in plain] == [row.tokens for row in drafted]


def test_every_part_matters() -> None:
    """Without one of the constraints the law is another one: none is implied by the others."""
    texts = ["".join(t) for n in range(3) for t in itertools.product(LETTERS, repeat=n)]
    reached = [text for text in texts if all(checked(text[:i], TOKENS[LETTERS.index(text[i])]) for i in range(len(text)))]
    reached = [t for t in reached if all(TOKENS[LETTERS.index(t[i])] in masked(t[:i]) for i in range(len(t)))]
    following = [(text, token) for text in reached for token in OWN]
    refusals = {
        (
            token not in masked(text),
            not passes(LEFT + text + ("" if token == END else LETTERS[TOKENS.index(token)]), token == END),
            not (parses(LEFT + text) if token == END else begins(LEFT + text + LETTERS[TOKENS.index(token)])),
        )
        for text, token in following
    }
    assert {(False, False, False), (True, False, False), (False, True, False), (False, False, True)} <= refusals


def late_mask(real: Any) -> Any:
    """Draws anew from p of the place before the refused token's."""
    return lambda scores, b, column: real(scores, b, max(column - 1, 0))


def first_check(real: Any) -> Any:
    """What is drawn anew is asked about in the first of the checks alone."""
    return lambda scores, b, column, position, states, refused: real(scores, b, column, position, states[:1], refused)


@pytest.mark.parametrize(("name", "wrong"), [("_p", late_mask), ("_draw_passing_token", first_check)])
def test_wrong_redraws_are_noticed(monkeypatch: pytest.MonkeyPatch, name: str, wrong: Any) -> None:
    monkeypatch.setattr(checks, name, wrong(getattr(checks, name)))
    assert agreement(run(Rejection(), 2), law(0)) < 1e-6
