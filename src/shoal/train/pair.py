"""Trains the bundled pair from nothing: `python -m shoal.train.pair`."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from tokenizers import Tokenizer

from shoal.problems.generator import generate
from shoal.train.corpus import CorpusSize, Tokens, Windows, build_corpus, pack
from shoal.train.distil import distillation_loss
from shoal.train.loop import Run, Schedule
from shoal.train.models import (
    build,
    drafter_config,
    export,
    next_token_loss,
    target_config,
)
from shoal.train.sampling import sample
from shoal.train.tokenizer import save_tokenizer, train_tokenizer

SEED = 20
WORK = Path("build/pair")
DISTIL_LR = 0.7  # of the peak learning rates
SAMPLES_REPEATED = 8  # copies of the target's samples among the corpus
TOKENIZER_CHARACTERS = 3_000_000  # a sample of the corpus is enough for 2048 tokens
console = Console(stderr=True)


@dataclass(frozen=True)
class Plan:
    """The sizes of every stage."""

    steps: int = 740  # of the target
    warm_steps: int = 850  # of the drafter on the corpus alone
    drafter_steps: int = 290  # of the drafter against the target
    sampled_problems: int = 2000
    length: int = 384  # tokens in a window
    batch: int = 12  # windows in a step
    corpus: CorpusSize = field(default_factory=CorpusSize)

    def scaled(self, scale: float) -> Plan:
        """A plan with so many times the steps and the text."""

        def times(size: int) -> int:
            return max(1, round(size * scale))

        corpus = dataclasses.asdict(self.corpus)
        return dataclasses.replace(
            self,
            steps=times(self.steps),
            warm_steps=times(self.warm_steps),
            drafter_steps=times(self.drafter_steps),
            sampled_problems=times(self.sampled_problems),
            corpus=CorpusSize(**{name: times(size) for name, size in corpus.items()}),
        )


class Pair:
    """The stages, each of which reads and writes files of one work directory."""

    def __init__(self, work: Path, plan: Plan, device: str, compiled: bool) -> None:
        self.work = work
        self.plan = plan
        self.compiled = compiled
        self.device = torch.device(device)
        self.tokenizer_directory = work / "tokenizer"
        work.mkdir(parents=True, exist_ok=True)

    def tokens(self, name: str) -> Tokens:
        """A packed text of the corpus: train, problems or stdlib."""
        array: Tokens = np.load(self.work / f"{name}.npy")
        return array

    def windows(self, tokens: Tokens, seed: int) -> Windows:
        return Windows(tokens, self.plan.length, self.plan.batch, seed)

    def prepare(self) -> None:
        """Corpus and tokenizer, packed; done once."""
        if (self.work / "stdlib.npy").exists():
            return
        console.log("writing the corpus")
        corpus = build_corpus(self.plan.corpus, SEED)
        share = TOKENIZER_CHARACTERS / sum(map(len, corpus.train))
        rng = random.Random(SEED)
        tokenizer = train_tokenizer(text for text in corpus.train if rng.random() < share)
        save_tokenizer(tokenizer, self.tokenizer_directory)
        for name in ("train", "problems", "stdlib"):
            packed = pack(getattr(corpus, name), tokenizer)
            np.save(self.work / f"{name}.npy", packed)
            console.log(f"{name}: {len(packed):,} tokens")

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.tokenizer_directory / "tokenizer.json"))

    def target(self) -> Run:
        """The target, trained as far as its checkpoint says."""
        model = build(target_config(), SEED).to(self.device)
        return Run(model, next_token_loss, self.work / "target.pt")

    def train_target(self) -> Run:
        """The target, trained to the end of its schedule."""
        run = self.target()
        if self.compiled:
            run.model.forward = torch.compile(run.model.forward)
        run.train(self.windows(self.tokens("train"), SEED), Schedule(self.plan.steps))
        return run

    def samples(self) -> Tokens:
        """Prompts of training problems as the target continues them at T=1; written once."""
        if not (self.work / "samples.npy").exists():
            problems = generate(SEED + 10, self.plan.sampled_problems, "train")
            prompts = [self.tokenizer().encode(problem.prompt).ids for problem in problems]
            written = sample(self.target().model.eval(), prompts, 1.0, SEED)
            rows = (prompt + row for prompt, row in zip(prompts, written, strict=True))
            packed = np.array([token for row in rows for token in row], dtype=np.uint16)
            np.save(self.work / "samples.npy", packed)
            console.log(f"samples: {len(packed):,} tokens, of which written {sum(map(len, written)):,}")
        return self.tokens("samples")

    def warm_drafter(self) -> Run:
        """The drafter, trained on the corpus alone."""
        model = build(drafter_config(), SEED).to(self.device)
        run = Run(model, next_token_loss, self.work / "drafter-warm.pt")
        run.train(self.windows(self.tokens("train"), SEED + 1), Schedule(self.plan.warm_steps))
        return run

    def train_drafter(self) -> Run:
        """The drafter, distilled on the corpus and on what the target wrote."""
        teacher = self.target().model.eval()
        model = build(drafter_config(), SEED).to(self.device)
        model.load_state_dict(self.warm_drafter().model.state_dict())
        run = Run(model, distillation_loss(teacher), self.work / "drafter.pt", lr=DISTIL_LR)
        texts = np.concatenate([self.tokens("train"), *[self.samples()] * SAMPLES_REPEATED])
        run.train(self.windows(texts, SEED + 2), Schedule(self.plan.drafter_steps))
        return run

    def export(self, directory: Path, target: Run, drafter: Run) -> None:
        """Writes both models below a directory."""
        for name, run in (("target", target), ("drafter", drafter)):
            export(run.model, self.tokenizer_directory, directory / name)


def main(
    work: Annotated[Path, typer.Option(help="Keeps the corpus and checkpoints.")] = WORK,
    output: Annotated[Path, typer.Option(help="Gets target/ and drafter/.")] = WORK / "export",
    scale: Annotated[float, typer.Option(help="Times the steps and the text.")] = 1.0,
    steps: Annotated[int | None, typer.Option(help="Of the target, instead.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    compiled: Annotated[bool, typer.Option("--compile/--no-compile")] = True,
) -> None:
    """Trains target and drafter; a rerun goes on where the last one stopped."""
    torch.set_float32_matmul_precision("high")
    plan = Plan().scaled(scale)
    if steps is not None:
        plan = dataclasses.replace(plan, steps=steps)
    pair = Pair(work, plan, device, compiled)
    try:
        pair.prepare()
        target = pair.train_target()
        drafter = pair.train_drafter()
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from the last checkpoint")
        raise typer.Exit(130) from None
    pair.export(output, target, drafter)
    console.print(f"wrote {output}")


if __name__ == "__main__":
    typer.run(main)
