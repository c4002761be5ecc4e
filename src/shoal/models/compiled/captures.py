"""The captured rounds of one model, by cache, and the failures that end them.

A graph knows the tensors of a cache by their addresses. So captured rounds belong to a
*generation*, the cache as it is now, and end with it. Caches outlive the engines that use them: the
next engine finds the rounds of the last one.

A row never ends because a capture failed. A kind of round that failed is not captured again; the
other kinds are. Where memory was short, all rounds over these caches are dropped, and captures
wait. Only replaced weights, or several kinds that failed, end captured rounds for good.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from operator import is_not
from typing import Any

import torch
from torch import Tensor

from shoal.errors import InternalError
from shoal.models.attention.methods import METHODS, resolved
from shoal.models.bridge import Bridge, ReplacedWeights
from shoal.models.cache import Plan, SlotCache
from shoal.models.compiled import EXECUTORS, Executor, Run
from shoal.models.compiled.block import Block, Bucket, Stores, View, step_up
from shoal.models.device import is_out_of_memory
from shoal.models.load_checks import LIMITS, divergences

MOST_KINDS = 3
"""The number of kinds of rounds from which on failures end captures.

Once this number of kinds has failed no kind is captured any more: each try takes seconds.
"""
PATIENCE = 64
"""The number of rounds without a capture after memory was short.

The number doubles each time.
"""


class Failures:
    """The failures of one model's captured rounds.

    Attributes:
        end: the reason why no more rounds are captured; None while they are.
    """

    def __init__(self) -> None:
        self.end: str | None = None
        self._kinds: dict[Hashable, str] = {}
        self._waiting, self._patience, self._memory = 0, PATIENCE, ""

    def note(self, kind: Hashable, error: Exception) -> str:
        """Notes a failure and returns its consequence, in words.

        Args:
            kind: the kind of the round, without facts that have no influence on failures.
        """
        reason = words_of(error)
        if is_out_of_memory(error):
            self._memory, self._waiting, self._patience = reason, self._patience, 2 * self._patience
            return f"no captured rounds for the next {self._waiting} rounds ({reason})"
        self._kinds[kind] = reason
        if isinstance(error, ReplacedWeights) or len(self._kinds) >= MOST_KINDS:
            self.end = reason
            return f"no more captured rounds ({reason})"
        return f"no more captured rounds of this kind ({reason})"

    def refuses(self, kind: Hashable) -> bool:
        """Returns True if rounds of a kind are left to their stages because it failed."""
        return self.end is not None or kind in self._kinds

    def waits(self) -> bool:
        """Returns True if the next round is left to its stages; counts rounds.

        The reason is a failure that ended captures for good, or that memory was short.
        """
        if self._waiting:
            self._waiting -= 1
            return True
        return self.end is not None

    @property
    def pause(self) -> bool:
        """True if captures wait at the moment."""
        return self.end is not None or self._waiting > 0

    @property
    def reasons(self) -> list[str]:
        """The reasons why fewer rounds are captured than were meant to be."""
        if self.end is not None:
            return [f"no captured rounds: {self.end}"]
        memory = [f"no captured rounds for now: {self._memory}"] if self._waiting else []
        return [
            f"some kinds of rounds are not captured: {reason}" for reason in self._kinds.values()
        ] + memory


def words_of(error: Exception) -> str:
    """Returns the name of an error and the first line of its message."""
    text = (str(error).strip() or "no reason given").splitlines()[0]
    return f"{type(error).__name__}: {text:.300}"


def require_device(device: torch.device, error: Exception) -> None:
    """Raises the error again if it has left a CUDA device unusable.

    Everything after such an error would fail with a message that misleads. An illegal address or a
    failed assertion stays with the device: the next call that waits for the device fails as well.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.current_stream(device).synchronize()
    except RuntimeError:
        raise error from None


log = logging.getLogger("shoal")

CAPTURED = "captured rounds"
"""The word for passes that were parts of captured rounds, in reports and in counts by executor."""
AT_ONCE = 1 << 24
"""The number of logits that `compare` takes at a time: it makes copies of them in float64."""


