"""`shoal demo`: the bundled pair at work, then measured against plain decoding."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from shoal.bench import Identity, Speed, greedy_identity, interleave
from shoal.cli.console import EXIT_INTERRUPTED, StatusLine, plain_table, printable, stdout
from shoal.cli.option_groups import option_groups, output_option, sampling_option, speed_option
from shoal.cli.options import (
    JsonOption,
    LookaheadOption,
    ModelSource,
    PlacedPair,
    SampleOptions,
    display_name,
    dtype_name,
    parse_lookahead,
)
from shoal.cli.printed_samples import follow, show_output
from shoal.cli.views import Board
from shoal.errors import RequestError
from shoal.types.arguments import split_options
from shoal.values import counted, require_text

if TYPE_CHECKING:
    from shoal.api import Shoal
    from shoal.types.samples import Result

PROMPT = '''def multiply_above_4(values):
    """Return the product of the numbers greater than 4 in values.

    >>> multiply_above_4([1, 2, 3, 4, 5])
    5
    >>> multiply_above_4([6, 10, 2])
    60
    """
'''
WARM_UP_TOKENS = 16
CHECKED_LENGTH = 4  # draft length of the greedy comparison where `auto` drafts nothing
NOT_DRAFTED = (
    "no speed-up: by the times measured here drafts did not pay, so the timed runs drafted nothing "
    "and both columns are plain decoding (samples above were drawn while it was found out); "
    f"--lookahead {CHECKED_LENGTH} drafts anyway"
)


@dataclass(frozen=True)
class DemoJob:
    """The pair of the demo, its prompt and its settings."""

    model: Shoal
    prompt: str
    n: int
    lookahead: str | int
    repeats: int
    options: dict[str, Any]

    def run(self, lookahead: str | int, **changes: Any) -> Result:
        """Generates all rows at a draft length."""
        return self.model.generate(
            self.prompt, self.n, lookahead=lookahead, **{**self.options, **changes}
        )

    @property
    def exact(self) -> bool:
        """The number format is precise enough to guarantee greedy identity."""
        return dtype_name(self.model.target) in ("float32", "float64")


@dataclass(frozen=True)
class Measurements:
    """The timings of both methods, and the greedy comparison."""

    plain: Speed
    speculative: Speed
    identity: Identity

    @property
    def speedup(self) -> float:
        """The speculative tokens per second over the plain ones."""
        return self.speculative.tokens_per_second / self.plain.tokens_per_second


@dataclass(frozen=True)
class DemoOptions(SampleOptions):
    """The prompt and the settings of the demo, and the form of its output."""

    prompt: Annotated[
        str,
        typer.Option(
            "--prompt", "-p", help="What the samples continue.", show_default="a function"
        ),
    ] = PROMPT
    temperature: Annotated[float, sampling_option(help="0 = greedy.")] = 0.8
    seed: Annotated[int, sampling_option(help="Same seed, same samples.")] = 0
    lookahead: LookaheadOption = "auto"
    repeats: Annotated[
        int, speed_option(min=1, help="Timed runs of each method; medians are shown.")
    ] = 3
    no_live: Annotated[
        bool, output_option("--no-live", help="Do not show the rows while they fill in.")
    ] = False
    json: JsonOption = False

    def job(self, names: PlacedPair) -> DemoJob:
        """Checks the options, then loads the pair."""
        require_text(self.prompt, "the prompt")
        options = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
        }
        lookahead = parse_lookahead(self.lookahead)
        split_options({**options, "lookahead": lookahead})
        with StatusLine() as status:
            status.say("loading ...")
            pair = ModelSource(**vars(names), max_batch=max(16, self.n)).load()
        if pair.drafter_name is None:
            raise RequestError(
                "the demo compares drafting with plain decoding and needs a drafter: give "
                "--draft as well"
            )
        return DemoJob(pair, self.prompt, self.n, lookahead, self.repeats, options)


@option_groups()
def demo(names: PlacedPair, options: DemoOptions) -> int:
    """Watch eight samples grow, then compare with plain decoding.

    Shows which tokens were drafted and accepted, in colour, while the samples fill in.

    Then measures speculative against plain decoding: same seeds, interleaved runs, medians.

    Last, decodes greedily with both: the tokens must be identical.
    """
    job, console = options.job(names), stdout()
    live = console.is_terminal and not options.no_live and not options.json
    shown = show_live(job, console) if live else job.run(job.lookahead)
    if shown is None:
        return EXIT_INTERRUPTED
    if shown.stats.drafted == 0 and job.lookahead != "auto":
        raise RequestError(
            f"nothing was drafted with --lookahead {options.lookahead}: raise it, or "
            f"--max-new-tokens"
        )
    measured = measure(job)
    if options.json:
        print(json.dumps(document(job, shown, measured)))
    else:
        if not live:
            console.print(Text(printable(job.prompt.rstrip()) + "\n"))
            show_output(console, shown[0], None, by_rank=False)
        report(console, job, measured)
    return 0 if measured.identity.holds or not job.exact else 1


def show_live(job: DemoJob, console: Console) -> Result | None:
    """Draws the rows while they fill in; None if Ctrl-C ended it."""

    def decode(ids: list[int]) -> str:
        return str(job.model.tokenizer.decode(ids, skip_special_tokens=True))

    console.print(Text(printable(job.prompt.rstrip()), style="dim"))
    stream = job.model.stream(job.prompt, job.n, lookahead=job.lookahead, **job.options)
    # The table below has the acceptance length, of runs whose draft lengths may be others.
    with Board(console, [job.n], decode, acceptance=False) as board:
        result, interrupted = follow(stream, board.add)
    return None if interrupted else result


def measure(job: DemoJob) -> Measurements:
    """Times plain and speculative decoding, then compares them greedily."""
    tokens = job.options["max_new_tokens"]
    methods = {"plain": partial(job.run, "off"), "speculative": partial(job.run, job.lookahead)}
    with StatusLine() as status:
        status.say("warming up ...")
        for run in methods.values():
            run(max_new_tokens=min(WARM_UP_TOKENS, tokens))
        results = interleave(methods, job.repeats, status.say)
        status.say("comparing greedy decoding ...")
        identity = greedy_identity(
            job.model, [job.prompt], job.n, job.lookahead, max_new_tokens=tokens
        )
        if identity.drafted == 0:  # `auto` did not draft here: compare at a fixed draft length
            identity = greedy_identity(
                job.model, [job.prompt], job.n, CHECKED_LENGTH, max_new_tokens=tokens
            )
    return Measurements(Speed.of(results["plain"]), Speed.of(results["speculative"]), identity)


def report(console: Console, job: DemoJob, measured: Measurements) -> None:
    """Prints the table, the speed-up and the greedy comparison."""
    dtype = dtype_name(job.model.target)
    runs = "one run each" if job.repeats == 1 else f"medians of {job.repeats} runs each"
    console.print()
    console.print(
        f"{counted(job.n, 'sample')} of at most {job.options['max_new_tokens']} tokens, "
        f"T={job.options['temperature']:g}, lookahead {job.lookahead}, {dtype} on "
        f"{job.model.target.device}; {runs}"
    )
    console.print()
    console.print(comparison(measured.plain, measured.speculative))
    console.print()
    if measured.speculative.drafted:
        console.print(f"speed-up: {measured.speedup:.2f}x", style="bold")
    else:
        console.print(NOT_DRAFTED, style="bold", soft_wrap=not console.is_terminal)
    console.print(
        f"greedy identical: {measured.identity.summary} ({dtype}, "
        f"{counted(measured.identity.rows, 'row')})"
    )
    if not measured.identity.holds and not job.exact:
        console.print(
            "In 16 bit, two tokens can tie for the highest score; float32 decides: --dtype float32."
        )


def comparison(plain: Speed, speculative: Speed) -> Any:
    """Returns a table of plain beside speculative decoding."""
    table = plain_table("", "plain", "speculative")
    for label, name, form in (
        ("tokens/s", "tokens_per_second", ".1f"),
        ("ms per token, row that ended first", "ms_per_token_first", ".2f"),
        ("ms per token, mean over rows", "ms_per_token_mean", ".2f"),
        ("ms per token, row that ended last", "ms_per_token_last", ".2f"),
        ("acceptance length", "acceptance_length", ".2f"),
        ("target passes", "target_passes", "d"),
        ("rounds", "rounds", "d"),
        ("drafted tokens", "drafted", "d"),
        ("accepted tokens", "accepted", "d"),
    ):
        table.add_row(
            label, *(format(getattr(speed, name), form) for speed in (plain, speculative))
        )
    return table


def document(job: DemoJob, shown: Result, measured: Measurements) -> dict[str, Any]:
    """Returns the JSON object of the demo."""
    model, identity = job.model, measured.identity
    return {
        "target": display_name(model.target),
        "draft": model.drafter_name
        if model.draft_model is None
        else display_name(model.draft_model),
        "dtype": dtype_name(model.target),
        "device": str(model.target.device),
        "loaded": model.loaded,
        "prompt": job.prompt,
        "n": job.n,
        "lookahead": job.lookahead,
        **job.options,
        "repeats": job.repeats,
        "plain": measured.plain.to_dict(),
        "speculative": measured.speculative.to_dict(),
        "speedup": measured.speedup,
        "greedy_identical": identity.holds,
        "greedy": vars(identity),
        "samples": [
            {"text": sample.text, "finish_reason": sample.finish_reason}
            for sample in shown[0].samples
        ],
    }
