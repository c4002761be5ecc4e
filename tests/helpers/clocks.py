"""Models and drafters whose passes take the seconds of a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.config import Limits, Sampling
from shoal.lookahead.controller import Fixed
from shoal.sampling.acceptance import Coupled
from shoal.testing.drafters import engine_of
from shoal.testing.scripted import ScriptedModel, hashed, one_hot, scripted
from shoal.types.requests import Request, Row
from shoal.types.rounds import Commit
from shoal.types.samples import Sample

V, ROWS, TOKENS = 11, 3, 900
PASS, COLUMN = 1.0, 0.03
"""Seconds of a pass of the target, and of each of its columns."""


def truth(ids: Sequence[int]) -> int:
    """What the target says after these tokens."""
    return (7 * ids[-1] + 3 * len(ids) + ids[0]) % V


class Clock:
    """Seconds that passes have taken."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Priced(ScriptedModel):
    """Says the truth, at a price."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(lambda ids: one_hot(truth(ids), V), V)
        self.clock = clock

    def _block(self, ids: Any, places: Any, positions: Any, plan: Any) -> Any:
        self.clock.seconds += PASS + COLUMN * positions.numel()
        return super()._block(ids, places, positions, plan)


VOCAB = 12


class Timed:
    """An engine whose clock moves one second per prompt token that the target computes, and per target pass of a round."""

    def __init__(self, *, draft: bool = True, **options: Any) -> None:
        self.now = 0.0
        drafter = scripted(hashed(VOCAB, 1), VOCAB) if draft else None
        settings = {"max_batch": 4, "chunk": 8, "rule": Coupled(), "clock": lambda: self.now, **options}
        self.engine = engine_of(scripted(hashed(VOCAB, 0), VOCAB), drafter, Fixed(2), **settings)
        self.samples: dict[Row, Sample] = {}
        feed, feed_prefix = self.engine.target.feed, self.engine.target.feed_prefix

        def slow_feed(slots: Any, tokens: Any, counts: Sequence[int], *, want_logits: bool = True, **tree: Any) -> Any:
            self.now += 1 if want_logits else sum(counts)
            return feed(slots, tokens, counts, want_logits=want_logits, **tree)

        def slow_feed_prefix(prefix: Any, start: int, tokens: Any) -> None:
            self.now += tokens.numel()
            feed_prefix(prefix, start, tokens)

        self.engine.target.feed = slow_feed  # type: ignore[method-assign]
        self.engine.target.feed_prefix = slow_feed_prefix  # type: ignore[method-assign]

    def ask(self, length: int, n: int = 1, new: int = 6, budget: float | None = None, seed: int = 0) -> list[Row]:
        prompt = tuple(
            1 + (i * i + seed) % (VOCAB - 1) for i in range(length + 1)
        )  # the last token is fed in the first round
        limits = Limits(max_new_tokens=new, time_budget=budget, eos=())
        return self.engine.submit(Request(prompt, n, Sampling(seed=seed), limits, submitted_at=self.now))

    def step(self) -> list[Commit]:
        commits = self.engine.step()
        self.samples |= {commit.row: commit.sample for commit in commits if commit.sample}
        return commits

    def finish(self) -> Timed:
        while self.step():
            pass
        assert self.engine.scheduler.idle
        return self

    def finish_alone(self, length: int, seed: int, new: int = 6) -> list[int]:
        """Tokens of a row that nothing disturbs."""
        (row,) = self.ask(length, new=new, seed=seed)
        self.finish()
        return row.tokens

    def told(self, rows: Sequence[Row]) -> list[str]:
        return [self.samples[row].finish_reason for row in rows]
