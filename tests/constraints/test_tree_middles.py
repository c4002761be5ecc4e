"""Middles of the languages that tree-sitter reads: where they may end, where they are cut, and what files had already.

Tests of: constraints.syntax.tree_middles, constraints.syntax.
"""

from __future__ import annotations

import random
import re
import sys
from importlib import import_module
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from constrained_laws import agreement, law_given, rows_of
from shoal.constraints import syntax
from shoal.constraints.syntax import (
    LANGUAGES,
    Language,
    Syntax,
    installed_languages,
    language_of,
    read_syntax,
    reason_unchecked,
    syntax_by_name,
    tree_middles,
    with_syntax,
)
from shoal.constraints.syntax.tree_middles import GRAMMARS, CursorTrees, Fault, TreeMiddle, tree_sitter_language
from shoal.errors import RequestError
from shoal.sampling.acceptance import Coupled, Rejection
from shoal.testing import tiny_tokenizer
from shoal.testing.scripted import hashed, scripted
from shoal.types.requests import Request

TOKENIZER = tiny_tokenizer()
CASES = {
    "javascript": ("function f(a) {\n  return a + ", "g(a, {b: [1]})", ";\n}\n", " (1"),
    "typescript": ("function f(a: number): ", "Array<string>", " {\n  return g(a as any);\n}\n", " extends ="),
    "tsx": ("const e = <p>{", "a ?? <b>c</b>", "}</p>;\n", " (1"),
    "java": ("class A {\n  int f(int a) {\n    return ", "Math.max(a, 1)", ";\n  }\n}\n", " (1"),
    "go": ("package m\n\nfunc f(a int) int {\n\tfor i := range ", "g(a)", " {\n\t\ta += i\n\t}\n\treturn a\n}\n", " { } }"),
    "c": ("int f(int *a) {\n  return a[", "*a + 1", "];\n}\n", "} int"),
    "cpp": ("template <class T> auto f(T a) {\n  return [&](auto x) { ", "return a + x;", " };\n}\n", " a( );; )"),
    "rust": ("fn f(a: Option<i32>) -> i32 {\n    match a {\n        ", "Some(x) if x > 0 => x,\n        ", "_ => 0,\n    }\n}\n",
             "Some(x => ,"),
}  # fmt: skip
"""For each language the text before the cursor, a right middle, the text behind it, and how a wrong middle goes on."""


def faults(language: str, source: str) -> int:
    """The number of error and missing nodes of a text, read from the beginning, by the parser alone; 1 for one without a node."""
    tree = import_module("tree_sitter").Parser(tree_sitter_language(language)).parse(source.encode())
    count, open_ = 0, [tree.root_node]
    while open_:
        node = open_.pop()
        count += node.is_error or node.is_missing
        open_ += node.children
    return count or int(tree.root_node.has_error)


def parses(language: str, source: str) -> bool:
    return not faults(language, source)


def check_of(language: str, left: str, right: str, healing: int = 0) -> TreeMiddle:
    return TreeMiddle(TOKENIZER, left, right, healing, language=language)


def state_behind(check: TreeMiddle, written: str | bytes) -> Any:
    """The state behind a text in tokens of a byte each; None if one is refused."""
    state: Any = check.start(None)  # type: ignore[arg-type]
    for token in tokens_of(written):
        state = None if state is None else check.after(state, token)
    return state


def tokens_of(written: str | bytes) -> list[int]:
    own = tree_middles.token_bytes(TOKENIZER)
    return [own.index(bytes([byte])) for byte in (written.encode() if isinstance(written, str) else written)]


def may_end(check: TreeMiddle, written: str) -> bool:
    return check.may_end(state_behind(check, written))


def cut(check: TreeMiddle, written: str, best: int | None = None) -> str | None:
    """The beginning of a text that is left of it where the place of that many characters has the best score."""
    tokens = tokens_of(written)
    scores = [-2.0 + i / 1000 for i in range(len(tokens) + 1)]
    if best is not None:
        scores[len(written[:best].encode())] = 0.0
    found = check.best_end(tokens, scores, len(written))
    return None if found is None else written[: found[0]]


# ── the seven languages ─────────────────────────────────────────────────────────────────────────────────────────────


def test_there_are_cases_for_all_languages() -> None:
    assert set(CASES) == set(GRAMMARS)
    assert get_args(Language) == tuple(LANGUAGES)
    assert installed_languages() == list(LANGUAGES)


