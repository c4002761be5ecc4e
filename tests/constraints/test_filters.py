"""Filters: what they let follow and where texts end, by their definition over whole texts; laws are those of the masked target.

Tests of: constraints.filters, constraints.token_bytes.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import shoal
from constrained_laws import agreement, law_of, rows_of
from shoal.api import Shoal
from shoal.config import Grammar, Limits, Sampling
from shoal.constraints import masks
from shoal.constraints.compiler import grammars_of
from shoal.constraints.filters import Filter, containing, matching, only_characters, only_words, without
from shoal.constraints.token_bytes import token_bytes
from shoal.errors import RequestError
from shoal.lookahead.controller import Fixed
from shoal.sampling.acceptance import Coupled, Rejection
from shoal.testing import END, VOCABULARY, tiny_tokenizer
from shoal.testing.drafters import engine_of
from shoal.testing.scripted import hashed, mixed, scripted, table_model
from shoal.types.requests import Request, Row

TOKENIZER = tiny_tokenizer()
A, B, C = (TOKENIZER.encode(letter, add_special_tokens=False)[0] for letter in "abc")
LETTERS = (A, B, C)
Predicate = Callable[[str], bool]
CASES: list[tuple[Filter, Predicate]] = [
    (without("ab"), lambda text: "ab" not in text),
    (without("a", "cc"), lambda text: "a" not in text and "cc" not in text),
    (containing("ab"), lambda text: "ab" in text),
    (only_words(["a", "ab", "bc"], separators="c"), lambda text: bool(re.fullmatch("c*((a|ab|bc)(c+(a|ab|bc))*c*)?", text))),
    (only_characters("ac"), lambda text: set(text) <= set("ac")),
    (matching("a(b|c)*"), lambda text: bool(re.fullmatch("a(b|c)*", text))),
    (~without("ab"), lambda text: "ab" in text),
    (~only_words(["a", "ab"], separators="c"), lambda text: not re.fullmatch("c*((a|ab)(c+(a|ab))*c*)?", text)),
    (without("b") | containing("bb"), lambda text: "b" not in text or "bb" in text),
    ((without("ab") | containing("cc")) & ~matching("c*"),
     lambda text: ("ab" not in text or "cc" in text) and not re.fullmatch("c*", text)),
    (~(containing("a") & containing("b")) & matching("(..)*"),
     lambda text: not ("a" in text and "b" in text) and len(text) % 2 == 0),
]  # fmt: skip


def mask_of(
    given: Filter, text: Sequence[int], tokenizer: Any = TOKENIZER, vocab: int = VOCABULARY
) -> tuple[torch.Tensor, bool]:
    constraint = grammars_of(tokenizer, vocab).constraint(given.grammar)
    state = constraint.begin(Row(Request((A,)), 0, 0, 0, [A], frozenset([END]), 99))
    for token in text:
        state = constraint.advance(state, token)
    mask = constraint.mask([state], vocab, torch.device("cpu"))
    return mask.tokens[0], bool(mask.ends[0])


@pytest.mark.parametrize(("given", "holds"), CASES, ids=lambda case: repr(case) if isinstance(case, Filter) else "")
def test_what_may_follow_is_what_some_text_of_the_set_begins_with(given: Filter, holds: Predicate) -> None:
    """All texts of up to four letters, against the definition: some ending of up to four letters leads into the set."""
    inside = given & only_characters("abc")
    texts = {"".join(t) for n in range(9) for t in itertools.product("abc", repeat=n) if holds("".join(t))}
    begun = {text[:end] for text in texts for end in range(len(text) + 1)}
    for n in range(4):
        for letters in itertools.product("abc", repeat=n):
            text = "".join(letters)
            if text not in begun:
                continue
            tokens, ends = mask_of(inside, [LETTERS["abc".index(letter)] for letter in text])
            found = {letter for letter, token in zip("abc", LETTERS, strict=True) if tokens[token]}
            assert found == {letter for letter in "abc" if text + letter in begun}, text
            assert ends == (text in texts), text


def table(seed: int) -> torch.Tensor:
    weights = torch.rand(4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1
    whole = torch.full((VOCABULARY, VOCABULARY), 1e-3, dtype=torch.float64)
    own = torch.tensor([*LETTERS, END])
    whole[own[:, None], own] = weights
    return whole / whole.sum(-1, keepdim=True)


LAW, HOLDS = CASES[9]
LONGEST = 4


def law() -> dict[tuple[int, ...], float]:
    """Each token by p renormalised over what may follow, from the definition."""
    p, endings = table(0), ["".join(t) for n in range(4) for t in itertools.product("abc", repeat=n)]

    def following(new: tuple[int, ...]) -> dict[int, float]:
        text = "".join("abc"[LETTERS.index(token)] for token in new)
        allowed = [t for t, c in zip(LETTERS, "abc", strict=True) if any(HOLDS(text + c + end) for end in endings)]
        return {token: float(p[new[-1] if new else A, token]) for token in allowed + [END] * HOLDS(text)}

    return law_of(following, LONGEST, END)


def written(rule: Any, k: int, constraints: Sequence[Any], n: int = 600) -> list[Row]:
    models = table_model(table(0)), table_model(table(1))
    return rows_of(*models, k, rule, n, LONGEST, END, constraints, prompt=(A,), tokenizer=TOKENIZER)[0]


@pytest.mark.parametrize(
    ("rule", "k"), [(Rejection(), 0), (Rejection(), 3), (Coupled(), 3)], ids=["plain", "rejection", "coupled"]
)
def test_the_law_counted_through_the_engine(rule: Any, k: int) -> None:
    """A conjunction in one expression, and the same as a list of a filter, a grammar and another filter."""
    whole = [LAW & only_characters("abc")]
    assert agreement(written(rule, k, whole), law()) > 1e-3
    parts = [without("ab") | containing("cc"), Grammar("regex", "[abc]*"), ~matching("c*")]
    if isinstance(rule, Coupled):
        assert [row.tokens for row in written(rule, k, parts, 50)] == [row.tokens for row in written(rule, k, whole, 50)]


def test_a_mask_of_the_state_before_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: states that do not move along drafts."""
    monkeypatch.setattr(masks, "_states", lambda positions, b, _, state: dict.fromkeys(positions.columns(b), state))
    assert agreement(written(Rejection(), 3, [LAW & only_characters("abc")], 100), law()) == 0


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_drafts_do_not_change_ids(temperature: float) -> None:
    target = hashed(VOCABULARY, 0, spread=3.0)
    given = (only_words(["fig", "figs", "plum"]) & without("mp")) | matching("[0-9]{4}")
    rows = []
    for k in (0, 4):
        draft = scripted(mixed(target, hashed(VOCABULARY, 1, spread=3.0), every=3), VOCABULARY) if k else None
        engine = engine_of(scripted(target, VOCABULARY), draft, Fixed(k), tokenizer=TOKENIZER, eos=(END,), rule=Coupled())
        sampling = Sampling(seed=2, temperature=temperature)
        rows.append(engine.submit(Request((1, 2), 4, sampling, Limits(max_new_tokens=20), constraints=(given,))))
        while engine.step():
            pass
    assert [row.tokens for row in rows[0]] == [row.tokens for row in rows[1]]
    assert sum(row.accepted for row in rows[1]) > 0
    for row in rows[1]:
        text = TOKENIZER.decode([token for token in row.tokens[2:] if token != END])
        assert re.fullmatch(r"[ \n\t.,;:!?]*((figs?|plum|f|fi|p|pl|plu)[ \n\t.,;:!?]*)*|[0-9]{1,4}", text)
        assert row.finish_reason == "length" or re.fullmatch(r"[ \n\t.,;:!?]*((figs?|plum)[ \n\t.,;:!?]*)*|[0-9]{4}", text)


