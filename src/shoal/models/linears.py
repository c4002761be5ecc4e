"""The order of a model's weights in memory.

A decoding pass is small products [tokens, in] x [in, out]. Libraries keep weights as [out, in], and MKL repacks them in every
float32 product of more than about ten tokens, which can cost more than the product. Kept input-major they need no repacking: the
same numbers under the same shape, only the strides change. The order follows facts and no measurement: it changes the rounding.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.models import formats


def transposed(weight: Tensor) -> Tensor:
    """The same matrix [out, in], laid out in memory as [in, out]."""
    return weight.t().contiguous().t()


@torch.no_grad()
def lay_out(hf: Any) -> str:
    """Keeps the float32 weights of a model's linear layers input-major where MKL multiplies them; returns what was done.

    Changes strides only, of a model that is ours: shapes, values and names stay, tied weights stay tied. `save_pretrained` of the
    model keeps working (see `SavePretrained`), also through `push_to_hub`.
    """
    layers = [layer for layer in hf.modules() if type(layer) is nn.Linear and layer.weight.device.type == "cpu"]
    weights = {id(layer.weight): layer.weight for layer in layers if layer.weight.dtype == torch.float32}.values()
    if not weights or not formats.cpu().mkl:
        return "output-major"
    for weight in weights:
        weight.data = transposed(weight.data)
    if hasattr(hf, "save_pretrained"):
        hf.save_pretrained = SavePretrained(hf)
    return "input-major"


class SavePretrained:
    """Transformers' `save_pretrained` for a model with input-major weights, as an attribute of that model.

    Transformers compares tied tensors only if they are contiguous, and raises otherwise; it copies all others itself. Each tied
    tensor is copied here once, so the file holds it once and in the usual order. The model is not touched. The reference is weak:
    no cycle keeps the weights alive. `__reduce__` binds a deep copy or an unpickled model to itself.
    """

    def __init__(self, hf: Any) -> None:
        self._hf = weakref.ref(hf)

    def __call__(
        self,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        *args: Any,
        **more: Any,
    ) -> None:
        """Arguments and errors are those of Transformers."""
        hf: Any = self._hf()
        state = contiguous_ties(hf.state_dict() if state_dict is None else state_dict)
        type(hf).save_pretrained(hf, save_directory, is_main_process, state, *args, **more)

    def __reduce__(self) -> Any:
        return SavePretrained, (self._hf(),)


def contiguous_ties(state: Mapping[str, Any]) -> dict[str, Any]:
    """The same entries; tied tensors that are not contiguous are replaced by one contiguous copy for all their names."""
    shared: dict[Any, list[str]] = {}
    for name, tensor in state.items():
        if isinstance(tensor, Tensor) and not tensor.is_contiguous():
            shared.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), []).append(name)
    copies = {
        name: copy
        for names in shared.values()
        if len(names) > 1
        for copy in [state[names[0]].contiguous()]
        for name in names
    }
    return {**state, **copies}
