"""What a body becomes: the requests of the engine and what the answer shall hold, field by field and at each limit; no model."""

from __future__ import annotations

import json
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError

from shoal.api import Shoal
from shoal.config import PARAMETERS, Grammar, Limits, Sampling
from shoal.constraints.dressing import Dressing
from shoal.errors import RequestError
from shoal.serve.access import validated
from shoal.serve.api_errors import ApiError, api_error_of
from shoal.serve.batch_lines import BatchLine, LineError, digest, has_failed, read_lines
from shoal.serve.infill import parsed_infill
from shoal.serve.item_models import ResponsesRequest
from shoal.serve.item_response import parsed_items
from shoal.serve.message_models import InfillRequest, Message
from shoal.serve.prompts import PromptEncoder
from shoal.serve.request_builder import ParsedRequest, RequestBuilder
from shoal.serve.request_models import ChatRequest, CompletionRequest
from shoal.serve.request_parser import RequestParser
from shoal.serve.settings import Settings
from shoal.serve.tool_calls import HERMES, LLAMA, MISTRAL, CallRules
from shoal.serve.tools import call_rules, grammar_with_calls, shown_tools
from shoal.testing import END, VOCABULARY, tiny_tokenizer
from shoal.testing.scripted import hashed, scripted
from shoal.types.requests import Request

TOKENIZER = tiny_tokenizer()
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
CONTEXT, CAPACITY = 64, 12
LIMITS: dict[str, Any] = {"max_tokens": 20, "max_n": 6, "max_logprobs": 4, "timeout": 50.0, "max_grammar": 30}
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"const": 1}


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def builder(tokenizer: Any = TOKENIZER, **settings: Any) -> RequestBuilder:
    encoder = PromptEncoder(tokenizer, VOCABULARY, TEMPLATE)
    return RequestBuilder(encoder, (END,), VOCABULARY, CONTEXT, CAPACITY, Settings("m", **{**LIMITS, **settings}))


def parse(model: Any = CompletionRequest, settings: dict[str, Any] | None = None, **fields: Any) -> ParsedRequest:
    body = ({"prompt": "hello"} if model is CompletionRequest else {"messages": MESSAGES}) | fields
    return RequestParser(builder(**settings or {})).parse(validated(model, body))


def refused(model: Any = CompletionRequest, settings: dict[str, Any] | None = None, **fields: Any) -> tuple[str | None, int]:
    """The field that an error names, and its status."""
    with pytest.raises(Exception) as raised:  # noqa: PT011 - of whichever kind, it becomes an answer
        parse(model, settings, **fields)
    error = api_error_of(raised.value)
    assert error.status_code < 500, raised.value
    return error.param, error.status_code


# ── what is taken over ──────────────────────────────────────────────────────────────────────────────────────────────


def test_the_fields_of_a_completion() -> None:
    parsed = parse(
        prompt=["hello", "you", "hello"], n=2, best_of=3, max_tokens=7, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1,
        typical_p=0.8, presence_penalty=0.25, frequency_penalty=-0.5, repetition_penalty=1.5, seed=-3, min_tokens=2,
        logit_bias={"5": 1.5, "259": -2}, stop=["x", "yz"], stop_token_ids=[7, 259], logprobs=3, time_budget=4.0,
        speculation=2, echo=True,
    )  # fmt: skip
    assert (parsed.drawn, parsed.returned, parsed.top_logprobs, parsed.rows) == (3, 2, 3, 9)
    assert parsed.echo == ["hello", "you", "hello"]
    assert parsed.prompts == [ids("hello"), ids("you"), ids("hello")]
    for own, text, occurrence in zip(parsed.requests, ("hello", "you", "hello"), (0, 0, 1), strict=True):
        assert (own.prompt_ids, own.n, own.top_logprobs, own.occurrence, own.max_draft) == (ids(text), 3, 3, occurrence, 2)
        assert own.sampling == Sampling(
            temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, typical_p=0.8, presence_penalty=0.25, frequency_penalty=-0.5,
            repetition_penalty=1.5, seed=-3, min_new_tokens=2, logit_bias={5: 1.5, 259: -2},
        )  # fmt: skip
        assert own.limits == Limits(max_new_tokens=7, stop=["x", "yz"], eos=(END, 7, 259), time_budget=4.0)
    assert not any((parsed.stream, parsed.include_usage, parsed.details, parsed.rounds, parsed.token_ids))
    assert parsed.headers == {}


def test_what_is_missing_has_its_default() -> None:
    parsed = parse()
    (own,) = parsed.requests
    assert own.sampling == Sampling()
    assert own.limits == Limits(max_new_tokens=16, stop=(), eos=(END,), time_budget=50.0)
    assert (own.n, own.max_draft, own.top_logprobs, own.shown_tokens) == (1, None, 0, frozenset())
    assert (parsed.drawn, parsed.returned, parsed.top_logprobs, parsed.echo, parsed.scored) == (1, 1, None, None, None)
    assert parsed.deadline == pytest.approx(time.perf_counter() + 50, abs=20)
    assert parse(top_k=-1).requests[0].sampling.top_k == 0


@pytest.mark.parametrize(("given", "most"), [("auto", None), ("off", 0), (0, 0), (3, 3)])
def test_drafts_per_round(given: Any, most: int | None) -> None:
    assert parse(speculation=given).requests[0].max_draft == most


