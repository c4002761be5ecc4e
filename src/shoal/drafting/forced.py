"""Drafts that grammars force: where one token alone can follow, it is drafted for nothing.

Forced tokens follow the last ones of any other drafter's proposal, or replace tokens of it that
were chosen without a distribution and that the grammar refuses. They are point masses and functions
of the tokens before them on their path, so every rule verifies them, and the output has the
target's distribution. A text has several tokenizations. llguidance's masks allow the tokenizer's
own where the text is certain, so that the target accepts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal.config import MOST_NODES
from shoal.constraints import masks
from shoal.drafting.grafting import grafted
from shoal.drafting.text import Guess, with_point_masses
from shoal.types.requests import Row
from shoal.types.trees import DraftTree

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
    """

    def __init__(self, limit: int, vocab_size: int, drafter: str) -> None:
        self._most, self._vocab_size, self._drafter = longest(limit), vocab_size, drafter

    def joined(self, rows: Sequence[Row], tree: DraftTree) -> DraftTree:
        """Returns the trees of a round with the forced tokens that follow them.

        Trees stay as they are if they have probes, whose places are known to their drafter, or if
        their siblings were drawn independently, which nothing may join.
        """
        if not self._most or not any(row.constraints for row in rows):
            return tree
        if tree.probes is not None or (tree.siblings is not None and tree.siblings.independent):
            return tree
        if tree.branches or tree.siblings is not None:
            return self._grown(rows, tree)
        kept, runs = [], []
        for row, draft in zip(rows, tree.drafts, strict=True):
            count, run = masks.forced(row, draft, self._vocab_size) if row.constraints else (0, [])
            # A token that was drawn from q is proposed, whatever it is.
            run = run[: self._room(row, count)] if tree.q is None or count == len(draft) else []
            kept.append(count if run else len(draft))
            runs.append(run)
        if not any(runs):
            return tree
        heads = [draft[:count] for draft, count in zip(tree.drafts, kept, strict=True)]
        drafts = [head + run for head, run in zip(heads, runs, strict=True)]
        found = DraftTree.of(drafts, device=tree.tokens.device, steps=tree.steps)
        q = None if tree.q is None else with_point_masses(tree.q, runs, kept)
        return self._named(replace(found, q=q), tree, kept)

    def _grown(self, rows: Sequence[Row], tree: DraftTree) -> DraftTree:
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
        return self._named(grafted(tree, guesses, tree.steps), tree, kept)

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
            kept, run = masks.forced(row, path, self._vocab_size)
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

    def _named(self, tree: DraftTree, own: DraftTree, kept: Sequence[int]) -> DraftTree:
        """Returns the tree with the names of drafters; the first nodes are those that are kept."""
        counts = [len(draft) - count for draft, count in zip(tree.drafts, kept, strict=True)]
        names = own.drafters or [[self._drafter] * len(draft) for draft in own.drafts]
        every = [
            [*known[:count], *[NAME] * more]
            for known, count, more in zip(names, kept, counts, strict=True)
        ]
        return replace(tree, drafters=every, forced=counts)
