"""The server in more than one process, by Ray: each loads the recipe's pair. Needs the extra `shoal[ray]`.

Ray Serve puts replicas behind one address, adds and removes them, and starts those anew whose engine has stopped. Batches are the
subject of `shoal.serve.pool`.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve as ray_serve
from ray._private import ray_constants
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

from shoal.errors import ModelError, RequestError
from shoal.serve.run import bind
from shoal.serve.serve_config import ServeConfig

LOG = logging.getLogger(__name__)
DEPLOYMENT = "shoal"
OPTIONS: dict[str, Any] = {"logging_level": logging.WARNING, "log_to_driver": False, "include_dashboard": False}


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
    """Within it there is a cluster: that of RAY_ADDRESS, the one of this machine, or one that is started for as long.

    One that is started listens on the loopback address only, and asks for a token (Ray makes one; from Ray 2.60 on by itself).
    """
    if ray.is_initialized():
        yield
        return
    for name in ("ray.data", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)  # the commands say what there is to say
    try:
        _connect()
        yield
    finally:
        ray.shutdown()


def _connect() -> None:
    named = os.environ.get("RAY_ADDRESS")
    if named and named != "local":
        ray.init(**OPTIONS)
        return
    if named != "local":
        with suppress(ConnectionError):  # there is none on this machine
            ray.init(address="auto", **OPTIONS)
            return
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = (
        False  # else Ray replaces a loopback address by one that others see, and listens on all
    )
    try:
        ray.init(address="local", _node_ip_address="127.0.0.1", **OPTIONS)
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def look_for_room(share: Share) -> None:
    """Says so if no machine of the cluster can ever hold a process: Ray waits in silence for one that can."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(has.get("CPU", 0) >= share.cpus and has.get("GPU", 0) >= share.gpus for has in machines):
        LOG.warning("no machine of this cluster has %g CPUs and %g GPUs: waiting for one", share.cpus, share.gpus)


# ── a server ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Replicas:
    """How many there are.

    Attributes:
        least, most: of them. wanted: requests, running and waiting, of each; beyond, there is one more.
        open: requests of each at most; as many wait in front of it, and more are answered with 503.
        drain: seconds for those to end when a replica is to go.
    """

    least: int = 1
    most: int = 1
    wanted: float = 4
    open: int = 256
    drain: float = 20


def deploy(recipe: ServeConfig, replicas: Replicas, share: Share, name: str) -> None:
    """Puts the server's application on the cluster, and returns when it answers; needs `ray.serve.start` before.

    Args:
        name: of the application, which no other has.

    Raises:
        RequestError: another application answers there already. ModelError: replicas fail to start, and why.
    """

    def app() -> FastAPI:
        return recipe.app()

    deployment: Any = ray_serve.deployment(
        ray_serve.ingress(app)(Replica), name=DEPLOYMENT, ray_actor_options=share.options, max_ongoing_requests=replicas.open,
        max_queued_requests=replicas.open, graceful_shutdown_timeout_s=replicas.drain,
        autoscaling_config={
            "min_replicas": replicas.least, "max_replicas": replicas.most, "target_ongoing_requests": replicas.wanted,
        },
    )  # fmt: skip
    try:
        ray_serve.run(deployment.bind(), name=name)
    except RayServeException as error:
        raise RequestError(
            f"this cluster's Ray Serve has an application already: {str(error).strip().splitlines()[-1]}"
        ) from error
    except RuntimeError as error:  # which says no more than that it failed
        told = ray_serve.status().applications[name].deployments[DEPLOYMENT].message
        raise ModelError(f"no replica starts: {told.strip().splitlines()[-1]}") from error


class Replica:
    """One server; Ray Serve adds the application, as `app`."""

    app: FastAPI

    def check_health(self) -> None:
        """BaseRequest by Ray Serve, which starts a replica anew where this raises."""
        if not self.app.state.worker.thread.alive:
            raise RuntimeError("the engine has stopped")


def run(
    recipe: ServeConfig, host: str, port: int, replicas: Replicas, share: Share, ready: Callable[[int], None]
) -> None:  # fmt: skip
    """Serves until SIGTERM or Ctrl-C; then open requests have the drain to finish.

    Args:
        port: 0 = any that is free, or that of a Ray Serve that runs already.
        ready: called with the port once requests are answered.

    Raises:
        RequestError: the port is taken, or the cluster's Ray Serve listens elsewhere, or another application answers there.
        KeyboardInterrupt: at the end, if it was Ctrl-C.
    """
    name = f"shoal-{secrets.token_hex(4)}"
    with connected(), _until_told() as told:
        look_for_room(share)
        port, ours = _listen(host, port)
        try:
            deploy(recipe, replicas, share, name)
            ready(port)
            told.wait()
        finally:
            _withdraw(name, replicas.drain, ours)


def _listen(host: str, port: int) -> tuple[int, bool]:
    """Sees to it that Ray Serve listens there. Returns the port, and whether Ray Serve was started for it."""
    running = _get_global_client(raise_if_no_controller_running=False)
    if running is None:
        with bind(host, port) as free:
            port = free.getsockname()[1]
        ray_serve.start(http_options={"host": host, "port": port})
        return port, True
    has = running.http_config
    if (host, port or has.port) != (has.host, has.port):
        raise RequestError(
            f"this cluster's Ray Serve listens at {has.host}:{has.port} already and cannot at {host}:{port} too: "
            f"give --host {has.host} --port {has.port}"
        )
    return has.port, False


def _withdraw(name: str, drain: float, ours: bool) -> None:
    """Ends the application, and Ray Serve if it was started for it and nobody else has come to use it."""
    for _ in range(1 + math.ceil(drain / 60)):
        with suppress(TimeoutError):  # Ray waits for a minute
            ray_serve.delete(name)
            break
    if ours and not ray_serve.status().applications:
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
