"""A smaller model of the same vocabulary drafts token by token, with a ragged cache of its own.

Its cache holds a prefix of each row's committed tokens, never more than all but the last. It lags by one after a full acceptance
(it never saw its own last draft) and by more after plain rounds; the first pass of a proposal feeds whatever is pending, so no
case is special.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.distributions import draw, probabilities
from shoal.errors import BadLogits
from shoal.request import Row
from shoal.round import Proposal
from shoal.runner import Runner


class ModelDrafter:
    """Samples k tokens per row from a draft model under the row's own sampling controls.

    Attributes:
        runner: the draft model. vocab_size: the target's; the drafter's logits are cut or filled up to it.
    """

    def __init__(self, runner: Runner, vocab_size: int) -> None:
        self.runner, self.vocab_size = runner, vocab_size

    def propose(
        self, rows: Sequence[Row], lengths: Sequence[int], luck: Tensor,
        goes_on: Callable[[Sequence[float]], Sequence[bool]] | None = None,
    ) -> Proposal:  # fmt: skip
        """At most max(lengths) passes; rows with shorter drafts ride along and their surplus is ignored."""
        lengths = list(lengths)
        slots, ones = [row.slot for row in rows], [1] * len(rows)
        reads_history = any(row.request.sampling.reads_history for row in rows)
        histories: list[list[int]] = [[] for _ in rows]
        tokens: list[Tensor] = []
        qs: list[Tensor] = []
        logits = self._catch_up(rows)
        steps = 0
        while steps < max(lengths):
            j, steps = steps, steps + 1
            if j:
                logits = self.runner.feed(slots, tokens[-1][:, None], ones)[:, -1]
            q = self._distributions(logits, rows, histories, j)
            if goes_on is not None:
                going = goes_on(_confidence(logits, q, rows))
                lengths = [length if on else min(length, j) for length, on in zip(lengths, going, strict=True)]
                if max(lengths) <= j:
                    break
            token = draw(q, luck[:, j])
            tokens.append(token)
            qs.append(q)
            if reads_history:
                for history, drawn, length in zip(histories, token.tolist(), lengths, strict=True):
                    if j + 1 < length:  # what a row drafts beyond its own length is ignored, so no control may fail on it
                        history.append(drawn)
        if not tokens:
            return Proposal.empty(len(rows), luck.device, steps)
        drafted = torch.stack(tokens, dim=1)
        drafts = [row[:length] for row, length in zip(drafted.tolist(), lengths, strict=True)]
        own = torch.tensor(lengths, device=drafted.device)
        return Proposal(drafted, own, torch.stack(qs, dim=1), drafts, steps)

    def observe(self, rows: Sequence[Row]) -> None:
        """Rolls back to what was committed."""
        cache = self.runner.cache
        for row in rows:
            cache.rollback(row.slot, min(cache.lengths[row.slot], len(row.tokens) - 1))

    def _catch_up(self, rows: Sequence[Row]) -> Tensor:
        """Feeds each row's committed tokens that the cache lacks, at least the last; logits after it, [rows, vocab]."""
        self._shorten_lags(rows)
        pending = [self._pending(row) for row in rows]
        counts = [len(tokens) for tokens in pending]
        width = max(counts)
        block = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in pending], device=self.runner.device)
        logits = self.runner.feed([row.slot for row in rows], block, counts)
        if min(counts) == width:
            return logits[:, -1]
        last = torch.tensor([count - 1 for count in counts], device=logits.device)
        return logits[torch.arange(len(rows), device=logits.device), last]

    def _pending(self, row: Row) -> list[int]:
        return row.tokens[self.runner.cache.lengths[row.slot] :]

    def _shorten_lags(self, rows: Sequence[Row]) -> None:
        """After plain rounds: brings every row to at most two pending tokens, all laggards by the shortest lag at a time, so
        that no block reaches beyond what a row will hold."""
        while late := [row for row in rows if len(self._pending(row)) > 2]:
            step = min(len(self._pending(row)) for row in late) - 1
            block = torch.tensor([self._pending(row)[:step] for row in late], device=self.runner.device)
            self.runner.feed([row.slot for row in late], block, [step] * len(late), want_logits=False)

    def _distributions(self, logits: Tensor, rows: Sequence[Row], histories: Sequence[Sequence[int]], j: int) -> Tensor:
        """q of every row at draft position j, [rows, target vocab]; ids the drafter does not have get no probability."""
        missing = self.vocab_size - logits.shape[-1]
        if missing > 0:
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        try:
            return probabilities(logits[:, None, : self.vocab_size], rows, histories, first=j)[:, 0]
        except BadLogits as error:
            raise BadLogits(f"the drafter {self.runner.name} returned NaN or infinite logits: {error}") from error


def _confidence(logits: Tensor, q: Tensor, rows: Sequence[Row]) -> list[float]:
    """The drafter's highest probability in each row; before processing if a row is greedy, as its q says nothing then."""
    if any(row.request.sampling.greedy for row in rows):
        q = logits.to(q.dtype).softmax(dim=-1)
    return q.amax(dim=-1).tolist()
