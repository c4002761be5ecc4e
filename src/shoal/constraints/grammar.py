"""Grammars as a constraint: llguidance's matchers (the extra `grammar`) follow a text.

Two matchers follow JSON: its grammar, and an expression that bounds the digits of its numbers, for
which llguidance has no option. The tokens that both allow are possible; if there are none (a bound
of the schema needs more digits), the tokens that the grammar allows.

The end of a text is one more symbol of llguidance's alphabet, with an id that no model produces.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.constraints.grammar_sources import llguidance_or_refuse, short
from shoal.constraints.protocol import Allowed, Constraint
from shoal.types.requests import Row

MASK_SECONDS = 0.05
"""The processor time that one mask of a row may take. Usual masks take some milliseconds at most,
masks of a very ambiguous grammar half a second within llguidance's own limits. The other rows of
the batch wait meanwhile."""
TOO_SLOW = (
    f"a mask took more than {MASK_SECONDS} s of processor time; make the grammar smaller "
    f"or less ambiguous"
)
_clock, _processor_time = time.perf_counter, time.thread_time
Bits = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, eq=False, slots=True)
class TextState:
    """A text as a linked list: its last token, and the state before that token. Never changed.

    Attributes:
        tracks: the row's matchers.
        parent: the state before the last token; None before the first token.
        token: the last token; -1 before the first token.
        length: the number of tokens of the text.
        serial: a number that no other state of the process has.
    """

    tracks: Sequence[Track] = field(repr=False)
    parent: TextState | None = field(default=None, repr=False)
    token: int = -1
    length: int = 0
    serial: int = field(default_factory=itertools.count().__next__)

    @property
    def tokens(self) -> tuple[int, ...]:
        reverse: list[int] = []
        state = self
        while state.parent is not None:
            reverse.append(state.token)
            state = state.parent
        return tuple(reversed(reverse))


class GrammarConstraint(Constraint[TextState]):
    """A compiled grammar; see `shoal.constraints.compiler`.

    Args:
        starts: llguidance's matchers before the first token: the grammar's, and that of the
            bounding expression, if there is one.
        end: the symbol for the end of the text.
        width: the number of symbols; at least the model's vocabulary.
    """

    def __init__(self, starts: Sequence[Any], end: int, width: int) -> None:
        self.starts, self._end, self._width = starts, end, width

    @property
    def batch_key(self) -> Hashable:
        return type(self), self._end, self._width

    def begin(self, row: Row) -> TextState:
        return TextState([Track(start) for start in self.starts])

    def advance(self, state: TextState, token: int) -> TextState:
        return TextState(state.tracks, state, token, state.length + 1)

    def mask(self, states: Sequence[TextState], vocab_size: int, device: torch.device) -> Allowed:
        """Returns the masks; nothing may follow a text that has left the grammar."""
        bits = _pack_masks(states, 0, self._width)
        bounded = [i for i, state in enumerate(states) if len(state.tracks) > 1]
        if bounded:
            both = bits[bounded] & _pack_masks([states[i] for i in bounded], 1, self._width)
            bits[bounded] = np.where(both.any(axis=-1, keepdims=True), both, bits[bounded])
        symbols = _symbols(torch.from_numpy(bits).to(device), self._width)
        ends = symbols[:, self._end].clone()
        symbols[:, self._end] = False
        return Allowed(symbols[:, :vocab_size], ends)

    def forced(self, state: TextState, draft: Sequence[int]) -> tuple[int, Sequence[int]]:
        """Returns the tokens by which the tokenizer writes the only text that can follow.

        A last token is left out if it might be a longer one, by the text behind it.
        """
        track = state.tracks[0]
        matcher = track.at(state)
        kept = 0 if matcher is None else matcher.validate_tokens(list(draft))
        end = reduce(self.advance, draft[:kept], state)
        if matcher is None or (matcher := track.at(end)) is None:
            return kept, ()
        return kept, list(takewhile(lambda token: token != self._end, matcher.compute_ff_tokens()))

    def why(self, state: TextState) -> str:
        reason = state.tracks[0].why(state)
        return reason and f"the grammar could not be followed any further: {reason}"


class Track:
    """One matcher of a row.

    It moves from one text to another by rolling back to their longest common prefix.

    Attributes:
        errors: the reason why there is no mask after a text of the last call, if llguidance gave up
            (it bounds the work it puts into one token) or took too long.
    """

    def __init__(self, start: Any) -> None:
        self.errors: dict[tuple[int, ...], str] = {}
        self._start, self._matcher = start, start.deep_copy()
        self._consumed: list[tuple[int, int]] = []  # serial and token of each state up to its text

    def at(self, state: TextState) -> Any:
        """Returns the matcher behind the state's text; None if its grammar refuses the text."""
        if self._matcher.is_error():  # it stays so
            self._matcher, self._consumed = self._start.deep_copy(), []
        new, known = self._new(state)
        old = [token for _, token in self._consumed[known:]]
        same = common_length(old, [token for _, token in new])
        if same < len(old):
            self._matcher.rollback(len(old) - same)
        read = same + self._matcher.try_consume_tokens([token for _, token in new[same:]])
        self._consumed[known:] = new[:read]
        if self._matcher.is_error():
            self.errors[state.tokens] = _first_line(self._matcher.get_error())
        return self._matcher if read == len(new) else None

    def _new(self, state: TextState) -> tuple[list[tuple[int, int]], int]:
        """Returns the states behind the consumed ones up to this one, and how many are consumed.

        Each state is given by its serial and token.
        """
        new: list[tuple[int, int]] = []
        while state.parent is not None and not self._has(state):
            new.append((state.serial, state.token))
            state = state.parent
        return new[::-1], state.length

    def _has(self, state: TextState) -> bool:
        return (
            state.length <= len(self._consumed)
            and self._consumed[state.length - 1][0] == state.serial
        )

    def why(self, state: TextState) -> str:
        """Returns the error of the state's text, or of a beginning of it; "" if there is none."""
        tokens = state.tokens if self.errors else ()
        return next(
            (error for text, error in self.errors.items() if tokens[: len(text)] == text), ""
        )


