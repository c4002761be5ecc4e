"""The costs and the acceptance of the rounds of a pair, learned from the rounds that were made."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from shoal.lookahead.acceptance import LIMIT, Acceptance, Array, TreeSizes
from shoal.lookahead.safeguards import Backoff, Credit, PlainRounds

CALIBRATION_SHARE = 0.02
"""The weight of one round in the calibration, which compares results with plans.

In plain rounds the calibration returns to 1 at the same rate.
"""
MIN_CALIBRATION, MAX_CALIBRATION = 0.5, 1.2
"""The bounds of the calibration: costs that are wrong by more say nothing about plans."""


class CostCurve:
    """A running estimate of seconds by size (positions of a target pass, rows of a drafter step).

    A size that was never tried is estimated from its neighbours. Beyond them the estimate is low,
    so that the size gets tried: below the smallest size seen the cost is proportional to the size,
    above the largest it is constant. A pass never costs more than a larger one, and per position
    hardly more than a smaller one (`MOST_PER_SIZE`). Old observations are forgotten, so that one
    disturbed measurement cannot rule out a size for good.

    Disturbances only make a pass slower (the first of its kind, other work on the machine). So the
    median of the first passes of a size counts, the faster one of two, and later a pass counts as
    at most twice the estimate. A first pass may take ten times as long as the later ones; a size
    that is believed to cost that is not tried again, nor any above it. So where the first passes
    of a size cost `MOST_TIMES` as much per position as a smaller size does, the estimate of before
    counts until there are `DOUBTED` of them.
    """

    FADE, FORGOTTEN, TRUST = 0.997, 0.3, 8.0
    """Three weights of a size, in observations.

    `FADE` is the factor per observation of any size, `FORGOTTEN` the weight below which a size is
    forgotten, `TRUST` the most weight that a size can have.
    """
    SHARE = 0.2
    """The weight of a new observation."""
    FIRST = 5
    """The number of observations of a size whose median counts.

    The faster of two observations, kept for long, would be 5 % below the cost of a size that is
    often observed, by the noise of a quiet machine. Plain rounds would seem that much faster,
    because few are made if drafts pay.
    """
    DOUBTED = 3
    """The number of observations of a size after which they are believed against smaller sizes."""
    MOST_TIMES = 2.0
    """The bound of an observation, as a multiple of the estimate."""
    MOST_PER_SIZE = 1.5
    """The bound of a size's cost per position, as a multiple of the cost per position of any
    smaller size.

    A first pass amid other work may take twenty times as long, and every pass compared with it
    would seem cheap.
    """
    FADE_EVERY = 16
    """The number of observations between two fadings of all weights."""

    def __init__(self) -> None:
        self._points: dict[int, list[float]] = {}  # size -> [seconds, weight]
        self._first: dict[int, list[float]] = {}  # size -> seconds of its first observations
        self._observed = 0
        # The sizes and their seconds, from (0, 0) on; None after an observation.
        self._line: tuple[list[int], list[float]] | None = None

    def observe(self, size: int, seconds: float) -> float:
        """Adds an observation of one pass; returns the seconds that such a pass takes."""
        self._fade(1, forget=True)
        size = rounded(size)
        value, weight = self._points.get(size, (seconds, 0.0))
        first = self._first.setdefault(size, [])
        if len(first) < self.FIRST:
            expected, most = self.seconds(size), self._most(size)
            first.append(seconds)
            value = sorted(first)[self._believed(len(first))]
            if len(first) < self.DOUBTED and value > most:
                value = expected
        else:
            value = self._later(first, value, seconds)
        self._points[size] = [value, min(weight + 1, self.TRUST)]
        self._line = None
        return value

    def age(self, rounds: int = 1) -> None:
        """Ages all sizes by rounds without an observation.

        Sizes that are too old keep their seconds until they are observed again, and then have only
        the new ones: a disturbed measurement does not rule drafts out for good.
        """
        self._fade(rounds, forget=False)

    def _fade(self, rounds: int, *, forget: bool) -> None:
        before, self._observed = self._observed, self._observed + rounds
        fadings = self._observed // self.FADE_EVERY - before // self.FADE_EVERY
        if not fadings:
            return
        fade = self.FADE ** (self.FADE_EVERY * fadings)
        faded = {key: [value, fade * weight] for key, (value, weight) in self._points.items()}
        old = [key for key, point in faded.items() if point[1] < self.FORGOTTEN]
        for key in old:
            self._first.pop(key, None)
            if forget:
                del faded[key]
        self._points = faded

    @property
    def known(self) -> bool:
        """True if there is an observation."""
        return bool(self._points)

    def doubts(self, size: int) -> bool:
        """Returns True if a size has too few observations for their median to be trusted."""
        return len(self._first.get(rounded(size), ())) < self.FIRST

    @property
    def largest(self) -> int:
        """The largest size that is not forgotten; 0 = none."""
        return max(self._points, default=0)

    def at(self, size: int) -> float | None:
        """Returns the seconds of this size, or of one that is kept together with it.

        Returns None if the size was never observed, or is forgotten.
        """
        point = self._points.get(rounded(size))
        return None if point is None else point[0]

    def seconds(self, size: int) -> float:
        """Returns the seconds of any size; 0 if there is no observation.

        A size that was not observed is estimated from its neighbours.
        """
        sizes, table = self._corners()
        right = bisect_left(sizes, size)
        if right == len(sizes):
            return table[-1]
        if not right:
            return 0.0
        share = (size - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
        return table[right - 1] + share * (table[right] - table[right - 1])

    def table(self, largest: int) -> Array:
        """Returns the seconds of every size 0..largest, [largest + 1], never falling with size."""
        return np.interp(np.arange(largest + 1), *self._corners())

    def _most(self, size: int) -> float:
        """Returns the most seconds of a size that are believed, given those of smaller sizes."""
        below = (point[0] / other for other, point in self._points.items() if other < size)
        return self.MOST_TIMES * size * min(below, default=math.inf)

    def _corners(self) -> tuple[list[int], list[float]]:
        if self._line is None:
            sizes = sorted(self._points)
            seconds, lowest = [], math.inf  # lowest: the least seconds / size of smaller sizes
            for size in sizes:
                seconds.append(min(self._points[size][0], self.MOST_PER_SIZE * lowest * size))
                lowest = min(lowest, seconds[-1] / size)
            for i in range(len(sizes) - 2, -1, -1):
                seconds[i] = min(seconds[i], seconds[i + 1])
            self._line = [0, *sizes], [0.0, *seconds]
        return self._line

    def _later(self, first: list[float], value: float, seconds: float) -> float:
        """Returns the estimate of a size after one more observation than the first ones."""
        return value + self.SHARE * (min(seconds, self.MOST_TIMES * value) - value)

    @staticmethod
    def _believed(observations: int) -> int:
        """Returns the place of the first observation that counts, sorted by seconds."""
        return (observations - 1) // 2


class DraftCostCurve(CostCurve):
    """A curve of a drafter's proposals or steps: the fastest of the first ones counts.

    A drafter that is believed to be slow makes no more proposals that could say otherwise, while
    one that is believed to be a little too fast is soon observed again.
    """

    @staticmethod
    def _believed(observations: int) -> int:
        return 0


class RunCostCurve(CostCurve):
    """A curve of plain rounds in one go: the median of the last ones counts.

    The estimate decides between plain rounds and drafts that are nearly as fast. A mean follows
    each disturbance, and drafts would begin whenever plain rounds seem slow for a moment.
    """

    FIRST = 9

    def _later(self, first: list[float], value: float, seconds: float) -> float:
        first[:] = [*first[1:], seconds]
        return sorted(first)[self._believed(len(first))]


class MixedCostCurve(CostCurve):
    """A curve of passes whose costs differ by nature.

    Their mean counts, so every observation counts in full.
    """

    FIRST, DOUBTED, MOST_TIMES = 1, 1, math.inf


def rounded(size: int) -> int:
    """Returns the size that stands for a size: within about 6 % above 16, a few dozen in all."""
    return size if size <= 16 else round(2 ** (round(math.log2(size) * 12) / 12))


class PairCosts:
    """The costs and acceptance rates of a pair on this machine; outlives the engines that use it.

    All of it is observed, and replaced or forgotten: costs of sizes that no longer occur fade away,
    acceptance is a fading average, and the calibration returns to 1 in plain rounds. `credit` never
    holds more than a few rounds, so a pair that was good for hours is left as soon as any other.

    Attributes:
        acceptance: the acceptance of drafts.
        verify: the seconds of a round without its drafting, by positions of the target's pass.
        runs: the seconds of a plain round among several in one go, by rows.
        start: the seconds of a proposal of one step, by rows.
        draft: the seconds of each further step, by rows.
        preparing: the seconds in which the drafter computes prompts and tokens that were decoded
            without it, by tokens.
        packed: True if a pass costs its real positions, False if it costs rows times the longest.
        trees: the number of nodes of drafts by their depth.
        rounds: the number of rounds learned from so far.
        calibrations: the tokens per second that rounds with drafts bring, divided by the rate that
            their plans promised, by the number of rows to a power of two. Plans are corrected by
            it: the last row of a batch, an unlucky one, brings little more than half.
        credit: the time that drafting may lose.
        plain_rounds: the count of rounds after which one is plain, even if drafts seem to pay.
        backoff: the count of plain rounds until the next plan; a run of the same number of rows
            continues with the count of the run before, as new rows change no estimate.
    """

    def __init__(self, packed: bool) -> None:
        self.packed = packed
        self.acceptance, self.trees = Acceptance(LIMIT), TreeSizes(LIMIT)
        self.verify = CostCurve()
        self.runs: CostCurve = RunCostCurve()
        self.start: CostCurve = DraftCostCurve()
        self.draft: CostCurve = DraftCostCurve()
        self.preparing = CostCurve()
        self.rounds = 0
        self.calibrations: dict[int, float] = {}
        self.credit = Credit()
        self.plain_rounds = PlainRounds()
        self.backoff = Backoff()
        self._drafters: dict[str, PairCosts] = {}

    def of(self, name: str, *, mixed: bool = False, one_memory: bool = False) -> PairCosts:
        """Returns the costs of one of several drafters, or of one of the ways of a drafter.

        They share the costs of the target's passes and the account.

        Args:
            mixed: True if the choice is several drafters, so that the cost of a proposal depends on
                those that took part.
            one_memory: True if the choices compute prompts for each other.
        """
        if name not in self._drafters:
            own = self._drafters[name] = PairCosts(self.packed)
            own.verify, own.runs = self.verify, self.runs
            own.credit, own.plain_rounds = self.credit, self.plain_rounds
            if one_memory:
                own.preparing = self.preparing
            if mixed:
                own.start, own.draft = MixedCostCurve(), MixedCostCurve()
        return self._drafters[name]

    def seconds_plain(self, rows: int) -> float:
        """Returns the seconds of a plain round.

        Where several are computed in one go, Python is met once for all of them, so that one costs
        less than a pass over drafts of as many positions, and never more than a round by itself.
        """
        if not self.runs.known:
            return self.verify.seconds(rows)
        alone = self.verify.at(rows)
        return min(self.runs.seconds(rows), math.inf if alone is None else alone)

    def follow(self, rows: list[int]) -> None:
        """Notes the serial numbers of the rows of the next round, for the account."""
        if rows != self.credit.run.rows:
            self.credit.follow(rows, self.seconds_plain)

    def seconds_preparing(self, tokens: int) -> float:
        """Returns the drafter's seconds over a number of tokens.

        Beyond the largest number observed they grow in proportion.
        """
        return self.preparing.seconds(tokens) * max(1.0, tokens / max(self.preparing.largest, 1))

    def observe_drafting(
        self, rows: int, steps: int, seconds: float, between: float | None
    ) -> float:
        """Adds an observation of a proposal; returns the seconds that such a proposal takes.

        Args:
            seconds: the seconds of the proposal.
            between: the seconds of all steps but one; None = unknown: all steps then count alike.
        """
        more = steps - 1
        if between is None:
            return steps * self.draft.observe(rows, seconds / steps)
        start = self.start.observe(rows, seconds - between)
        return start + (more * self.draft.observe(rows, between / more) if more else 0.0)

    def learn_plain(self, rows: int, rounds: int, seconds: float) -> bool:
        """Learns plain rounds of so many rows and seconds each; returns True if one was due."""
        age = rounds + self.credit.waiting
        self.start.age(age)
        self.draft.age(age)
        self.backoff.skip(rounds - 1)
        due = self.plain_rounds.plain(rows)
        self.forget_calibration(rows)
        self.credit.plain(seconds, rounds, settle=not due)
        return due

    @property
    def starting(self) -> CostCurve:
        """The curve of proposals of one step."""
        return self.start if self.start.known else self.draft

    def seconds_starting(self, rows: int) -> float:
        """Returns the seconds of a proposal of one step."""
        return self.starting.seconds(rows)

    def seconds_step(self, rows: int) -> float:
        """Returns the seconds of each further step."""
        return (self.draft if self.draft.known else self.start).seconds(rows)

    def seconds_drafting(self, rows: int, steps: int) -> float:
        """Returns the seconds of a proposal of at least one step."""
        return self.seconds_starting(rows) + (steps - 1) * self.seconds_step(rows)

    def positions(self, drafted: Sequence[int]) -> int:
        """Returns the positions of a target pass over rows with `drafted` nodes each."""
        rows = len(drafted)
        return rows + (sum(drafted) if self.packed else rows * max(drafted))

    def calibration(self, rows: int) -> float:
        """Returns the calibration of plans for about this number of rows."""
        return self.calibrations.get(rows.bit_length(), 1.0)

    def calibrate(self, rows: int, ratio: float, rounds: int) -> None:
        """Corrects the calibration by some rounds.

        Args:
            ratio: the tokens per second of the rounds, divided by the rate that their plan
                promised.
        """
        corrected = self.calibration(rows) * (
            1 + min(CALIBRATION_SHARE * rounds, 0.5) * (min(max(ratio, 0.5), 2.0) - 1)
        )
        self.calibrations[rows.bit_length()] = min(max(corrected, MIN_CALIBRATION), MAX_CALIBRATION)

    def forget_calibration(self, rows: int) -> None:
        """Moves the calibration towards 1, after a round without drafts."""
        if rows.bit_length() in self.calibrations:
            self.calibrations[rows.bit_length()] += CALIBRATION_SHARE * (1 - self.calibration(rows))
