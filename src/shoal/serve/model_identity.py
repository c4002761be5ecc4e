"""The public names of a model whose path must not be shown.

A model has a name, and a short identifier that depends on its files.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from shoal.models.sources import GGUF, directory_of, name_of

SUFFIXES = (".bin", ".jinja", ".json", ".model", ".py", ".safetensors", ".txt")
"""The files of a model's directory that determine its logits and its tokenization."""
END_BYTES = 2**16
"""The bytes read at both ends of a file: reading all weights would take as long as loading them."""


def identity(model: str | Path, revision: str | None = None) -> str:
    """Returns an identifier of a model.

    For a directory, or a GGUF file, it is a digest of the files' sizes and ends; for a Hub id it is
    the id and the revision. Two training runs of one model differ in nearly all weights, so also in
    the weights at the ends of the files. A branch of the Hub may move to another commit; a revision
    that is a commit does not.
    """
    directory = directory_of(model)
    file = Path(model) if directory is None and Path(model).is_file() else None
    if file is not None:
        digest = hashlib.sha256(f"{file.stat().st_size} ".encode() + _ends(file))
        return f"sha256:{digest.hexdigest()[:16]}"
    if directory is None:
        return f"{model}@{revision or 'main'}"
    found = hashlib.sha256()
    for file in sorted(
        file for file in directory.iterdir() if file.suffix in SUFFIXES and file.is_file()
    ):
        found.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        found.update(_ends(file))
    return f"sha256:{found.hexdigest()[:16]}"


def people_call(model: str) -> str:
    """Returns the name of a model or drafter without any path.

    A directory has its last part, the bundled pair "bundled target" and "bundled drafter". A
    drafter comes without its options, which may name files; a Hub id is unchanged.
    """
    from shoal.models.loading import bundled

    for part in ("target", "drafter"):
        if Path(model) == bundled(part):
            return f"bundled {part}"
    if Path(model).is_dir() or model.endswith(GGUF):
        return name_of(model)
    return "+".join(part.partition(":")[0] for part in model.split("+"))


def _ends(file: Path) -> bytes:
    with file.open("rb") as content:
        first = content.read(END_BYTES)
        content.seek(max(len(first), content.seek(0, os.SEEK_END) - END_BYTES))
        return first + content.read()
