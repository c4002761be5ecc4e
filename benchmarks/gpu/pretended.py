"""The pretended GPU of the tests, for whole scripts: `--device pretend` of all that benchmarks/gpu/run.py runs.

Tensors say that they are on cuda:0 and lie on the CPU; a captured function is recorded, and replayed without Python
(tests/helpers/pretend.py and recorder.py). So the lines that only a GPU takes are rehearsed: graphs, events, waits, copies. There
is no Triton on it, so that kernels and their layers are not; the times say nothing.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch

sys.path.append(str(Path(__file__).parents[2] / "tests" / "helpers"))

from pretend import DEVICE, Pretend, moved
from recorder import Recorder
from shoal.models.compiled import EXECUTORS

MEMORY = 16 << 30


class Event:
    """Stands in for `torch.cuda.Event`: the time at which the host comes by. Who waits for it waits for the device."""

    device: ClassVar[Pretend]

    def __init__(self, **_: Any) -> None:
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        self.device.synchronize()

    def query(self) -> bool:
        self.device.synchronize()
        return True

    def elapsed_time(self, other: Event) -> float:
        return 1000 * (other.at - self.at)


def start() -> torch.device:
    """Makes the device be there for the rest of the process, which is under `torch.inference_mode` from then on."""
    device, to = Pretend(), torch.nn.Module.to
    Event.device = device
    EXECUTORS["graphed"] = Recorder.on(device)

    def moving(module: Any, *args: Any, **kwargs: Any) -> Any:
        place = kwargs.get("device", args[0] if args else None)
        if isinstance(place, (str, torch.device)) and torch.device(place).type == "cuda":
            return moved(module)
        return to(module, *args, **kwargs)

    torch.nn.Module.to = moving  # type: ignore[method-assign]
    stand_ins: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_name": lambda place=None: "pretended GPU",
        "get_device_capability": lambda place=None: (7, 5),  # without Triton's kernels
        "mem_get_info": lambda place=None: (MEMORY, MEMORY),
        "synchronize": lambda place=None: device.synchronize(),
        "reset_peak_memory_stats": lambda place=None: None,
        "max_memory_allocated": lambda place=None: 0,
        "empty_cache": lambda: None,
        "get_rng_state": lambda place=None: torch.get_rng_state(),
        "set_rng_state": lambda state, place=None: torch.set_rng_state(state),
        "device": lambda place: nullcontext(),
        "device_of": lambda tensor: nullcontext(),
        "Event": Event,
    }
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)
    torch.inference_mode().__enter__()
    device.__enter__()
    return DEVICE
