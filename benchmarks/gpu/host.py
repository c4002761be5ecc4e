"""What the Python of a captured round takes, with an executor whose replays do nothing: no device is needed, and none is used.

The device of a round stands still from the download of the verdict to the next launch: "waiting" is the thread time of the host in
between, "after" its part up to the end of the round and "before" its part from the begin of the next one. "hidden" is what the host
does after the first launch while the device works. Where the next round is launched ahead of the verdict, as for users, the device
has work meanwhile: there is no "waiting", and what counts is "host", all but the wait for the device. Times are lower quartiles
over rounds of tiny models, whose layers cost the host nothing as they are launched as graphs; the calls of Python functions are the
median of a round, and those of them in which the device waits.

Run: python benchmarks/gpu/host.py
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median, quantiles
from typing import Any, NamedTuple
from unittest import mock

import torch

from common import arguments, deliver
from shoal.config import Limits, Sampling
from shoal.drafting import captured
from shoal.engine.engine import Engine
from shoal.lookahead.controller import Fixed
from shoal.models import compiled, loading
from shoal.models.compiled import transfer
from shoal.models.compiled.captured_round import CapturedRound
from shoal.models.compiled.captures import Captures
from shoal.models.compiled.transfer import Arrival
from shoal.models.runner import Runner
from shoal.testing import tiny_model
from shoal.testing.drafters import engine_of
from shoal.types.requests import Request

WARM_UPS = 40
UNLAUNCHED = 16
"""Rounds at most that launch nothing."""
PROMPT = (1, 2, 3)
Line = dict[str, Any]


class Moment(NamedTuple):
    """The begin or end of a round, a "launch", the begin of a "wait", or the "verdict" that ends it.

    Attributes:
        name: which of them.
        time: thread time, nanoseconds.
        calls: the calls of Python functions so far.
    """

    name: str
    time: int
    calls: int


class Watch:
    """The moments of a round, and the calls between them while calls are counted."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self.calls = 0

    def note(self, name: str) -> None:
        self.moments.append(Moment(name, time.thread_time_ns(), self.calls))

    def round(self, engine: Engine) -> list[Moment]:
        """Computes a round; returns its moments."""
        self.moments = []
        self.note("begin")
        engine.step()
        self.note("end")
        return self.moments

    def counted_round(self, engine: Engine) -> list[Moment]:
        """Computes a round and counts calls, those of this class left out."""

        def called(frame: Any, event: str, argument: Any) -> None:
            self.calls += event == "call" and frame.f_code.co_filename != __file__

        self.calls = 0
        sys.setprofile(called)
        try:
            return self.round(engine)
        finally:
            sys.setprofile(None)


def nothing_computed(watch: Watch) -> Callable[[torch.device], compiled.Executor]:
    """Returns an executor that runs a function once; its replays launch nothing.

    Their verdicts accept each number of drafts equally often, by turns and differently by row.
    """

    def execute(run: compiled.Run) -> compiled.Run:
        result: Any = run()
        verifies = getattr(run, "__name__", "") == "verified"
        turns = itertools.count()
        if verifies:
            numbers, logits = result
            columns, rows = logits.shape[1], torch.arange(len(numbers))
            numbers[:, 1], numbers[:, 2] = 9, 1  # the token after the kept drafts; sound
            numbers[:, 3 + 2 * columns :] = 7  # the drafts

        def replay() -> Any:
            watch.note("launch")
            if verifies:
                numbers[:, 0] = (rows + next(turns)) % columns
            return result

        return replay

    return lambda device: execute


def nothing_to_compare(*_: Any) -> None:
    """Stands for what a first replay would be compared with."""


