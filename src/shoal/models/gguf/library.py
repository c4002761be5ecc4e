"""The library llama.cpp, by the low-level functions of llama-cpp-python, the extra `gguf`."""

from __future__ import annotations

import ctypes
from collections import deque
from functools import cache
from types import ModuleType
from typing import Any

from shoal.errors import RequestError

INSTALL = (
    "GGUF files need llama.cpp: pip install 'shoal[gguf]'. Where there is no wheel for this "
    "machine, pip compiles it for some minutes with a C++ compiler"
)
WARNING = 3
"""The level of `ggml_log_level` from which on lines are kept."""

_complaints: deque[str] = deque(maxlen=4)
_callbacks: list[Any] = []  # llama.cpp calls them for as long as the process lives


@cache
def library() -> ModuleType:
    """Returns the module `llama_cpp`, which from now on writes nothing to stderr.

    Raises:
        RequestError: it is not installed, or does not load; the message says how to install it.
    """
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError) as error:
        raise RequestError(f"{INSTALL} ({error})") from error

    @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator, unused-ignore]
    def hear(level: int, text: bytes, _: Any) -> None:
        if level >= WARNING and text.strip():
            _complaints.append(text.decode("utf-8", "replace").strip())

    _callbacks.append(hear)
    llama_cpp.llama_log_set(hear, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    module: ModuleType = llama_cpp
    return module


def complaint(otherwise: str) -> str:
    """Returns the last line that llama.cpp wrote as a warning or an error, and forgets all lines.

    Returns `otherwise` if there is no line.
    """
    text = _complaints[-1] if _complaints else otherwise
    _complaints.clear()
    return text
