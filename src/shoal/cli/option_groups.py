"""The option groups: dataclasses that a command takes, each field an option on the command line.

On the help pages the kind of an option's value is named as users know it, a flag has none, and
paragraphs are broken where the terminal ends, not where the docstring does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import is_dataclass
from functools import partial
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.models import ParameterInfo

from shoal.config import PARAMETERS

MODELS, ADDRESS, TLS = "Models", "Address and access", "TLS"
LIMITS, SAMPLING = "Limits", "Sampling and limits"
SPEED, MACHINES, OUTPUT = "Speculation and speed", "More than one process", "Output"
PANELS = (None, MODELS, ADDRESS, TLS, LIMITS, SAMPLING, SPEED, MACHINES, OUTPUT)
"""The panels of the help pages, in order; None is the one without a name."""

(
    models_option,
    address_option,
    tls_option,
    limits_option,
    sampling_option,
    speed_option,
    machines_option,
    output_option,
) = (partial(typer.Option, rich_help_panel=panel) for panel in PANELS[1:])
"""`typer.Option` on a panel."""


def parameter_option(name: str, **settings: Any) -> Any:
    """Returns the option of a parameter of `shoal.Sampling`, with the help of its declaration."""
    return sampling_option(help=PARAMETERS[name].help, **settings)


Value = TypeVar("Value")
Command = Callable[..., Value]


def option_groups(*, without: Collection[str] = ()) -> Callable[[Command[Value]], Command[Value]]:
    """Makes the fields of a command's dataclass parameters parameters for typer.

    typer reads signatures. Options are ordered by panel and, within a panel, by parameter and
    field.

    Args:
        without: fields that are no options of this command and keep their defaults.
    """

    def decorate(command: Command[Value]) -> Command[Value]:
        groups: dict[str, Callable[..., Any]] = {
            name: kind
            for name, kind in get_type_hints(command).items()
            if isinstance(kind, type) and is_dataclass(kind)
        }
        fields: dict[str, list[str]] = {}
        options = []
        for parameter in _parameters(command):
            parameters = (
                _parameters(groups[parameter.name]) if parameter.name in groups else [parameter]
            )
            parameters = [option for option in parameters if option.name not in without]
            fields[parameter.name] = [option.name for option in parameters]
            options += parameters

        def flat(**values: Any) -> Value:
            built = {
                name: kind(**{field: values.pop(field) for field in fields[name]})
                for name, kind in groups.items()
            }
            return command(**values, **built)

        options.sort(key=_panel)
        flat.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        flat.__annotations__ = {option.name: option.annotation for option in options}
        flat.__name__, flat.__doc__ = command.__name__, command.__doc__
        return flat

    return decorate


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Returns the parameters of a function or class as keywords, with resolved annotations."""
    hints = get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    return [
        parameter.replace(
            kind=parameter.KEYWORD_ONLY, annotation=_as_written(hints[parameter.name])
        )
        for parameter in parameters
    ]


def _as_written(hint: Any) -> Any:
    """Removes the Optional that Python 3.10 puts around an annotation whose default is None."""
    if get_origin(hint) is Union:
        return next((part for part in get_args(hint) if get_origin(part) is Annotated), hint)
    return hint


def _panel(option: inspect.Parameter) -> int:
    """Returns the place of an option's panel among `PANELS`; a group has none."""
    info = next(extra for extra in get_args(option.annotation) if isinstance(extra, ParameterInfo))
    return PANELS.index(info.rich_help_panel)


KINDS = {bool: "", str: "TEXT", Path: "PATH"}
"""The words that stand for a type's name; numbers keep theirs, which names their range."""


class ReadableCommand(TyperCommand):
    """A command whose help page is for readers."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.help = None if self.help is None else unbroken(self.help)

    def get_params(self, ctx: Any) -> list[Any]:
        """Returns the command's options, the one for help included, each with a `metavar`."""
        return with_kinds(super().get_params(ctx))


class ReadableGroup(TyperGroup):
    """A command of several commands, each with such a help page."""

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


NegativePromptOption = Annotated[
    str | None,
    sampling_option(metavar="TEXT", help="With --guidance, the guide's text for the prompt."),
]
PositivePromptOption = Annotated[
    str | None,
    sampling_option(metavar="TEXT", help="With --guidance, the expert's text for the prompt."),
]
KvOption = Annotated[
    Literal["off", "int8"],
    models_option(
        "--kv",
        metavar="FORMAT",
        help="Keys and values of the target: off, or int8, rounded once (CPU); less memory.",
    ),
]
