"""`shoal train`: draft models and heads for a target, trained on its own samples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.console import EXIT_INTERRUPTED, plain_table, stderr, stdout
from shoal.cli.files import listed_documents, listed_prompts
from shoal.cli.option_groups import ReadableCommand, ReadableGroup
from shoal.cli.options import JsonOption
from shoal.drafting.draft import BUNDLED
from shoal.errors import RequestError

if TYPE_CHECKING:
    from shoal.train.stages import Figures, Stage, StagedTrainer

app = typer.Typer(
    cls=ReadableGroup,
    no_args_is_help=True,
    help="Train a drafter for a target, on what the target writes itself.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

TargetOption = Annotated[
    str,
    typer.Option("--model", "-m", help="Target: Hub id or directory; bundled: the bundled target."),
]
OutOption = Annotated[
    Path,
    typer.Option("--output", "-o", help="Directory for the drafter; a rerun goes on from there."),
]
PromptsOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--prompts",
        help="JSON Lines of prompts that the target continues. Without: small programming "
        "problems.",
    ),
]


SamplesOption = Annotated[
    int, typer.Option("--samples", min=16, help="Texts that the target writes.")
]
NewTokensOption = Annotated[int, typer.Option("--new-tokens", min=8, help="Tokens of each.")]
StepsOption = Annotated[
    int, typer.Option("--steps", min=1, help="Of the optimiser, 4,096 tokens each.")
]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu or cuda.")]


@app.callback()
def train() -> None:
    """Trains a drafter for a target, on what the target writes itself."""


@app.command(cls=ReadableCommand)
def drafter(
    out: OutOption,
    target: TargetOption = BUNDLED,
    prompts: PromptsOption = None,
    corpus: Annotated[
        list[Path] | None,
        typer.Option(
            "--corpus",
            help="Texts of the first stage; a .jsonl file has one per line (a text, or an "
            'object with "text"), any other is one. '
            "Without: small programming problems and Python's standard library. Repeatable.",
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers. Without: an eighth of the target's.")
    ] = None,
    width: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Hidden size. Without: a quarter of a target's of 2,048 or more, half from "
            "1,024 on.",
        ),
    ] = None,
    exits: Annotated[
        list[int] | None,
        typer.Option(
            "--exits",
            metavar="LAYER",
            min=1,
            help="Layers after which it shall draft, too, where it is sure. Repeatable.",
        ),
    ] = None,
    samples: SamplesOption = 2400,
    new_tokens: NewTokensOption = 128,
    corpus_steps: Annotated[
        int, typer.Option("--corpus-steps", min=1, help="Of the optimiser in the first stage.")
    ] = 320,
    steps: StepsOption = 320,
    device: DeviceOption = "cpu",
    json_output: JsonOption = False,
) -> None:
    """A draft model, for `--draft DIR`: the target's architecture, small, taught by a corpus and
    then by the target.

    Says after each stage how much of what it drafts is accepted.
    Ctrl-C stops it: what is trained so far can be used, and the same command goes on from there.
    """
    source, texts = _checked(target, out, prompts)
    documents = listed_documents(corpus or [])
    from shoal.train.drafter import DrafterTrainer, DrafterTraining

    training = DrafterTraining(
        samples=samples,
        new_tokens=new_tokens,
        steps=steps,
        corpus_steps=corpus_steps,
        layers=layers,
        width=width,
        exits=tuple(exits or ()),
    )
    _train(DrafterTrainer(out, source, texts, documents, training, device), str(out), json_output)


@app.command(cls=ReadableCommand)
def medusa(
    out: OutOption,
    target: TargetOption = BUNDLED,
    prompts: PromptsOption = None,
    heads: Annotated[int, typer.Option(min=1, max=16, help="Heads: the longest draft.")] = 4,
    layers: Annotated[int, typer.Option(min=1, max=8, help="Residual blocks of a head.")] = 2,
    samples: SamplesOption = 2400,
    new_tokens: NewTokensOption = 128,
    steps: StepsOption = 320,
    device: DeviceOption = "cpu",
    json_output: JsonOption = False,
) -> None:
    """Medusa heads, for `--draft medusa:DIR`.

    Ctrl-C stops it: what is trained so far can be used, and the same command goes on from there.
    """
    source, texts = _checked(target, out, prompts)
    from shoal.train.heads import HeadsTraining
    from shoal.train.medusa import MedusaTrainer

    training = HeadsTraining(
        heads=heads, layers=layers, samples=samples, new_tokens=new_tokens, steps=steps
    )
    _train(MedusaTrainer(out, source, texts, training, device), f"medusa:{out}", json_output)


@app.command(cls=ReadableCommand)
def eagle3(
    out: OutOption,
    target: TargetOption = BUNDLED,
    prompts: PromptsOption = None,
    ahead: Annotated[
        int, typer.Option(min=1, max=8, help="Positions of a draft that they are trained for.")
    ] = 3,
    samples: SamplesOption = 2400,
    new_tokens: NewTokensOption = 128,
    steps: StepsOption = 160,
    device: DeviceOption = "cpu",
    json_output: JsonOption = False,
) -> None:
    """EAGLE-3 heads, for `--draft eagle3:DIR`.

    Ctrl-C stops it: what is trained so far can be used, and the same command goes on from there.
    """
    source, texts = _checked(target, out, prompts)
    from shoal.train.eagle3 import Eagle3Trainer
    from shoal.train.heads import HeadsTraining

    training = HeadsTraining(heads=ahead, samples=samples, new_tokens=new_tokens, steps=steps)
    _train(Eagle3Trainer(out, source, texts, training, device), f"eagle3:{out}", json_output)


@app.command(cls=ReadableCommand)
def ppd(
    out: OutOption,
    target: TargetOption = BUNDLED,
    prompts: PromptsOption = None,
    ahead: Annotated[
        int, typer.Option(min=1, max=16, help="Prompt tokens: the longest draft.")
    ] = 3,
    samples: SamplesOption = 2400,
    new_tokens: NewTokensOption = 128,
    steps: StepsOption = 160,
    device: DeviceOption = "cpu",
    json_output: JsonOption = False,
) -> None:
    """Prompt tokens of PPD, for `--draft ppd:DIR`: vectors by which the target itself guesses
    further ahead.

    Ctrl-C stops it: what is trained so far can be used, and the same command goes on from there.
    """
    source, texts = _checked(target, out, prompts)
    from shoal.train.heads import HeadsTraining
    from shoal.train.ppd import PpdTrainer

    training = HeadsTraining(heads=ahead, samples=samples, new_tokens=new_tokens, steps=steps)
    _train(PpdTrainer(out, source, texts, training, device), f"ppd:{out}", json_output)


def _checked(target: str, out: Path, prompts: list[Path] | None) -> tuple[str | None, list[str]]:
    """Returns the target for `shoal.load`, and the prompts.

    Raises:
        RequestError: a file cannot be read, or the output is the target's directory.
    """
    texts = listed_prompts(prompts or [])
    source = None if target == BUNDLED else target
    if source is not None and Path(source).resolve() == out.resolve():
        raise RequestError("--output must be another directory than that of the target")
    return source, texts


def _train(work: StagedTrainer, draft: str, json_output: bool) -> None:
    """Runs all stages, and tells after each how good the drafts are."""
    try:
        work.prepare()
    except KeyboardInterrupt:
        stderr().print("stopped: the same command goes on")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    done: list[tuple[Stage, Sequence[Figures]]] = []

    def report(stage: Stage, figures: Sequence[Figures]) -> None:
        done.append((stage, figures))
        if not json_output:
            _print_figures(stage, figures)

    try:
        work.train(report)
    except KeyboardInterrupt:
        work.export()
        steps = f"{work.trainer.step} steps of {work.trainer.checkpoint.stem}"
        stderr().print(
            f"stopped after {steps}: {work.out} can be used, and the same command goes on",
            soft_wrap=True,
        )
        raise typer.Exit(EXIT_INTERRUPTED) from None
    work.export(done[-1][1])
    if json_output:
        stages = [
            {"stage": stage.name, "steps": stage.steps, "positions": list(map(asdict, rows))}
            for stage, rows in done
        ]
        print(json.dumps({"draft": draft, "target": work.source or BUNDLED, "stages": stages}))
    stderr().print(f"wrote {work.out}: --draft {draft}", soft_wrap=True)


def _print_figures(stage: Stage, figures: Sequence[Figures]) -> None:
    table = plain_table(
        f"after {stage.name}, position",
        "accepted at T=1",
        "greedy agreement",
        "among its five best",
    )
    for number, one in enumerate(figures, start=1):
        position = f"{number}" if len(figures) > 1 else "each"
        table.add_row(position, f"{one.accepted:.3f}", f"{one.greedy:.3f}", f"{one.among_five:.3f}")
    stdout().print(table)
