"""The table at the end: what was wanted, what was measured, and whether that is enough. Standard library only.

Wanted for bfloat16, shapes 7.8B/310M, 8 rows, an imposed acceptance of 0.8, as shares of the card's own floors
(docs/how-to/gpu.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages import Outcome

Report = Mapping[str, Any]
Reports = Mapping[str, Sequence[Report]]
"""What each stage left, by its name."""
UNVERIFIED, PARTLY, TRIAL = "kernels not verified", "kernels verified in part", "a trial"


@dataclass(frozen=True)
class Verdict:
    """A line of the table.

    Attributes:
        measured: None where no stage has the figure.
        doubt: `UNVERIFIED` or `PARTLY`, where not all proofs passed; `TRIAL` where no card was there.
        otherwise: the word where it is not met.
    """

    what: str
    wanted: str
    measured: str | None
    met: bool | None
    doubt: str | None = None
    otherwise: str = "missed"

    @property
    def word(self) -> str:
        word = {None: "not measured", True: "met", False: self.otherwise}[self.met]
        return word if self.doubt is None or self.met is None else f"{word}, but {self.doubt}"


@dataclass(frozen=True)
class Target:
    """Wanted: a figure that is at least, or at most, the bound.

    Attributes:
        figure: finds it among the reports; None: not there.
        form: of figure and bound.
        otherwise: the word where it is not met; "next" for what is wanted once the others are.
    """

    what: str
    bound: float
    figure: Callable[[Reports], float | None]
    form: str = "{:.2f}"
    at_least: bool = True
    otherwise: str = "missed"

    def verdict(self, reports: Reports, doubt: str | None) -> Verdict:
        wanted = ("at least " if self.at_least else "at most ") + self.form.format(self.bound)
        try:
            value = self.figure(reports)
        except (LookupError, TypeError, ZeroDivisionError):  # a report that is not whole
            value = None
        if value is None:
            return Verdict(self.what, wanted, None, None, doubt)
        met = value >= self.bound if self.at_least else value <= self.bound
        return Verdict(self.what, wanted, self.form.format(value), met, doubt, self.otherwise)


def verdicts(outcomes: Sequence[Outcome], *, trial: bool = False) -> list[Verdict]:
    """The whole table: the stages that prove something, then the figures.

    Args:
        trial: True on a device whose figures say nothing.
    """
    proofs = [outcome for outcome in outcomes if outcome.stage.proves]
    reports = {outcome.stage.name: outcome.reports for outcome in outcomes}
    doubt = TRIAL if trial else doubt_of(proofs)
    return [proved(proof) for proof in proofs] + [target.verdict(reports, doubt) for target in TARGETS]


def proved(proof: Outcome) -> Verdict:
    """The line of a stage that proves something; one that was stopped without a fault is not called missed."""
    measured, otherwise = proof.result, "missed"
    if proof.stopped and not proof.cases.failed:
        otherwise = "stopped"
        if proof.cases.passed:
            measured = f"{proof.cases.passed} of {proof.cases.chosen} cases passed, stopped"
    return Verdict(proof.stage.what, "passes", measured, proof.passed, otherwise=otherwise)


def doubt_of(proofs: Sequence[Outcome]) -> str | None:
    """The mark of all figures: proofs in part are those of which cases passed, none failed, and some were stopped."""
    if proofs and all(proof.passed for proof in proofs):
        return None
    sound = all(proof.passed or proved(proof).otherwise == "stopped" for proof in proofs)
    return PARTLY if sound and any(proof.cases.passed for proof in proofs) else UNVERIFIED


def markdown(table: Sequence[Verdict], outcomes: Sequence[Outcome], machine: Mapping[str, Any]) -> str:
    """The verdict as a page: where, what was wanted and found, what became of the stages."""
    where = ", ".join(
        f"{key} {machine[key]}" for key in ("date", "device", "torch", "transformers", "commit") if key in machine
    )
    trial = (
        ["**Tiny shapes on a CPU, or on a GPU that is pretended, to try the stages out: the figures say nothing.**", ""]
        if machine.get("trial")
        else []
    )
    lines = [*trial, f"Measured: {where}", "", "| target | wanted | measured | verdict |", "|---|---|---|---|"]
    lines += [f"| {v.what} | {v.wanted} | {v.measured or '-'} | {v.word} |" for v in table]
    lines += ["", "| stage | result | seconds |", "|---|---|---|"]
    lines += [f"| {o.stage.name}: {o.stage.what} | {o.result} | {o.seconds:.0f} |" for o in outcomes]
    return "\n".join(lines) + "\n"


# ── where the figures are ───────────────────────────────────────────────────────────────────────────────────────────


def _lines(reports: Reports, stage: str, **wanted: Any) -> list[Mapping[str, Any]]:
    """The lines of a stage's reports that have these values."""
    lines = [line for report in reports.get(stage, ()) for line in report.get("lines", ())]
    return [line for line in lines if all(line.get(name) == value for name, value in wanted.items())]


