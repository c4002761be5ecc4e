"""Log-probabilities of a prompt's own tokens, for `echo` and `prompt_logprobs`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import anyio
import torch

from shoal.engine.detokenizer import Detokenizer, special_tokens
from shoal.errors import RequestError
from shoal.models.runner import Runner
from shoal.serve.api_errors import ApiError
from shoal.serve.submissions import TokenUpdate
from shoal.serve.worker import Worker
from shoal.types.samples import TopLogprobs

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
        self._runner: Runner | None = target.fork_for_ordinary_passes()
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
        return max(texts, key=lambda text: (text.text == echo, _common(text.text, echo)))

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


def _common(a: str, b: str) -> int:
    """Returns the length of the longest common beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
