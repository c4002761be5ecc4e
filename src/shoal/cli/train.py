"""`shoal train`: draft models and heads for a target, trained on its own samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.console import EXIT_INTERRUPTED, Progress, loading_shown, plain_table, stderr, stdout
from shoal.cli.files import listed_documents, listed_prompts
from shoal.cli.option_groups import ReadableCommand, ReadableGroup, option_groups
from shoal.cli.options import JsonOption
from shoal.drafting.draft import BUNDLED
from shoal.errors import RequestError
from shoal.models.sources import directory_of, quieten_transformers

if TYPE_CHECKING:
    from shoal.train import Figures, Stage, StagedTrainer

app = typer.Typer(
    cls=ReadableGroup,
    no_args_is_help=True,
    help="Train a drafter for a target, on texts that the target writes itself.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

StepsOption = Annotated[
    int, typer.Option("--steps", min=1, help="Of the optimiser, 4,096 tokens each.")
]


@dataclass(frozen=True)
class TaskOptions:
    """The drafter's directory, the target, and the prompts that the target continues."""

    out: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="Directory for the drafter; a rerun goes on from there."
        ),
    ]
    target: Annotated[
        str,
        typer.Option(
            "--model", "-m", help="Target: Hub id or directory; bundled: the bundled target."
        ),
    ] = BUNDLED
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            "--prompts",
            help="JSON Lines of prompts that the target continues. Without: small programming "
            "problems.",
        ),
    ] = None

    def checked(self) -> tuple[str | None, list[str]]:
        """Returns the target for `shoal.load`, and the prompts.

        Raises:
            RequestError: a file cannot be read, the output is the target's directory, or it cannot
                be made.
        """
        quieten_transformers([] if self.target == BUNDLED else [self.target])
        texts = listed_prompts(self.prompts or [])
        source = None if self.target == BUNDLED else self.target
        if source is not None and Path(source).resolve() == self.out.resolve():
            raise RequestError("--output must be another directory than that of the target")
        if source is not None:
            directory_of(source)
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(f"cannot make {str(self.out)!r}: {error.strerror}") from error
        return source, texts


@dataclass(frozen=True)
class WrittenTextOptions:
    """The texts that the target writes."""

    samples: Annotated[
        int, typer.Option("--samples", min=16, help="Texts that the target writes.")
    ] = 2400
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=8, help="Tokens of each.")] = 128


@dataclass(frozen=True)
class RunOptions:
    """The device that trains, and the form of the output."""

    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu"
    json_output: JsonOption = False


@dataclass(frozen=True)
class DraftModelOptions:
    """The size of a draft model, and the layers after which it drafts."""

    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers. Without: an eighth of the target's.")
    ] = None
    width: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Hidden size. Without: a quarter of a target's of 2,048 or more, half from "
            "1,024 on.",
        ),
    ] = None
    exits: Annotated[
        list[int] | None,
        typer.Option(
            "--exits",
            metavar="LAYER",
            min=1,
            help="Layers after which it shall draft, too, where it is sure. Repeatable.",
        ),
    ] = None


@app.callback()
def train() -> None:
    """Trains a drafter for a target, on texts that the target writes itself."""


@app.command(cls=ReadableCommand)
@option_groups()
def drafter(
    *,
    task: TaskOptions,
    corpus: Annotated[
        list[Path] | None,
        typer.Option(
            "--corpus",
            help="Texts of the first stage; a .jsonl file has one per line (a text, or an "
            'object with "text"), any other is one. '
            "Without: small programming problems and Python's standard library. Repeatable.",
        ),
    ] = None,
    model: DraftModelOptions,
    texts: WrittenTextOptions,
    corpus_steps: Annotated[
        int, typer.Option("--corpus-steps", min=1, help="Of the optimiser in the first stage.")
    ] = 320,
    steps: StepsOption = 320,
    run: RunOptions,
) -> None:
    """A draft model, for `--draft DIR`: the target's architecture, small, taught by a corpus and
    then by the target.

    Says after each stage which share of its drafts is accepted.
    Ctrl-C stops it: the weights so far can be used, and the same command goes on from there.
    """
    source, prompts = task.checked()
    documents = listed_documents(corpus or [])

    def make_trainer() -> StagedTrainer:
        from shoal.train.drafter import DrafterTrainer, DrafterTraining

        training = DrafterTraining(
            samples=texts.samples,
            new_tokens=texts.new_tokens,
            steps=steps,
            corpus_steps=corpus_steps,
            layers=model.layers,
            width=model.width,
            exits=tuple(model.exits or ()),
        )
        return DrafterTrainer(task.out, source, prompts, documents, training, run.device)

    _train(make_trainer, str(task.out), run.json_output)