@pytest.mark.parametrize(("given", "seconds"), [(None, 50.0), (3.0, 3.0), (80.0, 50.0)])
def test_a_time_budget_is_at_most_the_servers(given: Any, seconds: float) -> None:
    parsed = parse(time_budget=given)
    assert parsed.requests[0].limits.time_budget == seconds
    assert parsed.deadline == pytest.approx(time.perf_counter() + seconds, abs=1)


def test_what_a_stream_and_details_hold() -> None:
    assert parse(stream=True, stream_options={"include_usage": True}).include_usage
    assert not parse(stream=True, stream_options={}).include_usage
    details = parse(shoal={"details": True})
    assert (details.details, details.rounds) == (True, False)
    rounds = parse(shoal={"rounds": True})
    assert (rounds.details, rounds.rounds) == (True, True)
    assert not parse(shoal={}).details
    assert parse(return_token_ids=True).token_ids


def test_ends_that_are_ignored_leave_those_of_the_request() -> None:
    def ends(**fields: Any) -> list[int]:
        return list(parse(**fields).requests[0].limits.eos or ())

    assert ends(ignore_eos=True, stop_token_ids=[7]) == [7]
    assert ends(ignore_eos=True) == []
    assert ends(ignore_eos=False) == [END]
    assert parse(ignore_eos=True, min_tokens=3, stop_token_ids=[7]).requests[0].sampling.min_new_tokens == 3


def test_prompts_are_scored_for_what_needs_it() -> None:
    for fields, scored in (
        ({"echo": True}, None), ({"logprobs": 2}, None), ({"echo": True, "logprobs": 2}, 2), ({"prompt_logprobs": 0}, 0),
        ({"prompt_logprobs": 1, "echo": True, "logprobs": 3}, 3), ({"prompt_logprobs": 4, "echo": True, "logprobs": 3}, 4),
    ):  # fmt: skip
        assert parse(**fields).scored == scored, fields
    assert parse(echo=True, max_tokens=0).requests == []


def test_what_was_sent_in_vain_is_named() -> None:
    assert parse(user="x", metadata={}, stream=True, stream_options={"include_obfuscation": True}).headers == {
        "x-shoal-ignored": "user, metadata, stream_options.include_obfuscation"
    }
    assert parse(user="x", max_tokens=21).headers == {"x-shoal-ignored": "user", "x-shoal-clamped": "max_tokens=20"}


# ── lengths ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_lengths_are_clamped_by_the_server_and_then_the_context() -> None:
    def most(prompt: Any, **fields: Any) -> int:
        return parse(prompt=prompt, **fields).requests[0].limits.max_new_tokens

    assert most("hello", max_tokens=20) == 20
    assert most("hello", max_tokens=500) == 20
    assert most(["a", "x" * 60], max_tokens=500) == 4  # of the longest prompt
    assert most(["x" * 60, "a"], max_tokens=-1) == 4
    assert most("x" * 63, max_tokens=500) == 1
    assert most("x" * 63) == 16  # the row ends by the context
    assert most("x" * 44, max_tokens=20) == 20
    assert refused(prompt="x" * 45, max_tokens=20) == ("prompt", 400)
    assert refused(prompt=["a", "x" * 45], max_tokens=20) == ("prompt", 400)
    assert refused(prompt="x" * 64) == ("prompt", 400)
    assert parse(prompt="x" * 64, max_tokens=0, echo=True).prompts == [ids("x" * 64)]
    assert most("a", **{"settings": {"max_tokens": 9}}) == 9


def test_a_chat_may_fill_the_context() -> None:
    def most(content: str, **fields: Any) -> int:
        one = parse(ChatRequest, messages=[{"role": "user", "content": content}], **fields).requests[0]
        return one.limits.max_new_tokens

    written = len("<user><assistant>")
    assert most("a") == 20
    assert most("x" * (CONTEXT - 5 - written)) == 5
    assert most("x" * (CONTEXT - 1 - written)) == 1
    assert refused(ChatRequest, messages=[{"role": "user", "content": "x" * (CONTEXT - written)}]) == ("messages", 400)
    assert (
        most("a", max_completion_tokens=3)
        == most("a", max_tokens=3)
        == most("a", max_tokens=3, max_completion_tokens=3)
        == 3
    )
    assert refused(ChatRequest, max_tokens=3, max_completion_tokens=4) == ("max_completion_tokens", 400)


