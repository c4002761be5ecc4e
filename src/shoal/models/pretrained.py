"""The checkpoints of Transformers: config, weights, tokenizer, and the ends that they name.

Every failure of Transformers is raised as one of shoal's errors.

Of checkpoints whose weights another library quantised Transformers computes some, writes others out
in a floating-point format, or asks for a package. If it does not see that the weights are
quantised, it reads their whole numbers as the weights themselves, and ignores the scales. Such
checkpoints are refused here by name.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils import cached_file

from shoal.config import PARAMETERS
from shoal.errors import ModelError, RequestError, UnsupportedModel
from shoal.models.formats import HALF_NAMES, headers_of, require_even_blocks, require_serialized
from shoal.models.gguf.tokenizer import tokenizer_of
from shoal.models.grouped_checkpoints import PARTS, in_groups, refusal
from shoal.models.sources import directory_of, gguf_of

INSTEAD = "take the checkpoint that it was made from, which quantize='target=int8' quantises"
SCALES = re.compile(
    r"(\.weight_?(scale|zero_point|packed|shape|global_scale)|\.(qweight|qzeros|scales|g_idx|SCB)$"
    r"|\.weight\.(absmax|quant_map|quant_state)|_(blocks|scales)$)"
)
"""The names of tensors that stand beside, or in place of, quantised weights."""


def checkpoint_of(hf: Any) -> Path | None:
    """Returns the directory of a model's checkpoint; None if it is not on this machine."""
    name = str(getattr(hf.config, "name_or_path", ""))
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    try:
        commit = getattr(hf.config, "_commit_hash", None)
        config = cached_file(name, "config.json", local_files_only=True, revision=commit)
    except (OSError, ValueError):
        return None
    return None if config is None else Path(config).parent


def method_of(config: Any) -> str | None:
    """Returns the name of the method that quantised a checkpoint; None if its config names none.

    Args:
        config: the model's config from Transformers.
    """
    fields = _quantization(config)
    if fields is None:
        return None
    name = fields.get("quant_method")
    if name is None and any(fields.get(f"load_in_{bits}bit") for bits in (4, 8)):
        name = "bitsandbytes"
    return str(getattr(name, "value", name or "an unnamed method"))


def _quantization(config: Any) -> Mapping[str, Any] | None:
    """Returns the entry about quantised weights, of the model or of its text half, or None."""
    text = config.get_text_config(decoder=True)
    entry = getattr(config, "quantization_config", None) or getattr(
        text, "quantization_config", None
    )
    return entry if entry is None or isinstance(entry, dict) else vars(entry)


def no_groups(config: Any) -> str | None:
    """Returns the reason why the kernels in C do not take a checkpoint's weights; None if they do.

    Args:
        config: the model's config from Transformers.
    """
    method = method_of(config)
    return "it is not quantised" if method is None else refusal(method, _quantization(config) or {})


def require_known_method(source: object, config: Any) -> None:
    """Raises UnsupportedModel if Transformers does not know the method: it would pass over it."""
    name = method_of(config)
    methods = {
        one.removesuffix("_4bit").removesuffix("_8bit") for one in AUTO_QUANTIZATION_CONFIG_MAPPING
    } - {"gguf"}  # Transformers reads such files, and no tensors beside a config.json
    if name is not None and name not in methods:
        raise UnsupportedModel(
            f"{source} was quantised by {name}, which Transformers does not read: {INSTEAD}"
        )


def require_no_scales(source: object, method: str | None, hf: Any, left: Iterable[str]) -> None:
    """Raises UnsupportedModel if a model without a quantiser has left scales in its checkpoint.

    Args:
        source: the checkpoint.
        method: the name of the method in its config, see `method_of`.
        hf: the loaded model.
        left: the names of tensors that Transformers has not used.
    """
    names = sorted(name for name in left if SCALES.search(name))
    if names and getattr(hf, "hf_quantizer", None) is None:
        reason = (
            "its config.json has no quantization_config that says how to read them"
            if method is None
            else f"Transformers reads no such tensors of {method}"
        )
        raise UnsupportedModel(
            f"{source} holds quantised weights ({names[0]} and {len(names) - 1} more such "
            f"tensors), and {reason}: {INSTEAD}"
        )


PROBLEMS = (LookupError, TypeError, AttributeError, ValueError, RuntimeError, AssertionError)
"""The errors that a model's modules end in where they do not compute."""
HALVES = ("gemma3", "gemma4", "internvl", "llama4", "llava", "mistral3")
"""The model types of multimodal checkpoints whose text half has a class of its own."""
ASSISTANT = "_assistant"
"""The end of the model types that Transformers gives to drafters of one target."""
BLOCKS = re.compile(r"dflash|dspark", re.IGNORECASE)
"""The names of published drafters of blocks, in the names of their classes and config entries."""
TOKENIZER_FILES = ("*token*", "*vocab*", "*merges*", "*.model", "*.spm", "*spiece*")
"""The patterns of the files that tokenizers of any class are read from."""


