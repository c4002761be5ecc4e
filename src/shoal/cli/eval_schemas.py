"""`shoal eval jsonschema`: which schemas are accepted, and whether documents fit their schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.cli.console import EXIT_INTERRUPTED, plain_table, printable, stderr, stdout
from shoal.cli.eval_output import with_progress
from shoal.cli.options import ModelSource


def evaluate_schemas(
    folder: Path,
    limit: int | None,
    n: int,
    options: Mapping[str, Any],
    source: ModelSource,
    *,
    as_json: bool,
) -> int:
    """Draws samples and reports; after Ctrl-C it reports the schemas that were tried by then.

    Raises:
        RequestError: the directory has no schemas, or llguidance or jsonschema is missing.
    """
    from shoal.evaluation import schemas

    asked = schemas.read_schemas(folder)[:limit]
    pair, found, code = source.load(), list[schemas.TriedSchema](), 0
    try:
        for one in with_progress("schemas", schemas.tried(pair, asked, n, options), len(asked)):
            found.append(one)
    except KeyboardInterrupt:
        stderr().print(f"interrupted: {len(found)} of {len(asked)} schemas tried")
        code = EXIT_INTERRUPTED
    if not found:
        return code
    summary = schemas.summary(found)
    if as_json:
        print(json.dumps({"n": n, "options": dict(options), **summary}))
    else:
        show(summary)
    return code


def show(summary: Mapping[str, Any]) -> None:
    """Prints the refused schemas, and a table."""
    for one in summary["schemas"]:
        if one["refused"]:
            stdout().print(
                printable(f"{one['name']}: {one['refused']}"), markup=False, soft_wrap=True
            )
    heads = "declared", "empirical", "compliance", "valid/invalid/cut", "compile, ms", "mask, ms"
    table = plain_table("schemas", "tried", *heads)
    groups = dict(summary["groups"])
    for name, own in (*groups.items(), *([("all", summary["all"])] if len(groups) > 1 else [])):
        shares = (_share(own[share]) for share in ("declared", "empirical", "compliance"))
        counts = "/".join(str(own["samples"][verdict]) for verdict in ("valid", "invalid", "cut"))
        times = (_shown(own["compile_ms"], 1), _shown(own["mask_ms_per_token"], 3))
        table.add_row(name, str(own["schemas"]), *shares, counts, *times)
    stdout().print(table)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _shown(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
