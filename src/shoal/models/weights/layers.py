"""The linear layers of a model that is ours, in the forms that its CPU multiplies fastest.

`save_pretrained` writes such weights as Transformers expects them.

The form of weights and their packing are chosen by facts. The form changes the rounding, and with
it the tokens of a seed, so no clock decides.

Panels cost less per call and read the weights once, in order. oneDNN packs weights where there is
no C compiler.

Layers with the same input may be fused: one matrix and product in place of several.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.models import formats
from shoal.models.weights.matrix import AS_IS, INPUT_MAJOR, PACKED, Key, Matrix, input_major
from shoal.models.weights.panels import PANEL, Int8Matrix, Int8PanelMatrix, PanelMatrix
from shoal.models.weights.parameter import PackedWeight, parameter_of
from shoal.native.build import SUFFIXES, missing


@torch.no_grad()
def matrix_of(layers: Sequence[nn.Linear]) -> Matrix:
    """Returns the matrix by which layers with the same input compute.

    It is the matrix of the one layer, or the matrices of all layers, one below the other. Several
    layers get a common matrix, packed if the weight of the first is. From then on their weights and
    biases are rows of the matrix, so nothing is stored twice, and a write into them is a write into
    the matrix. `matches` tells whether the layers still have the matrix. The weights of several
    layers must not be tied to others.

    Raises:
        ValueError: some have a bias and some have none, or unlike inputs or dtypes.
    """
    if len({(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in layers}) > 1:
        raise ValueError(
            "layers of one matrix need the same input, the same dtype, and all a bias or none"
        )
    first: Any = layers[0].weight
    if _packed(first) and matches(first.matrix, layers):
        return first.matrix
    form, bias = PACKED if _packed(first) else AS_IS, None
    if layers[0].bias is not None:
        bias = joined([layer.bias.detach() for layer in layers])
    matrix: Matrix | None = _of_panels(layers, bias)
    if matrix is None:
        rows = joined([plain(layer.weight) for layer in layers])
        matrix = _of_rows(layers, rows, bias, form)
    for layer, start in zip(layers, starts(layers), strict=True):
        stop = start + layer.out_features
        if form != PACKED:
            layer.weight.data = rows[start:stop]  # the matrix has a copy of an inference tensor
        elif isinstance(layer.weight, PackedWeight):
            layer.weight.data = PackedWeight.rows(matrix, start, stop)
        else:
            use_packed(layer, parameter_of(matrix, start, stop, layer.weight.requires_grad))
        if bias is not None:
            layer.bias.data = bias[start:stop]
    return matrix


def _of_rows(layers: Sequence[nn.Linear], rows: Tensor, bias: Tensor | None, form: str) -> Matrix:
    """Returns the common matrix of layers, with a table if the matrix of one has one."""
    weights: list[Any] = [layer.weight for layer in layers]
    table = any(_packed(weight) and weight.matrix.table is not None for weight in weights)
    if form == PACKED:
        return packed(rows, bias, table=table)
    return Matrix(rows, bias, form, table=table)


def _of_panels(layers: Sequence[nn.Linear], bias: Tensor | None) -> Matrix | None:
    """Returns the common matrix of layers whose panels can be joined as they are, else None."""
    parts = []
    for weight in (layer.weight for layer in layers):
        if not _packed(weight) or weight.matrix.shape != weight.shape:
            return None
        if not isinstance(weight.matrix, PanelMatrix) or weight.matrix.table is not None:
            return None
        parts.append(weight.matrix)
    gaps = any(part.shape[0] % PANEL for part in parts[:-1])
    return None if gaps else PanelMatrix.joined(parts, bias)


def matches(matrix: Matrix, layers: Sequence[nn.Linear]) -> bool:
    """Returns True if these layers still compute by this matrix.

    They do not if one of their weights or biases was replaced by another tensor.
    """
    return all(
        _is_part(matrix, start, layer) for layer, start in zip(layers, starts(layers), strict=True)
    )


def _is_part(matrix: Matrix, start: int, layer: nn.Linear) -> bool:
    weight = layer.weight
    if not matrix.adds(layer.bias, start):
        return False
    if _packed(weight):
        return weight.matrix is matrix and weight.start == start
    if matrix.form == PACKED:
        return False
    dense, own = matrix.dense()[start:], plain(weight)
    return (
        own.data_ptr() == dense.data_ptr()
        and own.dtype == dense.dtype
        and own.stride() == dense.stride()
    )


def starts(layers: Sequence[Any]) -> list[int]:
    """Returns the first row of each layer in their common matrix."""
    sizes = [layer.out_features for layer in layers]
    return [sum(sizes[:i]) for i in range(len(sizes))]


def _packed(weight: Tensor) -> TypeGuard[PackedWeight]:
    return isinstance(weight, PackedWeight) and weight.matrix.form == PACKED


def plain(weight: Tensor) -> Tensor:
    """Returns an ordinary tensor of these weights: their own memory, unless they are packed."""
    return weight.of(weight.matrix.dense()) if isinstance(weight, PackedWeight) else weight.detach()


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Returns one tensor of the rows of all parts.

    There is no copy where they lie one after the other already. The tensor is input-major if all
    are.
    """
    first, place = parts[0], parts[0].storage_offset()
    adjacent = True
    for part in parts:
        same = (
            part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and part.stride() == first.stride()
        )
        adjacent = adjacent and same and part.storage_offset() == place
        place += len(part) * part.stride(0)
    if adjacent:
        return first.as_strided(
            (sum(map(len, parts)), *first.shape[1:]), first.stride(), first.storage_offset()
        )
    if first.dim() == 2 and all(part.stride(0) == 1 and not part.is_contiguous() for part in parts):
        return torch.cat([part.t() for part in parts], 1).t()
    return torch.cat(list(parts))


