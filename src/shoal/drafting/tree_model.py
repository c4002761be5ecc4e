"""A smaller model drafts trees: one pass for each depth, over the nodes of all rows.

The first pass feeds the tokens that the cache lacks of each row. Each later pass feeds the tree so
far, from the last committed token on, as the target's verification does; only the columns of the
new depth are read. Accepted tokens stay in the cache.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shoal.drafting.growth import Growth, Node, Shape
from shoal.drafting.model import ModelDrafter
from shoal.drafting.multi_exit import MultiExitDrafter
from shoal.drafting.protocol import Drafter, DraftInputs
from shoal.drafting.shapes import RsdS, shape_of
from shoal.errors import UnsupportedModel
from shoal.models.runner import Runner
from shoal.sampling.distributions import Scores, probabilities
from shoal.types.requests import Request, Row
from shoal.types.rounds import Faults
from shoal.types.trees import DraftTree, Positions, Verdict


class TreeDrafter(ModelDrafter):
    """A drafter that draws trees from a model's q under the row's own sampling controls.

    For greedy rows, and for drafts that are not verified by their q, the trees hold the most
    probable tokens.

    Args:
        runner: see `ModelDrafter`.
        vocab_size: see `ModelDrafter`.
        pending: see `ModelDrafter`.
        shape: the shape of the trees.

    Raises:
        UnsupportedModel: the draft model takes no trees itself.
    """

    def __init__(self, runner: Runner, vocab_size: int, shape: Shape, *, pending: int = 2) -> None:
        super().__init__(runner, vocab_size, pending=pending)
        if not runner.takes_trees:
            raise UnsupportedModel(
                f"{runner.name}: it can draft chains and no trees, as "
                f"{runner.cut_obstacle or 'it takes no position for each token'}"
            )
        self.max_nodes = shape.most
        self._shape = shape
        # Of the round: tokens in the cache before its trees, and the column there of each node, 0 =
        # none.
        self._fed: dict[Row, tuple[int, list[int]]] = {}

    def propose(self, inputs: DraftInputs) -> DraftTree:
        """Proposes trees, in as many passes as the deepest tree has levels."""
        growth = Growth(inputs, self._shape, inputs.needs_q)
        held, _ = self.lacking(inputs.rows, inputs.lengths)
        fed: list[Node] = []
        depth, lengths = 0, list(inputs.lengths)
        while asked := growth.nodes_without_q():
            fed = growth.inner(asked) if depth else []
            logits = (
                self._after_trees(inputs, held, fed, asked)
                if depth
                else self._after_roots(inputs, asked)
            )
            q, sound = self._q(inputs, logits, asked)
            growth.know(asked, q)
            lengths = self._lengths(inputs, growth, asked, q, sound, depth)
            growth.shorten(lengths)
            growth.grow()
            depth += 1
        self.leave_out(inputs.rows, inputs.lengths, held)
        tree, nodes = growth.tree(depth)
        places = _columns(fed)
        for row, own, length in zip(inputs.rows, nodes, inputs.lengths, strict=True):
            if length:
                self._fed[row] = len(row.tokens) - 1, [places.get(node, 0) for node in own]
        return tree

    def _after_roots(self, inputs: DraftInputs, nodes: Sequence[Node]) -> Tensor:
        """Returns the logits after the rows' last tokens, [nodes, vocab of the drafter]."""
        logits = self.first_logits(inputs)
        return logits[torch.tensor([node.row for node in nodes], device=logits.device)]

    def _after_trees(
        self, inputs: DraftInputs, held: Sequence[int], fed: Sequence[Node], nodes: Sequence[Node]
    ) -> Tensor:
        """Returns the logits after nodes, [nodes, vocab of the drafter].

        Args:
            inputs: the inputs of the round.
            held: the number of tokens of each row in the cache before the round.
            fed: the nodes to feed, each row's from its root on; they include the asked ones.
            nodes: the nodes whose logits are wanted.
        """
        columns = _columns(fed)
        blocks, parents, slots = [], [], self.slots(inputs.rows)
        for b, (row, length, slot) in enumerate(
            zip(inputs.rows, inputs.lengths, slots, strict=True)
        ):
            own = [node for node in fed if node.row == b]
            self.runner.cache.rollback(slot, len(row.tokens) - 1 if length else held[b])
            blocks.append([row.tokens[-1] if length else 0, *(node.token for node in own)])
            parents.append([columns.get(node.parent, 0) - 1 if node.parent else -1 for node in own])
        counts = [len(block) for block in blocks]
        padded = [block + block[:1] * (max(counts) - len(block)) for block in blocks]
        tokens = torch.tensor(padded, device=self.runner.device)
        logits = self.runner.feed(slots, tokens, counts, parents=parents)
        index = torch.tensor([[node.row, columns[node]] for node in nodes], device=logits.device)
        return logits[index[:, 0], index[:, 1]]

    def _q(
        self, inputs: DraftInputs, logits: Tensor, nodes: Sequence[Node]
    ) -> tuple[Tensor, list[bool]]:
        """Returns the distributions of the nodes' children, [asked, vocab], and which are valid."""
        faults: Faults = {}
        requests: dict[int, Request] = {}
        rows = [
            _drawing_copy(inputs.rows[node.row], requests) for node in nodes
        ]  # each node has a copy, for its faults
        positions = Positions(rows, [node.path() for node in nodes], first=nodes[0].depth)
        q = probabilities(self.of_target(logits)[:, None], positions, faults)[:, 0]
        sound = [row not in faults for row in rows]
        if not all(sound):
            finite = logits.amax(-1).isfinite().tolist()
            self.clean(
                [
                    inputs.rows[node.row]
                    for node, is_finite in zip(nodes, finite, strict=True)
                    if not is_finite
                ]
            )
        return q, sound

    def _lengths(
        self,
        inputs: DraftInputs,
        growth: Growth,
        nodes: Sequence[Node],
        q: Tensor,
        sound: Sequence[bool],
        depth: int,
    ) -> list[int]:
        """Returns the length that paths may still reach.

        Paths grow no further if a node of the row has no distribution, or by `DraftInputs.stop`.
        """
        lengths = list(growth.lengths)
        for node, is_sound in zip(nodes, sound, strict=True):
            lengths[node.row] = lengths[node.row] if is_sound else min(lengths[node.row], depth)
        if inputs.stop is not None:
            sure = [0.0] * len(lengths)
            for node, highest in zip(nodes, q.amax(-1).tolist(), strict=True):
                sure[node.row] = max(sure[node.row], highest)
            lengths = [min(pair) for pair in zip(lengths, inputs.stop(depth, sure), strict=True)]
        return lengths

    def observe(self, rows: Sequence[Row], scores: Scores, verdict: Verdict) -> None:
        """Keeps the accepted nodes in the cache, as far as it has them."""
        paths, _ = verdict.lists
        for row, path in zip(rows, paths, strict=True):
            if row in self._fed:
                start, columns = self._fed[row]
                # Nodes behind its own are another drafter's.
                held = (columns[node] if node < len(columns) else 0 for node in path)
                own = itertools.takewhile(lambda column: column, held)
                self.runner.cache.keep(self._slots.of(row), start, [0, *own])
        self._fed = {}
        super().observe(rows, scores, verdict)


