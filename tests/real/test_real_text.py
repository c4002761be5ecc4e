"""Texts of a real tokenizer: stop strings across tokens, emoji and CJK in streams, chats by the model's own template, tools."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from serving import Served, served
from shoal.api import Shoal
from shoal.cli import run
from shoal.cli.files import TEMPLATES
from shoal.config import Grammar

pytestmark = [pytest.mark.real, pytest.mark.limit(900)]

TEXT = "你好，世界 😀👩‍🚀 café — naïve!"
"""Characters of one to four bytes, and one of several characters; most are several tokens."""
MESSAGES: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def model(pair: Any) -> Shoal:
    return pair("float32", "auto")


def test_streams_never_show_half_a_character(model: Shoal) -> None:
    """A grammar has one text: the model must write it, token by token of its own choice."""
    ids = model.tokenizer(TEXT)["input_ids"]
    assert len(ids) > 1.3 * len(TEXT.split())
    pieces = ["", ""]
    for increment in model.stream(
        "Say it:",
        2,
        grammar=Grammar("regex", "(你好，世界 😀👩‍🚀 café — naïve!)"),
        temperature=1.0,
        seed=2,
        max_new_tokens=80,
    ):
        assert "�" not in increment.text
        pieces[increment.sample] += increment.text
    assert pieces == [TEXT, TEXT]


@pytest.mark.parametrize("stop", ["世界 😀", "afé", " — n"])
def test_a_stop_string_across_tokens_ends_a_row(model: Shoal, stop: str) -> None:
    result = model.generate(
        "Say it:", 2, grammar=Grammar("regex", "(你好，世界 😀👩‍🚀 café — naïve!)"), temperature=1.0, seed=2, max_new_tokens=80,
        stop=(stop,),
    )  # fmt: skip
    for sample in result[0].samples:
        assert sample.finish_reason == "stop"
        assert sample.text == TEXT[: TEXT.index(stop)]


def test_chats_by_the_models_own_template(
    model: Shoal, stock: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From Python, by `shoal chat` and over HTTP: one answer, which is Transformers' own."""
    prompt = model.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)["input_ids"]
    ids = torch.tensor([prompt])
    out = stock("float32").generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    right = model.tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True)
    assert "Paris" in right
    assert model.generate([prompt], temperature=0, max_new_tokens=24)[0].samples[0].text == right

    monkeypatch.setattr("shoal.cli.options.ModelSource.load", lambda self, prefix_memory=0: model)
    monkeypatch.setattr(sys, "stdin", io.StringIO(MESSAGES[0]["content"] + "\n"))
    monkeypatch.setattr(Shoal, "close", lambda self: None)
    assert run(["chat", "--model", "smollm2", "--temperature", "0", "--max-new-tokens", "24", "--json", "-n", "1"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["samples"][0]["text"] for line in lines if "samples" in line] == [right]

    with served(model) as server:
        answer = server.client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=24)
        assert answer.choices[0].message.content == right
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(prompt)


@pytest.fixture(scope="module")
def server(pair: Any) -> Iterator[Served]:
    with served(pair("float32", "auto"), prefix_bytes=1 << 28) as running:
        yield running


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "people"],
    "additionalProperties": False,
}


def test_schemas_by_the_official_client(server: Served) -> None:
    answer = server.client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0.7, seed=4, max_tokens=60, n=2,
        response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}},
    )  # fmt: skip
    for choice in answer.choices:
        found = json.loads(choice.message.content or "")
        assert found.keys() == {"city", "people"}
        assert 0 <= found["people"] <= 99


def test_tools_by_the_official_client(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2's own template of this size knows no tools, so that a system message tells them; a grammar forces the call."""
    tool: Any = {"type": "function", "function": {"name": "locate", "description": "Finds a city.", "parameters": SCHEMA}}
    model = pair("float32", "auto")
    options: Any = {
        "model": "tiny",
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": 80,
        "tools": [tool],
        "tool_choice": {"type": "function", "function": {"name": "locate"}},
    }
    told = []
    for template in (model.tokenizer.chat_template, (TEMPLATES / "hermes.jinja").read_text(encoding="utf-8")):
        monkeypatch.setattr(model.tokenizer, "chat_template", template)
        with served(model) as server:
            raw = server.client.chat.completions.with_raw_response.create(**options)
        told.append(raw.headers.get("x-shoal-told"))
        calls = raw.parse().choices[0].message.tool_calls or []
        assert [call.function.name for call in calls] == ["locate"]
        assert json.loads(calls[0].function.arguments).keys() == {"city", "people"}
    assert told == ["tools", None]


def test_a_next_turn_computes_what_is_new(server: Served) -> None:
    """And answers what it would have answered without a memory."""
    first = server.client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=16)
    turn = [*MESSAGES, {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "And of Italy?"}]  # fmt: skip
    second = server.client.chat.completions.create(model="tiny", messages=turn, temperature=0, max_tokens=16)
    model = server.shoal
    prompt = model.tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"]
    alone = model.generate([prompt], temperature=0, max_new_tokens=16)[0].samples[0]
    assert second.choices[0].message.content == alone.text
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) > len(prompt) // 3
