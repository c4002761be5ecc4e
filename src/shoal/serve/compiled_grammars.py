"""Compiles the grammars of requests, each once, on a few threads within limits of time and memory.

A grammar is first compiled on trial, in a process that ends with its last client. A compilation in
this process cannot be interrupted. So grammars whose trials took long wait for a thread of their
own: one that nobody waits for any longer delays no grammar that is quickly compiled.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from shoal.config import Grammar
from shoal.constraints.compiler import LARK, Grammars, grammars_of
from shoal.constraints.grammar import GrammarConstraint
from shoal.constraints.grammar_sources import STACK, source_of, unusable
from shoal.errors import RequestError
from shoal.serve.api_errors import ApiError, naming
from shoal.types.requests import Request

READER_THREADS = 2
"""The number of grammars that are compiled on trial at a time."""
CPU_SECONDS = 2
"""The processor time for one grammar; the largest ones in common use take about one second."""
QUICK_SECONDS = 0.1
"""The processor time of a trial beyond which a grammar waits for the thread of the hard ones."""
MEMORY_BYTES = 2**27
"""The memory for one grammar."""
LIMITS = {"max_lexer_states": 50_000}
"""The limits within llguidance, which also hold in rounds, where no process is limited. A state of
its lexer takes about a kilobyte."""
MAX_WAITING = 64
"""The number of grammars that may wait to be compiled; further requests are answered with 429."""
MAX_REMEMBERED_REFUSALS = 256
"""The number of refused grammars whose error is kept, because a client often sends the same grammar
again. Of the grammar a digest is kept: its text may have 256 KiB."""
TOO_MUCH = {
    "slow": f"it takes more than {CPU_SECONDS} s of processor time to read; make it smaller",
    "large": f"it takes more than {MEMORY_BYTES >> 20} MiB to read, or is nested too deeply; "
    f"make it smaller",
}


@dataclass
class _Reading:
    """A grammar that is being compiled.

    Attributes:
        waiting: the number of requests that wait for it.
        probe: the process that compiles it on trial, while it does.
        left: True if no request waits any longer.
        number: the number of its trial.
    """

    waiting: int = 0
    probe: Probe | None = None
    left: bool = False
    number: int = field(default_factory=itertools.count(1).__next__)
    future: asyncio.Task[GrammarConstraint] = field(init=False)

    def leave(self) -> None:
        """Ends the work, which nobody waits for: the trial, and tasks that have not begun."""
        self.left = True
        self.future.cancel()
        if self.probe is not None:
            self.probe.leave(self.number)


class GrammarReader:
    """A compiler of grammars for the rows of a server; used on the event loop.

    Args:
        tokenizer: see `shoal.constraints.compiler.grammars_of`.
        vocab_size: see `shoal.constraints.compiler.grammars_of`.
    """

    def __init__(self, tokenizer: object, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._pool = ThreadPoolExecutor(READER_THREADS, "shoal-grammar-reader")
        self._readings: dict[Grammar, _Reading] = {}
        self._refused: OrderedDict[bytes, str] = OrderedDict()
        self._grammars: Grammars | None = None
        self._probes = threading.local()
        self._open: list[Probe] = []

    async def of_requests(self, requests: Iterable[Request], field: str) -> list[GrammarConstraint]:
        """Returns the constraints of the grammars of requests; see `read`.

        Args:
            requests: the requests, with a grammar or without.
            field: the name of the grammar's field, for messages.
        """
        with naming(field):
            return [
                await self.read(grammar, request.limits.time_budget)
                for request in requests
                if (grammar := request.sampling.grammar) is not None
            ]

    async def read(self, grammar: Grammar, seconds: float | None) -> GrammarConstraint:
        """Returns the grammar's constraint.

        As long as it is referenced, the engine finds the grammar compiled.

        Args:
            seconds: timeout; None = no timeout.

        Raises:
            RequestError: the grammar is invalid, or exceeds a limit.
            ApiError: 429, too many wait; 503, not compiled in time.
        """
        why = self._refused.get(_digest(grammar))
        if why is not None:
            raise RequestError(why)
        known = self._grammars.known(grammar) if self._grammars is not None else None
        return known if known is not None else await self._read(grammar, seconds)

    async def _read(self, grammar: Grammar, seconds: float | None) -> GrammarConstraint:
        reading = self._reading(grammar)
        reading.waiting += 1
        try:
            return await asyncio.wait_for(asyncio.shield(reading.future), seconds)
        except asyncio.TimeoutError as error:
            raise ApiError(
                503, f"the grammar was not read within {seconds} s", code="grammar_timeout"
            ) from error
        except RequestError as error:
            self._refused[_digest(grammar)] = str(error)
            while len(self._refused) > MAX_REMEMBERED_REFUSALS:
                self._refused.popitem(last=False)
            raise
        finally:
            reading.waiting -= 1
            if not reading.waiting:
                reading.leave()
                del self._readings[grammar]

    def _reading(self, grammar: Grammar) -> _Reading:
        if grammar not in self._readings:
            if len(self._readings) >= MAX_WAITING:
                message = (
                    f"{MAX_WAITING} grammars wait to be read already; try again in {CPU_SECONDS} s"
                )
                raise ApiError(
                    429,
                    message,
                    code="grammar_queue_full",
                    headers={"retry-after": str(CPU_SECONDS)},
                )
            reading = self._readings[grammar] = _Reading()
            reading.future = asyncio.ensure_future(self._compiled(grammar, reading))
        return self._readings[grammar]

    async def _compiled(self, grammar: Grammar, reading: _Reading) -> GrammarConstraint:
        loop = asyncio.get_running_loop()
        seconds = await loop.run_in_executor(self._pool, self._tried, grammar, reading)
        assert self._grammars is not None
        made = self._grammars.compilation(grammar, LIMITS, seconds > QUICK_SECONDS)
        return made if isinstance(made, GrammarConstraint) else await asyncio.wrap_future(made)

    def close(self) -> None:
        """Stops the threads and processes; nothing can be compiled afterwards."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for probe in self._open:
            probe.close()

    # ── on the pool's threads ─────────────────────────────────────────────────────────────────────

    def _tried(self, grammar: Grammar, reading: _Reading) -> float:
        """Compiles a grammar on trial; returns the seconds that it took."""
        self._grammars = grammars = grammars_of(self._tokenizer, self._vocab_size)
        if not hasattr(os, "fork"):
            return 0.0
        source, probe = grammars.source(grammar), self._probe(grammars)
        reading.probe = probe  # from now on whoever leaves tells it
        try:
            return 0.0 if reading.left else probe.check(grammar, source, reading.number)
        finally:
            reading.probe = None

    def _probe(self, grammars: Grammars) -> Probe:
        """Returns the probe of this thread."""
        probe: Probe | None = getattr(self._probes, "own", None)
        if probe is None:
            probe = self._probes.own = Probe(grammars.description)
            self._open.append(probe)
        return probe


