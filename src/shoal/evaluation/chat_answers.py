"""The part of a chat model's answer that is run as a completion.

The answer is a block of code that begins with the prompt and ends at its fence. Behind the function
stand helpers, which belong to it, and uses of it: a printed example, a test, a main program. Here
definitions stay that the function needs, and uses go, as with EvalPlus.
"""

from __future__ import annotations

import ast
import re
import symtable
import warnings
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from functools import partial

from shoal.evaluation.endings import COMMENTS, LITERALS, ending, function_end
from shoal.evaluation.problems import Problem

_FENCE = re.compile(r"^```", re.MULTILINE)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
_REST_OF_LINE = re.compile(r"[ \t;]*\n?")
_WORD = re.compile(r"[\w$]+")
_IMPORT = re.compile(r"\s*(#\s*(include|define)|using|use|import|require|typedef)\b")
_DECLARED = re.compile(
    r"\b(?:function|func|def|sub|class|struct|enum|interface|trait|module|type|const|let|var)"
    r"\b\s*(?:\*|self\.)?\s*([\w$]+)"
)
_CALLABLE = re.compile(r"([\w$]+)\s*\(\)[^;(){}=]*\{\}")
_ASSIGNED = re.compile(r"([\w$]+)\s*(?:\[\]\s*)?(?::[^=;\n]+)?=(?![=>~])")
_CONTROL = {"if", "for", "foreach", "while", "until", "switch", "catch", "elsif", "main"}
"""The words before brackets and braces that name no function; nobody calls `main` either."""


def cut_answer(problem: Problem, text: str) -> str:
    """Returns the completion in a chat answer that continues the problem's prompt."""
    code = _FENCE.split(text, maxsplit=1)[0]
    if problem.language == "python":
        return _cut_python(problem, ending("python").cut(problem.prompt, code, False))
    end = function_end(problem.language, problem.prompt, code)
    if end is None:
        return code
    end = next(_REST_OF_LINE.finditer(code, end)).end()
    uncommented = partial(_without_comments, problem.language)
    words = set(_WORD.findall(uncommented(problem.prompt + code[:end]))) - {"main"}
    split = _ruby_pieces if problem.language == "ruby" else _pieces
    pieces = [
        _Piece(piece, _IMPORT.match(bare) is not None, _defined(bare), set(_WORD.findall(bare)))
        for piece in split(problem.language, code[end:])
        for bare in [uncommented(piece)]
    ]
    needed = _closure(words, pieces)
    return code[:end] + "".join(
        piece.text for piece in pieces if piece.stays or piece.binds & needed
    )


@dataclass(frozen=True)
class _Piece:
    """A statement at the top of a program.

    Attributes:
        text: its text; for Python, whose lines are cut out, "".
        stays: it is a definition or import that harms nobody.
        binds: the names that it gives a value.
        mentions: the names that it reads.
    """

    text: str
    stays: bool
    binds: Set[str]
    mentions: Set[str]


def _closure(names: Iterable[str], pieces: Iterable[_Piece]) -> set[str]:
    """Returns names, and all names that the pieces that bind them read or bind."""
    found, left = set(names), list(pieces)
    while taken := [piece for piece in left if piece.binds & found]:
        left = [piece for piece in left if not piece.binds & found]
        for piece in taken:
            found |= piece.binds | piece.mentions
    return found


# ── Python ──────────────────────────────────────────────────────────────────────────────────────


def _cut_python(problem: Problem, text: str) -> str:
    """Leaves out the lines of statements that only use the entry point, or that it does not need.

    A statement that is no definition stays if it binds or changes a name that the entry point
    needs.
    """
    source, first = problem.prompt + text, problem.prompt.count("\n") + 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            body = ast.parse(source).body
            pieces = [_python_piece(statement) for statement in body]
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return text
    needed = _closure([problem.entry_point], pieces)
    lines: dict[int, bool] = {}
    for statement, piece in zip(body, pieces, strict=True):
        stays = (
            piece.stays
            or statement.lineno <= first
            or bool(piece.binds & needed)
            or (
                bool(piece.mentions & needed)
                and problem.entry_point not in _closure(piece.mentions, pieces)
            )
        )
        for number in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1):
            lines[number] = lines.get(number, False) or stays
    return "\n".join(
        line for number, line in enumerate(text.split("\n"), first) if lines.get(number, True)
    )


def _python_piece(statement: ast.stmt) -> _Piece:
    table = symtable.symtable(ast.unparse(statement), "answer.py", "exec")
    binds = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned()}
    mentions = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced()}
    inner = [symbol for scope in _scopes(table) for symbol in scope.get_symbols()]
    return _Piece(
        "",
        isinstance(statement, _DEFINITIONS),
        binds | {each.get_name() for each in inner if each.is_declared_global()},
        mentions | {each.get_name() for each in inner if each.is_global()},
    )


def _scopes(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for child in table.get_children():
        yield child
        yield from _scopes(child)


# ── Languages with braces, and Ruby ─────────────────────────────────────────────────────────────


def _without_comments(language: str, code: str) -> str:
    comments_or_texts = re.compile(
        f"({LITERALS})|{COMMENTS.get(language, '(?!)')}", re.DOTALL | re.MULTILINE
    )
    return comments_or_texts.sub(lambda match: match[1] or " ", code)


def _defined(code: str) -> set[str]:
    """Returns the names that a piece of code defines, by the looks of its outermost level."""
    code, inner = re.sub(LITERALS, '""', code, flags=re.DOTALL), 1
    while inner:  # nested brackets become empty ones, from the inside
        code, inner = re.subn(r"([(\[{])[^()\[\]{}]+([)\]}])", r"\1\2", code)
    found = (*_DECLARED.findall(code), *_CALLABLE.findall(code), *_ASSIGNED.findall(code))
    return {*found} - _CONTROL


def _pieces(language: str, code: str) -> Iterator[str]:
    """Yields the definitions and statements of a code's outermost level.

    Each ends at an empty line, or at the end of a line with a semicolon or a brace, or of one of
    C's preprocessor. One that the code does not finish is left out.
    """
    symbols = re.compile(
        rf"{COMMENTS.get(language, '(?!)')}|{LITERALS}|[()\[\]{{}}\n]", re.DOTALL | re.MULTILINE
    )
    depth = begin = 0
    for match in symbols.finditer(code):
        depth += 1 if match[0] in "([{" else -1 if match[0] in ")]}" else 0
        if depth < 0:
            return
        if match[0] == "\n" and not depth:
            piece = code[begin : match.end()]
            bare = _without_comments(language, piece).rstrip(" \t\n")
            whole = bare.endswith((";", "}")) or bare.lstrip().startswith("#")
            if whole or code[match.end() :].lstrip(" \t")[:1] == "\n":
                yield piece
                begin = match.end()
    if not depth:
        yield code[begin:]


def _ruby_pieces(_language: str, code: str) -> Iterator[str]:
    """Yields pieces that begin with a line without indent, and end with their last line."""
    yield from re.split(r"(?<=\n)(?=[^\s)\]}])(?!end\b)", code)
