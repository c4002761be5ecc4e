"""The messages of a chat: read from files, and written as token ids by a chat template.

A command line may give its prompts as messages too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.files import TEMPLATE_HELP, read_template, read_text, template_names
from shoal.config import require_text
from shoal.errors import RequestError
from shoal.types.prompt_forms import as_plain, chat_template_of, encoded_plain

Message = dict[str, str]
"""`role` and `content`."""


def message(role: str, content: str) -> Message:
    """Returns a message."""
    return {"role": role, "content": content}


def read_document(file: Path) -> dict[str, Any]:
    """Reads a file in JSON with "messages".

    It is an object, such as a request of OpenAI's API, or the list of these messages itself. Each
    message has the texts "role" and "content"; other fields are left as they are.

    Raises:
        RequestError: it cannot be read, or holds something else.
    """
    text = read_text(file, "file of messages")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{str(file)!r} is not JSON: {error}") from error
    document = value if isinstance(value, dict) else {"messages": value}
    if not isinstance(document.get("messages"), list):
        raise RequestError(
            f'{str(file)!r} must hold a list of messages, or an object with "messages"'
        )
    for number, one in enumerate(document["messages"], 1):
        if not isinstance(one, dict) or not all(
            isinstance(one.get(name), str) for name in ("role", "content")
        ):
            raise RequestError(
                f'{str(file)!r}, message {number}: it must be an object with the texts "role" '
                f'and "content"'
            )
        if one["content"]:
            require_text(one["content"], f"message {number} of {str(file)!r}")
    return document


class ChatWriter:
    """A writer of conversations in the form that a model reads.

    Args:
        tokenizer: a tokenizer of Transformers.
        template: the chat template; None = the tokenizer's own.

    Raises:
        RequestError: there is no tokenizer, or no template.
    """

    def __init__(self, tokenizer: Any, template: str | None) -> None:
        self.template = template or chat_template_of(tokenizer)
        if tokenizer is None or not self.template:
            names = ", ".join(template_names())
            raise RequestError(
                f"this model has no chat template: give --chat-template FILE, or one of the "
                f"names {names}"
            )
        self._tokenizer = tokenizer

    def text(self, messages: Sequence[Message]) -> str:
        """Returns a conversation that the model's turn follows.

        Raises:
            RequestError: the template refuses it.
        """
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [self._plain(one) for one in messages],
                    chat_template=self.template,
                    add_generation_prompt=True,
                    tokenize=False,
                )
            )
        except Exception as error:  # a template is a program that may raise anything
            raise RequestError(f"the chat template refused the messages: {error}") from error

    def ids(self, text: str) -> list[int]:
        """Returns the token ids of such a text.

        Raises:
            RequestError: it is no text.
        """
        try:
            return encoded_plain(partial(self._tokenizer.encode, add_special_tokens=False), text)
        except Exception as error:  # the template may have written an invalid text
            raise RequestError(f"the chat template refused the messages: {error}") from error

    def _plain(self, one: Message) -> Message:
        """Returns a message; names of special tokens in the text of a user are text."""
        if one["role"] != "user":
            return one
        return {**one, "content": as_plain(self._tokenizer, one["content"])}


@dataclass(frozen=True)
class ChatOptions:
    """The options that make prompts messages, and give the messages before them."""

    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Each prompt is a message, which the model answers by its chat template. "
            "--system, --messages and "
            "--chat-template mean it too.",
        ),
    ] = False
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="The system message.")
    ] = None
    messages: Annotated[
        Path | None,
        typer.Option(
            "--messages",
            metavar="FILE",
            help='What was said before, as /save of `shoal chat` writes it: JSON with "messages".',
        ),
    ] = None
    chat_template: Annotated[
        Path | None, typer.Option("--chat-template", metavar="NAME|FILE", help=TEMPLATE_HELP)
    ] = None

    def read(self, tokenizer: Any, prompts: Sequence[str]) -> Sequence[str] | list[list[int]]:
        """Returns the prompts themselves, or the ids of conversations that end with them.

        Raises:
            RequestError: there is no tokenizer or no template, or the template refuses the
                messages.
        """
        if not self.chat and (self.system, self.messages, self.chat_template) == (None, None, None):
            return prompts
        writer, before = self.writer(tokenizer), self.before()
        return [writer.ids(writer.text([*before, message("user", prompt)])) for prompt in prompts]

    def writer(self, tokenizer: Any) -> ChatWriter:
        """Returns the writer of conversations for the model of a tokenizer.

        Raises:
            RequestError: there is no template.
        """
        return ChatWriter(tokenizer, read_template(self.chat_template))

    def before(self) -> list[Message]:
        """Returns the messages before a prompt.

        The system's message of the options replaces the one of the file.

        Raises:
            RequestError: the file cannot be read.
        """
        found = [] if self.messages is None else read_document(self.messages)["messages"]
        plain = [message(one["role"], one["content"]) for one in found]
        if self.system is None:
            return plain
        return [message("system", self.system), *(one for one in plain if one["role"] != "system")]
