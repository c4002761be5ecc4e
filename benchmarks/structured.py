"""Structured output on the bundled pair: how many samples of forty schemas end, and whether they are valid.

    python benchmarks/structured.py                       # two samples each at temperature 0.8, 300 tokens at most
    python benchmarks/structured.py --whitespace compact --json FILE

`valid` ended by itself and fits its schema (jsonschema, formats included), `invalid` ended and does not, `cut` came to the limit,
`refused` counts schemas. Exit code 1 if anything is invalid.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from typing import Any

import torch

import shoal
from provenance import place_of_results, write_results
from schemas import SCHEMAS
from shoal.bench.machine import machine
from shoal.evaluation.schemas import verdict

Json = dict[str, Any]


def samples_of(model: shoal.Shoal, name: str, asked: argparse.Namespace) -> list[Json]:
    """One dict per sample: schema, verdict, tokens, text; one with the verdict "refused" and the reason if there are none."""
    schema = SCHEMAS[name]
    try:
        grammar = shoal.Grammar("json_schema", schema, **({"whitespace": asked.whitespace} if asked.whitespace else {}))
        result = model.generate(
            f"# {name}, as JSON\n{name} = ", n=asked.samples, grammar=grammar, temperature=asked.temperature, seed=asked.seed,
            max_new_tokens=asked.tokens,
        )  # fmt: skip
    except shoal.RequestError as error:
        return [{"schema": name, "verdict": "refused", "text": str(error), "tokens": 0}]
    return [
        {
            "schema": name, "verdict": verdict(sample.text, sample.finish_reason == "eos", schema), "text": sample.text,
            "tokens": len(sample.token_ids),
        }
        for sample in result[0].samples
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--whitespace", choices=("bounded", "compact", "any"))
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=place_of_results, metavar="FILE", help="write all samples there")
    asked = parser.parse_args()
    model = shoal.load(dtype="float32", compile="off", quantize="off")
    found = [sample for name in SCHEMAS for sample in samples_of(model, name, asked)]
    counts = Counter(sample["verdict"] for sample in found)
    if asked.json is not None:
        settings = {name: value for name, value in vars(asked).items() if name != "json"}
        where = {"machine": machine(torch.device("cpu")), "loaded": model.loaded}
        write_results(asked.json, {**where, "asked": settings, "counts": counts, "samples": found})
    for sample in found:
        if sample["verdict"] != "valid":
            print(f"{sample['verdict']:8} {sample['schema']:12} {sample['text'][:100]!r}")
    drawn = sum(counts.values()) - counts["refused"]
    print(f"{len(SCHEMAS)} schemas, {counts['refused']} refused; of {drawn} samples {counts['valid']} valid,")
    print(f"{counts['invalid']} invalid, {counts['cut']} cut: {counts['valid'] / max(drawn, 1):.0%} valid")
    return int(counts["invalid"] > 0)


if __name__ == "__main__":
    sys.exit(main())
