"""`python -m shoal.bench`: the figures of docs/measurements.md, on the bundled pair or any other.

For each dtype: first greedy identity on the very configuration measured, then plain, speculative and Hugging Face `generate` runs,
interleaved, medians; bookkeeping; peak memory against what `shoal check` predicts. EOS is ignored so that every way commits the
same number of tokens.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from itertools import count
from statistics import median
from typing import Annotated, Any

import torch
import torch.utils.benchmark
import transformers
import typer
from rich.console import Console
from rich.table import Table

import shoal
from shoal.bench.baseline import hf_generate
from shoal.bench.measure import batching_control, greedy_identity, interleave
from shoal.bench.memory import peak_tensor_bytes
from shoal.stats import Stats
from shoal.train.problems import generate as problems

PLAIN, OURS, HF = "plain (k = 0)", "speculative", "HF generate"


def main(
    model: Annotated[str | None, typer.Option(help="Hub id or directory; the bundled pair without it.")] = None,
    draft: Annotated[str | None, typer.Option(help="Hub id or directory of the drafter.")] = None,
    dtype: Annotated[list[str], typer.Option(help="Repeatable.")] = ["float32", "bfloat16"],  # noqa: B006
    n: Annotated[int, typer.Option("-n", help="Samples per prompt: the batch.")] = 8,
    max_new_tokens: int = 128,
    temperature: float = 0.8,
    lookahead: Annotated[list[str], typer.Option(help="Repeatable.")] = ["fixed:6"],  # noqa: B006
    prompts: Annotated[int, typer.Option(help="Held-out problems, one batch each.")] = 3,
    repeats: int = 5,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Measures speculative against plain decoding and Hugging Face generate."""
    texts = [problem.prompt for problem in problems(20, prompts, "templates")]
    reports = []
    for name in dtype:
        pair = shoal.load(model, draft, dtype=name, max_batch=n)
        reports += [_measured(pair, texts, n, max_new_tokens, temperature, ahead, repeats) for ahead in lookahead]
    machine = {
        "shoal": shoal.__version__, "torch": torch.__version__, "transformers": transformers.__version__,
        "threads": torch.get_num_threads(), "processor": platform.processor() or platform.machine(),
        "calibration_gflops": round(_calibration(), 1),
    }  # fmt: skip
    if json_output:
        typer.echo(json.dumps({"machine": machine, "runs": reports}))
        return
    console = Console(width=110)
    for report in reports:
        console.print(_table(report))
    console.print(json.dumps(machine), soft_wrap=True, highlight=False)


def _measured(
    pair: shoal.Shoal, texts: list[str], n: int, tokens: int, temperature: float, lookahead: str, repeats: int
) -> dict[str, Any]:
    """One configuration, measured."""
    identity = greedy_identity(pair, texts, n, lookahead, max_new_tokens=tokens, eos=())
    control = batching_control(pair, texts, n, max_new_tokens=tokens, eos=())
    ids = [tuple(pair.tokenizer.encode(text)) for text in texts]

    def ours(ahead: str, seed: int) -> Stats:
        results = [
            pair.generate([p], n, temperature=temperature, lookahead=ahead, max_new_tokens=tokens, eos=(), seed=seed)
            for p in ids
        ]
        return sum((result.stats for result in results), Stats())

    def theirs(seed: int) -> Stats:
        return sum((hf_generate(pair.target.hf, p, n, tokens, temperature, seed) for p in ids), Stats())

    ways = {PLAIN: lambda s: ours("off", s), OURS: lambda s: ours(lookahead, s), HF: theirs}
    for way in ways.values():
        way(0)
    runs = interleave({name: _seeded(way) for name, way in ways.items()}, repeats)
    report: dict[str, Any] = {
        "dtype": str(pair.target.dtype).removeprefix("torch."), "n": n, "max_new_tokens": tokens, "temperature": temperature,
        "lookahead": lookahead, "prompts": len(texts), "repeats": repeats, "greedy_identical_rows": identity.same,
        "control_identical_rows": control.same,
        "greedy_rows": identity.rows, "memory": _memory(pair, ids[0], n, tokens, temperature, lookahead),
    }  # fmt: skip
    report["ways"] = {name: _figures(stats) for name, stats in runs.items()}
    for other in (PLAIN, HF):
        report[f"speedup_over_{'plain' if other == PLAIN else 'hf'}"] = _ratio(runs[OURS], runs[other])
    report["plain_over_hf"] = _ratio(runs[PLAIN], runs[HF])
    return report


