"""`shoal batch` takes the files that OpenAI's batch API takes, and writes what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from serving import legible, pair, served
from shoal import cli
from shoal.serve.batch_lines import read_lines
from shoal.serve.output_file import OutputFile
from shoal.serve.serve_config import ServeConfig
from shoal.serve.settings import Settings

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def asked(name: Any, url: Any, **body: Any) -> dict[str, Any]:
    """A line as OpenAI's documentation shows it."""
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def chat(name: str, text: str, **options: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": text}]
    return asked(name, CHAT, model="tiny", messages=messages, **options)


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def results(tmp_path: Path, lines: list[Any]) -> dict[str, dict[str, Any]]:
    """What comes back, by custom id."""
    found: list[Any] = []
    recipe = ServeConfig(lambda: pair(max_batch=4), Settings("tiny", chat_template=TEMPLATE, max_tokens=64), lookahead=4)
    recipe.offline().answer(read_lines(write(tmp_path / "in", lines)), found.append)
    assert len(found) == len(lines)
    return {entry["custom_id"]: entry for entry in found}


def test_results_hold_what_the_server_answers(tmp_path: Path) -> None:
    lines = [
        chat("request-1", "Hello world!", seed=1, max_tokens=12),
        chat("request-2", "Name a prime.", seed=2, max_completion_tokens=9, n=2, logprobs=True, user="somebody"),
        asked("request-3", COMPLETIONS, prompt="hello", seed=3, n=3, best_of=4),
        asked("request-4", COMPLETIONS, model="tiny", prompt=["a", "b"], temperature=0, max_tokens=9999),
        chat("request-5", "Hi", seed=5, nn=1),
        asked("request-6", COMPLETIONS, prompt="x", model="other"),
        asked("request-7", COMPLETIONS, prompt="x", n=0),
    ]
    got = results(tmp_path, lines)
    with served(pair(max_batch=4), chat_template=TEMPLATE, max_tokens=64) as server:
        for line in lines:
            answer = server.post(line["url"], **({"prompt": None} if "messages" in line["body"] else {}) | line["body"])
            result = got[line["custom_id"]]
            assert result.keys() == {"id", "custom_id", "response", "error", "shoal"}
            assert result["id"].startswith("batch_req_")
            assert result["error"] is None
            assert result["response"].keys() == {"status_code", "request_id", "body"}
            assert result["response"]["request_id"]
            assert result["response"]["status_code"] == answer.status_code
            assert essence(result["response"]["body"]) == essence(answer.json())
            notes = {name: value for name, value in answer.headers.items() if name in ("x-shoal-ignored", "x-shoal-clamped")}
            assert result["shoal"].get("notes", {}) == notes
    assert [got[f"request-{n}"]["response"]["status_code"] for n in range(1, 8)] == [200, 200, 200, 200, 400, 404, 400]
    completion = openai.types.chat.ChatCompletion.model_validate(got["request-2"]["response"]["body"])
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 2 * 9
    assert len({result["id"] for result in got.values()}) == len({r["response"]["request_id"] for r in got.values()}) == 7


def test_lines_of_responses_are_answered(tmp_path: Path) -> None:
    body = {"model": "tiny", "input": "Hello world!", "seed": 1, "max_output_tokens": 999}
    got = results(
        tmp_path, [asked("a", "/v1/responses", **body), chat("b", "x", seed=1), asked("c", "/v1/responses", input=[])]
    )
    answer = openai.types.responses.Response.model_validate(got["a"]["response"]["body"])
    assert answer.usage is not None
    assert (answer.output_text != "", answer.usage.output_tokens) == (True, 64)
    assert got["a"]["shoal"]["notes"] == {"x-shoal-clamped": "max_output_tokens=64"}
    assert (got["c"]["response"]["status_code"], got["c"]["response"]["body"]["error"]["param"]) == (400, "input")


def essence(body: dict[str, Any]) -> Any:
    """An answer without what differs from one asking to the next."""
    took = [{**choice, "rounds": 0, "mean_logprob": 0} for choice in body.get("usage", {}).get("choices", ())]
    texts = [choice.get("text", choice.get("message")) for choice in body.get("choices", ())]
    return (
        body.get("error"),
        body.get("object"),
        body.get("model"),
        texts,
        took,
        body.get("usage", {}).get("completion_tokens"),
    )


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({"url": "/v1/embeddings"}, "invalid_url", "/v1/embeddings"),
        ({"url": None}, "invalid_url", "None"),
        ({"url": ["/v1/completions"]}, "invalid_url", "url must be"),
        ({"method": "GET"}, "invalid_method", "GET"),
        ({"method": None}, "invalid_method", "POST"),
        ({"body": "text"}, "invalid_body", "body"),
        ({"body": None}, "invalid_body", "body"),
        ({"prompt": "x"}, "unknown_field", "'prompt'"),
        ({"id": "x"}, "unknown_field", "'id'"),
        ({"custom_id": 7}, "invalid_custom_id", "custom_id"),
    ],
)
def test_a_wrong_line_has_no_response_and_leaves_the_others_alone(tmp_path: Path, change: Any, code: str, said: str) -> None:
    wrong = {**asked("wrong", COMPLETIONS, prompt="x"), **change}
    got = results(tmp_path, [wrong, asked("right", COMPLETIONS, prompt="x", seed=1)])
    result = got[wrong["custom_id"]]
    assert (result["response"], result["error"]["code"]) == (None, code)
    assert result["error"].keys() == {"code", "message"}
    assert said in result["error"]["message"]
    assert got["right"]["response"]["status_code"] == 200


