"""A round as static functions: steps of a drafting model, and the target's pass with the decision.

The inputs that change from round to round come in one upload: positions, pending tokens, draft
lengths, temperatures, uniforms. The results that the host must know come back in one download:
drafts, the verdict, probabilities, and whether all logits were sound. The host takes no part in
between: on the device, drafts go from step to step and into the target's block. The first replay of
a function is compared with the function, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.models.compiled import Run
from shoal.models.compiled.round_functions import (
    Kind,
    NextRound,
    RoundFunctions,
    RoundModel,
    WrittenCells,
)
from shoal.models.compiled.transfer import Arrival, Download, RoundResults, unpacked
from shoal.models.device import Moments

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers of as many bytes as a number."""


class RoundParts:
    """The functions of a kind of round, each built when it is first needed, and checked once.

    They are "draft", all steps of the drafter; "verify", the target's pass and the decision; and
    "advance", which fills the inputs of the round that follows.

    Args:
        drafter: None for plain decoding, k = 0.

    Attributes:
        functions: the functions to build, and their buffers.
        next: the inputs of the round that follows.
        built: the built functions, by name.
    """

    def __init__(self, kind: Kind, target: RoundModel, drafter: RoundModel | None) -> None:
        self.kind, self.functions = kind, RoundFunctions(kind, target, drafter)
        self.next = NextRound(self.functions, target, drafter)
        self.built: dict[str, Run] = {}
        self._results: Tensor | None = None  # of the target's pass that was built
        self._checked: set[str] = set()
        self._new: set[str] = set()  # parts that were run in this round, and are not checked
        self._passes, self._cache = target.passes, target.cache
        self._score_bytes: int = target.passes.hf.dtype.itemsize

    def build(self) -> None:
        """Builds the functions of a round that are not there yet; no such round is under way."""
        while self.build_one():
            pass

    def build_one(self) -> bool:
        """Builds one function of those; returns True if one was lacking.

        The inputs of the next round that follows are filled by the results of a pass: that function
        comes with the pass.
        """
        lacking = self.lacking()
        for name in lacking[:1]:
            self._build(name)
            if name == "verify" and self._results_stay:
                self._build("advance")
        return bool(lacking)

    def lacking(self) -> list[str]:
        """Returns the names of the functions that `build` has to build."""
        names = ("draft", "verify") if self.kind.k else ("verify",)
        return [name for name in names if name not in self.built]

    @property
    def can_advance(self) -> bool:
        """True if the device can fill the inputs of the round after one of these.

        All functions of the round must have been checked.
        """
        return self._results_stay and not self._new

    def comparing(self) -> AbstractContextManager[None]:
        """Returns a context whose time is no part of a round's."""
        return self._passes.building()

    @property
    def result_bytes(self) -> int:
        """The approximate bytes that the functions keep between runs: logits, and q in float32."""
        scores, k = self.kind.rows * self.kind.style.vocab_size, self.kind.k
        columns = k + 1 if "verify" in self.built else 0
        steps = k if "draft" in self.built else 0
        return scores * (columns * self._score_bytes + steps * (self._score_bytes + 4))

    def widen(self) -> None:
        """Ends all functions, and makes the next ones look at more candidates.

        The functions so far looked at fewer candidates than top_p keeps.
        """
        self.functions.widen()
        self.built.clear()
        self._results = None
        self._checked.clear()
        self._new.clear()

    def unchecked(self, name: str) -> bool:
        """Returns True if the part was run in this round and is not checked.

        The results of such a part were never compared with ordinary passes.
        """
        return name in self._new

    def checked(self, name: str) -> None:
        """Notes that the results of the part, if it was run, are right."""
        self._checked |= self._new & {name}
        self._new -= self._checked

    def _build(self, name: str) -> None:
        subject = f"a round of {self.kind.rows} rows, {name} {self.kind.k}"
        with self._passes.building(subject):
            self.functions.fill_padding()
            self.built[name] = self._built(name)

    @property
    def _results_stay(self) -> bool:
        """True if the results of a pass always lie in the same memory, as a replay's do."""
        return self._passes.replays and self._results is not None

    def _built(self, name: str) -> Run:
        passes, cache, functions = self._passes, self._cache, self.functions
        run = self._function(name)
        if name != "verify":
            return passes.generation(cache).execute(run)
        built = passes.executable(functions.block("target").bucket, cache, run)
        self._results = functions.results
        return built

    def _function(self, name: str) -> Run:
        """Returns the function of a part as it is, launched kernel by kernel."""
        if name == "advance":
            assert self._results is not None
            return partial(self.next.fill, self._results)
        return self.functions.verified if name == "verify" else self.functions.drafted

    def _run(self, name: str) -> Any:
        if name not in self._checked:
            self._new.add(name)
        return self.built[name]()


class Launched(NamedTuple):
    """A round that the device works on.

    Attributes:
        results: the results of the target's pass for the host, on the device, [rows, columns]
            int64.
        logits: logits of the target, [rows, k + 1, vocab]; good until the next pass.
        arrival: the results on their way to the host.
        moments: begin and end of the drafter's work and of the pass.
        replays: the buffers before the pass, if it is to be compared with its function.
    """

    results: Tensor
    logits: Tensor
    arrival: Arrival
    moments: Moments
    replays: FirstReplays | None


