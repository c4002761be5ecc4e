"""The server in several processes on Ray, each with a pair of its own. Needs the extra `ray`.

Ray Serve puts replicas behind one address, adds and removes them, and restarts replicas whose
engine has stopped. `shoal.serve.pool` does the same for batches.
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
from logging.config import dictConfig
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve as ray_serve
from ray._private import ray_constants
from ray.exceptions import RayError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.errors import ModelError, RequestError
from shoal.serve import logs
from shoal.serve.app import ServeConfig
from shoal.serve.logs import HEADER
from shoal.serve.prometheus_metrics import REPORT_SECONDS, Reporter
from shoal.serve.relay import flush_logs, printed_logs, send_logs
from shoal.serve.run import bind

LOG = logging.getLogger(__name__)
DEPLOYMENT = "shoal"
OPTIONS: dict[str, Any] = {
    "logging_level": logging.WARNING,
    "log_to_driver": False,
    "include_dashboard": False,
}
DRAIN_POLL_SECONDS = 0.1
"""The time between two counts of a replica's open requests while it is drained; Ray's default of
2 s is longer than a short drain, at whose end a replica is killed."""


@dataclass(frozen=True)
class Share:
    """The resources of each process.

    Attributes:
        cpus: the number of CPUs, which is also the number of its threads.
        gpus: the number of GPUs, which may be a fraction of one.
    """

    cpus: float = 1
    gpus: float = 0

    @property
    def options(self) -> dict[str, Any]:
        """The options of a Ray actor."""
        return {"num_cpus": self.cpus, "num_gpus": self.gpus}


@contextmanager
def connected() -> Iterator[None]:
    """Connects to the cluster of RAY_ADDRESS or of this machine, or starts one for the context.

    A cluster started here listens on the loopback address only, and needs a token (Ray makes one;
    from Ray 2.60 on by default).
    """
    if ray.is_initialized():
        yield
        return
    for name in ("ray.data", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)  # the commands print their own messages
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
    # With True, Ray replaces a loopback address by one that others see, and listens on all.
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        ray.init(address="local", _node_ip_address="127.0.0.1", **OPTIONS)
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def warn_if_too_small(share: Share) -> None:
    """Warns if no machine of the cluster has a process's resources: Ray waits in silence."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(
        has.get("CPU", 0) >= share.cpus and has.get("GPU", 0) >= share.gpus for has in machines
    ):
        LOG.warning(
            "no machine of this cluster has %g CPUs and %g GPUs: waiting for one",
            share.cpus,
            share.gpus,
        )


# ── a server ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Replicas:
    """The autoscaling and the limits of the replicas.

    Attributes:
        least: the smallest number of replicas.
        most: the largest number of replicas.
        wanted: requests per replica, running and waiting, above which another one is started.
        open: the most requests of a replica; as many wait in front of it, and more are answered
            with 503.
        drain: seconds that open requests have when a replica is removed.
        up_after: seconds for which the demand must ask for more replicas before they are added.
        down_after: seconds for which the demand must ask for fewer before replicas are removed.
    """

    least: int = 1
    most: int = 1
    wanted: float = 4
    open: int = 256
    drain: float = 20
    up_after: float = 30
    down_after: float = 600

    @property
    def autoscaling(self) -> dict[str, Any]:
        """The autoscaling_config of Ray Serve.

        Demand is averaged over the shorter delay, half a minute at most as by default.
        """
        period = min(30.0, max(1.0, min(self.up_after, self.down_after)))
        return {
            "min_replicas": self.least,
            "max_replicas": self.most,
            "target_ongoing_requests": self.wanted,
            "upscale_delay_s": self.up_after,
            "downscale_delay_s": self.down_after,
            "look_back_period_s": period,
            "metrics_interval_s": period / 3,
        }


@dataclass(frozen=True)
class LogConfig:
    """The level and the form of the logs, see `shoal.serve.logs`."""

    level: str = "info"
    form: logs.LogFormat = "text"


