"""The options that several commands share, and what they mean."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shoal.cli.option_groups import MODELS, OUTPUT, SAMPLING, SPEED
from shoal.config import Limits
from shoal.errors import RequestError
from shoal.models.sources import directory_of, require_source

if TYPE_CHECKING:
    from shoal.api import Shoal
    from shoal.models.runner import Runner

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Compile = Literal["auto", "on", "off"]
Rule = Literal["auto", "rejection", "coupled"]

PROMPTS_HELP = (
    'JSON Lines (.jsonl) of texts or objects with "prompt"; .txt: a prompt per paragraph; any other file is one prompt.'
)

LookaheadOption = Annotated[
    str,
    typer.Option(
        "--lookahead", "--k", "-k", metavar="LENGTH",
        help="Tokens proposed per row and round: auto (by measured costs), a number, off (plain decoding), bass or heuristic.",
        rich_help_panel=SPEED,
    ),
]  # fmt: skip
SamplesOption = Annotated[int, typer.Option("-n", "--samples", min=1, help="Samples per prompt.", rich_help_panel=SAMPLING)]
NewTokensOption = Annotated[
    int, typer.Option("--max-new-tokens", help="Tokens per sample at most.", rich_help_panel=SAMPLING)
]
TopPOption = Annotated[float, typer.Option(help="Smallest set of tokens with this mass; 1 = off.", rich_help_panel=SAMPLING)]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.", rich_help_panel=OUTPUT)]


@dataclass(frozen=True)
class SampleOptions:
    """How many samples, and how long."""

    n: SamplesOption = 8
    max_new_tokens: NewTokensOption = Limits.max_new_tokens


@dataclass(frozen=True)
class SpeculationOptions:
    """Draft lengths and the acceptance rule."""

    lookahead: LookaheadOption = "auto"
    rule: Annotated[
        Rule,
        typer.Option(
            "--rule", help="How drafts are judged. coupled: a seed's tokens do not depend on draft lengths. auto: so with a seed.",
            rich_help_panel=SPEED,
        ),
    ] = "auto"  # fmt: skip


@dataclass(frozen=True)
class PairNames:
    """Target and drafter, each a Hub id or a directory. Raises RequestError for a drafter without its target."""

    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="Target: Hub id or directory. Without it, the bundled pair.", rich_help_panel=MODELS
        ),
    ] = None
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft", "-d", help="Drafter: Hub id or directory. Without it, plain decoding.", rich_help_panel=MODELS
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.draft is not None and self.model is None:
            raise RequestError("--draft needs --model: a drafter fits one target; without both, the bundled pair is used")
        for name in (self.model, self.draft):
            if name is not None:
                directory_of(name)  # before torch is imported, which takes seconds


@dataclass(frozen=True)
class PlacedPair(PairNames):
    """A pair, its number format and its device."""

    dtype: Annotated[
        Dtype,
        typer.Option(
            "--dtype", metavar="FORMAT", help="Number format of the weights: auto, float32, bfloat16 or float16.",
            rich_help_panel=MODELS,
        ),
    ] = "auto"  # fmt: skip
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...", rich_help_panel=MODELS)] = "auto"


@dataclass(frozen=True)
class ModelSource(PlacedPair):
    """Which models to load, and how: the arguments of `shoal.load`."""

    revision: Annotated[
        str | None, typer.Option("--revision", help="Branch, tag or commit of the target.", rich_help_panel=MODELS)
    ] = None
    draft_revision: Annotated[
        str | None, typer.Option("--draft-revision", help="Branch, tag or commit of the drafter.", rich_help_panel=MODELS)
    ] = None
    local_files_only: Annotated[
        bool, typer.Option("--local-files-only", help="Never go to the network.", rich_help_panel=MODELS)
    ] = False
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.", rich_help_panel=MODELS)
    ] = False
    quantize: Annotated[
        str,
        typer.Option(
            "--quantize", metavar="FORMATS", rich_help_panel=MODELS,
            help="8-bit weights: off, or target=F,draft=F where F is int8, fp8 (CUDA) or off.",
        ),
    ] = "off"  # fmt: skip
    tensor_parallel: Annotated[
        bool,
        typer.Option(
            "--tensor-parallel", rich_help_panel=MODELS,
            help="Share the target among processes: torchrun --nproc-per-node N -m shoal generate ...",
        ),
    ] = False  # fmt: skip
    attention: Annotated[
        str,
        typer.Option(
            "--attention", metavar="METHOD", rich_help_panel=SPEED,
            help="How ragged rows are attended to: auto, pad, split, mixed, bifurcated, fused (CUDA), strict or reference.",
        ),
    ] = "auto"  # fmt: skip
    max_batch: Annotated[
        int, typer.Option("--max-batch", min=1, help="Rows decoded at the same time; more wait.", rich_help_panel=SPEED)
    ] = 16
    compile: Annotated[
        Compile,
        typer.Option(
            "--compile", rich_help_panel=SPEED,
            help="Passes of fixed shapes: CUDA graphs, or compiled code on a CPU (slow to start). auto = on for CUDA.",
        ),
    ] = "auto"  # fmt: skip
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Tokens that do not depend on the batch, in 16 bit too; CPU, slower.", rich_help_panel=SPEED
        ),
    ] = False

    def target_alone(self) -> ModelSource:
        """The same without the drafter."""
        return replace(self, draft=None, draft_revision=None)

    def load(self) -> Shoal:
        """Loads the pair, or the target alone where there is no drafter."""
        self.quieten_transformers()
        for name, revision in ((self.model, self.revision), (self.draft, self.draft_revision)):
            if name is not None:
                require_source(name, revision, self.local_files_only)
        from shoal.api import load

        options = {field.name: getattr(self, field.name) for field in fields(ModelSource)}
        return load(options.pop("model"), options.pop("draft"), **options)

    def quieten_transformers(self) -> None:
        """Keeps its warnings off stderr, and its progress bars unless something may be downloaded; before its import."""
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        if all(name is None or Path(name).is_dir() for name in (self.model, self.draft)):
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def parse_lookahead(text: str) -> str | int:
    """A draft length as the engine takes it, checked: "4" is an int, everything else the name of a rule."""
    from shoal.lookahead.controller import by_name

    lookahead = int(text) if text.isdecimal() else text
    by_name(lookahead)
    return lookahead


def display_name(runner: Runner) -> str:
    """A model's name as the user gave it; "bundled target" for a model that came with shoal."""
    from shoal.models.loading import bundled

    path = Path(runner.name)
    return f"bundled {path.name}" if path.parent == bundled("target").parent else runner.name


def dtype_name(runner: Runner) -> str:
    """The bare name: float32, not torch.float32."""
    return str(runner.dtype).removeprefix("torch.")
