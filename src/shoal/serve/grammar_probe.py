"""Reads grammars where nothing is lost if one takes too much: each in a process of its own that may be killed.

llguidance cannot be stopped: a schema of three lines keeps it busy for minutes, or takes all memory, and the allocation that fails
ends its process. So a stranger's grammar is read here first, under limits of time and memory. `shoal.serve.grammars` runs this file
as a script that loads nothing of shoal; a line of JSON comes per grammar, and a line of JSON answers it.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

WALL_SECONDS_PER_CPU_SECOND = 10
"""Seconds on the clock for each second of processor time: on a busy machine the latter says more."""


def main() -> None:
    """Serves until its input ends; the first line tells the tokenizer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which lets requests finish
    told = json.loads(sys.stdin.readline())
    sys.path[:] = told["path"]
    import llguidance

    alphabet = llguidance.LLTokenizer(told["tokenizer"], n_vocab=told["width"], eos_token=told["end"])
    limits = llguidance.LLParserLimits(verbose_errors=False, **told["limits"])

    def read(grammar: str) -> str:
        made = llguidance.LLMatcher(alphabet, grammar, log_level=0, limits=limits)
        if not made.is_error():
            made.compute_bitmask()
        return str(made.get_error())

    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(probed(read, **asked)), flush=True)


def probed(read: Any, grammar: str, seconds: int, size: int, stack: int) -> dict[str, str]:
    """What became of reading a grammar in a fork of this process: "ok", or why not.

    Args:
        seconds: of processor time. size, stack: bytes of memory and of the stack it is read with.
    """
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            _confine(seconds, size + stack)
            threading.stack_size(stack)
            reader = threading.Thread(target=lambda: os.write(theirs, b"=" + read(grammar).encode()[:2000]))
            reader.start()
            reader.join()
        os._exit(0)
    os.close(theirs)
    got = _received(ours, child, time.monotonic() + WALL_SECONDS_PER_CPU_SECOND * seconds)
    _, status = os.waitpid(child, 0)
    if got.startswith(b"="):
        error = got[1:].decode(errors="replace")
        return {"outcome": "refused", "why": error} if error else {"outcome": "ok", "why": ""}
    slow = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
    return {"outcome": "slow" if slow else "large", "why": ""}


def _received(pipe: int, child: int, deadline: float) -> bytes:
    """All that the child writes; it is killed at the deadline."""
    got = b""
    with os.fdopen(pipe, "rb", buffering=0) as file:
        while True:
            ready, _, _ = select.select([file], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                os.kill(child, signal.SIGKILL)
                return b""
            part = file.read(4096)
            if not part:
                return got
            got += part


def _confine(seconds: int, size: int) -> None:
    """Limits of this process, and the first to go where the machine has no memory."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + size
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main()
