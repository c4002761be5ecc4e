"""The options of commands that generate, about the sampling of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from shoal.cli.option_groups import parameter_option, sampling_option
from shoal.cli.options import SampleOptions, SamplesOption, TopPOption
from shoal.config import Sampling
from shoal.errors import RequestError

NOT_SAMPLING = ("n", "greedy", "align", "exact", "syntax", "members")
"""The fields of `SamplingOptions`, and of `shoal complete`, that are given in another way."""


@dataclass(frozen=True)
class SamplingOptions(SampleOptions):
    """The sampling of tokens, and the ends of samples."""

    n: SamplesOption = 1
    temperature: Annotated[
        float | None, parameter_option("temperature", show_default=str(Sampling.temperature))
    ] = None
    top_p: TopPOption = Sampling.top_p
    top_k: Annotated[int, parameter_option("top_k")] = Sampling.top_k
    min_p: Annotated[float, parameter_option("min_p")] = Sampling.min_p
    greedy: Annotated[bool, sampling_option("--greedy", help="Always the most probable token.")] = (
        False
    )
    seed: Annotated[
        int | None,
        sampling_option(help="The same seed gives the same samples; fresh entropy without it."),
    ] = None
    stop: Annotated[
        list[str] | None,
        sampling_option(metavar="TEXT", help="A string that ends a sample; repeatable."),
    ] = None
    time_budget: Annotated[
        float | None,
        sampling_option(help="Seconds; samples unfinished then are returned as they are."),
    ] = None

    align: Annotated[
        bool,
        sampling_option(
            "--align", help="Prompts may end inside a token, whose bytes every sample writes again."
        ),
    ] = False
    exact: Annotated[
        Literal["weights", "smc", "asap", "asap+smc", "distinct"] | None,
        sampling_option(
            "--exact",
            metavar="KIND",
            help="weights: weigh samples under --align so that they are samples of p; smc: and "
            "resample them while they run; asap: "
            "and draw them by what earlier ones have shown; asap+smc: both; distinct: whole texts "
            "without replacement, so that no two samples are equal.",
        ),
    ] = None

    def given(self) -> dict[str, Any]:
        """Returns the options of `Shoal.generate` that have a value.

        The others keep the library's defaults.
        """
        if self.greedy and self.temperature:
            raise RequestError(
                f"--greedy means --temperature 0, but --temperature {self.temperature:g} was "
                f"given: leave one out"
            )
        options = {
            name: value
            for name, value in vars(self).items()
            if name not in NOT_SAMPLING and value is not None
        }
        return options | ({"temperature": 0.0} if self.greedy else {})


@dataclass(frozen=True)
class GenerateSampling(SamplingOptions):
    """The sampling options with penalties, which code at a cursor does not need."""

    repetition_penalty: Annotated[float, parameter_option("repetition_penalty")] = (
        Sampling.repetition_penalty
    )
    presence_penalty: Annotated[float, parameter_option("presence_penalty")] = (
        Sampling.presence_penalty
    )
    frequency_penalty: Annotated[float, parameter_option("frequency_penalty")] = (
        Sampling.frequency_penalty
    )
