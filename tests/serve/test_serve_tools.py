"""Tools in chats, with the official client: calls that are forced by a grammar, and calls that the model makes by itself.

Tests of: serve.tools, serve.tool_calls, serve.written_calls, serve.message_models.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from transformers import AddedToken

from serving import Served, legible, pair, served
from shoal.api import Shoal
from shoal.config import Grammar
from shoal.serve.call_reader import CallReader
from shoal.serve.message_models import Message
from shoal.serve.tool_calls import HERMES, LLAMA, MISTRAL, Call, CallFormat, CallRules, forced_schema, format_of
from shoal.testing import tiny_tokenizer
from shoal.testing.scripted import scripted
from tool_calls import BODY, TIME, TOKENIZER, WEATHER, speaks, tool

TEMPLATES = {HERMES: "{# <tool_call> #}", LLAMA: "{# <|python_tag|> #}", MISTRAL: "{# [TOOL_CALLS] #}"}
ASKED: list[Any] = [{"role": "user", "content": "hi"}]


def read(rules: CallRules, text: str, size: int) -> tuple[str, list[Call]]:
    """What a reader makes of a text in pieces of so many characters."""
    reader, shown, calls = CallReader(rules), "", []
    for start in range(0, max(len(text), 1), size):
        more, found = reader.feed(text[start : start + size], start + size >= len(text))
        shown, calls = shown + more, calls + found
    assert reader.found == len(calls)
    return shown, calls


ONE, TWO = Call("weather", '{"city": "</tool_call>; \\"}"}'), Call("time", '{"zone": 2}')
RAW = [f'{{"name": "{call.name}", "KEY": {call.arguments}}}' for call in (ONE, TWO)]
TEXTS = [
    (HERMES, "Let me see.\n<tool_call>\n①\n</tool_call>\n<tool_call>\n②\n</tool_call>", "Let me see.", [ONE, TWO]),
    (HERMES, "<tool_call>①</tool_call> and <tool_call>②", " and", [ONE, TWO]),
    (HERMES, "a < b <tool_ca", "a < b <tool_ca", []),
    (HERMES, "<tool_call>①</tool_call>\n<to", "", [ONE]),
    (HERMES, "a <tool_call>①</tool_call> \n ", "a", [ONE]),
    (HERMES, "<tool_call>①\n</tool_", "", [ONE]),
    (HERMES, "①", RAW[0].replace("KEY", "arguments"), []),
    (HERMES, 'x <tool_call>{"name": "other", "arguments": {}}</tool_call>\n', None, []),
    (HERMES, 'x <tool_call>{"name": "weather", "arguments": NaN}</tool_call>', None, []),
    (HERMES, "x <tool_call>{]</tool_call> ", None, []),
    (HERMES, "", "", []),
    (LLAMA, "①", "", [ONE]),
    (LLAMA, "<|python_tag|>①; ②", "", [ONE, TWO]),
    (LLAMA, '{"a": 1} is JSON', None, []),
    (LLAMA, "Hello {", None, []),
    (MISTRAL, "[TOOL_CALLS] [①, ②]", "", [ONE, TWO]),
    (MISTRAL, "[①]", "", [ONE]),
    (MISTRAL, "Well. [TOOL_CALLS][②]", "Well.", [TWO]),
    (MISTRAL, "[1, 2] is a list", None, []),
    (HERMES, '<tool_call>{"name" : "time", "arguments" : { "zone":1.10 , "a":"\\ud83d"} }</tool_call>', "",
     [Call("time", '{ "zone":1.10 , "a":"\\ud83d"}')]),
    (LLAMA, '{"parameters": {"zone": 1e999}, "name": "time"}', "", [Call("time", '{"zone": 1e999}')]),
    (MISTRAL, '[TOOL_CALLS][ {"name":"time"} , {"arguments":{},"name":"time"}]', "", 2 * [Call("time", "{}")]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "shown", "calls"), TEXTS)
def test_calls_are_told_from_text_however_it_is_cut(
    form: CallFormat, text: str, shown: str | None, calls: list[Call]
) -> None:
    for short, raw in zip("①②", RAW, strict=True):
        text = text.replace(short, raw.replace("KEY", form.arguments))
    for size in (1, 2, 3, 7, 1000):
        rules = CallRules(form, {"weather", "time"}, forced=False, parallel=True)
        assert read(rules, text, size) == (text if shown is None else shown, calls)


def test_one_call_is_all_where_no_more_are_wanted() -> None:
    rules = CallRules(MISTRAL, {"time"}, forced=False, parallel=False)
    one = '{"name": "time", "arguments": {"zone": 2}}'
    assert read(rules, f"[{one}, {one}]", 5) == ("", [TWO])
    assert read(CallRules(HERMES, {"time"}, False, False), f"<tool_call>{one}</tool_call>" * 2, 5) == ("", [TWO])


def test_templates_tell_their_format() -> None:
    assert {form: format_of(text + BODY) for form, text in TEMPLATES.items()} == {form: form for form in TEMPLATES}
    assert format_of(BODY) is format_of(None) is None
    assert format_of('{"parameters": 1}<atem:invoke name="') is None, "JSON would not be what such a model writes"
    others = (
        "<tool_calls><tool_call>",
        "<|START_ACTION|>[",
        "<|action_start|>",
        "<|tool_call_begin|>",
        "<｜tool▁call▁begin｜>",
    )
    assert all(format_of(f'{one}{{"parameters": 1}}') is None for one in (*others, "<|channel|>commentary", "functools["))
    listed = format_of("<|python_tag|>[func_name1(params_name1=params_value1)]")
    assert (listed and listed.form, listed and listed.opening) == ("python", "")


CODE = 'if a < b:\n    print("</parameter>", 5)\n'
F = tool("f", code={"type": "string"}, n={"anyOf": [{"$ref": "#/properties/k"}, {"type": "null"}]}, k={"enum": [1, 22]},
         o={"type": "object"}, s={"type": ["string", "null"]})  # fmt: skip
GIVEN = {"code": CODE, "n": None, "k": 22, "o": {"a": ["5", True, {"b": 1.5}]}, "s": "5"}
LITERAL = 'code="if a < b:\\n    print(\\"</parameter>\\", 5)\\n", n=None, k=22, o={"a": ["5", true, {"b": 1.5}]}, s="5"'
JSON_OF = {name: value if isinstance(value, str) else json.dumps(value) for name, value in GIVEN.items()}
XML = "<function=f>\n" + "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in JSON_OF.items()) + "</function>\n"
INVOKE = '<invoke name="f">' + "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in JSON_OF.items()) + "</invoke>"
KEYS = "f\n" + "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in JSON_OF.items())
Q = '<|"|>'
OWN = f"call:f{{code:{Q}{CODE}{Q},n:null,k:22,o:{{a:[{Q}5{Q},true,{{b:1.5}}]}},s:{Q}5{Q}}}"
WRITTEN = [
    ("<tool_call><function=x><parameter=y>", f"<tool_call>\n{XML}</tool_call>"),
    ("<seed:tool_call><function=x><parameter=y>", f"<seed:tool_call>\n{XML}</seed:tool_call>"),
    ("<minimax:tool_call>", f"<minimax:tool_call>\n{INVOKE}\n</minimax:tool_call>"),
    ("<tool_call>x<arg_key>", f"<tool_call>{KEYS}</tool_call>"),
    ("[TOOL_CALLS]x[ARGS]", f"[TOOL_CALLS]f[ARGS]{json.dumps(GIVEN)}"),
    ("<function=x>{}</function> <|python_tag|>", f"<function=f>{json.dumps(GIVEN)}</function>"),
    ("'<|tool_call>call:'", f"<|tool_call>{OWN}<tool_call|>"),
    ("<|tool_call_start|>[", f"<|tool_call_start|>[f({LITERAL})]<|tool_call_end|>"),
]  # fmt: skip


@pytest.mark.slow(but=["<tool_call><function=x><parameter=y>"])
@pytest.mark.parametrize(("template", "call"), WRITTEN)
def test_calls_of_other_forms_are_typed_by_the_schema_of_the_tool(template: str, call: str) -> None:
    """However a text is cut, twice in a row; other names, and texts that the end cuts, are no calls."""
    form = format_of(f"{{# {template} #}}{{# [TOOL_CALLS] #}}")
    assert form is not None
    rules = CallRules(form, {"f"}, forced=False, parallel=True, schemas={"f": F["function"]["parameters"]})
    for size in (1, 3, 1000):
        shown, calls = read(rules, f"So: {call}\n{call}", size)
        assert (shown, [(one.name, json.loads(one.arguments)) for one in calls]) == ("So:", 2 * [("f", GIVEN)])
        assert read(rules, call[: len(call) // 2], size) == ("", [])
    other = call.replace("f(", "g(").replace("=f>", "=g>").replace('"f"', '"g"').replace(":f{", ":g{").replace("f[A", "g[A")
    assert read(rules, other.replace(">f\n", ">g\n"), 1000)[1] == []
    with served(pair(speaks(call), TOKENIZER), chat_template=f"{{# {template} #}}{BODY}") as server:
        body = {"messages": ASKED, "tools": [F]}
        (made,) = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()["choices"][0]["message"]["tool_calls"]
        assert json.loads(made["function"]["arguments"]) == GIVEN
        odd = tool("f", x={"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True})
        for given, status in ((F, 200), (odd, 200 if form.form in ("args", "function") else 400)):
            bound = httpx.post(f"{server.url}/v1/chat/completions", json={**body, "tools": [given], "guided_regex": "a"})
            assert (bound.status_code, bound.json().get("error", {}).get("param", "tools")) == (status, "tools"), bound.text


def test_references_lead_to_their_own_schema() -> None:
    inner = {"$defs": {"x": {"const": {"$ref": "#/left"}}}, "properties": {"a": {"$ref": "#/$defs/x"}, "b": {"$ref": "#"}}}
    rules = CallRules(HERMES, {"f", "g"}, forced=True, parallel=True)
    moved = forced_schema(rules, {"g": {}, "f": inner})["$defs"]["tool1"]
    assert moved["properties"] == {"a": {"$ref": "#/$defs/tool1/$defs/x"}, "b": {"$ref": "#/$defs/tool1"}}
    assert moved["$defs"] == inner["$defs"]


# ── with the official client ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module", params=[HERMES, LLAMA, MISTRAL], ids=["hermes", "llama", "mistral"])
def forced(request: Any) -> Iterator[tuple[Served, CallFormat]]:
    """A server of a model that says anything."""
    pytest.importorskip("llguidance")
    with served(pair(legible(0), TOKENIZER), chat_template=TEMPLATES[request.param] + BODY) as running:
        yield running, request.param


def create(server: Served, **fields: Any) -> Any:
    return server.client.chat.completions.create(model="tiny", **{"messages": ASKED, "tools": [WEATHER, TIME], **fields})


def test_forced_calls_keep_to_the_schema_and_to_the_distribution(forced: tuple[Served, CallFormat]) -> None:
    server, form = forced
    named = {"type": "function", "function": {"name": "weather"}}
    fields: dict[str, Any] = {"tool_choice": named, "n": 4, "seed": 3, "parallel_tool_calls": False}
    answer = create(server, **fields)
    assert {choice.finish_reason for choice in answer.choices} == {"tool_calls"}
    cities = [json.loads(choice.message.tool_calls[0].function.arguments)["city"] for choice in answer.choices]
    assert len(set(cities)) > 1
    assert all(choice.message.content is None and len(choice.message.tool_calls) == 1 for choice in answer.choices)
    plain = create(server, **fields, extra_body={"speculation": "off"})
    assert [choice.message.tool_calls[0].function.arguments for choice in plain.choices] == [
        choice.message.tool_calls[0].function.arguments for choice in answer.choices
    ]
    # The same by the library, under the grammar that is documented, behind what begins a call.
    rules = CallRules(form, {"weather"}, forced=True, parallel=False)
    grammar = Grammar("json_schema", json.dumps(forced_schema(rules, {"weather": WEATHER["function"]["parameters"]})))
    prompt = "(weather)(time)<user>hi<assistant>" + form.begun
    samples = server.shoal.generate(prompt, 4, seed=3, grammar=grammar, max_new_tokens=999, lookahead=4)[0].samples
    said = [json.loads(sample.text)[0] if form.listed else json.loads(sample.text) for sample in samples]
    assert [call[form.arguments]["city"] for call in said] == cities
    assert answer.usage.completion_tokens == sum(len(sample.token_ids) for sample in samples)
    assert answer.usage.prompt_tokens == len(prompt)


def test_a_forced_call_is_as_long_as_it_is(forced: tuple[Served, CallFormat]) -> None:
    """A least number of tokens, as a client's default, neither ends it in an error nor makes more calls; it is named."""
    server, _ = forced
    named = {"type": "function", "function": {"name": "weather"}}
    strict = [{**one, "function": {**one["function"], "strict": True}} for one in (WEATHER, TIME)]
    for more in ({"tool_choice": named, "parallel_tool_calls": False}, {"tool_choice": "required"}):
        fields: dict[str, Any] = {"messages": ASKED, "tools": strict, "seed": 3, "max_tokens": 400, "n": 2, **more}
        free, least = (
            server.post("/v1/chat/completions", prompt=None, **fields, **own) for own in ({}, {"min_tokens": 300})
        )
        assert (free.status_code, least.status_code) == (200, 200), least.text
        said = [
            [[call["function"] for call in one["message"]["tool_calls"]] for one in answer.json()["choices"]]
            for answer in (free, least)
        ]
        assert said[0] == said[1]
        assert "x-shoal-ignored" not in free.headers
        assert least.headers["x-shoal-ignored"] == "min_tokens"
    text = server.post("/v1/chat/completions", prompt=None, messages=ASKED, min_tokens=300, max_tokens=400, seed=3)
    assert (text.headers.get("x-shoal-ignored"), text.json()["usage"]["completion_tokens"] >= 300) == (None, True)


