"""The kernels in C for work on a CPU, compiled on the machine they run on, or carried by a wheel.

kernels.c            vectors of the processor
team.h               how many threads a region has
tile.h, pairs.h      sums of products in registers, and of pairs of bfloat16
typed.h, attend.h    products, rotary embedding with the write to the cache, RMS norm; attention
decode.h             a decoder's pass of these in one call
drawing.h            distributions, tokens drawn from them, the verdict on drafts
drafting.h           a drafter's step: a pass and a draw
kernels.h            their arguments in C; here in Python, the same fields in the same order
build                finds them, or has them compiled, once per machine
compiling            compiles them with the system's C compiler
"""

from __future__ import annotations

import ctypes
from typing import Any

_INTEGER, _REAL, _POINTER = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


def _all(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Returns fields of one type by their names, which stand in one text."""
    return [(name, kind) for name in names.split()]


class AttentionStruct(ctypes.Structure):
    """The ragged attention of one layer."""

    _fields_ = [
        *_all(_INTEGER, "rows heads kv_heads dim value_dim threads"),
        *_all(_REAL, "scale softcap"),
        ("window", _INTEGER),
        *_all(_POINTER, "bounds query_rows key_rows value_rows positions words"),
        *_all(_INTEGER, "columns rounded"),
        *_all(_POINTER, "sinks query key value shared_key shared_value"),
        *_all(
            _INTEGER,
            "query_token query_head key_token key_head value_token value_head "
            "shared_key_token shared_key_head shared_value_token shared_value_head",
        ),
        ("out", _POINTER),
    ]


class HeadsStruct(ctypes.Structure):
    """The rotary embedding of one layer, with the writing of its keys and values to their cells."""

    _fields_ = [
        *_all(_INTEGER, "tokens heads kv_heads dim rotary threads rounded"),
        ("eps", _REAL),
        *_all(_POINTER, "cos sin positions cells query_norm key_norm states keys values"),
    ]


class ProductStruct(ctypes.Structure):
    """A product by packed weights."""

    _fields_ = [
        *_all(_INTEGER, "tokens width outputs kind threads form exact"),
        *_all(_POINTER, "weight bias scales x other y y_rows"),
    ]


class WeightsStruct(ctypes.Structure):
    """A weight matrix, packed."""

    _fields_ = [*_all(_INTEGER, "width outputs form exact"), *_all(_POINTER, "weight bias scales")]


class NormStruct(ctypes.Structure):
    """An RMS norm."""

    _fields_ = [("weight", _POINTER), ("eps", _REAL)]


class LayerStruct(ctypes.Structure):
    """The weights that a pass reads of one layer."""

    _fields_ = [
        *_all(WeightsStruct, "states out gate up down"),
        *_all(NormStruct, "attention_norm mlp_norm query_norm key_norm"),
        ("window", _INTEGER),
    ]


class ModelStruct(ctypes.Structure):
    """The facts of a decoder that are the same in all its passes."""

    _fields_ = [
        *_all(_INTEGER, "layer_count heads kv_heads dim rotary width vocabulary"),
        ("scale", _REAL),
        ("embedding", _POINTER),
        ("layers", ctypes.POINTER(LayerStruct)),
        ("norm", NormStruct),
        ("head", WeightsStruct),
    ]


class PassStruct(ctypes.Structure):
    """A pass of a decoder."""

    _fields_ = [
        ("model", ctypes.POINTER(ModelStruct)),
        ("stores", _POINTER),
        *_all(_INTEGER, "tokens rows columns threads packed capacity rounded id_row vector_count"),
        *_all(_POINTER, "ids vectors bounds tree_positions words cos sin workspace logits"),
        *_all(_INTEGER, "last_only scored_rows scored_columns"),
    ]


class SettingStruct(ctypes.Structure):
    """The sampling settings of a row that the kernels know."""

    _fields_ = [*_all(_REAL, "temperature top_p min_p"), ("top_k", _INTEGER)]


class BlockStruct(ctypes.Structure):
    """The scores of a block's positions, and the settings and uniforms that tokens are drawn by."""

    _fields_ = [
        *_all(
            _INTEGER,
            "rows columns vocab threads bfloat16 buckets settings_row scores_row "
            "scores_column uniforms_row uniforms_column",
        ),
        *_all(_POINTER, "settings scores uniforms"),
    ]


class DrawsStruct(ctypes.Structure):
    """The draws at every position."""

    _fields_ = [("block", BlockStruct), *_all(_POINTER, "tokens chosen highest probs logprobs")]


class VerdictsStruct(ctypes.Structure):
    """The verdict on chains of drafts."""

    _fields_ = [
        ("block", BlockStruct),
        ("q_row", _INTEGER),
        *_all(_POINTER, "drafts lengths q accepted tokens chosen logprobs"),
    ]


class DraftStepStruct(ctypes.Structure):
    """A drafter's step: a pass, a draw from its last logits, and the inputs of the next step."""

    _fields_ = [("pass_", PassStruct), ("draws", DrawsStruct), *_all(_POINTER, "bounds positions")]