def by_facts(keys: Collection[Key]) -> dict[Key, str]:
    """Returns the forms with packing wherever weights of the dtype can be packed."""
    plain = without_packing(keys)
    return {key: plain[key] if packing(key[1]) is None else PACKED for key in keys}


def without_packing(keys: Collection[Key]) -> dict[Key, str]:
    """Returns the forms without packing: input-major where MKL multiplies, which is in float32."""
    return {
        (shape, dtype): INPUT_MAJOR if dtype == torch.float32 and formats.cpu().mkl else AS_IS
        for shape, dtype in keys
    }


def packing(dtype: torch.dtype) -> type[Matrix] | None:
    """Returns the class of packed matrices of a dtype on this CPU, None where there is none."""
    if dtype not in formats.cpu().packs:
        return None
    return PanelMatrix if dtype in SUFFIXES and not missing() else Matrix


def packed(weight: Tensor, bias: Tensor | None, *, table: bool = False) -> Matrix:
    """Returns a matrix of weights [out, in] in the packing of their dtype; see `Matrix`."""
    return (packing(weight.dtype) or Matrix)(weight, bias, PACKED, table=table)


def byte_packing() -> type[Int8Matrix] | None:
    """Returns the class of packed matrices of bytes; None where they are not packed."""
    return None if missing() else Int8PanelMatrix


class PackedLinear(nn.Linear):
    """A linear layer whose weight is, or was, packed: `nn.Linear` under another forward.

    The layer computes by its parameters at the time of the call: by the matrix where the weight is
    packed, and as `nn.Linear` where the weight was replaced, or for autograd.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Computes [..., in] -> [..., out]."""
        weight: Any = self.weight
        matrix: Matrix | None = weight.matrix if type(weight) is PackedWeight else None
        if (
            matrix is None
            or torch.is_grad_enabled()
            or x.dtype is not matrix.dtype
            or not matrix.adds(self.bias, weight.start)
        ):
            return F.linear(x, weight, self.bias)
        y = matrix.linear(x)
        if matrix.shape[0] == self.out_features:
            return y
        return y.narrow(-1, weight.start, self.out_features).contiguous()


LINEARS = (nn.Linear, PackedLinear)
"""The types of layers that compute just x Wᵀ + b."""


def use_packed(layer: nn.Linear, weight: nn.Parameter) -> None:
    """Gives a layer a packed weight."""
    layer.weight = weight
    layer.__class__ = PackedLinear


