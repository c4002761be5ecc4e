"""/v1/responses, with the official client: the same samples as /v1/chat/completions, as items and typed events.

Tests of: serve.item_models, serve.item_format, serve.response_models, serve.item_response,
serve.tool_calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from serving import Served, legible, pair, served
from shoal.serve.call_reader import CallReader
from shoal.serve.item_format import ItemWriter
from shoal.serve.tool_calls import HERMES, LLAMA, MISTRAL, Call, CallRules
from tool_calls import TOKENIZER, speaks

TEMPLATE = """{# <tool_call> #}{% for t in tools or [] %}({{ t.function.name }}){% endfor %}{% for m in messages %}<{{ m.role }}>\
{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}:{{ c.function.arguments.city }}{% endfor %}\
{% endfor %}<assistant>"""
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
LOGPROBS: Any = ["message.output_text.logprobs"]
WEATHER: Any = {
    "type": "function", "name": "weather", "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo", "Lima"]}}, "required": ["city"],
        "additionalProperties": False,
    },
}  # fmt: skip
NESTED: Any = {"type": "function", "function": {name: WEATHER[name] for name in ("name", "parameters")}}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(pair(), chat_template=TEMPLATE, max_tokens=100) as running:
        yield running


def create(server: Served, given: Any = "hi", **fields: Any) -> Any:
    """An answer; fields that the client does not know go into the body as well."""
    known = {"instructions", "max_output_tokens", "temperature", "top_p", "text", "tools", "tool_choice", "include",
             "top_logprobs", "metadata", "store", "parallel_tool_calls", "stream"}  # fmt: skip
    own = {name: fields.pop(name) for name in [*fields] if name not in known}
    return server.client.responses.create(model="tiny", input=given, extra_body=own, **fields)


def chat(server: Served, messages: Any, **fields: Any) -> Any:
    return server.post("/v1/chat/completions", prompt=None, messages=messages, **fields).json()


def streamed(server: Served, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each checked against the client's own types, and numbered."""
    response = httpx.post(f"{server.url}/v1/responses", json={"input": "hi", "stream": True, **body})
    assert response.status_code == 200, response.text
    blocks = [block.split("\n") for block in response.text.split("\n\n") if block]
    found = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [one["type"] for one in found]
    assert [one["sequence_number"] for one in found] == [*range(len(found))]
    for one in found:
        EVENTS.validate_python(one)
    return found


def without_names(answer: Any) -> dict[str, Any]:
    """An answer without its ids and times."""
    body = answer if isinstance(answer, dict) else answer.model_dump(exclude_unset=True)
    output = [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in body["output"]]
    return {**body, "output": output, "id": None, "created_at": None, "completed_at": None}


# ── the same as a chat ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("given", "fields", "messages"), [
    ("hi", {}, [{"role": "user", "content": "hi"}]),
    ("hi", {"instructions": "Be brief."}, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]),
    ([{"role": "developer", "content": "d"},
      {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
      {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
       "content": [{"type": "output_text", "text": "c", "annotations": [], "logprobs": []}]},
      {"role": "user", "content": "e"}], {},
     [{"role": "developer", "content": "d"}, {"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"},
      {"role": "user", "content": "e"}]),
])  # fmt: skip
def test_a_seed_gives_the_sample_of_the_same_chat(server: Served, given: Any, fields: Any, messages: Any) -> None:
    for speculation in ("auto", "off"):
        common = {"seed": 7, "temperature": 0.9, "top_p": 0.95, "speculation": speculation, "stop_token_ids": [50]}
        answer = create(server, given, max_output_tokens=40, **fields, **common)
        other = chat(server, messages, max_tokens=40, **common)
        assert answer.output_text == other["choices"][0]["message"]["content"]
        assert answer.usage.choices == other["usage"]["choices"]
        took = answer.usage.choices[0]
        assert (took["drafted"] > 0) is (speculation == "auto")
        assert (
            took["rounds"] == took["completion_tokens"]
            if speculation == "off"
            else took["rounds"] < took["completion_tokens"]
        )
        assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == tuple(
            other["usage"][f"{kind}_tokens"] for kind in ("prompt", "completion", "total")
        )


