"""The command `shoal` in the process, with models made for a test."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import run
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
