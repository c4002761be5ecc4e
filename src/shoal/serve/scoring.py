"""Log-probabilities of a prompt's own tokens: what `echo` tells beside those of the samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shoal.errors import RequestError
from shoal.outputs import Detokenizer
from shoal.request import TopLogprobs
from shoal.runner import Runner
from shoal.serve.tickets import Token

CHUNK = 128
"""Tokens per pass; their logits, [chunk, vocab], are all held at once."""


def prompt_tokens(tokenizer: Any, target: Runner, ids: Sequence[int], top: int) -> tuple[Token, ...]:
    """The prompt as tokens; nothing was known before the first, so it has no log-probability.

    Args:
        top: how many most probable tokens to tell of each position.

    Raises:
        RequestError: a prompt that is empty, too long, or not of this model's tokens. ModelError: out of memory.
    """
    if not ids or len(ids) > target.context:
        raise RequestError(f"the prompt must have 1..{target.context} tokens to be scored, got {len(ids)}")
    if not all(0 <= token < target.vocab_size for token in ids):
        raise RequestError(f"prompt ids must be in 0..{target.vocab_size - 1}, got {min(ids)}..{max(ids)}")
    logprobs, tops = _scores(target, ids, top)
    text = Detokenizer(tokenizer, ())
    for token in ids:
        text.push(token)
    return tuple(
        Token(token, text.piece(i), logprob, False, best)
        for i, (token, logprob, best) in enumerate(zip(ids, [None, *logprobs], [None, *tops], strict=True))
    )


@torch.inference_mode()
def _scores(target: Runner, ids: Sequence[int], top: int) -> tuple[list[float], list[TopLogprobs]]:
    """Log-probabilities of all tokens but the first and of the most probable ones in their place, before processing."""
    runner = target.fork()
    runner.use_static_passes(None)  # shapes that come once are not worth building for
    runner.reserve(1, len(ids))
    logprobs: list[float] = []
    tops: list[TopLogprobs] = []
    for start in range(0, len(ids) - 1, CHUNK):
        block = torch.tensor([ids[start : start + CHUNK]], device=target.device)
        following = torch.tensor(ids[start + 1 : start + 1 + CHUNK], device=target.device)
        logits = runner.feed([0], block, [block.shape[1]])[0, : len(following)]
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
        logprobs += scores.gather(1, following[:, None]).squeeze(1).tolist()
        best = scores.topk(top)
        pairs = [tuple(zip(*row, strict=True)) for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
        tops += [TopLogprobs(pair, pair) for pair in pairs]
    return logprobs, tops
