"""Members after a dot: known names only, one query per dot, the distribution of p given that tokens pass.

Tests of: constraints.members, constraints.syntax.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from constrained_laws import agreement, law_given, rows_of
from member_lists import analyser, asked, passes
from shoal.config import Limits, Sampling
from shoal.constraints import members
from shoal.constraints.members import ARROW, DOT, Members, State, jedi_analyser
from shoal.constraints.syntax import Syntax, with_syntax
from shoal.constraints.syntax.python import PythonMiddle
from shoal.errors import RequestError
from shoal.lookahead.controller import Fixed
from shoal.sampling.acceptance import Coupled, Rejection
from shoal.testing import tiny_tokenizer
from shoal.testing.drafters import engine_of
from shoal.testing.scripted import hashed, mixed, scripted
from shoal.types.requests import Request, Row


class Tokens:
    """A tokenizer of six tokens, some of which hold a dot and what stands around it."""

    texts = ("a", "b", ".", "b.a", ".ab", " ")

    def get_vocab(self) -> dict[str, int]:
        return {text: i for i, text in enumerate(self.texts)}


TOKENS = Tokens()
VOCAB, END, LONGEST = 7, 6, 3


TARGET, DRAFTER = hashed(VOCAB, 1, spread=0.7), hashed(VOCAB, 2, spread=0.7)


def law() -> dict[tuple[int, ...], float]:
    def right(new: tuple[int, ...], token: int) -> bool:
        text = "".join(Tokens.texts[one] for one in new)
        return passes(text, True) if token == END else passes(text + Tokens.texts[token], False)

    return law_given(TARGET, right, VOCAB, LONGEST, END)


def test_members_follow_an_arrow_too() -> None:
    class Arrows:
        texts = ("a", "-", ">", "->b", ".", "b", "1", "2")

        def get_vocab(self) -> dict[str, int]:
            return {text: i for i, text in enumerate(self.texts)}

    def after(*tokens: str, left: str = "", marks: Any = (DOT, ARROW)) -> bool:
        check = Members(
            Arrows(), left, analyser=lambda before, _: ["a", "ab", "a1"] if before.endswith(("->", ".")) else [], marks=marks
        )
        state: State | None = check.start(row)
        for token in tokens:
            state = None if state is None else check.after(state, Arrows.texts.index(token))
        return state is not None

    row = Row(Request((0,), 1), 0, 0, 0, [0], frozenset(), 9)
    assert after("-", ">", "a", "b")
    assert not after("-", ">", "b")
    assert not after("a", "->b")
    assert not after(".", "b")
    assert after(".", "a", "1")
    assert not after(".", "a", "2")
    assert after(">", "b")
    assert after("-", "b")
    assert not after(">", "b", left="p-")  # half of it before the cursor
    assert not after("b", left="p->")
    assert after("b", left="p->a")
    assert after("->b", marks=(DOT,))


def run(rule: Any, k: int, n: int) -> tuple[list[Row], Members]:
    check = Members(TOKENS, analyser=analyser)
    return rows_of(scripted(TARGET, VOCAB), scripted(DRAFTER, VOCAB), k, rule, n, LONGEST, END, [check])[0], check


@pytest.mark.parametrize(
    ("rule", "k"), [(Rejection(), 0), (Rejection(), 2), (Coupled(), 2)], ids=["plain", "rejection", "coupled"]
)
def test_tokens_have_the_distribution_of_p_given_that_they_pass(rule: Any, k: int) -> None:
    assert agreement(run(rule, k, 600)[0], law()) > 1e-3


def test_names_of_another_branch_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the names of whoever wrote the first dot there, as states that are not forked would have them."""
    first: dict[int, Any] = {}
    real = Members._members
    monkeypatch.setattr(Members, "_members", lambda self, text: first.setdefault(len(text), real(self, text)))
    assert agreement(run(Rejection(), 2, 300)[0], law()) < 1e-6


def test_each_dot_is_asked_about_once() -> None:
    """By whatever rows and drafts it is written."""
    asked.clear()
    rows, check = run(Rejection(), 2, 100)
    queries = [before for before, _ in asked]
    written = {
        text[: at + 1]
        for row in rows
        for text in ["".join(Tokens.texts[token] for token in row.tokens[1:] if token != END)]
        for at, c in enumerate(text)
        if c == "."
    }
    assert len(queries) == len(set(queries)) == check.queries
    assert written <= set(queries)
    assert len(written) > 5
    assert sum(row.accepted for row in rows) > 0


