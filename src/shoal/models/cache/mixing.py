"""The calls of mixers in a pass: the rows with equal numbers of tokens together, others apart.

A *mixer* is a module that keeps a recurrent state of each row: a short convolution, a state-space
model, a gated delta net. It reads and writes the state through Transformers' cache. Padding would
enter the states, so a call has none.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shoal.errors import InternalError
from shoal.models.cache.pass_plan import Plan

BLOCK = 256
"""The tokens of a prompt between two states that may be kept, where its passes are parted.

They are parted there whether states are kept or not, so that a prompt's tokens have the same bits.
"""
STEPWISE_BLOCK = 512
"""The same number for mixers that a row with a state passes token by token.

So many tokens are computed at once where a prompt begins, as one pass has no more of a row.
"""
Mixed = Tensor | tuple[Tensor | None, ...]
"""The outputs of a mixer, [rows, tokens, ...] each; None in the place of one that it has not."""
Call = Callable[[Tensor, Tensor | None], Mixed]
"""A function that passes inputs [rows, tokens, width] through a mixer.

It is given the positions of the tokens, too, [rows, tokens] int64; None if mixers take none.
"""
Key = tuple[str, int, int]
"""The kind of a state ("conv", "recurrent", "own"), the number of its layer, and its own number."""


class OwnState(NamedTuple):
    """A state that a mixer keeps in an attribute of a module, where others ask the cache."""

    module: nn.Module
    attribute: str
    key: Key


@dataclass(frozen=True)
class Mixers:
    """The mixers of a model.

    Attributes:
        modules: the mixers by name.
        stepwise: True if a row that has a state must pass a mixer token by token, because a call
            with several tokens begins without a state.
        placed: True if mixers take the positions of their tokens.
        own: the states that mixers keep in themselves, by the names of the mixers.
        counts: "replayed tokens", those of rows that mixers got again behind rejected drafts, and
            "copied states" of rows, since the model was loaded.
    """

    modules: Mapping[str, nn.Module]
    stepwise: bool = False
    placed: bool = False
    own: Mapping[str, Sequence[OwnState]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def block(self) -> int:
        """The number of tokens at whose multiples passes over prompts end."""
        return STEPWISE_BLOCK if self.stepwise else BLOCK

    def __str__(self) -> str:
        """Returns the number of mixers of each kind, by their names without numbers."""
        kinds = Counter(re.sub(r"\d+", "*", name) for name in self.modules)
        return ", ".join(f"{count} of {name}" for name, count in kinds.items())


@dataclass(frozen=True)
class HeldStates:
    """The states after a number of tokens, for rows that begin with the same tokens."""

    length: int
    states: Mapping[Key, Tensor]

    @property
    def nbytes(self) -> int:
        """The number of bytes of the states."""
        return sum(state.nbytes for state in self.states.values())


@dataclass(frozen=True)
class RowCopy:
    """A copy of a row's first tokens, for later rows that begin alike.

    Attributes:
        layers: the keys and values of each layer that has some, [length, heads, dim] each.
        marks: the states after some of the tokens, rising; the last one after all of them.
    """

    layers: Sequence[Sequence[Tensor]]
    marks: Sequence[HeldStates]

    @property
    def nbytes(self) -> int:
        """The number of bytes of keys, values and states."""
        keys = sum(tensor.nbytes for layer in self.layers for tensor in layer)
        return keys + sum(mark.nbytes for mark in self.marks)


def is_marked(number: int, blocks: int) -> bool:
    """Returns True if the states after `number` blocks of a prompt are kept.

    They are the last ones, and those of 1, 2, 4, 8 ... blocks, so that prompts that part anywhere
    find half of the prompt that they share.
    """
    return number == blocks or number & (number - 1) == 0


class StateMarks:
    """The states of slots after blocks of their prompts, for `shoal.models.cache.kept_rows`.

    Attributes:
        on: True if such states are kept.
        block: the number of tokens of a block (`Mixers.block`).
    """

    def __init__(self) -> None:
        self.on, self.block = False, BLOCK
        self._marks: dict[int, Sequence[HeldStates]] = {}

    def of(self, slot: int) -> Sequence[HeldStates]:
        """Returns the states of a slot, by rising lengths."""
        return self._marks.get(slot, ())

    def put(self, slot: int, marks: Sequence[HeldStates]) -> None:
        """Replaces the states of a slot."""
        self._marks[slot] = marks

    def add(self, slot: int, state: HeldStates) -> None:
        """Adds the states after the last block of a slot, and forgets some before (`is_marked`)."""
        number = state.length // self.block
        before = (mark for mark in self.of(slot) if mark.length < state.length)
        self.put(slot, [*(m for m in before if is_marked(m.length // self.block, number)), state])

    def cut(self, slot: int, length: int) -> None:
        """Forgets the states of a slot after more than `length` tokens."""
        self.put(slot, [mark for mark in self.of(slot) if mark.length <= length])

    def forget(self, slot: int) -> None:
        """Forgets the states of a slot."""
        self._marks.pop(slot, None)

    @property
    def nbytes(self) -> int:
        """The number of bytes of all states; those of several slots count once."""
        distinct = {id(mark): mark for marks in self._marks.values() for mark in marks}
        return sum(mark.nbytes for mark in distinct.values())


@dataclass(frozen=True)
class RowStates:
    """The states of a slot (`shoal.models.cache.states`).

    Attributes:
        base: the number of tokens in the base state.
        ahead: the number of tokens in the state ahead; None if it is not to be read.
        side: the side of the stores that has the base state, 0 or 1.
        inputs: the inputs of the mixers for the tokens from the base on, [tokens, width] each.
        held: the states after the row's prompt; None if no row waits for them.
    """

    base: int = 0
    ahead: int | None = None
    side: int = 0
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    held: HeldStates | None = None

    def adopted(self, length: int) -> RowStates:
        """Returns the states once the state ahead, of `length` tokens, has become the base."""
        return RowStates(length, None, 1 - self.side, held=self.held)


def held_states(row: RowStates, stores: Mapping[Key, Tensor], slot: int) -> HeldStates:
    """Returns a copy of the base state of a slot's row."""
    return HeldStates(
        row.base, {key: store[row.side, slot].clone() for key, store in stores.items()}
    )


