"""The output of a batch: exactly one answer per line, also after interruptions.

A line that has changed has no answer. Errors of earlier runs are dropped, whatever the settings of
these runs were: their lines are tried again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.durable import mend, sync, sync_entry
from shoal.errors import RequestError
from shoal.serve.api_errors import Json
from shoal.serve.batch_lines import BatchLine, has_failed, id_of

SYNC_LINES, SYNC_SECONDS = 64, 1.0
"""The number of answers, and the seconds after the last sync, after which answers are synced to the
disk."""


class OutputFile:
    """An append-only JSON Lines file of answers, locked by one process at a time.

    The field "shoal" of each answer has the digest of its line and the settings of its run. A
    damaged end, as a kill or a crash of the machine leaves it, is truncated, and its lines are
    answered again. If the path is a symbolic link, its target is written.

    Args:
        lines: the lines of the input.
        settings: the settings that change tokens and are known before a model is loaded.
        clock: in seconds, for the syncs.

    Attributes:
        ids: the ids of the lines that have an answer.
        failed: the ids of the lines to which this run's answer is an error.
        retried: the number of errors that were dropped.
        cut: the number of bytes of the truncated end.

    Raises:
        RequestError: the file cannot be written, another process writes it, or it has something
            other than answers to these lines under these settings.
    """

    def __init__(
        self,
        path: Path,
        lines: Sequence[BatchLine],
        settings: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._lines = {line.id: line for line in lines}
        self._settings = dict(settings)
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
            self.retried = len(self.failed)
            if self.failed:
                self._drop_failed()
            self._sync()
            sync_entry(path)
        except BaseException:
            self._file.close()
            raise

    def _keep(self, number: int, text: bytes) -> None:
        """Registers an earlier run's answer; raises RequestError if this run would not write it."""
        where = f"{self._path}:{number}"
        try:
            entry = json.loads(text)
        except (ValueError, RecursionError):
            entry = None
        named = id_of(entry)
        if named is None or not isinstance(made := entry.get("shoal"), dict):
            raise RequestError(
                f"{where} is no answer of this version of shoal batch; give another output "
                f"file, or remove the line"
            )
        line = self._lines.get(named)
        if line is None or (made.get("line") != line.digest and not has_failed(entry)):
            mismatch = (
                "which the input does not have"
                if line is None
                else f"but line {line.number} of the input is another one now"
            )
            raise RequestError(
                f"{where} answers the line {named!r}, {mismatch}: give another output file, or the "
                f"input that it belongs to"
            )
        if named in self.ids:
            raise RequestError(
                f"{where} is the second answer to the line {named!r}: remove one of them"
            )
        if not has_failed(entry):
            settings = {name: made[name] for name in made if name not in ("line", "notes")}
            self.require(settings, where)
        self._count(named, entry)

    def _drop_failed(self) -> None:
        """Replaces the file by one without errors; a crash leaves one of the two, whole."""
        place = self._path.resolve()
        beside = place.with_name(f"{place.name}.new")
        new = beside.open("w+b")
        try:
            _lock(new.fileno(), self._path)
            self._file.seek(0)
            new.writelines(line for line in self._file if not has_failed(json.loads(line)))
            sync(new)
            beside.replace(place)
        except BaseException:
            new.close()
            beside.unlink(missing_ok=True)
            raise
        self._file.close()
        self._file = new
        self.ids -= self.failed
        self.failed.clear()

    def require(self, settings: Mapping[str, Any], where: str = "") -> None:
        """Compares settings with the settings of all answers so far, and stores new ones.

        Args:
            where: file and line of the answer that has them; "" = this run.

        Raises:
            RequestError: they differ; the message names the first difference.
        """
        for name, value in settings.items():
            known = self._settings.setdefault(name, value)
            if known != value:
                before, now = (value, known) if where else (known, value)
                raise RequestError(
                    f"{where or self._path} was answered with {name} = {before!r}, this run has "
                    f"{now!r}: give another output file, or the same settings to go on"
                )

    def write(self, entry: Json) -> bool:
        """Appends an answer, unless its line has one; returns True if it was appended.

        Args:
            entry: the answer; its field "shoal" may have "notes", and settings that are known only
                after loading.

        Raises:
            RequestError: its settings differ from the earlier ones.
        """
        named = id_of(entry)
        if named is None or named in self.ids:
            return False
        made = dict(entry.get("shoal", {}))
        notes = {"notes": made.pop("notes")} if "notes" in made else {}
        self.require(made)
        stamp = {"line": self._lines[named].digest, **self._settings, **notes}
        self._file.write(json.dumps({**entry, "shoal": stamp}, allow_nan=False).encode() + b"\n")
        self._file.flush()  # now a kill of this process loses nothing
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
        """Writes the answers to the disk: now a crash of the machine loses nothing."""
        sync(self._file)
        self._synced_at, self._unsynced = self._clock(), 0

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._sync()
        finally:
            self._file.close()


def _lock(descriptor: int, path: Path) -> None:
    """Locks the file until it is closed, on systems that have such locks."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RequestError(f"another process is writing {str(path)!r}") from error