def _seeded(way: Callable[[int], Stats]) -> Callable[[], Stats]:
    """Runs a way with the seeds 1, 2, ... in turn."""
    seeds = count(1)
    return lambda: way(next(seeds))


def _ratio(fast: list[Stats], slow: list[Stats]) -> float:
    """Median of the per-repeat ratios of tokens per second: each repeat compares runs made side by side."""
    return median(a.tokens_per_second / b.tokens_per_second for a, b in zip(fast, slow, strict=True))


def _figures(runs: list[Stats]) -> dict[str, float]:
    def middle(name: str) -> float:
        return median(getattr(stats, name) for stats in runs)

    per_pass = median(1000 * s.seconds_target / s.target_passes for s in runs)
    per_draft = median(1000 * s.seconds_draft / s.draft_passes if s.draft_passes else 0.0 for s in runs)
    names = ("tokens_per_second", "seconds", "acceptance_length", "acceptance_rate", "target_passes", "drafted")
    return {name: middle(name) for name in (*names, "accepted", "bookkeeping")} | {
        "ms_per_target_pass": per_pass,
        "ms_per_draft_pass": per_draft,
    }


def _memory(
    pair: shoal.Shoal, ids: tuple[int, ...], n: int, tokens: int, temperature: float, lookahead: str
) -> dict[str, float]:
    """Peak bytes against weights + caches as `shoal check` predicts them."""
    models = [pair.target] + ([pair.draft_model] if pair.draft_model else [])
    weights = sum(model.parameter_bytes for model in models)
    caches = sum(model.cache_bytes(n, len(ids) + tokens) for model in models)
    peak = weights + peak_tensor_bytes(
        lambda: pair.generate([ids], n, temperature=temperature, lookahead=lookahead, max_new_tokens=tokens, eos=(), seed=0)
    )
    return {"weights": weights, "caches_predicted": caches, "peak": peak, "peak_over_predicted": peak / (weights + caches)}


def _calibration() -> float:
    """GFLOP/s of a float32 512 x 512 x 512 product: a quiet machine repeats it, a busy one does not."""
    a = torch.randn(512, 512)
    timer = torch.utils.benchmark.Timer("a @ a", globals={"a": a}, num_threads=torch.get_num_threads())
    return float(2 * 512**3 / timer.blocked_autorange(min_run_time=0.2).median / 1e9)


def _table(report: dict[str, Any]) -> Table:
    title = (
        f"{report['dtype']}, batch {report['n']}, {report['max_new_tokens']} new tokens, T = {report['temperature']}, "
        f"{report['lookahead']}: {report['speedup_over_plain']:.2f}x plain, {report['speedup_over_hf']:.2f}x HF generate"
    )
    memory = report["memory"]
    caption = (
        f"greedy identical: {report['greedy_identical_rows']} of {report['greedy_rows']} rows "
        f"(control, plain batched v plain alone: {report['control_identical_rows']}); "
        f"plain over HF {report['plain_over_hf']:.2f}x; "
        f"peak memory {memory['peak'] / 2**20:.0f} MiB = {memory['peak_over_predicted']:.2f}x predicted"
    )
    table = Table(title=title, caption=caption)
    columns = {
        "tokens/s": ("tokens_per_second", ".0f"),
        "acceptance length": ("acceptance_length", ".2f"),
        "target passes": ("target_passes", ".0f"),
        "ms/target pass": ("ms_per_target_pass", ".1f"),
        "ms/draft pass": ("ms_per_draft_pass", ".1f"),
        "bookkeeping": ("bookkeeping", ".1%"),
    }
    table.add_column("")
    for heading in columns:
        table.add_column(heading, justify="right")
    for name, figures in report["ways"].items():
        shown = [format(figures[key], spec) if figures[key] else "" for key, spec in columns.values()]
        table.add_row(name, *shown)
    return table


if __name__ == "__main__":
    typer.run(main)
