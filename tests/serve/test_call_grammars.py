"""Forced calls in the model's own form: what the grammar takes is what the reader reads, valid by the tool's schema.

Tests of: serve.call_grammars, serve.call_values, serve.call_texts, serve.written_calls.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from call_forms import TEMPLATES, TOKENS, Forced, form_of, tokenizer_of, written
from serving import served
from shoal.api import Shoal
from shoal.serve.call_grammars import own_calls
from shoal.testing.scripted import scripted
from tool_calls import BODY, TIME, WEATHER, speaks, tool

pytest.importorskip("llguidance")

ASKED: list[Any] = [{"role": "user", "content": "hi"}]


def args(*left_out: str, **properties: Any) -> dict[str, Any]:
    """The schema of arguments, all of them required but some."""
    required = [name for name in properties if name not in left_out]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


TEXT, WHOLE, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
INNER = args("z", q={"type": "string", "maxLength": 5}, z={"anyOf": [TEXT, NULL]})
TOOLS: list[dict[str, Any]] = [
    {"f": args("b", a=TEXT, b=TEXT)},
    {"f": args("b", a=TEXT, b=WHOLE), "g": args(x={"type": "boolean"})},
    {"f": args("c", a={"type": ["string", "null"]}, b={"type": ["integer", "string"]}, c={"type": "number"})},
    {"f": args(a={"enum": ["x", "1", "y z"]}, b={"enum": [1, 22, None, True]}, c={"const": -3})},
    {"f": args(a={"type": "array", "items": TEXT}, b={"type": "array", "items": WHOLE, "minItems": 1, "maxItems": 3})},
    {"f": args(a=INNER, b={"$ref": "#/properties/a"}), "g": args(a={"type": "object"}, b={})},
    {"f": args(a={"anyOf": [{"type": "string", "minLength": 2}, {"type": "number"}, NULL]})},
    {"f": args(a={"type": "string", "pattern": "^[a-c]+$"}, b={**TEXT, "minLength": 1, "maxLength": 4}, c={**WHOLE, "minimum": 5})},
    {"f": {"type": "object", "properties": {}}, "g": args()},
    {"f": args("a", "b", "d", a=TEXT, b=WHOLE, c={"type": "boolean"}, d=NULL)},
    {"f": args(a={**TEXT, "maxLength": 40}, b={"type": ["string", "null"], "minLength": 2, "maxLength": 5})},
    {"get-x": args(**{"from": TEXT, "a-b": WHOLE}), "a.b": args(class_=NULL, null=TEXT)},
]  # fmt: skip


def faults(forced: Forced, tools: dict[str, Any], count: int, seed: int) -> Iterator[str]:
    """Samples of a grammar that are no calls, or calls that do not fit."""
    rng = random.Random(seed)
    for _ in range(count):
        text = forced.sample(rng)
        if text is None:
            continue
        shown, calls = forced.read(text)
        if shown or not calls or forced.read(text, 3) != (shown, calls):
            yield text
        for call in calls:
            validator = jsonschema.Draft202012Validator(tools[call.name])
            if not validator.is_valid(json.loads(call.arguments)):
                yield text


@pytest.mark.slow(but=["glm-added"])
@pytest.mark.parametrize(("form", "kind"), TOKENS)
def test_what_the_grammar_takes_is_read_and_valid(form: str, kind: str) -> None:
    """Random samples, full of marks and quotes, in pieces too."""
    for i, tools in enumerate(TOOLS):
        forced = Forced(form, kind, tools)
        assert [*faults(forced, tools, 4, seed=i)] == []


def test_a_grammar_that_bans_no_marks_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a text with the marks of the form would be cut by its reader."""
    tools = {"f": args(a={"type": "array", "items": TEXT})}
    for form in ("qwen", "seed", "glm", "minimax"):
        said = written(form, [("f", {"a": [f"x {form_of(form).closing} y"]})])
        assert not Forced(form, "text", tools).accepts(said)
        with monkeypatch.context() as changed:
            changed.setattr("shoal.serve.call_values.texts_with", lambda banned: r"\x00")
            wrong = Forced(form, "text", tools)
        assert wrong.accepts(said)
        assert wrong.read(said)[0] or not wrong.read(said)[1] or '"x' not in wrong.read(said)[1][0].arguments, form


