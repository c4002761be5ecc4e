"""What keys and values may take, and what rows need of it.

A cache is slots times the longest row in them, and the prompts that rows share beside that, once each. The target alone decides
which rows are served. The drafter's cache has room for what it reads: no more of a row than its own context, and no more than fits
beside the target's keys of that row.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Sequence

import torch

from shoal.errors import RequestError
from shoal.models.runner import Runner
from shoal.types.prefix import Prefix, token_slots
from shoal.types.requests import Request, Row
from shoal.types.schedule import Round


class Memory:
    """The caches of an engine's models.

    Args:
        models: target first; its context bounds the rows. spare: columns beyond a row's last token that a pass over several rows
            may write. most: bytes that all caches together may take; None = no limit but the machine's.
    """

    def __init__(self, models: Sequence[Runner], spare: int, most: int | None) -> None:
        self._models, self._context, self._spare, self._most = models, models[0].context, spare, most
        self._reserved = 0
        if most is not None:
            for model in models:
                _meet(model)

    @property
    def used(self) -> int:
        """Bytes that the caches take now."""
        return sum(model.cache.nbytes() for model in self._models)

    def check(self, request: Request) -> None:
        """Raises RequestError: one row of the request is too much for the target. Alone it takes as much with its prompt in its
        slot as apart."""
        need, tokens = self._target_bytes(request), self._tokens(request)
        if self._most is not None and need > self._most:
            raise RequestError(
                f"a row of up to {tokens} tokens takes {need} bytes of KV cache, and there are {self._most}: shorten the prompt or "
                "lower max_new_tokens"
            )

    def draft_context(self, request: Request) -> int:
        """Most tokens of a row of the request that the drafter reads: what it has a context for, and what fits beside the target's
        keys of one such row. The target alone decides whether the row is served and where it ends."""
        context = min((drafter.context for drafter in self._models[1:]), default=sys.maxsize)
        if self._most is None or len(self._models) == 1:
            return context
        left = self._most - self._target_bytes(request)
        return bisect_right(range(1, context + 1), left, key=self._drafter_bytes)

    def _target_bytes(self, request: Request) -> int:
        return self._models[0].cache_bytes(1, self._tokens(request) + self._beyond(1))

    def _drafter_bytes(self, tokens: int) -> int:
        return sum(drafter.cache_bytes(1, tokens + self._beyond(1)) for drafter in self._models[1:])

    def _tokens(self, request: Request) -> int:
        """Most tokens of a row."""
        return min(len(request.prompt_ids) + request.limits.max_new_tokens, self._context)

    def _beyond(self, slots: int) -> int:
        """Columns beyond a row's last token that a pass may write: padding, which a row alone does not have."""
        return self._spare if slots > 1 else 1

    def fits(self, rows: Sequence[Row], slots: int, prefixes: Sequence[Prefix]) -> bool:
        """Whether these rows may be in that many slots, with these prompts in the shared store."""
        if self._most is None:
            return True
        need = sum(model.cache_bytes(*self._size(model, rows, slots, prefixes)) for model in self._models)
        return need + self._reserved <= self._most

    def reserve_tokens(self, tokens: int) -> None:
        """From now on so many tokens in a cache of one row of the target count beside the engine's caches; 0 = none.

        Raises:
            RequestError: they never fit.
        """
        need = self._models[0].cache_bytes(1, tokens)
        if self._most is not None and need > self._most:
            raise RequestError(
                f"{tokens} tokens take {need} bytes of KV cache, and there are {self._most}: shorten the prompt"
            )
        self._reserved = need if tokens else 0

    def allocate(self, round_: Round) -> None:
        """For what a round has in its slots. Caches keep the size they had, unless that would be too much.

        Raises:
            OutOfMemory.
        """
        sizes = [(model, self._size(model, round_.in_slots, round_.slots, round_.prefixes)) for model in self._models]
        if self._most is not None and sum(_grown(model, *size) for model, size in sizes) + self._reserved > self._most:
            for model, size in sizes:
                model.trim(*size)
        for model, size in sizes:
            model.reserve(*size)

    def _size(self, model: Runner, rows: Sequence[Row], slots: int, prefixes: Sequence[Prefix]) -> tuple[int, int, int]:
        """Slots, tokens per slot and token slots of the prefix store that the model needs."""
        if model is not self._models[0]:
            rows = [row for row in rows if row.draft_reach]
            prefixes = [prefix for prefix in prefixes if prefix.drafted]
        capacity = max(self._room(model, row) for row in rows) + self._beyond(slots) if rows else 0
        return slots, capacity, token_slots(prefixes)

    def _room(self, model: Runner, row: Row) -> int:
        """Most tokens that the row's slot will hold in the model's cache."""
        most = self._tokens(row.request)
        if model is not self._models[0]:
            most = min(most, row.draft_reach)
        return most if row.prefix is None else max(most - row.prefix.length, 0)


def _grown(model: Runner, slots: int, capacity: int, shared: int) -> int:
    """Bytes of the model's cache once it has room for that, too."""
    cache = model.cache
    return model.cache_bytes(max(slots, cache.slots), max(capacity, cache.capacity), max(shared, cache.cells))


def _meet(model: Runner) -> None:
    """One token through the model: only then is it known what a token takes in its cache."""
    model.reserve(1, 1)
    if not model.cache.bytes_per_token():
        model.feed([0], torch.zeros(1, 1, dtype=torch.long, device=model.device), [1], want_logits=False)
        model.cache.rollback(0, 0)
        model.take_counters()
