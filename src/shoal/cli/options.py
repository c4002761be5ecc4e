"""The options that several commands share, those of sampling included, and their meaning."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from shoal.cli.console import imports_shown, loading_shown
from shoal.cli.option_groups import (
    KvOption,
    NegativePromptOption,
    PositivePromptOption,
    models_option,
    output_option,
    parameter_option,
    sampling_option,
    speed_option,
)
from shoal.config import Limits, Sampling
from shoal.drafting.draft import BUNDLED, DRAFT_GUIDES, TARGET_GUIDES, draft_help, read_draft
from shoal.errors import RequestError
from shoal.models.head_start import HeadStart
from shoal.models.sources import directory_of, quieten_transformers, weight_files

if TYPE_CHECKING:
    from shoal.api import Shoal
    from shoal.models.runner import Runner

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Compile = Literal["auto", "on", "off", "modules"]
Rule = Literal["auto", "rejection", "coupled", "typical"]

PROMPTS_HELP = (
    'JSON Lines (.jsonl) of texts or objects with "prompt"; .txt: a prompt per '
    "paragraph; any other file is one prompt."
)

LookaheadOption = Annotated[
    str,
    speed_option(
        "--lookahead",
        "--k",
        "-k",
        metavar="LENGTH",
        help="Tokens proposed per row and round: auto (by measured costs), a number, off (plain "
        "decoding), bass or heuristic.",
    ),
]
SamplesOption = Annotated[
    int, sampling_option("-n", "--samples", min=1, help="Samples per prompt.")
]
NewTokensOption = Annotated[
    int, sampling_option("--max-new-tokens", help="Tokens per sample at most.")
]
TopPOption = Annotated[float, parameter_option("top_p")]
GuidanceOption = Annotated[float, parameter_option("guidance")]
PlausibilityOption = Annotated[float, parameter_option("plausibility")]
JsonOption = Annotated[bool, output_option("--json", help="One JSON object on stdout.")]


def parse_max_batch(text: str) -> int | str:
    """Reads a `max_batch` for `shoal.load`."""
    from shoal.engine.batch_size import require_max_batch

    return require_max_batch(int(text) if text.isdecimal() else text)


MaxBatchOption = Annotated[
    Any,
    speed_option(
        "--max-batch",
        metavar="ROWS",
        parser=parse_max_batch,
        help="Rows decoded at the same time; more wait. auto: as many as memory holds and as "
        "raise tokens/s.",
    ),
]


@dataclass(frozen=True)
class SampleOptions:
    """The number of samples, and their length."""

    n: SamplesOption = 8
    max_new_tokens: NewTokensOption = Limits.max_new_tokens


@dataclass(frozen=True)
class SpeculationOptions:
    """The draft lengths and the acceptance rule."""

    lookahead: LookaheadOption = "auto"
    rule: Annotated[
        Rule,
        speed_option(
            "--rule",
            help="How drafts are accepted. coupled: a seed's tokens do not depend on draft "
            "lengths. rejection: accepts more. auto: coupled with a seed, else rejection. typical: "
            "lossy.",
        ),
    ] = "auto"


@dataclass(frozen=True)
class PairNames:
    """The target and the drafter, Hub ids or directories; a drafter alone raises RequestError."""

    model: Annotated[
        str | None,
        models_option(
            "--model", "-m", help="Target: Hub id or directory. Without it, the bundled pair."
        ),
    ] = None
    draft: Annotated[
        str | None,
        models_option("--draft", "-d", help=f"{draft_help()} Without it, --model decodes plainly."),
    ] = None

    def __post_init__(self) -> None:
        # All before torch is imported, which takes seconds.
        if self.draft_model not in (None, BUNDLED) and self.model is None:
            raise RequestError(
                "--draft DIR needs --model: a draft model fits one target; without both, the "
                "bundled pair is used"
            )
        for name in self.models:
            directory_of(name)

    @property
    def draft_model(self) -> str | None:
        """The name of the draft model, if there is one; raises as `read_draft` does."""
        draft = read_draft(self.draft)
        return None if draft is None else draft.source

    @property
    def models(self) -> list[str]:
        """The names of the models."""
        return [name for name in (self.model, self.draft_model) if name not in (None, BUNDLED)]


@dataclass(frozen=True)
class PlacedPair(PairNames):
    """A pair, its number format and its device."""

    dtype: Annotated[
        Dtype,
        models_option(
            "--dtype",
            metavar="FORMAT",
            help="Number format of the weights: auto, float32, bfloat16 or float16.",
        ),
    ] = "auto"
    device: Annotated[str, models_option("--device", help="auto, cpu, cuda, cuda:1, ...")] = "auto"


@dataclass(frozen=True)
class ModelSource(PlacedPair):
    """The models to load, with the arguments of `shoal.load`."""

    guide: Annotated[
        str | None,
        models_option(
            "--guide",
            help="Second model for --guidance, like --model; draft = the draft model, target = "
            "the target, for negative prompts.",
        ),
    ] = None
    expert: Annotated[
        str | None,
        models_option(
            "--expert",
            help="Third model, which --guidance leads towards instead of the target (proxy "
            "tuning), like --model; draft = the draft model, target = the target.",
        ),
    ] = None
    revision: Annotated[
        str | None, models_option("--revision", help="Branch, tag or commit of the target.")
    ] = None
    draft_revision: Annotated[
        str | None, models_option("--draft-revision", help="Branch, tag or commit of the drafter.")
    ] = None
    local_files_only: Annotated[
        bool, models_option("--local-files-only", help="Never go to the network.")
    ] = False
    trust_remote_code: Annotated[
        bool,
        models_option("--trust-remote-code", help="Run Python code that comes with the model."),
    ] = False
    quantize: Annotated[
        str,
        models_option(
            "--quantize",
            metavar="FORMATS",
            help="8-bit weights: off, or target=F,draft=F where F is int8, fp8 (CUDA) or off.",
        ),
    ] = "off"
    kv: KvOption = "off"
    tensor_parallel: Annotated[
        bool,
        models_option(
            "--tensor-parallel",
            help="Share the target among processes: torchrun --nproc-per-node N -m shoal ...",
        ),
    ] = False
    attention: Annotated[
        str,
        speed_option(
            "--attention",
            metavar="METHOD",
            help="How ragged rows are attended to: auto, pad, split, bifurcated, fused (CUDA), "
            "native (CPU), strict or reference.",
        ),
    ] = "auto"
    max_batch: MaxBatchOption = "auto"
    compile: Annotated[
        Compile,
        speed_option(
            "--compile",
            help="CUDA graphs; on a CPU kernels in C, compiled once. auto = where that is "
            "possible; modules = auto, with the model's own modules for all but attention.",
        ),
    ] = "auto"
    strict: Annotated[
        bool,
        speed_option(
            "--strict", help="Tokens that do not depend on the batch, in 16 bit too; CPU, slower."
        ),
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        quieten_transformers(self.models)  # before a command imports Transformers

    @property
    def models(self) -> list[str]:
        """The names of the models."""
        return [*super().models, *self.other_guides]

    @property
    def other_guides(self) -> list[str]:
        """The names of the guide and the expert, if they are no models of the pair."""
        own = (None, DRAFT_GUIDES, TARGET_GUIDES)
        return [one for one in (self.guide, self.expert) if one is not None and one not in own]

    def require_guide(self, guidance: float) -> None:
        """Raises RequestError, before models are loaded, for guidance without a guide."""
        if guidance and self.guide is None:
            raise RequestError("--guidance needs a second model: give --guide")

    def target_alone(self) -> ModelSource:
        """Returns the source without drafter and guides."""
        return replace(self, draft=None, draft_revision=None, guide=None, expert=None)

    def load(self, prefix_memory: int = 0) -> Shoal:
        """Loads the pair, or the target alone if there is no drafter; see `shoal.load`."""
        files: list[Path] = []
        for name, revision in (
            (self.model, self.revision),
            (self.draft_model, self.draft_revision),
            *((name, None) for name in self.other_guides),
        ):
            if name not in (None, BUNDLED):
                files += weight_files(name, revision, self.local_files_only)
        options = {field.name: getattr(self, field.name) for field in fields(ModelSource)}
        pair = options.pop("model"), options.pop("draft")
        with HeadStart(files, memory=self.device in ("auto", "cpu")), loading_shown():
            from shoal.loader import load

            return load(*pair, prefix_memory=prefix_memory, **options)


def parse_lookahead(text: str) -> str | int:
    """Reads and checks a draft length: "4" is an int, everything else the name of a rule."""
    with imports_shown():
        from shoal.lookahead.controller import by_name
    lookahead = int(text) if text.isdecimal() else text
    by_name(lookahead)
    return lookahead


def display_name(runner: Runner) -> str:
    """Returns a model's name as the user gave it; shoal's own is called "bundled target"."""
    from shoal.models.sources import bundled

    path = Path(runner.name)
    return f"bundled {path.name}" if path.parent == bundled("target").parent else runner.name


def dtype_name(runner: Runner) -> str:
    """Returns the bare name of the data type: float32, not torch.float32."""
    return str(runner.dtype).removeprefix("torch.")


NOT_SAMPLING = ("n", "greedy", "align", "exact", "syntax", "members")
"""The fields of `SamplingOptions`, and of `shoal complete`, that are given in another way."""


def known_default(name: str) -> Any:
    """Returns the option of a parameter whose default the help tells; None = it is not given."""
    return parameter_option(name, show_default=str(getattr(Sampling, name)))


@dataclass(frozen=True)
class SamplingOptions(SampleOptions):
    """The sampling of tokens, and the ends of samples."""

    n: SamplesOption = 1
    temperature: Annotated[float | None, known_default("temperature")] = None
    top_p: Annotated[float | None, known_default("top_p")] = None
    top_k: Annotated[int | None, known_default("top_k")] = None
    min_p: Annotated[float | None, known_default("min_p")] = None
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
            "resample them while they run; asap: and draw them by what earlier ones have shown; "
            "asap+smc: both; distinct: whole texts without replacement, so that no two samples are "
            "equal.",
        ),
    ] = None

    def given(self) -> dict[str, Any]:
        """Returns the options of `Shoal.generate` that have a value; others keep their defaults."""
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
    """The sampling options with guidance and penalties, which code at a cursor does not need."""

    guidance: GuidanceOption = Sampling.guidance
    plausibility: PlausibilityOption = Sampling.plausibility
    posterior: Annotated[float, parameter_option("posterior")] = Sampling.posterior
    negative_prompt: NegativePromptOption = None
    positive_prompt: PositivePromptOption = None
    repetition_penalty: Annotated[float | None, known_default("repetition_penalty")] = None
    presence_penalty: Annotated[float, parameter_option("presence_penalty")] = (
        Sampling.presence_penalty
    )
    frequency_penalty: Annotated[float, parameter_option("frequency_penalty")] = (
        Sampling.frequency_penalty
    )
