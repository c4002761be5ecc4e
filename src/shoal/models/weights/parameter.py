"""A packed matrix as the weight of an `nn.Linear`, and the versions of weights of any kind.

A `PackedWeight` reads, writes, saves and copies as an ordinary tensor does. It has the shape and
dtype of the weights and no memory of its own. An operation that reads it gets the weights exactly,
unpacked for the occasion. An operation that writes it, or a view of it, unpacks, writes and packs
again. So `state_dict`, `load_state_dict`, optimizers, `p.data.copy_()` and `p[0].zero_()` work.
They take longer than on ordinary weights, products take less. Calls that would need an address
(`data_ptr`, an array of NumPy that can be written) are refused.

Versions tell whether weights were written since the last question. There are two questions.
`writes` asks the counters of PyTorch and of packed weights, which takes 0.1 ms for 160 modules; it
misses writes through `Tensor.data` of ordinary weights. It is enough for drafters, which may be
wrong. `sums` reads all bytes, for prefixes, which must be right.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from shoal.models.weights.matrix import AS_IS, PACKED, Matrix

SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
"""The operations that return the tensor itself as another object."""


class PackedWeight(Tensor):
    """A tensor of some rows of a `Matrix`, or a view of them.

    Attributes:
        matrix: has the weights.
        start: first row in the matrix; None for a view that torch took.
    """

    matrix: Matrix
    start: int | None
    _memo: tuple[int, Tensor] | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, matrix: Matrix, like: Tensor, start: int | None = None) -> Any:
        """Makes a tensor of a matrix's weights.

        Args:
            like: a tensor of the shape, strides and offset that this parameter has within
                `matrix.dense()`, on any device.
        """
        with torch.inference_mode(False):
            return Tensor._make_wrapper_subclass(
                cls,
                like.shape,
                like.stride(),
                like.storage_offset(),
                dtype=matrix.dtype,
                device=matrix.device,
            )

    def __init__(self, matrix: Matrix, like: Tensor, start: int | None = None) -> None:
        self.matrix, self.start, self._memo = matrix, start, None

    @staticmethod
    def rows(matrix: Matrix, start: int = 0, stop: int | None = None) -> PackedWeight:
        """Returns rows `start` to `stop` of a matrix; all rows unless told otherwise."""
        return PackedWeight(matrix, matrix.layout()[start:stop], start)

    def of(self, dense: Tensor) -> Tensor:
        """Returns this part of `matrix.dense()`, sharing its memory."""
        return dense.as_strided(self.shape, self.stride(), self.storage_offset())

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in SAME:
            return PackedWeight(args[0].matrix, args[0], args[0].start)
        return _Call(func, args, kwargs or {}).run()

    # ── the uses by torch that are no operations ──────────────────────────────────────────────────

    @property  # type: ignore[misc]
    def data(self) -> Tensor:  # type: ignore[override]
        """The weights, unknown to autograd; a write into them is a write into this tensor."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        """Makes this tensor be `value`, of any dtype or device; if not packed, it is ordinary."""
        if not isinstance(value, PackedWeight) or value.start is None:
            plain = value.clone() if isinstance(value, PackedWeight) else value.detach()
            bias = self.matrix.bias
            if bias is not None and self.start is not None:
                bias = bias[self.start : self.start + len(self)]
            value = PackedWeight.rows(Matrix(plain, bias, AS_IS))
        if value.matrix is not self.matrix:
            self.matrix.stale = True
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.matrix, self.start = value.matrix, value.start

    def numpy(self, *, force: bool = False) -> Any:
        """Returns a copy that cannot be written, because a write into it would be lost."""
        array = self.detach().clone().numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        return self.detach().clone().tolist()

    def data_ptr(self) -> int:
        return self._memory().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._memory().untyped_storage()

    def _memory(self) -> Tensor:
        if self.matrix.form == PACKED:
            raise RuntimeError(
                "packed weights have no address: take weight.detach().clone(), and "
                "weight.copy_() to write"
            )
        return self.of(self.matrix.dense())

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return repr(self.detach().clone())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            part = (
                None
                if self.start is None
                else PackedWeight(copy.deepcopy(self.matrix, memo), self, self.start)
            )
            own = self.detach().clone() if part is None else part
            memo[id(self)] = (
                nn.Parameter(own, self.requires_grad) if isinstance(self, nn.Parameter) else own
            )
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the tensor.

        A parameter comes back packed; the entry of a state dict comes back as an ordinary tensor,
        which every program can load.
        """
        if isinstance(self, nn.Parameter) and self.start is not None:
            return parameter_of, (
                self.matrix,
                self.start,
                self.start + len(self),
                self.requires_grad,
            )
        return self.clone().__reduce_ex__(protocol)


