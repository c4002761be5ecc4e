"""Grammars of strangers: read once each, by a few threads of their own, within limits of time and memory."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.config import Grammar
from shoal.constraints.grammar import STACK, Constraint, Grammars, grammars_of, short
from shoal.errors import RequestError
from shoal.serve.api_errors import ApiError

READER_THREADS = 2
"""Grammars that are read at a time."""
CPU_SECONDS = 2
"""Processor time that reading one may take: the largest of a service take about one."""
MEMORY_BYTES = 2**27
"""Bytes that it may take."""
LIMITS = {"max_lexer_states": 50_000}
"""Of llguidance's work, also in rounds, where no process is watched: a state of its lexer takes about a kilobyte."""
MAX_WAITING = 64
"""Grammars that may wait to be read; beyond, requests are told to come again."""
MAX_REMEMBERED_REFUSALS = 256
"""Refused grammars that are remembered: who sends one sends it again."""
TOO_MUCH = {
    "slow": f"it takes more than {CPU_SECONDS} s of processor time to read; make it smaller",
    "large": f"it takes more than {MEMORY_BYTES >> 20} MiB to read, or is nested too deeply; make it smaller",
}


@dataclass
class _Reading:
    """A grammar that is being read, and how many requests wait for it."""

    future: asyncio.Future[Constraint]
    waiting: int = 0


class GrammarReader:
    """Reads grammars for the rows of a server; used on the event loop.

    Args:
        tokenizer, vocab_size: see `shoal.constraints.grammar.grammars_of`.
    """

    def __init__(self, tokenizer: object, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._pool = ThreadPoolExecutor(READER_THREADS, "shoal-grammar-reader")
        self._readings: dict[Grammar, _Reading] = {}
        self._refused: OrderedDict[Grammar, str] = OrderedDict()
        self._grammars: Grammars | None = None
        self._probes = threading.local()
        self._open: list[Probe] = []

    async def read(self, grammar: Grammar, seconds: float | None) -> Constraint:
        """The grammar's constraint; as long as it is kept, the engine finds the grammar read.

        Args:
            seconds: how long to wait for it; None = as long as it takes.

        Raises:
            RequestError: a grammar that is wrong, or takes too much. ApiError: 429, too many wait; 503, not read in time.
        """
        if grammar in self._refused:
            raise RequestError(self._refused[grammar])
        known = self._grammars.known(grammar) if self._grammars is not None else None
        return known if known is not None else await self._read(grammar, seconds)

    async def _read(self, grammar: Grammar, seconds: float | None) -> Constraint:
        reading = self._reading(grammar)
        reading.waiting += 1
        try:
            return await asyncio.wait_for(asyncio.shield(reading.future), seconds)
        except asyncio.TimeoutError as error:
            raise ApiError(503, f"the grammar was not read within {seconds} s", code="grammar_timeout") from error
        except RequestError as error:
            self._refused[grammar] = str(error)
            while len(self._refused) > MAX_REMEMBERED_REFUSALS:
                self._refused.popitem(last=False)
            raise
        finally:
            reading.waiting -= 1
            if not reading.waiting:  # nobody asks any more: it need not be begun
                reading.future.cancel()
                if self._readings.get(grammar) is reading:
                    del self._readings[grammar]

    def _reading(self, grammar: Grammar) -> _Reading:
        if grammar not in self._readings:
            if len(self._readings) >= MAX_WAITING:
                message = f"{MAX_WAITING} grammars wait to be read already; try again in {CPU_SECONDS} s"
                raise ApiError(429, message, code="grammar_queue_full", headers={"retry-after": str(CPU_SECONDS)})
            future = asyncio.get_running_loop().run_in_executor(self._pool, self._job, grammar)
            self._readings[grammar] = _Reading(future)
        return self._readings[grammar]

    def close(self) -> None:
        """Ends what is running; nothing can be read any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for probe in self._open:
            probe.close()

    # ── on the pool's threads ───────────────────────────────────────────────────────────────────────────────────────

    def _job(self, grammar: Grammar) -> Constraint:
        self._grammars = grammars = grammars_of(self._tokenizer, self._vocab_size)
        if hasattr(os, "fork"):
            self._probe(grammars).check(grammar, grammars.written(grammar))
        return grammars.prototype(grammar, **LIMITS)

    def _probe(self, grammars: Grammars) -> Probe:
        """This thread's."""
        found: Probe | None = getattr(self._probes, "own", None)
        if found is None:
            found = self._probes.own = Probe(grammars)
            self._open.append(found)
        return found


class Probe:
    """A process that reads grammars first, see `shoal.serve.grammar_probe`; started at first use, and again when it has ended."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._process: subprocess.Popen[str] | None = None

    def check(self, grammar: Grammar, written: str) -> None:
        """Raises RequestError: the grammar takes too much, or is wrong. ApiError: 503, the process has ended."""
        told = self._asked({"grammar": written, "seconds": CPU_SECONDS, "size": MEMORY_BYTES, "stack": STACK})
        if told is None:
            raise ApiError(503, "the process that reads grammars has ended; try again", code="grammar_failed")
        why = short(told["why"]) if told["outcome"] == "refused" else TOO_MUCH.get(told["outcome"])
        if why is not None:
            raise RequestError(f"the {grammar.kind} grammar cannot be used: {why}")

    def _asked(self, question: dict[str, object]) -> dict[str, str] | None:
        try:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            return dict(json.loads(answer)) if answer else None
        except (OSError, ValueError):
            return None

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            command = [sys.executable, "-I", str(Path(__file__).with_name("grammar_probe.py"))]
            # One arena: another would reserve address space that counts as taken.
            environment = os.environ | {"MALLOC_ARENA_MAX": "1", "TOKENIZERS_PARALLELISM": "false"}
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, encoding="utf-8", env=environment
            )
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"path": sys.path, "limits": LIMITS, **self._grammars.description}) + "\n")
        return self._process

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                with suppress(OSError):
                    assert pipe is not None
                    pipe.close()
