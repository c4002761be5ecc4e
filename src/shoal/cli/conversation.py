"""The conversation of a chat so far: turns, each with the candidates for its answer.

The messages are read from files, and written as token ids by a chat template; a command line may
give its prompts as messages too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.files import TEMPLATE_HELP, read_template, read_text, template_names
from shoal.errors import RequestError
from shoal.types.arguments import as_plain, chat_template_of, encoded_plain
from shoal.values import require_text

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Candidate:
    """A candidate for an answer.

    Attributes:
        reasoning: the reasoning that a template separates from the answer; the model does not read
            it again.
        interrupted: Ctrl-C ended the answer.
    """

    text: str
    reasoning: str = ""
    interrupted: bool = False


@dataclass
class Turn:
    """A message of the user and its answers.

    Attributes:
        text: the message.
        answers: all answers, also from earlier attempts; empty while the message waits for one.
        chosen: the index of the answer that counts.
        attempts: the number of times that the model was asked.
    """

    text: str
    answers: list[Candidate] = field(default_factory=list)
    chosen: int = 0
    attempts: int = 0

    @property
    def answer(self) -> Candidate | None:
        """The one that counts."""
        return self.answers[self.chosen] if self.answers else None


@dataclass
class Conversation:
    """The turns in order, after the system's message if there is one."""

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)

    @property
    def last(self) -> Turn:
        """The last turn; raises RequestError if there is none."""
        if not self.turns:
            raise RequestError("nothing was said yet")
        return self.turns[-1]

    def messages(self) -> list[Message]:
        """Returns the messages for the last turn's answer: all before it, and its own."""
        return [*self._messages(self.turns[:-1]), message("user", self.last.text)]

    def _messages(self, turns: Iterable[Turn]) -> list[Message]:
        messages = [] if self.system is None else [message("system", self.system)]
        for turn in turns:
            messages.append(message("user", turn.text))
            if turn.answer is not None:
                messages.append(message("assistant", turn.answer.text))
        return messages

    def say(self, text: str) -> None:
        """Begins a turn."""
        self.turns.append(Turn(text))

    def undo(self) -> Turn:
        """Takes the last turn back and returns it; raises RequestError if there is none."""
        turn = self.last
        self.turns.pop()
        return turn

    def choose(self, number: int) -> Candidate:
        """Makes a candidate of the last turn, counted from 1, its answer.

        Raises:
            RequestError: there is no such candidate.
        """
        count = len(self.last.answers)
        if not 1 <= number <= count:
            said = (
                f"has {count} answers: choose one of 1 to {count}"
                if count
                else "has no answer yet: /regenerate asks for one"
            )
            raise RequestError(f"the last message {said}")
        self.last.chosen = number - 1
        return self.last.answers[number - 1]

    def document(self) -> dict[str, Any]:
        """Returns the conversation as a JSON object.

        It has "messages" in the form of OpenAI's API, and the places, from 0, of the interrupted
        ones.
        """
        messages: list[dict[str, str]] = list(self._messages(self.turns))
        answers = [turn.answer for turn in self.turns if turn.answer is not None]
        places = [place for place, one in enumerate(messages) if one["role"] == "assistant"]
        for place, answer in zip(places, answers, strict=True):
            if answer.reasoning:
                messages[place]["reasoning_content"] = answer.reasoning
        cut = [place for place, answer in zip(places, answers, strict=True) if answer.interrupted]
        return {"messages": messages, **({"interrupted": cut} if cut else {})}


def read_conversation(file: Path) -> Conversation:
    """Reads the conversation of a file.

    It may begin with a message of the system; then come messages of the user, each with an answer
    or without.

    Raises:
        RequestError: it cannot be read, see `read_document`, or has messages in another order.
    """
    document, conversation = read_document(file), Conversation()
    cut = document.get("interrupted")
    for place, one in enumerate(document["messages"]):
        _add(
            conversation,
            one,
            where=f"{str(file)!r}, message {place + 1}",
            interrupted=isinstance(cut, list) and place in cut,
        )
    return conversation


def _add(conversation: Conversation, one: Mapping[str, Any], where: str, interrupted: bool) -> None:
    role, text, turns = one["role"], one["content"], conversation.turns
    if role not in ROLES:
        raise RequestError(f"{where}: role {role!r}; a chat in the terminal has {', '.join(ROLES)}")
    if role == "system":
        if conversation.system is not None or turns:
            raise RequestError(f"{where}: the system's message comes first, and once")
        conversation.system = text
    elif role == "user":
        conversation.say(text)
    elif not turns or turns[-1].answers:
        raise RequestError(f"{where}: an answer without a message of the user before it")
    else:
        reasoning = one.get("reasoning_content")
        turns[-1].answers.append(
            Candidate(text, reasoning if isinstance(reasoning, str) else "", interrupted)
        )


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
        """Returns the token ids of such a text; raises RequestError if it is no text."""
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
            "--system, --messages and --chat-template mean it too.",
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
        """Returns a model's writer of conversations; raises RequestError without a template."""
        return ChatWriter(tokenizer, read_template(self.chat_template))

    def before(self) -> list[Message]:
        """Returns the messages before a prompt.

        The system's message of the options replaces the one of the file.

        Raises:
            RequestError: the file cannot be read.
        """
        messages = [] if self.messages is None else read_document(self.messages)["messages"]
        plain = [message(one["role"], one["content"]) for one in messages]
        if self.system is None:
            return plain
        return [message("system", self.system), *(one for one in plain if one["role"] != "system")]
