"""Earlier answers on disk, for later engines and runs: `suffix:answers=FILE`.

The file has one JSON object on each line. The first line names the format and the tokenizer; every
other line holds the tokens of one text and the length of its prompt. A text is appended when its
row ends, under a lock, so several processes may share a file. A file that has become too long keeps
its last texts. Only its owner may read it, because it holds the texts of users.
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
                _locked(file, shared=True)
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


def _locked(file: BinaryIO, shared: bool = False) -> None:
    fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
