"""Compiles grammars on trial, each in a process of its own with limits of time and memory.

llguidance cannot be interrupted: a schema of three lines can take minutes, or all memory, and a
failed allocation aborts its process. So the grammar of a request is compiled here first.
`shoal.serve.compiled_grammars` runs this file as a script that imports nothing of shoal; it reads
one line of JSON per grammar, and writes one line of JSON as the result. From a second pipe it reads
the numbers of the trials that nobody waits for any longer.
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
"""The factor from the processor-time limit to the wall-clock limit, because the machine may be
busy."""


def main() -> None:
    """Serves until the end of its input; the first line describes the tokenizer.

    Its argument is the descriptor of the pipe of `Leaves`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C the server lets requests finish
    leaves = Leaves(int(sys.argv[1]))
    setup = json.loads(sys.stdin.readline())
    sys.path[:] = setup["path"]
    import llguidance

    alphabet = llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(ProbedAlphabet(setup)), eos_token=setup["end"]
    )
    limits = llguidance.LLParserLimits(verbose_errors=False, **setup["limits"])

    def read(grammar: str) -> str:
        made = llguidance.LLMatcher(alphabet, grammar, log_level=0, limits=limits)
        if not made.is_error():
            made.compute_bitmask()
        return str(made.get_error())

    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(probed(read, **request, leaves=leaves)), flush=True)


class ProbedAlphabet:
    """The vocabulary of `shoal.constraints.compiler.Alphabet`, without its tokenizer.

    Args:
        setup: the description of that alphabet.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        self.tokens = [text.encode("latin-1") for text in setup["tokens"]]
        self.special_token_ids = setup["special"]
        self.eos_token_id = setup["end"]
        self.bos_token_id = None
        special = set(self.special_token_ids)
        self._ids = {text: i for i, text in enumerate(self.tokens) if text and i not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        """Returns tokens that write a text: the longest, which take as long to follow as others."""
        data, at, tokens = text.encode() if isinstance(text, str) else text, 0, []
        while at < len(data):
            sizes = range(min(self._longest, len(data) - at), 0, -1)
            size = next((size for size in sizes if data[at : at + size] in self._ids), 0)
            if size:
                tokens.append(self._ids[data[at : at + size]])
            at += size or 1
        return tokens


class Leaves:
    """The pipe by which the server tells that the last client of a trial has gone.

    A line is the number of a trial; it may come before that begins, or when it has ended.

    Args:
        pipe: a descriptor.
    """

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def fileno(self) -> int:
        return self._pipe

    def tell(self, number: int) -> bool:
        """Reads the pipe; returns True if a trial's number is there, or the server has gone."""
        data = os.read(self._pipe, 1 << 16)
        return not data or str(number).encode() in data.split()


def probed(
    read: Any,
    grammar: str,
    seconds: int,
    size: int,
    stack: int,
    number: int = 0,
    leaves: Leaves | None = None,
) -> dict[str, Any]:
    """Compiles a grammar in a fork of this process.

    Args:
        read: compiles a grammar and returns its error.
        grammar: the grammar as llguidance reads it.
        seconds: the limit of processor time.
        size: the limit of memory, in bytes.
        stack: the stack of the compiling thread, in bytes.
        number: the number of the trial.
        leaves: tells when nobody waits for it any longer.

    Returns:
        The outcome "ok", "refused" (then "why" is llguidance's error), "slow", "large" or "left",
        and the seconds of processor time.
    """
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            _set_limits(seconds, size + stack)
            threading.stack_size(stack)
            reader = threading.Thread(
                target=lambda: os.write(theirs, b"=" + read(grammar).encode()[:2000])
            )
            reader.start()
            reader.join()
        os._exit(0)
    os.close(theirs)
    deadline = time.monotonic() + WALL_SECONDS_PER_CPU_SECOND * seconds
    got = _received(ours, child, deadline, number, leaves)
    _, status, usage = os.wait4(child, 0)
    outcome, why = "large", ""
    if got is None:
        outcome = "left"
    elif got.startswith(b"="):
        why = got[1:].decode(errors="replace")
        outcome = "refused" if why else "ok"
    elif os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
        outcome = "slow"
    return {"outcome": outcome, "why": why, "seconds": usage.ru_utime + usage.ru_stime}


def _received(
    pipe: int, child: int, deadline: float, number: int, leaves: Leaves | None
) -> bytes | None:
    """Returns the output of the child; empty if it was killed at the deadline, None if it was left.

    A child that is left is killed as well.
    """
    got = b""
    with os.fdopen(pipe, "rb", buffering=0) as file:
        watched: list[Any] = [file] if leaves is None else [file, leaves]
        while True:
            ready, _, _ = select.select(watched, [], [], max(deadline - time.monotonic(), 0))
            left = leaves is not None and leaves in ready and leaves.tell(number)
            if left or not ready:
                os.kill(child, signal.SIGKILL)
                return None if left else b""
            if file in ready:
                part = file.read(4096)
                if not part:
                    return got
                got += part


def _set_limits(seconds: int, size: int) -> None:
    """Sets this process's limits, and lets the kernel kill it first when memory runs out."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
        most = pages * resource.getpagesize() + size
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main()
