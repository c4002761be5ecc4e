"""Counts of a row and of a run: occurrences of tokens, drafts by drafter, passes, seconds."""

from __future__ import annotations

import operator
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar


@dataclass(frozen=True)
class DraftCounts:
    """The number of tokens that a drafter proposed, and the number of these that were accepted."""

    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(self.drafted + other.drafted, self.accepted + other.accepted)

    def __sub__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(self.drafted - other.drafted, self.accepted - other.accepted)


def total_by_drafter(counts: Iterable[Mapping[str, DraftCounts]]) -> dict[str, DraftCounts]:
    """Returns the sums of the counts by drafter."""
    total: dict[str, DraftCounts] = {}
    for one in counts:
        for name, more in one.items():
            total[name] = total.get(name, DraftCounts()) + more
    return total


def as_dicts(counts: Mapping[str, DraftCounts]) -> dict[str, dict[str, int]]:
    """Returns the counts by drafter, ready for JSON."""
    return {name: asdict(one) for name, one in counts.items()}


class TokenCounts:
    """The running counts over a list of tokens that only grows.

    Attributes:
        ids: the tokens that occur, each once.
        counts: the number of occurrences of each token, in the order of `ids`.
        read: the length of the list when it was last counted.
    """

    def __init__(self, start: int = 0) -> None:
        self.ids, self.counts, self.read = array("q"), array("q"), start
        self._index: dict[int, int] = {}  # of each token in `ids`

    def upto(self, tokens: Sequence[int]) -> TokenCounts:
        """Counts the tokens that were appended since the last call; returns this object."""
        for i in range(self.read, len(tokens)):
            self._count(tokens[i])
        self.read = max(self.read, len(tokens))
        return self

    def of(self, token: int) -> int:
        """Returns the number of occurrences of a token."""
        index = self._index.get(token)
        return 0 if index is None else self.counts[index]

    def _count(self, token: int) -> None:
        index = self._index.setdefault(token, len(self.ids))
        if index == len(self.ids):
            self.ids.append(token)
            self.counts.append(0)
        self.counts[index] += 1


T = TypeVar("T")


@dataclass
class Seconds:
    """The time of a run, by stage.

    Attributes:
        seconds_target: seconds inside the target's forward passes and its guide's, on a GPU by
            its own events.
        seconds_draft: seconds inside the drafter's forward passes, on a GPU by its own events.
        seconds_prefill: seconds for prompts, both models, but for fused chunks.
        seconds_rounds: seconds of whole rounds without prefill; the time outside the two models is
            bookkeeping.
        seconds_propose: the part of the rounds spent on proposals, the models' passes included.
        seconds_verify: the part spent on verification passes.
        seconds_accept: the part spent on acceptance.
        seconds_commit: the part spent on committing tokens.
        seconds: wall clock of the run.
    """

    seconds_target: float = 0.0
    seconds_draft: float = 0.0
    seconds_prefill: float = 0.0
    seconds_rounds: float = 0.0
    seconds_propose: float = 0.0
    seconds_verify: float = 0.0
    seconds_accept: float = 0.0
    seconds_commit: float = 0.0
    seconds: float = 0.0

    @property
    def bookkeeping(self) -> float:
        """The share of a round spent outside the models' forward passes, 0..1."""
        if not self.seconds_rounds:
            return 0.0
        return 1 - (self.seconds_target + self.seconds_draft) / self.seconds_rounds


