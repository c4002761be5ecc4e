"""The sets of `shoal eval`, and the sandbox in which it executes programs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shoal.cli.console import stderr
from shoal.cli.option_groups import sampling_option
from shoal.errors import RequestError

if TYPE_CHECKING:
    from shoal.evaluation.problems import Problem
    from shoal.evaluation.sandbox import Sandbox
    from shoal.evaluation.tasks import Task


Name = Literal[
    "humaneval", "mbxp", "multipl-e", "functions", "infilling", "summarize", "jsonschema"
]

Kind = Literal["word", "space", "punctuation", "prefix-sep", "prefix-indent", "all"]


@dataclass(frozen=True)
class EvalSet:
    """An evaluation set.

    Attributes:
        tasks: the tasks that models are asked.
        problems: the problems to be judged; empty for summaries.
        documents: the documents of summaries.
        fingerprint: the fingerprint of the file; "" for the generated set.
    """

    name: str
    tasks: Sequence[Task]
    problems: Sequence[Problem] = ()
    documents: Sequence[Any] = ()
    chat: bool = False
    file: str = ""
    fingerprint: str = ""

    @property
    def scores(self) -> Sequence[str]:
        """The names of the scores in its grades, the most important first."""
        from shoal.evaluation.tasks import PASSED, ROUGE

        return (PASSED,) if self.problems else ROUGE


def digest(file: Path) -> str:
    """Returns a fingerprint of a file's content."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


@dataclass(frozen=True)
class SetOptions:
    """The evaluation set, and the way that models are asked."""

    set_: Annotated[
        Name,
        typer.Argument(
            metavar="SET",
            help="humaneval, mbxp, multipl-e, functions, infilling, summarize or jsonschema.",
        ),
    ]
    data: Annotated[
        Path | None,
        typer.Option(
            help="The set, .jsonl or .jsonl.gz; of jsonschema a directory; functions needs "
            "none. Nothing is downloaded."
        ),
    ] = None
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, help="Only the first so many problems; functions: 200 without it, 1996 at most."
        ),
    ] = None
    chat: Annotated[bool, sampling_option("--chat", help="Ask by the model's chat template.")] = (
        False
    )
    cut: Annotated[
        Kind | None,
        sampling_option(
            "--cut",
            help="Cut each solution inside a token of this class, and go on: as it is, with "
            "--align, and from where the token "
            "begins.",
        ),
    ] = None

    def read(self) -> EvalSet:
        """Reads the set.

        Raises:
            RequestError: a file is missing or wrong.
        """
        from shoal.evaluation import tasks

        if self.set_ == "functions":
            if self.data is not None:
                raise RequestError("the set functions is bundled: leave out --data")
            problems = tasks.function_problems(self.limit or tasks.FUNCTIONS)
            return EvalSet(
                self.set_, tasks.code_tasks(problems, chat=self.chat), problems, chat=self.chat
            )
        if self.data is None:
            raise RequestError(
                f"give the file of the set: shoal eval {self.set_} --data FILE; nothing is "
                f"bundled or downloaded"
            )
        if self.set_ == "infilling" and self.chat:
            raise RequestError(
                "a middle is filled in by special tokens, not in a chat: leave out --chat"
            )
        return self._read_file(self.data)

    def _read_file(self, data: Path) -> EvalSet:
        from shoal.evaluation import problems, tasks

        chat = self.chat
        file: dict[str, Any] = {"chat": chat, "file": data.name}
        if self.set_ == "summarize":
            documents = tasks.read_documents(data)[: self.limit]
            asked = tasks.summary_tasks(documents, chat=chat)
            return EvalSet(self.set_, asked, documents=documents, fingerprint=digest(data), **file)
        readers = {"mbxp": problems.read_mbxp, "multipl-e": problems.read_multipl_e}
        found = readers.get(self.set_, problems.read_humaneval)(data)[: self.limit]
        asked = (
            tasks.infilling_tasks(found)
            if self.set_ == "infilling"
            else tasks.code_tasks(found, chat=chat)
        )
        return EvalSet(self.set_, asked, found, fingerprint=digest(data), **file)


PAGE = "docs/explanation/sandbox.md"
Isolation = Literal["auto", "bubblewrap", "namespaces", "limits"]


@dataclass(frozen=True)
class SandboxOptions:
    """The sandbox, and the number of programs executed at a time."""

    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Programs executed at a time.", show_default="the number of cores"
        ),
    ] = None
    sandbox: Annotated[
        Isolation,
        typer.Option(
            help="What isolates programs; auto: the strongest that keeps them from files and "
            "network here, or none. "
            "limits leaves the network open."
        ),
    ] = "auto"

    @contextmanager
    def open(self) -> Iterator[Sandbox]:
        """Opens a sandbox, and describes it on stderr before the first program runs."""
        from shoal.evaluation.sandbox import Sandbox

        with Sandbox(self.sandbox) as sandbox:
            first, *more = sandbox.essentials
            for line in (
                f"programs are executed in: {first}",
                *(f"  {line}" for line in more),
                f"  what it prevents, and how: {PAGE}",
            ):
                stderr().print(line, markup=False, highlight=False, soft_wrap=True)
            yield sandbox
