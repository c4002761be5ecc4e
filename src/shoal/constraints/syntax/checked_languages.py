"""The languages of middles that parse, by name, and the checks of each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from pathlib import PurePath
from typing import Any, Literal, NamedTuple

from shoal.constraints.check import Cutting
from shoal.constraints.syntax.error_nodes import GRAMMARS
from shoal.constraints.syntax.middles import GrammarMiddle
from shoal.constraints.syntax.python import PythonMiddle
from shoal.constraints.syntax.tree_middles import TreeMiddle

Language = Literal[
    "python", "json", "javascript", "typescript", "tsx", "java", "go", "c", "cpp", "rust"
]
"""The names in `LANGUAGES`."""
Maker = Callable[[Any, str, str, int], Cutting]
"""A function: the tokenizer, the text before the middle, the text behind it, the bytes that are
written again -> the check. It raises RequestError where the check cannot be made."""


class LanguageKind(NamedTuple):
    """A language.

    Attributes:
        middle: makes the check of a middle.
        endings: the ends of its files' names.
        modules: the modules that the check needs beside shoal's own dependencies.
    """

    middle: Maker
    endings: tuple[str, ...]
    modules: tuple[str, ...] = ()


def _json(tokenizer: Any, left: str, right: str, healing: int) -> Cutting:
    grammar = files("shoal.constraints.syntax").joinpath("json.lark").read_text(encoding="utf-8")
    return GrammarMiddle(tokenizer, left, right, grammar, healing, name="json")


def _by_tree_sitter(name: str, endings: str) -> LanguageKind:
    modules = ("tree_sitter", GRAMMARS[name][0])
    return LanguageKind(partial(TreeMiddle, language=name), tuple(endings.split()), modules)


LANGUAGES: dict[str, LanguageKind] = {
    "python": LanguageKind(PythonMiddle, (".py", ".pyi", ".pyw")),
    "json": LanguageKind(_json, (".json",), ("lark",)),
    "javascript": _by_tree_sitter("javascript", ".js .jsx .mjs .cjs"),
    "typescript": _by_tree_sitter("typescript", ".ts .mts .cts"),
    "tsx": _by_tree_sitter("tsx", ".tsx"),
    "java": _by_tree_sitter("java", ".java"),
    "go": _by_tree_sitter("go", ".go"),
    "c": _by_tree_sitter("c", ".c .h"),
    "cpp": _by_tree_sitter("cpp", ".cpp .cc .cxx .hpp .hh .hxx"),
    "rust": _by_tree_sitter("rust", ".rs"),
}


def language_of(file_name: str) -> str | None:
    """Returns the language of a file by the end of its name; None if no language is known."""
    ending = PurePath(file_name).suffix.lower()
    return next((name for name, kind in LANGUAGES.items() if ending in kind.endings), None)


def installed_languages() -> list[str]:
    """Returns the names of the languages whose checks have what they need."""
    return [name for name, kind in LANGUAGES.items() if all(map(find_spec, kind.modules))]
