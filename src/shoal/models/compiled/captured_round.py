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
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.models.compiled.executors import Run
from shoal.models.compiled.replays import FirstReplays
from shoal.models.compiled.results import Found, unpacked
from shoal.models.compiled.round_functions import (
    DRAFTING,
    VERIFYING,
    Kind,
    RoundFunctions,
    RoundModel,
)
from shoal.models.compiled.transfer import Download
from shoal.models.device_time import Moments


class RoundPart(NamedTuple):
    """A function of a round.

    Attributes:
        name: "draft" or "verify".
        number: the first step of a "draft", the number of drafts of a "verify".
    """

    name: str
    number: int


class RoundParts:
    """The functions of a kind of round, each built when it is first needed, and checked once.

    Args:
        drafter: None for plain decoding, k = 0.

    Attributes:
        functions: the functions to build, and their buffers.
        built: the built functions, by part.
    """

    def __init__(self, kind: Kind, target: RoundModel, drafter: RoundModel | None) -> None:
        self.kind, self.functions = kind, RoundFunctions(kind, target, drafter)
        self.built: dict[RoundPart, Run] = {}
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

    def _widen(self) -> None:
        """Ends all functions, and makes the next ones look at more candidates.

        The functions so far looked at fewer candidates than top_p keeps.
        """
        self.functions.widen()
        self.built.clear()
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
                functions.fill_padding(number if name == "verify" else 0)
                self.built[part] = self._built(name, number)
                for tensor, own in zip(functions.state, kept, strict=True):
                    tensor.copy_(own)
        return self.built[part]

    def _built(self, name: str, number: int) -> Run:
        passes, cache, functions = self._passes, self._cache, self.functions
        run = self._function(name, number)
        if name == "verify":
            return passes.executable(functions.target_view(number).block.bucket, cache, run)
        return passes.generation(cache).execute(run)

    def _function(self, name: str, number: int) -> Run:
        """Returns the function of a part as it is, launched kernel by kernel."""
        functions = self.functions
        return partial(functions.verified if name == "verify" else functions.drafted, number)

    def _run(self, name: str, number: int) -> Any:
        part = RoundPart(name, number)
        if part not in self._checked:
            self._new.add(part)
        return self.built[part]()


class CapturedRound(RoundParts):
    """A round of one kind: its parts run one after another.

    Args:
        drafter: None for plain decoding, k = 0.

    Attributes:
        logits: logits of the target in the last round, [rows, drafts + 1, vocab].
        drafting: seconds of the drafter on the device in this round, as far as it was waited for.
    """

    def __init__(self, kind: Kind, target: RoundModel, drafter: RoundModel | None) -> None:
        super().__init__(kind, target, drafter)
        self._models = [model.passes for model in (target, drafter) if model is not None]
        self.logits: Tensor | None = None
        self.drafting, self._ran, self._waiting = 0.0, 0, False
        self._moments, self._download = Moments(target.passes.hf.device, 4), Download()

    def begin(self) -> None:
        """Sends the inputs: all, or only those of the steps if draft lengths are not known yet."""
        self.functions.inputs.send(*(DRAFTING[0], DRAFTING[-1]) if self.kind.looks else ())
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

    def verify(self, drafts: int, rows: int) -> Found:
        """Computes the target's pass over `drafts` drafts, and the decision; waits for the results.

        Args:
            rows: number of rows, from the first on, whose results are returned.

        Raises:
            ReplacedWeights: weights of either model were replaced since the functions were built.
            ArithmeticError: a first replay computes other bits than its function.
        """
        columns = self.columns(drafts)
        self._part("verify", columns)
        if self.kind.looks:
            self.functions.inputs.send(VERIFYING[0], VERIFYING[-1])
        replays = self._first_replays("verify", [columns])
        self._moments.note(2)
        results, self.logits = self._run("verify", columns)
        self._moments.note(3)
        for captures in self._models:  # while the device works
            captures.require_same_weights()
        numbers = self._download(results)[:rows].copy()
        self._add_drafting()
        if replays is not None:
            replays.compare([self._function("verify", columns)], [(results, self.logits)])
        found = unpacked(numbers, self.logits[:rows], self.drafting, self._moments.seconds(2, 3))
        if found.too_few:
            self._widen()
        return found

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
