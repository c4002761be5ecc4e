"""The commands, with help pages for readers.

The kind of an option's value is named as users know it, a flag has none, and paragraphs are broken
where the terminal ends, not where the docstring does.
"""

from __future__ import annotations

from inspect import cleandoc
from pathlib import Path
from typing import Any, get_args

from typer.core import TyperCommand, TyperGroup, TyperOption

KINDS = {bool: "", str: "TEXT", Path: "PATH"}
"""The words that stand for a type's name; numbers keep theirs, which names their range."""


class Command(TyperCommand):
    """A command."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.help = None if self.help is None else unbroken(self.help)

    def get_params(self, ctx: Any) -> list[Any]:
        """Returns the command's options, the one for help included, each with a `metavar`."""
        return with_kinds(super().get_params(ctx))


class Group(TyperGroup):
    """A command of several commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Returns the group's options, the one for help included, each with a `metavar`."""
        return with_kinds(super().get_params(ctx))


def unbroken(text: str) -> str:
    """Joins the lines of each paragraph."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in cleandoc(text).split("\n\n"))


def with_kinds(parameters: list[Any]) -> list[Any]:
    """Returns the parameters, each option with a `metavar`.

    An option without one gets the word for its type; a repeatable option gets the word for one of
    its values.
    """
    for option in parameters:
        if isinstance(option, TyperOption) and option.metavar is None:
            annotation: Any = option.type_descriptor.annotation
            option.metavar = KINDS.get(next(iter(get_args(annotation)), annotation))
    return parameters