def is_model(source: Any) -> bool:
    """Returns True if the source is a Transformers model object."""
    return isinstance(source, transformers.PreTrainedModel)


def name_of(hf: Any) -> str:
    """Returns the name of a model object: its config's name or path, or else its class."""
    return hf.config.name_or_path or type(hf).__name__


def causal_config(source: str | Path, **hub: Any) -> Any:
    """Returns the config of a causal language model.

    Raises:
        RequestError: see `from_pretrained`.
        UnsupportedModel: the model is of another kind.
    """
    config = from_pretrained(source, transformers.AutoConfig, **hub)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{source} ({config.model_type}) is not supported: it is an encoder-decoder; shoal "
            f"decodes causal language models"
        )
    reason = _own_target_reason(config)
    if reason is not None:
        raise UnsupportedModel(f"{source} ({config.model_type}) is not supported: {reason}")
    if (
        type(text_half(config) or config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        and not hub["trust_remote_code"]
    ):
        raise UnsupportedModel(
            f"{source} ({config.model_type}) is not supported: Transformers has no causal "
            f"language model for it"
        )
    return config


def text_half(config: Any) -> Any | None:
    """Returns the config of the text half of a multimodal checkpoint; None for other checkpoints.

    It has the whole's number format and ties.
    """
    if config.model_type not in HALVES:
        return None
    half = copy.deepcopy(config.get_text_config(decoder=True))
    for name in ("dtype", "tie_word_embeddings", "quantization_config"):
        value = getattr(config, name, None)
        if value is not None:
            setattr(half, name, value)
    return half


def _own_target_reason(config: Any) -> str | None:
    """Returns the reason why a drafter of one target is not taken; None for other models."""
    entries = config.to_dict()
    classes = entries.get("architectures") or ()
    block = any(BLOCKS.search(name) for name in (*classes, *entries))
    assistant = config.model_type.endswith(ASSISTANT)
    if block and any("dspark" in name.lower() for name in classes):
        return (
            "it is a drafter of the kind DSpark, and no model by itself: take dflash:DIR with a "
            "checkpoint of that kind for the same target, or suffix, which needs no files"
        )
    if block or (assistant and "target_layer_ids" in entries):
        return (
            "it drafts a block of tokens in one pass from hidden states of its own target, and is "
            "no model by itself: download it and give its directory as the drafter, dflash:DIR"
        )
    if assistant:
        return (
            "it drafts from the keys and values of its own target, and is no model by itself: "
            "download it and give its directory as the drafter, assistant:DIR"
        )
    return None


def load_weights(source: str | Path, config: Any, groups: str | None = None, **options: Any) -> Any:
    """Returns the model with its weights.

    Args:
        groups: the reason why the layers of a checkpoint of `shoal.models.grouped_checkpoints` are
            not taken in groups; None if they are. Features are rounded then if there is no `dtype`.

    Raises:
        RequestError: see `from_pretrained`.
        ModelError: see `from_pretrained`; or the checkpoint is incomplete.
        UnsupportedModel: the checkpoint was quantised by another library in a form that cannot be
            read here.
    """
    require_known_method(source, config)
    method, half = method_of(config), text_half(config)
    if half is not None:
        options |= {"config": half, "key_mapping": HALF_NAMES}
    grouped = method in (*PARTS, "auto-round")
    why = f"shoal's own kernels do not take it ({groups}), and " if grouped else ""
    if groups is None and method is not None:
        why, exact = "", options["dtype"] == torch.float32
        ours = in_groups(half or config, method, _quantization(config) or {}, exact)
        options |= {"config": ours, "dtype": torch.float32}
    try:
        require_serialized(method, _quantization(config) or {})
        with nullcontext() if half is None else _without_report():
            hf, report = from_pretrained(
                source, transformers.AutoModelForCausalLM, output_loading_info=True, **options
            )
        _check_complete(source, report["missing_keys"])
        place = checkpoint_of(hf)
        if method == "fp8" and place and getattr(hf, "hf_quantizer", None) is None:
            stored = headers_of(map(str, place.glob("*.safetensors")))
            require_even_blocks(stored, _quantization(config) or {})
    except (RequestError, ModelError) as error:
        if method is None:
            raise
        raise UnsupportedModel(
            f"{source} was quantised by {method}, and cannot be read here: {why}{error}; {INSTEAD}"
        ) from error
    require_no_scales(source, method, hf, report["unexpected_keys"])
    if hasattr(hf, "ct_decompress_hook"):
        _write_out(hf)
    return hf


def _write_out(hf: Any) -> None:
    """Writes out the weights of compressed-tensors; its package would do so in the first pass.

    There it would exchange the parameters of all modules, of which some are packed by then.
    """
    decompress = import_module("compressed_tensors.compressors").decompress_module
    compressor = hf.hf_quantizer.compressor
    for module in hf.modules():
        decompress(module, compressor.force_compression_format)
    compressor.remove_decompression_hook(hf)


@contextmanager
def _without_report() -> Iterator[None]:
    """Keeps Transformers from listing the tensors of the other half, which is not loaded."""
    logger = logging.getLogger("transformers.modeling_utils")

    def other(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)


def _check_complete(source: str | Path, missing: Iterable[str]) -> None:
    """Raises ModelError if a checkpoint lacks tensors, which Transformers would make random."""
    names = sorted(missing)
    if names:
        raise ModelError(
            f"{source}: the checkpoint lacks {len(names)} of its model's tensors, for example "
            f"{names[0]}; download or export it again"
        )


def load_tokenizer(source: str | Path, **hub: Any) -> Any:
    """Returns the Transformers tokenizer of a model. Raises RequestError if there is none."""
    file = gguf_of(source, hub.get("revision"), hub.get("local_files_only", False))
    if file is not None:
        return tokenizer_of(file)
    place = directory_of(source)
    if place is not None and not any(
        each for pattern in TOKENIZER_FILES for each in place.glob(pattern)
    ):
        raise RequestError(
            f"no tokenizer in {source}: expected tokenizer.json or the files that it is made from"
        )
    return from_pretrained(source, transformers.AutoTokenizer, **hub)


def tokenizer_at_hand(hf: Any) -> Any:
    """Returns the tokenizer from the place on this machine that a model came from, or None."""
    try:
        if hf.config.name_or_path:
            return load_tokenizer(hf.config.name_or_path, local_files_only=True)
        return None
    except RequestError:
        return None


def from_pretrained(source: str | Path, auto: Any, **options: Any) -> Any:
    """Calls `auto.from_pretrained` and raises every failure as one of shoal's errors."""
    kind = auto.__name__.removeprefix("Auto")
    try:
        return auto.from_pretrained(str(directory_of(source) or source), **options)
    except SafetensorError as error:
        raise ModelError(
            f"{source}: the safetensors file is damaged ({error}); download or export it again"
        ) from error
    except MemoryError as error:
        raise ModelError(
            f"{source}: out of memory while loading; try dtype='bfloat16' or a smaller model"
        ) from error
    except (*PROBLEMS, OSError, ImportError, StrictDataclassError) as error:
        first = _first_sentence(error)
        if "trust_remote_code" in str(error):
            first += " Only if you trust it: trust_remote_code=True"
        raise RequestError(f"cannot load the {kind} of {source}: {first}") from error


def _first_sentence(error: Exception) -> str:
    """Returns the message of an error of Transformers, without the advice that follows it."""
    text = str(error).strip()
    line = text.splitlines()[0].rstrip() if text else ""
    whole = " ".join(text.split()) if line.endswith(":") else line
    # Other errors say little without their kind.
    complete = whole and isinstance(error, (OSError, ValueError, ImportError))
    return whole if complete else f"{type(error).__name__} {whole}".strip()


def eos_ids(hf: Any, tokenizer: Any) -> tuple[int, ...]:
    """Returns the token ids that end a text.

    The sources are the model's generation config first, then its config, then the tokenizer. The
    tokenizer's end also ends the turns of its chat template, whatever the config names.
    """
    own = getattr(tokenizer, "eos_token_id", None)
    ends = named_eos(hf) or ()
    if own is None or (ends and not getattr(tokenizer, "chat_template", None)):
        return ends
    return (*ends, *({int(own)} - {*ends}))


def named_eos(hf: Any) -> tuple[int, ...] | None:
    """Returns the ends that the model's configs name; None if they name none."""
    for owner in (getattr(hf, "generation_config", None), hf.config):
        value = getattr(owner, "eos_token_id", None)
        if value is not None:
            ends = value if isinstance(value, (list, tuple)) else [value]
            return tuple(int(end) for end in ends if end is not None)
    return None


def own_sampling(hf: Any) -> dict[str, Any]:
    """Returns the sampling parameters that a model's generation config sets, as vLLM reads them."""
    config: Any = getattr(hf, "generation_config", None)
    values = config.to_diff_dict() if hasattr(config, "to_diff_dict") else {}
    names = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")
    return {name: values[name] for name in names if PARAMETERS[name].allows(values.get(name))}
