"""The work of a batch's worker.

This module has no imports that take time: a worker's configuration brings its other modules along.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from shoal.errors import InternalError, ShoalError

if TYPE_CHECKING:
    from shoal.serve.api_errors import Json
    from shoal.serve.handler import Offline
    from shoal.serve.serve_config import ServeConfig

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
        """Loads the pair, which may take minutes.

        A death while loading is not counted against a line.
        """
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
