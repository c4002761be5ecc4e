"""A served load: streaming clients against the real application on a loopback port, and how long the device waits meanwhile.

The clients are another process (`streams.py`), as of users. The event loop that writes their streams and the thread that launches
rounds share one interpreter. Two intervals at which Python lets them take turns are measured: its own, and that of `shoal serve` on
CUDA. "device waits" is the share of the time in which the device had no captured round to work on; None where none is captured.

Run by benchmarks/gpu/run.sh, or alone: python benchmarks/gpu/served.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import uvicorn
from fastapi import FastAPI

from common import arguments, deliver, device_or_exit, failures_of
from rounds import working
from shoal.api import Shoal
from shoal.bench.random_pairs import imposing, shaped_pair
from shoal.serve import engine_thread
from shoal.serve.app import make_app
from shoal.serve.settings import Settings
from shoal.testing import tiny_tokenizer

SWITCHES = (5e-3, engine_thread.SWITCH_SECONDS)
"""Seconds: Python's own interval, and that of `shoal serve` on CUDA."""
Line = dict[str, Any]


@asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[str]:
    """Within it the application is served; yields its address."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    task = asyncio.create_task(server.serve())
    while not server.started and not task.done():
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


async def by_others(url: str, options: argparse.Namespace) -> Line:
    """What another process sees as the clients of a server."""
    asked = [str(value) for value in (options.clients, options.requests, options.tokens, options.prompt_tokens)]
    script = str(Path(__file__).with_name("streams.py"))
    process = await asyncio.create_subprocess_exec(sys.executable, script, url, *asked, stdout=asyncio.subprocess.PIPE)
    told, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"the clients ended with exit code {process.returncode}")
    found: Line = json.loads(told)
    return found


async def measured(pair: Shoal, switch: float, options: argparse.Namespace) -> Line:
    """The line of an interval: the same load twice, of which the second is measured."""
    rule = pair.rule
    assert rule is not None
    app = make_app(pair, lambda: pair.engine(options.lookahead, rule), Settings("random", seeds=False))
    with patch.object(engine_thread, "SWITCH_SECONDS", switch), working() as worked:
        async with serving(app) as url:
            await by_others(url, options)
            worked.clear()
            found = await by_others(url, options)
    return {
        "switch ms": 1000 * switch, "clients": options.clients, "tokens": found["tokens"],
        "tokens/s": found["tokens"] / found["seconds"], "ms to first": 1000 * found["first"],
        "device waits": 1 - sum(worked) / found["seconds"] if worked else None,
        "failure": "; ".join(failures_of([pair.target, pair.draft_model])) or "-",
    }  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", default="7.8b/310m", help="as in shoal bench (default: 7.8b/310m)")
    parser.add_argument("--lookahead", default="fixed:6")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=6, help="of each client")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    options = parser.parse_args()
    device = device_or_exit(options.device)
    pair = shaped_pair(options.shape, dtype="auto", device=str(device), max_batch=options.clients)
    pair = imposing(Shoal(pair.target, pair.draft_model, tiny_tokenizer(), max_batch=options.clients), 0.8)
    lines = [asyncio.run(measured(pair, switch, options)) for switch in SWITCHES]
    deliver(f"{options.clients} streams of {pair.target.name}", list(lines[0]), lines, device, options.results, "served")
    raise SystemExit(0 if all(line["failure"] == "-" and line["tokens"] for line in lines) else 1)


if __name__ == "__main__":
    main()
