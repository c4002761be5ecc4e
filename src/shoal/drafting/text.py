"""The common part of drafters that read tokens and compute no model.

They propose point masses, verified by exact match, so no q is needed. They read no tokens of a row
before a draft is asked for.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.drafting.protocol import DraftCounters, Drafter, DraftInputs
from shoal.types.requests import Row
from shoal.types.trees import DraftTree


class Guess(NamedTuple):
    """A tree for one row.

    Attributes:
        tokens: the tokens of the nodes.
        confidence: for each depth, the drafter's confidence, 0..1, that a draft there is accepted
            if the one before it is.
        parents: the parents of the nodes, as in `DraftTree`; None = a chain.
    """

    tokens: Sequence[int]
    confidence: Sequence[float]
    parents: Sequence[int] | None = None

    def up_to(self, depth: int) -> Guess:
        """Returns the guess without nodes deeper than `depth`."""
        if self.parents is None:
            return Guess(self.tokens[:depth], self.confidence[:depth])
        tokens: list[int] = []
        parents: list[int] = []
        kept, depths = {-1: -1}, {-1: 0}
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            depths[node] = depths[parent] + 1
            if depths[node] <= depth:
                kept[node] = len(tokens)
                tokens.append(token)
                parents.append(kept[parent])
        return Guess(tokens, self.confidence[:depth], parents)


NOTHING = Guess((), ())
ROUND_TOKENS = 32
"""The most tokens per row that are read as part of a round."""


class TextDrafter(Drafter):
    """A drafter that proposes its guesses, as far as `DraftInputs.stop` lets it."""

    def __init__(self) -> None:
        self._drafting = self._preparing = self._prepared = 0.0

    @abstractmethod
    def read(self, rows: Sequence[Row]) -> int:
        """Reads the new tokens of the rows that are drafted for, prompts included.

        Returns:
            The number of tokens read.
        """

    @abstractmethod
    def guess(self, row: Row, length: int) -> Guess:
        """Returns a guess of at most `length` tokens that may follow a row, which was read."""

    @property
    @abstractmethod
    def table_bytes(self) -> int:
        """The bytes that its tables take now."""

    @property
    def kept_bytes(self) -> int:
        return self.table_bytes

    def guesses(self, inputs: DraftInputs) -> list[Guess]:
        """Returns the guesses of all rows, read up to their ends."""
        started = time.perf_counter()
        read = self.read(
            [row for row, length in zip(inputs.rows, inputs.lengths, strict=True) if length]
        )
        # As for a model, prompts and tokens that were decoded plainly are no part of a round.
        if read > ROUND_TOKENS * len(inputs.rows):
            self._preparing += time.perf_counter() - started
            started = time.perf_counter()
        pairs = zip(inputs.rows, inputs.lengths, strict=True)
        found = [self.guess(row, length) if length else NOTHING for row, length in pairs]
        self._drafting += time.perf_counter() - started
        return found

    def propose(self, inputs: DraftInputs) -> DraftTree:
        return tree_of(self.guesses(inputs), inputs)

    def take_counters(self) -> DraftCounters:
        seconds, self._drafting = self._drafting, 0.0
        prepared, self._prepared = self._preparing - self._prepared, self._preparing
        return DraftCounters(0, seconds, prepared)

    @property
    def seconds_preparing(self) -> float:
        return self._preparing


NUMBER_BYTES = 28
"""The bytes of an integer above 255."""


def number_bytes(texts: Iterable[Iterable[int]], elsewhere: Iterable[Iterable[int]] = ()) -> int:
    """Returns the bytes of the different number objects in these texts.

    Numbers of a text in `elsewhere` do not count, nor those below 257, which Python keeps anyway.
    """
    known = {id(token) for text in elsewhere for token in text}
    return NUMBER_BYTES * len(
        {id(token) for text in texts for token in text if token > 256} - known
    )


def with_point_masses(
    q: Sequence[Tensor], drafts: Sequence[Sequence[int]], firsts: Sequence[int] | None = None
) -> list[Tensor]:
    """Returns the q of chains, [rows, vocab] each, one-hot at tokens that were chosen.

    Args:
        q: the distributions that tokens were drawn from.
        drafts: the chosen tokens of each row.
        firsts: the position of each row's first chosen token; None = 0.
    """
    starts = [0] * len(drafts) if firsts is None else firsts
    most = max(first + len(draft) for first, draft in zip(starts, drafts, strict=True))
    found = [values.clone() for values in q]
    found += [torch.zeros_like(q[0]) for _ in range(most - len(q))]
    for row, (first, draft) in enumerate(zip(starts, drafts, strict=True)):
        for values, token in zip(found[first:], draft, strict=False):
            values[row] = 0.0
            values[row, token] = 1.0
    return found


def tree_of(guesses: Sequence[Guess], inputs: DraftInputs) -> DraftTree:
    """Returns the tree of the guesses of all rows, as far as `DraftInputs.stop` lets it grow."""
    lengths, steps = _lengths(guesses, inputs)
    drafts = [guess.up_to(length) for guess, length in zip(guesses, lengths, strict=True)]
    return _tree(drafts, inputs.uniforms.device, steps)


def _lengths(guesses: Sequence[Guess], inputs: DraftInputs) -> tuple[list[int], int]:
    """Returns the proposed length of each row's guess, and the number of positions looked at.

    The first position is always looked at, because it tells the cost of drafting and how often
    there is no guess. After the end of a row's guess the confidence is 0.
    """
    lengths = [len(guess.confidence) for guess in guesses]
    if inputs.stop is None:
        return lengths, max(*lengths, 1)
    position = 0
    while True:
        sure = [
            guess.confidence[position] if position < len(guess.confidence) else 0.0
            for guess in guesses
        ]
        lengths = [min(pair) for pair in zip(lengths, inputs.stop(position, sure), strict=True)]
        position += 1
        if max(lengths) <= position:
            return lengths, position


def _tree(drafts: Sequence[Guess], device: torch.device, steps: int) -> DraftTree:
    tokens = [guess.tokens for guess in drafts]
    if not any(tokens):
        return DraftTree.empty(len(tokens), device, steps)
    if all(guess.parents is None for guess in drafts):
        return DraftTree.of(tokens, device=device, steps=steps)
    parents = [
        range(-1, len(guess.tokens) - 1) if guess.parents is None else guess.parents
        for guess in drafts
    ]
    return DraftTree.of(tokens, parents, device=device, steps=steps)
