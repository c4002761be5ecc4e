"""The training of the bundled pair from nothing: `python training/pair/train_pair.py`."""

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

from continuations import sample
from pair_corpus import CorpusSize, build_corpus, pack
from pair_models import build, drafter_config, export, target_config
from pair_tokenizer import save_tokenizer, train_tokenizer
from problems.generator import generate
from shoal.drafting.distillation import distillation_loss, next_token_loss
from shoal.train.loop import Schedule, Trainer
from shoal.train.own_samples import Tokens, Windows

SEED = 20
WORK = Path("build/pair")
DISTIL_LR = 0.7  # of the peak learning rates
SAMPLES_REPEATED = 8  # copies of the target's samples among the corpus
TOKENIZER_CHARACTERS = 3_000_000  # a sample of the corpus is enough for 2048 tokens
console = Console(stderr=True)


@dataclass(frozen=True)
class TrainingConfig:
    """The sizes of every stage."""

    steps: int = 740  # of the target
    warm_steps: int = 850  # of the drafter on the corpus alone
    drafter_steps: int = 290  # of the drafter against the target
    sampled_problems: int = 2000
    length: int = 384  # tokens in a window
    batch: int = 12  # windows in a step
    corpus: CorpusSize = field(default_factory=CorpusSize)

    def scaled(self, scale: float) -> TrainingConfig:
        """Returns a config with `scale` times the steps and the text."""

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


class PairTrainer:
    """The stages, each of which reads and writes files of one work directory."""

    def __init__(self, work: Path, config: TrainingConfig, device: str, compiled: bool) -> None:
        self.work = work
        self.config = config
        self.compiled = compiled
        self.device = torch.device(device)
        self.tokenizer_directory = work / "tokenizer"
        work.mkdir(parents=True, exist_ok=True)

    def tokens(self, name: str) -> Tokens:
        """Returns a packed text of the corpus: train, problems or stdlib."""
        array: Tokens = np.load(self.work / f"{name}.npy")
        return array

    def windows(self, tokens: Tokens, seed: int) -> Windows:
        return Windows(tokens, self.config.length, self.config.batch, seed)

    def prepare(self) -> None:
        """Writes the corpus and the tokenizer, packed; done once."""
        if (self.work / "stdlib.npy").exists():
            return
        console.log("writing the corpus")
        corpus = build_corpus(self.config.corpus, SEED)
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

    def target(self) -> Trainer:
        """Returns the target, trained as far as its checkpoint is."""
        model = build(target_config(), SEED).to(self.device)
        return Trainer(model, next_token_loss, self.work / "target.pt")

    def train_target(self) -> Trainer:
        """Trains the target to the end of its schedule."""
        trainer = self.target()
        if self.compiled:
            trainer.model.forward = torch.compile(trainer.model.forward)
        trainer.train(self.windows(self.tokens("train"), SEED), Schedule(self.config.steps))
        return trainer

    def samples(self) -> Tokens:
        """Returns prompts of training problems with the target's continuations at T=1.

        They are written once.
        """
        if not (self.work / "samples.npy").exists():
            problems = generate(SEED + 10, self.config.sampled_problems, "train")
            prompts = [self.tokenizer().encode(problem.prompt).ids for problem in problems]
            written = sample(self.target().model.eval(), prompts, 1.0, SEED)
            rows = (prompt + row for prompt, row in zip(prompts, written, strict=True))
            packed = np.array([token for row in rows for token in row], dtype=np.uint16)
            np.save(self.work / "samples.npy", packed)
            console.log(f"samples: {len(packed):,} tokens, of which written {sum(map(len, written)):,}")
        return self.tokens("samples")

    def warm_drafter(self) -> Trainer:
        """Trains the drafter on the corpus alone."""
        model = build(drafter_config(), SEED).to(self.device)
        trainer = Trainer(model, next_token_loss, self.work / "drafter-warm.pt")
        trainer.train(self.windows(self.tokens("train"), SEED + 1), Schedule(self.config.warm_steps))
        return trainer

    def train_drafter(self) -> Trainer:
        """Distils the drafter on the corpus and on the target's own texts."""
        teacher = self.target().model.eval()
        model = build(drafter_config(), SEED).to(self.device)
        model.load_state_dict(self.warm_drafter().model.state_dict())
        trainer = Trainer(model, distillation_loss(teacher), self.work / "drafter.pt", lr=DISTIL_LR)
        texts = np.concatenate([self.tokens("train"), *[self.samples()] * SAMPLES_REPEATED])
        trainer.train(self.windows(texts, SEED + 2), Schedule(self.config.drafter_steps))
        return trainer

    def export(self, directory: Path, target: Trainer, drafter: Trainer) -> None:
        """Writes both models below a directory."""
        for name, trainer in (("target", target), ("drafter", drafter)):
            export(trainer.model, self.tokenizer_directory, directory / name)


def main(
    work: Annotated[Path, typer.Option(help="Keeps the corpus and checkpoints.")] = WORK,
    output: Annotated[Path, typer.Option(help="Gets target/ and drafter/.")] = WORK / "export",
    scale: Annotated[float, typer.Option(help="Times the steps and the text.")] = 1.0,
    steps: Annotated[int | None, typer.Option(help="Of the target, instead.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    compiled: Annotated[bool, typer.Option("--compile/--no-compile")] = True,
) -> None:
    """Trains target and drafter; a rerun continues where the last one stopped."""
    torch.set_float32_matmul_precision("high")
    config = TrainingConfig().scaled(scale)
    if steps is not None:
        config = dataclasses.replace(config, steps=steps)
    training = PairTrainer(work, config, device, compiled)
    try:
        training.prepare()
        target = training.train_target()
        drafter = training.train_drafter()
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from the last checkpoint")
        raise typer.Exit(130) from None
    training.export(output, target, drafter)
    console.print(f"wrote {output}")


if __name__ == "__main__":
    typer.run(main)
