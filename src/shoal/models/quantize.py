"""A copy of a model with weights in 8 bits: linear layers in int8 (CPU, CUDA) or fp8 (CUDA).

All other tensors are shared with the model. A quantised *target* is another model: lossless
decoding is lossless with respect to it. A quantised *drafter* proposes a little less well, and
costs no exactness at all; but it is never chosen by default, because other drafts mean other tokens
for a seed under the rule `rejection`, and whether it is faster depends on the layers' sizes.
Activations keep their format, except with torchao's fp8.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import RequestError
from shoal.models.attention.fused import available
from shoal.models.layers import WeightOnly8Bit
from shoal.models.weights import LINEARS
from shoal.models.weights.layers import byte_packing, joined, starts
from shoal.models.weights.matrix import PACKED
from shoal.models.weights.panels import Int8Matrix, plain_product
from shoal.models.weights.parameter import PackedWeight

FORMATS = ("off", "int8", "fp8")
ROLES = ("target", "draft")
OF_CUDA = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""The formats on CUDA that quantise the weights alone, for shoal's own product kernel."""


class Int8Linear(nn.Module):
    """A layer y = x Wᵀ + b with int8 weights and one scale per output.

    Attributes:
        weight: [out, in] int8, packed for the kernel in C if there is one.
        scales: [out] float32.
        bias: [out] or None.
    """

    def __init__(self, layer: nn.Linear, packing: type[Int8Matrix] | None = None) -> None:
        super().__init__()
        weight, scales = _in_bytes(layer.weight.detach())
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = layer.bias
        self.in_features, self.out_features = layer.in_features, layer.out_features
        if packing is not None:
            weight = PackedWeight.rows(packing(weight, self.scales, self.bias, PACKED))
        self.weight = nn.Parameter(weight, requires_grad=False)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Loads weights in bytes or in a floating-point format.

        Thus the weights of a policy in training can be loaded into its copy in bytes.
        """
        if (dense := state_dict.get(f"{prefix}weight")) is not None and dense.is_floating_point():
            weight, scales = _in_bytes(dense.to(self.scales.device))
            state_dict = {**state_dict, f"{prefix}weight": weight, f"{prefix}scales": scales}
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        """Computes [..., out] of [..., in], in the dtype of `x`."""
        weight: Any = self.weight
        rows = x.reshape(-1, x.shape[-1])
        if type(weight) is PackedWeight:
            y = weight.matrix.linear(rows)
            if y.shape[1] > self.out_features:
                y = y.narrow(1, weight.start or 0, self.out_features).contiguous()
        else:
            y = plain_product(rows, weight, self.scales, self.bias).to(x.dtype)
        return y.view(*x.shape[:-1], self.out_features)


def _in_bytes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns weights [out, in] as int8, and their scales [out] float32."""
    wide = weight.float()
    scales = wide.abs().amax(dim=1).clamp(min=1e-12) / 127
    return (wide / scales[:, None]).round().to(torch.int8).contiguous(), scales


@torch.no_grad()
def byte_matrix_of(layers: Sequence[Int8Linear]) -> Int8Matrix:
    """Returns the common matrix of the layers, like `shoal.models.weights.matrix_of` for int8.

    From then on weights, scales and biases of the layers are rows of common ones. A bias that
    another model has as well stays that model's.

    Raises:
        ValueError: some layers have a bias and some have none, or their inputs differ.
    """
    if len({(layer.in_features, layer.bias is None) for layer in layers}) > 1:
        raise ValueError("layers of one matrix need the same input, and all a bias or none")
    weights: list[Any] = [layer.weight for layer in layers]
    matrix: Int8Matrix | None = getattr(weights[0], "matrix", None)
    outputs = sum(layer.out_features for layer in layers)
    if (
        matrix is not None
        and matrix.shape[0] == outputs
        and all(
            type(weight) is PackedWeight and weight.matrix is matrix and weight.start == start
            for weight, start in zip(weights, starts(layers), strict=True)
        )
    ):
        return matrix
    scales = joined([layer.scales.detach() for layer in layers])
    bias = None if layers[0].bias is None else joined([layer.bias.detach() for layer in layers])
    if matrix is None:
        weight = joined([weight.detach() for weight in weights])
        matrix = Int8Matrix(weight, scales, bias)
    else:
        weight = torch.cat([weight.detach().clone() for weight in weights])
        matrix = type(matrix)(weight, scales, bias, PACKED)
    for layer, start in zip(layers, starts(layers), strict=True):
        rows = slice(start, start + layer.out_features)
        layer.weight.data = (
            weight[rows]
            if matrix.form != PACKED
            else PackedWeight.rows(matrix, rows.start, rows.stop)
        )
        layer.scales.data = scales[rows]
        if bias is not None and layer.bias.data_ptr() != bias[rows].data_ptr():
            layer.bias = nn.Parameter(bias[rows], requires_grad=False)
    return matrix


