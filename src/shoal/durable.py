"""Files that survive a crash of the machine: writes are synced, and damaged ends are cut off."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, BinaryIO


def sync(file: IO[bytes] | IO[str]) -> None:
    """Waits until all data written to a file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_entry(path: Path) -> None:
    """Waits until the name of a new file, or of the file that a link points to, is on the disk."""
    with suppress(OSError):  # some systems open no directories, some file systems sync none
        directory = os.open(path.resolve().parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def cache_folder() -> Path | None:
    """Returns the folder for data that this package can compute again.

    The folder is created if it is missing; None if it cannot be created.
    """
    try:
        place = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal"
        place.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home
        return None
    return place


def write_synced(path: Path, text: str) -> None:
    """Writes a small file so that a crash leaves either the whole old file or the whole new one."""
    beside = path.with_name(f"{path.name}.new")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        sync(file)
    beside.replace(path)
    sync_entry(path)


def mend(file: BinaryIO, check: Callable[[int, bytes], None]) -> int:
    """Reads a file of JSON objects, one a line, and cuts off its damaged end.

    The damaged end is a last line without its line break, or everything from the first NUL byte on:
    file systems may leave NUL bytes where data had not been written when the machine stopped, and
    JSON has none.

    Args:
        file: open for reading and appending.
        check: called with the number, from 1, and the bytes of each whole line; it raises for a
            line that does not belong in the file. It is also called with damaged lines that do not
            begin as an object, which are never cut off.

    Returns:
        The number of bytes that were cut off.
    """
    whole = file.seek(0)
    for number, line in enumerate(file, 1):
        if line.endswith(b"\n") and b"\0" not in line:
            check(number, line)
            whole += len(line)
            continue
        if not _left_by_a_crash(line, whole > 0):
            check(number, line)
        size = file.seek(0, os.SEEK_END)
        file.truncate(whole)
        return size - whole
    return 0


def _left_by_a_crash(line: bytes, later: bool) -> bool:
    """Returns True if a crash can have left this damaged line.

    Args:
        line: the damaged line.
        later: True if whole lines stand before it.
    """
    return line.startswith(b"{") or not line.strip(b"\0\n") or (later and line.startswith(b"\0"))
