"""The rules of the house: which way imports point, what is public, what may lie in the tree."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import shoal
from shoal import errors

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "shoal"

# ---------------------------------------------------------------------------------------------------------------------
# Import directions

PLACES = {
    "edges": "__init__ __main__ cli train bench evaluation serve testing reference transformers_door transformers_repository data",
    "api": "api stream progress",
    "engine": "engine",
    "stages": "intake scheduler prefill draft lookahead verify accept commit",
    "base": "round outputs fim constraints memory models selfcheck strict quantize linears formats tensor_parallel load_report "
    "runner dropout inputs distributions history truncation purity attention cache static available",
    "words": "counts durable request schedule deadlines waiting sharing sources config options values errors out_of_memory stats "
    "noise ranking json_schemas disjoint",
}

# A place imports the places named here; its modules do not import each other ...
MAY_IMPORT = {
    "edges": "edges api engine stages base words",
    "api": "engine stages base words",
    "engine": "stages base words",
    "stages": "base words",
    "base": "words",
    "words": "",
}

# ... but for these.
WITHIN = {
    "api": "stream",
    "stream": "progress",
    "models": "selfcheck strict tensor_parallel quantize linears formats runner attention cache",
    "strict": "runner attention",
    "tensor_parallel": "runner cache",
    "linears": "formats",
    "load_report": "attention runner",
    "selfcheck": "runner",
    "runner": "attention cache static",
    "memory": "runner",
    "static": "attention cache distributions truncation",
    "attention": "cache",
    "distributions": "history truncation constraints round",
    "ranking": "request",
    "request": "config counts errors stats ranking sharing",
    "schedule": "request sharing",
    "deadlines": "request",
    "waiting": "request",
    "sharing": "errors",
    "sources": "errors",
    "json_schemas": "disjoint",
    "config": "errors values",
    "options": "config errors",
    "out_of_memory": "errors",
    "stats": "errors",
    "noise": "errors",
}

# Who may import these packages, at the top of a file or inside a function.
RESERVED = {
    "transformers": "models cache attention static transformers_door transformers_repository testing train bench",
    "typer": "cli train bench",
    "rich": "cli train bench progress",
    "matplotlib": "bench evaluation",
    "rouge_score": "evaluation",
    "triton": "attention",
    "torchao": "quantize",
    "fastapi": "serve",
    "starlette": "serve",
    "pydantic": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
    "llguidance": "constraints serve",
    "ray": "serve",
}
# Optional, so never imported at the top of a file; but of one that is in this list itself.
DEFERRED = ("matplotlib", "rouge_score", "triton", "torchao", "llguidance", "ray", "shoal.attention.kernels", "shoal.serve")
TORCH_FREE = f"{PLACES['words']} scheduler"  # pure Python: tested and reasoned about without a tensor


@dataclass(frozen=True)
class Import:
    """One import statement of a file: `target` is a dotted name."""

    file: Path
    line: int
    target: str
    deferred: bool  # inside a function
    typing_only: bool  # under `if TYPE_CHECKING:`


def _is_typing_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _targets(node: ast.AST, package: list[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        above = package[: len(package) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        return [f"{base}.{alias.name}" for alias in node.names]
    return []


def imports_of(file: Path, root: Path) -> Iterator[Import]:
    """Every import statement of a file of the package at `root`, wherever it stands."""
    package = ["shoal", *file.relative_to(root).parts[:-1]]

    def walk(node: ast.AST, deferred: bool, typing_only: bool) -> Iterator[Import]:
        for target in _targets(node, package):
            yield Import(file, node.lineno, target, deferred, typing_only)  # type: ignore[attr-defined]
        inside = deferred or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside, typing_only or _is_typing_only(node))

    yield from walk(ast.parse(file.read_text(encoding="utf-8")), False, False)


def all_imports(root: Path) -> list[Import]:
    """The imports of every file under `root`."""
    return [found for file in sorted(root.rglob("*.py")) for found in imports_of(file, root)]


def module_of(file: Path, root: Path) -> str:
    """The module or subpackage directly under shoal to which a file belongs."""
    return file.relative_to(root).parts[0].removesuffix(".py")


def place_of(module: str) -> str:
    """Where a module stands; a new one must be given a place before it passes."""
    for place, modules in PLACES.items():
        if module in modules.split():
            return place
    raise AssertionError(f"shoal.{module} has no place in the table PLACES of tests/test_house.py")


def _internal_target(target: str, root: Path) -> str:
    first = target.split(".")[1] if "." in target else ""
    is_module = (root / first).is_dir() or (root / f"{first}.py").exists()
    return first if first and is_module else "__init__"  # a name of shoal/__init__.py


def _may_import(source: str, target: str) -> bool:
    if source == target:
        return True
    if target == "cli":
        return source == "__main__"
    if target in WITHIN.get(source, "").split():
        return True
    return place_of(target) in MAY_IMPORT[place_of(source)].split()


def broken_arrows(root: Path) -> list[str]:
    """Imports inside the package that point the wrong way, each as "where: from -> to (why)"."""
    broken = []
    for found in all_imports(root):
        if found.target.split(".")[0] != "shoal":
            continue
        source, target = module_of(found.file, root), _internal_target(found.target, root)
        if not _may_import(source, target):
            where = f"{found.file.relative_to(root)}:{found.line}"
            broken.append(f"{where}: {source} ({place_of(source)}) -> {target} ({place_of(target)})")
    return broken


def _optional(module: str) -> bool:
    return any(f"{module}.".startswith(f"{name}.") for name in DEFERRED)


def _must_be_deferred(found: Import, root: Path) -> bool:
    here = ".".join(("shoal", *found.file.relative_to(root).with_suffix("").parts))
    return _optional(found.target) and not _optional(here)


def misplaced_packages(root: Path) -> list[str]:
    """Imports of other people's packages where the table does not allow them."""
    wrong = []
    for found in all_imports(root):
        source, package = module_of(found.file, root), found.target.split(".")[0]
        if found.typing_only:
            continue
        where = f"{found.file.relative_to(root)}:{found.line}: {source} -> {package}"
        if package in RESERVED and source not in RESERVED[package].split():
            wrong.append(f"{where} (only {RESERVED[package]} may)")
        elif _must_be_deferred(found, root) and not found.deferred:
            wrong.append(f"{where} (only inside a function: it is optional)")
        elif package == "torch" and source in TORCH_FREE.split():
            wrong.append(f"{where} (this module does without torch)")
    return wrong