ONLY = {"type": "function", "function": {"name": "time"}}


@pytest.mark.slow(but=["llama-True"])
@pytest.mark.parametrize("flat", [True, False])
def test_only_allowed_tools_are_called_and_all_are_shown(forced: tuple[Served, CallFormat], flat: bool) -> None:
    """As OpenAI documents it for chats and for /v1/responses; clients send both forms to both."""
    own: dict[str, Any] = {"mode": "required", "tools": [{"type": "function", "name": "time"} if flat else ONLY]}
    choice: Any = {"type": "allowed_tools", **(own if flat else {"allowed_tools": own})}
    answer = create(forced[0], tool_choice=choice, n=8, seed=6, max_tokens=400)
    calls = [call.function for one in answer.choices for call in one.message.tool_calls]
    assert {call.name for call in calls} == {"time"}
    assert all([*json.loads(call.arguments)] == ["zone"] for call in calls)
    assert answer.usage.prompt_tokens == len("(weather)(time)<user>hi<assistant>" + forced[1].begun)
    named = create(forced[0], tool_choice=own["tools"][0], seed=6, max_tokens=400)
    assert named.choices[0].message.tool_calls[0].function.name == "time"


@pytest.mark.parametrize(("template", "call"), [
    ("<tool_call>", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    ("<tool_call><function=x><parameter=y>", "<tool_call>\n<function=f>\n</function>\n</tool_call>"),
])  # fmt: skip
def test_a_call_of_a_tool_that_is_not_allowed_is_text(template: str, call: str) -> None:
    with served(pair(speaks(call), TOKENIZER), chat_template=f"{{# {template} #}}{BODY}") as server:
        for name, found in (("f", 1), ("time", 0)):
            own = {"mode": "auto", "tools": [{"type": "function", "function": {"name": name}}]}
            choice = {"type": "allowed_tools", "allowed_tools": own}
            message = create(server, tools=[tool("f"), TIME], tool_choice=choice).choices[0].message
            assert (len(message.tool_calls or ()), message.content) == (found, None if found else call)


def test_some_tool_is_called_where_one_is_required(forced: tuple[Served, CallFormat]) -> None:
    server, _ = forced
    answer = create(server, tool_choice="required", n=8, seed=6)
    for choice in answer.choices:
        for call in choice.message.tool_calls:
            arguments = json.loads(call.function.arguments)
            assert [*arguments] == (["city"] if call.function.name == "weather" else ["zone"])
    assert {choice.message.tool_calls[0].function.name for choice in answer.choices} == {"weather", "time"}
    chunks = [*create(server, tool_choice="required", n=8, seed=6, stream=True)]
    streamed: dict[int, list[tuple[str, str]]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or ():
                streamed.setdefault(choice.index, []).append((call.function.name, call.function.arguments))
    assert streamed == {
        choice.index: [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        for choice in answer.choices
    }


@pytest.mark.slow(but=["llama"])
def test_several_calls_are_forced_where_the_format_has_several(forced: tuple[Served, CallFormat]) -> None:
    """Hermes' format writes them one behind the other; `parallel_tool_calls: false` and a named tool have one."""
    server, form = forced
    fields: dict[str, Any] = {"n": 4, "seed": 8, "tools": [TIME], "tool_choice": "required", "max_tokens": 400}
    drafted = create(server, **fields)
    plain = create(server, **fields, extra_body={"speculation": "off"})
    calls = [[call.function.arguments for call in choice.message.tool_calls] for choice in drafted.choices]
    assert calls == [[call.function.arguments for call in choice.message.tool_calls] for choice in plain.choices]
    assert (max(map(len, calls)) > 1) == (form is not LLAMA)
    counts = drafted.usage.choices
    assert sum(each["accepted"] for each in counts) > 20
    assert {each["drafted"] for each in plain.usage.choices} == {0}
    assert [each["completion_tokens"] for each in counts] == [each["completion_tokens"] for each in plain.usage.choices]
    if form is HERMES:  # the same by the library, under the grammar that is documented
        rules = CallRules(form, {"time"}, forced=True, parallel=True)
        schema = json.dumps(forced_schema(rules, {"time": TIME["function"]["parameters"]}))
        grammar = Grammar("json_schema", schema, between=form.between, behind=form.behind)
        prompt = "(time)<user>hi<assistant>" + form.begun
        samples = server.shoal.generate(prompt, 4, seed=8, grammar=grammar, max_new_tokens=400, lookahead=4)[0].samples
        assert [len(sample.token_ids) for sample in samples] == [each["completion_tokens"] for each in counts]
    named = {"type": "function", "function": {"name": "time"}}
    for more in ({"parallel_tool_calls": False}, {} if form is MISTRAL else {"tool_choice": named}):
        one = create(server, **{**fields, **more})
        assert {len(choice.message.tool_calls) for choice in one.choices} == {1} or not more


def test_a_call_that_is_cut_is_no_call(forced: tuple[Served, CallFormat]) -> None:
    choice = create(forced[0], tool_choice="required", max_tokens=5, seed=1).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls, choice.message.content) == ("length", None, "")


def test_a_call_that_is_cut_behind_another_is_no_content() -> None:
    one = '{"name": "time", "arguments": {"zone": 2}}'
    whole = f"{one}{HERMES.between}{one}"
    for forced in (True, False):
        before = "" if forced else HERMES.begun
        for end in range(len(one), len(whole)):
            rules = CallRules(HERMES, {"time"}, forced=forced, parallel=True)
            shown, calls = read(rules, before + whole[:end], 3)
            assert (shown, calls) == ("", [TWO]), whole[:end]


TWO_CALLS = 'Both.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n' \
    '<tool_call>\n{"name": "time", "arguments": {"zone": 1}}\n</tool_call>'  # fmt: skip


@pytest.fixture(scope="module")
def free() -> Iterator[Served]:
    """A server of a model that calls two tools."""
    with served(pair(speaks(TWO_CALLS), TOKENIZER), chat_template=TEMPLATES[HERMES] + BODY) as running:
        yield running


def test_calls_that_a_model_makes_by_itself(free: Served) -> None:
    answer = create(free, n=2)
    for choice in answer.choices:
        assert (choice.message.content, choice.finish_reason) == ("Both.", "tool_calls")
        called = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
        assert called == [("weather", {"city": "Rome"}), ("time", {"zone": 1})]
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls]
    assert len(set(ids)) == 4
    with free.client.chat.completions.stream(model="tiny", messages=ASKED, tools=[WEATHER, TIME]) as stream:
        final = stream.get_final_completion().choices[0]
    assert (final.message.content, final.finish_reason) == ("Both.", "tool_calls")
    assert [call.function.arguments for call in final.message.tool_calls or ()] == ['{"city": "Rome"}', '{"zone": 1}']
    first = create(free, parallel_tool_calls=False).choices[0].message
    assert [call.function.name for call in first.tool_calls] == ["weather"]


@pytest.mark.parametrize("arguments", ['{"city": "\\ud83d"}', '{"city": 1e999, "x":1.10}', '{"city":\t"\u2028"}'])
def test_arguments_are_the_text_of_the_model(arguments: str) -> None:
    """Half a surrogate pair and a number beyond doubles too; whatever a reader of events takes for a line is escaped."""
    said = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    item = {"input": "hi", "tools": [{"type": "function", **WEATHER["function"]}]}
    with served(pair(speaks(said), TOKENIZER), chat_template=TEMPLATES[HERMES] + BODY) as server:
        for stream in (False, True):
            fields = {"messages": ASKED, "tools": [WEATHER], "stream": stream}
            chat = httpx.post(f"{server.url}/v1/chat/completions", json=fields)
            written = json.dumps(arguments, ensure_ascii=True)[1:-1]
            assert (chat.status_code, written in chat.text) == (200, True), chat.text
            response = httpx.post(f"{server.url}/v1/responses", json={**item, "stream": stream})
            assert (response.status_code, written in response.text) == (200, True)
            assert all(line.startswith(("data: ", "event: ", "{")) for line in chat.text.splitlines() if line)


ONE_CALL = '{"name": "weather", "KEY": {"city": "Rome"}}'


@pytest.fixture(scope="module")
def tagged() -> Any:
    """A tokenizer whose tags of calls are special tokens, as those of Hermes, Mistral and Llama 3 are."""
    tokenizer = tiny_tokenizer()
    names = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return tokenizer


@pytest.mark.slow(but=["form0-said0-False"])
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("form", "said"), [
    (HERMES, f"<tool_call>\n{ONE_CALL}\n</tool_call>\n<tool_call>\n{ONE_CALL}\n</tool_call>"),
    (MISTRAL, f"[TOOL_CALLS] [{ONE_CALL}, {ONE_CALL}]"), (LLAMA, f"<|python_tag|>{ONE_CALL}"), (LLAMA, ONE_CALL),
])  # fmt: skip
def test_a_call_or_a_text_that_fits(form: CallFormat, said: str, special: bool, tagged: Any) -> None:
    """A grammar beside tools leaves calls possible, in the model's own format, and binds the text."""
    pytest.importorskip("llguidance")
    tokenizer = tagged if special else TOKENIZER
    schema = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}
    fields: Any = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    called = said.replace("KEY", form.arguments)
    for text in (called, '{"a": 22}', '{"a": 3}'):
        speaker = scripted(speaks(text, tokenizer=tokenizer), len(tokenizer), 2048)
        with served(Shoal(speaker, speaker, tokenizer), chat_template=TEMPLATES[form] + BODY) as server:
            choice = create(server, **fields).choices[0]
            calls = [call.function.arguments for call in choice.message.tool_calls or ()]
            if text == called:
                assert calls == said.count("Rome") * ['{"city": "Rome"}']
                assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
                pattern = create(server, extra_body={"guided_regex": "[/a]+"}).choices[0].message
                assert bool(pattern.tool_calls) or said == ONE_CALL
            else:
                assert (json.loads(choice.message.content)["a"] in (1, 22), calls) == (True, [])
    if special:
        speaker = scripted(speaks(f"So: {called}", tokenizer=tokenizer), len(tokenizer), 2048)
        with served(Shoal(speaker, speaker, tokenizer), chat_template=TEMPLATES[form] + BODY) as server:
            choice = create(server).choices[0]
            assert (choice.message.content, bool(choice.message.tool_calls)) == ("So:", True) or said == ONE_CALL


