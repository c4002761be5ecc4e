"""Given completions and the verdicts on them, in a directory: what was judged stays when the rest is interrupted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.errors import RequestError
from shoal.evaluation.journal import Journal, settle
from shoal.evaluation.judge import Pair, Verdict, judge_all, tallies
from shoal.evaluation.problems import Problem
from shoal.evaluation.sandbox import Sandbox

SETTINGS, VERDICTS, SUMMARY = "settings.json", "verdicts.jsonl", "summary.json"
Watch = Callable[[str, Iterable[Verdict], int], Iterable[Verdict]]
"""(what is done, verdicts as they come, how many there will be) -> the same verdicts; shows progress."""


class Solutions:
    """Completions to judge. A directory that holds verdicts on some of them is gone on with.

    Args:
        settings: what the verdicts depend on; a directory with verdicts of other settings is refused.

    Raises:
        RequestError: if the directory cannot be used, see `shoal.evaluation.journal`.
    """

    def __init__(self, directory: Path, pairs: Sequence[Pair], settings: Mapping[str, Any]) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(f"cannot use {str(directory)!r}: {error.strerror}") from error
        settle(directory / SETTINGS, dict(settings))
        self.directory, self.pairs = directory, list(pairs)
        self._names = _names(pairs)
        self._journal = Journal(directory / VERDICTS)

    def judge(self, sandbox: Sandbox, workers: int | None, watch: Watch) -> None:
        """Judges those without a verdict; each verdict is on the disk before the next is waited for."""
        missing = self._names[len(self.verdicts) :]
        with closing(judge_all(self.pairs[len(self.verdicts) :], sandbox, workers)) as verdicts:
            for name, verdict in zip(missing, watch("judging", verdicts, len(missing)), strict=True):
                self._journal.append({"task_id": name, **asdict(verdict)})

    @property
    def verdicts(self) -> list[Verdict]:
        """Of the first completions: verdicts come in the order of the completions."""
        entries = [self._journal.entries[name] for name in self._names if name in self._journal.entries]
        return [Verdict(**{name: entry[name] for name in Verdict.__dataclass_fields__}) for entry in entries]

    def report(self, problems: Sequence[Problem], extra: Mapping[str, Any]) -> dict[str, Any]:
        """What became of those that were judged; written to the directory, and returned."""
        verdicts = self.verdicts
        failures = [
            {"task_id": problem.task_id, "language": problem.language, "headline": verdict.headline, **asdict(verdict)}
            for (problem, _), verdict in zip(self.pairs, verdicts, strict=False)
            if not verdict.passed
        ]
        counted = {name: asdict(tally) for name, tally in tallies(problems, self.pairs, verdicts).items()}
        summary = {
            **extra,
            "judged": len(verdicts),
            "solutions": len(self.pairs),
            "languages": counted,
            "failures": failures,
        }
        (self.directory / SUMMARY).write_text(json.dumps(summary) + "\n", encoding="utf-8")
        return summary


def _names(pairs: Sequence[Pair]) -> list[str]:
    """Their task ids, from the second completion of a problem on with its number."""
    seen: Counter[str] = Counter()
    names = []
    for problem, _ in pairs:
        seen[problem.task_id] += 1
        names.append(problem.task_id if seen[problem.task_id] == 1 else f"{problem.task_id} ({seen[problem.task_id]})")
    return names
