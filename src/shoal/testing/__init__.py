"""Tiny models, a tokenizer and saved pairs to try shoal with: built in milliseconds, nothing is downloaded."""

from shoal.testing.tiny import ARCHITECTURES, REFUSED, VOCABULARY, save_pair, tiny_model, tiny_tokenizer

__all__ = ["ARCHITECTURES", "REFUSED", "VOCABULARY", "save_pair", "tiny_model", "tiny_tokenizer"]
