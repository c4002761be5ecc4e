"""A trie of the vocabulary, which finds the tokens that agree with bytes that must come next.

The trie is kept as its tokens in the order of their bytes. In that order the tokens below a node
stand side by side, so a node is a range and needs no object of its own.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.constraints.token_bytes import token_bytes

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
        mask = self._masks[remainder] = self.uncached(remainder)
        if len(self._masks) > CACHED:
            self._masks.popitem(last=False)
        return mask

    def uncached(self, remainder: bytes) -> Tensor:
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
        """Returns the range of the tokens of exactly these bytes.

        Vocabularies of pieces may spell a byte twice.
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
