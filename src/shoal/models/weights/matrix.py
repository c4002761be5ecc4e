"""A weight matrix, in the order of memory that its CPU multiplies fastest.

A decoding pass consists of products [tokens, in] x [in, out] of few tokens. They take the time in
which the weights are read. There are three forms:

- "as-is": [out, in] in rows, as libraries keep weights.
- "input-major": the same shape with other strides. MKL repacks weights in rows in every float32
product of more than about ten tokens, which can cost more than the product; it need not repack
input-major weights.
- "packed": blocks in the order in which oneDNN's kernels read them, an opaque tensor. Products take
activations, sums and products of the result in the same kernel.

Packed weights lie in huge pages where the system has them. A pass reads all weights once, and with
pages of 4 KiB a processor spends a third of that time on finding them. Small matrices share a
mapping, as a huge page has 2 MiB.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.models.head_start import CHUNK, HUGE, mapping

ALIGNED = 4096
"""The alignment of a matrix in bytes."""
_lock = threading.Lock()
_shared: tuple[mmap.mmap, int] | None = None
"""The mapping that has room for more matrices, and the number of its bytes in use."""


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns a tensor without contents; its memory is freed with the last tensor of a mapping."""
    count = math.prod(shape)
    size = -(-count * dtype.itemsize // ALIGNED) * ALIGNED
    try:
        place = _place(size) if HUGE is not None and size else None
    except OSError:  # no memory for a whole mapping, or the kernel has no huge pages
        place = None
    if place is None:
        return torch.empty(*shape, dtype=dtype)
    return torch.frombuffer(place[0], dtype=dtype, count=count, offset=place[1]).view(*shape)


def _place(size: int) -> tuple[mmap.mmap, int]:
    """Returns a mapping, and the offset of `size` free bytes in it."""
    global _shared
    if size > CHUNK // 4:
        return mapping(size), 0
    with _lock:
        if _shared is None or _shared[1] + size > CHUNK:
            _shared = mapping(CHUNK), 0
        block, offset = _shared
        _shared = block, offset + size
    return block, offset


AS_IS, INPUT_MAJOR, PACKED = FORMS = "as-is", "input-major", "packed"
Key = tuple[tuple[int, int], torch.dtype]
"""The shape [out, in] and the dtype of weights."""

Fused = tuple[str, list[Any], str]
_SILU: Fused = ("swish", [], "")
_TANH: Fused = ("gelu", [], "tanh")
FUSED: dict[str, Fused] = {
    "none": ("none", [], ""),
    "relu": ("relu", [], ""),
    "silu": _SILU,
    "swish": _SILU,
    "gelu": ("gelu", [], "none"),
    "gelu_new": _TANH,
    "gelu_pytorch_tanh": _TANH,
}
"""The activations by their names in Transformers (`hidden_act` of a config).

A value is oneDNN's attribute, scalars and algorithm.
"""


def _tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
}
"""The activations as functions; "none" has none."""


class Linear(Protocol):
    """A function activation(x Wᵀ + b): x [tokens, in], result [tokens, out]."""

    def __call__(self, x: Tensor, activation: str = "none") -> Tensor: ...


Products = tuple[Linear, Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]
"""The functions `Matrix.linear`, `linear_add` and `linear_mul`."""


def input_major(weight: Tensor) -> Tensor:
    """Returns the matrix [out, in], laid out in memory as [in, out]."""
    return weight.t().contiguous().t()


