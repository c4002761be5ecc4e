"""Draft trees that grow by draws from a drafter's q: the places of a tree, and the draws there.

A place is the next child of a node. Its token is not known yet, but the draws before it say how
good a place it is. A shape (`shoal.drafting.shapes`) chooses among places, never among tokens:
dropping a token because of its value would change the distribution. A chosen place may be dropped
again for better ones. A child is never worth more than its parent, so growing level by level
selects the same nodes as growing one node at a time, with one pass of the drafter for each depth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.drafting.protocol import DraftInputs
from shoal.sampling.uniforms import tree_uniforms
from shoal.types.trees import DraftTree, Siblings


@dataclass(eq=False)
class Node:
    """A node of a row's tree, or a place for one.

    Attributes:
        row: the row's index in the batch.
        parent: the parent; None = this is the root.
        depth: the depth; 0 for the root.
        number: the number in the order of all places.
        value: the probability that the target's verification tries this draw, an estimate. After
            DySpec: a draft is accepted with its q; otherwise the next sibling is tried.
        time: the arrival time of this path in a Poisson process with rate q, if the row's drafts
            are verified by q. The earliest arrivals of a level are a sample of its paths without
            replacement.
        token: the token; -1 for a place.
        accepted: the probability that the draw is accepted, an estimate.
        reach: the product of q along the path.
        context: the index of its children's distribution in `Growth.q`; -1 = not computed yet.
        copies: the number of sequences that pass through this node.
        draws: the children in the order in which they were drawn.
    """

    row: int
    parent: Node | None
    depth: int
    number: int
    value: float = 1.0
    time: float = 0.0
    token: int = -1
    accepted: float = 1.0
    reach: float = 1.0
    context: int = -1
    copies: int = 1
    draws: list[Node] = field(default_factory=list)

    @property
    def is_place(self) -> bool:
        return self.token < 0

    def path(self) -> list[int]:
        """Returns the tokens of the path from below the root to this node."""
        return [] if self.parent is None else [*self.parent.path(), self.token]


class Shape(Protocol):
    """A rule that chooses the places of trees.

    Attributes:
        nodes: the number of nodes of a row's tree.
        independent: True if children are drawn from q itself, see `shoal.types.trees`.
    """

    nodes: int
    independent: ClassVar[bool] = False

    @property
    def most(self) -> int:
        """The most nodes of a row's tree."""
        return self.nodes

    def length(self, length: int) -> int:
        """Returns the longest path of a row with this draft length."""
        return length

    def root(self, node: Node) -> None:
        """Prepares a row's root."""
        return None

    def children(self, node: Node) -> int:
        """Returns the most draws at a node."""
        ...

    def chosen(self, nodes: Sequence[Node]) -> list[Node]:
        """Returns the nodes and places of a round that are part of the trees.

        A chosen node's parent and elder siblings are chosen as well.
        """
        ...