def test_an_answer_is_what_the_client_takes_it_for(server: Served) -> None:
    fields: dict[str, Any] = {
        "max_output_tokens": 12, "temperature": 0.5, "top_p": 0.9, "metadata": {"a": "b"}, "store": False, "seed": 1,
        "instructions": "Say.",
    }  # fmt: skip
    raw = httpx.post(f"{server.url}/v1/responses", json={"input": "hi", **fields}).json()
    answer = Response.model_validate(raw)
    assert (answer.status, answer.store, answer.object, answer.model) == ("incomplete", False, "response", "tiny")  # type: ignore[attr-defined]
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert raw["usage"]["choices"][0]["ended_by"] == "length"
    assert [item.type for item in answer.output] == ["message"]
    for name in ("max_output_tokens", "temperature", "top_p", "metadata", "instructions"):
        assert getattr(answer, name) == fields[name]
    plain = Response.model_validate(httpx.post(f"{server.url}/v1/responses", json={"input": "hi"}).json())
    assert (plain.temperature, plain.top_p, plain.metadata, plain.tools) == (1.0, 1.0, {}, [])
    assert (plain.tool_choice, plain.max_output_tokens) == ("auto", None)


def test_a_text_that_ends_is_completed(server: Served) -> None:
    answer = create(server, text={"format": {"type": "json_schema", "name": "n", "schema": {"enum": ["yes", "no"]}}})
    assert (answer.status, answer.output[0].status, answer.incomplete_details) == ("completed", "completed", None)
    assert json.loads(answer.output_text) in ("yes", "no")
    assert answer.completed_at >= answer.created_at
    assert answer.text.format.model_dump(by_alias=True, exclude_unset=True)["schema"] == {"enum": ["yes", "no"]}
    said = create(server, text={"format": {"type": "json_object"}, "verbosity": "low"}, seed=2)
    assert said.output_text.startswith("{")
    body = {"input": "hi", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"not": {}}}}}
    error = httpx.post(f"{server.url}/v1/responses", json=body).json()["error"]
    assert error["param"] == "text.format"


def test_what_was_ignored_or_lowered_is_named(server: Served) -> None:
    body: dict[str, Any] = {
        "input": "hi", "max_output_tokens": 10**6, "temperature": 0, "user": "me", "store": True, "reasoning": {"effort": "low"},
        "text": {"verbosity": "low"}, "stream_options": {"include_obfuscation": False}, "include": ["reasoning.encrypted_content"],
        "background": False, "truncation": "disabled", "previous_response_id": None,
    }  # fmt: skip
    answer = httpx.post(f"{server.url}/v1/responses", json=body, headers={"x-request-id": "mine"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-shoal-clamped"] == "max_output_tokens=100"
    assert answer.headers["x-request-id"] == "mine"
    assert set(answer.headers["x-shoal-ignored"].split(", ")) == {
        "user", "store", "reasoning", "text.verbosity", "stream_options.include_obfuscation",
    }  # fmt: skip
    assert answer.json()["usage"]["output_tokens"] == 100
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "phone"}}}
    wanted = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    forced = {"tools": [WEATHER], "tool_choice": "required", "min_tokens": 99}
    for more, names in (
        ({"text": wanted}, "text.format.format=phone"),
        ({"text": wanted, "user": "me"}, "user, text.format.format=phone"),
        ({"user": "me", **forced}, "user, min_tokens"),
    ):
        answer = httpx.post(f"{server.url}/v1/responses", json={"input": "hi", "max_output_tokens": 9, **more})
        assert answer.headers["x-shoal-ignored"] == names


