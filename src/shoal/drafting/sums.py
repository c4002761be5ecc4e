"""A drafter without a model where it is sure, a draft model for all other rows.

Chains only. Where the model's drafts are verified by their q, those of the other drafter have one too: a point mass, which is what
they were drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.drafting.protocol import DraftCounters, Drafter, DraftInputs
from shoal.drafting.text import NOTHING, Guess, TextDrafter
from shoal.sampling.scores import Scores
from shoal.types.requests import Row
from shoal.types.rounds import Verdict
from shoal.types.schedule import PrefillChunk
from shoal.types.trees import DraftTree, chains

SURE = 0.6
"""Confidence in its first token from which a row is left to the drafter without a model: in suffix decoding, what followed once,
after a match of 9 tokens, or twice, and nothing else did, after one of 3."""


class SumDrafter(Drafter):
    """Two drafters as one.

    Args:
        text: proposes chains. model: drafts for the rows of which the other is not sure.
    """

    def __init__(self, text: TextDrafter, model: Drafter) -> None:
        self.text, self.model = text, model
        self.memory, self.hidden_layers = model.memory, model.hidden_layers

    def propose(self, inputs: DraftInputs) -> DraftTree:
        found = self.text.guesses(inputs)
        guesses = [guess if guess.tokens and guess.confidence[0] >= SURE else NOTHING for guess in found]
        lengths = [0 if guess.tokens else length for guess, length in zip(guesses, inputs.lengths, strict=True)]
        ends = _Ends(guesses, inputs)
        own = DraftTree.empty(len(lengths), inputs.uniforms.device)
        if max(lengths):
            stop = inputs.stop and ends.asked
            own = self.model.propose(DraftInputs(inputs.rows, lengths, inputs.uniforms, inputs.sampler, stop))
        steps = ends.finish(own.steps)
        chosen = [list(guess.tokens[:end]) for guess, end in zip(guesses, ends.lengths, strict=True)]
        if not any(chosen):
            return own if own.steps else DraftTree.empty(len(lengths), inputs.uniforms.device, steps)
        drafts = [mine or theirs for mine, theirs in zip(chosen, own.drafts, strict=True)]
        tree = DraftTree.of(drafts, device=inputs.uniforms.device, steps=steps)
        q = None if own.q is None else _with_point_masses(own.q, chosen, tree.m)
        return DraftTree(tree.tokens, tree.lengths, q, tree.drafts, chains(drafts), steps)

    def begin(self, rows: Sequence[Row]) -> None:
        self.text.begin(rows)
        self.model.begin(rows)

    def prepare(self, chunks: Sequence[PrefillChunk]) -> None:
        self.model.prepare(chunks)

    def read_prompts(self, chunks: Sequence[PrefillChunk], hidden: Sequence[Tensor]) -> None:
        self.model.read_prompts(chunks, hidden)

    def observe(self, rows: Sequence[Row], scores: Scores, verdict: Verdict) -> None:
        self.text.observe(rows, scores, verdict)
        self.model.observe(rows, scores, verdict)

    def end(self, rows: Sequence[Row]) -> None:
        self.text.end(rows)
        self.model.end(rows)

    def releases(self) -> Sequence[Callable[[], None]]:
        return self.model.releases()

    def take_counters(self) -> DraftCounters:
        text, model = self.text.take_counters(), self.model.take_counters()
        return DraftCounters(model.passes, text.seconds + model.seconds, text.preparing + model.preparing)

    @property
    def seconds_preparing(self) -> float:
        return self.text.seconds_preparing + self.model.seconds_preparing


class _Ends:
    """Where the drafts of a round end: both drafters ask `DraftInputs.stop` as one.

    Attributes:
        lengths: of the guesses so far.
    """

    def __init__(self, guesses: Sequence[Guess], inputs: DraftInputs) -> None:
        self._guesses, self._stop = guesses, inputs.stop
        self.lengths = [len(guess.tokens) for guess in guesses]

    def asked(self, position: int, confidence: Sequence[float]) -> Sequence[int]:
        """Asks with the model's confidence, and that of the guesses where there are any."""
        assert self._stop is not None
        sure = [
            model if not guess.tokens else guess.confidence[position] if position < len(guess.tokens) else 0.0
            for model, guess in zip(confidence, self._guesses, strict=True)
        ]
        ends = self._stop(position, sure)
        self.lengths = [min(pair) for pair in zip(self.lengths, ends, strict=True)]
        return ends

    def finish(self, position: int) -> int:
        """Asks on from a position for the guesses alone; returns how many positions were looked at in all."""
        if self._stop is None:
            return max(position, *self.lengths, 1)
        while max(self.lengths) > position or not position:
            self.asked(position, [0.0] * len(self.lengths))
            position += 1
        return position


def _with_point_masses(q: Sequence[Tensor], drafts: Sequence[list[int]], m: int) -> list[Tensor]:
    """q of m positions, [rows, vocab] each: rows with drafts of their own have a point mass there."""
    found = [values.clone() for values in q[:m]] + [torch.zeros_like(q[0]) for _ in range(m - len(q))]
    for row, tokens in enumerate(drafts):
        for values, token in zip(found, tokens, strict=False):
            values[row] = 0.0
            values[row, token] = 1.0
    return found