def test_without_tools_the_same_text_is_text(free: Served) -> None:
    for fields in ({"tool_choice": "none"}, {"tools": openai.NOT_GIVEN}, {"tools": []}):
        choice = create(free, **fields).choices[0]
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (TWO_CALLS, None, "stop")


def test_a_conversation_goes_on_with_what_the_tool_said(free: Served) -> None:
    message = create(free).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "21"}
    answer = create(free, messages=[*ASKED, message.model_dump(), result], tool_choice="none")
    prompt = "<user>hi<assistant>Both.weather:Rometime:<tool>21<assistant>"
    assert answer.usage.prompt_tokens == len(prompt)


DEEP = functools.reduce(lambda inner, _: {"items": inner}, range(400), dict[str, Any]())


@pytest.mark.parametrize(("fields", "param"), [
    ({"tool_choice": "required", "tools": None}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [ONLY, {"type": "function", "name": "x"}]}}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [ONLY]}}},
     "tool_choice.allowed_tools.mode"),
    ({"tool_choice": {"type": "custom", "custom": {"name": "time"}}}, "tool_choice.custom"),
    ({"tools": [TIME, TIME]}, "tools"),
    ({"tools": [tool("bad name")]}, "tools.0.function.name"),
    ({"tools": [tool("f", x={"not": {}})], "tool_choice": "required"}, "tools"),
    ({"tools": [tool("f", x=DEEP)], "tool_choice": "required"}, "tools"),
    ({"tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [
        {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}]}, "messages.0.tool_calls"),
])  # fmt: skip
def test_what_cannot_be_called_is_refused(free: Served, fields: dict[str, Any], param: str) -> None:
    body = {"messages": ASKED, "tools": [WEATHER, TIME], **fields}
    response = httpx.post(f"{free.url}/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_parts_that_are_no_text_are_refused_in_words(free: Served) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}
    error = httpx.post(f"{free.url}/v1/chat/completions", json=body).json()["error"]
    assert (error["param"], "This server takes text, no images" in error["message"]) == ("messages.0.content.0.type", True)


def prompt_of(server: Served, messages: list[Any], **fields: Any) -> tuple[str, str]:
    """The prompt that the template makes, and the header that names what was passed over."""
    body = {"messages": messages, "max_tokens": 1, "return_token_ids": True, **fields}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return TOKENIZER.decode(answer.json()["prompt_token_ids"]), answer.headers.get("x-shoal-ignored", "")


def called(arguments: Any, **more: Any) -> Any:
    function = {"name": "f", "arguments": arguments, **more}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "type": "function", "function": function}]}


