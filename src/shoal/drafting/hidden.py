"""Hidden states of the target, for drafters that are heads on them: those of prompts, and those of
the paths that rounds keep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shoal.sampling.scores import Scores
from shoal.types.requests import Request, Row
from shoal.types.rounds import Verdict
from shoal.types.schedule import PrefillChunk


def kept(scores: Scores, verdict: Verdict) -> list[Tensor]:
    """Of each row, the hidden states of its last token and of the nodes that were accepted,
    [accepted + 1, features]: of all its tokens since the round before, but the one that the round
    added without feeding it."""
    hidden = _hidden(scores)
    paths, _ = verdict.lists
    return [
        states[: 1 + len(path)]
        if isinstance(path, range)
        else states[[0, *(node + 1 for node in path)]]
        for states, path in zip(hidden, paths, strict=True)
    ]


def last_kept(scores: Scores, verdict: Verdict) -> Tensor:
    """Of each row, the hidden state of the deepest node that was accepted, or of its last token,
    [rows, features]: what the token that follows the accepted ones was drawn from."""
    hidden = _hidden(scores)
    paths, _ = verdict.lists
    columns = torch.tensor([path[-1] + 1 if path else 0 for path in paths], device=hidden.device)
    return hidden[torch.arange(len(paths), device=hidden.device), columns]


def _hidden(scores: Scores) -> Tensor:
    assert scores.hidden is not None, "a drafter with `hidden_layers` is given hidden states"
    return scores.hidden


class PromptStates:
    """Hidden states of the prompts of requests that have rows left.

    Args:
        most: how many positions of a prompt are kept, its last ones; None = all.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._of: dict[
            int, tuple[Request, list[Tensor], int]
        ] = {}  # by identity, which holding the request keeps its own
        self._left: dict[int, int] = {}

    def read(self, chunks: Sequence[PrefillChunk], hidden: Sequence[Tensor]) -> None:
        """Takes what `Drafter.read_prompts` is given. A chunk that does not follow what is there is
        passed over."""
        for chunk, states in zip(chunks, hidden, strict=True):
            request = chunk.row.request
            _, pieces, count = (
                self._of.get(id(request), (request, [], 0)) if chunk.start else (request, [], 0)
            )
            if chunk.start == count < chunk.stop:
                kept = [*pieces, states]
                if self._most is not None:  # a copy: a view would keep all positions of the chunk
                    kept = [torch.cat(kept)[-self._most :].clone()]
                self._of[id(request)] = request, kept, chunk.stop

    def of(self, row: Row) -> Tensor | None:
        """Hidden states of the row's prompt without its last token, [positions, features]; None
        where there are none, or not all were read."""
        _, pieces, count = self._of.get(id(row.request), (row.request, [], 0))
        return torch.cat(pieces) if pieces and count == row.prompt_length - 1 else None

    @property
    def bytes(self) -> int:
        """Of what is kept now."""
        return sum(
            piece.numel() * piece.element_size()
            for _, pieces, _ in self._of.values()
            for piece in pieces
        )

    def leave(self, rows: Iterable[Row]) -> None:
        """Rows left; with the last row of a request its prompt is forgotten."""
        for row in rows:
            key = id(row.request)
            self._left[key] = self._left.get(key, 0) + 1
            if self._left[key] == row.request.n:
                self._of.pop(key, None)
                del self._left[key]
