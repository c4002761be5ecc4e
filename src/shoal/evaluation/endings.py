"""The end of a completion, and the part of a chat model's answer that is run as one.

A model continues behind the function that it was asked for. Stop strings end most rows early; the
cut is made on the text: in Python behind the last top-level block that parses, in languages with
braces behind the function's closing brace. A set that brings stop strings of its own, as MultiPL-E
does, is cut at these and nowhere else.

Of a chat model's answer, the block of code counts that begins with the prompt and ends at its
fence. Behind the function stand helpers, which belong to it, and uses of it: a printed example, a
test, a main program. Here definitions stay that the function needs, and uses go, as with EvalPlus.
"""

from __future__ import annotations

import ast
import re
import symtable
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cache, partial
from itertools import compress

from shoal.evaluation.problems import Problem

FENCE = "\n```"
"""The text that ends the code block of a chat model's answer."""


@dataclass(frozen=True)
class Ending:
    """The ending of a language.

    Attributes:
        stops: strings that end a row; the text is cut before them.
        cut: (prompt, text, stopped) -> the completion; `stopped` tells that a stop string ended the
            row.
    """

    stops: tuple[str, ...]
    cut: Callable[[str, str, bool], str]


def ending(language: str) -> Ending:
    """Returns the ending of a language; in an unknown one only EOS and limits end a text."""
    return _ENDINGS.get(language, Ending((), _whole))


def _whole(_prompt: str, text: str, _stopped: bool) -> str:
    return text


def _python(prompt: str, text: str, _stopped: bool) -> str:
    """Returns the longest text before a line without indent that parses, else the first block."""
    ends = [match.start() + 1 for match in re.finditer(r"\n(?=[^\s)\]}])", text)] + [len(text)]
    whole = (end for end in reversed(ends) if _parses(prompt + text[:end]))
    return text[: next(whole, ends[0])]


