"""Which model it was that answered, as a short text that is the same for the same weights wherever they lie."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from shoal.models.sources import directory_of

SUFFIXES = (".bin", ".jinja", ".json", ".model", ".py", ".safetensors", ".txt")
"""Files of a model's directory that decide what it computes and how texts become tokens."""
END_BYTES = 2**16
"""Bytes at both ends of a file that are looked at: reading all weights would take as long as loading them."""


def identity(model: str | Path, revision: str | None = None) -> str:
    """Of a directory a digest of its files' sizes and ends; of a Hub id the id and the revision asked for.

    Two trainings of one model differ in nearly every weight, so also in those at the ends. What a branch of the Hub points to may
    change, which a revision that is a commit does not.
    """
    directory = directory_of(model)
    if directory is None:
        return f"{model}@{revision or 'main'}"
    found = hashlib.sha256()
    for file in sorted(file for file in directory.iterdir() if file.suffix in SUFFIXES and file.is_file()):
        found.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        found.update(_ends(file))
    return f"sha256:{found.hexdigest()[:16]}"


def _ends(file: Path) -> bytes:
    with file.open("rb") as content:
        first = content.read(END_BYTES)
        content.seek(max(len(first), content.seek(0, os.SEEK_END) - END_BYTES))
        return first + content.read()
