"""Sources with one thing wrong, for negative controls."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

PLACE = Path(__file__).parents[1] / "data/wrong_kernels.json"


def wrong_ones(part: str) -> dict[str, tuple[str, ...]]:
    """What is right in the sources of kernels and what is put in its place, by what is wrong then; before both may stand a name."""
    return {name: tuple(texts) for name, texts in json.loads(PLACE.read_text("utf-8"))[part].items()}


def replaced(texts: Mapping[str, str], right: str, wrong: str) -> dict[str, str]:
    """Puts `wrong` in the place of `right`, which must stand in the texts once, however it is spaced and broken into lines."""
    words = re.findall(r"\w+|[^\w\s]", right)
    start = r"[^\S\n]*" if right[:1].isspace() else ""
    end = r"[^\S\n]*\n" if right.endswith("\n") else r"[^\S\n]*" if right[-1:].isspace() else ""
    pattern = re.compile(start + r"\s*".join(map(re.escape, words)) + end)
    places = sum(len(pattern.findall(text)) for text in texts.values())
    assert places == 1, f"the sources say {right!r} {places} times"
    return {name: pattern.sub(lambda _: wrong, text) for name, text in texts.items()}


def mutant(module: ModuleType, right: str, wrong: str, folder: Path) -> ModuleType:
    """Imports the module with `wrong` in place of `right`, which must stand in its source once."""
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    path = folder / "mutant.py"
    path.write_text(replaced({"": source}, right, wrong)[""], encoding="utf-8")
    spec = importlib.util.spec_from_file_location("mutant", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
