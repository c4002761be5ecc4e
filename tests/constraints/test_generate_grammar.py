"""`shoal generate` with a schema, an expression or a grammar: samples that end by themselves fit, drafted or not.

Tests of: cli.prompt_lines, constraints.grammar_sources.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import run
from shoal.cli.prompt_lines import GrammarOptions
from shoal.config import Grammar
from shoal.constraints.grammar_sources import require_readable

pytest.importorskip("llguidance")
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22, 333]}}, "required": ["a"], "additionalProperties": False}
LARK = 'start: ("x" | "yz")~2..4 "!"'
GBNF = 'root ::= "a" number\nnumber ::= [0-9] [0-9]? "."'
Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def models(saved_pair: tuple[Path, Path]) -> list[str]:
    return ["--model", str(saved_pair[0]), "--draft", str(saved_pair[1])]


@pytest.fixture
def ask(models: list[str], capsys: pytest.CaptureFixture[str]) -> Ask:
    def call(*given: object) -> tuple[int, str, str]:
        work = [*models, "-n", "4", "--max-new-tokens", "40", "--seed", "3", "--json"]
        code = run(["generate", *work, *map(str, given)])
        return code, *capsys.readouterr()

    return call


def is_of_the_schema(text: str) -> bool:
    found = json.loads(text)
    return list(found) == ["a"] and found["a"] in (1, 22, 333)


@pytest.mark.parametrize(
    ("option", "written", "fits"),
    [
        ("--json-schema", json.dumps(SCHEMA), is_of_the_schema),
        ("--json-schema", {"a.json": json.dumps(SCHEMA)}, is_of_the_schema),
        ("--regex", "[ab]{3}(c|dd)", re.compile("[ab]{3}(c|dd)").fullmatch),
        ("--grammar", {"a.lark": LARK}, re.compile("(x|yz){2,4}!").fullmatch),
        ("--grammar", {"a.gbnf": GBNF}, re.compile(r"a\d\d?\.").fullmatch),
    ],
)
def test_every_sample_fits_and_drafts_change_no_token(
    option: str, written: Any, fits: Callable[[str], Any], ask: Ask, tmp_path: Path
) -> None:
    if isinstance(written, dict):
        [(name, text)] = written.items()
        written = tmp_path / name
        written.write_text(text)
    runs = []
    for lookahead in (3, "off"):
        code, out, err = ask("-p", "def f", option, written, "--lookahead", lookahead)
        assert code == 0, err
        found = json.loads(out)
        samples = found["prompts"][0]["samples"]
        assert [sample["finished"] for sample in samples] == [True] * 4
        assert all(fits(sample["text"]) for sample in samples), samples
        assert (found["stats"]["drafted"] > 0) is (lookahead == 3)
        assert found["stats"]["accepted"] <= found["stats"]["drafted"]
        runs.append([sample["token_ids"] for sample in samples])
    assert runs[0] == runs[1]


def test_lines_of_prompts_have_grammars_of_their_own(ask: Ask, tmp_path: Path) -> None:
    """What a line does not say is the command line's."""
    file = tmp_path / "asked.jsonl"
    own: list[dict[str, Any]] = [{"json_schema": SCHEMA}, {"regex": "u+v"}, {"grammar": LARK}, {}]
    file.write_text("".join(json.dumps({"prompt": "def f", **line}) + "\n" for line in own))
    code, out, err = ask("--prompts", file, "--regex", "[pq]{5}", "--lookahead", 3)
    assert code == 0, err
    found = json.loads(out)
    expressions = ["", "u+v", "(x|yz){2,4}!", "[pq]{5}"]
    for prompt, expression in zip(found["prompts"], expressions, strict=True):
        for sample in prompt["samples"]:
            text = sample["text"]
            assert sample["finished"] or expression == "u+v"
            fits = re.fullmatch(expression, text) if expression else is_of_the_schema(text)
            assert fits or not sample["finished"], (expression, text)
    assert found["stats"]["drafted"] > 0


def assert_refused(answer: tuple[int, str, str], said: str) -> None:
    code, out, _ = answer
    assert code == 2
    assert said in json.loads(out)["error"]["message"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--json-schema", "{", "--lookahead", "off"], "--json-schema: the schema is not JSON"),
        (["--json-schema", "nowhere.json"], "cannot read the schema 'nowhere.json'"),
        (["--grammar", "nowhere.lark"], "cannot read the grammar 'nowhere.lark'"),
        (["--regex", ""], "--regex: text of a regex grammar must be not empty"),
        (["--regex", "a", "--json-schema", "{}"], "--regex does not go with --json-schema"),
        (["--regex", "(a"], "--regex: the regex grammar cannot be used: the pattern (a cannot be used: unclosed group"),
        (["--regex", r"a(?=b)"], "a pattern looks around (\\b, (?=, (?!), which cannot be kept: leave it out of a(?=b)"),
        (
            ["--json-schema", '{"type": "nothing"}'],
            '--json-schema: the json_schema grammar cannot be used: type "nothing" is none of',
        ),
    ],
)
def test_what_is_no_grammar_is_refused_before_a_model_is_loaded(given: list[str], said: str, ask: Ask) -> None:
    assert_refused(ask("-p", "x", *given, "--model", "nowhere"), said)


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ("start: nothing", '--grammar: the lark grammar cannot be used: at 1(8): unknown name: "nothing"'),
        ("x: /a/", "no start rule found"),
        ("root ::= (", "--grammar: the grammar is no GBNF"),
    ],
)
def test_a_wrong_grammar_is_refused_before_a_model_is_loaded(grammar: str, said: str, ask: Ask, tmp_path: Path) -> None:
    file = tmp_path / "a.lark"
    file.write_text(grammar)
    assert_refused(ask("-p", "x", "--grammar", file, "--model", "nowhere"), said)


def test_special_tokens_of_a_grammar_are_looked_up_once_a_model_is_loaded(ask: Ask, tmp_path: Path) -> None:
    file = tmp_path / "a.lark"
    file.write_text("start: <|nothing|>")
    assert_refused(ask("-p", "x", "--grammar", file, "--model", "nowhere"), "nowhere is no directory")
    assert_refused(ask("-p", "x", "--grammar", file), "unknown special token")


def test_rules_that_refer_to_each_other_do_not_end_the_process() -> None:
    """llguidance recurses into them without a limit: on a thread whose stack is large enough."""
    rules = "".join(f'r{i}: "a" r{i + 1}\n' for i in range(3000))
    require_readable(Grammar("lark", f'start: r0\n{rules}r3000: "b"\n'))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"json_schema": [1]}, "asked.jsonl:1: json_schema: a schema is a JSON object, got [1]"),
        ({"regex": 3}, "asked.jsonl:1: regex: expected a text, got 3"),
        ({"regex": "a", "grammar": LARK}, "asked.jsonl:1: grammar does not go with regex"),
        ({"grammar": "root ::= ("}, "asked.jsonl:1: grammar: the grammar is no GBNF"),
        ({"regex": "(a"}, "asked.jsonl:1: regex: the regex grammar cannot be used"),
    ],
)
def test_lines_without_a_grammar_are_refused_by_place(line: dict[str, Any], said: str, ask: Ask, tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text(json.dumps({"prompt": "x", **line}))
    assert_refused(ask("--prompts", file), said)


def test_a_schema_is_taken_as_it_stands() -> None:
    assert GrammarOptions(json_schema=json.dumps(SCHEMA)).given() == Grammar("json_schema", SCHEMA)
    assert GrammarOptions().given() is None
