"""The input of a chat: lines of a terminal or a pipe, which become messages and commands."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.cli.console import stdout
from shoal.errors import RequestError

QUOTE = '"""'
PROMPT, INSIDE = "> ", "… "
HISTORY_LINES = 1000

ReadLine = Callable[[str], str]
"""A function that returns the next line without its end.

It takes the prompt that a terminal shows, and raises EOFError if there are no more lines.
"""


@dataclass(frozen=True)
class Entry:
    """An entry of the user: a message, or a command if its line begins with /."""

    text: str
    is_command: bool = False


def next_entry(read: ReadLine) -> Entry:
    """Returns the next entry; lines without text are passed over.

    Raises:
        EOFError: there are no more lines.
        RequestError: there are no more lines, and a quote is open.
    """
    line = ""
    while not line.strip():
        line = read(PROMPT)
    if not line.strip().startswith(QUOTE):
        return Entry(line.strip(), is_command=line.startswith("/"))
    line = line.strip().removeprefix(QUOTE)
    entered_lines = [line] if line else []
    while not line.rstrip().endswith(QUOTE):
        try:
            line = read(INSIDE)
        except EOFError:
            raise RequestError(
                f"the message that {QUOTE} opened has no {QUOTE} behind it"
            ) from None
        entered_lines.append(line)
    entered_lines[-1] = line.rstrip().removesuffix(QUOTE)
    return Entry("\n".join(entered_lines).rstrip("\n"))


def read_piped(_prompt: str) -> str:
    """Returns the next line of stdin.

    Raises:
        EOFError: there are no more lines.
        RequestError: the line is not UTF-8.
    """
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise RequestError(f"stdin is not UTF-8 text: {error.reason}") from error
    if not line:
        raise EOFError
    return line.removesuffix("\n").removesuffix("\r")


def require_foreground() -> None:
    """Raises RequestError if the terminal gives its keys to another process, as under `timeout`."""
    with contextlib.suppress(OSError, AttributeError):  # no such terminal, no such system
        if os.tcgetpgrp(sys.stdin.fileno()) != os.getpgrp():
            raise RequestError(
                "the terminal is another process's, so no key would come: run this in the "
                "foreground (under timeout: timeout --foreground)"
            )


@contextlib.contextmanager
def keys_kept() -> Iterator[None]:
    """Keeps the keys that are pressed during the block for the next line, and does not show them.

    Ctrl-C and Ctrl-Z work as ever. A signal that stops or ends the process leaves the terminal as
    it was, and a stopped process that goes on takes its settings again.
    """
    try:
        import termios

        before = termios.tcgetattr(sys.stdin)
    except (ImportError, OSError, ValueError, termios.error):
        yield
        return
    silent = [*before]
    silent[3] = (silent[3] & ~(termios.ECHO | termios.ICANON)) | termios.NOFLSH

    def apply(settings: Sequence[Any]) -> None:
        with contextlib.suppress(OSError, termios.error):  # a terminal that was closed
            termios.tcsetattr(sys.stdin, termios.TCSANOW, [*settings])

    apply(silent)
    try:
        with _around_signals(lambda: apply(before), lambda: apply(silent)):
            yield
    finally:
        apply(before)


@contextlib.contextmanager
def _around_signals(leave: Callable[[], None], enter: Callable[[], None]) -> Iterator[None]:
    """Calls one function before a signal stops or ends the process, and another when it goes on.

    A process that goes on in the background enters when it comes to the foreground.
    """

    def end(number: int, _frame: object) -> None:
        leave()
        _show_cursor()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        if number == signal.SIGTSTP:  # the process goes on
            signal.signal(number, end)

    def go_on(_number: int, _frame: object) -> None:
        with contextlib.suppress(OSError):
            if os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp():  # else it would be stopped again
                enter()

    handlers = dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP), end)
    before = {}
    for number, handler in (handlers | {signal.SIGCONT: go_on}).items():
        with contextlib.suppress(ValueError):  # another thread than the main one
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, default in before.items():
            signal.signal(number, default)


def _show_cursor() -> None:
    """Shows the cursor, which a board of several answers hides."""
    if stdout().is_terminal and not stdout().is_dumb_terminal:
        with contextlib.suppress(OSError):
            os.write(sys.stdout.fileno(), b"\x1b[?25h")


class TerminalLines:
    """The lines of a terminal, edited by readline if Python has it.

    The lines of earlier chats are behind the arrow keys.

    Args:
        history: the file of these lines; None = no lines are read or kept.
        commands: the commands that Tab completes.

    Attributes:
        fault: the reason that lines are not kept; "" if they are, or need not be.
    """

    def __init__(self, history: Path | None, commands: Sequence[str]) -> None:
        self._history, self.fault = history, ""
        self._readline = _readline()
        if self._readline is None:
            return
        self._readline.set_auto_history(False)
        self._readline.set_completer_delims(" \t\n")
        self._readline.set_completer(lambda text, state: _completion(text, state, commands))
        self._readline.parse_and_bind(
            "bind ^I rl_complete" if _is_libedit(self._readline) else "tab: complete"
        )
        if history is not None:
            self._open(history)

    def read(self, prompt: str) -> str:
        """Returns the next line; raises EOFError after Ctrl-D."""
        if not sys.stdout.isatty():  # input() would write the prompt among the answers
            sys.stderr.write(prompt)
            sys.stderr.flush()
            prompt = ""
        line = input(
            _bold(prompt)
            if prompt
            and self._readline
            and not _is_libedit(self._readline)
            and not stdout().is_dumb_terminal
            else prompt
        )
        if self._readline is not None and line.strip():
            self._readline.add_history(line)
            if self._history is not None:
                with contextlib.suppress(OSError):  # a full disk ends no chat
                    self._readline.append_history_file(1, self._history)
        return line

    def _open(self, history: Path) -> None:
        """Reads the lines of earlier chats, and makes the file, which only its owner may read."""
        try:
            history.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(history, os.O_CREAT | os.O_WRONLY, 0o600))
            history.chmod(0o600)
            self._readline.read_history_file(history)
            self._readline.set_history_length(HISTORY_LINES)
        except OSError as error:
            self.fault = f"lines are not kept in {str(history)!r}: {error.strerror}"
            self._history = None


def history_file() -> Path:
    """Returns the file of the lines, in the user's directory for the state of programs."""
    state = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return folder / "shoal" / "chat_history"


def _readline() -> Any:
    """Returns the readline module, or None if Python was built without it.

    The terminal then edits lines itself.
    """
    try:
        import readline
    except ImportError:
        return None
    return readline


def _is_libedit(readline: Any) -> bool:
    return "libedit" in (readline.__doc__ or "")


def _bold(prompt: str) -> str:
    """Returns the prompt in bold, with the escape codes marked for readline as invisible."""
    return f"\001\x1b[1m\002{prompt}\001\x1b[0m\002"


def _completion(text: str, state: int, commands: Sequence[str]) -> str | None:
    """Returns the match of that number, for readline."""
    matches = [command for command in commands if text.startswith("/") and command.startswith(text)]
    return matches[state] if state < len(matches) else None
