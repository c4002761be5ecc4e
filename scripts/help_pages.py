"""The help pages of all commands as one text: `python scripts/help_pages.py` writes docs/help.txt."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import typer.main
from typer import rich_utils

from shoal.cli import app

WIDTH = 100
FILE = Path(__file__).parents[1] / "docs" / "help.txt"


def render() -> str:
    """Returns every page under its command, at fixed width and without colour."""
    rich_utils.MAX_WIDTH, rich_utils.COLOR_SYSTEM, rich_utils.FORCE_TERMINAL = WIDTH, None, False
    group = typer.main.get_command(app)
    pages = [_page(["--help"])]
    for name, command in getattr(group, "commands", {}).items():
        pages += [_page([name, "--help"])] + [_page([name, part, "--help"]) for part in getattr(command, "commands", {})]
    return "\n".join(pages)


def _page(arguments: list[str]) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        app(arguments, prog_name="shoal", standalone_mode=False)
    lines = [line.rstrip() for line in text.getvalue().strip("\n").splitlines()]
    return "\n".join([f"$ shoal {' '.join(arguments)}", *lines, ""])


if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")
    print(f"wrote {FILE.name}")