def test_a_line_without_custom_id_goes_by_its_number(tmp_path: Path) -> None:
    nameless = asked("x", COMPLETIONS, prompt="x")
    del nameless["custom_id"]
    got = results(tmp_path, [asked("right", COMPLETIONS, prompt="x"), nameless])
    assert got["line-2"]["error"]["code"] == "invalid_custom_id"


def test_a_stream_is_refused_as_the_api_would_refuse_a_field(tmp_path: Path) -> None:
    result = results(tmp_path, [chat("a", "hi", stream=True)])["a"]
    assert result["error"] is None
    assert (result["response"]["status_code"], result["response"]["body"]["error"]["param"]) == (400, "stream")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """The command with a scripted pair: its exit code, and its --json."""
    monkeypatch.setattr("shoal.cli.options.ModelSource.load", lambda source: pair(legible(0), max_batch=4))

    def run(source: Path, out: Path) -> Any:
        capsys.readouterr()
        code = cli.run(["batch", str(source), str(out), "--json", "--k", "4", "--name", "tiny"])
        return code, json.loads(capsys.readouterr().out)

    return run


def test_both_kinds_of_lines_in_one_file(tmp_path: Path, command: Any) -> None:
    lines = [asked("one", COMPLETIONS, prompt="hello", seed=1), {"id": "two", "prompt": "hello", "seed": 1}, {"prompt": "x"}]
    code, tally = command(write(tmp_path / "in", lines), tmp_path / "out")
    assert (code, tally["answered"], tally["failed"], tally["tokens"]) == (0, 3, 0, 3 * 16)
    assert 0 < tally["accepted"] <= tally["drafted"]
    first, second, third = sorted(
        map(json.loads, (tmp_path / "out").read_text().splitlines()),
        key=lambda entry: entry.get("custom_id", f"{entry['id']}"),
    )
    assert (first["id"], "custom_id" in first) == ("line-3", False)
    assert [entry.get("custom_id", entry["id"]) for entry in (second, third)] == ["one", "two"]
    assert second["response"]["body"]["choices"][0]["text"] == third["choices"][0]["text"]
    kept = (tmp_path / "out").read_bytes()
    (tmp_path / "out").write_bytes(kept[:-30])
    assert command(tmp_path / "in", tmp_path / "out")[1]["answered"] == 1


def test_a_seed_within_a_body_brings_the_coupled_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    rules, offline = [], ServeConfig.offline
    monkeypatch.setattr(ServeConfig, "offline", lambda self: (rules.append(self.rule), offline(self))[1])
    command(write(tmp_path / "a", [asked("a", COMPLETIONS, prompt="x")]), tmp_path / "a.out")
    command(write(tmp_path / "b", [asked("a", COMPLETIONS, prompt="x", seed=0)]), tmp_path / "b.out")
    assert rules == ["rejection", "coupled"]


def test_a_custom_id_that_is_there_twice_is_refused(tmp_path: Path, command: Any) -> None:
    lines = [asked("a", COMPLETIONS, prompt="x"), chat("b", "y"), chat("a", "z")]
    code, out = command(write(tmp_path / "in", lines), tmp_path / "out")
    assert (code, "lines 1 and 3 have the same id 'a'" in out["error"]["message"]) == (2, True)
    assert not (tmp_path / "out").exists()


def test_failures_are_counted(tmp_path: Path, command: Any) -> None:
    lines = [asked("a", "/v1/embeddings", input="x"), asked("b", COMPLETIONS, prompt="x", n=0)]
    source = write(tmp_path / "in", lines)
    code, tally = command(source, tmp_path / "out")
    assert (code, tally["answered"], tally["failed"]) == (1, 2, 2)
    settings = {
        name: value
        for name, value in json.loads((tmp_path / "out").read_text().splitlines()[0])["shoal"].items()
        if name != "line"
    }
    with OutputFile(tmp_path / "out", list(read_lines(source)), settings) as ledger:
        assert ledger.failed == ledger.ids == {"a", "b"}