def test_prompts_are_cut_at_their_beginning() -> None:
    text = "".join(map(chr, range(33, 123)))  # 90 tokens
    assert parse(prompt=[text, "ab"], truncate_prompt_tokens=3).prompts == [ids(text)[-3:], ids("ab")]
    assert parse(prompt=text, truncate_prompt_tokens=-1, max_tokens=5).prompts == [ids(text)[-(CONTEXT - 5) :]]
    assert parse(prompt=text, truncate_prompt_tokens=-1, max_tokens=500).prompts == [ids(text)[-(CONTEXT - 20) :]]
    assert parse(prompt=text, truncate_prompt_tokens=-1).prompts == [ids(text)[-(CONTEXT - 16) :]]
    assert parse(prompt=text, truncate_prompt_tokens=4, echo=True).echo == [text[-4:]]
    assert parse(prompt="abc", truncate_prompt_tokens=4, echo=True).echo == ["abc"]
    assert refused(truncate_prompt_tokens=0) == ("truncate_prompt_tokens", 400)
    long = [{"role": "user", "content": "x" * 100}]
    chat = parse(ChatRequest, {"max_tokens": 40}, messages=long, truncate_prompt_tokens=-1)
    assert (len(chat.prompts[0]), chat.requests[0].limits.max_new_tokens) == (CONTEXT // 2, CONTEXT // 2)


# ── chats ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_chat_is_written_by_the_template_alone() -> None:
    """Its special tokens are its own: none is added by the tokenizer."""

    class Adds:
        """The tokenizer, which begins every text with a token unless it is told not to."""

        chat_template = TEMPLATE

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [*([1] if add_special_tokens else []), *ids(text)]

        def __getattr__(self, name: str) -> Any:
            return getattr(TOKENIZER, name)

    parser = RequestParser(builder(Adds()))
    assert parser.parse(validated(ChatRequest, {"messages": MESSAGES})).prompts == [ids("<user>hi<assistant>")]
    assert parser.parse(validated(CompletionRequest, {"prompt": "hi"})).prompts == [(1, *ids("hi"))]


def test_ends_of_turns_end_a_chat_beside_its_own() -> None:
    settings = {"turn_ends": ("<user>", "</s>")}

    def stops(**fields: Any) -> list[str]:
        return list(parse(ChatRequest, settings, **fields).requests[0].limits.stop)

    assert stops() == ["<user>", "</s>"]
    assert stops(stop="x") == ["x", "<user>", "</s>"]
    assert stops(stop=["x", "y"]) == ["x", "y", "<user>", "</s>"]
    assert stops(stop=["x"], ignore_eos=True) == ["x"]
    assert stops(stop=["", "x", ""], ignore_eos=True) == ["x"]
    assert stops(stop=[""], ignore_eos=True) == stops(stop="", ignore_eos=True) == []
    assert list(parse(CompletionRequest, settings, stop="x").requests[0].limits.stop) == ["x"]


def test_log_probabilities_of_a_chat() -> None:
    assert parse(ChatRequest).top_logprobs is None
    assert parse(ChatRequest, logprobs=True).top_logprobs == 0
    assert parse(ChatRequest, logprobs=True, top_logprobs=3).top_logprobs == 3
    assert refused(ChatRequest, top_logprobs=3) == ("top_logprobs", 400)
    assert refused(ChatRequest, logprobs=True, top_logprobs=5) == ("top_logprobs", 400)


# ── each limit ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("fields", [
    {"temperature": 3.5}, {"temperature": 0, "seed": 1}, {"top_p": 1}, {"min_p": 0}, {"min_p": 1}, {"typical_p": 1}, {"top_k": 0},
    {"repetition_penalty": 0.01}, {"seed": -(2**63)}, {"seed": 2**63 - 1}, {"stop": "x" * 512}, {"stop": ["x"] * 64},
    {"stop_token_ids": [VOCABULARY - 1]}, {"stop_token_ids": [1] * 1024}, {"logit_bias": {"259": 1}}, {"n": 6}, {"best_of": 6},
    {"logprobs": 4}, {"prompt_logprobs": 4}, {"prompt": ["a"] * 12}, {"prompt": ["a"] * 2, "n": 6}, {"max_tokens": 20},
    {"n": 2, "best_of": 2, "stream": True}, {"grammar": {"type": "regex", "text": "a" * 30}}, {"prompt": [VOCABULARY - 1]},
    {"max_tokens": 0, "echo": True}, {"time_budget": 0.001}, {"min_tokens": 0},
], ids=str)  # fmt: skip
def test_what_is_just_allowed(fields: dict[str, Any]) -> None:
    assert parse(**fields)


