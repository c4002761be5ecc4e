"""Prompts of a command line as messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.files import TEMPLATE_HELP, read_template
from shoal.errors import RequestError


@dataclass(frozen=True)
class ChatOptions:
    """Whether prompts are messages, and what goes before them."""

    chat: Annotated[
        bool, typer.Option("--chat", help="Each prompt is a message, which the model answers by its chat template.")
    ] = False
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="A system message before each; means --chat.")
    ] = None
    chat_template: Annotated[
        Path | None,
        typer.Option("--chat-template", metavar="NAME|FILE", help=TEMPLATE_HELP + " Means --chat."),
    ] = None

    def read(self, tokenizer: Any, prompts: Sequence[str]) -> Sequence[str] | list[list[int]]:
        """What the model is asked: the prompts themselves, or the ids of conversations.

        Raises:
            RequestError: there is no tokenizer or no template, or the template refuses the messages.
        """
        template = read_template(self.chat_template)
        if not self.chat and self.system is None and template is None:
            return prompts
        if tokenizer is None or (template is None and not getattr(tokenizer, "chat_template", None)):
            raise RequestError(
                "this model has no chat template: give --chat-template NAME or FILE, or leave out --chat and --system"
            )
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [_ids(tokenizer, template, [*before, {"role": "user", "content": prompt}]) for prompt in prompts]


def _ids(tokenizer: Any, template: str | None, messages: list[dict[str, str]]) -> list[int]:
    try:
        text = tokenizer.apply_chat_template(
            messages, chat_template=template, add_generation_prompt=True, tokenize=False
        )  # the tokenizer's own where that is None
        return list(tokenizer.encode(text, add_special_tokens=False))
    except Exception as error:  # a template is a program that may raise anything
        raise RequestError(f"the chat template refused the messages: {error}") from error
