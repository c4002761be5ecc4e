"""The sandbox of tests that are not about its strength."""

from __future__ import annotations

from functools import cache

from shoal.errors import RequestError
from shoal.evaluation import isolation
from shoal.evaluation.sandbox import Sandbox


@cache
def strongest() -> str:
    """The strongest backend that works here; the weak ones count too, as they only do when they are named."""
    for backend in isolation.BACKENDS:
        try:
            with Sandbox(backend):
                return backend
        except RequestError:
            continue
    raise RequestError("no sandbox works here")
