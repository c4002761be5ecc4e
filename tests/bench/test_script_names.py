"""Scripts that no test runs: whatever they take from shoal and from each other is there.

Tests of: the scripts under benchmarks and scripts.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(file for folder in ("benchmarks", "scripts") for file in (ROOT / folder).rglob("*.py"))


def imported(tree: ast.AST) -> Iterator[tuple[str, Any]]:
    """Every name that a script imports from shoal, and what it is; raises where there is nothing of that name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "shoal":
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
                yield alias.asname or alias.name, getattr(module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "shoal":
                    importlib.import_module(alias.name)
                    yield alias.asname or "shoal", sys.modules[alias.name if alias.asname else "shoal"]


def absent(source: str) -> list[str]:
    """Names of shoal's modules that a script takes and that are not there."""
    tree = ast.parse(source)
    try:
        modules = {name: value for name, value in imported(tree) if isinstance(value, ModuleType)}
    except (ImportError, AttributeError) as error:
        return [str(error)]
    others = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    others |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    return [
        ast.unparse(use)
        for use in uses
        if (name := use.value.id) in modules.keys() - others and not hasattr(modules[name], use.attr)  # type: ignore[attr-defined]
    ]


def defined(file: Path) -> set[str]:
    """Names that a script gives itself at its top."""
    nodes = ast.parse(file.read_text(encoding="utf-8")).body
    inside = [child for node in nodes if isinstance(node, (ast.If, ast.Try)) for child in ast.walk(node)]
    names = {getattr(node, "name", "") for node in nodes}
    names |= {n.id for node in [*nodes, *inside] for n in ast.walk(node) if isinstance(n, ast.Name)}
    return names | {
        alias.asname or alias.name
        for node in [*nodes, *inside]
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_what_a_script_takes_is_there(file: Path) -> None:
    source = file.read_text(encoding="utf-8")
    assert absent(source) == []
    siblings = {each.stem: each for folder in (ROOT / "benchmarks", file.parent) for each in folder.glob("*.py")}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in siblings:
            assert {alias.name for alias in node.names} <= defined(siblings[node.module])


@pytest.mark.parametrize("source", [
    "from shoal.models.selfcheck import gone", "from shoal.gone import x", "import shoal.gone",
    "def f():\n    from shoal.models import formats\n    formats.gone()",
])  # fmt: skip
def test_a_name_that_is_gone_is_seen(source: str) -> None:
    assert len(absent(source)) == 1
    right = source.replace("formats.gone", "formats.cpu").replace("selfcheck import gone", "formats import cpu")
    assert (
        absent(right.replace("shoal.gone import x", "shoal.config import Sampling").replace("shoal.gone", "shoal.config"))
        == []
    )
