"""The failures of captured rounds: which rounds are left to their stages, and for how long.

A row never ends because a capture failed. A kind of round that failed is not captured again; the
other kinds are. Where memory was short, all captured rounds over these caches let go of theirs, and
captures wait. Only replaced weights, or several kinds that failed, end captured rounds for good.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from shoal.models.available import is_out_of_memory
from shoal.models.bridge import ReplacedWeights

MOST_KINDS = 3
"""The number of kinds of rounds from which on failures end captures.

A device on which so many kinds cannot be captured captures none, and each try takes seconds.
"""
PATIENCE = 64
"""The number of rounds for which nothing is captured after memory was short.

The number doubles each time.
"""


class Failures:
    """The failures of one model's captured rounds.

    Attributes:
        end: the reason why no more rounds are captured; None while they are.
    """

    def __init__(self) -> None:
        self.end: str | None = None
        self._kinds: dict[Hashable, str] = {}
        self._waiting, self._patience, self._memory = 0, PATIENCE, ""

    def note(self, kind: Hashable, error: Exception) -> str:
        """Notes a failure and returns its consequence, in words.

        Args:
            kind: the kind of the round, without facts that have no influence on failures.
        """
        reason = words_of(error)
        if is_out_of_memory(error):
            self._memory, self._waiting, self._patience = reason, self._patience, 2 * self._patience
            return f"no captured rounds for the next {self._waiting} rounds ({reason})"
        self._kinds[kind] = reason
        if isinstance(error, ReplacedWeights) or len(self._kinds) >= MOST_KINDS:
            self.end = reason
            return f"no more captured rounds ({reason})"
        return f"no more captured rounds of this kind ({reason})"

    def refuses(self, kind: Hashable) -> bool:
        """Returns True if rounds of a kind are left to their stages because it failed."""
        return self.end is not None or kind in self._kinds

    def waits(self) -> bool:
        """Returns True if the next round is left to its stages; counts rounds.

        The reason is a failure that ended captures for good, or that memory was short.
        """
        if self._waiting:
            self._waiting -= 1
            return True
        return self.end is not None

    @property
    def pause(self) -> bool:
        """True if nothing may be captured at the moment."""
        return self.end is not None or self._waiting > 0

    @property
    def reasons(self) -> list[str]:
        """The reasons why fewer rounds are captured than were meant to be."""
        if self.end is not None:
            return [f"no captured rounds: {self.end}"]
        memory = [f"no captured rounds for now: {self._memory}"] if self._waiting else []
        return [
            f"some kinds of rounds are not captured: {reason}" for reason in self._kinds.values()
        ] + memory


def words_of(error: Exception) -> str:
    """Returns the name of an error and the first line of its message."""
    text = (str(error).strip() or "no reason given").splitlines()[0]
    return f"{type(error).__name__}: {text:.300}"


def require_device(device: torch.device, error: Exception) -> None:
    """Raises the error again if it has left a CUDA device unusable.

    Everything after such an error would fail with a message that misleads. An illegal address or a
    failed assertion stays with the device: the next call that waits for the device fails as well.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.current_stream(device).synchronize()
    except RuntimeError:
        raise error from None
