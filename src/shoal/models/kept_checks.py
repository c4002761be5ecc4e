"""The results of the checks of a load, kept on disk for the next load.

The checks compare a model's passes with plain forwards (`shoal.models.selfcheck`). The same files,
code, settings and processor give the same results, so a second load reads them. A load of a model
of 135 million parameters spends a third of its time on the checks.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from shoal.durable import cache_folder
from shoal.native.build import instructions, missing

LEAST_BYTES = 8 * 2**20
"""The size of the files from which on results are kept; smaller models are checked in no time."""
MOST_FILES = 256
"""The most files of results on the disk; the oldest go."""
SUFFIXES = (".safetensors", ".bin", ".gguf", ".json", ".py")
"""The suffixes of the files of a directory that decide what a model computes."""


class KeptChecks:
    """The kept results of one model's checks.

    Args:
        place: the file of the results; None keeps nothing.
    """

    def __init__(self, place: Path | None = None) -> None:
        self._place = place

    def read(self, check: str) -> dict[str, Any] | None:
        """Returns the result of a check, or None if it is not kept."""
        result = self._results().get(check)
        return result if isinstance(result, dict) else None

    def write(self, check: str, result: dict[str, Any]) -> None:
        """Keeps the result of a check; a disk that is full keeps nothing."""
        if self._place is None:
            return
        beside = self._place.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            beside.write_text(json.dumps({**self._results(), check: result}), encoding="utf-8")
            beside.replace(self._place)
            _remove_oldest(self._place.parent)

    def _results(self) -> dict[str, Any]:
        """Returns all results, none for a file that is damaged or of another user."""
        if self._place is None:
            return {}
        with suppress(OSError, ValueError):
            if self._place.stat().st_uid in (os.geteuid(), 0):
                results = json.loads(self._place.read_text(encoding="utf-8"))
                return results if isinstance(results, dict) else {}
        return {}


def kept_checks(source: str | Path, **settings: object) -> KeptChecks:
    """Returns the kept results of a model that is loaded from files.

    Args:
        source: a directory or a file. Nothing is kept of others, nor of small models.
        settings: the settings that the model is loaded by.
    """
    path, folder = Path(source).expanduser(), cache_folder()
    files = [path] if path.is_file() else list(_files_of(path))
    stats = [(file.resolve(), file.stat()) for file in files]
    if folder is None or sum(stat.st_size for _, stat in stats) < LEAST_BYTES:
        return KeptChecks()
    facts = [
        *(f"{file} {stat.st_size} {stat.st_mtime_ns}" for file, stat in stats),
        *(f"{name}={setting}" for name, setting in sorted(settings.items())),
        *sorted(instructions()),
        platform.machine(),
        os.environ.get("SHOAL_MARCH", ""),
        missing(),
        _code(),
    ]
    digest = hashlib.blake2b("\n".join(facts).encode(), digest_size=12).hexdigest()
    return KeptChecks(folder / f"checks-{digest}.json")


def _files_of(directory: Path) -> Iterable[Path]:
    if directory.is_dir():
        yield from (file for file in sorted(directory.iterdir()) if file.suffix in SUFFIXES)


@cache
def _code() -> str:
    """Returns a digest of the code that computes passes."""
    digest = hashlib.blake2b(digest_size=12)
    for package in ("torch", "transformers", "numpy"):
        digest.update(metadata.version(package).encode())
    package_files = Path(str(resources.files("shoal")))
    for room in ("models", "native"):
        for file in sorted((package_files / room).rglob("*.*")):
            if file.suffix in (".py", ".c", ".h"):
                digest.update(file.read_bytes())
    return digest.hexdigest()


def _remove_oldest(folder: Path) -> None:
    files = sorted(folder.glob("checks-*.json"), key=lambda file: file.stat().st_mtime)
    for file in files[:-MOST_FILES]:
        file.unlink(missing_ok=True)
