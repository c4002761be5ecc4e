"""The tiny models, scripted models and tokenizers for tests.

They test the library, drafters and constraints. Everything is built in milliseconds from configs;
nothing is downloaded. `shoal.testing.tiny` has tokenizers like those of real models.
"""

from shoal.testing.architectures import ARCHITECTURES, RECURRENT, REFUSED
from shoal.testing.tiny import VOCABULARY, save_pair, tiny_model, tiny_tokenizer

__all__ = [
    "ARCHITECTURES",
    "RECURRENT",
    "REFUSED",
    "VOCABULARY",
    "save_pair",
    "tiny_model",
    "tiny_tokenizer",
]
