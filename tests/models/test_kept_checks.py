"""The checks of a load are computed once for the same files, settings, code and processor.

Tests of: models.load_checks, models.selfcheck (self_check), models.passes (use_lean_passes), cli.check_model (self_check).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from native_kernels import needs_compiler
from shoal.cli.check_model import self_check as told
from shoal.errors import UnsupportedModel
from shoal.models import formats, load_checks, passes, selfcheck
from shoal.models.load_checks import KeptChecks
from shoal.models.loading import LoadOptions, load_runner
from shoal.models.passes import choose_passes
from shoal.models.runner import Runner
from shoal.testing import save_pair

SELF, LEAN = "_self_check", "largest_error"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint; results are kept in a folder of its own, of small models too."""
    monkeypatch.setattr(load_checks, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(load_checks, "LEAST_BYTES", 0)
    monkeypatch.setattr(formats, "cpu", lambda: formats.Cpu(packs=frozenset({torch.float32})))
    return save_pair(tmp_path / "pair")[0]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each check was computed."""
    counts: Counter[str] = Counter()

    def count(module: Any, name: str) -> None:
        check = getattr(module, name)

        def counted(runner: Runner) -> float:
            counts[name] += 1
            return float(check(runner))

        monkeypatch.setattr(module, name, counted)

    count(selfcheck, SELF)
    count(passes, LEAN)
    return counts


def load(source: Path, **options: Any) -> Runner:
    runner = load_runner(source, LoadOptions(**options))
    choose_passes(runner, "auto", owned=True)
    return runner


def facts(runner: Runner) -> list[Any]:
    """What the checks decide, and the logits of a pass."""
    runner.memory.reserve(2, 8)
    logits = runner.feed([0, 1], torch.tensor([[3, 4], [5, 6]]), [2, 1])
    names = (*selfcheck.RESULTS, "lean")
    return [
        *(bool(value) if name == "lean" else value for name in names for value in [getattr(runner, name)]),
        logits.tolist(),
    ]


@needs_compiler
def test_a_second_load_reads_what_the_first_has_found(place: Path, computed: Counter[str]) -> None:
    first = facts(load(place))
    assert computed == {SELF: 1, LEAN: 1}
    assert facts(load(place)) == first
    assert computed == {SELF: 1, LEAN: 1}


def rewrite(place: Path) -> dict[str, Any]:
    weights = place / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))
    return {}


def change_config(place: Path) -> dict[str, Any]:
    config = place / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text("utf-8")) | {"rms_norm_eps": 1e-3}), encoding="utf-8")
    return {}


CHANGES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "weights": rewrite,
    "config": change_config,
    "dtype": lambda _: {"dtype": "bfloat16"},
    "attention": lambda _: {"attention": "pad"},
    "quantize": lambda _: {"quantize": "int8"},
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_checked_again(change: str, place: Path, computed: Counter[str]) -> None:
    load(place)
    options = CHANGES[change](place)
    load(place, **options)
    assert computed[SELF] == 2
    load(place, **options)
    assert computed[SELF] == 2


@pytest.mark.parametrize("name", ["_code", "instructions", "missing"])
def test_other_code_and_another_processor_check_again(
    name: str, place: Path, computed: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(place)
    monkeypatch.setattr(load_checks, name, lambda: {"other"} if name == "instructions" else "other")
    load(place)
    assert computed[SELF] == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"self-check": 3}'])
def test_a_damaged_file_is_not_believed(text: str, place: Path, computed: Counter[str]) -> None:
    load(place)
    (file,) = load_checks.cache_folder().glob("checks-*.json")  # type: ignore[union-attr]
    file.write_text(text, encoding="utf-8")
    load(place)
    assert computed[SELF] == 2


def test_a_failure_is_not_kept(place: Path, computed: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(selfcheck, "_largest", lambda _: 9.0)
        with pytest.raises(UnsupportedModel, match="diverges"):
            load(place)
    load(place)
    assert computed[SELF] == 2


def test_small_models_and_full_disks_keep_nothing(
    place: Path, computed: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        load(place)
    monkeypatch.setattr(load_checks, "LEAST_BYTES", 2**30)
    load(place)
    assert computed[SELF] == 2
    assert not list(load_checks.cache_folder().glob("checks-*.json"))  # type: ignore[union-attr]


def test_the_oldest_results_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_checks, "MOST_FILES", 2)
    for number in range(4):
        file = tmp_path / f"checks-{number}.json"
        KeptChecks(file).write("a check", {"error": number})
        os.utime(file, (number, number))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["checks-2.json", "checks-3.json"]


def test_the_command_check_computes_it_again(place: Path, computed: Counter[str]) -> None:
    load(place)
    runner = load(place)
    assert computed[SELF] == 1
    runner.self_check_error = 5.0
    result = told(runner, "target")
    assert computed[SELF] == 2
    assert result.status == "ok"
    assert result.data["error"] < 1e-6
