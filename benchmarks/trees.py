"""Tokens per target pass of chains and trees of a draft model at equal budgets of nodes: counts alone, no times.

    python benchmarks/trees.py

n samples of each of a few held-out prompts by the bundled pair, verified by rejection sampling and its kin. A chain of `nodes`
tokens takes as many passes of the drafter; trees of width 2 to 4 take a half to a quarter. Of each kind of tree the best width is
shown, and of DySpec the best depth.
"""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple

from rich.console import Console
from rich.table import Column, Table

import shoal
from held_out import decode, prompts
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

    def cells(self) -> tuple[str, ...]:
        stats = self.stats
        per_round = (stats.drafted / stats.row_rounds, stats.draft_passes / stats.rounds)
        return self.name, f"{stats.acceptance_length:.2f}", *(f"{value:.1f}" for value in per_round)


def counted(
    pair: shoal.Shoal, asked: list[tuple[int, ...]], tree: str, width: int, nodes: int, depth: int, given: argparse.Namespace
) -> Stats:
    """All samples of one drafter, that many rows at a time."""
    assert pair.draft_model is not None
    model, vocab = pair.draft_model.fork(), pair.target.vocab_size
    chain = tree == "chain"
    drafter = ModelDrafter(model, vocab) if chain else TreeDrafter(model, vocab, shape_of(tree, width, nodes))
    engine = pair.engine(depth, Rejection(), drafter=drafter)
    sampling, limits = shoal.Sampling(temperature=given.temperature, seed=1), shoal.Limits(max_new_tokens=given.tokens)
    return decode(engine, [Request(ids, given.n, sampling, limits) for ids in asked])


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
    parser.add_argument("--temperature", type=float, default=0.8)
    given = parser.parse_args()
    pair = shoal.load(dtype="float32", max_batch=given.n)
    asked = prompts(pair, given.prompts)
    table = Table(*(Column(name, no_wrap=True) for name in ("nodes", "drafter", "tokens/pass", "drafted", "draft passes")))
    for nodes in given.nodes:
        for tree in ("chain", "rsd-c", "rsd-s", "dyspec", "k-seq"):
            found = [
                Found(name, counted(pair, asked, tree, width, nodes, depth, given))
                for name, width, depth in variants(tree, nodes)
            ]
            best = max(found, key=lambda one: one.stats.acceptance_length).cells()
            print(nodes, *best, file=sys.stderr, flush=True)
            table.add_row(str(nodes), *best)
    Console().print(table)


if __name__ == "__main__":
    main()
