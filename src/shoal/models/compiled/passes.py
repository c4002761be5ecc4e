"""A model's static passes: built at first use, checked against the dynamic path, then run.

What a bucket covers runs statically; everything else (prompts, rows that are not side by side, caches that have no layer yet)
stays with the dynamic path. Whatever goes wrong while building or running, the dynamic path takes over for good, with one
warning: a row never ends because a compiler failed.
"""

from __future__ import annotations

import logging
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.errors import InternalError, OutOfStep
from shoal.models.attention.methods import METHODS, resolved
from shoal.models.bridge import Bridge
from shoal.models.cache import Plan, SlotCache
from shoal.models.compiled.block import Block
from shoal.models.compiled.buckets import Bucket, bucket_for, step_up
from shoal.models.compiled.executors import EXECUTORS, Executor, Run
from shoal.models.compiled.view import Stores, View
from shoal.models.divergence import LIMITS, divergences

log = logging.getLogger("shoal")

ATTENTION = ("auto", "pad", "fused")
"""Attention methods that ask for masks and bounds only, never for a plan."""


Function = Callable[[View], Any]


@dataclass
class Pass:
    """A function of a view, built: fill the block, then run it.

    Attributes:
        checked: whether what it computes has been compared with an ordinary pass.
    """

    function: Function
    block: Block
    view: View
    run: Run
    checked: bool = False


@dataclass
class _Built:
    """The passes over one cache, a generation: they know its tensors by address and end with them. What they read, write and return
    is theirs alone, so that engines, which have a cache each, may run passes of one model at the same time."""

    stores: Stores
    execute: Executor
    passes: dict[Hashable, Pass] = field(default_factory=dict)
    rounds: dict[Hashable, Any] = field(default_factory=dict)
    partner: _Built | None = None

    def rounds_with(self, partner: _Built | None) -> dict[Hashable, Any]:
        """The rounds captured over this cache and that of a drafter: they end with either."""
        if self.partner is not partner:
            self.rounds.clear()
            self.partner = partner
            if partner is not None:
                partner.partner = self
        return self.rounds

    def end(self) -> None:
        """Lets go of all that knows the cache's tensors."""
        for one in (self, self.partner):
            if one is not None:
                one.rounds.clear()
        self.passes.clear()


