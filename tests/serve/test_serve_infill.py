"""/infill with the bodies of llama.cpp's clients: the texts are those of `generate`, the answers have what the clients read.

Tests of: serve.infill, serve.message_models, constraints.fim, constraints.members.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
import torch

from serving import Served, pair, served
from shoal.constraints import dressing, fim
from shoal.constraints.syntax import LANGUAGES
from shoal.errors import RequestError
from shoal.serve.infill import IndentLimit
from shoal.serve.settings import Settings
from shoal.testing import VOCABULARY, tiny_tokenizer
from tool_calls import speaks

PREFIX, MIDDLE, SUFFIX = "import os\n\ndef f(a):\n", "    retu", "\n\nprint(f(1))\n"
TIMINGS = {
    f"{part}_{what}" for part in ("prompt", "predicted") for what in ("n", "ms", "per_token_ms", "per_second")
}  # fmt: skip
VIM_FIELDS = ["content", *(f"timings/{name}" for name in sorted(TIMINGS)), "truncated", "tokens_cached"]
VIM: dict[str, Any] = {
    "input_prefix": PREFIX, "input_suffix": SUFFIX, "prompt": MIDDLE, "n_predict": 12, "n_indent": 0, "top_k": 40, "top_p": 0.99,
    "input_extra": [{"text": "def g(b):\n    return b\n", "time": [12, 345], "filename": "b.py"}],
    "stream": False, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "t_max_prompt_ms": 50_000,
    "t_max_predict_ms": 50_000, "response_fields": VIM_FIELDS,
}  # fmt: skip
"""llama.vim's, of a cursor; its n_indent is that of the line."""
VIM_RING: dict[str, Any] = {
    "input_prefix": "", "input_suffix": "", "input_extra": VIM["input_extra"], "prompt": "", "n_predict": 0, "temperature": 0.0,
    "stream": False, "samplers": [], "cache_prompt": True, "t_max_prompt_ms": 1, "t_max_predict_ms": 1, "response_fields": [""],
}  # fmt: skip
"""llama.vim's, to have other files read ahead of time."""
VSCODE: dict[str, Any] = {
    "input_prefix": PREFIX, "input_suffix": SUFFIX, "input_extra": [], "prompt": MIDDLE, "n_predict": 12, "top_k": 40,
    "top_p": 0.99, "stream": False, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "t_max_prompt_ms": 50_000,
    "t_max_predict_ms": 50_000,
}  # fmt: skip
"""llama.vscode's."""