@pytest.mark.parametrize(("fields", "param"), [
    ({"temperature": -0.01}, "temperature"), ({"top_p": -0.01}, "top_p"), ({"top_p": 1.01}, "top_p"), ({"min_p": 1.01}, "min_p"),
    ({"min_p": -0.01}, "min_p"), ({"typical_p": 0}, "typical_p"), ({"top_k": -2}, "top_k"),
    ({"repetition_penalty": 0}, "repetition_penalty"), ({"seed": 2**63}, "seed"), ({"seed": -(2**63) - 1}, "seed"),
    ({"stop": "x" * 513}, "stop"), ({"stop_token_ids": [VOCABULARY]}, "stop_token_ids"), ({"n": 7}, "n"), ({"n": 0}, "n"),
    ({"best_of": 7}, "best_of"), ({"n": 3, "best_of": 2}, "best_of"), ({"n": 1, "best_of": 2, "stream": True}, "best_of"),
    ({"logprobs": 5}, "logprobs"), ({"prompt_logprobs": 5}, "prompt_logprobs"), ({"prompt": ["a"] * 13}, "prompt"),
    ({"prompt": ["a"] * 3, "n": 5}, "n"), ({"prompt": ["a"] * 5, "n": 3}, "prompt"), ({"max_tokens": 0}, "max_tokens"),
    ({"prompt": ["a"] * 5, "best_of": 3}, "prompt"), ({"prompt": [VOCABULARY]}, "prompt"),
    ({"grammar": {"type": "regex", "text": "a" * 31}}, "grammar"), ({"time_budget": 0}, "time_budget"),
    ({"logit_bias": {"1": True}}, "logit_bias.1"), ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"260": 1}}, "logit_bias"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"), ({"stream_options": {}}, "stream_options"),
    ({"n": True}, "n"), ({"n": "2"}, "n"), ({"n": 2.5}, "n"), ({"unknown": 1}, "unknown"),
    ({"use_beam_search": True}, "use_beam_search"), ({"bad_words": ["x"]}, "bad_words"),
    ({"include_reasoning": False}, "include_reasoning"),
    ({"stream_options": {"include_usage": True, "x": 1}, "stream": True}, "stream_options.x"),
    ({"functions": [{}]}, "functions"), ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"), ({"logit_bias": {"٣": 1}}, "logit_bias"), ({"stop": [1]}, "stop.0"),
    ({"stop": ["x"] * 65}, "stop"), ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
    ({"prompt": ["x", [1]]}, "prompt.1"), ({"prompt": [[1], []]}, "prompt.1"), ({"prompt": ["x"] * 200_000}, "prompt"),
    ({"prompt": ["x"] * 5, "n": 3, "max_tokens": 0, "echo": True}, "prompt"), ({"prompt": []}, "prompt"),
    ({"prompt": None}, "prompt"), ({"prompt": "\ud800"}, "prompt"), ({"prompt": [1, 2], "suffix": "x"}, "suffix"),
    ({"echo": True, "suffix": "x"}, "echo"), ({"speculation": "fast"}, "speculation"), ({"speculation": -1}, "speculation"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_object", "whitespace": "none"}}, "response_format.whitespace"),
    ({"response_format": {"type": "json_object"}, "grammar": {"type": "regex", "text": "a"}}, "grammar"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
     "structured_outputs.disable_additional_properties"),
    ({"structured_outputs": {"json": ""}}, "structured_outputs.json"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["x" * 99] * 2}}, "structured_outputs.choice"),
    ({"guided_grammar": "root ::= ("}, "guided_grammar"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"), ({"prompt_logprobs": -1}, "prompt_logprobs"),

], ids=lambda value: str(value)[:60])  # fmt: skip
def test_what_is_just_refused(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields) == (param, 400)


@pytest.mark.parametrize(("temperature", "taken"), [(100, True), (101, False), (5000, False)])
def test_temperatures_of_noise_are_refused(temperature: float, taken: bool) -> None:
    if taken:
        assert parse(temperature=temperature).requests
    else:
        assert refused(temperature=temperature) == ("temperature", 400)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"n": 0}, "Invalid 'n': integer below minimum value. Expected a value >= 1, but got 0 instead."),
        ({"top_p": 1.5}, "Invalid 'top_p': decimal above maximum value. Expected a value <= 1, but got 1.5 instead."),
        ({"n": "3"}, "Invalid type for 'n': expected an integer, but got a string instead."),
        ({"logit_bias": {"7": "x"}}, "Invalid type for 'logit_bias.7': expected a number, but got a string instead."),
        (
            {"prompt": []},
            "Invalid 'prompt': array too short. Expected an array with minimum length 1, but got one with length 0",
        ),
        (
            {"stop": "a" * 513},
            "Invalid 'stop': string too long. Expected a string with maximum length 512, but got one with",
        ),
        ({"response_format": {}}, "Missing required parameter: 'response_format.type'."),
        ({"response_format": {"type": "x"}}, "Invalid value for 'response_format': 'x'. Supported values are: 'text', "),
        (
            {"speculation": "x"},
            "Invalid value for 'speculation': 'x'. Supported values are: 'auto' or 'off'. Or: Invalid type",
        ),
        ({"max_tokens": -3}, "Invalid 'max_tokens': must be 1 or more, or -1 or -2"),
    ],
)
def test_what_is_wrong_is_said_in_the_words_of_openai(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestValidationError) as raised:
        parse(**fields)
    assert api_error_of(raised.value).detail.startswith(said)


def test_there_is_one_limit_of_samples() -> None:
    """The smaller one of `--max-n` and of the samples that a server holds, for one prompt; the latter for several."""

    def said(**fields: Any) -> tuple[str | None, str]:
        with pytest.raises(ApiError) as raised:
            RequestParser(few).parse(validated(CompletionRequest, {"prompt": "x", **fields}))
        return raised.value.param, raised.value.detail

    few = RequestBuilder(
        PromptEncoder(TOKENIZER, VOCABULARY, TEMPLATE), (END,), VOCABULARY, CONTEXT, 5, Settings("tiny", max_n=4)
    )
    for n in (5, 6, 600):
        beyond = f"Invalid 'n': integer above maximum value. Expected a value <= 4 on this server, but got {n} instead."
        assert said(n=n) == ("n", beyond)
    assert said(n=2, best_of=5)[0] == "best_of"
    assert said(prompt=["x", "y"], n=3) == (
        "n",
        "Invalid 'n': 2 prompts of 3 samples are 6 samples at once. Expected at most 5 on this server.",
    )


def test_seeds_where_they_cannot_be_kept() -> None:
    assert refused(CompletionRequest, {"seeds": False}, seed=1) == ("seed", 400)
    assert parse(CompletionRequest, {"seeds": False}, seed=1, temperature=0)
    assert parse(CompletionRequest, {"seeds": False}, temperature=0.5)


