"""The multi-token-prediction layers of a checkpoint, by Transformers' own classes.

DeepSeek-V3, GLM-4.5, Qwen3-Next, Qwen3.5 and others publish a layer beside the model's own ones
that predicts one token further (arXiv 2412.19437, section 2.2). It reads a token's embedding and
the target's last hidden state before that token; the embedding, the head and the angles are the
target's. Transformers has it as `MtpModel`, whose `generate` drafts one token for one row. The
classes are used unmodified here. Where there are several layers, layer k drafts token k + 1 from
the states of layer k - 1. Further tokens are drafted by the last layer from its own states, as
EAGLE does.

Checkpoints name the layer in several ways, and Transformers knows its names at published sizes
only: `Beside` gives it a model whose config and names are those of the checkpoint at hand.
Transformers gives the projection and norms that Qwen's checkpoints have beside their layers
(`mtp.fc`) to the first layer. Here all layers use them, as in other engines.

Nemotron-H's layer is a stack of the target's own blocks, which Transformers' class does not make:
`StackedLayer` composes it of Transformers' blocks, as vLLM reads it.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AttentionInterface

from shoal.errors import ModelError, UnsupportedModel
from shoal.models.bridge import NAME

HIDING_NAME = "shoal-mtp"
"""The attention implementation of the layer."""
DRAFTED_NAME = "shoal-drafted"
"""The attention implementation of the layer while a copy of it learns."""
Attention = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]
"""A function of queries, keys and values [batch, heads, positions, dim] and the scale.

It returns [batch, positions, heads, dim].
"""
HIDDEN = -1e4
"""The score of a token without a state: no other token sees it.

Layer k has no states for the first k + 1 tokens of a row.
"""
SHARED = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "post_norm",
}
"""The modules that a checkpoint has once beside its layers, and Transformers in each layer."""
ENTRY, END = ("enorm", "hnorm", "eh_proj"), "final_layernorm"
"""The modules before the first block of a stack, and behind the last one."""


def layer_names(directory: Path, layers: int) -> dict[str, list[str]]:
    """Returns the names of the tensors of each such layer in a checkpoint, by the layer's number.

    Args:
        directory: the directory of the checkpoint.
        layers: the number of the model's own layers.
    """
    names: dict[str, list[str]] = {}
    for name in _tensors(directory):
        mtp = re.search(r"(?:^|\.)mtp\.(?:.*?layers\.(\d+)\.)?", name)
        layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
        if mtp:
            names.setdefault(mtp[1] or "0", []).append(name)
        elif layer and int(layer[1]) >= layers:
            names.setdefault(str(int(layer[1]) - layers), []).append(name)
    return names


def unplaced(directory: Path) -> str:
    """Returns the name of a tensor of such a layer that has no place in Transformers', or ""."""
    return next((name for name in _tensors(directory) if ".mtp_layers." in name), "")


def shared_modules(names: Iterable[str]) -> list[str]:
    """Returns the modules of a layer, as Transformers calls them, that stand beside the layers.

    Args:
        names: the names of the layers' tensors.
    """
    beside = (re.search(r"(?:^|\.)mtp\.(\w+)\.\w+$", name) for name in names)
    return sorted({SHARED[one[1]] for one in beside if one and one[1] in SHARED})


def _tensors(directory: Path) -> dict[str, str]:
    """Returns the names of the tensors in a directory of safetensors files, with their files."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    file = directory / "model.safetensors"
    if not file.is_file():
        return {}
    with safe_open(file, framework="pt") as tensors:
        return dict.fromkeys(tensors.keys(), file.name)


def _read(directory: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Reads some tensors of a directory of safetensors files."""
    places, tensors_by_name = _tensors(directory), {}
    for name in names:
        with safe_open(directory / places[name], framework="pt") as tensors:
            tensors_by_name[name] = tensors.get_tensor(name)
    return tensors_by_name


class Beside:
    """A target as `MtpModel` reads it: with the config and the names of its own checkpoint.

    Args:
        hf: the target.
        directory: its checkpoint.
        layers: the number of such layers.
    """

    def __init__(self, hf: Any, directory: Path, layers: int = 1) -> None:
        self._hf, self.config = hf, copy.deepcopy(hf.config)
        self.config.name_or_path = str(directory)
        text = self.config.get_text_config(decoder=True)
        text.num_mtp_layers = layers
        for kinds, preferred in (("layer_types", "full_attention"), ("mlp_layer_types", "sparse")):
            known = getattr(text, kinds, None)
            if known and getattr(text, f"mtp_{kinds}", None) is None:
                setattr(
                    text, f"mtp_{kinds}", [preferred if preferred in known else known[-1]] * layers
                )
        first = text.num_hidden_layers
        own = [rf"(^|\.)layers\.{number}\." for number in range(first, first + layers)]
        self._keys_to_ignore_on_load_unexpected = [*own, r"(^|\.)mtp\."]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hf, name)


