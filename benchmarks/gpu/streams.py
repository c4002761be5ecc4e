"""The clients of `served.py`, in a process of their own: streams of a server, and a JSON line of what they saw.

Run by served.py; it imports nothing of shoal, as users' programs do not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from statistics import median
from typing import Any

import httpx

PATIENCE = 60.0
"""Seconds until an answer is a hang."""


async def streamed(http: httpx.AsyncClient, prompt: list[int], tokens: int) -> tuple[int, float]:
    """Reads one stream to its end; returns the number of its tokens, and the seconds to its first part."""
    body = {
        "model": "random",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.8,
        "ignore_eos": True,
        "stream": True,
    }
    started, first, used = time.perf_counter(), 0.0, 0
    async with http.stream("POST", "/v1/completions", json={**body, "stream_options": {"include_usage": True}}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            first = first or time.perf_counter() - started
            if line.startswith("data: {"):
                usage = json.loads(line.removeprefix("data: ")).get("usage")
                used = usage["completion_tokens"] if usage else used
    return used, first


async def load(url: str, clients: int, requests: int, tokens: int, length: int) -> dict[str, Any]:
    """All clients at once, each with one request after the other, and with a prompt of its own."""

    async def client(number: int) -> list[tuple[int, float]]:
        prompt = [number, *(3 + (number + i) % 200 for i in range(1, length))]
        return [await streamed(http, prompt, tokens) for _ in range(requests)]

    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as http:
        started = time.perf_counter()
        each = [one for own in await asyncio.gather(*map(client, range(clients))) for one in own]
        seconds = time.perf_counter() - started
    return {"tokens": sum(used for used, _ in each), "seconds": seconds, "first": median(first for _, first in each)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    for name in ("clients", "requests", "tokens", "length"):
        parser.add_argument(name, type=int)
    print(json.dumps(asyncio.run(load(**vars(parser.parse_args())))))


if __name__ == "__main__":
    main()
