"""Tokens per target pass of chains and trees of a draft model at equal budgets of nodes: counts alone, no times.

    python benchmarks/trees.py --temperature 0.8 1.0 --json FILE

n samples of each of a few held-out prompts by the bundled pair, verified by rejection sampling and its kin. A chain of `nodes`
tokens takes as many passes of the drafter; trees of width 2 to 4 take a half to a quarter. Of each kind of tree the best width is
shown, and of DySpec the best depth.
"""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Column, Table

import shoal
from held_out import decode, prompts
from provenance import place_of_results, write_results
from shoal.bench.machine import machine
from shoal.drafting.model import ModelDrafter
from shoal.drafting.shapes import shape_of
from shoal.drafting.tree_model import TreeDrafter
from shoal.sampling.acceptance import Rejection
from shoal.types.requests import Request
from shoal.types.stats import Stats

WIDTHS = (2, 4)


class Found(NamedTuple):
    """What a drafter came to."""

    name: str
    stats: Stats

    def figures(self) -> dict[str, float]:
        """Returns tokens per pass, and drafts and passes of the drafter per round."""
        stats = self.stats
        return {
            "tokens_per_pass": stats.acceptance_length,
            "drafted": stats.drafted / stats.row_rounds,
            "draft_passes": stats.draft_passes / stats.rounds,
        }

    def cells(self) -> tuple[str, ...]:
        length, *per_round = self.figures().values()
        return self.name, f"{length:.2f}", *(f"{value:.1f}" for value in per_round)


def counted(pair: shoal.Shoal, requests: list[Request], tree: str, width: int, nodes: int, depth: int) -> Stats:
    """Decodes all samples by one drafter."""
    assert pair.draft_model is not None
    model, vocab = pair.draft_model.fork(), pair.target.vocab_size
    chain = tree == "chain"
    drafter = ModelDrafter(model, vocab) if chain else TreeDrafter(model, vocab, shape_of(tree, width, nodes))
    engine = pair.engine(depth, Rejection(), drafter=drafter)
    return decode(engine, requests)


def variants(tree: str, nodes: int) -> list[tuple[str, int, int]]:
    """Name, width and depth."""
    if tree == "chain":
        return [(f"chain of {nodes}", 1, nodes)]
    if tree == "dyspec":
        return [(f"dyspec, at most {depth} deep", 0, depth) for depth in (nodes // 2, nodes)]
    return [(f"{tree}, {width} wide", width, nodes // width) for width in WIDTHS if nodes // width > 1]


def main() -> None:
    """Prints a table, and its rows as they are known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("-n", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.8])
    parser.add_argument("--json", type=place_of_results, metavar="FILE", help="write what is found there")
    given = parser.parse_args()
    pair = shoal.load(dtype="float32", max_batch=given.n)
    asked = prompts(pair, given.prompts)
    limits = shoal.Limits(max_new_tokens=given.tokens)
    columns = ("T", "nodes", "drafter", "tokens/pass", "drafted", "draft passes")
    table, rows = Table(*(Column(name, no_wrap=True) for name in columns)), []
    for temperature in given.temperature:
        sampling = shoal.Sampling(temperature=temperature, seed=1)
        requests = [Request(ids, given.n, sampling, limits) for ids in asked]
        for nodes in given.nodes:
            for tree in ("chain", "rsd-c", "rsd-s", "dyspec", "k-seq"):
                found = [
                    Found(name, counted(pair, requests, tree, width, nodes, depth))
                    for name, width, depth in variants(tree, nodes)
                ]
                best = max(found, key=lambda one: one.stats.acceptance_length)
                place = {"temperature": temperature, "nodes": nodes}
                rows += [{**place, "drafter": one.name, **one.figures()} for one in found]
                cells = [f"{temperature:g}", str(nodes), *best.cells()]
                print(*cells, file=sys.stderr, flush=True)
                table.add_row(*cells)
    Console().print(table)
    if given.json:
        options = vars(given) | {"json": given.json.name}
        write_results(given.json, {"machine": machine(torch.device("cpu")), "arguments": options, "rows": rows})


if __name__ == "__main__":
    main()
