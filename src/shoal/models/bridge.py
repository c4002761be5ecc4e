"""The bridge to Transformers: an unmodified model computes a pass with shoal's attention and masks.

A model takes one of two attention paths. On the path "interface" it looks its attention up in the
AttentionInterface by the name in its config. During a pass that name is one registered here, whose
function calls the attention method of the pass under way. Transformers' mask interface does not
know these names, so the model passes no mask: `Masks` has all masks. A few older models take the
path "mask": they compute attention in their own eager code and are given a 4D mask.

Ordinary passes and captured ones (`shoal.models.compiled`) have different names, because they find
the pass under way differently: by a context variable, or by a global. So a process makes one
capture at a time.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import create_causal_mask

from shoal.errors import InternalError, UnsupportedModel
from shoal.models.attention import AttentionInputs, Masks
from shoal.models.attention.methods import Method
from shoal.models.attention.unfused import pad
from shoal.models.cache import SlotCache
from shoal.models.structure import Structure, chunk_of, embedded, last_column

NAME, STATIC_NAME = "shoal", "shoal-static"
"""The attention implementations that models are switched to."""


class ReplacedWeights(RuntimeError):
    """The error that weights or layers of a model were replaced after passes had read them off."""


class AttentionState(Protocol):
    """The state of a pass under way, which the layers read."""

    @property
    def method(self) -> Method:
        """The method that computes the attention of a layer."""

    @property
    def masks(self) -> Masks:
        """The masks of the pass."""

    def shared(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns the shared store of the layer whose keys were written last.

        The keys and the values are [cells, heads, dim] each; (None, None) without prefixes.
        """


class Layers(Protocol):
    """The layers that compute passes in place of the model's modules (`shoal.models.layers`)."""

    @property
    def stale(self) -> bool:
        """True if weights were replaced so that only the modules still know all of them."""

    def __call__(self, tokens: Tensor, positions: Tensor, state: Any) -> Tensor:
        """Computes a captured pass and returns its logits, like `Bridge.static_logits`."""

    def ordinary(
        self, tokens: Tensor, cache: SlotCache, method: Method, want_logits: bool
    ) -> Tensor:
        """Computes the pass that was announced to the cache and returns its logits.

        The tokens are packed or padded as the cache's plan says.
        """


@dataclass(frozen=True)
class _Ordinary:
    """The state of an ordinary pass over a cache."""

    method: Method
    masks: Masks
    cache: SlotCache

    def shared(self) -> tuple[Tensor | None, Tensor | None]:
        return self.cache.shared()


class _Static:
    """The state of the captured pass under way, and the lock of the thread that sets it."""

    state: AttentionState | None = None
    lock = threading.RLock()


_ordinary: ContextVar[_Ordinary | None] = ContextVar("shoal_attention", default=None)
_static = _Static()


