"""The metrics of all replicas on Ray, whichever of them is asked: the actor of `shoal.serve.relay`
keeps what each has reported."""

from __future__ import annotations

import logging
import pickle
from typing import Any

import ray
from ray.exceptions import RayError

from shoal.serve.metrics import Metrics, text_of
from shoal.serve.relay import NAMESPACE

LOG = logging.getLogger(__name__)
REPORT_SECONDS = 5.0
"""Time between two reports of a replica."""


class Reporter:
    """Reports the metrics of one replica.

    Args:
        actor: its name.
        replica: the replica's, unique in the cluster.
    """

    def __init__(self, actor: str, replica: str, metrics: Metrics) -> None:
        self._actor, self._replica, self._metrics = actor, replica, metrics

    def report(self) -> Any:
        """Sends what there is. Returns what will be what all replicas have reported, each pickled,
        by their names.

        Raises:
            RayError, ValueError: there is no actor.
        """
        actor: Any = ray.get_actor(self._actor, namespace=NAMESPACE)
        return actor.report.remote(self._replica, pickle.dumps(self._metrics.families()))

    async def text(self) -> bytes:
        """The metrics of all replicas in Prometheus' text format, each sample with the label
        `replica`; of this one alone if the actor is gone."""
        try:
            found = {
                name: pickle.loads(families) for name, families in (await self.report()).items()
            }
        except (RayError, ValueError) as error:
            LOG.warning("these are the metrics of one replica alone: %s", error)
            found = {self._replica: self._metrics.families()}
        return text_of(found)
