"""Solutions cut inside tokens: where, what each variant is given, what is counted, and the command."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import shoal
from shoal import cli
from shoal.evaluation import cuts as cut_programs
from shoal.evaluation.cuts import ALIGNED, KINDS, NAIVE, UNCUT, VARIANTS, Cut, cuts, places, tokens_of
from shoal.evaluation.problems import Problem
from shoal.evaluation.tasks import Grade, function_problems
from shoal.models.sources import bundled

SOLVED = Problem("f", "python", "def f(xs):\n", "assert f([1]) == 1\n", "f", "    total = sum(xs)\n    return total\n")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(bundled("target"))


@pytest.mark.parametrize("kind", KINDS)
def test_cuts_go_through_tokens_of_their_kind(tokenizer: Any, kind: str) -> None:
    found = cuts(function_problems(30), tokenizer, [kind])
    assert len(found) > 5
    for cut in found:
        whole = cut.problem.prompt + (cut.problem.canonical or "")
        assert cut.end >= cut.start >= len(cut.problem.prompt)
        if kind == "prefix-sep":
            assert cut.given(whole_tokens=True) == cut.given(whole_tokens=False)
            continue
        (token,) = (whole[start:end] for start, end in tokens_of(tokenizer, whole) if start < cut.end < end)
        left = cut.given(whole_tokens=False)[cut.start :]
        assert cut.given(whole_tokens=True) == whole[: cut.start]
        assert left
        assert token.startswith(left)
        assert left != token
        assert (kind == "space") == (left == " " and not token.isspace())
        assert (kind == "prefix-indent") == token.isspace()


def test_a_seed_decides_the_place_and_others_another(tokenizer: Any) -> None:
    problems = function_problems(30)
    assert cuts(problems, tokenizer, KINDS, 3) == cuts(problems[:], tokenizer, KINDS, 3)
    assert cuts(problems, tokenizer, KINDS, 3) != cuts(problems, tokenizer, KINDS, 4)
    assert cuts(problems, tokenizer, ["word"], 3) == [c for c in cuts(problems, tokenizer, KINDS, 3) if c.kind == "word"]


def test_a_token_that_the_prompt_begins_is_not_cut(tokenizer: Any) -> None:
    """The model is given no less than the prompt."""
    whole = "def first(numbers):\n    return numbers[0]\n"
    crossing = [(start, end) for start, end in tokens_of(tokenizer, whole) if end > start + 2]
    assert crossing
    for start, end in crossing:
        assert any(place == start for found in places(tokenizer, whole, start).values() for _, place in found)
        for first in range(start + 1, end):
            assert all(place >= end for found in places(tokenizer, whole, first).values() for _, place in found)


def test_what_cannot_be_cut_has_no_places(tokenizer: Any) -> None:
    assert not any(places(tokenizer, "größe = 1", 0).values())
    assert not cuts([Problem("g", "python", "def g():\n", "", "g")], tokenizer, KINDS)


class Pair:
    """Continues with what follows in the solution, and notes what it was asked."""

    def __init__(self, problem: Problem) -> None:
        self.whole, self.asked = problem.prompt + (problem.canonical or ""), list[tuple[str, dict[str, Any]]]()

    def generate(self, text: str, n: int, **options: Any) -> Any:
        self.asked.append((text, options))
        sample = SimpleNamespace(text=self.whole[len(text) :], finish_reason="stop")
        return Result([SimpleNamespace(samples=[sample] * n)], len(self.asked))


class Result(list[Any]):
    def __init__(self, outputs: list[Any], seconds: float) -> None:
        super().__init__(outputs)
        self.stats = SimpleNamespace(seconds=seconds)


@pytest.mark.parametrize("suffix", ["", "print(f([2]))\n"])
def test_each_way_is_given_what_it_says(suffix: str) -> None:
    problem = Problem("f", "python", SOLVED.prompt, SOLVED.tests, "f", SOLVED.canonical, suffix)
    cut, pair = Cut(problem, "word", 20, 17), Pair(problem)
    rows = list(cut_programs.written(pair, [cut, cut], 3, {"temperature": 0}))  # type: ignore[arg-type]
    assert len(pair.asked) == 9  # the first cut's are asked twice
    for row in rows:
        assert [each.variant for each in row] == list(VARIANTS)
        for each in row:
            assert each.completions == [problem.canonical] * 3
    by_variant = {(len(text), options["align"]) for text, options in pair.asked}
    assert by_variant == {(20, False), (20, True), (17, False)}
    assert pair.asked[3:6] != pair.asked[6:9]  # they take turns in being first
    assert all((options.get("suffix") == suffix) if suffix else options["stop"] for _, options in pair.asked)


def test_what_is_counted() -> None:
    def grader(asked: Iterable[tuple[str, str]]) -> Iterator[Grade]:
        for name, text in asked:
            assert name == "f"
            yield Grade({"passed": float(text == "good")}, "syntax" if text == "bad" else "failed")

    cut, other = Cut(SOLVED, "word", 20, 17), Cut(SOLVED, "space", 16, 15)
    found = [
        cut_programs.VariantSamples(cut, NAIVE, ["bad", "bad", "wrong"], 1.0),
        cut_programs.VariantSamples(cut, ALIGNED, ["good", "good", "wrong"], 3.0),
        cut_programs.VariantSamples(cut, UNCUT, ["good", "good", "good"], 2.0),
        *(cut_programs.VariantSamples(other, variant, ["wrong"], 1.0) for variant in VARIANTS),
    ]
    word, space = cut_programs.summary(list(cut_programs.graded(found, grader)))
    assert (word["kind"], word["cuts"], word["samples"]) == ("word", 1, 3)
    assert [word["variants"][variant]["passed"] for variant in VARIANTS] == pytest.approx([0, 2 / 3, 1])
    assert [word["variants"][variant]["syntax_errors"] for variant in VARIANTS] == pytest.approx([2 / 3, 0, 0])
    assert [word["variants"][variant]["latency"] for variant in VARIANTS] == pytest.approx([0.5, 1.5, 1])
    assert (space["kind"], space["cuts"], space["samples"]) == ("space", 1, 1)


@pytest.mark.slow
def test_the_command_tells_what_alignment_is_worth(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["eval", "functions", "--cut", "word", "--limit", "3", "-n", "2", "--temperature", "0", "--max-new-tokens", "64"]
    assert cli.run([*asked, "--sandbox", "limits", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (row,) = told["cuts"]
    assert {"commit", "date"} <= told["machine"].keys()
    assert (told["set"], told["n"], row["kind"], row["samples"]) == ("functions", 2, "word", 2 * row["cuts"])
    assert row["variants"]["naive"]["passed"] < row["variants"]["aligned"]["passed"]
    assert row["variants"]["aligned"]["latency"] > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["functions", "--cut", "word", "--chat"], "leave out --chat"),
        (["functions", "--cut", "word", "--time-budget", "1"], "leave out --methods, --time-budget and --output"),
        (["functions", "--cut", "word", "--methods", "plain"], "leave out --methods"),
        (["functions", "--cut", "letter"], "letter"),
    ],
)
def test_what_does_not_go_with_cuts(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["eval", *options, "--limit", "2"]) == 2
    assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_a_set_without_solutions_is_refused(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    record = {"task_id": "a", "prompt": "def f():\n", "test": "def check(f):\n    pass\n", "entry_point": "f"}
    (tmp_path / "set.jsonl").write_text(json.dumps(record) + "\n")
    assert cli.run(["eval", "humaneval", "--data", str(tmp_path / "set.jsonl"), "--cut", "word"]) == 2
    assert "have no solutions that could be cut" in " ".join(capsys.readouterr().err.split())


def test_alignment_rewrites_the_cut_token_on_the_bundled_pair() -> None:
    """Greedy, and where nothing is cut (`uncut`) the variant is the plain one."""
    pair = shoal.load()
    (cut,) = cuts(function_problems(1), pair.tokenizer, ["word"])
    rows = list(cut_programs.written(pair, [cut], 1, {"temperature": 0, "max_new_tokens": 48}))
    naive, aligned, uncut = (each.completions[0] for each in rows[0])
    begun = cut.given(whole_tokens=False)[len(cut.problem.prompt) :]
    assert naive.startswith(begun)
    assert aligned.startswith(begun)
    assert uncut.startswith(cut.given(whole_tokens=True)[len(cut.problem.prompt) :])
