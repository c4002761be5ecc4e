"""The metrics of all replicas on Ray, from any of them.

The actor of `shoal.serve.relay` keeps the report of each replica.
"""

from __future__ import annotations

import logging
import pickle
from typing import Any

import ray
from ray.exceptions import RayError

from shoal.serve.prometheus_metrics import Metrics, text_of
from shoal.serve.relay import NAMESPACE

LOG = logging.getLogger(__name__)
REPORT_SECONDS = 5.0
"""The time between two reports of a replica."""


class Reporter:
    """A reporter of the metrics of one replica.

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
        actor: Any = ray.get_actor(self._actor, namespace=NAMESPACE)
        return actor.report.remote(self._replica, pickle.dumps(self._metrics.families()))

    async def text(self) -> bytes:
        """Returns the metrics of all replicas in Prometheus' text format.

        Each sample has the label `replica`. If the actor is gone, only this replica's metrics are
        returned.
        """
        try:
            found = {
                name: pickle.loads(families) for name, families in (await self.report()).items()
            }
        except (RayError, ValueError) as error:
            LOG.warning("these are the metrics of one replica alone: %s", error)
            found = {self._replica: self._metrics.families()}
        return text_of(found)
