"""The arguments of the kernels as C has them: `kernels.h` has the same fields in the same order."""

from __future__ import annotations

import ctypes

_INTEGER, _REAL, _POINTER = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class Attention(ctypes.Structure):
    """One layer's ragged attention."""

    _fields_ = [
        *((name, _INTEGER) for name in ("rows", "heads", "kv_heads", "dim", "value_dim", "threads")),
        ("scale", _REAL),
        ("softcap", _REAL),
        ("window", _INTEGER),
        *((name, _POINTER) for name in ("bounds", "query_rows", "key_rows", "value_rows", "positions", "words")),
        ("columns", _INTEGER),
        *((name, _POINTER) for name in ("sinks", "query", "key", "value", "shared_key", "shared_value")),
        *((name, _INTEGER) for name in ("query_token", "query_head", "key_token", "key_head", "value_token", "value_head")),
        *((name, _INTEGER) for name in ("shared_key_token", "shared_key_head", "shared_value_token", "shared_value_head")),
        ("out", _POINTER),
    ]


class Heads(ctypes.Structure):
    """One layer's rotary embedding, and its keys and values to their cells."""

    _fields_ = [
        *((name, _INTEGER) for name in ("tokens", "heads", "kv_heads", "dim", "rotary", "threads")),
        ("eps", _REAL),
        *(
            (name, _POINTER)
            for name in ("cos", "sin", "positions", "cells", "query_norm", "key_norm", "states", "keys", "values")
        ),
    ]


class Product(ctypes.Structure):
    """A product by packed weights."""

    _fields_ = [
        *((name, _INTEGER) for name in ("tokens", "width", "outputs", "kind", "threads")),
        *((name, _POINTER) for name in ("weight", "bias", "x", "other", "y")),
    ]
