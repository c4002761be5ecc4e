"""Calls that come piece by piece or are cut: what is whole is delivered, what is not is neither call nor text, all is read once.

Tests of: serve.call_reader, serve.written_calls.
"""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from call_forms import TEMPLATES, form_of, tokenizer_of, written
from serving import served
from shoal.api import Shoal
from shoal.engine.stop_strings import Passages, Stops
from shoal.serve import call_reader
from shoal.serve.call_reader import CallEnd, CallReader, Nesting
from shoal.serve.tool_calls import HERMES, LLAMA, MISTRAL, Call, CallFormat, CallRules
from shoal.testing.scripted import scripted
from tool_calls import BODY, TIME, WEATHER, speaks

SCHEMAS = {
    "weather": {"properties": {"city": {"type": "string"}, "near": {"type": "array"}}},
    "time": {"properties": {"zone": {"type": "integer"}, "yes": {"type": ["boolean", "null"]}}},
    **{name: {"properties": {}} for name in ("get-now", "mcp.get-now")},
}
ROME, ONE = ("weather", {"city": 'Rome, [so (be {it 5" wide]', "near": ["a]", {"b": ")"}]}), ("time", {"zone": 1})
JSONS = {"hermes": HERMES, "hermes list": HERMES, "llama json": LLAMA, "mistral json": MISTRAL}
FORMS: dict[str, CallFormat] = {**{name: form_of(name) for name in TEMPLATES}, **JSONS}


def said(name: str, calls: list[tuple[str, Any]]) -> str:
    """The calls as a model of that form writes them, behind what begins a call."""
    if name not in JSONS:
        return written(name, calls)
    form = JSONS[name]
    each = [json.dumps({"name": one, form.arguments: given}) for one, given in calls]
    if name in ("mistral json", "hermes list"):
        return f"[{', '.join(each)}]{form.closing}"
    return f"{form.closing}{form.opening}".join(each) + form.closing


def read(form: CallFormat, text: str, size: int = 10**6, forced: bool = False) -> tuple[str, list[tuple[str, Any]]]:
    rules = CallRules(form, {*SCHEMAS}, forced=forced, parallel=True, schemas=SCHEMAS)
    reader, shown, calls = CallReader(rules), "", list[Call]()
    for start in range(0, len(text), size):
        more, found = reader.feed(text[start : start + size], start + size >= len(text))
        shown, calls = shown + more, calls + found
    return shown, [(one.name, json.loads(one.arguments)) for one in calls]


@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize("name", FORMS)
def test_a_cut_leaves_the_calls_that_are_whole(name: str, forced: bool) -> None:
    """At each place, in pieces and at once: where the second call has begun, the first one is there, and never a part."""
    form = FORMS[name]
    calls = [ROME] if name == "llama" else [ROME, ONE]
    before, text = "" if forced else form.begun or form.opening, said(name, calls)
    begun = text.rfind("time") if len(calls) > 1 else len(text)
    for end in range(1, len(text) + 1):
        shown, found = read(form, before + text[:end], forced=forced)
        for size in (1, 7):
            assert read(form, before + text[:end], size, forced) == (shown, found), text[:end]
        unsure = not before and not forced and "(" not in text[:end]  # a list in Python, or a text
        assert (shown, found) == (text[:end] if unsure else "", calls[: len(found)]), text[:end]
        assert len(found) >= (end >= begun) + (end == len(text)) * (len(calls) - 1), text[:end]


@pytest.mark.parametrize("name", ["qwen", "minimax", "lfm", "gemma", "llama", "seed", "glm"])
def test_a_call_whose_closing_is_cut_is_whole(name: str) -> None:
    text = said(name, [ROME])
    closing = FORMS[name].closing
    for left in range(2, len(closing)):
        assert read(FORMS[name], FORMS[name].begun + text[: -len(closing)] + closing[:left]) == ("", [ROME])


@pytest.mark.parametrize(("name", "text"), [
    ("qwen", "<function=weather>\n<parameter=city>\nthe </function> of\n</function> it"),
    ("minimax", '<invoke name="weather">\n<parameter name="city">the </invoke> of\n</invoke> it'),
    ("gemma", 'call:weather{city:<|"|>a} b}'),
    ("listed", '[weather(city="a), b'), ("listed", "[weather(city='a\\'), b"), ("lfm", "[weather(city=(1, 2), near=[1]"),
    ("mistral json", '[{"name": "weather", "arguments": {"city": "a}, {'),
])  # fmt: skip
def test_what_looks_like_an_end_inside_of_an_argument_is_none(name: str, text: str) -> None:
    """No call with a part of an argument is ever delivered."""
    for size in (1, 5, 1000):
        assert read(FORMS[name], FORMS[name].begun + text, size, forced=False) == ("", [])


