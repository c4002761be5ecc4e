"""Shapes of draft trees, which choose the places that get a node (`shoal.drafting.growth`).

| shape | trees | verified by |
|---|---|---|
| rsd-c | `width` different children of the root, each the begin of a chain | recursive rejection |
| rsd-s | the first `width` nodes of a level, by stochastic beam search | recursive rejection |
| dyspec | the places most probably tried, with one budget for all rows | recursive rejection |
| k-seq | `width` sequences, drawn independently | k-SEQ |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from shoal.config import MOST_NODES
from shoal.drafting.growth import Node, Shape


@dataclass(frozen=True)
class RsdC(Shape):
    """RSD-C (Jeon et al. 2024, arXiv 2402.14160) with the branching (width, 1, 1, ...)."""

    width: int
    nodes: int

    def children(self, node: Node) -> int:
        return 1 if node.depth else self.width

    def chosen(self, nodes: Sequence[Node]) -> list[Node]:
        return _first(self.most, sorted(nodes, key=lambda n: (n.depth, n.number)))


@dataclass(frozen=True)
class RsdS(Shape):
    """RSD-S (Jeon et al. 2024, arXiv 2402.14160): stochastic beam search, drawn lazily.

    The beam search is that of Kool et al. 2019, arXiv 1903.06059. In place of the largest perturbed
    log-probabilities of a level it takes the first arrivals of a Poisson process, which are drawn
    one by one. Rows whose nodes are no sample get the most probable nodes.
    """

    width: int
    nodes: int

    def children(self, node: Node) -> int:
        return self.width

    def chosen(self, nodes: Sequence[Node]) -> list[Node]:
        found: list[Node] = []
        sizes: dict[tuple[int, int], int] = defaultdict(int)
        kept: set[Node | None] = set()
        for node in sorted(nodes, key=lambda n: (n.depth, n.time, -n.value, n.number)):
            if sizes[node.row, node.depth] < self.width and (
                node.depth == 1 or node.parent in kept
            ):
                sizes[node.row, node.depth] += 1
                kept.add(node)
                found.append(node)
        return _first(self.most, found)


@dataclass(frozen=True)
class KSeq(Shape):
    """The sequences of SpecTr (Sun et al. 2023, arXiv 2310.15141).

    Sequences that agree so far are one path.
    """

    width: int
    nodes: int

    independent: ClassVar[bool] = True

    def length(self, length: int) -> int:
        return min(length, self.most // self.width)

    def root(self, node: Node) -> None:
        node.copies = self.width

    def children(self, node: Node) -> int:
        return node.copies

    def chosen(self, nodes: Sequence[Node]) -> list[Node]:
        return list(nodes)


@dataclass(frozen=True)
class DySpec(Shape):
    """DySpec (Xiong et al. 2024, arXiv 2410.11744), with `nodes` per row of the batch on average.

    Rows whose drafts are likely to be accepted get more.
    """

    nodes: int

    @property
    def most(self) -> int:
        return MOST_NODES

    def children(self, node: Node) -> int:
        return self.most

    def chosen(self, nodes: Sequence[Node]) -> list[Node]:
        rows: dict[int, int] = {node.row: 0 for node in nodes}
        found: list[Node] = []
        for node in sorted(nodes, key=lambda n: (-n.value, n.depth, n.number)):
            if len(found) == self.nodes * len(rows):
                break
            if rows[node.row] < self.most:
                rows[node.row] += 1
                found.append(node)
        return found


def _first(most: int, nodes: Sequence[Node]) -> list[Node]:
    """Returns the first nodes, at most `most` of each row."""
    found: list[Node] = []
    rows: dict[int, int] = defaultdict(int)
    for node in nodes:
        if rows[node.row] < most:
            rows[node.row] += 1
            found.append(node)
    return found


def shape_of(name: str, width: int, nodes: int) -> Shape:
    """Returns the shape of this name.

    Raises:
        KeyError: there is no such shape.
    """
    if name == "dyspec":
        return DySpec(nodes)
    kinds: dict[str, type[RsdC] | type[RsdS] | type[KSeq]] = {
        "rsd-c": RsdC,
        "rsd-s": RsdS,
        "k-seq": KSeq,
    }
    return kinds[name](width, nodes)
