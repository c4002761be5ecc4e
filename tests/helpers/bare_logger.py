"""The logger of shoal as tests must leave it."""

from __future__ import annotations

import logging


def require_bare_logger() -> None:
    """Raises AssertionError if the logger "shoal" is configured, and configures it no more."""
    logger = logging.getLogger("shoal")
    found = logger.handlers[:], logger.level, logger.propagate
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
    assert found == ([], logging.NOTSET, True), "the logger stays configured"
