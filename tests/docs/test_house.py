"""The rules of the house: which way imports point, what is public, what may lie in the tree.

Tests of: all modules of the package, by their source.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import shoal
from shoal import errors

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "shoal"

# ---------------------------------------------------------------------------------------------------------------------
# Import directions

LAYERS = (
    "errors durable",
    "values",
    "config stored_problems native",
    "types",
    "constraints lookahead",
    "sampling",
    "models",
    "drafting",
    "engine",
    "api",
    "loader",
    "integrations",
    "__init__",
    "evaluation serve bench train testing data",
    "cli",
    "__main__",
)
"""The rooms and single modules under shoal, lowest first. Each imports from those above it in this list; those of one line do not
import each other. There are no exceptions."""

# Who may import these packages, at the top of a file or inside a function.
RESERVED = {
    "transformers": "models integrations testing train bench",
    "typer": "cli train",
    "rich": "cli train bench engine.stream",
    "matplotlib": "bench evaluation",
    "rouge_score": "evaluation",
    "triton": "models.attention models.layers",
    "torchao": "models.quantize",
    "fastapi": "serve",
    "starlette": "serve",
    "pydantic": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
    "llguidance": "constraints serve",
    "ray": "serve",
    "psutil": "bench",
    "lm_eval": "integrations.lm_eval",
}
# Optional, so never imported at the top of a file; but of one that is in this list itself.
DEFERRED = (
    "matplotlib", "rouge_score", "triton", "torchao", "llguidance", "ray", "psutil", "lm_eval",
    "shoal.models.attention.fused_kernels", "shoal.models.layers.layer_kernels", "shoal.models.layers.draw_kernels", "shoal.serve",
    "shoal.integrations.lm_eval",
)  # fmt: skip
TORCH_FREE = (
    "errors durable values config stored_problems lookahead types.requests types.samples types.rounds "
    "types.arguments types.stats "
    "engine.scheduler engine.admission engine.waiting engine.admission engine.detokenizer "
    "engine.stop_strings constraints.json_schemas constraints.schema_checks constraints.schema_proofs "
    "constraints.grammar_sources models.sources models.head_start "
    "drafting.draft drafting.registry"
)
"""Pure Python: tested and reasoned about without a tensor."""


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
    """The room, or the module, directly under shoal to which a file belongs."""
    return file.relative_to(root).parts[0].removesuffix(".py")


def _dotted(file: Path, root: Path) -> str:
    """The file's module without "shoal."; a package by its own name."""
    return ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def layer_of(module: str) -> int:
    """Where a room stands; a new one must be given a place before it passes."""
    for layer, modules in enumerate(LAYERS):
        if module in modules.split():
            return layer
    raise AssertionError(f"shoal.{module} has no place in the table LAYERS of tests/docs/test_house.py")


def _internal_target(target: str, root: Path) -> str:
    first = target.split(".")[1] if "." in target else ""
    is_module = (root / first).is_dir() or (root / f"{first}.py").exists()
    return first if first and is_module else "__init__"  # a name of shoal/__init__.py


def broken_arrows(root: Path) -> list[str]:
    """Imports inside the package that point the wrong way, each as "where: from -> to"."""
    broken = []
    for found in all_imports(root):
        if found.target.split(".")[0] != "shoal":
            continue
        source, target = module_of(found.file, root), _internal_target(found.target, root)
        if source != target and layer_of(target) >= layer_of(source):
            broken.append(f"{found.file.relative_to(root)}:{found.line}: {source} -> {target}")
    return broken


def circles(root: Path) -> list[str]:
    """Modules of one room that import each other, directly or not."""
    modules = {_dotted(file, root) for file in root.rglob("*.py")}
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for found in all_imports(root):
        parts = found.target.split(".")
        if parts[0] != "shoal" or found.typing_only:
            continue
        names = (".".join(parts[1:end]) for end in range(len(parts), 1, -1))
        target, source = next((name for name in names if name in modules), None), _dotted(found.file, root)
        if target is not None and target != source:
            graph[source].add(target)
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def _optional(module: str) -> bool:
    return any(f"{module}.".startswith(f"{name}.") for name in DEFERRED)


def _must_be_deferred(found: Import, root: Path) -> bool:
    here = ".".join(("shoal", *found.file.relative_to(root).with_suffix("").parts))
    return _optional(found.target) and not _optional(here)


def misplaced_packages(root: Path) -> list[str]:
    """Imports of other people's packages where the table does not allow them."""
    wrong = []
    for found in all_imports(root):
        source, package = _dotted(found.file, root), found.target.split(".")[0]
        if found.typing_only:
            continue
        where = f"{found.file.relative_to(root)}:{found.line}: {source} -> {package}"
        if package in RESERVED and not _inside(source, RESERVED[package]):
            wrong.append(f"{where} (only {RESERVED[package]} may)")
        elif _must_be_deferred(found, root) and not found.deferred:
            wrong.append(f"{where} (only inside a function: it is optional)")
        elif package == "torch" and _inside(source, TORCH_FREE):
            wrong.append(f"{where} (this module does without torch)")
    return wrong


def _inside(source: str, places: str) -> bool:
    """Whether a module is one of these places, or in one of these rooms."""
    return any(f"{source}.".startswith(f"{place}.") for place in places.split())