def _pass(context: str) -> Callable[[Reports], float | None]:
    """The share of the floor that a plain pass of Triton layers with the kernel reaches, by the device's clock."""

    def figure(reports: Reports) -> float | None:
        found = _lines(
            reports, "passes", **{"new tokens": 1, "attention": "fused", "executor": "Triton layers", "context": context}
        )
        return max((line["floor / time"] for line in found), default=None)

    return figure


def _round(lookahead: str, name: str, stage: str = "rounds") -> Callable[[Reports], float | None]:
    def figure(reports: Reports) -> float | None:
        found = [line[name] for line in _lines(reports, stage, way="captured", lookahead=lookahead) if name in line]
        return found[0] if found else None

    return figure


def _speculative(name: str) -> Callable[[Reports], float | None]:
    """Of the faster speculative setting at 8 rows."""

    def figure(reports: Reports) -> float | None:
        found = [line for line in _lines(reports, "bench-8", baseline=False) if line["setting"] != "off"]
        if not found:
            return None
        best = max(found, key=lambda line: line["tokens_per_second"][0])
        return best[name][0] if isinstance(best[name], (list, tuple)) else best[name]

    return figure


def _against_transformers(batch: int) -> Callable[[Reports], float | None]:
    """Tokens per second of our fastest setting over Transformers' fastest."""

    def figure(reports: Reports) -> float | None:
        speeds = {
            baseline: [line["tokens_per_second"][0] for line in _lines(reports, f"bench-{batch}", baseline=baseline)]
            for baseline in (False, True)
        }
        return max(speeds[False]) / max(speeds[True]) if speeds[False] and speeds[True] else None

    return figure


def _ratio(reports: Reports) -> float | None:
    """Milliseconds per token and row of plain captured rounds over those of six drafts."""
    plain, drafted = (_round(lookahead, "ms per token")(reports) for lookahead in ("off", "fixed:6"))
    return plain / drafted if plain and drafted else None


def _of_bytes(stage: str) -> Callable[[Reports], float | None]:
    """Milliseconds of a plain round in 16 bit over those with weights of one byte."""

    def figure(reports: Reports) -> float | None:
        wide, narrow = (_round("off", "ms", one)(reports) for one in ("rounds", stage))
        return wide / narrow if wide and narrow else None

    return figure


def _switches(reports: Reports) -> float | None:
    """Tokens per second of a served load with the interval of `shoal serve` over Python's own."""
    found = [float(line["tokens/s"]) for line in _lines(reports, "served")]
    return found[1] / found[0] if len(found) == 2 else None


TARGETS = (
    Target("plain pass of 8 rows, share of the floor, short context", 0.80, _pass("short")),
    Target("plain pass of 8 rows, share of the floor, long context", 0.80, _pass("long")),
    Target("plain round of 8 rows, share of the floor", 0.80, _round("off", "floor / time")),
    Target("plain round of 8 rows, share of the floor, then", 0.85, _round("off", "floor / time"), otherwise="next"),
    Target("round of six drafts, 8 rows, share of its floor", 0.65, _round("fixed:6", "floor / time")),
    Target("six drafts against plain rounds, per token and row", 2.6, _ratio, "{:.2f}x"),
    Target("speculative against plain decoding, whole runs of 8 rows", 2.6, _speculative("speedup"), "{:.2f}x"),
    Target("waits for the host, share of a plain round", 0.03, _round("off", "host"), "{:.3f}", at_least=False),
    Target("waits for the host, share of a round of six drafts", 0.03, _round("fixed:6", "host"), "{:.3f}", at_least=False),
    Target("uploads per round of six drafts", 1, _round("fixed:6", "uploads"), "{:.1f}", at_least=False),
    Target("downloads per round of six drafts", 1, _round("fixed:6", "downloads"), "{:.1f}", at_least=False),
    *(
        Target(f"plain round of {name}, share of its floor", 0.80, _round("off", "floor / time", stage))
        for name, stage in (("a Llama 3 8B", "rounds-8b"), ("long contexts", "rounds-long"))
    ),
    *(
        Target(f"plain round of {form} weights against 16 bit", 1.3, _of_bytes(f"rounds-{form}"), "{:.2f}x")
        for form in ("int8", "fp8")
    ),
    Target("served load, quick switches against Python's own", 1.0, _switches, "{:.2f}x"),
    *(
        Target(f"tokens per second against Transformers, batch {batch}", 1.0, _against_transformers(batch), "{:.2f}x")
        for batch in (8, 1, 32)
    ),
)
