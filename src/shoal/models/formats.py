"""The choice of a model's number format by the checkpoint's format and the CPU's instructions.

The same facts give the same format in every process. A measurement would not: the format changes
the rounding of the logits, and with it the tokens of a seed, so a choice that depends on the load
of the machine makes seeds worthless.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shoal.errors import RequestError, UnsupportedModel
from shoal.native.build import SUFFIXES, cpu_flags, missing

WIDE = 1024
"""The least hidden size for bfloat16 on a CPU where PyTorch computes the products.

Layers of 256 features take up to twice as long in bfloat16 with AVX512-BF16, because converting
activations costs more than the product; layers of 1,024 and more take half as long from 8 tokens
on. Kernels in C convert no numbers.
"""

FLAGS = {
    torch.bfloat16: {
        "amx_bf16": "AMX-BF16",
        "avx512_bf16": "AVX512-BF16",
        "sve_bf16": "SVE-BF16",
        "svebf16": "SVE-BF16",
        "bf16": "ARM-BF16",
    },
    torch.float16: {
        "amx_fp16": "AMX-FP16",
        "avx512_fp16": "AVX512-FP16",
        "fp16_arith": "ARM-FP16",
        "asimdhp": "ARM-FP16",
    },
}
"""The flags of CPU instructions that multiply a 16-bit format.

The flags are spelled as in `torch.cpu.get_capabilities` or /proc/cpuinfo.
"""


@dataclass(frozen=True)
class Cpu:
    """The facts about a machine that the choice of formats needs.

    Attributes:
        products: the instruction set that multiplies a 16-bit format, for each format that has one.
        mkl: True if MKL computes matrix products, on x86.
        packs: the formats whose weights the kernels in C or oneDNN can pack
            (`shoal.models.weights`).
    """

    products: Mapping[torch.dtype, str] = field(default_factory=dict)
    mkl: bool = False
    packs: frozenset[torch.dtype] = frozenset()

    @staticmethod
    def of(flags: Iterable[str], *, onednn: bool = True, mkl: bool = False) -> Cpu:
        """Returns the facts that follow from CPU flags.

        Args:
            flags: the CPU flags.
            onednn: True if torch has oneDNN; without it 16-bit products do not use the
                instructions.
            mkl: see `Cpu`.
        """
        usable = set(flags) if onednn else set()
        flags_of = {
            dtype: [name for flag, name in names.items() if flag in usable]
            for dtype, names in FLAGS.items()
        }
        return Cpu({dtype: names[0] for dtype, names in flags_of.items() if names}, mkl)


@lru_cache(maxsize=1)
def cpu() -> Cpu:
    """Returns the facts of this machine, which are read once per process."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    onednn = torch.backends.mkldnn.is_available()
    facts = Cpu.of(cpu_flags(), onednn=onednn, mkl=x86 and torch.backends.mkl.is_available())
    return replace(facts, packs=frozenset(filter(can_pack, (torch.float32, torch.bfloat16))))