@pytest.mark.parametrize("language", CASES)
def test_a_text_ends_where_the_file_parses(language: str) -> None:
    left, middle, right, wrong = CASES[language]
    check = check_of(language, left, right)
    assert may_end(check, middle)
    assert not may_end(check, middle + wrong)
    for size in range(len(middle)):
        assert may_end(check, middle[:size]) == parses(language, left + middle[:size] + right)


@pytest.mark.parametrize("language", CASES)
def test_a_text_that_goes_on_is_cut_at_the_best_place_that_parses(language: str) -> None:
    left, middle, right, wrong = CASES[language]
    assert cut(check_of(language, left, right), middle + wrong, len(middle)) == middle
    lots = random.Random(language)
    for _ in range(4):  # by brute force
        text = middle + wrong
        scores = [round(lots.uniform(-3, 0), 1) for _ in range(len(text) + 1)]
        good = [
            (scores[size], size)
            for size in range(len(text) + 1)
            if parses(language, left + text[:size] + right) and not splits(text, size, right)
        ]
        found = check_of(language, left, right).best_end(tokens_of(text), scores, len(text))
        assert found == (max(good)[1], max(good)[1])


def splits(text: str, size: int, right: str) -> bool:
    """Whether a place is inside a word, which does not go on behind the text, or inside blanks."""
    sides = text[size - 1 : size], text[size : size + 1]
    words = all(side and (side.isalnum() or side in "_$") for side in sides)
    return (words and not re.match(r"[\w$]", right)) or all(side and side in " \t" for side in sides)


@pytest.mark.parametrize("language", CASES)
def test_faults_elsewhere_do_not_block_and_are_no_excuse(language: str) -> None:
    """A file that is broken behind the cursor, then one that is broken before it."""
    left, middle, right, wrong = CASES[language]
    broken = {"java": "class B { int x = = 1; }\n", "go": "func g() { x := = 1 }\n", "rust": "fn g() { let x = = 1; }\n"}
    other = broken.get(
        language, "int g() { int x = ? 1; }\n" if language in ("c", "cpp") else "function g() { let x = = 1; }\n"
    )
    first = "package m\n" if language == "go" else ""
    for before, behind in ((left, right + other), (first + other + left.removeprefix(first), right)):
        assert not parses(language, before + middle + behind)
        check = check_of(language, before, behind)
        assert check._trees.own
        assert may_end(check, middle)
        assert not may_end(check, middle + wrong)
        assert cut(check, middle + wrong, len(middle)) == middle


# ── faults of the cursor, and of the file ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("language", "left", "right"),
    [
        ("javascript", "function f() {\n  if (a) {", "\n}\nfunction g() { return 2; }\n"),
        ("javascript", "let s = `a ${ b", "\n"),
        ("javascript", "f(/* a ", "\n);\n"),
        ("javascript", "for (const a", "\n"),
        ("typescript", "const x: {a: ", "\n"),
        ("java", "class A {\n  int f(int x) {\n    int y = foo(", "\n  }\n}\n"),
        ("c", 'int main() {\n  char *s = "ab', "\n}\n"),
        ("go", "package m\nfunc f() {\n  for i := range ", "\n}\n"),
        ("rust", "fn main() {\n  let x = match y {", "\n}\n"),
        ("cpp", "int main() {\n  std::vector<int> v(", "\n}\n"),
    ],
)
def test_what_is_only_incomplete_at_the_cursor_is_no_fault_of_the_file(language: str, left: str, right: str) -> None:
    """What is missing may be reported far from the cursor, and would be forgiven as the file's own."""
    assert not parses(language, left + right)
    check = check_of(language, left, right)
    assert not check._trees.own
    assert not may_end(check, "")
    assert cut(check, "") is None


def test_an_end_that_heals_a_file_comes_before_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no text is known to complete what is open at the cursor, its faults count as the file's own."""
    monkeypatch.setattr(tree_middles, "_COMPLETING", ("%s",))
    left, right = "let x = a ? b ", ";\nlet y = = 2;\n"
    check = check_of("javascript", left, right)
    assert len(check._trees.own) == 2
    assert cut(check, ": c + ", best=0) == ": c "
    with monkeypatch.context() as patch:  # the control
        patch.setattr(CursorTrees, "count", lambda self, middle, guess=False: 0)
        assert cut(check, ": c + ", best=0) == ""


