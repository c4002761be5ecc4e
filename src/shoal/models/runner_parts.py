"""The parts of a runner: the facts about its model, and the memory of its cache.

The load of the model finds the facts, or gets them. The memory counts bytes, makes room and frees
it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.models.attention import methods
from shoal.models.bridge import Bridge
from shoal.models.cache import SlotCache
from shoal.models.cache.mixing import Mixers
from shoal.models.cache.states import StateCache, expect_drafts
from shoal.models.compiled.block import reservation
from shoal.models.device import explained
from shoal.models.load_checks import KeptChecks
from shoal.models.structure import counts_columns
from shoal.models.weights import nbytes
from shoal.models.weights.groups import parameter_count
from shoal.native.build import expect_forks

if TYPE_CHECKING:
    from shoal.models.runner import Runner


class ModelFacts:
    """A causal LM, the way into it, and the choices that were made for it at loading.

    Attributes:
        has_modules: True if `hf` is a Transformers model, whose modules and weights may be read.
        hf: the Transformers model, never modified.
        name: the name of the model as the user wrote it.
        bridge: the way into the Transformers model.
        attention_path: "interface" or "mask" (`shoal.models.bridge`).
        attention: the name of the attention method.
        method: that method.
        kv_block: the number of tokens of which a slot's room is a multiple.
        context: the largest number of tokens that a row may hold.
        vocab_size: the width of the logits.
        known_ids: the number of ids that the model can read.
        device: the device of the model when the runner was made or forked.
        dtype: the number format of the model at that time.
        packs: True if blocks with many unused columns are fed without them, as one sequence.
        shares: True if rows of a group may read one stored prompt.
        takes_trees: False if draft trees cannot be fed: the model finds positions, or keeps states.
        counts_columns: True if layers want one sequence (`shoal.models.structure`).
        mixers: the modules that keep recurrent states (`shoal.models.mixers`); None if none does.
        forward_context: the function of the context of each pass (`shoal.models.passes`).
        kv: the format of keys and values in the cache, "off" or "int8".
        notes: the measurements and choices of the load, by subject.
        absent: the executors that were ruled out when the model was loaded, and the reasons.
        self_check_error: the error that `selfcheck` measured; None before it has run.
        kept_checks: the results of checks that an earlier load has kept.
    """

    has_modules = True

    def __init__(
        self, hf: Any, name: str, attention_path: str, context: int, attention_name: str
    ) -> None:
        self.hf, self.name, self.attention_path, self.context = hf, name, attention_path, context
        masked = name if attention_path == "mask" else ""
        self.attention, self.method = attention_name, methods.method_named(attention_name, masked)
        expect_forks()
        self.device: torch.device = hf.device
        self.dtype: torch.dtype = hf.dtype
        self.counts_columns = counts_columns(hf)
        self.mixers: Mixers | None = None
        self.kv = "off"
        self.vocab_size = self.known_ids = int(hf.get_output_embeddings().weight.shape[0])
        self.absent: dict[str, str] = {}
        self.self_check_error: float | None = None
        self.kept_checks = KeptChecks()
        self.bridge = Bridge(hf, attention_path, context)
        self.takes_trees = self.bridge.takes_positions
        self.packs = attention_path == "interface" and self.bridge.takes_positions
        self.shares = self.packs and attention_name in methods.SHARING
        self.forward_context: Callable[[], AbstractContextManager[None]] = nullcontext
        self.notes: dict[str, str] = {}
        self.kv_block = methods.KV_BLOCKS.get(attention_name, 1)

    def new_cache(self) -> SlotCache:
        """Returns an empty cache of the kind that the executors take."""
        rounds = self.kv == "int8"
        return SlotCache(rounds) if self.mixers is None else StateCache(self.mixers, rounds)

    @property
    def parameter_bytes(self) -> int:
        """The number of bytes that the weights take, tied ones counted once."""
        return nbytes(list(self.hf.parameters()))

    @property
    def parameter_count(self) -> int:
        """The number of weights, tied ones counted once."""
        return parameter_count(self.hf)

    @property
    def cut_obstacle(self) -> str | None:
        """The reason why the model's first layers cannot be computed alone; None if they can."""
        return None if self.mixers is None else "its layers keep recurrent states"

    @property
    def keeps_states(self) -> bool:
        """True if layers keep recurrent states, which go back to few earlier lengths."""
        return self.mixers is not None

    def plain_logits(self, tokens: Tensor) -> Tensor:
        """Computes the logits [rows, q, vocab] without a cache, by the model's own attention.

        The passes are checked against these logits.
        """
        return self.bridge.plain_states(tokens, ())[0]


MOST_UNUSED = 2
"""The most tokens of a cache that grows, in those that its rows need."""


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
        cache = self._runner.cache
        sides = cache.sides if isinstance(cache, StateCache) else 2
        states = 3 * cache.bytes_per_slot() // (sides + 1)
        return own + (-(-states // self.block) if self.block else 0)

    @property
    def block(self) -> int:
        """The number of tokens at whose multiples passes over prompts end; 0 = anywhere."""
        mixers = self._runner.mixers
        return 0 if mixers is None else mixers.block

    def expect_drafts(self, longest: int) -> None:
        """Makes room for the recurrent states after drafts, where they are kept."""
        expect_drafts(self._runner.cache, longest)

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

    def wastes(self, slots: int, capacity: int, cells: int = 0) -> bool:
        """Returns True if the cache would grow to more than `MOST_UNUSED` times that size.

        Slots of many earlier rows would then be as long as one long row.
        """
        cache, (_, tokens) = self._runner.cache, self._room(slots, capacity)
        now = cache.slots * cache.capacity + cache.cells
        larger = cache.slots * max(tokens, cache.capacity) + cache.cells
        return larger > max(now, MOST_UNUSED * (slots * tokens + cells))

    def _room(self, slots: int, capacity: int) -> tuple[int, int]:
        """Returns the slots and the tokens per slot of a cache with room for that size.

        The sizes are the sizes of captured rounds, in whole blocks of keys.
        """
        if self._runner.captures is not None:
            by_kernel = self._runner.captures.knows_prefixes
            slots, capacity = reservation(slots, capacity, by_kernel=by_kernel)
        return slots, -(-capacity // self._runner.kv_block) * self._runner.kv_block
