"""A grammar of words, and models that draft and decode under it."""

from __future__ import annotations

from collections.abc import Sequence

import llguidance
import llguidance.hf
import numpy as np
import torch
from torch import Tensor

from shoal.api import Shoal
from shoal.config import Grammar
from shoal.constraints import masks
from shoal.testing import END, VOCABULARY, tiny_tokenizer
from shoal.testing.scripted import History, hashed, mixed, scripted
from shoal.types.requests import Row

TOKENIZER = tiny_tokenizer()
ALPHABET = llguidance.hf.from_tokenizer(TOKENIZER)
WORDS = Grammar("regex", "[a-d]{2,6}(,[0-9]{1,3}){0,3};")
COMPACT = {"x-guidance": {"whitespace_flexible": False}}


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def readable(grammar: Grammar) -> str:
    """The grammar as llguidance takes it, by its own functions."""
    matcher = llguidance.LLMatcher
    return {
        "regex": matcher.grammar_from_regex,
        "json_schema": matcher.grammar_from_json_schema,
        "lark": matcher.grammar_from_lark,
    }[grammar.kind](grammar.text)


def possible(grammar: Grammar, new: Sequence[int]) -> Tensor:
    """What may follow the new tokens, [260] bool, by a fresh matcher whose end of text is the EOS itself: none of shoal's code."""
    matcher = llguidance.LLMatcher(ALPHABET, readable(grammar))
    assert matcher.consume_tokens(list(new))
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    return torch.from_numpy(bits[:VOCABULARY].astype(bool))


TARGET = hashed(VOCABULARY, 0, spread=3.0)
DRAFTER = mixed(TARGET, hashed(VOCABULARY, 1, spread=3.0), every=3)


def made(target: History = TARGET, drafter: History | None = DRAFTER, max_batch: int = 16, vocab: int = VOCABULARY) -> Shoal:
    draft = None if drafter is None else scripted(drafter, vocab)
    shoal = Shoal(scripted(target, vocab), draft, TOKENIZER, max_batch=max_batch)
    shoal.eos = (END,)
    return shoal


def commit(row: Row, tokens: Sequence[int]) -> None:
    for token in tokens:
        row.tokens.append(token)
        masks.advance(row, token)
