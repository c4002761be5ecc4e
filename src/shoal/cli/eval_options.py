"""The options of `shoal eval`: what is sampled, where results go, and all of it as settings."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from shoal.cli.eval_output import EXPORT_HELP
from shoal.cli.eval_set import EvalSet
from shoal.cli.option_groups import output_option, sampling_option, speed_option
from shoal.cli.options import (
    GuidanceOption,
    JsonOption,
    ModelSource,
    NewTokensOption,
    PlausibilityOption,
    SampleOptions,
    SpeculationOptions,
    TopPOption,
    parse_lookahead,
)
from shoal.errors import RequestError

if TYPE_CHECKING:
    from shoal.evaluation.sampling import SamplingConfig


@dataclass(frozen=True)
class EvalSampling(SampleOptions):
    """The sampling options of an evaluation, and its methods."""

    max_new_tokens: NewTokensOption = 256
    temperature: Annotated[float, sampling_option(help="0 = greedy.")] = 0.2
    top_p: TopPOption = 0.95
    seed: Annotated[
        int | None,
        sampling_option(
            help="The same seed gives the same samples by every method; fresh entropy without."
        ),
    ] = None
    guidance: GuidanceOption = 0.0
    plausibility: PlausibilityOption = 0.0
    time_budget: Annotated[
        str,
        sampling_option(
            metavar="SECONDS,...",
            help="Budgets at which one run is looked at; inf: none. Rows are cut at the longest.",
        ),
    ] = "inf"
    methods: Annotated[
        str | None,
        speed_option(
            metavar="METHOD,...",
            show_default="all that there is a drafter for",
            help="plain; single: speculation sample after sample; batched: speculation on all "
            "samples at once; or planned, alone: programs planned with public tests, not lossless.",
        ),
    ] = None

    @property
    def guided(self) -> dict[str, float]:
        """The options of guidance; none without it."""
        given = {"guidance": self.guidance, "plausibility": self.plausibility}
        return {name: value for name, value in given.items() if value}

    def config(self, source: ModelSource, speculation: SpeculationOptions) -> SamplingConfig:
        """Returns the sampling settings, checked before a model is loaded.

        Raises:
            RequestError: the options cannot be sampled with.
        """
        from shoal.evaluation.sampling import METHODS, PLAIN, SamplingConfig

        lookahead = parse_lookahead(speculation.lookahead or "auto")
        speculative = (source.model is None or source.draft is not None) and lookahead not in (
            "off",
            0,
        )
        possible = METHODS if speculative else (PLAIN,)
        named = tuple(part.strip() for part in (self.methods or "").split(",") if part.strip())
        chosen = possible if self.methods is None else named
        if not speculative and set(chosen) - {PLAIN}:
            raise RequestError(
                "only --methods plain is left without a drafter or with --lookahead off"
            )
        longest = max(parse_budgets(self.time_budget))
        options = {
            "rule": speculation.rule,
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "time_budget": None if math.isinf(longest) else longest,
            **self.guided,
        }
        return SamplingConfig(self.n, options, lookahead, self.seed, chosen)


@dataclass(frozen=True)
class EvalOutputOptions:
    """The places that results go to."""

    out: Annotated[
        Path | None,
        output_option(
            "--output",
            "-o",
            help="Directory for results, summary, figure and report. The same command goes on "
            "where it stopped.",
        ),
    ] = None
    plot: Annotated[
        bool, output_option("--plot/--no-plot", help="Draw the figure (with --output).")
    ] = True
    export: Annotated[
        list[str] | None, output_option("--export", metavar="FORMAT:FILE", help=EXPORT_HELP)
    ] = None
    json: JsonOption = False

    @contextmanager
    def directory(self) -> Iterator[Path]:
        """Yields the given directory, or a temporary one that is removed afterwards."""
        if self.out is not None:
            yield self.out
            return
        with tempfile.TemporaryDirectory(prefix="shoal-eval-") as directory:
            yield Path(directory)


def options_of(sampling: EvalSampling, speculation: SpeculationOptions) -> dict[str, Any]:
    """Returns the options of `Shoal.generate`."""
    return {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        **sampling.guided,
        "seed": sampling.seed,
        "lookahead": parse_lookahead(speculation.lookahead or "auto"),
        "rule": speculation.rule,
    }


def parse_budgets(text: str) -> list[float]:
    """Reads the budgets in seconds, rising; inf is no budget.

    Raises:
        RequestError: a budget is no number > 0, or there is none.
    """
    try:
        budgets = sorted({float(part) for part in text.split(",") if part.strip()})
    except ValueError:
        budgets = []
    if not budgets or not all(budget > 0 for budget in budgets):
        raise RequestError(
            f"--time-budget must be seconds > 0 separated by commas, or inf, got {text!r}"
        )
    return budgets


def settings_of(eval_set: EvalSet, source: ModelSource, config: SamplingConfig) -> dict[str, Any]:
    """Returns all settings that the samples and their times depend on."""
    import torch

    from shoal import __version__

    models = {
        name: str(value) for name, value in vars(source).items() if value not in (None, False)
    }
    return {
        "set": eval_set.name,
        "file": eval_set.file,
        "fingerprint": eval_set.fingerprint,
        "chat": eval_set.chat,
        "model": "bundled pair",
        **models,
        "n": config.n,
        **config.options,
        "lookahead": config.lookahead,
        "seed": config.seed,
        "methods": list(config.methods),
        "threads": torch.get_num_threads(),
        "shoal": __version__,
    }