class Passes:
    """The static passes of one model, shared by the runners forked from it.

    Args:
        bridge: to the Transformers model. name: for messages.
        executor: a name in `EXECUTORS`. attention: a name in `ATTENTION`.

    Attributes:
        knows_prefixes: whether rows whose prompt is shared may take part.
        built, ran: how often a pass was, by its bucket (and style, see `drafting`).
        seconds_building: what that took. failure: why the dynamic path took over; None while it has not.
        candidates: how many that rounds of a style turned out to need (`shoal.sampling.truncation.listed_softmax`).
        rounds_failure: why no more whole rounds are captured (`shoal.models.compiled.rounds`); None while they are.
    """

    def __init__(self, bridge: Bridge, name: str, executor: str, attention: str = "auto") -> None:
        self._bridge, self.hf, self.name = bridge, bridge.hf, name
        self.executor = executor
        # "auto" is the kernel where it runs on CUDA, else the padded call.
        self._method = METHODS[resolved(attention, self.hf.device, self.hf.dtype, static=True)]
        self.knows_prefixes = self._method is METHODS["fused"]
        self._of: weakref.WeakKeyDictionary[SlotCache, _Built] = weakref.WeakKeyDictionary()
        self._idle: list[SlotCache] = []
        self.built: Counter[Hashable] = Counter()
        self.ran: Counter[Hashable] = Counter()
        self.seconds_building = 0.0
        self.failure: str | None = None
        self.candidates: dict[Hashable, int] = {}
        self.rounds_failure: str | None = None

    @property
    def by_kernels(self) -> bool:
        """Whether Triton kernels compute the layers, and draw from their logits, instead of operations of torch."""
        return self._bridge.layers is not None

    @property
    def failures(self) -> list[str]:
        """Why less is captured than was meant to be: whole rounds, or anything at all."""
        rounds = None if self.rounds_failure is None else f"no captured rounds: {self.rounds_failure}"
        return [reason for reason in (self.failure, rounds) if reason is not None]

    def cache_for(self, owner: Any) -> SlotCache:
        """A cache for as long as `owner` lives; then the next owner gets it, with the passes built over its tensors."""
        cache = self._idle.pop() if self._idle else self.new_cache()
        cache.clear()
        weakref.finalize(owner, self._idle.append, cache)
        return cache

    def new_cache(self) -> SlotCache:
        """One that nobody has used."""
        return SlotCache()

    def release(self) -> None:
        """Lets go of the caches that no runner uses, and of the passes over them."""
        self._idle.clear()
        for built in list(self._of.values()):
            built.end()  # its rounds know the caches
        self._of.clear()

    def forget(self, cache: SlotCache) -> None:
        """Ends the passes over a cache that is about to change its size: they would hold the tensors that it lets go of."""
        if (built := self._of.pop(cache, None)) is not None:
            built.end()

    def covers(self, plan: Plan, cache: SlotCache, ahead: int = 0) -> bool:
        """True if a pass over these rows, and `ahead` more of one token, can be static."""
        return self._uncovered(plan, cache, ahead) is None

    def refuses(self, plan: Plan, cache: SlotCache) -> str | None:
        """Returns the reason why no bucket covers a pass, or None if one does."""
        reason = self._uncovered(plan, cache)
        if reason is None and self._bucket(plan, cache) is None:
            return f"{plan.q} tokens of a row in one pass, more than any bucket has"
        return reason

    def _uncovered(self, plan: Plan, cache: SlotCache, ahead: int = 0) -> str | None:
        """Unused rows of a bucket must fall on unused slots."""
        if self.failure is not None:
            return self.failure
        if not len(cache):
            return "the first pass over a cache"
        if plan.first_slot != 0 or step_up(plan.rows) >= cache.slots:
            return "the rows do not lie side by side from slot 0 on, with a free slot behind them"
        if max(plan.tails) + ahead > cache.capacity:
            return "a slot is full"
        return "rows share a prompt" if plan.shares and not self.knows_prefixes else None

    def _bucket(self, plan: Plan, cache: SlotCache) -> Bucket | None:
        return bucket_for(plan.rows, plan.q, max(plan.tails), cache.capacity)

    def logits(self, plan: Plan, tokens: Tensor, cache: SlotCache, dynamic: Callable[[], Tensor]) -> Tensor:
        """One pass: appends `tokens` [rows, q] to the cache; returns their logits [rows, q, vocab], good until the next pass.

        Args:
            dynamic: the same by the dynamic path. It does the work where no bucket fits, and the first time one is used.
        """
        bucket = self._bucket(plan, cache) if self.covers(plan, cache) else None
        if bucket is None:
            return dynamic()
        with self.guarded():
            found = self.prepared(bucket, bucket, cache, lambda: self.forward)
            found.block.place(plan, cache.capacity)
            found.block.fill(tokens)
            logits: Tensor = self.run(bucket, found)[: plan.rows, : plan.q]
            if found.checked:
                cache.wrote(plan)
                return logits
            right = dynamic()
            real = torch.arange(plan.q) < torch.tensor(plan.counts)[:, None]
            compare(*(block[real.to(block.device)] for block in (logits, right)))
            found.checked = True
            return right
        return dynamic()

    def forward(self, view: View) -> Tensor:
        """The model over a block: logits [rows, q, vocab]. A function of the view's tensors alone."""
        self.share(view.block)
        view.masks.clear()
        logits = self._bridge.static_logits(view.block.tokens, view.block.positions, view)
        view.masks.clear()
        return logits

    def share(self, block: Block) -> None:
        """Where several processes compute the model, gives the block to all of them, on the device (`shoal.models.sharded`)."""

    # ── building and running ────────────────────────────────────────────────────────────────────────────────────────

    def prepared(self, key: Hashable, bucket: Bucket, cache: SlotCache, make: Callable[[], Function]) -> Pass:
        """The pass of that key over a cache; if need be, its function is made and built."""
        built = self.generation(cache)
        if key not in built.passes:
            built.passes[key] = self.build(bucket, cache, make())
            self.built[key] += 1
        return built.passes[key]

    def generation(self, cache: SlotCache) -> _Built:
        """What is built over a cache as it is now."""
        stores = cache.stores()
        if not stores:
            raise InternalError("static passes over a cache that no pass has given layers")
        built = self._of.get(cache)
        if built is None or any(a is not b for a, b in zip(built.stores[0], stores[0], strict=True)):  # new, or grown
            self.forget(cache)
            built = self._of[cache] = _Built(stores, EXECUTORS[self.executor](self.hf.device))
        return built

    def view(self, block: Block, cache: SlotCache) -> View:
        """What the model meets in passes over a block of a cache."""
        return View(block, self.generation(cache).stores, self._method, self.knows_prefixes and cache.cells > 0)

    def within(self, view: View) -> AbstractContextManager[None]:
        """Where `forward` may be called for a view."""
        return self._bridge.static(view)

    def build(self, bucket: Bucket, cache: SlotCache, function: Function) -> Pass:
        """A pass over a bucket of a cache, whose function is built; nobody keeps it."""
        block = Block(bucket, scratch=(cache.slots - 1) * cache.capacity, device=self.hf.device)
        view = self.view(block, cache)

        def run() -> Any:
            with self.within(view):
                return function(view)

        with self.building(f"a pass of {bucket}"):
            executable = self.executable(bucket, cache, run)
        return Pass(function, block, view, executable)

    def executable(self, bucket: Bucket, cache: SlotCache, run: Run) -> Run:
        """A function that calls `forward` once, for a block of that bucket of the cache, as the generation's executor builds it."""
        return self.generation(cache).execute(run)

    @contextmanager
    def building(self, what: str) -> Iterator[None]:
        """Something is built within, which is no part of any round's time."""
        started = time.perf_counter()
        log.info("%s: building %s (%s) ...", self.name, what, self.executor)
        yield
        self.seconds_building += time.perf_counter() - started

    def run(self, key: Hashable, prepared: Pass) -> Any:
        """What the pass returns for what its block holds."""
        self.ran[key] += 1
        return prepared.run()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Swallows whatever fails within, and leaves everything to the dynamic path from then on, if that can go on.

        Raises:
            OutOfStep.
        """
        try:
            yield
        except OutOfStep:
            raise
        except Exception as error:
            reason = (str(error).strip() or "no reason given").splitlines()[0]
            self.failure = f"{type(error).__name__}: {reason:.300}"
            self._of.clear()
            message = f"{self.name}: no more {self.executor} passes, ordinary ones do the work ({self.failure})"
            warnings.warn(message, RuntimeWarning, stacklevel=3)


def compare(logits: Tensor, right: Tensor) -> None:
    """Raises ArithmeticError if the logits of a first pass are not those of an ordinary one, [positions, vocab] each.

    Each position counts by itself: one row of many may be wrong.
    """
    numbers = right.isfinite()  # a damaged model's NaN is for others to name
    ours, theirs = (values.masked_fill(~numbers, 0.0) for values in (logits, right))
    error = float(divergences(ours, theirs).amax()) if theirs.numel() else 0.0
    if not error <= LIMITS[right.dtype]:
        raise ArithmeticError(f"logits diverge by {error:.3g} nats from those of an ordinary pass")