@pytest.fixture(scope="module", autouse=True)
def fills() -> Iterator[None]:
    """Makes tokens of the tiny tokenizer those for filling in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fim, "TOKENS", (("Q", "W", "Z"),))
        patch.setattr(dressing, "middle_ends", lambda tokenizer: frozenset())  # which are letters here
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(pair(), max_tokens=64) as running:
        yield running


def asked(server: Served, body: dict[str, Any], **more: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/infill", json=body | more)


def text(server: Served, **options: Any) -> str:
    """Of `generate`, for the same cursor."""
    result = server.shoal.generate(
        [PREFIX + MIDDLE], suffix=SUFFIX, rule="coupled", **{"max_new_tokens": 12, "seed": 7, **options}
    )
    return result[0].samples[0].text


def test_the_body_of_llama_vim(server: Served) -> None:
    answer = asked(server, VIM)
    assert answer.status_code == 200, answer.text
    assert set(answer.json()) == set(VIM_FIELDS)
    assert answer.headers["x-shoal-ignored"] == "samplers.infill"
    assert answer.json()["timings/predicted_n"] == 12 + 3  # with the tokens that write removed characters again
    assert answer.json()["truncated"] is False
    assert asked(server, VIM_RING).json() == {}


def test_the_body_of_llama_vscode(server: Served) -> None:
    answer = asked(server, VSCODE, seed=7).json()
    assert answer["content"] == text(server, top_k=40, top_p=0.99)
    assert set(answer["timings"]) == TIMINGS | {"draft_n", "draft_n_accepted"}
    assert answer["timings"]["draft_n_accepted"] > 0
    assert (answer["stop"], answer["stop_type"], answer["tokens_predicted"]) == (True, "limit", 15)
    assert answer["tokens_evaluated"] == len(fim.fill_in_middle(server.shoal.tokenizer, PREFIX + MIDDLE, SUFFIX))


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, dict(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)),
        ({"samplers": []}, {}),
        ({"samplers": ["top_k"], "top_k": 2}, dict(top_k=2)),
        ({"samplers": ["top_k"], "temperature": 0.3, "top_k": 9}, dict(top_k=9)),
        ({"samplers": ["temperature"], "temperature": 0.3}, dict(temperature=0.3)),
        ({"temperature": 0}, dict(temperature=0)),
        ({"samplers": [], "temperature": 0.0}, dict(temperature=0)),
        ({"samplers": [], "repeat_penalty": 9.0}, dict(repetition_penalty=9.0)),
        ({"samplers": [], "align": False}, dict(align=False)),
        ({"samplers": [], "stop": ["a", "e", "1"], "n_predict": 60}, dict(stop=["a", "e", "1"], max_new_tokens=60)),
    ],
)  # fmt: skip
def test_fields_mean_what_they_mean_in_llama_cpp(server: Served, fields: dict[str, Any], options: dict[str, Any]) -> None:
    body = {"input_prefix": PREFIX + MIDDLE, "input_suffix": SUFFIX, "n_predict": 12, "seed": 7}
    assert asked(server, body, **fields).json()["content"] == text(server, **options)


def test_streams_have_the_same_text(server: Served) -> None:
    body = VSCODE | {"seed": 7, "n_predict": 40, "stream": True}
    with httpx.stream("POST", f"{server.url}/infill", json=body) as answer:
        events = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert len(events) > 3
    assert events[-1]["content"] == ""
    assert "".join(event["content"] for event in events) == asked(server, body, stream=False).json()["content"]


def test_only_names_that_fit_a_header_are_told(server: Served) -> None:
    unknown = {"": 1, " ": 1, "\u00a5": 1, "a\r\nx-other": 1, "y" * 900: 1, **{f"z{i}": 1 for i in range(99)}}
    answer = asked(server, VSCODE | unknown, samplers=["top_k", "\u00a5\n"])
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-shoal-ignored"] == ", ".join(f"z{i}" for i in range(32))
    assert "x-other" not in answer.headers


def test_probabilities(server: Served) -> None:
    answer = asked(server, VSCODE, n_probs=3, seed=7).json()
    found = answer["completion_probabilities"]
    assert len(found) == 15
    assert all(len(token["top_logprobs"]) == 3 for token in found)
    first = found[0]["top_logprobs"]
    assert first[0]["logprob"] >= first[1]["logprob"] >= first[2]["logprob"]


def test_what_the_context_does_not_hold_is_left_out(server: Served) -> None:
    answer = asked(server, VSCODE, input_prefix="x = 1\n" * 2000, n_predict=4).json()
    assert answer["truncated"] is True
    assert 1500 < answer["tokens_evaluated"] < 2048
    excerpts = [{"text": letter * 900, "filename": f"{letter}.py"} for letter in "abcd"]
    more = asked(server, VSCODE, input_extra=excerpts, n_predict=4).json()
    alone = asked(server, VSCODE, n_predict=4).json()
    assert more["tokens_evaluated"] - alone["tokens_evaluated"] == 2 * 902
    assert more["truncated"] is False


def test_time_is_kept_and_texts_end_with_a_line(server: Served) -> None:
    answer = asked(server, VSCODE, n_predict=-1, t_max_prompt_ms=0, t_max_predict_ms=1).json()
    assert answer["stop_type"] == "limit"
    assert answer["tokens_predicted"] < 64


def test_names_of_files_stand_where_models_have_seen_them() -> None:
    class Known:
        def get_vocab(self) -> dict[str, int]:
            return {"<|repo_name|>": 0, "<|file_sep|>": 1}

    excerpts = [("a.py", "x\n"), ("b.py", "y\n")]
    whole = "<|repo_name|>project\n<|file_sep|>a.py\nx\n<|file_sep|>b.py\ny\n<|file_sep|>file\n"
    assert fim.repository(Known(), excerpts) == whole


@pytest.mark.parametrize(
    ("written", "least", "left"),
    [
        ("rn x\n    y\nz", 4, "rn x\n    y"),
        ("rn x\n\n    y\n   z", 4, "rn x\n\n    y"),
        ("rn x\n    ", 4, "rn x\n    "),
        ("z\n\t\tu\n\tz", 2, "z\n\t\tu"),
        ("z\nu", 0, "z\nu"),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 99])
def test_texts_end_before_a_line_that_is_indented_less(written: str, least: int, left: str, size: int) -> None:
    limit, shown, over = IndentLimit(least), "", False
    for start in range(0, len(written), size):
        part, over = limit.feed(written[start : start + size])
        shown += part
        if over:
            break
    assert shown + ("" if over else limit.rest()) == left
    assert over == (left != written)


def lines_of_a(ids: tuple[int, ...]) -> Any:
    """After "a" a line feed, after anything else "a"."""
    letter, feed = tiny_tokenizer().encode("a\n", add_special_tokens=False)
    scores = torch.zeros(VOCABULARY)
    scores[feed if ids[-1] == letter else letter] = 20.0
    return scores


def test_a_text_that_time_ends_has_no_part_of_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, clock, late = tuple(tiny_tokenizer().encode("a\na\na", add_special_tokens=False)), time.perf_counter, [0.0]

    def slow(ids: tuple[int, ...]) -> Any:
        late[0] = max(late[0], 999.0 * (ids[-5:] == begun))
        return lines_of_a(ids)

    monkeypatch.setattr(time, "perf_counter", lambda: clock() + late[0])
    with served(pair(slow), max_tokens=64) as lines:
        answer = asked(lines, VSCODE | {"n_predict": 64, "align": False, "temperature": 0}).json()
    assert answer["stop_type"] == "limit"
    assert answer["content"] in {"\n".join("a" * count) for count in range(2, 9)}
    assert len(answer["content"]) < answer["tokens_predicted"] < 64


def test_a_row_that_an_indent_ends_is_cancelled() -> None:
    with served(pair(lines_of_a), max_tokens=64) as lines:
        body = VSCODE | {"n_predict": 64, "align": False, "n_indent": 2, "temperature": 0}
        answer = asked(lines, body).json()
        assert answer["content"] == "a"
        assert answer["tokens_predicted"] < 64
        assert asked(lines, body, n_indent=0).json()["content"] == "a\n" * 32
        assert lines.worker.rows == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_suffix": None}, "input_suffix"), ({"input_extra": [{"filename": "a"}]}, "input_extra.0.text"),
        ({"grammar": "root ::= x"}, "grammar"), ({"json_schema": {"type": "object"}}, "json_schema"),
        ({"top_p": 2.0}, "top_p"), ({"n_predict": "many"}, "n_predict"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(server: Served, fields: dict[str, Any], param: str) -> None:
    answer = asked(server, VSCODE | fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_models_that_cannot_fill_in_say_so(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fim, "TOKENS", ())
    answer = asked(server, VSCODE)
    assert (answer.status_code, "no fill-in-the-middle tokens" in answer.text) == (400, True)


def test_members_are_for_servers_that_allow_them(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of /infill and of /v1/completions: "z" and "9" are all that is known."""
    refused = asked(server, VSCODE, members=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "members")
    assert "--members" in refused.json()["error"]["message"]
    monkeypatch.setattr("shoal.constraints.members.jedi_analyser", lambda: lambda before, behind: ["z", "9"])
    body = VSCODE | {"prompt": "    a.", "members": True, "align": False, "temperature": 5.0, "top_k": 0, "samplers": None}
    with served(server.shoal, members=True, max_tokens=64) as allowed:
        (model,) = httpx.get(f"{allowed.url}/v1/models").json()["data"]
        assert model["shoal"]["members"]
        given = {"prompt": PREFIX + "    a.", "suffix": SUFFIX, "max_tokens": 3, "n": 6, "seed": 3}
        answers = [asked(allowed, body | {"seed": seed}).json()["content"] for seed in range(4)]
        answers += [choice["text"] for choice in allowed.post(**given, members=True).json()["choices"]]
        free = [choice["text"] for choice in allowed.post(**given).json()["choices"]]
    assert all(text[:1] in ("z", "9") for text in answers), answers
    assert not all(text[:1] in ("z", "9") for text in free)


