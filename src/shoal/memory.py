"""What keys and values may take, and what rows need of it.

A cache is slots times the longest row in them, and the prompts that rows share beside that, once each. A model's cache has no room
for what lies beyond its own context: a drafter with a shorter one than the target's takes no more than it can read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.errors import RequestError
from shoal.request import Request, Row
from shoal.runner import Runner
from shoal.schedule import Round
from shoal.sharing import Prefix, cells


class Memory:
    """The caches of an engine's models.

    Args:
        models: target first; its context bounds the rows. spare: columns beyond a row's last token that a pass may write.
        most: bytes that all caches together may take; None = no limit but the machine's.
    """

    def __init__(self, models: Sequence[Runner], spare: int, most: int | None) -> None:
        self._models, self._context, self._spare, self._most = models, models[0].context, spare, most
        self._aside = 0
        if most is not None:
            for model in models:
                _meet(model)

    @property
    def used(self) -> int:
        """Bytes that the caches take now."""
        return sum(model.cache.nbytes() for model in self._models)

    def check(self, request: Request) -> None:
        """Raises RequestError: one row of the request is too much. Alone it takes as much with its prompt in its slot as apart."""
        prompt, new = len(request.prompt_ids), request.limits.max_new_tokens
        tokens = min(prompt + new, self._context)
        need = sum(model.cache_bytes(1, _read(model, prompt, tokens) + self._spare) for model in self._models)
        if self._most is not None and need > self._most:
            raise RequestError(
                f"a row of up to {tokens} tokens takes {need} bytes of KV cache, and there are {self._most}: shorten the prompt or "
                "lower max_new_tokens"
            )

    def fits(self, rows: Sequence[Row], slots: int, prefixes: Sequence[Prefix]) -> bool:
        """Whether these rows may be in that many slots, with these prompts in the shared store."""
        if self._most is None:
            return True
        need = sum(model.cache_bytes(*self._size(model, rows, slots, prefixes)) for model in self._models)
        return need + self._aside <= self._most

    def set_aside(self, tokens: int, rows: Sequence[Row], slots: int, prefixes: Sequence[Prefix]) -> bool:
        """Sets memory aside for a target's cache of one row beside those of the engine, 0 tokens = none; from then on rows that
        would not fit beside it wait. Whether there is room already, next to the rows in their slots.

        Raises:
            RequestError: there never is.
        """
        if self._most is None:
            return True
        need = self._models[0].cache_bytes(1, tokens)
        if need > self._most:
            raise RequestError(
                f"{tokens} tokens take {need} bytes of KV cache, and there are {self._most}: shorten the prompt"
            )
        self._aside = need if tokens else 0
        if tokens and not self.fits(rows, slots, prefixes):
            return False
        if self.used + self._aside > self._most:
            for model in self._models:
                model.trim(*self._size(model, rows, slots, prefixes))
        return True

    def make_room(self, round_: Round) -> None:
        """For what a round has in its slots. Caches keep the size they had, unless that would be too much.

        Raises:
            ModelError: out of memory.
        """
        sizes = [(model, self._size(model, round_.seated, round_.slots, round_.prefixes)) for model in self._models]
        if self._most is not None and sum(_grown(model, *size) for model, size in sizes) + self._aside > self._most:
            for model, size in sizes:
                model.trim(*size)
        for model, size in sizes:
            model.reserve(*size)

    def _size(self, model: Runner, rows: Sequence[Row], slots: int, prefixes: Sequence[Prefix]) -> tuple[int, int, int]:
        """Slots, tokens per slot and cells of the shared store that the model needs."""
        return slots, max((self._room(model, row) for row in rows), default=0) + self._spare, cells(prefixes, model.context)

    def _room(self, model: Runner, row: Row) -> int:
        """Most tokens that the row's slot will hold in the model's cache."""
        most = _read(model, row.prompt_length, min(row.prompt_length + row.request.limits.max_new_tokens, self._context))
        return most if row.prefix is None else max(most - row.prefix.length, 0)


def _read(model: Runner, prompt: int, tokens: int) -> int:
    """How many of a row's tokens the model reads: nothing of a prompt that it cannot hold, and nothing beyond its context."""
    return min(tokens, model.context) if model.holds(prompt) else 0


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
