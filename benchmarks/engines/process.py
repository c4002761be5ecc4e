"""The driver's side of a worker: starts it, asks it, keeps it from running while another engine is timed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import shoal
from engines.tasks import Absent, Setup, Task
from shoal.errors import InternalError

HELD = {
    "avx2": {
        "SHOAL_MARCH": "x86-64-v3",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "CT2_FORCE_CPU_ISA": "AVX2",
    }
}
"""The variables that hold engines to an instruction set that is less than the processor's.

llama.cpp has none: its build decides. OpenVINO's oneDNN heeds its own; operations beside the products may not.
"""
TAIL = 400  # characters of a worker's log in an error
BENCHMARKS = Path(__file__).parents[1]


class Worker:
    """An engine's process. Between two tasks it is stopped, so that no idle thread of it takes processor time.

    Args:
        python: that runs it. log: file for what it writes.

    Raises:
        Absent: the engine is not there, or not for this configuration. InternalError: it ended.
    """

    def __init__(self, python: str, setup: Setup, log: Path, *, preparing: bool = False) -> None:
        threads = {name: str(setup.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        # shoal is measured as it is imported here, whose commit the results name
        places = [BENCHMARKS, *([Path(shoal.__file__).parents[1]] if python == sys.executable else [])]
        environment = {
            **os.environ,
            **threads,
            **HELD.get(setup.isa, {}),
            "PYTHONPATH": os.pathsep.join(map(str, places)),
            "HF_HUB_OFFLINE": "1",
        }
        self.setup, self.log = setup, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [python, "-m", "engines.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
            )
        try:
            self.about = self._ask({"prepare": preparing} | asdict(setup))
            if "absent" in self.about:
                raise Absent(self.about["absent"])
            if not preparing:
                self._signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    def run(self, task: Task) -> dict[str, Any]:
        """The answer's fields, and "seconds"."""
        self._signal(signal.SIGCONT)
        try:
            return self._ask(asdict(task))
        finally:
            self._signal(signal.SIGSTOP)

    def _ask(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write((json.dumps(fields) + "\n").encode())
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            code, end = self.process.wait(), self.log.read_text(encoding="utf-8", errors="replace")[-TAIL:]
            raise InternalError(f"{self.setup.engine} {self.setup.method} ended with code {code}: ...{end.strip()}")
        return dict(json.loads(line))

    def _signal(self, number: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    def close(self) -> None:
        """Ends the process."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):  # what it never read is still to be written
                assert pipe is not None
                pipe.close()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # what was not sent any more
                    pipe.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def prepare(python: str, setup: Setup, log: Path) -> None:
    """Lets an engine convert its models, in a process that ends. Raises Absent as `Worker` does."""
    with Worker(python, setup, log, preparing=True):
        pass


def make_models(name: str, cache: Path, log: Path) -> None:
    """`engines.models.make`, in a process that ends. Raises InternalError where it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as errors:
        done = subprocess.run(
            [sys.executable, "-m", "engines.models", name, str(cache)], stdout=errors, stderr=errors,
            env={**os.environ, "PYTHONPATH": str(BENCHMARKS), "HF_HUB_OFFLINE": "1"}, check=False,
        )  # fmt: skip
    if done.returncode:
        raise InternalError(
            f"the models of {name} were not made: {log.read_text(errors='replace', encoding='utf-8')[-TAIL:].strip()}"
        )
