"""The sandbox in which `shoal eval` executes programs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shoal.cli.console import stderr

if TYPE_CHECKING:
    from shoal.evaluation.sandbox import Sandbox

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
