"""The slot cache of models whose layers keep a recurrent state (`shoal.models.cache.mixing`).

A state cannot be cut to an earlier length, so a slot has several of each. The *base* is the state
after tokens that are never taken back. The last one is the state after all tokens that were fed
since. Beside them lie the inputs that the mixers got for these tokens.

If all drafts of a row are accepted, the last state becomes its base. Otherwise the row's next pass
begins with its accepted tokens: each mixer gets their inputs again, from the base on. The rest of
the model does not compute them again, and their keys stay. This takes one call of a mixer, and one
more for the rows that had equal numbers of accepted tokens before a rejected one. A state after
each draft would take a call of its own, k + 1 in a round of k drafts, and room for k + 1 states.

Mixers that a row with a state passes token by token are called k + 1 times in any case. There the
state after each draft costs no call, and the accepted tokens' calls are not repeated: a slot has
room for the states after the first drafts of a pass (`KEPT_DRAFTS`), and one of these becomes the
base. Only tokens that were accepted beyond them follow it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.models.cache import SlotCache
from shoal.models.cache.mixing import (
    Call,
    Calls,
    EqualRows,
    HeldStates,
    Key,
    Mixed,
    Mixers,
    Passing,
    RowStates,
    held_states,
    joined,
)
from shoal.models.cache.pass_plan import Plan
from shoal.models.cache.row_store import resized, zeros
from shoal.types.requests import Prefix

KEPT_DRAFTS = 4
"""The number of drafts whose states have room in a slot, where mixers pass token by token.

