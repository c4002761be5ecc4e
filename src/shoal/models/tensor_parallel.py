"""Tensor parallelism: one target over several processes; rank 0 decides, the others compute their
part of its passes.

Transformers shards the weights by the model's own plan (`tp_plan="auto"`; Shoeybi et al. 2019,
arXiv 1909.08053): every rank has some heads of each layer, and a `SlotCache` of these heads.
Everything else is rank 0's alone: drafting, drawing, clocks, seeds, text. Before it changes a cache
of the target or makes a pass, it tells the others to do the same. So there is nothing that ranks
could decide differently, prices and deadlines included.

Passes of captured rounds are built by all ranks, or by none: where one of them fails to, ordinary
passes do the work on all. Such a pass begins with a collective by which all ranks get the block of
rank 0, tokens that were drafted within the round included. So NCCL's are part of the graph, and a
message names nothing but the graph.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shoal.errors import RequestError, UnsupportedModel
from shoal.models.cache import SlotCache
from shoal.models.compiled import Captures
from shoal.models.compiled.buckets import Bucket
from shoal.models.compiled.captures import CAPTURED
from shoal.models.compiled.executors import Run
from shoal.models.executors.protocol import Batch, Output
from shoal.models.ranks import Ranks
from shoal.models.runner import Runner
from shoal.models.sharded import (
    BUILD,
    CAPTURE,
    PASS,
    RESIZE,
    RUN,
    Served,
    SharedCaptures,
    arguments_of,
)
from shoal.types.prefix import Prefix


def require_ranks(name: str, config: Any) -> None:
    """Raises RequestError unless torchrun started this process as one of several that can share a
    model with this Transformers config."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size < 2 or "RANK" not in os.environ or not dist.is_available():
        raise RequestError(
            "tensor_parallel needs several processes: start them by `torchrun --nproc-per-node "
            "2 ...`"
        )
    if find_spec("accelerate") is None:
        raise RequestError("tensor_parallel needs accelerate: pip install '.[tensor-parallel]'")
    heads = getattr(config, "num_key_value_heads", 0) or getattr(config, "num_attention_heads", 0)
    if heads % size:
        raise RequestError(
            f"{name} has {heads} heads of keys and values, which {size} processes cannot share "
            f"evenly"
        )


def lead(runner: Runner) -> Runner:
    """On rank 0: the same model, as a runner whose passes all ranks make. On any other rank: serves
    rank 0 until that ends, and then ends the process.

    Args:
        runner: of a model that Transformers sharded; all ranks call this at the same point.
    """
    ranks = Ranks()
    if dist.get_rank() > 0:
        Served(runner, ranks).serve()
    atexit.register(ranks.stop)
    return _Leading(runner, ranks)


def capture_obstacle(backend: str) -> str | None:
    """Why the passes of a model that several processes share are not captured, by the name of what
    joins their sums; None where they can be."""
    return (
        None
        if "nccl" in backend
        else f"{backend} joins the sums of several processes on the host, which no graph can hold"
    )


class _Leading(Runner):
    """A checked runner whose forks tell their passes to the other ranks. Its own cache still knows
    what a token takes."""

    def __init__(self, runner: Runner, ranks: Ranks) -> None:
        vars(self).update(vars(runner))
        self._ranks = ranks

    def fork(self) -> Runner:
        """The same model with a cache and counters of its own."""
        other = super().fork()
        other.cache = _LedCache(self._ranks) if self.captures is None else other.cache
        return other

    @property
    def can_keep_prefixes(self) -> bool:
        """No: the other ranks keep nothing beside their caches."""
        return False

    @property
    def cut_obstacle(self) -> str:
        """The other ranks compute whole passes."""
        return "several processes share it"

    def use_vectors(self, vectors: Tensor) -> None:
        """Raises UnsupportedModel: the other ranks have no such inputs."""
        raise UnsupportedModel(
            f"{self.name} is shared by several processes, and this drafter feeds vectors of its own"
        )

    def capture_rounds(self, executor: str | None) -> None:
        """Of all ranks; none where these cannot be captured, and the load report says why."""
        reason = capture_obstacle(dist.get_backend()) if executor == "graphed" else None
        if reason is not None:
            self.captures, self.absent[CAPTURED] = None, reason
            return
        with self._ranks.broadcast(CAPTURE, -1, executor):
            super().capture_rounds(executor)

    def _new_captures(self, executor: str) -> Captures:
        return _LedCaptures(self._bridge, self.name, executor, self.attention, self._ranks)

    def _ordinary(self, batch: Batch) -> Output:
        assert isinstance(self.cache, _LedCache)
        tokens = batch.tokens.cpu()
        with self._ranks.broadcast(
            PASS, self.cache.number, *arguments_of(batch.plan), tokens, batch.want_logits
        ):
            return super()._ordinary(batch)


class _LedCache(SlotCache):
    """The cache of rank 0's heads; calls that move memory in it, or decide what will, are broadcast
    to the other ranks."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks, self.number = ranks, ranks.number()
        ranks.drop_with(self, self.number)

    def _resize(self, slots: int, capacity: int, cells: int) -> None:
        """The others do not follow the lengths of rows, which say what is kept."""
        if (slots, capacity, cells) != (self.slots, self.capacity, self.cells):
            with self._ranks.broadcast(RESIZE, self.number, slots, capacity, cells, self.lengths):
                super()._resize(slots, capacity, cells)

    def enter(self, slot: int, prefix: Prefix | None = None) -> None:
        with self._ranks.broadcast("enter", self.number, slot, prefix):
            super().enter(slot, prefix)

    def copy(self, source: int, target: int, length: int) -> None:
        with self._ranks.broadcast("copy", self.number, source, target, length):
            super().copy(source, target, length)

    def gather(self, slot: int, start: int, cells: Sequence[int]) -> None:
        with self._ranks.broadcast("gather", self.number, slot, start, cells):
            super().gather(slot, start, cells)

    def zero_tail(self, slot: int, length: int) -> None:
        with self._ranks.broadcast("zero_tail", self.number, slot, length):
            super().zero_tail(slot, length)

    def zero_non_finite(self, slot: int) -> None:
        with self._ranks.broadcast("zero_non_finite", self.number, slot):
            super().zero_non_finite(slot)


class _LedCaptures(SharedCaptures):
    """On rank 0: what is built here is built on all ranks, and runs on all of them."""

    def __init__(self, bridge: Any, name: str, executor: str, attention: str, ranks: Ranks) -> None:
        super().__init__(bridge, name, executor, attention)
        self._ranks = ranks

    def new_cache(self) -> SlotCache:
        return _LedCache(self._ranks)

    def executable(self, bucket: Bucket, cache: SlotCache, run: Run) -> Run:
        """Raises RuntimeError: another rank could not build its part."""
        assert isinstance(cache, _LedCache)
        ranks, number = self._ranks, self._ranks.number()
        built, error = run, None
        with ranks.broadcast(BUILD, cache.number, number, bucket):
            try:
                built = super().executable(bucket, cache, run)
            except Exception as failed:
                error = failed
            reason = ranks.first_failure(error)
        if error is not None:
            raise error
        if reason is not None:
            raise RuntimeError(reason)

        def replay() -> Any:
            with ranks.broadcast(RUN, number):
                return built()

        ranks.drop_with(replay, number)
        return replay
