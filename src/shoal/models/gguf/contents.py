"""The contents of a GGUF file: its facts, by llama.cpp's functions, and its weights as groups.

Rotary positions become the settings that Transformers has for them. llama.cpp divides all
frequencies by one factor ("linear"), mixes divided and undivided ones and makes cosines larger
("yarn"; Peng et al. 2023, arXiv 2309.00071), or divides each by a factor of its own, a tensor of
the file (Llama 3.1). Transformers computes the same by the same numbers. A file with other settings
is computed by llama.cpp.
"""

from __future__ import annotations

import ctypes
import re
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.errors import UnsupportedModel
from shoal.models.gguf import library
from shoal.models.sources import parts_of
from shoal.models.weights.groups import Groups


class BlockFormat(NamedTuple):
    """A format of blocks.

    Attributes:
        name: the format's name in llama.cpp.
        inputs: weights of a block.
        size: bytes of a block.
        read: the function from blocks [..., size] uint8 to numbers [..., inputs], and to scales and
            minima [..., groups] as `Groups` has them; None for no minima.
    """

    name: str
    inputs: int
    size: int
    read: Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]


def _half(block: Tensor, place: int) -> Tensor:
    """Returns the float16 at a place of each block, [..., 1]."""
    return block[..., place : place + 2].contiguous().view(torch.float16)


def _nibbles(bytes_: Tensor) -> Tensor:
    """Returns the low halves of the bytes, then the high ones."""
    return torch.cat([bytes_ & 15, bytes_ >> 4], -1)


def _fifth_bits(block: Tensor, place: int) -> Tensor:
    """Returns 32 bits of each block, [..., 32], as 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (block[..., place : place + 4, None] >> shifts & 1).flatten(-2) << 4


def _q8_0(block: Tensor) -> tuple[Tensor, Tensor, None]:
    return block[..., 2:].contiguous().view(torch.int8), _half(block, 0), None


def _q4_0(block: Tensor) -> tuple[Tensor, Tensor, None]:
    return _nibbles(block[..., 2:]), _half(block, 0), None


def _q4_1(block: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _nibbles(block[..., 4:]), _half(block, 0), _half(block, 2)


def _q5_0(block: Tensor) -> tuple[Tensor, Tensor, None]:
    numbers = _nibbles(block[..., 6:]) | _fifth_bits(block, 2)
    return numbers.to(torch.int8) - 16, _half(block, 0), None


def _q5_1(block: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    numbers = _nibbles(block[..., 8:]) | _fifth_bits(block, 4)
    return numbers.to(torch.int8), _half(block, 0), _half(block, 2)


def _factors_of_k(block: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scales and minima of the eight groups of a block of Q4_K or Q5_K."""
    first, second, last = block[..., 4:8], block[..., 8:12], block[..., 12:16]
    scales = torch.cat([first & 63, last & 15 | first >> 6 << 4], -1)
    minima = torch.cat([second & 63, last >> 4 | second >> 6 << 4], -1)
    return _half(block, 0).float() * scales, -(_half(block, 2).float() * minima)


