"""The details of the tokens of an answer: names, bytes, log-probabilities, drafters, rounds."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from shoal.constraints.token_bytes import byte_letters, fallback
from shoal.serve.api_errors import Json
from shoal.serve.submissions import RoundUpdate, RowUpdate, TokenUpdate

MIN_LOGPROB = -9999.0
"""The replacement of -inf, which JSON does not have."""
BY_ID = "token_id:{}"
"""The name of a token by its id, as vLLM writes it."""
BROKEN = "\ufffd"
"""The text to which tokenizers decode a part of a character."""


@lru_cache(2**16)
def name_and_bytes(tokenizer: Any, token: int, by_id: bool = False) -> tuple[str, bytes | None]:
    r"""Returns a token's name, and its bytes in a text; None if the tokenizer does not have them.

    The name is its text, spaces and special tokens included; for a part of a character, as OpenAI
    writes it, "bytes:\xe2\x82"; for an id without a text, as vLLM writes it, "token_id:7",
    and so for all if they are named by id.
    """
    if by_id:
        return BY_ID.format(token), name_and_bytes(tokenizer, token)[1]
    text = _decoded(tokenizer, token)
    if not text:
        return BY_ID.format(token), b""
    if BROKEN not in text:
        return text, text.encode()
    piece = tokenizer.convert_ids_to_tokens(token)
    raw = None if piece is None else _bytes(piece)
    return (
        (text, None) if raw is None else ("bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw)
    )


def _decoded(tokenizer: Any, token: int) -> str:
    """Returns the text of a token after another one.

    Some tokenizers remove the space at the beginning of a text.
    """
    once, twice = (
        str(tokenizer.decode([token] * times, clean_up_tokenization_spaces=False))
        for times in (1, 2)
    )
    return twice[len(once) :] if twice.startswith(once) and len(twice) > len(once) else once


def _bytes(piece: str) -> bytes | None:
    """Returns the bytes of a token as byte-level BPE or byte fallback writes it."""
    byte, known = fallback(piece), byte_letters()
    if byte is not None:
        return byte
    return (
        bytes(known[letter] for letter in piece)
        if all(letter in known for letter in piece)
        else None
    )


def finite(value: float | None) -> float | None:
    """Returns a log-probability as a JSON number; NaN, the mean of no tokens, becomes null."""
    return None if value is None or math.isnan(value) else max(value, MIN_LOGPROB)


class ChoiceDetails:
    """The details of a choice, the field `shoal`; the mean log-probability goes on over a stream.

    Args:
        tokenizer: the target's.
        rounds: True if the request asks for details by round.
    """

    def __init__(self, tokenizer: Any, rounds: bool) -> None:
        self._tokenizer, self._rounds = tokenizer, rounds
        self._logprob_sum, self._counted = 0.0, 0

    def of(self, update: RowUpdate) -> Json:
        """Returns the details of an update."""
        self._logprob_sum += sum(token.logprob or 0.0 for token in update.tokens)
        self._counted += len(update.tokens)
        by_round = {"by_round": [*map(self._round, update.by_round)]} if self._rounds else {}
        return {
            "tokens": [*map(_token, update.tokens)],
            "mean_logprob": finite(self._logprob_sum / self._counted) if self._counted else None,
            "committed": update.committed,
            "drafted": update.drafted,
            "accepted": update.accepted,
            "rounds": update.rounds,
            **by_round,
        }

    def _round(self, done: RoundUpdate) -> Json:
        rejected = [
            {"id": id, "text": name_and_bytes(self._tokenizer, id)[0], "drafter": name}
            for id, name in done.rejected
        ]
        return {
            "start": done.start,
            "committed": done.committed,
            "accepted": done.accepted,
            "rejected": rejected,
        }


def _token(token: TokenUpdate) -> Json:
    return {
        "id": token.id,
        "text": token.text,
        "logprob": finite(token.logprob),
        "from_draft": token.drafter is not None,
        "drafter": token.drafter,
    }
