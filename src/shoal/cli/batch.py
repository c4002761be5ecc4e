"""`shoal batch`: a file of requests -> a file of answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.batch_progress import BatchProgress, displayed
from shoal.cli.console import stderr, stdout
from shoal.cli.options import (
    MODELS,
    SPEED,
    AttentionOption,
    CompileOption,
    DeviceOption,
    DraftOption,
    DraftRevisionOption,
    DtypeOption,
    JsonOption,
    LocalOption,
    MaxBatchOption,
    ModelOption,
    QuantizeOption,
    RevisionOption,
    Rule,
    Source,
    StrictOption,
    TrustOption,
    parse_lookahead,
)
from shoal.cli.serve import (
    LIMITS,
    MACHINES,
    ChatTemplateOption,
    CpusOption,
    GpusOption,
    KvMemoryOption,
    MaxNOption,
    MaxTokensOption,
    in_bytes,
    ray_cluster,
    read_template,
)
from shoal.errors import InternalError, RequestError

if TYPE_CHECKING:
    from shoal.serve.api_formats import Json
    from shoal.serve.batch_lines import BatchLine
    from shoal.serve.output_file import OutputFile
    from shoal.serve.serve_config import ServeConfig
    from shoal.serve.settings import Settings

    Answer = Callable[[Sequence[BatchLine], Callable[[Json], None]], None]

EXIT_FAILURE, EXIT_INTERRUPTED = 1, 130


def batch(
    requests: Annotated[Path, typer.Argument(metavar="INPUT", help="A request per line, in JSON.", show_default=False)],
    answers: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="An answer per line; what is there already is kept.", show_default=False)
    ],
    model: ModelOption = None,
    draft: DraftOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    revision: RevisionOption = None,
    draft_revision: DraftRevisionOption = None,
    local_files_only: LocalOption = False,
    trust_remote_code: TrustOption = False,
    quantize: QuantizeOption = "off",
    name: Annotated[
        str | None,
        typer.Option(help="What a line's \"model\" may say. Without it, as --model, or 'bundled'.", rich_help_panel=MODELS),
    ] = None,
    chat_template: ChatTemplateOption = None,
    max_n: MaxNOption = 64,
    max_tokens: MaxTokensOption = 1024,
    kv_memory: KvMemoryOption = None,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds; samples unfinished then are written as they are.", rich_help_panel=LIMITS)
    ] = 3600.0,
    lookahead: Annotated[
        str,
        typer.Option(
            "--lookahead", "--k", "-k", metavar="LENGTH",
            help="Tokens proposed per row and round: auto, a number, off, bass or heuristic. A line may ask for less.",
            rich_help_panel=SPEED,
        ),
    ] = "auto",
    rule: Annotated[
        Rule, typer.Option(help="How drafts are judged. auto: coupled if any line has a seed.", rich_help_panel=SPEED)
    ] = "auto",
    attention: AttentionOption = "auto",
    max_batch: MaxBatchOption = 16,
    compile_passes: CompileOption = "auto",
    strict: StrictOption = False,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray", help="On Ray: workers on the cluster of RAY_ADDRESS, or on this machine.", rich_help_panel=MACHINES
        ),
    ] = False,
    workers: Annotated[int, typer.Option(min=1, help="With --ray: so many pairs.", rich_help_panel=MACHINES)] = 2,
    cpus: CpusOption = 1.0,
    gpus: GpusOption = 0.0,
    json_output: JsonOption = False,
) -> int:  # fmt: skip
    """Answer a file of requests: exactly one answer per id, as they are ready.

    A line has an "id" and the fields of the API: "prompt" or "messages", "n", "temperature", "seed", ... Or it is
    one of OpenAI's batch files, with "custom_id", "method", "url" and "body", and is answered as those are.
    What is wrong with a line is its answer; the exit code is 1 if every line failed. After a kill or a crash the
    same command goes on. docs/how-to/batch.md.
    In a checkout of shoal it needs [bold]pip install '.\\[serve]'[/], and --ray [bold]pip install '.\\[ray]'[/].
    """
    source = Source(
        model, draft, dtype, device, revision, draft_revision, attention, max_batch, trust_remote_code, local_files_only,
        compile_passes, quantize, strict,
    )  # fmt: skip
    controller = parse_lookahead(lookahead)
    source.quieten_transformers()
    try:
        from shoal.serve import batch_lines, output_file, serve_config, settings
    except ImportError as error:
        raise RequestError(f"shoal batch needs more packages ({error}): pip install '.[serve]'") from error
    asked = list(batch_lines.read_lines(requests))
    if answers.exists() and answers.samefile(requests):
        raise RequestError(f"INPUT and OUTPUT are one file, {str(answers)!r}")
    if rule == "auto":
        rule = "coupled" if any(line.seeded for line in asked) else "rejection"
    allowed = settings.Settings(
        model=name or model or "bundled", max_n=max_n, max_tokens=max_tokens, timeout=timeout, seeds=rule == "coupled",
        chat_template=read_template(chat_template),
    )  # fmt: skip
    served = serve_config.ServeConfig(source.load, allowed, controller, rule, in_bytes(kv_memory))
    with output_file.OutputFile(answers, asked, _made_by(source, allowed, rule)) as book:
        _tell_of_cut(book, answers)
        progress = BatchProgress(len(asked), len(book.ids))
        try:
            _answer(
                asked,
                book,
                progress,
                partial(_over_ray, served, workers, cpus, gpus) if ray else partial(_here, served, progress, book),
            )
        except KeyboardInterrupt:
            stderr().print(f"interrupted: {progress}; the same command goes on from there", markup=False, soft_wrap=True)
            return EXIT_INTERRUPTED
    if json_output:
        print(json.dumps(progress.document()))
    else:
        stdout().print(str(progress), markup=False, soft_wrap=True)
    return EXIT_FAILURE if asked and len(book.failed) == len(asked) else 0


def _made_by(source: Source, allowed: Settings, rule: str) -> Json:
    """What changes tokens and is known before a model is loaded; a drafter changes neither a seed's tokens nor the law."""
    from shoal import __version__
    from shoal.models.loading import bundled
    from shoal.serve.batch_lines import digest
    from shoal.serve.model_identity import identity

    template = allowed.chat_template
    return {
        "version": __version__, "model": identity(source.model or bundled("target"), source.revision), "rule": rule,
        "max_tokens": allowed.max_tokens, "timeout": allowed.timeout,
        "chat_template": None if template is None else digest(template),
    }  # fmt: skip


