"""The output of a chat: answers on stdout, all else on stderr."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from shoal.cli.console import Progress, printable, stderr, stdout
from shoal.cli.printed_samples import sample_document
from shoal.cli.views import BESIDE_ROWS, Board, Unseen
from shoal.values import counted

if TYPE_CHECKING:
    from shoal.cli.conversation import Candidate
    from shoal.cli.views import Decode, RunView
    from shoal.types.samples import Increment, Result, Sample
    from shoal.types.stats import Stats

    Split = Callable[[str, bool], tuple[str, str]]
    """A function that splits the text of one sample into reasoning and other text.

    It takes the text piece by piece, each with whether it is the last.
    """

LIMITS = {"length": "cut by max_new_tokens or the context", "time": "cut by the time budget"}
"""The notes about answers that did not end by themselves, by finish reason."""


@dataclass(frozen=True)
class MessageAnswers:
    """The answers to one message.

    Attributes:
        message: the message.
        first: the number of the first answer among all of its message, from 1.
        samples: the samples, each with its answer.
        interrupted: Ctrl-C ended the answers.
    """

    message: str
    first: int
    samples: Sequence[tuple[Sample, Candidate]]
    result: Result
    interrupted: bool


class ChatView(Protocol):
    """A way to show answers."""

    def growing(self, n: int, decode: Decode, split: Split) -> RunView:
        """Returns the view of n answers while they come."""

    def answered(self, answers: MessageAnswers) -> None:
        """Shows the parts of the answers that the view did not show."""

    def error(self, kind: str, text: str) -> None:
        """Shows why there is no answer."""


class AnswersLine(Progress):
    """A line of progress on stderr, about n answers."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self._n = n

    def __enter__(self) -> AnswersLine:
        super().__enter__()
        self.expect(rows=self._n)
        return self


class RunningAnswer(Unseen):
    """An answer as it comes: in a terminal with its reasoning, which is dim, and without words
    that are cut by the edge, unless the terminal knows no escape codes."""

    def __init__(self, console: Console, split: Split) -> None:
        self._console, self._split = console, split
        self._reasoned, self._line_begins = False, True
        self._column, self._word = 0, ""

    def __exit__(self, *_exception: object) -> None:
        if not self._line_begins:
            self._write("\n")

    def add(self, increment: Increment) -> None:
        """Prints the text that a round added."""
        reasoning, text = self._split(increment.text, increment.finish_reason is not None)
        if reasoning and self._console.is_terminal:
            self._write(reasoning, "dim")
            self._reasoned = True
        if text:
            self._write("\n\n" if self._reasoned else "")
            self._write(text)
            self._reasoned = False

    def _write(self, text: str, style: str = "") -> None:
        if text:
            self._line_begins = text.endswith("\n")
            if self._console.is_dumb_terminal:
                text = printable(text)
            elif self._console.is_terminal:
                whole = self._wrapped(printable(text))
                text = f"\x1b[2m{whole}\x1b[0m" if style == "dim" else whole
            self._console.file.write(text)
            self._console.file.flush()

    def _wrapped(self, text: str) -> str:
        """Returns text with line breaks between words.

        A word that has begun on a line and does not fit on it is erased and begins the next line.
        """
        pieces, width = [], self._console.width
        if self._column > width:  # the window has become smaller, and its lines were broken anew
            self._column, self._word = self._column % width, ""
        for character in text.expandtabs(4):
            cells = cell_len(character)
            if character == "\n":
                self._column, self._word = 0, ""
            elif self._column + cells > width:
                start = self._column - cell_len(self._word)
                self._word = self._word if start and character != " " else ""
                pieces.append(f"\x1b[{start + 1}G\x1b[K\n{self._word}" if self._word else "\n")
                self._column = cell_len(self._word)
                if character == " ":
                    continue
            if character != "\n":
                self._column += cells
                self._word = "" if character == " " or cells > 1 else self._word + character
            pieces.append(character)
        return "".join(pieces)


