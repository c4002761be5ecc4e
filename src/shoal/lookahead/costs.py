"""What rounds of a pair cost and bring, learned from the rounds that were made."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.lookahead.acceptance import LIMIT, Acceptance, Array

CALIBRATION_SHARE = 0.02
"""Weight of one round when results are compared with plans; in plain rounds the calibration returns to 1 at the same rate."""
MIN_CALIBRATION, MAX_CALIBRATION = 0.5, 1.2
"""Bounds: costs that are wrong by more say nothing about plans."""


class CostCurve:
    """A running estimate of seconds by size (positions of a target pass, rows of a drafter step).

    A size that was never tried is estimated from its neighbours. Beyond them the estimate is low, so that the size gets tried:
    below the smallest size seen the cost is proportional to the size, above the largest it is constant. A pass never costs more
    than a larger one. Old observations are forgotten, so that one disturbed measurement cannot rule out a size for good.

    Disturbances only make a pass slower (the first of its kind, other work on the machine). So of the first two passes of a size
    the faster one counts, and later a pass counts as at most twice the estimate.
    """

    FADE, FORGOTTEN, TRUST = 0.997, 0.3, 8.0
    """Weight kept per observation of any size; weight below which a size is forgotten; most weight a size can have."""
    SHARE = 0.2
    """Weight of a new observation."""

    def __init__(self) -> None:
        self._points: dict[int, list[float]] = {}  # size -> [seconds, weight]

    def observe(self, size: int, seconds: float) -> None:
        """One pass of that size took that long."""
        for point in self._points.values():
            point[1] *= self.FADE
        self._points = {key: point for key, point in self._points.items() if point[1] >= self.FORGOTTEN}
        value, weight = self._points.setdefault(rounded(size), [seconds, 0.0])
        if weight < 2:
            value = min(value, seconds)
        else:
            value += self.SHARE * (min(seconds, 2 * value) - value)
        self._points[rounded(size)] = [value, min(weight + 1, self.TRUST)]

    @property
    def known(self) -> bool:
        """Anything was observed yet."""
        return bool(self._points)

    @property
    def largest(self) -> int:
        """The largest size that is not forgotten; 0 = none."""
        return max(self._points, default=0)

    def at(self, size: int) -> float | None:
        """Seconds of the size itself, or of one that is kept together with it; None if it was never observed, or is forgotten."""
        point = self._points.get(rounded(size))
        return None if point is None else point[0]

    def table(self, largest: int) -> Array:
        """Seconds of every size 0..largest, [largest + 1]; never falling with the size."""
        sizes = sorted(self._points)
        seconds = np.array([self._points[size][0] for size in sizes])
        seconds = np.minimum.accumulate(seconds[::-1])[::-1]
        return np.interp(np.arange(largest + 1), [0, *sizes], [0.0, *seconds])


def rounded(size: int) -> int:
    """Sizes above 16 are kept to within about 6 %: a few dozen points in all."""
    return size if size <= 16 else round(2 ** (round(np.log2(size) * 12) / 12))


class PairCosts:
    """What is known of a pair on this machine; outlives the engines that use it.

    Attributes:
        acceptance: of drafts. verify: seconds of a round without its drafting, by positions of the target's pass.
        draft: seconds of a drafter step, by rows. packed: a pass costs its real positions, not rows times the longest.
        plain_seconds: spent without drafting since the last draft. rounds: learned from so far.
        calibration: tokens per second that rounds with drafts bring, over what their plans promised. Plans are corrected by it.
    """

    def __init__(self, packed: bool) -> None:
        self.packed = packed
        self.acceptance = Acceptance(LIMIT)
        self.verify, self.draft = CostCurve(), CostCurve()
        self.plain_seconds, self.rounds, self.calibration = 0.0, 0, 1.0

    def seconds_of_step(self, rows: int) -> float:
        """Of one drafter step; 0 if none was made yet."""
        return float(self.draft.table(rows)[rows]) if self.draft.known else 0.0

    def learn_verify(self, fed: Sequence[int], seconds: float) -> None:
        """A round took so many seconds beside its drafting. fed: positions of each row in the target's pass."""
        self.rounds += 1
        self.verify.observe(sum(fed) if self.packed else len(fed) * max(fed), seconds)

    def learn_plain(self, seconds: float) -> None:
        """A round without drafts took so many seconds."""
        self.plain_seconds += seconds
        self.calibration += CALIBRATION_SHARE * (1 - self.calibration)

    def calibrate(self, ratio: float) -> None:
        """A round brought `ratio` times the tokens per second that its plan promised."""
        corrected = self.calibration * (1 + CALIBRATION_SHARE * (min(max(ratio, 0.5), 2.0) - 1))
        self.calibration = min(max(corrected, MIN_CALIBRATION), MAX_CALIBRATION)
