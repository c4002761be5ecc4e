"""`shoal generate`: n samples of every prompt."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from shoal.cli.console import EXIT_INTERRUPTED, EXIT_REQUEST, Progress, hint_drafter, stderr, stdout
from shoal.cli.conversation import ChatOptions
from shoal.cli.files import read_prompts, require_writable, turn_ends, write_whole
from shoal.cli.option_groups import option_groups, output_option
from shoal.cli.options import (
    GenerateSampling,
    JsonOption,
    ModelSource,
    SamplingOptions,
    SpeculationOptions,
    parse_lookahead,
)
from shoal.cli.printed_samples import (
    document,
    follow,
    report_failures,
    sample_document,
    show_output,
)
from shoal.cli.prompt_lines import GrammarOptions, PromptLine, lines_of, merged
from shoal.cli.views import BESIDE_ROWS, Board, Events, RunningText, RunView, decoder, show_end
from shoal.config import GUIDES_PROMPTS
from shoal.errors import RequestError
from shoal.types.samples import Result, Sample
from shoal.values import counted

if TYPE_CHECKING:
    from shoal.api import Shoal
    from shoal.cli.views import Decode
    from shoal.engine.stream import Stream

FILE_WIDTH = 100


@dataclass(frozen=True)
class PromptOptions:
    """The places that prompts come from."""

    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt",
            "-p",
            metavar="TEXT",
            help="A prompt; repeatable. Without any, stdin is the prompt.",
        ),
    ] = None
    prompt_file: Annotated[
        list[Path] | None,
        typer.Option(
            "--prompt-file",
            "-f",
            metavar="FILE",
            help="A file that is one prompt, whole; repeatable.",
        ),
    ] = None

    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="Several prompts; repeatable. JSON Lines (.jsonl): texts, or objects with "
            '"prompt" and parameters of their own '
            '("n", "seed", "temperature", "max_new_tokens", ...). .txt: a prompt per paragraph.',
        ),
    ] = None

    def read(self) -> list[PromptLine]:
        """Returns the prompts, those of --prompts last; see `read_prompts` and `lines_of`."""
        texts, files = self.prompt or [], self.prompt_file or []
        lines = lines_of(self.prompts or [])
        if texts or files or not lines:
            lines = [PromptLine(text) for text in read_prompts(texts, files)] + lines
        return lines


@dataclass(frozen=True)
class OutputOptions:
    """The form of the output and its file; raises RequestError for one that cannot be written."""

    ranked: Annotated[bool, output_option("--ranked", help="Best mean log-probability first.")] = (
        False
    )
    logprobs: Annotated[
        bool, output_option("--logprobs", help="Log-probabilities of the tokens (with --json).")
    ] = False
    top_logprobs: Annotated[
        int,
        output_option(min=0, help="The most probable tokens per position, so many (with --json)."),
    ] = 0
    stream: Annotated[
        bool | None,
        output_option(
            "--stream/--no-stream",
            show_default="in a terminal",
            help="Show text as it is committed; with --json as events, one per line, into a "
            "pipe of one sample as bare text.",
        ),
    ] = None
    output: Annotated[
        Path | None,
        output_option("--output", "-o", help="Write the results to a file, whole or not at all."),
    ] = None
    json: JsonOption = False

    def __post_init__(self) -> None:
        if (self.logprobs or self.top_logprobs) and not self.json:
            raise RequestError(
                "--logprobs and --top-logprobs are part of the JSON output: add --json"
            )
        if self.stream and (self.output is not None or self.ranked):
            raise RequestError(
                "--stream shows samples while they grow: leave out --output and --ranked"
            )
        if self.output is not None:
            require_writable(self.output)

    def view(self, counts: Sequence[int]) -> Callable[[Console, Decode], RunView] | None:
        """Returns a function that makes the picture of growing rows, given the rows of each prompt.

        None stands for a line of progress instead.

        Raises:
            RequestError: several rows as bare text.
        """
        console, rows = stdout(), sum(counts)
        if self.json:
            return (lambda _console, _decode: Events(self.sample)) if self.stream else None
        if self.output is not None or not (
            console.is_terminal if self.stream is None else self.stream
        ):
            return None
        if rows == 1:
            return RunningText
        if not console.is_terminal:
            raise RequestError(
                f"--stream writes the text of one sample, and {rows} are asked for: add --json "
                f"for events"
            )
        if rows > console.height - BESIDE_ROWS:
            return None
        return lambda console, decode: Board(console, counts, decode, transient=True)

    def sample(self, sample: Sample) -> dict[str, Any]:
        """Returns a sample's JSON object."""
        return sample_document(sample, logprobs=self.logprobs, top_logprobs=bool(self.top_logprobs))


