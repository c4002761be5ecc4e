"""The small programming problems that come with the package: functions with examples and tests.

The generator of `training/pair` drew them once; `training/pair/store_problems.py` writes its
draws, and lists their seeds. Those of the draws `corpus` and `prompts` are of the kind that the
bundled pair was trained on, the others were held out of its training. The first problems of a draw
are those of a smaller draw.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Literal

Draw = Literal["corpus", "prompts", "held_out", "templates", "constants"]


@dataclass(frozen=True)
class FunctionProblem:
    """A function to write: `prompt` + `solution` is a whole function.

    Attributes:
        prompt: the head of the function and its docstring with examples.
        solution: the body.
        tests: assert statements that call the function.
    """

    prompt: str
    solution: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.prompt.removeprefix("def ").partition("(")[0]

    @property
    def function(self) -> str:
        """The source of the whole function, examples included."""
        return self.prompt + self.solution

    @property
    def document(self) -> str:
        """The function followed by its unit tests."""
        return self.function + "\n\n" + "\n".join(self.tests) + "\n"


def stored_file(draw: Draw) -> Path:
    """Returns the place of a draw: records of place, prompt, solution and tests, in any order."""
    return Path(str(resources.files("shoal"))) / "data" / "problems" / f"{draw}.json.gz"


@cache
def stored_problems(draw: Draw) -> tuple[FunctionProblem, ...]:
    """Reads the problems of a draw, in their order."""
    records = sorted(json.loads(gzip.decompress(stored_file(draw).read_bytes())))
    return tuple(
        FunctionProblem(prompt, solution, tuple(tests)) for _, prompt, solution, tests in records
    )
