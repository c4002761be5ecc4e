"""What a pair is served by: sent to whatever process is to load it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fastapi import FastAPI

from shoal.accept import RULES
from shoal.api import Shoal
from shoal.engine import Engine
from shoal.serve.app import make_app
from shoal.serve.offline import Offline
from shoal.serve.settings import Settings


@dataclass(frozen=True)
class Recipe:
    """How to load a pair, run its engine and answer; it can be pickled if `load` can.

    Attributes:
        lookahead, kv_bytes: see `Shoal.engine`. rule: a name of `shoal.accept.RULES`.
    """

    load: Callable[[], Shoal]
    settings: Settings
    lookahead: str | int = "auto"
    rule: str = "coupled"
    kv_bytes: int | None = None

    def app(self) -> FastAPI:
        """The server's application, around a pair loaded now."""
        shoal = self.load()
        return make_app(shoal, self._engines(shoal), self.settings)

    def offline(self) -> Offline:
        """The same without HTTP."""
        shoal = self.load()
        return Offline(shoal, self._engines(shoal), self.settings)

    def _engines(self, shoal: Shoal) -> Callable[[], Engine]:
        return lambda: shoal.engine(self.lookahead, RULES[self.rule](), kv_bytes=self.kv_bytes)
