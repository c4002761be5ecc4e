"""Prompts stored once for all rows of a group: which, and where. Pure Python.

m_c tokens of prompt and n rows of m_d new tokens then take m_c + n * m_d cells instead of n * (m_c + m_d), and every pass reads the
prompt once instead of n times (bifurcated attention, Athiwaratkun et al., ICML 2024, arXiv 2403.08845).
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.errors import RequestError
from shoal.types.prefix import Prefix

POLICIES = ("auto", "shared", "copied")
MIN_SAVED_TOKENS = 2048
"""`auto` shares a prompt if copies would take that many more cells; below, more calls per layer cost what they save
(docs/explanation/shared-prompts.md)."""


def check_policy(name: str) -> None:
    """Raises RequestError for a name that is not in `POLICIES`."""
    if name not in POLICIES:
        raise RequestError(f"prefix_sharing must be one of {', '.join(POLICIES)}, got {name!r}")


class PrefixStore:
    """Which cells belong to which group: first fit, holes are used again.

    Args:
        policy: "auto" (by `MIN_SAVED_TOKENS`), "shared" (always) or "copied" (never).
    """

    def __init__(self, policy: str = "auto") -> None:
        self.policy = policy
        self._held: dict[int, Prefix] = {}

    @property
    def prefixes(self) -> Sequence[Prefix]:
        """The prompts that are here, or come here in this round."""
        return list(self._held.values())

    @property
    def groups(self) -> list[int]:
        """Whose prompts are here, the first that came first."""
        return list(self._held)

    def find(self, group: int) -> Prefix | None:
        """The group's prompt, if it is here."""
        return self._held.get(group)

    def admit(self, group: int, rows: int, length: int, drafted: bool = True) -> Prefix | None:
        """Room for the prompt of a group, or None if it is better copied.

        Args:
            rows: of the group that may run at once. length: tokens of its prompt that are stored, all but the last.
            drafted: the drafter stores them, too.
        """
        if length < 1 or not self._shares(rows, length):
            return None
        base = 0
        for held in sorted(self._held.values(), key=lambda held: held.base):
            if held.base - base >= length:
                break
            base = held.base + held.length
        self._held[group] = Prefix(base, length, drafted)
        return self._held[group]

    def forget(self, group: int) -> None:
        """Frees the prompt of a group, if it is here."""
        self._held.pop(group, None)

    def clear(self) -> None:
        """Frees all prompts."""
        self._held.clear()

    def _shares(self, rows: int, length: int) -> bool:
        return self.policy == "shared" or (self.policy == "auto" and (rows - 1) * length >= MIN_SAVED_TOKENS)
