"""Middles that parse: what can be completed is never refused, a text ends only where the whole parses, and laws are as declared.

Tests of: constraints.syntax.python, layout, viable, endings and requests; constraints.protocol, engine.checks.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

import shoal
from constrained_laws import agreement, law_given, rows_of
from shoal.config import Limits, Sampling
from shoal.constraints.fim import fill_in_middle
from shoal.constraints.syntax import Syntax, python
from shoal.constraints.syntax.layout import SourceLayout
from shoal.constraints.syntax.python import Middle, PythonMiddle, ends_program
from shoal.constraints.syntax.viable import is_complete, is_viable
from shoal.constraints.token_bytes import token_bytes
from shoal.engine import checks
from shoal.engine.commit import end_scores
from shoal.errors import RequestError
from shoal.lookahead.controller import Fixed
from shoal.sampling.acceptance import Coupled, Rejection
from shoal.sampling.uniforms import Purpose, uniforms
from shoal.testing import tiny_tokenizer
from shoal.testing.drafters import engine_of
from shoal.testing.scripted import hashed, mixed, scripted
from shoal.types.requests import Request

PIECES = ("a", "(", ")", "=", "\n", "'", " ", ":", "if ")


def viable(text: str) -> bool:
    layout = SourceLayout()
    return all((not layout.due or is_viable(layout)) and layout.feed(character) for character in text) and is_viable(layout)


@pytest.mark.parametrize("module", [ast, json, random, statistics, Path], ids=lambda module: module.__name__)
def test_every_prefix_of_a_true_middle_can_be_completed(module: object) -> None:
    source = Path(inspect.getfile(module)).read_text(encoding="utf-8")  # type: ignore[arg-type]
    lots = random.Random(source)
    for _ in range(4):
        first = lots.randrange(len(source) - 30)
        layout = SourceLayout()
        assert all(layout.feed(character) for character in source[:first])
        assert ends_program(source[first:])
        for place in range(first, first + 30):
            assert layout.feed(source[place])
            assert is_viable(layout), source[first - 40 : place + 1]


def test_every_beginning_of_a_program_is_viable_and_every_viable_text_can_be_completed() -> None:
    """By brute force over all texts of up to three pieces."""
    ends = [
        quote + first + ")" * closed + last
        for quote, closed, first, last in itertools.product(
            ("", "'", "'''", "_'''"),
            range(4),
            ("", "a", "nd a", "_", " a else a", "=a", "a:a", "a=a"),
            ("", ":a", "=a", "a", "a:a", "\n a", " else a", ":\n a"),
        )
    ]
    for length in range(1, 4):
        for pieces in itertools.product(PIECES, repeat=length):
            text = "".join(pieces)
            if is_complete(text):
                assert all(viable(text[:end]) for end in range(len(text) + 1)), repr(text)
            if viable(text):
                assert any(is_complete(text + end) for end in ends), repr(text)


@pytest.mark.parametrize(
    "text",
    [
        "x = = ",
        "x = )",
        "def f(:",
        "if x:\ny",
        "a b ",
        "return return ",
        "x = 'a\n",
        "try:\n  a\nb ",
        "else:",
        "x..y",
        "  if x:\n y\n z",
    ],
)
def test_what_no_program_begins_with_is_refused(text: str) -> None:
    assert not viable(text)


@pytest.mark.parametrize(
    "text",
    ["x = 1 i", "x = 0x", "x = 1e-", "x !", "x = 'a", "x = f'{a", "x = '''a\n'", "x = im", "def f() -", "@a\n@b\nclass C:\n",
     "x = \\",
     "for x in y:\n  pass\nels", "async ",
     "x = rb", "if x:\n    # a\n  # b\n", "x = (1,\n  # a\n", "match x:\n  case 1:\n    a\n  ca",
     "@a\ndef f():\n  a\nb\nc\n", "if a:\n  b\n  c\nelif d:\n  e\nelse:\n  "],
)  # fmt: skip
def test_what_some_program_begins_with_is_not_refused(text: str) -> None:
    assert viable(text)


def test_long_files_leave_only_the_open_blocks() -> None:
    layout = SourceLayout()
    source = "class A:\n" + "".join(f"    def f{i}(self):\n        return {i}\n" for i in range(100))
    assert all(layout.feed(character) for character in source + "    x")
    assert layout.text == "class A:\n    def f99(self):\n        return 99\n    x"
    assert layout.feed(" ")
    assert layout.feed("=")
    assert layout.text == "class A:\n    x ="


def test_a_wrong_left_context_is_named() -> None:
    with pytest.raises(RequestError, match="not the beginning of a Python program"):
        PythonMiddle(tiny_tokenizer(), "x = = ", "")


BEGINNINGS = (
    "", "(", "((", "a", "'", '"', "'''", "'''a''", "'\\", "\\", "#", "if a", "if a:\n a\n", "if a:\n if a:\n  a\n", "x[a",
    "if a:\n ",
    "if a: a\n", "for a in a:\n a\n", "a = ", "if (", "(''", "if a:\n if a: a\n", "if a:\n if a", "if a:\n if (",
)  # fmt: skip


def test_no_end_of_a_program_is_taken_for_none() -> None:
    """By brute force over all texts of up to three pieces, put behind many beginnings."""
    refused = 0
    for length in range(1, 4):
        for found in itertools.product(("a", ")", "=", "\n", "'", " ", ":\n", "else"), repeat=length):
            text = "".join(found) + "\n"
            if not ends_program(text):
                refused += 1
                assert not any(is_complete(begun + text) for begun in BEGINNINGS), repr(text)
    assert refused > 50


@pytest.mark.parametrize(
    ("text", "possible"),
    [
        ("\nx = = 1\n", False), ("\n  a\n b\n  c\n", False), ("\nelse\n", False), ("\nif x:\n", False), ("\na\n  b\n", False),
        ("\na = (\n", False), ("\n[)\n", False), ("a'''\nx y\n", False), ("\n    return best\n", True),
        ("  a:\n  b\nelse:\n  c\n", True), ("\n  case 1:\n    a\n", True), ("', a])\nb\n", True),
        ("\n  b\nexcept a:\n  c\nelse:\n  d\nfinally:\n  e\n", True), ("\ndef f():\n  a\n", True), ("", True),
    ],
)  # fmt: skip
def test_what_no_program_ends_with_is_told_by_its_lines(text: str, possible: bool) -> None:
    assert ends_program(text) == possible


class Even:
    """Lets no token follow that makes the sum of all odd, and an end only after an even number of tokens."""

    def start(self, row: object) -> tuple[int, ...]:
        return ()

    def after(self, state: tuple[int, ...], token: int) -> tuple[int, ...] | None:
        return None if (sum(state) + token) % 3 == 2 else (*state, token)

    def may_end(self, state: tuple[int, ...]) -> bool:
        return len(state) % 2 == 0


VOCAB, EOS, ROWS = 6, 5, 2000


def law(target: Any) -> dict[tuple[int, ...], float]:
    """Of two tokens, by the definition."""
    check = Even()
    passes = lambda new, t: check.may_end(new) if t == EOS else check.after(new, t) is not None  # noqa: E731
    return law_given(target, passes, VOCAB, 2, EOS)


def fit(target: Any, drafter: Any, rule: Any) -> float:
    """The p-value of what is written under the law."""
    draft = None if drafter is None else scripted(drafter, VOCAB)
    rows, _ = rows_of(scripted(target, VOCAB), draft, 2 if draft else 0, rule, ROWS, 2, EOS, [Even()], seed=3)
    return agreement(rows, law(target))


@pytest.mark.slow(but=["plain-rejection", "plain-coupled"])
@pytest.mark.parametrize("rule", [Rejection(), Coupled()], ids=["rejection", "coupled"])
@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
def test_tokens_have_the_law_of_p_given_that_they_pass(rule: Any, drafted: bool) -> None:
    assert fit(hashed(VOCAB, 1, spread=0.7), hashed(VOCAB, 2, spread=0.7) if drafted else None, rule) > 1e-3


@pytest.mark.parametrize("purpose", [Purpose.TOKEN, Purpose.ACCEPT])
def test_numbers_used_twice_are_noticed(monkeypatch: pytest.MonkeyPatch, purpose: Purpose) -> None:
    """The control: the draw in place of a refused token by a number that decided on the refused one."""
    monkeypatch.setattr(checks, "uniforms", lambda seed, position, _: uniforms(seed, position, purpose))
    drafter = None if purpose is Purpose.TOKEN else hashed(VOCAB, 2, spread=0.7)
    assert fit(hashed(VOCAB, 1, spread=0.7), drafter, Rejection()) < 1e-6


def test_greedy_rows_take_the_best_token_that_passes_whatever_is_drafted() -> None:
    target, check = hashed(VOCAB, 5), Even()
    expected: list[int] = []
    while len(expected) < 12 and EOS not in expected:
        order = target((0, *expected)).argsort(descending=True).tolist()
        passes = (
            t for t in order if (check.may_end(tuple(expected)) if t == EOS else check.after(tuple(expected), t) is not None)
        )
        expected.append(next(passes))
    for drafter in (None, target, mixed(target, hashed(VOCAB, 9))):
        engine = engine_of(
            scripted(target, VOCAB),
            None if drafter is None else scripted(drafter, VOCAB),
            Fixed(3 if drafter else 0),
            eos=(EOS,),
        )
        limits = Limits(max_new_tokens=12)
        (row,) = engine.submit(Request((0,), 1, Sampling(temperature=0.0), limits, constraints=(check,)))
        while row.finish_reason is None:
            engine.step()
        assert row.tokens[1:] == expected
        assert drafter is None or row.accepted > 0 or drafter is not target


def test_where_no_token_passes_the_row_ends_with_an_error() -> None:
    class Nothing(Even):
        def after(self, state: tuple[int, ...], token: int) -> tuple[int, ...] | None:
            return None if state else (token,)

        def may_end(self, state: tuple[int, ...]) -> bool:
            return False

    engine = engine_of(scripted(hashed(VOCAB, 5), VOCAB), None, Fixed(0), eos=(EOS,))
    (row,) = engine.submit(Request((0,), 1, Sampling(seed=1), Limits(max_new_tokens=5), constraints=(Nothing(),)))
    while row.finish_reason is None:
        engine.step()
    assert row.finish_reason == "error"
    assert row.new_tokens == 1
    assert "no token passes" in str(row.error)


def test_characters_cut_into_tokens_are_read_whole(bundled: shoal.Shoal) -> None:
    tokenizer = bundled.tokenizer
    own = token_bytes(tokenizer)
    middle = PythonMiddle(tokenizer, "x = ", "\n")
    for text, passes in (("\u00e9", True), ("\u20ac", False), ("'\u20ac'", True)):
        state: object = middle.start(None)  # type: ignore[arg-type]
        for byte in text.encode():
            state = None if state is None else middle.after(state, own.index(bytes([byte])))  # type: ignore[arg-type]
        assert (state is not None) == passes, text
        assert state is None or middle.may_end(state)  # type: ignore[arg-type]


def test_middles_of_the_bundled_pair_parse_where_they_end(bundled: shoal.Shoal) -> None:
    left, right = "def largest(numbers):\n    best = ", "\n    return best\n"
    prompt = fill_in_middle(bundled.tokenizer, left, right)
    middle = PythonMiddle(bundled.tokenizer, left, right)
    result = bundled.generate([prompt], n=8, max_new_tokens=48, temperature=1.2, seed=1, constraints=[middle])
    ended = [sample for sample in result[0].samples if sample.finish_reason == "eos"]
    assert ended
    for sample in ended:
        ast.parse(left + sample.text + right)
    for sample in result[0].samples:
        assert viable(left + sample.text)


def test_best_end_is_the_place_of_highest_score_that_parses(bundled: shoal.Shoal) -> None:
    """By brute force over all places, with tokens of several characters, and with bytes that are written again."""
    tokenizer = bundled.tokenizer
    own, lots = token_bytes(tokenizer), random.Random(1)
    left, right = "if a:\n    x = (1 + na", "\n    b\n"
    pieces = ("na", "me", ") ", "\n", "    ", "y = 2", "(", ")", " + 1")
    cuts = 0
    for turn in range(40):
        healing = b"na" if turn % 2 else b""
        middle = PythonMiddle(tokenizer, left, right, len(healing))
        text = healing.decode() + "".join(lots.choice(pieces) for _ in range(6))
        tokens = tokenizer.encode(text, add_special_tokens=False)
        scores = [round(lots.uniform(-3, 0), 1) for _ in range(len(tokens) + 1)]
        written = len(healing)
        places = [(scores[0], 0, 0)] if not healing else []
        size = 0
        for count, token in enumerate(tokens, start=1):
            old, size = size, size + len(own[token] or b"")
            places += [(scores[count], end - written, count) for end in range(max(old + 1, written), size + 1)]
        text = text[written:]
        good = [place for place in places if is_complete(left + text[: place[1]] + right)]
        best = max(good, default=None)
        found = middle.best_end(tokens, scores, len(text))
        assert found == (None if best is None else best[1:])
        cuts += found is not None
        if best is not None and best[1] > 0:
            inside = middle.best_end(tokens, scores, best[1] - 1)
            assert inside is None or inside[0] < best[1]
    assert 10 < cuts < 40


def test_scores_of_ends_are_means_with_an_end() -> None:
    assert end_scores([-1.0, -2.0], [-5.0, -3.0, -0.5]) == pytest.approx([-5.0, -2.0, -3.5 / 3])
    assert end_scores([-1.0, -2.0], [-5.0, -3.0])[2] == float("-inf")


@pytest.mark.parametrize("align", [False, True])
def test_rows_that_reach_their_limit_are_cut_where_they_parse(align: bool, bundled: shoal.Shoal) -> None:
    left, right = "def largest(numbers):\n    best = numb", "\n    return best\n"
    options = {"n": 8, "suffix": right, "max_new_tokens": 20, "temperature": 1.0, "seed": 1, "syntax": "python"}
    samples = bundled.generate(left, align=align, **options)[0].samples  # type: ignore[arg-type]
    assert {sample.syntax for sample in samples} >= {"cut"}
    for sample in samples:
        assert (sample.syntax == "complete") == (sample.finish_reason == "eos")
        ast.parse(left + sample.text + right)
        assert len(sample.logprobs) == len(sample.token_ids)
        assert sample.text in ("numb" if align else "") + bundled.tokenizer.decode(sample.token_ids)
    texts = dict.fromkeys(range(8), "")
    for increment in bundled.stream(left, align=align, **options):  # type: ignore[arg-type]
        texts[increment.sample] += increment.text
    assert list(texts.values()) == [sample.text for sample in samples]


def test_requests_that_cannot_be_checked_are_refused(bundled: shoal.Shoal) -> None:
    for prompt, options, message in (
        ("x = = ", {}, "not the beginning of a Python program"),
        ([1, 2], {}, "prompts that are texts"),
        ("x = 1", {"align": True, "exact": True}, "exact=True does not go with syntax"),
        ("x = 1", {"suffix": "\ny = = 1\n"}, "not the end of a Python program"),
        ("x = 1", {"syntax": "ruby"}, "syntax must be one of python"),
    ):
        with pytest.raises(RequestError, match=message):
            bundled.generate(prompt, **({"syntax": "python", "max_new_tokens": 2} | options))  # type: ignore[arg-type]
    whole = Syntax("python", "if x:\n  a\nelse", "\n  b\n")
    (sample,) = bundled.generate([5], syntax=whole, max_new_tokens=4, seed=1)[0].samples
    assert sample.syntax in ("incomplete", "complete", "cut")
    assert viable("if x:\n  a\nelse" + sample.text)


def test_a_refused_beginning_is_not_read_again(bundled: shoal.Shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is refused for its beginning is what would be refused by itself."""
    tokenizer = bundled.tokenizer

    def fresh() -> tuple[PythonMiddle, Middle]:
        middle = PythonMiddle(tokenizer, "x = 1 ", "\n")
        return middle, middle.start(None)  # type: ignore[arg-type]

    middle, state = fresh()
    asked = []
    monkeypatch.setattr(python, "is_viable", lambda layout: asked.append(1) or is_viable(layout))
    refused = {token for token in range(len(tokenizer)) if middle.after(state, token) is None}
    assert len(asked) < len(tokenizer) / 2 < len(refused)
    for token in range(0, len(tokenizer), 31):
        alone, beginning = fresh()
        assert (alone.after(beginning, token) is None) == (token in refused)