def test_a_text_that_would_be_read_as_another_value_is_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = {"f": args(a={"anyOf": [{"type": "string", "minLength": 5}, NULL]})}
    text = "<function=f>\n<parameter=a>\n {} \n</parameter>\n</function>\n</tool_call>"
    forced = Forced("qwen", "text", tools)
    assert not forced.accepts(text.replace("{}", "null "))
    assert forced.accepts(text.replace("{}", "nulls"))
    monkeypatch.setattr("shoal.serve.call_grammars.READ_AS", {"null": "nothing"})
    assert Forced("qwen", "text", tools).accepts(text.replace("{}", "null ")), "the control"


SMALL = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=6)
TEXTS = st.one_of(
    SMALL, st.sampled_from(["", "null", "5", "True", '"a"', "{}", "a\nb", " x ", "\\", "'", "<", "</tool_call", "[ARGS]", ")]"])
)  # fmt: skip
NUMBERS = st.integers(-(10**15), 10**15) | st.sampled_from([1.5, -0.25, 10.0, 123456.789])
VALUES: dict[str, tuple[Any, Any]] = {
    "text": (TEXT, TEXTS),
    "number": ({"type": "number"}, NUMBERS),
    "whole": (WHOLE, st.integers(-(10**15), 10**15)),
    "flag": ({"type": "boolean"}, st.booleans()),
    "none": (NULL, st.none()),
    "listed": ({"enum": ["a", "b c", 1, None, False]}, st.sampled_from(["a", "b c", 1, None, False])),
    "maybe": ({"anyOf": [WHOLE, NULL]}, st.integers(0, 99) | st.none()),
    "words": ({"type": "array", "items": TEXT}, st.lists(TEXTS, max_size=3)),
    "inner": (
        args("n", t=TEXT, n={"type": "array", "items": {"type": "number"}}),
        st.fixed_dictionaries({"t": TEXTS}, optional={"n": st.lists(NUMBERS, max_size=2)}),
    ),
}
LEFT_OUT = ("flag", "none", "words", "inner")
FORCED = {
    form: {"f": args(*LEFT_OUT, **{k: schema for k, (schema, _) in VALUES.items()}), "g": args(x=TEXT)} for form in TEMPLATES
}
CALLS = st.fixed_dictionaries(
    {name: one for name, (_, one) in VALUES.items() if name not in LEFT_OUT},
    optional={name: VALUES[name][1] for name in LEFT_OUT},
).map(lambda values: {name: values[name] for name in VALUES if name in values})


