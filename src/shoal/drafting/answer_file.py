"""Earlier answers on disk, for the engines and runs to come: `suffix:answers=FILE`.

A file of JSON objects, one a line: first what it is, then a text each, with the length of its
prompt. Texts are appended as rows come to their end, under a lock, so that several processes may
share a file; one that has become too long keeps its last texts. Its owner alone may read it, as it
holds what users wrote.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Sequence
from typing import BinaryIO

from shoal.errors import RequestError

LOG = logging.getLogger("shoal")
TOKEN_BYTES = 8
"""Of a token in the file, at most about: its digits and a comma."""
TEXT_TOKENS = 8
"""Tokens that take as much as a text's line takes beside its own."""


class AnswerFile:
    """Texts of rows that came to their end.

    Args:
        path: of the file.
        limit: tokens of an engine's table: the file holds about as many.
        vocab_size: of the target.
    """

    def __init__(self, path: str, limit: int, vocab_size: int) -> None:
        self._path, self._limit, self._vocab_size = path, limit, vocab_size
        self._broken = False

    def read(self) -> list[tuple[list[int], int]]:
        """The last texts, of half of `limit` tokens, with the lengths of their prompts; lines that
        a crash has damaged, and tokens that the target has not, are passed over."""
        try:
            with open(self._path, "rb") as file:
                _locked(file, shared=True)
                return list(map(_text_of, _last(file, self._limit // 2, self._vocab_size)))
        except OSError as error:
            self._give_up(error)
            return []

    def append(self, tokens: Sequence[int], prompt: int) -> None:
        """A text. What cannot be written is given up, and said once: drafts are not worth an
        answer."""
        if self._broken:
            return
        try:
            with open(self._path, "r+b") as file:
                _locked(file)
                size = file.seek(0, os.SEEK_END)
                line = (
                    json.dumps(
                        {"prompt": prompt, "tokens": list(tokens)}, separators=(",", ":")
                    ).encode()
                    + b"\n"
                )
                if size + len(line) > TOKEN_BYTES * (self._limit + TEXT_TOKENS):
                    self._shorten(file)
                file.write(line)
        except OSError as error:
            self._give_up(error)

    def _shorten(self, file: BinaryIO) -> None:
        """Leaves the last texts, of a quarter of `limit` tokens, in place of all."""
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
    """Makes the file if there is none.

    Args:
        tokenizer: the fingerprint of the target's; None = unknown.

    Raises:
        RequestError: it cannot be written, is something else, or one of another tokenizer.
    """
    try:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            _locked(file)
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
    """The last lines of so many tokens, but for the first line of all."""
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
    """Nothing where the line is damaged."""
    try:
        value = json.loads(line)
        tokens, prompt = value["tokens"], value["prompt"]
        sound = all(
            type(token) is int and token >= 0 for token in [*tokens, prompt]
        ) and prompt <= len(tokens)
    except (ValueError, KeyError, TypeError):
        sound = False
    return (tokens, prompt) if sound else ([], 0)


def _locked(file: BinaryIO, shared: bool = False) -> None:
    fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
