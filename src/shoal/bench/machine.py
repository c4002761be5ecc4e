"""The machine of a measurement: hardware in general words, versions, the commit.

Results kept in benchmarks/results must name a commit, so that they can be measured again.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers

import shoal
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
        tracked = "status --porcelain --untracked-files=no -- :(top)".split()
        others = "ls-files --others --exclude-standard -- :(top)src :(top)benchmarks".split()
        changed, unknown = _git(top, *tracked, results), _git(top, *others, results)
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


def _is_kept(place: Path) -> bool:
    parts = place.resolve().parts
    return KEPT in pairwise(parts)


def machine(device: torch.device) -> dict[str, Any]:
    """Returns the machine for JSON; nothing in it names a host or a user."""
    processor = platform.processor() or platform.machine()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor,
        "processor": processor,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "shoal": shoal.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit(),
    }
