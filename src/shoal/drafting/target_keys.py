"""Drafters that attend to their target's own keys and values: assistants, and the target itself.

An assistant of Gemma 4 drafts from its target's last state, keys and values. The model is in
`shoal.models.target_models`. It reads the target's own cache, and writes nothing there: committed
tokens are there already, so the drafter computes no prompts, never lags and has no memory of its
own. Between rounds the cache holds the keys that the assistant is to see, those of all committed
tokens of a row but the last one.

A target drafts for itself with a part of its keys and values: those of the first tokens of a row
and of the most recent ones (StreamingLLM, Xiao et al., ICLR 2024, arXiv 2309.17453), while the
verification reads all tokens. It is meant for long contexts, where most of a pass is attention.
Before each proposal the part is copied from the target's cache, so the drafter need not follow
tokens that were committed, moved or rolled back there. Tokens keep their positions in the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.drafting.draft_slots import DraftMemory, DraftSlots
from shoal.drafting.early_exit import EarlyExitDrafter, TargetSlots
from shoal.drafting.model import ModelDrafter, OrdinarySteps
from shoal.drafting.protocol import DraftCounters, Drafter, DraftInputs
from shoal.drafting.text import NOTHING, tree_of
from shoal.drafting.trained_heads import LastStateDrafter, last_states, once
from shoal.errors import InternalError, UnsupportedModel
from shoal.models.four_bits import four_bit_copy
from shoal.models.runner import Runner
from shoal.models.target_models import (
    AssistantModel,
    first_layers,
    head_of,
    layer_count,
    lent_layers,
    load_assistant,
    require_exit,
)
from shoal.types.requests import Row
from shoal.types.rounds import Faults
from shoal.types.trees import DraftTree


class AssistantDrafter(LastStateDrafter):
    """A drafter that samples k tokens per row from an assistant of its target.

    Args:
        assistant: Transformers' model, shared by all engines.
        target: the target for which it drafts.
    """

    name = "assistant"

    def __init__(self, assistant: Any, target: Runner) -> None:
        super().__init__(*last_states(target))
        self.weights = assistant
        self._lent: _LentDrafter | None = None

    @classmethod
    def for_target(cls, target: Runner, *, directory: str) -> AssistantDrafter:
        return cls(once(target, directory, _load), target)

    def attach(self, target: Runner) -> None:
        model = AssistantModel(
            self.weights, target.hf.get_input_embeddings(), lent_layers(target.hf, target.name)
        )
        self._lent = _LentDrafter(model, target)

    def propose(self, inputs: DraftInputs) -> DraftTree:
        """Drafts for rows of which the target has a state, and keys beside a stored prompt's."""
        if self._lent is None:
            raise InternalError("a drafter that reads its target was not attached to an engine")
        drafts = [
            self.state_of(row) if length and _has_keys(row) else None
            for row, length in zip(inputs.rows, inputs.lengths, strict=True)
        ]
        states = [state for state in drafts if state is not None]
        if not states:
            return tree_of([NOTHING] * len(inputs.rows), inputs)
        self._lent.model.states = torch.stack(states)[:, None]
        lengths = [
            0 if state is None else length
            for state, length in zip(drafts, inputs.lengths, strict=True)
        ]
        return self._lent.propose(replace(inputs, lengths=lengths))

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
        logits_of_pass = runner.feed(slots, block, [1] * len(slots))[:, -1]
        if len(drafting) == len(self.slots):
            return logits_of_pass
        whole = logits_of_pass.new_zeros(len(self.slots), logits_of_pass.shape[-1])
        whole[drafting] = logits_of_pass
        return whole


ROOM = 64
"""The tokens of a draft for which memory is counted."""


