"""A suffix automaton of the earlier answers of an engine, and the places of running rows in it.

On disk they serve later engines and runs too: `suffix:answers=FILE`. The file has one JSON object
on each line. The first line names the format and the tokenizer; every other line holds the tokens
of one text and the length of its prompt. A text is appended when its row ends, under a lock, so
several processes may share a file. A file that has become too long keeps its last texts. Only its
owner may read it, because it holds the texts of users.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections import deque
from collections.abc import Iterable, Sequence
from sys import getsizeof
from typing import BinaryIO

from shoal.drafting.automaton import ROOT, TOKEN_BYTES, Place, SuffixAutomaton
from shoal.drafting.text import NUMBER_BYTES, number_bytes
from shoal.errors import RequestError
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
        """Reads new texts and the rows' places; returns how many tokens the automaton gained."""
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


LOG = logging.getLogger("shoal")
TOKEN_DIGITS = 8
"""The most bytes that a token takes in the file, about: its digits and a comma."""
TEXT_TOKENS = 8
"""The number of tokens that take as many bytes as the rest of a text's line."""


class AnswerFile:
    """A file with the texts of rows that have ended.

    Args:
        path: the path of the file.
        limit: the most tokens in an engine's table; the file holds about as many.
        vocab_size: the size of the target's vocabulary.
    """

    def __init__(self, path: str, limit: int, vocab_size: int) -> None:
        self._path, self._limit, self._vocab_size = path, limit, vocab_size
        self._broken = False

    def read(self) -> list[tuple[list[int], int]]:
        """Returns the last texts, with the lengths of their prompts.

        The texts have `limit` / 2 tokens together, at most. Lines that a crash has damaged, and
        lines with tokens outside the target's vocabulary, are skipped.
        """
        try:
            with open(self._path, "rb") as file:
                _lock(file, shared=True)
                return list(map(_text_of, _last(file, self._limit // 2, self._vocab_size)))
        except OSError as error:
            self._give_up(error)
            return []

    def append(self, tokens: Sequence[int], prompt: int) -> None:
        """Appends a text.

        If the file cannot be written, a warning is logged once and no more texts are appended: an
        answer must not fail because of its drafts.
        """
        if self._broken:
            return
        try:
            with open(self._path, "r+b") as file:
                _lock(file)
                size = file.seek(0, os.SEEK_END)
                line = (
                    json.dumps(
                        {"prompt": prompt, "tokens": list(tokens)}, separators=(",", ":")
                    ).encode()
                    + b"\n"
                )
                if size + len(line) > TOKEN_DIGITS * (self._limit + TEXT_TOKENS):
                    self._shorten(file)
                file.write(line)
        except OSError as error:
            self._give_up(error)

    def _shorten(self, file: BinaryIO) -> None:
        """Keeps only the last texts, with `limit` / 4 tokens at most."""
        kept = _last(file, self._limit // 4, None)
        file.seek(0)
        first = file.readline()
        file.seek(len(first))
        file.truncate()
        file.write(b"".join(kept))

    def _give_up(self, error: OSError) -> None:
        if not self._broken:
            LOG.warning("answers are no longer kept in %s: %s", self._path, error.strerror)
        self._broken = True


def require_answers(path: str, tokenizer: str | None) -> None:
    """Creates the file if there is none.

    Args:
        path: the path of the file.
        tokenizer: the fingerprint of the target's tokenizer; None = unknown.

    Raises:
        RequestError: the file cannot be written, has another format, or belongs to another
            tokenizer.
    """
    try:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            _lock(file)
            first = file.readline(1 << 12)
            if not first:
                file.write(
                    json.dumps({"shoal": "answers", "tokenizer": tokenizer}).encode() + b"\n"
                )
                return
    except OSError as error:
        raise RequestError(f"cannot write answers to {path!r}: {error.strerror}") from error
    try:
        about = json.loads(first)
        known = about["tokenizer"] if about["shoal"] == "answers" else ""
    except (ValueError, KeyError, TypeError):
        known = ""
    if known == "":
        raise RequestError(
            f"{path!r} is no file of answers, or its first line is damaged: name another file, "
            f"or remove it"
        )
    if None not in (known, tokenizer) and known != tokenizer:
        raise RequestError(
            f"{path!r} holds answers of another tokenizer: name another file for this target's"
        )


def _last(file: BinaryIO, tokens: int, vocab_size: int | None) -> list[bytes]:
    """Returns the last lines that have `tokens` tokens together, without the file's first line."""
    file.seek(0)
    kept: list[bytes] = []
    held = 0
    for line in reversed(file.readlines()[1:]):
        text = _text_of(line)
        if not text[0] or (vocab_size is not None and max(text[0]) >= vocab_size):
            continue
        held += len(text[0]) + TEXT_TOKENS
        if held > tokens and kept:
            break
        kept.append(line)
    return kept[::-1]


def _text_of(line: bytes) -> tuple[list[int], int]:
    """Returns the tokens of a line and the length of its prompt; ([], 0) if the line is damaged."""
    try:
        value = json.loads(line)
        tokens, prompt = value["tokens"], value["prompt"]
        sound = all(
            type(token) is int and token >= 0 for token in [*tokens, prompt]
        ) and prompt <= len(tokens)
    except (ValueError, KeyError, TypeError):
        sound = False
    return (tokens, prompt) if sound else ([], 0)


def _lock(file: BinaryIO, shared: bool = False) -> None:
    fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
