"""The logs of replicas on Ray, printed by the process that started them, as if it were one server.

An actor keeps the lines until they are taken, and the last metrics of each replica
(`shoal.serve.prometheus_metrics`). It imports little, so that its process is small.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.config import dictConfig
from typing import Any

import ray
from ray.exceptions import RayError

from shoal.serve import logs

NAMESPACE = "shoal"
MOST_LINES = 10_000
"""The number of lines that may wait to be printed; older ones are dropped."""
MAX_AGE_SECONDS = 30.0
"""The seconds without a report after which a replica has ended."""
LAST_SECONDS = 10.0
"""The time for the last lines at the end."""


class Relay:
    """The actor: replicas put lines, and one process takes them.

    Replicas report metrics, and get the metrics of all replicas.
    """

    def __init__(self) -> None:
        self._reports: dict[str, tuple[float, bytes]] = {}
        self._lines: deque[str] = deque(maxlen=MOST_LINES)
        self._news, self._closed = asyncio.Event(), False

    async def put(self, line: str) -> None:
        """Keeps a line."""
        self._lines.append(line)
        self._news.set()

    async def take(self) -> list[str] | None:
        """Returns all lines, as soon as there is one; None = closed, and no line is left."""
        while not self._lines and not self._closed:
            self._news.clear()
            await self._news.wait()
        taken = list(self._lines)
        self._lines.clear()
        return taken or None

    async def report(self, replica: str, metrics: bytes) -> dict[str, bytes]:
        """Takes a replica's metrics; returns the metrics of all replicas that have not ended."""
        now = time.monotonic()
        self._reports[replica] = now, metrics
        self._reports = {
            name: one for name, one in self._reports.items() if now - one[0] < MAX_AGE_SECONDS
        }
        return {name: reported for name, (_, reported) in self._reports.items()}

    async def close(self) -> None:
        """Ends the lines: `take` returns None once no line is left."""
        self._closed = True
        self._news.set()


class Relayed(logging.Handler):
    """A handler in a replica that sends each line to the actor.

    Without an actor it writes to the replica's own stderr, which Ray keeps in a file.

    Args:
        actor: the actor's name.
        replica: added to the fields of each record.
    """

    def __init__(self, actor: str, replica: str) -> None:
        super().__init__()
        self._replica, self._put = replica, lambda line: print(line, file=sys.stderr, flush=True)
        self._last: Any = None  # a Ray reference to the arrival of the last line
        with suppress(ValueError):  # there is none
            self._put = ray.get_actor(actor, namespace=NAMESPACE).put.remote

    def emit(self, record: logging.LogRecord) -> None:
        """Sends one line; a line that cannot be sent is lost."""
        try:
            record.fields = {**getattr(record, "fields", {}), "replica": self._replica}
            self._last = self._put(self.format(record))
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Waits until the actor has all lines, `LAST_SECONDS` at most."""
        with suppress(RayError):  # the actor has ended
            if self._last is not None and ray.is_initialized():
                ray.get(self._last, timeout=LAST_SECONDS)


def send_logs(actor: str, replica: str, level: str, form: logs.LogFormat) -> None:
    """Sends the logs of this replica to the actor of that name."""
    handler = {"()": f"{__name__}.Relayed", "actor": actor, "replica": replica}
    dictConfig(logs.config(level, form, handler))


def flush_logs() -> None:
    """Waits until all lines of this replica have been sent: a process that is killed loses them."""
    for handler in logging.getLogger("shoal").handlers:
        handler.flush()


@contextmanager
def printed_logs(actor: str) -> Iterator[None]:
    """Prints the lines of a cluster's replicas on stderr while the block lasts."""
    lines: Any = (
        ray.remote(Relay)
        .options(name=actor, namespace=NAMESPACE, num_cpus=0, max_restarts=0)
        .remote()
    )
    thread = threading.Thread(target=_print, args=(lines,), name="shoal-logs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        lines.close.remote()
        thread.join(LAST_SECONDS)
        ray.kill(lines)


def _print(lines: Any) -> None:
    with suppress(RayError):  # the actor has died with its lines
        while (taken := ray.get(lines.take.remote())) is not None:
            # If the disk of the log is full, these lines are lost; later ones may have room.
            with suppress(OSError):  # in one piece: this process writes lines of its own
                sys.stderr.write("".join(f"{line}\n" for line in taken))
                sys.stderr.flush()