def _columns(fed: Sequence[Node]) -> dict[Node | None, int]:
    """Returns the columns of nodes in their rows' blocks; column 0 is the root."""
    columns: dict[Node | None, int] = {}
    sizes: dict[int, int] = {}
    for node in fed:
        sizes[node.row] = sizes.get(node.row, 0) + 1
        columns[node] = sizes[node.row]
    return columns


def _drawing_copy(row: Row, requests: dict[int, Request]) -> Row:
    """Returns a copy of the row; the copy of a greedy row has temperature 1."""
    own, request = copy.copy(row), row.request
    if request.sampling.greedy:
        if id(request) not in requests:
            requests[id(request)] = replace(
                request, sampling=replace(request.sampling, temperature=1.0)
            )
        own.request = requests[id(request)]
    return own


WIDTHS = (2, 4)
"""The widths of the trees among which `tree=auto` chooses, beside chains."""


class ChainOrTreeDrafter(TreeDrafter):
    """A drafter of chains, or of RSD-S trees of several widths, by one model with one cache.

    It is `draft="DIR:tree=auto"`. A tree of width w finds by its siblings the tokens that the chain
    misses, and takes w times the columns of the target's pass. `lookahead="auto"` measures both
    (`shoal.lookahead.choosing`); with a fixed draft length all are chains.

    Args:
        runner: see `ModelDrafter`.
        vocab_size: see `ModelDrafter`.
        pending: see `ModelDrafter`.
        widths: the widths of the trees.
        nodes: the most nodes of a tree.

    Raises:
        UnsupportedModel: the draft model takes no trees itself.
    """

    def __init__(
        self,
        runner: Runner,
        vocab_size: int,
        widths: Sequence[int],
        nodes: int,
        *,
        pending: int = 2,
    ) -> None:
        self._shapes = [RsdS(width, nodes) for width in widths]
        super().__init__(runner, vocab_size, self._shapes[0], pending=pending)
        self.choices = ["chain", *(f"tree of width {width}" for width in widths)]
        self._used = 0

    def use(self, choice: int) -> None:
        self._used = choice
        if choice:
            self._shape = self._shapes[choice - 1]

    def propose(self, inputs: DraftInputs) -> DraftTree:
        return super().propose(inputs) if self._used else ModelDrafter.propose(self, inputs)


def tree_drafter(
    target: Runner, *, model: Drafter, tree: str, nodes: int, width: int = 2
) -> TreeDrafter:
    """Makes a drafter of trees from the drafter of a draft model.

    Raises:
        UnsupportedModel: the models have different tokenizers, or the draft model takes no trees.
    """
    assert isinstance(model, ModelDrafter)
    if model.shared is not None or type(model) not in (ModelDrafter, MultiExitDrafter):
        raise UnsupportedModel(
            f"{model.runner.name} has another tokenizer than {target.name}: it can draft "
            f"chains, not trees"
        )
    if tree == "auto":
        return ChainOrTreeDrafter(model.runner, target.vocab_size, WIDTHS, nodes)
    return TreeDrafter(model.runner, target.vocab_size, shape_of(tree, width, nodes))
