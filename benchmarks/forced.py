"""Passes per document with and without the drafts that a grammar forces, on schemas of a held-out kind: calls of tools.

    python benchmarks/forced.py                                # the bundled target: no drafter, suffix, the bundled drafter
    python benchmarks/forced.py --target DIR --draft suffix    # another one, with a chat template or without

With --json FILE the figures and the machine become a file.
Each schema is one tool with its arguments; samples end by themselves or at the limit of tokens. Per document: passes of
the target (the row's rounds), tokens, forced drafts and those accepted. Exit code 1 if the ids differ with and without.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import shoal
from provenance import place_of_results, write_results
from schemas import FLAG, NUMBER, SHORT, WHOLE, array, one_of, record
from shoal.bench.machine import machine
from shoal.drafting.grafting import ForcedTokens
from shoal.models.sources import bundled

TOOLS: dict[str, dict[str, Any]] = {
    "get_current_weather": {"location": SHORT, "temperature_unit": one_of("celsius", "fahrenheit"), "include_forecast": FLAG},
    "create_calendar_event": {"title": SHORT, "duration_minutes": {**WHOLE, "minimum": 5, "maximum": 480}, "all_day": FLAG},
    "search_documents": {"query": SHORT, "max_results": {**WHOLE, "minimum": 1}, "sort_order": one_of("relevance", "date")},
    "convert_currency": {"amount": NUMBER, "source_currency": one_of("EUR", "USD"), "target_currency": one_of("GBP", "JPY")},
    "send_message": {"recipient": SHORT, "message_body": SHORT, "priority": one_of("low", "normal", "high")},
    "set_thermostat": {"target_temperature": {**NUMBER, "minimum": 10, "maximum": 30}, "operating_mode": one_of("heat", "cool")},
    "book_restaurant": {"restaurant_name": SHORT, "party_size": {**WHOLE, "minimum": 1, "maximum": 12}, "outdoor_seating": FLAG},
    "tag_photograph": {"photograph_id": {**WHOLE, "minimum": 0}, "descriptive_tags": array(SHORT, minItems=1, maxItems=2)},
}  # fmt: skip
Samples = list[list[int]]


def measured(model: Any, whitespace: str, asked: argparse.Namespace) -> tuple[Samples, dict[str, float]]:
    ids: Samples = []
    sums = {"passes": 0, "tokens": 0, "forced": 0, "accepted": 0}
    for name, arguments in TOOLS.items():
        call = record(name={"const": name}, arguments=record(**arguments))
        result = model.generate(
            f"The call of the tool {name}, as JSON:\n", n=asked.samples, seed=0, temperature=asked.temperature,
            grammar=shoal.Grammar("json_schema", call, whitespace=whitespace), max_new_tokens=asked.tokens,
            lookahead=asked.lookahead,
        )  # fmt: skip
        ids += [sample.token_ids for sample in result[0].samples]
        forced = result.stats.by_drafter.get("grammar")
        sums["passes"] += result.stats.row_rounds
        sums["tokens"] += result.stats.committed
        if forced is not None:
            sums["forced"] += forced.drafted
            sums["accepted"] += forced.accepted
    return ids, {key: count / len(ids) for key, count in sums.items()}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a directory or Hub id; without it the bundled target")
    parser.add_argument("--draft", nargs="*", default=["none", "suffix", "bundled"])
    parser.add_argument("--whitespace", nargs="*", default=["bounded", "compact"])
    parser.add_argument("--lookahead", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--json", type=place_of_results, metavar="FILE", help="write what is found there")
    return parser.parse_args()


def main() -> int:
    asked, rows = arguments(), list[dict[str, Any]]()
    print("drafter    white space   tokens  passes without    with  ratio  forced  accepted")
    for drafter in asked.draft:
        draft = None if drafter == "none" else drafter
        target = bundled("target") if asked.target is None and draft is None else asked.target
        model = shoal.load(target, draft, dtype="float32", local_files_only=True)
        for whitespace in asked.whitespace:
            with mock.patch.object(ForcedTokens, "joined", lambda self, rows, tree: tree):
                before, plain = measured(model, whitespace, asked)
            after, counts = measured(model, whitespace, asked)
            row = {
                "drafter": drafter,
                "whitespace": whitespace,
                "same ids": before == after,
                "plain": plain,
                "forced": counts,
            }
            rows.append(row)
            print(
                f"{drafter:10} {whitespace:12} {counts['tokens']:7.1f} {plain['passes']:15.1f} {counts['passes']:7.1f} "
                f"{plain['passes'] / counts['passes']:6.2f} {counts['forced']:7.1f} {counts['accepted']:9.1f}"
            )
    if asked.json:
        given = {key: value for key, value in vars(asked).items() if key != "json"}
        if asked.target is not None:
            given["target"] = Path(asked.target).name
        write_results(asked.json, {"machine": machine(torch.device("cpu")), "arguments": given, "rows": rows})
    differ = not all(row["same ids"] for row in rows)
    if differ:
        print("ids differ with and without forced drafts")
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
