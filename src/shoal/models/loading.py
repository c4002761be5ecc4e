"""The loading of models and tokenizers, and the wrapping of a model object as a checked runner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers.activations import ACT2CLS
from transformers.pytorch_utils import Conv1D

from shoal.errors import ModelError, RequestError, UnsupportedModel
from shoal.models import formats, weights
from shoal.models.capabilities import capabilities, keeps_states
from shoal.models.executors.lean import C_DECODER
from shoal.models.fixed_shapes import make_strict
from shoal.models.gguf.gguf_runner import load_gguf, require_own_options
from shoal.models.gguf.own import own_model
from shoal.models.gguf.tokenizer import tokenizer_of
from shoal.models.kept_checks import KeptChecks, kept_checks
from shoal.models.lean.decoder import in_family
from shoal.models.mixers import use_mixers
from shoal.models.quantize import Int8Linear, quantized
from shoal.models.runner import Runner
from shoal.models.selfcheck import self_check
from shoal.models.sources import directory_of, gguf_of
from shoal.models.tensor_parallel import lead, require_ranks
from shoal.models.trimming import with_head_of
from shoal.native.build import missing
from shoal.types.load_stages import StageWatch, unwatched

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}

ROWWISE = {
    *weights.LINEARS,
    Conv1D,
    Int8Linear,
    *(made[0] if isinstance(made, tuple) else made for made in ACT2CLS.values()),
}
"""The layers that work on one token at a time: linear ones and activations."""
ASSISTANT = "_assistant"
"""The end of the model types that Transformers gives to drafters of one target."""
TOKENIZER_FILES = ("*token*", "*vocab*", "*merges*", "*.model", "*.spm", "*spiece*")
"""The patterns of the files that tokenizers of any class are read from."""


def bundled(part: str) -> Path:
    """Returns the directory of the bundled "target" or "drafter"."""
    return Path(str(resources.files("shoal"))) / "data" / "pair" / part


def wrap(
    hf: Any,
    name: str,
    attention: str = "auto",
    checked: bool = True,
    strict: bool = False,
    results: KeptChecks | None = None,
) -> Runner:
    """Makes a runner around a Transformers model object, and checks it.

    Args:
        strict: True for passes whose bits do not depend on the other rows in them
            (`shoal.models.fixed_shapes`).
        results: the kept results of checks of earlier loads; None = there are none.

    Raises:
        RequestError: the model is in training mode, or strict is on an accelerator or with another
            attention.
        UnsupportedModel: see `shoal.models.capabilities`, `selfcheck` and `fixed_shapes`.
    """
    require_eval(hf, name)
    attention_path, context = capabilities(hf, name)
    if strict and (hf.device.type != "cpu" or attention not in ("auto", "strict")):
        raise RequestError(
            f"strict works on a CPU with attention 'auto', got {attention!r} on {hf.device}"
        )
    if strict and attention_path != "interface":
        raise UnsupportedModel(f"{name} cannot be strict: it attends by its own code")
    runner = Runner(hf, name, attention_path, context, "strict" if strict else attention)
    runner.kept_checks = results or KeptChecks()
    if keeps_states(hf):
        if strict:
            raise UnsupportedModel(f"{name} cannot be strict: its layers keep recurrent states")
        use_mixers(runner)
    if checked:
        self_check(runner)
    return make_strict(runner, ROWWISE) if strict else runner


def require_eval(hf: Any, name: str) -> None:
    """Raises RequestError for a model in training mode."""
    if hf.training:
        raise RequestError(
            f"{name} is in training mode, where dropout makes its logits random: call "
            f"model.eval() first"
        )


def is_model(source: Any) -> bool:
    """Returns True if the source is a Transformers model object."""
    return isinstance(source, transformers.PreTrainedModel)


def name_of(hf: Any) -> str:
    """Returns the name of a model object: its config's name or path, or else its class."""
    return hf.config.name_or_path or type(hf).__name__


def tokenizer_at_hand(hf: Any) -> Any:
    """Returns the tokenizer at the place on this machine that a model object was loaded from.

    Returns None if there is no tokenizer.
    """
    try:
        return (
            load_tokenizer(hf.config.name_or_path, local_files_only=True)
            if hf.config.name_or_path
            else None
        )
    except RequestError:
        return None