def test_a_server_with_members_needs_jedi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jedi", None)
    with pytest.raises(RequestError, match=r"pip install '\.\[members\]'"):
        Settings("m", members=True)


def test_a_file_of_windows_gets_its_own_ends_of_lines() -> None:
    """The model reads line feeds, whatever it writes; an empty line ends no indented suggestion."""
    body = {
        "input_prefix": "def f():\n    a\n",
        "input_suffix": "\n",
        "n_predict": 60,
        "n_indent": 4,
        "stop": ["zz"],
        "align": False,
    }
    windows = body | {name: body[name].replace("\n", "\r\n") for name in ("input_prefix", "input_suffix")}
    said = "    b\r\n\r\n    c\n\n    d\re"
    with served(pair(speaks(said + "zz", begin="Z")), max_tokens=64) as server:
        texts = {}
        for name, asking in (("lf", body), ("crlf", windows)):
            for stream in (False, True):
                answer = httpx.post(f"{server.url}/infill", json={**asking, "stream": stream})
                got = [json.loads(part.removeprefix("data: ")) for part in answer.text.split("\n\n") if part]
                texts[name, stream] = "".join(one["content"] for one in got)
        plain = "    b\n\n    c\n\n    de"
        for stream in (False, True):
            assert texts["lf", stream] == plain
            assert texts["crlf", stream] == plain.replace("\n", "\r\n")


