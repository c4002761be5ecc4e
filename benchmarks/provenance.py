"""Files of results: those in benchmarks/results name the commit that they were made at."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.bench.machine import require_place
from shoal.durable import write_synced
from shoal.errors import RequestError

__all__ = ["place_of_results", "require_place", "write_results"]


def place_of_results(text: str) -> Path:
    """Reads, for `argparse`, a place that results may go to.

    A place that `require_place` refuses ends the script with exit code 2.
    """
    place = Path(text)
    try:
        require_place(place)
    except RequestError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return place


def write_results(place: Path, report: Mapping[str, Any], pages: Mapping[str, str] | None = None) -> None:
    """Writes a report as JSON, whole or not at all; all measurements become files this way.

    Args:
        report: an object for JSON; its "machine" comes from `shoal.bench.machine`.
        pages: texts beside it, by their suffix.

    Raises:
        RequestError: see `require_place`; by the commit that the report names.
    """
    require_place(place, made_at=str(report["machine"]["commit"]))
    write_synced(place, json.dumps(report, indent=1) + "\n")
    for suffix, page in (pages or {}).items():
        write_synced(place.with_name(place.stem + suffix), page)
