"""Assistants of Gemma 4 draft from their target's last state, keys and values.

The model is in `shoal.models.lent_keys`. It reads the target's own cache, and writes nothing there:
committed tokens are there already, so the drafter computes no prompts, never lags and has no memory
of its own. Between rounds the cache holds the keys that the assistant is to see, those of all
committed tokens of a row but the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.drafting.checkpoints import layers_and_width, once
from shoal.drafting.early_exit import TargetSlots
from shoal.drafting.hidden import LastStates
from shoal.drafting.model import ModelDrafter, OrdinarySteps
from shoal.drafting.protocol import DraftCounters, Drafter, DraftInputs, Keeps
from shoal.drafting.text import NOTHING, tree_of
from shoal.errors import InternalError
from shoal.models.lent_keys import AssistantModel, lent_layers, load_assistant
from shoal.models.runner import Runner
from shoal.sampling.scores import Scores
from shoal.types.requests import Row
from shoal.types.rounds import Faults, Verdict
from shoal.types.schedule import PrefillChunk
from shoal.types.trees import DraftTree


class AssistantDrafter(Drafter):
    """A drafter that samples k tokens per row from an assistant of its target.

    Args:
        assistant: Transformers' model, shared by all engines.
        target: the target for which it drafts.
    """

    name = "assistant"

    def __init__(self, assistant: Any, target: Runner) -> None:
        layers, width = layers_and_width(target)
        self.hidden_layers, self.weights = (layers,), assistant
        state = width * target.dtype.itemsize
        self.keeps = Keeps(state, per_row=state, tokens=1, on_device=True)
        self._states = LastStates()
        self._lent: _LentDrafter | None = None

    @classmethod
    def for_target(cls, target: Runner, *, directory: str) -> AssistantDrafter:
        return cls(once(target, directory, _load), target)

    def attach(self, target: Runner) -> None:
        model = AssistantModel(
            self.weights, target.hf.get_input_embeddings(), lent_layers(target.hf, target.name)
        )
        self._lent = _LentDrafter(model, target)

    def read_prompts(self, chunks: Sequence[PrefillChunk], hidden: Sequence[Tensor]) -> None:
        self._states.read(chunks, hidden)

    def propose(self, inputs: DraftInputs) -> DraftTree:
        """Drafts for rows of which the target has a state, and keys beside a stored prompt's."""
        if self._lent is None:
            raise InternalError("a drafter that reads its target was not attached to an engine")
        found = [
            self._states.of(row) if length and _has_keys(row) else None
            for row, length in zip(inputs.rows, inputs.lengths, strict=True)
        ]
        states = [state for state in found if state is not None]
        if not states:
            return tree_of([NOTHING] * len(inputs.rows), inputs)
        self._lent.model.states = torch.stack(states)[:, None]
        lengths = [
            0 if state is None else length
            for state, length in zip(found, inputs.lengths, strict=True)
        ]
        return self._lent.propose(replace(inputs, lengths=lengths))

    def observe(self, rows: Sequence[Row], scores: Scores, verdict: Verdict) -> None:
        self._states.observe(rows, scores, verdict)

    def replace(self, copies: Sequence[tuple[Row, Row]]) -> None:
        self._states.copy(copies)

    def end(self, rows: Sequence[Row]) -> None:
        self._states.leave(rows)

    @property
    def kept_bytes(self) -> int:
        return self._states.bytes

    def take_counters(self) -> DraftCounters:
        return DraftCounters() if self._lent is None else self._lent.take_counters()


def _load(directory: Path, target: Runner) -> Any:
    return load_assistant(directory, target.hf, target.name)


def _has_keys(row: Row) -> bool:
    """Returns True if the row's slot holds keys: right after a stored prompt it holds none."""
    stored = 0 if row.prefix is None else row.prefix.length
    return len(row.tokens) - 1 > stored


class _LentDrafter(ModelDrafter):
    """The draws of an assistant, token by token, in the slots of the target's cache.

    Args:
        model: the model.
        target: the engine's own runner of the target.
    """

    def __init__(self, model: AssistantModel, target: Runner) -> None:
        runner: Any = Runner(model, "the assistant", "interface", target.context, target.attention)
        runner.vocab_size = runner.known_ids = target.vocab_size
        runner.cache = target.cache
        super().__init__(runner, target.vocab_size)
        self.model, self._slots = model, TargetSlots(runner)

    def propose(self, inputs: DraftInputs) -> DraftTree:
        faults: Faults = {}
        tree = self._drafted(inputs, _LentSteps(self, inputs, faults), faults)
        assert tree is not None
        return tree

    def clean(self, rows: Sequence[Row]) -> None:
        """Zeroes nothing: all cells are the target's."""


class _LentSteps(OrdinarySteps):
    """The steps of a draft, whose passes write no keys.

    Each pass stands where the row's last token with keys stands, and the cache is as long
    afterwards as it was before.
    """

    def __init__(self, drafter: _LentDrafter, inputs: DraftInputs, faults: Faults) -> None:
        super().__init__(drafter, inputs, faults)
        self._drafting = [row for row, length in enumerate(inputs.lengths) if length]
        self._first = torch.tensor(
            [row.tokens[-1] for row in inputs.rows], device=drafter.runner.device
        )

    def logits(self, lengths: Sequence[int]) -> Tensor:
        last, runner, drafting = self.last, self._drafter.runner, self._drafting
        if last is not None:
            self.note_history(last, lengths)
        block = (self._first if last is None else last.clamp(min=0))[drafting, None]
        slots = [self.slots[row] for row in drafting]
        for slot in slots:
            runner.cache.rollback(slot, runner.cache.lengths[slot] - 1)
        found = runner.feed(slots, block, [1] * len(slots))[:, -1]
        if len(drafting) == len(self.slots):
            return found
        whole = found.new_zeros(len(self.slots), found.shape[-1])
        whole[drafting] = found
        return whole