FALSE = {
    "qwen": "<tool_call><function=other>\n</function></tool_call>",
    "minimax": '<minimax:tool_call><invoke name="other">\n</invoke></minimax:tool_call>',
    "glm": "<tool_call>other\n</tool_call>",
    "llama": "<function=other>{}</function>",
    "gemma": "<|tool_call>call:other{}<tool_call|>",
    "lfm": "<|tool_call_start|>[other()]<|tool_call_end|>",
    "hermes": '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
    "mistral": "[TOOL_CALLS]other[ARGS]{}",
}


@pytest.mark.parametrize("name", FALSE)
def test_a_call_behind_a_false_one_is_found_in_whole_answers_as_in_streams(name: str) -> None:
    """The name of no tool makes a text; so does JSON that is none."""
    form = FORMS[name]
    good = f"{form.begun}{said(name, [ONE])}"
    texts = [FALSE[name]]
    texts += ["<function=time>or so</function>"] * (name == "llama")
    if name in ("hermes", "llama", "mistral"):
        texts += [
            FALSE[name].replace("{}", "{]}").replace("other", "time"),
            FALSE[name].replace("other", "time").replace("{}", "{'a'}"),
        ]
    for false in texts:
        for size in (1, 2, 5, 1000):
            assert read(form, f"{false} {good}", size) == (false, [ONE]), false


def test_json_may_hold_the_closing_of_its_call() -> None:
    """Also where the piece of a stream ends behind it."""
    call = ("weather", {"city": "a </function> b", "near": []})
    for size in (1, 3, 1000):
        assert read(FORMS["llama"], "<function=" + said("llama", [call]), size) == ("", [call])
        hermes = ("weather", {"city": 'a </tool_call> "b"', "near": []})
        assert read(HERMES, HERMES.begun + said("hermes", [hermes]), size) == ("", [hermes])


class Counted:
    """A decoder, or an expression, that counts the characters which it looks at."""

    def __init__(self, real: Any, work: list[int]) -> None:
        self._real, self._work = real, work

    def raw_decode(self, text: str, at: int = 0) -> Any:
        self._work[0] += len(text) - at
        return self._real.raw_decode(text, at)

    def decode(self, text: str) -> Any:
        self._work[0] += len(text)
        return self._real.decode(text)

    def search(self, text: str, at: int = 0) -> re.Match[str] | None:
        found: re.Match[str] | None = self._real.search(text, at)
        self._work[0] += (len(text) if found is None else found.end()) - at
        return found


class CountedText(str):
    """A text that counts the characters among which others are looked for."""

    work = 0

    def find(self, what: str, start: Any = 0, end: Any = None) -> int:
        type(self).work += len(self) - start
        return super().find(what, start)


LONG = 'a "b" \\\\ {c} [d] (e) \\n </f '


