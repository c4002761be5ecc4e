"""The progress bar of `generate(progress=True)`."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from shoal.types.samples import Increment


def follow(increments: Iterable[Increment], rows: int, most: int) -> None:
    """Exhausts the increments and shows a progress bar on stderr.

    The bar is shown in a terminal or a notebook only.

    Args:
        increments: the increments.
        rows: the number of rows.
        most: the new tokens that each row may have; a row that ends earlier counts as complete.
    """
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    shown = sys.stderr.isatty() or console.is_jupyter
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task(_description(0, rows, 0), total=rows * most)
        tokens = ended = cut = 0
        for increment in increments:
            tokens += len(increment.token_ids)
            if increment.result is not None:
                ended, cut = ended + 1, cut + most - len(increment.result.token_ids)
            bar.update(task, completed=tokens + cut, description=_description(ended, rows, tokens))


def _description(ended: int, rows: int, tokens: int) -> str:
    return f"{ended}/{rows} rows, {tokens} tokens"
