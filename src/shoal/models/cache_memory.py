"""The memory that a model's cache takes: bytes counted, room made and given back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shoal.models import compiled
from shoal.models.attention import methods
from shoal.models.device import explained

if TYPE_CHECKING:
    from shoal.models.runner import Runner


class CacheMemory:
    """The keys and values in the cache of a runner, and its recurrent states if there are any.

    Args:
        runner: the runner, with the cache that it has when it is asked.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    @property
    def context(self) -> int:
        """The most tokens of a row."""
        return self._runner.context

    @property
    def shares(self) -> bool:
        """True if rows of a group may read one stored prompt."""
        return self._runner.shares

    def cache_bytes(self, slots: int, capacity: int, cells: int = 0) -> int:
        """Returns the number of bytes that a cache of that size takes."""
        slots, capacity = self._room(slots, capacity)
        return self._bytes(slots, capacity, cells)

    @property
    def token_bytes(self) -> int:
        """The number of bytes of the keys and values of one token of one row, over all layers."""
        if not self._runner.cache.measured:
            self._learn_bytes()
        return self._runner.cache.bytes_per_token()

    @property
    def kept_token_bytes(self) -> int:
        """The number of bytes of a token that is kept for later rows, with its share of states."""
        own = self.token_bytes  # a pass that measures it makes the states
        states = self._runner.cache.bytes_per_slot()
        return own + (-(-states // self.block) if self.block else 0)

    @property
    def block(self) -> int:
        """The number of tokens at whose multiples passes over prompts end; 0 = anywhere."""
        mixers = self._runner.mixers
        return 0 if mixers is None else mixers.block

    def grown_bytes(self, slots: int, capacity: int, cells: int = 0) -> int:
        """Returns the number of bytes of the cache once it also has room for that size."""
        cache, (slots, capacity) = self._runner.cache, self._room(slots, capacity)
        return self._bytes(
            max(slots, cache.slots), max(capacity, cache.capacity), max(cells, cache.cells)
        )

    def _bytes(self, slots: int, capacity: int, cells: int) -> int:
        tokens = slots * capacity + cells
        return tokens * self.token_bytes + slots * self._runner.cache.bytes_per_slot()

    @property
    def allocated_bytes(self) -> int:
        """The number of bytes that the cache takes now."""
        return self._runner.cache.nbytes()

    @property
    def attends_in_one_call(self) -> bool:
        """True if attention is one call for a row's own keys and the shared ones."""
        return (
            methods.resolved(self._runner.attention, self._runner.device, self._runner.dtype)
            in methods.KERNELS
        )

    @property
    def captures_without_prefixes(self) -> bool:
        """True if rows whose prompt is stored once would keep rounds from being captured."""
        return self._runner.captures is not None and not self._runner.captures.knows_prefixes

    def _learn_bytes(self) -> None:
        """Feeds one token, as the bytes of a token in the cache are known only after a pass."""
        self.reserve(1, 1)
        self._runner.feed(
            [0],
            torch.zeros(1, 1, dtype=torch.long, device=self._runner.device),
            [1],
            want_logits=False,
        )
        self._runner.cache.rollback(0, 0)
        self._runner.counts.take()

    def reserve(self, slots: int, capacity: int, cells: int = 0) -> None:
        """Makes room in the cache for rows and shared prompts.

        Args:
            slots: the number of rows.
            capacity: the number of tokens of a row.
            cells: the number of tokens of shared prompts.

        Raises:
            OutOfMemory: the memory does not suffice.
        """
        cache, (slots, capacity) = self._runner.cache, self._room(slots, capacity)
        if self._runner.captures is not None and (
            slots > cache.slots or capacity > cache.capacity or cells > cache.cells
        ):
            self._runner.captures.forget(cache)
        with explained(self._runner.name):
            cache.reserve(slots, capacity, cells)

    def trim(self, slots: int, capacity: int, cells: int = 0) -> None:
        """Gives unused room of the cache back, and drops rounds that were captured over it."""
        slots, capacity = self._room(slots, capacity)
        if self._runner.captures is not None and (slots, capacity, cells) != (
            self._runner.cache.slots,
            self._runner.cache.capacity,
            self._runner.cache.cells,
        ):
            self._runner.captures.forget(self._runner.cache)
        self._runner.cache.trim(slots, capacity, cells)

    def _room(self, slots: int, capacity: int) -> tuple[int, int]:
        """Returns the slots and the tokens per slot of a cache with room for that size.

        They are those of captured rounds, in whole blocks of keys.
        """
        if self._runner.captures is not None:
            by_kernel = self._runner.captures.knows_prefixes
            slots, capacity = compiled.reservation(slots, capacity, by_kernel=by_kernel)
        return slots, -(-capacity // self._runner.kv_block) * self._runner.kv_block
