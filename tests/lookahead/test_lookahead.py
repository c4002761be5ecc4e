"""Draft length controllers: Algorithm 1's sequences as derived from the paper, fixed lengths, names.

Tests of: lookahead.controller.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from shoal.config import Limits, Sampling
from shoal.errors import RequestError
from shoal.lookahead.controller import Bass, Controller, Fixed, Heuristic, Lookahead, Uniform, by_name
from shoal.testing.drafters import engine_of
from shoal.testing.scripted import adversary, hashed, oracle, scripted
from shoal.types.requests import Request, Row
from shoal.types.rounds import Outcome
from shoal.types.samples import Sample


def grown_to(length: int) -> Bass:
    """A Bass that has come up to this length."""
    bass = Bass()
    while bass.next_length() < length:
        bass.update([bass.next_length()], [bass.next_length()])
    assert bass.next_length() == length
    return bass


def lengths(bass: Bass, rounds: int, accepted: int = 0) -> list[int]:
    """The coming draft lengths if every round accepts `accepted` of them."""
    seen = [bass.next_length()]
    for _ in range(rounds - 1):
        bass.update([seen[-1]], [min(accepted, seen[-1])])
        seen.append(bass.next_length())
    return seen


def test_all_rejected() -> None:
    assert lengths(Bass(), 6) == [7, 6, 4, 2, 1, 1]
    assert lengths(grown_to(32), 13) == [32, 28, 24, 20, 17, 14, 11, 8, 6, 4, 2, 1, 1]


def test_all_accepted_grows_by_two_to_the_cap_on_the_13th_step() -> None:
    seen = lengths(Bass(), 15, accepted=99)
    assert seen == [7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 32, 32]
    assert seen.index(32) == 13


def test_the_best_row_sets_the_length() -> None:
    bass = Bass()
    bass.update([7, 7, 7], [0, 7, 3])
    assert bass.next_length() == 9
    bass.update([9, 9, 9], [0, 8, 3])
    assert bass.next_length() == 8  # 9 - ceil(0.9) = 8
    bass.update([8, 8, 8], [7, 2, 0])
    assert bass.next_length() == 7  # 8 - 1 - 1 = 6, but a row took 7


def test_growth_forgives_the_earlier_shrink() -> None:
    bass = Bass()
    for accepted, expected in ((0, 6), (6, 8), (0, 7), (0, 5)):
        bass.update([bass.next_length()], [accepted])
        assert bass.next_length() == expected


def test_a_row_near_its_end_says_nothing_about_the_length() -> None:
    """Only rows that were given the whole length count; where there is none, the length stays, and no shrink is noted."""
    bass = Bass()
    for drafted, accepted in (([2, 1], [2, 1]), ([6, 3], [0, 3]), ([0, 0], [0, 0]), ([], [])):
        bass.update(drafted, accepted)
        assert bass.next_length() == 7
    bass.update([7, 6], [1, 6])  # 7 - 1 = 6, and the second row, which could draft no more, sets no bound
    assert bass.next_length() == 6
    bass.update([6, 5], [0, 5])
    assert bass.next_length() == 4  # 6 - 1 - 1
    bass.update([4, 1, 0], [4, 0, 0])
    assert bass.next_length() == 6


def test_rows_that_drafted_nothing_do_not_count_in_the_heuristic() -> None:
    heuristic = Heuristic()
    for drafted, accepted, expected in (
        ([5, 0, 0, 0], [0, 0, 0, 0], 4),  # three rows may not draft; the one that drafted was rejected
        ([4, 4, 0, 0], [4, 0, 0, 0], 6),
        ([6, 6, 6, 0], [6, 0, 0, 0], 5),
        ([0, 0], [0, 0], 5),
        ([], [], 5),
    ):
        heuristic.update(drafted, accepted)
        assert heuristic.next_length() == expected


def test_a_draft_that_the_drafter_could_not_finish_counts_as_asked_for() -> None:
    """Where it failed may depend on drafts that were thrown away, and lengths must not."""
    heard: list[tuple[list[int], list[int]]] = []

    class Listening(Fixed):
        def update(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
            heard.append((list(drafted), list(accepted)))

    uniform = Uniform(Listening(5))
    rows: list[Any] = [SimpleNamespace(max_draft_length=9), SimpleNamespace(max_draft_length=3)]
    assert uniform.lengths(rows, 0) == [5, 3]
    uniform.learn(Outcome([2, 3], [2, 1], 5, 1.0, 0.5))
    uniform.learn(Outcome([0, 0], [0, 0], 0, 1.0, 0.0))
    assert heard == [([5, 3], [2, 1]), ([0, 0], [0, 0])]


# acceptance -> batch size -> (mean draft length, mean tokens per step and sequence), by simulation
SIMULATED = {
    0.7: {1: (3.3, 2.48), 2: (4.5, 2.74), 4: (6.2, 2.99), 8: (7.9, 3.15), 16: (9.4, 3.23)},
    0.8: {1: (4.6, 3.38), 2: (6.7, 3.99), 4: (8.9, 4.36), 8: (11.4, 4.61), 16: (14.2, 4.81)},
    0.9: {1: (7.8, 5.83), 2: (11.8, 7.23), 4: (16.7, 8.35), 8: (21.6, 9.00), 16: (26.8, 9.43)},
}
STEPS = 10_000


@pytest.mark.parametrize(("acceptance", "batch"), [(a, b) for a, row in SIMULATED.items() for b in row])
def test_mean_lengths_of_independent_acceptance(acceptance: float, batch: int) -> None:
    """Each draft is accepted with a fixed probability; the means wander by about 1 % over this many correlated steps."""
    runs = np.random.default_rng(0).geometric(1 - acceptance, size=(STEPS, batch)) - 1
    bass, drafted, committed = Bass(), 0, 0.0
    for run in runs:
        length = bass.next_length()
        accepted = np.minimum(run, length)
        bass.update([length] * batch, accepted.tolist())
        drafted += length
        committed += float(accepted.mean()) + 1
    assert (drafted / STEPS, committed / STEPS) == pytest.approx(SIMULATED[acceptance][batch], rel=0.03)


@pytest.mark.parametrize("k", [0, 1, 4, 64])
def test_fixed_never_moves(k: int) -> None:
    fixed = Fixed(k)
    for accepted in (0, k):
        fixed.update([k], [accepted])
        assert fixed.next_length() == fixed.limit == k


class Stepwise(Controller):
    """A controller of one's own: 4 drafts for a row whose drafts were all accepted in its last round, 1 for others."""

    limit = 4

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}  # by serial number of the row
        self._rows: list[int] = []

    def lengths(self, rows: Sequence[Row], waiting: int) -> list[int]:
        self._rows = [row.serial for row in rows]
        return [min(self._lengths.get(row.serial, self.limit), row.max_draft_length) for row in rows]

    def learn(self, outcome: Outcome) -> None:
        accepted = [a == d for a, d in zip(outcome.accepted, outcome.drafted, strict=True)]
        self._lengths = {row: self.limit if all_ else 1 for row, all_ in zip(self._rows, accepted, strict=True)}