def can_pack(dtype: torch.dtype) -> bool:
    """Returns True if weights of a format can be packed, multiplied by and given back.

    The kernels in C do it on every CPU. Versions of torch and CPUs differ: oneDNN packs no bfloat16
    where AVX-512 is missing.
    """
    if dtype in SUFFIXES and not missing():
        return True
    weight = torch.arange(-8, 8).view(4, 4).to(dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        torch.ops.mkldnn._linear_pointwise.binary(weight, weight, packed, None, "mul")
        back = packed.to_dense()
        return torch.ops.mkldnn._nbytes(packed) >= weight.nbytes and torch.equal(back, weight)
    except (RuntimeError, AttributeError):  # no such operation, or not for this format
        return False


def number_format(
    checkpoint: torch.dtype | None,
    width: int,
    cpu: Cpu,
    target: torch.dtype | None = None,
    *,
    kernels: bool = False,
) -> tuple[torch.dtype, str]:
    """Returns the format in which a model is computed on a CPU, and the reason.

    The format is bfloat16 for a bfloat16 checkpoint that the kernels in C compute, with half of the
    bytes of float32 and the same bits in any company; and for one of wide layers on a CPU with
    bfloat16 products. In all other cases it is float32, which holds the weights of any 16-bit
    checkpoint exactly. A drafter follows its target, unless that would round its weights.

    Args:
        checkpoint: the format of the stored weights; None if it is unknown.
        width: the hidden size of the model.
        cpu: the facts of the machine.
        target: the format of the target that this model drafts for; None for a target.
        kernels: True if the C decoder computes the model.
    """
    instructions, stored = cpu.products.get(torch.bfloat16), _name(checkpoint)
    if checkpoint != torch.bfloat16:
        return torch.float32, f"float32: the checkpoint is in {stored}"
    if target is not None:
        dtype = target if target == torch.bfloat16 else torch.float32
        return (
            dtype,
            f"{_name(dtype)}: the checkpoint is in {stored}, and the target in {_name(target)}",
        )
    if kernels and torch.bfloat16 in cpu.packs:
        return (
            torch.bfloat16,
            f"bfloat16: the checkpoint is in {stored}, and the kernels in C compute it",
        )
    if instructions is None:
        return torch.float32, f"float32: this CPU has no {stored} products"
    if width < WIDE:
        return (
            torch.float32,
            f"float32: layers of {width} features gain nothing from {instructions}, those of "
            f"{WIDE} do",
        )
    return (
        torch.bfloat16,
        f"bfloat16: the checkpoint is in {stored}, and this CPU has {instructions}",
    )


def stored_format(config: Any, source: str | Path) -> torch.dtype | None:
    """Returns the format of a checkpoint's weights; None if it is not stated.

    The model's Transformers config states it, or else the first tensor of the safetensors files, if
    `source` is a directory.
    """
    for owner in (config, config.get_text_config()):
        dtype = getattr(owner, "dtype", None)
        dtype = (
            getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
        )
        if isinstance(dtype, torch.dtype):
            return dtype
    for file in sorted(Path(source).expanduser().glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                names = list(tensors.keys())
                return tensors.get_tensor(names[0]).dtype if names else None
        except (SafetensorError, OSError):
            return None  # loading raises the error
    return None


def _name(dtype: torch.dtype | None) -> str:
    return "an unknown format" if dtype is None else str(dtype).removeprefix("torch.")


HALF_NAMES = {
    r"^(model\.)?language_model\.(model\.)?(?!lm_head\.)": "model.",
    r"^(model\.)?language_model\.lm_head\.": "lm_head.",
}
"""The names of the tensors of a text half: a pattern of those in the whole, and its replacement.

Transformers of several years have saved them in three ways.
"""


def name_in_half(name: str) -> str:
    """Returns the name that a tensor of a multimodal checkpoint has in the text half."""
    for pattern, replacement in HALF_NAMES.items():
        name = re.sub(pattern, replacement, name)
    return name


def headers_of(files: Iterable[str]) -> dict[str, tuple[list[int], str]]:
    """Returns the shapes and formats of all tensors of files."""
    headers = {}
    for file in files:
        if Path(file).suffix != ".safetensors":
            raise UnsupportedModel(f"{Path(file).name} is no safetensors file")
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it has no iterator
                part = tensors.get_slice(name)
                headers[name] = part.get_shape(), part.get_dtype()
    return headers


def require_serialized(method: str | None, fields: Mapping[str, Any]) -> None:
    """Raises RequestError if a config of torchao gives the name of its method alone.

    Releases before 0.10 wrote `int4_weight_only`, and Transformers reads settings as an object.

    Args:
        method: the name of the method that quantised the checkpoint.
        fields: the `quantization_config` of config.json.
    """
    kind = fields.get("quant_type")
    if method == "torchao" and not (isinstance(kind, Mapping) and [*kind] == ["default"]):
        raise RequestError(
            f"its quant_type {kind!r} is that of an older torchao, and Transformers reads settings "
            f'as an object, {{"default": ...}}'
        )


FP8_BLOCK = (128, 128)
"""The sides of a block of fp8 where the config does not say."""
FP8_SCALES = ("weight_scale_inv", "scale", "qscale_weight")
"""The names that checkpoints give to the scales of a weight's blocks."""


def require_even_blocks(
    tensors: Mapping[str, tuple[list[int], str]], fields: Mapping[str, Any]
) -> None:
    """Raises RequestError if a checkpoint in fp8 has blocks that are cut at the end of a side.

    Where Transformers writes such weights out, it parts a side into as many equal blocks as there
    are scales.

    Args:
        tensors: the shapes and formats of its tensors.
        fields: the `quantization_config` of config.json.
    """
    sizes = fields.get("weight_block_size", FP8_BLOCK) or ()
    for name, (scales, _) in tensors.items():
        owner, _dot, part = name.rpartition(".")
        weight = f"{owner}.weight" if part in FP8_SCALES else name.removesuffix("_scale_inv")
        if weight == name or weight not in tensors or len(scales) < len(FP8_BLOCK):
            continue
        shape = tensors[weight][0]
        for side, count, size in zip(shape[-2:], scales[-2:], sizes, strict=False):
            if 1 < count < side and (count - 1) * size < side < count * size:
                raise RequestError(
                    f"blocks of {list(sizes)} do not part its {weight} of {shape} evenly, and "
                    f"Transformers would read {count} blocks of {side / count:g}"
                )
