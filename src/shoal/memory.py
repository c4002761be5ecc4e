"""What keys and values may take, and what rows need of it.

A cache is slots times the longest row in them, and the prompts that rows share beside that, once each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.errors import RequestError
from shoal.request import Request, Row
from shoal.runner import Runner
from shoal.schedule import Round


class Memory:
    """The caches of an engine's models.

    Args:
        context: most tokens of a row. spare: columns beyond a row's last token that a pass may write.
        most: bytes that all caches together may take; None = no limit but the machine's.
    """

    def __init__(self, models: Sequence[Runner], context: int, spare: int, most: int | None) -> None:
        self._models, self._context, self._spare, self._most = models, context, spare, most
        if most is not None:
            for model in models:
                _meet(model)

    @property
    def used(self) -> int:
        """Bytes that the caches take now."""
        return sum(model.cache.nbytes() for model in self._models)

    def check(self, request: Request) -> None:
        """Raises RequestError: one row of the request is too much. Alone it takes as much with its prompt in its slot as apart."""
        tokens = min(len(request.prompt_ids) + request.limits.max_new_tokens, self._context)
        if self._most is not None and (need := self._bytes(1, tokens + self._spare, 0)) > self._most:
            raise RequestError(
                f"a row of up to {tokens} tokens takes {need} bytes of KV cache, and there are {self._most}: shorten the prompt or "
                "lower max_new_tokens"
            )

    def fits(self, rows: Sequence[Row], slots: int, cells: int) -> bool:
        """Whether these rows may be in that many slots, with so many cells of shared prompts."""
        return self._most is None or self._bytes(slots, self._capacity(rows), cells) <= self._most

    def make_room(self, round_: Round) -> None:
        """For what a round has in its slots. Caches keep the size they had, unless that would be too much.

        Raises:
            ModelError: out of memory.
        """
        sizes = round_.slots, self._capacity(round_.seated), round_.cells
        if self._most is not None and sum(_grown(model, *sizes) for model in self._models) > self._most:
            for model in self._models:
                model.trim(*sizes)
        for model in self._models:
            model.reserve(*sizes)

    def _bytes(self, slots: int, capacity: int, cells: int) -> int:
        return sum(model.cache_bytes(slots, capacity, cells) for model in self._models)

    def _capacity(self, rows: Sequence[Row]) -> int:
        """Tokens per slot."""
        return max(map(self._room, rows), default=0) + self._spare

    def _room(self, row: Row) -> int:
        """Most tokens that the row's slot will hold."""
        most = min(row.prompt_length + row.request.limits.max_new_tokens, self._context)
        return most if row.prefix is None else most - row.prefix.length


def _grown(model: Runner, slots: int, capacity: int, cells: int) -> int:
    """Bytes of the model's cache once it has room for that, too."""
    cache = model.cache
    return model.cache_bytes(max(slots, cache.slots), max(capacity, cache.capacity), max(cells, cache.cells))


def _meet(model: Runner) -> None:
    """One token through the model: only then is it known what a token takes in its cache."""
    model.reserve(1, 1)
    if not model.cache.bytes_per_token():
        model.feed([0], torch.zeros(1, 1, dtype=torch.long, device=model.device), [1], want_logits=False)
        model.cache.rollback(0, 0)
        model.spent()