@pytest.mark.parametrize(("arguments", "shown"), [
    ('{"city": "Ro', ""), ("[1]", ""), ("not json", ""), ("", ""), ('{"city": 1e999}', ""), ("[" * 9000, ""), ('{"city": NaN}', ""),
    ('{"city": "\\ud83d!"}', "?!"), ({"city": "Ro"}, "Ro"), ('{"city": "Ro"}', "Ro"),
])  # fmt: skip
def test_a_broken_call_ends_no_conversation(free: Served, arguments: Any, shown: str) -> None:
    """The template gets an object, whatever the model has written, or a client made of it."""
    prompt, _ = prompt_of(free, [*ASKED, called(arguments)])
    assert prompt == f"<user>hi<assistant>f:{shown}<assistant>"
    item = {"type": "function_call", "call_id": "x", "name": "f", "arguments": arguments}
    back = httpx.post(f"{free.url}/v1/responses", json={"input": [{"role": "user", "content": "x"}, item]})
    assert back.status_code == 200, back.text


def test_an_answer_may_be_sent_back_with_all_that_it_has(free: Served) -> None:
    """Fields that no template reads are passed over and named, of other providers too."""
    call = {"index": 0, **called("{}", parsed_arguments={})["tool_calls"][0]}
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "developer", "content": [part, {"type": "refusal", "refusal": "y"}], "id": "m1"},
        {"role": "assistant", "content": "a", "refusal": None, "parsed": {}, "reasoning_details": [], "finish_reason": "stop",
         "tool_calls": [], "tim\u00e9\r\nx: y": 1},
        {"role": "assistant", "content": None}, {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": None, "tool_call_id": "x", "is_error": True},
    ]  # fmt: skip
    tools = [{**TIME, "cache_control": {}, "function": {**TIME["function"], "x": 1}}]
    prompt, ignored = prompt_of(free, messages, tools=tools)
    assert prompt == "(time)<system>xy<assistant>a<assistant><assistant>f:<tool><assistant>"
    names = {"content.cache_control", "finish_reason", "id", "is_error", "parsed", "reasoning_details", "tim???x??y",
             "tool_calls.function.parsed_arguments", "tool_calls.index"}  # fmt: skip
    assert {*ignored.split(", ")} == {*(f"messages.{name}" for name in names), "tools.cache_control", "tools.function.x"}
    item = {"role": "user", "content": [{"type": "input_text", "text": "x", "cache_control": 1}], "at": 1}
    thought = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "x"}], "encrypted_content": "x"}
    back = httpx.post(f"{free.url}/v1/responses", json={"input": [thought, item]})
    assert back.status_code == 200, back.text
    assert back.headers["x-shoal-ignored"] == "input.at, input.content.cache_control, input.encrypted_content"


