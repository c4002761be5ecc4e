"""Checkpoints in groups of whole numbers, as GPTQ, AWQ and compressed-tensors write them, with the model that is meant."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shoal.testing import tiny_tokenizer


@dataclass(frozen=True)
class Layout:
    """How weights are stored; `size` is the inputs of a group, 0 for a group an output.

    `writer` is the program of GPTQ that `meta` names; gptqmodel takes the one from zero points in whole words. `order` is the seed
    of an order of inputs in which groups lie side by side, of act-order; 0 is that of the layer.
    """

    method: str
    bits: int = 8
    size: int = 32
    symmetric: bool = True
    form: str = "pack-quantized"
    scales: torch.dtype = torch.float16
    writer: str = ""
    order: int = 0

    @property
    def name(self) -> str:
        zeros = "symmetric" if self.symmetric else "asymmetric"
        return f"{self.method}-{self.form}-{self.bits}-{self.size or 'channel'}-{zeros}-{str(self.scales)[6:]}"

    @property
    def config(self) -> dict[str, Any]:
        if self.method == "gptq":
            return {
                "quant_method": "gptq", "bits": self.bits, "group_size": self.size or -1, "desc_act": bool(self.order),
                "sym": self.symmetric, "checkpoint_format": self.form,
                "meta": {"quantizer": [self.writer]} if self.writer else None,
            }  # fmt: skip
        if self.method == "auto-round":
            return {
                "quant_method": "auto-round", "bits": self.bits, "group_size": self.size or -1, "sym": self.symmetric,
                "packing_format": self.form, "data_type": "int", "act_bits": 16,
            }  # fmt: skip
        if self.method == "awq":
            return {
                "quant_method": "awq", "bits": self.bits, "group_size": self.size or -1, "zero_point": True, "version": self.form,
            }  # fmt: skip
        weights = {
            "num_bits": self.bits, "type": "int", "symmetric": self.symmetric, "strategy": "group" if self.size else "channel",
            "group_size": self.size or None, "actorder": "group" if self.order else None,
        }  # fmt: skip
        scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {
            "quant_method": "compressed-tensors", "format": self.form, "quantization_status": "compressed", "ignore": ["lm_head"],
            "config_groups": {"group_0": scheme},
        }  # fmt: skip


def in_words(numbers: Tensor, bits: int) -> Tensor:
    """Rows of numbers in words of 32 bits, the lowest bits first; those that fill the last word up are 0."""
    each = 32 // bits
    filled = torch.nn.functional.pad(numbers.long(), (0, -numbers.shape[1] % each)).unflatten(1, (-1, each))
    return (filled << torch.arange(each) * bits).sum(-1).to(torch.int32)  # the highest bit is the sign


def quantised(weight: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numbers [out, in] and zero points [out, groups] without a sign, scales [out, groups], and the weights that they mean."""
    wide = weight.float().view(len(weight), -1, layout.size or weight.shape[1])
    top, middle = (1 << layout.bits) - 1, 1 << layout.bits - 1
    if layout.symmetric:
        scales = (wide.abs().amax(-1) / (middle - 1)).to(layout.scales)
        zeros = torch.full_like(scales, middle, dtype=torch.long)
    else:
        low, high = wide.amin(-1).clamp(max=0), wide.amax(-1).clamp(min=0)
        scales = ((high - low) / top).to(layout.scales)
        zeros = (-low / scales.float()).round().long().clamp(0, top)
    numbers = ((wide / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, top).long()
    meant = (numbers - zeros[..., None]) * scales.float()[..., None]
    return numbers.view(weight.shape), zeros, scales, meant.view(weight.shape)


def gptq_parts(layout: Layout, numbers: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    inputs, less = numbers.shape[1], int(layout.form in ("gptq", "auto_round:auto_gptq"))
    each = 0 if layout.writer else less
    points = in_words((zeros.t() - each) % (1 << layout.bits), layout.bits)
    if layout.writer:  # the words as whole numbers
        points -= less * sum(1 << place for place in range(0, 32, layout.bits))
    return {
        "qweight": in_words(numbers, layout.bits).t().contiguous(),
        "qzeros": points,
        "scales": scales.t().contiguous(),
        "g_idx": (torch.arange(inputs) // (layout.size or inputs)).to(torch.int32),
    }


def awq_parts(_layout: Layout, numbers: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """By the published description: `pack_intweight` of the kernel GEMM takes outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight."""

    def words(by_output: Tensor) -> Tensor:  # [out, rows] to [rows, out / 8]
        made = torch.zeros(by_output.shape[1], len(by_output) // 8, dtype=torch.long)
        for output, row in enumerate(by_output.long()):
            word, place = divmod(output, 8)
            bit = 4 * (place // 2 if place % 2 == 0 else 4 + place // 2)
            made[:, word] |= row << bit
        return made.to(torch.int32)

    return {"qweight": words(numbers), "qzeros": words(zeros), "scales": scales.t().contiguous()}


def compressed_parts(layout: Layout, numbers: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    middle, parts = 1 << layout.bits - 1, {"weight_scale": scales}
    if layout.form == "pack-quantized":
        parts |= {"weight_packed": in_words(numbers, layout.bits), "weight_shape": torch.tensor(numbers.shape)}
    else:
        parts["weight"] = (numbers - middle).to(torch.int8)
    if not layout.symmetric:
        packed = layout.form == "pack-quantized"
        parts["weight_zero_point"] = (
            in_words(zeros.t(), layout.bits).t().contiguous() if packed else (zeros - middle).to(torch.int8)
        )
    return parts


def regroup(place: Path, layout: Layout, takes: Callable[[str], bool]) -> dict[str, Tensor]:
    """Quantises matrices of a checkpoint of any model, by the names of its tensors; returns the tensors that are meant."""
    write, file = gptq_parts if layout.method == "gptq" else compressed_parts, place / "model.safetensors"
    stored, meant = {}, load_file(file)
    for name, weight in list(meant.items()):
        stored[name] = weight
        if name.endswith("proj.weight") and takes(name) and weight.dim() == 2 and weight.shape[1] % 32 == 0:
            numbers, zeros, scales, meant[name] = quantised(stored.pop(name), layout)
            parts = write(layout, numbers, zeros, scales).items()
            stored |= {f"{name.removesuffix('.weight')}.{part}": each.contiguous() for part, each in parts}
    save_file(stored, file, metadata={"format": "pt"})
    config = json.loads((place / "config.json").read_text()) | {"quantization_config": layout.config}
    (place / "config.json").write_text(json.dumps(config))
    return meant


def order_of(layout: Layout, inputs: int) -> Tensor:
    """The order of inputs in which groups lie side by side."""
    return (
        torch.randperm(inputs, generator=torch.Generator().manual_seed(layout.order))
        if layout.order
        else torch.arange(inputs)
    )


def write_grouped(
    place: Path, model: Any, layout: Layout, takes: Callable[[str], bool] = lambda name: "lm_head" not in name
) -> Any:
    """Writes the checkpoint of a model, which gets the weights that are stored. Returns the model.

    Args:
        takes: True for the names of the linear layers that are quantised.
    """
    by_form = {"auto_round:auto_gptq": gptq_parts, "auto_round:auto_awq": awq_parts}
    write = {"gptq": gptq_parts, "awq": awq_parts}.get(layout.method) or by_form.get(layout.form, compressed_parts)
    stored: dict[str, Tensor] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and takes(name):
            places = order_of(layout, layer.in_features)
            numbers, zeros, scales, meant = quantised(layer.weight.detach()[:, places], layout)
            back = places.argsort()
            layer.weight.data = meant[:, back]
            parts = write(layout, numbers[:, back], zeros, scales)
            if layout.order:
                index = "g_idx" if layout.method == "gptq" else "weight_g_idx"
                parts[index] = (back // layout.size).to(torch.int32)
            stored |= {f"{name}.{part}": each for part, each in parts.items()}
            stored |= {f"{name}.weight": stored.get(f"{name}.weight", torch.empty(0))}
    model.save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    tensors = load_file(place / "model.safetensors") | stored
    kept = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    save_file(kept, place / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((place / "config.json").read_text()) | {"quantization_config": layout.config}
    (place / "config.json").write_text(json.dumps(config))
    return model
