"""The loading of models, and the wrapping of a model object as a checked runner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.activations import ACT2CLS
from transformers.pytorch_utils import Conv1D

from shoal.errors import ModelError, RequestError, UnsupportedModel
from shoal.models import formats, weights
from shoal.models.executor import C_DECODER
from shoal.models.gguf.gguf_runner import load_gguf, require_own_options
from shoal.models.gguf.own import ROUNDED, own_model
from shoal.models.lean import in_family
from shoal.models.load_checks import KeptChecks, kept_checks
from shoal.models.load_report import StageWatch, unwatched
from shoal.models.mixers import use_mixers
from shoal.models.passes import make_strict
from shoal.models.pretrained import causal_config, load_weights, method_of, no_groups
from shoal.models.quantize import Int8Linear, cannot_save, quantized, set_apart
from shoal.models.runner import Runner
from shoal.models.selfcheck import self_check
from shoal.models.sources import gguf_of
from shoal.models.structure import capabilities, keeps_states
from shoal.models.tensor_parallel import lead, require_ranks
from shoal.models.vocabulary import with_head_of
from shoal.models.weights.groups import GroupLinear
from shoal.native.build import missing

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}

KV_FORMATS = ("off", "int8")
"""The formats of keys and values; "off" is the model's number format."""

ROWWISE = {
    *weights.LINEARS,
    Conv1D,
    Int8Linear,
    *(made[0] if isinstance(made, tuple) else made for made in ACT2CLS.values()),
}
"""The layers that work on one token at a time: linear ones and activations."""


def wrap(
    hf: Any,
    name: str,
    attention: str = "auto",
    checked: bool = True,
    strict: bool = False,
    results: KeptChecks | None = None,
    kv: str = "off",
) -> Runner:
    """Makes a runner around a Transformers model object, and checks it.

    Args:
        strict: True for passes whose bits do not depend on the other rows in them
            (`shoal.models.passes`).
        results: the kept results of checks of earlier loads; None = there are none.
        kv: "int8" for keys and values that are rounded when they are written
            (`shoal.models.cache.row_store`). The check of the model comes before, without rounding;
            fast passes are then compared with modules that round.

    Raises:
        RequestError: the model is in training mode, strict is on an accelerator or with another
            attention, or kv is unknown or on an accelerator.
        UnsupportedModel: see `shoal.models.structure`, `selfcheck` and `passes`.
    """
    require_eval(hf, name)
    _require_kv(kv, hf.device)
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
    if kv != "off":
        runner.kv = runner.notes["kv"] = kv
        runner.cache = runner.new_cache()
    return make_strict(runner, ROWWISE) if strict else runner


def require_eval(hf: Any, name: str) -> None:
    """Raises RequestError for a model in training mode."""
    if hf.training:
        raise RequestError(
            f"{name} is in training mode, where dropout makes its logits random: call "
            f"model.eval() first"
        )


