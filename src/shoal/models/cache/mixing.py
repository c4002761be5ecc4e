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
        sides: the sides of the stores that have states, by the numbers of tokens in them.
        inputs: the inputs of the mixers for the tokens from the base on, [tokens, width] each.
        held: the states after the row's prompt; None if no row waits for them.
    """

    base: int = 0
    sides: Mapping[int, int] = field(default_factory=dict)
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    held: HeldStates | None = None

    @property
    def side(self) -> int:
        """The side that has the base state, or gets the first one."""
        return self.sides.get(self.base, 0)

    def settled(self, length: int) -> RowStates:
        """Returns the states once the first `length` tokens are final.

        The last state that has no other token is the base.

        Raises:
            InternalError: the states after so few tokens are gone.
        """
        if not length:
            return RowStates()
        if length < self.base:
            raise InternalError(
                f"a slot has recurrent states of {self.base} tokens and none of {length}"
            )
        base = max((tokens for tokens in self.sides if tokens <= length), default=0)
        sides = {base: self.sides[base]} if base else {}
        inputs = {name: tokens[base - self.base :] for name, tokens in self.inputs.items()}
        return RowStates(base, sides, {} if base == length else inputs, self.held)

    def places(self, start: int, stored: Sequence[int], sides: int) -> tuple[int, ...]:
        """Returns the sides that get the states after some tokens of a pass.

        No side is used that has another state, as long as there are such sides. The last one then
        gets one state after the other.

        Args:
            start: the number of tokens before the pass.
            stored: these tokens, rising.
            sides: the number of sides.
        """
        used = set(self.sides.values()) if start else set()
        free = [side for side in range(sides) if side not in used] or [self.sides[start]]
        return (*free, *free[-1:] * len(stored))[: len(stored)]


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
        stored: the tokens after which states are stored, rising; the last token is one of them.
        write: the places of these states, [stored, rows] int64.
        columns: the places of the tokens in the block, [rows * count] int64; None if they are all
            of it.
        starts: the number of tokens of each row before these.
    """

    slots: Sequence[int]
    count: int
    read: Tensor | None
    stored: Sequence[int]
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
        sides: the number of states that a slot has room for.

    Attributes:
        replays: the groups of rows whose accepted tokens follow their base again.
        feeds: the groups of rows with the tokens of the pass.
        firsts: the first column of each row in the block.
        inputs: the block of each mixer, [columns, width], once it has been called.
    """

    def __init__(self, plan: Plan, rows: Sequence[RowStates], sides: int = 2) -> None:
        self.plan, self._rows, self._sides = plan, rows, sides
        ends = np.cumsum(plan.counts) if plan.packed else (1 + np.arange(plan.rows)) * plan.q
        self.firsts: list[int] = [0, *ends.tolist()]
        self.inputs: dict[str, Tensor] = {}
        self._written: dict[int, list[tuple[int, int]]] = {}
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
        return not start or start in row.sides

    def _replay(self, count: int, empty: bool, group: Sequence[int]) -> EqualRows:
        slots = [self.plan.slots[b] for b in group]
        base = self._places(slots, [self._rows[slot].side for slot in slots])
        starts = [self._rows[slot].base for slot in slots]
        read = None if empty else base
        stored, write = [count - 1], base[None]
        return EqualRows(slots, count, read, stored, write, columns=None, starts=starts)

    def _feed(self, count: int, empty: bool, group: Sequence[int]) -> EqualRows:
        """Makes the group of rows with so many tokens of the pass.

        Beside the states after their last tokens it stores those of the first ones that there is
        room for, as drafts may be taken back behind them. A row without a state has one call.
        """
        plan = self.plan
        slots = [plan.slots[b] for b in group]
        early = 0 if empty or plan.final else min(self._sides - 2, count - 1)
        stored = [*range(early), count - 1]
        sides = []
        for b in group:
            sides.append(self._before(b).places(plan.starts[b], stored, self._sides))
            ends = (plan.lengths[b] - count + 1 + token for token in stored)
            self._written[b] = list(zip(ends, sides[-1], strict=True))
        read = None if empty else self._places(slots, [self._read_side(b) for b in group])
        columns = None
        if len(group) < plan.rows or count < plan.q:
            firsts = np.array([self.firsts[b] for b in group])[:, None]
            columns = torch.from_numpy((firsts + np.arange(count)).reshape(-1)).to(plan.device)
        starts = [plan.starts[b] for b in group]
        write = torch.stack([self._places(slots, places) for places in zip(*sides, strict=True)])
        return EqualRows(slots, count, read, stored, write, columns=columns, starts=starts)

    def _before(self, b: int) -> RowStates:
        """Returns the states of row b once its accepted tokens have followed the base again."""
        row, start = self._rows[self.plan.slots[b]], self.plan.starts[b]
        if not start:
            return RowStates(held=row.held)
        return row if self.follows(b) else RowStates(start, {start: row.side}, held=row.held)

    def _read_side(self, b: int) -> int:
        """Returns the side of the state that the tokens of row b follow."""
        return self._before(b).sides[self.plan.starts[b]]

    def _places(self, slots: Sequence[int], sides: Sequence[int]) -> Tensor:
        places = [side * len(self._rows) + slot for slot, side in zip(slots, sides, strict=True)]
        return torch.tensor(places, device=self.plan.device)

    def states_after(self, b: int) -> RowStates:
        """Returns the states of row b once the pass has ended."""
        plan, row = self.plan, self._before(b)
        tokens = {side: length for length, side in [*row.sides.items(), *self._written[b]]}
        sides = {length: side for side, length in tokens.items()}
        if plan.final:
            return RowStates(row.base, sides, held=row.held).settled(plan.lengths[b])
        own = slice(self.firsts[b], self.firsts[b] + plan.counts[b])
        inputs = {name: block[own] for name, block in self.inputs.items()}
        if plan.starts[b] != row.base:
            inputs = {name: torch.cat([row.inputs[name], new]) for name, new in inputs.items()}
        return RowStates(row.base, sides, inputs, row.held)
