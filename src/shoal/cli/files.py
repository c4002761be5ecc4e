"""The prompts that commands read, and the files that they write."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shoal.durable import sync, sync_entry
from shoal.errors import RequestError
from shoal.values import require_text

TEMPLATES = Path(__file__).with_name("chat_templates")
"""The chat templates of well-known formats, for models with a tokenizer that has none."""
TURN_ENDS = {
    "chatml": "<|im_end|>",
    "hermes": "<|im_end|>",
    "qwen": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "phi3": "<|end|>",
    "alpaca": "### Instruction:",
    "vicuna": "USER:",
}
"""The text that ends a turn in each format, beside the model's end-of-text token.

A base model's end-of-text token may be another one.
"""
MARK = "\ufeff"
"""The byte order mark that programs on Windows write before a text."""
TEMPLATE_HELP = (
    "A chat template, for a tokenizer without one: a file, or a name such as chatml, llama3, qwen."
)


def read_prompts(prompts: list[str], files: list[Path]) -> list[str]:
    """Returns the prompts of a command line: texts, then whole files.

    If there are neither, stdin is the prompt.

    Raises:
        RequestError: a file cannot be read, a prompt is empty or no text, or there is none at all.
    """
    prompts_by_source = [("--prompt", text) for text in prompts]
    prompts_by_source += [(str(file), read_text(file)) for file in files]
    if not prompts_by_source:
        if sys.stdin.isatty():
            raise RequestError(
                "no prompt: give --prompt TEXT, --prompt-file FILE, or pipe text into stdin"
            )
        try:
            prompts_by_source = [("stdin", sys.stdin.read().removeprefix(MARK))]
        except UnicodeDecodeError as error:
            raise RequestError(f"stdin is not UTF-8 text: {error.reason}") from error
    for name, text in prompts_by_source:
        require_text(text, f"the prompt from {name}")
    return [text for _, text in prompts_by_source]


def template_names() -> list[str]:
    """Names of the chat templates that come with shoal."""
    return sorted(file.stem for file in TEMPLATES.glob("*.jinja"))


def turn_ends(template: Path | None) -> tuple[str, ...]:
    """Returns the stop strings of a chat template that is given by its name; a file has none."""
    end = TURN_ENDS.get(str(template))
    return () if end is None else (end,)


def read_template(template: Path | None) -> str | None:
    """Returns a chat template's text, by its name or from a file; None if neither is given.

    A name takes precedence over a file of that name.

    Raises:
        RequestError: it cannot be read.
    """
    if template is None:
        return None
    names = template_names()
    file = TEMPLATES / f"{template}.jinja" if str(template) in names else template
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        said = (
            f"cannot read the chat template {str(template)!r}: {reason}; give a file, or one of "
            f"the names {', '.join(names)}"
        )
        raise RequestError(said) from error


def read_text(file: Path, kind: str = "prompt file", newline: str | None = None) -> str:
    """Returns a file's text.

    Lines end with line feeds, and a byte order mark at the beginning, as editors on Windows write
    it, is no part of the text. With `newline` "" the text is the file's own in both.

    Raises:
        RequestError: it cannot be read.
    """
    try:
        with file.open(encoding="utf-8", newline=newline) as opened:
            text = opened.read()
            return text if newline == "" else text.removeprefix(MARK)
    except OSError as error:
        raise RequestError(f"cannot read {kind} {str(file)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{kind} {str(file)!r} is not UTF-8 text: {error.reason}") from error


def listed_prompts(files: Sequence[Path]) -> list[str]:
    """Returns the prompts of files that hold several.

    A .jsonl file has one per line, a .txt file one per paragraph, and any other file is one. A line
    is JSON, a text or an object with a text "prompt". Paragraphs are separated by blank lines.

    Raises:
        RequestError: a file cannot be read, holds no prompt or something else; with file and line.
    """
    return [prompt for file in files for prompt in _prompts_of(file)]


def _prompts_of(file: Path) -> list[str]:
    text = read_text(file)
    require_text(text, f"the prompt from {file}")
    if file.suffix not in (".jsonl", ".txt"):
        return [text]
    if file.suffix == ".txt":
        parts = [part.strip("\r\n") for part in re.split(r"\n\s*\n", text) if part.strip()]
    else:
        rows = enumerate(text.split("\n"), 1)
        parts = [_text_of(row, f"{file}:{number}", "prompt") for number, row in rows if row.strip()]
    if not parts:
        raise RequestError(f"{str(file)!r} holds no prompt")
    return parts


def listed_documents(files: Sequence[Path]) -> list[str]:
    """Returns the texts of a corpus.

    A .jsonl file has one per line, a text or an object with a text "text"; any other file is one.

    Raises:
        RequestError: a file cannot be read, is empty or holds something else; with file and line.
    """
    documents = []
    for file in files:
        text = read_text(file)
        require_text(text, f"the text of {file}")
        if file.suffix != ".jsonl":
            documents.append(text)
            continue
        rows = enumerate(text.split("\n"), 1)
        documents += [
            _text_of(row, f"{file}:{number}", "text") for number, row in rows if row.strip()
        ]
    return documents


def _text_of(row: str, where: str, field: str) -> str:
    try:
        value = json.loads(row)
    except json.JSONDecodeError as error:
        raise RequestError(f"{where} is not JSON: {error}") from error
    text = value.get(field) if isinstance(value, dict) else value
    if not isinstance(text, str) or not text:
        raise RequestError(f'{where} must be a text or an object with a text "{field}"')
    return text


def require_writable(path: Path) -> None:
    """Raises RequestError for a file that cannot be written, before there are results to lose."""
    written = path if _special(path) else path.resolve().parent
    if not written.is_dir() and not _special(path):
        reason = f"there is no directory {str(path.parent)!r}"
    elif path.is_dir():
        reason = "it is a directory"
    elif not os.access(written, os.W_OK):
        reason = "permission denied"
    else:
        return
    raise RequestError(f"cannot write {str(path)!r}: {reason}")


def write_whole(path: Path, text: str) -> None:
    """Writes a file whole: no reader ever sees a part of it, not even after a crash.

    A pipe or a device is written to directly.

    Raises:
        RequestError: it cannot be written; the earlier content is still there.
    """
    try:
        if _special(path):
            path.write_text(text, encoding="utf-8")
        else:
            _replace(path.resolve(), text)
    except OSError as error:
        raise RequestError(f"cannot write {str(path)!r}: {error.strerror}") from error


def _special(path: Path) -> bool:
    """Tells whether a path is a pipe, a device or a directory, which no file must replace."""
    return path.exists() and not path.is_file()


def _replace(path: Path, text: str) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            sync(file)
        os.chmod(temporary, path.stat().st_mode if path.exists() else 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    sync_entry(path)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
