"""`python benchmarks/gguf_rounding.py FILE.gguf`: what rounding of features changes in a GGUF file's model (docs/how-to/gguf.md).

The text of README.md is read by the kernels in C with features in 16 bits a group, by the same with features in float32, and by
llama.cpp. Told are perplexities, and how far distributions are from those in float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import command
import shoal
from provenance import require_place, write_results
from shoal.bench.machine import machine

TEXT = Path(__file__).parents[1] / "README.md"
EXACT = "own kernels, float32"
WAYS: dict[str, dict[str, Any]] = {
    EXACT: {"dtype": "float32"},
    "own kernels, 16 bits": {},
    "llama.cpp": {"compile": "off"},
}
BLOCK = 256  # tokens of a pass


@torch.inference_mode()
def logprobs(file: Path, options: dict[str, Any], tokens: int) -> tuple[Tensor, Tensor]:
    """The ids of the text, and the log-probabilities [tokens, vocab] of what follows each."""
    with shoal.load(file, **options) as model:
        ids = torch.tensor([model.tokenizer(TEXT.read_text("utf-8"))["input_ids"][:tokens]])
        runner = model.target
        runner.memory.reserve(1, ids.shape[1])
        blocks = [runner.feed([0], block, [block.shape[1]])[0].double() for block in ids.split(BLOCK, 1)]
        return ids[0], torch.cat(blocks).log_softmax(-1)


def compared(ids: Tensor, found: Tensor, exact: Tensor) -> dict[str, float]:
    """The figures of some log-probabilities beside the exact ones."""
    own, right = (each[:-1].gather(1, ids[1:, None]) for each in (found, exact))
    return {
        "perplexity": float((-own.mean()).exp()),
        "divergence": float((exact.exp() * (exact - found)).sum(-1).mean()),
        "largest_difference": float((own - right).abs().max()),
        "other_argmax": int((found.argmax(-1) != exact.argmax(-1)).sum()),
    }


def main(
    file: Annotated[Path, typer.Argument(help="A GGUF file of a family that the kernels know.")],
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the text.")] = 1500,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Compares the distributions behind each token of a text."""
    require_place(json_path)
    ids, exact = logprobs(file, WAYS[EXACT], tokens)
    rows: dict[str, dict[str, float]] = {}
    table = Table("passes", "perplexity", "divergence, nats", "largest difference of a token", "other highest logits")
    for name, options in WAYS.items():
        rows[name] = compared(ids, exact if name == EXACT else logprobs(file, options, tokens)[1], exact)
        one = rows[name]
        table.add_row(
            name, f"{one['perplexity']:.4f}", *(f"{one[key]:.2g}" for key in list(one)[1:3]), str(one["other_argmax"])
        )
    Console(width=120).print(table)
    if json_path is not None:
        facts = {"machine": machine(torch.device("cpu")), "file": file.name, "tokens": len(ids)}
        write_results(json_path, facts | {"rows": rows})


if __name__ == "__main__":
    command.run(main)
