"""The models that draft in their target's own cache: its first layers, and assistants of Gemma 4.

The first layers are a model of their own: early exit, after Elhoushi et al., LayerSkip, ACL 2024,
arXiv 2404.16710. No weights are copied. The modules that lead to the layers are copied without
their contents, which are the model's. The runner of such a model feeds the cache that it was made
from: it writes the keys and values of the model's first layers, at the places where the model
itself would write them.

An assistant of Gemma 4 drafts from keys and values that its target lends it. Transformers' classes
are used unmodified (`Gemma4AssistantForCausalLM`); its `generate` drafts with them for one row. An
assistant has no keys of its own. Each of its layers attends to the keys of the target's last layer
of the same kind with keys, for all tokens before the row's last committed token. That token has no
keys yet, and drafted tokens never get keys: all tokens of a draft stand at the position of the last
committed token. Beside the embedding of the token before, which is the target's, a pass reads a
state: the target's last hidden state first, its own result afterwards.

Where a draft follows rejected ones, Transformers also shows the assistant the keys of the first
rejected token (5.24), and in layers with a sliding window the keys of all rejected tokens. Here the
assistant never sees these keys.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, cache_utils

from shoal.errors import ModelError, PairMismatch, RequestError, UnsupportedModel
from shoal.models.bridge import NAME
from shoal.models.cache import SlotCache
from shoal.models.lean.forward import LeanPass
from shoal.models.pretrained import from_pretrained
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
    return lambda states: head(norm(states))


def _model_of(runner: Runner, layers: int) -> Any:
    """Returns the Transformers model of the first layers, which is made and tried once.

    Its config is the model's own, which tells layers how to attend.
    """
    models = _models.of(runner.hf)
    if layers not in models:
        _place_of(runner)
        models[layers] = shallow(runner.hf, layers)
        passed = _layers_passed(runner, models[layers])
        if passed != layers:
            del models[layers]
            raise UnsupportedModel(
                f"{runner.name} ({_kind(runner)}) cannot leave after {layers} layers: its pass "
                f"made {passed}"
            )
    return models[layers]


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
        names = [name for name in outer if lists[name] == count]
        _places[hf] = names[0] if len(names) == 1 else ""
    return _places[hf]


def _kind(runner: Runner) -> str:
    return str(getattr(runner.hf.config, "model_type", type(runner.hf).__name__))


@torch.inference_mode()
def _layers_passed(runner: Runner, hf: Any) -> int:
    """Returns the number of layers whose keys a pass of the model writes; 0 if the pass fails."""
    part = runner.over_same_cache(hf, None)
    part.cache = SlotCache()
    part.memory.reserve(1, 1)
    try:
        part.feed([0], torch.zeros(1, 1, dtype=torch.long, device=part.device), [1])
    except (LookupError, TypeError, AttributeError, RuntimeError, ValueError):
        return 0
    return len(part.cache)


def _lean(lean: LeanPass, layers: int) -> LeanPass:
    return lean.of(replace(lean.decoder, layers=lean.decoder.layers[:layers]))


LENT_NAME = "shoal-lent"
"""The attention implementation of assistants."""
_Lent: Any = getattr(cache_utils, "KVSharingDict", dict)
"""Transformers' mapping of lent keys, since 5.24."""


class LentKeys(_Lent):  # type: ignore[misc]
    """The keys and values of a target's cache, [rows, heads, kv, dim] each, by the kind of layer.

    They are read when a layer asks for them: so its attention finds the shared store of the same
    layer.

    Args:
        cache: the target's cache, in a pass.
        layers: the number of the layer in the cache, by the kind of layer.
    """

    def __init__(self, cache: SlotCache, layers: Mapping[str, int]) -> None:
        super().__init__()
        self._cache, self._layers = cache, layers

    def __getitem__(self, kind: str) -> tuple[Tensor, Tensor]:
        return self._cache.rows(self._layers[kind])


