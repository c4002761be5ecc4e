"""The job of `shoal bench`: the combinations to measure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from shoal.bench.decoding_methods import PLAIN
from shoal.bench.work import Case, Ids
from shoal.config import require_lossless
from shoal.errors import RequestError


@dataclass(frozen=True)
class Job:
    """The combinations of batch size, layout, temperature and method.

    Attributes:
        batches: the numbers of rows.
        n: the rows per prompt of the layout "grouped".
        layouts: the layouts to measure.
        temperatures: the temperatures to measure.
        lookaheads: the draft lengths to measure.
        baselines: the baselines to measure.
        eos: the ids that end a row; () = every row runs to `max_new_tokens`.
        rule: the acceptance rule.
        acceptance: the rate to impose, None for the real rule.
        guidance: see `shoal.Sampling`.
        plausibility: see `shoal.Sampling`.
    """

    batches: tuple[int, ...] = (1, 2, 4, 8)
    n: int = 8
    layouts: tuple[str, ...] = ("different",)
    temperatures: tuple[float, ...] = (0.8,)
    lookaheads: tuple[str, ...] = ("auto",)
    baselines: tuple[str, ...] = ()
    max_new_tokens: int = 128
    repeats: int = 3
    seed: int = 0
    eos: Ids = ()
    rule: str = "rejection"
    acceptance: float | None = None
    guidance: float = 0.0
    plausibility: float = 0.0

    def __post_init__(self) -> None:
        if min(self.repeats, self.max_new_tokens) < 1:
            raise RequestError("repeats and max_new_tokens must be >= 1")
        if self.acceptance is not None:
            require_lossless(
                self.rule, "an imposed acceptance, which stands for that of an exact rule,"
            )
        if self.guidance and self.baselines:
            raise RequestError(
                "Transformers' own methods take no guide: give --baselines '' beside --guidance"
            )
        object.__setattr__(
            self, "lookaheads", tuple(dict.fromkeys((PLAIN, *self.lookaheads)))
        )  # plain is the denominator

    @property
    def guided(self) -> dict[str, float]:
        """The options of `Shoal.generate` for guidance."""
        return {"guidance": self.guidance, "plausibility": self.plausibility}

    @property
    def cases(self) -> list[Case]:
        """The cases by layout, temperature and batch size."""
        chosen = product(self.layouts, self.temperatures, self.batches)
        return [
            Case.of(layout, temperature, batch, self.n) for layout, temperature, batch in chosen
        ]