@app.command(cls=ReadableCommand)
@option_groups()
def medusa(
    *,
    task: TaskOptions,
    heads: Annotated[int, typer.Option(min=1, max=16, help="Heads: the longest draft.")] = 4,
    layers: Annotated[int, typer.Option(min=1, max=8, help="Residual blocks of a head.")] = 2,
    texts: WrittenTextOptions,
    steps: StepsOption = 320,
    run: RunOptions,
) -> None:
    """Medusa heads, for `--draft medusa:DIR`.

    Ctrl-C stops it: the weights so far can be used, and the same command goes on from there.
    """
    _train_heads("medusa", task, texts, run, heads=heads, layers=layers, steps=steps)


@app.command(cls=ReadableCommand)
@option_groups()
def eagle3(
    *,
    task: TaskOptions,
    ahead: Annotated[
        int, typer.Option(min=1, max=8, help="Positions of a draft that they are trained for.")
    ] = 3,
    texts: WrittenTextOptions,
    steps: StepsOption = 160,
    run: RunOptions,
) -> None:
    """EAGLE-3 heads, for `--draft eagle3:DIR`.

    Ctrl-C stops it: the weights so far can be used, and the same command goes on from there.
    """
    _train_heads("eagle3", task, texts, run, heads=ahead, steps=steps)


@app.command(cls=ReadableCommand)
@option_groups()
def ppd(
    *,
    task: TaskOptions,
    ahead: Annotated[
        int, typer.Option(min=1, max=16, help="Prompt tokens: the longest draft.")
    ] = 3,
    texts: WrittenTextOptions,
    steps: StepsOption = 160,
    run: RunOptions,
) -> None:
    """Prompt tokens of PPD, for `--draft ppd:DIR`: vectors by which the target itself guesses
    further ahead.

    Ctrl-C stops it: the weights so far can be used, and the same command goes on from there.
    """
    _train_heads("ppd", task, texts, run, heads=ahead, steps=steps)


def _train_heads(
    kind: str, task: TaskOptions, texts: WrittenTextOptions, run: RunOptions, **sizes: int
) -> None:
    """Trains heads of one kind.

    Args:
        kind: the name of the drafter.
        sizes: the further fields of `shoal.train.HeadsTraining`.
    """
    source, prompts = task.checked()

    def make_trainer() -> StagedTrainer:
        from shoal.train import HeadsTraining
        from shoal.train.heads import TRAINERS

        training = HeadsTraining(samples=texts.samples, new_tokens=texts.new_tokens, **sizes)
        return TRAINERS[kind](task.out, source, prompts, training, run.device)

    _train(make_trainer, f"{kind}:{task.out}", run.json_output)


def _train(make_trainer: Callable[[], StagedTrainer], draft: str, json_output: bool) -> None:
    """Runs all stages, and tells after each how good the drafts are."""
    # In a terminal the trainer shows bars.
    with nullcontext() if stderr().is_terminal else Progress():
        try:
            with loading_shown():
                work = make_trainer()
                work.prepare()
        except KeyboardInterrupt:
            stderr().print("stopped: the same command goes on")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        done = _staged(work, json_output)
    work.export(done[-1][1])
    if json_output:
        stages = [
            {"stage": stage.name, "steps": stage.steps, "positions": list(map(asdict, rows))}
            for stage, rows in done
        ]
        print(json.dumps({"draft": draft, "target": work.source or BUNDLED, "stages": stages}))
    stderr().print(f"wrote {work.out}: --draft {draft}", soft_wrap=True)


def _staged(work: StagedTrainer, json_output: bool) -> list[tuple[Stage, Sequence[Figures]]]:
    """Trains, and prints the figures of each stage; after Ctrl-C it writes the weights so far."""
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
    return done


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
