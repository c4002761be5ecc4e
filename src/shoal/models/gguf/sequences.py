"""A slot cache whose rows are sequences of llama.cpp's memory.

Each sequence has a buffer of its own (`kv_unified` off). There its keys lie in the order of its
tokens, independently of the other rows of the pass. So a row's sums have one order: passes over
quantised weights give the same bits alone and in company. In one buffer for all sequences, which
llama.cpp has too, passes give other bits in other company, and some greedy ids change
(docs/how-to/gguf.md).

A slot's tokens beyond its length stay in the memory until the slot's next pass begins. Then they
are removed, so that going back is setting a length, as in any slot cache.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shoal.errors import ModelError, OutOfMemory, RequestError
from shoal.models.cache import Plan, SlotCache
from shoal.models.gguf import complaint, library
from shoal.types.requests import Prefix

if TYPE_CHECKING:
    from shoal.models.gguf import GgufModel

MOST_ROWS = 256
"""The largest number of sequences that llama.cpp's memory can tell apart."""
PASS_TOKENS = 2048
"""The largest number of tokens that llama.cpp is given at once."""
CELLS = 256
"""The number of cells of a block; a sequence's buffer has whole blocks."""
HEAD = 8
"""The number of bytes before the data that llama.cpp writes down of a sequence."""