def test_log_probabilities_and_details_are_those_of_a_chat(server: Served) -> None:
    fields: dict[str, Any] = {"seed": 4, "shoal": {"rounds": True}}
    answer = create(server, include=LOGPROBS, top_logprobs=2, max_output_tokens=20, **fields)
    messages = [{"role": "user", "content": "hi"}]
    [choice] = chat(server, messages, logprobs=True, top_logprobs=2, max_tokens=20, **fields)["choices"]
    part = answer.output[0].content[0]
    assert [one.model_dump() for one in part.logprobs] == choice["logprobs"]["content"]
    assert answer.shoal == choice["shoal"]
    assert len(answer.shoal["by_round"]) == answer.usage.choices[0]["rounds"]
    body = {"include": LOGPROBS, "top_logprobs": 2, "max_output_tokens": 20, **fields}
    events = streamed(server, **body)
    deltas = [one for one in events if one["type"] == "response.output_text.delta"]
    assert [one for delta in deltas for one in delta["logprobs"]] == choice["logprobs"]["content"]
    assert all("".join(one["token"] for one in delta["logprobs"]) == delta["delta"] for delta in deltas)
    details = events[-1]["response"]["shoal"]
    assert details == {**choice["shoal"], "mean_logprob": pytest.approx(choice["shoal"]["mean_logprob"])}
    assert create(server, max_output_tokens=2).output[0].content[0].logprobs == []


# ── streams ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_stream_tells_the_answer_in_typed_events(server: Served) -> None:
    body = {"seed": 7, "max_output_tokens": 40}
    whole = httpx.post(f"{server.url}/v1/responses", json={"input": "hi", **body}).json()
    events = streamed(server, **body)
    kinds = [one["type"].removeprefix("response.") for one in events]
    rounds = whole["usage"]["choices"][0]["rounds"]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * rounds,
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    assert 1 < rounds < whole["usage"]["output_tokens"]
    text = whole["output"][0]["content"][0]["text"]
    assert "".join(one["delta"] for one in events if "delta" in one) == text == events[-4]["text"]
    assert without_names(events[-1]["response"]) == without_names(whole)
    assert (events[0]["response"]["status"], events[0]["response"]["output"]) == ("in_progress", [])
    ids = {one["item_id"] for one in events if "item_id" in one} | {one["item"]["id"] for one in events if "item" in one}
    assert ids == {events[-1]["response"]["output"][0]["id"]}
    assert {one["response"]["id"] for one in events if "response" in one} == {events[-1]["response"]["id"]}


def test_the_client_puts_a_stream_together(server: Served) -> None:
    whole = create(server, seed=7, max_output_tokens=30)
    with server.client.responses.stream(
        model="tiny", input="hi", max_output_tokens=30, extra_body={"seed": 7}
    ) as stream:  # it checks the order of the events
        kinds = [event.type for event in stream]
    assert kinds[-1] == "response.incomplete"
    found = create(server, seed=7, max_output_tokens=30, stream=True)
    assert "".join(event.delta for event in found if event.type == "response.output_text.delta") == whole.output_text


def test_a_row_that_fails_while_it_is_streamed_says_so() -> None:
    script = legible(0)

    def breaks(ids: tuple[int, ...]) -> torch.Tensor:
        return script(ids) * (torch.nan if len(ids) > 25 else 1.0)

    with served(pair(breaks), chat_template=TEMPLATE) as server:
        events = streamed(server)
        assert events[-1]["type"] == "response.failed"
        answer = events[-1]["response"]
        assert (answer["status"], answer["error"]["code"]) == ("failed", "server_error")
        assert "NaN" in answer["error"]["message"]
        assert (answer["output"][0]["status"], len(answer["output"][0]["content"][0]["text"])) == ("incomplete", 26 - 17 - 2)
        with pytest.raises(openai.InternalServerError, match="NaN"):
            create(server)
        with pytest.raises(openai.BadRequestError):  # before there is a stream it has a status
            server.client.responses.create(model="tiny", input="x" * 3000, stream=True)


# ── tools ───────────────────────────────────────────────────────────────────────────────────────────────────────────


