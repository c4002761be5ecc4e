"""Loading models and tokenizers, and what can be known of them before the first token.

It imports `transformers`, as only the cache, the attention registration and `shoal.integrations` do beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers.activations import ACT2CLS
from transformers.pytorch_utils import Conv1D

from shoal.errors import ModelError, PairMismatch, RequestError, UnsupportedModel
from shoal.models import formats, linears
from shoal.models.quantize import Int8Linear, quantized
from shoal.models.runner import Runner
from shoal.models.selfcheck import self_check
from shoal.models.sources import directory_of
from shoal.models.strict import make_strict
from shoal.models.tensor_parallel import lead, require_ranks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

REFUSED = {
    "bloom": "its ALiBi biases are built from a 2D mask shared by all rows, so rows of unequal lengths get wrong positions",
    "gpt_neo": "its local layers slice keys at an offset common to all rows",
}
RECURRENT = ("linear_attention", "conv", "mamba", "recurrent", "ssm", "rwkv", "hybrid")
ROWWISE = {nn.Linear, Conv1D, Int8Linear, *(made[0] if isinstance(made, tuple) else made for made in ACT2CLS.values())}
"""Layers that work on one token at a time: linear ones and activations."""
VOCABULARY_PADDING = 512
"""Without tokenizers to compare, vocabularies this close count as one padded to different sizes."""

TOKENIZER_FILES = ("*token*", "*vocab*", "*merges*", "*.model", "*.spm", "*spiece*")
"""What tokenizers are read from, by any of their classes."""

PROBE = 'def f(x):\n    return x ** 2  # Größe ≤ 10 → 你好, I\'m 3.14\n\t<b>"ok"</b>'


def bundled(part: str) -> Path:
    """Directory of the bundled "target" or "drafter"."""
    return Path(str(resources.files("shoal"))) / "data" / "pair" / part


def capabilities(hf: Any, name: str) -> tuple[str, int]:
    """The attention path of a model (see `shoal.models.runner`), and how many tokens a row of it may hold.

    Raises:
        UnsupportedModel: with the reason, for models whose rows cannot have lengths of their own.
    """
    config = hf.config.get_text_config()
    reason = _refusal(hf, config)
    if reason:
        raise UnsupportedModel(f"{name} ({config.model_type}) is not supported: {reason}")
    attention_path = "interface" if type(hf)._can_set_attn_implementation() else "mask"
    return attention_path, _context(config)


def _refusal(hf: Any, config: Any) -> str | None:
    if getattr(hf.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder; shoal decodes causal language models"
    if config.model_type in REFUSED:
        return REFUSED[config.model_type]
    layers = set(getattr(config, "layer_types", None) or ())
    recurrent = sorted(layer for layer in layers if any(word in layer for word in RECURRENT))
    if recurrent:
        return f"its {', '.join(recurrent)} layers keep a recurrent state that cannot be rolled back to an earlier length"
    if getattr(hf, "_is_stateful", False):
        return "it keeps a recurrent state (SSM or hybrid) that cannot be rolled back to an earlier length"
    if "chunked_attention" in layers or getattr(config, "attention_chunk_size", None):
        return "its chunked attention is not implemented for ragged rows"
    if getattr(config, "alibi", False):
        return "ALiBi: its position biases are built from a 2D mask shared by all rows"
    if hf.get_output_embeddings() is None:
        return "it has no language-model head"
    return None


def _context(config: Any) -> int:
    """Positions a row may use. Dynamic and long RoPE rescale by the longest row of a batch, so rows would change their
    neighbours beyond the original length: they are held to it."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    context = next((int(v) for v in (getattr(config, n, None) for n in names) if v), 1 << 20)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for parameters in rope.values() if rope and all(isinstance(v, Mapping) for v in rope.values()) else [rope]:
        if parameters.get("rope_type", parameters.get("type")) in ("dynamic", "longrope"):
            original = parameters.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            context = min(context, int(original or context))
    return context


def wrap(hf: Any, name: str, attention: str = "auto", checked: bool = True, strict: bool = False) -> Runner:
    """A runner around a Transformers model object, checked.

    Args:
        strict: passes whose bits do not depend on what else is in them (`shoal.models.strict`).

    Raises:
        RequestError: if the model is in training mode, or strict on an accelerator or with another attention.
        UnsupportedModel: see `capabilities`, `selfcheck` and `strict`.
    """
    require_eval(hf, name)
    attention_path, context = capabilities(hf, name)
    if strict and (hf.device.type != "cpu" or attention not in ("auto", "strict")):
        raise RequestError(f"strict works on a CPU with attention 'auto', got {attention!r} on {hf.device}")
    if strict and attention_path != "interface":
        raise UnsupportedModel(f"{name} cannot be strict: it attends by its own code")
    runner = Runner(hf, name, attention_path, context, "strict" if strict else attention)
    if checked:
        self_check(runner)
    return make_strict(runner, ROWWISE) if strict else runner


