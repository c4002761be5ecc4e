"""Middles under any grammar: both quotients against their definition, JSON against its parser, laws as declared.

Tests of: constraints.syntax.middles, behind, grammars and requests.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import shoal
from constrained_laws import agreement, law_given, rows_of
from shoal.constraints.syntax import middles, read_syntax
from shoal.constraints.syntax.behind import Behind
from shoal.constraints.syntax.grammars import automaton, encode, read_grammar
from shoal.constraints.syntax.middles import Column, GrammarMiddle, Quotients
from shoal.constraints.token_bytes import token_bytes
from shoal.errors import RequestError
from shoal.sampling.acceptance import Coupled, Rejection
from shoal.testing import tiny_tokenizer
from shoal.testing.scripted import hashed, scripted

lark = pytest.importorskip("lark")

CALCULATOR = """
start: sum
?sum: product | sum "+" product
?product: atom | product "*" atom
?atom: NUMBER | "(" sum ")"
NUMBER: /[0-9]+/
%ignore " "
"""
GRAMMARS = {  # with an alphabet, and lengths of texts by brute force: of the whole, and of those before and behind
    "calculator": (CALCULATOR, "1+( )", 6, 3),
    "brackets": ('start: start start | "(" start ")" |', "()", 10, 4),
    "empty": ('start: a b\na: | "a" a\nb: "b" | b "c" |', "abc", 7, 3),
    "straddling": ('start: ("ia" NAME | "abb" "i"? | NAME "=" NAME) NAME?\nNAME: /[abi]{1,2}/', "abi=", 6, 2),
}
JSON = files("shoal.constraints.syntax").joinpath("json.lark").read_text(encoding="utf-8")


def quotients(grammar: str, right: str) -> Quotients:
    return Quotients(Behind(read_grammar(grammar), right.encode()))


def read(found: Quotients, text: str, column: Column | None = None) -> Column | None:
    column = column or found.start()
    for byte in text.encode():
        column = column and found.read(column, byte)
    return column


@lru_cache
def language(name: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """By lark's own parser: the texts of a grammar up to a length; and all texts up to the length of those before and behind."""
    grammar, alphabet, whole, part = GRAMMARS[name]
    found = quotients(grammar, "")
    texts = ["".join(text) for length in range(whole + 1) for text in itertools.product(alphabet, repeat=length)]
    own = {text for text in texts if (column := read(found, text)) and found.may_end(column)}
    parser = lark.Lark(grammar, parser="earley", lexer="dynamic_complete")
    lots = random.Random(1)
    short = texts[: sum(len(alphabet) ** length for length in range(4))]
    for text in {*short, *lots.sample(texts, 250), *lots.sample(sorted(own), min(100, len(own)))}:
        try:
            parser.parse(text)
        except lark.exceptions.LarkError:
            assert text not in own, repr(text)
        else:
            assert text in own, repr(text)
    return frozenset(own), tuple(text for text in texts if len(text) <= part)


def wrong(name: str, found: Any = quotients) -> list[str]:
    """Where the quotients are not as their definition says, by all middles that leave the whole short enough."""
    grammar, _, longest, part = GRAMMARS[name]
    own, parts = language(name)
    beginnings: dict[str, set[str]] = {}
    for text in own:
        for first, last in itertools.product(range(part + 1), repeat=2):
            if first + last <= len(text):
                beginnings.setdefault(text[len(text) - last :], set()).add(text[:first])
    report = []
    for right in parts:
        asked = found(grammar, right)
        for left in parts:
            column = read(asked, left)
            if (column is not None and asked.may_end(column)) != (left + right in own):
                report.append(f"complete: {left!r} {right!r}")
            if left in beginnings.get(right, ()):
                if column is None:
                    report.append(f"refused: {left!r} {right!r}")
            elif column is not None and not _completed(asked, column, longest, GRAMMARS[name][1]):
                report.append(f"not refused: {left!r} {right!r}")
    return report


def _completed(asked: Quotients, column: Column, most: int, alphabet: str) -> bool:
    """Whether some middle leads to an end."""
    columns = {id(column): column}
    for _ in range(most):
        if any(map(asked.may_end, columns.values())):
            return True
        after = [asked.read(one, ord(character)) for one in columns.values() for character in alphabet]
        columns = {id(one): one for one in after if one is not None}
    return False


@pytest.mark.slow(but=["brackets"])
@pytest.mark.parametrize("name", GRAMMARS)
def test_the_quotients_are_those_of_the_definition(name: str) -> None:
    assert not wrong(name)


def test_a_quotient_that_leaves_the_text_behind_out_is_noticed() -> None:
    """The control: what is viable by the text before alone, ending where the whole does."""

    class Careless(Quotients):
        def may_end(self, column: Column) -> bool:
            return True

    assert wrong("brackets", lambda grammar, _: quotients(grammar, ""))
    assert wrong("brackets", lambda grammar, right: Careless(Behind(read_grammar(grammar), right.encode())))


