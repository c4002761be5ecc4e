"""Runs the scripts in this directory as commands: `python benchmarks/NAME.py --help` lists their options."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from shoal.errors import RequestError


def run(main: Callable[..., None]) -> None:
    """`typer.run`, but a RequestError becomes one line on stderr and exit code 2."""
    try:
        typer.run(main)
    except RequestError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
