"""`exact="asap"`: over-estimates of what p gives to the allowed texts that begin alike (Park et al.
2024, arXiv 2405.21047, ASAp).

For each beginning w that a row has written, c(w) is p's probability that a text that begins so stays allowed, as far as is known:
1 where nothing has been written yet, else the sum of p(x | w) c(wx) over the allowed tokens x. It only falls, towards the truth.
Rows draw from p(x | w) c(wx), renormalised: where every c is the truth, that is p given that the whole text is allowed.

The rows of a prompt share a trie of these estimates, also with later requests of the engine that ask for the same. A round draws by
what is known when it begins, and learns its rows' tokens when it has ended. What rows draw from changes with it, and the weights
of samples hold whatever it is: that of a token x is the sum over the allowed tokens y of p(y | w) c(wy), divided by c(wx), so that
weight and probability of each x make p(x | w).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.types.requests import Request, Row
from shoal.types.trees import Positions

MOST_NODES = 1 << 18
"""Beginnings that an engine keeps, of all prompts: about 400 bytes each. Tries that were used least
recently are given up."""
MOST_TRIES = 4096
"""Prompts of which an engine keeps estimates."""
_UNSEEN = 1e-12
"""Of the mass of a beginning, what unseen tokens have at least, as long as there are any: sums of
rounded numbers may say 0."""
_CHANGE = 1e-14
"""Relative change of an estimate that those before it are told of."""


class Seen(NamedTuple):
    """What a row has seen of p where it drew a token; p is without constraints.

    Attributes:
        mass: p of all allowed tokens.
        tokens: how many of them there are.
        p: of the token that was drawn.
    """

    mass: float
    tokens: int
    p: float


class Node:
    """A beginning that a row has written.

    Attributes:
        estimate: c of it.
        mass, count: p of the tokens allowed after it, and their number; None until a row goes on
            from here.
        children: by token.
        p: what p gives to its last token.
    """

    __slots__ = ("children", "count", "estimate", "mass", "p", "parent", "trie")

    def __init__(self, trie: Trie, parent: Node | None, p: float) -> None:
        self.trie, self.parent, self.p = trie, parent, p
        self.estimate = 1.0
        self.mass: float | None = None
        self.count = 0
        self.children: dict[int, Node] = {}

    def __copy__(self) -> Node:
        """Itself: rows that are copies of others go on from the same place."""
        return self

    def learn(self, block: Sequence[int], seen: Sequence[Seen]) -> Node | None:
        """What a row has seen at the tokens of its block, as far as they are constrained; returns
        where the row is then.

        None: it is bound no longer, or there is no room for more.
        """
        passed, node = [], self
        for token, here in zip(block, seen, strict=False):
            passed.append(node)
            if node.mass is None:
                node.mass, node.count = here.mass, here.tokens
            if token not in node.children:
                if not node.trie.grow():
                    break
                node.children[token] = Node(node.trie, node, here.p)
            node = node.children[token]
        for one in reversed(passed):
            one._settle()
        above = self.parent
        while above is not None and above._settle():
            above = above.parent
        return node if len(passed) == len(block) and node is not passed[-1] else None

    def _settle(self) -> bool:
        """Computes its estimate anew; whether it has changed."""
        assert self.mass is not None
        known = sum(child.p * child.estimate for child in self.children.values())
        if len(self.children) < self.count:
            known += max(
                self.mass - sum(child.p for child in self.children.values()), _UNSEEN * self.mass
            )
        before, self.estimate = self.estimate, known
        return abs(known - before) > _CHANGE * before

    def after(self, path: Sequence[int]) -> Node | None:
        """The beginning that goes on with these tokens, if a row has written it."""
        node: Node | None = self
        for token in path:
            if node is None:
                return None
            node = node.children.get(token)
        return node


class Trie:
    """The estimates of one prompt.

    Attributes:
        kept_by: where there must be room for its nodes; None = it has been given up, and grows no
            more.
    """

    def __init__(self, kept_by: Estimates) -> None:
        self.kept_by: Estimates | None = kept_by
        self.nodes = 0
        self.root = Node(self, None, 1.0)

    def grow(self) -> bool:
        """Counts one more node, if there is room for it."""
        if self.kept_by is None or self.kept_by.nodes >= self.kept_by.most:
            return False
        self.nodes += 1
        self.kept_by.nodes += 1
        return True


class Estimates:
    """The tries of an engine. nodes: how many they have, beside their roots; most: no more than
    that."""

    def __init__(self, most: int = MOST_NODES) -> None:
        self.nodes, self.most = 0, most
        self.tries: dict[Any, Trie] = {}

    def begin(self, rows: Sequence[Row]) -> None:
        """Gives rows that have no new tokens the estimates of their prompt, if their request asks
        for it."""
        for row in rows:
            if row.request.estimated:
                row.beginning = self._of(row.request).root

    def _of(self, request: Request) -> Trie:
        key = _key(request)
        trie = self.tries.pop(key, None) or Trie(self)
        while self.tries and (self.nodes >= self.most or len(self.tries) >= MOST_TRIES):
            self._give_up(next(iter(self.tries)))
        self.tries[key] = trie
        return trie

    def _give_up(self, key: Any) -> None:
        trie = self.tries.pop(key)
        trie.kept_by, self.nodes = None, self.nodes - trie.nodes


def _key(request: Request) -> Any:
    """Equal for requests whose texts have the same p and the same limits, whatever their seeds, of
    one owner."""
    sampling, limits = request.sampling, request.limits
    settings = [
        _fixed(getattr(sampling, each.name)) for each in fields(sampling) if each.name != "seed"
    ]
    ends = (
        limits.max_new_tokens,
        _fixed(limits.stop),
        _fixed(limits.eos),
        _fixed(request.criteria),
        request.shown_tokens,
    )
    return request.owner, request.prompt_ids, *settings, *ends, _fixed(request.constraints)


def _fixed(value: Any) -> Any:
    """Something that can be a key: lists and mappings by their items, other things without a hash
    by what they are."""
    if isinstance(value, dict):
        return tuple((key, _fixed(item)) for key, item in sorted(value.items()))
    if isinstance(value, list | tuple):
        return tuple(map(_fixed, value))
    try:
        hash(value)
    except TypeError:
        return _Identity(value)
    return value


class _Identity:
    """Equal to what holds the same object."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __hash__(self) -> int:
        return id(self.held)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.held is self.held


