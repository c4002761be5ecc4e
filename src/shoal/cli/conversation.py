"""The conversation of a chat so far: turns, each with the candidates for its answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.cli.messages import Message, message, read_document
from shoal.errors import RequestError

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
        answers: all answers, also from earlier attempts; empty while the message waits for one.
        chosen: the index of the answer that counts.
        attempts: the number of times that the model was asked.
    """

    said: str
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
        """The last turn.

        Raises:
            RequestError: there is none.
        """
        if not self.turns:
            raise RequestError("nothing was said yet")
        return self.turns[-1]

    def asked(self) -> list[Message]:
        """Returns the messages for the last turn's answer: all before it, and its own."""
        return [*self._messages(self.turns[:-1]), message("user", self.last.said)]

    def _messages(self, turns: Iterable[Turn]) -> list[Message]:
        found = [] if self.system is None else [message("system", self.system)]
        for turn in turns:
            found.append(message("user", turn.said))
            if turn.answer is not None:
                found.append(message("assistant", turn.answer.text))
        return found

    def say(self, text: str) -> None:
        """Begins a turn."""
        self.turns.append(Turn(text))

    def undo(self) -> Turn:
        """Takes the last turn back, and returns it.

        Raises:
            RequestError: there is none.
        """
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
    document, found = read_document(file), Conversation()
    cut = document.get("interrupted")
    for place, one in enumerate(document["messages"]):
        _add(
            found,
            one,
            where=f"{str(file)!r}, message {place + 1}",
            interrupted=isinstance(cut, list) and place in cut,
        )
    return found


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
