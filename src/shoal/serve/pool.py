"""A batch in more than one process: workers on Ray that each load the recipe's pair and answer blocks of lines."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from shoal.errors import InternalError, ModelError, ShoalError
from shoal.serve.api_formats import Json
from shoal.serve.batch_lines import BatchLine, LineError
from shoal.serve.blocks import MAX_DEATHS, Block, Blocks
from shoal.serve.cluster import Share, connected, look_for_room
from shoal.serve.offline import Offline
from shoal.serve.serve_config import ServeConfig

LOG = logging.getLogger(__name__)


def answer(
    lines: Sequence[BatchLine], recipe: ServeConfig, done: Callable[[Json], None], workers: int, share: Share
) -> None:
    """Answers lines as `Offline.answer` does, by so many workers; `done` is called here.

    A line that kills its workers has an error for its answer, all others are answered.

    Raises:
        ShoalError: what a worker raised, such as that there is no such model; or workers die while they load. Exception: what
            `done` raised.
    """
    with connected():
        look_for_room(share)
        pool = _Pool(Blocks(lines, workers), recipe, share, done)
        try:
            pool.run(workers)
        finally:
            pool.close()


class _Pool:
    """Workers and what each is at: a block, or None while it loads."""

    def __init__(self, blocks: Blocks, recipe: ServeConfig, share: Share, done: Callable[[Json], None]) -> None:
        self._blocks, self._recipe, self._done = blocks, recipe, done
        self._make: Any = ray.remote(Answerer).options(max_restarts=0, max_task_retries=0, **share.options)
        self._busy: dict[Any, tuple[Any, Block | None]] = {}
        self._lost = 0
        """Workers in succession that died while they loaded."""

    def run(self, workers: int) -> None:
        """Until all blocks are answered."""
        for _ in range(min(workers, len(self._blocks))):
            self._start()
        while self._busy:
            (ready,), _ = ray.wait(list(self._busy), num_returns=1)
            worker, block = self._busy.pop(ready)
            try:
                got = pickle.loads(ray.get(ready))
            except RayTaskError:
                raise  # not a death: what an Answerer cannot tell as a row
            except RayError as error:
                ray.kill(worker)
                self._died(block, error)
            else:
                self._take_in(got)
                self._lost = 0
                self._go_on(worker)

    def close(self) -> None:
        """Ends the workers, whatever they are at."""
        for worker, _ in self._busy.values():
            ray.kill(worker)

    def _start(self) -> None:
        worker = self._make.remote(self._recipe)
        self._busy[worker.load.remote()] = worker, None

    def _go_on(self, worker: Any) -> None:
        block = self._blocks.take()
        if block is None:
            ray.kill(worker)
        else:
            self._busy[worker.answer.remote(pickle.dumps(block.lines))] = worker, block

    def _take_in(self, got: Sequence[Json | ShoalError]) -> None:
        for one in got:
            if isinstance(one, ShoalError):
                raise one
            self._done(one)

    def _died(self, block: Block | None, error: RayError) -> None:
        """A worker is gone: its lines are asked again, and another one comes if there is something to do."""
        why = str(error).strip().splitlines()[0]
        if block is None:
            self._lost += 1
            if self._lost == MAX_DEATHS:
                raise ModelError(f"{MAX_DEATHS} workers in succession died while they loaded the models: {why}")
        else:
            LOG.warning("a worker died with %d lines, which are asked again: %s", len(block.lines), why)
            given_up = self._blocks.died(block)
            if given_up is not None:
                message = f"this line was alone with {MAX_DEATHS} workers, and each of them died: {why}"
                self._done(given_up.failure(LineError(500, message, code="worker_died")))
        if len(self._blocks):
            self._start()


class Answerer:
    """A worker. What it answers and what it raises come back as rows: raised, an error would come in pages of Ray's."""

    def __init__(self, recipe: ServeConfig) -> None:
        self._recipe = recipe

    @cached_property
    def _pair(self) -> Offline:
        return self._recipe.offline()

    def load(self) -> bytes:
        """Loads the pair, which may take minutes; a worker that dies by it is no line's fault."""
        return self._rows(lambda got: self._pair)

    def answer(self, lines: bytes) -> bytes:
        """Answers the lines of a block, all or none: what a killed worker had answered of it never leaves it."""
        return self._rows(lambda got: self._pair.answer(pickle.loads(lines), got.append))

    def _rows(self, work: Callable[[list[Json | ShoalError]], object]) -> bytes:
        got: list[Json | ShoalError] = []
        try:
            work(got)
        except Exception as error:
            LOG.exception("a block failed")  # in Ray's log of this process
            got = [error if isinstance(error, ShoalError) else InternalError(f"{type(error).__name__}: {error}")]
        return pickle.dumps(got)
