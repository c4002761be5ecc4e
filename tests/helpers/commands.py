"""The command `shoal` in the process, with models made for a test."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shoal.cli import printed_samples, run
from shoal.testing import save_pair

SAMPLE_KEYS = {
    "text", "token_ids", "mean_logprob", "finish_reason", "finished", "finished_at_s", "rounds", "drafted", "accepted",
    "by_drafter",
}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Answer]


@pytest.fixture
def shoal(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command line in this process."""

    def call(*arguments: object) -> Answer:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        return Answer(code, *capsys.readouterr())

    return call


def press_ctrl_c(monkeypatch: pytest.MonkeyPatch, module: ModuleType, after: int, times: int = 1) -> None:
    """Ctrl-C after so many increments of the first answer of a command that has so many."""
    seen: list[Any] = []

    def follow(stream: Any, show: Callable[[Any], None]) -> Any:
        def press(increment: Any) -> None:
            show(increment)
            seen.append(increment)
            if len(seen) == after:
                for _ in range(times):
                    os.kill(os.getpid(), signal.SIGINT)

        return printed_samples.follow(stream, press)

    monkeypatch.setattr(module, "follow", follow)


@dataclass(frozen=True)
class Models:
    """Directories of a target, a drafter that fits it, and one that does not."""

    target: Path
    drafter: Path
    stranger: Path

    @property
    def pair(self) -> tuple[str, ...]:
        return "--model", str(self.target), "--draft", str(self.drafter)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    target, drafter = save_pair(root)
    stranger = shutil.copytree(drafter, root / "stranger")
    file = stranger / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    return Models(target, drafter, stranger)
