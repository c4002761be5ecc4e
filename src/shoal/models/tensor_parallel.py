"""Tensor parallelism: one target over several processes; rank 0 decides, the others compute their part of its passes.

Transformers shards the weights by the model's own plan (`tp_plan="auto"`; Shoeybi et al. 2019, arXiv 1909.08053): every rank has
some heads of each layer, and a `SlotCache` of these heads. Everything else is rank 0's alone: drafting, drawing, clocks, seeds,
text. Before it changes a cache of the target or makes a pass, it tells the others to do the same. So there is nothing that ranks
could decide differently, prices and deadlines included.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from itertools import count
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import ModelError, RequestError
from shoal.models.cache import Plan, SlotCache
from shoal.models.cache.tree import Parents
from shoal.models.runner import Runner
from shoal.types.prefix import Prefix

TIMEOUT = timedelta(days=365)
"""How long a rank waits for the next broadcast: rank 0 may wait for its user."""
STOP, PASS = "stop", "pass"
"""What rank 0 says beside the names of `SlotCache`'s methods."""


def require_ranks(name: str, config: Any) -> None:
    """Raises RequestError unless torchrun started this process as one of several that can share a model with this Transformers
    config."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size < 2 or "RANK" not in os.environ or not dist.is_available():
        raise RequestError("tensor_parallel needs several processes: start them by `torchrun --nproc-per-node 2 ...`")
    if find_spec("accelerate") is None:
        raise RequestError("tensor_parallel needs accelerate: pip install '.[tensor-parallel]'")
    heads = getattr(config, "num_key_value_heads", 0) or getattr(config, "num_attention_heads", 0)
    if heads % size:
        raise RequestError(f"{name} has {heads} heads of keys and values, which {size} processes cannot share evenly")


def lead(runner: Runner) -> Runner:
    """On rank 0: the same model, as a runner whose passes all ranks make. On any other rank: serves rank 0 until that ends, and
    then ends the process.

    Args:
        runner: of a model that Transformers sharded; all ranks call this at the same point.
    """
    ranks = Ranks()
    if dist.get_rank() > 0:
        ranks.serve(runner)
    atexit.register(ranks.stop)
    return _Leading(runner, ranks)


def capture_obstacle(backend: str) -> str:
    """Why the passes of a model that several processes share are not captured, by the name of what joins their sums."""
    if "nccl" not in backend:
        return f"{backend} joins the sums of several processes on the host, which no graph can hold"
    return f"{backend}: a pass of several processes begins with a broadcast from the host, which no graph can hold"


class Ranks:
    """The processes of one model, and how rank 0 speaks to them: on the CPU, beside the collectives of the model itself."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._lock = threading.RLock()
        self._keys = count()
        self._dropped: deque[int] = deque()
        self._out_of_step = False

    # ── rank 0 ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def new_key(self, cache: SlotCache) -> int:
        """What to call a cache of rank 0; the others drop theirs once it is gone."""
        key = next(self._keys)
        weakref.finalize(cache, self._dropped.append, key).atexit = False
        return key

    @contextmanager
    def broadcast(self, what: str, key: int, *arguments: Any) -> Iterator[None]:
        """What the block does, the other ranks do as well.

        Raises:
            ModelError: after a block that failed: nobody knows how far the others came.
        """
        with self._lock:
            if self._out_of_step:
                raise ModelError("an earlier pass failed, and the other processes may wait in it: start them all again")
            self._say(what, key, *arguments)
            self._out_of_step = True
            yield
            self._out_of_step = False

    def stop(self) -> None:
        """Lets the other ranks end; those that wait in a failed pass end by the loss of this process, and would not hear."""
        if not self._out_of_step:
            self._say(STOP, -1)
            self._leave()

    def _leave(self) -> None:
        """Ends the threads of the group while Python is still there: one that lets go of a tensor later aborts the process."""
        dist.destroy_process_group()
        del self._group  # the last reference: its threads are joined here

    def _say(self, what: str, key: int, *arguments: Any) -> None:
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        dist.broadcast_object_list([(what, key, arguments, dropped)], src=0, group=self._group, device=torch.device("cpu"))

    # ── the others ──────────────────────────────────────────────────────────────────────────────────────────────────

    @torch.inference_mode()
    def serve(self, runner: Runner) -> NoReturn:
        """Does what rank 0 says, with the caches of this rank's heads.

        Raises:
            SystemExit: when it says stop.
        """
        caches: dict[int, SlotCache] = {}
        while True:
            what, key, arguments, dropped = self._hear()
            for old in dropped:
                caches.pop(old, None)
            if what == STOP:
                self._leave()
                raise SystemExit(0)
            cache = caches.setdefault(key, SlotCache())
            if what == PASS:
                _repeat(runner, cache, *arguments)
            else:
                getattr(cache, what)(*arguments)

    def _hear(self) -> Any:
        said: list[Any] = [None]
        dist.broadcast_object_list(said, src=0, group=self._group, device=torch.device("cpu"))
        return said[0]


