"""An engine in a process of its own: `python -m engines.worker`, asked and answered in lines of JSON.

The first line is a `Setup` with "prepare": true converts the models and ends; false loads them. Then every line is a `Task`.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import time
from dataclasses import asdict
from typing import Any

from engines.tasks import Absent, Setup, Task


def die_with_parent() -> None:
    """Lets the kernel kill this process when its driver ends, though it is stopped then and reads no stdin (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main() -> None:
    """Answers until stdin ends. What libraries print on stdout goes to stderr."""
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    asked = json.loads(sys.stdin.readline())
    preparing, setup = asked.pop("prepare"), Setup(**asked)
    try:
        module = importlib.import_module(f"engines.{setup.engine}_engine")
        if preparing:
            getattr(module, "prepare", lambda _: None)(setup)
            answer(ready=True)
            return
        engine = module.Engine(setup)
    except (ImportError, Absent) as error:
        answer(absent=str(error))
        return
    answer(ready=True, version=engine.version, settings=engine.settings)
    for line in sys.stdin:
        task = Task(**json.loads(line))
        started = time.perf_counter()
        found = engine.generate(task)
        answer(seconds=time.perf_counter() - started, **asdict(found))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # some engines' threads do not end
