"""The search for the modules of a model that keep a recurrent state.

A pass shows which modules they are: they ask the cache for a state. If no module does, they are the
modules with new tensors among their attributes after the pass (RecurrentGemma). So no family is
named here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.errors import UnsupportedModel
from shoal.models.cache import Plan
from shoal.models.cache.mixing import EqualRows, Mixers, OwnState
from shoal.models.cache.states import KNOWN, StateCache, call_of
from shoal.models.pretrained import PROBLEMS
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

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        given = (*self.args, *self.options.values())
        return [value for value in given if isinstance(value, Tensor)]

    def takes_tokens(self) -> bool:
        """Returns True if the inputs are features of the pass's tokens and their positions only."""
        block, *others = self.tensors
        positions = torch.arange(TOKENS, device=block.device)[None]
        return block.shape[:-1] == (1, TOKENS) and all(
            torch.equal(each, positions) for each in others
        )


class _Watch(StateCache):
    """The cache of a pass of one row that notes who asks it for a state.

    Attributes:
        found: the mixers by name.
        calls: the last call of each module by name.
        attending: the names of the modules that store keys.
    """

    def __init__(self) -> None:
        super().__init__(Mixers({}))
        self.found: dict[str, _Found] = {}
        self.calls: dict[str, _Found] = {}
        self.attending: set[str] = set()
        self._running: list[tuple[str, _Found]] = []

    @contextmanager
    def watching(self, hf: nn.Module) -> Iterator[None]:
        """Notes which modules run within the context."""

        def enters(name: str, module: nn.Module, args: Any, options: Any) -> None:
            self.calls[name] = _Found(module, args, options)
            self._running.append((name, self.calls[name]))

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
    before = _attributes(runner.hf)
    try:
        reason, made = _searched(runner, watch, before)
    except PROBLEMS as error:
        first = str(error).partition("\n")[0]
        reason = f"it keeps states in a cache of its own kind ({type(error).__name__}: {first})"
    finally:
        for (module, attribute), value in before.items():
            setattr(module, attribute, value)
    if reason:
        kind = runner.hf.config.get_text_config().model_type
        raise UnsupportedModel(f"{runner.name} ({kind}) is not supported: {reason}")
    runner.mixers = made
    runner.takes_trees = runner.shares = False
    runner.packs |= not watch.attending  # without attention nothing asks for positions
    runner.cache = runner.new_cache()


def _searched(runner: Runner, watch: _Watch, before: _Attributes) -> tuple[str | None, Mixers]:
    """Passes a row through a model; returns the reason to refuse it, or None, and its mixers."""
    ids = torch.arange(TOKENS, device=runner.device)[None] % runner.vocab_size
    with watch.watching(runner.hf):
        runner.ordinary(Plan([0], [0], [TOKENS], runner.device), ids, want_logits=False)
    own = {} if watch.found else _own_states(runner.hf, before)
    watch.found |= {name: watch.calls[name] for name in own}
    reason = _obstacle(watch)
    modules = {name: call.module for name, call in watch.found.items()}
    placed = any(len(call.tensors) > 1 for call in watch.found.values())
    made = Mixers(modules, placed=placed, own=own)
    if reason is None and not all(_continues(name, watch.found[name], made) for name in modules):
        made = replace(made, stepwise=True)
    return reason, made


_Attributes = Mapping[tuple[nn.Module, str], Tensor | None]


def _attributes(hf: nn.Module) -> _Attributes:
    """Returns the attributes of modules that are tensors or None, parameters and buffers aside."""
    return {
        (module, name): value
        for module in hf.modules()
        for name, value in vars(module).items()
        if value is None or isinstance(value, Tensor)
    }


def _own_states(hf: nn.Module, before: _Attributes) -> dict[str, list[OwnState]]:
    """Returns the tensors that modules got in a pass, by the outermost of these modules."""
    names = {module: name for name, module in hf.named_modules()}
    changed = [
        place
        for place, value in _attributes(hf).items()
        if value is not None and value is not before.get(place)
    ]
    own: dict[str, list[OwnState]] = {}
    for module, attribute in sorted(changed, key=lambda place: names[place[0]]):
        name = next((each for each in own if names[module].startswith(f"{each}.")), names[module])
        states = own.setdefault(name, [])
        key = "own", list(own).index(name), len(states)
        states.append(OwnState(module, attribute, key))
    return own


def _obstacle(watch: _Watch) -> str | None:
    """Returns the reason why the states of a model cannot be kept row by row, or None."""
    if not watch.found:
        return "its recurrent layers keep their states neither in the cache nor in themselves"
    for name, call in watch.found.items():
        if name in watch.attending:
            return f"its module {name} keeps keys and a recurrent state at once"
        if not call.takes_tokens():
            return f"its recurrent module {name} takes more than the states of its tokens"
    return None


def _continues(name: str, call: _Found, made: Mixers) -> bool:
    """Returns True if a mixer has the same state after one call with several tokens as after single
    steps.
    """
    stores = [_stores_after(name, call, replace(made, stepwise=each)) for each in (False, True)]
    return all(
        float((whole - steps).norm())
        <= ERRORS.get(call.tensors[0].dtype, ERROR) * float(steps.norm())
        for whole, steps in zip(*stores, strict=True)
    )


def _stores_after(name: str, call: _Found, made: Mixers) -> list[Tensor]:
    """Returns a mixer's states after a block that is fed in two parts."""
    cache = StateCache(made)
    cache.reserve(1, 1)

    def new(value: Any) -> Any:
        return cache if isinstance(value, StateCache) else value

    options = {key: new(value) for key, value in call.options.items()}
    block, mixed = call_of(cache, name, call.module, [*map(new, call.args)], options)
    place = torch.zeros(1, dtype=torch.long, device=block.device)
    for part, read in ((slice(0, BEFORE), None), (slice(BEFORE, None), place)):
        tokens = block[:, part]
        count = tokens.shape[1]
        write, starts = place[None], [part.start]
        rows = EqualRows([0], count, read, [count - 1], write, columns=None, starts=starts)
        cache.through(rows, tokens, mixed)
    return cache.states_of(0)