class _Leading(Runner):
    """A checked runner whose forks tell their passes to the other ranks. Its own cache still knows what a token takes.
    It has no static passes: a captured graph cannot contain the broadcast."""

    def __init__(self, runner: Runner, ranks: Ranks) -> None:
        vars(self).update(vars(runner))
        self._ranks = ranks

    def fork(self) -> Runner:
        """The same model with a cache and counters of its own."""
        other = super().fork()
        other.cache = _LedCache(self._ranks)
        return other

    def use_static_passes(self, executor: str | None) -> None:
        """Never; the load report says why."""
        if executor is not None:
            self.notes["passes"] = f"modules ({capture_obstacle(dist.get_backend())})"

    def _dynamic(self, plan: Plan, tokens: Tensor, want_logits: bool) -> Tensor:
        assert isinstance(self.cache, _LedCache)
        with self._ranks.broadcast(PASS, self.cache.key, *_arguments(plan), tokens.cpu(), want_logits):
            return super()._dynamic(plan, tokens, want_logits)


class _LedCache(SlotCache):
    """The cache of rank 0's heads; calls that move memory in it, or decide what will, are broadcast to the other ranks."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks, self.key = ranks, ranks.new_key(self)

    def reserve(self, slots: int, capacity: int, cells: int = 0) -> None:
        with self._ranks.broadcast("reserve", self.key, slots, capacity, cells):
            super().reserve(slots, capacity, cells)

    def trim(self, slots: int, capacity: int, cells: int = 0) -> None:
        with self._ranks.broadcast("trim", self.key, slots, capacity, cells):
            super().trim(slots, capacity, cells)

    def enter(self, slot: int, prefix: Prefix | None = None) -> None:
        with self._ranks.broadcast("enter", self.key, slot, prefix):
            super().enter(slot, prefix)

    def copy(self, source: int, target: int, length: int) -> None:
        with self._ranks.broadcast("copy", self.key, source, target, length):
            super().copy(source, target, length)

    def gather(self, slot: int, start: int, cells: Sequence[int]) -> None:
        with self._ranks.broadcast("gather", self.key, slot, start, cells):
            super().gather(slot, start, cells)

    def zero_tail(self, slot: int, length: int) -> None:
        with self._ranks.broadcast("zero_tail", self.key, slot, length):
            super().zero_tail(slot, length)


def _arguments(plan: Plan) -> tuple[Any, ...]:
    """What makes a plan, as `_repeat` takes it."""
    return plan.slots, plan.starts, plan.counts, plan.packed, plan.prefixes, plan.into, plan.parents


def _repeat(
    runner: Runner, cache: SlotCache, slots: list[int], starts: list[int], counts: list[int], packed: bool,
    prefixes: list[Prefix | None], into: Prefix | None, parents: Parents | None, tokens: Tensor, want_logits: bool,
) -> None:  # fmt: skip
    """The pass that rank 0 makes, on this rank's heads."""
    runner.cache = cache
    plan = Plan(slots, starts, counts, runner.device, packed=packed, prefixes=prefixes, into=into, parents=parents)
    runner._dynamic(plan, tokens.to(runner.device), want_logits)
