"""What an examination found: a list of verdicts with figures and advice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Finding:
    """One check.

    Attributes:
        name: what was looked at. figure: what was seen. advice: what to do about it; "" if nothing.
        data: the figures, for JSON.
    """

    name: str
    verdict: Verdict
    figure: str
    advice: str = ""
    data: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"name": self.name, "verdict": self.verdict, "figure": self.figure, "advice": self.advice, "data": self.data}


def overall(findings: list[Finding]) -> Verdict:
    """The worst verdict."""
    verdicts = {finding.verdict for finding in findings}
    return "fail" if "fail" in verdicts else "warn" if "warn" in verdicts else "ok"
