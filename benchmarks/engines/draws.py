"""Draws tokens from logits, and accepts drafts, by NumPy: for an engine that only gives logits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.tasks import Answer, Task

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Sampler:
    """Draws from logits of many rows at once. Everything is [rows, vocabulary]."""

    temperature: float
    top_p: float
    random: np.random.Generator

    def probabilities(self, logits: Floats) -> Floats:
        if self.temperature == 0:
            best = np.zeros(logits.shape, dtype=np.float32)
            best[np.arange(len(logits)), logits.argmax(-1)] = 1
            return best
        scaled = logits / np.float32(self.temperature)
        p = np.exp(scaled - scaled.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        return p if self.top_p >= 1 else np.stack([self._nucleus(row) for row in p])

    def _nucleus(self, p: Floats) -> Floats:
        """Tokens below (1 - top_p) / vocabulary are outside together: only the others are sorted."""
        likely = np.flatnonzero(p >= (1 - self.top_p) / len(p))
        order = likely[np.argsort(-p[likely])]
        kept = order[: 1 + int(np.searchsorted(np.cumsum(p[order]), self.top_p))]
        out = np.zeros_like(p)
        out[kept] = p[kept] / p[kept].sum()
        return out

    def draw(self, p: Floats) -> Ints:
        """One token of each row; p need not sum to 1."""
        if self.temperature == 0:
            return p.argmax(-1)
        cumulated = np.cumsum(p, axis=-1, dtype=np.float64)
        u = self.random.random(len(p)) * cumulated[:, -1]
        return np.minimum((cumulated <= u[:, None]).sum(-1), p.shape[-1] - 1)


def kept_drafts(p: Floats, q: Floats, proposed: Ints, sampler: Sampler) -> tuple[int, int]:
    """How many drafts of a row are kept, and the token after them: rejection sampling (Leviathan et al. 2023, algorithm 1).

    Args:
        p: [k + 1, vocabulary], of the target. q: [k, vocabulary], of the drafter. proposed: [k].
    """
    for j, token in enumerate(proposed.tolist()):
        if sampler.random.random() * q[j, token] >= p[j, token]:
            return j, int(sampler.draw(np.maximum(p[j] - q[j], 0)[None])[0])
    return len(proposed), int(sampler.draw(p[-1:])[0])


def plain_rows(
    logits: Floats,
    decode: Callable[[Ints, Ints], Floats],
    task: Task,
    sampler: Sampler,
    ends: Callable[[list[int]], bool],
    started: float,
) -> Answer:
    """Draws a token of each row until all have ended; rows that have drop out of the batch.

    Args:
        logits: [rows, vocabulary], behind the prompts.
        decode: (rows, their last tokens) -> their next logits.
        ends: whether a row has ended, by its tokens. started: when the call began, by `time.perf_counter`.
    """
    written: list[list[int]] = [[] for _ in logits]
    finished_at, logprobs = np.zeros(len(logits)), np.zeros(len(logits))
    rows = np.arange(len(logits))
    while True:
        p = sampler.probabilities(logits)
        last = sampler.draw(p)
        logprobs[rows] += np.log(p[np.arange(len(rows)), last])
        for row, token in zip(rows.tolist(), last.tolist(), strict=True):
            written[row].append(token)
        over = np.array([len(written[row]) == task.new_tokens or ends(written[row]) for row in rows.tolist()])
        finished_at[rows[over]] = time.perf_counter() - started
        rows, last = rows[~over], last[~over]
        if not len(rows):
            means = logprobs / [len(row) for row in written]
            return Answer(written, finished_at=finished_at.tolist(), mean_logprobs=means.tolist())
        logits = decode(rows, last)


def row_end(
    eos: Sequence[int], stops: Sequence[str] = (), text: Callable[[list[int]], str] | None = None
) -> Callable[[list[int]], bool]:
    """Returns whether a row has ended: by its last token, or by a stop string in the text of its last tokens."""
    if text is None:
        return lambda written: written[-1] in eos
    tail = 1 + max(len(stop.encode()) for stop in stops)  # a token has a byte at least

    def ended(written: list[int]) -> bool:
        end = text(written[-tail:])
        return written[-1] in eos or any(stop in end for stop in stops)

    return ended