def like(one: Any, other: Any) -> bool:
    """True if two values are the same in JSON: 1 is 1.0, and True is neither."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


@pytest.mark.parametrize(("form", "kind"), TOKENS)
def test_calls_come_back_with_the_very_same_values(form: str, kind: str) -> None:
    """A call as the form writes it is of the grammar, and read as it was; or it holds what the form cannot."""
    forced, refused = Forced(form, kind, FORCED[form]), 0

    @settings(max_examples=25, deadline=None, derandomize=True, database=None)
    @given(CALLS, TEXTS, st.booleans())
    def come_back(values: dict[str, Any], text: str, twice: bool) -> None:
        nonlocal refused
        calls = [("f", values), ("g", {"x": text})][: 1 + (twice and form != "llama")]
        said = written(form, calls)
        if not forced.accepts(said):
            refused += 1
            return
        shown, found = forced.read(said)
        assert shown == ""
        assert [one.name for one in found] == [name for name, _ in calls]
        assert all(like(json.loads(a.arguments), b) for a, (_, b) in zip(found, calls, strict=True)), said

    come_back()
    assert refused < 8, refused


@pytest.mark.parametrize("schema", [
    {"type": "object", "additionalProperties": True, "properties": {}}, args(a={"not": {}}),
    args(a={"type": "array", "uniqueItems": True}),
    args(a={"oneOf": [WHOLE, {"type": "number"}]}), args(a={"$ref": "#/properties/a"}),
    args(a={"type": "array", "items": {"$ref": "#"}}),
    {"type": "object"}, args(a={"type": "string", "format": "uuid"}), args(a={"enum": [[1]]}), {"anyOf": [args()]},
], ids=str)  # fmt: skip
def test_a_schema_that_a_form_cannot_hold_is_told(schema: Any) -> None:
    for form in TEMPLATES:
        own = own_calls(form_of(form), {"f": schema}, True)
        assert (own is None) == (form not in ("mistral", "llama")), form


# ── through the server ──────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def speaking(form: str, kind: str, said: str, before: str = "") -> Iterator[Callable[..., Any]]:
    """A model that says a text, under a template of the form: its answers to requests."""
    tokenizer = tokenizer_of(form, kind)
    begin = f"<assistant>{before}"
    model = scripted(speaks(said, begin, tokenizer), len(tokenizer), 2048)
    shown = "{# " + TEMPLATES[form] + " #}" + BODY
    body = {"messages": ASKED, "tools": [WEATHER, TIME], "tool_choice": "required", "max_tokens": 400}
    with served(Shoal(model, model, tokenizer, max_batch=2), chat_template=shown) as server:
        yield lambda **fields: httpx.post(f"{server.url}/v1/chat/completions", json=body | fields, timeout=60)


ROME, ONE = ("weather", {"city": "Rome"}), ("time", {"zone": 1})


@pytest.mark.slow(but=["qwen-text"])
@pytest.mark.parametrize(("form", "kind"), [one for one in TOKENS if one[1] != "added"])
def test_calls_are_forced_in_the_form_of_the_model(form: str, kind: str) -> None:
    """The prompt has what begins a call, and no message tells the tools; whole, streamed, one alone, and cut."""
    calls = [ROME] if form == "llama" else [ROME, ONE]
    half = len(tokenizer_of(form, kind).encode(written(form, [ROME]))) // 2
    with speaking(form, kind, written(form, calls), form_of(form).begun) as asked:
        answer, streamed, cut = asked(), asked(stream=True).text, asked(max_tokens=half)
        first = asked(parallel_tool_calls=False, response_format={"type": "json_object"})
    assert (answer.status_code, answer.headers.get("x-shoal-told")) == (200, None), answer.text
    (choice,) = answer.json()["choices"]
    made = [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in choice["message"]["tool_calls"]]
    assert (made, choice["finish_reason"], choice["message"]["content"]) == (calls, "tool_calls", None)
    assert streamed.count('"arguments":') == len(calls)
    assert '"content":"' not in streamed.replace('"content":""', "")
    assert [one["function"]["name"] for one in first.json()["choices"][0]["message"]["tool_calls"]] == ["weather"]
    (choice,) = cut.json()["choices"]
    assert choice["message"].get("tool_calls") is None
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")


@pytest.mark.slow(but=["gemma"])
@pytest.mark.parametrize("form", ["qwen", "gemma", "mistral"])
def test_a_call_or_a_text_that_fits(form: str) -> None:
    """A grammar beside tools that may be called: the call is in the model's own form."""
    fields = {"tool_choice": "auto", "guided_regex": "[ab]+"}
    for said, called in ((form_of(form).begun + written(form, [ROME]), True), ("ab", False)):
        with speaking(form, "special", said) as asked:
            message = asked(**fields).json()["choices"][0]["message"]
        assert (bool(message.get("tool_calls")), message["content"]) == (called, None if called else "ab")


@pytest.mark.slow(but=["qwen"])
@pytest.mark.parametrize("form", TEMPLATES)
def test_what_a_form_cannot_hold_is_told_and_forced_as_json(form: str) -> None:
    odd = tool("f", x={"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True})
    said = '{"name": "f", "arguments": {"x": [2, 1]}}\n</tool_call>'
    with speaking(form, "text", said, "<tool_call>\n") as asked:
        answer = asked(tools=[odd])
    assert answer.headers.get("x-shoal-told") == (None if form in ("mistral", "llama") else "tools")
    if form not in ("mistral", "llama"):
        (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"x": [2, 1]}