TWO_CALLS = 'Both.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\nand\n' \
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'  # fmt: skip
ITEMS = [
    ("message", "Both."),
    ("function_call", '{"city": "Rome"}'),
    ("message", "\nand"),
    ("function_call", '{"city": "Oslo"}'),
]


@pytest.fixture(scope="module")
def caller() -> Iterator[Served]:
    """A server of a model that calls a tool twice."""
    with served(pair(speaks(TWO_CALLS), TOKENIZER), chat_template=TEMPLATE) as running:
        yield running


def said(item: Any) -> tuple[str, str]:
    return item["type"], item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]


def test_calls_are_items_in_the_order_in_which_the_model_made_them(caller: Served) -> None:
    answer = create(caller, tools=[WEATHER])
    raw = answer.model_dump(exclude_unset=True)
    assert [said(item) for item in raw["output"]] == ITEMS
    Response.model_validate(raw)
    assert (answer.status, answer.tools[0].name, answer.parallel_tool_calls) == ("completed", "weather", True)
    assert {item["status"] for item in raw["output"]} == {"completed"}
    assert len({item["id"] for item in raw["output"]}) == 4
    events = streamed(caller, tools=[WEATHER])
    assert without_names(events[-1]["response"]) == without_names(raw)
    own = [one["type"].removeprefix("response.") for one in events if one.get("output_index") == 1]
    assert own == ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    places = [one["output_index"] for one in events if "output_index" in one]
    assert places == sorted(places)  # an item is done before the next one begins
    one = create(caller, tools=[WEATHER], parallel_tool_calls=False).model_dump()["output"]
    assert [item["type"] for item in one].count("function_call") == 1
    assert create(caller).output_text == TWO_CALLS
    assert create(caller, tools=[WEATHER], tool_choice="none").output_text == TWO_CALLS


