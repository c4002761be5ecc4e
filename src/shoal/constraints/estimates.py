"""Implements `exact="asap"`: over-estimates of the probability that p gives to the allowed texts
with one beginning (Park et al. 2024, arXiv 2405.21047, ASAp).

For each beginning w that a row has written, c(w) estimates the probability under p that a text with
this beginning stays allowed: 1 if no row has gone on from w, else the sum of p(x | w) c(wx) over
the allowed tokens x. An estimate only falls, towards the true value. Rows draw from p(x | w) c(wx),
renormalised: if every c is the true value, that is p given that the whole text is allowed.

The rows of a prompt share a trie of these estimates, also with later equal requests of the engine.
A round draws by the estimates at its beginning, and learns its rows' tokens when it has ended. The
proposal changes as estimates improve; importance weights correct for it: weight(x) = sum_y p(y|w)
c(wy) / c(wx), the sum over the allowed tokens y, so proposal(x) * weight(x) = p(x|w).

The rows of a request with `exact="distinct"` have a trie of their own. Its p is that of the allowed
tokens, which sums to 1 at each place, so c(w) is 1 until texts that begin with w have been drawn,
and then the share of p(. | w) that is left (`shoal.engine.joint_rows`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.types.requests import Request, Row
from shoal.types.trees import Positions

MOST_NODES = 1 << 18
"""The number of beginnings that an engine keeps, of all prompts: about 400 bytes each. The tries
that were least recently used are given up."""
MOST_TRIES = 4096
"""The number of prompts whose estimates an engine keeps."""
_UNSEEN = 1e-12
"""The least share of their mass that unseen tokens keep when others of them are seen, as long as
there are any: differences of rounded numbers may say 0."""
_CHANGE = 1e-14
"""The relative change of an estimate from which the estimates before it are computed anew."""


class DrawnValues(NamedTuple):
    """The values of p, without constraints, at a position where a row drew a token.

    Attributes:
        tokens: the number of allowed tokens.
        p: the probability of the token that was drawn.
        rest: the probability of the other allowed tokens, without those after `children` of them.
            It is summed by itself: where p gives nearly everything to one token, a difference
            would be noise.
        children: the number of the longer beginnings that were known, the first ones of the node.
    """

    tokens: int
    p: float
    rest: float
    children: int = 0


class PrefixNode:
    """A beginning that a row has written.

    Attributes:
        estimate: c of the beginning.
        unseen: the probability under p of the tokens allowed after it without the `children`; None
            until a row goes on from here.
        count: the number of the tokens allowed after it.
        children: the longer beginnings, by their last token.
        p: the probability that p gives to its last token.
    """

    __slots__ = ("children", "count", "estimate", "p", "parent", "trie", "unseen")

    def __init__(self, trie: Trie, parent: PrefixNode | None, p: float) -> None:
        self.trie, self.parent, self.p = trie, parent, p
        self.estimate = 1.0
        self.unseen: float | None = None
        self.count = 0
        self.children: dict[int, PrefixNode] = {}

    def __copy__(self) -> PrefixNode:
        """Returns the node itself: rows that are copies of others go on from the same place."""
        return self

    def learn(self, block: Sequence[int], seen: Sequence[DrawnValues]) -> PrefixNode | None:
        """Records the values that a row has seen at the constrained tokens of its block.

        Returns:
            The row's node after these tokens; None if no constraint binds the row any longer, or
                the trie has no room for more.
        """
        passed, node = [], self
        for token, here in zip(block, seen, strict=False):
            passed.append(node)
            if node.unseen is None:
                node.unseen, node.count = here.p + here.rest, here.tokens
            if token not in node.children:
                if not node.trie.grow():
                    break
                later = sum(child.p for child in list(node.children.values())[here.children :])
                node.unseen = max(here.rest - later, _UNSEEN * here.rest)
                node.children[token] = PrefixNode(node.trie, node, here.p)
            node = node.children[token]
        for one in reversed(passed):
            one._settle()
        self._tell()
        return node if len(passed) == len(block) and node is not passed[-1] else None

    def take(self) -> None:
        """Takes the text that ends here away."""
        self.estimate = 0.0
        self._tell()

    def _tell(self) -> None:
        """Computes the estimates of the shorter beginnings anew, as far as they change."""
        above = self.parent
        while above is not None and above._settle():
            above = above.parent

    def _settle(self) -> bool:
        """Computes the estimate anew; returns True if it has changed."""
        assert self.unseen is not None
        known = sum(child.p * child.estimate for child in self.children.values())
        if len(self.children) < self.count:
            known += self.unseen
        before, self.estimate = self.estimate, known
        return abs(known - before) > _CHANGE * before

    def after(self, path: Sequence[int]) -> PrefixNode | None:
        """Returns the beginning that goes on with these tokens; None if no row has written it."""
        node: PrefixNode | None = self
        for token in path:
            if node is None:
                return None
            node = node.children.get(token)
        return node


class Trie:
    """The estimates of one prompt.

    Attributes:
        kept_by: the `Estimates` that must have room for its nodes; None = the trie has been given
            up, and grows no more.
        nodes: the number of its nodes beside the root.
        root: the empty beginning.
    """

    def __init__(self, kept_by: Estimates) -> None:
        self.kept_by: Estimates | None = kept_by
        self.nodes = 0
        self.root = PrefixNode(self, None, 1.0)

    def grow(self) -> bool:
        """Counts one more node; returns False if there is no room for it."""
        if self.kept_by is None or self.kept_by.nodes >= self.kept_by.most:
            return False
        self.nodes += 1
        self.kept_by.nodes += 1
        return True


class Estimates:
    """The tries of an engine.

    Attributes:
        nodes: the number of nodes of all tries, their roots not counted.
        most: the largest number of nodes.
        tries: the tries by the key of their request, least recently used first.
    """

    def __init__(self, most: int = MOST_NODES) -> None:
        self.nodes, self.most = 0, most
        self.tries: dict[Any, Trie] = {}

    def begin(self, rows: Sequence[Row]) -> None:
        """Gives rows of a request, without new tokens, their estimates, if requested."""
        request = rows[0].request
        if request.estimated or request.distinct:
            trie = Trie(Estimates(sys.maxsize)) if request.distinct else self._of(request)
            for row in rows:
                row.beginning = trie.root

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
    """Returns a key that is equal for an owner's requests with the same p and the same limits.

    Seeds do not matter.
    """
    sampling, limits = request.sampling, request.limits
    settings = [
        _hashable(getattr(sampling, each.name)) for each in fields(sampling) if each.name != "seed"
    ]
    ends = (
        limits.max_new_tokens,
        _hashable(limits.stop),
        _hashable(limits.eos),
        _hashable(request.criteria),
        request.shown_tokens,
    )
    return request.owner, request.prompt_ids, *settings, *ends, _hashable(request.constraints)


def _hashable(value: Any) -> Any:
    """Returns a hashable key: lists and mappings by their items, unhashable objects by identity."""
    if isinstance(value, dict):
        return tuple((key, _hashable(item)) for key, item in sorted(value.items()))
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    try:
        hash(value)
    except TypeError:
        return _Identity(value)
    return value


class _Identity:
    """A key that equals only the keys of the same object."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __hash__(self) -> int:
        return id(self.held)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.held is self.held


