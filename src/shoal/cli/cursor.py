"""A cursor in a file, as editors and compilers write it: LINE:COL, both from 1."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from shoal.cli.files import read_text
from shoal.errors import RequestError

STDIN = "-"


def split_at(file: Path, at: str) -> tuple[str, str]:
    """Returns the texts of a file before and behind a cursor.

    The cursor stands before the character at its place. A column is a count of characters; the
    column after a line's last character is the line's end. Line breaks are those of the file.

    Raises:
        RequestError: the file cannot be read, or has no such place.
    """
    place = re.fullmatch(r"([1-9][0-9]{0,8}):([1-9][0-9]{0,8})", at)
    if place is None:
        raise RequestError(f"--at must be LINE:COL, two numbers from 1 on such as 12:5, got {at!r}")
    if str(file) == STDIN and hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(newline="")
    text = sys.stdin.read() if str(file) == STDIN else read_text(file, "file", newline="")
    whole, (line, column) = text.split("\n"), map(int, place.groups())
    lines = [one.removesuffix("\r") for one in whole]
    if line > len(lines):
        raise RequestError(f"--at {at}: {str(file)!r} has {len(lines)} lines")
    if column > len(lines[line - 1]) + 1:
        raise RequestError(
            f"--at {at}: line {line} has {len(lines[line - 1])} characters, so its last column "
            f"is {len(lines[line - 1]) + 1}"
        )
    cut = sum(len(one) + 1 for one in whole[: line - 1]) + column - 1
    return text[:cut], text[cut:]
