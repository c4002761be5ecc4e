"""Results name the commit that they were made at; benchmarks/results takes no others.

Tests of: bench.machine, benchmarks/provenance.py; the arguments of the scripts under benchmarks.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import command
import cpu_passes
import first_token
import forced
import prompts
import ragged
import scaling
import virtual
from provenance import write_results
from shoal.bench.machine import NO_GIT, commit, machine, require_place
from shoal.cli import run
from shoal.errors import RequestError

ROOT = Path(__file__).parents[2]


def git(place: Path, *arguments: str) -> None:
    who = ("-c", "user.name=n", "-c", "user.email=e")
    subprocess.run(["git", *who, *arguments], cwd=place, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A clean repository with a package and results."""
    for name in ("src/pkg/__init__.py", "benchmarks/results/old.json", "benchmarks/run.sh", "README"):
        file = tmp_path / "repo" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("a")
    (tmp_path / "repo" / ".gitignore").write_text("*.pyc\n")
    git(tmp_path / "repo", "init", "-q")
    git(tmp_path / "repo", "add", "-A")
    git(tmp_path / "repo", "commit", "-qm", "x")
    return tmp_path / "repo"


@pytest.mark.parametrize(
    ("file", "dirty"),
    [
        (None, False),
        ("src/pkg/__init__.py", True),
        ("README", True),  # tracked
        ("src/pkg/new.py", True),
        ("benchmarks/new.py", True),
        ("notes.txt", False),  # untracked, and no code
        ("src/pkg/x.pyc", False),  # ignored
        ("benchmarks/results/old.json", False),  # what a run wrote must not spoil the next one
        ("benchmarks/results/new.json", False),
    ],
)
def test_dirty_is_what_may_change_a_measurement(repository: Path, file: str | None, dirty: bool) -> None:
    if file is not None:
        (repository / file).write_text("b")
    found = commit(repository / "src" / "pkg")
    assert re.fullmatch("[0-9a-f]{12}-dirty" if dirty else "[0-9a-f]{12}", found)
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "y", "--allow-empty")
    assert re.fullmatch("[0-9a-f]{12}", commit(repository / "src" / "pkg"))


def test_staged_is_not_committed(repository: Path) -> None:
    (repository / "README").write_text("b")
    git(repository, "add", "-A")
    assert commit(repository / "src" / "pkg").endswith("-dirty")