def parameter_of(
    matrix: Matrix, start: int = 0, stop: int | None = None, requires_grad: bool = True
) -> Any:
    """Returns rows of a matrix as a parameter, marked as `nn.Parameter` marks other classes.

    `nn.Parameter` detaches the tensor before. That is an operation of a class of its own, the first
    of which has torch import the tensors that are shared among processes, for most of a second.
    """
    weight: Any = PackedWeight.rows(matrix, start, stop).requires_grad_(requires_grad)
    weight._is_param = True
    return weight


class _Call:
    """An operation of torch some of whose tensors are packed."""

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.weights = [
            leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, PackedWeight)
        ]
        # One tensor for each matrix, by its id: views of a matrix see each other's writes.
        self.dense: dict[int, Tensor] = {}
        for weight in self.weights:
            if id(weight.matrix) not in self.dense:
                memo = weight._memo
                fresh = memo is not None and memo[0] == weight.matrix.epoch
                self.dense[id(weight.matrix)] = (
                    memo[1] if memo is not None and fresh else weight.matrix.dense()
                )
        self.parts = {
            id(weight): weight.of(self.dense[id(weight.matrix)]) for weight in self.weights
        }

    def run(self) -> Any:
        """Runs the operation and returns its result; afterwards the matrices hold its writes."""
        writes = list(self._outputs())
        before = [(part.shape, part.data_ptr()) for part in writes]
        args, kwargs = tree_map(
            lambda leaf: self.parts.get(id(leaf), leaf), (self.args, self.kwargs)
        )
        try:
            out = self.func(*args, **kwargs)
        finally:
            if writes:
                self._write()
        if [(part.shape, part.data_ptr()) for part in writes] != before:
            raise RuntimeError(
                f"{self.func} gives weights other memory, which packed ones cannot take: assign "
                f"weight.data"
            )
        return self._results(out)

    def _outputs(self) -> Iterator[Tensor]:
        """Yields the parts that the operation writes into."""
        for i, argument in enumerate(self.func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = self.args[i] if i < len(self.args) else self.kwargs.get(argument.name)
                yield from (
                    self.parts[id(leaf)] for leaf in tree_leaves(value) if id(leaf) in self.parts
                )

    def _write(self) -> None:
        for matrix in {id(weight.matrix): weight.matrix for weight in self.weights}.values():
            matrix.write(self.dense[id(matrix)])

    def _results(self, out: Any) -> Any:
        """Converts the result: parts of packed matrices are packed weights."""
        own = {id(self.parts[id(weight)]): weight for weight in self.weights}
        matrices = {
            _memory(self.dense[id(weight.matrix)]): weight.matrix for weight in self.weights
        }

        def result(tensor: Any) -> Any:
            if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
                return tensor
            matrix = matrices.get(_memory(tensor))
            return own.get(id(tensor), tensor if matrix is None else self._view(matrix, tensor))

        return tree_map(result, out)

    def _view(self, matrix: Matrix, tensor: Tensor) -> PackedWeight:
        if tensor.dtype != matrix.dtype:
            raise RuntimeError(
                "packed weights cannot be viewed as another dtype: take weight.detach().clone()"
            )
        view = PackedWeight(matrix, tensor)
        view._memo = matrix.epoch, self.dense[id(matrix)]
        return view


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


WORDS = 1 << 20
"""The number of words of 8 bytes that one sum of a weight reads."""
SHORT = 64  # the most items of a container whose items count as a module's settings
TORCHS_OWN = frozenset(vars(nn.Module()))  # the attributes that every module has
PLAIN = (bool, int, float, str, type(None))
"""The types of a module's attributes that count as its settings."""
Version = list[tuple[int, int]]
"""An identity and a number of writes for each tensor."""


def writes(module: nn.Module | Tensor, without: Collection[int] = ()) -> Version:
    """Returns numbers that change when weights or buffers of a module are written or replaced.

    Args:
        module: a module, or one tensor.
        without: the identities of tensors that are left out.
    """
    return [_counted(one) for one in tensors(module) if id(one) not in without]


def tensors(module: nn.Module | Tensor) -> list[Tensor]:
    """Returns the weights and buffers of a module, several times if they are tied.

    PyTorch's own iterators know names and take four times as long.
    """
    if isinstance(module, Tensor):
        return [module]
    if not isinstance(module, nn.Module):
        return []  # other passes have no modules
    modules, leaves = [module], list[Tensor]()
    for one in modules:  # grows by the children of each
        for own in (one._parameters, one._buffers):
            if own:
                leaves += [each for each in own.values() if each is not None]
        if one._modules:
            modules += [each for each in one._modules.values() if each is not None]
    return leaves


def _counted(tensor: Tensor) -> tuple[int, int]:
    if isinstance(tensor, PackedWeight):
        return id(tensor.matrix), tensor.matrix.epoch
    return id(tensor), 0 if tensor.is_inference() else tensor._version


class Updates:
    """A count of a target's updates that the weights of its drafter have not followed.

    Attributes:
        behind: the number of questions that found another target since the drafter's own weights
            were written last.
    """

    def __init__(self, target: nn.Module) -> None:
        self._target, self._own, self.behind = writes(target), Version(), 0

    def count(self, target: nn.Module, own: nn.Module | Tensor | None) -> int:
        """Counts an update if there was one since the last question, and returns `behind`.

        Args:
            own: the drafter's weights; those that are the target's follow it and do not count.
        """
        if own is None:
            return 0
        shared = tensors(target)
        version = writes(own, set(map(id, shared)))
        if not version:
            return 0
        writers = list(map(_counted, shared))
        if writers != self._target:
            self._target, self.behind = writers, self.behind + 1
        if version != self._own:
            self.behind = 0 if self._own else self.behind
            self._own = version
        return self.behind


def sums(hf: nn.Module) -> list[Tensor]:
    """Returns sums that change with a write into the weights and buffers of a model.

    They change with hooks and other attributes of modules, which a pass over a few tokens need not
    meet. A packed matrix alone counts the writes into its weights; PyTorch those of others.
    """
    checksums: list[Tensor] = []
    counts, tensors = list[int](), {id(one): one for one in (*hf.parameters(), *hf.buffers())}
    for module in hf.modules():
        leaves = _attributes(module)
        tensors |= {id(one): one for one in leaves if isinstance(one, Tensor)}
        plain = [one for one in leaves if isinstance(one, PLAIN)]
        hooks = (*module._forward_hooks, None, *module._forward_pre_hooks)
        counts.append(hash((*hooks, vars(module).get("forward"), *plain)))
    for tensor in tensors.values():
        if isinstance(tensor, PackedWeight):
            counts += [id(tensor.matrix), tensor.matrix.epoch]
            if tensor.matrix.form == PACKED:
                continue
            tensor = tensor.of(tensor.matrix.dense())
        try:
            checksums += _sums_of(tensor.detach())
        except (NotImplementedError, TypeError, RuntimeError):
            counts += [id(tensor), 0 if tensor.is_inference() else tensor._version]
    devices = dict.fromkeys(each.device for each in checksums)
    return [
        torch.tensor(counts),
        *(torch.stack([one for one in checksums if one.device == device]) for device in devices),
    ]


def _attributes(module: nn.Module) -> list[object]:
    """Returns names and values of a module's attributes, and those in short containers."""
    leaves: list[object] = []
    for name, value in vars(module).items():
        short = isinstance(value, (list, tuple, dict)) and len(value) <= SHORT
        if isinstance(value, (*PLAIN, Tensor)) or (short and name not in TORCHS_OWN):
            leaves += (name, *tree_leaves(value))
    return leaves


def _sums_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yields two sums of each `WORDS` words, each word times an odd number of its place.

    A single word that changes always changes the first sum. In that one the highest bits of an even
    number of words cancel each other, so the second sum adds the words' upper halves.
    """
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()  # this process's shard of a parallel model
    rows = tensor.t() if tensor.ndim == 2 and tensor.t().is_contiguous() else tensor
    data = rows.contiguous().flatten().view(torch.uint8)
    if len(data) % 8 or data.storage_offset() % 8:
        data = F.pad(data, (0, -len(data) % 8)).clone()
    words, factors = data.view(torch.int64), _factors(tensor.device)
    for part in words.split(WORDS):
        yield (part * factors[: len(part)]).sum()
        yield (part >> 32).mul_(factors[: len(part)]).sum()


@cache
def _factors(device: torch.device) -> Tensor:
    """Makes `WORDS` odd numbers, int64."""
    generator = torch.Generator().manual_seed(0)
    limits = torch.iinfo(torch.int64)
    numbers = torch.randint(limits.min, limits.max, (WORDS,), generator=generator)
    return (numbers | 1).to(device)