@dataclass
class Stats(Seconds):
    """The counts and seconds of a run, summed over rounds.

    Attributes:
        rounds: draft -> verify -> accept -> commit cycles of the batch.
        target_passes: forward passes of the target over the batch, prompts not counted.
        draft_passes: forward passes of the drafter over the batch, prompts not counted.
        guide_passes: forward passes of the guide, and of the expert, over the rows with guidance,
            prompts not counted.
        prefills: prompts computed by the target, one per group; more if a prompt lost its place to
            others while rows of its group waited (`shoal.engine.scheduler`).
        prefill_tokens: the tokens of these prompts.
        restored_tokens: prompt tokens copied from earlier rows instead.
        prefill_chunks: chunks in which prompts were computed; equals `prefills` if no prompt was
            long.
        fused_chunks: the chunks among them that were computed in the passes of rounds.
        row_rounds: target passes, summed over rows.
        drafted: drafted tokens over all rows.
        accepted: accepted drafts over all rows.
        committed: committed tokens over all rows, replacement and bonus tokens included.
        pauses: times that a row gave its slot to a row of another request
            (`shoal.engine.waiting`).
        resampled: rows that became copies of other rows of their request (`exact="smc"`).
        restarted: rows that began again, as another row of their request had drawn the text that
            they wrote (`exact="distinct"`).
        by_drafter: tokens drafted and accepted, by the name of the drafter that proposed them;
            empty if nothing was drafted.
        loaded: the choices of `shoal.load` for "target" and "draft" (`shoal.models.load_report`).
            These choices may change the tokens of a seed, as they change rounding or drafts. Empty
            for an engine made by hand. A sum keeps the first that is not empty.
        executors: the passes of "target", "draft", "guide", "expert", with prompts, by the
            name of the executor that computed them (`shoal.models.executor`).
        updates_behind: the updates of the target's weights since the drafter's own were written
            last (`Shoal.realign`); 0 for a drafter without weights of its own. A sum keeps the
            highest.
        lossy: "" if tokens have the target's distribution; else the rule that was asked for, and
            the change that it makes.
    """

    rounds: int = 0
    target_passes: int = 0
    draft_passes: int = 0
    guide_passes: int = 0
    prefills: int = 0
    prefill_tokens: int = 0
    restored_tokens: int = 0
    prefill_chunks: int = 0
    fused_chunks: int = 0
    row_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    committed: int = 0
    pauses: int = 0
    resampled: int = 0
    restarted: int = 0
    by_drafter: dict[str, DraftCounts] = field(default_factory=dict)
    loaded: dict[str, dict[str, str] | None] = field(default_factory=dict)
    executors: dict[str, Counter[str]] = field(default_factory=dict)
    updates_behind: int = 0
    lossy: str = ""

    def __repr__(self) -> str:
        speed = f"acceptance_length={self.acceptance_length:.2f}, seconds={self.seconds:.3g}"
        speed += f", lossy={self.lossy!r}" if self.lossy else ""
        return (
            f"Stats(rounds={self.rounds}, drafted={self.drafted}, accepted={self.accepted}, "
            f"committed={self.committed}, {speed})"
        )

    def __add__(self, other: Stats) -> Stats:
        return _combined(self, other, operator.add)

    def __sub__(self, other: Stats) -> Stats:
        return _combined(self, other, operator.sub)

    def count_drafts(self, drafter: str, drafted: int, accepted: int) -> None:
        """Adds the numbers of tokens that a drafter proposed and that were accepted."""
        if drafted:
            known = self.by_drafter.get(drafter, DraftCounts())
            self.by_drafter[drafter] = known + DraftCounts(drafted, accepted)

    def count_executors(self, model: str, passes: Counter[str]) -> None:
        """Adds the passes of a model ("target", "draft", "guide", "expert") by executor."""
        if passes:
            known = self.executors.setdefault(model, Counter())
            for name, count in passes.items():
                known[name] += count

    @property
    def acceptance_length(self) -> float:
        """The number of tokens committed per row per target pass; plain decoding = 1.00."""
        return self.committed / self.row_rounds if self.row_rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """The ratio of accepted to drafted tokens; by construction it falls with draft length."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_second(self) -> float:
        """The committed tokens over wall clock, prompts and drafting included."""
        return self.committed / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns all counts, times and derived figures, ready for JSON."""
        derived = ("acceptance_length", "acceptance_rate", "bookkeeping", "tokens_per_second")
        executors = {model: dict(passes) for model, passes in self.executors.items()}
        counts = asdict(replace(self, executors={})) | {"executors": executors}
        return counts | {name: getattr(self, name) for name in derived}


def _combined(one: Stats, other: Stats, combine: Callable[[Any, Any], Any]) -> Stats:
    amounts = [f.name for f in fields(one) if isinstance(f.default, int | float)]
    combined = {name: combine(getattr(one, name), getattr(other, name)) for name in amounts}
    combined["updates_behind"] = max(one.updates_behind, other.updates_behind)
    return Stats(
        **combined,
        by_drafter=_by_name(one.by_drafter, other.by_drafter, combine, DraftCounts()),
        executors=_by_name(one.executors, other.executors, combine, Counter()),
        loaded=one.loaded or other.loaded,
        lossy=one.lossy or other.lossy,
    )


def _by_name(
    mine: Mapping[str, T], theirs: Mapping[str, T], combine: Callable[[T, T], T], none: T
) -> dict[str, T]:
    """Combines counts by name; names without counts are left out."""
    combined = {
        name: combine(mine.get(name, none), theirs.get(name, none)) for name in {**mine, **theirs}
    }
    return {name: counts for name, counts in combined.items() if counts != none}
