"""`python benchmarks/asap.py`: how near samples under a constraint come to p given that the text is allowed, as rows learn.

toy: texts of five letters 0 and 1 without two 1 in a row, of a scripted model. The KL divergence of the law of
rows from p given that the text is allowed is exact, by enumeration, after so many samples; means over seeds, rows one by one and
eight at once.

json: requests for 8 samples of a list of JSON values on the bundled target, at batch 8, one request after the other. The divergence
is estimated from the weights w of a stage's samples, the mean of (w/Z) log (w/Z), Z being the mean of w; `worth` is the effective
number of a request's 8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import command
import shoal
from provenance import require_place, write_results
from shoal.bench.machine import machine
from shoal.config import Grammar
from shoal.constraints.dressing import EXACT, add_weights
from shoal.constraints.estimates import PrefixNode
from shoal.constraints.protocol import Allowed, Constraint
from shoal.lookahead.controller import Fixed
from shoal.sampling.acceptance import Coupled
from shoal.testing.drafters import engine_of
from shoal.testing.scripted import hashed, mixed, scripted
from shoal.types.requests import Request, Row
from shoal.types.samples import log_mean

Text = tuple[int, ...]
TEXTS = [text for text in product((0, 1), repeat=5) if (1, 1) not in pairwise(text)]
SCRIPT, PROMPT = hashed(2, 4, spread=2.0), (0, 1)
VALUE = r'(true|false|null|-?[0-9]{1,2}|"[a-z]{1,6}")'
LIST = Grammar("regex", rf"{VALUE}(, ?{VALUE}){{0,2}}\]")
STAGES = ((0, 1), (1, 3), (3, 8), (8, 16), (16, 32))


class Toy(Constraint[Text]):
    def begin(self, row: Row) -> Text:
        return ()

    def advance(self, state: Text, token: int) -> Text:
        return (*state, token)

    def mask(self, states: Sequence[Text], vocab_size: int, device: torch.device) -> Allowed:
        tokens = [[any(text[: len(s) + 1] == (*s, token) for text in TEXTS) for token in (0, 1)] for s in states]
        return Allowed(torch.tensor(tokens), torch.zeros(len(states), dtype=torch.bool))


@cache
def p(text: Text) -> float:
    """Of the last token of a text after those before it."""
    return float(SCRIPT((*PROMPT, *text[:-1])).double().softmax(-1)[text[-1]])


def law(node: PrefixNode | None, state: Text = ()) -> Iterator[float]:
    """Probabilities of `TEXTS`, in order, where rows draw by these estimates."""
    if len(state) == 5:
        yield 1.0
        return
    after = sorted({text[: len(state) + 1] for text in TEXTS if text[: len(state)] == state})
    children = [None if node is None else node.children.get(text[-1]) for text in after]
    shares = [p(text) * (1.0 if child is None else child.estimate) for text, child in zip(after, children, strict=True)]
    for text, child, share in zip(after, children, shares, strict=True):
        yield from (share / sum(shares) * rest for rest in law(child, text))


def toy(seeds: int, counts: Sequence[int], batch: int) -> list[float]:
    """Mean divergences after so many samples."""
    truth = [math.prod(p(text[:end]) for end in range(1, 6)) for text in TEXTS]
    found: list[list[float]] = [[] for _ in counts]
    for seed in range(seeds):
        draft = scripted(mixed(SCRIPT, hashed(2, 9), every=2), 2)
        engine = engine_of(scripted(SCRIPT, 2), draft, Fixed(2), max_batch=batch)
        ended, constraint = 0, (Toy(),)
        for place, count in enumerate(counts):
            if count > ended:
                sampling, limits = shoal.Sampling(seed=1000 * seed + count), shoal.Limits(max_new_tokens=5, eos=())
                engine.submit(add_weights(Request(PROMPT, count - ended, sampling, limits, constraints=constraint), "asap"))
                while engine.step():
                    pass
                ended = count
            root = next((trie.root for trie in engine.estimates.tries.values()), None)
            drawn = list(law(root))
            right = [each / sum(truth) for each in truth]
            found[place].append(sum(t * math.log(t / d) for t, d in zip(right, drawn, strict=True)))
    return [mean(each) for each in found]


def lists(pair: shoal.Shoal, exact: str, repeats: int, title: str) -> list[tuple[list[float], float]]:
    """Log weights of each request of a run, and its worth, stage after stage; of all repeats."""
    found: list[tuple[list[float], float]] = []
    for seed in track(range(repeats), title):
        engine = pair.engine(3, Coupled())
        sampling = shoal.Sampling(seed=seed, grammar=LIST)
        prompt = tuple(pair.tokenizer("values = [1, 2, ")["input_ids"])
        for turn in range(STAGES[-1][1]):
            asked = Request(prompt, 8, sampling, shoal.Limits(max_new_tokens=20), occurrence=turn)
            rows = engine.submit(add_weights(asked, exact))
            while engine.step():
                pass
            logs = [row.log_weight for row in rows]
            found.append((logs, math.exp(2 * log_mean(logs) - log_mean([2 * each for each in logs])) * len(logs)))
    return found


def divergence(logs: Sequence[float]) -> float:
    """Of what samples of these log weights were drawn from."""
    gaps = [log - log_mean(logs) for log in logs]
    return mean(math.exp(gap) * gap if gap > -math.inf else 0.0 for gap in gaps)


def main(
    seeds: Annotated[int, typer.Option(min=1, help="of the toy")] = 40,
    repeats: Annotated[int, typer.Option(min=1, help="of the lists")] = 12,
    to: Annotated[Path | None, typer.Option("--json", help="write the figures")] = None,
) -> None:
    """Prints two tables."""
    require_place(to)
    console, figures = Console(width=120), dict[str, Any]()
    counts = (0, 5, 10, 20, 50, 200)
    table = Table("toy: samples learned", *map(str, counts))
    for batch in (1, 8):
        found = figures[f"toy {batch}"] = toy(seeds, counts, batch)
        table.add_row(f"KL, batch {batch}", *(f"{each:.1e}" for each in found))
    console.print(table)
    table = Table("json: requests", "", *(f"{first + 1}-{end}" for first, end in STAGES))
    pair, turns = shoal.load(max_batch=8), STAGES[-1][1]
    runs = {exact: lists(pair, exact, repeats, exact) for exact in EXACT if exact != "distinct"}
    for exact, found in runs.items():
        stages = [[found[run * turns + turn] for run in range(repeats) for turn in range(*stage)] for stage in STAGES]
        divergences = [divergence([log for logs, _ in stage for log in logs]) for stage in stages]
        worths = [mean(worth for _, worth in stage) for stage in stages]
        figures[exact] = {"divergence": divergences, "worth": worths}
        if "smc" not in exact:  # weights of resampled rows are not those of what they were drawn by
            table.add_row(exact, "KL", *(f"{each:.2f}" for each in divergences))
        table.add_row(exact, "worth of 8", *(f"{each:.1f}" for each in worths))
    console.print(table)
    if to is not None:
        write_results(to, {"machine": machine(torch.device("cpu")), "seeds": seeds, "repeats": repeats, "figures": figures})


if __name__ == "__main__":
    command.run(main)
