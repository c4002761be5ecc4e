"""The first layers of a model as a model of their own: early exit.

After Elhoushi et al., LayerSkip, ACL 2024, arXiv 2404.16710. No weights are copied. The modules
that lead to the layers are copied as shells; their contents are the model's. The runner of such a
model feeds the cache that it was made from: it writes the keys and values of the model's first
layers, at the places where the model itself would write them.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import RequestError, UnsupportedModel
from shoal.models.cache import SlotCache
from shoal.models.lean.forward import LeanPass
from shoal.models.runner import Runner
from shoal.models.structure import Belongings

NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm")
"""The names that Transformers gives to the norm between the last layer and the head."""

_models: Belongings[Any] = Belongings("first layers")
"""The models of the first layers of a model, by the number of layers."""
_places: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
"""The name of the list of layers of each model."""


def require_exit(runner: Runner, layers: int) -> None:
    """Checks that a model can exit after a number of layers.

    Raises:
        RequestError: the model does not have more layers than that.
        UnsupportedModel: see `first_layers`.
    """
    every = layer_count(runner)
    if not 1 <= layers < every:
        raise RequestError(
            f"{runner.name} has {every} layers: exit must be in 1..{every - 1}, got {layers}"
        )
    _model_of(runner, layers)


def layer_count(runner: Runner) -> int:
    """Returns the number of layers of the model. Raises UnsupportedModel: see `first_layers`."""
    return len(runner.hf.get_submodule(_place_of(runner)))


def first_layers(runner: Runner, layers: int) -> Runner:
    """Makes a runner of the model's first layers, its last norm and its head, over the same cache.

    Its passes are lean if the model's passes are, and never captured.

    Raises:
        UnsupportedModel: the model's layers are not one list that its passes go through, or other
            processes have parts of it.
    """
    lean = None if runner.lean is None else _lean(runner.lean, layers)
    return runner.over_same_cache(_model_of(runner, layers), lean)


def head_of(runner: Runner) -> Callable[[Tensor], Tensor]:
    """Returns the function that computes logits [..., vocab] of a layer's states [..., width].

    The function applies the last norm and the head. It leaves out the operations that a few models
    apply to their logits afterwards.

    Raises:
        UnsupportedModel: the model's last norm has none of the names in `NORMS`.
    """
    owner = runner.hf.get_submodule(_place_of(runner).rpartition(".")[0])
    head = runner.hf.get_output_embeddings()
    norm = next(
        (
            getattr(owner, name)
            for name in NORMS
            if isinstance(getattr(owner, name, None), nn.Module)
        ),
        None,
    )
    if norm is None:
        raise UnsupportedModel(
            f"the exits of {runner.name} cannot be compared: name one, as in self:exit=2"
        )
    return lambda states: head(norm(states))  # type: ignore[no-any-return]


def _model_of(runner: Runner, layers: int) -> Any:
    """Returns the Transformers model of the first layers, which is made and tried once.

    Its config is the model's own, which tells layers how to attend.
    """
    known = _models.of(runner.hf)
    if layers not in known:
        _place_of(runner)
        known[layers] = shallow(runner.hf, layers)
        made = _layers_passed(runner, known[layers])
        if made != layers:
            del known[layers]
            raise UnsupportedModel(
                f"{runner.name} ({_kind(runner)}) cannot leave after {layers} layers: its pass "
                f"made {made}"
            )
    return known[layers]


def shallow(hf: Any, layers: int) -> Any:
    """Makes a Transformers model of a model's first layers, its last norm and its head.

    The modules are the model's own.

    Raises:
        UnsupportedModel: the model's layers are not one list.
    """
    place = _place_in(hf)
    if not place:
        raise UnsupportedModel(
            f"{type(hf).__name__} cannot leave after {layers} layers: its layers are no list of "
            f"modules"
        )
    *path, last = place.split(".")
    top = module = _shell(hf)
    for name in path:
        module._modules[name] = module = _shell(module._modules[name])
    module._modules[last] = nn.ModuleList(list(module._modules[last])[:layers])
    return top


def _shell(module: Any) -> Any:
    """Makes another module of the same class with the same contents."""
    other = copy.copy(module)
    other._modules = dict(module._modules)
    return other


def _place_of(runner: Runner) -> str:
    """Returns the name of the list of layers of a runner's model.

    Raises:
        UnsupportedModel: the model has no such list, or its layers cannot be cut.
    """
    place = _place_in(runner.hf)
    if not place or runner.cut_obstacle:
        why = runner.cut_obstacle or "its layers are no list of modules"
        raise UnsupportedModel(f"{runner.name} ({_kind(runner)}) cannot draft for itself: {why}")
    return place


def _place_in(hf: Any) -> str:
    """Returns the name of the list of layers of a model; "" if there is no such list."""
    if hf not in _places:
        config = hf.config
        count = getattr(
            config.get_text_config() if hasattr(config, "get_text_config") else config,
            "num_hidden_layers",
            None,
        )
        lists = {
            name: len(module)
            for name, module in hf.named_modules()
            if isinstance(module, nn.ModuleList)
        }
        outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
        found = [name for name in outer if lists[name] == count]
        _places[hf] = found[0] if len(found) == 1 else ""
    return _places[hf]


def _kind(runner: Runner) -> str:
    return str(getattr(runner.hf.config, "model_type", type(runner.hf).__name__))


@torch.inference_mode()
def _layers_passed(runner: Runner, hf: Any) -> int:
    """Returns the number of layers whose keys a pass of the model writes; 0 if the pass fails."""
    tried = runner.over_same_cache(hf, None)
    tried.cache = SlotCache()
    tried.memory.reserve(1, 1)
    try:
        tried.feed([0], torch.zeros(1, 1, dtype=torch.long, device=tried.device), [1])
    except (LookupError, TypeError, AttributeError, RuntimeError, ValueError):
        return 0
    return len(tried.cache)


def _lean(lean: LeanPass, layers: int) -> LeanPass:
    return lean.of(replace(lean.decoder, layers=lean.decoder.layers[:layers]))
