"""`shoal train`: heads that draft for a target, trained on its own samples."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.console import plain_table, stderr, stdout
from shoal.cli.files import listed_prompts
from shoal.drafting.specs import BUNDLED
from shoal.errors import RequestError

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


@app.command()
def medusa(
    out: OutOption,
    target: TargetOption = BUNDLED,
    prompts: PromptsOption = None,
    heads: Annotated[int, typer.Option(min=1, max=16, help="Heads: the longest draft.")] = 4,
    layers: Annotated[int, typer.Option(min=1, max=8, help="Residual blocks of a head.")] = 1,
    samples: Annotated[int, typer.Option(min=16, help="Texts that the target writes.")] = 2400,
    new_tokens: Annotated[int, typer.Option(min=8, help="Tokens of each.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Of the optimiser, 4,096 tokens each.")] = 160,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Medusa heads, for `--draft medusa:DIR`.

    Ctrl-C stops it: what is trained so far can be used, and the same command goes on from there.
    """
    texts = listed_prompts(prompts or [])
    source = None if target == BUNDLED else target
    if source is not None and Path(source).resolve() == out.resolve():
        raise RequestError("--out must be another directory than that of the target")
    from shoal.train.medusa import MedusaTrainer, MedusaTraining

    training = MedusaTraining(heads=heads, layers=layers, samples=samples, new_tokens=new_tokens, steps=steps)
    work = MedusaTrainer(out, source, texts, training, device)
    try:
        work.prepare()
    except KeyboardInterrupt:
        stderr().print("stopped: the same command goes on")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    try:
        work.train()
    except KeyboardInterrupt:
        work.export()
        stderr().print(
            f"stopped after {work.trainer.step} of {steps} steps: {out} can be used, and the same command goes on"
        )
        raise typer.Exit(EXIT_INTERRUPTED) from None
    figures = work.figures()
    work.export(figures)
    table = plain_table("head", "accepted", "among its five best")
    for number, one in enumerate(figures):
        table.add_row(f"{number}", f"{one.accepted:.3f}", f"{one.among_five:.3f}")
    stdout().print(table)
    stderr().print(f"wrote {out}: --draft medusa:{out}")
