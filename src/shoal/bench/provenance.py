"""The commit that results were made at.

Results kept in benchmarks/results must name one, so that they can be measured again.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from shoal.errors import RequestError

KEPT = ("benchmarks", "results")
NO_GIT = "not from a git repository"
PACKAGE = Path(__file__).parents[1]


def commit(package: Path = PACKAGE) -> str:
    """Returns 12 digits of the commit that the package runs from, or `NO_GIT`.

    "-dirty" is added if a tracked file differs from it, or if src or benchmarks have untracked
    files that git does not ignore: they may change the results. Files in benchmarks/results do not
    count: the results of one run must not spoil the next one's.
    """
    try:
        _git(
            package, "ls-files", "--error-unmatch", "__init__.py"
        )  # not just some repository around it
        top = Path(_git(package, "rev-parse", "--show-toplevel"))
        results = ":(top,exclude)" + "/".join(KEPT)
        changed = _git(
            top, "status", "--porcelain", "--untracked-files=no", "--", ":(top)", results
        )
        unknown = _git(
            top,
            "ls-files",
            "--others",
            "--exclude-standard",
            "--",
            ":(top)src",
            ":(top)benchmarks",
            results,
        )
        return _git(top, "rev-parse", "--short=12", "HEAD") + (
            "-dirty" if changed or unknown else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return NO_GIT


def _git(place: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=place, check=True, capture_output=True, encoding="utf-8"
    ).stdout.strip()


def require_place(*places: Path | None, made_at: str | None = None) -> None:
    """Checks the files or directories that results shall go to, before the work starts.

    Args:
        places: the files or directories; None is none.
        made_at: the commit of results that are there already; None for this package's commit now.

    Raises:
        RequestError: a place is in benchmarks/results, and the results name no commit.
    """
    for place in filter(None, places):
        if _is_kept(place):
            named = commit() if made_at is None else made_at
            if not re.fullmatch("[0-9a-f]{12,}", named):
                raise RequestError(
                    f"results in {'/'.join(KEPT)} must name the commit they were made at, and "
                    f"this is {named}: commit the "
                    "changes first, or write elsewhere"
                )


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


def _is_kept(place: Path) -> bool:
    parts = place.resolve().parts
    return KEPT in pairwise(parts)


def _write(place: Path, text: str) -> None:
    place.write_text(text, encoding="utf-8")


def write_results(
    place: Path,
    report: Mapping[str, Any],
    write: Callable[[Path, str], None] = _write,
    pages: Mapping[str, str] | None = None,
) -> None:
    """Writes a report as JSON; all measurements become files this way.

    Args:
        report: an object for JSON; its "machine" comes from `shoal.bench.machine`.
        write: a function that writes a text to a file.
        pages: texts beside it, by their suffix.

    Raises:
        RequestError: see `require_place`; by the commit that the report names.
    """
    require_place(place, made_at=str(report["machine"]["commit"]))
    write(place, json.dumps(report, indent=1) + "\n")
    for suffix, page in (pages or {}).items():
        write(place.with_name(place.stem + suffix), page)