class TextView:
    """A view of answers as text: one as it comes, several under numbers once they have ended.

    Args:
        quiet: leave out counts and times.
    """

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet

    def growing(self, n: int, decode: Decode, split: Split) -> RunView:
        """Returns a view: running text for one answer; in a terminal several side by side."""
        console = stdout()
        if n == 1:
            return RunningAnswer(console, split)
        if console.is_terminal and n <= console.height - BESIDE_ROWS:
            return Board(console, [n], decode, transient=True)
        return AnswersLine(n)

    def answered(self, answers: MessageAnswers) -> None:
        """Prints several answers, and the counts."""
        notes = []
        if len(answers.result[0].samples) > 1:
            for number, (sample, answer) in enumerate(answers.samples, answers.first):
                show_answer(stdout(), number, sample, answer)
            if len(answers.samples) > 1:
                notes.append(f"answer {answers.first} is taken, /choose K takes another")
        elif (reason := answers.samples[0][0].finish_reason) in LIMITS:
            notes.append(LIMITS[reason])
        if answers.interrupted:
            notes.append("interrupted")
        if not self._quiet:
            notes.insert(0, counts(answers.result.stats, len(answers.result[0].prompt_ids)))
        if notes:
            say(f"# {'; '.join(notes)}")
        if answers.result.stats.lossy:
            say(answers.result.stats.lossy, "yellow")

    def error(self, kind: str, text: str) -> None:
        """Prints the error on stderr."""
        say(" ".join(f"error: {text}".split()), "bold red")


class JsonView:
    """A view that writes each message as a line on stdout, an object."""

    def growing(self, n: int, decode: Decode, split: Split) -> RunView:
        """Returns a view that shows nothing."""
        return Unseen()

    def answered(self, answers: MessageAnswers) -> None:
        """Prints all answers, and the statistics."""
        self._write(
            {
                "prompt": answers.message,
                "prompt_tokens": len(answers.result[0].prompt_ids),
                "samples": [_document(sample, answer) for sample, answer in answers.samples],
                "interrupted": answers.interrupted,
                "stats": answers.result.stats.to_dict(),
            }
        )

    def error(self, kind: str, text: str) -> None:
        """Prints the error as other commands do."""
        TextView(quiet=True).error(kind, text)
        self._write({"error": {"type": kind, "message": " ".join(text.split())}})

    @staticmethod
    def _write(value: dict[str, Any]) -> None:
        file = stdout().file
        file.write(json.dumps(value, allow_nan=False) + "\n")
        file.flush()


def _document(sample: Sample, answer: Candidate) -> dict[str, Any]:
    return (
        sample_document(sample)
        | {"text": answer.text}
        | ({"reasoning": answer.reasoning} if answer.reasoning else {})
    )


def show_answer(console: Console, number: int, sample: Sample, answer: Candidate) -> None:
    """Prints one of several answers, under its number; in a terminal with its reasoning."""
    header = (
        f"# answer {number}: {sample.finish_reason}, {counted(len(sample.token_ids), 'token')}, "
        f"mean logprob {sample.mean_logprob:.3f}"
    )
    console.print(Text(header, style="bold"), soft_wrap=True)
    if not console.is_terminal:
        console.file.write(f"{answer.text.rstrip()}\n\n")
        return
    if answer.reasoning:
        console.print(Text(f"{printable(answer.reasoning)}\n", style="dim"))
    console.print(Text(f"{printable(answer.text).rstrip()}\n"))


def counts(stats: Stats, prompt_tokens: int = 0) -> str:
    """Returns counts and times in a line, and the prompt's tokens that were not computed again."""
    line = (
        f"{counted(stats.committed, 'token')}, {stats.seconds:.2f} s, "
        f"{stats.tokens_per_second:.0f} tokens/s, acceptance length {stats.acceptance_length:.2f}"
    )
    if stats.restored_tokens and prompt_tokens:
        line += f", {stats.restored_tokens} of {prompt_tokens} prompt tokens kept from before"
    return line


def say(text: str, style: str = "dim") -> None:
    """Prints a line that is no answer, on stderr."""
    console = stderr()
    console.print(Text(text, style=style), soft_wrap=not console.is_terminal)
