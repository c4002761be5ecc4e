"""Drafts joined to the proposals of other drafters: paths of texts, and tokens that grammars force.

Trees of two drafters become one, a model's tree with paths from texts joined to it, after RASD
(2025, arXiv 2503.03434). Paths that both propose share their nodes, and further nodes of the text
are appended. A text's node that would follow a node of the model is left out if the model's q has
many likelier tokens.

The text's nodes are point masses, tried after the model's draws at the same place. The model's
draws come from a known q. So this is recursive rejection sampling whose last draws at a place come
from point masses, and it is exact: with p for the rest that earlier draws have left, a point mass x
is accepted with probability p(x), and p without x is left for later draws. The presence of such a
node may depend on all that the model drew, as long as its verification uses other random numbers.

Where a grammar leaves one token only, that token is drafted, and no model has to be asked. Forced
tokens follow the last ones of any other drafter's proposal, or replace tokens of it that were
chosen without a distribution and that the grammar refuses. They are point masses and functions of
the tokens before them on their path, so every rule verifies them, and the output has the target's
distribution. A text has several tokenizations. llguidance's masks allow the tokenizer's own where
the text is certain, so that the target accepts it.

Mostly the grammar leaves a choice of white space behind them. By the coupled rule, under which no
draft changes a token, the most frequent token of the model's texts is drafted there, and the tokens
that the grammar forces behind it.

Of several text drafters that may propose for a row, one is chosen by the acceptance of the first
tokens of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from shoal.config import MOST_NODES
from shoal.constraints import masks
from shoal.drafting.recycling import Habits
from shoal.drafting.text import CHOICES, Guess, with_point_masses
from shoal.types.requests import Row
from shoal.types.trees import DraftTree, Siblings, Verdict


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
    return tree if siblings is None else replace(tree, siblings=_extend(siblings, rows))


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
                joint = self.nodes.get((known[parent], token))
                if joint is None:
                    yield node, known[parent]
                else:
                    known[node] = joint

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
    """Returns the nodes of each guess for which q has `CHOICES` likelier tokens; none without q."""
    tokens_by_row: list[set[int]] = [set() for _ in rows]
    if siblings is None:
        return tokens_by_row
    asked = [
        (b, node, siblings.contexts[b][parent + 1], guess.tokens[node])
        for b, (row, guess) in enumerate(zip(rows, guesses, strict=True))
        for node, parent in row.joins(guess)
        if siblings.contexts[b][parent + 1] >= 0
    ]
    if not asked:
        return tokens_by_row
    whose, nodes, contexts, tokens = zip(*asked, strict=True)
    q = siblings.q[torch.tensor(contexts, device=siblings.q.device)]
    likelier = (q > q.gather(1, torch.tensor(tokens, device=q.device)[:, None])).sum(-1)
    for b, node, before in zip(whose, nodes, likelier.tolist(), strict=True):
        if before >= CHOICES:
            tokens_by_row[b].add(node)
    return tokens_by_row


def _extend(siblings: Siblings, rows: Sequence[_Row]) -> Siblings:
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


NAME = "grammar"
"""The name of forced drafts in counts by drafter."""
LONGEST = 16
"""The longest path of a tree that ends in forced tokens, if the draft length has a lower limit."""


def longest(limit: int) -> int:
    """Returns the longest path with forced tokens, for a limit of draft lengths; 0 = no drafts."""
    return max(limit, LONGEST) if limit else 0


class ForcedTokens:
    """The forced tokens of the rows of an engine.

    Args:
        limit: the limit of draft lengths; 0 = nothing is drafted.
        vocab_size: the size of the target's vocabulary.
        drafter: the name of the engine's drafter.
        habits: the tokens that may follow forced ones; None = none.
    """

    def __init__(
        self, limit: int, vocab_size: int, drafter: str, habits: Habits | None = None
    ) -> None:
        self._most, self._vocab_size, self._drafter = longest(limit), vocab_size, drafter
        self._habits = habits
        self._lengths: dict[Row, int] = {}  # of the rows of the last round, which may have ended

    def joined(self, rows: Sequence[Row], tree: DraftTree) -> DraftTree:
        """Returns the trees of a round with the forced tokens that follow them.

        Trees stay as they are if they have probes, whose places are known to their drafter, or if
        their siblings were drawn independently, which nothing may join.
        """
        if not self._most or not any(row.constraints for row in rows):
            return tree
        if self._habits is not None:
            for row, length in self._lengths.items():
                self._habits.learn(row.tokens[length - 1 :])
            self._lengths = {row: len(row.tokens) for row in rows if row.constraints}
        if tree.probes is not None or (tree.siblings is not None and tree.siblings.independent):
            return tree
        if tree.branches or tree.siblings is not None:
            return self._grow(rows, tree)
        kept, runs = [], []
        for row, draft in zip(rows, tree.drafts, strict=True):
            count, run = (
                masks.certain_tokens(row, draft, self._vocab_size) if row.constraints else (0, [])
            )
            # A token that was drawn from q is proposed, whatever it is.
            if row.constraints and tree.q is None and self._habits is not None:
                room = self._room(row, count)
                self._habits.extend(row, draft[:count], run, room, self._vocab_size)
            run = run[: self._room(row, count)] if tree.q is None or count == len(draft) else []
            kept.append(count if run else len(draft))
            runs.append(run)
        if not any(runs):
            return tree
        heads = [draft[:count] for draft, count in zip(tree.drafts, kept, strict=True)]
        drafts = [head + run for head, run in zip(heads, runs, strict=True)]
        tree_of_drafts = DraftTree.of(drafts, device=tree.tokens.device, steps=tree.steps)
        q = None if tree.q is None else with_point_masses(tree.q, runs, kept)
        return self._add_names(replace(tree_of_drafts, q=q), tree, kept)

    def _grow(self, rows: Sequence[Row], tree: DraftTree) -> DraftTree:
        """Returns trees that may branch with the forced tokens behind their leaves, and their root.

        Of trees that were drawn from a q, the root gets none unless it is the only column.
        """
        each = zip(rows, tree.drafts, tree.parents, strict=True)
        guesses = [
            self._guess(row, draft, above, root=tree.siblings is None) for row, draft, above in each
        ]
        kept = list(map(len, tree.drafts))
        if [len(guess.tokens) for guess in guesses] == kept:
            return tree
        return self._add_names(grafted(tree, guesses, tree.steps), tree, kept)

    def _guess(self, row: Row, draft: Sequence[int], above: Sequence[int], *, root: bool) -> Guess:
        """Returns a row's tree with forced tokens behind its nodes."""
        tokens, parents, paths = list(draft), list(above), [list[int]()]
        for token, parent in zip(draft, above, strict=True):
            paths.append([*paths[parent + 1], token])
        inner = set(above) - ({-1} if root else set())
        most = min(self._most, MOST_NODES - len(draft)) if row.constraints else 0
        for end, path in enumerate(paths, start=-1):
            if end in inner or len(tokens) >= len(draft) + most:
                continue
            kept, run = masks.certain_tokens(row, path, self._vocab_size)
            room = min(self._room(row, len(path)), len(draft) + most - len(tokens))
            for token in run[:room] if kept == len(path) else ():
                parents.append(end)
                end = len(tokens)
                tokens.append(token)
        return Guess(tokens, (), parents)

    def _room(self, row: Row, depth: int) -> int:
        """Returns the most forced tokens behind a depth of the row's tree."""
        allowed = [self._most, row.remaining - 1]
        if row.request.max_draft is not None:
            allowed.append(row.request.max_draft)
        return max(min(allowed) - depth, 0)

    def _add_names(self, tree: DraftTree, own: DraftTree, kept: Sequence[int]) -> DraftTree:
        """Returns the tree with the names of drafters; the first nodes are those that are kept."""
        counts = [len(draft) - count for draft, count in zip(tree.drafts, kept, strict=True)]
        names = own.drafters or [[self._drafter] * len(draft) for draft in own.drafts]
        every = [
            [*known[:count], *[NAME] * more]
            for known, count, more in zip(names, kept, counts, strict=True)
        ]
        return replace(tree, drafters=every, forced=counts)