def test_greedy_rows_write_the_same_whatever_is_drafted() -> None:
    texts = []
    for drafter in (None, TARGET, mixed(TARGET, DRAFTER)):
        engine = engine_of(
            scripted(TARGET, VOCAB),
            None if drafter is None else scripted(drafter, VOCAB),
            Fixed(3 if drafter else 0),
            eos=(END,),
        )
        request = Request(
            (3,), 1, Sampling(temperature=0.0), Limits(max_new_tokens=9), constraints=(Members(TOKENS, analyser=analyser),)
        )
        (row,) = engine.submit(request)
        while engine.step():
            pass
        texts.append(row.tokens)
    assert texts[0] == texts[1] == texts[2]


# ── contexts ────────────────────────────────────────────────────────────────────────────────────────────────────────


def written(check: Members, text: str) -> State | None:
    tokenizer = tiny_tokenizer()
    state: State | None = check.start(None)  # type: ignore[arg-type]
    for token in tokenizer.encode(text, add_special_tokens=False):
        state = None if state is None else check.after(state, token)
    return state


def test_a_cursor_inside_a_name_and_before_one() -> None:
    tokenizer = tiny_tokenizer()

    def names(before: str, behind: str) -> Collection[str]:
        assert (before, behind) == ("x = os.", "isdir(y)")
        return ["path_isdir", "parse"]

    check = Members(tokenizer, "x = os.pa", "isdir(y)", analyser=names)
    middle = written(check, "th_")
    assert middle is not None
    assert check.may_end(middle)  # with what stands behind it is a name
    whole = written(check, "rse")
    assert whole is not None
    assert not check.may_end(whole)
    assert written(check, "ths") is None
    assert written(check, "rse(") is not None
    assert written(check, "r(") is None


def test_what_alignment_writes_again_is_not_checked() -> None:
    tokenizer, queries = tiny_tokenizer(), []

    def names(before: str, behind: str) -> Collection[str]:
        queries.append(before)
        return ["path", "parse"]

    known = Members(tokenizer, "x = os.pa", analyser=names, healing=3)
    assert written(known, ".pa") == State(b"", (b"parse", b"path"), b"pa")
    assert written(known, ".pat") is not None
    assert written(known, ".pax") is None
    unknown = Members(tokenizer, "x = os.xé", analyser=names, healing=4)
    assert written(unknown, ".xé + ") is not None  # what the user wrote is not refused
    assert queries == ["x = os."] * 2


@pytest.mark.parametrize(("parses", "member"), [(True, True), (False, True), (True, False)])
def test_requests_with_members(monkeypatch: pytest.MonkeyPatch, parses: bool, member: bool) -> None:
    monkeypatch.setattr(members, "jedi_analyser", lambda: lambda before, behind: ["alpha"])
    asked = Request((1,), prompt="a.", removed=())
    syntax = Syntax("python", "b = a.", "\n", parses=parses, members=member)
    checks = with_syntax(asked, tiny_tokenizer(), syntax).constraints
    assert [type(check) for check in checks] == [kind for kind, on in ((PythonMiddle, parses), (Members, member)) if on]
    if member:
        assert written(checks[-1], "alp") is not None
        assert written(checks[-1], "be") is None


def test_where_nothing_is_known_any_name_may_follow() -> None:
    check = Members(tiny_tokenizer(), "x = thing.unheard", analyser=lambda before, behind: ())
    assert written(check, "_of.other.names()") is not None
    assert check.queries == 3  # one of them for all texts that begin at the cursor
    assert written(check, "_of") is not None
    assert check.queries == 3


CLASS = "class A:\n    def __init__(self):\n        self.alpha = []\n\na = A()\n"


@pytest.mark.parametrize(
    ("left", "right", "text", "right_text"),
    [
        (CLASS + "a.", "", "alpaca", "alpha.append(1)"),
        (CLASS, "", "a.alpha.push(1)", "a.alpha.pop()\n"),
        ("def user():\n    return made().", "\n\ndef made():\n    return A()\n" + CLASS, "beta", "alpha"),
        ("import math\n", "", "x = math.sine(", "x = math.sin(1.5) # about.this and '.that' are no members"),
        (CLASS + "class B:\n    def f(self):\n        ", "", "a.beta", "self.new = a.alpha\n        from .a import b"),
    ],
)
def test_what_jedi_knows(left: str, right: str, text: str, right_text: str) -> None:
    pytest.importorskip("jedi")
    check = Members(tiny_tokenizer(), left, right)
    assert written(check, text) is None
    assert written(check, right_text) is not None


def test_what_jedi_fails_at_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    jedi = pytest.importorskip("jedi")
    monkeypatch.setattr(jedi, "Script", lambda code: 1 / 0)
    assert not jedi_analyser()("import math\nmath.", "")


def test_jedi_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jedi", None)
    with pytest.raises(RequestError, match="members after a dot need jedi"):
        members.Members(tiny_tokenizer())
