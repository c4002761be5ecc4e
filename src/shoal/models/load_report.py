"""The reports of the loading of a pair: its stages while it loads, and its choices afterwards.

Stages are reported as they begin and end, to a callback or the logger "shoal". The report of the
choices lists those that change the rounding of logits or the drafts, and so may change a seed's
tokens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

from shoal.models.attention.methods import resolved
from shoal.models.compiled.captures import CAPTURED
from shoal.models.executor import C_DECODER, C_LAYERS, TRITON_LAYERS
from shoal.models.runner import Runner

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
    """Returns a context without a report."""
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
        self._progress, self._stages = progress or log, list[LoadStage]()
        self._began_at = time.perf_counter()

    @contextmanager
    def stage(self, name: StageName, model: StageModel) -> Iterator[None]:
        """Reports one stage, which lasts as long as the block."""
        began_at = time.perf_counter()
        self._progress(LoadStage(name, model))
        yield
        self._stages.append(LoadStage(name, model, time.perf_counter() - began_at))
        self._progress(self._stages[-1])

    def of(self, model: StageModel) -> StageWatch:
        """Returns a function that reports the stages of one model."""
        return lambda name: self.stage(name, model)

    def ready(self) -> None:
        """Reports that all is loaded."""
        self._progress(
            LoadStage("ready", "pair", time.perf_counter() - self._began_at, tuple(self._stages))
        )


def load_report(
    target: Runner,
    draft: Runner | None,
    drafter: str | None = None,
    guides: Mapping[str, Runner | None] | None = None,
) -> dict[str, dict[str, str] | None]:
    """Returns the choices for each model, ready for JSON, without the name or path of a model.

    The value of "draft" is None without a drafter; there is no "guide" or "expert" without one.

    Args:
        draft: the draft model; None = there is none.
        drafter: the name and the options of a drafter that is not a model.
        guides: the guide and the expert, by role; None = there is none.
    """
    entry = ({} if drafter is None else {"drafter": drafter}) | (
        {} if draft is None else described(draft)
    )
    report = {"target": described(target), "draft": entry or None}
    return report | {role: described(one) for role, one in (guides or {}).items() if one}


def described(runner: Runner) -> dict[str, str]:
    """Returns the choices for one model, by name.

    Returns:
        dtype: the number format.
        dtype_reason: the reason for the number format.
        device: the device of the model.
        weights: the order of the weights in memory (`shoal.models.weights`).
        quantize: the 8-bit format, or "off".
        attention: the method, with "auto" resolved.
        passes: the executor of passes of a few tokens (`shoal.models.executor`), and
            the reason why a faster one is not used.
        strict: the proof of strict passes, or "off".
        kv: the format that keys and values are rounded to, or "off".
        kernels: a remark on the kernels in C, if they are not simply the machine's own
            (`shoal.native.build.remark`).
    """
    notes, name = runner.notes, str(runner.dtype).removeprefix("torch.")
    reason = notes.get("dtype", "that of the model object").removeprefix(f"{name}: ")
    return {
        "dtype": name,
        "dtype_reason": reason,
        "device": str(runner.device),
        "weights": notes.get("weights", "as given"),
        "quantize": notes.get("quantize", "off"),
        "attention": _attention(runner),
        "passes": _passes(runner),
        "strict": notes.get("strict", "off"),
        "kv": notes.get("kv", "off"),
        **({"kernels": notes["kernels"]} if "kernels" in notes else {}),
    }


def _passes(runner: Runner) -> str:
    layers = (
        TRITON_LAYERS
        if runner.bridge.layers is not None and not runner.ordinary_only
        else runner.executors[-1].name
    )
    reason = runner.capture_failure or runner.absent.get(CAPTURED)
    if reason is not None:
        return f"{layers} (no captured rounds: {reason})"
    if runner.captures is not None:
        return ", ".join([f"{CAPTURED} of {layers}", *runner.captures.failures])
    if runner.lean is None:
        return layers
    return C_DECODER if runner.lean.whole is not None else C_LAYERS


def _attention(runner: Runner) -> str:
    if runner.attention_path == "mask" or not runner.has_modules:
        return "the model's own"
    return resolved(runner.attention, runner.device, runner.dtype)


def one_line(report: dict[str, dict[str, str] | None]) -> str:
    """Returns a report as one line for the log."""
    return "loaded: " + "; ".join(f"{role} {_words(entry)}" for role, entry in report.items())


def _words(entry: dict[str, str] | None) -> str:
    if entry is None or "dtype" not in entry:
        return "none" if entry is None else entry["drafter"]
    rest = (
        f"{name} {entry[name]}"
        for name in ("weights", "quantize", "attention", "passes", "strict", "kv", "kernels")
        if name in entry
    )
    first = f"{entry['drafter']}, " if "drafter" in entry else ""
    return (
        f"{first}{entry['dtype']} on {entry['device']} ({entry['dtype_reason']}), {', '.join(rest)}"
    )
