"""The ranks of a sharded model that do not lead: they obey rank 0 with their own heads.

See `shoal.models.tensor_parallel`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import OutOfStep
from shoal.models.cache import Plan, SlotCache
from shoal.models.compiled import Captures
from shoal.models.compiled.block import Block
from shoal.models.compiled.buckets import Bucket
from shoal.models.compiled.executors import Run
from shoal.models.ranks import AGAIN, STOP, Ranks
from shoal.models.runner import Runner

PASS, CAPTURE, BUILD, RUN, RESIZE = "pass", "capture", "build", "run", "resize"
"""The words of rank 0 beside the names of `SlotCache`'s methods.

PASS is an ordinary pass. CAPTURE captures rounds from now on, or no more. BUILD builds a pass of a
round, and RUN runs it. RESIZE changes the size of a cache.
"""


class SharedCaptures(Captures):
    """The captured rounds of a model that several processes share, on any rank."""

    alone = False

    def share(self, block: Block) -> None:
        """Sends the block of rank 0 to all ranks, which compute it.

        The collective is part of the captured graph. Collectives of gloo are not captured: they run
        on the host.
        """
        dist.broadcast(block.inputs, src=0)


class Served:
    """The state of a rank other than 0, by rank 0's numbers.

    It holds the rank's part of the model, of the caches, and of the passes that are built over
    them.
    """

    def __init__(self, runner: Runner, ranks: Ranks) -> None:
        self._runner, self._ranks = runner, ranks
        self._caches: dict[int, SlotCache] = {}
        self._built: dict[int, tuple[int, Run]] = {}  # with the numbers of their caches
        self._captures: SharedCaptures | None = None

    @torch.inference_mode()
    def serve(self) -> NoReturn:
        """Obeys the messages of rank 0 until it stops.

        SIGTERM and Ctrl-C, which torchrun sends to all processes, are ignored: rank 0 obeys them,
        as it may have rows to finish.

        Raises:
            SystemExit: rank 0 says stop, or an operation fails.
        """
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
        try:
            while self._do(*self._ranks.hear()):
                pass
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise SystemExit(
                f"rank {dist.get_rank()} of {self._runner.name} cannot go on ({reason}): {AGAIN}"
            ) from error
        raise SystemExit(0)

    def _do(
        self, what: str, number: int, arguments: tuple[Any, ...], dropped: Sequence[int]
    ) -> bool:
        """Does the operation of a message; returns False if it was the last one."""
        self._drop(dropped)
        if what == STOP:
            self._ranks.leave()
            return False
        if what == CAPTURE:
            self._capture_rounds(*arguments)
        elif what == RUN:
            self._built[number][1]()
        else:
            cache = self._caches.setdefault(number, SlotCache())
            if what == BUILD:
                self._build(number, cache, *arguments)
            elif what == RESIZE:
                self._resize(number, cache, *arguments)
            elif what == PASS:
                repeat(self._runner, cache, *arguments)
            else:
                getattr(cache, what)(*arguments)
        return True

    def _drop(self, numbers: Sequence[int]) -> None:
        if numbers and self._runner.device.type == "cuda":
            torch.cuda.synchronize(self._runner.device)  # no other call waits for launched work
        for number in numbers:
            self._caches.pop(number, None)
            self._built.pop(number, None)

    def _capture_rounds(self, executor: str | None) -> None:
        runner = self._runner
        self._drop(list(self._built))
        self._captures = None
        if executor is not None:
            self._captures = SharedCaptures(runner._bridge, runner.name, executor, runner.attention)

    def _build(self, owner: int, cache: SlotCache, number: int, bucket: Bucket) -> None:
        error = None
        try:
            self._built[number] = owner, self._executable(bucket, cache)
        except OutOfStep:
            raise
        except Exception as failed:
            error = failed
        if self._ranks.first_failure(error) is not None:
            self._drop([number])

    def _executable(self, bucket: Bucket, cache: SlotCache) -> Run:
        """Builds this rank's part of a captured pass: the block comes from rank 0 each time."""
        captures = self._captures
        assert captures is not None
        block = Block(bucket, (cache.slots - 1) * cache.capacity, self._runner.device)
        view = captures.view(block, cache)

        def run() -> Any:
            with captures.within(view):
                return captures.forward(view)

        return captures.executable(bucket, cache, run)

    def _resize(
        self,
        number: int,
        cache: SlotCache,
        slots: int,
        capacity: int,
        cells: int,
        lengths: list[int],
    ) -> None:
        self._drop([built for built, (owner, _) in self._built.items() if owner == number])
        if self._captures is not None:
            self._captures.forget(cache)
        cache.lengths = lengths
        cache._resize(slots, capacity, cells)


def arguments_of(plan: Plan) -> tuple[tuple[list[int], ...], dict[str, Any]]:
    """Returns the arguments of a plan by place and by name, without its device."""
    return (plan.slots, plan.starts, plan.counts), {
        "packed": plan.packed,
        "prefixes": plan.prefixes,
        "into": plan.into,
        "parents": plan.parents,
    }


def repeat(
    runner: Runner,
    cache: SlotCache,
    rows: tuple[list[int], list[int], list[int]],
    options: dict[str, Any],
    tokens: Tensor,
    want_logits: bool,
) -> None:
    """Computes a pass of rank 0 on this rank's heads, by the arguments of its plan."""
    runner.cache = cache
    plan = Plan(*rows, runner.device, **options)
    runner.ordinary(plan, tokens.to(runner.device), want_logits)