def test_an_unknown_field_is_told_before_all_others() -> None:
    assert refused(prompt=3, temperature=-1, frobnicate=2) == ("frobnicate", 400)
    assert parse(frobnicate=None).requests


# ── grammars ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("fields", "field", "grammar"), [
    ({"grammar": {"type": "regex", "text": "a+"}}, "grammar", Grammar("regex", "a+")),
    ({"response_format": {"type": "json_object"}}, "response_format", Grammar("json_object")),
    ({"response_format": {"type": "json_object", "whitespace": "any"}}, "response_format", Grammar("json_object", "", "any")),
    ({"response_format": {"type": "json_object", "schema": {"const": 1}}}, "response_format",
     Grammar("json_schema", '{"const": 1}')),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "response_format",
     Grammar("json_schema", '{"const": 1}')),
    ({"structured_outputs": {"choice": ["é", 'a"']}}, "structured_outputs.choice", Grammar("lark", 'start: "é" | "a\\""')),
    ({"guided_choice": ["a"]}, "guided_choice", Grammar("lark", 'start: "a"')),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, "structured_outputs.json",
     Grammar("json_schema", '{"const": 1}', "compact")),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False}}, "structured_outputs.json",
     Grammar("json_schema", '{"const": 1}')),
    ({"guided_regex": "a"}, "guided_regex", Grammar("regex", "a")),
], ids=str)  # fmt: skip
def test_the_grammar_and_its_field(fields: dict[str, Any], field: str, grammar: Grammar) -> None:
    parsed = parse(**fields)
    assert (parsed.requests[0].sampling.grammar, parsed.grammar_field) == (grammar, field)


def test_a_second_grammar_is_refused() -> None:
    assert refused(guided_regex="a", guided_choice=["a"]) == ("guided_choice", 400)
    assert refused(structured_outputs={}) == ("structured_outputs", 400)
    assert parse(response_format={"type": "text"}, guided_regex="a").grammar_field == "guided_regex"


@pytest.mark.parametrize("name", [name for name, one in PARAMETERS.items() if one.api])
def test_a_request_takes_what_sampling_takes(name: str) -> None:
    """Every declared number: the same bounds, and the value that stands for the default."""
    one = PARAMETERS[name]
    for value in (-2, -1, 0, 1, 2, 2**62):
        given = value if one.whole else float(value)
        if one.api == "temperature" and given > 100:  # in a request it is a slip
            assert refused(temperature=given) == ("temperature", 400)
            continue
        if one.allows(given):
            assert getattr(parse(**{one.api: given}).requests[0].sampling, name) == given
            continue
        with pytest.raises(RequestError, match=f"{name} must be {re.escape(one.range)}, got"):
            Sampling(**{name: given})
        if one.api == "top_p" and value == 0:  # the most probable token, as OpenAI's API takes it
            assert parse(top_p=given).requests[0].sampling.top_p == 1e-9
        elif value == one.off:
            assert getattr(parse(**{one.api: given}).requests[0].sampling, name) == getattr(Sampling, name)
        else:
            assert refused(**{one.api: given}) == (one.api, 400)


@pytest.mark.parametrize("limit", [-1, -2])
def test_negative_limits_mean_as_many_as_there_may_be(limit: int) -> None:
    """As llama.cpp and Ollama's clients write it, in every API."""
    prompt = "x" * (CONTEXT - 6)
    assert parse(max_tokens=limit).requests[0].limits.max_new_tokens == LIMITS["max_tokens"]
    assert parse(prompt=prompt, max_tokens=limit).requests[0].limits.max_new_tokens == 6
    both = {"max_tokens": limit, "max_completion_tokens": 20}
    for fields in ({"max_tokens": limit}, {"max_completion_tokens": limit}, both):
        assert parse(ChatRequest, **fields).requests[0].limits.max_new_tokens == LIMITS["max_tokens"]
    items = validated(ResponsesRequest, {"input": "hi", "max_output_tokens": limit})
    assert parsed_items(RequestParser(builder()), items).requests[0].limits.max_new_tokens == LIMITS["max_tokens"]


def test_other_limits_are_refused_in_one_sentence_by_their_names() -> None:
    def said(model: Any, body: dict[str, Any]) -> tuple[str | None, str]:
        reader = RequestParser(builder())
        read = partial(parsed_items, reader) if model is ResponsesRequest else reader.parse
        with pytest.raises(Exception) as raised:  # noqa: PT011 - of whichever kind, it becomes an answer
            read(validated(model, body))
        error = api_error_of(raised.value)
        return error.param, error.detail

    chat, named = {"messages": MESSAGES}, ("max_tokens", "max_completion_tokens")
    asked = [
        (CompletionRequest, {"prompt": "hello"}, "max_tokens"),
        (ResponsesRequest, {"input": "hi"}, "max_output_tokens"),
    ]
    for model, body, name in [*asked, *((ChatRequest, chat, name) for name in named)]:
        reason = "must be 1 or more, or -1 or -2 for as many as the server allows, got -3"
        param, message = said(model, {**body, name: -3})
        assert (param, message.startswith(f"Invalid '{name}': "), message.endswith(reason)) == (name, True, True)
        param, message = said(model, {**body, name: 0})
        least = "Expected a value >= 1 on this server, but got 0 instead."
        assert (param, message) == (name, f"Invalid '{name}': integer below minimum value. {least}")