SURE = 0.6
"""The prior acceptance rate of the model's first draft token.

Until there is data, a text drafter gets a row if its confidence is at least this. In suffix
decoding this holds for a token that followed a match of 9 tokens once, or a match of 3 tokens
twice, if no other token followed.
"""


PRIOR = 4.0
"""The number of rounds that a prior counts as.

The prior of all rows is `SURE` for the last drafter and 1 for the others; the prior of a row is the
rate of all rows.
"""


FADE = 0.98
"""The factor by which counts fade in each round, so that a drafter that was left gets a new chance.
"""


@dataclass
class Tally:
    """The first tokens that a drafter proposed.

    Attributes:
        accepted: the number of accepted tokens, fading.
        expected: the number of tokens that would be accepted by the drafter's confidence, fading.
    """

    accepted: float = 0.0
    expected: float = 0.0

    def rate(self, prior: float) -> float:
        """Returns the ratio of accepted to expected tokens; `prior` if there are no counts."""
        return (self.accepted + PRIOR * prior) / (self.expected + PRIOR)

    def add(self, accepted: bool, expected: float) -> None:
        self.accepted = FADE * self.accepted + accepted
        self.expected = FADE * self.expected + expected

    def fade(self) -> None:
        self.accepted, self.expected = FADE * self.accepted, FADE * self.expected