It is the draft length for which memory is counted elsewhere. Drafts accepted beyond it are few.
"""
KNOWN = hasattr(SlotCache, "get_conv_state")
"""True if this version of Transformers asks a cache for recurrent states."""


class StateCache(SlotCache):
    """The keys, values and recurrent states of rows of unequal lengths.

    Args:
        mixers: the modules that keep states.
        rounds: see `SlotCache`.

    Attributes:
        mixers: see above.
        sides: the number of states of each kind that a slot has room for.
    """

    def __init__(self, mixers: Mixers, rounds: bool = False) -> None:
        super().__init__(rounds)
        self.mixers, self.sides = mixers, 2
        self.marks.block = mixers.block
        self._row_states: list[RowStates] = []
        self._tensors: dict[Key, Tensor] = {}
        self._places: dict[int, int] = {}
        self._calls: Calls | None = None
        self._passing = Passing()

    # ── for the engine ────────────────────────────────────────────────────────────────────────────

    def _resize(self, slots: int, capacity: int, cells: int) -> None:
        size = (self.sides, slots)
        stores = {key: resized(store, size, size) for key, store in self._tensors.items()}
        super()._resize(slots, capacity, cells)
        new = [RowStates() for _ in range(slots - len(self._row_states))]
        self._tensors, self._row_states = stores, self._row_states[:slots] + new

    @torch.inference_mode()
    def enter(
        self, slot: int, prefix: Prefix | None = None, begun: HeldStates | None = None
    ) -> None:
        """Lets a new row take the slot, without tokens, or with the tokens of stored states."""
        super().enter(slot, prefix)
        self._row_states[slot] = RowStates()
        if begun is not None:
            for key, store in self._tensors.items():
                store[0, slot] = begun.states[key]
            self.mixers.counts["copied states"] += 1
            self.lengths[slot] = begun.length
            self._row_states[slot] = RowStates(begun.length, {begun.length: 0})

    def rollback(self, slot: int, length: int) -> None:
        """Forgets all tokens from `length` on; those before it are never taken back.

        Raises:
            InternalError: the states after `length` tokens are gone.
        """
        super().rollback(slot, length)
        self._row_states[slot] = self._row_states[slot].settled(length)

    def reaches(self, slot: int, length: int) -> bool:
        """Returns True if the states after the slot's first `length` tokens can be computed."""
        row = self._row_states[slot]
        held = row.held is not None and row.held.length == length
        return not length or held or row.base <= length <= self.lengths[slot]

    @torch.inference_mode()
    def hold(self, slot: int) -> None:
        """Keeps a copy of the base state, for rows that begin with the same tokens."""
        row = self._row_states[slot]
        self.mixers.counts["copied states"] += 1
        self._row_states[slot] = replace(row, held=held_states(row, self._tensors, slot))

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        """Makes the first `length` tokens of slot `target` those of slot `source`."""
        row = self._row_states[source]
        if row.held is not None and row.held.length == length < row.base:
            for key, store in self._tensors.items():
                store[0, target] = row.held.states[key]
            self.mixers.counts["copied states"] += 1
            row = RowStates(length, {length: 0}, held=row.held)
        else:
            row = row.settled(length)
            for side in row.sides.values() if source != target else ():
                self.mixers.counts["copied states"] += 1
                for store in self._tensors.values():
                    store[side, target] = store[side, source]
        super().copy(source, target, length)
        self._row_states[target] = row

    @torch.inference_mode()
    def zero_non_finite(self, slot: int) -> None:
        """Zeroes all NaN and infinite values of the slot, those of its states included."""
        super().zero_non_finite(slot)
        for tensor in [*self.states_of(slot), *self._row_states[slot].inputs.values()]:
            tensor.nan_to_num_(0.0, 0.0, 0.0)

    def states_of(self, slot: int) -> list[Tensor]:
        """Returns the stored states of each kind of a slot, [sides, ...] each."""
        return [store[:, slot] for store in self._tensors.values()]

    def bytes_per_slot(self) -> int:
        """Returns the bytes of a row's states; 0 before the first pass.

        They are those of all sides, and one after the prompt.
        """
        state = sum(s.element_size() * s.shape[2:].numel() for s in self._tensors.values())
        return (self.sides + 1) * state

    # ── during a pass ─────────────────────────────────────────────────────────────────────────────

    def begin(self, plan: Plan) -> None:
        """Announces a forward pass."""
        super().begin(plan)
        self._calls = calls = Calls(plan, self._row_states, self.sides)
        again = sum(len(group.slots) * group.count for group in calls.replays)
        self.mixers.counts["replayed tokens"] += again

    def wrote(self, plan: Plan, ahead: int = 0) -> None:
        """Notes that the plan's tokens are in their cells, and in the states."""
        super().wrote(plan, ahead)
        assert self._calls is not None
        assert not ahead  # the rounds of such models are not captured
        after = [self._calls.states_after(b) for b in range(plan.rows)]
        for slot, row in zip(plan.slots, after, strict=True):
            self._row_states[slot] = row
            if self.marks.on and plan.final and row.base % self.marks.block == 0:
                self.mixers.counts["copied states"] += 1
                self.marks.add(slot, held_states(row, self._tensors, slot))
        self._calls = None

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Makes the mixers compute by groups of rows within the context.

        Afterwards it puts a `forward` back that an owner had set on a mixer, and the states that
        mixers had in themselves.
        """
        modules = self.mixers.modules
        states = [each for own in self.mixers.own.values() for each in own]
        owners = [getattr(each.module, each.attribute) for each in states]
        owned = [module.__dict__.get("forward") for module in modules.values()]
        for name, module in modules.items():
            module.__dict__["forward"] = partial(self._forward, name, module.forward)
        try:
            yield
        finally:
            for module, before in zip(modules.values(), owned, strict=True):
                if before is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = before
            for each, state in zip(states, owners, strict=True):
                setattr(each.module, each.attribute, state)

    def _forward(self, name: str, forward: Any, *args: Any, **options: Any) -> Any:
        """Computes a mixer in a pass; in another thread's call the mixer computes by itself."""
        if not any(value is self for value in (*args, *options.values())):
            return forward(*args, **options)
        return self._mix(name, *call_of(self, name, forward, args, options))

    def _mix(self, name: str, block: Tensor, call: Call) -> Mixed:
        """Passes a block of tokens through a mixer, packed or padded as the pass."""
        calls = self._calls
        assert calls is not None
        for group in calls.replays:
            inputs = [self._row_states[slot].inputs[name][: group.count] for slot in group.slots]
            self.through(group, torch.stack(inputs), call)
        flat = calls.inputs[name] = block.flatten(0, 1)
        parts: list[Mixed] = []
        for group in calls.feeds:
            if group.columns is None:
                return self.through(group, block, call)
            own = flat.index_select(0, group.columns).view(len(group.slots), group.count, -1)
            parts.append(self.through(group, own, call))

        def whole(tensors: Sequence[Tensor]) -> Tensor:
            mixed = tensors[0].new_zeros(len(flat), *tensors[0].shape[2:])
            for group, tensor in zip(calls.feeds, tensors, strict=True):
                assert group.columns is not None
                mixed.index_copy_(0, group.columns, tensor.flatten(0, 1))
            return mixed.unflatten(0, block.shape[:2])

        return joined(parts, whole)

    def through(self, group: EqualRows, block: Tensor, call: Call) -> Mixed:
        """Passes a group's tokens, [rows, count, width], through a mixer, and stores its states."""
        self._passing = passing = Passing(group.read)
        places = group.positions if self.mixers.placed else None
        steps = [slice(None)]
        if self.mixers.stepwise and group.read is not None:
            steps = [slice(i, i + 1) for i in range(group.count)]
        parts = []
        for last, step in zip(range(group.count - len(steps), group.count), steps, strict=True):
            parts.append(call(block[:, step], None if places is None else places[:, step]))
            if last not in group.stored:
                continue
            for key, states in passing.states.items():
                if key not in self._tensors:
                    self._tensors[key] = zeros(states, (self.sides, self.slots, *states.shape[1:]))
                store = self._tensors[key].flatten(0, 1)
                write = group.write[group.stored.index(last)]
                store.index_copy_(0, write, states.to(store.dtype))
        self._passing = Passing()
        if len(parts) == 1:
            return parts[0]
        return joined(parts, lambda tokens: torch.cat(list(tokens), dim=1))

    # ── for a Transformers model ──────────────────────────────────────────────────────────────────

    def _state(self, key: Key) -> Tensor | None:
        """Returns the states of the group that passes a mixer; None if its rows have none.

        Mixers may change the tensor in place.
        """
        read, states = self._passing.read, self._passing.states
        if key not in states and read is not None:
            states[key] = self._tensors[key].flatten(0, 1).index_select(0, read)
        return states.get(key)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Returns the last inputs of a convolution, [rows, width, kernel], or None."""
        return self._state(("conv", layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Returns the states of a recurrence, [rows, ...], or None."""
        return self._state(("recurrent", layer_idx, state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Appends inputs to those of a convolution; returns the inputs that it may read."""
        key = "conv", layer_idx, state_idx
        before = self._state(key)
        if before is not None:
            size, inputs = before.shape[-1], torch.cat([before, conv_states], dim=-1)
        else:
            size = conv_kernel_size or conv_states.shape[-1]
            lacking = max(size - conv_states.shape[-1], 0)
            inputs = torch.nn.functional.pad(conv_states, (lacking, 0))
        self._passing.states[key] = inputs[..., -size:]
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Replaces the states of a recurrence."""
        self._passing.states["recurrent", layer_idx, state_idx] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """Returns False: a convolution keeps no more inputs than it reads."""
        return False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends keys and values, see `SlotCache.update`; some layers have none."""
        place = self._places.setdefault(layer_idx, len(self._places))
        return super().update(key_states, value_states, place)


def call_of(
    cache: StateCache, name: str, forward: Any, args: Sequence[Any], options: Mapping[str, Any]
) -> tuple[Tensor, Call]:
    """Returns the tokens of a call of a mixer, and a function that repeats it with other tokens.

    States that the mixer keeps in itself are lent to it, and taken from it afterwards.
    """
    given = (*args, *options.values())
    block, *positions = (value for value in given if isinstance(value, Tensor))
    own = cache.mixers.own.get(name, ())

    def call(part: Tensor, places: Tensor | None) -> Any:
        new = {id(block): part, **{id(each): places for each in positions}}
        for state in own:
            setattr(state.module, state.attribute, cache._state(state.key))
        mixed = forward(
            *(new.get(id(value), value) for value in args),
            **{key: new.get(id(value), value) for key, value in options.items()},
        )
        for state in own:
            cache._passing.states[state.key] = getattr(state.module, state.attribute)
        return mixed

    return block, call


@torch.inference_mode()
def expect_drafts(cache: SlotCache, longest: int) -> None:
    """Makes room for the states after drafts, where these cost no call of a mixer.

    Args:
        cache: the cache of any model.
        longest: the most drafts of a row in a pass.
    """
    if isinstance(cache, StateCache) and cache.mixers.stepwise:
        cache.sides = max(cache.sides, 2 + min(longest, KEPT_DRAFTS))
        cache.reserve(cache.slots, cache.capacity, cache.cells)