def require_eval(hf: Any, name: str) -> None:
    """Raises RequestError for a model in training mode."""
    if hf.training:
        raise RequestError(f"{name} is in training mode, where dropout makes its logits random: call model.eval() first")


def is_model(source: Any) -> bool:
    """Whether it is a Transformers model object."""
    return isinstance(source, transformers.PreTrainedModel)


def name_of(hf: Any) -> str:
    """What to call a model object."""
    return hf.config.name_or_path or type(hf).__name__


def tokenizer_at_hand(hf: Any) -> Any:
    """The tokenizer that lies where a model object was loaded from, on this machine; None if there is none."""
    try:
        return load_tokenizer(hf.config.name_or_path, local_files_only=True) if hf.config.name_or_path else None
    except RequestError:
        return None


def load_runner(
    source: str | Path, *, dtype: str | torch.dtype = "auto", device: str | torch.device = "auto", revision: str | None = None,
    attention: str = "auto", quantize: str = "off", strict: bool = False, tensor_parallel: bool = False,
    trust_remote_code: bool = False, local_files_only: bool = False, target_dtype: torch.dtype | None = None,
) -> Runner:  # fmt: skip
    """Loads a causal LM through `from_pretrained` (hub id or directory; sharded or single-file safetensors).

    Args:
        dtype: "auto" is the checkpoint's own on an accelerator, and decided by `shoal.models.formats` on a CPU.
        quantize: a format of `shoal.models.quantize`. strict: see `wrap`. target_dtype: for a drafter, that of its target.
        tensor_parallel: a part of the model in every process that torchrun started; returns in the first (see
            `shoal.models.tensor_parallel`).

    Raises:
        RequestError: not found, or an unknown dtype or device. ModelError: unreadable weights or no memory.
        UnsupportedModel: see `capabilities` and `selfcheck`.
    """
    place = resolve_device(device)
    hub = {"revision": revision, "trust_remote_code": trust_remote_code, "local_files_only": local_files_only}
    config = _from(source, transformers.AutoConfig, **hub)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{source} ({config.model_type}) is not supported: it is an encoder-decoder; shoal decodes causal language models"
        )
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and not trust_remote_code:
        raise UnsupportedModel(
            f"{source} ({config.model_type}) is not supported: Transformers has no causal language model for it"
        )
    sharding = _sharding(str(source), config, device, quantize, strict) if tensor_parallel else {}
    kind, why = resolve_dtype(dtype), f"{str(dtype).removeprefix('torch.')}: as asked"
    if dtype == "auto":
        kind, why = _auto_dtype(config, source, place, target_dtype, bool(sharding))
    hf, found = _from(source, transformers.AutoModelForCausalLM, dtype=kind, output_loading_info=True, **sharding, **hub)
    _check_complete(source, found["missing_keys"])
    try:
        hf = hf.to(place).eval()
    except RuntimeError as error:
        raise ModelError(f"{source}: cannot be moved to {place}: {error}") from error
    order = "sharded" if sharding else linears.lay_out(hf)
    hf, how = quantized(hf, quantize)
    runner = wrap(hf, str(source), attention, strict=strict)
    runner.notes |= {"dtype": why, "quantize": how, "weights": order}
    return lead(runner) if sharding else runner


def _auto_dtype(
    config: Any, source: str | Path, place: torch.device, target_dtype: torch.dtype | None, sharded: bool
) -> tuple[torch.dtype | str, str]:
    """The number format of dtype="auto", and why. The processes of a sharded model may have unlike CPUs, and must agree."""
    if place.type != "cpu":
        return "auto", "that of the checkpoint"
    if sharded:
        return torch.float32, "float32: its processes may have unlike CPUs"
    width = getattr(config.get_text_config(), "hidden_size", None) or 0
    return formats.number_format(formats.stored_format(config, source), width, formats.cpu(), target_dtype)


def _sharding(name: str, config: Any, device: str | torch.device, quantize: str, strict: bool) -> dict[str, Any]:
    """What makes `from_pretrained` share a model out among the processes that torchrun started."""
    if strict or quantize != "off" or str(device) != "auto":
        raise RequestError("tensor_parallel wants device 'auto', and goes neither with strict nor with a quantised target")
    require_ranks(name, config.get_text_config())
    return {"distributed_config": transformers.distributed.DistributedConfig(tp_plan="auto")}


