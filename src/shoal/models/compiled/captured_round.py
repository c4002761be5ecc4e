"""A round as static functions: steps of a drafting model, and the target's pass with the decision.

The inputs that change from round to round come in one upload: positions, pending tokens, draft
lengths, temperatures, uniforms. The results that the host must know come back in one download:
drafts, the verdict, probabilities, and whether all logits were sound. In between nothing is asked
of the host: drafts go from step to step and into the target's block on the device.

Where the host decides the draft lengths by the drafter's confidence, a function is a few steps
(`Kind.piece`). The confidences of the steps that were run come back in a download of their own, and
the draft lengths follow in an upload of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.models.compiled.executors import Run
from shoal.models.compiled.replays import FirstReplays
from shoal.models.compiled.round_functions import (
    DRAFTING,
    VERIFYING,
    Kind,
    NextRound,
    RoundFunctions,
    RoundModel,
)
from shoal.models.compiled.transfer import Arrival, Download, Found, unpacked
from shoal.models.device_time import Moments


class RoundPart(NamedTuple):
    """A function of a round.

    Attributes:
        name: "draft", "verify", or "advance", which fills the inputs of the round that follows.
        number: the first step of a "draft", the number of drafts of the others.
    """

    name: str
    number: int


class RoundParts:
    """The functions of a kind of round, each built when it is first needed, and checked once.

    Args:
        drafter: None for plain decoding, k = 0.

    Attributes:
        functions: the functions to build, and their buffers.
        next: the inputs of the round that follows.
        built: the built functions, by part.
    """

    def __init__(self, kind: Kind, target: RoundModel, drafter: RoundModel | None) -> None:
        self.kind, self.functions = kind, RoundFunctions(kind, target, drafter)
        self.next = NextRound(self.functions, target, drafter)
        self.built: dict[RoundPart, Run] = {}
        self._results: dict[int, Tensor] = {}  # of the target's pass, by its number of drafts
        self._complete: set[int] = set()  # the arguments of `build` that nothing is lacking for
        self._checked: set[RoundPart] = set()
        self._new: set[RoundPart] = set()  # parts that were run in this round, and are not checked
        self._passes, self._cache = target.passes, target.cache
        self._score_bytes: int = target.passes.hf.dtype.itemsize

    def build(self, drafts: int) -> None:
        """Builds the functions of rounds with `drafts` drafts that are not there yet.

        Where the host looks at confidences, these are the functions of rounds with at most `drafts`
        drafts.
        """
        if drafts not in self._complete:
            for part in self.lacking(drafts):
                self._part(*part)
            self._complete.add(drafts)

    def build_one(self, drafts: int) -> bool:
        """Builds one function of those; returns True if one was lacking."""
        lacking = self.lacking(drafts)
        for part in lacking[:1]:
            self._part(*part)
        return bool(lacking)

    def lacking(self, drafts: int) -> list[RoundPart]:
        """Returns the parts that `build` has to build."""
        step = max(self.kind.piece, 1)
        widths = range(0 if self.kind.looks else drafts, drafts + 1, step)
        parts = [RoundPart("draft", first) for first in range(0, drafts, step)]
        parts += [RoundPart("verify", self.columns(width)) for width in widths]
        return [part for part in parts if part not in self.built]

    def can_advance(self, drafts: int) -> bool:
        """Returns True if the device can fill the inputs of the round after one of `drafts` drafts.

        All functions of that round must have been checked.
        """
        return self._results_stay(drafts) and not self._new

    def comparing(self) -> AbstractContextManager[None]:
        """Returns a context whose time is no part of a round's."""
        return self._passes.building()

    @property
    def result_bytes(self) -> int:
        """The approximate bytes that the functions keep between runs: logits, and q in float32."""
        scores = self.kind.rows * self.kind.style.vocab_size
        columns = sum(part.number + 1 for part in self.built if part.name == "verify")
        steps = sum(max(self.kind.piece, 1) for part in self.built if part.name == "draft")
        return scores * (columns * self._score_bytes + steps * (self._score_bytes + 4))

    def columns(self, drafts: int) -> int:
        """Returns the number of drafts for which the target's pass has columns.

        It may be more than `drafts`, the number of drafts that are verified: there are few widths,
        as each is a function.
        """
        piece = self.kind.piece
        return -(-drafts // piece) * piece if piece else 0

    def widen(self) -> None:
        """Ends all functions, and makes the next ones look at more candidates.

        The functions so far looked at fewer candidates than top_p keeps.
        """
        self.functions.widen()
        self.built.clear()
        self._results.clear()
        self._complete.clear()
        self._checked.clear()
        self._new.clear()

    def unchecked(self, name: str) -> bool:
        """Returns True if a part of that name was run in this round and is not checked.

        The results of such a part were never compared with ordinary passes.
        """
        return any(part.name == name for part in self._new)

    def checked(self, name: str) -> None:
        """Notes that the results of the parts of that name that were run are right."""
        self._checked |= {part for part in self._new if part.name == name}
        self._new -= self._checked

    def _part(self, name: str, number: int) -> Run:
        """Returns the function of a part, and builds it if it is not there.

        After the build, the buffers hold the values of the round under way again.
        """
        part, functions = RoundPart(name, number), self.functions
        if part not in self.built:
            with self._passes.building(f"a round of {self.kind.rows} rows, {name} {number}"):
                kept = [tensor.clone() for tensor in functions.state]
                functions.fill_padding(0 if name == "draft" else number)
                self.built[part] = self._built(name, number)
                for tensor, own in zip(functions.state, kept, strict=True):
                    tensor.copy_(own)
            if name == "verify" and not self.kind.looks and self._results_stay(number):
                self._part("advance", number)
        return self.built[part]

    def _results_stay(self, drafts: int) -> bool:
        """Returns True if the results of a pass always lie in the same memory, as a replay's do."""
        return self._passes.replays and drafts in self._results

    def _built(self, name: str, number: int) -> Run:
        passes, cache, functions = self._passes, self._cache, self.functions
        run = self._function(name, number)
        if name != "verify":
            return passes.generation(cache).execute(run)
        built = passes.executable(functions.target_view(number).block.bucket, cache, run)
        if functions.results is not None:
            self._results[number] = functions.results
        return built

    def _function(self, name: str, number: int) -> Run:
        """Returns the function of a part as it is, launched kernel by kernel."""
        functions = self.functions
        if name == "advance":
            return partial(self.next.fill, number, self._results[number])
        return partial(functions.verified if name == "verify" else functions.drafted, number)

    def _run(self, name: str, number: int) -> Any:
        part = RoundPart(name, number)
        if part not in self._checked:
            self._new.add(part)
        return self.built[part]()


class Launched(NamedTuple):
    """A target's pass that the device works on.

    Attributes:
        columns: the number of drafts that it has columns for.
        results: its results for the host, on the device, [rows, columns] int64.
        logits: logits of the target, [rows, drafts + 1, vocab]; good until the next pass.
        arrival: the results on their way to the host.
        moments: begin and end of the drafter's work and of the pass.
        drafting: seconds of the drafter in this round that were waited for.
        drafted: True if the drafter has worked since then.
        replays: the buffers before the pass, if it is to be compared with its function.
    """

    columns: int
    results: Tensor
    logits: Tensor
    arrival: Arrival
    moments: Moments
    drafting: float
    drafted: bool
    replays: FirstReplays | None


class CapturedRound(RoundParts):
    """A round of one kind: its parts run one after another.

    Two of its rounds may be under way: `follow` launches the next one before `collect` waits for
    the one before.

    Args:
        drafter: None for plain decoding, k = 0.

    Attributes:
        drafting: seconds of the drafter on the device in this round, as far as it was waited for.
        logits: logits of the target in the round that was collected last, [rows, drafts + 1,
            vocab]; None before.
    """

    def __init__(self, kind: Kind, target: RoundModel, drafter: RoundModel | None) -> None:
        super().__init__(kind, target, drafter)
        self._models = [model.passes for model in (target, drafter) if model is not None]
        self.logits: Tensor | None = None
        self.drafting, self._ran, self._waiting = 0.0, 0, False
        device = target.passes.hf.device
        self._moments, self._others = Moments(device, 4), Moments(device, 4)
        self._download = Download()

    def begin(self) -> None:
        """Sends the inputs: all, or only those of the steps if draft lengths are not known yet."""
        self.functions.inputs.send(*(DRAFTING[0], DRAFTING[-1]) if self.kind.looks else ())
        self._begin()

    def _begin(self) -> None:
        self._moments, self._others = self._others, self._moments
        self._new, self.drafting, self._ran = set(), 0.0, 0

    def draft(self, steps: int) -> None:
        """Computes the drafts up to number `steps` that are not there yet."""
        firsts = range(self._ran, steps, max(self.kind.piece, 1))
        for first in firsts:
            self._part("draft", first)
        replays = self._first_replays("draft", firsts)
        self._moments.note(0)
        results = [self._run("draft", first) for first in firsts]
        self._moments.note(1)
        if replays is not None:
            with self.comparing():
                replays.compare([self._function("draft", first) for first in firsts], results)
        self._ran, self._waiting = steps, True

    def confidences(self, rows: int) -> list[list[float]]:
        """Returns the drafter's confidences of all steps so far and the first rows.

        Waits for them. A confidence is 0 where the drafter has no distribution.
        """
        found = self._download(self.functions.confidences[: self._ran].view(torch.long))
        self._add_drafting()
        confidences: list[list[float]] = found.view(np.float64)[:, :rows].tolist()
        return confidences

    def launch(self, drafts: int) -> Launched:
        """Launches the target's pass over `drafts` drafts, and the decision; does not wait."""
        columns = self.columns(drafts)
        self._part("verify", columns)
        if self.kind.looks:
            self.functions.inputs.send(VERIFYING[0], VERIFYING[-1])
        replays, moments = self._first_replays("verify", [columns]), self._moments
        moments.note(2)
        results, logits = self._run("verify", columns)
        moments.note(3)
        arrival = self._download.start(results)
        drafted, self._waiting = self._waiting, False
        return Launched(
            columns,
            results,
            logits,
            arrival,
            moments=moments,
            drafting=self.drafting,
            drafted=drafted,
            replays=replays,
        )

    def follow(self, before: Launched, uniforms: Tensor) -> Launched:
        """Launches the round that follows one which is under way; does not wait.

        Args:
            before: that round, whose real rows all have as many drafts as it computed.
            uniforms: see `NextRound.send`.

        Raises:
            ArithmeticError: the first inputs are other bits than their function computes.
        """
        drafts = before.columns
        self.next.send(uniforms)
        self._advance(drafts)
        self._begin()
        if self.kind.k:
            self.draft(self.kind.k)
        return self.launch(drafts)

    def _advance(self, drafts: int) -> None:
        """Fills the inputs of the next round; compares the first ones with their function's."""
        part, buffer = RoundPart("advance", drafts), self.functions.inputs.buffer
        run = self._part(*part)
        if part in self._checked:
            run()
            return
        with self.comparing():
            before = buffer.clone()
            run()
            ours = buffer.clone()
            buffer.copy_(before)
            self._function(*part)()
            same = torch.equal(ours, buffer)
        if not same:
            raise ArithmeticError("a replay does not write the inputs that its function writes")
        self._checked.add(part)

    def require_same_weights(self) -> None:
        """Raises ReplacedWeights if weights of a model were replaced since functions were built."""
        for captures in self._models:
            captures.require_same_weights()

    def collect(self, launched: Launched, rows: Sequence[int]) -> Found:
        """Returns the results of these rows of a round; waits for them.

        Raises:
            ArithmeticError: a first replay computes other bits than its function.
        """
        numbers, moments = launched.arrival.wait()[rows], launched.moments
        self.logits = launched.logits
        drafting = launched.drafting + (moments.seconds(0, 1) if launched.drafted else 0.0)
        verifying = moments.seconds(2, 3)
        if launched.replays is not None:
            run = self._function("verify", launched.columns)
            with self.comparing():
                launched.replays.compare([run], [(launched.results, launched.logits)])
        return unpacked(numbers, launched.logits[: len(rows)], drafting, verifying)

    def _first_replays(self, name: str, numbers: Sequence[int]) -> FirstReplays | None:
        """Returns the buffers before parts run; None if no part is to be compared."""
        new = any(RoundPart(name, number) not in self._checked for number in numbers)
        if not (new and self._passes.replays):
            return None
        functions = self.functions
        written = (
            functions.written_by_target(numbers[0])
            if name == "verify"
            else functions.written_by_steps(numbers[0], numbers[-1] + self.kind.piece)
        )
        return FirstReplays(functions, written)

    def _add_drafting(self) -> None:
        """Adds the drafter's time, once per wait: its work is over."""
        if self._waiting:
            self.drafting, self._waiting = self.drafting + self._moments.seconds(0, 1), False
