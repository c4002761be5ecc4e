"""The properties of a model, its changes since it was read, and objects that are made once for it.

Before its first token, `capabilities` tells its attention path, its context, and if its rows can
have different lengths.

Passes without the model's modules, and captured passes, know only the weights and layers that the
model had. Adapters, hooks and replaced tensors work in the modules alone. Inputs may be vectors in
place of tokens, where the model takes them (`embedded`).

Objects that are made once for a model lie in it and are freed with it. A `WeakKeyDictionary` does
not do this. It frees a value with its key, but here values lead to their keys (a runner holds its
model), and a value that the dictionary holds keeps such a key alive for ever. A value that hangs on
the model is part of a cycle, which Python collects.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from shoal.errors import UnsupportedModel
from shoal.models.weights.parameter import PackedWeight

REFUSED = {
    "bloom": "its ALiBi biases are built from a 2D mask shared by all rows, so rows of unequal "
    "lengths get wrong positions",
    "gpt_neo": "its local layers slice keys at an offset common to all rows",
}
ROPES_BY_LENGTH = ("dynamic", "longrope")
"""The kinds of rotary embedding that rescale by the longest row of a batch.

They read the row's positions on the host.
"""
CHUNKED = "chunked_attention"
RECURRENT = ("linear_attention", "conv", "mamba", "recurrent", "ssm", "rwkv", "hybrid")


def capabilities(hf: Any, name: str) -> tuple[str, int]:
    """Returns the attention path of a model (see `shoal.models.bridge`) and its context.

    The context is the number of tokens that a row may hold.

    Raises:
        UnsupportedModel: the rows of the model cannot have lengths of their own; the message names
            the reason.
    """
    config = hf.config.get_text_config()
    reason = _refusal(hf, config)
    if reason:
        raise UnsupportedModel(f"{name} ({config.model_type}) is not supported: {reason}")
    attention_path = "interface" if type(hf)._can_set_attn_implementation() else "mask"
    return attention_path, _context(config)


def keeps_states(hf: Any) -> bool:
    """Returns True if layers of a model keep a recurrent state."""
    layers = getattr(hf.config.get_text_config(), "layer_types", None) or ()
    recurrent = any(word in layer for layer in layers for word in RECURRENT)
    return recurrent or getattr(hf, "_is_stateful", False)


def chunk_of(module: Any) -> int | None:
    """Returns the size of the chunks of positions that a layer attends within (Llama 4), or None.

    The layer is not told: Transformers writes its chunks into the mask.
    """
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None) or ()
    if index is None or index >= len(kinds) or kinds[index] != CHUNKED:
        return None
    return getattr(config, "attention_chunk_size", None)


def counts_columns(hf: Any) -> bool:
    """Returns True if layers find the positions of their tokens in the cache's length.

    Llama 4's layers without rotary embeddings do, to scale their queries.
    """
    return any(
        getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True)
        for module in hf.modules()
    )


def last_column(hf: Any) -> int | Tensor:
    """Returns the value of `logits_to_keep` for the last column of a pass.

    Given a number, models whose last layers read the keys of others (Gemma 4, Gemma 3n) compute
    these layers for that many tokens only, and the other tokens of the pass are lost.
    """
    config = hf.config.get_text_config() if hasattr(hf.config, "get_text_config") else hf.config
    sharing = getattr(config, "num_kv_shared_layers", None)
    return torch.tensor([-1], device=hf.device) if sharing else 1


def _refusal(hf: Any, config: Any) -> str | None:
    if getattr(hf.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder; shoal decodes causal language models"
    if config.model_type in REFUSED:
        return REFUSED[config.model_type]
    if any(name.endswith("indexer") for name, _ in hf.named_modules()):
        return (
            "its indexers choose each token's keys from a cache of their own, by whole rows' masks"
        )
    if getattr(config, "d_rel", None):
        return "its relative biases count from Transformers' own cache, not from rows' positions"
    layers = set(getattr(config, "layer_types", None) or ())
    if (
        keeps_states(hf)
        and not {"cache", "past_key_values"} & signature(hf.forward).parameters.keys()
    ):
        return "it keeps recurrent states in an object of its own kind, not in Transformers' cache"
    if getattr(config, "attention_chunk_size", None) and not layers:
        return "it does not say which of its layers attend in chunks"
    if getattr(config, "alibi", False):
        return "ALiBi: its position biases are built from a 2D mask shared by all rows"
    if hf.get_output_embeddings() is None:
        return "it has no language-model head"
    return None


def _context(config: Any) -> int:
    """Returns the number of positions that a row may use.

    Dynamic and long RoPE rescale by the longest row of a batch, so a row beyond the original length
    would change its neighbours. Models with such a RoPE are limited to the original length.
    """
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    context = next((int(v) for v in (getattr(config, n, None) for n in names) if v), 1 << 20)
    for parameters in rope_parameters(config):
        if parameters.get("rope_type", parameters.get("type")) in ROPES_BY_LENGTH:
            original = parameters.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            context = min(context, int(original or context))
    return context


def rope_parameters(config: Any) -> list[Mapping[str, Any]]:
    """Returns the RoPE parameters of a model: one mapping, or one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope and all(isinstance(value, Mapping) for value in rope.values()):
        return list(rope.values())
    return [rope]


Value = TypeVar("Value")