# ── words divided among tokens ──────────────────────────────────────────────────────────────────────────────────────


def test_masks_over_the_tokens_of_the_bundled_pair() -> None:
    """Tokens of several letters, words that begin in one and end in another."""
    tokenizer = AutoTokenizer.from_pretrained(Path(shoal.__file__).parent / "data" / "pair" / "target")
    own = [(i, spelled) for i, spelled in enumerate(token_bytes(tokenizer)) if spelled]
    words = ["return", "returns", "self", "é"]
    lots = random.Random(0)
    for text in ("", "ret", "return", "returns ", "self, re", "\u00e9 "):
        ids = tokenizer.encode(text, add_special_tokens=False)
        tokens, ends = mask_of(only_words(words), ids, tokenizer, len(tokenizer))
        kept, _ = mask_of(without("turn"), ids, tokenizer, len(tokenizer)) if "turn" not in text else (None, None)
        complete = r"[ \n\t.,;:!?]*((return|returns|self|é)([ \n\t.,;:!?]+(return|returns|self|é))*[ \n\t.,;:!?]*)?"
        assert ends == bool(re.fullmatch(complete, text))
        beginnings = {word.encode()[:end] for word in words for end in range(1, len(word.encode()) + 1)}
        for token, spelled in [
            *lots.sample(own, 200),
            *((i, s) for i, s in own if any(b in s for b in (b"ret", b"self", b"urn"))),
        ]:
            grown = text.encode() + spelled
            *whole, last = re.split(rb"[ \n\t.,;:!?]", grown)
            right = all(not word or word.decode(errors="replace") in words for word in whole) and (
                not last or last in beginnings
            )
            assert bool(tokens[token]) == right, (text, spelled)
            if kept is not None and grown.decode(errors="ignore").encode() == grown:
                assert bool(kept[token]) == (b"turn" not in grown), (text, spelled)


