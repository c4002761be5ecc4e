"""`python benchmarks/gguf_passes.py FILE.gguf`: shoal over llama.cpp against llama.cpp's own passes (docs/how-to/gguf.md).

The file is loaded with `compile="off"`, which keeps it from shoal's own kernels.

Tokens per second of plain decoding at each batch size: by shoal at T = 0.8, and by `llama_decode` in a bare loop that reads every
logit and takes the highest. Both decode the same rows for as many steps, in turns. Before a time is taken, greedy ids of both are
compared; near ties are counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

import command
import shoal
from provenance import require_place, write_results
from shoal.api import Shoal
from shoal.bench import interleave
from shoal.bench.machine import machine
from shoal.models.gguf import GgufModel, library
from shoal.models.gguf.sequences import Feed, Sequences

PROMPT = "Write a Python function that reverses a linked list, and explain each of its lines."


def bare_loop(model: GgufModel, prompt: list[int], rows: int, tokens: int, unified: bool) -> tuple[list[list[int]], float]:
    """Greedy ids of each row, and tokens per second of the steps alone."""
    lib, cache, feed = library(), Sequences(model), Feed()
    cache.reserve(rows, len(prompt) + tokens)
    if unified:
        cache = _unified(model, rows, len(prompt) + tokens)
    for row in range(rows):
        places, ids = np.arange(len(prompt) - 1), prompt[:-1]
        assert lib.llama_decode(cache.context, feed.fill(ids, places, np.full(len(ids), row), False)) == 0
    last, written = np.full(rows, prompt[-1]), []
    started = time.perf_counter()
    for step in range(tokens):
        places = np.full(rows, len(prompt) - 1 + step)
        assert lib.llama_decode(cache.context, feed.fill(last, places, np.arange(rows), True)) == 0
        logits = np.ctypeslib.as_array(lib.llama_get_logits(cache.context), shape=(rows, model.vocab_size))
        last = logits.argmax(-1)
        written.append(last)
    seconds = time.perf_counter() - started
    return np.stack(written, 1).tolist(), rows * tokens / seconds


def speed(model: GgufModel, prompt: list[int], rows: int, tokens: int, unified: bool) -> float:
    """Tokens per second of the bare loop."""
    return bare_loop(model, prompt, rows, tokens, unified)[1]


def _unified(model: GgufModel, rows: int, length: int) -> Any:
    """A memory with one buffer for all sequences, which shoal does not use."""
    lib = library()
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_seq_max = rows * -(-length // 256) * 256, 2048, rows
    params.n_threads = params.n_threads_batch = torch.get_num_threads()
    params.kv_unified = params.no_perf = True
    cache = Sequences(model)
    cache.context = lib.llama_init_from_model(model.handle, params)
    return cache


def by_shoal(model: Shoal, prompt: list[int], rows: int, tokens: int) -> float:
    """Tokens per second of the rounds, the prompt's pass left out."""
    options: dict[str, Any] = {"temperature": 0.8, "max_new_tokens": tokens, "eos": (), "seed": 1, "lookahead": "off"}
    stats = model.generate([prompt], rows, **options).stats
    return stats.committed / (stats.seconds - stats.seconds_prefill)


def near_ties(model: Shoal, prompt: list[int], rows: int, tokens: int, right: list[list[int]]) -> int:
    """Rows whose greedy ids differ from those of the bare loop."""
    result = model.generate([prompt], rows, temperature=0, max_new_tokens=tokens, eos=(), lookahead="off")
    return sum(list(sample.token_ids) != ids for sample, ids in zip(result[0].samples, right, strict=True))


def main(
    file: Annotated[Path, typer.Argument(help="The model.")],
    batch_sizes: Annotated[str, typer.Option(help="Comma-separated.")] = "1,8",
    tokens: Annotated[int, typer.Option(help="New tokens per row.")] = 64,
    repeats: int = 5,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Measures the cost of what shoal does beside llama.cpp's passes."""
    require_place(json_path)
    model, table = (
        shoal.load(file, compile="off"),
        Table("batch", "shoal, T = 0.8", "passes alone", "ratio", "passes, one buffer", "rows that differ"),
    )
    prompt = model.tokenizer(PROMPT)["input_ids"]
    report: dict[str, Any] = {"machine": machine(torch.device("cpu")), "file": file.name, "bytes": file.stat().st_size}
    hf = model.target.hf
    for rows in map(int, batch_sizes.split(",")):
        ties = near_ties(model, prompt, rows, tokens, bare_loop(hf, prompt, rows, tokens, False)[0])
        ways: dict[str, Callable[[], float]] = {
            "shoal": partial(by_shoal, model, prompt, rows, tokens),
            "passes": partial(speed, hf, prompt, rows, tokens, False),
            "one buffer": partial(speed, hf, prompt, rows, tokens, True),
        }
        found = {way: median(rates) for way, rates in interleave(ways, repeats).items()}
        report[str(rows)] = found | {"rows_that_differ": ties}
        ratio = found["shoal"] / found["passes"]
        figures = (found["shoal"], found["passes"])
        table.add_row(
            str(rows), *(f"{rate:.0f}" for rate in figures), f"{ratio:.2f}", f"{found['one buffer']:.0f}", str(ties)
        )
    if json_path is not None:
        write_results(json_path, report)
    Console(width=110).print(table)


if __name__ == "__main__":
    command.run(main)
