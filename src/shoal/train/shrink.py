"""The small model of a target's own architecture: fewer layers and a smaller width."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from shoal.errors import RequestError

FEED_FORWARD = (
    "intermediate_size",
    "n_inner",
    "ffn_dim",
    "ffn_hidden_size",
    "word_embed_proj_dim",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
"""The names that configs have for widths that follow the model's width."""
KV_HEADS = ("num_key_value_heads", "num_kv_heads")


def shrunk(
    config: PreTrainedConfig, layers: int | None = None, width: int | None = None
) -> PreTrainedConfig:
    """Returns the config of a drafter: same vocabulary, same size of a head, tied embeddings.

    The choice is FastDraft's, arXiv 2411.11055, section 3.1. Heads keep their size, so that
    everything by position (rotary embeddings, scales of queries) stays as it is; a smaller width
    has fewer of them.

    Args:
        layers: None = an eighth of the target's.
        width: None = a quarter of the target's from 2,048 on, half from 1,024 on, else all.

    Raises:
        RequestError: the width is not made of whole heads, or is more than the target has.
    """
    made = copy.deepcopy(config.get_text_config())
    depth, full, heads = made.num_hidden_layers, made.hidden_size, made.num_attention_heads
    head = full // heads if full % heads == 0 else full
    layers = layers or max(1, depth // 8)
    if width is None:
        width = full // (4 if full >= 2048 else 2 if full >= 1024 else 1)
        width = max(head, width - width % head)
    if width % head or width > full:
        raise RequestError(
            f"--width must be a multiple of {head}, the width per head, and at most {full}, the "
            f"target's; not {width}"
        )
    if layers > depth:
        raise RequestError(f"--layers must be at most {depth}, those of the target; not {layers}")
    for name, value in made.to_dict().items():
        if "layer" in name and isinstance(value, list) and len(value) == depth:
            setattr(made, name, [value[(i + 1) * depth // layers - 1] for i in range(layers)])
        elif name in FEED_FORWARD and isinstance(value, int):
            setattr(made, name, max(1, value * width // full))
        elif name in KV_HEADS and isinstance(value, int):
            few = heads * width // full
            setattr(
                made,
                name,
                next(n for n in range(max(1, value * width // full), 0, -1) if few % n == 0),
            )
    made.num_hidden_layers, made.hidden_size, made.num_attention_heads = (
        layers,
        width,
        heads * width // full,
    )
    made.tie_word_embeddings = True
    if hasattr(made, "quantization_config"):
        del made.quantization_config
    return made


def small_model(
    target: PreTrainedModel, layers: int | None, width: int | None, seed: int
) -> PreTrainedModel:
    """Returns a model of the shrunk config, in float32 and without dropout.

    A weight that has the name and shape of a weight of the target begins as that: embeddings and
    the first layers, if the width is the target's.

    Raises:
        RequestError: see `shrunk`, or a width that the architecture cannot have.
    """
    config = shrunk(target.config, layers, width)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            with torch.no_grad():
                model.eval()(
                    input_ids=torch.zeros(1, 2, dtype=torch.long)
                )  # a wrong number of heads shows here
        except (ValueError, TypeError, RuntimeError) as error:
            raise RequestError(
                f"{type(target).__name__} cannot have this --width: {error}"
            ) from error
    known = dict(target.named_parameters())
    for name, parameter in model.named_parameters():
        if name in known and known[name].shape == parameter.shape:
            parameter.data.copy_(known[name].data)
    found: PreTrainedModel = model
    return found
