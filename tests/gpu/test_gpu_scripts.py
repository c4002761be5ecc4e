"""benchmarks/gpu without a GPU: refused clearly, its stages and its table, and the same lines tried out on the CPU.

Tests of: bench.work, bench.random_pairs.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

from serving import eventually
from shoal import cli
from shoal.bench import random_pairs
from shoal.bench.random_pairs import SHAPES, shaped_pair
from shoal.bench.work import Ceilings, Load
from shoal.models import loading
from shoal.models.attention.fused import has_triton
from shoal.models.compiled.block import reservation
from shoal.serve import engine_thread

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "gpu"
MODULES = "attention check common host identity passes products requirements rounds run served stages verdict".split()
CPU = torch.device("cpu")

needs_triton = pytest.mark.skipif(not has_triton(), reason="Triton 3.6 is not installed (extra `triton`)")
needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder is importable; nothing of it stays imported."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def script(request: pytest.FixtureRequest, scripts: None) -> ModuleType:
    """A script as a module."""
    return importlib.import_module(request.param)


# ── refused ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@needs_no_cuda
@pytest.mark.parametrize("script", ["budget"], indirect=True)
def test_a_budget_is_counted_and_called_computed(
    script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nothing = [part for name in ("launch", "copy", "wait", "host") for part in (f"--{name}-us", "0")]
    monkeypatch.setattr(sys, "argv", ["budget.py", "--drafts", "4", *nothing, "--json", str(tmp_path / "budget.json")])
    script.main()
    printed = capsys.readouterr().out
    assert "COMPUTED, NOT MEASURED" in printed
    table = {cells[1].strip(): cells[2:-1] for cells in (line.split("│") for line in printed.splitlines()) if len(cells) > 8}
    of = {name: [float(cell) for cell in cells] for name, cells in table.items()}
    assert of["plain"][2:5] == [2, 1, 1]  # one fills the inputs of the next round
    assert of["k = 4"][2:5] == [3, 1, 1]
    assert all(line[5] == line[6] for line in of.values())  # nothing but passes
    assert 3.0 < of["plain"][5] < of["k = 4"][5] < 5.0
    assert of["plain"][0] - of["plain"][1] == 32 * 9  # 256 programs, none of which shares a query's keys
    written = json.loads((tmp_path / "budget.json").read_text())["computed, not measured"]
    assert {round_.pop("round"): [*round_.values()] for round_ in written} == of


def test_the_run_is_refused_without_a_device() -> None:
    run = subprocess.run([SCRIPTS / "run.sh", sys.executable], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (3, "")
    assert run.stderr.splitlines()[-1] == "benchmarks/gpu/run.sh: torch finds no CUDA device: nothing was measured"


@needs_no_cuda
@pytest.mark.parametrize("script", ["attention", "check", "identity", "passes", "products", "rounds"], indirect=True)
def test_a_script_is_refused_without_a_device(script: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["script.py"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 3
    assert capsys.readouterr().err == "script.py: no CUDA device: nothing was measured\n"


@pytest.mark.parametrize("script", ["requirements"], indirect=True)
def test_all_that_is_missing_is_named_at_once(script: Any) -> None:
    installed = {"torch": "2.11.0+cu130", "transformers": "5.17.0", "typer": "0.9", "rich": "13.9"}

    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    bounds = script.project_bounds(script.PROJECT.read_text(encoding="utf-8"))
    assert {"torch", "transformers", "safetensors", "numpy", "typer"} <= bounds.keys()
    problems = script.unmet({**bounds, "triton": ">=3.6"}, version)
    assert problems.keys() == {"safetensors", "tokenizers", "numpy", "typer", "triton"}
    assert problems["typer"] == f"0.9, wanted {bounds['typer']}"
    assert script.absent(problems) == ["safetensors", "tokenizers", "numpy", "triton"]
    assert script.unmet({"torch": ">=2.6,<2.11"}, version) == {"torch": "2.11.0+cu130, wanted >=2.6,<2.11"}


@pytest.mark.parametrize("script", ["run"], indirect=True)
def test_a_python_without_torch_is_told_what_to_bring(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        script, "unmet", lambda bounds: {"torch": "not installed, wanted >=2.6", "hypothesis": "not installed"}
    )
    with pytest.raises(SystemExit) as ended:
        script.require_packages()
    assert ended.value.code == 4
    lines = capsys.readouterr().err.splitlines()
    assert ["torch" in lines[0], "hypothesis" in lines[1], "nothing was measured" in lines[2]] == [True] * 3
    monkeypatch.setattr(script, "unmet", lambda bounds: {"hypothesis": "not installed", "typer": "0.1, wanted >=0.29"})
    monkeypatch.setattr(script.shutil, "which", lambda name: "/there" if name == script.SANITIZER else None)
    assert script.require_packages() == ["hypothesis"]  # the measurements can do without
    monkeypatch.setattr(script.shutil, "which", lambda name: None)
    assert script.require_packages() == ["hypothesis", "compute-sanitizer"]


# ── stages ──────────────────────────────────────────────────────────────────────────────────────────────────────────

WRITES = """
import json, pathlib, sys, time
place = pathlib.Path(sys.argv[1])
(place / "a.json").write_text(json.dumps({"lines": [1]}))
(place / "torn.json").write_text("{")
print("said", flush=True)
"""


def stage(scripts: Any, name: str, code: str, **options: Any) -> Any:
    made = {"limit": 30.0, **options}
    return scripts.Stage(name, f"what {name} does", command=(sys.executable, "-c", code, "{results}"), **made)


@pytest.mark.parametrize("script", ["stages"], indirect=True)
def test_a_stage_that_fails_does_not_stop_the_next(script: Any, tmp_path: Path) -> None:
    chosen = [
        stage(script, "broken", WRITES + "sys.exit(5)"),
        stage(script, "lacking", WRITES, needs=("triton", "torch")),
        stage(script, "fine", WRITES + "import os; print(os.environ['WHERE'])", variables={"WHERE": "there"}),
    ]
    outcomes = list(script.run(chosen, tmp_path, ["triton"]))
    assert [outcome.result for outcome in outcomes] == ["failed, exit code 5", "not run: needs triton", "passed"]
    assert [outcome.reports for outcome in outcomes] == [[{"lines": [1]}], [], [{"lines": [1]}]]
    assert [outcome.output for outcome in outcomes] == ["said\n", "", "said\nthere\n"]


@pytest.mark.parametrize("script", ["stages"], indirect=True)
def test_the_last_stages_get_the_time_that_is_left(script: Any, tmp_path: Path) -> None:
    chosen = [stage(script, name, "import time; time.sleep(60)") for name in ("first", "second")]
    first, second = script.run(chosen, tmp_path, seconds=2.5, grace=1.0)
    assert first.result in ("stopped after 1 s", "stopped after 2 s")  # and not after its own limit
    assert second.result == "not run: no time left"


@pytest.mark.parametrize("script", ["stages"], indirect=True)
def test_stages_that_measure_nothing_run_together(script: Any, tmp_path: Path) -> None:
    """Each of two waits for the other; the one that measures comes after them."""
    meets = """