class StackedLayer(nn.Module):
    """A layer of several of the target's own blocks, with the methods of `MtpModel` in use here.

    Args:
        hf: the target.
        blocks: a base model of the target's class with these blocks and the norm behind them.

    Attributes:
        entry: the norms of embedding and state, and the projection of both.
    """

    def __init__(self, hf: Any, blocks: Any) -> None:
        super().__init__()
        self.config, norm = blocks.config, type(blocks.norm_f)
        width, epsilon = self.config.hidden_size, self.config.layer_norm_epsilon
        modules = norm(width, eps=epsilon), norm(width, eps=epsilon)
        projection = nn.Linear(2 * width, width, bias=False)
        self.entry = nn.ModuleDict(dict(zip(ENTRY, (*modules, projection), strict=True)))
        self.layers = nn.ModuleList([blocks])
        self.embed_tokens, self.shared_head = hf.get_input_embeddings(), hf.get_output_embeddings()
        blocks.set_input_embeddings(None)
        for block in blocks.layers:
            if block.block_type == "full_attention":
                block.mixer.layer_idx = 0  # the only one that keeps keys

    def forward_layer(
        self, number: int, states: Tensor, positions: Tensor, cache: Any, *, input_ids: Tensor
    ) -> Tensor:
        """Computes the states of the layer; see `MtpHeads.compute`."""
        known = self.entry["enorm"](self.embed_tokens(input_ids)), self.entry["hnorm"](states)
        joined = self.entry["eh_proj"](torch.cat(known, dim=-1))
        options = {"position_ids": positions, "cache": cache, "use_cache": False}
        return self.layers[number](inputs_embeds=joined, **options).last_hidden_state

    def _project_to_logits(self, states: Tensor) -> Tensor:
        return self.shared_head(states)


class MtpHeads(nn.Module):
    """The layers, with the attributes and methods of `shoal.models.eagle3_layer.Eagle3Heads`.

    Args:
        layer: Transformers' `MtpModel`, or a `StackedLayer`.

    Attributes:
        depth: the number of layers.
    """

    title, shares = "the checkpoint's MTP layer", False

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer, self.lm_head = layer, layer.shared_head
        self.features = self.width = int(layer.config.hidden_size)
        self.depth = len(layer.layers)
        layer.config._attn_implementation = HIDING_NAME

    def read(self, hidden: Tensor) -> Tensor:
        """Returns the hidden states: the layer reads them as they are."""
        return hidden

    def compute(
        self, tokens: Tensor, states: Tensor, positions: Tensor, cache: Any, number: int = 0
    ) -> Tensor:
        """Computes the states of a layer, [rows, q, width], with the keys and values of a cache.

        Args:
            tokens: [rows, q].
            states: the state of each token, [rows, q, width].
            positions: [rows, q].
            number: the number of the layer.
        """
        return self.layer.forward_layer(number, states, positions, cache, input_ids=tokens)

    def forward(
        self, tokens: Tensor, states: Tensor, positions: Tensor, attend: Attention, number: int = 0
    ) -> Tensor:
        """Computes the states of a layer over whole texts, while a copy of the layers learns."""
        with _attending_by(attend, self.layer.config):
            output: Tensor = self.layer.forward_layer(
                number, states, 1 + positions, None, input_ids=tokens
            )
        return output

    def drafted(self, states: Tensor) -> Tensor:
        """Computes the logits of `logits`: the layer drafts all ids of the target."""
        # Layers that learn have more bits than the target, whose head this is.
        return self.logits(states.to(self.layer.embed_tokens.weight.dtype))

    def logits(self, states: Tensor) -> Tensor:
        """Computes logits over the target's vocabulary of the layer's states [..., width]."""
        return self.layer._project_to_logits(states)


def load_layer(hf: Any, directory: Path, name: str) -> MtpHeads:
    """Loads the layers of a target's checkpoint.

    Args:
        hf: the target.
        directory: its checkpoint.
        name: the target's name, for errors.

    Raises:
        UnsupportedModel: there is none, or Transformers cannot make it.
        ModelError: some of its tensors are missing.
    """
    text = hf.config.get_text_config(decoder=True)
    names = layer_names(directory, int(text.num_hidden_layers))
    strange = unplaced(directory)
    if not names and strange:
        raise UnsupportedModel(
            f"{name} has a multi-token-prediction layer whose tensors ({strange}) Transformers "
            f"cannot place"
        )
    if not names:
        raise UnsupportedModel(
            f"{name} has no multi-token-prediction layer: its checkpoint has no such tensors"
        )
    kinds = getattr(text, "mtp_layers_block_type", None)
    try:
        if kinds is not None:
            layer = _load_stack(hf, directory, names, kinds)
        else:
            layer = _load_layers(hf, directory, names)
    except RuntimeError as error:
        raise ModelError(f"{name}: {error}") from error
    except (ValueError, AttributeError, TypeError) as error:
        raise UnsupportedModel(
            f"{name}: Transformers cannot make its multi-token-prediction layer: {error}"
        ) from error
    return MtpHeads(layer).eval().requires_grad_(False)


