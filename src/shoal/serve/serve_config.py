"""The configuration of a served pair; Ray sends it to the processes that load the pair."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from fastapi import FastAPI

from shoal.api import Shoal
from shoal.engine.engine import Engine
from shoal.models.available import kv_budget
from shoal.sampling.acceptance import RULES
from shoal.serve.app import make_app
from shoal.serve.offline import Offline
from shoal.serve.settings import Settings

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServeConfig:
    """How to load a pair, run its engine and answer requests; it can be pickled if `load` can.

    Attributes:
        lookahead: see `Shoal.engine`. rule: a name of `shoal.sampling.acceptance.RULES`.
        kv_bytes: memory for keys and values; None = a fraction of the free memory, see `shoal.models.available`.
    """

    load: Callable[[], Shoal]
    settings: Settings
    lookahead: str | int = "auto"
    rule: str = "coupled"
    kv_bytes: int | None = None

    def app(self) -> FastAPI:
        """Loads the pair, and returns the server's application."""
        shoal = self.load()
        return make_app(shoal, self._engines(shoal), self.settings)

    def offline(self) -> Offline:
        """Loads the pair, and returns what answers batch files."""
        shoal = self.load()
        return Offline(shoal, self._engines(shoal), self.settings)

    def _engines(self, shoal: Shoal) -> Callable[[], Engine]:
        def make() -> Engine:
            budget = kv_budget(shoal.target.device) if self.kv_bytes is None else self.kv_bytes
            LOG.info("keys and values may take %s bytes", "any number of" if budget is None else f"{budget:,}")
            engine = shoal.engine(self.lookahead, RULES[self.rule](), kv_bytes=budget)
            engine.prepare()
            return engine

        return make
