"""shoal: many samples at once from open language models, by exact batched speculative sampling.

import shoal

model = shoal.load()  # the bundled pair; or load("hub-id-or-dir", draft="hub-id-or-dir")
result = model.generate("def add(a, b):", n=8, max_new_tokens=64, temperature=0.8, seed=0)
print(result[0].ranked[0].text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.api import Shoal
    from shoal.config import Grammar, Limits, Sampling, Speculation
    from shoal.errors import InternalError, ModelError, RequestError, ShoalError
    from shoal.integrations.repository import custom_generate_dir
    from shoal.integrations.transformers import custom_generate
    from shoal.loader import load
    from shoal.types.samples import Increment, Output, Result, Sample, TopLogprobs
    from shoal.types.stats import Stats

__version__ = "0.1.0"

_HOMES = {
    "api": "Shoal",
    "loader": "load",
    "config": "Grammar Limits Sampling Speculation",
    "errors": "InternalError ModelError RequestError ShoalError",
    "types.samples": "Increment Output Result Sample TopLogprobs",
    "types.stats": "Stats",
    "integrations.transformers": "custom_generate",
    "integrations.repository": "custom_generate_dir",
}
__all__ = [
    "Grammar",
    "Increment",
    "InternalError",
    "Limits",
    "ModelError",
    "Output",
    "RequestError",
    "Result",
    "Sample",
    "Sampling",
    "Shoal",
    "ShoalError",
    "Speculation",
    "Stats",
    "TopLogprobs",
    "custom_generate",
    "custom_generate_dir",
    "load",
]


def __dir__() -> list[str]:
    """The public names, also before their first use."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used: `shoal --help` need not wait for torch."""
    for module, names in _HOMES.items():
        if name in names.split():
            value = getattr(import_module(f"shoal.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")
