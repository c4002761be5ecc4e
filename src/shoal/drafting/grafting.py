"""Trees of two drafters as one: a model's tree, with paths from texts joined to it.

After RASD (2025, arXiv 2503.03434): paths that both propose share their nodes, and further nodes of
the text are appended. A text's node that would follow a node of the model is left out if the
model's q has many likelier tokens.

The text's nodes are point masses, tried after the model's draws at the same place. The model's
draws come from a known q. So this is recursive rejection sampling whose last draws at a place come
from point masses, and it is exact: with p for the rest that earlier draws have left, a point mass x
is accepted with probability p(x), and p without x is left for later draws. The presence of such a
node may depend on all that the model drew, as long as its verification uses other random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from shoal.config import MOST_NODES
from shoal.drafting.paths import CHOICES
from shoal.drafting.text import Guess
from shoal.types.trees import DraftTree, Siblings


def grafted(own: DraftTree, guesses: Sequence[Guess], steps: int) -> DraftTree:
    """Returns the trees of a model, followed by the nodes that the guesses add.

    No row gets more than `MOST_NODES` nodes. A model's chain that is longer stays as it is.

    Args:
        own: the model's trees of all rows.
        guesses: the guesses of the rows.
        steps: the number of drafting steps of the whole.
    """
    siblings = own.siblings if own.q is None else _of_chains(own)
    rows = [
        _Row(list(draft), list(above)) for draft, above in zip(own.drafts, own.parents, strict=True)
    ]
    left_out = _unlikely(rows, guesses, siblings)
    for row, guess, out in zip(rows, guesses, left_out, strict=True):
        row.join(guess, out)
    tree = DraftTree.of(
        [row.tokens for row in rows],
        [row.parents for row in rows],
        device=own.tokens.device,
        steps=steps,
    )
    return tree if siblings is None else replace(tree, siblings=_extended(siblings, rows))


@dataclass
class _Row:
    """A row's tree, the model's nodes first."""

    tokens: list[int]
    parents: list[int]

    def __post_init__(self) -> None:
        self.own = len(self.tokens)
        self.nodes = {
            pair: node
            for node, pair in reversed([*enumerate(zip(self.parents, self.tokens, strict=True))])
        }

    def joins(self, guess: Guess) -> Iterator[tuple[int, int]]:
        """Yields (node, parent) for nodes of a guess that the model lacks at a node that it has.

        The parent is a node of the model, or -1 for the root.
        """
        known = {-1: -1}
        for node, (token, parent) in enumerate(zip(guess.tokens, _parents(guess), strict=True)):
            if parent in known:
                found = self.nodes.get((known[parent], token))
                if found is None:
                    yield node, known[parent]
                else:
                    known[node] = found

    def join(self, guess: Guess, left_out: set[int]) -> None:
        """Adds a guess, without the nodes in `left_out` and their descendants."""
        known = {-1: -1}
        for node, (token, parent) in enumerate(zip(guess.tokens, _parents(guess), strict=True)):
            if parent not in known or node in left_out:
                continue
            pair = (known[parent], token)
            if pair not in self.nodes:
                if len(self.tokens) >= MOST_NODES:
                    continue
                self.nodes[pair] = len(self.tokens)
                self.parents.append(pair[0])
                self.tokens.append(token)
            known[node] = self.nodes[pair]


def _parents(guess: Guess) -> Sequence[int]:
    return range(-1, len(guess.tokens) - 1) if guess.parents is None else guess.parents


def _of_chains(own: DraftTree) -> Siblings:
    """Returns chains with a q as trees in which every node but the last has one child."""
    assert own.q is not None
    rows = len(own.drafts)
    contexts = [
        [j * rows + b for j in range(len(draft))] + [-1] for b, draft in enumerate(own.drafts)
    ]
    return Siblings(
        torch.cat(list(own.q)),
        contexts,
        [[[j] for j in range(len(draft))] + [[]] for draft in own.drafts],
    )


def _unlikely(
    rows: Sequence[_Row], guesses: Sequence[Guess], siblings: Siblings | None
) -> list[set[int]]:
    """Returns the nodes of each guess for which q has at least `CHOICES` likelier tokens.

    The sets are empty if there is no q.
    """
    found: list[set[int]] = [set() for _ in rows]
    if siblings is None:
        return found
    asked = [
        (b, node, siblings.contexts[b][parent + 1], guess.tokens[node])
        for b, (row, guess) in enumerate(zip(rows, guesses, strict=True))
        for node, parent in row.joins(guess)
        if siblings.contexts[b][parent + 1] >= 0
    ]
    if not asked:
        return found
    whose, nodes, contexts, tokens = zip(*asked, strict=True)
    q = siblings.q[torch.tensor(contexts, device=siblings.q.device)]
    likelier = (q > q.gather(1, torch.tensor(tokens, device=q.device)[:, None])).sum(-1)
    for b, node, before in zip(whose, nodes, likelier.tolist(), strict=True):
        if before >= CHOICES:
            found[b].add(node)
    return found


def _extended(siblings: Siblings, rows: Sequence[_Row]) -> Siblings:
    """Returns the siblings with the joined nodes as the last draws of the columns before them."""
    contexts, draws, sampled = [], [], []
    for row, known, own in zip(rows, siblings.contexts, siblings.draws, strict=True):
        more = len(row.tokens) - row.own
        each = [*(list(nodes) for nodes in own), *([] for _ in range(more))]
        contexts.append([*known, *[-1] * more])
        sampled.append([len(nodes) for nodes in each])
        for node in range(row.own, len(row.tokens)):
            each[row.parents[node] + 1].append(node)
        draws.append(each)
    return Siblings(siblings.q, contexts, draws, siblings.independent, sampled)
