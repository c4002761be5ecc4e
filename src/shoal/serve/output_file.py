"""A batch's output: exactly one answer per line, however often the work was interrupted, and never one to another question."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from shoal.durable import mend, sync, sync_entry
from shoal.errors import RequestError
from shoal.serve.api_formats import Json
from shoal.serve.batch_lines import BatchLine, has_failed, id_of

SYNC_LINES, SYNC_SECONDS = 64, 1.0
"""So many answers may be in the system's memory only, and for so long while further ones come."""


class OutputFile:
    """The output: an append-only JSON Lines file of answers, open to one process at a time.

    Each answer has a field "shoal": the digest of its line, and the settings under which it was made. A damaged end, as a kill
    or a crash of the machine leaves it, is cut off, and its lines are answered again. A link is written through: it stays one.

    Args:
        asked: the lines. settings: what changes tokens, as far as it is known before a model is loaded.
        clock: seconds, for when to wait for the disk.

    Attributes:
        ids: of the lines that have an answer. failed: of those whose answer is an error. cut: bytes of the damaged end.

    Raises:
        RequestError: for a file that cannot be used, that another process is writing, that holds something else, or answers to
            other lines or of other settings.
    """

    def __init__(
        self,
        path: Path,
        asked: Sequence[BatchLine],
        settings: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._asked, self._settings = path, {line.id: line for line in asked}, dict(settings)
        self._clock, self._synced_at, self._unsynced = clock, clock(), 0
        self.ids: set[str | int] = set()
        self.failed: set[str | int] = set()
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise RequestError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
        try:
            _lock(self._file.fileno(), path)
            self.cut = mend(self._file, self._keep)
            self._sync()
            sync_entry(path)
        except BaseException:
            self._file.close()
            raise

    def _keep(self, number: int, text: bytes) -> None:
        """Takes in an answer that is there already. Raises RequestError unless this run could have made it."""
        where = f"{self._path}:{number}"
        try:
            entry = json.loads(text)
        except (ValueError, RecursionError):
            entry = None
        named = id_of(entry)
        if named is None or not isinstance(made := entry.get("shoal"), dict):
            raise RequestError(
                f"{where} is no answer of this version of shoal batch; give another output file, or remove the line"
            )
        line = self._asked.get(named)
        if line is None or made.get("line") != line.digest:
            what = (
                "which the input does not have"
                if line is None
                else f"but line {line.number} of the input is another one now"
            )
            raise RequestError(
                f"{where} answers the line {named!r}, {what}: give another output file, or the input that it belongs to"
            )
        if named in self.ids:
            raise RequestError(f"{where} is the second answer to the line {named!r}: remove one of them")
        self.require({name: value for name, value in made.items() if name not in ("line", "notes")}, where)
        self._count(named, entry)

    def require(self, settings: Mapping[str, Any], where: str = "") -> None:
        """Holds settings against those of all answers so far; what is not known yet is known from then on.

        Args:
            where: the answer that has them; "" = this run.

        Raises:
            RequestError: they differ; it names the first that does.
        """
        for name, value in settings.items():
            known = self._settings.setdefault(name, value)
            if known != value:
                before, now = (value, known) if where else (known, value)
                raise RequestError(
                    f"{where or self._path} was answered with {name} = {before!r}, this run has {now!r}: "
                    "give another output file, or the same settings to go on"
                )

    def write(self, entry: Json) -> bool:
        """Adds an answer, if its line has none yet; says whether. Its "shoal" may hold settings known only now, and "notes".

        Raises:
            RequestError: it was made under other settings than those before.
        """
        named = id_of(entry)
        if named is None or named in self.ids:
            return False
        made = dict(entry.get("shoal", {}))
        notes = {"notes": made.pop("notes")} if "notes" in made else {}
        self.require(made)
        stamp = {"line": self._asked[named].digest, **self._settings, **notes}
        self._file.write(json.dumps({**entry, "shoal": stamp}, allow_nan=False).encode() + b"\n")
        self._file.flush()  # a kill of this process loses nothing now
        self._count(named, entry)
        self._unsynced += 1
        if self._unsynced >= SYNC_LINES or self._clock() - self._synced_at >= SYNC_SECONDS:
            self._sync()
        return True

    def _count(self, named: str | int, entry: Json) -> None:
        self.ids.add(named)
        if has_failed(entry):
            self.failed.add(named)

    def _sync(self) -> None:
        """Now a crash of the machine loses nothing either."""
        sync(self._file)
        self._synced_at, self._unsynced = self._clock(), 0

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, _type: type[BaseException] | None, _value: BaseException | None, _tb: TracebackType | None) -> None:
        try:
            self._sync()
        finally:
            self._file.close()


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
