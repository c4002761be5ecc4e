"""`shoal chat` in a pseudo-terminal: its keys, and what it leaves. What stands for the model needs no torch.

Tests of: cli.chat, cli.chat_input, cli.chat_views.
"""

from __future__ import annotations

import codecs
import io
import os
import pty
import re
import select
import signal
import stat
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from shoal.cli.chat_views import RunningAnswer
from shoal.types.samples import Increment

TIMEOUT_SECONDS = 280  # seconds until a wait is a hang
CONTROL = """
import fcntl, os, sys, termios, time

fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # the terminal whose Ctrl-C this process gets
"""
CHILD = """
import signal
from types import SimpleNamespace

for number in (signal.SIGHUP, signal.SIGQUIT):  # which nohup, or a shell's &, has told these tests to pass over
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

from shoal.cli import chat, run
from shoal.cli.options import ModelSource
from shoal.types.samples import Increment, Output, Result, Sample
from shoal.types.stats import Stats

class Stream:
    def __init__(self, text):
        self.pieces, self.said, self.reason = text.split(" "), "", "eos"

    def __iter__(self):
        for piece in self.pieces:
            if self.reason == "cancelled":
                return
            self.said += piece + " "
            yield Increment(0, 0, piece + " ", (1,), 0)
            time.sleep(0.01)

    def cancel(self):
        self.reason = "cancelled"

    def result(self):
        ids = (1,) * len(self.said)
        sample = Sample(self.said, ids, (), (), 0.0, self.reason, 0.0, 1, 0, 0, 1, ())
        return Result((Output(None, (1, 2), (sample,)),), Stats(committed=len(ids), row_rounds=1, seconds=1.0))

def stream(prompts, n, shown_tokens, **options):
    messages = bytes(prompts[0]).decode().split(";")
    return Stream("tick " * 5000 if messages[-1] == "slow" else f"to {len(messages)} messages: {messages[-1]!r}")

class Tokenizer(SimpleNamespace):
    __hash__ = object.__hash__  # what is read of a tokenizer is kept by it

tokenizer = Tokenizer(
    chat_template="t", encode=lambda text, **_: list(text.encode()),
    apply_chat_template=lambda messages, **_: ";".join(message["content"] for message in messages),
    decode=lambda ids, **_: "",
)
model = SimpleNamespace(tokenizer=tokenizer, target=SimpleNamespace(context=10**6, hf=None), stream=stream, prefixes=None)
sys.modules["shoal.models.pretrained"] = SimpleNamespace(own_sampling=lambda hf: {})  # it imports torch
ModelSource.load = lambda self, prefix_memory=0: model
chat._names = lambda model: "a model"
chat.parse_lookahead = lambda text: 3
code = run(sys.argv[1:])
assert "torch" not in sys.modules
sys.exit(code)
"""

SHELL = """
import signal

signal.signal(signal.SIGTTOU, signal.SIG_IGN)
child = os.fork()
if child:
    while os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1]):
        os.tcsetpgrp(0, os.getpgrp())
        shown = bool(termios.tcgetattr(0)[3] & termios.ECHO)
        print(f"[stopped, keys shown: {shown}]", flush=True)
        for line in sys.stdin:
            if line == "fg\\n":
                os.tcsetpgrp(0, child)
            os.killpg(child, signal.SIGCONT)
            if line == "fg\\n":
                break
    os._exit(0)
os.setpgid(0, 0)
os.tcsetpgrp(0, os.getpid())
signal.signal(signal.SIGTTOU, signal.SIG_DFL)
signal.signal(signal.SIGTSTP, signal.SIG_DFL)
"""  # a shell with one job, the chat: it knows "fg", and takes any other line for "bg"