def _tell_of_cut(book: OutputFile, answers: Path) -> None:
    if book.cut:
        said = (
            f"{answers}: its last {book.cut} bytes were no whole answers, as a kill or a crash leaves them, and were cut off"
        )
        stderr().print(said, markup=False, soft_wrap=True)


def _answer(asked: Sequence[BatchLine], ledger: OutputFile, progress: BatchProgress, answer: Answer) -> None:
    """Answers what has no answer yet."""
    waiting = [line for line in asked if line.id not in ledger.ids]
    with displayed(progress) as changed:

        def done(entry: Json) -> None:
            if ledger.write(entry):
                progress.add(entry)
                changed()

        if waiting:
            answer(waiting, done)
    missing = [line.id for line in waiting if line.id not in ledger.ids]
    if missing:
        raise InternalError(f"{len(missing)} lines have no answer, such as {missing[0]!r}: begin again")


def _here(
    config: ServeConfig, progress: BatchProgress, book: OutputFile, lines: Sequence[BatchLine], done: Callable[[Json], None]
) -> None:
    offline = config.offline()
    progress.loaded = offline.shoal.loaded
    book.require(offline.made)
    offline.answer(lines, done)


def _over_ray(
    config: ServeConfig, workers: int, cpus: float, gpus: float, lines: Sequence[BatchLine], done: Callable[[Json], None]
) -> None:
    cluster = ray_cluster()
    from shoal.serve import pool

    pool.answer(lines, config, done, workers, cluster.Share(cpus, gpus))
