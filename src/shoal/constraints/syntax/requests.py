"""Requests whose new text has to parse between two others, or to name only members that exist."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.constraints.check import Cutting
from shoal.constraints.members import Members
from shoal.constraints.syntax.checked_languages import LANGUAGES, language_of
from shoal.constraints.syntax.middles import GrammarMiddle
from shoal.constraints.token_bytes import token_bytes
from shoal.errors import RequestError
from shoal.types.requests import Request


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
            in Python.
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
            language than Python.
    """
    found = syntax if isinstance(syntax, Syntax) else Syntax(syntax)
    language = found.language
    if language.endswith(".lark") and "\n" not in language:
        try:
            found = replace(found, language=Path(language).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"the grammar {language} cannot be read: {error}") from None
    elif language not in LANGUAGES and ":" not in language:
        raise RequestError(
            f"syntax must be one of {', '.join(LANGUAGES)}, a grammar in lark's language or the "
            f"path of a .lark file, "
            f"got {language!r}"
        )
    if found.members and language != "python":
        raise RequestError(
            "members are those of Python: they do not go with the syntax of another language"
        )
    return found


def syntax_by_name(file_name: str | None, *, members: bool = False) -> Syntax | None:
    """Returns the optional syntax of a file by the end of its name, which is none of a request.

    Args:
        file_name: the file's name; None = any text may be written.
        members: see `Syntax`; only Python has them.

    Returns:
        None if nothing is to be checked.
    """
    language = None if file_name is None else language_of(file_name)
    if members and language != "python":
        return Syntax("python", parses=False, members=True)
    return None if language is None else Syntax(language, members=members, optional=True)


def _middle(language: str, tokenizer: Any, left: str, right: str, healing: int) -> Cutting:
    if language in LANGUAGES:
        return LANGUAGES[language].middle(tokenizer, left, right, healing)
    return GrammarMiddle(tokenizer, left, right, language, healing)


def why_unchecked(syntax: Syntax, tokenizer: Any) -> str | None:
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
    found = read_syntax(syntax)
    left = request.prompt if found.left is None else found.left
    right = (suffix or "") if found.right is None else found.right
    if tokenizer is None:
        raise RequestError("syntax needs a tokenizer, and this model was given none")
    if left is None:
        raise RequestError("syntax needs prompts that are texts, or Syntax(left=...)")
    healing = sum(
        len(own or b"") for own in map(token_bytes(tokenizer).__getitem__, request.removed)
    )
    checks: list[Any] = []
    if found.parses:
        try:
            checks.append(_middle(found.language, tokenizer, left, right, healing))
        except RequestError:
            if not found.optional:
                raise
    if found.members:  # behind the parser: jedi is slower, and sees only texts that parse
        checks.append(Members(tokenizer, left, right, healing=healing))
    return replace(request, constraints=(*request.constraints, *checks))
