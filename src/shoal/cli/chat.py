"""The commands of a chat, from /help to /exit."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from shoal.cli.chat_input import (
    Entry,
    ReadLine,
    TerminalLines,
    history_file,
    keys_kept,
    next_entry,
    read_piped,
    require_foreground,
)
from shoal.cli.chat_session import SHORT, ChatSession, ChatSettings
from shoal.cli.chat_views import ChatView, JsonView, TextView, counts, say
from shoal.cli.console import EXIT_INTERRUPTED, EXIT_REQUEST, Progress, hint_drafter
from shoal.cli.conversation import ChatOptions, Conversation, read_conversation
from shoal.cli.files import require_writable, turn_ends, write_whole
from shoal.cli.option_groups import option_groups, output_option, sampling_option, speed_option
from shoal.cli.options import (
    GenerateSampling,
    ModelSource,
    SpeculationOptions,
    display_name,
    parse_lookahead,
)
from shoal.config import Sampling
from shoal.errors import ModelError, RequestError
from shoal.values import counted

if TYPE_CHECKING:
    from shoal.api import Shoal
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
        near = difflib.get_close_matches(name.lower(), COMMANDS, n=1)
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
    return f"taken back: {_short(turn.text)}"


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
    conversation = read_conversation(Path(argument).expanduser())
    session.conversation.system, session.conversation.turns = (
        conversation.system,
        conversation.turns,
    )
    last = f"; the last: {_short(conversation.turns[-1].text)}" if conversation.turns else ""
    waits = (
        ", which waits for an answer: /regenerate"
        if conversation.turns and not conversation.turns[-1].answers
        else ""
    )
    return f"{len(conversation.turns)} messages of yours{last}{waits}"


def _system(session: ChatSession, argument: str) -> str:
    session.conversation.system = argument or None
    if argument:
        return f"the system message is: {_short(argument)}"
    return "there is no system message now"


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
    lines = [f"asked {counted(session.messages, 'time')}: {counts(stats)}"]
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


GIB = 2**30


@dataclass(frozen=True)
class ChatSampling(GenerateSampling):
    """The sampling options of a chat: as in `shoal generate`, but answers may be longer."""

    n: Annotated[
        int, sampling_option("-n", "--samples", min=1, help="Answers to each message.")
    ] = 1
    max_new_tokens: Annotated[
        int, sampling_option("--max-new-tokens", help="Tokens per answer at most.")
    ] = 1024


@dataclass(frozen=True)
class ChatOutput:
    """The output of a chat, and whether its lines are kept."""

    quiet: Annotated[
        bool, output_option("--quiet", "-q", help="Without counts and times behind answers.")
    ] = False
    history: Annotated[
        bool,
        output_option(
            "--history/--no-history", help="Keep the lines that are entered, for later chats."
        ),
    ] = True
    json: Annotated[bool, output_option("--json", help="A JSON object per message on stdout.")] = (
        False
    )

    def view(self) -> ChatView:
        """Returns the view that shows answers."""
        return JsonView() if self.json else TextView(self.quiet)


@option_groups(without=("chat", "align", "exact", "negative_prompt", "positive_prompt"))
def chat(
    chats: ChatOptions,
    sampling: ChatSampling,
    speculation: SpeculationOptions,
    source: ModelSource,
    output: ChatOutput,
    prefix_memory: Annotated[
        float,
        speed_option(
            "--prefix-memory",
            min=0,
            help="GiB for what was said before, which is then not computed again; 0 = none.",
        ),
    ] = 1.0,
) -> int:
    """Talk with a model.

    Answers are shown as they grow; with -n there are several to choose from. /help lists commands.
    Where stdin is no terminal, each of its lines is a message or a command. Ctrl-C stops an answer,
    and the text so far stays.
    """
    shown = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    options = {name: getattr(Sampling, name) for name in shown} | sampling.given()
    options |= {"lookahead": parse_lookahead(speculation.lookahead), "rule": speculation.rule}
    if sys.stdin.isatty():
        require_foreground()
    settings = ChatSettings(sampling.n, options, turn_ends(chats.chat_template))
    conversation = Conversation() if chats.messages is None else read_conversation(chats.messages)
    if chats.system is not None:
        conversation.system = chats.system
    hint_drafter(source, settings.values["lookahead"])
    from shoal.models.pretrained import own_sampling

    with Progress():
        model = source.load(prefix_memory=int(prefix_memory * GIB))
        writer = chats.writer(model.tokenizer)
    settings.adopt(own_sampling(model.target.hf), sampling.given())
    session = ChatSession(model, writer, conversation, settings, output.view())
    if not sys.stdin.isatty():
        return _read_all(session, output.view())
    lines = TerminalLines(history_file() if output.history else None, list(COMMANDS))
    say(f"{_names(model)}. /help lists commands, Ctrl-D leaves.")
    if lines.fault:
        say(lines.fault)
    _talk(session, output.view(), lines.read)
    return 0


def _names(model: Shoal) -> str:
    """Names the target and the drafter."""
    drafter = model.drafter_name
    if drafter is None:
        return f"{display_name(model.target)}, plain decoding"
    if model.drafting is None and model.draft_model is not None:
        drafter = display_name(model.draft_model)
    return f"{display_name(model.target)}, drafts by {drafter}"


def _talk(session: ChatSession, view: ChatView, read: ReadLine) -> None:
    """Answers the lines of a terminal until the user leaves.

    An error or Ctrl-C ends an answer, but not the chat.
    """
    while True:
        asking = False
        try:
            entry = next_entry(read)
            asking = True
            with keys_kept():
                _take(session, entry)
        except (Leave, EOFError):
            if not asking:
                say("")
            return
        except KeyboardInterrupt:
            say("stopped: nothing of this answer is kept" if asking else "\n/exit or Ctrl-D leaves")
        except (RequestError, ModelError) as error:
            view.error(type(error).__name__, str(error))


def _read_all(session: ChatSession, view: ChatView) -> int:
    """Answers the lines of a pipe; the exit code says whether all could be."""
    failed = False
    while True:
        try:
            _take(session, next_entry(read_piped))
            if session.interrupted:
                return EXIT_INTERRUPTED
        except (Leave, EOFError):
            return EXIT_REQUEST if failed else 0
        except (RequestError, ModelError) as error:
            view.error(type(error).__name__, str(error))
            failed = True


def _take(session: ChatSession, entry: Entry) -> None:
    if entry.is_command:
        run_command(session, entry.text)
    elif entry.text:
        session.say(entry.text)
