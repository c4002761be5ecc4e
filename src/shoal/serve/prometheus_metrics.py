"""Metrics for Prometheus: the engine's figures, and counters and histograms of rows and requests.

The engine's figures are read on request. A timeline keeps the times at which the rows of a request
got slots and tokens.

On Ray the actor of `shoal.serve.relay` keeps the report of each replica, and any of them tells the
metrics of all.
"""

from __future__ import annotations

import importlib.metadata
import logging
import pickle
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    Info,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal import __version__
from shoal.drafting.protocol import name_of
from shoal.serve.api_errors import ApiError
from shoal.serve.logs import Exchange
from shoal.types.rounds import Commit
from shoal.types.samples import Sample
from shoal.types.stats import DraftCounts

if TYPE_CHECKING:
    from shoal.serve.worker import Worker


# Buckets of the histograms.
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
LENGTHS = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 13, 17)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
PACES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

COUNTED = {
    "rounds": "Draft, verify, accept, commit cycles of the batch",
    "target_passes": "Passes of the target, prompts not counted",
    "draft_passes": "Passes of the drafter, prompts not counted",
    "guide_passes": "Passes of the guide, prompts not counted",
    "prefill_tokens": "Prompt tokens computed",
    "restored_tokens": "Prompt tokens copied from earlier requests",
    "prefill_chunks": "Pieces in which they were",
    "fused_chunks": "Pieces among them that were computed in passes of rounds",
    "row_rounds": "Rounds times their rows",
    "drafted": "Tokens drafted",
    "accepted": "Drafted tokens accepted",
    "committed": "Tokens committed, replacement and bonus included",
    "pauses": "Times that a row gave its slot to one of another request",
}
"""The counters of `shoal.Stats`."""
STAGES = ("prefill", "propose", "verify", "accept", "commit")


class Metrics:
    """A server's metrics; rows are counted on the engine's thread."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self._registry, "namespace": "shoal"}
        ProcessCollector(registry=self._registry)
        versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
        Info("build", "Versions that run", **own).info(
            {"version": __version__, "python": platform.python_version(), **versions}
        )
        self._model = Info("model", "What is served", **own)
        self._queue = Histogram(
            "request_queue_seconds",
            "From a request to the first slot of one of its rows",
            buckets=SECONDS,
            **own,
        )
        self._first = Histogram(
            "time_to_first_token_seconds",
            "From a request to a row's first tokens",
            buckets=SECONDS,
            **own,
        )
        self._gap = Histogram(
            "inter_token_seconds",
            "Of a row, from the tokens of a round to those of its next",
            buckets=PACES,
            **own,
        )
        self._pace = Histogram(
            "time_per_output_token_seconds",
            "Of a row, the mean time of a token after its first round",
            buckets=PACES,
            **own,
        )
        self._seconds = Histogram(
            "row_seconds", "From a request to a row's end", buckets=SECONDS, **own
        )
        self._tokens = Histogram("row_tokens", "Tokens of a row", buckets=TOKENS, **own)
        self._length = Histogram(
            "row_acceptance_length", "Tokens of a row per target pass", buckets=LENGTHS, **own
        )
        self._rows = Counter("rows", "Rows ended", ["reason"], **own)
        self._answers = Counter("requests", "Requests answered", ["path", "status"], **own)
        self._duration = Histogram(
            "request_seconds",
            "From a request to the end of its answer",
            ["path", "status"],
            buckets=SECONDS,
            **own,
        )

    def collect_from(self, worker: Worker, model: str) -> None:
        """Adds the figures of the worker's engine under the served name `model`."""
        engine = worker.thread.engine
        drafter = "" if engine.drafter is None else name_of(engine.drafter)
        about = {
            "model": model,
            "drafter": drafter,
            "device": str(engine.target.device),
            "dtype": str(engine.target.dtype),
        }
        self._model.info({name: value.removeprefix("torch.") for name, value in about.items()})
        self._registry.register(_Engine(worker))

    def request_started(self, seconds: float) -> None:
        """Counts the first slot of a request's rows, `seconds` after the request arrived."""
        self._queue.observe(seconds)

    def first_tokens(self, seconds: float) -> None:
        """Counts the first tokens of a row, `seconds` after its request arrived."""
        self._first.observe(seconds)

    def next_tokens(self, seconds: float) -> None:
        """Counts the next tokens of a row, `seconds` after its previous ones."""
        self._gap.observe(seconds)

    def row_ended(self, sample: Sample, pace: float | None) -> None:
        """Counts the end of a row.

        Args:
            sample: the row's sample.
            pace: seconds per token after its first round; None if there was none.
        """
        if pace is not None:
            self._pace.observe(pace)
        self._rows.labels(sample.finish_reason).inc()
        self._seconds.observe(sample.finished_at)
        self._tokens.observe(len(sample.token_ids))
        if sample.target_passes:
            self._length.observe(len(sample.token_ids) / sample.target_passes)

    def request_ended(self, exchange: Exchange) -> None:
        """Counts an answer whose last byte was sent, or whose client has gone."""
        labels = exchange.route, str(exchange.status)
        self._answers.labels(*labels).inc()
        self._duration.labels(*labels).observe(exchange.seconds)

    def families(self) -> list[Metric]:
        """Returns the current values of all metrics; they can be pickled."""
        return list(self._registry.collect())

    async def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


def text_of(replicas: Mapping[str, Sequence[Metric]]) -> bytes:
    """Returns several processes' metrics in Prometheus' format, labelled by `replica`."""
    together: dict[str, Metric] = {}
    for replica, families in replicas.items():
        for family in families:
            content = together.setdefault(
                family.name, Metric(family.name, family.documentation, family.type, family.unit)
            )
            content.samples += [
                sample._replace(labels={**sample.labels, "replica": replica})
                for sample in family.samples
            ]
    registry = CollectorRegistry()
    registry.register(_Families(list(together.values())))
    return generate_latest(registry)


