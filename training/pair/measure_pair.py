"""The measurement of the shipped pair: `python training/pair/measure_pair.py`."""

from __future__ import annotations

import ast
import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from continuations import sample
from pair_corpus import pack
from problems.generator import FunctionProblem, Split, generate
from shoal.drafting.distillation import acceptance, logits
from shoal.models.sources import bundled
from shoal.train.own_samples import Tokens, stdlib_pieces

SHIPPED = bundled("target").parent
SEED = 1
LENGTH = 384  # tokens in a window
STDLIB_SHARE = 0.24  # of the training tokens, and so of the overall figures
TEMPERATURES = (1.0, 0.8, 0.2)
SPLITS: tuple[Split, ...] = ("constants", "templates")
WIDTH = 100  # characters of the printed tables
NEW_TOKENS = 96  # enough for any of the functions and some of its tests
TIMEOUT = 5.0  # seconds for the tests of one problem


@dataclass(frozen=True)
class TextFigures:
    """The means over the positions of one kind of text; losses in nats per token."""

    text: str
    tokens: int
    target_loss: float
    drafter_loss: float
    agreement: float
    acceptance: dict[str, float]


@dataclass(frozen=True)
class CodeFigures:
    """The shares of the functions that the target wrote for prompts of one split."""

    split: str
    temperature: float
    samples: int
    valid: float
    passed: float


@dataclass(frozen=True)
class LoadedPair:
    """The two models in float32, and their tokenizer."""

    target: LlamaForCausalLM
    drafter: LlamaForCausalLM
    tokenizer: Tokenizer

    @classmethod
    def load(cls, directory: Path) -> LoadedPair:
        """Reads `target` and `drafter` below a directory."""
        target, drafter = (
            LlamaForCausalLM.from_pretrained(directory / name, dtype=torch.float32).eval() for name in ("target", "drafter")
        )
        return cls(target, drafter, Tokenizer.from_file(str(directory / "target" / "tokenizer.json")))


@torch.inference_mode()
def text_figures(pair: LoadedPair, text: str, tokens: Tokens, counted: npt.NDArray[np.bool_] | None = None) -> TextFigures:
    """Computes the figures of one packed text, or of the tokens `counted` in it.

    The text is read in windows of `LENGTH` tokens.
    """
    count = len(tokens) // LENGTH
    windows = torch.from_numpy(tokens[: count * LENGTH].astype("int64")).view(count, LENGTH)
    rows = []
    for batch in windows.split(16):
        p, q = (logits(model, batch).flatten(0, 1) for model in (pair.target, pair.drafter))
        labels = batch[:, 1:].flatten()
        figures = [
            F.cross_entropy(p, labels, reduction="none"),
            F.cross_entropy(q, labels, reduction="none"),
            (p.argmax(-1) == q.argmax(-1)).float(),
            *(acceptance(p, q, temperature) for temperature in TEMPERATURES),
        ]
        rows.append(torch.stack(figures))
    figures_by_token = torch.cat(rows, dim=1)
    if counted is not None:
        chosen = torch.from_numpy(counted[: count * LENGTH]).view(count, LENGTH)[:, 1:]
        figures_by_token = figures_by_token[:, chosen.flatten()]
    target, drafter, agreement, *kept = figures_by_token.mean(1).tolist()
    by_temperature = dict(zip(map(str, TEMPERATURES), kept, strict=True))
    positions = figures_by_token.shape[1]
    return TextFigures(text, positions, target, drafter, agreement, by_temperature)


def mixed(problems: TextFigures, stdlib: TextFigures) -> TextFigures:
    """Averages the figures of both texts, weighted as the training corpus was."""

    def mean(a: float, b: float) -> float:
        return (1 - STDLIB_SHARE) * a + STDLIB_SHARE * b

    return TextFigures(
        text="overall",
        tokens=problems.tokens + stdlib.tokens,
        target_loss=mean(problems.target_loss, stdlib.target_loss),
        drafter_loss=mean(problems.drafter_loss, stdlib.drafter_loss),
        agreement=mean(problems.agreement, stdlib.agreement),
        acceptance={key: mean(kept, stdlib.acceptance[key]) for key, kept in problems.acceptance.items()},
    )


def first_function(source: str) -> str:
    """Returns the leading function of a text: everything up to the next unindented line."""
    head, *rest = source.splitlines(keepends=True)
    body = []
    for line in rest:
        if line.strip() and not line.startswith(" "):
            break
        body.append(line)
    return head + "".join(body)


def is_valid(source: str) -> bool:
    """Tells whether Python can parse a text."""
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return True