class Sequences(SlotCache):
    """The rows of unequal lengths of one model; each slot is a sequence.

    Attributes:
        context: llama.cpp's pointer to the memory and the computation over it; None before
            `reserve`.
        snapshots_wanted: the number of tokens before which llama.cpp is to keep recurrent states.
    """

    snapshots_wanted = 0

    def __init__(self, model: GgufModel) -> None:
        super().__init__()
        self._model = model
        self.context: Any = None
        self._free: Any = None
        self._size = (0, 0)
        self._stored: list[int] = []
        self._copied = False

    @property
    def memory(self) -> Any:
        """The pointer of llama.cpp to the cells."""
        return library().llama_get_memory(self.context)

    # ── room ──────────────────────────────────────────────────────────────────────────────────────

    def _resize(self, slots: int, capacity: int, cells: int) -> None:
        """Makes a memory of that size, with the tokens that slots hold.

        Raises:
            RequestError: more rows than llama.cpp has sequences.
            OutOfMemory: llama.cpp has no memory of that size.
        """
        if slots > MOST_ROWS:
            raise RequestError(
                f"llama.cpp decodes at most {MOST_ROWS} rows at a time, got {slots}: give "
                f"max_batch={MOST_ROWS}"
            )
        size = max(slots, 1), -(-max(capacity, 1) // CELLS) * CELLS
        if size != self._size:
            self._move(*size)
        super()._resize(slots, capacity, cells)

    def _move(self, slots: int, room: int) -> None:
        """Makes a context of `slots` sequences for `room` tokens each; copies the slots' tokens."""
        self._settle()
        context = _make_context(self._model, slots, room, self.snapshots_wanted)
        free = weakref.finalize(self, library().llama_free, context)
        full = [slot for slot in range(min(slots, self.slots)) if self.lengths[slot]]
        try:
            for slot in full:
                _write(context, slot, self.state_of(slot).for_sequences(slots))
        except BaseException:
            free()
            raise
        if self._free is not None:
            self._free()
        self.context, self._free, self._size = context, free, (slots, room)
        self._stored = [self.lengths[slot] if slot in full else 0 for slot in range(slots)]

    def _settle(self) -> None:
        """Carries out copies.

        llama.cpp copies when a pass begins, so this is a pass of one token, which is then removed.
        """
        if not self._copied:
            return
        slot = min(range(self.slots), key=self.lengths.__getitem__)  # one with room for it
        self._forget(slot)
        place = np.array([self.lengths[slot]])
        code = library().llama_decode(self.context, Feed(1).fill([0], place, [slot], False))
        self._stored[slot] = self.lengths[slot] + 1
        self._forget(slot)
        if code:
            raise OutOfMemory(f"llama.cpp cannot copy rows: {complaint('no reason')}")
        self._copied = False

    def state_of(self, slot: int) -> RowState:
        """Returns the keys and values of a slot's tokens."""
        self._settle()
        self._forget(slot)
        lib = library()
        state = (ctypes.c_uint8 * lib.llama_state_seq_get_size(self.context, slot))()
        lib.llama_state_seq_get_data(self.context, state, len(state), slot)
        end, recurrent = len(state), self._model.recurrent
        if recurrent or lib.llama_model_n_swa(self._model.handle):
            partial = lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
            end -= lib.llama_state_seq_get_size_ext(self.context, slot, partial) - HEAD
        data = bytes(state)
        first, last = data[HEAD:end], data[end:]
        caches, states = ([first], last) if recurrent else ([first, last], b"")
        caches = [part for part in caches if part]
        return RowState(data[:HEAD], caches, states, slot, self._size[0], self.lengths[slot])

    def restore(self, slot: int, state: RowState, length: int) -> None:
        """Restores a slot's first `length` tokens from a state; raises OutOfMemory without room."""
        self._settle()
        _write(self.context, slot, state.for_sequences(self._size[0]))
        self._stored[slot], self.lengths[slot] = state.length, length

    def bytes_per_token(self) -> int:
        """Returns the bytes that a token of one row takes over all layers."""
        return self._model.token_bytes

    # ── rows ──────────────────────────────────────────────────────────────────────────────────────

    def begin(self, plan: Plan) -> None:
        """Announces a pass, and removes the tokens of its rows beyond their lengths."""
        super().begin(plan)
        for slot, length in zip(plan.slots, plan.lengths, strict=True):
            self._forget(slot)
            self._stored[slot] = length  # fewer tokens, if the pass fails
        self._copied = False

    def hear(self, rows: Sequence[int], ids: Sequence[int]) -> None:
        """Notes the tokens of a pass that has begun, by slots."""

    def _forget(self, slot: int) -> None:
        """Removes the cells of a slot beyond its length."""
        self.zero_tail(slot, self.lengths[slot])

    def enter(self, slot: int, prefix: Prefix | None = None) -> None:
        """Lets a new row take the slot, without tokens."""
        super().enter(slot, prefix)
        self._forget(slot)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` tokens of slot `source` to slot `target`.

        The copy takes place before the next pass, which may be another row's.
        """
        if source != target:
            lib, memory = library(), self.memory
            self._forget(source)
            lib.llama_memory_seq_rm(memory, target, -1, -1)
            lib.llama_memory_seq_cp(memory, source, target, -1, -1)
            self._stored[target] = self.lengths[source]
            self._copied = True
        self.lengths[target] = length

    def zero_tail(self, slot: int, length: int) -> None:
        """Removes the tokens of the slot from position `length` on."""
        if self._stored[slot] > length:
            if not library().llama_memory_seq_rm(self.memory, slot, length, -1):
                raise ModelError(
                    f"{self._model.file}: llama.cpp cannot take a row back to {length} tokens"
                )
            self._stored[slot] = length

    def zero_non_finite(self, slot: int) -> None:
        """Removes all tokens of the slot: their keys and values are not at hand."""
        self.zero_tail(slot, 0)


def _make_context(model: GgufModel, slots: int, room: int, snapshots: int) -> Any:
    """Returns a context for `slots` sequences of `room` tokens each.

    Args:
        snapshots: number of a pass's last tokens before which states are kept, where llama.cpp can.

    Raises:
        OutOfMemory: llama.cpp could not make it.
    """
    lib = library()
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_seq_max = slots * room, PASS_TOKENS, slots
    params.n_threads = params.n_threads_batch = torch.get_num_threads()
    params.kv_unified = False
    params.n_rs_seq = snapshots
    params.swa_full = params.no_perf = True
    context = lib.llama_init_from_model(model.handle, params)
    if not context:
        raise OutOfMemory(
            f"{model.file}: llama.cpp cannot make a cache of {slots} x {room} tokens: "
            f"{complaint('no reason')}"
        )
    return context


def _write(context: Any, slot: int, state: bytes) -> None:
    """Makes the tokens of a slot those that were written down of another slot.

    Raises:
        OutOfMemory: there is no room for them.
    """
    buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
    if not library().llama_state_seq_set_data(context, buffer, len(state), slot):
        raise OutOfMemory(
            f"llama.cpp cannot copy a row of {len(state)} bytes: {complaint('no reason')}"
        )


@dataclass(frozen=True)
class RowState:
    """The keys and values of a sequence, as llama.cpp writes them down.

    Attributes:
        head: bytes before the caches.
        caches: the bytes of each cache; models with sliding windows have two.
        states: the bytes of recurrent states, which have one form in every context.
        slot: the number of the sequence.
        sequences: number of sequences that its context had.
        length: number of its tokens.
    """

    head: bytes
    caches: Sequence[bytes]
    states: bytes
    slot: int
    sequences: int
    length: int

    @property
    def nbytes(self) -> int:
        """The number of bytes of the caches and states."""
        return sum(map(len, (*self.caches, self.states)))

    def for_sequences(self, count: int) -> bytes:
        """Returns the bytes as a context with another number of sequences reads them.

        A cache begins with the number of sequences, and has a count of cells for each of them: 0
        for all but this sequence, whose cells follow.

        Raises:
            ModelError: a cache does not have this form, because this is another llama.cpp.
        """
        lead, rest = self._around(self.sequences)
        if not all(cache.startswith(lead) and cache.endswith(rest) for cache in self.caches):
            raise ModelError(
                "this llama.cpp writes sequences down in a way that shoal does not know: "
                "install llama-cpp-python 0.3.36"
            )
        before, after = self._around(count)
        cells = (cache[len(lead) : len(cache) - len(rest)] for cache in self.caches)
        return b"".join([self.head, *(before + part + after for part in cells), self.states])

    def _around(self, count: int) -> tuple[bytes, bytes]:
        """Returns the bytes before and behind the cells of a sequence.

        The bytes behind are counts of later sequences, which are 0.
        """
        slot = min(self.slot, count - 1)
        return np.array([count, *[0] * slot], np.int32).tobytes(), bytes(4 * (count - 1 - slot))


class Feed:
    """The batch of llama.cpp over arrays of NumPy, which are filled anew for each pass.

    Args:
        most: number of tokens that there is room for.
    """

    def __init__(self, most: int = PASS_TOKENS) -> None:
        lib = library()
        self._ids, self._places, self._rows = (np.zeros(most, np.int32) for _ in range(3))
        self._ones, self._outputs = np.ones(most, np.int32), np.zeros(most, np.int8)
        step = self._rows.itemsize
        self._each_row = self._rows.ctypes.data + step * np.arange(most, dtype=np.uintp)
        pointer = ctypes.POINTER
        self.batch = lib.llama_batch(
            token=self._ids.ctypes.data_as(pointer(lib.llama_token)),
            pos=self._places.ctypes.data_as(pointer(lib.llama_pos)),
            n_seq_id=self._ones.ctypes.data_as(pointer(ctypes.c_int32)),
            seq_id=self._each_row.ctypes.data_as(pointer(pointer(lib.llama_seq_id))),
            logits=self._outputs.ctypes.data_as(pointer(ctypes.c_int8)),
        )

    def fill(self, ids: Sequence[int] | Any, places: Any, rows: Any, want_logits: bool) -> Any:
        """Returns the batch of these tokens.

        Args:
            ids: token ids, [tokens] integers.
            places: positions, [tokens] integers.
            rows: sequences, [tokens] integers.
            want_logits: True if the logits of all tokens are wanted, False if none are.
        """
        count = len(ids)
        self._ids[:count], self._places[:count], self._rows[:count] = ids, places, rows
        self._outputs[:count] = want_logits
        self.batch.n_tokens = count
        return self.batch
