"""The ranks of a sharded model: the messages among them, and the ranks that obey rank 0.

Each other rank computes its own heads as rank 0 orders, see `shoal.models.tensor_parallel`.

Rank 0 announces the next step by messages that travel on the CPU, beside the collectives of the
model. The messages of rank 0 are enough for the other ranks. They answer in one case only: to
report whether each rank has built an object that all ranks must build.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from shoal.errors import OutOfStep, RequestError
from shoal.models.cache import Plan, SlotCache
from shoal.models.compiled import Run
from shoal.models.compiled.block import Block, Bucket
from shoal.models.compiled.captures import Captures
from shoal.models.runner import Runner

TIMEOUT = timedelta(days=365)
"""The time that the other ranks wait for the next message of rank 0, which may wait for its user.
"""
PASS_SECONDS = 300.0
"""The default time in seconds that a rank waits for the others within a pass.

Rank 0 waits as long until the others hear it. A process that waits for a stopped one would not end
otherwise. The environment variable `VARIABLE` overrides the default.
"""
VARIABLE = "SHOAL_RANK_TIMEOUT"
AGREEMENT = timedelta(minutes=10)
"""The time that a rank waits for the others' answers.

A rank asks for them after it has loaded its part, has built an object, or has failed to.
"""
STOP = "stop"
AGAIN = "start them all again"


class Ranks:
    """The processes of one model. All ranks make this object at the same point of the load.

    Raises:
        RequestError: `SHOAL_RANK_TIMEOUT` is not a number of seconds.
    """

    def __init__(self) -> None:
        self._pass_seconds = pass_seconds()
        self._group = dist.new_group(backend="gloo", timeout=AGREEMENT)
        self._answers = dist.new_group(backend="gloo", timeout=AGREEMENT)
        # All ranks are here now: a rank that loads longer than the others does not hang.
        limit = timedelta(seconds=self._pass_seconds)
        # Transformers gives these groups two hours, for loading.
        for group in list(distributed_c10d._world.pg_map):
            if group not in (self._group, self._answers):
                distributed_c10d._set_pg_timeout(limit, group)
        distributed_c10d._set_pg_timeout(limit if dist.get_rank() == 0 else TIMEOUT, self._group)
        self._lock = threading.RLock()
        self._numbers = count()
        self._dropped: deque[int] = deque()
        self._out_of_step = False

    # ── rank 0 ────────────────────────────────────────────────────────────────────────────────────

    def number(self) -> int:
        """Returns a new number for an object of all ranks; raises OutOfStep if a block failed."""
        self._require_in_step()
        return next(self._numbers)

    def drop_with(self, owner: Any, number: int) -> None:
        """Makes the other ranks drop the object of that number once rank 0's owner is gone."""
        weakref.finalize(owner, self._dropped.append, number).atexit = False

    @contextmanager
    def broadcast(self, operation: str, number: int, *arguments: Any) -> Iterator[None]:
        """Announces the operation of the block to the other ranks, which do it as well.

        Raises:
            OutOfStep: a rank has ended or hangs, or an earlier block failed, so that the progress
                of the other ranks is unknown.
        """
        with self._lock:
            self._require_in_step()
            self._out_of_step = True
            try:
                self._say(operation, number, *arguments)
                yield
            except Exception as error:
                if is_loss(error) and "timed out" in str(error).lower():
                    raise OutOfStep(
                        f"a process of the model has not answered for {self._pass_seconds:g} "
                        f"seconds ({VARIABLE}): {AGAIN}"
                    ) from error
                if is_loss(error):
                    raise OutOfStep(
                        f"a process of the model has failed or ended, its own message says why: "
                        f"{AGAIN}"
                    ) from error
                raise
            self._out_of_step = False

    def stop(self) -> None:
        """Lets the other ranks end.

        Ranks that wait in a failed pass would not hear the message; they end by the loss of this
        process.
        """
        if not self._out_of_step:
            try:
                self._say(STOP, -1)
            except RuntimeError as error:
                if not is_loss(error):
                    raise
                return  # one has ended already; the others end with this process
            self.leave()

    def _require_in_step(self) -> None:
        if self._out_of_step:
            raise OutOfStep(
                f"an earlier pass failed, and the other processes of the model may wait in it: "
                f"{AGAIN}"
            )

    def _say(self, operation: str, number: int, *arguments: Any) -> None:
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        dist.broadcast_object_list(
            [(operation, number, arguments, dropped)],
            src=0,
            group=self._group,
            device=torch.device("cpu"),
        )

    # ── all ranks ─────────────────────────────────────────────────────────────────────────────────

    def first_failure(self, error: Exception | None) -> str | None:
        """Returns the error of the first rank that has one; None if all ranks succeeded.

        All ranks call this at the same point.

        Raises:
            OutOfStep: not all ranks reached the call. A rank that waits in a collective for a rank
                that failed earlier does not reach it.
        """
        reason = None if error is None else f"{type(error).__name__}: {error}"
        answers: list[str | None] = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(answers, reason, group=self._answers)
        except RuntimeError as lost:
            raise OutOfStep(
                f"not all processes of the model could say whether they go on ({reason}): {AGAIN}"
            ) from lost
        return next(
            (f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer is not None),
            None,
        )

    def leave(self) -> None:
        """Ends the threads of the groups while Python still runs.

        A thread that drops a tensor later aborts the process.
        """
        dist.destroy_process_group()
        del self._group, self._answers  # the last references: their threads are joined here

    # ── the others ────────────────────────────────────────────────────────────────────────────────

    def hear(self) -> tuple[str, int, tuple[Any, ...], list[int]]:
        """Waits for the next message of rank 0.

        Returns:
            The operation, the number of its object, the arguments, and the numbers of dropped
            objects.
        """
        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=0, group=self._group, device=torch.device("cpu"))
        return box[0]


def pass_seconds() -> float:
    """Returns the seconds that a rank waits within a pass; raises RequestError for no number."""
    text = os.environ.get(VARIABLE, "") or PASS_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 10**8:
        raise RequestError(f"{VARIABLE} must be a number of seconds, greater than 0: got {text!r}")
    return seconds


def is_loss(error: BaseException) -> bool:
    """Returns True if a collective failed because of another process."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    )


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
        self, operation: str, number: int, arguments: tuple[Any, ...], dropped: Sequence[int]
    ) -> bool:
        """Does the operation of a message; returns False if it was the last one."""
        self._drop(dropped)
        if operation == STOP:
            self._ranks.leave()
            return False
        if operation == CAPTURE:
            self._capture_rounds(*arguments)
        elif operation == RUN:
            self._built[number][1]()
        else:
            cache = self._caches.setdefault(number, SlotCache())
            if operation == BUILD:
                self._build(number, cache, *arguments)
            elif operation == RESIZE:
                self._resize(number, cache, *arguments)
            elif operation == PASS:
                repeat(self._runner, cache, *arguments)
            else:
                getattr(cache, operation)(*arguments)
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
            self._captures = SharedCaptures(runner.bridge, runner.name, executor, runner.attention)

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
        "pack_from": 0.0 if plan.packed else None,
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
    into = options.pop("into")
    plan = Plan(*rows, runner.device, **options)
    plan.into = into
    runner.ordinary(plan, tokens.to(runner.device), want_logits)
