"""The results of `shoal check`: a status, a figure and advice for each check."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

CheckStatus = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
        name: the name of the check.
        figure: the measured or observed figure.
        advice: the action to take; "" if there is none.
        data: the figures, for JSON.
        on: the prompts that they were measured on; "" if prompts do not matter.
    """

    name: str
    status: CheckStatus
    figure: str
    advice: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    on: str = ""

    @property
    def whole(self) -> str:
        """The figure and the prompts it was measured on."""
        return f"{self.figure}; on {self.on}" if self.on else self.figure

    def to_dict(self) -> dict[str, Any]:
        """Returns an object for JSON."""
        return {
            "name": self.name,
            "verdict": self.status,
            "figure": self.whole,
            "advice": self.advice,
            "data": self.data,
        }


def overall(results: list[CheckResult]) -> CheckStatus:
    """Returns the worst status."""
    statuses = {result.status for result in results}
    return "fail" if "fail" in statuses else "warn" if "warn" in statuses else "ok"
