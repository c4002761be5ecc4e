"""The sequences of models whose layers keep a recurrent state (Mamba, Jamba, LFM2, Qwen3-Next).

A state has no earlier length. Of some architectures (LFM2 is one) llama.cpp keeps the states after
each of a pass's last tokens; a target's rows go back to these, and nothing is computed again.

Of other architectures llama.cpp keeps the newest states alone. So before a row's first pass after
`rollback` its states are copied, in llama.cpp's own buffers. (A draft model makes several passes
before it goes back, and may go back to their beginning.) A row that goes back takes the copy, and
the tokens that stay are fed again; their keys, where a layer has some, are computed again too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shoal.errors import InternalError, ModelError, OutOfMemory
from shoal.models.cache import Plan
from shoal.models.gguf import complaint, library
from shoal.models.gguf.sequences import PASS_TOKENS, Feed, RowState, Sequences
from shoal.types.requests import Prefix

if TYPE_CHECKING:
    from shoal.models.gguf import GgufModel


SNAPSHOTS = 8
"""The number of a pass's last tokens that llama.cpp is to keep states before.

Each takes the bytes of a row's states. A pass of more drafts keeps the states before it.
"""


class Base(NamedTuple):
    """A length that a row can go back to.

    Attributes:
        length: the number of tokens.
        states: the key of the states after them, which llama.cpp holds; None for no tokens.
        fed: the ids of the tokens that were fed since.
    """

    length: int
    states: ctypes.Array[ctypes.c_uint8] | None
    fed: list[int]


class RowPass(NamedTuple):
    """A row's last pass.

    Attributes:
        start: the number of tokens before a pass whose states llama.cpp keeps; None for others.
        ended: True if the pass was a round of a target, as the next pass will be.
    """

    start: int | None = None
    ended: bool = False


class StateSequences(Sequences):
    """The rows of a model with recurrent states; each slot is a sequence."""

    snapshots_wanted = SNAPSHOTS

    def __init__(self, model: GgufModel) -> None:
        super().__init__(model)
        self._bases: list[Base | None] = []
        self._held: list[RowState | None] = []
        self._rounds: list[RowPass] = []
        self._state_bytes = 0

    def _resize(self, slots: int, capacity: int, cells: int) -> None:
        before = self.context
        super()._resize(slots, capacity, cells)
        more = slots - len(self._bases)
        self._bases = self._bases[:slots] + [None] * more
        self._held = self._held[:slots] + [None] * more
        self._rounds = self._rounds[:slots] + [RowPass()] * more
        if self.context is not before:  # which held the states
            bases = self._bases
            self._bases = [None if base is not None and base.states else base for base in bases]
            self._rounds = [RowPass()] * slots

    def enter(self, slot: int, prefix: Prefix | None = None) -> None:
        """Lets a new row take the slot, without tokens."""
        super().enter(slot, prefix)
        self._bases[slot] = self._held[slot] = None
        self._rounds[slot] = RowPass()

    def bytes_per_slot(self) -> int:
        """Returns the bytes of a row's states; 0 before the first pass.

        They are the newest, llama.cpp's of earlier tokens, the ones before the pass, and those of
        the prompt.
        """
        return (3 + self.snapshots) * self._state_bytes

    @property
    def snapshots(self) -> int:
        """The number of tokens of a pass that llama.cpp can take back from states that it keeps."""
        return int(library().llama_n_rs_seq(self.context)) if self.context else 0

    # ── going back ────────────────────────────────────────────────────────────────────────────────

    def rollback(self, slot: int, length: int) -> None:
        """Forgets tokens from `length` on; raises InternalError if the states there are gone."""
        if not self._can_return(slot, length):
            raise InternalError(f"slot {slot} has no recurrent states of {length} tokens")
        super().rollback(slot, length)
        self._rounds[slot] = self._rounds[slot]._replace(ended=False)
        if length == self._stored[slot]:
            self._bases[slot] = None

    def keep(self, slot: int, length: int, columns: Sequence[int]) -> None:
        """Ends a target's round, which keeps the first token of a pass at least.

        A row that ends by a fault keeps none. Its states may be gone: then no pass takes it on.
        """
        if columns or self._can_return(slot, length):
            super().keep(slot, length, columns)
        else:
            super().rollback(slot, length)
        self._rounds[slot] = self._rounds[slot]._replace(ended=True)

    def _can_return(self, slot: int, length: int) -> bool:
        base = self._bases[slot]
        newest = length == self._stored[slot]
        kept = self._keeps_states_of(slot, length) if base is None else base.length <= length
        return not length or newest or kept

    def _keeps_states_of(self, slot: int, length: int) -> bool:
        """Returns True if llama.cpp itself keeps the states after so many tokens of the last pass.

        It has lost the states before the pass, though it counts them among those that it keeps.
        """
        start, taken = self._rounds[slot].start, self._stored[slot] - length
        return start is not None and start < length and taken <= self.snapshots

    def reaches(self, slot: int, length: int) -> bool:
        """Returns True if the slot can be copied to its first `length` tokens."""
        held = self._held[slot]
        kept = held is not None and held.length == length
        return not length or length == self.lengths[slot] or kept

    def hold(self, slot: int) -> None:
        """Keeps a copy of the row, for rows that begin with the same tokens."""
        self._held[slot] = self.state_of(slot)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` tokens of slot `source` to slot `target`."""
        held = self._held[source]
        if length != self.lengths[source] and length:
            assert held is not None
            self.restore(target, held, length)
        elif source != target and length:
            self.restore(target, self.state_of(source), length)
        elif not length:
            self.enter(target)
        self._held[target] = held

    def restore(self, slot: int, state: RowState, length: int) -> None:
        """Restores the tokens of a slot from a state."""
        super().restore(slot, state, length)
        self._bases[slot], self._rounds[slot] = None, RowPass()

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
        """Announces a pass: its rows go back to their lengths, and states are kept."""
        self._return(plan.slots)
        super().begin(plan)
        lib: Any = library()
        at_once = sum(plan.counts) <= PASS_TOKENS  # a row of two calls has the states of the second
        for slot, start, count in zip(plan.slots, plan.starts, plan.counts, strict=True):
            base, last = self._bases[slot], self._rounds[slot]
            self._rounds[slot] = RowPass()
            if start and not self._state_bytes:
                only = lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
                self._state_bytes = lib.llama_state_seq_get_size_ext(self.context, slot, only)
            if start and base is None and last.ended and at_once and count - 1 <= self.snapshots:
                self._rounds[slot] = RowPass(start)
            elif base is None or not start:
                self._bases[slot] = Base(start, self._states(slot) if start else None, [])

    def hear(self, rows: Sequence[int], ids: Sequence[int]) -> None:
        """Notes the tokens of a pass, by slots."""
        for slot, token in zip(rows, ids, strict=True):
            base = self._bases[slot]
            if base is not None:
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
            newest = lib.llama_memory_seq_pos_max(self.memory, slot) + 1 == length
            if self._bases[slot] is None and self._keeps_states_of(slot, length):
                super().zero_tail(slot, length)
            elif not newest:
                base = self._read_base(slot, length)
                again = range(base.length, length)
                ids += base.fed[: len(again)]
                places += again
                rows += [slot] * len(again)
            self._stored[slot], self._bases[slot] = length, None
            self._rounds[slot] = self._rounds[slot]._replace(start=None)
        for first in range(0, len(ids), PASS_TOKENS):
            part = slice(first, first + PASS_TOKENS)
            again = Feed(len(ids[part])).fill(ids[part], np.array(places[part]), rows[part], False)
            code = library().llama_decode(self.context, again)
            if code:
                raise OutOfMemory(f"llama.cpp cannot take rows back: {complaint('no reason')}")

    def _read_base(self, slot: int, length: int) -> Base:
        """Restores the tokens and states of a slot from its base, and returns the base."""
        base, lib = self._bases[slot], library()
        if base is None or not base.length <= length <= base.length + len(base.fed):
            raise ModelError(
                f"{self._model.file}: llama.cpp cannot take a row back to {length} tokens"
            )
        if base.states is not None:
            size = len(base.states)
            lib.llama_state_seq_set_data_ext(self.context, base.states, size, slot, _copy_flags())
        if not lib.llama_memory_seq_rm(self.memory, slot, base.length, -1):
            raise ModelError(f"{self._model.file}: llama.cpp cannot read a row's states in again")
        return base

    def _states(self, slot: int) -> ctypes.Array[ctypes.c_uint8]:
        """Lets llama.cpp keep a copy of a slot's states, one for each slot; returns its key."""
        lib: Any = library()
        size = lib.llama_state_seq_get_size_ext(self.context, slot, _copy_flags())
        key = (ctypes.c_uint8 * size)()
        lib.llama_state_seq_get_data_ext(self.context, key, size, slot, _copy_flags())
        return key


def _copy_flags() -> int:
    """Returns the flags of copies without keys, which stay on the device."""
    lib = library()
    return int(lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY | lib.LLAMA_STATE_SEQ_FLAGS_ON_DEVICE)