@dataclass(frozen=True)
class EqualRows:
    """The rows with equal numbers of tokens in a pass.

    Attributes:
        slots: the slots of the rows.
        count: the number of tokens of each row.
        read: the stored states that the rows begin with, [rows] int64; None = no state.
        write: the places of the states after the tokens, [rows] int64.
        columns: the places of the tokens in the block, [rows * count] int64; None if they are all
            of it.
        starts: the number of tokens of each row before these.
    """

    slots: Sequence[int]
    count: int
    read: Tensor | None
    write: Tensor
    columns: Tensor | None
    starts: Sequence[int]

    @cached_property
    def positions(self) -> Tensor:
        """The positions of the tokens, [rows, count] int64."""
        device = self.write.device
        steps = torch.arange(self.count, device=device)
        return torch.tensor(self.starts, device=device)[:, None] + steps


@dataclass
class Passing:
    """The states of the rows that pass a mixer.

    Attributes:
        read: the stored states that the rows begin with, [rows] int64; None = no state.
        states: the states that the mixer has read or written, [rows, ...] each.
    """

    read: Tensor | None = None
    states: dict[Key, Tensor] = field(default_factory=dict)


def joined(parts: Sequence[Mixed], join: Callable[[Sequence[Tensor]], Tensor]) -> Mixed:
    """Joins the outputs of several calls of a mixer."""
    if isinstance(parts[0], Tensor):
        return join(parts)  # type: ignore[arg-type]
    return tuple(None if each[0] is None else join(each) for each in zip(*parts, strict=True))