class CapturedRound(RoundParts):
    """A round of one kind: its parts run one after another.

    Two of its rounds may be under way: `follow` launches the next one before `collect` waits for
    the one before.

    Args:
        drafter: None for plain decoding, k = 0.

    Attributes:
        logits: logits of the target in the round that was collected last, [rows, k + 1, vocab];
            None before.
    """

    def __init__(self, kind: Kind, target: RoundModel, drafter: RoundModel | None) -> None:
        super().__init__(kind, target, drafter)
        self._models = [model.passes for model in (target, drafter) if model is not None]
        self.logits: Tensor | None = None
        device = target.passes.hf.device
        self._moments, self._others = Moments(device, 4), Moments(device, 4)
        self._download = Download()

    def begin(self) -> None:
        """Sends the inputs, and computes the drafts; does not wait."""
        self.functions.inputs.send()
        self._begin()

    def _begin(self) -> None:
        self._moments, self._others = self._others, self._moments
        self._new = set()
        if self.kind.k:
            self._draft()

    def _draft(self) -> None:
        replays = self._first_replays("draft")
        self._moments.note(0)
        results = self._run("draft")
        self._moments.note(1)
        if replays is not None:
            with self.comparing():
                replays.compare(self._function("draft"), results)

    def launch(self) -> Launched:
        """Launches the target's pass over the drafts, and the decision; does not wait."""
        replays, moments = self._first_replays("verify"), self._moments
        moments.note(2)
        results, logits = self._run("verify")
        moments.note(3)
        arrival = self._download.start(results)
        return Launched(results, logits, arrival, moments, replays)

    def follow(self, uniforms: Tensor) -> Launched:
        """Launches the round that follows one which is under way; does not wait.

        All real rows of that round have k drafts.

        Args:
            uniforms: see `NextRound.send`.

        Raises:
            ArithmeticError: the first inputs are other bits than their function computes.
        """
        self.next.send(uniforms)
        self._advance()
        self._begin()
        return self.launch()

    def _advance(self) -> None:
        """Fills the inputs of the next round; compares the first ones with their function's."""
        run, buffer = self.built["advance"], self.functions.inputs.buffer
        if "advance" in self._checked:
            run()
            return
        with self.comparing():
            before = buffer.clone()
            run()
            ours = buffer.clone()
            buffer.copy_(before)
            self._function("advance")()
            same = ours.equal(buffer)
        if not same:
            raise ArithmeticError("a replay does not write the inputs that its function writes")
        self._checked.add("advance")

    def require_same_weights(self) -> None:
        """Raises ReplacedWeights if weights of a model were replaced since functions were built."""
        for captures in self._models:
            captures.require_same_weights()

    def collect(self, launched: Launched, rows: Sequence[int]) -> RoundResults:
        """Returns the results of these rows of a round; waits for them.

        Raises:
            ArithmeticError: a first replay computes other bits than its function.
        """
        numbers, moments = launched.arrival.wait()[rows], launched.moments
        self.logits = launched.logits
        drafting = moments.seconds(0, 1) if self.kind.k else 0.0
        verifying = moments.seconds(2, 3)
        if launched.replays is not None:
            with self.comparing():
                results = launched.results, launched.logits
                launched.replays.compare(self._function("verify"), results)
        return unpacked(numbers, launched.logits[: len(rows)], drafting, verifying)

    def _first_replays(self, name: str) -> FirstReplays | None:
        """Returns the buffers before a part runs; None if it is not to be compared."""
        if name in self._checked or not self._passes.replays:
            return None
        functions = self.functions
        cells = functions.written_by_target() if name == "verify" else functions.written_by_steps()
        return FirstReplays(functions, cells)


class FirstReplays:
    """The buffers of a round before a function is replayed for the first time.

    A function launched kernel by kernel runs the same kernels on the same shapes as its replay, so
    not a bit may differ: a key that a replay leaves out, a cell that it writes late, a value that
    was a number of Python when it was captured, memory that another graph has written over.
    Rounding hides most of these where a replay is compared with passes of another shape.

    Args:
        functions: the functions of the round and their buffers.
        written: the cells that the replay will write.
    """

    def __init__(self, functions: RoundFunctions, cells: Sequence[WrittenCells]) -> None:
        self._functions, self._places = functions, cells
        self._before = [tensor.clone() for tensor in functions.state]

    def compare(self, run: Run, results: Sequence[Tensor]) -> None:
        """Launches the function kernel by kernel, and compares all that it writes.

        Args:
            run: the function.

        Raises:
            ArithmeticError: the replay computes other bits than its function.
        """
        functions, steps = self._functions, self._functions.steps.copy()
        before = functions.results
        after, cells = functions.inputs.buffer.clone(), self._cells()
        for tensor, value in zip(functions.state, self._before, strict=True):
            tensor.copy_(value)
        real = self._places[0].block.bounds[1] > 0
        for ours, right in zip(results, run(), strict=True):
            _require(~(_differ(ours, right) & real), "values")
        functions.steps[:], functions.results = steps, before  # their addresses are known to graphs
        _require(_bits(after) == _bits(functions.inputs.buffer), "buffers")
        for place, ours, right in zip(self._places, cells, self._cells(), strict=True):
            padding = place.cells == place.block.scratch
            _require(~_differ(ours, right) | padding, "keys and values")

    def _cells(self) -> list[Tensor]:
        """Returns the numbers in the written cells, of all layers [cells, numbers]."""
        return [
            torch.cat([store.flatten(0, 1)[one.cells].flatten(1) for store in one.stores], dim=1)
            for one in self._places
        ]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(BITS[tensor.element_size()])


def _differ(ours: Tensor, right: Tensor) -> Tensor:
    """Returns True for the rows [rows, ...] in which a bit differs, [rows]."""
    return (_bits(ours) != _bits(right)).view(len(ours), -1).any(dim=1)


def _require(same: Tensor, subject: str) -> None:
    """Raises ArithmeticError unless all are True."""
    if not bool(same.all()):
        raise ArithmeticError(f"a replay does not write the {subject} that its function writes")