@option_groups()
def generate(
    prompts: PromptOptions,
    chats: ChatOptions,
    sampling: GenerateSampling,
    grammars: GrammarOptions,
    speculation: SpeculationOptions,
    source: ModelSource,
    output: OutputOptions,
) -> int:
    """Generate n samples of every prompt.

    Results go to stdout, progress to stderr. In a terminal samples are shown while they grow,
    accepted drafts in green. Ctrl-C stops and prints the finished samples, in a terminal the
    unfinished ones too.
    """
    lines = prompts.read()
    options = sampling.given() | {
        "lookahead": parse_lookahead(speculation.lookahead),
        "rule": speculation.rule,
    }
    grammar = grammars.given()
    options |= {} if grammar is None else {"grammar": grammar}
    merged(lines, sampling.n, options)  # a wrong value is reported before a model is loaded
    chats.before()
    run = Generation(lines, chats, sampling, output, options)
    result, interrupted = run.follow(source)
    run.deliver(result, interrupted)
    if result.stats.lossy:
        stderr().print(result.stats.lossy, style="yellow", markup=False, soft_wrap=True)
    failed = report_failures(result)
    return EXIT_INTERRUPTED if interrupted else EXIT_REQUEST if failed else 0


@dataclass(frozen=True)
class Generation:
    """A generation: the prompts, the options, and the form of the output."""

    asked: Sequence[PromptLine]
    chats: ChatOptions
    sampling: SamplingOptions
    shown: OutputOptions
    options: Mapping[str, Any]

    @property
    def counts(self) -> list[int]:
        """The number of samples of each prompt."""
        return [self.sampling.n if one.n is None else one.n for one in self.asked]

    def follow(self, source: ModelSource) -> tuple[Result, bool]:
        """Loads the models and generates, with a view of the samples on stdout or a progress line.

        Returns:
            The result, and whether Ctrl-C ended the generation.
        """
        make_view = self.shown.view(self.counts)
        hint_drafter(source, self.options["lookahead"])
        with Progress() as progress:
            model = source.load()
            progress.say(f"preparing {counted(sum(self.counts), 'sample')} ...")
            stream = self._stream(model)
            if make_view is None:
                progress.expect(rows=sum(self.counts))
                return follow(stream, progress.add)
        with make_view(stdout(), decoder(model.tokenizer)) as view:
            result, interrupted = follow(stream, view.add)
        if isinstance(view, Events):
            view.end(result, interrupted)
        elif isinstance(view, RunningText):
            show_end(result[0].samples[0])
        return result, interrupted

    def _stream(self, model: Shoal) -> Stream:
        conversation = self.chats.read(model.tokenizer, [one.text for one in self.asked])
        asked: dict[str, Any] = {
            "align": self.sampling.align,
            "exact": self.sampling.exact or False,
        }
        ends, own = turn_ends(self.chats.chat_template), self._written(model, self.options)
        lines = [replace(one, options=self._written(model, one.options)) for one in self.asked]
        options = merged(lines, self.sampling.n, own, ends, model.tokenizer)
        return model.stream(conversation, top_logprobs=self.shown.top_logprobs, **asked, **options)

    def _written(self, model: Shoal, options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns options with guides' prompts that are written as the prompts are."""
        written = dict(options)
        for name in GUIDES_PROMPTS.values():
            if isinstance(text := options.get(name), str):
                (written[name],) = self.chats.read(model.tokenizer, [text])
        return written

    def deliver(self, result: Result, interrupted: bool) -> None:
        """Prints the results or writes them to a file.

        After Ctrl-C it always prints, as a file holds whole results only. Text printed while it
        came is not printed again.
        """
        if interrupted:
            samples = [sample for output in result for sample in output.samples]
            finished = sum(sample.finish_reason != "cancelled" for sample in samples)
            stderr().print(f"interrupted: {finished} of {len(samples)} samples finished")
        make_view = self.shown.view(self.counts)
        if make_view is RunningText or (make_view is not None and self.shown.json):
            return
        if self.shown.output is None or interrupted:
            self._print(result, stdout(), cut=make_view is not None)
            return
        text = io.StringIO()
        self._print(result, Console(file=text, width=FILE_WIDTH))
        write_whole(self.shown.output, text.getvalue())

    def _print(self, result: Result, console: Console, *, cut: bool = False) -> None:
        if self.shown.json:
            written = document(result, self.asked, self.shown.sample, ranked=self.shown.ranked)
            console.file.write(json.dumps(written, allow_nan=False) + "\n")
            return
        for index, (output, one) in enumerate(zip(result, self.asked, strict=True), 1):
            first_line = next((line for line in one.text.splitlines() if line.strip()), "")
            title = (
                f"prompt {index} of {len(self.asked)}: {first_line}"
                if len(self.asked) > 1
                else None
            )
            show_output(console, output, title, self.shown.ranked, cut=cut)
