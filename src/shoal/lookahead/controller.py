"""Draft length controllers by name, which see counts and costs, and never tensors.

`by_name` finds the controller that a user names, and `as_controller` makes one of a `Lookahead`;
the two protocols are in `shoal.lookahead`.

One draft length for the whole batch is decided from counts alone: `Bass` is Algorithm 1 of BASS,
`Heuristic` the algorithm of Transformers. Qian et al. 2024, arXiv 2404.15778. The paper's
constants: l0 = 7, l_incre = 2, l_mod = 10, l_limit = 32. The *maximum* over rows triggers growth,
so the length drifts up with the batch; that suits an idle GPU and not a CPU.

`EvenAuto` serves a device that computes captured rounds, which goes on with the next round before
the host has seen this one (`shoal.drafting.captured_inputs`). It cannot if the host ends drafts by
the drafter's confidence, nor if the next length depends on this round. So a plan has one length for
all rows, by the acceptance at each position, and holds for several rounds. Where a pass costs the
same for any number of positions, confidence brings 2 to 6 % (`benchmarks/stopping.py --flat 0.1`);
the time of the host, which it costs, is 11 to 14 % of a round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shoal.errors import RequestError
from shoal.lookahead import Controller, Lookahead
from shoal.lookahead.acceptance import Array
from shoal.lookahead.auto import Auto
from shoal.lookahead.choosing import AutoChoice, Choices
from shoal.lookahead.costs import PairCosts
from shoal.lookahead.plan import DraftPlan, acceptance_of
from shoal.types.requests import Row

if TYPE_CHECKING:
    from shoal.types.rounds import Outcome


LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
"""The draft lengths of plans. They are few, as each has functions of its own to capture."""
SLOWEST = 8.0
"""The exponent of the mean over rows of the rounds until their ends, while no row waits.

With 1 all rows count alike, with infinity the slowest one alone, which the batch ends with.
"""


@dataclass(frozen=True)
class EvenPlan:
    """Rounds in which all rows draft equally many tokens.

    Attributes:
        rate: the expected committed tokens per second.
        longest: the draft length.
        weights: None: committed tokens of all rows count alike.
    """

    rate: float
    longest: int
    weights: None = None

    def keep(self, places: Sequence[int]) -> None:
        """Changes nothing: the plan is the same for fewer rows."""


def best_even_plan(survival: Array, remaining: Array | None, costs: PairCosts) -> EvenPlan | None:
    """Returns the plan whose rows end first; None if plain decoding is expected to be faster.

    Args:
        survival: see `shoal.lookahead.plan.best_plan`.
        remaining: [rows], the tokens that each row may still get; None if other rows wait for
            slots, so that all committed tokens count alike.
    """
    rows, limit = survival.shape
    lengths = np.array([length for length in LENGTHS if length <= limit])
    tokens = 1 + np.insert(survival.cumsum(axis=1), 0, 0.0, axis=1)[:, lengths]
    positions = rows * (1 + lengths)
    seconds = costs.verify.table(int(positions.max()))[positions]
    seconds[1:] += costs.seconds_starting(rows) + costs.seconds_step(rows) * (lengths[1:] - 1)
    seconds[1:] /= costs.calibration(rows)
    # The cost of larger passes than any so far is unknown: a plan may grow by doubling.
    seconds[positions > 2 * max(costs.verify.largest, rows)] = np.inf
    if remaining is None:
        speeds = tokens.sum(axis=0) / seconds
    else:
        rounds = remaining[:, None] / tokens
        speeds = 1 / (seconds * (rounds**SLOWEST).mean(axis=0) ** (1 / SLOWEST))
    best = int(speeds.argmax())
    return (
        EvenPlan(float(tokens[:, best].sum() / seconds[best]), int(lengths[best])) if best else None
    )


class EvenAuto(Auto):
    """The controller that `lookahead="auto"` names where rounds are captured."""

    rounds_of_a_plan = 16

    @property
    def shorten(self) -> Callable[[int, Sequence[float]], list[int]] | None:
        """None: no draft is shortened."""
        return None

    @property
    def steady(self) -> bool:
        """True if the next round has the lengths of this round, for any outcome of this round."""
        return self._holds or super().steady

    def _best(self, rows: Sequence[Row], *, waiting: bool) -> DraftPlan | None:
        _, survival = acceptance_of(rows, self.costs)
        remaining = None if waiting else np.array([row.remaining for row in rows])
        return best_even_plan(survival, remaining, self.costs)


MAX_LENGTH = 64
"""The longest draft length: a longer verification is a prefill, and most likely a slip."""


class Fixed:
    """A controller with draft length k in every round; raises RequestError unless k is in 0..64."""

    def __init__(self, k: int) -> None:
        if not 0 <= k <= MAX_LENGTH:
            raise RequestError(f"draft length must be in 0..{MAX_LENGTH}, got {k}")
        self.limit = k

    def next_length(self) -> int:
        return self.limit

    def update(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Learns nothing: the length is fixed."""