class FirstTokens:
    """The counts of first tokens by drafter, over all rows and for each row.

    Args:
        members: the number of drafters. The confidence of all drafters but the last is compared
            with the worth of the last one's first tokens.
    """

    def __init__(self, members: int) -> None:
        self._members = members
        self._all = [Tally() for _ in range(members)]
        self._rows: dict[Row, list[Tally]] = {}
        # For each row: the drafter that proposed, and the accepted tokens that it expected.
        self._round: dict[Row, tuple[int, float]] = {}

    def takes(self, row: Row, member: int, confidence: float) -> bool:
        """Returns True if the row is left to a drafter with this confidence in its first token."""
        last = self._members - 1
        own = self._rows.get(row, self._all)
        believed = confidence * own[member].rate(self._all[member].rate(1.0))
        return believed >= own[last].rate(self._all[last].rate(SURE))

    def proposed(
        self,
        rows: Sequence[Row],
        whose: Sequence[int],
        confidence: Sequence[float],
        drafted: Sequence[int],
    ) -> None:
        """Notes the proposals of a round.

        Args:
            rows: the rows.
            whose: for each row, the drafter that proposed.
            confidence: for each row, the drafter's confidence; 1 for the last drafter.
            drafted: for each row, the draft length.
        """
        each = zip(rows, whose, confidence, drafted, strict=True)
        self._round = {row: (member, sure) for row, member, sure, count in each if count}

    def learn(self, rows: Sequence[Row], verdict: Verdict) -> None:
        """Counts the first tokens of a round that is over."""
        if not self._round:
            return
        for row, path in zip(rows, verdict.lists[0], strict=True):
            known = self._round.get(row)
            if known is None:
                continue
            own = self._rows.setdefault(row, [Tally() for _ in range(self._members)])
            for member, tally in enumerate(own):
                if member != known[0]:
                    tally.fade()
            for tally in (own[known[0]], self._all[known[0]]):
                tally.add(len(path) > 0, known[1])
        self._round = {}

    def forget(self, rows: Sequence[Row]) -> None:
        """Forgets rows that have left."""
        for row in rows:
            self._rows.pop(row, None)
            self._round.pop(row, None)
