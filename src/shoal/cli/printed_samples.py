"""The samples on a console, each under a header line, and a stream followed to its end.

Ctrl-C cancels the rows and keeps the samples that finished.

For programs, results and samples are JSON objects.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.rule import Rule
from rich.syntax import Syntax
from rich.text import Text

from shoal.cli.console import printable, stderr
from shoal.cli.prompt_lines import PromptLine
from shoal.types.samples import Output, Result, Sample
from shoal.types.stats import as_dicts
from shoal.values import counted

if TYPE_CHECKING:
    from shoal.engine.stream import Stream
    from shoal.types.samples import Increment, Output, Result, Sample


def show_output(
    console: Console, output: Output, title: str | None, by_rank: bool, *, cut: bool = False
) -> None:
    """Prints one prompt's samples, each under a header; with `cut` those that Ctrl-C cut too."""
    if title:
        console.print(Rule(Text(title, overflow="ellipsis", no_wrap=True), align="left"))
    rank = {id(sample): number for number, sample in enumerate(output.ranked, 1)}
    samples = [
        (number, sample)
        for number, sample in enumerate(output.samples, 1)
        if cut or sample.finish_reason != "cancelled"
    ]
    for number, sample in (
        sorted(samples, key=lambda item: rank[id(item[1])]) if by_rank else samples
    ):
        place = f", rank {rank[id(sample)]} of {len(rank)}" if len(rank) > 1 else ""
        header = f"# sample {number}{place}: {describe(sample)}"
        console.print(Text(header, style="bold"), soft_wrap=True)
        text = python_text(printable(sample.text)) if console.is_terminal else Text(sample.text)
        text.rstrip()
        console.print(text, soft_wrap=True)
        console.print()


def python_text(text: str) -> Text:
    """Highlights text as Python in the terminal's own colours."""
    return Syntax("", "python", theme="ansi_dark", background_color="default").highlight(text)


def describe(sample: Sample) -> str:
    """Describes a sample in one line: rank figure, end, size, and tokens per round.

    With a rank figure the line fits in 80 columns.
    """
    committed = sample.accepted + sample.rounds if sample.syntax == "cut" else len(sample.token_ids)
    per_round = committed / sample.rounds if sample.rounds else 0.0
    late = (
        " after the time budget"
        if not sample.in_time and sample.finish_reason in ("eos", "stop", "length")
        else ""
    )
    weight = "" if sample.log_weight is None else f", log weight {sample.log_weight:.3f}"
    return (
        f"mean logprob {sample.mean_logprob:.3f}{weight}, {sample.finish_reason}{late}, "
        f"{counted(len(sample.token_ids), 'token')}, {per_round:.2f}/round"
    )


def report_failures(result: Result) -> bool:
    """Tells whether samples failed, each on its own, and prints a line that says so."""
    samples = [sample for output in result for sample in output.samples]
    failed = [sample.error for sample in samples if sample.error]
    if failed:
        line = " ".join(
            f"error: {len(failed)} of {len(samples)} samples failed; the first: {failed[0]}".split()
        )
        stderr().print(line, style="bold red", markup=False, highlight=False, soft_wrap=True)
    return bool(failed)


class Interrupt:
    """A flag that Ctrl-C sets; a second press raises KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self.pressed = False

    def __bool__(self) -> bool:
        return self.pressed

    def handle(self, _signal: int, _frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True


@contextmanager
def catch_interrupt() -> Iterator[Interrupt]:
    """Turns Ctrl-C into a flag, so that a round is never left half done."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt  # only the main thread may set signal handlers, and only it receives Ctrl-C
        return
    previous = signal.signal(signal.SIGINT, interrupt.handle)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, previous)


def follow(stream: Stream, show: Callable[[Increment], None]) -> tuple[Result, bool]:
    """Shows every increment and returns the result, and whether Ctrl-C cut it short."""
    cancelled = False
    with catch_interrupt() as interrupt:
        for increment in stream:
            show(increment)
            if interrupt and not cancelled:  # once: each row that is cancelled is an increment
                cancelled = True
                stream.cancel()
        return stream.result(), bool(interrupt)


def document(
    result: Result,
    lines: Sequence[PromptLine],
    sample: Callable[[Sample], dict[str, Any]],
    *,
    ranked: bool = False,
) -> dict[str, Any]:
    """Returns the JSON object of a result.

    Args:
        sample: makes the object of a sample.
        ranked: put samples with the best mean log-probability first.
    """
    prompts = []
    for output, one in zip(result, lines, strict=True):
        samples = [sample(each) for each in (output.ranked if ranked else output.samples)]
        prompts.append(
            {"prompt": one.text, "samples": samples}
            | ({} if one.id is None else {"id": one.id})
            | _worth(output)
        )
    return {"prompts": prompts, "stats": result.stats.to_dict()}


def _worth(output: Output) -> dict[str, Any]:
    """Returns the effective number and the log mass of weighted samples."""
    number, mass = output.effective_samples, output.log_mass
    if number is None or mass is None:
        return {}
    return {"effective_samples": number, "log_mass": _finite(mass)}


def sample_document(
    sample: Sample, *, logprobs: bool = False, top_logprobs: bool = False
) -> dict[str, Any]:
    """Returns the JSON object of a sample.

    Args:
        logprobs: add the log-probabilities of its tokens.
        top_logprobs: add the log-probabilities of the most probable tokens.
    """
    entry: dict[str, Any] = {
        "text": sample.text,
        "token_ids": list(sample.token_ids),
        "mean_logprob": _finite(sample.mean_logprob),
        "finish_reason": sample.finish_reason,
        "finished": sample.finished,
        "finished_at_s": sample.finished_at,
        "rounds": sample.rounds,
        "drafted": sample.drafted,
        "accepted": sample.accepted,
        "by_drafter": as_dicts(sample.by_drafter),
    }
    if sample.syntax is not None:
        entry["syntax"] = sample.syntax
    if sample.log_weight is not None:
        entry["log_weight"] = _finite(sample.log_weight)
    if sample.error:
        entry["error"] = sample.error
    if logprobs:
        entry["logprobs"] = [_finite(value) for value in sample.logprobs]
        entry["processed_logprobs"] = [_finite(value) for value in sample.processed_logprobs]
    if top_logprobs:
        entry["top_logprobs"] = [
            {"raw": _pairs(top.raw), "processed": _pairs(top.processed)}
            for top in sample.top_logprobs
        ]
    return entry


def _pairs(pairs: Sequence[tuple[int, float]]) -> list[list[int | float | None]]:
    return [[token, _finite(value)] for token, value in pairs]


def _finite(value: float) -> float | None:
    """Returns None for NaN and infinities, which JSON does not have."""
    return value if math.isfinite(value) else None
