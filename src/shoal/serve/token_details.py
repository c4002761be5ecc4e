"""The details of the tokens of an answer: names, bytes, log-probabilities, drafters, rounds.

For `echo` and `prompt_logprobs` a prompt's own tokens have log-probabilities, too.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import anyio
import torch

from shoal.constraints.grammar import common_length
from shoal.constraints.token_bytes import byte_letters, fallback
from shoal.engine.detokenizer import Detokenizer, special_tokens
from shoal.errors import RequestError
from shoal.models.runner import Runner
from shoal.serve.api_errors import ApiError, Json
from shoal.serve.worker import RoundUpdate, RowUpdate, TokenUpdate, Worker
from shoal.types.samples import TopLogprobs

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
    """Returns the text of a token after another: some tokenizers remove a text's first space."""
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
    if all(letter in known for letter in piece):
        return bytes(known[letter] for letter in piece)
    return None


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


CHUNK_TOKENS = 128
"""The tokens per pass; their logits [chunk, vocab] are in memory at once."""
POLL_SECONDS = 0.02
"""The interval at which the reservation of memory is tried again."""


async def scored(
    worker: Worker, prompts: Sequence[Sequence[int]], top: int, deadline: float
) -> list[Scoring]:
    """Scores prompts one after the other: only one cache is needed beside the rows' caches.

    Args:
        worker: the worker whose engine scores them.
        prompts: the token ids of the prompts.
        top: the number of most probable tokens per position.
        deadline: by `time.perf_counter`.

    Raises:
        ApiError: 503, the deadline has passed.
        RequestError: see `Scoring`.
        ModelError: see `Scoring`.
    """
    try:
        with anyio.fail_after(max(deadline - time.perf_counter(), 0)):
            return [await _scored(worker, ids, top) for ids in prompts]
    except TimeoutError as error:
        message = (
            "the prompts could not be scored within this request's time: send fewer or "
            "shorter ones, or allow more"
        )
        raise ApiError(503, message, code="time_limit") from error


async def _scored(worker: Worker, ids: Sequence[int], top: int) -> Scoring:
    async with worker.scoring:
        try:
            while not await worker.thread.call(
                lambda: worker.thread.engine.reserve_tokens(len(ids))
            ):
                await asyncio.sleep(POLL_SECONDS)
            scoring = await worker.thread.call(
                lambda: Scoring(worker.thread.engine.target, ids, top)
            )
            while not scoring.done:
                await worker.thread.call(scoring.advance)
            scoring.release()
            return scoring
        finally:
            worker.thread.post(lambda: worker.thread.engine.reserve_tokens(0))


class Scoring:
    """The scoring of one prompt, a chunk at a time, so that rounds can run between two chunks.

    Args:
        ids: the prompt's token ids.
        top: the number of most probable tokens per position.

    Attributes:
        done: True if all log-probabilities are computed.

    Raises:
        RequestError: the prompt is empty, too long, or has ids outside of the vocabulary.
        ModelError: out of memory.
    """

    def __init__(self, target: Runner, ids: Sequence[int], top: int) -> None:
        if not ids or len(ids) > target.context:
            raise RequestError(
                f"the prompt must have 1..{target.context} tokens to be scored, got {len(ids)}"
            )
        if not all(0 <= token < target.vocab_size for token in ids):
            raise RequestError(
                f"prompt ids must be in 0..{target.vocab_size - 1}, got {min(ids)}..{max(ids)}"
            )
        self._ids, self._top = list(ids), top
        self._runner: Runner | None = target.fork(ordinary=True)
        self._runner.memory.reserve(1, len(ids))
        self._logprobs: list[float | None] = [None]  # the first token has no probability
        self._tops: list[TopLogprobs | None] = [None]
        self._ranks: list[int] = [0]

    @property
    def done(self) -> bool:
        return len(self._logprobs) == len(self._ids)

    def release(self) -> None:
        """Frees the cache; the results stay."""
        self._runner = None

    @torch.inference_mode()
    def advance(self) -> None:
        """Computes the log-probabilities of the next chunk's tokens and of the most probable ones.

        They are computed from the unprocessed logits.
        """
        runner, start = self._runner, len(self._logprobs) - 1
        assert runner is not None
        block = torch.tensor([self._ids[start : start + CHUNK_TOKENS]], device=runner.device)
        following = torch.tensor(
            self._ids[start + 1 : start + 1 + CHUNK_TOKENS], device=runner.device
        )
        logits = runner.feed([0], block, [block.shape[1]])[0, : len(following)]
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
        own = scores.gather(1, following[:, None])
        self._logprobs += own.squeeze(1).tolist()
        self._ranks += (scores > own).sum(-1).add(1).tolist()
        best = scores.topk(self._top)
        pairs = [
            tuple(zip(*row, strict=True))
            for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        self._tops += [TopLogprobs(pair, pair) for pair in pairs]

    def tokens(self, tokenizer: Any, echo: str) -> tuple[TokenUpdate, ...]:
        """Returns the prompt's tokens, with their parts of the echoed text; call when `done`."""
        text = self._read(tokenizer, echo)
        scores = zip(self._ids, self._logprobs, self._tops, strict=True)
        return tuple(
            TokenUpdate(token, text.piece(i), logprob, None, best)
            for i, (token, logprob, best) in enumerate(scores)
        )

    def _read(self, tokenizer: Any, echo: str) -> Detokenizer:
        """Returns the prompt decoded token by token, with the special tokens that `echo` shows."""
        special = frozenset(special_tokens(tokenizer))
        begins = {getattr(tokenizer, "bos_token_id", None)}
        every = (frozenset[int](), special - begins, special)
        texts = [Detokenizer(tokenizer, (), shown=shown) for shown in every]
        for text in texts:
            for token in self._ids:
                text.push(token)
        return max(texts, key=lambda text: (text.text == echo, common_length(text.text, echo)))

    def ranked(self, count: int) -> list[dict[int, tuple[float, int]] | None]:
        """Returns the log-probabilities and ranks at each token of the prompt; call when `done`.

        Each entry has the token itself and the `count` most probable tokens there, with ranks from
        1; it is None for the first token.
        """
        return [None, *(self._ranked_at(i, count) for i in range(1, len(self._ids)))]

    def _ranked_at(self, i: int, count: int) -> dict[int, tuple[float, int]]:
        logprob, best = self._logprobs[i], self._tops[i]
        assert logprob is not None
        assert best is not None
        others = enumerate(best.raw[:count], start=1)
        own = self._ids[i]
        return {
            own: (logprob, self._ranks[i]),
            **{t: (value, rank) for rank, (t, value) in others if t != own},
        }
