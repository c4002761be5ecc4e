"""Tiny models, a tokenizer, scripted models and exact distributions for tests of the library, of
drafters and of constraints.

Everything is built in milliseconds from configs; nothing is downloaded. `shoal.testing.tokenizers`
has tokenizers as real models have them.
"""

from shoal.testing.tiny import (
    ARCHITECTURES,
    REFUSED,
    VOCABULARY,
    save_pair,
    tiny_model,
    tiny_tokenizer,
)

__all__ = ["ARCHITECTURES", "REFUSED", "VOCABULARY", "save_pair", "tiny_model", "tiny_tokenizer"]
