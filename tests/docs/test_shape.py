"""Measures of how hard the package is to take in, as upper bounds that may only fall.

Tests of: every module of the package. Whoever adds, takes away: a bound is lowered with what goes, and never raised. Only the
counts of modules and lines are those of the package as it is, which a new feature may raise, with its reason in the commit.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "shoal"
DESIGN = PACKAGE.parents[1] / "DESIGN.md"
COLUMNS, MEMBERS, PARAMETERS, POSITIONAL = 100, 30, 8, 7
SHORT, LONG, SCREEN = 60, 400, 60
FIRST_WORDS = re.compile(r"(?:what|of|as|the same|those|that|whose|how|where|which|whether)\b", re.IGNORECASE)
TWO_FIELDS = re.compile(r"(?:^|\. )[a-z_]+(?:, [a-z_]+)*: ")
BOUNDS = {
    "modules": 320,
    "lines": 88_255,
    "short modules": 2,
    "long modules": 0,
    "long functions": 0,
    "long lines": 0,
    "packed statements": 0,
    "functions of many parameters": 0,
    "classes of many members": 0,
    "calls of many positions": 0,
    "class names used twice": 0,
    "module names used twice": 1,
    "docstrings without a subject": 0,
    "fields side by side": 0,
    "words of the design": 2_617,
}
SIZES = ("modules", "lines")
"""The measures that a new feature may raise."""
PUBLISHED = {
    "loader.py load": "each option of a pair by its name; users call it so, and its docstring is the reference of the options",
    "integrations/transformers.py custom_generate": "Transformers gives five arguments by position, and users bind the others",
}
"""The functions whose signatures others call by name, with the reason that they stay as they are."""


@cache
def modules() -> dict[str, tuple[str, ast.Module]]:
    """The text and the syntax tree of each module, by its path in the package."""
    files = (file for file in sorted(PACKAGE.rglob("*.py")) if "data" not in file.parts)
    texts = {str(file.relative_to(PACKAGE)): file.read_text(encoding="utf-8") for file in files}
    return {name: (text, ast.parse(text)) for name, text in texts.items()}


def nodes(*kinds: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    """The nodes of these kinds, each with the path of its module."""
    for name, (_, tree) in modules().items():
        yield from ((name, node) for node in ast.walk(tree) if isinstance(node, kinds))


def lines() -> Iterator[tuple[str, str]]:
    for name, (text, _) in modules().items():
        yield from ((f"{name}:{number}", line) for number, line in enumerate(text.splitlines(), 1))


def docstrings() -> Iterator[tuple[str, str]]:
    for name, node in nodes(ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef):
        text = ast.get_docstring(node)  # type: ignore[arg-type]
        if text:
            yield f"{name}:{getattr(node, 'lineno', 1)}", text


def members(node: ast.ClassDef) -> set[str]:
    """The methods of a class, its annotated attributes, and those that it sets of itself."""
    names = {each.name for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))}
    names |= {each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)}
    written = (each for each in ast.walk(node) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store))
    return names | {each.attr for each in written if isinstance(each.value, ast.Name) and each.value.id == "self"}


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    own = node.args
    return sum(each.arg not in ("self", "cls") for each in (*own.posonlyargs, *own.args, *own.kwonlyargs))


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether Triton compiles a function: its arguments are pointers, strides and constants, and no object can hold them."""
    return any(ast.unparse(each).startswith("triton.jit") for each in node.decorator_list)


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """The functions but Triton's kernels, each with its place."""
    for name, node in nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        if not is_kernel(node):  # type: ignore[arg-type]
            yield f"{name} {node.name}", node  # type: ignore[attr-defined, misc]


def long_functions() -> list[str]:
    return [place for place, node in functions() if (node.end_lineno or 0) - node.lineno + 1 > SCREEN]


def functions_of_many_parameters() -> list[str]:
    return [place for place, node in functions() if parameters(node) > PARAMETERS]


def twice(names: Iterator[str]) -> list[str]:
    return [name for name, times in Counter(names).items() if times > 1]


MEASURES: dict[str, Callable[[], list[str]]] = {
    "modules": lambda: list(modules()),
    "lines": lambda: [place for place, _ in lines()],
    "short modules": lambda: [
        name for name, (text, _) in modules().items() if len(text.splitlines()) < SHORT and "__init__" not in name
    ],
    "long modules": lambda: [name for name, (text, _) in modules().items() if len(text.splitlines()) > LONG],
    "long functions": lambda: [place for place in long_functions() if place not in PUBLISHED],
    "long lines": lambda: [place for place, line in lines() if len(line) > COLUMNS],
    "packed statements": lambda: [place for place, line in lines() if "# fmt: skip" in line],
    "functions of many parameters": lambda: [place for place in functions_of_many_parameters() if place not in PUBLISHED],
    "classes of many members": lambda: [
        f"{name} {node.name}"  # type: ignore[attr-defined]
        for name, node in nodes(ast.ClassDef)
        if len(members(node)) > MEMBERS  # type: ignore[arg-type]
    ],
    "calls of many positions": lambda: [
        f"{name}:{node.lineno}"  # type: ignore[attr-defined]
        for name, node in nodes(ast.Call)
        if len(node.args) >= POSITIONAL  # type: ignore[attr-defined]
    ],
    "class names used twice": lambda: twice(node.name for _, node in nodes(ast.ClassDef)),  # type: ignore[attr-defined]
    "module names used twice": lambda: twice(Path(name).stem for name in modules() if "__init__" not in name),
    "docstrings without a subject": lambda: [place for place, text in docstrings() if FIRST_WORDS.match(text)],
    "fields side by side": lambda: [
        place for place, text in docstrings() for line in text.splitlines() if len(TWO_FIELDS.findall(line.strip())) > 1
    ],
    "words of the design": lambda: DESIGN.read_text(encoding="utf-8").split(),
}


@pytest.mark.parametrize("measure", BOUNDS)
def test_no_measure_grows(measure: str) -> None:
    places = MEASURES[measure]()
    advice = (
        "take as much away" if measure not in SIZES else "take as much away, or raise the bound and say why in the commit"
    )
    assert len(places) <= BOUNDS[measure], f"{len(places)} {measure}, the last of them {places[-5:]}: {advice}"


def test_each_published_signature_is_still_an_exception() -> None:
    assert set(PUBLISHED) <= {*long_functions(), *functions_of_many_parameters()}