import pathlib, sys, time
folder, own = pathlib.Path(sys.argv[1]).parent, pathlib.Path(sys.argv[1]).name
(folder / f"{own}.there").touch()
other = {"one": "two", "two": "one"}.get(own)
while other and not (folder / f"{other}.there").exists():
    time.sleep(0.01)
print(sorted(file.name for file in folder.glob("*.there")))
"""
    chosen = [stage(script, name, meets, together=name != "alone") for name in ("one", "two", "alone")]
    outcomes = list(script.run(chosen, tmp_path))
    assert [(outcome.stage.name, outcome.result) for outcome in outcomes] == [(s.name, "passed") for s in chosen]
    assert outcomes[2].output == "['alone.there', 'one.there', 'two.there']\n"


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
open(sys.argv[1] + "/ready", "w").close()
time.sleep(600)
"""


class AtTheLimit(subprocess.Popen[bytes]):
    """A process whose limit is over as soon as it is where the test wants it."""

    def wait(self, timeout: float | None = None) -> int:
        if timeout == 2.0:
            eventually(Path(self.args[-1], "ready").exists)  # type: ignore[arg-type, index]
            raise subprocess.TimeoutExpired(self.args, timeout)
        return super().wait(timeout)


@pytest.mark.parametrize("script", ["stages"], indirect=True)
def test_a_stage_at_its_limit_may_deliver_and_is_then_killed_with_all_that_it_started(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script.subprocess, "Popen", AtTheLimit)
    delivers = (
        WRITES
        + "try: (place / 'ready').touch(); time.sleep(600)\n"
        + "except KeyboardInterrupt: (place / 'late.json').write_text('{\"lines\": [2]}')"
    )
    (slow,) = script.run([stage(script, "slow", delivers, limit=2.0)], tmp_path, grace=100.0)
    (stubborn,) = script.run([stage(script, "stubborn", STUBBORN, limit=2.0)], tmp_path, grace=0.5)
    assert [slow.result, stubborn.result] == ["stopped after 2 s"] * 2
    assert slow.reports == [{"lines": [1]}, {"lines": [2]}]
    child = Path(f"/proc/{int(stubborn.output)}/stat")

    def ended() -> bool:
        try:
            return child.read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    eventually(ended)


@pytest.mark.parametrize("script", ["run"], indirect=True)
def test_the_stages_fit_their_time(script: Any) -> None:
    every = script.stages("cuda")
    quick = script.chosen(every, None, quick=True)
    assert sum(stage.limit for stage in every) <= script.SECONDS
    assert sum(stage.limit for stage in quick) <= script.QUICK_SECONDS <= 600  # one command of a lent machine
    proofs = ["check", "kernels", "captured", "identity"]
    names = [stage.name for stage in every]
    assert [stage.name for stage in every if stage.proves] == names[:4] == proofs
    assert [name for name in names if name.startswith("bench")] == ["bench-8", "bench-1", "bench-32"]
    assert [stage.name for stage in quick] == [*proofs, "rounds"]
    assert script.chosen(every, "rounds,check", quick=False) == [every[0], every[4]]
    more = ["rounds-8b", "rounds-long", "rounds-int8", "rounds-fp8", "served", "sanitizer"]
    assert names[-len(more) :] == more
    assert sum(stage.limit for stage in every if stage.name in more) <= 600
    assert {stage.name: stage.command[0] for stage in every}["sanitizer"] == "compute-sanitizer"
    with pytest.raises(SystemExit, match="no stage speed: check, kernels"):
        script.chosen(every, "check,speed", quick=False)
    for stage in every:  # what it runs is there
        files = [part for part in stage.command if part.endswith(".py")]
        assert all(Path(file).exists() for file in files)
        assert files or stage.command[2] == "shoal"


class Understood(Exception):
    """Raised where a command would begin to work."""


