"""Token alignment: prompts that end inside a token (Athiwaratkun et al., Token Alignment via
Character Matching, 2024).

A prompt is shortened by its last tokens, and the first new tokens must write the bytes of these
again; the model chooses how the bytes divide into tokens. Each sample is aligned by itself, under
the noise of its own row, so samples of a prompt stay independent.

The distribution is local: each constrained token has p renormalised over the allowed tokens. The
distribution of p given the bytes, among all continuations of the shortened prompt, weighs a sample
by w = prod Z_t, where Z_t is the probability that p gives the allowed tokens at step t
(`shoal.constraints.dressing`).

The vocabulary is kept as a trie: its tokens in the order of their bytes. In that order the tokens
below a node stand side by side, so a node is a range and needs no object of its own.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal.config import Grammar, Sampling
from shoal.constraints.filters import Filter
from shoal.constraints.protocol import Allowed, Constraint
from shoal.constraints.token_bytes import token_bytes
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


def align_request(request: Request, tokenizer: Any, *, at: int | None = None) -> Request:
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


CACHED = 128
"""The number of masks kept, the most recently used ones: 128 of 152,000 tokens take 19 MB."""
FREQUENT = (
    b" ",
    b"  ",
    b"    ",
    b"        ",
    b"\n",
    b"\n\n",
    b"\n    ",
    b"\n        ",
    b"\t",
    b"\n\t",
)
"""The remainders whose masks are made with the vocabulary: prompts of code often end in
indentation."""


class AlignmentVocabulary:
    """The vocabulary by its bytes.

    Args:
        spelled: the bytes of each token by its id; None or no bytes for tokens that write nothing,
            which agree with nothing.
    """

    def __init__(self, spelled: Sequence[bytes | None]) -> None:
        self.spelled = tuple(text or b"" for text in spelled)
        order = sorted((text, token) for token, text in enumerate(self.spelled) if text)
        self._texts = [text for text, _ in order]
        self._ids = torch.tensor([token for _, token in order], dtype=torch.long)
        self._longest = max(map(len, self._texts), default=0)
        self._masks: OrderedDict[bytes, Tensor] = OrderedDict()
        for remainder in FREQUENT:
            self.allowed(remainder)

    def allowed(self, remainder: bytes) -> Tensor:
        """Returns the tokens that begin with `remainder` or that `remainder` begins with.

        The mask, [tokens] bool, is shared; callers must not change it.
        """
        if remainder in self._masks:
            self._masks.move_to_end(remainder)
            return self._masks[remainder]
        mask = self._masks[remainder] = self.compute_allowed(remainder)
        if len(self._masks) > CACHED:
            self._masks.popitem(last=False)
        return mask

    def compute_allowed(self, remainder: bytes) -> Tensor:
        """Returns `allowed`, computed anew."""
        mask = torch.zeros(len(self.spelled), dtype=torch.bool)
        places = [self._range(remainder)]
        places += [
            self._same(remainder[:length])
            for length in range(1, min(len(remainder) - 1, self._longest) + 1)
        ]
        mask[torch.cat([self._ids[start:end] for start, end in places])] = True
        return mask

    def _range(self, beginning: bytes) -> tuple[int, int]:
        """Returns the range of the tokens that begin with these bytes."""
        last = beginning.rstrip(b"\xff")
        after = last[:-1] + bytes([last[-1] + 1]) if last else None
        end = len(self._texts) if after is None else bisect_left(self._texts, after)
        return bisect_left(self._texts, beginning), end

    def _same(self, text: bytes) -> tuple[int, int]:
        """Returns the range of the tokens that write exactly these bytes.

        A vocabulary of pieces may have two tokens for one byte.
        """
        return bisect_left(self._texts, text), bisect_left(self._texts, text + b"\0")


_known: weakref.WeakKeyDictionary[Any, AlignmentVocabulary] = weakref.WeakKeyDictionary()


def vocabulary_of(tokenizer: Any) -> AlignmentVocabulary:
    """Returns the vocabulary of a tokenizer, made once.

    Tokens that decoding leaves out write nothing; added tokens are spelled as they stand.
    """
    if tokenizer not in _known:
        _known[tokenizer] = AlignmentVocabulary(token_bytes(tokenizer))
    return _known[tokenizer]
