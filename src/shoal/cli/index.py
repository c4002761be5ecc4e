"""`shoal index`: the texts in which drafts are looked up, read from files piece by piece."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.console import stderr, stdout
from shoal.cli.files import require_writable
from shoal.cli.options import JsonOption
from shoal.drafting.draft import BUNDLED
from shoal.errors import RequestError
from shoal.models.sources import require_source
from shoal.values import counted

SUFFIXES = (".py", ".txt", ".md", ".rst", ".jsonl")
"""The endings of the files that are read in a directory."""
FIELDS = ("text", "prompt")
PIECE = 1 << 20
"""The most characters of a text: a longer one is cut at the end of a line."""


def files_of(paths: Sequence[Path]) -> list[Path]:
    """Returns the files that are meant; a directory gives those in it, at any depth.

    Raises:
        RequestError: there are none.
    """
    files_of_folders: list[Path] = []
    for path in paths:
        if not path.exists():
            raise RequestError(f"there is no file {str(path)!r}")
        inside = (
            sorted(one for one in path.rglob("*") if one.suffix in SUFFIXES and one.is_file())
            if path.is_dir()
            else [path]
        )
        if not inside:
            raise RequestError(f"no {', '.join(SUFFIXES)} file in {str(path)!r}")
        files_of_folders += inside
    return files_of_folders


def texts_of(file: Path) -> Iterator[tuple[str, int]]:
    """Yields the texts of a file with the bytes of each: a .jsonl file's lines, else pieces of it.

    Raises:
        RequestError: it cannot be read, is not UTF-8, or a line is neither a text nor an object
            with one; the message names file and line.
    """
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            for text in _lines(lines, file) if file.suffix == ".jsonl" else _pieces(lines):
                yield text, len(text.encode())
    except OSError as error:
        raise RequestError(f"cannot read {str(file)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{str(file)!r} is not UTF-8 text: {error.reason}") from error


def _pieces(lines: Iterator[str]) -> Iterator[str]:
    held: list[str] = []
    size = 0
    for line in lines:
        for start in range(0, len(line), PIECE):
            part = line[start : start + PIECE]
            if size + len(part) > PIECE:
                yield "".join(held)
                held, size = [], 0
            held.append(part)
            size += len(part)
    if held:
        yield "".join(held)


def _lines(lines: Iterator[str], file: Path) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise RequestError(f"{file}:{number} is not JSON: {error}") from error
        texts = _texts_in(value)
        if texts is None:
            raise RequestError(
                f'{file}:{number} must be a text, an object with a text "text" or "prompt", or an '
                f"answer of `shoal batch`"
            )
        yield from texts


def _texts_in(value: Any) -> list[str] | None:
    """Returns the texts of a line: its own, or those of an answer; None if it may have none."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, dict):
        return None
    own = [value[field] for field in FIELDS if isinstance(value.get(field), str)]
    if own:
        return own[:1]
    response = value.get("response")
    body = response.get("body") if isinstance(response, dict) else value
    choices = body.get("choices") if isinstance(body, dict) else None
    if not isinstance(choices, list):
        return [] if value.get("error") else None
    dicts = [choice for choice in choices if isinstance(choice, dict)]
    said = [one.get("text", (one.get("message") or {}).get("content")) for one in dicts]
    return [text for text in said if isinstance(text, str) and text]


SENT = 64
"""The number of texts that are split at once."""


def index(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Text, code, .jsonl with a text or prompt per line, answers of `shoal batch`; or "
            "directories."
        ),
    ],
    out: Annotated[Path, typer.Option("--output", "-o", help="The index.")],
    tokenizer: Annotated[
        str,
        typer.Option(
            "--tokenizer",
            "-t",
            help="Of the target: Hub id or directory; bundled: the bundled target.",
        ),
    ] = BUNDLED,
    as_json: JsonOption = False,
) -> None:
    """Index a corpus, for `--draft suffix:index=FILE`.

    Rows of every target with this tokenizer then look up their last tokens in these texts. Ctrl-C
    leaves nothing behind.
    """
    require_writable(out)
    if out.exists() and not out.is_file():
        raise RequestError(f"cannot write {str(out)!r}: it is no file")
    paths = files_of(files)
    if out.resolve() in {file.resolve() for file in paths}:
        raise RequestError(f"--output {str(out)!r} is one of the files to read")
    if tokenizer != BUNDLED:
        require_source(tokenizer)
    started = time.perf_counter()
    about = _written(paths, out, tokenizer)
    about["seconds"] = round(time.perf_counter() - started, 3)
    if as_json:
        print(json.dumps(about))
        return
    line = (
        f"{counted(about['tokens'], 'token')} of {counted(about['texts'], 'text')} in "
        f"{about['bytes'] / 2**20:.1f} MiB, {about['seconds']:.1f} s"
    )
    stdout().print(line)
    stderr().print(f"wrote {out}: --draft suffix:index={out}", soft_wrap=True)


def _written(files: list[Path], out: Path, source: str) -> dict[str, Any]:
    """Writes the index under a temporary name until it is complete, and returns a summary of it."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from shoal.models.pretrained import load_tokenizer
    from shoal.models.sources import bundled

    tokenizer = load_tokenizer(bundled("target") if source == BUNDLED else source)
    place = out.resolve()
    descriptor, temporary = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            about = _built(files, tokenizer, file)
        os.chmod(temporary, place.stat().st_mode if place.exists() else 0o644)
        os.replace(temporary, place)
    except OSError as error:
        os.unlink(temporary)
        raise RequestError(f"cannot write {str(out)!r}: {error.strerror}") from error
    except BaseException:
        os.unlink(temporary)
        raise
    return {"out": str(out), **about, "bytes": place.stat().st_size}


def _built(files: list[Path], tokenizer: Any, file: Any) -> dict[str, Any]:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from shoal.drafting.corpus import IndexWriter
    from shoal.models.vocabulary import fingerprint

    console, writer, waiting = stderr(), IndexWriter(file), list[str]()

    def add() -> None:
        for ids in (
            tokenizer(waiting, add_special_tokens=False, verbose=False)["input_ids"]
            if waiting
            else []
        ):
            writer.add(ids)
        waiting.clear()

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("reading", total=sum(one.stat().st_size for one in files))
        held = 0
        for one in files:
            for text, size in texts_of(one):
                waiting.append(text)
                held += size
                progress.advance(task, size)
                if len(waiting) >= SENT or held >= 1 << 20:
                    add()
                    held = 0
        add()
        progress.update(task, description="sorting")
        if not writer.tokens:
            raise RequestError("there is no text in these files")
        parts = writer.finish(fingerprint(tokenizer))
    return {
        "files": len(files),
        "texts": writer.texts,
        "tokens": writer.tokens,
        "parts": parts,
        "tokenizer": fingerprint(tokenizer),
    }