def _digest(grammar: Grammar) -> bytes:
    return hashlib.sha256(repr(grammar).encode("utf-8", "backslashreplace")).digest()


class Probe:
    """A process of `shoal.serve.grammar_probe`.

    It is started at the first use, and again after it has ended.

    Args:
        alphabet: see `shoal.constraints.compiler.Alphabet.description`.
    """

    def __init__(self, alphabet: Mapping[str, object]) -> None:
        self._alphabet = alphabet
        self._process: subprocess.Popen[str] | None = None
        self._leaves: FileIO | None = None

    def check(self, grammar: Grammar, written: str, number: int = 0) -> float:
        """Compiles a grammar on trial, unless `leave` ends the trial.

        Args:
            written: the grammar as llguidance reads it.
            number: the number of the trial.

        Returns:
            The seconds of processor time that it took.

        Raises:
            RequestError: the grammar is invalid, or exceeds a limit.
            ApiError: 503, the process has ended.
        """
        result = self.outcome(written, number)
        if result is None:
            raise ApiError(
                503, "the process that reads grammars has ended; try again", code="grammar_failed"
            )
        why = result["why"] if result["outcome"] == "refused" else TOO_MUCH.get(result["outcome"])
        if why is not None:
            raise unusable(grammar, why)
        return float(result["seconds"])

    def outcome(self, written: str, number: int = 0) -> dict[str, Any] | None:
        """Returns the result of a trial (see `grammar_probe`); None = the process has ended."""
        request = {
            "grammar": written,
            "seconds": CPU_SECONDS,
            "size": MEMORY_BYTES,
            "stack": STACK,
            "number": number,
        }
        try:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            return dict(json.loads(answer)) if answer else None
        except (OSError, ValueError):
            return None

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            theirs, ours = os.pipe()
            os.set_blocking(ours, False)
            self._leaves = FileIO(ours, "wb")
            script = str(Path(__file__).with_name("grammar_probe.py"))
            command = [sys.executable, "-I", script, str(theirs)]
            # One malloc arena: a second one would reserve address space, which counts as memory.
            environment = os.environ | {"MALLOC_ARENA_MAX": "1", "TOKENIZERS_PARALLELISM": "false"}
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                command,
                stdin=pipe,
                stdout=pipe,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
                env=environment,
                pass_fds=[theirs],
            )
            os.close(theirs)
            assert self._process.stdin is not None
            self._process.stdin.write(
                json.dumps({"path": sys.path, "limits": LIMITS, **self._alphabet}) + "\n"
            )
        return self._process

    def leave(self, number: int) -> None:
        """Ends a trial, if it goes on or is about to begin; never waits."""
        if self._leaves is not None:
            with suppress(OSError, ValueError):  # it has ended
                self._leaves.write(b"%d\n" % number)

    def close(self) -> None:
        """Kills the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout, self._leaves):
                with suppress(OSError):
                    assert pipe is not None
                    pipe.close()


BYTES = {"tokens": [*map(chr, range(256)), "<end>"], "special": [256], "end": 256}
"""The alphabet of all bytes, which writes each text that a tokenizer does."""
MOST_TRIED = 256
"""The most grammars that are tried before a model is loaded; each takes some hundredths of a
second, a hard one `CPU_SECONDS`."""


class FirstTrials:
    """Trials of grammars before a model is loaded, over an alphabet of bytes.

    A grammar that no alphabet makes usable is refused. A grammar that names tokens is not tried,
    and one that takes too much is left to the trial over the model's own alphabet.
    """

    def __init__(self) -> None:
        self._probe = Probe(BYTES)
        self._reasons: dict[bytes, str] = {}

    def require(self, grammar: Grammar) -> None:
        """Raises RequestError: the grammar is invalid, or llguidance is not installed."""
        source, key = source_of(grammar), _digest(grammar)
        if any(match["name"] for match in LARK.finditer(grammar.text)) or not hasattr(os, "fork"):
            return
        if key not in self._reasons and len(self._reasons) < MOST_TRIED:
            result = self._probe.outcome(source)
            refused = result is not None and result["outcome"] == "refused"
            self._reasons[key] = result["why"] if result and refused else ""
        if why := self._reasons.get(key):
            raise unusable(grammar, why)

    def close(self) -> None:
        """Kills the process."""
        self._probe.close()
