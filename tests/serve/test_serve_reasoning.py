"""Reasoning of chat models apart from their answers: by the template's `<think>`, with grammars and calls behind it.

Tests of: serve.reasoning, serve.pool.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serving import CONTEXT, TIMEOUT_SECONDS, Served, legible, pair, served
from shoal.api import Shoal
from shoal.config import Grammar
from shoal.constraints.compiler import Grammars
from shoal.engine.stop_strings import Passages, Stops
from shoal.serve.reasoning import MARKS, THINK, Marks, ReasoningReader, ReasoningRules, _up_to, rules_of
from shoal.testing import tiny_tokenizer
from shoal.testing.scripted import scripted
from tool_calls import BODY, TIME, WEATHER, speaks

TOKENIZER = tiny_tokenizer()
CLOSING = THINK.closing
HARMONY, MUSE, MISTRAL, GEMMA = MARKS[:4]
HYBRID = "{# <tool_call> </think> #}" + BODY + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
OPENED = "{# <tool_call> </think> #}" + BODY + "<think>\n"
ASKED: list[Any] = [{"role": "user", "content": "hi"}]
TEXTS = [
    (False, "<think>\nso a < b </th ok\n</think>\n\nYes.\n", "so a < b </th ok", "Yes.\n"),
    (False, "\n<think>x</think>", "x", ""),
    (False, "<think>cut off </thin", "cut off </thin", ""),
    (False, "No <think>x</think>", "", "No <think>x</think>"),
    (False, " <thi", "", " <thi"),
    (False, "", "", ""),
    (True, "\nso\n\nit is\n</think>Yes </think> no", "so\n\nit is", "Yes </think> no"),
    (True, "</think>\n\n Yes", "", "Yes"),
    (True, "on and on\n", "on and on", ""),
]  # fmt: skip


FINAL = "<|channel|>final<|message|>"
TURN, LONGCAT = "<|end|><|start|>assistant<|channel|>", MARKS[-2]
OTHERS = [
    (HARMONY, f"<|channel|>analysis<|message|>So: <|end|> no<|end|><|start|>assistant{FINAL}Yes.", "So: <|end|> no", "Yes."),
    (HARMONY, f"{FINAL}Yes. {FINAL}", "", f"Yes. {FINAL}"),
    (HARMONY, "<|channel|>analysis<|message|>cut", "cut", ""),
    (HARMONY, "Plain.", "", "Plain."),
    (HARMONY, f"{HARMONY.opening}one{TURN}analysis<|message|>two{TURN}final<|message|>Yes{TURN}", "one\ntwo", f"Yes{TURN}"),
    (HARMONY, f"{HARMONY.opening}one{TURN}final <|constrain|>json<|message|>{{}}", "one", "{}"),
    (HARMONY, f"{HARMONY.opening}one{TURN}final json<|message|>{{}}", "one", "{}"),
    (HARMONY, f"{HARMONY.opening}one{TURN}finally\n<|message|>", f"one{TURN}finally\n<|message|>", ""),
    (HARMONY, f"{HARMONY.opening}cut{TURN}fin", "cut", ""),
    (HARMONY, f"{HARMONY.opening}cut<|end|><|start|>", "cut", ""),
    (LONGCAT, "<longcat_think>so</longcat_think>Yes", "so", "Yes"),
    (GEMMA, "<|channel>thought\n<channel|>Yes", "", "Yes"),
    (MISTRAL, "[THINK]so[/THINK]\n\nYes [THINK]", "so", "Yes [THINK]"),
    (MISTRAL, "[TH", "", "[TH"),
    (GEMMA, "<|channel>thought\nso < <channel ok\n<channel|>\nYes <|channel>", "so < <channel ok", "Yes <|channel>"),
    (MUSE, " to=self<|message|>so<|eom|><|start|>assistant to=user<|message|>Yes", "so", "Yes"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rules", "text", "reasoning", "rest"),
    [(ReasoningRules(opened), *texts) for opened, *texts in TEXTS]
    + [(ReasoningRules(False, marks), *texts) for marks, *texts in OTHERS],
)
def test_reasoning_is_told_from_the_rest_however_it_is_cut(
    rules: ReasoningRules, text: str, reasoning: str, rest: str
) -> None:
    for size in (1, 2, 3, 7, 1000):
        reader, found = ReasoningReader(rules), ["", ""]
        for start in range(0, max(len(text), 1), size):
            pieces = reader.feed(text[start : start + size], start + size >= len(text))
            found = [one + more for one, more in zip(found, pieces, strict=True)]
        assert found == [reasoning, rest]
        if reasoning and rules.marks.closing == CLOSING:
            assert reader.characters == (text.index(CLOSING) + len(CLOSING) if CLOSING in text else len(text))


def test_templates_say_where_samples_reason() -> None:
    assert rules_of("{# </think> #}", "a<think>\n") == ReasoningRules(opened=True)
    assert rules_of("{# </think> #}", "a") == ReasoningRules(opened=False)
    assert rules_of("{# </think> #}", "<think>\n\n</think>\n\n") is None
    assert rules_of("{# #}", "a<think>") is rules_of(None, "a") is None


def test_an_expression_ends_at_the_first_closing() -> None:
    expression = re.compile(re.sub(r"\\x\{(\w+)\}", r"\\x\1", _up_to(CLOSING)), re.DOTALL)
    parts = ["<", "/", "t", "think", ">", "</think", "</think>", "\n"]
    texts = ["".join((a, b, c, d)) for a in parts for b in parts for c in parts for d in parts]
    for text in texts:
        assert bool(expression.fullmatch(text)) == (text.count(CLOSING) == 1 and text.endswith(CLOSING)), text


def asked(server: Served, **fields: Any) -> Any:
    body = {"messages": ASKED, **fields}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=TIMEOUT_SECONDS)
    assert response.status_code == 200, response.text
    return response.json()


CALL = '<tool_call>\n{"name": "time", "arguments": {"zone": 1}}\n</tool_call>'
SAID = f"<think>\nHm, a zone.\n</think>\n\nSo:\n{CALL}"


@pytest.fixture(scope="module")
def says() -> Iterator[Served]:
    with served(pair(speaks(SAID), TOKENIZER), chat_template=HYBRID) as running:
        yield running


def test_reasoning_and_calls_behind_it(says: Served) -> None:
    answer = asked(says, tools=[TIME], n=2)
    for choice in answer["choices"]:
        message = choice["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm, a zone.", "So:")
        assert message["reasoning"] == message["reasoning_content"]
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"zone": 1}
        assert choice["finish_reason"] == "tool_calls"
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2 * (SAID.index("</think>") + 8)
    with says.client.chat.completions.stream(
        model="tiny", messages=ASKED, tools=[TIME], stream_options={"include_usage": True}
    ) as stream:
        thoughts = [
            event.chunk.choices[0].delta.model_extra["reasoning_content"]  # type: ignore[index]
            for event in stream
            if event.type == "chunk"
            and event.chunk.choices
            and "reasoning_content" in event.chunk.choices[0].delta.model_extra  # type: ignore[operator]
        ]
        final = stream.get_final_completion()
    assert len(thoughts) > 1
    assert "".join(thoughts) == "Hm, a zone."
    assert final.choices[0].message.content == "So:"
    assert final.usage is not None
    assert final.usage.completion_tokens_details is not None
    assert final.usage.completion_tokens_details.reasoning_tokens == SAID.index("</think>") + 8


def test_a_message_comes_back_with_its_reasoning(says: Served) -> None:
    message = asked(says, tools=[TIME])["choices"][0]["message"]
    assert asked(says, messages=[*ASKED, message, *ASKED], max_tokens=1)["usage"]["prompt_tokens"]
    item = says.post("/v1/responses", prompt=None, input="hi", tools=[{"type": "function", **TIME["function"]}]).json()
    assert [part["type"] for part in item["output"]] == ["reasoning", "message", "function_call"]
    assert item["output"][0]["content"][0]["text"] == "Hm, a zone."
    assert item["usage"]["output_tokens_details"]["reasoning_tokens"] == SAID.index("</think>") + 8
    back = says.post("/v1/responses", prompt=None, input=[*ASKED, *item["output"]], max_output_tokens=1)
    assert back.status_code == 200, back.text


def test_closed_thinking_is_none(says: Served) -> None:
    choice = asked(says, chat_template_kwargs={"enable_thinking": False}, max_tokens=4)["choices"][0]
    assert "reasoning_content" not in choice["message"]


def test_templates_say_which_marks_there_are() -> None:
    for marks in MARKS[:-1]:
        template = f"{{# {marks.opening} #}}"
        assert rules_of(template, "x") == ReasoningRules(False, marks)
        assert rules_of(template, f"x{marks.opening}") == ReasoningRules(True, marks)
        assert rules_of(template, f"x{marks.closing}") is None
    assert rules_of(f"{{# {HARMONY.opening} #}}", f"<|start|>assistant{FINAL}") is None


def test_a_thought_that_is_continued_stays_a_thought() -> None:
    template = f"{{# {CLOSING} #}}"
    assert rules_of(template, "<user>hi<assistant><think>\nso", "<think>\nso") == ReasoningRules(True)
    assert rules_of(template, "<think>so</think>Yes", "<think>so</think>Yes") is None
    assert rules_of(template, "<user><think><assistant>Yes", "Yes") is None
    thoughts = "{# <channel|> #}{% for m in messages %}<{{ m.role }}>{{ m.content.split('<|channel>')[0] }}{% endfor %}"
    thoughts += "{% if add_generation_prompt %}<assistant>{% if think %}<|channel>thought\n{% endif %}{% endif %}"
    with served(pair(speaks("<|channel>thought\nso it is<channel|>Yes"), TOKENIZER), chat_template=thoughts) as server:
        messages = [*ASKED, {"role": "assistant", "content": "<|channel>thought\nso"}]
        for think in (False, True):
            fields = {"messages": messages, "continue_final_message": True, "chat_template_kwargs": {"think": think}}
            message = asked(server, **fields)["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == ("it is", "Yes")
    with served(pair(speaks("<think>so it is</think>Yes"), TOKENIZER), chat_template=HYBRID) as server:
        for begun, reasoning, text in (("<think>so", "it is", "Yes"), ("<think>so it is</think>Y", None, "es")):
            messages = [*ASKED, {"role": "assistant", "content": begun}]
            message = asked(server, messages=messages, continue_final_message=True)["choices"][0]["message"]
            assert (message.get("reasoning_content"), message["content"]) == (reasoning, text)


def test_stop_strings_are_for_the_answer(says: Served) -> None:
    """Not for the reasoning before it, nor for calls behind it; and not before `min_tokens`."""
    for stop in ("a zone", "Hm", "zone", "arguments", "\n}", "time"):
        message = asked(says, tools=[TIME], stop=[stop])["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm, a zone.", "So:"), stop
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"zone": 1}
    choice = asked(says, tools=[TIME], stop=["So"])["choices"][0]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Hm, a zone.", None)
    choice = asked(says, stop=["</think>"])["choices"][0]  # the end of the reasoning is no part of it
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Hm, a zone.", None)
    with served(pair(speaks("<think>\nso a b\n</think>\nc a b"), TOKENIZER),
                chat_template=OPENED) as server:  # fmt: skip
        message = asked(server, stop=["b"])["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("so a b", "c a ")


@pytest.mark.slow(but=["n"])
@pytest.mark.parametrize("marks", MARKS, ids=lambda marks: marks.opening)
@pytest.mark.parametrize("stop", ["n", "<", "|", ">", "final", "k", "a"])
def test_stop_strings_cut_no_mark(marks: Marks, stop: str) -> None:
    """Each letter of a mark may be a stop string; streams and whole answers are the same."""
    template, answer = f"{{# {marks.opening} {marks.closing} #}}{BODY}", "Yes, an < | k>"
    whole = [f"{marks.opening}Hm.{marks.closing}{answer}", *([f"{marks.answer}{answer}"] if marks.answer else [])]
    for text in whole[marks == HARMONY :]:  # whose <|end|> is this tokenizer's own
        with served(pair(speaks(text), TOKENIZER), chat_template=template) as server:
            message = asked(server, stop=[stop])["choices"][0]["message"]
            assert message["content"] == answer.partition(stop)[0]
            assert message.get("reasoning_content") == ("Hm." if text.startswith(marks.opening) else None)
            with server.client.chat.completions.stream(model="tiny", messages=ASKED, stop=[stop]) as stream:
                assert stream.get_final_completion().choices[0].message.content == message["content"]


@pytest.mark.parametrize("form", ["", " <|constrain|>json", " json"])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_stop_strings_end_answers_of_gpt_oss_that_name_their_form(form: str, size: int) -> None:
    text = f"{HARMONY.opening}a zone{TURN}final{form}<|message|>{{zone}}"
    passages = Passages(Stops(unstopped=ReasoningRules(False, HARMONY).unstopped))
    first, last = text.index("zone"), text.rindex("zone")
    for sure in range(first + 4, len(text) + size, size):
        assert passages.cover(text[:sure], min(sure, len(text)), first, first + 4)
    assert passages.cover(text, len(text), last, last + 4) is False


@pytest.mark.slow(but=["tool"])
@pytest.mark.parametrize("stop", ["tool", "_", "<", ">", "ll>"])
def test_stop_strings_cut_no_mark_of_a_call(stop: str) -> None:
    for said, content in ((f"So:{CALL}", "So:"), ("So: <tool_c", "So: <tool_c".partition(stop)[0])):
        with served(pair(speaks(said), TOKENIZER), chat_template=HYBRID) as server:
            message = asked(server, tools=[TIME], stop=[stop])["choices"][0]["message"]
            assert message["content"] == content
            assert bool(message.get("tool_calls")) == (said != "So: <tool_c")


@pytest.mark.parametrize("stop", ["\n", "\n\n", " "])
@pytest.mark.parametrize("opened", [False, True])
def test_stop_strings_of_blanks_wait_for_the_answer(opened: bool, stop: str) -> None:
    """lm-eval sends "\n\n" with every prompt, and models write it before each answer."""
    said = "<think>\nso\n\nit is\n</think>\n\n \nYes, no.\n\n more"
    with served(pair(speaks(said), TOKENIZER), chat_template=OPENED if opened else HYBRID) as server:
        choice = asked(server, stop=[stop])["choices"][0]
        assert (choice["message"]["reasoning_content"], choice["finish_reason"]) == ("so\n\nit is", "stop")
        assert choice["message"]["content"] == ("Yes," if stop == " " else "Yes, no.")


def test_stop_strings_wait_for_the_least_number_of_tokens() -> None:
    with served(pair(speaks("ab ab ab"), TOKENIZER), chat_template=BODY, turn_ends=("ab",)) as server:
        for least, text in ((0, ""), (1, ""), (2, "ab "), (4, "ab "), (5, "ab ab "), (8, "ab ab ab")):
            for stream in (False, True):
                fields = {"messages": ASKED, "min_tokens": least, "stream": stream}
                got = httpx.post(f"{server.url}/v1/chat/completions", json=fields).text
                parts = re.findall(r'"content":"([^"]*)"', got)
                assert "".join(parts) == text, (least, stream)


# ── grammars behind reasoning ───────────────────────────────────────────────────────────────────────────────────────

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module", params=[HYBRID, OPENED], ids=["hybrid", "opened"])
def forced(request: Any) -> Iterator[tuple[Served, bool]]:
    """A server of a model that says anything, but ends its reasoning soon."""
    pytest.importorskip("llguidance")
    script = legible(3)
    closing, prompt = [*TOKENIZER.encode(CLOSING)], len(TOKENIZER.encode("<user>hi"))

    def soon(ids: tuple[int, ...]) -> Any:
        logits = script(ids).clone()
        read = next((k for k in range(len(closing) - 1, 0, -1) if list(ids[-k:]) == closing[:k]), 0)
        logits[closing[read]] += 40.0 if read else 5.0 * (len(ids) > prompt + 40)
        logits[TOKENIZER.encode("<")[0]] += 8.0 * (len(ids) < prompt + 20)
        return logits

    with served(pair(soon, TOKENIZER), chat_template=request.param) as running:
        yield running, request.param is OPENED


@pytest.mark.parametrize("fields", [
    {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    {"structured_outputs": {"regex": '\\{ ?"a": ?(1|22)\\}'}},
    {"guided_grammar": 'start: "{\\"a\\": " ("1" | "22") "}"'},
], ids=["schema", "regex", "lark"])  # fmt: skip
def test_a_grammar_holds_behind_reasoning(forced: tuple[Served, bool], fields: dict[str, Any]) -> None:
    server, opened = forced
    body = {"n": 4, "seed": 5, "max_tokens": 400, **fields}
    drafted, plain = asked(server, **body), asked(server, **body, speculation="off")
    assert [c["message"] for c in drafted["choices"]] == [c["message"] for c in plain["choices"]]
    whole = [choice for choice in drafted["choices"] if choice["finish_reason"] == "stop"]
    assert whole
    assert all(json.loads(choice["message"]["content"])["a"] in (1, 22) for choice in whole)
    assert any("reasoning" in choice["message"] for choice in whole) or not opened
    assert sum(each["accepted"] for each in drafted["usage"]["choices"]) > 20
    assert {each["drafted"] for each in plain["usage"]["choices"]} == {0}


def test_forced_calls_stand_behind_reasoning(forced: tuple[Served, bool]) -> None:
    server, opened = forced
    body = {"n": 4, "seed": 5, "max_tokens": 300, "tools": [WEATHER, TIME], "tool_choice": "required"}
    drafted, plain = asked(server, **body), asked(server, **body, speculation="off")

    def calls(answer: Any) -> list[list[tuple[str, str]]]:
        return [
            [(call["function"]["name"], call["function"]["arguments"]) for call in choice["message"].get("tool_calls") or ()]
            for choice in answer["choices"]
        ]

    assert calls(drafted) == calls(plain)
    assert any(calls(drafted))
    assert any("reasoning" in choice["message"] for choice in drafted["choices"]) or not opened
    assert sum(each["accepted"] for each in drafted["usage"]["choices"]) > 20


def test_what_stands_around_a_grammar_is_checked() -> None:
    with pytest.raises(ValueError, match="before of a regex grammar must be empty"):
        Grammar("regex", "a", before="b")
    with pytest.raises(ValueError, match="between of a lark grammar must be a string"):
        Grammar("lark", 'start: "a"', between=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("template", [HYBRID, OPENED], ids=["hybrid", "opened"])
def test_grammars_and_calls_stand_behind_thoughts_between_special_tokens(template: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    model = scripted(speaks(SAID, tokenizer=tokenizer), len(tokenizer), CONTEXT)
    with served(Shoal(model, model, tokenizer, max_batch=2), chat_template=template) as server:
        for fields, text in (
            ({"tools": [TIME]}, "So:"),
            ({"guided_regex": "a"}, "a"),
            ({"guided_regex": "[ab]"}, ("a", "b")),
        ):
            message = asked(server, **fields)["choices"][0]["message"]
            assert message["reasoning_content"] == "Hm, a zone."
            assert message["content"] in text
        choice = asked(server, tools=[TIME], tool_choice="required", parallel_tool_calls=False)["choices"][0]
        assert [one["function"]["name"] for one in choice["message"]["tool_calls"]] == ["time"]
        assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Hm, a zone.", None)


def test_a_thought_may_be_left_out_and_ends_once() -> None:
    """By the grammar itself: no closing inside, be it spelled by other tokens; nothing of a call before it."""
    pytest.importorskip("llguidance")
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    begin, end = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    made, plain = Grammars(tokenizer, len(tokenizer)), Grammar("regex", "ab")
    spelled = [token for c in "</think>" for token in tokenizer.encode(c, add_special_tokens=False)]
    (a, b), x = tokenizer.encode("ab"), tokenizer.encode("x")[0]
    texts = {
        False: [[a, b], [begin, end, a, b], [begin, x, end, a, b]],
        True: [[end, a, b], [x, x, end, a, b]],
    }
    for opened, taken in texts.items():
        start = made.constraint(ReasoningRules(opened).allowed_before(plain, special=True)).starts[0]
        refused = [[begin, x, *spelled, end, a, b], [begin, a, b], [x, a, b], [end, x, end, a, b], [begin, begin, end, a, b]]
        for ids in [*taken, *refused, *texts[not opened][1:]]:
            matcher = start.deep_copy()
            whole = matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()
            assert whole == (ids in taken), ids