def test_a_fault_of_the_text_that_was_tried_is_none_of_the_file() -> None:
    """Each text that is put at this cursor leaves a fault at it, and another behind it."""
    trees = CursorTrees("typescript", "function f(a: ", "ray<string> {\n  return g(a as any);\n}\n")
    assert [fault.sides for fault in trees.own] == [(2, 2)]
    assert trees.count("\r\n`: ") is None


def test_a_text_that_seems_to_fit_is_read_from_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    trees = CursorTrees("javascript", "f(", ");\n")
    monkeypatch.setattr(trees, "_parse_edit", lambda text: trees._whole(b"a"))
    assert trees.count(")", guess=True) == 0
    assert trees.count(")") is None


def test_faults_are_known_by_their_places() -> None:
    fault = Fault((0, 0), -9, -5)
    assert fault.is_part_of(Fault((0, 0), -5, -1))
    assert not fault.is_part_of(Fault((0, 0), -4, -1))
    assert not fault.is_part_of(Fault((0, 2), -9, 5))
    trees = CursorTrees("c", "ab", "cd")
    assert [trees._place(*place, 3) for place in ((0, 1), (1, 3), (2, 5), (2, 2), (5, 5), (5, 6), (1, 6), (6, 6))] == [
        Fault((0, 0), -2, -1), Fault((0, 1), -1, 0), Fault((1, 1), 0, 0), Fault((0, 0), 0, 0), Fault((1, 1), 0, 0),
        Fault((2, 2), 0, 1), Fault((0, 2), -1, 1), Fault((2, 2), 1, 1),
    ]  # fmt: skip


# ── texts ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("left", "good", "right", "bad"),
    [
        ('let a = "x', " y", '";\nlet b = 1;\n', '"'),
        ("let a = 1; // x", " is (", "\nlet b = 1;\n", "\nb ("),
        ("let a = /* x", " is (", " */ 1;\n", " */ ("),
        ("let a = `x ${", "b + `c`", "}`;\n", "b + `c"),
        ("let a = /x", "[(]y", "/;\n", "(/("),
    ],
    ids=["string", "line comment", "comment", "template", "expression"],
)
def test_cursors_inside_strings_and_comments(left: str, good: str, right: str, bad: str) -> None:
    check = check_of("javascript", left, right)
    assert may_end(check, good)
    assert not may_end(check, bad)


@pytest.mark.parametrize("language", CASES)
def test_an_empty_suffix(language: str) -> None:
    left, middle, right, _ = CASES[language]
    check = check_of(language, left, "")
    assert bool(check._trees.own) == (language == "tsx")  # its end is a tag's
    assert may_end(check, middle) == parses(language, left + middle) or language == "tsx"
    assert may_end(check, middle + right)
    assert cut(check, middle + right + "\n) (") is not None


@pytest.mark.parametrize("end", ["\r\n", "\n"])
def test_line_ends_and_tabs(end: str) -> None:
    left, right = "int f(int a) {\n\tif (a) {\n\t\t".replace("\n", end), "\n\t}\n\treturn a;\n}\n".replace("\n", end)
    middle = "a++;\n\t\ta--;".replace("\n", end)
    check = check_of("c", left, right)
    assert may_end(check, middle)
    assert not may_end(check, middle + "}")
    assert cut(check, middle + "}") == middle
    text = f"a++;{end}\t\tb("
    places = [cut(check_of("c", left, right), text, best) for best in range(len(text))]
    assert f"a++;{end}" in places
    assert "a++;\r" not in places
    assert f"a++;{end}\t" not in places