def deploy(
    config: ServeConfig, replicas: Replicas, share: Share, name: str, log: LogConfig
) -> None:
    """Deploys the server's application, and returns when it answers.

    `ray.serve.start` must have been called.

    Args:
        config: the configuration of each replica.
        replicas: autoscaling and limits.
        share: the resources of each replica.
        name: the name of the application, and of the actor that takes its logs and counts; unique
            in the cluster.
        log: the level and the form of the logs.

    Raises:
        RequestError: another application has the route already.
        ModelError: the replicas do not start, with the reason.
    """

    def app() -> FastAPI:
        replica = ray_serve.get_replica_context().replica_id.unique_id
        send_logs(name, replica, log.level, log.form)
        made = config.app()
        made.add_middleware(WithoutRequestId)
        made.state.reporter = Reporter(name, replica, made.state.metrics)
        made.state.metrics_text = made.state.reporter.text
        return made

    deployment: Any = ray_serve.deployment(
        ray_serve.ingress(app)(Replica),
        name=DEPLOYMENT,
        ray_actor_options=share.options,
        max_ongoing_requests=replicas.open,
        max_queued_requests=replicas.open,
        graceful_shutdown_timeout_s=replicas.drain,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_SECONDS,
        autoscaling_config=replicas.autoscaling,
        health_check_period_s=REPORT_SECONDS,
    )
    try:
        ray_serve.run(deployment.bind(), name=name)
    except RayServeException as error:
        raise RequestError(
            f"this cluster's Ray Serve has an application already: "
            f"{str(error).strip().splitlines()[-1]}"
        ) from error
    except RuntimeError as error:  # the message has no reason
        message = ray_serve.status().applications[name].deployments[DEPLOYMENT].message
        raise ModelError(f"no replica starts: {message.strip().splitlines()[-1]}") from error


class Replica:
    """One server; Ray Serve adds the application, as `app`."""

    app: FastAPI

    def check_health(self) -> None:
        """Reports the metrics; raises an error if the engine has stopped.

        Ray Serve calls this method and starts a replica anew if it raises.
        """
        if not self.app.state.worker.thread.alive:
            raise RuntimeError("the engine has stopped")
        with suppress(RayError, ValueError):  # the process that serves is about to end
            self.app.state.reporter.report()

    def __del__(self) -> None:
        """Sends the last lines; Ray Serve calls this method before it kills the replica."""
        flush_logs()


class WithoutRequestId:
    """A middleware (ASGI) that removes the request's id, which Ray's proxy sends already."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forwards everything but the header to the application."""

        async def without(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)[HEADER]
            await send(message)

        await self.app(scope, receive, without)


def run(
    config: ServeConfig,
    host: str,
    port: int,
    replicas: Replicas,
    share: Share,
    ready: Callable[[int], None],
    log: LogConfig = LogConfig(),
) -> None:
    """Serves until SIGTERM or Ctrl-C; open requests then have `replicas.drain` seconds to finish.

    Args:
        config: the configuration of each replica.
        host: the address to listen at.
        port: 0 = any free one, or that of a running Ray Serve.
        replicas: autoscaling and limits.
        share: the resources of each replica.
        ready: called with the port as soon as requests are answered.
        log: the level and the form of the logs.

    Raises:
        RequestError: the port is taken, or the cluster's Ray Serve has another address, or another
            application has the route.
        KeyboardInterrupt: at the end, if it was Ctrl-C.
    """
    name = f"shoal-{secrets.token_hex(4)}"
    with _logged(log), connected(), printed_logs(name), _termination() as terminated:
        warn_if_too_small(share)
        port, ours = _listen(host, port)
        try:
            deploy(config, replicas, share, name, log)
            ready(port)
            terminated.wait()
        finally:
            _withdraw(name, replicas.drain, ours)


@contextmanager
def _logged(log: LogConfig) -> Iterator[None]:
    """Logs the messages of this process on stderr."""
    dictConfig(logs.config(log.level, log.form))
    try:
        yield
    finally:
        logs.restore()


def _listen(host: str, port: int) -> tuple[int, bool]:
    """Starts Ray Serve unless it runs; returns its port, and True if it was started here."""
    running = _get_global_client(raise_if_no_controller_running=False)
    if running is None:
        with bind(host, port) as free:
            port = free.getsockname()[1]
        ray_serve.start(http_options={"host": host, "port": port})
        return port, True
    has = running.http_config
    if (host, port or has.port) != (has.host, has.port):
        raise RequestError(
            f"this cluster's Ray Serve listens at {has.host}:{has.port} already and cannot at "
            f"{host}:{port} too: give --host {has.host} --port {has.port}"
        )
    return has.port, False


def _withdraw(name: str, drain: float, ours: bool) -> None:
    """Deletes the application; shuts down Ray Serve if started here and used by no other."""
    for _ in range(1 + math.ceil(drain / 60)):
        with suppress(TimeoutError):  # Ray's own timeout is a minute
            ray_serve.delete(name)
            break
    if ours and not ray_serve.status().applications:
        ray_serve.shutdown()


@contextmanager
def _termination() -> Iterator[threading.Event]:
    """Yields an event that SIGTERM sets."""
    terminated = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    try:
        yield terminated
    finally:
        signal.signal(signal.SIGTERM, before)