def _parses(source: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the parsed code: invalid escapes and the like
        try:
            ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True


LITERALS = r""""(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`"""
C_COMMENTS, HASH_COMMENTS = r"//[^\n]*|/\*.*?\*/", r"(?:^|(?<=\s))\#[^\n]*"
_RAW = r"""\br"[^"]*"|\br\#".*?"\#|\br\#\#".*?"\#\#"""
"""Rust's texts in which a backslash stands for itself."""


def before_stop(text: str, stops: Sequence[str]) -> str:
    """Returns the text before the first of the stop strings; all of it if there is none."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)]


def _braces(prompt: str, text: str, stopped: bool, *, language: str) -> str:
    """Returns the text up to the brace that closes the function that the prompt begins.

    A brace that a stop string removed is put back.
    """
    end, missing = _closing_brace(language, prompt, text)
    if end is not None:
        return text[:end]
    return text + _CLOSINGS.get(language, CLOSING) if stopped and missing == 1 else text


def _closing_brace(language: str, prompt: str, text: str) -> tuple[int | None, int]:
    """Returns the end of the brace that closes the block of the prompt, and the braces missing.

    That is all of it, or the function alone where the tests stand in the class around it.
    """
    symbols = _symbols(language)
    depth = sum(_depth_change(match[0]) for match in symbols.finditer(prompt))
    if language in _CLOSINGS:
        depth = min(depth, 1)
    for match in symbols.finditer(text):
        depth += _depth_change(match[0])
        if depth == 0 and match[0] == "}":
            return match.end(), depth
    return None, depth


def function_end(language: str, prompt: str, text: str) -> int | None:
    """Returns the place in a text behind the function that the prompt begins; None without one."""
    if language == "ruby":
        match = re.search(r"^end\b", text, re.MULTILINE)
        return match.end() if match else None
    return _closing_brace(language, prompt, text)[0] if language in COMMENTS else None


def block_end(language: str, text: str, start: int) -> int:
    """Returns the place of the brace that closes the block open at `start`; -1 without one."""
    depth = 1
    for match in _symbols(language).finditer(text, start):
        depth += _depth_change(match[0])
        if depth == 0:
            return match.start()
    return -1


@cache
def _symbols(language: str) -> re.Pattern[str]:
    return re.compile(f"{COMMENTS[language]}|{LITERALS}|[{{}}]", re.DOTALL | re.MULTILINE)


def _depth_change(symbol: str) -> int:
    return {"{": 1, "}": -1}.get(symbol, 0)


def _ruby(_prompt: str, text: str, stopped: bool) -> str:
    """Adds the `end` in the first column, which is the stop string, to the function."""
    return text + RUBY_CLOSING if stopped else text


CLOSING, RUBY_CLOSING = "\n}", "\nend"
_CLOSINGS = {"scala": "\n    }", "csharp": "\n        }"}
"""The closing braces of functions in a class that the tests continue, as MBXP indents them."""
_WITHIN_A_CLASS = ("java", *_CLOSINGS)
COMMENTS = {
    **dict.fromkeys(("javascript", "typescript", "java", "cpp", "go", "go_test"), C_COMMENTS),
    **dict.fromkeys(("kotlin", "scala", "csharp", "swift", "d"), C_COMMENTS),
    "rust": rf"{C_COMMENTS}|{_RAW}|'[A-Za-z_]\w*(?!')",  # the last one is a lifetime
    "perl": HASH_COMMENTS,
    "php": f"{C_COMMENTS}|{HASH_COMMENTS}",
}
"""The comments of the languages with braces, as regular expressions."""
_ENDINGS = {
    "python": Ending(
        ("\ndef ", "\nclass ", "\n#", "\n@", "\nif ", "\nprint(", "\nassert "), _python
    ),
    **{
        name: Ending((_CLOSINGS.get(name, CLOSING),), partial(_braces, language=name))
        for name in COMMENTS
    },
    "ruby": Ending((RUBY_CLOSING,), _ruby),
}


_FENCE = re.compile(r"^```", re.MULTILINE)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
_LIMIT = "setrecursionlimit"  # a deep recursion needs it, wherever it is called
_BY_TEXT = {"eval", "exec", "globals", "locals", "vars"}  # these reach names in texts
_ENDS_OR_READS = {"exit", "_exit", "quit", "abort", "input", "stdin", "argv"}
_REST_OF_LINE = re.compile(r"[ \t;]*\n?")
_DIRECTIVE = re.compile(r"\s*#(?!!?\[)")  # no attribute of Rust or PHP
_WORD = re.compile(r"[\w$]+")
_IMPORT = re.compile(r"\s*(#\s*(include|define)|using|use|import|require|typedef)\b")
_DECLARED = re.compile(
    r"\b(?:function|func|fn|def|sub|class|struct|enum|interface|trait|module|type|const|let|var)"
    r"\b\s*(?:\*|self\.)?\s*([\w$]+)"
)
_IMPL = re.compile(r"\bimpl\b([^{;]*)\{")  # of Rust, for the type or trait that it names
_CALLABLE = re.compile(r"([\w$]+)\s*\(\)[^;(){}=]*\{\}")
_ASSIGNED = re.compile(r"([\w$]+)\s*(?:\[\]\s*)?(?::[^=;\n]+)?=(?![=>~])")
_CONTROL = {"if", "for", "foreach", "while", "until", "switch", "catch", "elsif", "main"}
"""The words before brackets and braces that name no function; nobody calls `main` either."""


def cut_answer(problem: Problem, text: str) -> str:
    """Returns the completion in a chat answer that continues the problem's prompt.

    A problem's own stop strings are those of a function that is continued alone: they would cut
    the helpers behind it. They decide where the function's end is not seen, and where the tests
    continue the class around it.
    """
    code = _FENCE.split(text, maxsplit=1)[0]
    short = before_stop(code, problem.stops)
    if problem.language == "python" and not problem.stops:
        return _cut_python(problem, ending("python").cut(problem.prompt, code, False))
    end = function_end(problem.language, problem.prompt, code)
    if end is None or (problem.stops and problem.language in _WITHIN_A_CLASS):
        return short
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
    kept = code[:end] + "".join(
        piece.text for piece in pieces if piece.stays or piece.binds & needed
    )
    if problem.stops and problem.tests.lstrip().startswith("}"):  # which closes the last piece
        kept = kept.rstrip()
        return kept[:-1] if kept.endswith("}") else short
    return kept


@dataclass(frozen=True)
class _Piece:
    """A statement at the top of a program.

    Attributes:
        text: its text; for Python, whose lines are cut out, "".
        stays: it is an import, or changes the interpreter, and stays for its own sake.
        binds: the names that it gives a value.
        mentions: the names that it reads.
    """

    text: str
    stays: bool
    binds: Set[str]
    mentions: Set[str]


def _closure(names: Iterable[str], pieces: Iterable[_Piece]) -> set[str]:
    """Adds to names those in the pieces that bind them, until no further piece binds one."""
    closure, left = set(names), list(pieces)
    while taken := [piece for piece in left if piece.binds & closure]:
        left = [piece for piece in left if not piece.binds & closure]
        for piece in taken:
            closure |= piece.binds | piece.mentions
    return closure


# ── Python ──────────────────────────────────────────────────────────────────────────────────────


def _cut_python(problem: Problem, text: str) -> str:
    """Leaves out the lines of statements that the entry point does not need.

    A statement stays if it binds a name that the entry point or the tests need, or if it may change
    the value of one: it reaches a variable, or sets an attribute of a class or module.
    """
    source, first = problem.prompt + text, problem.prompt.count("\n") + 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            body = ast.parse(source).body
            pieces = [_python_piece(statement) for statement in body]
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return text
    lines: dict[int, bool] = {}
    for statement, stays in zip(body, _needed(problem, body, pieces, first), strict=True):
        decorators = [each.lineno for each in getattr(statement, "decorator_list", [])]
        begin = min([statement.lineno, *decorators])
        for number in range(begin, (statement.end_lineno or begin) + 1):
            lines[number] = lines.get(number, False) or stays
    return "\n".join(
        line for number, line in enumerate(text.split("\n"), first) if lines.get(number, True)
    )


def _needed(
    problem: Problem, body: Sequence[ast.stmt], pieces: Sequence[_Piece], first: int
) -> list[bool]:
    """Tells of each statement whether it stays; those up to the line `first` do."""
    bound = set[str]().union(*(piece.binds for piece in pieces))
    defined = {each.name for each in body if hasattr(each, "name")}
    imports = (ast.Import, ast.ImportFrom)
    for statement, piece in zip(body, pieces, strict=True):
        defined |= piece.binds if isinstance(statement, imports) else set()
    names = {problem.entry_point} | defined & set(_WORD.findall(problem.tests))
    changes = list[set[str]]()  # of each statement, the names whose values it may change
    for statement, piece in zip(body, pieces, strict=True):
        reached = _closure(piece.mentions, pieces)
        changed = reached & (bound - defined)
        if _sets_attributes(statement):
            changed |= piece.mentions & bound
        only_uses = problem.entry_point in reached or _only_uses(statement)
        changes.append(set() if only_uses else changed)
    while True:
        needed = _closure(names, pieces)
        by_text = not needed.isdisjoint(_BY_TEXT)
        stays = [
            piece.stays
            or (by_text and isinstance(statement, _DEFINITIONS))
            or statement.lineno <= first
            or not needed.isdisjoint(piece.binds | changed)
            for statement, piece, changed in zip(body, pieces, changes, strict=True)
        ]
        names = needed.union(*(piece.mentions for piece in compress(pieces, stays)))
        if names <= needed:
            return stays


def _sets_attributes(statement: ast.stmt) -> bool:
    """Tells whether a statement defines, assigns to a part of an object, or calls a method."""
    return isinstance(statement, _DEFINITIONS) or any(
        isinstance(getattr(node, "ctx", None), ast.Store)
        if isinstance(node, ast.Attribute | ast.Subscript)
        else isinstance(node, ast.Expr)
        and isinstance(getattr(node.value, "func", None), ast.Attribute)
        for node in ast.walk(statement)
    )


def _only_uses(statement: ast.stmt) -> bool:
    """Tells whether a statement ends the program, reads its input, or only prints and checks."""
    nodes = list(ast.walk(statement))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    leaves = [node for node in nodes if isinstance(node, ast.stmt) and not hasattr(node, "body")]
    return not names.isdisjoint(_ENDS_OR_READS) or all(map(_prints_or_checks, leaves))


def _prints_or_checks(leaf: ast.stmt) -> bool:
    if isinstance(leaf, ast.Expr) and isinstance(leaf.value, ast.Call):
        return isinstance(leaf.value.func, ast.Name) and leaf.value.func.id == "print"
    return isinstance(leaf, ast.Assert | ast.Raise | ast.Pass | ast.Constant)


def _python_piece(statement: ast.stmt) -> _Piece:
    table = symtable.symtable(ast.unparse(statement), "answer.py", "exec")
    symbols = table.get_symbols()
    binds = {each.get_name() for each in symbols if each.is_assigned() or each.is_imported()}
    mentions = {each.get_name() for each in symbols if each.is_referenced()}
    inner = [symbol for scope in _scopes(table) for symbol in scope.get_symbols()]
    starred = isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*"
    return _Piece(
        "",
        starred or _LIMIT in {getattr(node, "attr", "") for node in ast.walk(statement)},
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
    heads = _WORD.findall(" ".join(_IMPL.findall(code)))
    names = (*heads, *_DECLARED.findall(code), *_CALLABLE.findall(code), *_ASSIGNED.findall(code))
    return {*names} - _CONTROL


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
            whole = bare.endswith((";", "}")) or _DIRECTIVE.match(bare)
            if whole or code[match.end() :].lstrip(" \t")[:1] == "\n":
                yield piece
                begin = match.end()
    if not depth:
        yield code[begin:]


def _ruby_pieces(_language: str, code: str) -> Iterator[str]:
    """Yields pieces that begin with a line without indent, and end with their last line."""
    yield from re.split(r"(?<=\n)(?=[^\s)\]}])(?!end\b)", code)
