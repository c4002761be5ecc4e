"""Where a measurement ran: hardware in general words, versions, the commit."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import shoal


def machine(device: torch.device) -> dict[str, Any]:
    """Ready for JSON; nothing in it names a host or a user."""
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


def commit() -> str | None:
    """Of the repository that this package runs from; "-dirty" if its files differ from it. None for an installed package."""
    package = Path(__file__).parents[1]
    try:
        head = _git(package, "rev-parse", "--short=12", "HEAD")
        _git(package, "ls-files", "--error-unmatch", "__init__.py")  # not just some repository around it
        return f"{head}-dirty" if _git(package, "status", "--porcelain", ".") else head
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(place: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=place, check=True, capture_output=True, text=True).stdout.strip()
