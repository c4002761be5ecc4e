"""The engines of two runners, for tests."""

from __future__ import annotations

from typing import Any

from shoal.drafting.model import ModelDrafter
from shoal.engine.engine import Engine
from shoal.engine.prefix_cache import PrefixMemory
from shoal.lookahead.controller import Controller, Lookahead
from shoal.models.runner import Runner


def engine_of(
    target: Runner, draft: Runner | None, lookahead: Lookahead | Controller, **options: Any
) -> Engine:
    """Makes an engine whose drafter is a model of its own, or that decodes plainly.

    Options are those of `Engine`, and `prefix_bytes`.
    """
    prefix_bytes = options.pop("prefix_bytes", 0)
    if prefix_bytes:
        options["prefixes"] = PrefixMemory(target, draft, prefix_bytes)
    drafter = None if draft is None else ModelDrafter(draft.fork(), target.vocab_size)
    return Engine(target, drafter, lookahead, **options)


def drafted_by(engine: Engine) -> Runner:
    """Returns the draft model of such an engine."""
    assert isinstance(engine.drafter, ModelDrafter)
    return engine.drafter.runner


def runners_of(engine: Engine) -> list[Runner]:
    """Returns the models of such an engine, target first."""
    return [engine.target] if engine.drafter is None else [engine.target, drafted_by(engine)]