class _Belongings(dict[str, Any]):
    """The stored objects of one model. Copies and pickles of the model begin without them."""

    def __init__(self, owner: nn.Module | None = None) -> None:
        self.owner = (lambda: None) if owner is None else weakref.ref(owner)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Belongings:
        return _Belongings()

    def __reduce__(self) -> tuple[type[_Belongings], tuple[()]]:
        return _Belongings, ()


class Belongings(Generic[Value]):
    """The objects that are stored in models, by model and key.

    Args:
        name: the name of this store, different from the names of all other stores.
    """

    ATTRIBUTE = "_shoal_belongings"

    def __init__(self, name: str) -> None:
        self._name = name

    def of(self, model: nn.Module) -> dict[Hashable, Value]:
        """Returns the objects of a model, by key.

        Do not use a model as a key: it would not be freed. Use `weakref.ref(model)`, or store the
        object in that model.
        """
        notes = vars(model).get(self.ATTRIBUTE)
        if not isinstance(notes, _Belongings) or notes.owner() is not model:
            notes = vars(model)[self.ATTRIBUTE] = _Belongings(model)
        return notes.setdefault(self._name, {})


class _Answers(threading.local):
    """The answers of structures in this thread, while `asked_once` keeps them."""

    answers: dict[Structure, bool] | None = None


_ANSWERS = _Answers()


@contextmanager
def asked_once() -> Iterator[None]:
    """Asks each structure once within the context, instead of once a pass.

    The dictionaries of 300 modules have left the caches of a processor after every pass: a question
    takes 0.1 ms for 12 layers, a tenth of a round of the bundled model. No code but the engine's
    runs between the rounds of one call, so weights are replaced between calls.
    """
    before, _ANSWERS.answers = _ANSWERS.answers, {}
    try:
        yield
    finally:
        _ANSWERS.answers = before


def ask_again() -> None:
    """Forgets the answers that `asked_once` keeps: other code than the engine's has run."""
    if _ANSWERS.answers is not None:
        _ANSWERS.answers.clear()


class Structure:
    """The modules of a model, its parameters and their addresses.

    Each pass asks if they have changed, or each call (`asked_once`). The check uses maps, as loops
    of the interpreter would take three times as long.

    Args:
        hf: any module. Packed parameters may move: their matrices know it.
    """

    def __init__(self, hf: nn.Module) -> None:
        modules = list(hf.modules())
        entries: list[tuple[dict[str, Any], str, Any]] = []
        for module in modules:
            entries += [
                (module._parameters, name, parameter)
                for name, parameter in module._parameters.items()
            ]
            entries += [(module._modules, name, child) for name, child in module._modules.items()]
            entries.append((module.__dict__, "forward", module.__dict__.get("forward")))
        self._holders = [holder for holder, _, _ in entries]
        self._names = [name for _, name, _ in entries]
        self._values = [value for *_, value in entries]
        parameters = [one for module in modules for one in module._parameters.values()]
        self._plain = [
            one for one in parameters if one is not None and not isinstance(one, PackedWeight)
        ]
        self._addresses = list(map(Tensor.data_ptr, self._plain))
        hooks = [
            hooks
            for module in modules
            for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]
        self._no_hooks = [hooks for hooks in hooks if not hooks]
        self._hooks = [(hooks, set(hooks)) for hooks in hooks if hooks]

    @property
    def changed(self) -> bool:
        """True if a module, a parameter, the tensor behind one, a hook or a forward has changed.

        Hooks of Transformers' own, which stay once a pass has returned hidden states, do not count:
        they do not change the results.
        """
        answers = _ANSWERS.answers
        if answers is None:
            return self._differs()
        if self not in answers:
            answers[self] = self._differs()
        return answers[self]

    def _differs(self) -> bool:
        return (
            not all(map(operator.is_, map(dict.get, self._holders, self._names), self._values))
            or list(map(Tensor.data_ptr, self._plain)) != self._addresses
            or (any(self._no_hooks) and self._hooked())
            or any(hooks.keys() != keys for hooks, keys in self._hooks)
        )

    def _hooked(self) -> bool:
        """Returns True if modules without hooks have got hooks that are not Transformers' own.

        Hooks of Transformers are recorded, and do not count as changes from then on.
        """
        new = [hooks for hooks in self._no_hooks if hooks]
        if not all(_is_transformers(hook) for hooks in new for hook in hooks.values()):
            return True
        self._no_hooks = [hooks for hooks in self._no_hooks if not hooks]
        self._hooks += [(hooks, set(hooks)) for hooks in new]
        return False


def _is_transformers(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


def embedded(ids: Tensor, table: Callable[[Tensor], Tensor], vectors: Tensor | None) -> Tensor:
    """Returns the embeddings [..., width] of ids [...] int64, some of which are vectors.

    Args:
        table: the function from ids of tokens [...] to embeddings [..., width].
        vectors: [count, width]; None if all ids are tokens.
    """
    if vectors is None:
        return table(ids)
    others = vectors[(-1 - ids).clamp(min=0)]
    return torch.where((ids < 0)[..., None], others, table(ids.clamp(min=0)))


def require_vectors(hf: Any, name: str) -> None:
    """Raises UnsupportedModel if the model takes ids alone."""
    if "inputs_embeds" not in signature(hf.forward).parameters:
        raise UnsupportedModel(
            f"{name} takes ids of tokens alone, and this drafter feeds vectors of its own: take "
            f"another one"
        )
