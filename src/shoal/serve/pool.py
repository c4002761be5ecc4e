"""A batch in several processes: workers on Ray that each load a pair and answer blocks of lines."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError

from shoal.errors import InternalError, ModelError, ShoalError
from shoal.serve.api_errors import Json
from shoal.serve.app import ServeConfig
from shoal.serve.batch_lines import MAX_DEATHS, BatchLine, Blocks, LineBlock, LineError
from shoal.serve.cluster import Share, connected, warn_if_too_small

if TYPE_CHECKING:
    from shoal.serve.handler import Offline

LOG = logging.getLogger(__name__)


class Answerer:
    """A worker of a batch.

    It returns results and errors as a pickled list: Ray would wrap an error that is raised in its
    own traceback.
    """

    def __init__(self, config: ServeConfig) -> None:
        self._config = config

    @cached_property
    def _pair(self) -> Offline:
        return self._config.offline()

    def load(self) -> bytes:
        """Loads the pair, which may take minutes; a death while loading counts against no line."""
        return self._results(lambda got: self._pair)

    def answer(self, lines: bytes) -> bytes:
        """Answers the lines of a block, all or none: a worker that is killed loses its results."""
        return self._results(lambda got: self._pair.answer(pickle.loads(lines), got.append))

    def _results(self, work: Callable[[list[Json | ShoalError]], object]) -> bytes:
        got: list[Json | ShoalError] = []
        try:
            work(got)
        except Exception as error:
            LOG.exception("a block failed")  # to Ray's log of this process
            got = [
                error
                if isinstance(error, ShoalError)
                else InternalError(f"{type(error).__name__}: {error}")
            ]
        return pickle.dumps(got)


def answer(
    lines: Sequence[BatchLine],
    config: ServeConfig,
    done: Callable[[Json], None],
    workers: int,
    share: Share,
) -> None:
    """Answers lines with several workers, as `Offline.answer` does with one.

    A line that kills its workers is answered with an error, all others are answered. `done` is
    called in this process.

    Raises:
        ShoalError: the error of a worker, for example that a model does not exist; or workers died
            while they loaded.
        Exception: the error that `done` raised.
    """
    with connected():
        warn_if_too_small(share)
        _Pool(Blocks(lines, workers), config, share, done).run(workers)


class _Pool:
    """The workers and the block of each; None while it loads."""

    def __init__(
        self, blocks: Blocks, config: ServeConfig, share: Share, done: Callable[[Json], None]
    ) -> None:
        self._blocks, self._config, self._done = blocks, config, done
        self._make: Any = ray.remote(Answerer).options(
            max_restarts=0, max_task_retries=0, **share.options
        )
        self._busy: dict[Any, tuple[Any, LineBlock | None]] = {}
        self._failed_loads = 0
        """The number of consecutive workers that died while they loaded."""

    def run(self, workers: int) -> None:
        """Runs until all blocks are answered, and ends the workers."""
        try:
            for _ in range(min(workers, len(self._blocks))):
                self._start()
            while self._busy:
                self._wait()
        finally:
            for worker, _ in self._busy.values():
                ray.kill(worker)

    def _wait(self) -> None:
        """Waits for one worker, and gives it the next block."""
        (ready,), _ = ray.wait(list(self._busy), num_returns=1)
        worker, block = self._busy.pop(ready)
        try:
            got = pickle.loads(ray.get(ready))
        except RayTaskError:
            raise  # an error of the worker's code, not its death
        except RayError as error:
            ray.kill(worker)
            self._died(block, error)
        else:
            self._collect(got)
            self._failed_loads = 0
            self._give_block(worker)

    def _start(self) -> None:
        worker = self._make.remote(self._config)
        self._busy[worker.load.remote()] = worker, None

    def _give_block(self, worker: Any) -> None:
        block = self._blocks.take()
        if block is None:
            ray.kill(worker)
        else:
            self._busy[worker.answer.remote(pickle.dumps(block.lines))] = worker, block

    def _collect(self, got: Sequence[Json | ShoalError]) -> None:
        for one in got:
            if isinstance(one, ShoalError):
                raise one
            self._done(one)

    def _died(self, block: LineBlock | None, error: RayError) -> None:
        """Puts the block of a dead worker back, and starts another worker if there are blocks."""
        why = str(error).strip().splitlines()[0]
        if block is None:
            self._failed_loads += 1
            if self._failed_loads == MAX_DEATHS:
                raise ModelError(
                    f"{MAX_DEATHS} workers in succession died while they loaded the models: {why}"
                )
        else:
            LOG.warning(
                "a worker died with %d lines, which are asked again: %s", len(block.lines), why
            )
            given_up = self._blocks.died(block)
            if given_up is not None:
                message = (
                    f"this line was alone with {MAX_DEATHS} workers, and each of them died: {why}"
                )
                self._done(given_up.failure(LineError(500, message, code="worker_died")))
        if len(self._blocks):
            self._start()
