"""`python benchmarks/gguf_company.py FILE.gguf`: whether a row's logits depend on its company (docs/how-to/gguf.md).

Six rows are decoded in ragged passes with random drafts, which are rejected, and each alone, a token a pass. Counted are the
positions whose highest logit is another one; with a buffer for each row, as shoal has it, and with one for all.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import command
from held_out import problems
from provenance import require_place, write_results
from shoal.bench.machine import machine
from shoal.models.gguf import GgufModel, library, sequences
from shoal.models.gguf.gguf_runner import GgufRunner
from shoal.models.gguf.tokenizer import tokenizer_of

ROWS, PROMPT, LENGTH, DRAFTS = 6, 20, 80, 4
MADE = sequences._make_context


def unified(model: GgufModel, slots: int, room: int) -> Any:
    """Makes a context with one buffer for all rows."""
    lib = library()
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_seq_max = slots * room, sequences.PASS_TOKENS, slots
    params.n_threads = params.n_threads_batch = torch.get_num_threads()
    params.kv_unified = params.swa_full = params.no_perf = True
    return lib.llama_init_from_model(model.handle, params)


def alone(model: GgufModel, row: list[int]) -> Tensor:
    """The logits of a row's tokens behind its prompt, [tokens, vocab], a token a pass."""
    runner = GgufRunner(model, "")
    runner.memory.reserve(1, LENGTH + DRAFTS + 1)
    runner.feed([0], torch.tensor([row[:PROMPT]]), [PROMPT], want_logits=False)
    return torch.cat([runner.feed([0], torch.tensor([[token]]), [1])[0].clone() for token in row[PROMPT:]])


def in_company(model: GgufModel, rows: list[list[int]]) -> list[Tensor]:
    """The same logits of all rows, from ragged passes in which some drafts are rejected."""
    runner, draw = GgufRunner(model, ""), random.Random(0)
    runner.memory.reserve(len(rows), LENGTH + DRAFTS + 1)
    runner.feed(
        list(range(len(rows))), torch.tensor([row[:PROMPT] for row in rows]), [PROMPT] * len(rows), want_logits=False
    )
    found: list[list[Tensor]] = [[] for _ in rows]
    at = [PROMPT] * len(rows)
    while live := [slot for slot, place in enumerate(at) if place < LENGTH]:
        blocks, right = [], []
        for slot in live:
            drafts = draw.randint(0, DRAFTS)
            kept = min(draw.randint(0, drafts), LENGTH - 1 - at[slot])
            wrong = [draw.randint(10, model.vocab_size - 1) for _ in range(drafts - kept)]
            blocks.append([*rows[slot][at[slot] : at[slot] + 1 + kept], *wrong])
            right.append(1 + kept)
        width = max(map(len, blocks))
        padded = torch.tensor([block + [0] * (width - len(block)) for block in blocks])
        logits = runner.feed(live, padded, list(map(len, blocks)))
        for number, (slot, count) in enumerate(zip(live, right, strict=True)):
            found[slot].append(logits[number, :count].clone())
            at[slot] += count
            runner.cache.rollback(slot, at[slot])
    return [torch.cat(parts) for parts in found]


def ways() -> Iterator[str]:
    for name, made in (("a buffer for each row", MADE), ("one buffer", unified)):
        sequences._make_context = made
        yield name


@torch.inference_mode()
def main(
    file: Annotated[Path, typer.Argument(help="The model.")],
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Counts the highest logits that company changes."""
    require_place(json_path)
    text = "\n".join(one.prompt for one in problems(20, seed=1))
    ids, model = tokenizer_of(file)(text)["input_ids"], GgufModel(file)
    rows = [ids[number * LENGTH : (number + 1) * LENGTH] for number in range(ROWS)]
    assert all(len(row) == LENGTH for row in rows)
    report: dict[str, Any] = {"machine": machine(torch.device("cpu")), "file": file.name}
    table = Table("memory", "highest logits that differ", "of", "largest difference")
    for name in ways():
        pairs = list(zip((alone(model, row) for row in rows), in_company(model, rows), strict=True))
        differ = sum(int((one.argmax(-1) != other.argmax(-1)).sum()) for one, other in pairs)
        largest = max(float((one - other).abs().max()) for one, other in pairs)
        report[name] = {"differ": differ, "of": ROWS * (LENGTH - PROMPT), "largest": largest}
        table.add_row(name, str(differ), str(ROWS * (LENGTH - PROMPT)), f"{largest:.3f}")
    if json_path is not None:
        write_results(json_path, report)
    Console(width=100).print(table)


if __name__ == "__main__":
    command.run(main)