@pytest.mark.parametrize(
    "pattern",
    [
        "(ab|a)*c?",
        "(?i:ab)+",
        "[^a]b{1,2}",
        "a(?:b|c){2}d?",
        ".(?<=a)b",
        "(?<![ab])c|a(?<!c)[bc]",
        r"[^\W\d]\w*",
        r"(?s:.)\d?",
    ],
)
def test_automata_match_what_expressions_match(pattern: str) -> None:
    found = automaton(pattern)
    for length in range(5):
        for characters in itertools.product("abcd0\n\u00e9", repeat=length):
            text = "".join(characters)
            state = 0
            for byte in text.encode():
                state = found.moves[state][byte] if state >= 0 else -1
            assert (state in found.accepts) == bool(re.fullmatch(pattern, text)), repr(text)


def test_utf8_of_ranges_is_that_of_their_characters() -> None:
    lots = random.Random(1)
    for low in (0, 0x7F, 0x80, 0x7FF, 0x800, 0xD700, 0xFFFF, 0x10000, *(lots.randrange(0x110000) for _ in range(20))):
        high = min(0x10FFFF, low + lots.choice([0, 1, 70, 5000, 70000]))
        written = {
            bytes(text) for one in encode(((low, high),)) for text in itertools.product(*(range(a, b + 1) for a, b in one))
        }
        assert written == {chr(code).encode() for code in range(low, high + 1) if not 0xD800 <= code <= 0xDFFF}


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("start: a", "cannot be read"),
        ('start: "a" start', "derives no text"),
        ("start: A\nA: /a(?=b)/", "cannot be followed"),
        ("start: A\nA: /a(?<!bc)/", "cannot be followed"),
        ("start: A\nA: /a(?<!b|cd)/", "fixed-width"),
        ("start: A\nA: /(a|b)*a(a|b){14}/", "more than 4096 states"),
    ],
)
def test_grammars_that_cannot_be_followed_are_refused(grammar: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        GrammarMiddle(tiny_tokenizer(), "", "", grammar)


def document(lots: random.Random, depth: int) -> Any:
    kinds = [lambda: lots.choice([None, True, False]), lambda: lots.uniform(-1e6, 1e-6), lambda: lots.randrange(10**6)]
    kinds.append(lambda: "".join(lots.choice('ab "\\/\n\u00e9\u20ac\U0001f600{}[]:,') for _ in range(lots.randrange(8))))
    if depth:
        kinds.append(lambda: [document(lots, depth - 1) for _ in range(lots.randrange(5))])
        kinds.append(lambda: {f"k{i}\u00e9": document(lots, depth - 1) for i in range(lots.randrange(5))})
    return lots.choice(kinds[-2:] if depth > 2 else kinds)()


def parses(text: str) -> bool:
    try:
        json.loads(text, parse_constant=lambda name: pytest.fail(name))
    except json.JSONDecodeError:
        return False
    return True


def test_every_prefix_of_a_true_middle_of_json_can_be_completed_and_ends_as_its_parser_says() -> None:
    lots = random.Random(3)
    for turn in range(30):
        text = json.dumps(document(lots, 4), indent=turn % 3 or None, ensure_ascii=turn % 2 == 0)
        for _ in range(5):
            first = lots.randrange(len(text) + 1)
            last = min(len(text), first + lots.randrange(25))
            found = quotients(JSON, text[last:])
            column = read(found, text[:first])
            for place in range(first, last + 1):
                assert column is not None, (text[:place], text[last:])
                assert found.may_end(column) == parses(text[:place] + text[last:])
                column = read(found, text[place : place + 1], column) if place < last else column


def test_what_is_written_in_json_at_random_is_complete_as_its_parser_says() -> None:
    """Walks that take any character that may follow; each ends soon if the shortest text is wanted, so none is a dead end."""
    lots, ends = random.Random(5), 0
    alphabet = '{}[]:,"a\\u01-.eE+ \n'
    around = [("", ""), ('{"a": [1, ', "]}"), ('[{"b": "x', '"}, 1e5]'), ("[1", "2]"), ('{"a": tr', '": 0}'), ('["\\', '"]')]
    for left, right in around:
        found = quotients(JSON, right)
        for _ in range(20):
            text, column = left, read(found, left)
            for _ in range(12):
                assert column is not None
                assert found.may_end(column) == parses(text + right), text + right
                ends += found.may_end(column)
                after = [(character, one) for character in alphabet if (one := read(found, character, column))]
                character, column = lots.choice(after)
                text += character
    assert ends > 100


def test_no_text_ends_before_the_bytes_that_are_written_again() -> None:
    tokenizer = tiny_tokenizer()
    check = GrammarMiddle(tokenizer, "[12", "]", JSON, healing=2)
    state: Any = check.start(None)  # type: ignore[arg-type]
    ends = []
    for token in tokenizer.encode("123,", add_special_tokens=False):
        ends.append(check.may_end(state))
        state = check.after(state, token)
    assert [*ends, check.may_end(state)] == [False, False, True, True, False]


def test_contexts_that_do_not_fit_are_named() -> None:
    def middle(left: str, right: str) -> GrammarMiddle:
        return GrammarMiddle(tiny_tokenizer(), left, right, JSON, name="json")

    with pytest.raises(RequestError, match="syntax='json': the text before the cursor is not the beginning"):
        middle('{"a" 1', "}")
    with pytest.raises(RequestError, match="syntax='json': the text behind the cursor is not the end"):
        middle("", "} {")
    with pytest.raises(RequestError, match="syntax='json': no text between"):
        middle("[[[", "]}")
    with pytest.raises(RequestError, match="the text behind"):
        middle("\ud800", '\ud800"]')


def test_a_text_ends_only_where_the_parser_of_the_grammar_agrees(bundled: shoal.Shoal) -> None:
    """Two names side by side are a text of the grammar's characters, while a lexer takes them for one."""
    grammar = "start: NAME NAME\nNAME: /[a-z]+/\n%ignore / +/"
    assert lark.Lark(grammar, parser="earley", lexer="dynamic_complete").parse("ab")
    tokenizer = bundled.tokenizer
    own = token_bytes(tokenizer)
    middle = GrammarMiddle(tokenizer, "a", "b", grammar)
    state: Any = middle.start(None)  # type: ignore[arg-type]
    assert not middle.may_end(state)
    assert middle.may_end(middle.after(state, own.index(b" ")))


VOCAB, EOS, ROWS, LENGTH = 6, 5, 1000, 3


@pytest.fixture
def letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middles, "token_bytes", lambda _: [b"1", b"+", b"(", b")", b"1)", None])