def test_minus_one_means_any_seed() -> None:
    assert parse(seed=-1).requests[0].sampling.seed is None
    assert parse(seed=-2).requests[0].sampling.seed == -2
    assert parse(suffix="").prompts == parse().prompts


# ── /infill and /v1/responses ───────────────────────────────────────────────────────────────────────────────────────


class Middles:
    """The tokenizer with marks of a fill-in-the-middle prompt."""

    chat_template = None

    def get_vocab(self) -> dict[str, int]:
        return {**TOKENIZER.get_vocab(), "<fim_prefix>": 257, "<fim_suffix>": 258, "<fim_middle>": 259}

    def __getattr__(self, name: str) -> Any:
        return getattr(TOKENIZER, name)


def infill(**fields: Any) -> tuple[ParsedRequest, bool]:
    request = validated(InfillRequest, {"input_prefix": "ab", "input_suffix": "cd", "align": False, **fields})
    return parsed_infill(builder(Middles()), request)


def test_the_fields_of_infill() -> None:
    parsed, truncated = infill(n_predict=5, seed=-1, temperature=-1.0, repeat_penalty=1.5, n_probs=9, t_max_predict_ms=2000.0,
                               t_max_prompt_ms=500.0, prompt="x", stop=["z"])  # fmt: skip
    (own,) = parsed.requests
    assert parsed.prompts == [(257, *ids("abx"), 258, *ids("cd"), 259)]
    assert own.sampling == Sampling(temperature=0.0, top_k=40, top_p=0.95, min_p=0.05, repetition_penalty=1.5)
    assert own.limits == Limits(max_new_tokens=5, stop=["z"], eos=(END,), time_budget=2.5)
    assert (parsed.top_logprobs, truncated, parsed.headers) == (4, False, {})
    assert parse(CompletionRequest).top_logprobs is None
    assert infill(n_probs=0)[0].top_logprobs is None


@pytest.mark.parametrize(
    ("given", "most", "said"), [(None, 20, {}), (-1, 20, {}), (20, 20, {}), (21, 20, {"x-shoal-clamped": "n_predict=20"})]
)
def test_lengths_of_infill(given: Any, most: int, said: dict[str, str]) -> None:
    parsed, _ = infill(n_predict=given)
    assert (parsed.requests[0].limits.max_new_tokens, parsed.headers) == (most, said)


def test_infill_leaves_half_of_the_context_to_the_prompt() -> None:
    request = validated(InfillRequest, {"input_prefix": "a" * 99, "input_suffix": "b" * 99, "align": False})
    parsed, truncated = parsed_infill(builder(Middles(), max_tokens=60), request)
    assert truncated
    assert parsed.requests[0].limits.max_new_tokens == CONTEXT // 2
    assert len(parsed.prompts[0]) <= CONTEXT // 2
    assert (
        parsed_infill(
            builder(Middles()), validated(InfillRequest, {"input_prefix": "a", "input_suffix": "", "n_predict": 0})
        )[0].requests
        == []
    )


def test_middles_that_are_aligned() -> None:
    """With a suffix unless it is said otherwise, or a grammar says what the text is."""
    parser = RequestParser(builder(Middles()))

    def removed(**fields: Any) -> tuple[int, ...]:
        body = validated(CompletionRequest, {"prompt": "abcdef", "suffix": "x", **fields})
        return parser.parse(body).requests[0].removed

    assert removed() == removed(align=True) == ids("def")
    assert removed(align=False) == ()
    assert removed(guided_regex="a") == ()
    with pytest.raises(ApiError, match="align"):
        removed(guided_regex="a", align=True)
    assert parse(prompt="abcdef", align=True).requests[0].removed == ids("def")
    assert parse(prompt="abcdef").requests[0].removed == ()
    weighed = parser.parse(validated(CompletionRequest, {"prompt": "abcdef", "suffix": "x", "exact": "weights"}))
    assert weighed.requests[0].weighted
    with pytest.raises(ApiError, match="needs align"):
        parser.parse(validated(CompletionRequest, {"prompt": "abcdef", "suffix": "x", "align": False, "exact": "weights"}))


