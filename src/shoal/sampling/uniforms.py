"""The counter-based uniforms, keyed by (row seed, position, purpose).

A row's seed is a hash of its request (`group_seed`, `row_seed`). The row's uniforms are a pure
function of that seed and of the token's place in the row. So a row cannot depend on its neighbours,
on the order of the batch, on compaction or on the time when the row joined.

The uniforms do not depend on any decision of a round. So a rule's uniforms are computed for many
positions of a row at once (`UniformsAhead`), and a round reads a few rows of a table, instead of
some twenty operations on arrays too small to be worth one each.

One key per position, instead of one per draw, is exact: the draws of a round at positions beyond
its first rejection are thrown away without having influenced any committed token, so the next round
may use the same numbers again. A controller that learns from discarded draws
(`shoal.lookahead.Controller.adaptive`) breaks that argument; its rounds are numbered,
and every one has numbers of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.types.requests import Row

if TYPE_CHECKING:
    from shoal.sampling.acceptance import Rule


class Purpose(IntEnum):
    """The purpose of a uniform; different purposes at one position are independent."""

    TOKEN = 1
    """The draw of the token at this position.

    The drafter draws it from q, or the target from p as bonus or plain token. A round does one or
    the other, never both, so a drafter with q = p reproduces plain decoding token for token.
    """
    ACCEPT = 2
    """The acceptance or rejection of the draft at this position."""
    REPLACE = 3
    """The draw of the replacement from norm(max(p - q, 0))."""
    RESAMPLE = 4
    """The choice of the rows of a request that go on, by the number of the first one's round.

    See `shoal.engine.joint_rows`.
    """
    DISTINCT = 5
    """The choice if a row goes on when a text is drawn before its own, by the number of that row.

    See `shoal.engine.joint_rows`.
    """
    TREE = 1024
    """The first of two purposes for each draw of a draft tree.

    The two are for the next child's token and for its place. At a position only a tree that begins
    there uses them.
    """
    CHECK = 1 << 20
    """The first of the purposes of draws instead of a token that a check refused.

    There may be many such draws (`shoal.constraints.protocol`).
    """
    BUCKET = 16
    """The first of `BUCKETS` purposes: exponential variates of an exponential race.

    The coupled rule draws by this race (`shoal.sampling.drawing.exponential_race`).
    """


BUCKETS = 64
"""The number of buckets of the exponential race.

With more buckets two similar distributions give the same token more often.
"""


_RACE = np.array([Purpose.TOKEN, *range(Purpose.BUCKET, Purpose.BUCKET + BUCKETS)])
_PURPOSES = np.array([Purpose.TOKEN, Purpose.ACCEPT, Purpose.REPLACE])
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUND = np.uint64(0xD1B54A32D192ED03)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Computes SplitMix64's finaliser, an avalanching bijection of 64 bits (Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(
    seeds: npt.ArrayLike, positions: npt.ArrayLike, purpose: Purpose | npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Computes uniforms in [0, 1) with 53 random bits.

    There is one for each broadcast element of (seeds, positions, purpose).
    """
    with np.errstate(over="ignore"):  # wrapping multiplication is the point
        state = _mix(np.asarray(seeds, dtype=np.int64).astype(np.uint64) + _GOLDEN)
        state = _mix(state + np.asarray(positions, dtype=np.int64).astype(np.uint64) * _GOLDEN)
        state = _mix(state + np.asarray(purpose, dtype=np.int64).astype(np.uint64) * _GOLDEN)
    return (state >> np.uint64(11)) * 2.0**-53


def round_uniforms(
    seeds: npt.ArrayLike, firsts: npt.ArrayLike, width: int, rounds: npt.ArrayLike | None = None
) -> npt.NDArray[np.float64]:
    """Computes all uniforms of a round, [rows, width, 3].

    The axes are the row, the position from the row's first open one, and the purpose (TOKEN,
    ACCEPT, REPLACE).

    Args:
        seeds: the seeds of the rows, [rows].
        firsts: the first open positions of the rows, [rows].
        width: the number of positions, the longest draft plus one.
        rounds: None, or the number of each row's round: then no number is used in two rounds, even
            if it drew a token that was thrown away.
    """
    keys = np.asarray(seeds, dtype=np.int64)
    if rounds is not None:
        with np.errstate(over="ignore"):
            keys = _mix(
                keys.astype(np.uint64)
                + np.asarray(rounds, dtype=np.int64).astype(np.uint64) * _ROUND
            ).astype(np.int64)
    positions = np.asarray(firsts, dtype=np.int64)[:, None] + np.arange(width)
    return uniforms(keys[:, None, None], positions[..., None], _PURPOSES)


