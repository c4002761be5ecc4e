"""Draws tokens from logits, and accepts drafts, by NumPy: for an engine that only gives logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