def law(target: Any, check: GrammarMiddle) -> dict[tuple[int, ...], float]:
    """Of the tokens of a row, by the definition."""

    def passes(new: tuple[int, ...], token: int) -> bool:
        state = check.start(None)  # type: ignore[arg-type]
        for before in new:
            state = check.after(state, before)
        return check.may_end(state) if token == EOS else check.after(state, token) is not None

    return law_given(target, passes, VOCAB, LENGTH, EOS)


def fit(target: Any, drafter: Any, rule: Any, check: Any, right: GrammarMiddle | None = None) -> float:
    """The p-value of what is written under the law of a check; right: another one, whose law is compared with."""
    draft = None if drafter is None else scripted(drafter, VOCAB)
    rows, _ = rows_of(scripted(target, VOCAB), draft, 2 if draft else 0, rule, ROWS, LENGTH, EOS, [check], seed=3)
    assert all(row.error is None for row in rows)
    return agreement(rows, law(target, right or check))


@pytest.mark.slow(but=["plain-rejection", "drafted-coupled"])
@pytest.mark.parametrize("rule", [Rejection(), Coupled()], ids=["rejection", "coupled"])
@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
def test_tokens_have_the_law_of_p_given_that_they_pass(letters: None, rule: Any, drafted: bool) -> None:
    check = GrammarMiddle(None, "(", "1)", CALCULATOR)
    assert fit(hashed(VOCAB, 1, spread=0.7), hashed(VOCAB, 2, spread=0.7) if drafted else None, rule, check) > 1e-3


def test_states_that_rows_share_are_noticed(letters: None) -> None:
    """The control: one state that all rows and drafts move on."""

    class Shared(GrammarMiddle):
        def after(self, state: Any, token: int) -> Any:
            self._start.column = (super().after(state, token) or state).column
            return self._start if super().after(state, token) else None

    good, shared = (kind(None, "(", "1)", CALCULATOR) for kind in (GrammarMiddle, Shared))
    models = hashed(VOCAB, 1, spread=0.7), hashed(VOCAB, 2, spread=0.7)
    assert fit(*models, Rejection(), shared, good) < 1e-6


@pytest.mark.parametrize("align", [False, True])
def test_rows_end_or_are_cut_where_the_whole_is_json(align: bool, bundled: shoal.Shoal) -> None:
    left, right = '{"name": "shoal", "numbers": [1, 2', ", 5]}\n"
    options: Any = {
        "n": 8,
        "suffix": right,
        "max_new_tokens": 12,
        "temperature": 1.0,
        "seed": 1,
        "syntax": "json",
        "align": align,
    }
    samples = bundled.generate(left, **options)[0].samples
    for sample in samples:
        assert sample.syntax in ("complete", "cut")
        json.loads(left + sample.text + right)
    assert len({sample.text for sample in samples}) > 1


def test_grammars_are_given_by_name_text_or_path(bundled: shoal.Shoal, tmp_path: Path) -> None:
    path = tmp_path / "calculator.lark"
    path.write_text(CALCULATOR)
    assert read_syntax(str(path)) == read_syntax(CALCULATOR)
    (sample,) = bundled.generate("1 + (2", suffix=")", syntax=str(path), max_new_tokens=6, seed=1)[0].samples
    column = read(quotients(CALCULATOR, ")"), "1 + (2" + sample.text)
    assert column is not None
    for wanted, message in (("ruby", "syntax must be one of python, json"), (str(tmp_path / "none.lark"), "cannot be read")):
        with pytest.raises(RequestError, match=message):
            bundled.generate("1", syntax=wanted, max_new_tokens=2)
