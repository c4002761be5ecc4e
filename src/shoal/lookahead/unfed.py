"""The number of tokens that a drafter lacks, as its controller sees it.

A drafter computes no tokens of a row until it drafts for the row.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.types.requests import Row


class Unfed:
    """The tokens that must be computed before the next draft.

    The counts are those of a drafter that is a model (`shoal.drafting.draft_slots`). For other
    drafters the seconds that go with these tokens are 0.
    """

    def __init__(self) -> None:
        # By serial number: the tokens that the drafter had of a row when it last drafted for it.
        self._held: dict[int, int] = {}
        # The rows that the last round drafted for; the drafter has all their tokens but the last.
        self._current: set[int] = set()
        self._groups: dict[int, int] = {}  # the groups of the rows with tokens

    def change(self, rows: Sequence[Row]) -> None:
        """Forgets rows that have left."""
        serials = {row.serial for row in rows}
        self._current &= serials
        self._held = {serial: held for serial, held in self._held.items() if serial in serials}
        self._groups = {
            serial: group for serial, group in self._groups.items() if serial in serials
        }

    def tokens(self, rows: Sequence[Row]) -> int:
        """Returns the number of tokens that these rows lack; a shared prompt counts once."""
        groups, lacking = set(self._groups.values()), 0
        for row in rows:
            if row.serial in self._current:
                continue
            held = self._held.get(row.serial)
            if held is None:
                held = row.prompt_length if row.group in groups else 0
                groups.add(row.group)
            lacking += len(row.tokens) - held
        return lacking

    def cheapest(self, rows: Sequence[Row], most: int) -> Sequence[Row]:
        """Returns the rows that may draft and lack the fewest tokens."""
        return sorted(
            (row for row in rows if row.max_draft_length), key=lambda row: self.tokens([row])
        )[:most]

    def feed(self, rows: Sequence[Row]) -> int:
        """Notes that a round drafts for these rows, and no others.

        Returns:
            The number of tokens that must be computed before.
        """
        if len(self._current) == len(rows):
            return 0
        lacking = self.tokens(rows)
        self._current = {row.serial for row in rows}
        self._groups |= {row.serial: row.group for row in rows}
        return lacking

    def leave(self, rows: Sequence[Row]) -> None:
        """Notes that a round does not draft for all of these rows."""
        if self._current:
            self._held |= {
                row.serial: len(row.tokens) for row in rows if row.serial in self._current
            }
            self._current = set()
