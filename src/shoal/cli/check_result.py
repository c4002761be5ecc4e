"""The results of `shoal check`: a status, a figure and advice for each check."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

CheckStatus = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class CheckResult:
    """One check.

    Attributes:
        name: what was looked at.
        figure: what was seen.
        advice: what to do about it; "" if nothing.
        data: the figures, for JSON.
        on: the prompts that they were measured on; "" where prompts do not matter.
    """

    name: str
    status: CheckStatus
    figure: str
    advice: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    on: str = ""

    @property
    def whole(self) -> str:
        """The figure and what it was measured on."""
        return f"{self.figure}; on {self.on}" if self.on else self.figure

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "name": self.name,
            "verdict": self.status,
            "figure": self.whole,
            "advice": self.advice,
            "data": self.data,
        }


def overall(results: list[CheckResult]) -> CheckStatus:
    """The worst status."""
    statuses = {result.status for result in results}
    return "fail" if "fail" in statuses else "warn" if "warn" in statuses else "ok"
