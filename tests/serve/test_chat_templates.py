"""The chat templates that come with shoal: what their formats say, word for word, and their names on the command line.

Tests of: cli/chat_templates, cli.files, serve.tool_calls, serve.message_models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serving import pair, served
from shoal.cli import run
from shoal.cli.files import read_template, template_names, turn_ends
from shoal.errors import RequestError
from shoal.serve.tool_calls import HERMES, LLAMA, MISTRAL, format_of
from shoal.testing import tiny_tokenizer
from tool_calls import speaks

CHAT: list[Any] = [
    {"role": "system", "content": "S"}, {"role": "user", "content": "U"}, {"role": "assistant", "content": "A"},
    {"role": "user", "content": "V"},
]  # fmt: skip
RENDERED = {
    "alpaca": "S\n\n### Instruction:\nU\n\n### Response:\nA</s>\n\n### Instruction:\nV\n\n### Response:\n",
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
    "<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n",
    "gemma": "<s><start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n"
    "<start_of_turn>user\nV<end_of_turn>\n<start_of_turn>model\n",
    "llama2": "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nU [/INST] A </s><s>[INST] V [/INST]",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nV<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "<s>[INST] U[/INST] A</s>[INST] S\n\nV[/INST]",
    "phi3": "<|system|>\nS<|end|>\n<|user|>\nU<|end|>\n<|assistant|>\nA<|end|>\n<|user|>\nV<|end|>\n<|assistant|>\n",
    "vicuna": "<s>S USER: U ASSISTANT: A</s>USER: V ASSISTANT:",
    "zephyr": "<|system|>\nS</s>\n<|user|>\nU</s>\n<|assistant|>\nA</s>\n<|user|>\nV</s>\n<|assistant|>\n",
}
RENDERED |= {"hermes": RENDERED["chatml"], "qwen": RENDERED["chatml"]}
TOOL: Any = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALL: Any = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
CALLED: list[Any] = [
    {"role": "system", "content": "S"}, {"role": "user", "content": "U"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "1", "tool_call_id": "123456789"}, {"role": "tool", "content": "2", "tool_call_id": "123456789"},
]  # fmt: skip
SAID = json.dumps(TOOL)
HEAD = f"<|im_start|>system\nS\n\nFunctions that may be called:\n<tools>\n{SAID}\n</tools>\nA call is written so:\n<tool_call>\n" \
    '{"name": FUNCTION, "arguments": OBJECT}\n</tool_call><|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant' \
    + '\n<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>' * 2 + "<|im_end|>\n"  # fmt: skip
WITH_TOOLS = {
    "hermes": HEAD + "".join(f"<|im_start|>tool\n<tool_response>\n{i}\n</tool_response><|im_end|>\n" for i in (1, 2))
    + "<|im_start|>assistant\n",
    "qwen": HEAD + "<|im_start|>user" + "".join(f"\n<tool_response>\n{i}\n</tool_response>" for i in (1, 2))
    + "<|im_end|>\n<|im_start|>assistant\n",
    "llama3": f"<s><|start_header_id|>system<|end_header_id|>\n\nS\n\nFunctions that may be called:\n\n{SAID}\n\n"
    'A call is written so: {"name": FUNCTION, "parameters": OBJECT}<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n'
    'U<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n{"name": "f", "parameters": {"a": "é"}}; '
    '{"name": "f", "parameters": {"a": "é"}}<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n1<|eot_id|>'
    "<|start_header_id|>ipython<|end_header_id|>\n\n2<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": f"<s>[AVAILABLE_TOOLS] [{SAID}][/AVAILABLE_TOOLS][INST] S\n\nU[/INST]"
    '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "é"}, "id": "123456789"}, '
    '{"name": "f", "arguments": {"a": "é"}, "id": "123456789"}]</s>'
    '[TOOL_RESULTS] {"content": "1", "call_id": "123456789"}[/TOOL_RESULTS]'
    '[TOOL_RESULTS] {"content": "2", "call_id": "123456789"}[/TOOL_RESULTS]',
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    found = tiny_tokenizer()
    found.bos_token, found.eos_token = "<s>", "</s>"
    return found


def rendered(tokenizer: Any, name: str, messages: list[Any], **variables: Any) -> str:
    template = read_template(Path(name))
    given = {"add_generation_prompt": True, **variables}
    return str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **given))


def test_all_of_them_are_tried() -> None:
    assert template_names() == sorted(RENDERED)
    assert {name: format_of(read_template(Path(name))) for name in template_names() if name in WITH_TOOLS} == {
        "hermes": HERMES, "qwen": HERMES, "llama3": LLAMA, "mistral": MISTRAL,
    }  # fmt: skip
    assert [name for name in template_names() if format_of(read_template(Path(name)))] == sorted(WITH_TOOLS)


@pytest.mark.parametrize("name", RENDERED)
def test_a_chat_is_written_as_the_format_says(tokenizer: Any, name: str) -> None:
    assert rendered(tokenizer, name, CHAT) == RENDERED[name]
    developer = [{**CHAT[0], "role": "developer"}, *CHAT[1:]]
    assert rendered(tokenizer, name, developer) == RENDERED[name]
    begun = rendered(tokenizer, name, CHAT[:3], add_generation_prompt=False)
    marks = {"alpaca": "A</s>\n\n", "llama2": " A </s>", "mistral": " A</s>", "vicuna": "A</s>"}
    assert begun.endswith(marks.get(name, "\n")) or name == "llama3"
    if name != "mistral":  # whose message of the system goes with the last one of the user
        assert RENDERED[name].startswith(begun)


@pytest.mark.parametrize("name", RENDERED)
def test_special_tokens_that_a_tokenizer_lacks_are_left_out(name: str) -> None:
    bare = tiny_tokenizer()
    bare.bos_token = None
    assert "None" not in rendered(bare, name, CHAT)
    assert rendered(bare, name, CHAT).startswith(RENDERED[name].removeprefix("<s>")[:8])


@pytest.mark.parametrize("name", RENDERED)
def test_tools_are_written_as_the_format_says_or_refused(tokenizer: Any, name: str) -> None:
    if name in WITH_TOOLS:
        assert rendered(tokenizer, name, CALLED, tools=[TOOL]) == WITH_TOOLS[name]
        alone = rendered(tokenizer, name, CALLED[1:2], tools=[TOOL])
        assert SAID in alone
        assert "S\n" not in alone
    elif name != "chatml":  # which has any role
        with pytest.raises(Exception, match="no role tool"):
            rendered(tokenizer, name, [*CHAT, {"role": "tool", "content": "x"}])


def test_a_name_that_is_none_is_told_which_there_are(tmp_path: Path) -> None:
    assert read_template(None) is None
    (tmp_path / "mine").write_text("mine")
    assert read_template(tmp_path / "mine") == "mine"
    with pytest.raises(
        RequestError,
        match=r"cannot read the chat template 'llama4': .*; give a file, or one of the names alpaca, chatml, gemma",
    ):
        read_template(Path("llama4"))


BEGIN, ENDED = "<|im_start|>assistant\n", "Hi.<|im_end|>\n<|im_start|>user\nAnd"


def test_what_ends_a_turn_ends_an_answer(tokenizer: Any) -> None:
    ended, script = ENDED, speaks(ENDED, BEGIN, ends=False)
    options = {"chat_template": read_template(Path("chatml")), "turn_ends": turn_ends(Path("chatml"))}
    with served(pair(script), **options) as server:
        for speculation, drafted in (("auto", True), ("off", False)):
            for stop in (None, "\n", ["\n"]):
                body = {"messages": CHAT, "stop": stop, "speculation": speculation}
                answer = server.post("/v1/chat/completions", prompt=None, **body).json()
                assert (answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]) == ("Hi.", "stop")
                took = answer["usage"]["choices"][0]
                assert (took["ended_by"], took["drafted"] > 0) == ("stop", drafted)
                assert took["completion_tokens"] <= len("Hi.<|im_end|>")
        assert server.client.responses.create(model="tiny", input="x").output_text == "Hi."
        body = {"messages": CHAT, "ignore_eos": True, "max_tokens": len(ended)}
        answer = server.post("/v1/chat/completions", prompt=None, **body).json()
        assert answer["choices"][0]["message"]["content"] == ended
        whole = server.post(prompt=rendered(tokenizer, "chatml", CHAT), max_tokens=len(ended)).json()  # no chat
        assert whole["choices"][0]["text"] == ended


def test_what_ends_a_turn_ends_a_line_of_a_file_with_stop_strings_of_its_own(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a server adds it to those of a request, unless nothing ends a sample by itself."""
    shoal, file = pair(speaks(ENDED, BEGIN, ends=False)), tmp_path / "asked.jsonl"
    monkeypatch.setattr("shoal.cli.options.ModelSource.load", lambda self: shoal)
    lines = [{}, {"stop": ["q"]}, {"stop": "q"}, {"stop": ["."]}, {"n": 2}, {"eos": []}, {"eos": [], "stop": "A"}]
    file.write_text("".join(json.dumps({"prompt": "x"} | line) + "\n" for line in lines))
    ask = [
        "generate",
        "--chat-template",
        "chatml",
        "--max-new-tokens",
        str(len(ENDED)),
        "--stop",
        "r\nA",
        "--greedy",
        "--json",
    ]
    for length, drafted in (("3", True), ("off", False)):
        assert run([*ask, "--prompts", str(file), "--lookahead", length]) == 0
        found = json.loads(capsys.readouterr().out)
        texts = [sample["text"] for prompt in found["prompts"] for sample in prompt["samples"]]
        assert texts == [
            "Hi.", "Hi.", "Hi.", "Hi", "Hi.", "Hi.", ENDED.removesuffix("r\nAnd"), ENDED.removesuffix("And"),
        ]  # fmt: skip
        assert (found["stats"]["accepted"] > 0) is drafted
    file.write_text('{"prompt": "x", "stop": 5}\n')
    assert run([*ask, "--prompts", str(file)]) == 2
    assert "asked.jsonl:1: stop must be non-empty strings, got 5" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_ends_of_turns_are_those_of_the_formats(tokenizer: Any) -> None:
    """Behind an answer there is the end of a turn, the token that ends texts, or what begins the user's turn."""
    assert turn_ends(None) == turn_ends(Path("mine.jinja")) == ()
    for name in RENDERED:
        answer = {"role": "assistant", "content": "ANSWER"}
        _, behind = rendered(tokenizer, name, [*CHAT[:2], answer, CHAT[3]]).split("ANSWER")
        for end in turn_ends(Path(name)) or ("</s>",):
            assert end in behind.split("V")[0]


def test_a_server_writes_chats_by_a_named_template() -> None:
    with served(pair(), chat_template=read_template(Path("qwen"))) as server:
        body = {"messages": CHAT, "seed": 1, "max_tokens": 4}
        answer = server.post("/v1/chat/completions", prompt=None, **body).json()
        assert answer["usage"]["prompt_tokens"] == len(RENDERED["qwen"])
        same = server.post(prompt=RENDERED["qwen"], seed=1, max_tokens=4).json()
        assert same["choices"][0]["text"] == answer["choices"][0]["message"]["content"]
        forced = server.post(
            "/v1/chat/completions", prompt=None, **body | {"max_tokens": 60}, tools=[TOOL], tool_choice="required"
        )
        assert forced.status_code == 200