def test_an_installed_package_has_no_commit(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "site-packages" / "pkg"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    assert commit(other) == NO_GIT
    inside = repository / "src" / "other"  # in some repository, but not of it
    inside.mkdir()
    (inside / "__init__.py").write_text("")
    assert commit(inside) == NO_GIT
    monkeypatch.setenv("PATH", "")  # no git at all
    assert commit(repository / "src" / "pkg") == NO_GIT


def test_a_machine_always_names_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(machine(torch.device("cpu"))["commit"], str)
    monkeypatch.setattr("shoal.bench.machine.commit", lambda: NO_GIT)
    assert machine(torch.device("cpu"))["commit"] == NO_GIT


@pytest.fixture
def results(tmp_path: Path) -> Path:
    place = tmp_path / "benchmarks" / "results"
    (place / "deep").mkdir(parents=True)
    return place


DIRTY, CLEAN = "0123456789ab-dirty", "0123456789ab"


@pytest.mark.parametrize("made_at", [DIRTY, NO_GIT, "None", ""])
def test_kept_results_name_a_commit(results: Path, tmp_path: Path, made_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.bench.machine.commit", lambda: made_at)
    link = tmp_path / "link"
    link.symlink_to(results)
    monkeypatch.chdir(results)
    for place in (results, results / "a.json", results / "deep" / "a.json", Path("a.json"), link / "a.json"):
        with pytest.raises(RequestError, match="must name the commit"):
            require_place(place)
        with pytest.raises(RequestError, match="must name the commit"):
            write_results(place, {"machine": {"commit": made_at}})
    assert not [file for file in results.rglob("*") if file.is_file()]
    require_place(None, tmp_path, tmp_path / "a.json")
    write_results(tmp_path / "a.json", {"machine": {"commit": made_at}})
    assert json.loads((tmp_path / "a.json").read_text())["machine"]["commit"] == made_at


def test_results_of_a_clean_tree_are_kept(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.bench.machine.commit", lambda: CLEAN)
    require_place(results, results / "a.json")
    write_results(results / "a.json", {"machine": {"commit": CLEAN}})
    assert (results / "a.json").is_file()
    monkeypatch.setattr("shoal.bench.machine.commit", lambda: DIRTY)
    write_results(results / "b.json", {"machine": {"commit": CLEAN}})  # made at a clean commit, changed while it ran


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("work began")


@pytest.mark.parametrize("option", [("--output", "a.json"), ("--results", ".")])
def test_bench_refuses_before_it_loads(
    option: tuple[str, str], results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shoal.bench.machine.commit", lambda: DIRTY)
    monkeypatch.setattr("shoal.cli.options.ModelSource.load", _never)
    assert run(["bench", option[0], str(results / option[1])]) == 2
    assert "commit the changes first" in capsys.readouterr().err
    assert run(["eval", "functions", "--output", str(results)]) == 2
    assert "commit the changes first" in capsys.readouterr().err


def assert_refused(
    script: Callable[[], object], place: Path, monkeypatch: pytest.MonkeyPatch, option: str = "--json"
) -> None:
    """A script whose tree has changes ends with code 2 before it loads a model."""
    monkeypatch.setattr("shoal.bench.machine.commit", lambda: DIRTY)
    monkeypatch.setattr("shoal.load", _never)
    monkeypatch.setattr(sys, "argv", ["script", option, str(place)])
    with pytest.raises(SystemExit) as ended:
        script()
    assert ended.value.code == 2


@pytest.mark.parametrize("module", [scaling, virtual, prompts, cpu_passes, ragged, first_token])
def test_commands_refuse_before_they_measure(
    module: Any, results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prompts, "random_llama", _never)
    monkeypatch.setattr(cpu_passes, "load_runner", _never)
    monkeypatch.setattr(ragged, "load_runner", _never)
    monkeypatch.setattr(first_token, "seconds", _never)
    assert_refused(lambda: command.run(module.main), results / "a.json", monkeypatch)
    error = capsys.readouterr().err
    assert error.startswith("error: results in benchmarks/results must name")
    assert error.count("\n") == 1


@pytest.mark.parametrize("script", ["load", "structured", "bookkeeping", "forced", "gpu"])
def test_scripts_refuse_before_they_measure(
    script: str, results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those on a GPU have one reader of arguments."""
    if script == "gpu":
        monkeypatch.syspath_prepend(ROOT / "benchmarks" / "gpu")
        common = importlib.import_module("common")
        assert_refused(lambda: common.arguments("x").parse_args(), results, monkeypatch, "--results")
    else:
        assert_refused(importlib.import_module(script).main, results / "a.json", monkeypatch)
    assert "must name the commit" in capsys.readouterr().err


def test_passes_with_forced_drafts_become_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each drafter and kind of white space, with and without the drafts; a target is named without its place."""
    plain, drafted = (
        {"passes": passes, "tokens": 9.0, "forced": 9.0 - passes, "accepted": 9.0 - passes} for passes in (9.0, 3.0)
    )
    counts = iter([plain, drafted])
    monkeypatch.setattr("shoal.load", lambda *_, **__: None)
    monkeypatch.setattr(forced, "measured", lambda *_: ([[1]], next(counts)))
    options = ["--target", str(tmp_path / "model"), "--draft", "none", "--whitespace", "compact"]
    monkeypatch.setattr(sys, "argv", ["forced", *options, "--json", str(tmp_path / "a.json")])
    assert forced.main() == 0
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["machine"]["commit"] == commit()
    assert found["arguments"]["target"] == "model"
    assert found["rows"] == [
        {"drafter": "none", "whitespace": "compact", "same ids": True, "plain": plain, "forced": drafted}
    ]


def test_measurements_become_files_in_one_way_only() -> None:
    """A module that wrote JSON by itself would name no commit; `shoal bench` names it in each file, virtual's prices go back
    into itself, process.py keeps logs, and chaos.py, clients.py, evalplus_*.py and schema_engines.py write what servers,
    clients, evaluators and engines read."""
    files = [*(ROOT / "src/shoal/bench").glob("*.py"), *(ROOT / "benchmarks").rglob("*.py"), ROOT / "src/shoal/cli/bench.py"]
    writes = re.compile(r"write_text|write_whole\(|json\.dump\(|open\([^)]*[\"']w")
    known = "bench.py chaos.py chaos_troubles.py client_checks.py client_frameworks.py clients.py evalplus_checks.py "
    known += "evalplus_outcomes.py process.py provenance.py schema_engines.py virtual.py"
    assert {file.name for file in files if writes.search(file.read_text())} <= {*known.split()}


def test_no_measurement_is_printed_as_json() -> None:
    """Printed JSON would be redirected into benchmarks/results, where nothing could refuse it. What client_checks.py
    prints is read by clients.py, and workers of schema_engines.py, held_memory.py and gpu/streams.py answer their parents."""
    names = ("client_checks.py", "schema_engines.py", "held_memory.py", "gpu/streams.py")
    others = {ROOT / "benchmarks" / name for name in names}
    scripts = {*(ROOT / "benchmarks").rglob("*.py")} - others
    for file in [*(ROOT / "src/shoal/bench").glob("*.py"), *scripts]:
        for found in re.findall(r"(?:print|echo)\(json\.dumps\((.*)", file.read_text()):
            assert found.startswith('report["machine"]'), (file.name, found)  # below tables: not the measurement