def test_imports_point_downwards() -> None:
    broken = broken_arrows(PACKAGE)
    assert not broken, "broken arrows:\n  " + "\n  ".join(broken)


def test_packages_are_imported_where_they_belong() -> None:
    wrong = misplaced_packages(PACKAGE)
    assert not wrong, "broken arrows:\n  " + "\n  ".join(wrong)


@pytest.mark.parametrize(
    ("file", "source", "arrow"),
    [
        ("verify.py", "from shoal.accept import accept", "verify (stages) -> accept (stages)"),
        ("cache/plan.py", "from shoal import engine", "cache (base) -> engine (engine)"),
        ("cache/plan.py", "from ..engine import Engine", "cache (base) -> engine (engine)"),
        ("errors.py", "def f():\n    import shoal.config", "errors (words) -> config (words)"),
        ("train/loop.py", "from shoal.cli import app", "train (edges) -> cli (edges)"),
        ("commit.py", "from shoal import load", "commit (stages) -> __init__ (edges)"),
    ],
)
def test_a_broken_arrow_is_named(tmp_path: Path, file: str, source: str, arrow: str) -> None:
    for name in ("accept.py", "engine.py", "config.py", "cli/__init__.py", file):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source if name == file else "")
    assert [line.split(": ", 1)[1] for line in broken_arrows(tmp_path)] == [arrow]


