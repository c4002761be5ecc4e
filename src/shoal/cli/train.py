"""`shoal train`: heads that draft for a target, trained on its own samples."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.console import plain_table, stderr, stdout
from shoal.cli.files import listed_prompts
from shoal.drafting.specs import BUNDLED
from shoal.errors import RequestError

if TYPE_CHECKING:
    from shoal.train.heads import HeadsTrainer

EXIT_INTERRUPTED = 130
app = typer.Typer(
    no_args_is_help=True,
    help="Train a drafter for a target, on what the target writes itself.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

TargetOption = Annotated[str, typer.Option("--target", "-m", help="Hub id or directory; bundled: the bundled target.")]
OutOption = Annotated[Path, typer.Option("--out", "-o", help="Directory for the heads; a rerun goes on from there.")]
PromptsOption = Annotated[
    list[Path] | None,
    typer.Option("--prompts", help="JSON Lines of prompts that the target continues. Without: small programming problems."),
]


@app.callback()
def train() -> None:
    """Trains a drafter for a target, on what the target writes itself."""


SamplesOption = Annotated[int, typer.Option("--samples", min=16, help="Texts that the target writes.")]
NewTokensOption = Annotated[int, typer.Option("--new-tokens", min=8, help="Tokens of each.")]
StepsOption = Annotated[int, typer.Option("--steps", min=1, help="Of the optimiser, 4,096 tokens each.")]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu or cuda.")]


@app.command()
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
) -> None:
    """Medusa heads, for `--draft medusa:DIR`.

    Ctrl-C stops it: what is trained so far can be used, and the same command goes on from there.
    """
    source, texts = _checked(target, out, prompts)
    from shoal.train.heads import HeadsTraining
    from shoal.train.medusa import MedusaTrainer

    training = HeadsTraining(heads=heads, layers=layers, samples=samples, new_tokens=new_tokens, steps=steps)
    _train(MedusaTrainer(out, source, texts, training, device), "medusa")


@app.command()
def eagle3(
    out: OutOption,
    target: TargetOption = BUNDLED,
    prompts: PromptsOption = None,
    ahead: Annotated[int, typer.Option(min=1, max=8, help="Positions of a draft that they are trained for.")] = 3,
    samples: SamplesOption = 2400,
    new_tokens: NewTokensOption = 128,
    steps: StepsOption = 160,
    device: DeviceOption = "cpu",
) -> None:
    """EAGLE-3 heads, for `--draft eagle3:DIR`.

    Ctrl-C stops it: what is trained so far can be used, and the same command goes on from there.
    """
    source, texts = _checked(target, out, prompts)
    from shoal.train.eagle3 import Eagle3Trainer
    from shoal.train.heads import HeadsTraining

    training = HeadsTraining(heads=ahead, samples=samples, new_tokens=new_tokens, steps=steps)
    _train(Eagle3Trainer(out, source, texts, training, device), "eagle3")


def _checked(target: str, out: Path, prompts: list[Path] | None) -> tuple[str | None, list[str]]:
    """The target as `shoal.load` takes it, and the prompts. Raises RequestError."""
    texts = listed_prompts(prompts or [])
    source = None if target == BUNDLED else target
    if source is not None and Path(source).resolve() == out.resolve():
        raise RequestError("--out must be another directory than that of the target")
    return source, texts


def _train(work: HeadsTrainer, name: str) -> None:
    """All stages; says how good the heads are."""
    try:
        work.prepare()
    except KeyboardInterrupt:
        stderr().print("stopped: the same command goes on")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    try:
        work.train()
    except KeyboardInterrupt:
        work.export()
        done = f"{work.trainer.step} of {work.training.steps} steps"
        stderr().print(f"stopped after {done}: {work.out} can be used, and the same command goes on")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    figures = work.figures()
    work.export(figures)
    table = plain_table("position ahead", "accepted", "among its five best")
    for number, one in enumerate(figures, start=1):
        table.add_row(f"{number}", f"{one.accepted:.3f}", f"{one.among_five:.3f}")
    stdout().print(table)
    stderr().print(f"wrote {work.out}: --draft {name}:{work.out}")
