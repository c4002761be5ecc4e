"""benchmarks/gpu without a GPU: refused clearly, and the same lines tried out on the CPU."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from shoal.bench.roofline import Ceilings

SCRIPTS = Path(__file__).parents[1] / "benchmarks" / "gpu"
CPU = torch.device("cpu")

needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.fixture
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A script as a module; none of them stays importable."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield importlib.import_module(request.param)
    for name in (request.param, "common"):
        sys.modules.pop(name, None)


@needs_no_cuda
def test_the_run_is_refused_without_a_device() -> None:
    run = subprocess.run([SCRIPTS / "run.sh", sys.executable], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (3, "")
    assert run.stderr.splitlines()[-1] == "benchmarks/gpu/run.sh: torch finds no CUDA device: nothing was measured"


@needs_no_cuda
@pytest.mark.parametrize("script", ["attention", "passes"], indirect=True)
def test_a_script_is_refused_without_a_device(script: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["script.py"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 3
    assert capsys.readouterr().err == "script.py: no CUDA device: nothing was measured\n"


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
    with pytest.raises(ArithmeticError, match="fused is off by"):
        script.measured(shape, ["pad", "fused"], CPU, bandwidth=1e9)


@pytest.mark.parametrize("script", ["passes"], indirect=True)
def test_passes_are_timed_and_written_down(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = ["--device", "cpu", "--shape", "tiny", "--rows", "3", "--context", "40", "--repeats", "2"]
    monkeypatch.setattr(sys, "argv", ["passes.py", *options, "--results", str(tmp_path)])
    monkeypatch.setattr(script, "ceilings", lambda device, dtype: Ceilings(1e9, 1e9))
    script.main()
    (file,) = tmp_path.glob("*-passes.json")
    lines = json.loads(file.read_text(encoding="utf-8"))["lines"]
    methods = [("pad", "single launches"), ("pad", "eager"), ("split", "single launches")]
    assert [(line["new tokens"], line["attention"], line["passes"]) for line in lines] == [
        (q, *method) for q in (1, 7) for method in methods
    ]
    assert all(0 < line["fastest"] <= line["ms"] <= line["slowest"] for line in lines)
