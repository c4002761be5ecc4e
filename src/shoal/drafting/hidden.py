"""Hidden states of the target, for drafters that are heads on them.

They are the states of prompts, and of the paths that rounds keep.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shoal.sampling.scores import Scores
from shoal.types.requests import Request, Row
from shoal.types.rounds import Verdict
from shoal.types.schedule import PrefillChunk


def kept(scores: Scores, verdict: Verdict) -> list[Tensor]:
    """Returns the hidden states of each row's last token and of its accepted nodes.

    They have shape [accepted + 1, features]. The token that the round added behind them has no
    state yet: it is fed in the next round.
    """
    hidden = _hidden(scores)
    paths, _ = verdict.lists
    return [
        states[: 1 + len(path)]
        if isinstance(path, range)
        else states[[0, *(node + 1 for node in path)]]
        for states, path in zip(hidden, paths, strict=True)
    ]


def last_kept(scores: Scores, verdict: Verdict) -> Tensor:
    """Returns the hidden state of each row's deepest accepted node, or of its last token.

    They have shape [rows, features]. The token after the accepted ones was drawn from this state.
    """
    hidden = _hidden(scores)
    paths, _ = verdict.lists
    columns = torch.tensor([path[-1] + 1 if path else 0 for path in paths], device=hidden.device)
    return hidden[torch.arange(len(paths), device=hidden.device), columns]


def _hidden(scores: Scores) -> Tensor:
    assert scores.hidden is not None, "a drafter with `hidden_layers` is given hidden states"
    return scores.hidden


class PromptStates:
    """The hidden states of the prompts of requests that have rows left.

    Args:
        most: the number of positions of a prompt that are kept, its last ones; None = all.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        # By the identity of the request, which is held so that no other takes it.
        self._of: dict[int, tuple[Request, list[Tensor], int]] = {}
        self._left: dict[int, int] = {}

    def read(self, chunks: Sequence[PrefillChunk], hidden: Sequence[Tensor]) -> None:
        """Reads the arguments of `Drafter.read_prompts`.

        A chunk that does not follow the positions read so far is skipped.
        """
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
        """Returns the hidden states of the row's prompt, [positions, features].

        The prompt's last token has none. Returns None if there are no states, or if some were not
        read.
        """
        _, pieces, count = self._of.get(id(row.request), (row.request, [], 0))
        return torch.cat(pieces) if pieces and count == row.prompt_length - 1 else None

    @property
    def bytes(self) -> int:
        """The bytes that are kept now."""
        return sum(
            piece.numel() * piece.element_size()
            for _, pieces, _ in self._of.values()
            for piece in pieces
        )

    def leave(self, rows: Iterable[Row]) -> None:
        """Notes that rows have left; the prompt of a request is forgotten with its last row."""
        for row in rows:
            key = id(row.request)
            self._left[key] = self._left.get(key, 0) + 1
            if self._left[key] == row.request.n:
                self._of.pop(key, None)
                del self._left[key]


class LastStates:
    """The hidden state from which each row's last token was drawn, its prompt's at first."""

    def __init__(self) -> None:
        self._prompts = PromptStates(most=1)
        self._last: dict[Row, Tensor] = {}
        """The states [width] of the rows that had a round."""

    def read(self, chunks: Sequence[PrefillChunk], hidden: Sequence[Tensor]) -> None:
        """Reads the arguments of `Drafter.read_prompts`."""
        self._prompts.read(chunks, hidden)

    def of(self, row: Row) -> Tensor | None:
        """Returns the state of a row, [width]; None if there is none."""
        if row in self._last:
            return self._last[row]
        prompt = self._prompts.of(row)
        return None if prompt is None else prompt[-1]

    def observe(self, rows: Sequence[Row], scores: Scores, verdict: Verdict) -> None:
        """Reads the arguments of `Drafter.observe`."""
        self._last.update(zip(rows, last_kept(scores, verdict), strict=True))

    def copy(self, copies: Iterable[tuple[Row, Row]]) -> None:
        """Copies states for pairs of a row and its parent."""
        self._last |= {row: self._last[parent] for row, parent in copies}

    def leave(self, rows: Sequence[Row]) -> None:
        """Forgets rows that have left."""
        self._prompts.leave(rows)
        for row in rows:
            self._last.pop(row, None)

    @property
    def bytes(self) -> int:
        """The bytes that are kept now."""
        own = sum(state.numel() * state.element_size() for state in self._last.values())
        return self._prompts.bytes + own
