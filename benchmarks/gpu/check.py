"""The device, its two ceilings, and whether a product and a Triton kernel can be captured at all.

A CUDA graph of a product and a norm is replayed on new numbers and must give the bits of the same calls launched one by one. What
this stage cannot do, no later one can. Exits with 1 where a replay differs.

Run by benchmarks/gpu/run.sh, or alone: python benchmarks/gpu/check.py
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from common import PRETEND, arguments, deliver, device_or_exit
from shoal.bench.work import ceilings
from shoal.models.compiled import EXECUTORS
from shoal.models.lean import Norm

TOKENS, WIDTH = 8, 4096


def settings() -> str:
    """Clocks and power as the driver tells them; nothing is set."""
    try:
        query = [
            "nvidia-smi",
            "--query-gpu=name,driver_version,clocks.sm,clocks.mem,power.draw,power.limit",
            "--format=csv,noheader",
        ]
        return subprocess.run(query, capture_output=True, text=True, check=False, timeout=10).stdout.strip() or "-"
    except (OSError, subprocess.TimeoutExpired):
        return "-"


def replays(work: Callable[[Tensor], Tensor], device: torch.device, dtype: torch.dtype) -> str:
    """Captures `work` over a buffer, replays it on new numbers and compares bits: "same", or what went wrong."""
    x = torch.randn(TOKENS, WIDTH, device=device, dtype=dtype)
    replay = EXECUTORS["graphed" if device.type == "cuda" else "eager"](device)(lambda: work(x))
    try:
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            found, right = replay().clone(), work(x)
            if not torch.equal(found, right):
                return f"differs by {float((found.double() - right.double()).abs().max()):.3g}"
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return "same"


@torch.inference_mode()
def main() -> None:
    options = arguments(__doc__).parse_args()
    device = device_or_exit(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weight = torch.randn(WIDTH, WIDTH, device=device, dtype=dtype)
    norm = Norm(torch.ones(WIDTH, device=device, dtype=dtype), 1e-6)
    found = {"product": replays(lambda x: F.linear(x, weight), device, dtype)}
    if device.type == "cuda" and options.device != PRETEND:  # it has no Triton
        from shoal.models.layers import add_norm

        found["product and Triton norm"] = replays(lambda x: add_norm(F.linear(x, weight), None, norm), device, dtype)
    ceiling = ceilings(device, dtype)
    line: dict[str, Any] = {
        "settings": settings(),
        "copy GB/s": ceiling.bytes / 1e9,
        "product TFLOP/s": ceiling.flops / 1e12,
        **{f"replayed {name}": result for name, result in found.items()},
    }
    deliver("the device", list(line), [line], device, options.results, "check")
    raise SystemExit(0 if set(found.values()) == {"same"} else 1)


if __name__ == "__main__":
    main()
