"""`shoal batch`: a file of requests -> a file of answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.console import EXIT_FAILURE, EXIT_INTERRUPTED, imports_shown, stderr, stdout
from shoal.cli.files import read_template, turn_ends
from shoal.cli.option_groups import (
    limits_option,
    machines_option,
    models_option,
    option_groups,
    speed_option,
)
from shoal.cli.options import JsonOption, ModelSource, Rule, parse_lookahead
from shoal.cli.progress import BatchProgress, displayed
from shoal.cli.serve import in_bytes, ray_cluster
from shoal.cli.serve_options import (
    ChatTemplateOption,
    CpusOption,
    GpusOption,
    KvMemoryOption,
    MaxNOption,
    MaxTokensOption,
    lookahead_option,
)
from shoal.drafting.draft import DRAFT_GUIDES, TARGET_GUIDES
from shoal.errors import InternalError, RequestError
from shoal.models.sources import name_of

if TYPE_CHECKING:
    from shoal.serve.api_errors import Json
    from shoal.serve.app import ServeConfig
    from shoal.serve.batch_lines import BatchLine
    from shoal.serve.output_file import OutputFile
    from shoal.serve.settings import Settings

    Answer = Callable[[Sequence[BatchLine], Callable[[Json], None]], None]


@dataclass(frozen=True)
class FileArguments:
    """The file of requests and the file of answers."""

    requests: Annotated[
        Path,
        typer.Argument(metavar="INPUT", help="A request per line, in JSON.", show_default=False),
    ]
    answers: Annotated[
        Path,
        typer.Argument(
            metavar="OUTPUT",
            help="An answer per line; lines that are there already are kept.",
            show_default=False,
        ),
    ]

    def __post_init__(self) -> None:
        if not self.requests.exists():  # said before torch is imported, which takes seconds
            raise RequestError(f"cannot read {str(self.requests)!r}: No such file or directory")


@dataclass(frozen=True)
class BatchNameOptions:
    """The name by which lines call the model, and the chat template."""

    name: Annotated[
        list[str] | None,
        models_option(
            "--name",
            "--served-model-name",
            help='What a line\'s "model" may be; repeatable. Without it, as --model (of a path '
            "its last part), or 'bundled'.",
        ),
    ] = None
    chat_template: ChatTemplateOption = None


@dataclass(frozen=True)
class BatchLimitOptions:
    """The limits of a line, and of the caches and the time of its samples."""

    max_n: MaxNOption = 256
    max_tokens: MaxTokensOption = 1024
    kv_memory: KvMemoryOption = None
    timeout: Annotated[
        float,
        limits_option(min=0.001, help="Seconds; samples unfinished then are written as they are."),
    ] = 3600.0


@dataclass(frozen=True)
class BatchSpeculation:
    """The draft lengths and the acceptance rule of all lines."""

    lookahead: Annotated[str, lookahead_option("A line")] = "auto"
    rule: Annotated[
        Rule,
        speed_option(
            help="How drafts are accepted. auto: coupled if a line has a seed, else rejection."
        ),
    ] = "auto"


@dataclass(frozen=True)
class WorkerOptions:
    """The workers on Ray."""

    ray: Annotated[
        bool,
        machines_option(
            "--ray", help="On Ray: workers on the cluster of RAY_ADDRESS, or on this machine."
        ),
    ] = False
    workers: Annotated[int, machines_option(min=1, help="With --ray: so many pairs.")] = 2
    cpus: CpusOption = 1.0
    gpus: GpusOption = 0.0


@option_groups(without={"tensor_parallel"})
def batch(
    files: FileArguments,
    speculation: BatchSpeculation,
    source: ModelSource,
    naming: BatchNameOptions,
    limits: BatchLimitOptions,
    machines: WorkerOptions,
    json_output: JsonOption = False,
) -> int:
    """Answer a file of requests: exactly one answer per id, as they are ready.

    A line has an "id" and the fields of the API: "prompt" or "messages", "n", "temperature",
    "seed", ... Or it is one of OpenAI's batch files, with "custom_id", "method", "url" and "body",
    and is answered as those are. The answer to a wrong line names the error; the exit code is 1 if
    every line failed. After a kill or a crash the same command goes on. docs/how-to/batch.md. In a
    checkout of shoal it needs [bold]pip install '.\\[serve]'[/], and --ray [bold]pip install
    '.\\[ray]'[/].
    """
    controller = parse_lookahead(speculation.lookahead)
    _require_packages(machines.ray)
    from shoal.serve import app, batch_lines, output_file, settings

    lines = list(batch_lines.read_lines(files.requests))
    if files.answers.exists() and files.answers.samefile(files.requests):
        raise RequestError(f"INPUT and OUTPUT are one file, {str(files.answers)!r}")
    rule = _rule(speculation.rule, lines)
    model, *aliases = naming.name or [name_of(source.model or "bundled")]
    allowed = settings.Settings(
        model=model,
        aliases=tuple(aliases),
        max_n=limits.max_n,
        max_tokens=limits.max_tokens,
        timeout=limits.timeout,
        seeds=rule == "coupled",
        chat_template=read_template(naming.chat_template),
        turn_ends=turn_ends(naming.chat_template),
    )
    config = app.ServeConfig(source.load, allowed, controller, rule, in_bytes(limits.kv_memory))
    with output_file.OutputFile(files.answers, lines, _settings(source, allowed, rule)) as output:
        _report_found(output, files.answers)
        progress = BatchProgress(len(lines), len(output.ids))
        answer = (
            partial(_answer_on_ray, config, machines)
            if machines.ray
            else partial(_answer_here, config, progress, output)
        )
        try:
            _answer(lines, allowed, output, progress, answer)
        except KeyboardInterrupt:
            text = f"interrupted: {progress}; the same command goes on from there"
            stderr().print(text, markup=False, soft_wrap=True)
            return EXIT_INTERRUPTED
    if json_output:
        print(json.dumps(progress.document()))
    else:
        stdout().print(str(progress), markup=False, soft_wrap=True)
    return EXIT_FAILURE if lines and len(output.failed) == len(lines) else 0


def _require_packages(ray: bool) -> None:
    """Imports the modules that answer requests. Raises RequestError: packages are missing."""
    try:
        with imports_shown():
            import shoal.serve.handler  # noqa: F401
    except ImportError as error:
        raise RequestError(
            f"shoal batch needs more packages ({error}): pip install "
            f"'.[{'ray' if ray else 'serve'}]'"
        ) from error
    if ray:
        ray_cluster()  # before there is an output


def _rule(rule: str, lines: Sequence[BatchLine]) -> str:
    """Returns the rule of a run: a seed in any line asks for the coupled one."""
    if rule != "auto":
        return rule
    return "coupled" if any(line.seeded for line in lines) else "rejection"


def _settings(source: ModelSource, allowed: Settings, rule: str) -> Json:
    """Returns the settings that change tokens and are known before a model is loaded.

    A drafter is left out: it changes no seed's tokens and no distribution, unless it is a guide.
    """
    from shoal import __version__
    from shoal.models.sources import bundled, identity
    from shoal.serve.batch_lines import digest

    template, guides = allowed.chat_template, dict[str, object]()
    for role, name in (("guide", source.guide), ("expert", source.expert)):
        if name == DRAFT_GUIDES:
            name = source.draft_model if source.model else str(bundled("drafter"))
        if name is not None:
            guides[role] = name if name == TARGET_GUIDES else identity(name, None)
    return {
        "version": __version__,
        "model": identity(source.model or bundled("target"), source.revision),
        "rule": rule,
        "max_tokens": allowed.max_tokens,
        "timeout": allowed.timeout,
        "chat_template": None if template is None else digest(template),
    } | guides


def _report_found(output: OutputFile, answers: Path) -> None:
    """Tells which lines of an earlier output were dropped."""
    said = []
    if output.cut:
        said.append(
            f"its last {output.cut} bytes were no whole answers, as a kill or a crash leaves "
            f"them, and were cut off"
        )
    if output.retried:
        said.append(f"{output.retried} lines that failed before are tried again")
    for text in said:
        stderr().print(f"{answers}: {text}", markup=False, soft_wrap=True)


def _answer(
    lines: Sequence[BatchLine],
    allowed: Settings,
    output: OutputFile,
    progress: BatchProgress,
    answer: Answer,
) -> None:
    """Answers the lines that have no answer yet."""
    from shoal.serve.compiled_grammars import FirstTrials
    from shoal.serve.handler import refusal

    with displayed(progress) as changed, closing(FirstTrials()) as trials:

        def done(entry: Json) -> None:
            if output.write(entry):
                progress.add(entry)
                changed()

        for line in lines:  # before weights are read, which may take minutes
            if line.id not in output.ids and (entry := refusal(line, allowed, trials)):
                done(entry)
        waiting = [line for line in lines if line.id not in output.ids]
        if waiting:
            answer(waiting, done)
    missing = [line.id for line in lines if line.id not in output.ids]
    if missing:
        raise InternalError(
            f"{len(missing)} lines have no answer, such as {missing[0]!r}: begin again"
        )


def _answer_here(
    config: ServeConfig,
    progress: BatchProgress,
    output: OutputFile,
    lines: Sequence[BatchLine],
    done: Callable[[Json], None],
) -> None:
    offline = config.offline()
    progress.loaded = offline.shoal.loaded
    output.require(offline.made)
    offline.answer(lines, done)


def _answer_on_ray(
    config: ServeConfig,
    machines: WorkerOptions,
    lines: Sequence[BatchLine],
    done: Callable[[Json], None],
) -> None:
    cluster = ray_cluster()
    from shoal.serve import pool

    pool.answer(lines, config, done, machines.workers, cluster.Share(machines.cpus, machines.gpus))