def race_uniforms(
    seeds: npt.ArrayLike, firsts: npt.ArrayLike, width: int
) -> npt.NDArray[np.float64]:
    """Computes the numbers that `shoal.sampling.drawing.exponential_race` draws by.

    Args:
        seeds: the seeds of the rows, [rows].
        firsts: the first open positions of the rows, [rows].
        width: the number of positions.

    Returns:
        [rows, width, 1 + BUCKETS]: a uniform in [0, 1), then exponential variates > 0.
    """
    positions = np.asarray(firsts, dtype=np.int64)[:, None] + np.arange(width)
    draws = uniforms(np.asarray(seeds, dtype=np.int64)[:, None, None], positions[..., None], _RACE)
    draws[..., 1:] = -np.log1p(-np.maximum(draws[..., 1:], 2.0**-54))
    return draws


def tree_uniforms(
    seeds: npt.ArrayLike, firsts: npt.ArrayLike, draws: npt.ArrayLike
) -> npt.NDArray[np.float64]:
    """Computes the numbers that draws of a tree are made by, two uniforms in [0, 1) each, [n, 2].

    They belong to the position that the tree begins at, not to the position of the draw. So no two
    rounds use the same numbers: the decision to draw a further child of a node may depend on the
    draws below it, and that would bend the distribution of a round which drew by the same numbers.

    Args:
        seeds: the seeds of the rows, [n].
        firsts: the first open positions of the rows, [n].
        draws: the number of each draw in the row's tree, [n].
    """
    purposes = Purpose.TREE + 2 * np.asarray(draws, dtype=np.int64)[:, None] + np.arange(2)
    return uniforms(
        np.asarray(seeds, dtype=np.int64)[:, None],
        np.asarray(firsts, dtype=np.int64)[:, None],
        purposes,
    )


def group_seed(seed: int, prompt_ids: Sequence[int], occurrence: int) -> int:
    """Returns the seed of a group of rows, in [0, 2**64).

    The seed is a hash of the request, so that the rest of the call does not matter.

    Args:
        seed: the seed of the request, any integer.
        prompt_ids: the ids of the prompt, each in int64.
        occurrence: the number of equal prompts before it in the call
            (`shoal.types.requests.occurrences`).
    """
    head = f"{seed} {occurrence} ".encode()  # no two pairs give the same bytes
    ids = np.asarray(prompt_ids, dtype="<i8").tobytes()
    return int.from_bytes(hashlib.blake2b(head + ids, digest_size=8).digest(), "little")


def row_seed(group: int, row: int) -> int:
    """Returns the seed of row `row` of the group with the seed `group`, in [0, 2**63)."""
    return row_seeds(group, row, row + 1)[0]


def row_seeds(group: int, first: int, end: int) -> list[int]:
    """Returns the seeds of the rows `first` to `end - 1` of a group, see `row_seed`."""
    with np.errstate(over="ignore"):
        numbers = np.arange(first + 1, end + 1, dtype=np.uint64)
        mixed = _mix(_mix(np.array([group], dtype=np.uint64)) + numbers * _GOLDEN)
    return [int(one) for one in mixed >> np.uint64(1)]  # non-negative int64


AHEAD = 64
"""The number of positions that are computed at once."""
NOWHERE = (0, -AHEAD, 0)
"""The place of a row whose positions were never computed: they are long past."""