class Bridge:
    """A Transformers model with the calls that passes make.

    Attributes:
        hf: the model, as its owner left it except during a pass.
        attention_path: "interface" or "mask".
        context: the number of positions of the model.
        takes_positions: True if the model is told the positions of its tokens.
        lock: the lock that is held during a pass.
        layers: the layers that compute passes in place of the model's modules, if set.
    """

    def __init__(self, hf: Any, attention_path: str, context: int) -> None:
        self.hf, self.attention_path, self.context = hf, attention_path, context
        parameters = inspect.signature(hf.forward).parameters
        self.takes_positions = "position_ids" in parameters
        self._last = last_column(hf) if "logits_to_keep" in parameters else None
        self._cache_name = cache_name(hf)
        self.lock = threading.RLock()
        self.layers: Layers | None = None
        self._structure: Structure | None = None

    def of(self, hf: Any) -> Bridge:
        """Returns a bridge to another model that has this model's config.

        One pass at a time may switch the attention of that config.
        """
        other = copy.copy(self)
        other.hf, other.layers, other._structure = hf, None, None
        return other

    def ordinary(
        self,
        tokens: Tensor,
        cache: SlotCache,
        method: Method,
        forward_context: AbstractContextManager[None],
        want_logits: bool,
        hidden_layers: Sequence[int] = (),
        vectors: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes an ordinary pass, as long as its rows are.

        Returns the logits of `tokens`, packed or padded as the cache's plan says, and the hidden
        states of `hidden_layers` side by side (`shoal.models.runner.Runner.hidden_layers`); None
        without such layers.

        Args:
            forward_context: a context that is entered while the model computes.
            want_logits: False allows the logits of the last column only.
            vectors: the vectors that negative ids stand for (`shoal.models.executor`).

        Raises:
            UnsupportedModel: the model does not return its hidden states.
        """
        plan = cache.plan
        assert plan is not None
        masks = Masks(plan)
        options: dict[str, Any] = (
            {} if want_logits or self._last is None else {"logits_to_keep": self._last}
        )
        if self.takes_positions:
            # Unused columns near the end of the context would index past a learned position table.
            positions = plan.pack(plan.positions)
            beyond = plan.reach > self.context
            options["position_ids"] = positions.clamp(max=self.context - 1) if beyond else positions
        if self.attention_path == "mask":
            options["attention_mask"] = masks.explicit_bias(self.hf.dtype)
        if hidden_layers:
            options["output_hidden_states"] = True
        ids: Tensor | None = tokens
        if vectors is not None:
            ids, options["inputs_embeds"] = (
                None,
                embedded(tokens, self.hf.get_input_embeddings(), vectors),
            )
        with self._switched(NAME), forward_context, cache.attached():
            before = _ordinary.set(_Ordinary(method, masks, cache))
            try:
                output = self.hf(ids, use_cache=True, **{self._cache_name: cache}, **options)
            finally:
                _ordinary.reset(before)
        logits: Tensor = output.logits
        return logits, _side_by_side(output, hidden_layers) if hidden_layers else None

    def require_same_weights(self) -> None:
        """Raises ReplacedWeights if the model has other weights or layers than passes have read."""
        if self._structure is None:
            self._structure = Structure(self.hf)
        if self._structure.changed if self.layers is None else self.layers.stale:
            raise ReplacedWeights(
                "weights or layers of the model were replaced by others; write into its "
                "weights, or load the pair again"
            )

    @contextmanager
    def static(self, state: AttentionState) -> Iterator[None]:
        """Opens a context in which `static_logits` may be called or captured.

        Raises:
            ReplacedWeights: a captured function would read weights that the model no longer has, or
                leave out layers that it has.
        """
        self.require_same_weights()
        with self._switched(STATIC_NAME), _static.lock:
            before, _static.state = _static.state, state
            try:
                yield
            finally:
                _static.state = before

    def static_logits(self, tokens: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Computes the logits [rows, q, vocab] of a captured pass as a function of tensors alone.

        Positions beyond the context belong to columns that are not read.
        """
        if self.layers is not None:
            return self.layers(tokens, positions, cache)  # angles are computed, not looked up
        options: dict[str, Any] = (
            {"position_ids": positions.clamp(max=self.context - 1)} if self.takes_positions else {}
        )
        return self.hf(tokens, use_cache=True, **{self._cache_name: cache}, **options).logits

    def plain_states(self, tokens: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Computes logits and hidden states without a cache, by the model's own attention.

        The logits are [rows, q, vocab], the states [rows, q, layers * width], or None without
        layers. The eager attention computes soft-capped scores (Gemma 2): Transformers 5.17 takes
        SDPA for them, which leaves the cap out.

        Raises:
            UnsupportedModel: the model does not return its hidden states.
        """
        capped = (
            getattr(self.hf.config.get_text_config(), "attn_logit_softcapping", None) is not None
        )
        options = {"output_hidden_states": True} if layers else {}
        with self._switched("eager") if capped else nullcontext():
            output = self.hf(tokens, use_cache=False, **options)
        return output.logits, _side_by_side(output, layers) if layers else None

    def stepped_logits(self, tokens: Tensor, first: int) -> Tensor:
        """Computes the logits [rows, q, vocab] as Transformers' `generate` does.

        Args:
            first: the number of tokens of the first call; the others follow one by one.
        """
        output, parts = self.hf(tokens[:, :first], use_cache=True), []
        for token in tokens[:, first:].split(1, dim=1):
            parts.append(output.logits)
            cache = getattr(output, self._cache_name)
            output = self.hf(token, use_cache=True, **{self._cache_name: cache})
        return torch.cat([*parts, output.logits], dim=1)

    @contextmanager
    def _switched(self, name: str) -> Iterator[None]:
        """Switches the model's attention to that name within the context, and back afterwards."""
        config = self.hf.config
        with self.lock:
            before = config._attn_implementation
            if self.attention_path == "interface":
                config._attn_implementation = name
            try:
                yield
            finally:
                if self.attention_path == "interface":
                    config._attn_implementation = before


def cache_name(hf: Any) -> str:
    """Returns the name of the argument that gives a model its cache.

    Transformers 5.24 renames `past_key_values` to `cache`. A model from another source may have
    either name with any version. A model that wraps another may name neither; it hands on the
    arguments that Transformers' own functions take.
    """
    for forward in (hf.forward, create_causal_mask):
        parameters = inspect.signature(forward).parameters
        for name in ("cache", "past_key_values"):
            if name in parameters:
                return name
    raise InternalError("Transformers knows neither cache nor past_key_values")


def _side_by_side(output: Any, layers: Sequence[int]) -> Tensor:
    """Returns the hidden states of some layers side by side, [rows, q, layers * width].

    Raises:
        UnsupportedModel: the model's output has no such states.
    """
    states = getattr(output, "hidden_states", None)
    if states is None or max(layers) >= len(states):
        raise UnsupportedModel(
            f"{type(output).__name__} has no hidden states of layers {list(layers)}, which the "
            f"drafter reads"
        )
    return torch.cat([states[layer] for layer in layers], dim=-1)


def _inputs(
    state: AttentionState,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: dict[str, Any],
) -> AttentionInputs:
    """Collects the inputs of a layer's attention from the `options` that its model passes.

    The scaling that the model passes is used: OPT passes 1, MLA its own. A window that the model
    passes counts, None included; Qwen2-MoE passes none and notes it on the module.
    """
    scaling = options.get("scaling")
    window = (
        options["sliding_window"]
        if "sliding_window" in options
        else getattr(module, "sliding_window", None)
    )
    shared_key, shared_value = state.shared()
    return AttentionInputs(
        query,
        key,
        value,
        masks=state.masks.both_ways() if options.get("both_ways") else state.masks,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=window,
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
        shared_key=shared_key,
        shared_value=shared_value,
    )


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Computes the attention of a layer in an ordinary pass.

    Args:
        query: [rows, heads, q, dim], or packed [1, heads, tokens, dim].
        key: [rows, kv heads, kv, dim] as stored (not repeated).
        value: [rows, kv heads, kv, dim] as stored (not repeated).

    Returns:
        ([rows, q, heads, value dim] or packed, None).
    """
    state = _ordinary.get()
    if state is None:
        raise InternalError(
            "a model switched to shoal's attention ran outside of a planned forward pass"
        )
    plan = state.cache.plan
    assert plan is not None
    query = plan.unpack(query.transpose(1, 2)).transpose(1, 2)
    if query.shape[2] != plan.q:  # kernels would read behind its end
        raise UnsupportedModel(
            f"a layer attends from {query.shape[2]} columns in a pass of {plan.q}: the model "
            f"leaves tokens out"
        )
    inputs = _inputs(state, module, query, key, value, options)
    chunk = chunk_of(module)
    if chunk is not None and plan.reach > chunk:  # within the first one, chunks hide nothing
        return plan.pack(pad(inputs.in_chunks(chunk))), None
    method = pad if options.get("both_ways") else state.method  # no kernel looks behind a column
    return plan.pack(method(inputs)), None


def _attend_static(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Computes the attention of a layer in a captured pass, which is never packed."""
    state = _static.state
    if state is None:
        raise InternalError(
            "a model switched to shoal's static attention ran outside of a captured pass"
        )
    return state.method(_inputs(state, module, query, key, value, options)), None


AttentionInterface.register(NAME, _attend)
AttentionInterface.register(STATIC_NAME, _attend_static)