def test_completions_with_a_suffix_have_the_ends_of_lines_of_each_file() -> None:
    """The model reads line feeds, and offsets point into the returned text; a grammar's text stays its own."""
    said = "    b\r\n\n  c\rzz"
    body = {"prompt": ["a\n", "a\r\n"], "suffix": "", "max_tokens": 40, "stop": ["c\r\nz", "zz"], "logprobs": 0, "n": 2}
    body |= {"align": False, "return_token_ids": True, "shoal": {"details": True}}
    plain, crlf = "    b\n\n  c", "    b\r\n\r\n  c"
    with served(pair(speaks(said, begin="Z")), max_tokens=64) as server:
        whole = server.post(**body).json()["choices"]
        parts = server.post(**body, stream=True).text.split("\n\n")[:-2]
        streamed = [json.loads(part.removeprefix("data: "))["choices"][0] for part in parts]
        fenced = server.post(**body | {"guided_regex": "    b\\n\\n  c", "stop": None}).json()["choices"]
    for choice, text in zip(whole, [plain, plain, crlf, crlf], strict=True):
        own = [one for one in streamed if one["index"] == choice["index"]]
        assert choice["text"] == "".join(one["text"] for one in own) == text
        offsets = choice["logprobs"]["text_offset"]
        assert offsets == [place for one in own for place in one["logprobs"]["text_offset"]]
        assert [text[a:b] for a, b in pairwise([*offsets, len(text)])] == [one["text"] for one in choice["shoal"]["tokens"]]
    assert len({str(choice["prompt_token_ids"]) for choice in whole}) == 1
    assert [choice["text"] for choice in fenced] == [plain] * 4


