"""More than one process, by Ray: each loads the recipe's pair and does what one alone would do. Needs the extra `shoal[ray]`.

Ray Data deals out the lines of a batch, and those of a killed process once more. Ray Serve puts replicas of the server behind one
address, adds and removes them, and starts those anew whose engine has stopped.
"""

from __future__ import annotations

import logging
import math
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ray
from fastapi import FastAPI
from ray import data as ray_data
from ray import serve as ray_serve

from shoal.errors import InternalError, ModelError, ShoalError
from shoal.serve.lines import Json, Line
from shoal.serve.offline import Offline
from shoal.serve.recipe import Recipe

LOG = logging.getLogger(__name__)
NAME = "shoal"
TASK = 64
"""Most lines of a task: so many are asked again when a process dies, and at a task's end its batch runs empty."""
TURNS = 4
"""Tasks for each process, if there are lines enough: who is quick has more of them."""


@dataclass(frozen=True)
class Share:
    """What each process has of its machine: CPUs, which are its threads too, and of GPUs, which may be a part of one."""

    cpus: float = 1
    gpus: float = 0

    @property
    def options(self) -> dict[str, Any]:
        """In Ray's words."""
        return {"num_cpus": self.cpus, "num_gpus": self.gpus}


@contextmanager
def connected() -> Iterator[None]:
    """Within it there is a cluster: that of RAY_ADDRESS, the one of this machine, or one that is started for as long."""
    if ray.is_initialized():
        yield
        return
    ray.init(logging_level=logging.WARNING, log_to_driver=False, include_dashboard=False)
    for name in ("ray.data", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)  # the commands say what there is to say
    try:
        yield
    finally:
        ray.shutdown()


def _look_for_room(share: Share) -> None:
    """Says so if no machine of the cluster can ever hold a process: Ray waits in silence for one that can."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(has.get("CPU", 0) >= share.cpus and has.get("GPU", 0) >= share.gpus for has in machines):
        LOG.warning("no machine of this cluster has %g CPUs and %g GPUs: waiting for one", share.cpus, share.gpus)


# ── a batch ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def answer(lines: Sequence[Line], recipe: Recipe, done: Callable[[Json], None], workers: int, share: Share) -> None:
    """Answers lines as `Offline.answer` does, by so many workers; `done` is called here.

    Raises:
        ShoalError: what a worker raised, such as that there is no such model. Exception: what `done` raised.
    """
    task = min(max(len(lines) // (TURNS * workers), 1), TASK)
    items = [{"line": pickle.dumps(line)} for line in lines]
    with connected():
        _look_for_room(share)
        ray_data.DataContext.get_current().enable_progress_bars = False
        dealt = ray_data.from_items(items, override_num_blocks=math.ceil(len(lines) / task))
        pool = ray_data.ActorPoolStrategy(size=workers)
        answers = dealt.map_batches(Answerer, fn_constructor_args=(recipe,), batch_size=None, compute=pool, **share.options)
        for row in answers.iter_rows():
            got = pickle.loads(row["got"])
            if isinstance(got, ShoalError):
                raise got
            done(got)


class Answerer:
    """A worker: it loads at its first task, and answers one after the other."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    @cached_property
    def _pair(self) -> Offline:
        return self._recipe.offline()

    def __call__(self, batch: Mapping[str, Sequence[bytes]]) -> dict[str, list[bytes]]:
        """Answers the lines of a task, all or none: what a killed worker had answered of it never leaves it.

        An error is a row as well; raised here, it would come back in pages of Ray's.
        """
        got: list[Json | ShoalError] = []
        try:
            self._pair.answer([pickle.loads(line) for line in batch["line"]], got.append)
        except Exception as error:
            LOG.exception("a task failed")  # in Ray's log of this process
            got = [error if isinstance(error, ShoalError) else InternalError(f"{type(error).__name__}: {error}")]
        return {"got": [pickle.dumps(one) for one in got]}


# ── a server ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Replicas:
    """How many there are.

    Attributes:
        least, most: of them. wanted: requests, running and waiting, of each; beyond, there is one more.
        open: requests of each at most; more wait in front of it. drain: seconds for those to end when a replica is to go.
    """

    least: int = 1
    most: int = 1
    wanted: float = 4
    open: int = 256
    drain: float = 20


def deploy(recipe: Recipe, replicas: Replicas, share: Share) -> None:
    """Puts the server's application on the cluster, and returns when it answers; needs `ray.serve.start` before.

    Raises:
        ModelError: replicas fail to start, and why.
    """

    def app() -> FastAPI:
        return recipe.app()

    deployment: Any = ray_serve.deployment(
        ray_serve.ingress(app)(Replica), name=NAME, ray_actor_options=share.options, max_ongoing_requests=replicas.open,
        graceful_shutdown_timeout_s=replicas.drain,
        autoscaling_config={
            "min_replicas": replicas.least, "max_replicas": replicas.most, "target_ongoing_requests": replicas.wanted,
        },
    )  # fmt: skip
    try:
        ray_serve.run(deployment.bind(), name=NAME)
    except RuntimeError as error:  # which says no more than that it failed
        told = ray_serve.status().applications[NAME].deployments[NAME].message
        raise ModelError(f"no replica starts: {told.strip().splitlines()[-1]}") from error


class Replica:
    """One server; Ray Serve adds the application, as `app`."""

    app: FastAPI

    def check_health(self) -> None:
        """Asked by Ray Serve, which starts a replica anew where this raises."""
        if not self.app.state.worker.alive:
            raise RuntimeError("the engine has stopped")


def run(recipe: Recipe, host: str, port: int, replicas: Replicas, share: Share, ready: Callable[[], None]) -> None:
    """Serves until SIGTERM or Ctrl-C; then open requests have the drain to finish.

    Args:
        ready: called once requests are answered.

    Raises:
        KeyboardInterrupt: at the end, if it was Ctrl-C.
    """
    with connected(), _until_told() as told:
        _look_for_room(share)
        ray_serve.start(http_options={"host": host, "port": port})
        try:
            deploy(recipe, replicas, share)
            ready()
            told.wait()
        finally:
            _withdraw(replicas.drain)


def _withdraw(drain: float) -> None:
    """Ends the application, and Ray Serve if that was all it had."""
    for _ in range(1 + math.ceil(drain / 60)):
        with suppress(TimeoutError):  # Ray waits for a minute
            ray_serve.delete(NAME)
            break
    if not ray_serve.status().applications:
        ray_serve.shutdown()


@contextmanager
def _until_told() -> Iterator[threading.Event]:
    """An event that SIGTERM sets."""
    told = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: told.set())
    try:
        yield told
    finally:
        signal.signal(signal.SIGTERM, before)
