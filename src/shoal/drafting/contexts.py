"""The text of each row in the tokens of a drafter with another vocabulary.

The drafter's tokenizer splits a prompt. Committed tokens are split anew together with the word
before them, as the drafter would split the whole text: its drafts are worse after tokens that were
mapped one by one, or that were kept in the pieces in which the drafter wrote them. The drafter's
cache keeps all tokens before the first one that has changed.

By SLEM, string-level exact match, the drafter writes text, and the target's tokens of that text are
the drafts. Timor et al. 2025, arXiv 2502.05202.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil, prod

import torch
from torch import Tensor

from shoal.drafting.model import ModelDrafter
from shoal.drafting.protocol import DraftInputs
from shoal.drafting.text import NOTHING, Guess, tree_of
from shoal.models.vocabulary import Vocabularies
from shoal.types.requests import Request, Row
from shoal.types.trees import DraftTree


@dataclass(eq=False, slots=True)
class Context:
    """A row as the drafter reads it.

    Attributes:
        row: a row with the drafter's ids in place of the target's; the key of its slot.
        read: the number of tokens of the target's row that it covers.
        floor: the number of tokens that stay as they are: the prompt, and all up to the last
            special token.
        drafted: the drafter's ids that it wrote after `row.tokens` in the last round; they may be
            in its cache.
    """

    row: Row
    read: int
    floor: int
    drafted: list[int] = field(default_factory=list)


class Contexts:
    """The rows of an engine in the drafter's tokens; `same` are its ids of shared tokens."""

    def __init__(self, vocabularies: Vocabularies) -> None:
        self._target, self._draft = vocabularies.target, vocabularies.draft
        shared = vocabularies.shared
        self.same = {} if shared is None else dict(zip(shared.target, shared.draft, strict=True))
        self._of: dict[Row, Context] = {}
        # By the identity of the request: the request, and a copy in the drafter's ids.
        self._prompts: dict[int, tuple[Request, Request]] = {}

    def of(self, row: Row) -> Context:
        """Returns the context of a row; begins it if the row is new."""
        context = self._of.get(row)
        if context is None:
            request = self._prompt(row.request)
            tokens = list(request.prompt_ids)
            own = Row(
                request,
                row.group,
                row.index,
                seed=row.seed,
                tokens=tokens,
                eos=frozenset(),
                max_length=row.max_length,
            )
            context = self._of[row] = Context(own, row.prompt_length, len(tokens))
        return context

    @property
    def rows(self) -> Sequence[Row]:
        """The target's rows that have a context."""
        return list(self._of)

    def with_contexts(self, rows: Iterable[Row]) -> list[Row]:
        """Returns the rows that have a context."""
        return [row for row in rows if row in self._of]

    def leave(self, rows: Iterable[Row]) -> None:
        """Forgets rows, and prompts without rows."""
        left = {id(row.request) for row in rows if self._of.pop(row, None) is not None}
        for key in left - {id(row.request) for row in self._of}:
            del self._prompts[key]

    def follow(self, row: Row) -> int:
        """Reads newly committed tokens.

        Returns:
            The number of leading tokens that have not changed, drafts included.
        """
        own = self.of(row)
        tokens, drafted, new = own.row.tokens, own.drafted, row.tokens[own.read :]
        if not new and not drafted:
            return len(tokens)
        start = max(own.floor - 1, len(tokens) - WIDEST, 0)
        before = [*tokens[start:], *drafted]
        own.read, own.drafted = len(row.tokens), []
        texts: list[int] = []
        for token in new:
            if token in self._target.pieces:
                texts.append(token)
                continue
            self._append(own, texts)
            texts = []
            if token in self.same:
                tokens.append(self.same[token])
            own.floor = len(tokens)
        self._append(own, texts)
        pairs = zip(before, tokens[start:], strict=False)
        same = next(
            (i for i, (old, now) in enumerate(pairs) if old != now),
            min(len(before), len(tokens) - start),
        )
        return start + same

    def _append(self, own: Context, texts: Sequence[int]) -> None:
        """Reads a run of the target's tokens without special tokens."""
        if texts:
            tokens = own.row.tokens
            window = self._draft.windows(tokens, own.floor)[0]
            tokens[window:] = self._draft.ids(
                self._draft.spelled(tokens[window:]) + self._target.spelled(texts)
            )

    def _prompt(self, request: Request) -> Request:
        """Returns the prompt in the drafter's ids, with at least one id."""
        key = id(request)
        if key not in self._prompts:
            ids = list(self._draft.begin)
            texts: list[int] = []
            for token in (*request.prompt_ids, None):
                if token is not None and token in self._target.pieces:
                    texts.append(token)
                    continue
                first = len(ids) == len(self._draft.begin)
                ids += self._draft.ids(
                    self._target.text(texts) if first else self._target.spelled(texts), first=first
                )
                texts = []
                same = None if token is None else self.same.get(token)
                ids += [] if same is None or same in self._draft.begin else [same]
            self._prompts[key] = (
                request,
                Request(tuple(ids or [self._draft.end or 0]), request.n, owner=request.owner),
            )
        return self._prompts[key][1]


WIDEST = 64
"""The number of tokens at the end of a row that later tokens may change."""


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
        """Returns each row's drafted tokens (-1: no distribution) and their probabilities."""
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
        token_lists = torch.stack(tokens, dim=1).tolist()
        self._drafter.clean(
            [row for row, own in zip(inputs.rows, token_lists, strict=True) if -1 in own]
        )
        return token_lists, torch.stack(sure, dim=1).tolist()

    def _guess(self, row: Row, written: Sequence[int], sure: Sequence[float], length: int) -> Guess:
        """Returns the target's tokens of the text that the drafter wrote, up to a special token."""
        ours, theirs = self._vocabularies.target, self._vocabularies.draft
        stop = next(
            (i for i, token in enumerate(written) if token not in theirs.pieces), len(written)
        )
        own = list(written[:stop])
        self._contexts.of(row).drafted = own
        tokens = self._retokenise(row.tokens, theirs.spelled(own))
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

    def _retokenise(self, tokens: Sequence[int], text: bytes) -> list[int]:
        """Returns the target's tokens of a text that follows these tokens.

        Tokens and text are split together, if that leaves the tokens as they are.
        """
        ours = self._vocabularies.target
        for start in ours.windows(tokens):
            window = list(tokens[start:])
            ids = ours.ids(ours.spelled(window) + text)
            if ids[: len(window)] == window:
                return ids[len(window) :]
        return []
