"""The sequences of models whose layers keep a recurrent state (Mamba, Jamba, LFM2, Qwen3-Next).

A state has no earlier length, and llama.cpp keeps the newest alone. So a row's states are written
down before its first pass behind `rollback`. (A draft model makes several passes before it goes
back.) To go back means to read the states in again and to feed the tokens that stay a second time;
their keys, where a layer has some, are computed again too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shoal.errors import InternalError, ModelError, OutOfMemory
from shoal.models.cache import Plan
from shoal.models.gguf.gguf_model import complaint, library
from shoal.models.gguf.sequences import PASS_TOKENS, Feed, RowState, Sequences
from shoal.types.requests import Prefix

if TYPE_CHECKING:
    from shoal.models.gguf.gguf_model import GgufModel


class Base(NamedTuple):
    """A length that a row can go back to.

    Attributes:
        length: the number of tokens.
        states: the states after them, as llama.cpp writes them down; None for no tokens.
        fed: the ids of the tokens that were fed since.
    """

    length: int
    states: ctypes.Array[ctypes.c_uint8] | None
    fed: list[int]


class StateSequences(Sequences):
    """The rows of a model with recurrent states; each slot is a sequence."""

    def __init__(self, model: GgufModel) -> None:
        super().__init__(model)
        self._bases: list[Base | None] = []
        self._held: list[RowState | None] = []
        self._state_bytes = 0

    def _resize(self, slots: int, capacity: int, cells: int) -> None:
        super()._resize(slots, capacity, cells)
        more = slots - len(self._bases)
        self._bases = self._bases[:slots] + [None] * more
        self._held = self._held[:slots] + [None] * more

    def enter(self, slot: int, prefix: Prefix | None = None) -> None:
        """Lets a new row take the slot, without tokens."""
        super().enter(slot, prefix)
        self._bases[slot] = self._held[slot] = None

    def bytes_per_slot(self) -> int:
        """Returns the bytes of a row's states; 0 before the first pass.

        They are the newest, the ones before the pass, and those of the prompt.
        """
        return 3 * self._state_bytes

    # ── going back ────────────────────────────────────────────────────────────────────────────────

    def rollback(self, slot: int, length: int) -> None:
        """Forgets all tokens from `length` on.

        Raises:
            InternalError: the states after `length` tokens are gone.
        """
        if not self._can_return(slot, length):
            raise InternalError(f"slot {slot} has no recurrent states of {length} tokens")
        super().rollback(slot, length)
        if length == self._stored[slot]:
            self._bases[slot] = None

    def _can_return(self, slot: int, length: int) -> bool:
        base = self._bases[slot]
        newest = length == self._stored[slot]
        return not length or newest or (base is not None and base.length <= length)

    def reaches(self, slot: int, length: int) -> bool:
        """Returns True if the slot can be copied to its first `length` tokens."""
        held = self._held[slot]
        kept = held is not None and held.length == length
        return not length or length == self.lengths[slot] or kept

    def hold(self, slot: int) -> None:
        """Keeps a copy of the row, for rows that begin with the same tokens."""
        self._held[slot] = self.state_of(slot)

    def copy(self, source: int, target: int, length: int) -> None:
        """Makes the first `length` tokens of slot `target` those of slot `source`."""
        held = self._held[source]
        if length != self.lengths[source] and length:
            assert held is not None
            self.restore(target, held, length)
        elif source != target and length:
            self.restore(target, self.state_of(source), length)
        elif not length:
            self.enter(target)
        self._held[target] = held
        self.gaps[target] = self.gaps[source]

    def restore(self, slot: int, state: RowState, length: int) -> None:
        """Makes the tokens of a slot those of a state."""
        super().restore(slot, state, length)
        self._bases[slot] = None

    def state_of(self, slot: int) -> RowState:
        """Returns the keys, values and states of a slot's tokens."""
        self._return([slot])
        return super().state_of(slot)

    def zero_tail(self, slot: int, length: int) -> None:
        """Removes all tokens of the slot, or none: states have no earlier length."""
        if not length:
            super().zero_tail(slot, 0)

    # ── during a pass ─────────────────────────────────────────────────────────────────────────────

    def begin(self, plan: Plan) -> None:
        """Announces a pass: its rows go back to their lengths, and states are written down."""
        self._return(plan.slots)
        super().begin(plan)
        for slot, start in zip(plan.slots, plan.starts, strict=True):
            if self._bases[slot] is None or not start:
                self._bases[slot] = Base(start, self._states(slot) if start else None, [])

    def hear(self, rows: Sequence[int], ids: Sequence[int]) -> None:
        """Notes the tokens of a pass, by slots."""
        for slot, token in zip(rows, ids, strict=True):
            base = self._bases[slot]
            assert base is not None
            base.fed.append(token)

    def _return(self, slots: Sequence[int]) -> None:
        """Takes rows back to their lengths, by one pass over the tokens that stay."""
        ids: list[int] = []
        places: list[int] = []
        rows: list[int] = []
        for slot in slots:
            length, lib = self.lengths[slot], library()
            if not length or self._stored[slot] <= length:
                continue
            if lib.llama_memory_seq_pos_max(self.memory, slot) + 1 != length:
                base = self._read_base(slot, length)
                again = range(base.length, length)
                ids += base.fed[: len(again)]
                places += again
                rows += [slot] * len(again)
            self._stored[slot], self._bases[slot] = length, None
        for first in range(0, len(ids), PASS_TOKENS):
            part = slice(first, first + PASS_TOKENS)
            again = Feed(len(ids[part])).fill(ids[part], np.array(places[part]), rows[part], False)
            code = library().llama_decode(self.context, again)
            if code:
                raise OutOfMemory(f"llama.cpp cannot take rows back: {complaint('no reason')}")

    def _read_base(self, slot: int, length: int) -> Base:
        """Makes the tokens and states of a slot those of its base, and returns it."""
        base, lib = self._bases[slot], library()
        if base is None or not base.length <= length <= base.length + len(base.fed):
            raise ModelError(
                f"{self._model.file}: llama.cpp cannot take a row back to {length} tokens"
            )
        if base.states is not None:
            only = lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
            size = len(base.states)
            lib.llama_state_seq_set_data_ext(self.context, base.states, size, slot, only)
        if not lib.llama_memory_seq_rm(self.memory, slot, base.length, -1):
            raise ModelError(f"{self._model.file}: llama.cpp cannot read a row's states in again")
        return base

    def _states(self, slot: int) -> ctypes.Array[ctypes.c_uint8]:
        """Returns the states of a slot as llama.cpp writes them down."""
        lib: Any = library()
        only = lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        self._state_bytes = lib.llama_state_seq_get_size_ext(self.context, slot, only)
        data = (ctypes.c_uint8 * self._state_bytes)()
        lib.llama_state_seq_get_data_ext(self.context, data, len(data), slot, only)
        return data