class Bass:
    """A draft length that grows when some row took its whole draft, and shrinks otherwise.

    It grows to l + 2, at most 32. It shrinks to l - ceil(l / 10) - s, but not below the accepted
    tokens of the best row; s = 1 from the second shrink in a row on. Rows near their end, whose
    drafts were shorter than l, do not count; if there are no other rows, l stays.
    """

    L0, INCREMENT, MODULUS, LIMIT = 7, 2, 10, 32

    def __init__(self) -> None:
        self.limit = self.LIMIT
        self._length = self.L0
        self._shrank = 0

    def next_length(self) -> int:
        return self._length

    def update(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        counted = [a for a, d in zip(accepted, drafted, strict=True) if d >= self._length]
        if not counted:
            return
        if max(counted) >= self._length:
            self._length = min(self._length + self.INCREMENT, self.LIMIT)
            self._shrank = 0
        else:
            shrunk = self._length - math.ceil(self._length / self.MODULUS) - self._shrank
            self._length = max(1, *counted, shrunk)
            self._shrank = 1


class Heuristic:
    """A draft length that starts at 5 and never leaves 1..20.

    A batch counts as fully accepted if at least half of its rows were: by its best row, as in
    Algorithm 1 of BASS, lengths would drift up with the batch; by its worst row they would sink to
    1. Rows without drafts do not count.
    """

    START, GROWTH, SHRINKAGE, LIMIT = 5, 2, 1, 20

    def __init__(self) -> None:
        self.limit = self.LIMIT
        self._length = self.START

    def next_length(self) -> int:
        return self._length

    def update(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        full_acceptances = [a == d for a, d in zip(accepted, drafted, strict=True) if d]
        if not full_acceptances:
            return
        grows = 2 * sum(full_acceptances) >= len(full_acceptances)
        self._length = min(
            max(self._length + (self.GROWTH if grows else -self.SHRINKAGE), 1), self.limit
        )


class Uniform(Controller):
    """A `Lookahead` as a `Controller`: one length for every row, and no draft is shortened."""

    def __init__(self, lookahead: Lookahead) -> None:
        self.lookahead = lookahead
        self.limit = lookahead.limit
        self._lengths: list[int] = []

    @property
    def steady(self) -> bool:
        """True if the length never changes."""
        return isinstance(self.lookahead, Fixed)

    def lengths(self, rows: Sequence[Row], waiting: int) -> list[int]:
        """Returns the next length for each row, at most `Row.max_draft_length`."""
        k = min(max(self.lookahead.next_length(), 0), self.limit)
        self._lengths = [min(k, row.max_draft_length) for row in rows]
        return self._lengths

    def learn(self, outcome: Outcome) -> None:
        """Passes the counts on to the `Lookahead`.

        If the drafter failed in the middle of a draft, the length that was asked for counts as
        drafted, as if the position had been rejected: lengths must not depend on rejected drafts
        (`Controller.adaptive`).
        """
        self.lookahead.update(self._lengths if outcome.steps else outcome.drafted, outcome.accepted)


__all__ = [
    "Auto",
    "AutoChoice",
    "Bass",
    "Controller",
    "EvenAuto",
    "Fixed",
    "Heuristic",
    "Lookahead",
    "PairCosts",
    "Uniform",
    "as_controller",
    "by_name",
]


def by_name(
    name: object,
    pair_costs: PairCosts | None = None,
    choices: Choices | None = None,
    *,
    captured: bool = False,
) -> Lookahead | Controller:
    """Returns the controller that a user names.

    "auto" -> Auto(pair_costs), for captured rounds EvenAuto(pair_costs); 4, "4", "fixed:4" ->
    Fixed(4); 0, "off" -> Fixed(0); "bass" -> Bass(); "heuristic" -> Heuristic(); a controller
    object -> itself.

    Args:
        name: the name, the draft length or the object.
        pair_costs: the costs that `Auto` begins with, and adds to; None = no costs yet.
        choices: the drafter; "auto" chooses among the ways that it names. None = there is one way.
        captured: True if rounds with drafts are captured.

    Raises:
        RequestError: the name is none of these.
    """
    if isinstance(name, int) and not isinstance(name, bool):
        return Fixed(name)
    if isinstance(name, str):
        if name == "auto" and choices is not None and choices.choices:
            return AutoChoice(pair_costs or PairCosts(packed=True), choices)
        if name == "auto" and captured:
            return EvenAuto(pair_costs or PairCosts(packed=True))
        if name in _NAMES:
            return _NAMES[name](pair_costs)
        digits = name.removeprefix("fixed:")
        if digits.isdecimal():
            return Fixed(int(digits))
    elif isinstance(name, (Lookahead, Controller)):
        return name
    raise RequestError(
        f"lookahead must be 'auto', a draft length, 'fixed:K', 'bass', 'heuristic' or 'off', "
        f"got {name!r}; a class of one's own derives from shoal.lookahead.controller.Controller, "
        "or has limit, next_length and update"
    )


_NAMES: dict[str, Callable[[PairCosts | None], Lookahead | Controller]] = {
    "auto": lambda pair_costs: Auto(pair_costs or PairCosts(packed=True)),
    "bass": lambda _: Bass(),
    "heuristic": lambda _: Heuristic(),
    "off": lambda _: Fixed(0),
}


def as_controller(lookahead: Lookahead | Controller) -> Controller:
    """Returns a `Lookahead` as a `Controller`, and a controller as it is."""
    return Uniform(lookahead) if isinstance(lookahead, Lookahead) else lookahead