def test_a_controller_of_ones_own_through_an_engine() -> None:
    """Three rows side by side: every draft is right; every draft is wrong; only the first one is wrong."""
    vocab = 11
    right = hashed(vocab)

    def drafts(ids: tuple[int, ...]) -> Tensor:
        wrong = ids[0] == 2 or (ids[0] == 3 and len(ids) == 2)
        return (adversary if wrong else oracle)(right, vocab)(ids)

    engine = engine_of(scripted(right, vocab), scripted(drafts, vocab), by_name(Stepwise()))
    for first, new in ((1, 20), (2, 5), (3, 13)):
        engine.submit(Request((first, 5), 1, Sampling(temperature=0), Limits(max_new_tokens=new)))
    samples: dict[int, Sample] = {}
    while commits := engine.step():
        samples |= {c.row.tokens[0]: c.sample for c in commits if c.sample is not None}
    counts = {first: (sample.rounds, sample.drafted, sample.accepted) for first, sample in samples.items()}
    assert counts == {
        1: (4, 4 + 4 + 4 + 4, 16),  # five tokens a round
        2: (5, 4 + 1 + 1 + 1 + 0, 0),  # one token a round, and the last one of a row is never drafted
        3: (4, 4 + 1 + 4 + 4, 9),  # 1, 2, 5 and 5 tokens
    }


class Own:
    """A user's lookahead."""

    limit = 3

    def next_length(self) -> int:
        return 3

    def update(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "kind", "limit"),
    [(4, Fixed, 4), ("4", Fixed, 4), ("fixed:4", Fixed, 4), (0, Fixed, 0), ("off", Fixed, 0), ("0", Fixed, 0), ("bass", Bass, 32)],
)  # fmt: skip
def test_names(name: object, kind: type, limit: int) -> None:
    controller = by_name(name)
    assert type(controller) is kind
    assert isinstance(controller, Lookahead)
    assert controller.limit == limit


def test_an_object_is_its_own_name() -> None:
    own = Own()
    assert by_name(own) is own


@pytest.mark.parametrize(
    "name", ["", "fast", "fixed:", "fixed:x", "fixed:-1", "-1", "BASS", "4.0", 1.5, None, True, [4], object()]
)
def test_bad_names(name: object) -> None:
    with pytest.raises(RequestError, match=r"lookahead must be 'auto', a draft length, .* or 'off', got"):
        by_name(name)


def test_a_controller_that_lacks_defaults_is_told_where_they_are() -> None:
    class Bare:
        limit, adaptive, may_speculate, shorten = 4, False, True, None
        lengths, learn = Stepwise.lengths, Stepwise.learn

    with pytest.raises(RequestError, match=r"derives from shoal\.lookahead\.controller\.Controller"):
        by_name(Bare())


@pytest.mark.parametrize("k", [-1, 65, "65", "fixed:1000"])
def test_lengths_out_of_range(k: object) -> None:
    with pytest.raises(RequestError, match=r"must be in 0\.\.64, got -?\d+"):
        by_name(k)


def test_every_engine_gets_its_own_bass() -> None:
    assert by_name("bass") is not by_name("bass")