def load_runner(
    source: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    revision: str | None = None,
    attention: str = "auto",
    quantize: str = "off",
    strict: bool = False,
    tensor_parallel: bool = False,
    trust_remote_code: bool = False,
    local_files_only: bool = False,
    target_dtype: torch.dtype | None = None,
    pack: bool = True,
    kept: Sequence[int] | None = None,
    compile: str = "auto",
    watch: StageWatch = unwatched,
) -> Runner:
    """Loads a causal LM through `from_pretrained`.

    The source is a hub id or a directory, with sharded or single-file safetensors.

    Args:
        dtype: the number format; "auto" is the checkpoint's own on an accelerator, and on a CPU the
            choice of `shoal.models.formats`.
        quantize: a format of `shoal.models.quantize`.
        strict: see `wrap`.
        tensor_parallel: True puts a part of the model in every process that torchrun started; the
            call returns in the first (see `shoal.models.tensor_parallel`).
        target_dtype: the target's format, for a drafter.
        pack: True if weights may be packed (`shoal.models.weights`).
        kept: the ids that the model's head keeps (`shoal.models.trimming`); None for all.
        compile: the setting of `shoal.models.passes`; "off" gives a GGUF file to llama.cpp.
        watch: the function that is told the stages of the load.

    Raises:
        RequestError: the model is not found, or the dtype or device is unknown.
        ModelError: the weights are unreadable, or the memory does not suffice.
        UnsupportedModel: see `shoal.models.capabilities` and `selfcheck`.
    """
    file = gguf_of(source, revision, local_files_only)
    if file is not None:
        options: dict[str, Any] = {
            "strict": strict,
            "dtype": dtype,
            "attention": attention,
            "quantize": quantize,
            "tensor_parallel": tensor_parallel,
            "kept": kept,
        }
        return _gguf_runner(file, str(source), str(device), compile, watch, options)
    place = resolve_device(device)
    hub = {
        "revision": revision,
        "trust_remote_code": trust_remote_code,
        "local_files_only": local_files_only,
    }
    config = _from(source, transformers.AutoConfig, **hub)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{source} ({config.model_type}) is not supported: it is an encoder-decoder; shoal "
            f"decodes causal language models"
        )
    if config.model_type.endswith(ASSISTANT):
        raise UnsupportedModel(
            f"{source} ({config.model_type}) is not supported: it drafts from the keys and values "
            f"that its own target shares with it, which shoal's passes do not hand out"
        )
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and not trust_remote_code:
        raise UnsupportedModel(
            f"{source} ({config.model_type}) is not supported: Transformers has no causal "
            f"language model for it"
        )
    sharding = _sharding(str(source), config, device, quantize, strict) if tensor_parallel else {}
    kind, why = resolve_dtype(dtype), f"{str(dtype).removeprefix('torch.')}: as asked"
    if dtype == "auto":
        modules = strict or quantize != "off" or compile in ("off", "modules")
        kernels = not modules and attention in ("auto", "native") and not missing()
        kernels = kernels and in_family(config)
        kind, why = _auto_dtype(config, source, place, target_dtype, bool(sharding), kernels)
    with watch("weights"):
        hf = _weights(source, config, dtype=kind, **sharding, **hub)
        known = int(hf.get_output_embeddings().weight.shape[0])
        hf = _moved(hf if kept is None else with_head_of(hf, kept, str(source)), source, place)
    with watch("packing"):
        plain = strict or not pack or quantize != "off"
        order = (
            "sharded"
            if sharding
            else weights.lay_out(hf, weights.without_packing if plain else weights.by_facts)
        )
        hf, how = quantized(hf, quantize, pack and not strict)
    whole = kept is None and not sharding and place.type == "cpu"
    checks = {"compile": compile, "quantize": quantize, "pack": pack, "dtype": kind}
    checks |= {"device": place, "attention": attention, "strict": strict}
    with watch("checking"):
        results = kept_checks(source, **checks) if whole else None
        runner = wrap(hf, str(source), attention, strict=strict, results=results)
    runner.known_ids = known
    runner.notes |= {"dtype": why, "quantize": how, "weights": order}
    return lead(runner) if sharding else runner


def _gguf_runner(
    file: Path, name: str, device: str, compile: str, watch: StageWatch, options: dict[str, Any]
) -> Runner:
    """Loads a GGUF file for the kernels in C, or, where they do not compute it, for llama.cpp.

    The kernels round no features where `dtype` is float32.
    """
    exact = resolve_dtype(options["dtype"]) == torch.float32
    require_own_options(name, **{**options, **({"dtype": "auto"} if exact else {})})
    notes: Mapping[str, str] = {"reason": f"compile={compile!r}"}
    if compile not in ("off", "modules"):
        with watch("weights"):
            hf, notes = own_model(file, device, exact)
        if hf is not None:
            with watch("checking"):
                results = kept_checks(file, exact=exact, device=device, compile=compile)
                runner = wrap(hf, name, results=results)
            runner.notes |= notes
            return runner
    runner = load_gguf(file, name, device=device, watch=watch, **options)
    runner.absent[C_DECODER] = notes["reason"]
    return runner


def _moved(hf: Any, source: str | Path, place: torch.device) -> Any:
    try:
        return hf.to(place).eval()
    except RuntimeError as error:
        raise ModelError(f"{source}: cannot be moved to {place}: {error}") from error


