"""The common part of drafters that read tokens and compute no model.

They propose point masses, verified by exact match, so no q is needed. They read no tokens of a row
before a draft is asked for.

Drafters that know the tokens that may follow, and their probabilities, propose the most probable
continuations of a row, as a chain or a tree (`probable`).
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count, islice, pairwise
from typing import NamedTuple, TypeVar

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
        """Reads the new tokens, prompts included, of drafted rows; returns their number."""

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
        own_guesses = [self.guess(row, length) if length else NOTHING for row, length in pairs]
        self._drafting += time.perf_counter() - started
        return own_guesses

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
    columns = [values.clone() for values in q]
    columns += [torch.zeros_like(q[0]) for _ in range(most - len(q))]
    for row, (first, draft) in enumerate(zip(starts, drafts, strict=True)):
        for values, token in zip(columns[first:], draft, strict=False):
            values[row] = 0.0
            values[row, token] = 1.0
    return columns


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


FLOOR = 0.05
"""The least probability of a path.

Less probable drafts cost a verified position each and bring next to no tokens.
"""
CHOICES = 10
"""The most tokens of a position in a tree: Medusa's trees have no others."""
Place = TypeVar("Place")
Following = Callable[[Place], Iterable[tuple[int, float, Place]]]
"""A place in a text -> tokens that may follow, their probabilities, and the places after them.

The most probable token comes first.
"""


def probable(place: Place, following: Following[Place], length: int, nodes: int) -> Guess:
    """Returns a tree of up to `nodes` nodes (0: a chain) with paths of up to `length` tokens."""
    return tree(place, following, length, nodes) if nodes else chain(place, following, length)


Choices = Sequence[tuple[int, float]]
"""The tokens of a position and their probabilities, the most probable first."""


def most_probable(logits: Tensor, choices: int) -> list[list[list[tuple[int, float]]]]:
    """Returns the `choices` most probable tokens of each row and position.

    Args:
        logits: the logits, [rows, positions, vocab].
        choices: the number of tokens.
    """
    top = logits.float().softmax(-1).topk(min(choices, logits.shape[-1]), dim=-1)
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        [list(zip(*position, strict=True)) for position in zip(*row, strict=True)] for row in pairs
    ]


def independent(positions: Sequence[Choices], length: int, nodes: int) -> Guess:
    """Guesses as `probable` does, if the tokens of a position do not depend on earlier ones.

    Returns NOTHING if a probability is not finite.
    """
    if any(not math.isfinite(choices[0][1]) for choices in positions):
        return NOTHING
    return probable(0, partial(_after, positions), length, nodes)


def _after(positions: Sequence[Choices], depth: int) -> Iterator[tuple[int, float, int]]:
    for token, chance in positions[depth] if depth < len(positions) else ():
        yield token, min(chance, 0.999), depth + 1


def chain(place: Place, following: Following[Place], length: int) -> Guess:
    """Returns a chain with the most probable token after each."""
    tokens: list[int] = []
    confidence: list[float] = []
    path = 1.0
    while len(tokens) < length:
        next_guess = next(iter(following(place)), None)
        if next_guess is None:
            break
        token, sure, place = next_guess
        path *= sure
        if path < FLOOR:
            break
        tokens.append(token)
        confidence.append(sure)
    return Guess(tokens, confidence) if tokens else NOTHING


def tree(place: Place, following: Following[Place], length: int, nodes: int) -> Guess:
    """Returns a tree of the most probable paths, the most probable first.

    This is the greedy rule of DySpec's tree builder (Xiong et al. 2024, arXiv 2410.11744). The
    confidence at a depth is the probability of reaching it from the depth before.
    """
    tokens: list[int] = []
    parents: list[int] = []
    reached = [1.0] + [0.0] * length  # by depth
    heap: list[
        tuple[float, int, int, int, int, Place]
    ] = []  # -probability, number, depth, parent, token, place after it
    numbers = count()

    def push(place: Place, path: float, depth: int, parent: int) -> None:
        for token, sure, after in islice(following(place), nodes if depth <= length else 0):
            if path * sure < FLOOR:
                return
            heappush(heap, (-path * sure, next(numbers), depth, parent, token, after))

    push(place, 1.0, 1, -1)
    while heap and len(tokens) < nodes:
        path, _, depth, parent, token, after = heappop(heap)
        tokens.append(token)
        parents.append(parent)
        reached[depth] -= path  # which is negative
        push(after, -path, depth + 1, len(tokens) - 1)
    confidence = [min(after / before, 1.0) for before, after in pairwise(reached) if after]
    return Guess(tokens, confidence, parents) if tokens else NOTHING
