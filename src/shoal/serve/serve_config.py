"""The configuration of a served pair; Ray sends it to the processes that load the pair."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from fastapi import FastAPI

from shoal.api import Shoal
from shoal.engine.engine import Engine
from shoal.engine.waiting import QUANTUM
from shoal.errors import RequestError
from shoal.models.device import kv_budget
from shoal.models.load_report import LoadStages
from shoal.sampling.acceptance import RULES
from shoal.serve.app import make_app
from shoal.serve.handler import Offline
from shoal.serve.settings import Settings

LOG = logging.getLogger(__name__)


PREFIX_SHARE = 0.125
"""The share of the memory for keys and values that prompts of earlier requests may take."""
MOST_PREFIX_BYTES = 2**30
"""The most bytes that these prompts take by default."""


@dataclass(frozen=True)
class ServeConfig:
    """The configuration of a pair, its engine and its answers; it can be pickled if `load` can.

    Attributes:
        load: loads the pair.
        lookahead: see `Shoal.engine`.
        rule: a name of `shoal.sampling.acceptance.RULES`.
        kv_bytes: memory for keys and values; None = a fraction of the free memory, see
            `shoal.models.device`.
        prefix_bytes: the part of this memory for prompts that are kept for later requests; None =
            `PREFIX_SHARE`.
    """

    load: Callable[[], Shoal]
    settings: Settings
    lookahead: str | int = "auto"
    rule: str = "coupled"
    kv_bytes: int | None = None
    prefix_bytes: int | None = None

    def app(self) -> FastAPI:
        """Loads the pair, and returns the server's application."""
        shoal = self.load()
        return make_app(shoal, self._engines(shoal, QUANTUM), self.settings)

    def offline(self) -> Offline:
        """Loads the pair, and returns it as an `Offline`, which answers batch files."""
        shoal = self.load()
        return Offline(shoal, self._engines(shoal), self.settings)

    def _engines(self, shoal: Shoal, quantum: int | None = None) -> Callable[[], Engine]:
        def make() -> Engine:
            budget = kv_budget(shoal.target.device) if self.kv_bytes is None else self.kv_bytes
            kept, rows = divided(budget, self.prefix_bytes)
            LOG.info(
                "keys and values may take %s bytes",
                "any number of" if rows is None else f"{rows:,}",
            )
            LOG.info("prompts that are kept for later requests may take %s bytes more", f"{kept:,}")
            engine = shoal.engine(
                self.lookahead,
                RULES[self.rule](),
                kv_bytes=rows,
                prefix_bytes=kept,
                quantum=quantum,
            )
            with LoadStages().stage("preparing", "pair"):
                engine.prepare()
            return engine

        return make


def divided(budget: int | None, prefix_bytes: int | None) -> tuple[int, int | None]:
    """Returns the bytes for kept prompts, and the bytes left for rows; None = no limit.

    Raises:
        RequestError: no bytes are left for rows.
    """
    if budget is None:
        return (MOST_PREFIX_BYTES if prefix_bytes is None else prefix_bytes), None
    kept = (
        min(int(PREFIX_SHARE * budget), MOST_PREFIX_BYTES) if prefix_bytes is None else prefix_bytes
    )
    if kept >= budget:
        raise RequestError(
            f"kept prompts may not take all {budget:,} bytes of keys and values: got {kept:,}"
        )
    return kept, budget - kept
