"""The checkpoints of GPTQ, AWQ, AutoRound and compressed-tensors: whole numbers in groups.

A weight is (number - zero point) * scale, with a scale and a zero point for each output and each
group of inputs, or for each output. The product kernels in C compute that
(`shoal.models.weights.groups`), so the layers are taken as they are stored, without the packages of
these methods and without unpacking. Transformers reads everything else, and finds the tensors: the
layers stand in for its own while it does.

GPTQ: Frantar et al. 2022, arXiv 2210.17323. In its first format a stored zero point is one less
than the zero point; gptqmodel takes it from whole words, so that a zero point of 0 borrows from
the next one. compressed-tensors packs unsigned numbers as GPTQ does, along the inputs, and
zero points along the outputs; or stores signed bytes, which are 128 less. AWQ (Lin et al. 2023,
arXiv 2306.00978) packs eight numbers of 4 bits along the outputs, in the order `AWQ_OUTPUTS`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from shoal.errors import UnsupportedModel
from shoal.models.formats import headers_of, name_in_half
from shoal.models.weights.groups import GROUP, GroupLinear, Groups, ReorderedLinear

BITS = (4, 8)
"""The sizes of the numbers."""
WORD = 32
"""The bits of a word of packed numbers."""
LEAST_GROUP = 16
"""The number that the inputs of a group must be a multiple of."""
BY_GROUP = (True, "group", "dynamic")
"""The entries `actorder` of groups whose inputs do not lie side by side."""
OURS = "shoal-groups"
"""The name of the method by which Transformers finds `_GroupReader`."""
WEIGHTS = {"gptq": "qweight", "awq": "qweight", "compressed-tensors": "weight_scale"}
"""The tensor of each quantised layer by which it is known, by method."""
AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output, of eight side by side, that each 4 bits of a word of AWQ belong to, lowest first."""
AUTO_ROUND = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}
"""The method whose order of weights AutoRound takes, by its packing_format."""
PARTS = {
    "awq": ("qweight", "qzeros", "scales", "bias"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx", "bias"),
    "compressed-tensors": (
        *("weight", "weight_packed", "weight_scale", "weight_zero_point"),
        *("weight_shape", "weight_g_idx", "bias"),
    ),
}
"""The tensors of a layer, by method."""
PACKED = ("pack-quantized", "int-quantized", "naive-quantized")
"""The formats of compressed-tensors that hold whole numbers."""
DTYPES = {"I8": torch.int8, "I32": torch.int32, "I64": torch.int64} | dict.fromkeys(
    ("F16", "BF16", "F32"), torch.float32
)
"""The formats of stored tensors, and those in which Transformers gives them to us, without loss."""


def refusal(method: str, fields: Mapping[str, Any]) -> str | None:
    """Returns the reason why the kernels do not take a checkpoint; None if they do.

    Args:
        method: the name of the method that quantised it.
        fields: the `quantization_config` of config.json.
    """
    if method == "auto-round":  # arXiv 2309.05516
        kind = str(fields.get("packing_format"))
        if kind not in AUTO_ROUND or fields.get("act_bits", 16) < 16:
            return f"its packing_format {kind} is another order of weights, or quantises features"
        method = AUTO_ROUND[kind]
    words = str(fields.get("pack_dtype") or "int32").removeprefix("torch.")
    if method in ("gptq", "awq") and words != "int32":
        return f"its pack_dtype {words} is another order of weights"
    if method == "gptq":
        kind = _gptq_format(fields)
        if kind not in ("gptq", "gptq_v2"):
            return f"the checkpoint_format {kind} is another order of weights"
        bits = fields.get("bits")
        many = f"its weights have {bits} bits, and the kernels take 4 or 8"
        return None if bits in BITS else many
    if method == "awq":
        bits = fields.get("bits", 4)
        kind = str(fields.get("version") or fields.get("format") or "gemm").lower()
        if fields.get("backend") == "llm-awq":
            kind = "llm-awq"
        if kind != "gemm":
            return f"its version {kind} is another order of weights"
        return None if bits == 4 else f"its weights have {bits} bits, and AWQ's order is that of 4"
    if method != "compressed-tensors":
        return f"the kernels take no weights of {method}"
    if fields.get("quantization_status", "compressed") != "compressed":
        return f"its quantization_status is {fields['quantization_status']}"
    for name in ("kv_cache_scheme", "transform_config"):
        if fields.get(name):
            return f"it has a {name}"
    if (fields.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return "its weights are sparse"
    groups = list((fields.get("config_groups") or {}).values())
    if not groups:
        return "it names no config_groups"
    return next(filter(None, (_scheme_refusal(fields, group) for group in groups)), None)


def _gptq_format(fields: Mapping[str, Any]) -> str:
    """Returns the name of the format of GPTQ's tensors; releases name it by several entries."""
    if fields.get("is_marlin_format"):
        return "marlin"
    return str(fields.get("checkpoint_format") or fields.get("format") or "gptq").lower()


def _borrows(fields: Mapping[str, Any]) -> bool:
    """Returns True if gptqmodel wrote a checkpoint, see the top of the module."""
    writers = (fields.get("meta") or {}).get("quantizer") or ()
    names = [writers] if isinstance(writers, str) else writers
    return any(str(name).lower().startswith("gptqmodel") for name in names)


def _scheme_refusal(fields: Mapping[str, Any], group: Mapping[str, Any]) -> str | None:
    """Returns the reason why the kernels do not take a scheme of compressed-tensors, or None."""
    weights = group.get("weights") or {}
    kind, bits = weights.get("type", "int"), weights.get("num_bits")
    for name in ("input_activations", "output_activations"):
        if (inputs := group.get(name)) is not None:
            return (
                f"it is W{bits}A{inputs.get('num_bits')}: its {name} are quantised too, and the "
                f"kernels take weights alone"
            )
    if kind != "int" or bits not in BITS:
        return f"its weights are {kind} of {bits} bits, and the kernels take int of 4 or 8"
    if weights.get("strategy") not in ("group", "channel"):
        return (
            f"its scales are by {weights.get('strategy')}, and the kernels take those by group or "
            f"by channel"
        )
    layout = group.get("format") or fields.get("format")
    return None if layout in PACKED else f"its format is {layout}"


def in_groups(config: Any, method: str, fields: Mapping[str, Any], exact: bool) -> Any:
    """Returns the config by which Transformers loads a checkpoint with layers in groups.

    Args:
        method: the name of the method that quantised it.
        fields: the `quantization_config` of config.json.
        exact: True for products of features that are not rounded.
    """
    ours = copy.deepcopy(config)
    first = method == "gptq" and _gptq_format(fields) != "gptq_v2"
    if method == "auto-round":
        method = AUTO_ROUND[str(fields["packing_format"])]
        first = method == "gptq"
    ours.quantization_config = {
        "quant_method": OURS,
        "stored_by": method,
        "exact": exact,
        "zero_less": first,
        "borrows": _borrows(fields),
        "needs": _needs(method, fields),
    }
    return ours


def _needs(method: str, fields: Mapping[str, Any]) -> list[str]:
    """Returns the tensors that every quantised layer must have by the config."""
    if method == "gptq":
        return ["g_idx"] if fields.get("desc_act") else []
    groups = [group["weights"] for group in (fields.get("config_groups") or {}).values()]
    points = bool(groups) and not any(group.get("symmetric", True) for group in groups)
    order = bool(groups) and all(group.get("actorder") in BY_GROUP for group in groups)
    return ["weight_zero_point"] * points + ["weight_g_idx"] * order


@register_quantization_config(OURS)
class _GroupSettings(QuantizationConfigMixin):  # type: ignore[misc]
    """The settings of `_GroupReader`.

    Attributes:
        stored_by: the method that quantised the checkpoint.
        exact: True for products of features that are not rounded.
        zero_less: True if stored zero points are one less than the zero points.
        borrows: True if the one was taken from whole words.
        needs: the names of tensors that a layer must have.
    """

    def __init__(self, **entries: Any) -> None:
        self.quant_method = OURS
        self.stored_by, self.exact = str(entries["stored_by"]), bool(entries["exact"])
        self.zero_less, self.borrows = bool(entries["zero_less"]), bool(entries["borrows"])
        self.needs = tuple(entries["needs"])


@register_quantizer(OURS)
class _GroupReader(HfQuantizer):  # type: ignore[misc]
    """The part of the loading of Transformers that gives quantised layers their groups."""

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Iterable[str] = (), **_: Any
    ) -> None:
        method = self.quantization_config.stored_by
        stored, shapes = headers_of(checkpoint_files), {}
        modules = dict(model.named_modules())
        for name in stored:
            owner, _dot, part = name.rpartition(".")
            own = owner if owner in modules else name_in_half(f"{owner}.").removesuffix(".")
            block = ".".join(
                own.split(".")[:3]
            )  # others are of another half, or of heads beside it
            if part == WEIGHTS[method] and (own in modules or block in modules):
                names = {each: f"{owner}.{each}" for each in PARTS[method]}
                shapes[own] = {each: stored[at] for each, at in names.items() if at in stored}
        if not shapes:
            raise UnsupportedModel(f"it holds no {WEIGHTS[method]}")
        for owner, parts in shapes.items():
            layer = modules.get(owner)
            if type(layer) is not nn.Linear:
                raise UnsupportedModel(
                    f"the kernels take linear layers only, and its {owner} is none of the model's"
                )
            if layer is model.get_output_embeddings() and model.config.tie_word_embeddings:
                raise UnsupportedModel("its quantised head is tied to its embedding")
            model.set_submodule(owner, _StoredLinear(layer, parts))

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        settings = self.quantization_config
        for name, layer in list(model.named_modules()):
            if isinstance(layer, _StoredLinear):
                try:
                    groups, order = layer.groups(settings)
                except _OtherLayout as reason:
                    raise UnsupportedModel(f"of its {name} {reason}") from reason
                linear: nn.Module = GroupLinear(groups, layer.part("bias"), settings.exact)
                model.set_submodule(
                    name, linear if order is None else ReorderedLinear(linear, order)
                )
        self.remove_quantization_config(model)
        return model

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """Returns False: Transformers cannot write layers of ours."""
        return False

    @property
    def is_trainable(self) -> bool:
        """False."""
        return False


class _OtherLayout(Exception):
    """The reason why the kernels do not take a layer."""


class _StoredLinear(nn.Module):
    """The stored tensors of a quantised layer, whose place a `GroupLinear` takes after the load."""

    def __init__(self, layer: nn.Linear, parts: Mapping[str, tuple[list[int], str]]) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        for name, (shape, kind) in parts.items():
            if kind not in DTYPES:
                raise UnsupportedModel(f"the kernels do not know the format {kind} of a {name}")
            place = torch.empty(shape, dtype=DTYPES[kind], device="meta")
            self.register_parameter(name, nn.Parameter(place, requires_grad=False))

    def part(self, name: str) -> Tensor | None:
        """Returns a tensor, or None if the checkpoint has no tensor of that name."""
        part = self._parameters.get(name)
        return None if part is None else part.detach()

    def groups(self, settings: _GroupSettings) -> tuple[Groups, Tensor | None]:
        """Returns the layer's weights, and the order of inputs that puts each group side by side.

        The order is None where they lie so. Raises _OtherLayout."""
        out, inputs = self.out_features, self.in_features
        for name in settings.needs:
            if self.part(name) is None:
                raise _OtherLayout(f"the tensor {name} is not there, which its config calls for")
        if inputs % GROUP:
            raise _OtherLayout(f"the inputs are {inputs}, no multiple of {GROUP}")
        reads: dict[str, Any] = {"gptq": partial(self._of_gptq, settings), "awq": self._of_awq}
        numbers, zeros, scales, bits = reads.get(settings.stored_by, self._of_compressed)()
        if numbers.shape != (out, inputs) or len(scales) != out or inputs % scales.shape[1]:
            raise _OtherLayout(
                f"the weights are {list(numbers.shape)} with scales {list(scales.shape)}, and the "
                f"layer is {[out, inputs]}"
            )
        size = inputs // scales.shape[1]
        if size % LEAST_GROUP:
            raise _OtherLayout(f"a group has {size} inputs, no multiple of {LEAST_GROUP}")
        places = self.part("g_idx") if "g_idx" in self._parameters else self.part("weight_g_idx")
        side_by_side, order = torch.arange(inputs) // size, None
        if places is not None and not torch.equal(places.long(), side_by_side):
            order = places.long().argsort(stable=True)
            if not torch.equal(places[order].long(), side_by_side):
                raise _OtherLayout(f"the groups of inputs are not {size} inputs each (g_idx)")
            numbers = numbers[:, order]
        return groups_of(numbers, zeros, scales, bits), order

    def _of_gptq(self, settings: _GroupSettings) -> tuple[Tensor, Tensor | None, Tensor, int]:
        """Returns numbers [out, in], zero points and scales [out, groups], and the bits."""
        words, zeros, scales = map(self.part, ("qweight", "qzeros", "scales"))
        if words is None or zeros is None or scales is None:
            raise _OtherLayout("the tensors are not all there")
        bits = _bits(len(words), self.in_features)
        points = _numbers(zeros, bits)
        if settings.zero_less:
            alone = points + 1 & (1 << bits) - 1
            points = _numbers(zeros + sum(1 << place for place in range(0, WORD, bits)), bits)
            if not settings.borrows and not torch.equal(points, alone):
                raise _OtherLayout(
                    "a zero point is 0, which programs store in several ways in the "
                    "checkpoint_format gptq (gptq_v2 has one way)"
                )
        return _numbers(words.t(), bits), points.to(torch.int16).t(), scales.t(), bits

    def _of_awq(self) -> tuple[Tensor, Tensor | None, Tensor, int]:
        """Returns numbers [out, in], zero points and scales [out, groups], and the bits."""
        words, zeros, scales = map(self.part, ("qweight", "qzeros", "scales"))
        if words is None or zeros is None or scales is None:
            raise _OtherLayout("the tensors are not all there")
        numbers, points = (_in_order(_numbers(each, 4)) for each in (words, zeros))
        return numbers.t().contiguous(), points.t().to(torch.int16), scales.t(), 4

    def _of_compressed(self) -> tuple[Tensor, Tensor | None, Tensor, int]:
        """Returns numbers [out, in], zero points and scales [out, groups], and the bits."""
        words, scales = self.part("weight_packed"), self.part("weight_scale")
        stored, zeros = self.part("weight"), self.part("weight_zero_point")
        if words is not None:
            bits = _bits(words.shape[1], self.in_features)
            numbers = _numbers(words, bits)
        elif stored is not None and stored.dtype == torch.int8:
            bits, numbers = 8, _unsigned(stored, 8)
        else:
            raise _OtherLayout("the weights are no whole numbers")
        if scales is None or scales.dim() != 2:
            raise _OtherLayout("the scales are not by group or by channel")
        if zeros is None:
            return numbers, None, scales, bits
        packed = zeros.dtype == torch.int32
        wide = _numbers(zeros.t(), bits).t() if packed else _unsigned(zeros, bits)
        return numbers, wide[: self.out_features].to(torch.int16), scales, bits


def groups_of(numbers: Tensor, zeros: Tensor | None, scales: Tensor, bits: int) -> Groups:
    """Returns weights (number - zero point) * scale as groups of 32 inputs, or of 16.

    They are the same weights: the halves of a 16-bit scale times a number have room in float32. Of
    scales in float32 with zero points the last bit may be rounded.

    Args:
        numbers: [out, in] uint8, of `bits` bits.
        zeros: [out, groups] int16; None if all are the middle of the numbers.
        scales: [out, groups] float32.
        bits: 4 or 8.
    """
    middle = 1 << bits - 1
    minima = None
    if zeros is not None and not bool((zeros == middle).all()):
        minima = ((middle if bits == 8 else 0) - zeros).float() * scales
    size = numbers.shape[1] // scales.shape[1]
    times = size // (GROUP if size % GROUP == 0 else LEAST_GROUP)
    factors = [scales] if minima is None else [scales, minima]
    if all(torch.equal(each.half().float(), each) for each in factors):
        factors = [each.half() for each in factors]
    factors = [each.repeat_interleave(times, 1) for each in factors]
    signed = (numbers.to(torch.int16) - middle).to(torch.int8) if bits == 8 else numbers
    return Groups(signed, *factors)


def _bits(words: int, inputs: int) -> int:
    """Returns the bits of each number if the numbers of all inputs fill a number of words."""
    bits = words * WORD // inputs
    if bits not in BITS or bits * inputs != words * WORD:
        raise _OtherLayout(
            f"{words} words hold {inputs} weights, no whole number of 4 or 8 bits each"
        )
    return bits


def _numbers(words: Tensor, bits: int) -> Tensor:
    """Unpacks words [rows, words] int32, the lowest bits first, to [rows, numbers] uint8."""
    numbers = words.contiguous().view(torch.uint8)
    return numbers if bits == 8 else torch.stack([numbers & 15, numbers >> 4], -1).flatten(1)


def _in_order(numbers: Tensor) -> Tensor:
    """Returns numbers [rows, outputs] of AWQ's words in the order of the outputs."""
    places = torch.tensor(AWQ_OUTPUTS).argsort()
    return numbers.unflatten(1, (-1, len(AWQ_OUTPUTS)))[:, :, places].flatten(1)


def _unsigned(numbers: Tensor, bits: int) -> Tensor:
    """Returns signed numbers int8 as unsigned ones, uint8."""
    return (numbers.to(torch.int16) + (1 << bits - 1)).to(torch.uint8)