class Screen:
    """A terminal with a chat in it."""

    def __init__(self, state: Path, *options: str, begin: str = "") -> None:
        self.all = ""  # with escape codes
        self.master, self.slave = pty.openpty()
        self.settings, self.shown = termios.tcgetattr(self.slave), ""
        self.decode = codecs.getincrementaldecoder("utf-8")().decode  # a read may end within a character
        environment = {**os.environ, "TERM": "xterm", "INPUTRC": os.devnull, "XDG_STATE_HOME": str(state), "COLUMNS": "100"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", CONTROL + begin + CHILD, "chat", *options],
            stdin=self.slave, stdout=self.slave, stderr=self.slave, start_new_session=True, env=environment,
        )  # fmt: skip

    def type(self, keys: str) -> None:
        """Presses keys."""
        os.write(self.master, keys.encode())

    def expect(self, text: str, keys: str = "") -> str:
        """Waits until a text is shown; returns all that was shown before it since the last one.

        Args:
            keys: pressed again and again until then: Python misses a Ctrl-C that comes just before it waits for a key.
        """
        deadline = time.monotonic() + TIMEOUT_SECONDS
        self.type(keys)
        while text not in self.shown:
            assert time.monotonic() < deadline, self.shown
            if keys and not select.select([self.master], [], [], 10)[0]:
                self.type(keys)
            ended = self.process.poll() is not None
            if not select.select([self.master], [], [], 1)[0]:
                assert not ended, f"the chat has ended, and this is all: {self.shown}"
            else:
                more = self.decode(os.read(self.master, 65536))
                self.all += more
                self.shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.shown + more)
        before, _, self.shown = self.shown.partition(text)
        return before

    def close(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def screen(tmp_path: Path) -> Iterator[Screen]:
    found = Screen(tmp_path)
    yield found
    found.close()


def test_keys_pressed_while_it_answers_are_the_next_line(screen: Screen) -> None:
    screen.expect("> ")
    screen.type("slow\r")
    screen.expect("tick tick tick")
    screen.type("typed ahead\r\x03")
    assert "typed" not in screen.expect("; interrupted")
    assert screen.expect("to 3 messages: 'typed ahead'").count("typed ahead") == 1  # as the line that is edited
    screen.expect("> ")
    screen.type("/clear\r")
    screen.expect("the conversation begins anew")


def test_a_chat_in_the_background_of_its_terminal_says_so(tmp_path: Path) -> None:
    """As under `timeout`, where it would be stopped at the first key it asks for."""
    screen = Screen(tmp_path, begin="os.fork() and (os.wait(), os._exit(0)); os.setpgid(0, 0)")
    screen.expect("error: the terminal is another process's, so no key would come")
    screen.close()


@pytest.mark.slow(but=["15"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_leaves_the_terminal_as_it_was(screen: Screen, number: signal.Signals) -> None:
    """As that of `timeout --foreground`: a shell would show no keys afterwards."""
    screen.expect("> ")
    screen.type("slow\r")
    screen.expect("tick tick tick")
    assert termios.tcgetattr(screen.slave) != screen.settings
    screen.process.send_signal(number)
    assert screen.process.wait(TIMEOUT_SECONDS) == -number
    assert termios.tcgetattr(screen.slave) == screen.settings


def test_a_stopped_answer_leaves_the_terminal_to_the_shell(tmp_path: Path) -> None:
    """Ctrl-Z, bg and fg: the shell shows its keys, and the answer that goes on hides them again."""
    screen = Screen(tmp_path, begin=SHELL)
    screen.expect("> ")
    screen.type("slow\r")
    for lines in (["fg"], ["bg", "fg"]):
        screen.expect("tick tick tick")
        screen.type("\x1a")
        screen.expect("[stopped, keys shown: True]")
        assert termios.tcgetattr(screen.slave) == screen.settings
        for line in lines:
            screen.type(f"{line}\r")
            screen.expect(line)
            screen.expect("tick tick tick")
        while termios.tcgetattr(screen.slave)[3] & termios.ECHO:  # until the signal has come
            screen.expect("tick")
    screen.type("typed ahead\r\x03")
    assert "typed" not in screen.expect("; interrupted")
    assert screen.expect("to 3 messages: 'typed ahead'").count("typed ahead") == 1
    screen.expect("> ")
    screen.type("/exit\r")
    screen.process.wait(TIMEOUT_SECONDS)
    assert termios.tcgetattr(screen.slave) == screen.settings
    screen.close()


def test_pasted_lines_are_one_message(screen: Screen) -> None:
    screen.expect("> ")
    screen.type("\x1b[200~first\n\n  second\x1b[201~")  # as a terminal sends them where it is asked to mark them
    screen.expect("second")
    screen.type("\r")
    screen.expect("to 1 messages: 'first\\n\\n  second'")


def test_ctrl_d_while_it_answers_leaves_behind_the_answer(screen: Screen) -> None:
    screen.expect("> ")
    screen.type("slow\r")
    screen.expect("tick tick tick")
    screen.type("\x04")
    screen.expect("tick tick tick")
    screen.type("\x03")
    screen.expect("; interrupted")
    assert screen.process.wait(TIMEOUT_SECONDS) == 0
    assert termios.tcgetattr(screen.slave) == screen.settings


def test_a_terminal_without_escape_codes_gets_none(tmp_path: Path) -> None:
    """As the shell in Emacs, of TERM=dumb; a word may then be cut by the edge."""
    screen = Screen(tmp_path, begin="os.environ |= {'TERM': 'dumb', 'COLUMNS': '10'};")
    screen.expect("> ")
    screen.type("a message of some words\r")
    assert "a message of some words" in screen.expect("> ").replace("\r\n", "")
    assert "\x1b" not in screen.all
    screen.close()


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        (["one two ", "thr", "ee fo", "ur"], ["one two", "three four"]),
        (["1234567890 1", "234567890", "12345"], ["1234567890", "1234567890", "12345"]),
        (["a\tb\n\n", "  12345678 9", "0"], ["a   b", "", "  12345678", "90"]),
        (["ab 東京東京", "東京"], ["ab 東京東", "京東京"]),
        (["1234567 890", "12 3"], ["1234567", "89012 3"]),
    ],
)
def test_words_are_not_cut_by_the_edge(texts: list[str], shown: list[str]) -> None:
    file = io.StringIO()
    answer = RunningAnswer(Console(file=file, force_terminal=True, width=10), lambda text, _ended: ("", text))
    for text in texts:
        answer.add(Increment(0, 0, text, (1,), 0))
    lines = [""]
    for before, column, after in re.findall(r"([^\x1b\n]*)(?:\x1b\[(\d+)G\x1b\[K)?(\n?)", file.getvalue()):
        lines[-1] += before
        lines[-1] = lines[-1][: int(column) - 1] if column else lines[-1]
        lines += [""] * len(after)
    assert [line.rstrip() for line in lines] == shown
    assert all(cell_len(line) <= 10 for line in lines)


def test_a_window_that_shrinks_erases_nothing_of_the_lines_before() -> None:
    """Terminals break these lines anew, so that the cursor is no longer where the word began."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=40)
    answer = RunningAnswer(console, lambda text, _ended: ("", text))
    answer.add(Increment(0, 0, "one two three four fi", (1,), 0))
    console.width = 10
    answer.add(Increment(0, 0, "ve six sevens", (1,), 0))
    assert file.getvalue() == "one two three four five six se\x1b[9G\x1b[K\nsevens"


def test_keys_of_a_terminal(screen: Screen, tmp_path: Path) -> None:
    screen.expect("a model. /help lists commands, Ctrl-D leaves.")
    screen.expect("> ")
    screen.type("slow\r")
    screen.expect("tick tick tick")
    screen.type("\x03")
    assert screen.expect("; interrupted").count("tick") < 4000
    screen.expect("> ")
    screen.type("lost")
    screen.expect("lost")
    screen.expect("/exit or Ctrl-D leaves", keys="\x03")  # while a line is edited
    screen.expect("> ")
    for line in ('"""', "first", "/second"):
        screen.type(f"{line}\r")
        screen.expect("… ")
    screen.type('"""\r')
    screen.expect("to 3 messages: 'first\\n/second'")
    screen.expect("> ")
    screen.type("/reg\t\r")  # Tab completes
    screen.expect("to 3 messages: 'first\\n/second'")
    screen.expect("> ")
    screen.type("\x1b[A\x1b[A\x1b[A\x1b[A\x1b[A\x1b[A\r")  # the arrow brings the first line back
    screen.expect("tick tick tick")
    screen.type("\x03")
    screen.expect("; interrupted")
    screen.expect("> ")
    screen.type("\x04")
    assert screen.process.wait(TIMEOUT_SECONDS) == 0
    assert termios.tcgetattr(screen.slave) == screen.settings, "the terminal is as it was"
    history = tmp_path / "shoal" / "chat_history"
    assert history.read_text().splitlines() == ["slow", '"""', "first", "/second", '"""', "/regenerate", "slow"]
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert stat.S_IMODE(history.parent.stat().st_mode) == 0o700


def test_no_history(tmp_path: Path) -> None:
    screen = Screen(tmp_path, "--no-history")
    screen.expect("> ")
    screen.type("one\r")
    screen.expect("to 1 messages: 'one'")
    screen.expect("> ")
    screen.type("/exit\r")
    assert screen.process.wait(TIMEOUT_SECONDS) == 0
    screen.close()
    assert list(tmp_path.iterdir()) == []
