"""shoal: many samples at once from open language models, by exact batched speculative sampling.

import shoal

model = shoal.load()                       # the bundled pair; or load("hub-id-or-dir", draft="hub-id-or-dir")
result = model.generate("def add(a, b):", n=8, max_new_tokens=64, temperature=0.8, seed=0)
print(result[0].ranked[0].text)
"""

from shoal.api import Shoal, load
from shoal.config import Limits, Sampling, Speculation
from shoal.errors import InternalError, ModelError, RequestError, ShoalError
from shoal.request import Increment, Output, Result, Sample, TopLogprobs
from shoal.stats import Stats
from shoal.transformers_door import custom_generate

__version__ = "0.1.0"

__all__ = [
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
    "load",
]