def test_the_library_the_server_and_editors_dress_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose `align` is not given is dressed by the same rule, and by it alone, at the same place."""
    calls: list[tuple[Dressing, str | None, int | None]] = []

    def applied(
        self: Dressing, request: Request, tokenizer: Any, suffix: Any = None, end: Any = None, naming: Any = None
    ) -> Any:
        calls.append((self, suffix, end))
        return request

    monkeypatch.setattr(Dressing, "apply", applied)
    model = Shoal(scripted(hashed(VOCABULARY), VOCABULARY), None, Middles())
    model.generate(["abcdef"], suffix="x", max_new_tokens=1)
    RequestParser(builder(Middles())).parse(validated(CompletionRequest, {"prompt": "abcdef", "suffix": "x"}))
    infill(input_prefix="abcdef", input_suffix="x", align=None)
    assert calls == [(Dressing(), "x", 7)] * 3


def items(**fields: Any) -> ParsedRequest:
    request = validated(ResponsesRequest, {"input": "hi", **fields})
    return parsed_items(RequestParser(builder()), request)


def test_items_become_the_chat_that_means_the_same() -> None:
    parsed = items(
        instructions="be", max_output_tokens=3, temperature=0.5, include=["message.output_text.logprobs"], top_logprobs=2
    )
    assert parsed.prompts == [ids("<system>be<user>hi<assistant>")]
    assert parsed.requests[0].limits.max_new_tokens == 3
    assert parsed.requests[0].sampling.temperature == 0.5
    assert parsed.top_logprobs == 2
    assert items(max_output_tokens=99).headers == {"x-shoal-clamped": "max_output_tokens=20"}
    assert items(store=True, text={"verbosity": "low"}).headers == {"x-shoal-ignored": "text.verbosity, store"}
    assert items(include=["message.output_text.logprobs"]).top_logprobs == 0
    assert items(top_logprobs=1).headers == {"x-shoal-ignored": "top_logprobs"}
    for fields, param in (({"input": "x" * 90}, "input"),
                          ({"top_logprobs": 5, "include": ["message.output_text.logprobs"]}, "top_logprobs")):  # fmt: skip
        with pytest.raises(ApiError) as raised:
            items(**fields)
        assert raised.value.param == param


def test_pairs_of_metadata() -> None:
    most = {f"{i}".rjust(64): "x" * 512 for i in range(16)}
    assert items(metadata=most)
    for wrong in ({**most, "one": "more"}, {"x" * 65: "y"}, {"x": "y" * 513}, {"x": 1}):
        with pytest.raises(RequestValidationError) as raised:
            items(metadata=wrong)
        assert str(api_error_of(raised.value).param).startswith("metadata")


def test_reasoning_and_calls_come_back_in_one_message() -> None:
    request = validated(ResponsesRequest, {"input": [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "so"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "yes"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "?"},
        {"type": "function_call", "call_id": "3", "name": "f", "arguments": ""},
        {"role": "assistant", "content": "c"},
    ]})  # fmt: skip
    said = [message.plain() for message in request.messages()]
    assert [one["role"] for one in said] == ["user", "assistant", "tool", *["assistant"] * 2, "user", *["assistant"] * 2]
    assert (said[1]["content"], said[1]["reasoning_content"]) == ("yes", "so")
    assert [(call["id"], call["function"]) for call in said[1]["tool_calls"]] == [
        ("1", {"name": "f", "arguments": {}}), ("2", {"name": "g", "arguments": {"a": 1}}),
    ]  # fmt: skip
    assert (said[2]["tool_call_id"], said[2]["content"]) == ("1", "x")
    assert [one["content"] for one in said[3:]] == ["a", "b", "?", "", "c"]  # what follows a call is a message of its own


def test_what_the_engine_would_refuse_is_an_answer() -> None:
    with pytest.raises((ApiError, RequestError)):
        parse(exact="weights")


@pytest.mark.parametrize("more", [{"type": None}, {"type": ""}, {}], ids=str)
@pytest.mark.parametrize("arguments", [{}, {"arguments": None}, {"arguments": ""}, {"arguments": '{"a'}], ids=str)
def test_calls_that_a_client_put_together_come_back(more: dict[str, Any], arguments: dict[str, Any]) -> None:
    """From pieces of a stream, of which only the first has the type and only later ones arguments."""
    call = {"index": 0, "id": None, **more, "function": {"name": "f", **arguments}}
    message = validated(Message, {"role": "assistant", "content": None, "tool_calls": [call]})
    assert message.plain()["tool_calls"] == [{"id": "", "type": "function", "function": {"name": "f", "arguments": {}}}]


def test_reasoning_comes_back_by_either_name() -> None:
    for fields, told in (
        ({"reasoning": "a"}, "a"),
        ({"reasoning_content": "b"}, "b"),
        ({"reasoning_content": "b", "reasoning": "a"}, "b"),
    ):
        assert Message(role="assistant", content="x", **fields).plain()["reasoning_content"] == told
    assert "reasoning_content" not in Message(role="user", content="x").plain()


def test_an_unknown_field_within_another_goes_first() -> None:
    assert refused(temperature=-1, shoal={"detail": True}) == ("shoal.detail", 400)


# ── tools ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def tools(*names: str, **fields: Any) -> ChatRequest:
    given = [{"type": "function", "function": {"name": name}} for name in names]
    return validated(ChatRequest, {"messages": MESSAGES, "tools": given, **fields})


def test_a_tool_without_parameters_takes_no_arguments() -> None:
    for form in (HERMES, LLAMA, MISTRAL):
        rules = CallRules(form, {"f"}, forced=True, parallel=True)
        schema = json.loads(grammar_with_calls(tools("f"), rules, 10**6).text)
        assert schema["$defs"]["tool0"] == {"type": "object", "properties": {}, "additionalProperties": False}


@pytest.mark.parametrize("parallel", [True, False])
def test_a_list_of_calls_has_one_where_no_more_are_wanted(parallel: bool) -> None:
    rules = CallRules(MISTRAL, {"f", "g"}, forced=True, parallel=parallel)
    schema = json.loads(grammar_with_calls(tools("f", "g"), rules, 10**6).text)
    assert (schema["type"], schema["minItems"], schema.get("maxItems")) == ("array", 1, None if parallel else 1)
    for own, name in zip(schema["items"]["anyOf"], ("f", "g"), strict=True):
        assert own["properties"]["name"] == {"const": name}
        assert (own["required"], own["additionalProperties"]) == (["name", "arguments"], False)


def test_several_calls_where_any_tool_may_be_called() -> None:
    rules = CallRules(HERMES, {"f", "g"}, forced=True, parallel=True)
    several = grammar_with_calls(tools("f", "g", tool_choice="required"), rules, 10**6)
    assert (several.between, several.behind) == (HERMES.between, HERMES.behind)
    named = {"type": "function", "function": {"name": "g"}}
    one = grammar_with_calls(tools("f", "g", tool_choice=named), CallRules(HERMES, {"g"}, True, True), 10**6)
    assert (one.between, one.behind) == ("", "")
    assert json.loads(one.text)["properties"]["name"] == {"const": "g"}
    with pytest.raises(ApiError, match="characters"):
        grammar_with_calls(tools("f"), rules, 10)


def test_templates_see_what_a_tool_says() -> None:
    assert shown_tools(tools("f")) == [{"type": "function", "function": {"name": "f"}}]


def test_what_counts_as_a_call() -> None:
    template = "<tool_call>"

    def rules(*names: str, **fields: Any) -> Any:
        return call_rules(tools(*names, **fields), template)

    assert rules("f") == CallRules(HERMES, frozenset({"f"}), forced=False, parallel=True)
    assert rules("f", parallel_tool_calls=False).parallel is False
    assert rules("f", "g", tool_choice="required") == CallRules(HERMES, frozenset({"f", "g"}), forced=True, parallel=True)
    named = {"type": "function", "function": {"name": "g"}}
    assert rules("f", "g", tool_choice=named) == CallRules(HERMES, frozenset({"g"}), forced=True, parallel=True)
    assert rules("f", tool_choice="none") is None
    assert rules() is None
    for wrong, fields in ((("f",), {"tool_choice": named}), ((), {"tool_choice": "required"}), (("f", "f"), {})):
        with pytest.raises(ApiError) as raised:
            rules(*wrong, **fields)
        assert raised.value.param == ("tools" if wrong == ("f", "f") else "tool_choice")
    with pytest.raises(ApiError, match="writes no calls"):
        call_rules(tools("f"), "no marks")


# ── lines of batches ────────────────────────────────────────────────────────────────────────────────────────────────


def test_ids_and_digests_of_lines(tmp_path: Path) -> None:
    texts = ['{"id": true, "prompt": "a"}', "", '{"id": 7, "prompt": "a", "seed": 0}', '{"id": "x", "messages": []}', "[1]", "{",
             '{"custom_id": "y", "method": "POST", "url": "/v1/completions", "body": {"seed": 1}}']  # fmt: skip
    path = tmp_path / "in.jsonl"
    path.write_text("\r\n".join(texts))
    lines = list(read_lines(path))
    assert [(line.number, line.id, line.seeded, line.enveloped) for line in lines] == [
        (1, "line-1", False, False), (3, 7, True, False), (4, "x", False, False), (5, "line-5", False, False),
        (6, "line-6", False, False), (7, "y", True, True),
    ]  # fmt: skip
    assert lines[1].digest == digest(texts[2])  # the same, however lines end
    assert lines[1].request() == ("/v1/completions", {"prompt": "a", "seed": 0})
    assert lines[2].request() == ("/v1/chat/completions", {"messages": []})
    assert lines[5].request() == ("/v1/completions", {"seed": 1})
    for line, code in ((lines[0], "invalid_value"), (lines[3], "invalid_json"), (lines[4], "invalid_json")):
        with pytest.raises(ApiError) as raised:
            line.request()
        assert raised.value.code == code
    assert [has_failed(entry) for entry in (
        lines[1].result({"choices": []}), lines[1].failure(KeyError("x")), lines[5].result({"usage": {}}),
        lines[5].failure(ApiError(400, "no")), lines[5].failure(LineError(400, "no", code="c")),
    )] == [False, True, False, True, True]  # fmt: skip
    wrapped = lines[5].failure(LineError(400, "no", code="c"))
    assert (wrapped["custom_id"], wrapped["response"], wrapped["error"]) == ("y", None, {"code": "c", "message": "no"})
    answered = lines[5].failure(ApiError(404, "no"))
    assert (answered["response"]["status_code"], answered["error"]) == (404, None)
    path.write_bytes(b'\xef\xbb\xbf{"id": 8, "prompt": "a"}\r\n')  # as editors on Windows begin a file
    assert [line.request()[1] for line in read_lines(path)] == [{"prompt": "a"}]
    path.write_text('{"id": 1}\n{"id": 2}\n{"id": 1}\n')
    with pytest.raises(RequestError, match="lines 1 and 3 have the same id 1"):
        list(read_lines(path))


@pytest.mark.parametrize("change", [
    {"custom_id": 1}, {"method": "GET"}, {"url": "/v1/x"}, {"body": []}, {"extra": 1}, {"custom_id": None},
], ids=str)  # fmt: skip
def test_a_line_that_is_no_request(change: dict[str, Any]) -> None:
    entry = {"custom_id": "y", "method": "POST", "url": "/v1/completions", "body": {}} | change
    with pytest.raises(LineError) as raised:
        BatchLine(1, json.dumps(entry), "y", enveloped=True).request()
    assert raised.value.code == ("unknown_field" if "extra" in change else f"invalid_{next(iter(change))}")