@pytest.mark.parametrize("faults", [broken_arrows, misplaced_packages, circles])
def test_imports_are_as_the_tables_say(faults: Callable[[Path], list[str]]) -> None:
    assert faults(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "source", "arrow"),
    [
        ("sampling/uniforms.py", "from shoal.engine.verify import verify", "sampling -> engine"),
        ("models/plan.py", "from shoal import engine", "models -> engine"),
        ("models/plan.py", "from ..engine import Engine", "models -> engine"),
        ("errors.py", "def f():\n    import shoal.config", "errors -> config"),
        ("lookahead/auto.py", "from shoal.constraints import grammar", "lookahead -> constraints"),
        ("train/loop.py", "from shoal.cli import app", "train -> cli"),
        ("engine/commit.py", "from shoal import load", "engine -> __init__"),
    ],
)
def test_a_broken_arrow_is_named(tmp_path: Path, file: str, source: str, arrow: str) -> None:
    for name in ("engine/engine.py", "constraints/grammar.py", "config.py", "cli/__init__.py", file):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source if name == file else "")
    assert [line.split(": ", 1)[1] for line in broken_arrows(tmp_path)] == [arrow]


def test_a_circle_is_found(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine/a.py").write_text("from shoal.engine import b")
    (tmp_path / "engine/b.py").write_text("def f():\n    from shoal.engine.a import g")
    assert set(circles(tmp_path)) == {"engine.a", "engine.b"}


@pytest.mark.parametrize(
    ("file", "source", "allowed"),
    [
        ("sampling/uniforms.py", "from transformers.cache_utils import Cache", False),
        ("engine/scheduler.py", "import torch.nn", False),
        ("engine/scheduler.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", True),
        ("models/attention/fused.py", "import triton", False),
        ("models/attention/fused_kernels.py", "import triton", True),
        ("models/runner.py", "def f():\n    import triton", False),
        ("models/attention/fused.py", "from shoal.models.attention import fused_kernels", False),
        ("models/attention/fused.py", "def attend():\n    from shoal.models.attention import fused_kernels", True),
        ("models/attention/fused.py", "def kernel():\n    import triton", True),
    ],
)
def test_a_misplaced_package_is_found(tmp_path: Path, file: str, source: str, allowed: bool) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
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
# Tests


def shared_tests(root: Path) -> list[str]:
    """Imports of one test module by another: what two of them need lies in tests/helpers."""
    files = sorted(root.rglob("*.py"))
    modules = {file.stem for file in files if "helpers" not in file.parts}
    imports = [found for file in files for found in imports_of(file, root)]
    return [f"{found.file.name}:{found.line}: {found.target}" for found in imports if found.target.split(".")[0] in modules]


def test_no_test_module_imports_another() -> None:
    assert not shared_tests(ROOT / "tests")


def test_an_import_of_a_test_module_is_found(tmp_path: Path) -> None:
    for name in ("engine/test_a.py", "models/b_cases.py", "helpers/laws.py", "models/test_c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("from test_a import P\nimport b_cases, laws\n" if name.endswith("c.py") else "")
    assert shared_tests(tmp_path) == ["test_c.py:1: test_a.P", "test_c.py:2: b_cases"]


# ---------------------------------------------------------------------------------------------------------------------
# Public surface

PUBLIC = """
    Grammar Increment InternalError Limits ModelError Output RequestError Result Sample Sampling Shoal ShoalError Speculation
    Stats TopLogprobs custom_generate custom_generate_dir load
""".split()


def test_public_names_are_there_and_documented() -> None:
    assert sorted(shoal.__all__) == PUBLIC
    assert all(inspect.getdoc(getattr(shoal, name)) for name in PUBLIC)


def test_errors_are_as_the_tree_in_their_docstring() -> None:
    """Whoever catches ShoalError catches all; a wrong request is a ValueError, too."""
    kinds = {name: value for name, value in vars(errors).items() if inspect.isclass(value)}
    assert all(issubclass(kind, errors.ShoalError) for kind in kinds.values())
    assert [name for name, kind in kinds.items() if issubclass(kind, ValueError)] == ["RequestError"]
    drawn = re.findall(r"^ +([│├└─ ]*)([A-Z]\w+)(?= |$)", errors.__doc__ or "", flags=re.MULTILINE)
    assert sorted(name for _, name in drawn) == sorted(kinds)
    inner = {name for branch, name in drawn if branch.startswith("│")}
    assert inner == {name for name, kind in kinds.items() if issubclass(kind, errors.ModelError)} - {"ModelError"} != set()


# ---------------------------------------------------------------------------------------------------------------------
# The tree

OWN_FOLDERS = ("src", "tests", "docs", "scripts", ".ci")
BUNDLED_MIB = 32  # the package with its models: a wheel that installs in seconds


def _text_files() -> Iterator[tuple[Path, str]]:
    files = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]  # a file in a linked work tree
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
    folders = ("work/shared", "work/main", "work/.library", "opt/wheels", "root/.pyenv", "tmp/v")
    hosts = ("pypi org", "pythonhosted org", "download.pytorch org", "npmjs org", "debian org")
    forbidden = [f"/{name}/" for name in folders] + [host.replace(" ", ".") for host in hosts]
    found = [f"{path.relative_to(ROOT)}: {word}" for path, text in _text_files() for word in forbidden if word in text + "/"]
    assert not found


def test_the_package_stays_small() -> None:
    size = sum(path.stat().st_size for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert size <= BUNDLED_MIB * 2**20
    assert (PACKAGE / "py.typed").exists()
