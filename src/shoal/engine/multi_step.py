"""Several plain rounds in one go, for passes so short that the work around them counts.

On a CPU the passes and draws of such rounds are calls of the kernels in C, each of which leaves the
drawn tokens where the next one reads them (`shoal.models.lean.steps`). They are committed together.
Tokens, log-probabilities and counts are the same as of rounds one by one: a row's draws depend on
its own tokens and uniforms alone, and a run of rounds ends as soon as a row that ends would change
the rows of the next round.

Other engines call this multi-step scheduling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.engine.running_rows import Batch
from shoal.lookahead import Controller
from shoal.models.compiled.draft_functions import DraftedStep
from shoal.models.lean.steps import Drawing, lean_steps, rounds_at_once
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.sampling.acceptance.one_sample import decides_chains
from shoal.sampling.controls import change
from shoal.sampling.distributions import RACES
from shoal.sampling.native_draws import knows
from shoal.sampling.uniforms import UniformsAhead
from shoal.types.requests import Row
from shoal.types.trees import PlainRun

MOST_ROUNDS = 8
"""The most rounds of a run."""
MOST_TOKENS = 512
"""The most tokens of a run, rows times rounds: four rounds of 128 rows."""


class MultiStep:
    """The runs of plain rounds of an engine.

    Args:
        batch: the engine's rows, with its target, drafter and clock.
        lookahead: the controller, which knows how long rounds stay plain if there is a drafter.
        rule: the rule of the engine; runs are made of draws by the rules of `shoal` alone.
    """

    def __init__(
        self, batch: Batch, lookahead: Controller, rule: Rule, uniforms: UniformsAhead
    ) -> None:
        self._target, self._clock = batch.target, batch.clock
        self._lookahead, self._uniforms = lookahead, uniforms
        self._drafts = batch.drafter is not None
        self._plain = batch.plain
        own = isinstance(rule, Coupled | Rejection) and decides_chains(rule)
        self._race = RACES.get(rule.draw) if own else None

    @classmethod
    def of(
        cls, batch: Batch, lookahead: Controller, rule: Rule, uniforms: UniformsAhead
    ) -> MultiStep | None:
        """Returns the runs of an engine; None if its target computes no rounds in one go."""
        if rounds_at_once(batch.target) < 2:
            return None
        return cls(batch, lookahead, rule, uniforms)

    def run(self, rows: Sequence[Row], *, may_change: bool) -> PlainRun | None:
        """Draws the next tokens of all rows; their cells are then in the cache, nothing committed.

        Args:
            rows: the rows that run, in a round that is plain.
            may_change: True if a row waits for the slot of the first row that ends.

        Returns:
            None if the rounds have to be computed one by one.
        """
        rounds = self._rounds(rows)
        if rounds < 2:
            return None
        target, slots = self._target, [row.slot for row in rows]
        raw = torch.empty(rounds, len(rows))
        step = self._steps(rows, slots, raw)
        if step is None:
            return None
        lengths = [target.cache.lengths[slot] for slot in slots]
        deadline = min((row.deadline for row in rows if row.deadline is not None), default=None)
        left = {b: (row.remaining, row.eos) for b, row in enumerate(rows)}  # rows that go on
        tokens: list[list[int]] = []
        probs: list[Tensor] = []
        while len(tokens) < rounds and (draws := step()) is not None:
            tokens.append(draws.tokens.tolist())
            probs.append(draws.confidence)
            count, new = len(tokens), tokens[-1]
            for b in [b for b, (most, eos) in left.items() if count == most or new[b] in eos]:
                del left[b]
            late = deadline is not None and self._clock() >= deadline
            if late or not left or (may_change and len(left) < len(rows)):
                break
        else:
            if len(tokens) < rounds:  # a row has no distribution: its round is computed by itself
                self._give_back(slots, [length + len(tokens) for length in lengths])
        if not tokens:
            return None
        processed = torch.stack(probs, dim=1).log().tolist()
        by_row = [list(own) for own in zip(*tokens, strict=True)]
        return PlainRun(by_row, raw[: len(tokens)].T.tolist(), processed)

    def _rounds(self, rows: Sequence[Row]) -> int:
        """Returns the most rounds of a run of these rows; less than 2 = no run."""
        if self._race is None:
            return 0
        rounds = min(MOST_ROUNDS, MOST_TOKENS // len(rows), rounds_at_once(self._target))
        if rounds > 1 and self._drafts:
            rounds = min(rounds, self._lookahead.plain_rounds)
        if rounds < 2 or not self._plain.includes(rows) or change(rows):
            return 0
        return min(rounds, max(row.remaining for row in rows))

    def _steps(
        self, rows: Sequence[Row], slots: Sequence[int], raw: Tensor
    ) -> Callable[[], DraftedStep | None] | None:
        """Returns the rounds of a run as steps by the kernels in C; None if the kernels lack one.

        Args:
            raw: receives the natural logs of the tokens' probabilities, [rounds, rows].
        """
        samplings = [row.request.sampling for row in rows]
        if not knows(samplings):
            return None
        target, rounds, numbered = self._target, len(raw), self._lookahead.adaptive
        drawing = Drawing(
            target.vocab_size,
            samplings,
            self._uniforms.of_rounds(rows, rounds, numbered),
            bool(self._race),
            want_q=False,
            want_highest=False,
            logprobs=raw,
        )
        last = torch.tensor([[row.tokens[-1]] for row in rows])
        return lean_steps(target, slots, last, [1] * len(rows), rounds, drawing)

    def _give_back(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Removes the cells of a failed round from the cache."""
        cache = self._target.cache
        for slot, length in zip(slots, lengths, strict=True):
            cache.lengths[slot] = length
            cache.zero_non_finite(slot)
