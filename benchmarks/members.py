"""Unknown members after a dot, with and without `shoal.constraints.members`, on the bundled pair.

    python benchmarks/members.py [--samples 16] [--seed 0] [--json FILE]

Each program ends with a dot behind a value that is known. What the samples write there is looked up on the value itself.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import random
import re
import string
import time
from typing import Any

import torch

import shoal
from provenance import place_of_results, write_results
from shoal.bench.machine import machine
from shoal.constraints.members import Members

PROGRAMS: list[tuple[str, Any]] = [
    ("import math\n\ndef area(radius):\n    return math.", math),
    ("import os\n\ndef exists(name):\n    return os.path.", os.path),
    ("import os\n\nfor name in os.", os),
    ("import json\n\ndef read(text):\n    return json.", json),
    ("import random\n\ndef choose(items):\n    return random.", random),
    ("import re\n\ndef numbers(text):\n    return re.", re),
    ("import string\n\nletters = string.", string),
    ("import collections\n\ncounts = collections.", collections),
    ('words = "one two three".', ""),
    ("numbers = [3, 1, 2]\nnumbers.", []),
    ("ages = {'ann': 3}\nfor name in ages.", {}),
    ("seen = set()\nseen.", set()),
]


def unknown(text: str, value: Any) -> bool:
    """Whether the text begins with no name, or with one that the value has not."""
    name = re.match(r"\w+", text)
    return name is None or not hasattr(value, name[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=place_of_results, metavar="FILE", help="write what is found there")
    given = parser.parse_args()
    pair = shoal.load()
    options: dict[str, Any] = {"n": given.samples, "seed": given.seed, "max_new_tokens": 12, "lookahead": 3}
    rows: list[dict[str, Any]] = []
    seconds, queries = [0.0, 0.0], 0
    print("| program ends with | unknown, free | unknown, checked |\n|---|---:|---:|")
    for prompt, value in PROGRAMS:
        check = Members(pair.tokenizer, prompt)
        row = []
        for i, constraints in enumerate(((), (check,))):
            started = time.perf_counter()
            samples = pair.generate(prompt, constraints=constraints, **options)[0].samples
            seconds[i] += time.perf_counter() - started
            row.append(sum(unknown(sample.text, value) for sample in samples))
        queries += check.queries
        rows.append({"ends_with": prompt.splitlines()[-1].strip(), "free": row[0], "checked": row[1]})
        print(f"| `{rows[-1]['ends_with']}` | {row[0]} | {row[1]} |")
    total = given.samples * len(PROGRAMS)
    unknown_names = {way: sum(row[way] for row in rows) for way in ("free", "checked")}
    print(f"| all {total} | {unknown_names['free']} | {unknown_names['checked']} |")
    print(f"\n{seconds[0]:.1f} s free, {seconds[1]:.1f} s checked, with {queries} queries")
    if given.json:
        figures = {"samples": total, "unknown": unknown_names, "queries": queries, "seconds": seconds, "rows": rows}
        write_results(given.json, {"machine": machine(torch.device("cpu")), "seed": given.seed, **figures})


if __name__ == "__main__":
    main()