class _Families(Collector):
    """A collector of metrics that were read before."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._known = families

    def collect(self) -> Sequence[Metric]:
        """Returns the metrics."""
        return self._known


class _Engine(Collector):
    """A collector of the engine's figures, read when the metrics are requested."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        """Yields one family per figure."""
        stats = self._worker.thread.stats
        for name, about in COUNTED.items():
            yield CounterMetricFamily(f"shoal_{name}", about, getattr(stats, name))
        yield from _by_drafter(list(stats.by_drafter.items()))
        yield _by_executor({role: dict(counts) for role, counts in stats.executors.copy().items()})
        seconds = CounterMetricFamily(
            "shoal_stage_seconds", "Time by stage, the models' passes included", labels=["stage"]
        )
        for stage in STAGES:
            seconds.add_metric([stage], getattr(stats, f"seconds_{stage}"))
        yield seconds
        yield GaugeMetricFamily(
            "shoal_acceptance_length",
            "Tokens per row and target pass so far",
            stats.acceptance_length,
        )
        yield GaugeMetricFamily(
            "shoal_rows_capacity", "Most rows running and waiting", self._worker.capacity
        )
        with suppress(ApiError):  # there is no engine while a failed one is replaced
            engine = self._worker.thread.engine
            yield GaugeMetricFamily(
                "shoal_rows_running", "Rows being decoded", len(engine.scheduler.running)
            )
            yield GaugeMetricFamily(
                "shoal_rows_waiting", "Rows waiting", len(engine.scheduler.waiting)
            )
            yield GaugeMetricFamily(
                "shoal_kv_bytes", "Bytes of keys and values allocated", engine.memory.used
            )
            kept = 0 if engine.kept_prefixes is None else engine.kept_prefixes.nbytes
            yield GaugeMetricFamily(
                "shoal_prefix_bytes",
                "Bytes allocated for prompts that are kept for later requests",
                kept,
            )
        yield GaugeMetricFamily(
            "shoal_up", "1 while there is an engine to decode", float(self._worker.thread.alive)
        )


def _by_drafter(counts: Sequence[tuple[str, DraftCounts]]) -> Iterator[Metric]:
    for count in ("drafted", "accepted"):
        family = CounterMetricFamily(
            f"shoal_drafter_{count}", f"{COUNTED[count]}, by drafter", labels=["drafter"]
        )
        for name, one in counts:
            family.add_metric([name], getattr(one, count))
        yield family


def _by_executor(passes: Mapping[str, Mapping[str, int]]) -> Metric:
    family = CounterMetricFamily(
        "shoal_passes",
        "Passes of each model, prompts included, by the code that computed them",
        labels=["role", "executor"],
    )
    for role, counts in passes.items():
        for executor, count in counts.items():
            family.add_metric([role, executor], count)
    return family


class Timeline:
    """The times of a request's rows, for the engine thread alone."""

    def __init__(self, rows: int) -> None:
        self._started = False
        self._first: list[float | None] = [None] * rows  # end of its first round
        self._last = [0.0] * rows  # end of its last round so far
        self._later = [0] * rows  # tokens after the first round

    def record(self, metrics: Metrics, index: int, commit: Commit, now: float) -> None:
        """Reports the slot and the tokens of a row in a round to the metrics.

        Args:
            index: the number of the row.
            commit: the row's commit.
            now: the end of the round, by the clock of `Request.submitted_at`.
        """
        row, request = commit.row, commit.row.request
        if not self._started and row.started_at is not None:
            self._started = True
            metrics.request_started(row.started_at - request.submitted_at)
        if commit.tokens:
            if self._first[index] is None:
                self._first[index] = now
                metrics.first_tokens(now - request.submitted_at)
            else:
                self._later[index] += len(commit.tokens)
                metrics.next_tokens(now - self._last[index])
            self._last[index] = now
        if commit.sample is not None:
            metrics.row_ended(commit.sample, self._pace(index))

    def _pace(self, index: int) -> float | None:
        first, later = self._first[index], self._later[index]
        return (self._last[index] - first) / later if first is not None and later else None


LOG = logging.getLogger(__name__)
REPORT_SECONDS = 5.0
"""The time between two reports of a replica."""


class Reporter:
    """A reporter of the metrics of one replica, which alone needs Ray.

    Args:
        actor: the actor's name.
        replica: the replica's name, unique in the cluster.
        metrics: the replica's metrics.
    """

    def __init__(self, actor: str, replica: str, metrics: Metrics) -> None:
        self._actor, self._replica, self._metrics = actor, replica, metrics

    def report(self) -> Any:
        """Sends the current metrics.

        Returns:
            A Ray reference to the reports of all replicas, each pickled, by their names.

        Raises:
            RayError: there is no actor.
            ValueError: there is no actor.
        """
        import ray

        from shoal.serve.relay import NAMESPACE

        actor: Any = ray.get_actor(self._actor, namespace=NAMESPACE)
        return actor.report.remote(self._replica, pickle.dumps(self._metrics.families()))

    async def text(self) -> bytes:
        """Returns the metrics of all replicas in Prometheus' text format.

        Each sample has the label `replica`. If the actor is gone, only this replica's metrics are
        returned.
        """
        from ray.exceptions import RayError

        try:
            content = {
                name: pickle.loads(families) for name, families in (await self.report()).items()
            }
        except (RayError, ValueError) as error:
            LOG.warning("these are the metrics of one replica alone: %s", error)
            content = {self._replica: self._metrics.families()}
        return text_of(content)
