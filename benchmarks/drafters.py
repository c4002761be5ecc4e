"""Tokens per target pass of drafters: counts alone, no times.

    python benchmarks/drafters.py

n samples of each of a few held-out prompts by the bundled target, at a fixed draft length. "twice": every prompt is asked a second
time once the first answers are there, as in the epochs of a training run, and the second time is counted.
"""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Column, Table

import shoal
from shoal.drafting.model import ModelDrafter
from shoal.drafting.names import named
from shoal.problems.generator import generate
from shoal.sampling.acceptance import Coupled
from shoal.types.requests import Request
from shoal.types.stats import Stats

SEED = 20
DRAFTERS = (
    "bundled", "ngram", "suffix:scope=row", "suffix", "suffix:nodes=8", "suffix:scope=engine", "recycling",
    "recycling:scope=engine", "suffix+bundled", "suffix:scope=engine+bundled",
)  # fmt: skip


def counted(pair: shoal.Shoal, prompts: list[list[int]], drafter: str, k: int, n: int, temperature: float) -> list[Stats]:
    """Of the first time that the prompts are asked, and of the second, through one engine."""
    assert pair.draft_model is not None
    made, model = named(drafter), ModelDrafter(pair.draft_model.fork(), pair.target.vocab_size)
    engine = pair.engine(k, Coupled(), drafter=model if made is None else made.drafter(pair.target, model))
    found = []
    for time in range(2):
        before = engine.stats - Stats()
        sampling = shoal.Sampling(temperature=temperature, seed=time)
        for ids in prompts:
            engine.submit(Request(tuple(ids), n, sampling, shoal.Limits(max_new_tokens=128)))
            while engine.step():
                pass
        found.append(engine.stats - before)
    return found


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafters", default="|".join(DRAFTERS), help="names separated by |; bundled: the draft model")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("-n", type=int, default=8)
    parser.add_argument("-k", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.8)
    given = parser.parse_args()
    pair = shoal.load(dtype="float32", max_batch=given.n)
    prompts = [pair.tokenizer.encode(problem.prompt) for problem in generate(SEED, given.prompts, "templates")]
    table = Table(*(Column(name, no_wrap=True) for name in ("drafter", "time", "tokens/pass", "drafted/pass", "accepted")))
    for drafter in given.drafters.split("|"):
        for time, stats in zip(
            ("once", "twice"), counted(pair, prompts, drafter, given.k, given.n, given.temperature), strict=True
        ):
            drafted = f"{stats.drafted / stats.row_rounds:.2f}"
            table.add_row(drafter, time, f"{stats.acceptance_length:.2f}", drafted, f"{stats.acceptance_rate:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