@contextmanager
def standing_still(watch: Watch, ahead: bool) -> Iterator[None]:
    """Within it, captured rounds compute nothing and are not checked.

    Args:
        ahead: whether rounds may be launched before the verdict of the last.
    """

    class Watched(Arrival):
        def wait(self) -> Any:
            watch.note("wait")
            found = super().wait()
            watch.note("verdict")
            return found

    checked = {
        "check_drafts": lambda round_, *_: round_.checked("draft"),
        "check_verdict": lambda round_, *_: round_.checked("verify"),
    }
    with (
        mock.patch.dict(compiled.EXECUTORS, graphed=nothing_computed(watch)),
        mock.patch.object(transfer, "Arrival", Watched),
        mock.patch.object(Captures, "replays", new=ahead),
        mock.patch.object(CapturedRound, "_first_replays", nothing_to_compare),
        mock.patch.object(CapturedRound, "_advance", lambda round_: round_.built["advance"]()),
        mock.patch.multiple(captured, **checked),
    ):
        yield


def runner(seed: int) -> Runner:
    model = tiny_model("llama", seed=seed, layers=1, max_position_embeddings=8192)
    made = loading.wrap(model, "tiny", "pad", checked=False)
    made.capture_rounds("graphed")
    return made


def started(drafts: int, rows: int, tokens: int) -> Engine:
    """An engine whose rows all run; its rounds are built."""
    engine = engine_of(runner(0), runner(1) if drafts else None, Fixed(drafts), max_batch=rows)
    for i in range(rows):
        engine.submit(Request((*PROMPT, i), 1, Sampling(temperature=0.8, seed=i), Limits(max_new_tokens=tokens)))
    for _ in range(WARM_UPS):
        engine.step()
    if engine.target.capture_failure or engine.stats.executors["target"]["captured rounds"] < WARM_UPS:
        raise RuntimeError(f"rounds were not captured: {engine.target.capture_failure}, {engine.stats.executors}")
    return engine


def parts(moments: list[Moment], of: Callable[[Moment], int]) -> dict[str, int]:
    """The parts of a round by a measure of its moments."""
    begin, launch = (next(of(one) for one in moments if one.name == name) for name in ("begin", "launch"))
    wait, verdict, end = (of(next(one for one in moments[::-1] if one.name == name)) for name in ("wait", "verdict", "end"))
    return {
        "host": end - begin - (verdict - wait),
        "waiting": launch - begin + end - verdict,
        "after": end - verdict,
        "before": launch - begin,
        "hidden": wait - launch,
    }


def launching(step: Callable[[Engine], list[Moment]], engine: Engine, count: int) -> list[list[Moment]]:
    """The moments of rounds that launched a function; a cache that must grow first keeps the next one from being launched ahead."""
    rounds = (step(engine) for _ in range(count + UNLAUNCHED))
    return list(itertools.islice((one for one in rounds if any(moment.name == "launch" for moment in one)), count))


def measured(drafts: int, rows: int, repeats: int, ahead: bool = False) -> Line:
    """The host's time and calls in rounds of `drafts` drafts, launched ahead of verdicts or after them."""
    watch = Watch()
    with standing_still(watch, ahead):
        engine = started(drafts, rows, (1 + drafts) * (WARM_UPS + 2 * (repeats + UNLAUNCHED) + 2))
        used = engine._stages.captured.launched_ahead
        before = used["used"]
        times = [parts(one, lambda one: one.time) for one in launching(watch.round, engine, repeats)]
        calls = [parts(one, lambda one: one.calls) for one in launching(watch.counted_round, engine, repeats)]
    line: Line = {"drafts": drafts, "rows": rows, "launched ahead": (used["used"] - before) / (2 * repeats)}
    for name in times[0]:
        line[f"{name} us"] = quantiles(each[name] / 1000 for each in times)[0]
    line["calls"] = int(median(each["host"] for each in calls))
    line["calls waiting"] = int(median(each["waiting"] for each in calls))
    if ahead:
        line |= dict.fromkeys(("waiting us", "after us", "before us", "calls waiting"), "-")
    return line


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(device="cpu")
    parser.add_argument("--drafts", default="0,6", help="draft lengths")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        measured(drafts, options.rows, options.rounds, ahead)
        for ahead in (True, False)
        for drafts in map(int, options.drafts.split(","))
    ]
    deliver("the host's part of a captured round", list(lines[0]), lines, torch.device("cpu"), options.results, "host")
    raise SystemExit(0)


if __name__ == "__main__":
    main()
