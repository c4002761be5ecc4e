"""Constraints part by part, each against its definition and without a model: bytes, masks, schemas, weights, middles, filters."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.config import Grammar, Limits, Sampling
from shoal.constraints import masks
from shoal.constraints.alignment import Alignment, AlignmentVocabulary, back_off, vocabulary_of
from shoal.constraints.compiler import Grammars, grammars_of
from shoal.constraints.dressing import EXACT, add_weights
from shoal.constraints.estimates import DrawnValues, Estimates, weigh
from shoal.constraints.filters import containing, matching, only_words, without
from shoal.constraints.fim import MiddlePrompt, middle_prompt, nearest
from shoal.constraints.grammar import GrammarConstraint, TextState
from shoal.constraints.json_schemas import ESCAPES, WHITESPACE, numbers, prepare
from shoal.constraints.masks import Failed
from shoal.constraints.members import Members
from shoal.constraints.protocol import Allowed, Constraint
from shoal.constraints.schema_checks import with_orders
from shoal.constraints.schema_proofs import Proofs, resolve
from shoal.constraints.syntax import Syntax, with_syntax
from shoal.constraints.syntax.python import end_places
from shoal.constraints.token_bytes import byte_letters, byte_level, sentence_piece
from shoal.errors import RequestError
from shoal.serve.reasoning import ReasoningRules
from shoal.testing import VOCABULARY, tiny_tokenizer
from shoal.types.requests import Request, Row
from shoal.types.trees import Positions

TOKENIZER = tiny_tokenizer()
CPU = torch.device("cpu")


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def row_of(constraints: Sequence[Constraint[Any]] = (), eos: Sequence[int] = (), **fields: Any) -> Row:
    row = Row(Request((1,), **fields), 0, 0, 0, [1], frozenset(eos), 99)
    masks.begin(row, constraints)
    return row


class Says(Constraint[int]):
    """The same mask everywhere; a state counts the tokens."""

    def __init__(self, tokens: Sequence[bool], ends: bool, dtype: torch.dtype = torch.bool) -> None:
        self.tokens, self.ends, self.dtype = tokens, ends, dtype

    def begin(self, row: Row) -> int:
        return 0

    def advance(self, state: int, token: int) -> int:
        return state + 1

    def mask(self, states: Sequence[int], vocab_size: int, device: torch.device) -> Allowed:
        return Allowed(torch.tensor([self.tokens] * len(states)).to(self.dtype), torch.tensor([self.ends] * len(states)))


# ── masks of rows ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_end_of_a_row_is_masked_as_the_end() -> None:
    for ends in (True, False):
        row = row_of([Says([True, False, not ends, not ends], ends)], eos=[3, 2])
        allowed = masks.allowed_tokens(Positions([row], [[]]), torch.zeros(1, 1, 4))
        assert allowed is not None
        assert allowed[0, 0].tolist() == [True, False, ends, ends]
    rows = [row_of([Says([False] * 4, True)], eos=[end]) for end in (3, 1)]
    allowed = masks.allowed_tokens(Positions(rows, [[], []]), torch.zeros(2, 1, 4))
    assert allowed is not None
    assert allowed[:, 0].nonzero().tolist() == [[0, 3], [1, 1]]  # each its own


def test_a_conjunction_ends_where_all_end() -> None:
    def complete(*said: tuple[list[bool], bool]) -> bool:
        return masks.is_complete(row_of([Says(*one) for one in said]), 2)

    assert complete(([False, False], True))
    assert complete(([True, False], True), ([False, True], True))
    assert not complete(([False, False], False))
    assert not complete(([True, False], True), ([False, True], False))
    assert not complete(([True, False], True), ([True, True], True))


def test_what_is_under_a_constraint_ends_with_an_end() -> None:
    row = row_of([Says([True] * 4, True)], eos=[3])
    assert [masks.bound_tokens(row, block) for block in ([], [0, 1], [0, 3, 1], [3])] == [0, 2, 2, 1]
    assert masks.bound_tokens(row_of(), [0, 1]) == 0


def test_a_mask_of_numbers_is_a_fault_of_its_rows() -> None:
    row = row_of([Says([True, True], True, torch.int64)])
    allowed = masks.allowed_tokens(Positions([row], [[]]), torch.zeros(1, 1, 2))
    assert allowed is not None
    assert not allowed.any()
    assert "dtype torch.bool, got (1, 2) and torch.int64" in masks.why(Positions([row], [[]]), 0, 0, 2)
    assert masks.may_begin(row, 2)  # the row will tell
    row.constraints = [(row.constraints[0][0], Failed("lost"))]
    assert masks.why(Positions([row], [[]]), 0, 0, 2) == "lost"


# ── bytes and alignment ─────────────────────────────────────────────────────────────────────────────────────────────


def test_the_letters_of_byte_level_bpe_are_those_of_gpt2() -> None:
    letters = byte_letters()
    assert sorted(letters.values()) == [*range(256)]
    named = {"!": 33, "~": 126, "¡": 161, "¬": 172, "®": 174, "ÿ": 255, "Ġ": 32, "Ċ": 10, "Ā": 0, "ł": 160, "Ń": 173}
    assert {letter: letters[letter] for letter in named} == named
    assert byte_level("Ġcaf\u00c3\u00a9") == " café".encode()
    assert byte_level("\u4e2d") == b""


def test_pieces_of_sentence_piece() -> None:
    assert [sentence_piece(piece) for piece in ("▁the", "▁▁", "a▁b", "<0x0A>", "<0xé>", "é")] == [
        b" the", b"  ", b"a b", b"\n", "<0xé>".encode(), "é".encode(),
    ]  # fmt: skip


def test_tokens_beyond_the_tokenizer_agree_with_nothing() -> None:
    """Models have more rows of logits than their tokenizers have tokens."""
    alignment = Alignment(b"b", AlignmentVocabulary([b"a", b"b", b"bc", None]))
    mask = alignment.mask([b"b", b""], 6, CPU)
    assert mask.tokens.tolist() == [[False, True, True, False, False, False], [True] * 6]
    assert mask.ends.tolist() == [False, True]
    assert alignment.mask([b"b"], 2, CPU).tokens.tolist() == [[False, True]]
    assert [alignment.advance(b"bcd", token) for token in (1, 2, 5)] == [b"cd", b"d", b"bcd"]


@pytest.mark.parametrize("spelled", [[b"a", b"ab", b"abc", b"b", b"", None, b"\xff", b"\xff\xff", b"\xfe", b"ab"]])
def test_which_tokens_agree_with_bytes(spelled: list[bytes | None]) -> None:
    vocabulary = AlignmentVocabulary(spelled)
    for remainder in (b"a", b"ab", b"abc", b"abcd", b"b", b"c", b"\xff", b"\xff\xff", b"\xfe", b"\xfe\xff", b"ab\0"):
        expected = [bool(own) and (own.startswith(remainder) or remainder.startswith(own)) for own in spelled]
        assert vocabulary.compute_allowed(remainder).tolist() == expected, remainder
        assert vocabulary.allowed(remainder) is vocabulary.allowed(remainder)


@pytest.mark.parametrize(("text", "count"), [
    ("abcdef", 3), ("abc", 2), ("a", 0), ("x\u0100ab", 4), ("x\u00bfab", 4), ("xa\u0100b", 3), ("x\u4e2da", 4), ("\u4e2da", 3),
])  # fmt: skip
def test_no_character_is_cut_in_two(text: str, count: int) -> None:
    """U+0100 ends with the first continuation byte that there is, U+00BF with the last."""
    assert back_off(ids(text), TOKENIZER, vocabulary_of(TOKENIZER)) == count


# ── schemas ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("text", "fits"), [
    ("1e307", True), ("-1.5E-300", True), ("1e1234", False), ("1e999", False), ("1e308", False), ("12e307", False),
    ("9." + "9" * 20 + "E+307", True), ("9" * 20 + ".5e288", True), ("9" * 20 + ".5e289", False), ("[1e99,2e309]", False),
    ("1.5e-324", True), ("0e5", True), ("[1e5,1E5]", True), ("1.2.3", False), ("true", True), ("1e5e5", False),
    ("1" * 20, True), ("1" * 21, False), ("0." + "1" * 20, True),
    ("0." + "1" * 21, False), ('{"a": ["' + "1" * 30 + '\\"e9"], "b": 1e+100}', True), ("[true, false, 1e5]", True),
    ('"' + "1" * 30, False), ("1e", False),
])  # fmt: skip
def test_digits_of_numbers(text: str, fits: bool) -> None:
    assert bool(re.fullmatch(numbers(), text)) is fits


def schema(given: Any, whitespace: str = "bounded") -> Any:
    return json.loads(prepare(json.dumps(given), whitespace)[0])


def test_bounds_of_formats_leave_what_else_is_said() -> None:
    date = schema({"type": "string", "format": "date"})
    assert "format" not in date
    for day in ("2024-02-29", "2024-04-30", "2024-12-31", "2024-01-29", "2000-02-29"):
        assert re.search(date["pattern"], day)
    for day in ("2023-02-29", "2024-02-30", "2024-04-31", "0000-01-01", "1900-02-29"):
        assert not re.search(date["pattern"], day)
    for beside in ({"allOf": [{"pattern": "^a"}]}, {"const": "x"}, {"enum": ["x"]}, {"pattern": "^a"}):
        given = {"type": "string", "format": "date", **beside}
        assert schema(given) == {k: v for k, v in given.items() if k != "format" or not {"const", "enum"} & beside.keys()}
    assert schema({"format": "email", "maxLength": 5})["maxLength"] == 5
    assert schema({"type": "string", "format": "password"}) == {"type": "string"}


@pytest.mark.parametrize("place", ["properties", "patternProperties", "$defs", "definitions"])
def test_names_are_no_keywords_and_what_they_name_is_bounded(place: str) -> None:
    inner = {"type": "string", "format": "date"}
    names = ("const", "enum", "default", "examples", "format", "uniqueItems", "x")
    assert all("pattern" in schema({place: dict.fromkeys(names, inner)})[place][name] for name in names)
    kept = {"const": inner, "enum": [inner], "default": inner, "examples": [inner]}
    assert schema(kept) == kept


def test_blanks_of_json() -> None:
    pattern = WHITESPACE["bounded"]["whitespace_pattern"]
    assert all(re.fullmatch(pattern, blanks) for blanks in (" ", "\n", "\n" + " " * 20, "\n\t"))
    assert not any(re.fullmatch(pattern, blanks) for blanks in ("", "  ", "\n" + " " * 21, "\n\n", "\t"))
    assert [prepare("{}", name)[1] for name in ("bounded", "compact", "any")] == [
        ESCAPES | WHITESPACE["bounded"],
        ESCAPES | {"whitespace_flexible": False},
        ESCAPES,
    ]
    assert prepare('{"x-guidance": {"whitespace_flexible": true}}', "compact")[1] == ESCAPES
    assert prepare("true", "compact") == ("{}", ESCAPES | {"whitespace_flexible": False})
    with pytest.raises(RequestError, match="no JSON"):
        prepare("no json", "compact")


@pytest.mark.parametrize(("schemas", "proved"), [
    ([{"type": "string"}, {"enum": [1]}], True),
    ([{"type": "integer"}, {"enum": [1]}], False),
    ([{"type": "string"}, {"const": None}], True),
    ([{"type": "number"}, {"const": True}], True),
    ([{"enum": [1, 2]}, {"enum": [2, 3]}], False),
    ([{"enum": [1]}, {"const": 1.0}], False),
    ([{"enum": [1]}, {"enum": [2]}], True),
    ([{"type": ["string", "null"]}, {"type": ["null", "object"]}], False),
    ([{"type": ["string", "null"]}, {"type": ["number", "object"]}], True),
    ([{"type": "number", "exclusiveMinimum": 5}, {"maximum": 5}], True),
    ([{"type": "number", "minimum": 5}, {"maximum": 5}], False),
    ([{"type": "number", "minimum": 5}, {"exclusiveMaximum": 5}], True),
    ([{"type": "number", "minimum": 6}, {"maximum": 5}], True),
    ([{"minimum": 6}, {"maximum": 5}], False),
    ([{"type": "number", "minimum": 0, "exclusiveMinimum": True}, {"maximum": 0.5}], False),
    ([{"type": "object", "required": ["a"]}, {"additionalProperties": False}], True),
    ([{"type": "object", "required": ["a"]}, {"additionalProperties": False, "patternProperties": {"a": {}}}], False),
    ([{"type": "object", "required": ["a"]}, {"additionalProperties": False, "properties": {"a": {}}}], False),
    ([{"type": "object", "required": ["a"], "properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": 2}}}], True),
    ([{"type": "object", "properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": 2}}}], False),
    ([{"anyOf": [{"const": 1}, {"const": 2}]}, {"const": 3}], True),
    ([{"anyOf": [{"const": 1}, {"const": 3}]}, {"const": 3}], False),
    ([{"allOf": [{"type": "null"}]}, {"type": "string"}], True),
    ([False], True),
    ([True], False),
    ([{"$ref": "#/$defs/a"}, {"const": 2}], True),
    ([{"$ref": "#/$defs/none"}, {"const": 2}], False),
], ids=str)  # fmt: skip
def test_what_no_value_fits(schemas: list[Any], proved: bool) -> None:
    assert Proofs({"$defs": {"a": {"const": 1}}}).impossible(schemas) is proved
    assert Proofs({"$defs": {"a": {"const": 1}}}).impossible(schemas[::-1]) is proved


def test_pointers_are_unescaped_in_their_order() -> None:
    root = {"$defs": {"~1": "tilde", "/": "slash", "a b": "blank", "x": {"y": "deep"}}}
    places = ("~01", "~1", "a%20b", "x/y", "none", "x/y/z")
    assert [resolve(root, f"#/$defs/{place}") for place in places] == ["tilde", "slash", "blank", "deep", True, True]
    assert resolve(root, "other#/$defs/x") is True


def test_unique_items_by_their_orders() -> None:
    def orders(count: int, **fields: Any) -> Any:
        given = {"type": "array", "uniqueItems": True, "items": {"enum": [*range(count)]}, **fields}
        return with_orders(given, given["items"])

    assert len(orders(8, maxItems=3)["anyOf"]) == 56
    assert len(orders(5)["anyOf"]) == 120
    assert "anyOf" not in orders(6)
    assert "anyOf" not in orders(12, maxItems=3)
    one = orders(3, minItems=2)["anyOf"][1]
    assert one == {
        "type": "array", "items": False, "minItems": 2, "maxItems": 3,
        "prefixItems": [{"const": 0}, {"const": 2}, {"enum": [1]}],
    }  # fmt: skip
    assert orders(3)["anyOf"][0]["minItems"] == 0
    assert orders(3, maxItems=1) == {"type": "array", "items": {"enum": [0, 1, 2]}, "maxItems": 1}
    assert orders(1) == {"type": "array", "items": {"enum": [0]}, "maxItems": 1}
    assert "anyOf" not in orders(3, items={"enum": [1, 2], "const": 1})
    assert len(orders(3, items={"type": "boolean"})["anyOf"]) == 2
    assert len(orders(3, items={"enum": [1, 1.0, True, "1"], "type": "number"}, maxItems=2)) == len(orders(1, maxItems=2))
    for kept in ({"minItems": 4}, {"contains": {}}, {"maxItems": 2.0}):
        assert "uniqueItems" in orders(3, **kept)


# ── grammars ────────────────────────────────────────────────────────────────────────────────────────────────────────


def state_after(constraint: GrammarConstraint, text: str) -> TextState:
    state = constraint.begin(row_of())
    for token in ids(text):
        state = constraint.advance(state, token)
    return state


def following(grammar: Grammar, text: str) -> tuple[set[str], bool]:
    """The ASCII characters that may follow a text, and whether it may end."""
    constraint = grammars_of(TOKENIZER, VOCABULARY).constraint(grammar)
    mask = constraint.mask([state_after(constraint, text)], VOCABULARY, CPU)
    return {chr(c) for c in range(32, 127) if mask.tokens[0, ids(chr(c))[0]]}, bool(mask.ends[0])


def test_what_stands_behind_a_grammar_belongs_to_the_text() -> None:
    behind = Grammar("json_schema", '{"const": 1}', behind="!")
    assert [following(behind, text) for text in ("1", "1!")] == [({"!"}, False), (set(), True)]
    between = Grammar("json_schema", '{"const": 1}', between=";", behind="!")
    assert [following(between, text) for text in ("1", "1;1!")] == [({";", "!"}, False), (set(), True)]


@pytest.mark.parametrize("grammar", [Grammar("regex", "yes"), Grammar("lark", 'start: "yes"')], ids=lambda given: given.kind)
@pytest.mark.parametrize("opened", [True, False])
def test_an_answer_stands_behind_reasoning_and_at_most_two_line_feeds(grammar: Grammar, opened: bool) -> None:
    allowed = ReasoningRules(opened).allowed_before(grammar)
    begun = "" if opened else "<think>"
    line_feed = ids("\n")[0]
    for text, goes_on in (("", True), ("\n", True), ("\n\n", False)):
        constraint = grammars_of(TOKENIZER, VOCABULARY).constraint(allowed)
        mask = constraint.mask([state_after(constraint, f"{begun}so</think>{text}")], VOCABULARY, CPU)
        assert (bool(mask.tokens[0, line_feed]), bool(mask.tokens[0, ids("y")[0]])) == (goes_on, True)
    assert following(allowed, f"{begun}so</think>yes") == (set(), True)
    assert following(allowed, "yes")[1] is not opened  # without reasoning, or still within it


def test_digits_are_bounded_behind_what_stands_before() -> None:
    """Which may have as many as it likes."""
    grammar = Grammar("json_schema", '{"type": "integer"}', before="[0-9]{25}:")
    assert following(grammar, "9" * 24)[0] == set("0123456789")
    assert "1" in following(grammar, "9" * 25 + ":" + "1" * 19)[0]
    assert following(grammar, "9" * 25 + ":" + "1" * 20) == (set(), True)


def test_a_grammar_that_was_used_lately_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, asked = Grammars(TOKENIZER, VOCABULARY), list[str]()
    read = Grammars._read
    monkeypatch.setattr(
        Grammars, "_read", lambda self, given, **limits: asked.append(given.text) or read(self, given, **limits)
    )
    monkeypatch.setattr("shoal.constraints.compiler.KEPT", 2)
    for text in "abaaca":
        grammars.constraint(Grammar("regex", text))
    assert asked == [*"abc"]  # of two that are kept, the one that was asked for last
    grammars.constraint(Grammar("regex", "b"))
    assert asked == [*"abcb"]


def test_filters_heed_case_only_where_they_are_told_to() -> None:
    for text, small, capital in (("a", True, True), ("A", False, True)):
        assert (text in following(without("a", ignore_case=True).grammar, "")[0]) is False
        assert (text in following(without("a").grammar, "")[0]) is not small
        assert following(containing("a", ignore_case=True).grammar, text)[1] is capital
        assert following(containing("a").grammar, text)[1] is small
    assert following(without("Ab", ignore_case=True).grammar, "xa")[0].isdisjoint("bB")
    assert following((~containing("a", ignore_case=True)).grammar, "")[0].isdisjoint("aA")


def test_an_expression_may_have_lines_and_slashes() -> None:
    assert following(matching("a\nb/c").grammar, "a\nb") == ({"/"}, False)
    assert following(matching(r"a\/b").grammar, "a") == ({"/"}, False)
    assert following(only_words(["a.", "a"], separators="]-").grammar, "a") == ({".", "]", "-"}, True)


# ── weights and estimates ───────────────────────────────────────────────────────────────────────────────────────────


class Check:
    """Lets every token pass."""

    def start(self, row: Row) -> int:
        return 0

    def after(self, state: int, token: int) -> int:
        return 0

    def may_end(self, state: int) -> bool:
        return True


@pytest.mark.parametrize(
    "cut", [{"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"typical_p": 0.9}, {"temperature": 0}], ids=str
)
def test_what_is_cut_is_not_weighed(cut: dict[str, Any]) -> None:
    masked, free = Request((1,), constraints=(Says([True], True),)), Request((1,))
    assert add_weights(masked).weighted
    for request, aligned in ((masked, False), (free, True)):
        with pytest.raises(RequestError, match="leave out top_k"):
            add_weights(Request((1,), sampling=Sampling(**cut), constraints=request.constraints), aligned=aligned)
    checked = Request((1,), sampling=Sampling(**cut), constraints=(Check(),))
    if "temperature" in cut:
        with pytest.raises(RequestError, match="temperature=0"):
            add_weights(checked)
    else:
        assert add_weights(checked).weighted  # the check comes after all other controls


def test_which_weights_go_with_what() -> None:
    masked = Request((1,), 2, constraints=(Says([True], True),))
    found = [add_weights(masked, exact) for exact in EXACT]
    assert all(one.weighted for one in found)
    assert [one.resampled for one in found] == ["smc" in exact for exact in EXACT]
    assert [one.estimated for one in found] == ["asap" in exact for exact in EXACT]
    assert [one.distinct for one in found] == [exact == "distinct" for exact in EXACT]
    assert add_weights(Request((1,), 1), "distinct").distinct  # also where nothing limits texts
    with pytest.raises(RequestError, match="n >= 2"):
        add_weights(Request((1,), 1, constraints=masked.constraints), "smc")
    with pytest.raises(RequestError, match="needs align"):
        add_weights(Request((1,), 2))
    for exact in ("asap", "distinct"):
        with pytest.raises(RequestError, match="checks of single tokens have none"):
            add_weights(Request((1,), 2, constraints=(Check(),)), exact)
    with pytest.raises(RequestError, match="leave out top_k"):
        add_weights(Request((1,), 2, Sampling(top_p=0.9)), "distinct")


def test_estimates_multiply_probabilities_at_any_temperature() -> None:
    row = row_of([Says([True] * 3, True)], estimated=True)
    estimates = Estimates()
    estimates.begin([row])
    root = row.beginning
    root.learn([0, 1], [DrawnValues(3, 0.5, 0.5), DrawnValues(2, 0.1, 0.15)])
    first = root.children[0]
    assert first.estimate == pytest.approx(0.25)  # 0.1 of the token that was drawn, and what was not
    assert root.estimate == pytest.approx(0.5 * 0.25 + 0.5)
    scores = torch.tensor([[[1.0, 0.0, -1.0]]], dtype=torch.float64)
    for temperature in (1.0, 2.0, 0.5):
        changed = scores.clone()
        weigh(changed, temperature, Positions([row], [[]]))
        before, after = ((one[0, 0] / temperature).softmax(-1) for one in (scores, changed))
        expected = before * torch.tensor([0.25, 1, 1])
        assert after.tolist() == pytest.approx((expected / expected.sum()).tolist())


def test_beginnings_are_kept_as_long_as_there_is_room() -> None:
    estimates, asked = Estimates(most=2), [row_of(estimated=True, sampling=Sampling(top_k=k)) for k in range(2)]
    estimates.begin(asked[:1])
    root = asked[0].beginning
    assert root.learn([0, 1, 2], [DrawnValues(3, 0.5, 0.5)] * 3) is None  # there is room for two
    assert estimates.nodes == 2
    assert root.after([0, 1]) is not None
    assert root.after([0, 1, 2]) is None
    estimates.begin(asked[1:])  # the other question takes the room
    assert estimates.nodes == 0
    assert root.learn([5], [DrawnValues(3, 0.5, 0.5)]) is None  # what was given up grows no more
    assert asked[1].beginning.learn([5], [DrawnValues(3, 0.5, 0.5)]) is not None
    assert estimates.nodes == 1


def test_estimates_are_those_of_the_same_question() -> None:
    base: dict[str, Any] = {"sampling": Sampling(seed=1), "limits": Limits(max_new_tokens=5), "owner": "a"}
    others: list[dict[str, Any]] = [
        {"sampling": Sampling(temperature=0.5)}, {"sampling": Sampling(presence_penalty=1)}, {"limits": Limits(max_new_tokens=6)},
        {"limits": Limits(max_new_tokens=5, stop=["x"])}, {"owner": "b"}, {"shown_tokens": frozenset({1})}, {"prompt_ids": (2,)},
        {"sampling": Sampling(logit_bias={1: 1})},
    ]  # fmt: skip
    estimates = Estimates()

    def trie(**fields: Any) -> Any:
        row = SimpleNamespace(request=Request(**{"prompt_ids": (1,), **base, "estimated": True, **fields}), beginning=None)
        estimates.begin([row])  # type: ignore[list-item]
        return row.beginning.trie

    own = trie()
    assert trie(sampling=Sampling(seed=2)) is own
    assert trie(n=5) is own
    assert len({id(trie(**other)) for other in others} | {id(own)}) == len(others) + 1


# ── middles and members ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_suffix_gets_what_the_prefix_leaves() -> None:
    assert nearest(TOKENIZER, "aaaa", "b" * 100, 40) == ("aaaa", "b" * 36)
    assert nearest(TOKENIZER, "a" * 100, "bb", 40) == ("a" * 38, "bb")
    assert nearest(TOKENIZER, "a" * 100, "b" * 100, 40) == ("a" * 30, "b" * 10)
    assert nearest(TOKENIZER, "a" * 20, "b" * 20, 40) == ("a" * 20, "b" * 20)
    assert nearest(TOKENIZER, "x" * 7 + "\n" + "a" * 25, "bb\nbb\n" + "c" * 90, 36) == ("a" * 25, "bb\nbb\n")


def test_a_middle_begins_as_its_tokenizer_begins_texts() -> None:
    """With its first token, which stands before excerpts of other files too."""

    class Begins:
        bos_token_id = 9

        def __init__(self, first: Sequence[int]) -> None:
            self.first = first

        def get_vocab(self) -> dict[str, int]:
            return {"<fim_prefix>": 1, "<fim_suffix>": 2, "<fim_middle>": 3}

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [*(self.first if add_special_tokens else ()), *map(ord, text)]

    a, b, c = map(ord, "abc")
    assert middle_prompt(Begins([9]), "a", "b", "c") == MiddlePrompt((9, c, 1, a, 2, b, 3), 4)
    assert middle_prompt(Begins([]), "a", "b") == MiddlePrompt((1, a, 2, b, 3), 2)
    assert middle_prompt(Begins([7]), "a", "").ids == (1, a, 2, 3)  # another token is none of the beginning


def test_the_text_behind_is_the_one_that_is_given() -> None:
    """With the nearest parts of a file in the prompt, the whole of it is in `Syntax`."""
    request = Request(ids("["), prompt="[")
    for syntax, suffix, right in (
        (Syntax("json", right="]"), "}", "]"),
        ("json", "]", "]"),
        (Syntax("json", left='{"a": '), "}", "}"),
    ):
        (check,) = with_syntax(request, TOKENIZER, syntax, suffix).constraints
        state = check.after(check.start(row_of()), ids("1")[0])
        assert check.may_end(state), right
        assert not check.may_end(check.after(state, ids(",")[0]))
    with pytest.raises(RequestError, match="members"):
        with_syntax(request, TOKENIZER, Syntax("json", members=True))


def test_places_at_which_a_text_may_be_cut() -> None:
    """The best score first, of equal ones the latest; inside tokens, not inside characters; what is healed is no part of it."""
    places, text = end_places([b"ab", "é".encode()[:1], "é".encode()[1:], b"c"], 0, [1.0, 3.0, 9.0, 2.0, 3.0], 9)
    assert text == "abéc"
    assert places == [(3.0, 4, 4), (3.0, 2, 1), (3.0, 1, 1), (2.0, 3, 3), (1.0, 0, 0)]
    healed, text = end_places([b"xy", b"zab", b"c"], 3, [1.0, 5.0, 3.0, 2.0], 2)
    assert text == "abc"
    assert healed == [(3.0, 2, 2), (3.0, 1, 2), (3.0, 0, 2)]
    assert end_places([b"xyz", b"a"], 3, [1.0, 5.0, 3.0], 9)[0] == [(5.0, 0, 1), (3.0, 1, 2)]


def test_names_of_members_have_letters_of_any_alphabet() -> None:
    check = Members(TOKENIZER, "x", "", analyser=lambda before, behind: ["né", "size"])

    def passes(text: str) -> bool:
        state: Any = check.start(row_of())
        for token in ids(text):
            state = None if state is None else check.after(state, token)
        return state is not None

    assert [passes(text) for text in (".né", ".né = 1", ".nü", ".size()", ".si(", ".n ", ".né.size")] == [
        True, True, False, True, False, False, True,
    ]  # fmt: skip
    ends = Members(TOKENIZER, "x.si", "ze()", analyser=lambda before, behind: ["size", "si"])
    assert ends.may_end(ends.start(row_of()))
    inside = Members(TOKENIZER, "x.s", "zf()", analyser=lambda before, behind: ["size", "s"])
    assert not inside.may_end(inside.start(row_of()))
