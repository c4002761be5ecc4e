"""Earlier answers of an engine in one suffix automaton, and the places of running rows in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from sys import getsizeof

from shoal.drafting.answer_file import AnswerFile
from shoal.drafting.automaton import ROOT, TOKEN_BYTES, Place, SuffixAutomaton
from shoal.drafting.text import NUMBER_BYTES, number_bytes
from shoal.types.requests import Row

LONGEST = 64
"""The most tokens of a row that are matched: longer matches say no more about the next token."""


PLACE_BYTES = 9
"""The bytes of a token's place in a list, about."""


class Answers:
    """The texts of rows that have ended, prompts included: the last ones, up to a limit.

    New texts are read into the automaton when the next draft is proposed, not before.

    Args:
        limit: the most tokens in the automaton. A full automaton is built anew from the last texts,
            with half as many tokens at most.
        file: the file that later engines read, with the texts of earlier ones.
    """

    def __init__(self, limit: int, file: AnswerFile | None = None) -> None:
        self._file, self._unopened = file, file is not None
        self._limit = limit
        self._automaton = SuffixAutomaton()
        # The last texts, with the lengths of their prompts.
        self._texts: deque[tuple[list[int], int]] = deque()
        # The number of tokens of these texts, and the number of texts that were not read yet.
        self._held = self._unread = 0
        self._changes = 0
        # For each row: its state, matched tokens, tokens read, and `_changes` at that time.
        self._rows: dict[Row, tuple[int, int, int, int]] = {}

    @property
    def bytes(self) -> int:
        """The memory that the texts and the automaton take, in bytes, to a few percent."""
        texts = [tokens for tokens, _ in self._texts]
        return self._automaton.bytes + sum(map(getsizeof, texts)) + number_bytes(texts)

    @staticmethod
    def most_bytes(limit: int) -> int:
        """Returns the most memory that a table of `limit` tokens takes, in bytes."""
        return TOKEN_BYTES * limit + (PLACE_BYTES + NUMBER_BYTES) * limit // 2

    def leave(self, row: Row, whole: bool) -> None:
        """Forgets the place of a row that has left.

        Args:
            row: the row.
            whole: True if the row's text is an answer, which is then kept.
        """
        self._rows.pop(row, None)
        if not whole:
            return
        tokens = row.tokens[-self._limit // 2 :]
        prompt = max(row.prompt_length - (len(row.tokens) - len(tokens)), 0)
        if self._file is not None:
            self._file.append(tokens, prompt)
        if not self._unopened:
            self._keep(tokens, prompt)

    def _keep(self, tokens: list[int], prompt: int) -> None:
        self._texts.append((tokens, prompt))
        self._held, self._unread = self._held + len(tokens), self._unread + 1
        while self._held > self._limit // 2 and len(self._texts) > 1:
            self._held -= len(self._texts.popleft()[0])
            self._unread = min(self._unread, len(self._texts))

    def read(self, rows: Iterable[Row]) -> int:
        """Reads new texts, and the places of these rows.

        Returns:
            The number of tokens that the automaton has gained.
        """
        before = self._automaton.tokens
        if self._unopened and self._file is not None:
            self._unopened = False
            for text, prompt in self._file.read():
                self._keep(text, prompt)
        if self._unread:
            self._changes += 1
            for tokens, prompt in list(self._texts)[-self._unread :]:
                self._add(tokens, prompt)
            self._unread = 0
            if self._automaton.tokens > self._limit:
                self._automaton, before = SuffixAutomaton(), 0
                for tokens, prompt in self._texts:
                    self._add(tokens, prompt)
        for row in rows:
            self._follow(row)
        return self._automaton.tokens - before

    def _add(self, tokens: Sequence[int], prompt: int) -> None:
        """Adds a text to the automaton.

        A beginning of the prompt that the automaton has already is not added again, so a prompt
        that several rows had is counted once.
        """
        automaton, state, known = self._automaton, ROOT, 0
        while known < prompt:
            following = automaton.following[state].get(tokens[known])
            if following is None or automaton.length[following] != automaton.length[state] + 1:
                break
            state, known = following, known + 1
        automaton.read(state, tokens[known:])

    def _follow(self, row: Row) -> None:
        """Finds the longest suffix of the row that is in the automaton.

        The search starts anew if texts were added since, because they may have longer matches.
        """
        automaton = self._automaton
        state, matched, known, changes = self._rows.get(row, (ROOT, 0, 0, -1))
        if changes != self._changes:
            state, matched, known = ROOT, 0, max(len(row.tokens) - LONGEST, 0)
        for token in row.tokens[known:]:
            while state > ROOT and token not in automaton.following[state]:
                state = automaton.link[state]
                matched = automaton.length[state]
            state = automaton.following[state].get(token, ROOT)
            matched = matched + 1 if state > ROOT else 0
        self._rows[row] = state, matched, len(row.tokens), self._changes

    def place(self, row: Row) -> Place:
        """Returns the place of a row that was among the rows last read."""
        state, matched, _, _ = self._rows[row]
        return Place(self._automaton, state, matched).continued()