def test_messages_of_other_apis_mean_what_they_mean_here(free: Served) -> None:
    """Parts by other names, texts in lists, thoughts in parts, calls without ids, citations."""
    thought, said = {"type": "thinking", "thinking": "Hm", "signature": "x"}, {"type": "output_text", "text": "d"}
    other = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm"}]}
    messages = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, "b", {"text": "c"}]},
        {"role": "assistant", "content": [thought, said]},
        {"role": "assistant", "content": [other, {"type": "text", "text": "e"}], "annotations": [{"type": "url_citation"}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": None}}]},
        {"role": "tool", "content": "1"},
    ]
    prompt, ignored = prompt_of(free, messages)
    assert prompt == "<user>abc<assistant>d<assistant>e<assistant>f:<tool>1<assistant>"
    assert ignored == "messages.content.signature"
    assert Message.model_validate(messages[1]).plain()["reasoning_content"] == "Hm"
    assert Message.model_validate(messages[2]).plain()["reasoning_content"] == "Hm"
    cited = {"type": "output_text", "text": "x", "annotations": [{"type": "url_citation"}]}
    back = httpx.post(
        f"{free.url}/v1/responses",
        json={"input": [{"role": "assistant", "content": [cited]}, {"role": "user", "content": "y"}]},
    )
    assert back.status_code == 200, back.text


def test_a_template_that_knows_developers_sees_them() -> None:
    with served(pair(), chat_template="{# developer #}" + BODY) as server:
        assert prompt_of(server, [{"role": "developer", "content": "x"}])[0] == "<developer>x<assistant>"


def test_a_message_may_be_continued(free: Served) -> None:
    """By vLLM's fields, and by the mark that Mistral's and DeepSeek's clients send."""
    messages = [*ASKED, {"role": "assistant", "content": "So be"}]
    for fields in ({"continue_final_message": True}, {"continue_final_message": True, "add_generation_prompt": False}):
        assert prompt_of(free, messages, **fields)[0] == "<user>hi<assistant>So be"
    assert prompt_of(free, [*ASKED, {**messages[1], "prefix": True}])[0] == "<user>hi<assistant>So be"
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    with served(pair(), chat_template=template) as server:
        assert prompt_of(server, ASKED)[0] == "<user>hi<a>"
        assert prompt_of(server, ASKED, add_generation_prompt=False)[0] == "<user>hi"
    both = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    refused = httpx.post(f"{free.url}/v1/chat/completions", json=both)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "continue_final_message")