def test_places_are_characters_and_the_parser_counts_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters of one to four bytes before, in and behind the text, some of them in the middle of a token of its own."""
    left, right = 'const ü = "é€😀";\nlet b = f(', ', "é€😀");\nlet c = = 1;\n'
    middle = '"ж😀", [ü'
    check = check_of("javascript", left, right)
    assert [fault.sides for fault in check._trees.own] == [(2, 2)]
    assert may_end(check, middle + "]")
    assert not may_end(check, middle)
    assert cut(check, middle + "] (é") == middle + "] "
    state = state_behind(check, '"é'.encode()[:-1])
    assert (state.text, state.rest) == ('"', b"\xc3")
    assert not check.may_end(state)
    inside = check_of("javascript", 'let a = "', '";\n')
    assert may_end(inside, "x")
    assert not inside.may_end(state_behind(inside, "xé".encode()[:-1]))
    assert state_behind(check, b'"\xff') is None
    assert check.after(check.start(None), TOKENIZER.eos_token_id) is None  # type: ignore[arg-type]
    assert check.after(check.start(None), 10_000) is None  # type: ignore[arg-type]
    wrong = check_of("javascript", left, right)  # the control: an offset in characters
    assert wrong._trees.own
    wrong._trees._cursor = len(left)
    assert not may_end(wrong, middle + "]")


def test_bytes_that_are_written_again_are_no_part_of_the_text() -> None:
    left, right = "let aé = b + cé", ";\n"
    check = check_of("javascript", left, right, healing=len("cé".encode()))
    assert not may_end(check, "c")
    assert may_end(check, "cé")
    assert may_end(check, "cé(1)")
    assert not may_end(check, "cé(1")
    tokens = tokens_of("cé(1) (")
    assert check.best_end(tokens, [-1.0] * (len(tokens) + 1), 5) == (4, 7)  # with the blank, which parses alike


def test_no_end_lies_inside_a_word() -> None:
    """A name that the model did not write is no suggestion; the text's own end may be inside one."""
    check = check_of("javascript", "let a = b + ", "\n")
    assert cut(check, "first.second", best=8) == "first.second"
    assert cut(check, "first.second", best=5) == "first"
    assert cut(check, "$a$b (", best=2) == "$a$b "
    for rest in ("th\n", "$th\n"):
        assert cut(check_of("javascript", "let a = b + ", rest), "length()", best=4) == "leng"


# ── whatever is written ─────────────────────────────────────────────────────────────────────────────────────────────

PIECES = (
    "a", "1", "é", "😀", '"', "'", "`", "(", ")", "{", "}", "[", "]", ";", ",", " ", "\n", "\t", "\r\n", "//", "/*", "*/",
    "= ", "+", "return ", "if ", "else ", ": ", "=> ", "<", ">", "let ", "int ",
)  # fmt: skip


@st.composite
def cursors(draw: st.DrawFn) -> tuple[str, str, str, str, int]:
    language = draw(st.sampled_from(list(CASES)))
    left, middle, right, _ = CASES[language]
    whole = left + middle + right
    start = draw(st.integers(0, len(whole)))
    end = draw(st.integers(start, len(whole)))
    text = "".join(draw(st.lists(st.sampled_from(PIECES), max_size=6)))
    text = whole[start:end] + text if draw(st.booleans()) else text
    return language, whole[:start], text, whole[end:], draw(st.integers(0, len(text)))


@settings(max_examples=150, deadline=None)
@given(cursors())
def test_no_result_adds_a_fault(case: tuple[str, str, str, str, int]) -> None:
    """Of files that some text at the cursor makes whole, with any text there."""
    language, left, text, right, best = case
    check = check_of(language, left, right)
    found = cut(check, text, best)
    if not check._trees.own:
        assert found is None or parses(language, left + found + right)
        assert may_end(check, text) == parses(language, left + text + right)
    elif found is not None:  # no text that completes the file is known: it is no worse than with the best of those tried
        kinds = {fault.sides for fault in check._trees.own}
        whole = (left + found + right).encode()
        left_over = check._trees._faults(check._trees._parser.parse(whole), len(found.encode()))
        assert {fault.sides for fault in left_over} <= kinds


