"""SLEM, string-level exact match: a drafter of any vocabulary writes text.

Timor et al. 2025, arXiv 2502.05202. The target's tokens of that text are the drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import ceil, prod

import torch
from torch import Tensor

from shoal.drafting.contexts import Contexts
from shoal.drafting.model import ModelDrafter
from shoal.drafting.protocol import DraftInputs
from shoal.drafting.text import NOTHING, Guess, tree_of
from shoal.models.vocabulary import Vocabularies
from shoal.types.requests import Row
from shoal.types.trees import DraftTree


class StringDrafts:
    """A method that writes the drafter's most probable token after each.

    It writes as much text as the drafts need.

    Args:
        drafter: the drafter, with the model and its cache.
        contexts: the contexts of its rows.
        vocabularies: the target's vocabulary and the drafter's.
    """

    def __init__(
        self, drafter: ModelDrafter, contexts: Contexts, vocabularies: Vocabularies
    ) -> None:
        self._drafter, self._contexts, self._vocabularies = drafter, contexts, vocabularies
        kept = vocabularies.kept
        self._kept = None if kept is None else torch.tensor(kept, device=drafter.runner.device)

    def steps(self, lengths: Sequence[int]) -> int:
        """Returns the number of the drafter's tokens for drafts of these lengths."""
        return ceil(max(lengths) * self._vocabularies.ratio)

    def propose(self, inputs: DraftInputs, steps: int) -> DraftTree:
        """Returns drafts that are point masses: exact match needs no q."""
        drafter, rows = self._drafter, inputs.rows
        before, _ = drafter.lacking(rows, inputs.lengths)
        tokens, sure = self._written(inputs, steps)
        drafter.leave_out(rows, inputs.lengths, before)
        guesses = [
            self._guess(row, own, confidence, length) if length else NOTHING
            for row, own, confidence, length in zip(rows, tokens, sure, inputs.lengths, strict=True)
        ]
        return tree_of(guesses, inputs)

    def _written(
        self, inputs: DraftInputs, steps: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Returns the drafter's tokens of each row and their probabilities.

        A token is -1 if the drafter has no distribution.
        """
        runner, slots = self._drafter.runner, self._drafter.slots(inputs.rows)
        last = self._drafter.first_logits(inputs)
        tokens: list[Tensor] = []
        sure: list[Tensor] = []
        while True:
            highest, best = last.float().softmax(-1).max(-1)
            best = best if self._kept is None else self._kept[best]
            tokens.append(torch.where(highest.isfinite(), best, -1))
            sure.append(highest)
            if len(tokens) == steps:
                break
            last = runner.feed(slots, best[:, None], [1] * len(slots))[:, -1]
        found = torch.stack(tokens, dim=1).tolist()
        self._drafter.clean([row for row, own in zip(inputs.rows, found, strict=True) if -1 in own])
        return found, torch.stack(sure, dim=1).tolist()

    def _guess(self, row: Row, written: Sequence[int], sure: Sequence[float], length: int) -> Guess:
        """Returns the target's tokens of the text that the drafter wrote, up to a special token."""
        ours, theirs = self._vocabularies.target, self._vocabularies.draft
        stop = next(
            (i for i, token in enumerate(written) if token not in theirs.pieces), len(written)
        )
        own = list(written[:stop])
        self._contexts.of(row).drafted = own
        tokens = self._retokenised(row.tokens, theirs.spelled(own))
        ends = list(accumulate(len(theirs.pieces[token]) for token in own))
        confidence, at = [], 0
        for end in accumulate(len(ours.pieces[token]) for token in tokens):
            first = at
            while at < len(ends) and ends[at] <= end:
                at += 1
            confidence.append(prod(sure[first:at]))
        if stop < len(written) and written[stop] == theirs.end and ours.end is not None:
            tokens.append(ours.end)
            confidence.append(sure[stop])
        return Guess(tokens[:length], confidence[:length])

    def _retokenised(self, tokens: Sequence[int], text: bytes) -> list[int]:
        """Returns the target's tokens of a text that follows these tokens.

        Tokens and text are split together, if that leaves the tokens as they are.
        """
        ours = self._vocabularies.target
        for start in ours.windows(tokens):
            window = list(tokens[start:])
            found = ours.ids(ours.spelled(window) + text)
            if found[: len(window)] == window:
                return found[len(window) :]
        return []
