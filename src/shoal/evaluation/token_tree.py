"""A tree of tokens, searched by P-UCB with the model's probabilities as priors.

After Zhang et al., "Planning with Large Language Models for Code Generation" (PG-TD, 2023, arXiv
2303.05510). A node is the text up to a token. A leaf is *evaluated* by a roll-out, the greedy
continuation of its text, whose reward is that of the finished program; it is then *expanded* by the
most probable next tokens, and the best reward below each node is its value. The child that goes on
as a roll-out did needs no roll-out of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

BASE, CONSTANT = 10.0, 4.0
"""The numbers of P-UCB's weight of exploration, as in PG-TD."""

Candidates = Sequence[tuple[int, float]]
"""The most probable tokens at a place, best first, with their log-probabilities."""


@dataclass(frozen=True)
class WholeText:
    """A text behind the prompt, up to its end.

    Attributes:
        token_ids: the tokens.
        logprobs: the log-probability of each.
        text: the text, without a stop string.
        stopped: True if a stop string ended it.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    text: str
    stopped: bool


@dataclass(frozen=True)
class RollOut:
    """The greedy continuation of a node's text.

    Attributes:
        tokens: the tokens.
        logprobs: the log-probability of each.
        candidates: the most probable tokens at the place of each.
        ended: True if the text ended, by itself or at its limit; False if the roll-out was cut.
        whole: the whole text of which it is the end.
        reward: the reward of that text; 0 if texts are not rewarded.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    candidates: Sequence[Candidates]
    ended: bool
    whole: WholeText
    reward: float = 0.0


@dataclass(eq=False)
class TokenNode:
    """A text: that of the node above it and one token.

    Attributes:
        parent: the node above; None for the root.
        token: the token; -1 for the root.
        logprob: the token's log-probability.
        visits: the number of evaluations of this node and of nodes below it, those that are under
            way included.
        value: the best reward so far of this node and those below it; None before the first.
        leaves: the number of leaves below that may be selected, this node included.
        children: the nodes below; None before the node is expanded.
        roll_out: a roll-out that passes through this node, and the number of its tokens before it.
    """

    parent: TokenNode | None = None
    token: int = -1
    logprob: float = 0.0
    visits: int = 0
    value: float | None = None
    leaves: int = 1
    children: list[TokenNode] | None = None
    roll_out: tuple[RollOut, int] | None = field(default=None, repr=False)

    @property
    def above(self) -> list[TokenNode]:
        """This node and those above it, the root first."""
        ancestors = [self]
        while ancestors[-1].parent is not None:
            ancestors.append(ancestors[-1].parent)
        return ancestors[::-1]

    @property
    def path(self) -> list[int]:
        """The tokens from the root to this node."""
        return [node.token for node in self.above[1:]]


class TokenTree:
    """The tree of the texts behind one prompt.

    Args:
        width: the most children of a node.
        entropy: the entropy, in nats, below which a node has its most probable child only.

    Attributes:
        root: the node from which leaves are selected; it moves down where a search commits tokens.
    """

    def __init__(self, width: int, entropy: float = 0.0) -> None:
        self.width, self.entropy = width, entropy
        self.root = TokenNode()

    def score(self, node: TokenNode) -> float:
        """Computes P-UCB: Q + beta(s) p sqrt(log N(s)) / (1 + N(s, a)).

        beta(s) is log((N(s) + BASE + 1) / BASE) + CONSTANT; N(s) counts the node above, once more
        than it was visited, N(s, a) the node itself; Q is its value, 0 before it has one.
        """
        assert node.parent is not None
        visits = node.parent.visits + 1
        beta = math.log((visits + BASE + 1) / BASE) + CONSTANT
        bonus = beta * math.exp(node.logprob) * math.sqrt(math.log(visits)) / (1 + node.visits)
        return (0.0 if node.value is None else node.value) + bonus

    def select(self) -> TokenNode | None:
        """Returns the leaf to evaluate next, and counts its visit; None if there is none left.

        A leaf under way is not selected again, and its visit counts at once, so that several leaves
        can be selected before the first is evaluated.
        """
        node = self.root
        if not node.leaves:
            return None
        while node.children is not None:
            node = max((child for child in node.children if child.leaves), key=self.score)
        self.take(node)
        return node

    @staticmethod
    def take(leaf: TokenNode) -> None:
        """Counts the visit of a leaf whose evaluation begins."""
        for node in leaf.above:
            node.visits += 1
            node.leaves -= 1

    def learn(self, leaf: TokenNode, reward: float) -> None:
        """Ends the evaluation of a leaf: expands it by its roll-out, tells those above."""
        assert leaf.roll_out is not None
        leaf.children = self._children(leaf, *leaf.roll_out)
        for node in leaf.above:
            node.value = reward if node.value is None else max(node.value, reward)
            node.leaves += len(leaf.children)

    def _children(self, leaf: TokenNode, roll_out: RollOut, place: int) -> list[TokenNode]:
        if place >= len(roll_out.tokens):
            return []
        candidates = roll_out.candidates[place]
        flat = self.width > 1 and entropy(candidates) >= self.entropy
        children = [TokenNode(leaf, *each) for each in candidates[: self.width if flat else 1]]
        for child in children:
            if child.token == roll_out.tokens[place]:
                child.roll_out = roll_out, place + 1
        return children


def entropy(candidates: Candidates) -> float:
    """Computes an entropy in nats, in which all but the most probable tokens count as one.

    It is at most the entropy of the whole distribution.
    """
    chances = [math.exp(logprob) for _, logprob in candidates]
    chances.append(max(1 - sum(chances), 0.0))
    return -sum(chance * math.log(chance) for chance in chances if chance > 0)