def _require_kv(kv: str, place: torch.device) -> None:
    """Raises RequestError for a format of keys and values that is not computed."""
    if kv not in KV_FORMATS:
        raise RequestError(f"kv must be one of {', '.join(KV_FORMATS)}, got {kv!r}")
    if kv != "off" and place.type != "cpu":
        raise RequestError(
            f"kv={kv!r} works on a CPU, and {place} is none: leave it out, or give device='cpu'"
        )


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The options of a model that is loaded by its name.

    Attributes:
        dtype: the number format; "auto" is the checkpoint's own on an accelerator, and on a CPU the
            choice of `shoal.models.formats`.
        device: a torch device; "auto" is an accelerator if there is one.
        revision: the revision on the Hub; None for the newest.
        attention: the name of the attention method (`shoal.models.attention`).
        quantize: a format of `shoal.models.quantize`.
        strict: see `wrap`.
        tensor_parallel: True puts a part of the model in every process that torchrun started; the
            call returns in the first (see `shoal.models.tensor_parallel`).
        trust_remote_code: True if code from the model's repository may run.
        local_files_only: True to never ask the Hub.
        target_dtype: the target's format, for a drafter.
        pack: True if weights may be packed (`shoal.models.weights`).
        kept: the ids that the model's head keeps (`shoal.models.vocabulary`); None for all.
        compile: the setting of `shoal.models.passes`; "off" gives a GGUF file to llama.cpp.
        kv: the format of keys and values, see `wrap`.
    """

    dtype: str | torch.dtype = "auto"
    device: str | torch.device = "auto"
    revision: str | None = None
    attention: str = "auto"
    quantize: str = "off"
    strict: bool = False
    tensor_parallel: bool = False
    trust_remote_code: bool = False
    local_files_only: bool = False
    target_dtype: torch.dtype | None = None
    pack: bool = True
    kept: Sequence[int] | None = None
    compile: str = "auto"
    kv: str = "off"

    def may_use_kernels(self, config: Any) -> bool:
        """Returns True if the kernels in C may compute passes of a model with this config."""
        modules = self.strict or self.quantize != "off" or self.compile in ("off", "modules")
        kernels = not modules and self.attention in ("auto", "native") and not missing()
        return kernels and in_family(config)


def load_runner(
    source: str | Path, options: LoadOptions | None = None, watch: StageWatch = unwatched
) -> Runner:
    """Loads a causal LM through `from_pretrained`, or a GGUF file.

    Args:
        source: a hub id, a directory with sharded or single-file safetensors, or a GGUF file.
        options: how it is loaded; None for the defaults.
        watch: the function that is told the stages of the load.

    Raises:
        RequestError: the model is not found, or the dtype or device is unknown.
        ModelError: the weights are unreadable, or the memory does not suffice.
        UnsupportedModel: see `shoal.models.structure` and `selfcheck`.
    """
    options = options or LoadOptions()
    file = gguf_of(source, options.revision, options.local_files_only)
    if file is not None:
        return _gguf_runner(file, str(source), options, watch)
    place = resolve_device(options.device)
    _require_kv(options.kv, place)
    hub = {
        "revision": options.revision,
        "trust_remote_code": options.trust_remote_code,
        "local_files_only": options.local_files_only,
    }
    config = causal_config(source, **hub)
    sharding = _sharding(str(source), config, options) if options.tensor_parallel else {}
    kind = resolve_dtype(options.dtype)
    why = f"{str(options.dtype).removeprefix('torch.')}: as asked"
    groups = _no_groups(config, place, options)
    if groups is None and options.dtype == "auto":
        why = f"float32: {ROUNDED}"
    elif options.dtype == "auto":
        kind, why = _auto_dtype(config, source, place, options, sharded=bool(sharding))
    with watch("weights"):
        hf = load_weights(source, config, groups, dtype=kind, **sharding, **hub)
        ids = int(hf.get_output_embeddings().weight.shape[0])
        if options.kept is not None:
            hf = with_head_of(hf, options.kept, str(source))
        hf = _moved(hf, source, place)
    with watch("packing"):
        hf, notes = _packed(hf, options, sharded=bool(sharding))
    whole = options.kept is None and not sharding and place.type == "cpu"
    checks = {"compile": options.compile, "quantize": options.quantize, "pack": options.pack}
    checks |= {"dtype": kind, "device": place, "attention": options.attention}
    settings: dict[str, Any] = {"strict": options.strict, "kv": options.kv}
    with watch("checking"):
        results = kept_checks(source, **checks, **settings) if whole else None
        runner = wrap(hf, str(source), options.attention, results=results, **settings)
    runner.known_ids = ids
    if (method := method_of(config)) is not None:
        notes["weights"] += f"; quantised by {method}"
    runner.notes |= {"dtype": why, **notes}
    return lead(runner) if sharding else runner


def _no_groups(config: Any, place: torch.device, settings: LoadOptions) -> str | None:
    """Returns the reason why no layers are taken in the groups that a checkpoint has, or None."""
    obstacles = {
        f"they compute on a CPU, and {place} is none": place.type != "cpu",
        f"there are no kernels in C: {missing()}": bool(missing()),
        f"they compute in float32, and dtype is {settings.dtype}": (
            resolve_dtype(settings.dtype) not in ("auto", torch.float32)
        ),
        "strict": settings.strict,
        "tensor_parallel": settings.tensor_parallel,
        f"quantize={settings.quantize!r}": settings.quantize != "off",
        "compile='off'": settings.compile == "off",
    }
    asked_for = next((reason for reason, stands in obstacles.items() if stands), None)
    return asked_for or no_groups(config)


def _packed(hf: Any, settings: LoadOptions, *, sharded: bool) -> tuple[Any, dict[str, str]]:
    """Packs and quantises weights; returns the model and the notes of both choices."""
    if not sharded:
        set_apart(hf)
    plain = settings.strict or not settings.pack or settings.quantize != "off"
    forms = weights.without_packing if plain else weights.by_facts
    order = "sharded" if sharded else weights.lay_out(hf, forms)
    grouped = sum(isinstance(module, GroupLinear) for module in hf.modules())
    if grouped:
        order, hf.save_pretrained = f"{grouped} in groups, others {order}", cannot_save
    hf, how = quantized(hf, settings.quantize, settings.pack and not settings.strict)
    return hf, {"quantize": how, "weights": order}


def _gguf_runner(file: Path, name: str, settings: LoadOptions, watch: StageWatch) -> Runner:
    """Loads a GGUF file for the kernels in C, or, where they do not compute it, for llama.cpp.

    The kernels round no features where `dtype` is float32.
    """
    options: dict[str, Any] = {
        "strict": settings.strict,
        "dtype": settings.dtype,
        "attention": settings.attention,
        "quantize": settings.quantize,
        "tensor_parallel": settings.tensor_parallel,
        "kept": settings.kept,
    }
    device = str(settings.device)
    exact = resolve_dtype(settings.dtype) == torch.float32
    require_own_options(name, **{**options, **({"dtype": "auto"} if exact else {})})
    notes: Mapping[str, str] = {"reason": f"compile={settings.compile!r}"}
    if settings.compile not in ("off", "modules"):
        with watch("weights"):
            hf, notes = own_model(file, device, exact)
        if hf is not None:
            with watch("checking"):
                checks = {"device": device, "compile": settings.compile, "kv": settings.kv}
                results = kept_checks(file, exact=exact, **checks)
                runner = wrap(hf, name, results=results, kv=settings.kv)
            runner.notes |= notes
            return runner
    if settings.kv != "off":
        raise RequestError(
            f"{name}: kv={settings.kv!r} is for shoal's own passes, and llama.cpp computes this "
            f"file ({notes['reason']}): leave it out"
        )
    runner = load_gguf(file, name, device=device, watch=watch, **options)
    runner.absent[C_DECODER] = notes["reason"]
    return runner


def _moved(hf: Any, source: str | Path, place: torch.device) -> Any:
    try:
        return hf.to(place).eval()
    except RuntimeError as error:
        raise ModelError(f"{source}: cannot be moved to {place}: {error}") from error


def _auto_dtype(
    config: Any, source: str | Path, place: torch.device, settings: LoadOptions, *, sharded: bool
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
    kernels = settings.may_use_kernels(config)
    return formats.number_format(
        stored, width, formats.cpu(), settings.target_dtype, kernels=kernels
    )


def _sharding(name: str, config: Any, settings: LoadOptions) -> dict[str, Any]:
    """Returns the options of `from_pretrained` that share a model among torchrun's processes."""
    if settings.kv != "off":
        raise RequestError(f"kv={settings.kv!r} does not go with tensor_parallel: leave one out")
    if settings.strict or settings.quantize != "off" or str(settings.device) != "auto":
        raise RequestError(
            "tensor_parallel wants device 'auto', and goes neither with strict nor with a "
            "quantised target"
        )
    require_ranks(name, config.get_text_config())
    return {"distributed_config": transformers.distributed.DistributedConfig(tp_plan="auto")}


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
