"""The search for the modules of a model that keep a recurrent state.

Which modules they are, a pass shows: they ask the cache for a state. So a family that keeps its
states in Transformers' cache needs no word here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.errors import UnsupportedModel
from shoal.models.cache import Plan
from shoal.models.cache.mixing import EqualRows, Mixers
from shoal.models.cache.states import KNOWN, StateCache
from shoal.models.runner import Runner

BEFORE, TOKENS = 2, 6
"""The tokens of the pass that finds mixers, and the first of them that make a state."""
ERRORS = {torch.float64: 1e-8, torch.float32: 1e-4}
"""The largest relative distance of states that rounding explains, by number format."""
ERROR = 0.03
"""The largest one in formats of 16 bits."""


class _Found(NamedTuple):
    """The arguments of a mixer's call."""

    module: nn.Module
    args: tuple[Any, ...]
    options: Mapping[str, Any]


class _Watch(StateCache):
    """The cache of a pass of one row that notes who asks it for a state.

    Attributes:
        found: the mixers by name.
        attending: the names of the modules that store keys.
    """

    def __init__(self) -> None:
        super().__init__(Mixers({}))
        self.found: dict[str, _Found] = {}
        self.attending: set[str] = set()
        self._running: list[tuple[str, _Found]] = []

    @contextmanager
    def watching(self, hf: nn.Module) -> Iterator[None]:
        """Notes which modules run within the context."""

        def enters(name: str, module: nn.Module, args: Any, options: Any) -> None:
            self._running.append((name, _Found(module, args, options)))

        def leaves(*_: Any) -> None:
            self._running.pop()

        hooks = []
        for name, module in hf.named_modules():
            hooks.append(
                module.register_forward_pre_hook(
                    lambda module, args, options, name=name: enters(name, module, args, options),
                    with_kwargs=True,
                )
            )
            hooks.append(module.register_forward_hook(leaves))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _state(self, key: Any) -> Tensor | None:
        name, call = self._running[-1]
        self.found[name] = call
        return super()._state(key)

    def update(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        self.attending.add(self._running[-1][0])
        return super().update(*args, **options)


@torch.inference_mode()
def use_mixers(runner: Runner) -> None:
    """Finds the modules of a runner's model that keep a state, and gives the runner their cache.

    Raises:
        UnsupportedModel: the states of the model are not kept in the cache, or not row by row.
    """
    if not KNOWN:
        raise UnsupportedModel(
            f"{runner.name} is not supported: this version of Transformers has no common cache for "
            f"recurrent states; version 5.24 has one"
        )
    watch = _Watch()
    runner.cache = watch
    watch.reserve(1, TOKENS)
    ids = torch.arange(TOKENS, device=runner.device)[None] % runner.vocab_size
    try:
        with watch.watching(runner.hf):
            runner.ordinary(Plan([0], [0], [TOKENS], runner.device), ids, want_logits=False)
        reason = _obstacle(watch)
        stepwise = reason is None and not all(map(_continues, watch.found.values()))
    except (LookupError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        first = str(error).partition("\n")[0]
        reason = f"it keeps states in a cache of its own kind ({type(error).__name__}: {first})"
    if reason:
        kind = runner.hf.config.get_text_config().model_type
        raise UnsupportedModel(f"{runner.name} ({kind}) is not supported: {reason}")
    runner.mixers = Mixers({name: call.module for name, call in watch.found.items()}, stepwise)
    runner.takes_trees = runner.shares = False
    runner.packs |= not watch.attending  # without attention nothing asks for positions
    runner.cache = runner.new_cache()


def _obstacle(watch: _Watch) -> str | None:
    """Returns the reason why the states of a model cannot be kept row by row, or None."""
    if not watch.found:
        return "its recurrent layers keep their states in themselves, not in the cache"
    for name, call in watch.found.items():
        tensors = [each for each in _values(call) if isinstance(each, Tensor)]
        if name in watch.attending:
            return f"its module {name} keeps keys and a recurrent state at once"
        if len(tensors) != 1 or tensors[0].shape[:2] != (1, TOKENS):
            return f"its recurrent module {name} takes more than the states of its tokens"
    return None


def _values(call: _Found) -> list[Any]:
    return [*call.args, *call.options.values()]


def _continues(call: _Found) -> bool:
    """Returns True if a mixer's state after several tokens in one call is that of single steps."""
    block = next(each for each in _values(call) if isinstance(each, Tensor))
    stores = [_stores_after(call, block, stepwise) for stepwise in (False, True)]
    return all(
        float((whole - steps).norm()) <= ERRORS.get(block.dtype, ERROR) * float(steps.norm())
        for whole, steps in zip(*stores, strict=True)
    )


def _stores_after(call: _Found, block: Tensor, stepwise: bool) -> list[Tensor]:
    """Returns a mixer's states after a block that is fed in two parts."""
    cache = StateCache(Mixers({"": call.module}, stepwise))
    cache.reserve(1, 1)
    place = torch.zeros(1, dtype=torch.long, device=block.device)

    def mixed(part: Tensor) -> Any:
        given = {id(block): part}

        def new(value: Any) -> Any:
            return cache if isinstance(value, StateCache) else given.get(id(value), value)

        options = {key: new(value) for key, value in call.options.items()}
        return call.module(*map(new, call.args), **options)

    for part, read in ((block[:, :BEFORE], None), (block[:, BEFORE:], place)):
        cache.through(EqualRows([0], part.shape[1], read, place, None), part, mixed)
    return cache.states_of(0)