@pytest.mark.parametrize("device", ["cuda", "pretend", "cpu"])
@pytest.mark.parametrize("script", ["run"], indirect=True)
def test_the_commands_of_the_stages_are_understood(
    script: Any, device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An option that a script does not have would cost its stage on a card."""

    def begins(*_: object, **__: object) -> None:
        raise Understood

    monkeypatch.setattr(random_pairs, "shaped_pair", begins)
    understood = []
    for stage in script.stages(device):
        command = [part.replace("{results}", str(tmp_path)) for part in stage.command]
        (name, *rest) = [Path(part).stem for part in command if Path(part).parent == SCRIPTS and part.endswith(".py")] or [
            ""
        ]
        if name:
            module = importlib.import_module(name)
            monkeypatch.setattr(module, "device_or_exit", begins)
            monkeypatch.setattr(sys, "argv", command[1:])
            work: Any = module.main
        elif command[2] == "shoal":
            work = partial(cli.app, command[3:], prog_name="shoal", standalone_mode=False)
        else:
            continue  # of pytest
        with pytest.raises(Understood):
            work()
        understood.append(stage.name)
        assert not rest
    assert len(understood) == len(script.stages(device)) - len(("kernels", "captured", "sanitizer"))


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("script", ["run"], indirect=True)
def test_the_memory_checker_has_cases_of_all_kernels(script: Any) -> None:
    """Of attention, of layers and of draws; and few, as it takes long."""
    (stage,) = (one for one in script.stages("cuda") if one.name == "sanitizer")
    command = stage.command[stage.command.index(sys.executable) :]
    variables = {**os.environ, "TRITON_INTERPRET": "1"}
    told = subprocess.run(
        [*command, "--collect-only", "-q"], env=variables, capture_output=True, text=True, check=False
    ).stdout
    cases = [line.partition("::")[0].rpartition("/")[2] for line in told.splitlines() if "::" in line]
    assert set(cases) == {"fused_cases.py", "layers_cases.py", "steps_cases.py"}, told
    assert len(cases) < 40


@pytest.mark.parametrize("script", ["run"], indirect=True)
def test_a_run_ends_with_a_verdict_whatever_happened(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, three files, and the figures of a kernel that was not verified marked."""
    code = WRITES.replace('{"lines": [1]}', '{"lines": [LINE]}')
    line = {"context": "short", "new tokens": 1, "attention": "fused", "executor": "Triton layers", "floor / time": 0.9}
    every = [
        stage(script, "kernels", "raise SystemExit(1)", quick=True, proves=True),
        stage(script, "passes", code.replace("LINE", repr(line)), quick=True),
        stage(script, "long", "raise SystemExit(9)"),
    ]
    monkeypatch.setattr(script, "stages", lambda device: every)
    monkeypatch.setenv("RESULTS", str(tmp_path / "made"))
    assert script.main(["--device", "cpu", "--quick"]) == 1
    written = list((tmp_path / "made").iterdir())
    assert all(file.stem.endswith("-pretended-gpu") for file in written)
    files = {file.suffix: file.read_text(encoding="utf-8") for file in written}
    assert files.keys() == {".json", ".md", ".log"}
    report = json.loads(files[".json"])
    assert [stage["stage"] for stage in report["stages"]] == ["kernels", "passes"]
    assert "| what kernels does | passes | failed, exit code 1 | missed |" in files[".md"]
    assert "| 0.90 | met, but a trial |" in files[".md"]
    assert "not measured" in files[".md"]
    assert files[".md"].startswith("**Tiny shapes on a CPU")
    assert files[".md"] in capsys.readouterr().out
    assert "said" in files[".log"]


@pytest.mark.parametrize("script", ["run"], indirect=True)
@pytest.mark.parametrize(("options", "times"), [([], 3), (["--patience", "7.5"], 7.5)])
def test_a_busy_machine_gives_the_stages_more_time(
    script: Any, options: list[str], times: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Their limits and the one of all; a run of other commands than a card's would rehearse nothing."""
    given: dict[str, float] = {}

    def nothing(stages: Any, folder: Path, missing: Any, *, seconds: float) -> Iterator[Any]:
        given.update({stage.name: stage.limit for stage in stages}, all=seconds)
        return iter(())

    monkeypatch.setattr(script, "run", nothing)
    monkeypatch.setenv("RESULTS", str(tmp_path))
    assert script.main(["--device", "pretend", *options]) == 0
    limits = {stage.name: stage.limit for stage in script.stages("pretend")}
    assert given == {name: times * limit for name, limit in {**limits, "all": script.SECONDS}.items()}


@pytest.mark.parametrize("script", ["run"], indirect=True)
def test_results_go_elsewhere_where_no_commit_would_be_named(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shoal.bench.machine.commit", lambda: "not from a git repository")
    place = script.place_for_results(None)
    assert "benchmarks" not in place.parts
    assert str(place) in capsys.readouterr().err
    os.rmdir(place)
    with pytest.raises(SystemExit, match="commit"):
        script.place_for_results(str(SCRIPTS.parent / "results"))


# ── the verdict ─────────────────────────────────────────────────────────────────────────────────────────────────────


def bench(batch: int, **speeds: float) -> dict[str, Any]:
    return {
        "lines": [
            {
                "setting": name, "baseline": name == "hf", "batch": batch, "tokens_per_second": [speed, speed, speed],
                "speedup": [speed / speeds["off"]] * 3, "ms_mean": 1000 * batch / speed,
            }
            for name, speed in speeds.items()
        ]
    }  # fmt: skip


@pytest.mark.parametrize("script", ["verdict"], indirect=True)
def test_the_verdict_says_what_was_met(script: Any) -> None:
    stages = importlib.import_module("stages")

    def outcome(name: str, *reports: dict[str, Any], proves: bool = False, result: str = "passed") -> Any:
        return stages.Outcome(stages.Stage(name, name, 1.0, (), proves=proves), result, 1.0, reports, "")

    rounds = [
        {"way": "modules", "lookahead": "off", "floor / time": 0.1, "host": 0.5},
        {"way": "captured", "lookahead": "off", "floor / time": 0.9, "host": 0.01, "ms per token": 6.0, "ms": 6.0},
        {
            "way": "captured",
            "lookahead": "fixed:6",
            "floor / time": 0.3,
            "host": 0.2,
            "uploads": 1.0,
            "downloads": 3.0,
            "ms per token": 2.0,
        },
    ]
    outcomes = [
        outcome("kernels", proves=True),
        outcome("rounds", {"lines": [{"kind": "gap", "round": "captured, off"}]}, {"lines": rounds}),
        outcome("bench-8", bench(8, off=1000.0, hf=800.0, **{"fixed:6": 2500.0, "auto": 4000.0})),
        outcome("passes", {"lines": [{"context": "short", "new tokens": 1, "attention": "fused", "executor": "Triton layers"}]}),
        outcome("bench-1", bench(1, off=100.0, hf=180.0, auto=160.0)),
        outcome("rounds-int8", {"lines": [{"way": "captured", "lookahead": "off", "ms": 4.0}]}),
        outcome("served", {"lines": [{"switch ms": 5.0, "tokens/s": 100.0}, {"switch ms": 0.2, "tokens/s": 90.0}]}),
    ]  # fmt: skip
    found = {verdict.what: verdict for verdict in script.verdicts(outcomes)}
    words = {what: (verdict.measured, verdict.word) for what, verdict in found.items()}
    assert words["plain round of 8 rows, share of the floor"] == ("0.90", "met")
    assert words["plain round of 8 rows, share of the floor, then"] == ("0.90", "met")
    assert words["kernels"] == ("passed", "met")
    assert words["round of six drafts, 8 rows, share of its floor"] == ("0.30", "missed")
    assert words["six drafts against plain rounds, per token and row"] == ("3.00x", "met")
    assert words["speculative against plain decoding, whole runs of 8 rows"] == ("4.00x", "met")
    assert words["waits for the host, share of a plain round"] == ("0.010", "met")
    assert words["waits for the host, share of a round of six drafts"] == ("0.200", "missed")
    assert words["downloads per round of six drafts"] == ("3.0", "missed")
    assert words["tokens per second against Transformers, batch 8"] == ("5.00x", "met")
    assert words["tokens per second against Transformers, batch 1"] == ("0.89x", "missed")
    assert words["tokens per second against Transformers, batch 32"] == (None, "not measured")
    assert words["plain round of int8 weights against 16 bit"] == ("1.50x", "met")
    assert words["plain round of fp8 weights against 16 bit"] == (None, "not measured")
    assert words["served load, quick switches against Python's own"] == ("0.90x", "missed")
    for context in ("short", "long"):  # a line without the figure; no line
        assert words[f"plain pass of 8 rows, share of the floor, {context} context"] == (None, "not measured")

    outcomes[0] = replace(outcomes[0], result="failed, exit code 1")
    words = {verdict.what: verdict.word for verdict in script.verdicts(outcomes)}
    assert words["kernels"] == "missed"
    assert words["tokens per second against Transformers, batch 8"] == "met, but kernels not verified"
    assert script.verdicts(outcomes[1:])[0].doubt == script.UNVERIFIED  # nothing was proved either
    words = {verdict.what: verdict.word for verdict in script.verdicts(outcomes, trial=True)}
    assert words["tokens per second against Transformers, batch 8"] == "met, but a trial"
    page = script.markdown(script.verdicts(outcomes), outcomes, {"date": "today", "device": "one"})
    assert page.count("\n| ") == len(found) + len(outcomes) + 2


@pytest.mark.parametrize("script", ["verdict"], indirect=True)
def test_the_guide_has_the_targets_and_the_triton_that_is_pinned(script: Any) -> None:
    guide = (SCRIPTS.parents[1] / "docs" / "how-to" / "gpu.md").read_text(encoding="utf-8")
    bounds = {target.what: target.bound for target in script.TARGETS}
    plain = [bounds[f"plain round of 8 rows, share of the floor{which}"] for which in ("", ", then")]
    assert "| at least {:.0%}, then {:.0%} |".format(*plain).replace("%", " %") in guide
    assert f"| at least {bounds['round of six drafts, 8 rows, share of its floor']:.0%} |".replace("%", " %") in guide
    assert f"| at least {bounds['six drafts against plain rounds, per token and row']}x; BASS" in guide
    pins = (SCRIPTS.parents[1] / "constraints.txt").read_text(encoding="utf-8")
    of = {name: version for name, _, version in (line.split(";")[0].strip().partition("==") for line in pins.splitlines())}
    assert f"torch {of['torch'].rpartition('.')[0]} brings {of['triton']}, the release that `constraints.txt` pins" in guide


@pytest.mark.parametrize("script", ["run"], indirect=True)
def test_stages_have_more_time_than_they_took_on_a_card(script: Any) -> None:
    """By the seconds that the guide tells of an H100 and an H200; those that prove something have half as much again."""
    guide = (SCRIPTS.parents[1] / "docs" / "how-to" / "gpu.md").read_text(encoding="utf-8")
    taken = {
        name: max(map(int, re.findall(r"\d+", told)))
        for name, told in re.findall(r"^\| `([\w-]+)` \|.*\| ([\d to]+) \|$", guide, re.M)
    }
    limits = {stage.name: stage.limit / (1.5 if stage.proves else 1.1) for stage in script.stages("cuda")}
    assert {"check", "kernels", "captured", "identity", "rounds"} <= taken.keys() <= limits.keys()
    assert {name: seconds for name, seconds in taken.items() if seconds > limits[name]} == {}


@pytest.mark.parametrize("script", ["verdict"], indirect=True)
def test_kernels_that_were_only_stopped_are_verified_in_part(script: Any) -> None:
    stages = importlib.import_module("stages")
    rounds = {"lines": [{"way": "captured", "lookahead": "off", "floor / time": 0.82}]}
    what = "plain round of 8 rows, share of the floor"

    def words(result: str, output: str) -> tuple[str | None, str, str, str]:
        kernels = stages.Outcome(stages.Stage("kernels", "kernels", 1.0, (), proves=True), result, 1.0, [], output)
        others = [
            stages.Outcome(stages.Stage("check", "check", 1.0, (), proves=True), "passed", 1.0, [], ""),
            stages.Outcome(stages.Stage("rounds", "rounds", 1.0, ()), "passed", 1.0, [rounds], ""),
        ]
        found = {verdict.what: verdict for verdict in script.verdicts([kernels, *others])}
        return found["kernels"].measured, *(found[name].word for name in ("kernels", what, f"{what}, then"))

    some = "collected 101 items\n\n==== 60 passed in 9.0s ====\n"
    part = ("60 of 101 cases passed, stopped", "stopped", "met, but kernels verified in part")
    assert words("stopped after 170 s", some) == (*part, "next, but kernels verified in part")
    assert words("stopped after 170 s", "8 workers [101 items]\n==== 60 passed in 9.0s ====\n")[:3] == part
    fault = some.replace("60 passed", "1 failed, 60 passed")
    assert words("stopped after 170 s", fault)[1:3] == ("missed", "met, but kernels not verified")
    assert words("stopped after 170 s", "")[1:3] == ("stopped", "met, but kernels not verified")  # no case has run
    assert words("failed, exit code 1", some)[1:3] == ("missed", "met, but kernels not verified")
    assert words("passed", some) == ("passed", "met", "met", "next")


@pytest.mark.slow
@pytest.mark.parametrize("script", ["run"], indirect=True)
def test_cases_are_counted_where_their_stage_is_stopped(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what pytest prints when it is interrupted."""
    stages = importlib.import_module("stages")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # alone, as the second case waits
    monkeypatch.setattr(stages.subprocess, "Popen", AtTheLimit)
    file = tmp_path / "test_two.py"
    file.write_text(
        "import pathlib, sys, time\ndef test_a(): pass\ndef test_left_out(): pass\n"
        "def test_b():\n    pathlib.Path(sys.argv[-1], 'ready').touch()\n    time.sleep(600)\n"
    )
    command = script._pytest(str(file), "-k", "not left_out", "{results}")
    (outcome,) = stages.run([stages.Stage("two", "two", 2.0, command)], tmp_path / "made", grace=100.0)
    assert (outcome.stopped, outcome.cases) == (True, (1, 0, 2)), outcome.output


# ── the measurements, on a CPU ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("script", ["attention"], indirect=True)
def test_attention_is_timed_and_checked(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = script.SHAPES["cpu"][1]
    lines = script.measured(shape, ["pad", "split"], CPU, bandwidth=1e9)
    assert [line["attention"] for line in lines] == ["pad", "split"]
    assert all(line["microseconds"] > 0 and line["of bandwidth"] > 0 and line["error"] < 1e-5 for line in lines)
    inputs = script.inputs_of(shape, torch.float32, CPU)
    assert inputs.plan.offsets == [20, 20]
    assert script.read_bytes(inputs) == (32 + 42 - 20) * 2 * (16 + 16) * 4  # lengths 30 + 2 and 40 + 2, 20 of them once

    monkeypatch.setitem(script.METHODS, "fused", lambda inputs: 1.001 * script.METHODS["pad"](inputs))
    lines = script.measured(script.SHAPES["cpu"][0], ["pad", "fused", "varlen"], CPU, bandwidth=1e9)
    assert [line["verified"] for line in lines] == [True, False, True]
    assert lines[2]["microseconds"] == "-"  # FlashAttention is refused on a CPU, which ends nothing


class Clock:
    """A stand-in for `time`: every call of its counter is so many seconds after the last."""

    def __init__(self, step: float) -> None:
        self.step, self.now = step, 0.0

    def perf_counter(self) -> float:
        self.now += self.step
        return self.now


@pytest.mark.parametrize("script", ["attention", "products"], indirect=True)
def test_times_are_microseconds_and_shares_are_of_bytes_a_second(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that takes 500 microseconds moves its bytes; at the bandwidth it would take 250."""
    monkeypatch.setattr(importlib.import_module("common"), "time", Clock(500e-6))
    if script.__name__ == "attention":
        shape = script.SHAPES["cpu"][0]
        moved = script.read_bytes(script.inputs_of(shape, torch.float32, CPU))
        (line,) = script.measured(shape, ["pad"], CPU, bandwidth=4000.0 * moved)
    else:
        operation = script.Operation("one", [lambda: torch.ones(2)], None, 100.0)
        line = script.line_of(operation, CPU, 1, bandwidth=4000.0 * 100, repeats=3)
    assert line["microseconds"] == pytest.approx(500)
    assert line["of bandwidth"] == pytest.approx(0.5)


@pytest.mark.parametrize("script", ["passes"], indirect=True)
def test_a_pass_is_milliseconds_beside_a_floor_in_seconds(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four passes in the queue take 2 ms, each 500 microseconds, of which the floor is half."""
    runner = shaped_pair("tiny", dtype="float32", device="cpu", max_batch=2).target
    runner = script.prepared(runner.hf, "pad", False, [5, 7], 4)
    monkeypatch.setattr(script, "time", Clock(2e-3))
    (line,) = script.lines_of({("pad", False): runner}, [5, 7], 1, 1, floor=250e-6, context="short")
    assert line["ms"] == pytest.approx(0.5)
    assert line["floor / time"] == pytest.approx(0.5)


@pytest.mark.parametrize("script", ["check"], indirect=True)
def test_a_replay_that_differs_ends_the_check(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run_script(script, monkeypatch, tmp_path) == 0
    first: list[torch.Tensor] = []

    def stuck(device: torch.device) -> Any:
        def build(run: Any) -> Any:
            first[:] = [run()]
            return lambda: first[0]

        return build

    monkeypatch.setitem(script.EXECUTORS, "eager", stuck)
    assert run_script(script, monkeypatch, tmp_path) == 1
    assert lines_in(tmp_path, "check")[0]["replayed product"].startswith("differs by ")


@pytest.mark.parametrize("script", ["products"], indirect=True)
def test_products_are_checked_and_timed(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run_script(script, monkeypatch, tmp_path, "--repeats", "1") == 0
    lines = lines_in(tmp_path, "products")
    assert {line["tokens"] for line in lines} == {8, 56}
    assert {line["operation"] for line in lines if line["error"] != "-"} == {
        "small, float32",
        "softmax of 600",
        "inverse_transform of 600, torch",
        "exponential_race of 600, torch",
    }
    wrong = script.Operation("wrong", [lambda: torch.ones(2)], torch.zeros(2).double() + 1.1, 8.0)
    assert script.line_of(wrong, CPU, 1, 1e9, 1)["verified"] is False
    another = script.Operation(
        "one of 56 tokens", [lambda: torch.tensor([50000] * 55 + [50001])], torch.tensor([50000] * 56), 8.0
    )
    assert script.line_of(another, CPU, 56, 1e9, 1)["verified"] is False  # though its number is near
    refused = script.Operation("refused", [lambda: torch.ones(2) @ torch.ones(3)], None, 8.0)
    assert script.line_of(refused, CPU, 1, 1e9, 1)["microseconds"] == "-"


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "named"),
    [
        (
            "products",
            [
                "small, int8",
                "small, float8_e4m3fn",
                "norm of 48",
                "norm and sum of 48",
                "silu and product",
                "softmax of 600, kernels",
                "inverse_transform of 600, kernels",
                "exponential_race of 600, kernels",
            ],
        ),
        ("attention", ["fused"]),
    ],
)
def test_the_kernels_of_a_stage_are_called_as_they_are(script: str, named: list[str], tmp_path: Path) -> None:
    """By the interpreter: on a card a name that has changed would cost the stage."""
    command = [sys.executable, str(SCRIPTS / f"{script}.py"), "--device", "cpu", "--results", str(tmp_path)]
    options = ["--repeats", "1"] if script == "products" else []
    run = subprocess.run(
        [*command, *options], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    lines = lines_in(tmp_path, script)
    found = {line.get("operation", line.get("attention")): line["verified"] for line in lines}
    assert {name: found.get(name) for name in named} == dict.fromkeys(named, True)


def run_script(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *options: str) -> int:
    """Its exit code."""
    monkeypatch.setattr(sys, "argv", ["script.py", "--device", "cpu", "--results", str(tmp_path), *options])
    monkeypatch.setattr(script, "ceilings", lambda device, dtype: Ceilings(1e9, 1e9), raising=False)
    with pytest.raises(SystemExit) as ended:
        script.main()
    return int(ended.value.code or 0)


def lines_in(folder: Path, name: str) -> list[dict[str, Any]]:
    (file,) = folder.glob(f"*-{name}.json")
    lines: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["lines"]
    return lines


@pytest.mark.parametrize("script", ["passes"], indirect=True)
def test_passes_are_timed_and_written_down(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(script, "WARM_UPS", 1)
    monkeypatch.setattr(script, "QUEUED", 1)
    options = ["--shape", "tiny", "--rows", "3", "--contexts", "short=24,long=40", "--repeats", "1"]
    assert run_script(script, monkeypatch, tmp_path, *options) == 0
    methods = [("pad", "modules"), ("split", "modules")]
    for name, kept in (("short", methods), ("long", methods[:1])):
        lines = lines_in(tmp_path, f"passes-{name}")
        assert [(line["new tokens"], line["attention"], line["executor"]) for line in lines] == [
            (q, *method) for q in (1, 7) for method in kept
        ]
        assert all(0 < line["fastest"] <= line["ms"] <= line["slowest"] for line in lines)
        assert {line["context"] for line in lines} == {name}


@pytest.mark.parametrize("script", ["passes"], indirect=True)
def test_every_way_is_measured_on_cuda(script: Any) -> None:
    """The modules against Triton layers; the kernel alone in long contexts."""
    found = set(script.kinds(True, ["fused", "pad", "split"]))
    assert found == {("fused", False), ("fused", True), ("pad", False), ("split", False)}
    assert set(script.kinds(True, ["fused"])) == {kind for kind in found if kind[0] == "fused"}


@pytest.mark.parametrize("script", ["passes"], indirect=True)
def test_modules_do_not_pass_for_triton_layers(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a CPU there are none."""
    monkeypatch.setattr(script, "kinds", lambda *_: [("pad", False), ("pad", True)])
    options = ["--shape", "tiny", "--rows", "2", "--contexts", "short=24", "--repeats", "1"]
    assert run_script(script, monkeypatch, tmp_path, *options) == 1
    assert {line["executor"] for line in lines_in(tmp_path, "passes-short")} == {"modules"}


def test_the_floor_counts_the_bytes_that_there_are() -> None:
    """Weights once, keys and values of each token once: also where captured rounds reserve more."""
    pair = shaped_pair("tiny", dtype="float32", device="cpu", max_batch=2)
    for static in (None, "eager"):
        runner = loading.wrap(pair.target.hf, "tiny")
        runner.capture_rounds(static)
        load = Load.of(runner)
        assert load is not None
        assert load.kv == 3 * 2 * 64 * 4  # layers, keys and values, width, bytes
        assert load.weights == sum(p.numel() for p in pair.target.hf.parameters()) * 4  # one matrix embeds and predicts


# ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────────────

CARD, RESULTS, PROMPT_TOKENS = 80e9, 1 << 30, 128
"""Bytes of an H100, and of the results of captured rounds at most; tokens of the prompts of `shoal bench`."""


def bytes_of(shape: Any) -> tuple[int, int]:
    """Of the weights in bfloat16, and of the keys and values of a token."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(shape.config())
    return 2 * sum(one.numel() for one in model.parameters()), 2 * 2 * shape.layers * shape.kv_width


def cache(rows: int, tokens: int) -> int:
    """Tokens that rows have room for, as captured rounds reserve it."""
    slots, capacity = reservation(rows, tokens, by_kernel=True)
    return slots * capacity


def options_of(stage: Any) -> dict[str, str]:
    """Those of a stage's command that have a value."""
    return dict(pair for pair in pairwise(stage.command) if pair[0].startswith("--"))


@pytest.mark.parametrize("script", ["run"], indirect=True)
def test_the_measurements_fit_a_card(script: Any) -> None:
    """Weights, caches and results, without a collector that frees what one context, or one way, leaves behind for the next."""
    every = {stage.name: options_of(stage) for stage in script.stages("cuda")}
    passes, rounds = importlib.import_module("passes"), importlib.import_module("rounds")
    target, drafter = map(bytes_of, SHAPES[every["passes"]["--shape"]])
    weights, token, pair = target[0] + drafter[0], target[1], target[1] + drafter[1]

    def of_passes(later: int) -> int:
        """later: methods of attention in the contexts after the first."""
        sizes = [int(one.partition("=")[2]) for one in every["passes"]["--contexts"].split(",")]
        methods = ["fused", "pad"], ["fused", "pad"][:later]
        kinds = [len(list(passes.kinds(True, methods[min(i, 1)]))) for i in range(len(sizes))]
        return weights + token * sum(n * cache(8, size + 8) for n, size in zip(kinds, sizes, strict=True))

    def of_rounds(stage: dict[str, str]) -> int:
        models = [bytes_of(shape) for shape in SHAPES[stage["--shape"]]]
        ways, prompt = stage.get("--ways", ",".join(rounds.WAYS["cuda"])), int(stage.get("--prompt-tokens", rounds.PROMPT))
        lengths = [
            int("0" + one.partition(":")[2]) for one in stage.get("--lookaheads", ",".join(rounds.LOOKAHEADS)).split(",")
        ]
        new = (1 + max(lengths)) * (rounds.WARM_UPS + 2 * 12 + 2)
        engines = len(lengths) + 1  # and the one of greedy tokens
        each = engines * sum(token for _, token in models) * cache(8, prompt + new) + RESULTS
        return sum(weights for weights, _ in models) + len(ways.split(",")) * each

    of_each = [of_rounds(options) for name, options in every.items() if name.startswith("rounds")]
    bench = [options for name, options in every.items() if name.startswith("bench")]
    of_bench = [
        weights + 4 * pair * cache(int(one["--batch-sizes"]), PROMPT_TOKENS + int(one["--max-new-tokens"]) + 7) + RESULTS
        for one in bench
    ]
    assert weights > 16e9  # of 8.1 thousand million parameters
    assert len(of_each) == 5
    assert max(of_passes(later=1), *of_each, *of_bench) <= CARD
    assert of_passes(later=2) > CARD  # so the long context has one method only


@pytest.mark.parametrize("script", ["rounds"], indirect=True)
def test_a_round_is_taken_apart(script: Any) -> None:
    """Overlapping kernels count once, copies not at all, and what lies between is a gap."""
    kernel = script.Interval
    found = [kernel(0.0, 10.0, "a"), kernel(8.0, 12.0, "b"), kernel(20.0, 30.0, "c"), kernel(13.0, 19.0, "Memcpy HtoD")]
    union = script.busy_intervals(found)
    assert [(one.start, one.end) for one in union] == [(0.0, 12.0), (20.0, 30.0)]
    assert script.gaps(union) == [(8.0, "b .. c")]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["rounds"], indirect=True)
def test_rounds_are_profiled(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = ["--shape", "tiny", "--rows", "2", "--rounds", "2", "--prompt-tokens", "9"]
    assert run_script(script, monkeypatch, tmp_path, *options) == 0
    lines = lines_in(tmp_path, "rounds")
    ways = ["captured modules", "modules"]
    assert [(line["way"], line["lookahead"]) for line in lines] == [(way, k) for way in ways for k in ("off", "fixed:6")]
    assert all(line["ms"] > 0 and 0 < line["idle"] < 1 and line["kernels"] > 10 for line in lines)
    assert all(line["greedy as the first way"] == 1 for line in lines)
    assert lines[1]["kernels"] > lines[0]["kernels"]
    assert {line["kind"] for line in lines_in(tmp_path, "kernels")} == {"kernel", "gap"}
    assert len(list(tmp_path.glob("*-trace.json.gz"))) == 4
    assert script.agreement([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 7, 6]]) == 4 / 6


@pytest.mark.slow
@needs_no_cuda
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("check", []),
        (
            "rounds",
            ["--shape", "tiny", "--rows", "2", "--rounds", "1", "--prompt-tokens", "9", "--ways", "captured modules"],
        ),
    ],
)
def test_scripts_run_on_the_pretended_device(script: str, options: list[str], tmp_path: Path) -> None:
    """By the lines that only a GPU takes: a recorded graph is replayed, and rounds are captured, with no failure."""
    command = [sys.executable, str(SCRIPTS / f"{script}.py"), "--device", "pretend", "--results", str(tmp_path), *options]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = lines_in(tmp_path, script)
    if script == "check":
        assert [line["replayed product"] for line in lines] == ["same"]
    else:
        assert [(line["lookahead"], line["failure"]) for line in lines] == [("off", "-"), ("fixed:6", "-")]
        assert all(0 < line["host"] < 1 for line in lines)  # of captured rounds alone


@pytest.mark.slow
@pytest.mark.parametrize("script", ["served"], indirect=True)
def test_a_served_load_is_measured_with_two_intervals(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    used: list[float] = []
    begin = engine_thread._quick_switches
    monkeypatch.setattr(
        engine_thread, "_quick_switches", lambda device: (used.append(engine_thread.SWITCH_SECONDS), begin(device))[1]
    )
    options = ["--shape", "tiny", "--clients", "2", "--requests", "2", "--tokens", "8", "--prompt-tokens", "9"]
    assert run_script(script, monkeypatch, tmp_path, *options) == 0
    lines = lines_in(tmp_path, "served")
    assert used == list(script.SWITCHES) == [5e-3, 2e-4]
    assert [(line["switch ms"], line["tokens"], line["device waits"]) for line in lines] == [
        (5.0, 32, None),
        (0.2, 32, None),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["rounds"], indirect=True)
def test_rounds_of_bytes_and_of_other_lengths(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = [
        "--shape",
        "tiny",
        "--rows",
        "2",
        "--rounds",
        "1",
        "--prompt-tokens",
        "9",
        "--quantize",
        "target=int8,draft=int8",
    ]
    assert run_script(script, monkeypatch, tmp_path, *options, "--lookaheads", "fixed:4", "--ways", "modules") == 0
    assert [(line["way"], line["lookahead"]) for line in lines_in(tmp_path, "rounds")] == [("modules", "fixed:4")]


@pytest.mark.parametrize("script", ["host"], indirect=True)
@pytest.mark.parametrize(("drafts", "calls"), [(0, 340), (6, 560)])
def test_the_host_calls_few_functions_in_a_round(script: Any, drafts: int, calls: int) -> None:
    """The device waits for nearly all of them. The bounds may only fall."""
    line = script.measured(drafts, rows=8, repeats=8)
    assert 0 < line["calls waiting"] <= line["calls"] <= calls
    assert all(line[f"{part} us"] > 0 for part in ("waiting", "before", "after", "hidden"))


@pytest.mark.parametrize("script", ["host"], indirect=True)
@pytest.mark.parametrize(("drafts", "calls"), [(0, 294), (6, 462)])
def test_the_host_calls_few_functions_in_a_round_that_was_launched_ahead(script: Any, drafts: int, calls: int) -> None:
    """What users get. The bounds may only fall."""
    line = script.measured(drafts, rows=8, repeats=8, ahead=True)
    assert line["launched ahead"] == 1
    assert 0 < line["calls"] <= calls
    assert (line["waiting us"], line["calls waiting"]) == ("-", "-")
    assert line["host us"] > line["hidden us"] > 0


@pytest.mark.parametrize("script", ["host"], indirect=True)
def test_rounds_before_a_cache_grows_launch_nothing_and_are_left_out(script: Any) -> None:
    """After 64 tokens the caches of these rows grow."""
    line = script.measured(0, rows=2, repeats=24, ahead=True)
    assert 0.9 < line["launched ahead"] < 1
    assert line["calls"] > 0


@pytest.mark.parametrize("script", ["host"], indirect=True)
def test_what_the_host_takes_is_written_down(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(script, "measured", lambda drafts, rows, repeats, ahead: {"drafts": drafts, "launched ahead": ahead})
    assert run_script(script, monkeypatch, tmp_path, "--drafts", "0,6") == 0
    assert [tuple(line.values()) for line in lines_in(tmp_path, "host")] == [(0, True), (6, True), (0, False), (6, False)]


@pytest.mark.parametrize("script", ["identity"], indirect=True)
def test_greedy_tokens_are_compared(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(script, "TOKENS", 4)
    monkeypatch.setattr(script, "WAYS", script.WAYS[1::2])
    assert run_script(script, monkeypatch, tmp_path) == 0
    lines = lines_in(tmp_path, "identity")
    assert [(line["rows"], line["same"]) for line in lines] == [(8, 8)] * 2
    assert all(line["drafted"] > 0 for line in lines)
    cuda = torch.device("cuda")
    assert not script.proved(lines, cuda)  # nothing was captured
    captured = [{**line, "captured passes": 3} for line in lines]
    assert script.proved(captured, cuda)
    assert not script.proved([{**captured[0], "failure": "it broke"}], cuda)
    assert not script.proved([{**captured[0], "same": 7}], cuda)