def common_length(a: Sequence[object], b: Sequence[object]) -> int:
    """Returns the length of the longest common prefix."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def _symbols(bits: Tensor, width: int) -> Tensor:
    """Unpacks masks: [..., words] int32 -> [..., width] bool."""
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    return (bits[..., None] >> places & 1).flatten(-2)[..., :width].bool()


def _pack_masks(states: Sequence[TextState], which: int, width: int) -> Bits:
    """Returns masks over the symbols by one track of each state, [states, words] packed.

    llguidance computes the rows whose states are a chain on as many threads as it sees fit. If that
    takes too long, they are computed again state by state, which shows the slow masks. Rows whose
    states branch are computed state by state.
    """
    started = _clock()
    bits = np.zeros((len(states), -(-width // 32)), dtype=np.int32)
    # Matcher, place of the first mask to fill, tokens that lead to the next ones.
    fills: list[tuple[Any, int, list[int]]] = []
    chains, trees = [], []
    for places in _by_row(states):
        track = states[places[0]].tracks[which]
        track.errors.clear()  # they may belong to rejected drafts
        if not _is_chain(states, places):
            trees.append((track, places))
        elif (matcher := track.at(states[places[0]])) is not None:
            fills.append((matcher, places[0], [states[i].token for i in places[1:]]))
            chains.append((track, places))
    _fill_at_once(fills, bits)
    late = _clock() - started > MASK_SECONDS
    # The masks of a matcher that failed claim that the text may end.
    again = [
        chain
        for chain, (matcher, *_) in zip(chains, fills, strict=True)
        if late or matcher.is_error()
    ]
    for track, places in again + trees:
        _fill_one_by_one(track, states, places, bits)
    return bits


def _by_row(states: Sequence[TextState]) -> list[list[int]]:
    """Returns the places of each row's states."""
    rows: dict[int, list[int]] = {}
    for i, state in enumerate(states):
        rows.setdefault(id(state.tracks), []).append(i)
    return list(rows.values())


def _is_chain(states: Sequence[TextState], places: Sequence[int]) -> bool:
    """Returns True if the places are neighbours and each state follows the one before."""
    return all(b == a + 1 and states[b].parent is states[a] for a, b in itertools.pairwise(places))


def _fill_at_once(fills: Sequence[tuple[Any, int, list[int]]], bits: Bits) -> None:
    """Fills the masks of chains."""
    filling = _filling()
    if single := [(matcher, at) for matcher, at, ahead in fills if not ahead]:
        filling.fill_next_token_bitmask_par(_executor(), single, bits)
    if several := [ask for ask in fills if ask[2]]:
        filling.fill_next_token_bitmask_par_with_draft_tokens(_executor(), several, bits)


def _fill_one_by_one(
    track: Track, states: Sequence[TextState], places: Sequence[int], bits: Bits
) -> None:
    """Fills the masks of one row, parents before children.

    A state where llguidance gives up or takes too long gets an empty mask. llguidance's caches make
    some masks faster in this second run than in the first; they will be fast in the next call, too.
    """
    for i in places:
        bits[i] = 0
        started = _processor_time()
        matcher = None if track.why(states[i]) else track.at(states[i])
        if matcher is None:
            continue
        _filling().fill_next_token_bitmask(matcher, bits, i)
        late = _processor_time() - started > MASK_SECONDS
        error = _first_line(matcher.get_error()) if matcher.is_error() else TOO_SLOW if late else ""
        if error:
            track.errors[states[i].tokens] = error
            bits[i] = 0


def _first_line(text: str) -> str:
    return short(text).partition("\n")[0]


def _filling() -> Any:
    """Returns llguidance's functions that fill masks."""
    import llguidance.numpy

    return llguidance.numpy


@cache
def _executor() -> Any:
    """Returns llguidance's threads."""
    return llguidance_or_refuse().LLExecutor()


if hasattr(os, "register_at_fork"):  # a forked child does not have them
    os.register_at_fork(after_in_child=_executor.cache_clear)