class Growth:
    """The trees of a round.

    Args:
        inputs: the inputs of the round.
        shape: the shape of the trees.
        by_q: True if drafts are verified by their q. False if trees hold the tokens that are most
            probable under the uniforms of each position, which the target's draws use too.
    """

    def __init__(self, inputs: DraftInputs, shape: Shape, by_q: bool) -> None:
        self._inputs, self._shape, self._by_q = inputs, shape, by_q
        self.independent = shape.independent and by_q
        self._greedy = [row.request.sampling.greedy for row in inputs.rows]
        self.lengths = [shape.length(length) for length in inputs.lengths]
        self._numbers = count()
        # The draws of each row, dropped ones included: each has uniforms of its own.
        self._drawn = [0] * len(inputs.rows)
        self.roots = [
            Node(b, None, 0, next(self._numbers), token=row.tokens[-1])
            for b, row in enumerate(inputs.rows)
        ]
        self.nodes: list[Node] = []
        self.q: Tensor | None = None  # [contexts, vocab]
        self._left: Tensor | None = None  # q without the drawn tokens
        for root, length in zip(self.roots, self.lengths, strict=True):
            shape.root(root)
            if length:
                self._open(root)

    def samples(self, row: int) -> bool:
        """Returns True if a row's nodes are a sample, False if they are the most probable ones."""
        return self._by_q and not self._greedy[row]

    def nodes_without_q(self) -> list[Node]:
        """Returns the nodes whose children are wanted and whose q is not known."""
        best = {
            place.parent: None
            for place in self._shape.chosen(self.nodes)
            if place.is_place and place.parent
        }
        return [node for node in best if node.context < 0]

    def inner(self, asked: Sequence[Node]) -> list[Node]:
        """Returns the nodes, without dropped ones, whose q is known or asked for, parents first."""
        wanted = set(asked)
        nodes = [
            n
            for n in self._shape.chosen(self.nodes)
            if not n.is_place and (n.context >= 0 or n in wanted)
        ]
        return sorted(nodes, key=lambda n: (n.depth, n.number))

    def know(self, nodes: Sequence[Node], q: Tensor) -> None:
        """Stores the distributions after some nodes, [nodes, vocab]."""
        start = 0 if self.q is None else len(self.q)
        self.q = q if self.q is None else torch.cat([self.q, q])
        self._left = q.clone() if self._left is None else torch.cat([self._left, q])
        for place, node in enumerate(nodes, start=start):
            node.context = place

    def shorten(self, lengths: Sequence[int]) -> None:
        """Limits the paths of each row to these lengths; places beyond them are dropped."""
        self.lengths = [min(pair) for pair in zip(self.lengths, lengths, strict=True)]
        self.nodes = [
            node for node in self.nodes if not node.is_place or node.depth <= self.lengths[node.row]
        ]

    def grow(self) -> None:
        """Draws at all chosen places whose q is known; drawn nodes open places for children."""
        while True:
            chosen = self._shape.chosen(self.nodes)
            places = [
                place
                for place in chosen
                if place.is_place and place.parent and place.parent.context >= 0
            ]
            if not places:
                break
            self._draw(places)

    def _open(self, node: Node) -> None:
        """Adds the place of a node's first child."""
        if node.depth < self.lengths[node.row] and (
            not node.depth or node.token not in self._inputs.rows[node.row].eos
        ):
            self.nodes.append(
                Node(node.row, node, node.depth + 1, next(self._numbers), node.accepted, node.time)
            )

    def _draw(self, places: Sequence[Node]) -> None:
        """Draws at places of different parents."""
        assert self._left is not None
        rows = [place.row for place in places]
        contexts = torch.tensor(
            [place.parent.context for place in places if place.parent], device=self._left.device
        )
        weights = self._left[contexts]
        numbers = self._uniforms(rows)
        tokens = self._tokens(weights, places, torch.from_numpy(numbers[:, :1]))
        mass = weights.gather(1, tokens[:, None]).squeeze(1)
        before = weights.sum(dim=1, dtype=torch.float64)
        once = torch.tensor(
            [not (self.independent and self.samples(b)) for b in rows], device=tokens.device
        )
        self._left[contexts[once], tokens[once]] = 0.0
        after = self._left[contexts].sum(dim=1, dtype=torch.float64)
        drawn_tokens = zip(
            tokens.tolist(),
            mass.tolist(),
            before.tolist(),
            after.tolist(),
            numbers[:, 1].tolist(),
            strict=True,
        )
        for place, drawn in zip(places, drawn_tokens, strict=True):
            self._fill(place, *drawn)

    def _uniforms(self, rows: Sequence[int]) -> npt.NDArray[np.float64]:
        """Returns the uniforms of the next draw of each row, [draws, 2]; rows may repeat."""
        draws = []
        for b in rows:
            draws.append(self._drawn[b])
            self._drawn[b] += 1
        known = [self._inputs.rows[b] for b in rows]
        return tree_uniforms([row.seed for row in known], [len(row.tokens) for row in known], draws)

    def _tokens(self, weights: Tensor, places: Sequence[Node], fresh: Tensor) -> Tensor:
        """Returns one token for each place, by its weights [places, vocab]."""
        greedy = [self._greedy[place.row] for place in places]
        if all(greedy):
            return weights.argmax(-1)
        if self._by_q:
            uniforms = fresh.to(weights.device)
        else:
            own = torch.tensor(
                [[place.row, place.depth - 1] for place in places],
                device=self._inputs.uniforms.device,
            )
            uniforms = self._inputs.uniforms[own[:, 0], own[:, 1]]
        tokens = self._inputs.sampler(weights, uniforms)
        return (
            torch.where(torch.tensor(greedy, device=tokens.device), weights.argmax(-1), tokens)
            if any(greedy)
            else tokens
        )

    def _fill(
        self, place: Node, token: int, mass: float, before: float, after: float, uniform: float
    ) -> None:
        """Gives a place its token, and opens the next places.

        Args:
            place: the place.
            token: the token that was drawn.
            mass: the weight of the token.
            before: the sum of all weights before the draw.
            after: the sum that is left for the next sibling.
            uniform: a uniform for the next sibling's arrival time.
        """
        parent = place.parent
        assert parent is not None
        share = mass / before
        same = next((node for node in parent.draws if node.token == token), None)
        if same is not None:
            same.copies += 1
            self.nodes.remove(place)
        else:
            place.token = token
            place.accepted = place.value * share
            place.reach = parent.reach * mass
            self._open(place)
        parent.draws.append(same or place)
        if len(parent.draws) < self._shape.children(parent) and after > 0:
            time, value = place.time, place.value * (1 - share)
            if self.samples(place.row):
                time -= math.log1p(-uniform) / max(parent.reach * after, 1e-300)
            self.nodes.append(
                Node(place.row, parent, place.depth, next(self._numbers), value, time)
            )

    def tree(self, steps: int) -> tuple[DraftTree, list[list[Node]]]:
        """Returns the trees, and the nodes of each row in their order.

        Parents come before their children, and siblings in the order in which they were drawn.
        """
        kept = sorted(
            (n for n in self._shape.chosen(self.nodes) if not n.is_place),
            key=lambda n: (n.depth, n.number),
        )
        own: list[list[Node]] = [[] for _ in self.roots]
        for node in kept:
            own[node.row].append(node)
        device = self._inputs.uniforms.device
        if not kept:
            return DraftTree.empty(len(own), device, steps), own
        index = {node: place for nodes in own for place, node in enumerate(nodes)}
        drafts = [[node.token for node in nodes] for nodes in own]
        parents = [[index.get(node.parent, -1) for node in nodes if node.parent] for nodes in own]
        tree = DraftTree.of(drafts, parents, device=device, steps=steps)
        return DraftTree(
            tree.tokens,
            tree.lengths,
            None,
            drafts=tree.drafts,
            parents=tree.parents,
            steps=steps,
            siblings=self._siblings(own, index) if self._by_q else None,
        ), own

    def _siblings(self, own: Sequence[Sequence[Node]], index: dict[Node, int]) -> Siblings:
        assert self.q is not None
        columns = [[root, *nodes] for root, nodes in zip(self.roots, own, strict=True)]
        draws = [
            [[index[child] for child in node.draws if child in index] for node in row]
            for row in columns
        ]
        contexts = [[node.context for node in row] for row in columns]
        return Siblings(self.q, contexts, draws, self.independent)
