"""Greedy tokens of whole runs on the device: captured rounds, ordinary passes, and Transformers' own `generate`.

In float32, on the pair that ships with the repository, with draft lengths that are fixed and that follow the controller. Every row
must be the same by every way, and captured rounds must really have run. Exits with 1 otherwise.

Run by benchmarks/gpu/run.sh, or alone: python benchmarks/gpu/identity.py
"""

from __future__ import annotations

from typing import Any

import torch

import shoal
from common import arguments, deliver, device_or_exit, failures_of
from shoal.bench import compared, token_ids
from shoal.bench.decoding_methods import baseline_method
from shoal.bench.work import Work

PROMPTS = ("def add(a, b):\n", "def is_even(number):\n    return", "import os\n\n\ndef main():\n", "class Stack:\n")
SAMPLES, TOKENS = 2, 48
WAYS: tuple[tuple[str, dict[str, Any], object], ...] = (
    ("captured, plain", {}, "off"),
    ("captured, fixed:4", {}, 4),
    ("captured, auto", {}, "auto"),
    ("ordinary, fixed:4", {"compile": "off"}, 4),
    ("ordinary and padded, fixed:4", {"compile": "off", "attention": "pad"}, 4),
)


def ways_of(device: torch.device) -> list[dict[str, Any]]:
    """A line for each way: rows that are those of `generate`, drafted tokens, captured passes, and why there are fewer."""
    lines, expected = [], None
    for name, options, lookahead in WAYS:
        with shoal.load(device=str(device), dtype="float32", max_batch=8, **options) as pair:
            work = Work(tuple(tuple(pair.tokenizer(text)["input_ids"]) for text in PROMPTS), SAMPLES, 0.0, TOKENS, seed=0)
            if expected is None:
                expected = work.by_prompt(baseline_method(pair, "hf").run(work).ids)
            result = pair.generate(
                work.prompts, SAMPLES, temperature=0.0, max_new_tokens=TOKENS, lookahead=lookahead, eos=()
            )
            found = compared(expected, token_ids(result), result.stats.drafted)
            models = [model for model in (pair.target, pair.draft_model) if model is not None and model.captures is not None]
            failures = failures_of(models)
            ran = sum(model.captures.ran.total() for model in models)
        lines.append(
            {"way": name, "rows": found.rows, "same": found.same, "drafted": found.drafted, "captured passes": ran,
             "failure": "; ".join(failures) or "-", "first difference": found.place or "-"}
        )  # fmt: skip
    return lines


def proved(lines: list[dict[str, Any]], device: torch.device) -> bool:
    """Whether all rows are the same, by passes that are what they are called."""
    return all(
        line["same"] == line["rows"]
        and line["failure"] == "-"
        and (device.type != "cuda" or not line["way"].startswith("captured") or line["captured passes"] > 0)
        for line in lines
    )


def main() -> None:
    options = arguments(__doc__).parse_args()
    device = device_or_exit(options.device)
    lines = ways_of(device)
    deliver("greedy tokens against `generate`, float32", list(lines[0]), lines, device, options.results, "identity")
    raise SystemExit(0 if proved(lines, device) else 1)


if __name__ == "__main__":
    main()
