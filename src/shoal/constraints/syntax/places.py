"""The places at which a text that is made of tokens may be cut."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


def end_places(
    written: Sequence[bytes], healing: int, scores: Sequence[float], most: int
) -> tuple[list[tuple[float, int, int]], str]:
    """Returns the places, highest score first, and the text.

    Args:
        written: the bytes that each token writes.
        healing: the number of bytes that are written again, and are no part of the text.
        scores: see `shoal.constraints.check.Cutting.best_end`.
        most: see `shoal.constraints.check.Cutting.best_end`.

    Returns:
        Each place as its score, the characters before it and the number of tokens that wrote them;
            and the text.
    """
    places = [(scores[0], 0, 0)] if not healing else []
    decoder, size, text = codecs.getincrementaldecoder("utf-8")(), 0, ""
    for count, own in enumerate(written, start=1):
        text += decoder.decode(own[healing:])
        if 0 < healing <= len(own):
            places.append((scores[count], 0, count))
        healing = max(0, healing - len(own))
        places += [(scores[count], end, count) for end in range(size + 1, min(most, len(text)) + 1)]
        size = len(text)
    return sorted(places, reverse=True), text