@dataclass
class _Generation:
    """The rounds captured over one cache as it is now.

    The rounds know the cache's tensors by address and end with them. Their buffers and results are
    theirs alone, so that engines, which have a cache each, may run rounds of one model at the same
    time.
    """

    stores: Stores
    execute: Executor
    rounds: dict[Hashable, Any] = field(default_factory=dict)
    partner: _Generation | None = None

    def rounds_with(self, partner: _Generation | None) -> dict[Hashable, Any]:
        """Returns the rounds captured over this cache and a drafter's, which end with either."""
        if self.partner is not partner:
            self.rounds.clear()
            self.partner = partner
            if partner is not None:
                partner.partner = self
        return self.rounds

    def end(self) -> None:
        """Lets go of all that knows the cache's tensors, the drafter's generation included."""
        partner, self.partner = self.partner, None
        self.rounds.clear()
        if partner is not None:
            partner.rounds.clear()
            partner.partner = None


class Captures:
    """The captured rounds of one model, shared by the runners forked from it.

    Args:
        bridge: to the Transformers model.
        name: for messages.
        executor: a name in `EXECUTORS`.
        attention: a name in `ATTENTION` of `shoal.models.compiled`.

    Attributes:
        knows_prefixes: rows whose prompt is shared may take part.
        built: number of functions that were captured, by kind of round.
        ran: number of passes that captured rounds have computed, by kind of round.
        seconds_building: time that captures and the comparisons of first rounds took.
        candidates: number of candidates that rounds of a style turned out to need
            (`shoal.sampling.truncation.listed_softmax`).
        failed: the rounds that are left to their stages because a capture of them failed.
    """

    alone = True
    """False where other processes take part in each function."""

    def __init__(self, bridge: Bridge, name: str, executor: str, attention: str = "auto") -> None:
        self._bridge, self.hf, self.name = bridge, bridge.hf, name
        self.executor = executor
        # "auto" is the kernel where it runs on CUDA, else the padded call.
        self._method = METHODS[resolved(attention, self.hf.device, self.hf.dtype, static=True)]
        self.knows_prefixes = self._method is METHODS["fused"]
        self._of: weakref.WeakKeyDictionary[SlotCache, _Generation] = weakref.WeakKeyDictionary()
        self._idle: list[SlotCache] = []
        self.built: Counter[Hashable] = Counter()
        self.ran: Counter[Hashable] = Counter()
        self.seconds_building = 0.0
        self.candidates: dict[Hashable, int] = {}
        self.failed = Failures()

    @property
    def by_kernels(self) -> bool:
        """True if Triton kernels, and not torch, compute the layers and draw from their logits."""
        return self._bridge.layers is not None

    @property
    def failures(self) -> list[str]:
        """The reasons why fewer rounds are captured than were meant to be."""
        return self.failed.reasons

    # ── caches ────────────────────────────────────────────────────────────────────────────────────

    def cache_for(self, owner: Any) -> SlotCache:
        """Returns a cache for as long as `owner` lives.

        Then the next owner gets the cache, with the rounds captured over it.
        """
        cache = self._idle.pop() if self._idle else self.new_cache()
        cache.clear()
        weakref.finalize(owner, self._idle.append, cache)
        return cache

    def new_cache(self) -> SlotCache:
        """Returns a new, unused cache."""
        return SlotCache()

    def release(self) -> None:
        """Lets go of the caches that no runner uses, and of the rounds over all caches."""
        self._idle.clear()
        for generation in list(self._of.values()):
            generation.end()  # its rounds hold the caches
        self._of.clear()

    def forget(self, cache: SlotCache) -> None:
        """Ends the rounds over a cache that changes its size, since they hold its old tensors."""
        if (generation := self._of.pop(cache, None)) is not None:
            generation.end()

    def generation(self, cache: SlotCache) -> _Generation:
        """Returns the generation of a cache as it is now."""
        if not len(cache):
            raise InternalError("captured rounds over a cache that no pass has given layers")
        generation = self._of.get(cache)
        # The cache is new, or has grown.
        if generation is None or any(map(is_not, generation.stores[0], cache.stores_of(0))):
            self.forget(cache)
            execute = EXECUTORS[self.executor](self.hf.device)
            generation = self._of[cache] = _Generation(cache.stores(), execute)
        return generation

    # ── passes of a round ─────────────────────────────────────────────────────────────────────────

    def covers(self, plan: Plan, cache: SlotCache, ahead: int = 0) -> bool:
        """Returns True if a pass over these rows can be part of a captured round.

        The same must hold for `ahead` more passes of one token. Rows that pad a round must fall on
        unused slots.
        """
        rows = plan.rows
        side_by_side = (
            len(cache) > 0 and plan.slots == list(range(rows)) and step_up(rows) < cache.slots
        )
        fits = max(plan.tails) + ahead <= cache.capacity
        return side_by_side and fits and (self.knows_prefixes or not plan.shares)

    def forward(self, view: View) -> Tensor:
        """Computes logits [rows, q, vocab] of a block: a function of the view's tensors alone."""
        self.share(view.block)
        view.masks.clear()
        logits = self._bridge.static_logits(view.block.tokens, view.block.positions, view)
        view.masks.clear()
        return logits

    def share(self, block: Block) -> None:
        """Gives the block to all processes that compute the model, on the device.

        Does nothing where one process computes it (`shoal.models.ranks`).
        """

    def view(self, block: Block, cache: SlotCache) -> View:
        """Returns the cache that the model meets in passes over a block."""
        return View(
            block,
            self.generation(cache).stores,
            self._method,
            self.knows_prefixes and cache.cells > 0,
        )

    @property
    def replays(self) -> bool:
        """True if a function that was built is another than the function itself.

        Then it can be compared with the function.
        """
        return self.alone and self.executor != "eager"

    def within(self, view: View) -> AbstractContextManager[None]:
        """Returns the context in which `forward` may be called for a view."""
        return self._bridge.static(view)

    def require_same_weights(self) -> None:
        """Raises ReplacedWeights if a replay would read tensors that the model has no longer."""
        self._bridge.require_same_weights()

    def executable(self, bucket: Bucket, cache: SlotCache, run: Run) -> Run:
        """Builds a function that calls `forward` once, for a block of that bucket of the cache.

        The generation's executor builds it.
        """
        return self.generation(cache).execute(run)

    @contextmanager
    def building(self, subject: str = "") -> Iterator[None]:
        """Times the capture of a function or the comparison of a first round.

        Neither is part of any round's time: first waits for the round that is under way.

        Args:
            subject: the function, for the log; empty for a comparison.
        """
        if self.hf.device.type == "cuda":
            torch.cuda.current_stream(self.hf.device).synchronize()
        started = time.perf_counter()
        if subject:
            log.info("%s: building %s (%s) ...", self.name, subject, self.executor)
        yield
        self.seconds_building += time.perf_counter() - started


def compare(logits: Tensor, right: Tensor) -> None:
    """Raises ArithmeticError if the logits of a first round differ from the logits of ordinary
    passes.

    Each position counts by itself: one row of many may be wrong.

    Args:
        logits: [positions, vocab].
        right: [positions, vocab].
    """
    at_once = max(1, AT_ONCE // right.shape[-1])
    errors = [
        _largest(*parts) for parts in zip(logits.split(at_once), right.split(at_once), strict=True)
    ]
    error = max((math.inf if math.isnan(one) else one for one in errors), default=0.0)
    if not error <= LIMITS[right.dtype]:
        raise ArithmeticError(f"logits diverge by {error:.3g} nats from those of an ordinary pass")


def _largest(logits: Tensor, right: Tensor) -> float:
    """Returns the largest divergence of a position."""
    numbers = right.isfinite()  # a damaged model's NaN is for others to name
    ours, theirs = (values.masked_fill(~numbers, 0.0) for values in (logits, right))
    return float(divergences(ours, theirs).amax()) if theirs.numel() else 0.0
