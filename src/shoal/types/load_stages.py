"""The stages in which a pair is loaded, told to a callback, or to the logger "shoal", as they begin
and end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

StageName = Literal["tokenizer", "weights", "packing", "checking", "passes", "preparing", "ready"]
StageModel = Literal["target", "draft", "pair"]
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
            last one.
        model: "target", "draft", or "pair" for both.
        seconds: None as it begins, then how long it took; of "ready", which has no beginning, the
            whole call.
        stages: of "ready": all others, ended.
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
"""A stage of one model, as a context."""


def unwatched(_name: StageName) -> AbstractContextManager[None]:
    """A stage that nobody is told of."""
    return nullcontext()


def log(stage: LoadStage) -> None:
    """A line as a stage begins, and one when the pair is loaded, with the seconds of each."""
    if stage.seconds is None or stage.name == "ready":
        LOG.info("%s", stage)


class LoadStages:
    """The stages of one call.

    Args:
        progress: called as a stage begins and as it ends, not where it fails; what it raises ends
            the call. None = `log`.
    """

    def __init__(self, progress: LoadProgress | None = None) -> None:
        self._progress, self._ended = progress or log, list[LoadStage]()
        self._began_at = time.perf_counter()

    @contextmanager
    def stage(self, name: StageName, model: StageModel) -> Iterator[None]:
        """One stage, for as long as the block lasts."""
        began_at = time.perf_counter()
        self._progress(LoadStage(name, model))
        yield
        self._ended.append(LoadStage(name, model, time.perf_counter() - began_at))
        self._progress(self._ended[-1])

    def of(self, model: StageModel) -> StageWatch:
        """The stages of one model."""
        return lambda name: self.stage(name, model)

    def ready(self) -> None:
        """Tells that all is loaded."""
        self._progress(
            LoadStage("ready", "pair", time.perf_counter() - self._began_at, tuple(self._ended))
        )
