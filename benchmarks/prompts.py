"""`python benchmarks/prompts.py`: a verify pass over n rows of one prompt, stored once (shared) or in every slot (copied).

The model is a random Llama and the prompt's keys and values are random too: time depends on neither. Both caches hold
the same ones, and every line compares their logits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import command
from provenance import require_place, write_results
from shoal.bench import interleave
from shoal.bench.machine import machine
from shoal.errors import RequestError
from shoal.models import loading
from shoal.models.cache import Plan
from shoal.models.runner import Runner
from shoal.types.requests import Prefix

LAYOUTS = ("shared", "copied")


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        length: tokens of the prompt. rows: samples of it. tail: tokens each row has beyond it. q: tokens each row feeds.
    """

    length: int
    rows: int
    tail: int
    q: int

    def cells(self, layout: str) -> int:
        """Tokens that a cache holds: m_c + n * m_d, or n * (m_c + m_d)."""
        own = self.tail + self.q
        return self.length + self.rows * own if layout == "shared" else self.rows * (self.length + own)


@dataclass(frozen=True)
class Line:
    """One case measured: bytes of each cache; medians of milliseconds per pass, None where that cache was too large; `speedup`:
    copied over shared, median over the repeats; `difference` of the logits in their standard deviations."""

    prompt: int
    rows: int
    shared_bytes: int
    copied_bytes: int
    shared_ms: float
    copied_ms: float | None = None
    speedup: float | None = None
    difference: float | None = None


def measure(model: Runner, case: Case, repeats: int, most_bytes: int) -> Line:
    """Both layouts in turns, after one pass each to warm up."""
    filled = {
        layout: _filled(model, case, layout)
        for layout in LAYOUTS
        if case.cells(layout) * model.cache.bytes_per_token() <= most_bytes
    }
    if "shared" not in filled:
        raise RequestError(f"{case} does not fit into {most_bytes} bytes even once: lower the lengths or the rows")
    logits = {layout: _verify(runner, case) for layout, runner in filled.items()}
    passes: dict[str, Callable[[], float]] = {}
    for layout, runner in filled.items():
        passes[layout] = partial(_milliseconds, runner, case)
    times = interleave(passes, repeats)
    sizes = {layout: case.cells(layout) * model.cache.bytes_per_token() for layout in LAYOUTS}
    assert all(runner.cache.nbytes() == sizes[layout] for layout, runner in filled.items())
    line = Line(case.length, case.rows, sizes["shared"], sizes["copied"], median(times["shared"]))
    if "copied" not in filled:
        return line
    speedup = median(copied / shared for shared, copied in zip(times["shared"], times["copied"], strict=True))
    difference = float((logits["shared"] - logits["copied"]).abs().max() / logits["copied"].std())
    return replace(line, copied_ms=median(times["copied"]), speedup=speedup, difference=difference)


@torch.inference_mode()
def _filled(model: Runner, case: Case, layout: str) -> Runner:
    """A fork whose cache holds the rows, the same for both layouts."""
    runner, own = model.fork(), case.tail + case.q
    prefix = Prefix(0, case.length)
    if layout == "shared":
        runner.memory.reserve(case.rows, own, case.length)
        _write(runner, Plan.of_prompt(prefix, 0, case.length, runner.device), seed=0)
    else:
        runner.memory.reserve(case.rows, case.length + own)
        _write(runner, Plan([0], [0], [case.length], runner.device), seed=0)
    for slot in range(case.rows):
        if layout == "shared":
            runner.cache.enter(slot, prefix)
        else:
            runner.cache.copy(0, slot, case.length)
    rows = range(case.rows)
    prefixes = [runner.cache.prefixes[slot] for slot in rows]
    plan = Plan(rows, [case.length] * case.rows, [case.tail] * case.rows, runner.device, prefixes=prefixes)
    _write(runner, plan, seed=1)
    return runner


