"""`shoal eval --export`: the files have the samples of the journal, as EvalPlus and the BigCode harness read them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandboxes import strongest
from shoal.cli import run as command_line
from shoal.errors import RequestError
from shoal.evaluation.exports import FORMATS, HUMANEVAL, programs_of
from shoal.evaluation.journal import SAMPLES
from shoal.evaluation.problems import Problem, read_humaneval
from shoal.testing import save_pair

NUMBERS = (2, 0, 10, 1, 3, 4, 5, 6, 7, 8, 9)
"""Problems of a file in another order than the evaluators', beyond 9: as texts, 10 is sorted before 2."""


def record(number: int) -> dict[str, str]:
    return {
        "task_id": f"HumanEval/{number}",
        "prompt": f'def f{number}():\n    """Return {number}: é, \u2028."""\n',
        "entry_point": f"f{number}",
        "test": f"def check(candidate):\n    assert candidate() == {number}\n",
        "canonical_solution": f"    return {number}\n",
    }


def write_set(file: Path, numbers: tuple[int, ...]) -> list[Problem]:
    file.write_text("\n".join(json.dumps(record(number)) for number in numbers), encoding="utf-8")
    return read_humaneval(file)


def entry(*completions: str) -> dict[str, Any]:
    return {"attempts": {"batched": {"samples": [{"completion": text} for text in completions]}}}


def bigcode_passes(program: str, number: int) -> bool:
    """As the harness decides: the program, then the tests of the problem at its place."""
    problem = record(number)
    try:
        exec(f"{program}\n\n{problem['test']}\ncheck({problem['entry_point']})", {})
    except (AssertionError, NameError, SyntaxError):
        return False
    return True


def test_every_program_is_tested_by_the_tests_of_its_problem(tmp_path: Path) -> None:
    problems = write_set(tmp_path / "set.jsonl", NUMBERS)
    entries = {p.task_id: entry(str(p.canonical), "    return -1\n") for p in problems}
    entries["HumanEval/4"] = {"attempts": {}, "error": "the prompt is too long"}
    programs = programs_of(problems, entries, "batched", 2)
    lines = [json.loads(line) for line in FORMATS["evalplus"].render("humaneval", programs).split("\n")[:-1]]
    assert [set(line) for line in lines] == [{"task_id", "solution"}] * 22
    assert [line["task_id"] for line in lines] == [f"HumanEval/{number // 2}" for number in range(22)]
    generations = json.loads(FORMATS["bigcode"].render("humaneval", programs))
    assert [program for found in generations for program in found] == [line["solution"] for line in lines]
    outcomes = [[bigcode_passes(program, place) for program in found] for place, found in enumerate(generations)]
    assert outcomes == [[place != 4, False] for place in range(11)]  # a refused problem has its prompt, which returns None
    assert generations[4] == [record(4)["prompt"]] * 2
    by_text = json.loads(FORMATS["bigcode"].write(dict(sorted(programs.items()))))  # 10 before 2: the tests are others'
    assert [bigcode_passes(found[0], place) for place, found in enumerate(by_text)] == [True, True, *[False] * 9]


def test_a_list_by_place_leaves_out_no_problem(tmp_path: Path) -> None:
    gap = write_set(tmp_path / "gap.jsonl", (0, 1, 3))
    FORMATS["evalplus"].check("humaneval", gap)
    with pytest.raises(RequestError, match="HumanEval/2 is missing"):
        FORMATS["bigcode"].check("humaneval", gap)
    entries = {problem.task_id: entry("x", "y") for problem in gap}
    programs = programs_of([replace(problem, suffix="end") for problem in gap], entries, "batched", 2)
    assert programs["HumanEval/1"] == [f"{gap[1].prompt}{text}end" for text in "xy"]
    assert FORMATS["evalplus"].hint("humaneval", "f.jsonl", programs).endswith("(3 of its 164 problems: it needs all)")
    assert "--limit 3 --n_samples 2 --load_generations_path f.json" in FORMATS["bigcode"].hint(
        "humaneval", "f.json", programs
    )
    known = HUMANEVAL["humaneval"]
    assert [known.place(f"HumanEval/{number}") for number in ("0", "163", "164", "07", "-1", "1 ")] == [0, 163, *[None] * 4]
    assert known.place("Other/1") is None