@pytest.mark.parametrize("name", ["stop", "input_extra", "prompt"])
def test_each_text_of_a_request_may_have_the_line_ends_of_windows(name: str) -> None:
    """Its stop strings and parts of other files as well: the same is read, and ends where it did."""
    asking = {"input_prefix": "a\n", "input_suffix": "\n", "align": False, "n_predict": 40, "stop": ["zz"]}
    fields: dict[str, Any] = {
        "stop": ["c\n"], "input_extra": [{"filename": "b.py", "text": "b = 1\nc = 2\n"}], "prompt": "d\n",
    }  # fmt: skip
    windows = json.loads(json.dumps(fields).replace("\\n", "\\r\\n"))
    with served(pair(speaks("b\nc\nd\nzz", begin="Z")), max_tokens=64) as server:
        found = [httpx.post(f"{server.url}/infill", json={**asking, name: one[name]}).json() for one in (fields, windows)]
    assert found[0]["content"] == ("b\n" if name == "stop" else "b\nc\nd\n")
    for key in ("content", "stop_type", "tokens_evaluated"):
        assert found[0][key] == found[1][key]


JS = {"input_prefix": "function f(a) {\n", "prompt": "  return a + ", "input_suffix": ";\n}\n", "align": False, "seed": 1}


@pytest.mark.parametrize(
    ("said", "fields", "text", "syntax"),
    [
        ("b(1) + (c", {}, "b(1) + (c", None),
        ("b(1) + (c", {"filename": "src/a.js"}, "b(1) ", "cut"),
        ("b(1) + (c", {"syntax": "javascript"}, "b(1) ", "cut"),
        ("b(1) + (c", {"filename": "a.js", "syntax": "python"}, "", ""),
        ("b(1) + (c", {"filename": "a.txt"}, "b(1) + (c", None),
        ("b(1) + (c", {"filename": "a.py"}, "b(1) + (c", None),
        ("(b + (c", {"filename": "a.js"}, "(b + (c", "incomplete"),
        ("b;\n  c(1);\nd(", {"filename": "a.js", "n_indent": 2}, "b;\n  c(1);", "cut"),
        ("b + g({\nx: 1});", {"filename": "a.js", "n_indent": 2}, "b + g", "cut"),
        ("(b + g({\nx: 1}));", {"filename": "a.js", "n_indent": 2}, "(b + g({", "incomplete"),
    ],
)
def test_the_name_of_a_file_says_where_texts_are_cut(
    said: str, fields: dict[str, Any], text: str, syntax: str | None
) -> None:
    body = JS | {"n_predict": len(said)} | fields
    with served(pair(speaks(said, begin="Z", ends=False)), max_tokens=64) as server:
        if syntax == "":
            refused = asked(server, body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "syntax")
            return
        answers = [asked(server, body).json()]
        stream = httpx.post(f"{server.url}/infill", json=body | {"stream": True}).text
        events = [json.loads(part.removeprefix("data: ")) for part in stream.split("\n\n") if part]
        answers.append(events[-1] | {"content": "".join(event["content"] for event in events)})
    for answer in answers:
        assert answer["content"] == text
        assert answer.get("syntax") == syntax


def test_a_text_that_ends_by_itself_ends_where_the_file_parses() -> None:
    with served(pair(speaks("b(1)", begin="Z")), max_tokens=64) as server:
        answer = asked(server, JS, n_predict=20, filename="a.mjs").json()
        assert (answer["content"], answer["syntax"], answer["stop_type"]) == ("b(1)", "complete", "eos")
        body = {"prompt": "return a + ", "suffix": ";\n", "max_tokens": 9, "align": False}
        for fields in ({"syntax": "javascript"}, {"filename": "a.js"}):
            completed = server.post(**body, **fields).json()
            assert completed["choices"][0]["text"] == "b(1)"
            assert completed["usage"]["choices"][0]["syntax"] == "complete"
        ids = server.post(prompt=[1, 2], filename="a.js").json()["error"]
        assert (ids["param"], "text" in ids["message"]) == ("filename", True)
        (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert model["shoal"]["syntax"] == list(LANGUAGES)
