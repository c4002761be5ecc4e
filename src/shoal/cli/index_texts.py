"""The texts of a corpus, read from files piece by piece."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from shoal.errors import RequestError

SUFFIXES = (".py", ".txt", ".md", ".rst", ".jsonl")
"""The endings of the files that are read in a directory."""
FIELDS = ("text", "prompt")
PIECE = 1 << 20
"""The most characters of a text: a longer one is cut at the end of a line."""


def files_of(paths: Sequence[Path]) -> list[Path]:
    """Returns the files that are meant; a directory gives those in it, at any depth.

    Raises:
        RequestError: there are none.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise RequestError(f"there is no file {str(path)!r}")
        inside = (
            sorted(one for one in path.rglob("*") if one.suffix in SUFFIXES and one.is_file())
            if path.is_dir()
            else [path]
        )
        if not inside:
            raise RequestError(f"no {', '.join(SUFFIXES)} file in {str(path)!r}")
        found += inside
    return found


def texts_of(file: Path) -> Iterator[tuple[str, int]]:
    """Yields the texts of a file with the bytes of each: a .jsonl file's lines, else pieces of it.

    Raises:
        RequestError: it cannot be read, is not UTF-8, or a line is neither a text nor an object
            with one; the message names file and line.
    """
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            for text in _lines(lines, file) if file.suffix == ".jsonl" else _pieces(lines):
                yield text, len(text.encode())
    except OSError as error:
        raise RequestError(f"cannot read {str(file)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{str(file)!r} is not UTF-8 text: {error.reason}") from error


def _pieces(lines: Iterator[str]) -> Iterator[str]:
    held: list[str] = []
    size = 0
    for line in lines:
        for start in range(0, len(line), PIECE):
            part = line[start : start + PIECE]
            if size + len(part) > PIECE:
                yield "".join(held)
                held, size = [], 0
            held.append(part)
            size += len(part)
    if held:
        yield "".join(held)


def _lines(lines: Iterator[str], file: Path) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise RequestError(f"{file}:{number} is not JSON: {error}") from error
        found = [value] if isinstance(value, str) else []
        if isinstance(value, dict):
            found = [value[field] for field in FIELDS if isinstance(value.get(field), str)]
        if not found:
            raise RequestError(
                f'{file}:{number} must be a text or an object with a text "text" or "prompt"'
            )
        yield found[0]