class Matrix:
    """The matrix W [out, in] and the bias b [out] of a linear layer.

    They may be the weights of several layers with the same input, one below the other.

    `linear`, `linear_add` and `linear_mul` are chosen when the weights change, so that a call has
    nothing to decide; whoever keeps a matrix asks it for them at each call. x is [tokens, in] and
    contiguous, in the dtype of the weights; nothing is recorded for autograd.

    Attributes:
        form: one of `FORMS`.
        shape: (out, in).
        dtype: dtype of the weights.
        bias: [out] or None.
        device: device of the weights.
        epoch: number of changes of the weights.
        stale: True if the parameters that had this matrix have got another.
        table: the weights as [out, in] in rows, where they are looked up by row too (tied
            embeddings), else None.
        linear: (x, activation) -> activation(x Wᵀ + b), [tokens, out]; activation is a name in
            `ACTIVATIONS`, or "none".
        linear_add: (x, other) -> x Wᵀ + b + other; other [tokens, out].
        linear_mul: (x, other) -> (x Wᵀ + b) * other.
    """

    table: Tensor | None
    linear: Linear
    linear_add: Callable[[Tensor, Tensor], Tensor]
    linear_mul: Callable[[Tensor, Tensor], Tensor]

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, form: str = AS_IS, *, table: bool = False
    ) -> None:
        self.form, self.bias, self.table = form, bias, None
        self._describe((weight.shape[0], weight.shape[1]), weight)
        self._keep(weight.detach(), table)

    def _describe(self, shape: tuple[int, int], like: Tensor) -> None:
        """Begins as a matrix of a shape, with the dtype and the device of a tensor."""
        self.shape, self.dtype, self.device = shape, like.dtype, like.device
        self.epoch, self.stale = 0, False

    def _keep(self, weight: Tensor, table: bool) -> None:
        """Takes weights [out, in] over.

        Weights in rows are not copied where the form is "as-is" or a table is wanted.
        """
        with torch.inference_mode(False), torch.no_grad():
            # An inference tensor could be written in inference mode only.
            weight = weight.clone() if weight.is_inference() else weight
            if self.form == PACKED:
                self.table, self._weight = (
                    weight.contiguous() if table else None,
                    self._packed(weight),
                )
            else:
                self._weight = input_major(weight) if self.form == INPUT_MAJOR else weight
                self.table = self._weight if table else None
            self.linear, self.linear_add, self.linear_mul = self._products()

    def _packed(self, weight: Tensor) -> Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())

    def _unpacked(self) -> Tensor:
        return self._weight.to_dense()

    def _products(self) -> Products:
        return (_of_packed if self.form == PACKED else _of_dense)(self._weight, self.bias)

    def dense(self) -> Tensor:
        """Returns the weights [out, in], exactly; not always a copy."""
        if self.form != PACKED:
            return self._weight
        return self._unpacked() if self.table is None else self.table

    def layout(self) -> Tensor:
        """Returns a tensor without data of the shape and strides of `dense()`."""
        source = self._weight if self.form != PACKED else self.table
        like = torch.empty(0, dtype=self.dtype, device="meta")
        if source is None:
            return like.as_strided(self.shape, (self.shape[1], 1))
        return like.as_strided(source.shape, source.stride(), source.storage_offset())

    def write(self, weight: Tensor) -> None:
        """Replaces the weights by others of the same shape and dtype, from the next product on."""
        self.epoch += 1
        with torch.inference_mode(False), torch.no_grad():
            dense = self.dense()
            if weight is not dense:
                dense.copy_(weight)
        if self.form == PACKED:
            self._keep(dense, self.table is not None)

    def adds(self, bias: Tensor | None, start: int = 0) -> bool:
        """Returns True if the products of the rows from `start` on have this bias.

        It may be the bias of one of several layers.
        """
        if bias is self.bias:
            return True
        return (
            bias is not None
            and self.bias is not None
            and bias.data_ptr() == self.bias[start:].data_ptr()
        )

    def nbytes(self) -> int:
        """Returns the bytes of the weights, with the padding of blocks and with the table."""
        if self.form != PACKED:
            return self._weight.nbytes
        return torch.ops.mkldnn._nbytes(self._weight) + (
            0 if self.table is None else self.table.nbytes
        )

    def __reduce__(self) -> Any:
        return _again, (self.dense(), self.bias, self.form, self.table is not None)


def _again(weight: Tensor, bias: Tensor | None, form: str, table: bool) -> Matrix:
    """Unpickles a matrix, or copies it."""
    return Matrix(weight, bias, form, table=table)


def _of_packed(weight: Tensor, bias: Tensor | None) -> Products:
    unary = torch.ops.mkldnn._linear_pointwise.default
    binary = torch.ops.mkldnn._linear_pointwise.binary

    def linear(x: Tensor, activation: str = "none") -> Tensor:
        return unary(x, weight, bias, *FUSED[activation])

    def linear_add(x: Tensor, other: Tensor) -> Tensor:
        return binary(x, other, weight, bias, "add")

    def linear_mul(x: Tensor, other: Tensor) -> Tensor:
        return binary(x, other, weight, bias, "mul")

    return linear, linear_add, linear_mul


def _of_dense(weight: Tensor, bias: Tensor | None) -> Products:
    return products_of(lambda x: F.linear(x, weight, bias))


def products_of(product: Callable[[Tensor], Tensor]) -> Products:
    """Returns the products of a matrix by a function x -> x Wᵀ + b whose result may be written."""

    def linear(x: Tensor, activation: str = "none") -> Tensor:
        y = product(x)
        return y if activation == "none" else ACTIVATIONS[activation](y)

    def linear_add(x: Tensor, other: Tensor) -> Tensor:
        return product(x).add_(other)

    def linear_mul(x: Tensor, other: Tensor) -> Tensor:
        return product(x).mul_(other)

    return linear, linear_add, linear_mul