def _q4_k(block: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    numbers = _nibbles(block[..., 16:].unflatten(-1, (4, 32))).flatten(-2)
    return numbers, *_factors_of_k(block)


def _q5_k(block: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low = _nibbles(block[..., 48:].unflatten(-1, (4, 32))).flatten(-2)
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    high = (block[..., None, 16:48] >> shifts & 1).flatten(-2)
    return (low | high << 4).to(torch.int8), *_factors_of_k(block)


def _q6_k(block: Tensor) -> tuple[Tensor, Tensor, None]:
    low = _nibbles(block[..., :128].unflatten(-1, (2, 64))).flatten(-2)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = (block[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts & 3).flatten(-3)
    scales = block[..., 192:208].contiguous().view(torch.int8)
    return (low | high << 4).to(torch.int8) - 32, _half(block, 208).float() * scales, None


BLOCKS = {
    2: BlockFormat("Q4_0", 32, 18, _q4_0),
    3: BlockFormat("Q4_1", 32, 20, _q4_1),
    6: BlockFormat("Q5_0", 32, 22, _q5_0),
    7: BlockFormat("Q5_1", 32, 24, _q5_1),
    8: BlockFormat("Q8_0", 32, 34, _q8_0),
    12: BlockFormat("Q4_K", 256, 144, _q4_k),
    13: BlockFormat("Q5_K", 256, 176, _q5_k),
    14: BlockFormat("Q6_K", 256, 210, _q6_k),
}
"""The formats, by their numbers of `ggml_type`."""
PART = 4096
"""Rows of a tensor that are read at once, to bound memory."""


def groups_of(kind: int, data: Tensor, inputs: int) -> Groups:
    """Reads a tensor of a format in `BLOCKS`.

    Args:
        data: its bytes, uint8.
        inputs: weights of a row, a multiple of the block's.
    """
    block = BLOCKS[kind]
    rows = data.view(-1, inputs // block.inputs, block.size)
    return Groups.joined([_read(block, part) for part in rows.split(PART)])


def _read(block: BlockFormat, rows: Tensor) -> Groups:
    numbers, scales, minima = block.read(rows)
    return Groups(
        numbers.flatten(1), scales.flatten(1), None if minima is None else minima.flatten(1)
    )


NUMBERS = {4: "u32", 5: "i32", 6: "f32", 7: "bool", 10: "u64", 11: "i64"}
"""The numbers of `gguf_type` that are read, and the ends of the functions' names."""
RESULTS = {
    "u32": ctypes.c_uint32,
    "i32": ctypes.c_int32,
    "f32": ctypes.c_float,
    "bool": ctypes.c_bool,
    "u64": ctypes.c_uint64,
    "i64": ctypes.c_int64,
}


class TensorPlace(NamedTuple):
    """A tensor in the file.

    Attributes:
        kind: the number of `ggml_type`.
        start: the first byte in the file.
        size: the number of bytes.
    """

    kind: int
    start: int
    size: int


class _Parameters(ctypes.Structure):
    """`gguf_init_params`."""

    _fields_ = [("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p)]


@cache
def _ggml() -> Any:
    """Returns the library of `gguf_...`, with the types of the functions that are called."""
    library()
    from llama_cpp._ggml import libggml

    pointer, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64
    kinds: dict[str, tuple[Any, list[Any]]] = {
        "gguf_init_from_file": (pointer, [text, _Parameters]),
        "gguf_free": (None, [pointer]),
        "gguf_find_key": (number, [pointer, text]),
        "gguf_get_kv_type": (ctypes.c_int, [pointer, number]),
        "gguf_get_n_tensors": (number, [pointer]),
        "gguf_get_tensor_name": (text, [pointer, number]),
        "gguf_get_tensor_type": (ctypes.c_int, [pointer, number]),
        "gguf_get_tensor_offset": (ctypes.c_size_t, [pointer, number]),
        "gguf_get_tensor_size": (ctypes.c_size_t, [pointer, number]),
        "gguf_get_data_offset": (ctypes.c_size_t, [pointer]),
        "gguf_get_val_str": (text, [pointer, number]),
        **{f"gguf_get_val_{end}": (RESULTS[end], [pointer, number]) for end in RESULTS},
    }
    for name, (result, arguments) in kinds.items():
        function = getattr(libggml, name)
        function.restype, function.argtypes = result, arguments
    return libggml


class Header:
    """The header of a GGUF file.

    Attributes:
        tensors: the places of the tensors by their names.
        size: the number of bytes of the file.

    Raises:
        UnsupportedModel: llama.cpp does not read the file.
    """

    def __init__(self, file: Path) -> None:
        lib = _ggml()
        self._handle = lib.gguf_init_from_file(str(file).encode(), _Parameters(True, None))
        if not self._handle:
            raise UnsupportedModel(f"{file}: llama.cpp cannot read its header")
        weakref.finalize(self, lib.gguf_free, self._handle)
        first, handle = lib.gguf_get_data_offset(self._handle), self._handle
        self.tensors = {
            lib.gguf_get_tensor_name(handle, i).decode(): TensorPlace(
                lib.gguf_get_tensor_type(handle, i),
                first + lib.gguf_get_tensor_offset(handle, i),
                lib.gguf_get_tensor_size(handle, i),
            )
            for i in range(lib.gguf_get_n_tensors(handle))
        }
        self._bytes = np.memmap(file, np.uint8, "c")
        self.size = len(self._bytes)

    def value(self, key: str) -> Any:
        """Returns a number or text of the file; None for a key that is not there, or has a list."""
        lib = _ggml()
        place = lib.gguf_find_key(self._handle, key.encode())
        kind = lib.gguf_get_kv_type(self._handle, place) if place >= 0 else None
        if kind == 8:
            return lib.gguf_get_val_str(self._handle, place).decode("utf-8", "replace")
        if kind not in NUMBERS:
            return None
        return getattr(lib, f"gguf_get_val_{NUMBERS[kind]}")(self._handle, place)

    def has(self, key: str) -> bool:
        """Returns True if the file has a value of this name."""
        return bool(_ggml().gguf_find_key(self._handle, key.encode()) >= 0)

    def bytes_of(self, name: str) -> Tensor:
        """Returns the bytes of a tensor, mapped from the file."""
        place = self.tensors[name]
        return torch.from_numpy(self._bytes[place.start : place.start + place.size])


def layers_with_states(file: Path) -> list[int]:
    """Returns the numbers of the layers that keep recurrent states, by their tensors' names."""
    names = {name for part in parts_of(str(file)) for name in Header(Path(part)).tensors}
    matches = (re.match(r"blk\.(\d+)\.(?:ssm|shortconv|time_mix)", name) for name in names)
    return sorted({int(one[1]) for one in matches if one})


FACTORS = "rope_freqs.weight"
"""The name of the tensor of factors, [features of a head / 2] float32."""
NEUTRAL = {"attn_factor": 1, "yarn_ext_factor": 1, "yarn_attn_factor": 1, "yarn_log_multiplier": 0}
"""The values of those numbers of a scaling that Transformers' families have no word for."""
BETAS = (("beta_fast", "yarn_beta_fast", 32.0), ("beta_slow", "yarn_beta_slow", 1.0))
"""The bounds of the mixture, in Transformers and in files, and their usual values."""


def rotary_parameters(header: Header, family: str, context: int) -> dict[str, Any]:
    """Returns the `rope_parameters` of a Transformers config.

    Args:
        context: the number of positions of the file.

    Raises:
        UnsupportedModel: llama.cpp computes other positions.
    """

    def value(key: str, otherwise: Any) -> Any:
        number = header.value(f"{family}.rope.{key}")
        if number is None and header.has(f"{family}.rope.{key}"):
            raise UnsupportedModel(f"its {family}.rope.{key} is a list")
        return otherwise if number is None else number

    scaled = value("scaling.factor", value("scale_linear", 0)) or 1
    kind = value("scaling.type", "linear")  # as llama.cpp reads a file that names none
    parameters: dict[str, Any] = {"rope_theta": value("freq_base", 1e4)}
    for key, neutral in NEUTRAL.items():
        if value(f"scaling.{key}", neutral) != neutral:
            raise UnsupportedModel(f"it has {family}.rope.scaling.{key}")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModel(f"it has {family}.rope.scaling.type {kind!r}")
    if kind == "none" or (kind == "linear" and scaled == 1):
        return parameters | {"rope_type": "default"}
    if FACTORS in header.tensors:
        raise UnsupportedModel(f"it has {FACTORS} beside {family}.rope.scaling.type {kind!r}")
    parameters |= {"rope_type": kind, "factor": scaled}
    if kind == "yarn":
        parameters["original_max_position_embeddings"] = value(
            "scaling.original_context_length", context
        )
        parameters |= {name: value(f"scaling.{key}", otherwise) for name, key, otherwise in BETAS}
    return parameters


def divide(rotary: Any, factors: Tensor) -> None:
    """Divides the frequencies of a rotary module of Transformers by a file's factors.

    Raises:
        UnsupportedModel: there are more or fewer factors than frequencies.
    """
    if factors.shape != rotary.inv_freq.shape:
        raise UnsupportedModel(
            f"it has {len(factors)} factors of {len(rotary.inv_freq)} rotary frequencies"
        )
    with torch.no_grad():
        rotary.inv_freq = rotary.inv_freq / factors
        rotary.original_inv_freq = rotary.inv_freq.clone()
