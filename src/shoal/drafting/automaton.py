"""A suffix automaton of several texts that grow at their ends: every substring has a state, which
knows how often it occurs.

After Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985); of several
texts, Blumer et al., "Complete inverted files for efficient text retrieval and analysis" (1987).
Appending a token takes amortised constant time, and at most two states, but for counting: that
takes a step for every suffix that occurs elsewhere as well, up to `COUNTED`.
"""

from __future__ import annotations

from collections.abc import Iterable
from sys import getsizeof
from typing import NamedTuple

COUNTED = 64
"""Most suffixes of a text that are counted when a token is appended: only a text that repeats
itself over and over has more. Those left out are the shortest, which nobody looks up where longer
ones are known."""
INTEGER_BYTES = 28
"""Of a number of more than a byte; a state has two that no other has: its own, and its length."""
TOKEN_BYTES = 2 * (getsizeof({0: 0}) + 2 * INTEGER_BYTES + 4 * 9)
"""Most bytes of a token: of two states, each with places in four lists."""
ROOT = 0


class SuffixAutomaton:
    """States are numbers; `ROOT` is the empty text's, where every text begins.

    Attributes:
        following: of each state, the states that tokens lead to.
        link: of each state, that of its longest suffix that occurs elsewhere as well.
        length: of each state, the tokens of its longest text.
        count: how often its texts occur.
        tokens: appended so far.
    """

    def __init__(self) -> None:
        self.following: list[dict[int, int]] = [{}]
        self.link, self.length, self.count = [-1], [0], [0]
        self.tokens = 0

    @property
    def bytes(self) -> int:
        """Memory that it takes, to a few percent."""
        lists = (self.following, self.link, self.length, self.count)
        return 2 * INTEGER_BYTES * len(self.length) + sum(map(getsizeof, (*lists, *self.following)))

    def append(self, state: int, token: int) -> int:
        """The state of a whole text, once it has become a token longer."""
        following, link, length = self.following, self.link, self.length
        known = following[state].get(token)
        if known is None:
            new = self._new(length[state] + 1, {}, ROOT, 0)
            above = state
            while above >= 0 and token not in following[above]:
                following[above][token] = new
                above = link[above]
            if above >= 0:
                link[new] = self._of_length(above, token, following[above][token])
        else:
            new = self._of_length(state, token, known)
        self._count(new)
        self.tokens += 1
        return new

    def _count(self, state: int) -> None:
        link, count = self.link, self.count
        for _ in range(COUNTED):
            if state <= ROOT:
                return
            count[state] += 1
            state = link[state]

    def _of_length(self, above: int, token: int, state: int) -> int:
        """The state of the longest text of `above` and the token: `state`, or a part of it split
        off if that knows longer ones."""
        following, link, length = self.following, self.link, self.length
        if length[state] == length[above] + 1:
            return state
        shorter = self._new(
            length[above] + 1, dict(following[state]), link[state], self.count[state]
        )
        link[state] = shorter
        while above >= 0 and following[above].get(token) == state:
            following[above][token] = shorter
            above = link[above]
        return shorter

    def read(self, state: int, tokens: Iterable[int]) -> int:
        """The state of a whole text, once it has become longer by these tokens."""
        for token in tokens:
            state = self.append(state, token)
        return state

    def _new(self, length: int, following: dict[int, int], link: int, count: int) -> int:
        self.following.append(following)
        self.length.append(length)
        self.link.append(link)
        self.count.append(count)
        return len(self.length) - 1


class Place(NamedTuple):
    """Where the end of a text stands in an automaton: the state of its longest suffix that has been
    continued, and its length."""

    automaton: SuffixAutomaton
    state: int
    length: int

    def continued(self) -> Place:
        """The same or a shorter suffix, of which some text goes on."""
        automaton, state, _ = self
        while state > ROOT and not automaton.following[state]:
            state = automaton.link[state]
        return self if state == self.state else Place(automaton, state, automaton.length[state])

    def counts(self) -> list[tuple[int, int]]:
        """How often each token follows, the one seen last first."""
        count = self.automaton.count
        return [
            (count[state], token)
            for token, state in reversed(self.automaton.following[self.state].items())
        ]

    def after(self, token: int) -> Place:
        """Once a token follows that some text has there."""
        return Place(self.automaton, self.automaton.following[self.state][token], self.length + 1)
