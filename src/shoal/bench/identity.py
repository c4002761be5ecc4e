"""The check of greedy speculation against greedy plain decoding.

It covers every configuration that will be timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from shoal.bench.decoding_methods import PLAIN, Method
from shoal.bench.measure import Identity, compared, first_difference
from shoal.bench.report import Checked
from shoal.bench.work import Case, Ids, Run, Work
from shoal.errors import InternalError

CONTROL_ROWS = 8  # rows that the 16-bit control decodes one by one


@dataclass
class IdentityCheck:
    """A check of token ids; in an exact format a difference ends everything.

    Args:
        decode: returns the method of a draft length, by the real rule.
        dtype: the number format as messages write it.
        exact: the format is float32 or float64.
        step: called before every run, with its name.

    Attributes:
        found: the findings by layout, batch size and draft length.
    """

    decode: Callable[[str], Method]
    dtype: str
    exact: bool
    step: Callable[[str], None]
    found: dict[tuple[str, int, str], Checked] = field(default_factory=dict)
    _single: dict[Ids, Ids] = field(default_factory=dict)

    def check(self, case: Case, work: Work, lookaheads: Sequence[str]) -> None:
        """Checks the greedy identity of these draft lengths on this work.

        Raises:
            InternalError: for a difference in float32 or float64, with its place.
        """
        self.step(f"greedy identity, {case.name}: plain")
        plain = self.decode(PLAIN).run(work)
        control = None if self.exact else self._control(work, plain)
        for name in lookaheads:
            self.step(f"greedy identity, {case.name}: {name}")
            run = self.decode(name).run(work)
            drafted = run.stats.drafted if run.stats else 0
            found = compared(work.by_prompt(plain.ids), work.by_prompt(run.ids), drafted)
            if self.exact and found.same < found.rows:
                raise self._difference(case, name, found.place)
            self.found[case.layout, case.batch, name] = Checked.of(found, control)

    def compare(self, case: Case, name: str, runs: Sequence[Run], plain: Sequence[Run]) -> None:
        """Compares timed runs that were greedy themselves: they must agree as well.

        Raises:
            InternalError: see `check`.
        """
        for repeat, (one, other) in enumerate(zip(plain, runs, strict=False)):
            for row, (a, b) in enumerate(zip(one.ids, other.ids, strict=True)):
                position = first_difference(a, b)
                if position is not None:
                    raise self._difference(
                        case, name, f"repeat {repeat + 1}, row {row + 1}, token {position + 1}"
                    )

    def _difference(self, case: Case, name: str, place: str) -> InternalError:
        return InternalError(
            f"greedy decoding with lookahead {name} differs from plain decoding, {self.dtype}, "
            f"{case.name}: first at {place}; nothing that follows would be worth measuring"
        )

    def _control(self, work: Work, plain: Run) -> Identity:
        """Compares some rows of the plain run with the same rows decoded one by one.

        In 16 bit, batching changes ties by itself.
        """
        first = {prompt: row for row, prompt in reversed(list(enumerate(work.rows)))}
        rows = sorted(first.values())[:CONTROL_ROWS]
        single = [
            self._decoded_by_itself(replace(work, prompts=(work.rows[row],), n=1)) for row in rows
        ]
        return compared([[ids] for ids in single], [[plain.ids[row]] for row in rows], drafted=0)

    def _decoded_by_itself(self, work: Work) -> Ids:
        """Decodes one prompt greedily by itself, once."""
        (prompt,) = work.prompts
        if prompt not in self._single:
            (self._single[prompt],) = self.decode(PLAIN).run(work).ids
        return self._single[prompt]
