"""What a worker is told: which engine on which models, then one task after another. Plain data that JSON carries."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

PLAIN = "plain"
"""The method without a drafter; the others name a draft length: "auto", "fixed:4"."""


class Absent(Exception):
    """The engine, or what it would need for this configuration, is not there; says why."""


@dataclass(frozen=True)
class Setup:
    """An engine's configuration.

    Attributes:
        engine: its module.
        target: a directory that `save_pretrained` wrote, in float32.
        draft: such a directory, or, for shoal, a drafter's spec.
        dtype: "float32", "bfloat16", "int8" (weights of 8 bits, bfloat16 beside them), or the format of a GGUF file.
        cache: directory for what the engine converts the models to.
        rows, length: at most, of a task; prompts included.
        isa: the instruction set that engines are held to (`engines.process.HELD`), "" = the processor's.
    """

    engine: str
    method: str
    target: str
    draft: str | None
    dtype: str
    threads: int
    cache: str
    rows: int
    length: int
    isa: str = ""

    def gguf_file(self, model: str) -> Path:
        """The GGUF file of one of both models."""
        return Path(self.cache) / f"{Path(model).name}-{self.dtype.removesuffix('-float32')}.gguf"

    @property
    def drafted(self) -> int:
        """Tokens that a peer drafts per round."""
        return int(self.method.removeprefix("fixed:")) if self.method.startswith("fixed:") else 0


@dataclass(frozen=True)
class Task:
    """n rows of each prompt, each of `new_tokens` tokens if nothing ends it before. temperature: 0 is greedy.

    Attributes:
        eos: the tokens that end a row.
        stops: the strings that end a row; all rows go on beyond them in engines that measure speed alone.
    """

    prompts: Sequence[Sequence[int]]
    n: int
    new_tokens: int
    temperature: float
    top_p: float
    seed: int
    eos: Sequence[int] = ()
    stops: Sequence[str] = ()


@dataclass(frozen=True)
class Answer:
    """New ids of every row, prompt by prompt.

    Attributes:
        finished_at: seconds from the call to the end of each row; None where all rows are handed over at once.
        mean_logprobs: of each row, under the distribution that is sampled; None where the engine does not say.
        drafted, accepted: tokens, where the engine says. acceptance_length: tokens per row and target pass.
    """

    ids: Sequence[Sequence[int]]
    drafted: int | None = None
    accepted: int | None = None
    acceptance_length: float | None = None
    finished_at: Sequence[float] | None = None
    mean_logprobs: Sequence[float] | None = None


def convert(out: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` make a file or directory, if it is not there; one that was interrupted is made again."""
    unfinished = out.with_name(f"{out.name}.part")
    if not out.exists():
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
        write(unfinished)
        unfinished.rename(out)


class Engine(Protocol):
    """What each engine's module has under the name `Engine`; made with a `Setup`, after `prepare(setup)` in another process.

    Attributes:
        version: of the package. settings: what it was told, for the report.
    """

    version: str
    settings: dict[str, str]

    def generate(self, task: Task) -> Answer:
        """Decodes the task. What it does is timed."""
        ...
