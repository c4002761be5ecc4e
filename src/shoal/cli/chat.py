"""`shoal chat`: a conversation with a model in the terminal, or by lines of a pipe."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from shoal.cli.chat_commands import COMMANDS, Leave, run_command
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
from shoal.cli.chat_session import ChatSession, ChatSettings
from shoal.cli.chat_views import ChatView, JsonView, TextView, say
from shoal.cli.console import EXIT_INTERRUPTED, EXIT_REQUEST, Progress
from shoal.cli.conversation import Conversation, read_conversation
from shoal.cli.files import turn_ends
from shoal.cli.messages import ChatOptions
from shoal.cli.option_groups import option_groups, output_option, sampling_option, speed_option
from shoal.cli.options import (
    GenerateSampling,
    ModelSource,
    SpeculationOptions,
    display_name,
    parse_lookahead,
)
from shoal.errors import ModelError, RequestError

if TYPE_CHECKING:
    from shoal.api import Shoal

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


@option_groups(without=("chat", "align", "exact"))
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
    and what has come of it stays.
    """
    options = sampling.given() | {
        "lookahead": parse_lookahead(speculation.lookahead),
        "rule": speculation.rule,
    }
    if sys.stdin.isatty():
        require_foreground()
    settings = ChatSettings(sampling.n, options, turn_ends(chats.chat_template))
    conversation = Conversation() if chats.messages is None else read_conversation(chats.messages)
    if chats.system is not None:
        conversation.system = chats.system
    with Progress():
        model = source.load(prefix_memory=int(prefix_memory * GIB))
        writer = chats.writer(model.tokenizer)
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