def _check_complete(source: str | Path, missing: Iterable[str]) -> None:
    """Transformers fills what a checkpoint lacks with random numbers, and only warns."""
    names = sorted(missing)
    if names:
        raise ModelError(
            f"{source}: the checkpoint lacks {len(names)} of its model's tensors, for example {names[0]}; "
            "download or export it again"
        )


def load_tokenizer(source: str | Path, **hub: Any) -> Any:
    """The Transformers tokenizer of a model. Raises RequestError when there is none."""
    place = directory_of(source)
    if place is not None and not any(found for pattern in TOKENIZER_FILES for found in place.glob(pattern)):
        raise RequestError(f"no tokenizer in {source}: expected tokenizer.json or the files that it is made from")
    return _from(source, transformers.AutoTokenizer, **hub)


def _from(source: str | Path, auto: Any, **options: Any) -> Any:
    """`auto.from_pretrained` with every failure told as one of our errors."""
    what = auto.__name__.removeprefix("Auto")
    try:
        return auto.from_pretrained(str(directory_of(source) or source), **options)
    except SafetensorError as error:
        raise ModelError(f"{source}: the safetensors file is damaged ({error}); download or export it again") from error
    except MemoryError as error:
        raise ModelError(f"{source}: out of memory while loading; try dtype='bfloat16' or a smaller model") from error
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError) as error:
        first = _first_sentence(error)
        if "trust_remote_code" in str(error):
            first += " Only if you trust it: trust_remote_code=True"
        raise RequestError(f"cannot load the {what} of {source}: {first}") from error


def _first_sentence(error: Exception) -> str:
    """What an error of Transformers says, without the advice that follows."""
    text = str(error).strip()
    line = text.splitlines()[0].rstrip() if text else ""
    whole = " ".join(text.split()) if line.endswith(":") else line
    told = whole and isinstance(error, (OSError, ValueError, ImportError))  # others say little without their kind
    return whole if told else f"{type(error).__name__} {whole}".strip()


def resolve_device(device: str | torch.device) -> torch.device:
    """ "auto" takes an accelerator if there is one. Raises RequestError for a device that is not here."""
    if str(device) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise RequestError(f"device {device!r} is not available here: {str(error).splitlines()[0]}") from error
    return place


def resolve_dtype(dtype: str | torch.dtype) -> torch.dtype | str:
    """A torch dtype, or "auto" as it is. Raises RequestError for an unknown name."""
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    if dtype not in DTYPES:
        raise RequestError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {dtype!r}")
    return DTYPES[dtype]


def eos_ids(hf: Any, tokenizer: Any) -> tuple[int, ...]:
    """The token ids that end a text: the model's generation config first, then its config, then the tokenizer."""
    generation = getattr(hf, "generation_config", None)
    for owner in (generation, hf.config, tokenizer):
        value = getattr(owner, "eos_token_id", None)
        if value is not None:
            return tuple(value) if isinstance(value, (list, tuple)) else (int(value),)
    return ()


def pair_report(target: Runner, draft: Runner, tokenizer: Any = None, draft_tokenizer: Any = None) -> list[str]:
    """What keeps this drafter from proposing for this target; empty if nothing does.

    Tokenizers decide, not sizes: models often pad one vocabulary to different widths. Without both tokenizers the widths
    must agree up to `VOCABULARY_PADDING`.
    """
    problems = []
    if target.device != draft.device:
        problems.append(f"target is on {target.device}, drafter on {draft.device}")
    if tokenizer is None or draft_tokenizer is None:
        if abs(target.vocab_size - draft.vocab_size) > VOCABULARY_PADDING:
            problems.append(f"vocabulary of {target.vocab_size} v {draft.vocab_size} and no tokenizers to compare")
        return problems
    ours, theirs = ({i: t for t, i in tok.get_vocab().items()} for tok in (tokenizer, draft_tokenizer))
    differing = [i for i in ours.keys() & theirs.keys() if ours[i] != theirs[i]]
    if differing:
        i = min(differing)
        problems.append(
            f"tokenizers differ: {len(differing)} of {len(ours)} ids mean different tokens, for example {i} is {ours[i]!r} for the "
            f"target and {theirs[i]!r} for the drafter"
        )
    elif tokenizer.encode(PROBE) != draft_tokenizer.encode(PROBE):
        problems.append("tokenizers differ: the same vocabulary, but they split the same text differently")
    return problems


def check_pair(target: Runner, draft: Runner, tokenizer: Any = None, draft_tokenizer: Any = None) -> None:
    """Raises PairMismatch naming what `pair_report` found."""
    problems = pair_report(target, draft, tokenizer, draft_tokenizer)
    if problems:
        raise PairMismatch(
            f"{draft.name} cannot draft for {target.name}: {'; '.join(problems)}. A drafter must share the target's tokenizer; "
            "drafters with another tokenizer are not supported yet"
        )