def test_the_tokenizers_end_ends_a_turn_whatever_the_config_names() -> None:
    model = scripted(speaks("Yes.", ends=True), len(TOKENIZER), 2048)
    model.hf.config.eos_token_id = 7
    for given, own in ((BODY, None), (None, BODY)):
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = own
        with served(Shoal(model, model, tokenizer), chat_template=given) as server:
            choice = create(server, tools=openai.NOT_GIVEN, max_tokens=99).choices[0]
            assert (choice.message.content, choice.finish_reason) == ("Yes.", "stop")


def test_every_chunk_has_the_usage_so_far(free: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = {"messages": ASKED, "n": 2, "stream": True, "stream_options": options, "max_tokens": 9}
    text = httpx.post(f"{free.url}/v1/chat/completions", json=fields).text
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert (counts[0], counts[-2:], counts == sorted(counts)) == (0, [18, 18], True)
    assert all(one["usage"]["total_tokens"] == count + 19 for one, count in zip(chunks, counts, strict=True))


def test_a_template_without_tools_is_told() -> None:
    """Calls that the grammar alone can make are made: the tools, calls and their results are told as texts."""
    pytest.importorskip("llguidance")
    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    call = {"id": "x", "type": "function", "function": {"name": "time", "arguments": '{"zone": 1}'}}
    past = [{"role": "system", "content": "S"}, *ASKED, {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "x", "content": "12"}]  # fmt: skip
    shown = "\n".join(json.dumps(one) for one in (WEATHER, TIME))
    told = f"Functions that may be called:\n<tools>\n{shown}\n</tools>\nA call is written so:\n<tool_call>\n" \
        '{"name": FUNCTION, "arguments": OBJECT}\n</tool_call>'  # fmt: skip
    said = '<tool_call>\n{"name": "time", "arguments": {"zone": 1}}\n</tool_call>'
    with served(pair(), chat_template=plain) as server:
        body = {"messages": ASKED, "tools": [WEATHER, TIME]}
        error = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()["error"]
        assert (error["param"], "--chat-template" in error["message"]) == ("tools", True)
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            for messages, prompt in (
                (ASKED, f"<system>{told}<user>hi"),
                (past, f"<system>S\n\n{told}<user>hi<assistant>{said}<user><tool_response>\n12\n</tool_response>"),
            ):
                fields = {**body, "messages": messages, "tool_choice": choice, "seed": 4, "max_tokens": 400}
                answer = httpx.post(f"{server.url}/v1/chat/completions", json=fields)
                assert answer.headers["x-shoal-told"] == "tools"
                assert answer.json()["choices"][0]["message"]["tool_calls"], answer.text
                assert answer.json()["usage"]["prompt_tokens"] == len(prompt + "<assistant><tool_call>\n")
    two = [*past[:-1], past[-1], {**past[-1], "content": [{"type": "text", "text": "13"}]}, *ASKED]
    results = "<tool_response>\n12\n</tool_response>\n\n<tool_response>\n13\n</tool_response>\n\nhi"
    turns = "{% for m in messages %}{% if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    turns += f"{{{{ raise_exception('in turns') }}}}{{% endif %}}{plain.removeprefix('{% for m in messages %}')}"
    with served(pair(), chat_template=turns) as server:
        for messages, prompt in (
            (ASKED, f"<user>{told}\n\nhi"),
            (two, f"<user>S\n\n{told}\n\nhi<assistant>{said}<user>{results}"),
        ):
            fields = {**body, "messages": messages, "tool_choice": "required", "seed": 4, "max_tokens": 400}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=fields)
            assert answer.json()["choices"][0]["message"]["tool_calls"], answer.text
            assert answer.json()["usage"]["prompt_tokens"] == len(prompt + "<assistant><tool_call>\n")