def test_five_thousand_words_are_compiled_and_asked_in_a_bounded_state() -> None:
    lots = random.Random(1)
    words = sorted({"".join(lots.choices("abcdefghij", k=lots.randrange(3, 9))) for _ in range(5000)})
    given = only_words(words)
    assert len(given.expression) < 60 * len(words)
    for word in words[::1000]:
        ids = TOKENIZER.encode(word, add_special_tokens=False)
        tokens, _ = mask_of(given, ids[:-1])
        assert {t for t in range(VOCABULARY) if tokens[t]} >= {ids[-1]}
        beginning = word[:-1]
        following = {other[len(beginning)] for other in words if other.startswith(beginning) and len(other) > len(beginning)}
        assert {TOKENIZER.decode([t]) for t in range(VOCABULARY) if tokens[t]} == following | (
            set(" \n\t.,;:!?") if beginning in words else set()
        )


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────────


def made() -> Shoal:
    shoal_ = Shoal(scripted(hashed(VOCABULARY, 0), VOCABULARY), None, TOKENIZER)
    shoal_.eos = (END,)
    return shoal_


def test_filters_that_no_text_fits_are_refused_by_name() -> None:
    with pytest.raises(
        RequestError, match=r"the filter \(without\('a'\) & containing\('cat', 'ale'\)\) cannot be used: .*no text"
    ):
        made().generate([(1, 2)], constraints=[without("a"), containing("cat", "ale")])


@pytest.mark.parametrize(
    ("grammar", "constraints", "words"),
    [
        (Grammar("regex", "ab"), [without("b")], r"\(without\('b'\) & matching\('ab'\)\) cannot be used: .*no text"),
        (None, [Grammar("regex", "ab?"), Grammar("regex", "acb+")], r"matching\('ab\?'\) & .* cannot be used: .*no text"),
        (Grammar("regex", "a+"), [Grammar("regex", "(aa)*b")], "no text"),
        (Grammar("json_object"), [only_characters("abc")], "no token may begin a text under .*json_object.*only_characters"),
        (
            Grammar("lark", 'start: "a" start "b" | "c"'),
            [matching("b+")],
            "no token may begin a text under .*lark.*matching",
        ),
    ],
)
def test_a_conjunction_that_leaves_nothing_is_refused_at_once(
    grammar: Grammar | None, constraints: list[Any], words: str
) -> None:
    shoal_ = made()
    with pytest.raises(RequestError, match=words):
        shoal_.generate([(1, 2)], seed=0, grammar=grammar, constraints=constraints)


def test_a_grammar_and_an_expression_that_part_later_name_what_the_row_is_stuck_in() -> None:
    """Of grammars that are no regular expression only the beginning is known."""
    with pytest.raises(
        RequestError, match=r"no token is left possible by the grammar, constraints=\[\"matching\('a\+'\)\"\]"
    ):
        made().generate([(1, 2)], seed=0, grammar=Grammar("lark", 'start: "a" "b"'), constraints=[matching("a+")])


@pytest.mark.parametrize("seed", range(3))
def test_expressions_and_filters_never_get_stuck(seed: int) -> None:
    """They are one expression: "ab" may go on to "abc" by either, and to nothing that both allow."""
    given = [Grammar("regex", "ab?c|ca*"), without("abc")]
    (output,) = made().generate([(1, 2)], n=8, seed=seed, max_new_tokens=4, constraints=given)
    assert all(re.fullmatch("ac|ca*|", sample.text) or sample.text == "a" for sample in output.samples)
    assert {sample.finish_reason for sample in output.samples} <= {"eos", "length", "stop"}


@pytest.mark.parametrize("make", [without, lambda: containing(""), lambda: only_words([]), lambda: matching("")])
def test_empty_filters_are_refused(make: Callable[[], Filter]) -> None:
    with pytest.raises(RequestError, match="a filter needs"):
        make()