class UniformsAhead:
    """The uniforms of the rows of one engine, on the host.

    If rounds are numbered, the table holds the uniforms of plain rounds, in which a row's number of
    rounds grows with its position. Rounds with drafts, whose later positions have the same number,
    are computed one by one.

    Args:
        rule: the rule that the uniforms are for.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._table = np.empty(0)  # [places * AHEAD, ...]
        # By the row's serial: its place in the table, its first position there, and the rounds
        # that it was behind that position; 0 where rounds are not numbered.
        self._places: dict[int, tuple[int, int, int]] = {}

    def of_round(self, rows: Sequence[Row], width: int, numbered: bool, later: int = 0) -> Tensor:
        """Returns the uniforms of the rows' next `width` positions, [rows, width, ...].

        They are the numbers that `Rule.uniforms` computes.

        Args:
            numbered: True gives every round numbers of its own, if the rule's numbers depend on
                rounds at all.
            later: the number of rounds from now on to the round.
        """
        by_round = numbered and self._rule.numbers_rounds
        if width > AHEAD or (by_round and (width > 1 or later)):
            firsts = [len(row.tokens) for row in rows]
            rounds = [row.rounds + later for row in rows] if numbered else None
            return self._rule.uniforms([row.seed for row in rows], firsts, width, rounds)
        return self._from_table(rows, width, by_round)

    def of_rounds(self, rows: Sequence[Row], rounds: int, numbered: bool) -> Tensor:
        """Returns the uniforms of the next plain rounds, at most `AHEAD`, [rows, rounds, ...].

        Args:
            numbered: see `of_round`.
        """
        return self._from_table(rows, rounds, numbered and self._rule.numbers_rounds)

    def _from_table(self, rows: Sequence[Row], width: int, by_round: bool) -> Tensor:
        places = [self._places.get(row.serial, NOWHERE) for row in rows]
        counts = _offsets(rows, places, by_round)
        if max(counts) > AHEAD - width:
            # Rows that need new positions soon are computed too, or each round would compute some.
            least = min(AHEAD - width + 1, AHEAD // 2)
            stale = [row for row, count in zip(rows, counts, strict=True) if count >= least]
            self._compute(stale, rows, by_round)
            places = [self._places[row.serial] for row in rows]
            counts = _offsets(rows, places, by_round)
        starts = [AHEAD * place[0] + count for place, count in zip(places, counts, strict=True)]
        return torch.from_numpy(self._table[np.add.outer(starts, np.arange(width))])

    def _compute(self, stale: Sequence[Row], rows: Sequence[Row], by_round: bool) -> None:
        """Computes the next positions of the rows whose positions run out, `stale`.

        They take places of their own in the table, or the places of rows that have left.
        """
        old = {row.serial: self._places[row.serial] for row in rows if row.serial in self._places}
        occupied = {place[0] for place in old.values()}
        free = (place for place in range(len(rows)) if place not in occupied)
        places = [old[row.serial][0] if row.serial in old else next(free) for row in stale]
        firsts = [len(row.tokens) for row in stale]
        numbers_of_positions = self._next_positions(stale, firsts, by_round)
        behind = _behind(stale, by_round)
        self._places = old | {
            row.serial: place
            for row, place in zip(stale, zip(places, firsts, behind, strict=True), strict=True)
        }
        missing = AHEAD * (1 + max(place[0] for place in self._places.values())) - len(self._table)
        if missing > 0:
            empty = np.empty((missing, *numbers_of_positions.shape[2:]), numbers_of_positions.dtype)
            self._table = np.concatenate([self._table, empty]) if len(self._table) else empty
        self._table.reshape(-1, AHEAD, *numbers_of_positions.shape[2:])[places] = (
            numbers_of_positions
        )

    def _next_positions(
        self, rows: Sequence[Row], firsts: Sequence[int], by_round: bool
    ) -> npt.NDArray[np.float64]:
        """Returns the uniforms of the positions from `firsts` on, [rows, AHEAD, ...]."""
        if not by_round:
            return self._rule.uniforms([row.seed for row in rows], firsts, AHEAD, None).numpy()
        seeds = [row.seed for row in rows for _ in range(AHEAD)]
        positions = [first + later for first in firsts for later in range(AHEAD)]
        numbers = [row.rounds + later for row in rows for later in range(AHEAD)]
        numbers_of_positions = self._rule.uniforms(seeds, positions, 1, numbers).numpy()
        return numbers_of_positions.reshape(len(rows), AHEAD, *numbers_of_positions.shape[2:])


def _behind(rows: Sequence[Row], by_round: bool) -> list[int]:
    """Returns the rounds that rows are behind their positions; 0 where rounds are not numbered."""
    return [len(row.tokens) - row.rounds for row in rows] if by_round else [0] * len(rows)


def _offsets(
    rows: Sequence[Row], places: Sequence[tuple[int, int, int]], by_round: bool
) -> list[int]:
    """Returns the number of used positions of each row's place; after a round with drafts all."""
    behind = _behind(rows, by_round)
    return [
        len(row.tokens) - first if now == then else AHEAD
        for row, (_, first, then), now in zip(rows, places, behind, strict=True)
    ]
