"""How many tokens a drafter lacks, as its controller sees it: it computes nothing of a row that is
not drafted for."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.types.requests import Row


class Unfed:
    """Tokens that would have to be computed before the next draft.

    It says what a drafter that is a model does (`shoal.drafting.slots`). For others the seconds
    that go with these tokens are 0.
    """

    def __init__(self) -> None:
        self._held: dict[
            int, int
            # tokens that the drafter had of a row when it was last drafted for, by serial number
        ] = {}
        self._current: set[int] = (
            set()
        )  # rows that the last round drafted for, with all their tokens but the last
        self._groups: dict[int, int] = {}  # of the rows with tokens

    def change(self, rows: Sequence[Row]) -> None:
        """Rows joined or left."""
        serials = {row.serial for row in rows}
        self._current &= serials
        self._held = {serial: held for serial, held in self._held.items() if serial in serials}
        self._groups = {
            serial: group for serial, group in self._groups.items() if serial in serials
        }

    def tokens(self, rows: Sequence[Row]) -> int:
        """Of these rows, a prompt that several of them have counted once."""
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
        """Those of the rows that may draft and lack the fewest tokens."""
        return sorted(
            (row for row in rows if row.max_draft_length), key=lambda row: self.tokens([row])
        )[:most]

    def feed(self, rows: Sequence[Row]) -> int:
        """A round will draft for these rows, and no others; returns the tokens that must be
        computed before."""
        if len(self._current) == len(rows):
            return 0
        lacking = self.tokens(rows)
        self._current = {row.serial for row in rows}
        self._groups |= {row.serial: row.group for row in rows}
        return lacking

    def leave(self, rows: Sequence[Row]) -> None:
        """A round will not draft for all of these rows."""
        if self._current:
            self._held |= {
                row.serial: len(row.tokens) for row in rows if row.serial in self._current
            }
            self._current = set()
