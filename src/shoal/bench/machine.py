"""The machine of a measurement: hardware in general words, versions, the commit."""

from __future__ import annotations

import os
import platform
import time
from typing import Any

import torch
import transformers

import shoal
from shoal.bench import provenance


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
        "commit": provenance.commit(),
    }
