"""The arguments of the kernels as C has them: `kernels.h` has the same fields in the same order."""

from __future__ import annotations

import ctypes

_INTEGER, _REAL, _POINTER = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class AttentionStruct(ctypes.Structure):
    """The ragged attention of one layer."""

    _fields_ = [
        *(
            (name, _INTEGER)
            for name in ("rows", "heads", "kv_heads", "dim", "value_dim", "threads")
        ),
        ("scale", _REAL),
        ("softcap", _REAL),
        ("window", _INTEGER),
        *(
            (name, _POINTER)
            for name in ("bounds", "query_rows", "key_rows", "value_rows", "positions", "words")
        ),
        ("columns", _INTEGER),
        *(
            (name, _POINTER)
            for name in ("sinks", "query", "key", "value", "shared_key", "shared_value")
        ),
        *(
            (name, _INTEGER)
            for name in (
                "query_token",
                "query_head",
                "key_token",
                "key_head",
                "value_token",
                "value_head",
            )
        ),
        *(
            (name, _INTEGER)
            for name in (
                "shared_key_token",
                "shared_key_head",
                "shared_value_token",
                "shared_value_head",
            )
        ),
        ("out", _POINTER),
    ]


class HeadsStruct(ctypes.Structure):
    """The rotary embedding of one layer, with the writing of its keys and values to their cells."""

    _fields_ = [
        *((name, _INTEGER) for name in ("tokens", "heads", "kv_heads", "dim", "rotary", "threads")),
        ("eps", _REAL),
        *(
            (name, _POINTER)
            for name in (
                "cos",
                "sin",
                "positions",
                "cells",
                "query_norm",
                "key_norm",
                "states",
                "keys",
                "values",
            )
        ),
    ]


class ProductStruct(ctypes.Structure):
    """A product by packed weights."""

    _fields_ = [
        *(
            (name, _INTEGER)
            for name in ("tokens", "width", "outputs", "kind", "threads", "form", "exact")
        ),
        *((name, _POINTER) for name in ("weight", "bias", "scales", "x", "other", "y", "y_rows")),
    ]


class WeightsStruct(ctypes.Structure):
    """A weight matrix, packed."""

    _fields_ = [
        *((name, _INTEGER) for name in ("width", "outputs", "form", "exact")),
        *((name, _POINTER) for name in ("weight", "bias", "scales")),
    ]


class NormStruct(ctypes.Structure):
    """An RMS norm."""

    _fields_ = [("weight", _POINTER), ("eps", _REAL)]


class LayerStruct(ctypes.Structure):
    """The weights that a pass reads of one layer."""

    _fields_ = [
        *((name, WeightsStruct) for name in ("states", "out", "gate", "up", "down")),
        *((name, NormStruct) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")),
        ("window", _INTEGER),
    ]


class ModelStruct(ctypes.Structure):
    """The facts of a decoder that are the same in all its passes."""

    _fields_ = [
        *(
            (name, _INTEGER)
            for name in ("layer_count", "heads", "kv_heads", "dim", "rotary", "width", "vocabulary")
        ),
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
        *(
            (name, _INTEGER)
            for name in ("tokens", "rows", "columns", "threads", "packed", "capacity", "id_row")
        ),
        *((name, _INTEGER) for name in ("vector_count",)),
        *(
            (name, _POINTER)
            for name in ("ids", "vectors", "bounds", "tree_positions", "words", "cos", "sin")
        ),
        *((name, _POINTER) for name in ("workspace", "logits")),
        ("last_only", _INTEGER),
    ]


class SettingStruct(ctypes.Structure):
    """The sampling settings of a row that the kernels know."""

    _fields_ = [*((name, _REAL) for name in ("temperature", "top_p", "min_p")), ("top_k", _INTEGER)]


class BlockStruct(ctypes.Structure):
    """The scores of a block's positions, and the settings and uniforms that tokens are drawn by."""

    _fields_ = [
        *(
            (name, _INTEGER)
            for name in (
                "rows",
                "columns",
                "vocab",
                "threads",
                "bfloat16",
                "buckets",
                "settings_row",
            )
        ),
        *(
            (name, _INTEGER)
            for name in ("scores_row", "scores_column", "uniforms_row", "uniforms_column")
        ),
        *((name, _POINTER) for name in ("settings", "scores", "uniforms")),
    ]


class DrawsStruct(ctypes.Structure):
    """The draws at every position."""

    _fields_ = [
        ("block", BlockStruct),
        *((name, _POINTER) for name in ("tokens", "chosen", "highest", "probs")),
    ]


class VerdictsStruct(ctypes.Structure):
    """The verdict on chains of drafts."""

    _fields_ = [
        ("block", BlockStruct),
        ("q_row", _INTEGER),
        *(
            (name, _POINTER)
            for name in ("drafts", "lengths", "q", "accepted", "tokens", "chosen", "logprobs")
        ),
    ]


class DraftStepStruct(ctypes.Structure):
    """A drafter's step: a pass, a draw from its last logits, and the inputs of the next step."""

    _fields_ = [
        ("pass_", PassStruct),
        ("draws", DrawsStruct),
        ("bounds", _POINTER),
        ("positions", _POINTER),
    ]
