"""Deterministic automata over bytes: the form of a grammar's terminals in the quotients."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

from shoal.errors import RequestError

MOST_STATES = 4096
"""The most states of one automaton. Terminals of real grammars take some tens; a counted repetition
of alternatives may take any number."""

Item = TypeVar("Item", bound=Hashable)


class Automaton:
    """A deterministic automaton.

    States are numbers, 0 is the first one. Every state is reached from state 0 and reaches a state
    that accepts.

    Attributes:
        moves: for each state, the next state for each of the 256 bytes, -1 for none.
        accepts: the states that accept.
    """

    def __init__(self, moves: Sequence[Sequence[int]], accepts: frozenset[int]) -> None:
        self.moves, self.accepts = moves, accepts
        self._before: list[dict[int, set[int]]] = [{} for _ in moves]
        for state, row in enumerate(moves):
            for byte, after in enumerate(row):
                if after >= 0:
                    self._before[after].setdefault(byte, set()).add(state)
        self._back: dict[tuple[frozenset[int], int], frozenset[int]] = {}

    def back(self, states: frozenset[int], byte: int) -> frozenset[int]:
        """Returns the states that this byte leads from to one of the given states."""
        key = states, byte
        if key not in self._back:
            self._back[key] = frozenset().union(
                *(self._before[state].get(byte, ()) for state in states)
            )
        return self._back[key]

    def leading(self, states: Iterable[int]) -> frozenset[int]:
        """Returns the states from which some text leads to one of the given states."""
        states_before = set(states)
        open_ = list(states_before)
        while open_:
            for before in self._before[open_.pop()].values():
                open_ += before - states_before
                states_before |= before
        return frozenset(states_before)

    def runs(self, state: int) -> Iterator[tuple[int, int, int]]:
        """Yields the moves of a state as first byte, last byte and next state."""
        row, first = self.moves[state], 0
        for byte in range(1, 257):
            if byte == 256 or row[byte] != row[first]:
                if row[first] >= 0:
                    yield first, byte - 1, row[first]
                first = byte

    def shortest(self) -> Automaton:
        """Returns an automaton of the accepted texts without an accepted shorter beginning."""
        moves = [
            (-1,) * 256 if state in self.accepts else row for state, row in enumerate(self.moves)
        ]
        return _prune(moves, self.accepts)


def determinize(
    start: Iterable[Item],
    closure: Callable[[set[Item]], Iterable[Item]],
    edges: Callable[[Item], Iterable[tuple[int, int, Item]]],
    accepts: Callable[[Item], bool],
) -> Automaton:
    """Returns the deterministic automaton of a nondeterministic one.

    Args:
        start: the first states.
        closure: adds the states that are reached without reading.
        edges: the first byte, last byte and next state of a state's moves.
        accepts: True for a state that accepts.

    Raises:
        RequestError: more than `MOST_STATES` states.
    """
    first = frozenset(closure(set(start)))
    numbers, order, moves = {first: 0}, [first], []
    for states in order:  # grows
        outgoing = [edge for state in states for edge in edges(state)]
        cuts = sorted(
            {0, 256, *(low for low, _, _ in outgoing), *(high + 1 for _, high, _ in outgoing)}
        )
        targets: list[set[Item]] = [set() for _ in cuts]
        for low, high, target in outgoing:
            for place in range(bisect_right(cuts, low) - 1, bisect_right(cuts, high)):
                targets[place].add(target)
        row: list[int] = []
        for place, (low, end) in enumerate(pairwise(cuts)):
            after = -1
            if targets[place]:
                key = frozenset(closure(targets[place]))
                if key not in numbers:
                    numbers[key] = len(order)
                    order.append(key)
                after = numbers[key]
            row += [after] * (end - low)
        moves.append(tuple(row))
        if len(order) > MOST_STATES:
            raise RequestError(
                f"a terminal of the grammar needs an automaton of more than {MOST_STATES} states"
            )
    return _prune(
        moves, frozenset(number for number, states in enumerate(order) if any(map(accepts, states)))
    )


def repeat(parts: Sequence[Automaton], least: int) -> Automaton:
    """Returns the automaton of `least` (0 or 1) or more texts of the parts, one behind another."""
    return _join([], parts, least)


def follow(first: Automaton, parts: Sequence[Automaton]) -> Automaton:
    """Returns the automaton of a text of `first`, then any number of texts of the parts."""
    return _join([first], parts, 1) if parts else first


def _join(firsts: Sequence[Automaton], parts: Sequence[Automaton], least: int) -> Automaton:
    """Returns the automaton of texts that begin with one of `firsts` and go on with `parts`.

    The texts begin with one of `parts` if `firsts` is empty. A state is a pair: the automaton's
    number and its state.
    """
    machines = [*parts, *firsts]
    begun = [(number, 0) for number in range(len(parts))]
    start = [(len(parts) + number, 0) for number in range(len(firsts))] or begun

    def closure(states: set[tuple[int, int]]) -> set[tuple[int, int]]:
        done = any(number >= 0 and state in machines[number].accepts for number, state in states)
        return states | set(begun) if done else states

    def edges(item: tuple[int, int]) -> Iterator[tuple[int, int, tuple[int, int]]]:
        number, state = item
        return (
            (low, high, (number, after))
            for low, high, after in machines[number].runs(state)
            if number >= 0
        )

    def accepts(item: tuple[int, int]) -> bool:
        return item[1] in machines[item[0]].accepts

    union = determinize(start, closure, edges, accepts)
    return union if least else Automaton(union.moves, union.accepts | {0})


def _prune(moves: Sequence[Sequence[int]], accepts: frozenset[int]) -> Automaton:
    """Returns the automaton without states that are not reached or reach no state that accepts.

    Raises:
        RequestError: no state is left.
    """
    order, seen = [0], {0}
    for state in order:  # grows
        order += [
            after for after in dict.fromkeys(moves[state]) if after >= 0 and after not in seen
        ]
        seen.update(order)
    useful = Automaton(moves, accepts).leading(accepts & seen)
    if 0 not in useful:
        raise RequestError("a terminal of the grammar matches no text")
    kept = {
        state: number for number, state in enumerate(state for state in order if state in useful)
    }
    rows = [tuple(kept.get(after, -1) for after in moves[state]) for state in kept]
    return Automaton(rows, frozenset(kept[state] for state in kept if state in accepts))