@torch.no_grad()
def lay_out(hf: Any, choose: Callable[[Collection[Key]], Mapping[Key, str]]) -> str:
    """Gives the weights of a model's linear layers the forms that `choose` says.

    The model must be ours. Shapes, values and names stay, tied weights stay tied. `save_pretrained`
    of the model keeps working, also through `push_to_hub` (see `SavePretrained`).

    Args:
        choose: returns the forms for shapes and dtypes; see `shoal.models.weights.layers`.

    Returns:
        The forms and the numbers of their weights, in words.
    """
    counts: Counter[str] = Counter()
    shared = [each for each in _shared_weights(hf) if each.weight.device.type == "cpu"]
    forms = choose({each.key for each in shared})
    layouts = [(each, forms[each.key] if each.has_one_bias else AS_IS) for each in shared]
    for each, form in layouts:
        if form == INPUT_MAJOR:
            each.weight.data = input_major(each.weight.data)
        counts[form] += 1
    to_pack = [each for each, form in layouts if form == PACKED]
    for each, matrix in zip(to_pack, _matrices(to_pack), strict=True):
        each.use(matrix)
    if set(counts) - {AS_IS} and hasattr(hf, "save_pretrained"):
        hf.save_pretrained = SavePretrained(hf)
    if len(counts) > 1:
        return ", ".join(f"{count} {form}" for form, count in counts.most_common())
    return next(iter(counts), AS_IS)


def _matrices(shared: Sequence[_Shared]) -> Iterator[Matrix]:
    """Yields the packed matrices. Threads pack them at the same time, as many as PyTorch has."""
    if any(packing(each.key[1]) is not PanelMatrix for each in shared):
        yield from (each.matrix() for each in shared)  # each by all threads of a library
        return
    with ThreadPoolExecutor(torch.get_num_threads(), "shoal-packing") as pool:
        yield from pool.map(_Shared.matrix, shared)


def nbytes(weights: Iterable[Tensor]) -> int:
    """Returns the bytes that parameters take in memory; a packed matrix counts once."""
    packed = {weight.matrix for weight in weights if isinstance(weight, PackedWeight)}
    return sum(weight.nbytes for weight in weights if not isinstance(weight, PackedWeight)) + sum(
        m.nbytes() for m in packed
    )


class _Shared:
    """A parameter that linear layers have as their weight, and everything else that has it too."""

    def __init__(self) -> None:
        self.owners: list[tuple[nn.Module, str]] = []

    @property
    def layers(self) -> list[nn.Linear]:
        return [
            owner
            for owner, name in self.owners
            if isinstance(owner, nn.Linear) and type(owner) in LINEARS and name == "weight"
        ]

    @property
    def weight(self) -> Tensor:
        return self.layers[0].weight

    @property
    def has_one_bias(self) -> bool:
        """True if the layers have one bias.

        A matrix adds one bias; layers that share a weight may have their own.
        """
        return len({id(layer.bias) for layer in self.layers}) == 1

    @property
    def key(self) -> Key:
        return (self.weight.shape[0], self.weight.shape[1]), self.weight.dtype

    def matrix(self) -> Matrix:
        """Returns a packed matrix, with a table if not only products use the parameter."""
        layers = self.layers
        return packed(self.weight, layers[0].bias, table=len(layers) < len(self.owners))

    def use(self, matrix: Matrix) -> None:
        """Puts a packed matrix in the place of the ordinary parameter."""
        layers, old = self.layers, self.weight
        new = parameter_of(matrix, requires_grad=old.requires_grad)
        new.__dict__.update(old.__dict__)  # marks that Transformers leaves
        for owner, name in self.owners:
            owner._parameters[name] = new
        for layer in layers:
            use_packed(layer, new)


def _shared_weights(hf: nn.Module) -> list[_Shared]:
    """Returns the weights of linear layers with their owners.

    No weight is kept here, so that a replaced one is freed at once.
    """
    groups: dict[int, _Shared] = {}
    for module in hf.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                groups.setdefault(id(parameter), _Shared()).owners.append((module, name))
    return [shared for shared in groups.values() if shared.layers]


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

    Parts of one matrix are parts of one tensor.
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
