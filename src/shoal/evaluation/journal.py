"""A journal of results that survive a kill.

It has one JSON line per problem, on the disk before the next problem begins.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from shoal.durable import mend, sync, sync_entry, write_synced
from shoal.errors import RequestError

SETTINGS = "settings.json"
Value = TypeVar("Value")
ShowProgress = Callable[[str, Iterable[Value], int], Iterable[Value]]
"""A function that passes results on and shows progress.

It takes (task, results as they come, their number), and returns the same results.
"""


class Journal:
    """An append-only JSON Lines file of objects with a "task_id".

    Opening it repairs a file after a kill or a crash: a damaged end is cut off, and its problems
    are done again.

    Raises:
        RequestError: for a line in the middle that is no such object, with its number; for a file
            that cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, dict[str, Any]] = {}
        try:
            with path.open("a+b") as file:
                mend(file, self._keep)
                sync(file)
            sync_entry(path)
        except OSError as error:
            raise RequestError(f"cannot use {str(path)!r}: {error.strerror}") from error

    def _keep(self, number: int, line: bytes) -> None:
        entry = _entry(line, f"{self.path}:{number}")
        self.entries[entry["task_id"]] = entry

    def append(self, entry: dict[str, Any]) -> None:
        """Writes one problem's results and waits until they are on the disk."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, allow_nan=False) + "\n")
            sync(file)
        self.entries[entry["task_id"]] = entry


def _entry(line: bytes, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise RequestError(
            f"{where} is not JSON ({error}): the file was changed by something else; remove the "
            f"line"
        ) from error
    if not isinstance(entry, dict) or not isinstance(entry.get("task_id"), str):
        raise RequestError(f'{where} must be an object with a text "task_id"')
    return entry


def open_directory(directory: Path, settings: dict[str, Any]) -> None:
    """Makes the directory if necessary, and writes the settings of a new run (atomically).

    It compares the settings with the directory's old ones if there are any.

    Raises:
        RequestError: it cannot be used, or holds results of other settings; names the first that
            differs.
    """
    path, settings = directory / SETTINGS, json.loads(json.dumps(settings))
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"cannot use {str(directory)!r}: {error.strerror}") from error
    if not path.exists():
        write_synced(path, json.dumps(settings, indent=1) + "\n")
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RequestError(f"{str(path)!r} is not JSON: {error}") from error
    for name in [*settings, *(set(before) - set(settings))]:
        if before.get(name) != settings.get(name):
            raise RequestError(
                f"{str(path.parent)!r} holds results with {name} = {before.get(name)!r}, asked "
                f"for is {settings.get(name)!r}: "
                "give another --output, or the same settings to go on"
            )
