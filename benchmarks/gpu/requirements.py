"""What the measurements need of the machine's own Python. Standard library only: it must run where nothing else can."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import metadata
from itertools import zip_longest
from pathlib import Path

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
SERVING = ("fastapi", "uvicorn", "pydantic", "prometheus-client", "httpx")
MEASURING = {"triton": ">=3.6", "pytest": ">=8", "hypothesis": ">=6.100", **dict.fromkeys(SERVING, ">=0")}
"""Beside the project's own dependencies: the kernels' compiler, and what their tests and a served load need."""

Bounds = Mapping[str, str]


def project_bounds(text: str) -> dict[str, str]:
    """The dependencies in a pyproject.toml, as {name: bounds}; tomllib would need Python 3.11."""
    found = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    return dict(re.findall(r'"([\w-]+)([^";]*)', found[1])) if found else {}


def unmet(bounds: Bounds, version: Callable[[str], str] = metadata.version) -> dict[str, str]:
    """What is not as wanted, by name: "not installed", or the version that is."""
    problems = {}
    for name, wanted in bounds.items():
        try:
            found = version(name)
        except metadata.PackageNotFoundError:
            problems[name] = f"not installed, wanted {wanted}"
            continue
        if not all(_holds(found, bound) for bound in wanted.split(",") if bound):
            problems[name] = f"{found}, wanted {wanted}"
    return problems


def _holds(version: str, bound: str) -> bool:
    operator, limit = re.fullmatch(r"\s*(>=|<)\s*([\d.]+)\s*", bound).groups()  # type: ignore[union-attr]
    pairs = zip_longest(_numbers(version), _numbers(limit), fillvalue=0)
    order = next((1 if own > other else -1 for own, other in pairs if own != other), 0)
    return order >= 0 if operator == ">=" else order < 0


def _numbers(version: str) -> list[int]:
    """2.11.0+cu130 -> [2, 11, 0]."""
    return [int(part) for part in re.match(r"\d+(\.\d+)*", version)[0].split(".")]  # type: ignore[index]


def absent(problems: Mapping[str, str]) -> list[str]:
    """Those that are not there at all."""
    return [name for name, problem in problems.items() if problem.startswith("not installed")]