def test_a_check_that_takes_every_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the property."""
    monkeypatch.setattr(CursorTrees, "count", lambda self, middle, guess=False: 0)
    with pytest.raises(AssertionError):
        test_no_result_adds_a_fault.hypothesis.inner_test(("c", "int a = ", "(", ";\n", 1))  # type: ignore[attr-defined]


class Tokens:
    """A tokenizer of pieces of JavaScript."""

    texts = ("a", "(", ")", " + ")

    def get_vocab(self) -> dict[str, int]:
        return {text: i for i, text in enumerate(self.texts)}


VOCAB, END, LONGEST = 5, 4, 3
LEFT, RIGHT = "f(", ");\n"


def law(script: Any) -> dict[tuple[int, ...], float]:
    def passes(new: tuple[int, ...], token: int) -> bool:
        return token != END or parses("javascript", LEFT + "".join(Tokens.texts[one] for one in new) + RIGHT)

    return law_given(script, passes, VOCAB, LONGEST, END)


@pytest.mark.slow(but=["0-coupled", "2-rejection"])
@pytest.mark.parametrize("rule", [Rejection(), Coupled()], ids=["rejection", "coupled"])
@pytest.mark.parametrize("k", [0, 2])
def test_tokens_have_the_law_of_p_given_that_an_end_parses(rule: Any, k: int) -> None:
    target, drafter = hashed(VOCAB, 1, spread=0.7), hashed(VOCAB, 2, spread=0.7)
    check = TreeMiddle(Tokens(), LEFT, RIGHT, language="javascript")
    rows, _ = rows_of(scripted(target, VOCAB), scripted(drafter, VOCAB), k, rule, 1500, LONGEST, END, [check])
    assert agreement(rows, law(target)) > 1e-3
    if k == 0 and isinstance(rule, Coupled):  # the control
        assert agreement(rows, law(drafter)) < 1e-6


@pytest.mark.parametrize("language", ["javascript", "java"])
def test_samples_of_a_model_parse_and_are_ranked(language: str, bundled: shoal.Shoal) -> None:
    left, _, right, _ = CASES[language]
    options: dict[str, Any] = dict(n=8, suffix=right, max_new_tokens=16, temperature=1.0, seed=1)
    samples = bundled.generate(left, syntax=language, **options)[0].samples
    assert {sample.syntax for sample in samples} <= {"complete", "cut", "incomplete"}
    assert any(sample.syntax == "cut" for sample in samples)
    for sample in samples:
        assert (sample.syntax == "complete") == (sample.finish_reason == "eos")
        assert sample.syntax == "incomplete" or parses(language, left + sample.text + right)
    free = bundled.generate(left, **options)[0].samples
    assert not all(parses(language, left + sample.text + right) for sample in free)


# ── names and packages ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "language"),
    [
        ("a.py", "python"), ("/b/c.pyi", "python"), ("package.json", "json"), ("a.MJS", "javascript"), ("a.jsx", "javascript"),
        ("a.d.ts", "typescript"), ("a.tsx", "tsx"), ("A.java", "java"), ("a.go", "go"), ("a.h", "c"), ("a.hpp", "cpp"),
        ("a.cc", "cpp"), ("a.rs", "rust"), ("a.txt", None), ("Makefile", None), (".c", None), ("", None), ("-", None),
    ],
)  # fmt: skip
def test_the_end_of_a_name_says_the_language(name: str, language: str | None) -> None:
    assert language_of(name) == language
    syntax = syntax_by_name(name)
    assert syntax == (None if language is None else Syntax(language, optional=True))


def test_no_end_of_a_name_says_two_languages() -> None:
    endings = [ending for kind in LANGUAGES.values() for ending in kind.endings]
    assert len(endings) == len(set(endings))


def test_members_stay_with_python() -> None:
    assert syntax_by_name("a.py", members=True) == Syntax("python", members=True, optional=True)
    assert (
        syntax_by_name("a.go", members=True)
        == syntax_by_name(None, members=True)
        == Syntax("python", None, None, False, True)
    )
    with pytest.raises(
        RequestError, match=r"members are those of Python.*leave them out, or name python, c, cpp .*got 'go'"
    ):
        read_syntax(Syntax("go", members=True))


@pytest.mark.parametrize("module", ["tree_sitter", "tree_sitter_go"])
def test_without_the_packages_what_to_install_is_said(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tree_sitter_language.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    request = Request((1,), 1, prompt="package m\n")
    message = r"syntax='go' needs tree-sitter and tree-sitter-go: pip install '\.\[syntax\]'"
    with pytest.raises(RequestError, match=message):
        with_syntax(request, TOKENIZER, "go")
    optional = Syntax("go", optional=True)
    assert with_syntax(request, TOKENIZER, optional).constraints == ()
    assert "pip install" in (reason_unchecked(optional, TOKENIZER) or "")
    monkeypatch.undo()
    assert reason_unchecked(optional, TOKENIZER) is None
    assert len(with_syntax(request, TOKENIZER, optional).constraints) == 1


def test_packages_that_are_absent_leave_their_languages_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syntax, "find_spec", lambda name: None if name == "tree_sitter" else name)
    assert installed_languages() == ["python", "json"]
