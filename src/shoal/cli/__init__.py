"""The command line of shoal.

Its commands are `shoal demo`, `shoal generate`, `shoal chat`, `shoal complete`, `shoal serve`,
`shoal batch`, `shoal check`, `shoal bench`, `shoal eval`, `shoal index`, `shoal train`.

stdout carries results only; progress and errors go to stderr. Exit codes: 0 fine, 2 the request or
the model cannot be served (the user can mend it), 1 our failure, 130 interrupted. torch and
transformers are imported inside commands.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer
from typer import TyperException

from shoal.cli import (
    batch,
    bench,
    chat,
    check,
    complete,
    demo,
    evaluate,
    generate,
    index,
    serve,
    train,
)
from shoal.cli.console import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_REQUEST
from shoal.cli.option_groups import ReadableCommand, ReadableGroup
from shoal.errors import ModelError, RequestError
from shoal.models.head_start import spare_imports

app = typer.Typer(
    name="shoal",
    cls=ReadableGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=ReadableCommand)(demo.demo)
app.command(cls=ReadableCommand)(generate.generate)
app.command(cls=ReadableCommand)(chat.chat)
app.command(cls=ReadableCommand)(complete.complete)
app.command(cls=ReadableCommand)(serve.serve)
app.command(cls=ReadableCommand)(batch.batch)
app.command(cls=ReadableCommand)(check.check)
app.command(cls=ReadableCommand)(bench.bench)
app.command("eval", cls=ReadableCommand)(evaluate.evaluate)
app.command(cls=ReadableCommand)(index.index)
app.add_typer(train.app, name="train")


def _print_version(wanted: bool) -> None:
    if wanted:
        from shoal import __version__

        print(f"shoal {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def shoal(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Many samples at once from open language models, by exact batched speculative sampling.

    Start with [bold]shoal demo[/]: it needs no network, no account and no GPU.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code; every error becomes one line on stderr."""
    try:
        code = app(list(arguments), prog_name="shoal", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:  # the reader of stdout left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except TyperException as error:
        return _report("UsageError", _usage(error), arguments, EXIT_REQUEST)
    except (RequestError, ModelError) as error:
        return _report(type(error).__name__, str(error), arguments, EXIT_REQUEST)
    except Exception as error:
        hint = "" if _debug() else " (run again with SHOAL_DEBUG=1 for the traceback)"
        return _report(type(error).__name__, f"{error}{hint}", arguments, EXIT_FAILURE)


BRACES = str.maketrans("", "", "{}")  # around arguments
NO_COMMAND = re.compile(r"No such command '(.*?)'\..*")


def _usage(error: TyperException) -> str:
    """Returns the message of a wrong command line, in words of ours where typer's are none.

    An argument's name is no option, and a group without one of its commands has no message at all.
    """
    name, context = getattr(error, "option_name", ""), getattr(error, "ctx", None)
    wanted = name.lstrip("-").upper()
    for one in context.command.params if context is not None and name else ():
        shown = one.metavar or str(one.name).upper()
        if shown == wanted and one.param_type_name == "argument":
            return f"{name} is no option: give {wanted} itself, without a name"
    message = str(error.format_message())
    if context is not None and (unknown := NO_COMMAND.fullmatch(message)):
        names = list(context.command.commands)
        near = [name for name in names if name.startswith(unknown[1])] or difflib.get_close_matches(
            unknown[1], names, n=1, cutoff=0.5
        )
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
        return f"there is no command {unknown[1]!r}; {hint}"
    if context is not None and message.startswith("Missing argument"):
        usage = " ".join(context.command.collect_usage_pieces(context)).translate(BRACES)
        message = f"{message.rstrip('.')}; usage: {context.command_path} {usage}"
    for theirs, ours in ((": Value error, ", ": "), (": Input should be ", ": it must be ")):
        message = message.replace(theirs, ours, 1)
    return message or "a command is missing, see the list above"


def main() -> None:
    """Runs the command line of `shoal` and `python -m shoal`."""
    if (
        sys.getfilesystemencoding() == "ascii"
    ):  # LC_ALL=C and PYTHONUTF8=0: é would be two bytes that stand for nothing
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    for name, mode in (
        ("stdin", "r"),
        ("stdout", "w"),
        ("stderr", "w"),
    ):  # None where the caller closed it
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    spare_imports()
    sys.exit(run(sys.argv[1:]))


def _debug() -> bool:
    return os.environ.get("SHOAL_DEBUG", "") not in ("", "0")


def _report(kind: str, message: str, arguments: Sequence[str], code: int) -> int:
    """Reports an error: a line on stderr and, under --json, an object on stdout."""
    from shoal.cli.console import stderr

    line = " ".join(message.split())
    if _debug():
        traceback.print_exc()
    name = f"{kind}: " if code == EXIT_FAILURE else ""
    stderr().print(
        f"error: {name}{line}", style="bold red", markup=False, highlight=False, soft_wrap=True
    )
    if "--json" in arguments:
        print(json.dumps({"error": {"type": kind, "message": line}}))
    return code
