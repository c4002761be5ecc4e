"""Token alignment: prompts that end inside a token (Athiwaratkun et al., Token Alignment via
Character Matching, 2024).

A prompt is shortened by its last tokens, and the first new tokens must write the bytes of these
again; the model chooses how the bytes divide into tokens. Each sample is aligned by itself, under
the noise of its own row, so samples of a prompt stay independent.

The distribution is local: each constrained token has p renormalised over the allowed tokens. The
distribution of p given the bytes, among all continuations of the shortened prompt, weighs a sample
by w = prod Z_t, where Z_t is the probability that p gives the allowed tokens at step t
(`shoal.constraints.weights`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch

from shoal.config import Grammar, Sampling
from shoal.constraints.alignment_vocabulary import AlignmentVocabulary, vocabulary_of
from shoal.constraints.filters import Filter
from shoal.constraints.protocol import Allowed, Constraint
from shoal.errors import RequestError
from shoal.types.requests import Request, Row

BACK_OFF = 3
"""The most tokens taken back (the paper's default)."""
WORD_START = "▁"


class Alignment(Constraint[bytes]):
    """A constraint under which the new text begins with given bytes.

    A state is the rest of the bytes.

    Args:
        remainder: the bytes.
        vocabulary: the vocabulary of the row's tokenizer.
    """

    def __init__(self, remainder: bytes, vocabulary: AlignmentVocabulary) -> None:
        self.remainder, self._vocabulary = remainder, vocabulary

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alignment) and (other.remainder, other.batch_key) == (
            self.remainder,
            self.batch_key,
        )

    def __hash__(self) -> int:
        return hash((self.remainder, self.batch_key))

    def begin(self, row: Row) -> bytes:
        return self.remainder

    def advance(self, state: bytes, token: int) -> bytes:
        spelled = self._vocabulary.spelled
        text = spelled[token] if token < len(spelled) else b""
        return state[len(text) :] if state.startswith(text) else b""

    def mask(self, states: Sequence[bytes], vocab_size: int, device: torch.device) -> Allowed:
        tokens = torch.ones(len(states), vocab_size, dtype=torch.bool)
        for i, state in enumerate(states):
            if state:
                own = self._vocabulary.allowed(state)[:vocab_size]
                tokens[i, : len(own)] = own
                tokens[i, len(own) :] = False
        return Allowed(
            tokens.to(device), torch.tensor([not state for state in states], device=device)
        )

    def is_free(self, state: bytes) -> bool:
        return not state

    @property
    def batch_key(self) -> Hashable:
        return Alignment, id(self._vocabulary)


def aligned(request: Request, tokenizer: Any, *, at: int | None = None) -> Request:
    """Returns the request with a shorter prompt, and a constraint to write the removed bytes.

    Args:
        tokenizer: the target's.
        at: the place in the prompt where the text to be continued ends; None = the end of the
            prompt. If a suffix follows the text, the place is an earlier one.

    Raises:
        RequestError: there is no tokenizer, or the request has a control that excludes alignment.
    """
    _require(request, tokenizer)
    ids = request.prompt_ids
    end = len(ids) if at is None else at
    vocabulary = vocabulary_of(tokenizer)
    count = back_off(ids[:end], tokenizer, vocabulary)
    removed = ids[end - count : end]
    remainder = b"".join(vocabulary.spelled[token] for token in removed)
    if not remainder:
        return request
    return replace(
        request,
        prompt_ids=ids[: end - count] + ids[end:],
        removed=removed,
        removed_from=end - count,
        limits=replace(request.limits, max_new_tokens=request.limits.max_new_tokens + count),
        constraints=(*request.constraints, Alignment(remainder, vocabulary)),
    )


def back_off(ids: Sequence[int], tokenizer: Any, vocabulary: AlignmentVocabulary) -> int:
    """Returns the number of last tokens to take back.

    It is at most `BACK_OFF`. The walk takes back neither the first token of a prompt nor a special
    token, nor any token before a special one. It ends after a token that starts a word by
    SentencePiece's mark, or a run of blanks that was added to the vocabulary. If a character would
    be cut in two, the walk takes back more tokens, until the rest ends with a whole character or
    the walk has to end.
    """
    added = set(getattr(tokenizer, "added_tokens_decoder", {}))
    spelled, count = vocabulary.spelled, 0
    while count < len(ids) - 1 and ids[-1 - count] < len(spelled) and spelled[ids[-1 - count]]:
        token = ids[-1 - count]
        count += 1
        starts = token in added or str(tokenizer.convert_ids_to_tokens(token)).startswith(
            WORD_START
        )
        begins_whole = not 0x80 <= spelled[token][0] < 0xC0  # no continuation byte of UTF-8
        if begins_whole and (starts or count >= BACK_OFF):
            break
    return count


def bound_from_start(sampling: Sampling, constraints: Sequence[Any]) -> bool:
    """Returns True if a grammar or filter constrains the whole text from the end of the prompt on.

    A shortened prompt ends at another place.
    """
    return sampling.grammar is not None or any(
        isinstance(each, Filter | Grammar) for each in constraints
    )


def _require(request: Request, tokenizer: Any) -> None:
    sampling = request.sampling
    if tokenizer is None:
        raise RequestError("align needs a tokenizer, and this engine has none")
    if bound_from_start(sampling, request.constraints):
        raise RequestError(
            "align does not go with a grammar or filter, whose language begins where the prompt "
            "ends: leave one out"
        )
