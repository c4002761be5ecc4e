"""The draws of the problem generator that the package holds as data: `python training/pair/store_problems.py` writes them anew."""

from __future__ import annotations

import gzip
import json

from problems.generator import FunctionProblem, Split, generate
from shoal.stored_problems import Draw, stored_file

DRAWS: dict[Draw, tuple[int, int, Split]] = {
    "corpus": (22, 8000, "train"),
    "prompts": (21, 2400, "train"),
    "held_out": (20, 1024, "templates"),
    "templates": (404, 1000, "templates"),
    "constants": (404, 1000, "constants"),
}
"""The seed, the number and the split of each: the corpus and the prompts of `shoal train`, the prompts of `shoal bench`, and both
halves of `shoal eval functions`."""


def drawn(draw: Draw) -> list[FunctionProblem]:
    """Draws the problems."""
    return generate(*DRAWS[draw])


def main() -> None:
    """Writes every draw; similar functions stand side by side, so that a window of gzip holds them."""
    for draw in DRAWS:
        problems = enumerate(drawn(draw))
        records = [(place, problem.prompt, problem.solution, problem.tests) for place, problem in problems]
        records.sort(key=lambda record: (record[2], record[1]))
        file = stored_file(draw)
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(gzip.compress(json.dumps(records, separators=(",", ":")).encode(), 9, mtime=0))
        print(f"{file.name}: {len(records)} problems, {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