class AssistantModel(nn.Module):
    """A model of an assistant and its target's cache, with the methods that `Runner` uses.

    Args:
        assistant: Transformers' model.
        embedding: the target's embedding.
        layers: see `LentKeys`.

    Attributes:
        states: the state that each row's next pass reads, [rows, 1, width]: set before the first
            pass of a draft.
    """

    def __init__(self, assistant: Any, embedding: nn.Module, layers: Mapping[str, int]) -> None:
        super().__init__()
        self.assistant, self._layers = assistant, layers
        self._embedding = [embedding]  # in a list: it must not become a submodule
        self.config = SimpleNamespace(
            _attn_implementation="eager", eos_token_id=None, model_type="assistant"
        )
        self.states = torch.empty(0)
        self.eval()

    @property
    def device(self) -> torch.device:
        return self.assistant.device

    @property
    def dtype(self) -> torch.dtype:
        return self.assistant.dtype

    def get_output_embeddings(self) -> nn.Module:
        return self.assistant.lm_head

    def forward(
        self, tokens: Tensor, past_key_values: SlotCache, use_cache: bool, position_ids: Tensor
    ) -> Any:
        """Computes the logits [rows, 1, vocabulary] of a pass.

        Args:
            tokens: [rows, 1].
            position_ids: the positions of the last tokens that have keys, [rows, 1].

        Returns:
            An object with the attribute `logits`.
        """
        read = torch.cat([self._embedding[0](tokens), self.states], dim=-1)
        inner = self.assistant.model
        computed = inner(
            inputs_embeds=self.assistant.pre_projection(read),
            attention_mask=dict.fromkeys(self._layers),
            position_ids=position_ids + 1,
            shared_kv_states=LentKeys(past_key_values, self._layers),
            use_cache=False,
        ).last_hidden_state
        self.states = self.assistant.post_projection(computed)
        return SimpleNamespace(logits=self._logits(computed))

    def _logits(self, computed: Tensor) -> Tensor:
        """Computes logits; tokens in no chosen cluster get the row's least logit minus one.

        Transformers takes the least of all rows, by which a row's q would depend on its neighbours.
        """
        clusters, head = self.assistant.masked_embedding, self.assistant.lm_head
        if clusters is None:
            return head(computed)
        return torch.cat([clusters(row[None], head.weight) for row in computed])


def load_assistant(directory: Path, hf: Any, name: str) -> Any:
    """Loads the assistant in a directory, in its target's number format.

    Args:
        hf: the target.
        name: the target's name, for errors.

    Raises:
        RequestError: it cannot be loaded.
        ModelError: tensors are missing.
        PairMismatch: it belongs to another target.
        UnsupportedModel: the target lends no keys, or Transformers is too old.
    """
    lent_layers(hf, name)
    model, report = from_pretrained(
        directory, transformers.AutoModelForCausalLM, output_loading_info=True, dtype=hf.dtype
    )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"{directory}: the checkpoint lacks {len(missing)} of its tensors, for example "
            f"{missing[0]}; download it again"
        )
    _require_fit(directory, model.config, hf.config.get_text_config(decoder=True), name)
    model.model.config._attn_implementation = LENT_NAME
    return model.to(hf.device).eval().requires_grad_(False)


def lent_layers(hf: Any, name: str) -> dict[str, int]:
    """Returns the number of the target's layer that lends its keys, by the kind of layer.

    Raises:
        UnsupportedModel: the target lends none, or Transformers is too old.
    """
    text = hf.config.get_text_config(decoder=True)
    modes = getattr(text, "kv_sharing_modes", None)
    if not modes or "store" not in modes or _Lent is dict:
        raise UnsupportedModel(
            f"{name} ({text.model_type}) lends no keys and values: such assistants draft for "
            f"Gemma 4, with Transformers 5.24 or newer"
        )
    return {kind: i for i, kind in enumerate(text.layer_types) if modes[i] == "store"}


def _require_fit(directory: Path, config: Any, target: Any, name: str) -> None:
    """Raises PairMismatch if an assistant belongs to another target.

    Args:
        target: the config of the target's text half.
        name: the target's name.
    """
    own = config.get_text_config()
    of = {kind: i for i, kind in enumerate(target.layer_types)}
    sizes = {"hidden states": target.hidden_size, "a vocabulary": target.vocab_size}
    needs = {"hidden states": config.backbone_hidden_size, "a vocabulary": own.vocab_size}
    for i, kind in enumerate(own.layer_types):
        for entry in ("head_dim", "num_key_value_heads"):
            part = f"{entry} of {kind}"
            needs[part] = getattr(own.per_layer_config[i], entry)
            sizes[part] = (
                getattr(target.per_layer_config[of[kind]], entry) if kind in of else "none"
            )
    for part, one in needs.items():
        if one != sizes[part]:
            raise PairMismatch(
                f"{directory} cannot draft for {name}: {part} of {one} v {sizes[part]}: the "
                f"assistant of another target"
            )


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> Any:
    """Computes the attention of a layer, whose window Transformers counts from the last key."""
    window = options.get("sliding_window")
    options["sliding_window"] = None if window is None else window + 1
    return AttentionInterface()[NAME](module, query, key, value, mask, **options)


AttentionInterface.register(LENT_NAME, _attend)