@pytest.mark.parametrize(("name", "found"), [("weather", 2), ("time", 0)])
def test_calls_of_allowed_tools_alone_count(caller: Served, name: str, found: int) -> None:
    """And the answer tells the choice as it was sent; tools that are no functions are passed over."""
    tools = [WEATHER, {"type": "function", "name": "time", "parameters": None, "strict": None}]
    allowed = [{"type": "function", "name": name}, {"type": "mcp", "server_label": "x"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    answer = caller.post("/v1/responses", prompt=None, input="hi", tools=tools, tool_choice=choice)
    assert [one["type"] for one in answer.json()["output"]].count("function_call") == found
    assert (answer.json()["tool_choice"], answer.headers["x-shoal-ignored"]) == (choice, "tool_choice.tools.type=mcp")
    assert answer.json()["usage"]["input_tokens"] == len("(weather)(time)<user>hi<assistant>")
    Response.model_validate(answer.json())


def test_a_conversation_goes_on_with_what_the_function_returned(caller: Served) -> None:
    first = create(caller, tools=[WEATHER]).model_dump(exclude_unset=True)
    calls = [item for item in first["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "21"} for call in calls]
    given = [{"role": "user", "content": "hi"}, *first["output"], *results]
    answer = create(caller, given, tools=[WEATHER])
    prompt = "(weather)<user>hi<assistant>Both.weather:Rome<assistant>\nandweather:Oslo<tool>21<tool>21<assistant>"
    assert answer.usage.input_tokens == len(prompt)
    alone = create(caller, [*given[:1], calls[0], {**results[0], "output": [{"type": "input_text", "text": "21"}]}])
    assert alone.usage.input_tokens == len("<user>hi<assistant>weather:Rome<tool>21<assistant>")


def test_tools_that_are_no_functions_are_passed_over(server: Served) -> None:
    """Codex sends its own beside functions, and its instructions in two messages."""
    others: list[Any] = [{"type": "web_search"}, {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}}]
    own = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "be brief"}]}
    body = {"input": [own, {"role": "user", "content": "hi"}], "instructions": "be kind", "tools": [*others, WEATHER],
            "client_metadata": {"a": "b"}, "seed": 3, "max_output_tokens": 30}  # fmt: skip
    answer = httpx.post(f"{server.url}/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    ignored = "client_metadata, tools.type=custom, tools.type=web_search"
    assert answer.headers["x-shoal-ignored"] == ignored
    assert [tool["name"] for tool in answer.json()["tools"]] == ["weather"]
    messages = [{"role": "system", "content": "be kind\n\nbe brief"}, {"role": "user", "content": "hi"}]
    same = chat(server, messages, tools=[NESTED], seed=3, max_tokens=30)
    assert same["usage"]["prompt_tokens"] == answer.json()["usage"]["input_tokens"]
    apart = [messages[1], {"role": "developer", "content": "be brief"}, messages[1]]
    assert chat(server, apart, max_tokens=1)["usage"]["prompt_tokens"] == len("<user>hi<system>be brief<user>hi<assistant>")


def test_a_forced_call_is_that_of_the_same_chat(server: Served) -> None:
    named = {"type": "function", "name": "weather"}
    answer = create(server, tools=[WEATHER], tool_choice=named, seed=3)
    messages = [{"role": "user", "content": "hi"}]
    chosen = {"type": "function", "function": {"name": "weather"}}
    [choice] = chat(server, messages, tools=[NESTED], tool_choice=chosen, seed=3)["choices"]
    [call] = answer.output
    assert call.arguments == choice["message"]["tool_calls"][0]["function"]["arguments"]
    assert answer.tool_choice.name == "weather"
    text = {"format": {"type": "json_schema", "name": "weather", "schema": WEATHER["parameters"]}}  # as instructor asks
    assert create(server, tools=[WEATHER], tool_choice=named, text=text, seed=3).output[0].arguments == call.arguments
    plain = create(server, tools=[WEATHER], tool_choice="required", seed=3, speculation="off")
    assert plain.output[0].arguments == call.arguments
    assert (plain.usage.choices[0]["drafted"], answer.usage.choices[0]["drafted"] > 0) == (0, True)


@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL])
def test_items_do_not_depend_on_how_a_text_is_cut(form: Any) -> None:
    one = f'{{"name": "f", "{form.arguments}": {{"a": 1}}}}'
    call = form.opening + (f"[{one}]" if form.listed else one) + form.closing
    rules = CallRules(form, {"f"}, forced=False, parallel=True)
    for text in (f"a {call} b{call}{call}", f"{call} b", f"{call}", "a", "", f" {call} {call} "):
        seen = []
        for size in (1, 2, 3, 7, 1000):
            reader, writer = CallReader(rules), ItemWriter("k")
            for start in range(0, max(len(text), 1), size):
                writer.add(reader.pieces(text[start : start + size], start + size >= len(text)), [])
            writer.end("completed")
            seen.append([said(item) for item in writer.items])
        assert all(items == seen[0] for items in seen), (text, seen)
        assert sum(kind == "function_call" for kind, _ in seen[0]) == text.count('"name"')


def test_a_call_is_told_whole() -> None:
    events = ItemWriter("k").add([Call("f", "{}")], [])
    assert [one["sequence_number"] for one in events] == [0, 1, 2, 3]
    assert (events[0]["item"]["arguments"], events[-1]["item"]["arguments"]) == ("", "{}")


