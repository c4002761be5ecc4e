"""A suffix automaton of several texts that grow at their ends, with the count of every substring.

After Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985); for several
texts, Blumer et al., "Complete inverted files for efficient text retrieval and analysis" (1987).
Appending a token takes amortised constant time and at most two new states. Counting takes one more
step for every suffix that occurs elsewhere as well, up to `COUNTED` steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from sys import getsizeof
from typing import NamedTuple

COUNTED = 64
"""The most suffixes of a text that are counted when a token is appended.

Only a text that repeats itself over and over has more. The shortest suffixes are left out; they are
not looked up if a longer one matches.
"""
INTEGER_BYTES = 28
"""The bytes of an integer above 255; each state has two of its own: its number and its length."""
TOKEN_BYTES = 2 * (getsizeof({0: 0}) + 2 * INTEGER_BYTES + 4 * 9)
"""The most bytes that a token takes: two states, each with places in four lists."""
ROOT = 0


class SuffixAutomaton:
    """A suffix automaton whose states are numbers; `ROOT` is the state of the empty text.

    Every text begins at `ROOT`.

    Attributes:
        following: for each state, the next state by token.
        link: for each state, the state of its longest suffix that occurs elsewhere as well.
        length: for each state, the number of tokens of its longest text.
        count: for each state, the number of times that its texts occur.
        tokens: the number of tokens appended so far.
    """

    def __init__(self) -> None:
        self.following: list[dict[int, int]] = [{}]
        self.link, self.length, self.count = [-1], [0], [0]
        self.tokens = 0

    @property
    def bytes(self) -> int:
        """The memory that the automaton takes, in bytes, to a few percent."""
        lists = (self.following, self.link, self.length, self.count)
        return 2 * INTEGER_BYTES * len(self.length) + sum(map(getsizeof, (*lists, *self.following)))

    def append(self, state: int, token: int) -> int:
        """Appends a token to the whole text of `state`; returns the state of the longer text."""
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
        """Returns the state of the longest text of `above` and the token.

        This is `state`, or, if `state` has longer texts, a new state that is split off from it.
        """
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
        """Appends tokens to the whole text of `state`; returns the state of the longer text."""
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
    """A place in an automaton: the longest suffix of a text that some text continues.

    Attributes:
        automaton: the automaton.
        state: the state of the suffix.
        length: the number of its tokens.
    """

    automaton: SuffixAutomaton
    state: int
    length: int

    def continued(self) -> Place:
        """Returns the place of the longest suffix of this one after which some text continues."""
        automaton, state, _ = self
        while state > ROOT and not automaton.following[state]:
            state = automaton.link[state]
        return self if state == self.state else Place(automaton, state, automaton.length[state])

    def counts(self) -> list[tuple[int, int]]:
        """Returns (count, token) for each next token, the token seen last first."""
        count = self.automaton.count
        return [
            (count[state], token)
            for token, state in reversed(self.automaton.following[self.state].items())
        ]

    def after(self, token: int) -> Place:
        """Returns the place after one more token, which must follow here in some text."""
        return Place(self.automaton, self.automaton.following[self.state][token], self.length + 1)
