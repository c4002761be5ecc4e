"""The prompts that are stored once for all rows of a group, and their places.

Pure Python. m_c tokens of prompt and n rows of m_d new tokens then take m_c + n * m_d token slots
instead of n * (m_c + m_d); how often a pass reads the prompt is the attention method's (bifurcated
attention, Athiwaratkun et al., ICML 2024, arXiv 2403.08845).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from shoal.errors import RequestError
from shoal.types.requests import Prefix

POLICIES = ("auto", "shared", "copied")
MIN_SAVED_TOKENS = 2048
"""The token slots that sharing must save before `auto` shares a prompt.

Below this number, the additional attention calls per layer of the padded method cost as much as
they save (measured at commit 35f59082).
"""


def check_policy(name: str) -> None:
    """Raises RequestError if a name is not in `POLICIES`."""
    if name not in POLICIES:
        raise RequestError(f"prefix_sharing must be one of {', '.join(POLICIES)}, got {name!r}")


@dataclass(frozen=True)
class PrefixStore:
    """A map of the token slots that hold the prompts of groups.

    A store does not change: its methods return other stores.

    Attributes:
        policy: "auto" (by `MIN_SAVED_TOKENS`), "grouped" (prompts of several rows), "shared"
            (always) or "copied" (never).
        prefixes: the stored prompts by group, in the order in which they were added.
    """

    policy: str = "auto"
    prefixes: Mapping[int, Prefix] = field(default_factory=dict)

    def add(self, group: int, rows: int, length: int, drafted: bool = True) -> PrefixStore:
        """Returns the store with the prompt of a group, in the first hole that is large enough.

        Returns the same store if the prompt is better copied.

        Args:
            group: the group.
            rows: the rows of the group that may run at once.
            length: the tokens of its prompt that are stored, all but the last.
            drafted: True if the drafter's cache stores them, too.
        """
        if length < 1 or not self._shares(rows, length):
            return self
        base = 0
        for other in sorted(self.prefixes.values(), key=lambda prefix: prefix.base):
            if other.base - base >= length:
                break
            base = other.base + other.length
        return PrefixStore(self.policy, {**self.prefixes, group: Prefix(base, length, drafted)})

    def without(self, groups: Collection[int]) -> PrefixStore:
        """Returns the store without the prompts of these groups."""
        return PrefixStore(
            self.policy,
            {group: prefix for group, prefix in self.prefixes.items() if group not in groups},
        )

    def _shares(self, rows: int, length: int) -> bool:
        least = {"auto": MIN_SAVED_TOKENS, "grouped": 1, "shared": 0}.get(self.policy, math.inf)
        return (rows - 1) * length >= least
