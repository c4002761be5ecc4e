"""The prompts of a command line as messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.files import TEMPLATE_HELP, read_template
from shoal.cli.messages import ChatWriter, Message, message, read_document


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