def weigh(scores: Tensor, temperature: float, positions: Positions) -> None:
    """Multiplies the probability of each token by the estimate of the text that the token makes.

    Args:
        scores: [rows, q, vocab], after all controls but temperature; changed in place.
        temperature: the temperature that the scores will be divided by.
        positions: the positions that the scores are for.
    """
    for b, row in enumerate(positions.rows):
        for column, path in (
            positions.paths(b, scores.shape[1]) if row.beginning is not None else ()
        ):
            _multiply(scores[b, column], row.beginning.after(path), temperature)


def log_weights(node: PrefixNode, block: Sequence[int], inside: Tensor) -> list[float]:
    """Returns the natural logs of the weights of tokens that were drawn after a beginning.

    Args:
        inside: natural log of p at each token, [tokens, vocab]; -inf for tokens that are not
            allowed.
    """
    weights = []
    here: PrefixNode | None = node
    for token, logs in zip(block, inside, strict=True):
        _multiply(logs, here, 1.0)
        here = None if here is None else here.children.get(token)
        weights.append(
            float(logs.logsumexp(-1)) - (0.0 if here is None else math.log(here.estimate))
        )
    return weights


def _multiply(scores: Tensor, node: PrefixNode | None, temperature: float) -> None:
    """Multiplies probabilities by the estimates after one beginning, in place: scores [vocab]."""
    known = (
        {}
        if node is None
        else {token: child.estimate for token, child in node.children.items() if child.estimate < 1}
    )
    if known:
        logs = torch.tensor(list(known.values()), dtype=torch.float64).log() * temperature
        scores[torch.tensor(list(known), device=scores.device)] += logs.to(scores)