def weigh(scores: Tensor, temperature: float, positions: Positions) -> None:
    """Multiplies what the distributions of these scores give to each token by the estimate of the
    text that it makes.

    Args:
        scores: [rows, q, vocab], after all controls but temperature; changed in place.
    """
    for b, row in enumerate(positions.rows):
        for column, path in (
            positions.paths(b, scores.shape[1]) if row.beginning is not None else ()
        ):
            _multiply(scores[b, column], row.beginning.after(path), temperature)


def log_weights(node: Node, block: Sequence[int], inside: Tensor) -> list[float]:
    """Natural logs of the weights of tokens that were drawn after a beginning.

    Args:
        inside: natural log of p at each token, [tokens, vocab]; -inf for those that are not
            allowed.
    """
    found = []
    here: Node | None = node
    for token, logs in zip(block, inside, strict=True):
        _multiply(logs, here, 1.0)
        here = None if here is None else here.children.get(token)
        found.append(float(logs.logsumexp(-1)) - (0.0 if here is None else math.log(here.estimate)))
    return found


def _multiply(scores: Tensor, node: Node | None, temperature: float) -> None:
    """By the estimates after one beginning, scores [vocab] in place."""
    known = (
        {}
        if node is None
        else {token: child.estimate for token, child in node.children.items() if child.estimate < 1}
    )
    if known:
        logs = torch.tensor(list(known.values()), dtype=torch.float64).log() * temperature
        scores[torch.tensor(list(known), device=scores.device)] += logs.to(scores)