class ReducedCacheDrafter(Drafter):
    """A drafter that samples from the target, or an exit of it, over a part of its cache.

    Args:
        window: the number of most recent committed tokens that are read, beside the last one.
        sinks: the number of first tokens of a row that are read.
        exit: the number of layers that draft; None = all.
    """

    name = "self"

    def __init__(self, window: int, sinks: int, exit: int | None = None) -> None:
        self.window, self.sinks, self.exit = window, sinks, exit
        self._drafter: _WithPart | None = None

    def attach(self, target: Runner) -> None:
        layers = layer_count(target) if self.exit is None else self.exit
        runner = (
            target.over_same_cache(target.hf, target.lean)
            if self.exit is None
            else first_layers(target, layers)
        )
        runner.cache = target.new_cache()
        slots = _PartSlots(runner, target, self.window, self.sinks, layers)
        self._drafter = _WithPart(runner, target.vocab_size, slots)
        self.memory = _PartMemory(slots, self.window + self.sinks + ROOM)

    def propose(self, inputs: DraftInputs) -> DraftTree:
        if self._drafter is None:
            raise InternalError(
                "a drafter that reads its target's cache was not attached to an engine"
            )
        return self._drafter.propose(inputs)

    def take_counters(self) -> DraftCounters:
        return DraftCounters() if self._drafter is None else self._drafter.take_counters()


def self_drafter(
    target: Runner,
    exit: int | None = None,
    window: int | None = None,
    sinks: int = 0,
    int4: bool = False,
) -> Drafter:
    """Makes a drafter of the target's first layers, of all with a part of its cache, or of both.

    Args:
        target: the model that drafts for itself.
        exit: the number of layers that draft; None = all with a window, else chosen from round to
            round.
        window: the number of most recent tokens that are read while drafting; None = all.
        sinks: the number of first tokens that are read beside a window.
        int4: True for the target's copy in 4 bits, with a cache of its own.

    Raises:
        RequestError: the target has no such exit.
        UnsupportedModel: the target has no exit at all, takes no positions, or has no such copy.
    """
    if int4:
        drafter = ModelDrafter(four_bit_copy(target), target.vocab_size)
        drafter.weights = None  # the copy follows the target
        return drafter
    layer_count(target)
    if exit is not None or window is None:
        require_exit(target, 1 if exit is None else exit)
    if window is None:
        if exit is None:
            head_of(target)
        return EarlyExitDrafter(exit)
    if not target.takes_trees:
        raise UnsupportedModel(
            f"{target.name} takes no position for each token, which drafting with a part of its "
            f"cache needs"
        )
    return ReducedCacheDrafter(window, sinks, exit)


class _WithPart(ModelDrafter):
    """A draft model that reads the last token of each row, over a part of the tokens before it."""

    def __init__(self, runner: Runner, vocab_size: int, slots: _PartSlots) -> None:
        super().__init__(runner, vocab_size)
        self._slots: _PartSlots = slots

    def propose(self, inputs: DraftInputs) -> DraftTree:
        self._slots.fill(inputs.rows, inputs.lengths)
        return super().propose(inputs)

    def lacking(
        self, rows: Sequence[Row], lengths: Sequence[int]
    ) -> tuple[list[int], list[list[int]]]:
        return [self._held(row) for row in rows], [
            [row.tokens[-1] if length else 0] for row, length in zip(rows, lengths, strict=True)
        ]


class _PartSlots(DraftSlots):
    """The slots of the rows of a round, in their order, filled anew in each round.

    Args:
        source: the runner whose cache is read.
        layers: the number of its layers that are copied.
    """

    computes_prompts = False

    def __init__(
        self, runner: Runner, source: Runner, window: int, sinks: int, layers: int
    ) -> None:
        super().__init__(runner)
        self._source, self._window, self._sinks, self._layers = source, window, sinks, layers

    def fill(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        """Copies the part of each row that is drafted for."""
        self._places = {row: slot for slot, row in enumerate(rows)}
        self.runner.memory.reserve(len(rows), self._window + self._sinks + max(lengths))
        slots = [row.slot if length else None for row, length in zip(rows, lengths, strict=True)]
        self._cache.take(self._source.cache, slots, self._sinks, self._window, self._layers)


class _PartMemory(DraftMemory):
    """The memory of the part: no row takes more than it.

    Args:
        slots: the slots.
        part: the most tokens of a row, those of drafts included.
    """

    def __init__(self, slots: DraftSlots, part: int) -> None:
        super().__init__(slots)
        self._part = part

    def _size(self, slots: int, capacity: int, cells: int) -> tuple[int, int, int]:
        return slots, self._part if capacity else 0, 0

    def wastes(self, slots: int, capacity: int, cells: int = 0) -> bool:
        return self._own.wastes(*self._size(slots, capacity, cells))

    def trim(self, slots: int, capacity: int, cells: int = 0) -> None:
        """Trims the cache to the part, which is all that is kept between rounds."""
        self._own.trim(*self._size(slots, capacity, cells))