def shoal(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = command_line(["eval", *map(str, arguments), "--sandbox", strongest()])
    return code, *capsys.readouterr()


@pytest.mark.slow
def test_samples_are_written_after_a_run_and_from_a_finished_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = save_pair(tmp_path)
    write_set(tmp_path / "set.jsonl", (1, 0))
    files = {"evalplus": tmp_path / "out.jsonl", "bigcode": tmp_path / "out.json"}
    common = [
        "humaneval", "--data", tmp_path / "set.jsonl", "--model", target, "--draft", drafter, "-n", 2, "--max-new-tokens", 6,
        "--temperature", 1, "--methods", "plain,batched", "--output", tmp_path / "out", "--no-plot", "--json",
    ]  # fmt: skip
    code, out, err = shoal(capsys, *common)
    assert (code, json.loads(out)["problems"]) == (0, 2), err
    monkeypatch.setattr("shoal.cli.options.ModelSource.load", lambda _: pytest.fail("a model was loaded"))
    exports = [part for name, file in files.items() for part in ("--export", f"{name}:{file}")]
    code, out, err = shoal(capsys, *common, *exports)
    assert (code, json.loads(out)["problems"]) == (0, 2), err
    assert f"evalplus.evaluate --dataset humaneval --samples {files['evalplus']}" in err
    journal = [json.loads(line) for line in (tmp_path / "out" / SAMPLES).read_text(encoding="utf-8").split("\n")[:-1]]
    expected = [
        (line["task_id"], record(int(line["task_id"][-1]))["prompt"] + sample["completion"])
        for line in reversed(journal)  # the set has problem 1 first
        for sample in line["attempts"]["batched"]["samples"]
    ]
    plain = [s["completion"] for line in reversed(journal) for s in line["attempts"]["plain"]["samples"]]
    assert plain != [program[len(record(0)["prompt"]) :] for _, program in expected]  # without a seed: whose they are shows
    lines = [json.loads(line) for line in files["evalplus"].read_text().splitlines()]
    assert [(line["task_id"], line["solution"]) for line in lines] == expected
    generations = json.loads(files["bigcode"].read_text())
    assert [len(found) for found in generations] == [2, 2]
    assert [program for found in generations for program in found] == [program for _, program in expected]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["humaneval", "--data", "SET", "--export", "lcb:x.jsonl"], "FORMAT:FILE with a format of evalplus, bigcode"),
        (["humaneval", "--data", "SET", "--export", "evalplus"], "FORMAT:FILE"),
        (["humaneval", "--data", "SET", "--export", "evalplus:x.json"], "evalplus:FILE.jsonl"),
        (["humaneval", "--data", "SET", "--export", "bigcode:nowhere/x.json"], "no directory 'nowhere'"),
        (["humaneval", "--data", "SET", "--export", "bigcode:x.json", "--export", "bigcode:x.json"], "two exports"),
        (
            ["functions", "--limit", "1", "--export", "evalplus:x.jsonl"],
            "EvalPlus has no task with the problems of functions",
        ),
        (
            ["mbxp", "--data", "MBXP", "--export", "bigcode:x.json"],
            "has no task with the problems of mbxp: humaneval can be",
        ),
        (["humaneval", "--data", "OTHER", "--export", "evalplus:x.jsonl"], "no problem 'HumanEval/164': its ids are"),
        (["functions", "--solutions", "canonical", "--export", "evalplus:x.jsonl"], "leave out --solutions"),
    ],
)
def test_what_an_evaluator_would_not_read_is_refused_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.setattr("shoal.cli.options.ModelSource.load", lambda _: pytest.fail("a model was loaded"))
    monkeypatch.chdir(tmp_path)
    write_set(tmp_path / "SET", (0, 1))
    write_set(tmp_path / "OTHER", (0, 164))
    (tmp_path / "MBXP").write_text(json.dumps({**record(0), "task_id": "MBPP/1", "language": "python"}))
    code, out, err = shoal(capsys, *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
