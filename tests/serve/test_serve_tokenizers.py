"""The server and the commands over tokenizers as real models have them: echo, names, chats without a second BOS, several templates.

Tests of: serve.prompts, serve.token_details, serve.api_formats, serve.request_parser,
cli.conversation, evaluation.tasks, cli.check_prompts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving import Served, served
from shoal.api import Shoal
from shoal.cli import run
from shoal.cli.check_prompts import CHAT as A_CHAT
from shoal.cli.check_prompts import PromptSet
from shoal.cli.conversation import ChatWriter, message
from shoal.evaluation.tasks import chat_ids
from shoal.serve.message_models import Message
from shoal.serve.prompts import PromptEncoder
from shoal.testing import CHATML, save_pair
from shoal.types.arguments import encoded
from tokenizers_of_models import KINDS, PIECES, SMALL, chatty, saying, tokenizer, written

MESSAGES: list[Any] = [{"role": "user", "content": "the text"}]
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, Served]]:
    with served(chatty(request.param)) as running:
        yield request.param, running


def events(server: Served, path: str = "/v1/completions", **body: Any) -> list[Any]:
    """The chunks of a stream."""
    lines = server.post(path, stream=True, **body).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


# ── completions ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow(but=["llama-the text"])
@pytest.mark.parametrize("prompt", ["the text", "naïve 🙂 ", "<|user|> the<|im_end|>"])
def test_offsets_say_where_tokens_begin_in_the_text(server: tuple[str, Served], prompt: str) -> None:
    """Those of an echoed prompt too; the same in a stream."""
    kind, running = server
    body: dict[str, Any] = {"prompt": prompt, "seed": 4, "max_tokens": 8, "logprobs": 1, "ignore_eos": True}
    for echo in (False, True):
        (choice,) = running.post(**body, echo=echo).json()["choices"]
        text, found = choice["text"], choice["logprobs"]
        offsets, begin = found["text_offset"], len(prompt) if echo else 0
        assert text.startswith(prompt) or not echo
        count = len(encoded(tokenizer(kind), prompt)) if echo else 0
        assert len(offsets) == len(found["tokens"]) == count + 8
        assert offsets == sorted(offsets)
        assert all(offset <= begin for offset in offsets[:count])
        assert offsets[count] == begin
        places = list(zip(found["tokens"], offsets, [*offsets[1:], len(text)], strict=True))
        for name, start, end in places if "<|" not in prompt else places[count:]:
            if end - start == len(name) and not name.startswith("bytes:"):
                assert text[start:end] == name
        plain = [name for name in found["tokens"][count:] if not name.startswith(("bytes:", "<"))]
        assert sum(name in text for name in plain) == len(plain)
        pieces = [c for event in events(running, **body, echo=echo) for c in event["choices"]]
        assert "".join(piece["text"] for piece in pieces) == text
        told = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
        assert [offset for one in told for offset in one["text_offset"]] == offsets


def test_a_prompt_that_ends_in_a_character_comes_back(server: tuple[str, Served]) -> None:
    kind, running = server
    ids = list(encoded(tokenizer(kind), "the 🙂"))[:-1]
    body: dict[str, Any] = {"prompt": ids, "seed": 4, "max_tokens": 6, "logprobs": 0, "echo": True}
    (choice,) = running.post(**body).json()["choices"]
    before = tokenizer(kind).decode(ids).rstrip("\ufffd")
    assert choice["text"].startswith(f"{before}\ufffd")
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[len(ids)] == len(before)
    pieces = [c for event in events(running, **body) for c in event["choices"]]
    assert "".join(piece["text"] for piece in pieces) == choice["text"]
    only = running.post(**body | {"max_tokens": 0}).json()["choices"][0]["text"]
    assert only == tokenizer(kind).decode(ids)


@pytest.mark.slow(but=["more0-llama"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [{}, {"align": True}, {"n": 2}, {"stop": ["!"]}, {"logprobs": 0}])
def test_a_character_that_a_prompt_cuts_is_whole_in_its_echo(kind: str, more: dict[str, Any]) -> None:
    """With the sample that completes it, also in a stream; a sample that does not begins with what is left of it."""
    whole, text = list(encoded(tokenizer(kind), "the 🙂 ok")), "the 🙂 ok"
    cut = next(end for end in range(len(whole), 0, -1) if tokenizer(kind).decode(whole[:end]).endswith("\ufffd"))
    body: dict[str, Any] = {"prompt": whole[:cut], "temperature": 0, "max_tokens": 9, "echo": True, **more}
    with served(saying(kind, whole[:cut], whole[cut:])) as running:
        choices = running.post(**body).json()["choices"]
        assert [choice["text"][-len(text) :] for choice in choices] == [text] * len(choices)
        assert "\ufffd" not in choices[0]["text"]
        for place, choice in enumerate(choices):
            pieces = [c for event in events(running, **body) for c in event["choices"] if c["index"] == place]
            assert "".join(piece["text"] for piece in pieces) == choice["text"]


def test_texts_are_those_of_the_library(server: tuple[str, Served]) -> None:
    kind, running = server
    body: dict[str, Any] = {"prompt": "the text", "seed": 5, "max_tokens": 20}
    (choice,) = running.post(**body).json()["choices"]
    (own,) = chatty(kind).generate("the text", seed=5, max_new_tokens=20)[0].samples
    assert choice["text"] == own.text
    assert written(kind, (*encoded(tokenizer(kind), "the text"), *own.token_ids)).endswith(own.text)


def test_texts_of_others_spell_no_special_tokens() -> None:
    """Of users, of tools, of their descriptions, and in the arguments of calls; where asked they do."""
    end, kept = tokenizer("tagged").eos_token, "<think>"
    template = "{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    template += (
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}{# <tool_call> #}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({end: [end, kept]})}}
    messages = [{"role": "user", "content": end}, {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": end, "tool_call_id": "1"}]  # fmt: skip
    function = {"name": "f", "description": end, "parameters": {"type": "object", "description": end}}
    body = {
        "messages": messages,
        "tools": [{"type": "function", "function": function}],
        "max_tokens": 1,
        "return_token_ids": True,
    }
    with served(chatty("tagged"), chat_template=template) as running:
        texts = []
        for split, count in ((None, 0), (True, 0), (False, 6)):
            answer = running.post("/v1/chat/completions", prompt=None, split_special_tokens=split, **body).json()
            ids = answer["prompt_token_ids"]
            assert ids.count(tokenizer("tagged").eos_token_id) == count
            texts.append(tokenizer("tagged").decode(ids))
        assert texts[0] == texts[1] == texts[2]
        assert texts[0].count(end) == 6
    pytest.importorskip("llguidance")
    bare = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"  # it knows no tools: a system message tells them
    )
    with served(chatty("tagged"), chat_template=bare) as running:
        for split, count in ((None, 0), (False, 6)):
            body |= {"tool_choice": "required", "split_special_tokens": split}
            answer = running.post("/v1/chat/completions", prompt=None, **body).json()
            assert answer["prompt_token_ids"].count(tokenizer("tagged").eos_token_id) == count


def test_names_and_documents_of_users_spell_no_special_token_either() -> None:
    end = tokenizer("tagged").eos_token
    said = "<{{ m.role }} {{ m.name or m.tool_call_id }}>{{ m.content }}"
    template = "{{ documents | tojson }}{% for m in messages %}" + said + "{% endfor %}"
    messages = [{"role": "user", "name": end, "content": "a"}, {"role": "tool", "tool_call_id": end, "content": "b"}]
    body = {"messages": messages, "chat_template_kwargs": {"documents": [{"title": end, "text": end}]}}
    with served(chatty("tagged"), chat_template=template) as running:
        for split, count in ((None, 0), (False, 4)):
            tokens = running.post("/tokenize", prompt=None, split_special_tokens=split, **body).json()["tokens"]
            assert tokens.count(tokenizer("tagged").eos_token_id) == count
            assert tokenizer("tagged").decode(tokens).count(end) == 4


# ── chats ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def by_transformers(kind: str, **variables: Any) -> list[int]:
    """The conversation as Transformers itself writes it."""
    found = tokenizer(kind).apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False, **variables)
    return list(found)


def test_a_chat_has_the_ids_of_its_template(server: tuple[str, Served]) -> None:
    """BOS once, and of several templates the default."""
    kind, running = server
    ids = by_transformers(kind)
    body = {"messages": MESSAGES, "return_token_ids": True, "max_tokens": 3}
    answer = running.post("/v1/chat/completions", prompt=None, **body).json()
    assert answer["prompt_token_ids"] == ids
    counted = running.post("/tokenize", prompt=None, messages=MESSAGES).json()
    assert counted["tokens"] == ids
    text = tokenizer(kind).decode(ids)
    same = running.post(prompt=text, return_token_ids=True, max_tokens=3).json()
    if kind in PIECES:
        assert ids.count(tokenizer(kind).bos_token_id) == 1
        assert same["choices"][0]["prompt_token_ids"].count(tokenizer(kind).bos_token_id) == 1


@pytest.mark.slow(but=["llama"])
def test_a_chat_with_tools_is_written_by_the_template_for_tools(server: tuple[str, Served]) -> None:
    kind, running = server
    body = {"messages": MESSAGES, "tools": [TOOL], "return_token_ids": True, "max_tokens": 30, "seed": 1}
    answer = running.post("/v1/chat/completions", prompt=None, **body)
    if kind in PIECES:
        assert "writes no calls" in answer.json()["error"]["message"]
        return
    shown = [{"type": "function", "function": TOOL["function"]}]
    assert answer.json()["prompt_token_ids"] == by_transformers(kind, tools=shown)
    forced = running.post("/v1/chat/completions", prompt=None, **body, tool_choice="required").json()
    (choice,) = forced["choices"]
    assert choice["finish_reason"] in ("tool_calls", "length")
    assert all(call["function"]["name"] == "add" for call in choice["message"].get("tool_calls", ()))


def test_a_model_reasons_and_calls_in_tokens_of_its_own() -> None:
    """Tags that are no special tokens open and close what they stand around, also under a grammar."""
    own = KINDS["tagged"]()
    own.chat_template = "{{ messages[0].content }}:{# </think> #}"
    said = '<think>the text</think>{"a": 1}'
    prompt, ids = tuple(own.encode("the text:")), tuple(own.encode(said))
    assert own.convert_tokens_to_ids("</think>") in ids
    model = saying("tagged", prompt, ids)
    shoal = Shoal(model.target, model.draft_model, own, max_batch=4)
    shoal.eos = model.eos
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with served(shoal) as running:
        for body in ({}, {"response_format": form}):
            asked = {"messages": MESSAGES, "temperature": 0, "max_tokens": 40, **body}
            (choice,) = running.post("/v1/chat/completions", prompt=None, **asked).json()["choices"]
            assert choice["message"]["reasoning"] == "the text"
            assert choice["message"]["content"] == '{"a": 1}'
            assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("kind", SMALL)
def test_the_command_line_and_evaluations_write_the_same_chat(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = by_transformers(kind)
    assert chat_ids(tokenizer(kind), "the text") == ids
    bos = tokenizer(kind).bos_token_id
    assert chat_ids(tokenizer(kind), "the text", "the").count(bos) == ids.count(bos)
    writer = ChatWriter(tokenizer(kind), None)
    assert writer.ids(writer.text([message("user", "the text")])) == ids
    assert PromptSet.of(A_CHAT, "built in", ["the text"], tokenizer(kind)).ids == (tuple(ids),)
    monkeypatch.setattr("shoal.cli.options.ModelSource.load", lambda self: chatty(kind))
    asked = ["generate", "--chat", "-p", "the text", "--max-new-tokens", "4", "--seed", "1", "--json"]
    assert run(asked) == 0
    (sample,) = json.loads(capsys.readouterr().out)["prompts"][0]["samples"]
    (same,) = chatty(kind).generate([ids], seed=1, max_new_tokens=4)[0].samples
    assert sample["token_ids"] == list(same.token_ids)


def test_a_template_that_writes_no_bos_gets_none() -> None:
    """As ChatML over a tokenizer that puts BOS before texts."""
    own = KINDS["llama"]()
    own.chat_template = CHATML
    ids = own.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert own.bos_token_id not in ids
    assert own.encode("the text")[0] == own.bos_token_id
    assert chat_ids(own, "the text") == ids
    writer = ChatWriter(own, None)
    assert writer.ids(writer.text(MESSAGES)) == ids
    assert PromptSet.of(A_CHAT, "built in", ["the text"], own).ids == (tuple(ids),)
    encoder, messages = PromptEncoder(own, len(own), None), [Message.model_validate(MESSAGES[0])]
    assert encoder.encode_text(encoder.write(messages, {}), special=False) == tuple(ids)


def test_an_evaluation_asks_a_chat_with_one_bos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`shoal eval --chat`, from a folder with the tokenizer and its templates."""
    asked: list[list[int]] = []
    generate = Shoal.generate

    def listening(self: Shoal, prompts: Any, *arguments: Any, **options: Any) -> Any:
        asked.append(list(prompts[0]))
        return generate(self, prompts, *arguments, **options)

    monkeypatch.setattr(Shoal, "generate", listening)
    own = tokenizer("llama")
    target, _ = save_pair(tmp_path, vocab_size=len(own), max_position_embeddings=1024, eos_token_id=own.eos_token_id)
    own.save_pretrained(target)
    problem = {"task_id": "t/0", "prompt": "def f():\n", "entry_point": "f", "canonical_solution": "    return 1\n"}
    problem["test"] = "def check(f):\n    assert f() == 1\n"
    (tmp_path / "set.jsonl").write_text(json.dumps(problem))
    options = ["--methods", "plain", "--chat", "-n", "1", "--max-new-tokens", "3", "--no-plot", "--json"]
    command = ["eval", "humaneval", "--data", str(tmp_path / "set.jsonl"), "--model", str(target), *options]
    assert run(command) == 0, capsys.readouterr().err
    assert len(asked) == 2
    assert asked[0][0] == own.bos_token_id
    assert asked[0].count(own.bos_token_id) == 1