def _write(runner: Runner, plan: Plan, seed: int) -> None:
    """Random keys and values where the plan says."""
    config = runner.hf.config
    generator = torch.Generator(runner.device).manual_seed(seed)
    shape = (plan.rows, config.num_key_value_heads, plan.q, config.hidden_size // config.num_attention_heads)
    runner.cache.begin(plan)
    for layer in range(config.num_hidden_layers):
        keys, values = (torch.randn(shape, generator=generator, device=runner.device).to(runner.dtype) for _ in range(2))
        runner.cache.update(keys, values, layer)
    runner.cache.end()


def _verify(runner: Runner, case: Case) -> Tensor:
    """The logits of a pass over q tokens of each row; the cache is as before afterwards."""
    tokens = torch.arange(case.rows * case.q, device=runner.device).view(case.rows, case.q) % runner.vocab_size
    logits = runner.feed(range(case.rows), tokens, [case.q] * case.rows)
    for slot in range(case.rows):
        runner.cache.rollback(slot, case.length + case.tail)
    return logits


def _milliseconds(runner: Runner, case: Case) -> float:
    started = time.perf_counter()
    _verify(runner, case)
    if runner.device.type == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - started)


def random_llama(layers: int, width: int, heads: int, kv_heads: int, dtype: str, device: str) -> Runner:
    """A Llama with random weights and a small vocabulary."""
    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=3 * width, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=2048, max_position_embeddings=1 << 17,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    hf = transformers.AutoModelForCausalLM.from_config(config, dtype=loading.DTYPES[dtype])
    return loading.wrap(hf.to(loading.resolve_device(device)).eval(), f"llama {layers} x {width}")


def table(lines: list[Line]) -> Table:
    """For people."""
    shown = Table("prompt", "rows", "MiB shared", "MiB copied", "ms shared", "ms copied", "copied / shared")
    for line in lines:
        sizes = (f"{size / 2**20:.1f}" for size in (line.shared_bytes, line.copied_bytes))
        times = ("too large", "") if line.copied_ms is None else (f"{line.copied_ms:.1f}", f"{line.speedup:.2f}x")
        shown.add_row(str(line.prompt), str(line.rows), *sizes, f"{line.shared_ms:.1f}", *times)
    return shown


def main(
    lengths: str = "256,512,1024,2048,4096,8192", rows: str = "1,2,4,8,16,32,64", q: int = 5, tail: int = 64, layers: int = 4,
    width: int = 512, heads: int = 8, kv_heads: int = 8, dtype: str = "float32", device: str = "cpu", repeats: int = 7,
    most_gib: float = 6.0, output: Path | None = typer.Option(None, "--json"),
) -> None:  # fmt: skip
    """Prints bytes and times of a verify pass, shared against copied; a cache larger than --most-gib is not made."""
    require_place(output)
    model = random_llama(layers, width, heads, kv_heads, dtype, device)
    console = Console()
    lines = []
    for length, n in product(*([int(number) for number in numbers.split(",")] for numbers in (lengths, rows))):
        line = measure(model, Case(length, n, tail, q), repeats, int(most_gib * 2**30))
        console.print(f"[dim]prompt {length}, rows {n}: shared {line.shared_ms:.1f} ms[/]", highlight=False)
        lines.append(line)
    console.print(table(lines))
    worst = max((line.difference for line in lines if line.difference is not None), default=0.0)
    console.print(f"largest difference of the logits: {worst:.1e} standard deviations")
    if output is not None:
        shape: dict[str, Any] = {"layers": layers, "width": width, "heads": heads, "kv_heads": kv_heads, "dtype": dtype}
        setting = {
            **shape,
            "q": q,
            "tail": tail,
            "device": device,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
        where = machine(torch.device(device))
        write_results(output, {"machine": where, "setting": setting, "lines": [asdict(line) for line in lines]})


if __name__ == "__main__":
    command.run(main)