@pytest.mark.parametrize(
    ("file", "source", "allowed"),
    [
        ("accept.py", "from transformers.cache_utils import Cache", False),
        ("scheduler.py", "import torch.nn", False),
        ("scheduler.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", True),
        ("attention/fused.py", "import triton", False),
        ("attention/kernels.py", "import triton", True),
        ("attention/fused.py", "from shoal.attention import kernels", False),
        ("attention/fused.py", "def attend():\n    from shoal.attention import kernels", True),
        ("attention/fused.py", "def kernel():\n    import triton", True),
    ],
)
def test_a_misplaced_package_is_found(tmp_path: Path, file: str, source: str, allowed: bool) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(source)
    assert bool(misplaced_packages(tmp_path)) is not allowed


def test_shoal_imports_without_the_optional_packages() -> None:
    code = (
        "import sys\n"
        "for name in ('matplotlib', 'fastapi', 'triton', 'llguidance', 'scipy', 'pytest', 'hypothesis'):\n"
        "    sys.modules[name] = None\n"  # importing it fails from here on
        "import shoal, shoal.cli\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------------------------------------------------------------
# Public surface

PUBLIC = """
    Grammar Increment InternalError Limits ModelError Output RequestError Result Sample Sampling Shoal ShoalError Speculation
    Stats TopLogprobs custom_generate custom_generate_dir load
""".split()

ERRORS = {
    "ShoalError": (Exception,),
    "RequestError": (errors.ShoalError, ValueError),
    "ModelError": (errors.ShoalError,),
    "UnsupportedModel": (errors.ModelError,),
    "PairMismatch": (errors.ModelError,),
    "BadLogits": (errors.ModelError,),
    "OutOfMemory": (errors.ModelError,),
    "InternalError": (errors.ShoalError,),
}


def test_public_names() -> None:
    assert sorted(shoal.__all__) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_there_and_documented(name: str) -> None:
    assert inspect.getdoc(getattr(shoal, name))


def test_error_tree() -> None:
    found = {name: value.__bases__ for name, value in vars(errors).items() if inspect.isclass(value)}
    assert found == ERRORS


def test_the_error_tree_in_the_docstring_is_the_one_in_the_code() -> None:
    drawn = re.findall(r"^[ │├└─]+([A-Z]\w+)(?= |$)", errors.__doc__ or "", flags=re.MULTILINE)
    assert sorted(drawn) == sorted(ERRORS)


# ---------------------------------------------------------------------------------------------------------------------
# The tree

OWN_FOLDERS = ("src", "tests", "docs", "scripts", ".ci")
BUNDLED_MIB = 32  # the package with its models: a wheel that installs in seconds


def _text_files() -> Iterator[tuple[Path, str]]:
    files = [path for path in ROOT.iterdir() if path.is_file()]
    files += [path for name in OWN_FOLDERS for path in (ROOT / name).rglob("*") if path.is_file()]
    for path in sorted(files):
        content = path.read_bytes()
        if b"\0" not in content and "__pycache__" not in path.parts:
            yield path, content.decode("utf-8", errors="replace")


def test_version_is_the_newest_of_the_changelog() -> None:
    newest = re.search(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert newest is not None
    assert newest[1] == shoal.__version__


def test_no_file_names_a_place_of_one_machine() -> None:
    # Put together here, so that this file passes its own test: folders of developers' machines, package registries.
    folders = [
        ("work", "shared"),
        ("work", "main"),
        ("work", ".library"),
        ("opt", "wheels"),
        ("root", ".pyenv"),
        ("tmp", "v"),
    ]
    hosts = [("pypi", "org"), ("pythonhosted", "org"), ("download.pytorch", "org"), ("npmjs", "org"), ("debian", "org")]
    forbidden = ["/" + "/".join(parts) + "/" for parts in folders] + [".".join(parts) for parts in hosts]
    found = [f"{path.relative_to(ROOT)}: {word}" for path, text in _text_files() for word in forbidden if word in text + "/"]
    assert not found


def test_the_package_stays_small() -> None:
    size = sum(path.stat().st_size for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert size <= BUNDLED_MIB * 2**20


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()
