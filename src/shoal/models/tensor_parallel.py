"""Tensor parallelism: one target over several processes. Rank 0 decides, the others compute.

Transformers shards the weights by the model's own plan (`tp_plan="auto"`; Shoeybi et al. 2019,
arXiv 1909.08053): every rank has some heads of each layer, and a `SlotCache` of these heads. Rank 0
alone has everything else: drafting, drawing, clocks, seeds, text. Before it changes a cache of the
target or makes a pass, it tells the other ranks to do the same. So ranks cannot decide differently,
prices and deadlines included.

Passes of captured rounds are built by all ranks, or by none: if one of them fails to build a pass,
ordinary passes do the work on all ranks. A captured pass begins with a collective that gives all
ranks the block of rank 0, with the tokens that were drafted within the round. So NCCL's collectives
are part of the graph, and the message for such a pass names only the graph.
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
from shoal.models.compiled import Run
from shoal.models.compiled.block import Bucket
from shoal.models.compiled.captures import CAPTURED, Captures
from shoal.models.executor import PassBatch, PassOutput
from shoal.models.ranks import (
    BUILD,
    CAPTURE,
    PASS,
    RESIZE,
    RUN,
    Ranks,
    Served,
    SharedCaptures,
    arguments_of,
)
from shoal.models.runner import Runner
from shoal.types.requests import Prefix


def require_ranks(name: str, config: Any) -> None:
    """Checks that torchrun started several processes that can share a model of this config.

    Raises:
        RequestError: torchrun did not start this process as one of several, accelerate is missing,
            or the processes cannot share the model's heads evenly.
    """
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
    """Makes the runner of a model whose passes all ranks compute.

    Rank 0 gets the runner. Any other rank serves rank 0 until that ends, and then ends the process.

    Args:
        runner: a runner of a model that Transformers sharded; all ranks call this at the same
            point.

    Raises:
        UnsupportedModel: the model's layers keep recurrent states.
    """
    if runner.mixers is not None:
        raise UnsupportedModel(
            f"{runner.name} cannot be shared by processes: {runner.cut_obstacle}"
        )
    ranks = Ranks()
    if dist.get_rank() > 0:
        Served(runner, ranks).serve()
    atexit.register(ranks.stop)
    return _Leading(runner, ranks)


def capture_obstacle(backend: str) -> str | None:
    """Returns the reason why passes of a model that processes share are not captured, or None.

    Args:
        backend: the name of the library that joins the sums of the processes.
    """
    if "nccl" in backend:
        return None
    return f"{backend} joins the sums of several processes on the host, which no graph can hold"


class _Leading(Runner):
    """A checked runner whose forks send their passes to the other ranks.

    Its own cache keeps the number of bytes of a token.
    """

    def __init__(self, runner: Runner, ranks: Ranks) -> None:
        vars(self).update(vars(runner))
        self._ranks = ranks

    def fork(self, ordinary: bool = False) -> Runner:
        """Returns the same model with a cache and counters of its own, see `Runner.fork`."""
        other = super().fork(ordinary)
        other.cache = _LedCache(self._ranks) if self.captures is None else other.cache
        return other

    @property
    def can_keep_prefixes(self) -> bool:
        """False: the other ranks keep nothing beside their caches."""
        return False

    @property
    def cut_obstacle(self) -> str:
        """The reason why first layers cannot be computed alone: ranks compute whole passes."""
        return "several processes share it"

    def use_vectors(self, vectors: Tensor) -> None:
        """Raises UnsupportedModel: the other ranks have no such inputs."""
        raise UnsupportedModel(
            f"{self.name} is shared by several processes, and this drafter feeds vectors of its own"
        )

    def capture_rounds(self, executor: str | None) -> None:
        """Captures the rounds of all ranks from now on, or tells the load report why not."""
        reason = capture_obstacle(dist.get_backend()) if executor == "graphed" else None
        if reason is not None:
            self.captures, self.absent[CAPTURED] = None, reason
            return
        with self._ranks.broadcast(CAPTURE, -1, executor):
            super().capture_rounds(executor)

    def _new_captures(self, executor: str) -> Captures:
        return _LedCaptures(self.bridge, self.name, executor, self.attention, self._ranks)

    def _ordinary(self, batch: PassBatch) -> PassOutput:
        assert isinstance(self.cache, _LedCache)
        tokens = batch.tokens.cpu()
        with self._ranks.broadcast(
            PASS, self.cache.number, *arguments_of(batch.plan), tokens, batch.want_logits
        ):
            return super()._ordinary(batch)


class _LedCache(SlotCache):
    """The cache of rank 0's heads.

    Calls that move memory in the cache, or decide which memory will move, are broadcast to the
    other ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks, self.number = ranks, ranks.number()
        ranks.drop_with(self, self.number)

    def _resize(self, slots: int, capacity: int, cells: int) -> None:
        """Changes the size of the cache on all ranks, and sends the lengths of the rows to them.

        The other ranks do not follow the lengths, which tell the tokens that are kept.
        """
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
    """The captured rounds of rank 0, which are built on all ranks and run on all of them."""

    def __init__(self, bridge: Any, name: str, executor: str, attention: str, ranks: Ranks) -> None:
        super().__init__(bridge, name, executor, attention)
        self._ranks = ranks

    def new_cache(self) -> SlotCache:
        return _LedCache(self._ranks)

    def executable(self, bucket: Bucket, cache: SlotCache, run: Run) -> Run:
        """Builds a pass on all ranks; raises RuntimeError if another rank could not."""
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
