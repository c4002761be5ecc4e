"""`shoal eval --solutions`: results that stay after an interruption, and what is said before the first program runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandboxes import strongest
from shoal.cli import run as command_line
from shoal.evaluation import execution, isolation, journal, sandbox
from shoal.evaluation.execution import ExecutionResult, Solution
from shoal.evaluation.journal import RESULTS, SUMMARY
from shoal.evaluation.sandbox import Sandbox

COMMON = ("functions", "--limit", "4", "--solutions", "canonical", "--json")


def shoal(capsys: pytest.CaptureFixture[str], *arguments: object, backend: str = "") -> tuple[int, dict[str, Any], str]:
    capsys.readouterr()
    code = command_line(["eval", *map(str, arguments), "--sandbox", backend or strongest()])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out.strip() else {}, err


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The task ids that are executed; the second of them interrupts."""
    asked: list[str] = []

    def interrupted(pairs: list[Solution], *_: object) -> Iterator[ExecutionResult]:
        for problem, _completion in pairs:
            if len(asked) == 2:
                asked.append("interrupted")
                raise KeyboardInterrupt
            asked.append(problem.task_id)
            yield ExecutionResult("passed" if len(asked) > 1 else "failed", "", 0.1)

    monkeypatch.setattr(journal, "execute_all", interrupted)
    return asked


def test_ctrl_c_keeps_the_results(capsys: pytest.CaptureFixture[str], tmp_path: Path, executed: list[str]) -> None:
    code, summary, err = shoal(capsys, *COMMON, "--output", tmp_path)
    assert code == 130
    assert "interrupted: 2 of 4 judged" in err
    assert (summary["judged"], summary["solutions"]) == (2, 4)
    assert summary["languages"]["python"] == {"passed": 1, "total": 2, "problems": 4, "without_solution": 0}
    assert [failure["task_id"] for failure in summary["failures"]] == executed[:1]
    assert [json.loads(line)["task_id"] for line in (tmp_path / RESULTS).read_text().splitlines()] == executed[:2]
    assert json.loads((tmp_path / SUMMARY).read_text()) == summary
    code, summary, _ = shoal(capsys, *COMMON, "--output", tmp_path)  # goes on: the first two are not executed again
    assert (code, summary["judged"]) == (0, 4)
    assert (len(executed), len(set(executed))) == (5, 5)
    assert summary["languages"]["python"]["passed"] == 3


def test_ctrl_c_without_a_directory_tells_what_was_executed(capsys: pytest.CaptureFixture[str], executed: list[str]) -> None:
    code, summary, _ = shoal(capsys, *COMMON)
    assert (code, summary["judged"], len(executed)) == (130, 2, 3)


def test_every_completion_of_a_problem_is_kept(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    problem = {"task_id": "a", "prompt": "def f():\n", "entry_point": "f", "test": "def check(f): assert f() == 1"}
    (tmp_path / "set.jsonl").write_text(json.dumps(problem))
    lines = [json.dumps({"task_id": "a", "completion": f"    return {value}"}) for value in (1, 2, 1)]
    (tmp_path / "given.jsonl").write_text("\n".join(lines))
    command = ("humaneval", "--data", tmp_path / "set.jsonl", "--solutions", tmp_path / "given.jsonl", "--json")
    code, summary, _ = shoal(capsys, *command, "--output", tmp_path / "out")
    assert (code, summary["judged"], summary["languages"]["python"]["passed"]) == (0, 3, 2)
    outcomes = [json.loads(line)["outcome"] for line in (tmp_path / "out" / RESULTS).read_text().splitlines()]
    assert outcomes == ["passed", "failed", "passed"]
    (tmp_path / "given.jsonl").write_text("\n".join(lines[:2]))
    code, summary, _ = shoal(capsys, *command, "--output", tmp_path / "out")
    assert code == 2
    assert "holds results with solutions_fingerprint" in summary["error"]["message"]


def test_the_isolation_is_told_before_a_program_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    real = execution.execute

    def first(*arguments: Any) -> ExecutionResult:
        told.append(capsys.readouterr().err)
        return real(*arguments)

    monkeypatch.setattr(execution, "execute", first)
    code, summary, _ = shoal(capsys, *COMMON, "--workers", 1)
    assert code == 0
    assert told[0].startswith(f"programs are executed in: {strongest()}")
    assert next(iter(summary)) == "isolation"


def test_a_weak_sandbox_is_refused_before_anything_is_executed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "TOOLS", {"bubblewrap": "no-such-tool", "namespaces": "no-such-tool"})
    code, summary, _ = shoal(capsys, *COMMON, backend="auto")
    assert (code, summary.keys()) == (2, {"error"})
    assert "install bubblewrap" in summary["error"]["message"]
    assert "--sandbox limits" in summary["error"]["message"]
    code, summary, err = shoal(capsys, *COMMON, backend="limits")
    assert (code, summary["judged"]) == (0, 4)
    assert err.startswith("programs are executed in: limits")
    assert "\n  NOT kept from: " in err
    assert "\n  what it prevents, and how: docs/explanation/sandbox.md\n" in err


def test_the_sandbox_is_chosen_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.cli.options.ModelSource.load", lambda _: pytest.fail("a model was loaded"))
    monkeypatch.setattr(sandbox.isolation, "TOOLS", {"bubblewrap": "no-such-tool", "namespaces": "no-such-tool"})
    code, summary, _ = shoal(capsys, "functions", "--limit", 1, "--json", backend="auto")
    assert code == 2
    assert "install bubblewrap" in summary["error"]["message"]


def test_an_interrupted_sandbox_is_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An exception between two results, for example in the progress bar, closes the sandbox too."""
    from shoal.evaluation.tasks import function_problems

    def broken(_: str, results: Iterator[ExecutionResult], __: int) -> Iterator[ExecutionResult]:
        yield next(results)
        raise KeyboardInterrupt

    problems = function_problems(3)
    with Sandbox(strongest()) as box:
        held = journal.Solutions(tmp_path, [(problem, problem.canonical or "") for problem in problems], {})
        with pytest.raises(KeyboardInterrupt):
            held.execute(box, 1, broken)  # type: ignore[arg-type]
        assert len(held.results) == 1
        assert box._closed