class Calls:
    """The calls of each mixer in one pass.

    Args:
        rows: the states of all slots.

    Attributes:
        replays: the groups of rows whose accepted tokens follow their base again.
        feeds: the groups of rows with the tokens of the pass.
        firsts: the first column of each row in the block.
        inputs: the block of each mixer, [columns, width], once it has been called.
    """

    def __init__(self, plan: Plan, rows: Sequence[RowStates]) -> None:
        self.plan, self._rows = plan, rows
        ends = np.cumsum(plan.counts) if plan.packed else (1 + np.arange(plan.rows)) * plan.q
        self.firsts: list[int] = [0, *ends.tolist()]
        self.inputs: dict[str, Tensor] = {}
        replays: dict[tuple[int, bool], list[int]] = {}
        feeds: dict[tuple[int, bool], list[int]] = {}
        for b, (slot, start) in enumerate(zip(plan.slots, plan.starts, strict=True)):
            row = rows[slot]
            if not self.follows(b):
                replays.setdefault((start - row.base, row.base == 0), []).append(b)
            feeds.setdefault((plan.counts[b], start == 0), []).append(b)
        self.replays = [self._replay(*key, group) for key, group in replays.items()]
        self.feeds = [self._feed(*key, group) for key, group in feeds.items()]

    def follows(self, b: int) -> bool:
        """Returns True if a stored state of row b has all its tokens before the pass.

        Raises:
            InternalError: no state is early enough.
        """
        row, start = self._rows[self.plan.slots[b]], self.plan.starts[b]
        if start < row.base:
            raise InternalError(f"a row of {start} tokens has the states of {row.base}")
        return start in (row.base, row.ahead)

    def _replay(self, count: int, empty: bool, group: Sequence[int]) -> EqualRows:
        slots = [self.plan.slots[b] for b in group]
        base = self._places(slots, [self._rows[slot].side for slot in slots])
        starts = [self._rows[slot].base for slot in slots]
        return EqualRows(slots, count, None if empty else base, base, None, starts)

    def _feed(self, count: int, empty: bool, group: Sequence[int]) -> EqualRows:
        plan = self.plan
        slots = [plan.slots[b] for b in group]
        ahead = [1 - self._rows[slot].side for slot in slots]
        read = None if empty else self._places(slots, [self._side(b) for b in group])
        columns = None
        if len(group) < plan.rows or count < plan.q:
            firsts = np.array([self.firsts[b] for b in group])[:, None]
            columns = torch.from_numpy((firsts + np.arange(count)).reshape(-1)).to(plan.device)
        starts = [plan.starts[b] for b in group]
        return EqualRows(slots, count, read, self._places(slots, ahead), columns, starts)

    def _side(self, b: int) -> int:
        """Returns the side of the state that the tokens of row b follow."""
        row = self._rows[self.plan.slots[b]]
        return 1 - row.side if self.plan.starts[b] == row.ahead else row.side

    def _places(self, slots: Sequence[int], sides: Sequence[int]) -> Tensor:
        places = [side * len(self._rows) + slot for slot, side in zip(slots, sides, strict=True)]
        return torch.tensor(places, device=self.plan.device)

    def states_after(self, b: int) -> RowStates:
        """Returns the states of row b once the pass has ended."""
        plan = self.plan
        row, end = self._rows[plan.slots[b]], plan.lengths[b]
        if plan.final:
            return row.adopted(end)
        own = slice(self.firsts[b], self.firsts[b] + plan.counts[b])
        inputs = {name: block[own] for name, block in self.inputs.items()}
        if plan.starts[b] != row.ahead:
            return RowStates(plan.starts[b], end, row.side, inputs, row.held)
        inputs = {name: torch.cat([row.inputs[name], new]) for name, new in inputs.items()}
        return RowStates(row.base, end, row.side, inputs, row.held)