def parse(text: str | Mapping[str, str]) -> dict[str, str]:
    """Parses the formats by role.

    Examples are "target=int8,draft=int8", "off" (both, the default), or a mapping.

    Raises:
        RequestError: a role or a format is unknown.
    """
    forms = dict.fromkeys(ROLES, "off")
    if isinstance(text, str) and text != "off":
        parts = (part.partition("=") for part in text.split(","))
        forms |= {role.strip(): form.strip() for role, _, form in parts}
    elif isinstance(text, Mapping):
        forms |= text
    if not forms.keys() <= set(ROLES) or not set(forms.values()) <= set(FORMATS):
        raise RequestError(
            f"quantize must be off, or target=FORMAT,draft=FORMAT with int8, fp8 or off, got "
            f"{text!r}"
        )
    return forms


def quantized(hf: Any, form: str, pack: bool = True) -> tuple[Any, str]:
    """Makes a copy of a Transformers model with 8-bit linear layers.

    Returns the copy, or the model itself if `form` is "off", and the name of the format.

    Args:
        form: "int8", "fp8" or "off".
        pack: True if int8 weights may be packed on a CPU (see `shoal.models.loading.LoadOptions`).

    Raises:
        RequestError: the device cannot compute the format.
    """
    if form == "off":
        return hf, "off"
    if hf.device.type == "cpu":
        if form != "int8":
            raise RequestError(
                f"quantize: {form} needs a CUDA device of compute capability 8.9 or more; on a "
                f"CPU take int8"
            )
        return _int8_copy(hf, byte_packing() if pack else None), "int8"
    if hf.dtype == torch.float32:
        raise RequestError(
            f"quantize: {form} on CUDA needs a model in bfloat16 or float16, got float32; load it "
            f"with dtype='bfloat16' (--dtype bfloat16)"
        )
    if form == "fp8" and torch.cuda.get_device_capability(hf.device) < (8, 9):
        raise RequestError(
            f"quantize: {torch.cuda.get_device_name(hf.device)} has no fp8; take int8"
        )
    if available(torch.empty(0, device=hf.device, dtype=hf.dtype)):
        return _weight_only(hf, OF_CUDA[form]), form
    return _with_torchao(hf, form), form


def _copy(hf: Any) -> Any:
    """Copies the modules around the same tensors, so that the owner's model stays as it is."""
    tensors = [*hf.parameters(), *hf.buffers()]
    return copy.deepcopy(hf, {id(tensor): tensor for tensor in tensors})


def cannot_save(*_: Any, **__: Any) -> None:
    """Raises RequestError; it replaces `save_pretrained` of a quantised copy.

    `from_pretrained` could not load the copy's tensors.
    """
    raise RequestError(
        "a model that shoal quantised cannot be saved: load it with quantize='off' and save that"
    )


def _int8_copy(hf: Any, packing: type[Int8Matrix] | None) -> Any:
    return with_layers(hf, lambda layer: Int8Linear(layer, packing))


def _weight_only(hf: Any, form: torch.dtype) -> Any:
    """Makes a copy for CUDA with shoal's own product kernel, as fast as reading the weights."""
    return with_layers(hf, lambda layer: WeightOnly8Bit(layer, form))


def with_layers(
    hf: Any, make: Callable[[Any], nn.Module], kinds: tuple[type, ...] = LINEARS
) -> Any:
    """Makes a copy of the model in which other layers replace the linear layers of some types."""
    ours = _copy(hf)
    ours.save_pretrained = cannot_save
    for parent in list(ours.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in kinds:
                setattr(parent, name, make(child))
    return ours.eval()


def _with_torchao(hf: Any, form: str) -> Any:
    """Makes a copy for CUDA without Triton, with torchao's kernels.

    With "fp8" the weights and activations are in 8 bits, with "int8" the weights only.
    """
    try:
        from torchao.quantization import (
            Float8DynamicActivationFloat8WeightConfig,
            Int8WeightOnlyConfig,
            PerRow,
            quantize_,
        )
    except ImportError as error:
        raise RequestError(
            "quantize on CUDA needs Triton, or torchao: pip install '.[quantize]'"
        ) from error
    config = (
        Int8WeightOnlyConfig()
        if form == "int8"
        else Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
    )
    ours = _copy(hf)
    quantize_(ours, config)
    ours.save_pretrained = cannot_save
    return ours


class ForeignLinear(nn.Linear):
    """A linear layer that another library computes, by its weight or by a forward of the layer.

    Weights of torchao have a product of their own and, for most, no bytes in the usual order.
    compressed-tensors gives each layer a forward of its own. Only the module computes with them.
    """


def set_apart(hf: nn.Module) -> None:
    """Makes a `ForeignLinear` of each linear layer that another library computes."""
    for module in hf.modules():
        if type(module) is nn.Linear and (
            type(module.weight) not in (nn.Parameter, Tensor) or "forward" in vars(module)
        ):
            module.__class__ = ForeignLinear


def rounds_features(hf: nn.Module) -> bool:
    """Returns True if other libraries' layers may round features to bytes.

    bitsandbytes' 8 bits do, and some of torchao's formats.
    """
    return any(
        isinstance(each, ForeignLinear) or type(each).__name__ == "Linear8bitLt"
        for each in hf.modules()
    )
