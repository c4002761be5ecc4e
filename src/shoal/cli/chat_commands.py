"""The commands of a chat, from /help to /exit."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.chat_session import SHORT
from shoal.cli.chat_views import counts, say
from shoal.cli.conversation import read_conversation
from shoal.cli.files import require_writable, write_whole
from shoal.errors import RequestError

if TYPE_CHECKING:
    from shoal.cli.chat_session import ChatSession

TEXTS = """\
\"\"\" opens a message of several lines, and \"\"\" closes it. \
Ctrl-C stops an answer, Ctrl-D leaves."""


class Leave(Exception):
    """The user wants to leave."""


@dataclass(frozen=True)
class Command:
    """A command of a chat.

    Attributes:
        argument: the argument's name in the help; "" if it takes none.
        run: runs the command; returns the line to print, or "".
    """

    argument: str
    help: str
    run: Callable[[ChatSession, str], str]
    optional: bool = False


def run_command(session: ChatSession, line: str) -> None:
    """Runs the command of a line that begins with /.

    Raises:
        RequestError: there is no such command, or it cannot be done.
        Leave: the user wants to leave.
        KeyboardInterrupt: see `ChatSession.answer`.
    """
    name, _, argument = line.partition(" ")
    command, argument = COMMANDS.get(name), argument.strip()
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else "/help lists them."
        raise RequestError(
            f'there is no command {name}: {hint} A message that begins with / is put between """'
        )
    if bool(argument) > bool(command.argument):
        raise RequestError(f"{name} takes nothing behind it")
    if command.argument and not argument and not command.optional:
        raise RequestError(f"{name} needs {command.argument} behind it")
    said = command.run(session, argument)
    if said:
        say(said)


def _help(_session: ChatSession, _argument: str) -> str:
    usages = {
        f"{name} {command.argument}".strip(): command.help for name, command in COMMANDS.items()
    }
    width = max(map(len, usages))
    return "\n".join([*(f"{usage:{width}}  {text}" for usage, text in usages.items()), TEXTS])


def _reset(session: ChatSession, _argument: str) -> str:
    session.conversation.turns.clear()
    return "the conversation begins anew"


def _undo(session: ChatSession, _argument: str) -> str:
    turn = session.conversation.undo()
    return f"taken back: {_short(turn.said)}"


def _regenerate(session: ChatSession, _argument: str) -> str:
    session.answer()
    return ""


def _n(session: ChatSession, argument: str) -> str:
    return _set(session, f"n {argument}")


def _choose(session: ChatSession, argument: str) -> str:
    answer = session.conversation.choose(_number(argument, "/choose"))
    return f"answer {argument} is taken: {_short(answer.text)}"


def _save(session: ChatSession, argument: str) -> str:
    file, document = Path(argument).expanduser(), session.conversation.document()
    require_writable(file)
    write_whole(file, json.dumps(document, ensure_ascii=False, indent=1) + "\n")
    return f"{len(document['messages'])} messages are in {file}"


def _load(session: ChatSession, argument: str) -> str:
    found = read_conversation(Path(argument).expanduser())
    session.conversation.system, session.conversation.turns = found.system, found.turns
    last = f"; the last: {_short(found.turns[-1].said)}" if found.turns else ""
    waits = (
        ", which waits for an answer: /regenerate"
        if found.turns and not found.turns[-1].answers
        else ""
    )
    return f"{len(found.turns)} messages of yours{last}{waits}"


def _system(session: ChatSession, argument: str) -> str:
    session.conversation.system = argument or None
    return (
        f"the system message is: {_short(argument)}"
        if argument
        else "there is no system message now"
    )


def _set(session: ChatSession, argument: str) -> str:
    values = session.settings.values
    if not argument:
        return "\n".join(f"{name} {json.dumps(value)}" for name, value in values.items())
    name, _, text = argument.partition(" ")
    if not text.strip():
        raise RequestError(f"/set {name} needs a value behind it")
    name = session.settings.set(name, text.strip())
    values = session.settings.values
    return f"{name} is {json.dumps(values[name]) if name in values else 'as the model has it'}"


def _stats(session: ChatSession, _argument: str) -> str:
    if session.stats is None:
        return "nothing was answered yet"
    stats = session.stats
    lines = [f"asked {session.messages} times: {counts(stats)}"]
    prompts = stats.prefill_tokens + stats.restored_tokens
    lines.append(f"prompts: {prompts} tokens, {stats.restored_tokens} of them kept from before")
    lines += [
        f"{name}: {each.drafted} tokens drafted, {each.accepted} accepted"
        for name, each in stats.by_drafter.items()
    ]
    return "\n".join(lines)


def _exit(_session: ChatSession, _argument: str) -> str:
    raise Leave


def _number(text: str, command: str) -> int:
    if not text.isdecimal():
        raise RequestError(f"{command} needs a number behind it, got {text!r}")
    return int(text)


def _short(text: str) -> str:
    """Shortens a text to one line of at most 60 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:59]}…"


COMMANDS = {
    "/help": Command("", "show this list", _help),
    "/reset": Command("", "begin anew, with the same system message and options", _reset),
    "/clear": Command("", "the same as /reset", _reset),
    "/undo": Command("", "take the last message and its answer back", _undo),
    "/regenerate": Command("", "answer the last message once more", _regenerate),
    "/n": Command("K", "give K answers to each message", _n),
    "/choose": Command("K", "go on with answer K of the last message", _choose),
    "/save": Command("FILE", "write the conversation to a file in JSON", _save),
    "/load": Command("FILE", "go on with the conversation of such a file", _load),
    "/system": Command(
        "TEXT", "set the system message; without TEXT, remove it", _system, optional=True
    ),
    "/set": Command(
        "NAME VALUE",
        f"set temperature, top_p, {', '.join(SHORT)}, seed, ...; without both, show all",
        _set,
        optional=True,
    ),
    "/stats": Command("", "show counts and times of this chat", _stats),
    "/exit": Command("", "leave", _exit),
}
