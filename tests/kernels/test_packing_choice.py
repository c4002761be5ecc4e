"""Which weights are packed: a measurement that disturbances do not turn, made once per CPU.

Tests of: models.weights.choice, native.processor, models.weights.matrix, models.formats.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.models import formats
from shoal.models.weights import choice
from shoal.models.weights.matrix import AS_IS, INPUT_MAJOR, PACKED
from shoal.native import processor
from shoal.testing import save_pair

F32, BF16 = torch.float32, torch.bfloat16
KEY = ((64, 32), F32)


class Machine:
    """A clock that products advance, by what a form takes, and more while something else runs.

    Attributes:
        disturbed: number of the product -> extra seconds. products: made so far.
    """

    def __init__(self, seconds: dict[str, float], disturbed: Callable[[int], float] = lambda _: 0.0) -> None:
        self.now, self.products, self.seconds, self.disturbed = 0.0, 0, seconds, disturbed

    def perf_counter(self) -> float:
        return self.now

    def matrix(self, weight: torch.Tensor, bias: None, form: str) -> Any:
        machine = self

        class Fake:
            def linear(self, x: torch.Tensor) -> None:
                machine.now += machine.seconds[form] + machine.disturbed(machine.products)
                machine.products += 1

        return Fake()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Machine]:
    """A CPU that packs float32, with a cache folder of its own."""
    monkeypatch.setattr(formats, "cpu", lambda: formats.Cpu(mkl=True, packs=frozenset({F32})))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def make(plain: float, packed: float, disturbed: Callable[[int], float] = lambda _: 0.0) -> Machine:
        made = Machine({INPUT_MAJOR: plain, PACKED: packed}, disturbed)
        monkeypatch.setattr(choice, "Matrix", made.matrix)
        monkeypatch.setattr(choice, "packed", lambda weight, bias: made.matrix(weight, bias, PACKED))
        monkeypatch.setattr(choice, "time", made)
        return made

    return make


def chosen() -> str:
    return choice.by_measurement([KEY])[KEY]


def forget(tmp_path: Path) -> None:
    for file in (tmp_path / "shoal").glob("*.json"):
        file.unlink()


@pytest.mark.parametrize(
    ("packed", "expected"), [(0.5, PACKED), (1.0, PACKED), (1.2, PACKED), (1.3, INPUT_MAJOR), (3.0, INPUT_MAJOR)]
)
def test_packed_unless_clearly_slower(machine: Callable[..., Machine], packed: float, expected: str) -> None:
    machine(1e-3, packed * 1e-3)
    assert chosen() == expected


DISTURBANCES = {
    "one take": lambda n: 0.1 if n == 20 else 0.0,
    "every fifth take": lambda n: 0.02 if n % 5 == 0 else 0.0,
    "a time in the middle": lambda n: 0.01 if 15 < n < 60 else 0.0,
    "half of the packed takes": lambda n: 0.01 if n % 4 == 1 else 0.0,
    "a third of the others": lambda n: 0.01 if n % 6 == 0 else 0.0,
    "the first": lambda n: 0.05 if n < 6 else 0.0,
}


@pytest.mark.parametrize("disturbance", DISTURBANCES)
@pytest.mark.parametrize(("packed", "expected"), [(0.6, PACKED), (1.8, INPUT_MAJOR)])
def test_disturbed_takes_do_not_turn_the_choice(
    machine: Callable[..., Machine], disturbance: str, packed: float, expected: str
) -> None:
    made = machine(1e-3, packed * 1e-3, DISTURBANCES[disturbance])
    assert chosen() == expected
    assert made.products >= 2 * len(choice.TOKENS) * choice.ROUNDS[0]


def test_control_one_take_or_means_would_be_turned(machine: Callable[..., Machine]) -> None:
    """The same takes, judged by their means: what the rule must not be."""
    machine(1e-3, 0.6e-3, DISTURBANCES["half of the packed takes"])
    takes = choice.measured((64, 32), F32, 0.5)
    means = [sum(b for _, b in pairs) / sum(a for a, _ in pairs) for pairs in takes.values()]
    assert sum(means) > choice.TOLERATED * len(means)
    assert choice.packs(takes)


def test_the_time_to_measure_is_bounded(machine: Callable[..., Machine]) -> None:
    made = machine(0.01, 0.01)
    choice.by_measurement([((64, 32 * i), F32) for i in range(1, 9)])
    least = 8 * 2 * len(choice.TOKENS) * (choice.ROUNDS[0] + 1) * 0.01
    assert made.now <= max(least, choice.SECONDS + 8 * 0.06)


def test_shapes_are_measured_once_and_heads_by_a_part(machine: Callable[..., Machine]) -> None:
    made = machine(1e-3, 1e-3)
    heads = [((choice.ROWS * k, 32), F32) for k in (1, 2, 30)]
    assert set(choice.by_measurement(heads).values()) == {PACKED}
    assert made.products == 2 * len(choice.TOKENS) * (choice.ROUNDS[1] + 1)
    choice.by_measurement(heads)
    assert made.products == 2 * len(choice.TOKENS) * (choice.ROUNDS[1] + 1)


def test_a_later_process_makes_the_same_choice(machine: Callable[..., Machine], tmp_path: Path) -> None:
    machine(1e-3, 3e-3)
    assert chosen() == INPUT_MAJOR
    later = machine(3e-3, 1e-3)  # another mood of the machine
    assert chosen() == INPUT_MAJOR
    assert later.products == 0
    forget(tmp_path)
    assert chosen() == PACKED


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"choices": 3}', '{"choices": {"float32 64x32": {"packs": "no"}}}', "\0\0"]
)
def test_a_damaged_file_is_ignored_and_replaced(machine: Callable[..., Machine], tmp_path: Path, content: str) -> None:
    machine(1e-3, 3e-3)
    chosen()
    (file,) = (tmp_path / "shoal").glob("*.json")
    file.write_text(content)
    assert chosen() == INPUT_MAJOR
    assert json.loads(file.read_text())["choices"]["float32 64x32"]["packs"] is False
    assert [path.name for path in (tmp_path / "shoal").iterdir()] == [file.name]


def test_what_another_process_chose_meanwhile_counts(machine: Callable[..., Machine], tmp_path: Path) -> None:
    machine(1e-3, 1e-3)
    place = choice._place()
    assert place is not None
    choice._remember(place, {"float32 64x32": {"packs": False}})
    assert choice._remember(place, {"float32 64x32": {"packs": True}})["float32 64x32"]["packs"] is False


def test_a_full_disk_only_costs_time(
    machine: Callable[..., Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(1e-3, 1e-3)
    place = choice._place()
    assert place is not None

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    assert choice._remember(place, {"float32 64x32": {"packs": False}})["float32 64x32"]["packs"] is False
    assert not list(place.parent.glob("weights-*")), "no part of a file is left"


def test_a_folder_that_cannot_be_written_only_costs_time(
    machine: Callable[..., Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    machine(1e-3, 0.5e-3)
    assert chosen() == PACKED


def test_what_changes_the_time_changes_the_file(machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    machine(1e-3, 1e-3)
    places = {choice._place()}
    for name in ("cache_bytes", "get_num_threads", "cpu_flags"):
        with monkeypatch.context() as patch:
            owner: Any = {"cache_bytes": choice, "get_num_threads": torch, "cpu_flags": processor}[name]
            patch.setattr(owner, name, lambda *_: {"x"} if name == "cpu_flags" else 12345)  # noqa: B023
            places.add(choice._place())
    assert len(places) == 4


def test_the_cache_is_as_large_as_linux_says(tmp_path: Path) -> None:
    for i, size in enumerate(("32K", "1024K", "48M")):
        (tmp_path / f"index{i}").mkdir()
        (tmp_path / f"index{i}" / "size").write_text(size + "\n")
    assert choice.cache_bytes(tmp_path) == 48 * 2**20
    assert choice.cache_bytes(tmp_path / "none") == 32 * 2**20


def test_what_cannot_be_packed_is_not_measured(machine: Callable[..., Machine]) -> None:
    made = machine(1e-3, 1e-3)
    keys = [((64, 32), dtype) for dtype in (BF16, torch.float16, torch.float64)]
    assert set(choice.by_measurement(keys).values()) == {AS_IS}
    assert made.products == 0
    assert choice.by_facts([KEY]) == {KEY: INPUT_MAJOR}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "packed"),
        ({"strict": True}, "input-major"),
        ({"compile": "off"}, "packed"),
        ({"quantize": "target=int8"}, "input-major"),
    ],
)
def test_models_are_packed_where_passes_can_use_it(
    machine: Callable[..., Machine], tmp_path: Path, options: dict[str, Any], expected: str
) -> None:
    machine(1e-3, 0.5e-3)
    target, _ = save_pair(tmp_path / "pair")
    assert shoal.load(target, **options).target.notes["weights"] == expected
