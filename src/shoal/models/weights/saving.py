"""`save_pretrained` of a model whose weights lie in memory otherwise than Transformers expects."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shoal.models.weights.parameter import PackedWeight


class SavePretrained:
    """Transformers' `save_pretrained` for a model with packed or input-major weights, as an attribute of that model.

    Transformers compares the addresses of tied tensors if they are contiguous, and raises otherwise; it copies all others itself.
    Packed tensors are unpacked here, and each tied one copied once, so the file holds it once and in the usual order. The model is
    not touched. The reference is weak: no cycle keeps the weights alive. `__reduce__` binds a deep copy or an unpickled model to
    itself.
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
        state = contiguous_ties(unpacked(hf.state_dict() if state_dict is None else state_dict))
        type(hf).save_pretrained(hf, save_directory, is_main_process, state, *args, **more)

    def __reduce__(self) -> Any:
        return SavePretrained, (self._hf(),)


def unpacked(state: Mapping[str, Any]) -> dict[str, Any]:
    """The same entries; packed weights are ordinary tensors, those of one matrix parts of one tensor."""
    packed = {name: tensor for name, tensor in state.items() if isinstance(tensor, PackedWeight)}
    dense = {matrix: matrix.dense() for matrix in {tensor.matrix for tensor in packed.values()}}
    return {**state, **{name: tensor.of(dense[tensor.matrix]) for name, tensor in packed.items()}}


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
