"""Modules of Python with one thing wrong, for negative controls."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


def mutant(module: ModuleType, right: str, wrong: str, folder: Path) -> ModuleType:
    """The module with `wrong` in place of `right`, which must stand in its source once."""
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    assert source.count(right) == 1, f"the source says {right!r} {source.count(right)} times"
    path = folder / "mutant.py"
    path.write_text(source.replace(right, wrong), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("mutant", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