@pytest.mark.parametrize("name", ["hermes", "llama json", "mistral json", "mistral", "llama", "listed"])
def test_a_call_of_twice_the_length_is_twice_the_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the characters that are looked at, in pieces of three: a file that a model writes is one argument."""
    work = [0]
    monkeypatch.setattr(call_reader, "DECODER", Counted(call_reader.DECODER, work))

    class CountedNesting(Nesting):
        def __init__(self, *arguments: str) -> None:
            super().__init__(*arguments)
            self._outside: Any = Counted(self._outside, work)
            self._inside: Any = {quote: Counted(one, work) for quote, one in self._inside.items()}

    monkeypatch.setattr(call_reader, "Nesting", CountedNesting)
    monkeypatch.setattr(call_reader, "Nesting", CountedNesting)
    counts = []
    for times in (40, 80):
        call = ("weather", {"city": LONG * times})
        work[0] = 0
        text = FORMS[name].begun + said(name, [call])
        assert read(FORMS[name], text, 3) == ("", [call])
        counts.append(work[0])
        assert len(text) // 2 < work[0] < 6 * len(text)
    assert counts[1] < 2.2 * counts[0], counts


@pytest.mark.parametrize("name", ["qwen", "glm", "gemma", "minimax", "lfm"])
def test_a_closing_is_looked_for_once_at_each_place(name: str) -> None:
    text, end = said(name, [("weather", {"city": LONG * 20})]), CallEnd(FORMS[name].form, FORMS[name].closing)
    CountedText.work = 0
    found = [end.find(CountedText(text[:size])) for size in range(0, len(text) + 1)]
    assert [place for place in found if place] == [(len(text) - len(FORMS[name].closing), len(text))]
    assert CountedText.work < 25 * len(text)


# ── through the server ──────────────────────────────────────────────────────────────────────────────────────────────

PLAIN = [("weather", {"city": "Rome"}), ("time", {"zone": 12345})]


@pytest.mark.slow(but=["listed-required"])
@pytest.mark.parametrize("choice", ["required", "auto"])
@pytest.mark.parametrize("name", ["minimax", "listed", "lfm", "mistral", "qwen"])
def test_max_tokens_cuts_the_second_call_and_leaves_the_first(name: str, choice: str) -> None:
    """Whole and streamed, in chats and responses, for each of n choices."""
    form, tokenizer = form_of(name), tokenizer_of(name, "text")
    before, text = form.begun, written(name, PLAIN)
    forced = choice == "required"
    model = scripted(
        speaks(text if forced else before + text, f"<assistant>{before if forced else ''}", tokenizer), len(tokenizer), 2048
    )
    most = len(tokenizer.encode(("" if forced else before) + text[: text.index("1234") + 2]))
    with served(Shoal(model, model, tokenizer, max_batch=4), chat_template="{# " + TEMPLATES[name] + " #}" + BODY) as server:
        asked = {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER, TIME], "tool_choice": choice}
        for stream in (False, True):
            body = {**asked, "n": 2, "max_tokens": most, "stream": stream}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")] or [answer.text]
            choices = [one for line in lines for one in json.loads(line)["choices"]]
            for index in range(2):
                own = [one for one in choices if one["index"] == index]
                said = [one.get("message") or one["delta"] for one in own]
                made = [call["function"] for one in said for call in one.get("tool_calls") or ()]
                assert [(one["name"], json.loads(one["arguments"])) for one in made] == PLAIN[:1]
                assert "".join(one.get("content") or "" for one in said) == ""
                assert own[-1]["finish_reason"] == "length"
            item = {"input": "hi", "tools": [{"type": "function", **one["function"]} for one in (WEATHER, TIME)]}
            more = {"tool_choice": choice, "max_output_tokens": most, "stream": stream}
            response = httpx.post(f"{server.url}/v1/responses", json={**item, **more}, timeout=60).text
            assert response.count('"name":"weather"') >= 1, response
            assert '"name":"time","arguments"' not in response
            assert "incomplete" in response


CALL = '{"name": "time", "arguments": {"zone": 1}}'
XML = "<function=time>\n<parameter=zone>\n1\n</parameter>\n</function>"
INVOKE = '<invoke name="time">\n<parameter name="zone">1</parameter>\n</invoke>'
IRREGULAR = [
    ("hermes", 'a <tool_call>{"name": "time", "arguments": "{\\"zone\\": 1}"}</tool_call>', "a", [ONE]),  # a text of JSON
    ("hermes", '<tool_call>{"name": "time", "arguments": null}</tool_call>', "", [("time", {})]),
    ("hermes", f"<tool_call>\n{CALL}\n{CALL}\n</tool_call>\n<tool_call>{CALL}", "", [ONE] * 3),  # two between one pair of marks
    ("hermes", f"<tool_call>\n{CALL}\n{CALL[:20]}", "", [ONE]),
    ("llama json", f"{CALL}; {CALL[:20]}", "", [ONE]),
    ("llama json", f'{CALL}\n{{"a": 1}}', '{"a": 1}', [ONE]),
    ("qwen", f"Sure.\n{XML}\n</tool_call>", "Sure.", [ONE]),  # without its opening, as Qwen3-Coder often writes
    ("qwen", f"Sure.\n{XML}\n{XML}", "Sure.", [ONE, ONE]),
    ("qwen", f"<tool_call>{XML}\n</tool_call>{XML}\n</tool_ca", "", [ONE, ONE]),
    ("qwen", f"{XML} done", " done", [ONE]),
    ("qwen", f"{XML}\n<function=weather>\n<param", "", [ONE]),
    ("minimax", f"Sure.\n{INVOKE}\n</minimax:tool_call>", "Sure.", [ONE]),
    ("hermes", f"<tool_call>\n{CALL}}}}}\n</tool_call> ok", " ok", [ONE]),  # brackets too many
    ("hermes", f"<tool_call>{CALL}, {CALL}</tool_call>", "", [ONE, ONE]),
    ("hermes", f"<tool_call>{CALL} ] so", "] so", [ONE]),
    ("hermes", f'<tool_call>{{"type": "function", "function": {CALL}}}</tool_call>', "", [ONE]),  # as tools are shown
    ("llama json", f"[{CALL}, {CALL}]", "", [ONE, ONE]),
    ("llama json", f"{CALL}, {CALL}", "", [ONE, ONE]),
    ("mistral", '[TOOL_CALLS]time{"zone": 1}', "", [ONE]),  # without the mark between
    ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]", "", [ONE, ONE]),  # JSON alone
    ("llama", '<function=time{"zone": 1}</function>', "", [ONE]),
    ("qwen", f"<tool_call>\n{CALL}\n</tool_call>", "", [ONE]),
    ("glm", f"<tool_call>{CALL}</tool_call><tool_call>[{CALL}]</tool_call>", "", [ONE, ONE]),
    ("lfm", f"<|tool_call_start|>[{CALL}]<|tool_call_end|> ok", " ok", [ONE]),
    ("gemma", "<|tool_call>call:weather{city:New York,near:[a b,1]}<tool_call|>", "",
     [("weather", {"city": "New York", "near": ["a b", 1]})]),
    ("qwen", XML.replace("\n1\n", "\nTRUE\n").replace("zone", "yes"), "", [("time", {"yes": True})]),
    ("qwen", "<tool_call><function=weather>\n<parameter=near>\n['a', None, {'b': True}]\n</parameter>\n</function></tool_call>",
     "", [("weather", {"near": ["a", None, {"b": True}]})]),
    ("glm", "<tool_call>weather<arg_key>near</arg_key><arg_value>('it''s', \"b\")</arg_value></tool_call>",
     "", [("weather", {"near": ["its", "b"]})]),
    ("lfm", "<|tool_call_start|>[get-now(from='a=(b', class=1, λ=null)]<|tool_call_end|>", "",
     [("get-now", {"from": "a=(b", "class": 1, "λ": None})]),
    ("listed", '[mcp.get-now(in="x == f(y)")]', "", [("mcp.get-now", {"in": "x == f(y)"})]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "shown", "calls"), IRREGULAR)
def test_calls_that_are_not_quite_as_the_template_has_them(form: str, text: str, shown: str, calls: list[Any]) -> None:
    for size in (1, 2, 5, 1000):
        assert read(FORMS[form], text, size) == (shown, calls), size


@pytest.mark.parametrize(("form", "text"), [
    ("hermes", '<tool_call>{"name": ["time"], "arguments": {}}</tool_call> x'),
    ("llama json", '{"name": {"a": 1}, "parameters": {}}'),
    ("hermes", '<tool_call>{"name": "time", "arguments": "1"}</tool_call> x'),
    ("hermes", '<tool_call>{"name": "time", "arguments": "[1]"}</tool_call> x'),
    ("qwen", "<function= is XML, and so is <function=nope>."), ("qwen", "a <function=tim"),
    ("mistral", "[TOOL_CALLS] is a mark of Mistral's."), ("mistral", "[TOOL_CALLS][1, 2] so"), ("llama", "<function=f is one"),
    ("llama json", "[1, 2] is a list"), ("hermes", '<tool_call>{"function": {"arguments": {}}}</tool_call> x'),
    ("lfm", "<|tool_call_start|>[get-now(x=float('inf'))]<|tool_call_end|>"),
])  # fmt: skip
def test_what_looks_like_a_call_and_is_none_is_text(form: str, text: str) -> None:
    for size in (1, 2, 5, 1000):
        assert read(FORMS[form], text, size) == (text, []), size


def test_stop_strings_leave_calls_without_their_opening_alone() -> None:
    said = f"So: {XML}\n</tool_call> zone"
    tokenizer = tokenizer_of("qwen", "text")
    model = scripted(speaks(said, tokenizer=tokenizer), len(tokenizer), 2048)
    with served(Shoal(model, model, tokenizer), chat_template="{# " + TEMPLATES["qwen"] + " #}" + BODY) as server:
        body = {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER, TIME], "stop": ["zone", "1"]}
        choice = server.post("/v1/chat/completions", prompt=None, **body).json()["choices"][0]
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"zone": 1}
    assert (choice["message"]["content"], choice["finish_reason"]) == ("So:", "tool_calls")


@pytest.mark.parametrize(
    ("form", "text", "other"),
    [(FORMS["listed"], "[time(", "[1, 2]"), (LLAMA, '{"name"', '{"zone"'), (MISTRAL, '[{"name"', "[{1")],
)
def test_a_stop_string_cuts_no_opening_of_a_call_that_is_no_mark(form: CallFormat, text: str, other: str) -> None:
    """It waits until the text shows whether it begins a call."""
    rules = CallRules(form, ["time"], False, True)
    for said, covered in ((text, True), (other, False)):
        passages = Passages(Stops(unstopped=rules.unstopped))
        assert passages.cover(f"\n{said[:1]}", 2, 1, 2) is None
        assert passages.cover(f"\n{said}", 1 + len(said), 1, 2) is covered
