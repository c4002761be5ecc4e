"""Files of a batch: a request per line in, exactly one answer per request out, however often the work was interrupted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeGuard

from shoal.errors import RequestError

Json = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """One line of the input.

    Attributes:
        number: from 1. text: as it was read.
        id: what its "id" says, or "line-NUMBER" where it says nothing that names it: a text or an integer.
        seeded: whether it asks for the same tokens again.
    """

    number: int
    text: str
    id: str | int
    seeded: bool = False


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of an input, but for empty ones. What is wrong with one of them is for its answer to say.

    Raises:
        RequestError: for a file that cannot be read, and for an id that is there twice.
    """
    seen: dict[str | int, int] = {}
    try:
        with path.open(encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            for number, text in enumerate(file, 1):
                if not text.strip():
                    continue
                line = _line(number, text)
                if line.id in seen:
                    raise RequestError(f"{path}: lines {seen[line.id]} and {number} have the same id {line.id!r}")
                seen[line.id] = number
                yield line
    except OSError as error:
        raise RequestError(f"cannot read {str(path)!r}: {error.strerror}") from error


def _line(number: int, text: str) -> Line:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = None
    fields = body if isinstance(body, dict) else {}
    named = fields.get("id")
    return Line(number, text, named if is_id(named) else f"line-{number}", fields.get("seed") is not None)


def is_id(value: object) -> TypeGuard[str | int]:
    """Whether it can name a line."""
    return isinstance(value, (str, int)) and not isinstance(value, bool)


class Ledger:
    """The output: an append-only JSON Lines file of answers, open to one process at a time.

    A last line that a kill has torn is cut off, and its request answered again.

    Attributes:
        ids: of the answers in it.

    Raises:
        RequestError: for a file that cannot be used, that another process is writing, or that holds something else.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise RequestError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
        try:
            _lock(self._file.fileno(), path)
            self.ids = self._read(path)
        except BaseException:
            self._file.close()
            raise

    def _read(self, path: Path) -> set[str | int]:
        ids: set[str | int] = set()
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            if line.startswith(b"{") and not line.endswith(b"\n"):
                self._file.truncate(self._file.tell() - len(line))
            else:
                ids.add(_id_of(line, f"{path}:{number}"))
        return ids

    def write(self, entry: Json) -> bool:
        """Adds an answer, if its id has none yet; says whether."""
        if entry["id"] in self.ids:
            return False
        self._file.write(json.dumps(entry, allow_nan=False).encode() + b"\n")
        self._file.flush()  # a kill of this process loses nothing now
        self.ids.add(entry["id"])
        return True

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, _type: type[BaseException] | None, _value: BaseException | None, _tb: TracebackType | None) -> None:
        self._file.close()


def _id_of(line: bytes, where: str) -> str | int:
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    named = entry.get("id") if isinstance(entry, dict) and entry.keys() & {"choices", "error"} else None
    if not is_id(named):
        raise RequestError(
            f'{where} is no answer, which has an "id", and "choices" or an "error"; give another output file, or remove the line'
        )
    return named


def _lock(descriptor: int, path: Path) -> None:
    """Until the file is closed; where the system has no such locks, the user must see to it."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RequestError(f"another process is writing {str(path)!r}") from error