def passes(function: str, problem: FunctionProblem) -> bool:
    """Runs the tests of a problem on a function in a fresh interpreter."""
    program = "\n".join([function, *problem.tests])
    try:
        done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, timeout=TIMEOUT)
    except (subprocess.TimeoutExpired, ValueError):
        return False
    return done.returncode == 0


@dataclass(frozen=True)
class Continuation:
    """The token ids of a prompt and of the target's continuation."""

    prompt: list[int]
    written: list[int]


def code_figures(
    pair: LoadedPair, split: Split, problems: Sequence[FunctionProblem], temperature: float
) -> tuple[CodeFigures, list[Continuation]]:
    """Computes the figures of one sample per problem, and returns the samples too."""
    prompts = [pair.tokenizer.encode(problem.prompt).ids for problem in problems]
    rows = sample(pair.target, prompts, temperature, SEED, NEW_TOKENS)
    functions = [
        first_function(problem.prompt + pair.tokenizer.decode(row)) for problem, row in zip(problems, rows, strict=True)
    ]
    valid = [is_valid(function) for function in functions]
    passed = [ok and passes(function, problem) for ok, function, problem in zip(valid, functions, problems, strict=True)]
    count = len(problems)
    shares = sum(valid) / count, sum(passed) / count
    samples = [Continuation(*both) for both in zip(prompts, rows, strict=True)]
    return CodeFigures(split, temperature, count, *shares), samples


def sample_figures(pair: LoadedPair, name: str, samples: Sequence[Continuation]) -> TextFigures:
    """Measures how well the drafter predicts the target's own texts; prompts are not counted."""
    tokens = [token for s in samples for token in s.prompt + s.written]
    counted = [own for s in samples for own in [False] * len(s.prompt) + [True] * len(s.written)]
    return text_figures(pair, name, np.array(tokens, dtype=np.uint16), np.array(counted))


def measure(directory: Path, tokens: int, samples: int) -> tuple[list[TextFigures], list[CodeFigures]]:
    """Measures all figures.

    They are of about `tokens` tokens of held-out problems, and of `samples` samples of the target.
    """
    pair = LoadedPair.load(directory)
    count = max(2, tokens // 150)
    documents = [problem.document for split in SPLITS for problem in generate(SEED, count // 2, split)]
    problems = text_figures(pair, "held-out problems", pack(documents, pair.tokenizer))
    pieces = list(stdlib_pieces(True, int(tokens * 1.5), SEED))
    stdlib = text_figures(pair, "held-out stdlib", pack(pieces, pair.tokenizer))
    texts = [problems, stdlib, mixed(problems, stdlib)]
    codes: list[CodeFigures] = []
    for temperature in (0.2, 1.0):
        own: list[Continuation] = []
        for split in SPLITS:
            code, written = code_figures(pair, split, generate(SEED, samples, split), temperature)
            codes.append(code)
            own += written
        texts.append(sample_figures(pair, f"samples at T={temperature}", own))
    return texts, codes


def text_table(rows: Sequence[TextFigures]) -> Table:
    """Returns a table of one line per kind of text."""
    headings = (
        "text",
        "tokens",
        "target loss",
        "drafter loss",
        "agreement",
        *(f"T={t}" for t in TEMPERATURES),
    )
    table = Table(*headings, box=SIMPLE_HEAD, caption="T=...: acceptance at that temperature")
    for row in rows:
        losses = f"{row.target_loss:.3f}", f"{row.drafter_loss:.3f}"
        kept = (f"{value:.3f}" for value in row.acceptance.values())
        table.add_row(row.text, f"{row.tokens:,}", *losses, f"{row.agreement:.3f}", *kept)
    return table


def code_table(rows: Sequence[CodeFigures]) -> Table:
    """Returns a table of one line per split and temperature."""
    table = Table("held-out", "temperature", "samples", "parses", "passes its tests", box=SIMPLE_HEAD)
    for row in rows:
        shares = f"{row.valid:.1%}", f"{row.passed:.1%}"
        table.add_row(row.split, f"{row.temperature}", str(row.samples), *shares)
    return table


def main(
    directory: Annotated[Path, typer.Option(help="Holds target/ and drafter/.")] = SHIPPED,
    tokens: Annotated[int, typer.Option(help="Held-out tokens of each kind.")] = 60_000,
    samples: Annotated[int, typer.Option(help="Prompts per split and temperature.")] = 200,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Prints losses, agreement, acceptance, validity and pass rate of a pair."""
    texts, codes = measure(directory, tokens, samples)
    if as_json:
        rows = {
            "texts": list(map(dataclasses.asdict, texts)),
            "codes": list(map(dataclasses.asdict, codes)),
        }
        print(json.dumps(rows, indent=2))
        return
    console = Console(width=WIDTH)
    console.print(text_table(texts))
    console.print(code_table(codes))


if __name__ == "__main__":
    typer.run(main)