def _auto_dtype(
    config: Any,
    source: str | Path,
    place: torch.device,
    target_dtype: torch.dtype | None,
    sharded: bool,
    kernels: bool,
) -> tuple[torch.dtype | str, str]:
    """Returns the number format of dtype="auto", and the reason.

    The processes of a sharded model may have unlike CPUs, and must agree on a format.
    """
    if place.type != "cpu":
        return "auto", "that of the checkpoint"
    if sharded:
        return torch.float32, "float32: its processes may have unlike CPUs"
    width = getattr(config.get_text_config(), "hidden_size", None) or 0
    stored = formats.stored_format(config, source)
    return formats.number_format(stored, width, formats.cpu(), target_dtype, kernels=kernels)


def _sharding(
    name: str, config: Any, device: str | torch.device, quantize: str, strict: bool
) -> dict[str, Any]:
    """Returns the options of `from_pretrained` that share a model among torchrun's processes."""
    if strict or quantize != "off" or str(device) != "auto":
        raise RequestError(
            "tensor_parallel wants device 'auto', and goes neither with strict nor with a "
            "quantised target"
        )
    require_ranks(name, config.get_text_config())
    return {"distributed_config": transformers.distributed.DistributedConfig(tp_plan="auto")}


def _weights(source: str | Path, config: Any, **options: Any) -> Any:
    """Returns the model with its weights.

    Raises:
        RequestError: see `_from`.
        ModelError: see `_from`; or the checkpoint is incomplete.
        UnsupportedModel: the checkpoint was quantised by another library in a form that cannot be
            read here.
    """
    try:
        hf, found = _from(
            source, transformers.AutoModelForCausalLM, output_loading_info=True, **options
        )
        _check_complete(source, found["missing_keys"])
    except (RequestError, ModelError) as error:
        foreign = getattr(config, "quantization_config", None)
        if foreign is None:
            raise
        name = (
            foreign.get("quant_method")
            if isinstance(foreign, dict)
            else getattr(foreign, "quant_method", None)
        )
        raise UnsupportedModel(
            f"{source} was quantised by {getattr(name, 'value', name)}, and cannot be read "
            f"here: {error}; take the checkpoint "
            "that it was made from, which quantize='target=int8' quantises"
        ) from error
    return hf


def _check_complete(source: str | Path, missing: Iterable[str]) -> None:
    """Raises ModelError if a checkpoint lacks tensors of its model.

    Transformers fills such tensors with random numbers, and only warns.
    """
    names = sorted(missing)
    if names:
        raise ModelError(
            f"{source}: the checkpoint lacks {len(names)} of its model's tensors, for example "
            f"{names[0]}; "
            "download or export it again"
        )


def load_tokenizer(source: str | Path, **hub: Any) -> Any:
    """Returns the Transformers tokenizer of a model. Raises RequestError if there is none."""
    file = gguf_of(source, hub.get("revision"), hub.get("local_files_only", False))
    if file is not None:
        return tokenizer_of(file)
    place = directory_of(source)
    if place is not None and not any(
        found for pattern in TOKENIZER_FILES for found in place.glob(pattern)
    ):
        raise RequestError(
            f"no tokenizer in {source}: expected tokenizer.json or the files that it is made from"
        )
    return _from(source, transformers.AutoTokenizer, **hub)


def _from(source: str | Path, auto: Any, **options: Any) -> Any:
    """Calls `auto.from_pretrained` and raises every failure as one of shoal's errors."""
    what = auto.__name__.removeprefix("Auto")
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
    except (
        OSError,
        ValueError,
        KeyError,
        ImportError,
        RuntimeError,
        TypeError,
        StrictDataclassError,
    ) as error:
        first = _first_sentence(error)
        if "trust_remote_code" in str(error):
            first += " Only if you trust it: trust_remote_code=True"
        raise RequestError(f"cannot load the {what} of {source}: {first}") from error


def _first_sentence(error: Exception) -> str:
    """Returns the message of an error of Transformers, without the advice that follows it."""
    text = str(error).strip()
    line = text.splitlines()[0].rstrip() if text else ""
    whole = " ".join(text.split()) if line.endswith(":") else line
    # Other errors say little without their kind.
    complete = whole and isinstance(error, (OSError, ValueError, ImportError))
    return whole if complete else f"{type(error).__name__} {whole}".strip()


def resolve_device(device: str | torch.device) -> torch.device:
    """Returns the device of a name; "auto" is an accelerator if there is one.

    Raises:
        RequestError: the device is not available.
    """
    if str(device) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise RequestError(
            f"device {device!r} is not available here: {str(error).splitlines()[0]}"
        ) from error
    return place


def resolve_dtype(dtype: str | torch.dtype) -> torch.dtype | str:
    """Returns a torch dtype, or "auto" as it is. Raises RequestError for an unknown name."""
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    if dtype not in DTYPES:
        raise RequestError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {dtype!r}")
    return DTYPES[dtype]


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
            return tuple(value) if isinstance(value, (list, tuple)) else (int(value),)
    return None
