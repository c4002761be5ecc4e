"""Sandboxes of tests: one of each backend, and the strongest for tests that are not about its strength."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from shoal.errors import RequestError
from shoal.evaluation import isolation
from shoal.evaluation.sandbox import Sandbox


def sandbox_of(backend: str) -> Sandbox:
    """A sandbox of this backend; the test is skipped, with the reason, where the backend does not work."""
    try:
        return Sandbox(backend)
    except RequestError as error:
        pytest.skip(str(error))


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


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    """The best sandbox of this machine."""
    with Sandbox(strongest()) as made:
        yield made
