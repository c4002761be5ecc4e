"""`shoal check`: can this pair be used here, and does it pay?"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from shoal.bench.machine import QuietGate
from shoal.cli import check_drafters, check_model, check_pair, check_prompts
from shoal.cli.check_case import LEAST_TOKENS, SECONDS, CheckCase, Effort
from shoal.cli.check_prompts import (
    BUILT_IN,
    CODE,
    CheckResult,
    PromptSet,
    built_in,
    measured_on,
    overall,
)
from shoal.cli.console import StatusLine, stderr, stdout
from shoal.cli.files import listed_prompts, read_text
from shoal.cli.option_groups import option_groups, sampling_option, speed_option
from shoal.cli.options import PROMPTS_HELP, JsonOption, ModelSource, SamplesOption
from shoal.values import require_text

EXIT_FAILED_CHECK = 2
INDENT = 24  # columns before a figure
MOST_TOKENS, MOST_REPEATS = 64, 3  # of a row, and of timed runs, if there is time for them
GivenPrompts = tuple[str, list[str]]
"""The place that prompts come from, and the prompts."""
TIMED = {"costs", "choice"}
"""The results that seconds decide."""
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


@dataclass(frozen=True)
class CheckPromptOptions:
    """The prompts to measure on."""

    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt",
            "-p",
            metavar="TEXT",
            help="Prompt to measure on; repeatable. Without any and without --prompts, built-in "
            "code, prose and chat.",
        ),
    ] = None
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help=f"Prompts to measure on, {check_prompts.MOST} at most, evenly spaced: "
            f"{PROMPTS_HELP} Repeatable."
        ),
    ] = None

    def read(self) -> GivenPrompts:
        """Returns the prompts, and the place that they come from.

        Raises:
            RequestError: a prompt is empty or no text, or a file cannot be read.
        """
        texts, files = self.prompt or [], self.prompts or []
        for text in texts:
            require_text(text, "the prompt")
        named = ["--prompt"] * bool(texts) + list(map(str, files))
        return f"from {' and '.join(named)}", [*texts, *listed_prompts(files)]


@dataclass(frozen=True)
class MeasureOptions:
    """The rows, length and draft length of the runs that are measured."""

    n: SamplesOption = 8
    max_new_tokens: Annotated[
        int | None,
        sampling_option(
            "--max-new-tokens",
            help=f"Tokens per sample. Without it {MOST_TOKENS}, or what a minute allows.",
        ),
    ] = None
    k: Annotated[
        int, speed_option("--k", "-k", min=1, help="Draft length at which acceptance is measured.")
    ] = 4


@option_groups(without={"compile", "guide", "expert", "max_batch", "tensor_parallel"})
def check(
    prompts: CheckPromptOptions,
    measuring: MeasureOptions,
    source: ModelSource,
    repeats: Annotated[
        int | None,
        speed_option(
            min=1,
            help=f"Timed runs of each draft length. Without it {MOST_REPEATS}, or what a minute "
            "allows.",
        ),
    ] = None,
    trim: Annotated[
        int | None,
        speed_option(
            "--trim",
            min=16,
            help="Write beside the drafter which K tokens its head is to keep: those used most.",
        ),
    ] = None,
    trim_text: Annotated[
        list[Path] | None,
        speed_option(help="Texts to count them in, instead of the target's own. Repeatable."),
    ] = None,
    json_output: JsonOption = False,
) -> int:
    """Examine a model or a pair: does it load, fit, agree, and pay?

    Without --draft each drafter that needs no model is measured, and the one that pays named.
    Acceptance and speed-up depend on the text: give your own prompts. Predicted speed-ups stand
    beside measured ones, against plain decoding and against Transformers' batched generate. Every
    check says ok, warn or fail with a figure and, where needed, a remedy; exit code 2 if one
    failed.
    """
    source = replace(source, max_batch=max(16, measuring.n))
    given = prompts.read()
    trimming = None if trim is None else (trim, [read_text(path) for path in trim_text or []])
    console = stdout()
    results: list[CheckResult] = []
    with StatusLine() as status:
        for result in checks_of(source, given, measuring, repeats, status.say, trimming):
            status.clear()
            said = any(result.on in earlier.whole for earlier in results)
            show(stderr() if json_output else console, result, said)
            results.append(result)
    if json_output:
        print(
            json.dumps(
                {"verdict": overall(results), "checks": [result.to_dict() for result in results]}
            )
        )
    else:
        console.print(Text(f"verdict: {overall(results)}", style=STYLES[overall(results)]))
    return EXIT_FAILED_CHECK if overall(results) == "fail" else 0


def checks_of(
    source: ModelSource,
    given: GivenPrompts,
    measuring: MeasureOptions,
    repeats: int | None,
    say: Callable[[str], None],
    trimming: tuple[int, list[str]] | None = None,
) -> Iterator[CheckResult]:
    """Yields all results in order; those about drafting only for a pair that fits.

    The last one, if there is any, names the processes that disturbed its times.

    Args:
        trimming: the number of tokens to keep, and the texts to count tokens in.
    """
    timed = False
    with QuietGate().watch() as seen:
        for result in _checks(source, given, measuring, repeats, say, trimming):
            timed = timed or result.name in TIMED
            yield result
    if timed and seen.busy:
        figure = f"other processes were busy meanwhile: {', '.join(map(str, seen.busy[:3]))}"
        advice = "seconds and ratios mislead: measure again while nothing else runs"
        yield CheckResult("disturbed", "warn", figure, advice)


def _checks(
    source: ModelSource,
    given: GivenPrompts,
    measuring: MeasureOptions,
    repeats: int | None,
    say: Callable[[str], None],
    trimming: tuple[int, list[str]] | None,
) -> Iterator[CheckResult]:
    say("loading ...")
    model, results = check_model.load(source)
    yield from results
    if model is None:
        return
    sets = prompt_sets(given, model.tokenizer, source.model is None)
    case = CheckCase(
        model,
        sets,
        measuring.n,
        max_new_tokens=measuring.max_new_tokens or MOST_TOKENS,
        k=measuring.k,
        repeats=repeats or MOST_REPEATS,
        say=say,
    )
    yield from check_model.turn_end(model)
    yield check_model.self_check(model.target, "target")
    yield check_model.family(model.target)
    yield check_model.executors(model.target, "target", measuring.k)
    if model.draft_model is not None:
        yield check_model.self_check(model.draft_model, "drafter")
    context = check_model.context(case)
    yield check_prompts.check_prompts(sets, source.model is None)
    yield measured_on(context, *sets)
    yield check_model.number_format(model.target)
    yield measured_on(check_model.memory(case), *sets)
    fixed = measuring.max_new_tokens, repeats
    if context.status != "fail":
        if source.draft is None:
            yield from check_drafters.published(case)
            some = replace(case, sets=[one.first() for one in sets])
            some, told = affordable(some, fixed, partial(check_drafters.runs_of, case))
            yield from told
            yield from check_drafters.compared_drafters(some)
        if model.drafter_name is not None:
            yield from _drafting_checks(case.drafted(), fixed)
    if trimming is not None:
        yield check_pair.trim(case, *trimming)


def affordable(
    case: CheckCase, fixed: tuple[int | None, int | None], runs: Callable[[Effort], int]
) -> tuple[CheckCase, list[CheckResult]]:
    """Returns a case that is measured in a minute, and a result if it has less work.

    Args:
        case: the case with all work.
        fixed: the tokens and repeats that the user asks for, which stay; None = any.
        runs: see `Effort.within`.
    """
    tokens, repeats = fixed
    if tokens is not None and repeats is not None:
        return case, []
    most = case.effort
    passes = SECONDS / case.seconds_of_round
    less = most.within(passes, runs, LEAST_TOKENS if tokens is None else tokens)
    if repeats is not None:
        less = replace(less, repeats=repeats)
    if less == most:
        return case, []
    case = case.with_effort(less)
    figure = (
        f"as a minute allows: prompts: {len(case.prompts)}, tokens of a row: {less.tokens}, timed "
        f"runs: {less.repeats}"
    )
    advice = "steadier figures: --max-new-tokens 64 --repeats 3, with --prompts of your own"
    return case, [CheckResult("work", "ok", figure, advice, vars(less))]


def _drafting_checks(
    case: CheckCase, fixed: tuple[int | None, int | None]
) -> Iterator[CheckResult]:
    if not case.sets:
        advice = "measure on shorter prompts, or take a drafter with a longer context"
        yield CheckResult(
            "acceptance",
            "skip",
            "the drafter holds none of the prompts, so nothing is drafted",
            advice,
        )
        return
    case, told = affordable(case, fixed, check_pair.runs_of)
    yield from told
    checks = (
        check_pair.acceptance,
        check_pair.vocabulary,
        check_pair.costs,
        check_pair.speed_up,
        check_pair.identity,
    )
    for check_of in checks:
        yield from check_of(case)


def prompt_sets(given: GivenPrompts, tokenizer: Any, bundled: bool) -> Sequence[PromptSet]:
    """Returns the user's prompts, or built-in ones if there are none.

    The bundled pair gets Python code, another pair gets prompts of several kinds.
    """
    source, texts = given
    if texts:
        return [PromptSet.of("", source, texts, tokenizer)]
    return built_in([CODE] if bundled else list(BUILT_IN), tokenizer)


def show(console: Console, result: CheckResult, said: bool) -> None:
    """Prints the status, name and figure, and the advice under the figure.

    Args:
        said: the prompts that it was measured on are printed above already.
    """
    style = STYLES[result.status]
    width = max(20, console.width - INDENT)
    first, *more = textwrap.wrap(result.figure if said else result.whole, width)
    console.print(
        Text.assemble((f"{result.status:5}", style), (f"{result.name:{INDENT - 5}}", "bold"), first)
    )
    for line in more:
        console.print(" " * INDENT + line, markup=False)
    for line in textwrap.wrap(f"-> {result.advice}", width) if result.advice else []:
        console.print(" " * INDENT + line, style=style, markup=False)
