"""Fill in the middle that parses: languages by name, and checks of the text around a cursor.

A check tells which texts may stand between the two texts around a cursor; `with_syntax` adds it to
a request. `python` checks Python: `viable` calls its parser, `layout` follows lines and brackets.
`middles` checks any grammar in lark's language (`grammars`, whose terminals are `automata`):
`behind` reads the text behind the cursor, and quotients the text before it and the new text.
`tree_middles` checks languages that tree-sitter reads, by the error nodes of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Any, Literal, NamedTuple

from shoal.constraints.members import ARROW, DOT, SERVERS, Members, server_of
from shoal.constraints.protocol import Cutting
from shoal.constraints.syntax.middles import GrammarMiddle
from shoal.constraints.syntax.python import PythonMiddle
from shoal.constraints.syntax.tree_middles import GRAMMARS, TreeMiddle
from shoal.constraints.token_bytes import token_bytes
from shoal.errors import RequestError
from shoal.types.requests import Request

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


MEMBERS = ("python", *SERVERS)
"""The languages whose members can be asked for."""


def language_of(file_name: str) -> str | None:
    """Returns the language of a file by the end of its name; None if no language is known."""
    ending = PurePath(file_name).suffix.lower()
    return next((name for name, kind in LANGUAGES.items() if ending in kind.endings), None)


def installed_languages() -> list[str]:
    """Returns the names of the languages whose checks have all that they need."""
    return [name for name, kind in LANGUAGES.items() if all(map(find_spec, kind.modules))]


@dataclass(frozen=True)
class Syntax:
    """The texts around the new text, and the checks of the new text.

    Attributes:
        language: one of `LANGUAGES`, a grammar in lark's language, or the path of one, which ends
            in ".lark".
        left: the text before the new one; None = the prompt of the request.
        right: the text behind the new one; None = the suffix of the request. Give both texts if a
            model sees only the nearest parts of a file.
        parses: True if the whole has to parse.
        members: True if only names that jedi knows may follow a dot (`shoal.constraints.members`),
            in Python; in C and C++ names that clangd knows, after an arrow too.
        optional: True if the new text need not parse where the check cannot be made: a package is
            missing, or the texts around it do not fit the language.
    """

    language: str
    left: str | None = None
    right: str | None = None
    parses: bool = True
    members: bool = False
    optional: bool = False


def read_syntax(syntax: str | Syntax) -> Syntax:
    """Returns the syntax with the grammar in the place of its path.

    Raises:
        RequestError: an unknown language, a file that cannot be read, or members of another
            language than Python, C and C++.
    """
    read = syntax if isinstance(syntax, Syntax) else Syntax(syntax)
    language = read.language
    if language.endswith(".lark") and "\n" not in language:
        try:
            read = replace(read, language=Path(language).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"the grammar {language} cannot be read: {error}") from None
    elif language not in LANGUAGES and ":" not in language:
        raise RequestError(
            f"syntax must be one of {', '.join(LANGUAGES)}, a grammar in lark's language or the "
            f"path of a .lark file, got {language!r}"
        )
    if read.members and language not in MEMBERS:
        raise RequestError(
            f"members are those of Python, C or C++: leave them out, or name {', '.join(MEMBERS)} "
            f"as the syntax, got {language!r}"
        )
    return read


def syntax_by_name(file_name: str | None, *, members: bool = False) -> Syntax | None:
    """Returns the optional syntax of a file by the end of its name, which is none of a request.

    Args:
        file_name: the file's name; None = any text may be written.
        members: see `Syntax`; where the file's language has none, it is taken for Python.

    Returns:
        None if nothing is to be checked.
    """
    language = None if file_name is None else language_of(file_name)
    if members and language not in MEMBERS:
        return Syntax("python", parses=False, members=True)
    return None if language is None else Syntax(language, members=members, optional=True)


def _members(language: str, tokenizer: Any, left: str, right: str, healing: int) -> Members:
    if language not in SERVERS:
        return Members(tokenizer, left, right, healing=healing)
    server = server_of(language)
    return Members(tokenizer, left, right, analyser=server, healing=healing, marks=(DOT, ARROW))


def _middle(language: str, tokenizer: Any, left: str, right: str, healing: int) -> Cutting:
    if language in LANGUAGES:
        return LANGUAGES[language].middle(tokenizer, left, right, healing)
    return GrammarMiddle(tokenizer, left, right, language, healing)


def reason_unchecked(syntax: Syntax, tokenizer: Any) -> str | None:
    """Returns the reason why the check of an optional syntax cannot be made; None if it can."""
    try:
        _middle(syntax.language, tokenizer, syntax.left or "", syntax.right or "", 0)
    except RequestError as error:
        return str(error)
    return None


def with_syntax(
    request: Request, tokenizer: Any, syntax: str | Syntax, suffix: str | None = None
) -> Request:
    """Returns the request with the checks of its text, between the prompt and the suffix.

    The checks are that the text can be completed to a text that parses, and that members exist.
    Alignment has to come before: the bytes that the samples of an aligned request write again
    belong to the text before the cursor.

    Raises:
        RequestError: an unknown language; no tokenizer, or a prompt of token ids and no text in
            `Syntax`; no program begins with the text before, or ends with the text behind; jedi,
            lark or tree-sitter is needed and not installed; or members of another language.
    """
    named = read_syntax(syntax)
    left = request.prompt if named.left is None else named.left
    right = (suffix or "") if named.right is None else named.right
    if tokenizer is None:
        raise RequestError("syntax needs a tokenizer, and this model was given none")
    if left is None:
        raise RequestError("syntax needs prompts that are texts, or Syntax(left=...)")
    healing = sum(
        len(own or b"") for own in map(token_bytes(tokenizer).__getitem__, request.removed)
    )
    checks: list[Any] = []
    if named.parses:
        try:
            checks.append(_middle(named.language, tokenizer, left, right, healing))
        except RequestError:
            if not named.optional:
                raise
    if named.members:  # behind the parser: jedi is slower, and sees only texts that parse
        checks.append(_members(named.language, tokenizer, left, right, healing))
    return replace(request, constraints=(*request.constraints, *checks))