def _load_layers(hf: Any, directory: Path, names: dict[str, list[str]]) -> Any:
    """Loads the layers by Transformers' class; the arguments are those of `_load_stack`."""
    try:
        from transformers.core_model_loading import WeightRenaming
        from transformers.modeling_layers import MtpModel
    except ImportError as error:
        raise UnsupportedModel(
            "draft=mtp needs Transformers 5.24, which has MtpModel: pip install -U transformers"
        ) from error

    def renamings(model: Any, main: Any) -> list[Any]:
        end = WeightRenaming(rf"\.mtp_block\.{END}\.", ".post_norm.")  # Bailing's name
        return [*MtpModel.get_weight_conversions(model, main), end]

    shared = shared_modules(names.get("0", ()))
    later = rf"^layers\.[1-9]\d*\.({'|'.join(shared) or '$'})\."
    missing = [*(MtpModel._keys_to_ignore_on_load_missing or ()), later]
    # Of the same name and module: Transformers knows the names of tensors by them.
    own = {"_keys_to_ignore_on_load_missing": missing, "__module__": MtpModel.__module__}
    own["get_weight_conversions"] = renamings
    kind: Any = type(MtpModel.__name__, (MtpModel,), own)
    layer = kind.from_pretrained(Beside(hf, directory, len(names)), device_map={"": str(hf.device)})
    for one in layer.layers[1:]:
        for module in shared:
            setattr(one, module, getattr(layer.layers[0], module))
    layer.layers.to(hf.device, hf.dtype)
    return layer


def _load_stack(
    hf: Any, directory: Path, names: dict[str, list[str]], kinds: Sequence[str]
) -> StackedLayer:
    """Loads a layer that is a stack of blocks.

    Args:
        hf: the target.
        directory: its checkpoint.
        names: the names of the tensors of each block, by its number.
        kinds: the kinds of the blocks.

    Raises:
        RuntimeError: tensors are missing.
        ValueError: there are other blocks than one of attention and some without states.
    """
    known = kinds.count("full_attention") == 1 and "linear_attention" not in kinds
    if not known or len(names) != len(kinds):
        raise ValueError(
            f"its {len(names)} blocks ({', '.join(kinds)}) are not one of attention beside others "
            f"without a state"
        )
    config = copy.deepcopy(hf.config.get_text_config(decoder=True))
    config.layers_block_type, config.vocab_size = list(kinds), 1
    tensors = _read(directory, [one for each in names.values() for one in each])
    own = {re.sub(r"^(.*\.)?mtp\.", "", name): tensor for name, tensor in tensors.items()}
    places = [f"layers.0.{name}.weight" for name in ENTRY]
    places.append(f"layers.{len(kinds) - 1}.{END}.weight")
    lost = [place for place in places if place not in own]
    if lost:
        raise RuntimeError(f"the tensor {lost[0]} of its multi-token-prediction layer is missing")
    *entry, end = (own.pop(place) for place in places)
    blocks, info = type(hf.get_decoder()).from_pretrained(
        None,
        config=config,
        state_dict=own | {"norm_f.weight": end, "embeddings.weight": end[None]},
        dtype=hf.dtype,
        output_loading_info=True,
    )
    if info["missing_keys"]:
        raise RuntimeError(f"weights are missing: {sorted(info['missing_keys'])}")
    layer = StackedLayer(hf, blocks)
    for module, tensor in zip(layer.entry.values(), entry, strict=True):
        module.weight.data = tensor.to(hf.dtype)
    layer.layers.to(hf.device)
    layer.entry.to(hf.device)
    return layer


def _hide_first(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> Any:
    """Computes attention that sees no token without a state, which stand in a row's first cells.

    A feature that is appended to queries and keys hides these cells, whatever the layer stores.
    """
    options["scaling"] = options.get("scaling") or query.shape[-1] ** -0.5
    first = torch.zeros_like(key[..., :1])
    first[:, :, : module.layer_idx + 1] = HIDDEN
    query = torch.cat([query, torch.ones_like(query[..., :1])], dim=-1)
    return AttentionInterface()[NAME](
        module, query, torch.cat([key, first], dim=-1), value, mask, **options
    )


AttentionInterface.register(HIDING_NAME, _hide_first)


_attention: ContextVar[Attention] = ContextVar("shoal_drafted_attention")


@contextmanager
def _attending_by(attention: Attention, config: Any) -> Iterator[None]:
    """Switches Transformers' modules with that config to an attention within the context."""
    before, config._attn_implementation = config._attn_implementation, DRAFTED_NAME
    token = _attention.set(attention)
    try:
        yield
    finally:
        _attention.reset(token)
        config._attn_implementation = before


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    return _attention.get()(query, key, value, options.get("scaling")), None


AttentionInterface.register(DRAFTED_NAME, _attend)
