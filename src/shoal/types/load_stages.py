"""The stages of loading a pair, reported as they begin and end to a callback or the logger
"shoal"."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

StageName = Literal["tokenizer", "weights", "packing", "checking", "passes", "preparing", "ready"]
StageModel = Literal["target", "draft", "guide", "expert", "pair"]
SENTENCES: dict[StageName, str] = {
    "tokenizer": "reading the tokenizer of the {}",
    "weights": "reading the weights of the {}",
    "packing": "packing the weights of the {}",
    "checking": "checking the {}",
    "passes": "choosing how passes of the {} are computed, and compiling them",
    "preparing": "preparing the engine of the {}",
    "ready": "the {} is loaded",
}
LOG = logging.getLogger("shoal")


@dataclass(frozen=True)
class LoadStage:
    """A stage of `shoal.load`.

    Attributes:
        name: "tokenizer"; "weights": read, or downloaded, and moved to the device; "packing": their
            order in memory is measured, or they are quantised; "checking": the self-check;
            "passes": kernels are compiled or chosen; "preparing": a server's engine; "ready": the
            last stage.
        model: "target", "draft", "guide", "expert", or "pair" for all.
        seconds: None when the stage begins, then its duration; for "ready", which has no beginning,
            the duration of the whole call.
        stages: for "ready", all the other stages, ended.
    """

    name: StageName
    model: StageModel
    seconds: float | None = None
    stages: tuple[LoadStage, ...] = ()

    def __str__(self) -> str:
        text = SENTENCES[self.name].format("draft model" if self.model == "draft" else self.model)
        if self.seconds is None:
            return f"{text} ..."
        parts = ", ".join(
            f"{stage.model} {stage.name} {stage.seconds:.1f} s" for stage in self.stages
        )
        return f"{text}: {self.seconds:.1f} s" + (f" ({parts})" if parts else "")


LoadProgress = Callable[[LoadStage], object]
StageWatch = Callable[[StageName], AbstractContextManager[None]]
"""A function that returns a context for a stage of one model."""


def unwatched(_name: StageName) -> AbstractContextManager[None]:
    """Returns a context that reports nothing."""
    return nullcontext()


def log(stage: LoadStage) -> None:
    """Logs a line when a stage begins, and the seconds of each stage when the pair is loaded."""
    if stage.seconds is None or stage.name == "ready":
        LOG.info("%s", stage)


class LoadStages:
    """The stages of one call.

    Args:
        progress: called as a stage begins and as it ends, but not if the stage fails; an error that
            it raises ends the call. None = `log`.
    """

    def __init__(self, progress: LoadProgress | None = None) -> None:
        self._progress, self._ended = progress or log, list[LoadStage]()
        self._began_at = time.perf_counter()

    @contextmanager
    def stage(self, name: StageName, model: StageModel) -> Iterator[None]:
        """Reports one stage, which lasts as long as the block."""
        began_at = time.perf_counter()
        self._progress(LoadStage(name, model))
        yield
        self._ended.append(LoadStage(name, model, time.perf_counter() - began_at))
        self._progress(self._ended[-1])

    def of(self, model: StageModel) -> StageWatch:
        """Returns a function that reports the stages of one model."""
        return lambda name: self.stage(name, model)

    def ready(self) -> None:
        """Reports that all is loaded."""
        self._progress(
            LoadStage("ready", "pair", time.perf_counter() - self._began_at, tuple(self._ended))
        )