# ── what is not there ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("fields", "param", "said"), [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no answers"),
    ({"conversation": "conv_1"}, "conversation", "keeps no answers"),
    ({"background": True}, "background", "keeps no answers"),
    ({"prompt": {"id": "x"}}, "prompt", "keeps no prompts"),
    ({"n": 2}, "n", "/v1/chat/completions takes n"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice.type", "function"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice", "'other', which is not among"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
        {"type": "function", "name": "a"}, {"type": "function", "name": "b"}]}}, "tool_choice", "'a', 'b', which are not among"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}},
     "tool_choice", "allows no function"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0.type", "text"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input.0.content.0.type", "text"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "function_call_output"),
    ({"input": []}, "input", "minimum length 1"),
    ({"input": None}, "input", ""),
    ({"truncation": "auto"}, "truncation", "disabled"),
    ({"include": ["other"]}, "include.0", "logprobs"),
    ({"tools": [{"type": "function"}]}, "tools.0.name", "Missing required parameter: 'tools.0.name'"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name", "Missing required parameter"),
    ({"input": {"role": "user"}}, "input", "Invalid type for 'input': expected a string, but got an object"),
    ({"input": [{"role": "user", "content": {"a": 1}}]}, "input.0.content", "Invalid type for 'input.0.content'"),
    ({"input": [{"role": "assistant", "content": [{"type": "refusal"}]}]}, "input.0.content.0.text", "a string"),
    ({"top_logprobs": 30, "include": LOGPROBS}, "top_logprobs", "Expected a value <= 20"),
    ({"tools": [WEATHER], "include": LOGPROBS}, "include", "/v1/chat/completions"),
    ({"max_output_tokens": 0}, "max_output_tokens", "'max_output_tokens': integer below"),
    ({"input": "x" * 3000}, "input", "maximum context length"),
    ({"metadata": {"a": 1}}, "metadata.a", "16 texts"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata.16", "16 texts"),
    ({"stream_options": {"include_usage": True}, "stream": True}, "stream_options.include_usage", "unknown"),
    ({"max_tokens": 3}, "max_tokens", "unknown"),
    ({"model": "other"}, "model", "tiny"),
])  # fmt: skip
def test_what_is_absent_is_refused_by_its_name(server: Served, fields: dict[str, Any], param: str, said: str) -> None:
    for stream in (False, True):
        response = httpx.post(f"{server.url}/v1/responses", json={"input": "hi", "stream": stream, **fields})
        assert response.status_code == (404 if param == "model" else 400)
        error = response.json()["error"]
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        assert said in error["message"]
    assert server.worker.rows == 0


@pytest.mark.parametrize(("fields", "ignored"), [
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"include": ["web_search_call.results"]}, "include.web_search_call.results"),
    ({"include": ["reasoning.encrypted_content", "code_interpreter_call.outputs"]}, "include.code_interpreter_call.outputs"),
    ({"context_management": [{"type": "compaction", "compact_threshold": 1000}]}, "context_management"),
    ({"prompt_cache_options": {"mode": "auto"}}, "prompt_cache_options"),
])  # fmt: skip
def test_what_adds_nothing_here_is_ignored_and_named(server: Served, fields: dict[str, Any], ignored: str) -> None:
    body = {"input": "hi", "seed": 1, "max_output_tokens": 4}
    plain, answer = (httpx.post(f"{server.url}/v1/responses", json=body | more) for more in ({}, fields))
    assert (answer.status_code, answer.headers.get("x-shoal-ignored")) == (200, ignored), answer.text
    assert without_names(answer.json())["output"] == without_names(plain.json())["output"]


def test_an_answer_that_refused_may_be_sent_back(server: Served) -> None:
    """The official client keeps such parts in `output`."""
    said = [[{"type": kind, name: "no"}] for kind, name in (("refusal", "refusal"), ("output_text", "text"))]
    answers = [
        create(
            server, [{"role": "user", "content": "a"}, {"role": "assistant", "content": one}], max_output_tokens=4, seed=1
        )
        for one in said
    ]
    assert answers[0].output_text == answers[1].output_text != ""


def test_tools_may_have_the_form_of_a_chat(server: Served) -> None:
    answers = [create(server, tools=[one], tool_choice="required", seed=1) for one in (WEATHER, NESTED)]
    first, second = (answer.output[0] for answer in answers)
    assert (first.name, first.arguments) == (second.name, second.arguments)


def test_without_a_chat_template_there_is_no_conversation() -> None:
    with served(pair()) as server:
        error = httpx.post(f"{server.url}/v1/responses", json={"input": "hi"}).json()["error"]
        assert "no chat template" in error["message"]
