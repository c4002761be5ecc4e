"""The method `save_pretrained` of a model whose weights do not lie as Transformers expects."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shoal.models.weights.parameter import PackedWeight


class SavePretrained:
    """The method `save_pretrained` of a model with packed or input-major weights.

    An instance is an attribute of the model. Transformers compares the addresses of tied tensors if
    they are contiguous, and raises otherwise; it copies all others itself. Packed tensors are
    unpacked here, and each tied tensor is copied once, so the file holds it once and in the usual
    order. The model is not touched. The reference to the model is weak: no cycle keeps the weights
    alive. `__reduce__` binds a deep copy or an unpickled model to itself.
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
        """Saves the model; arguments and errors are those of Transformers."""
        hf: Any = self._hf()
        state = contiguous_ties(unpacked(hf.state_dict() if state_dict is None else state_dict))
        type(hf).save_pretrained(hf, save_directory, is_main_process, state, *args, **more)

    def __reduce__(self) -> Any:
        return SavePretrained, (self._hf(),)


def unpacked(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries with ordinary tensors in place of packed weights.

    Those of one matrix are parts of one tensor.
    """
    packed = {name: tensor for name, tensor in state.items() if isinstance(tensor, PackedWeight)}
    dense = {matrix: matrix.dense() for matrix in {tensor.matrix for tensor in packed.values()}}
    return {**state, **{name: tensor.of(dense[tensor.matrix]) for name, tensor in packed.items()}}


def contiguous_ties(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries with contiguous copies of tensors that share their memory with others.

    Such tensors are tied, or rows of one matrix; those that are contiguous already stay. A tied
    tensor is replaced by the same copy for all its names.
    """
    sharing: dict[int, list[str]] = {}
    for name, tensor in state.items():
        if isinstance(tensor, Tensor):
            sharing.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    names = [
        name
        for group in sharing.values()
        if len(group) > 1
        for name in group
        if not state[name].is_contiguous()
    ]
    places = {
        name: (state[name].data_ptr(), state[name].shape, state[name].stride()) for name in names
    }
    copies = {place: state[name].contiguous() for name, place in places.items()}
    return {**state, **{name: copies[place] for name, place in places.items()}}
