"""`shoal chat`: what is asked, what is printed and kept, and what Ctrl-C leaves.

Tests of: cli.chat, cli.chat_session, cli.chat_views, cli.chat_input, cli.conversation.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from commands import press_ctrl_c
from shoal.api import Shoal
from shoal.cli import chat_session, chat_views, run
from shoal.cli.chat import _talk
from shoal.cli.chat_input import Entry, next_entry
from shoal.cli.chat_session import ChatSession, ChatSettings
from shoal.cli.chat_views import RunningAnswer, TextView
from shoal.cli.conversation import ChatWriter, Conversation
from shoal.cli.files import read_template
from shoal.cli.views import RunningText
from shoal.errors import RequestError
from shoal.testing import VOCABULARY, tiny_model, tiny_tokenizer
from shoal.testing.scripted import UNSAID, History, runner, scripted
from shoal.types.samples import Increment

BEGIN, END = "<|im_start|>", "<|im_end|>"
LETTERS = range(ord("a") - ord("!"), ord("z") - ord("!") + 1)
"""Ids of the byte tokenizer."""


def talker(respond: Callable[[str], str]) -> History:
    """Says a letter by chance and then what is responded to all before its turn, in the format chatml; behind that "!"."""
    tokenizer = tiny_tokenizer()

    def script(ids: tuple[int, ...]) -> torch.Tensor:
        before, _, begun = tokenizer.decode(ids).rpartition(f"{BEGIN}assistant\n")
        logits = torch.full((VOCABULARY,), UNSAID, dtype=torch.float64)
        answer = f"{respond(before)}{END}"
        said = tokenizer.encode(answer[len(begun) - 1 :][:1] or "!") if begun else LETTERS
        logits[list(said)] = 0
        return logits

    return script


def summary(before: str) -> str:
    """How many messages there were, the first letter of each, and the last one."""
    messages = [part.partition("\n")[2].removesuffix(f"{END}\n") for part in before.split(BEGIN)[1:]]
    return f" {len(messages)} {','.join(one[:1] for one in messages)} {messages[-1]}"


@dataclass
class Spoken:
    """What a chat left."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def answers(self) -> list[list[str]]:
        """Without their letters."""
        return [[sample["text"][1:] for sample in line["samples"]] for line in self.lines if "samples" in line]


Chat = Callable[..., Spoken]


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    """Runs `shoal chat` on lines of stdin, with a scripted pair by default."""
    target = talker(summary)
    models = scripted(target, VOCABULARY, 2048), scripted(target, VOCABULARY, 2048)
    monkeypatch.setattr(
        "shoal.cli.options.ModelSource.load",
        lambda self, prefix_memory=0: Shoal(*models, tiny_tokenizer(), max_batch=8),
    )

    def call(lines: list[str], *options: object) -> Spoken:
        capsys.readouterr()
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        code = run(["chat", "--chat-template", "chatml", "--k", "3", *map(str, options)])
        return Spoken(code, *capsys.readouterr())

    return call


# ── lines of a pipe ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_line_of_a_pipe_is_a_message(talk: Chat) -> None:
    found = talk(["one", "", "two"])
    assert found.code == 0
    first, second = found.out.splitlines()
    assert first[1:] == " 1 o one"
    assert second[1:] == f" 3 o,{first[0]},t two"
    assert re.findall(r"^# (\d+) tokens, [\d.]+ s, \d+ tokens/s, acceptance length ([\d.]+)$", found.err, re.M) != []
    assert all(float(length) > 1.5 for length in re.findall(r"acceptance length ([\d.]+)", found.err))
    assert talk(["one"], "--quiet").err == ""


def test_objects_of_a_pipe(talk: Chat) -> None:
    found = talk(["one", '"""', "/two", "  lines", '"""', '"""three"""'], "--json", "-n", 2, "--seed", 1, "--system", "S")
    assert found.code == 0
    assert [line["prompt"] for line in found.lines] == ["one", "/two\n  lines", "three"]
    assert [len(line["samples"]) for line in found.lines] == [2, 2, 2]
    letter = found.lines[0]["samples"][0]["text"][0]
    assert found.answers[0] == [" 2 S,o one"] * 2
    assert found.answers[1] == [f" 4 S,o,{letter},/ /two\n  lines"] * 2
    assert [sample["finish_reason"] for sample in found.lines[0]["samples"]] == ["stop", "stop"]
    assert all(line["stats"]["accepted"] > 0 and not line["interrupted"] for line in found.lines)
    plain = talk(["one"], "--json", "-n", 2, "--seed", 1, "--system", "S", "--lookahead", "off").lines[0]
    assert plain["stats"]["drafted"] == 0
    assert [s["token_ids"] for s in plain["samples"]] == [s["token_ids"] for s in found.lines[0]["samples"]]


def test_commands_change_what_is_asked(talk: Chat) -> None:
    lines = ["one", "/undo", "two", "/system S", "three", "/reset", "four", "/system", "/n 2", "five"]
    found = talk(lines, "--json")
    assert found.code == 0
    letter = [line["samples"][0]["text"][0] for line in found.lines]
    assert found.answers == [
        [" 1 o one"], [" 1 t two"], [f" 4 S,t,{letter[1]},t three"], [" 2 S,f four"], [f" 3 f,{letter[3]},f five"] * 2,
    ]  # fmt: skip
    assert "taken back: one" in found.err


def test_another_answer_and_the_choice_between_all(talk: Chat) -> None:
    """With a seed, the second attempt is not the first one again."""
    found = talk(["one", "/regenerate", "/regenerate", "two", "/undo", "/choose 1", "three"], "--json", "--seed", 4)
    assert found.code == 0
    assert [line["prompt"] for line in found.lines] == ["one", "one", "one", "two", "three"]
    letters = [line["samples"][0]["text"][0] for line in found.lines]
    assert len(set(letters[:3])) > 1
    assert found.answers[3:] == [[f" 3 o,{letters[2]},t two"], [f" 3 o,{letters[0]},t three"]]
    text = talk(["one", "/regenerate", "/n 2", "/regenerate"], "--seed", 4)
    assert [line[:10] for line in text.out.splitlines() if line.startswith("#")] == ["# answer 3", "# answer 4"]
    assert "answer 3 is taken, /choose K takes another" in text.err


def test_settings(talk: Chat) -> None:
    lines = [
        "/set max_tokens 3", "one", "/stats", "/set stop n", "/set max-new-tokens default", "two", "/set seed 1", "/set",
        "/set seed none", "/set n 2", "three",
    ]  # fmt: skip
    found = talk([*lines, "/stats"], "--json", "--max-new-tokens", 30)
    assert found.code == 0
    assert [len(sample["token_ids"]) for sample in found.lines[0]["samples"]] == [3]
    assert [line["samples"][0]["finish_reason"] for line in found.lines] == ["length", "stop", "stop"]
    assert "\nseed 1\n" in found.err
    assert "\ntemperature 1.0\n" in found.err  # also where the command line does not say it
    assert len(found.answers[2]) == 2
    committed = sum(line["stats"]["committed"] for line in found.lines)
    assert "asked 1 time: 3 tokens, " in found.err
    assert f"asked 3 times: {committed} tokens, " in found.err
    assert "model: " in found.err


def test_the_models_own_sampling_holds_where_nobody_says_another(talk: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in chats over HTTP; `default` takes it again."""
    own = {"temperature": 0.7, "top_p": 0.5, "top_k": 20}
    monkeypatch.setattr("shoal.models.pretrained.own_sampling", lambda hf: own)
    found = talk(["/set", "/set top_k 3", "/set", "/set top_k default", "/set"], "--top-p", 0.9)
    told = [re.findall(rf"^{name} (\d.*)$", found.err, re.M) for name in own]
    assert told == [["0.7"] * 3, ["0.9"] * 3, ["20", "3", "20"]]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/foo", 'there is no command /foo: /help lists them. A message that begins with / is put between """'),
        ("/regenrate", "did you mean /regenerate?"),
        ("/undo", "nothing was said yet"),
        ("/regenerate", "nothing was said yet"),
        ("/choose 1", "nothing was said yet"),
        ("/choose x", "/choose needs a number behind it, got 'x'"),
        ("/choose", "/choose needs K behind it"),
        ("/reset all", "/reset takes nothing behind it"),
        ("/n 0", "n must be an integer in [1, 1000000], got 0"),
        ("/set colour red", "there is no option 'colour'; there are n, temperature, "),
        ("/set top_p 2", "top_p must be in (0, 1], got 2"),
        ("/set seed", "/set seed needs a value behind it"),
        ("/set lookahead psychic", "psychic"),
        ("/load nowhere.json", "cannot read file of messages 'nowhere.json': No such file or directory"),
        ("/save no/where.json", "cannot write 'no/where.json': there is no directory 'no'"),
        ('"""', 'the message that """ opened has no """ behind it'),
        ("\ud800", "the message is not text"),
    ],
)
def test_what_cannot_be_done_is_said_and_the_chat_goes_on(talk: Chat, line: str, words: str) -> None:
    found = talk([line], "--json")
    assert found.code == 2
    assert words in found.lines[-1]["error"]["message"]
    assert "error: " in found.err


def test_a_message_that_gets_no_answer_is_not_kept(talk: Chat) -> None:
    found = talk(["one", "x" * 3000, "two", "/exit", "three"], "--json")
    assert found.code == 2
    assert "the conversation has " in found.lines[1]["error"]["message"]
    assert found.answers[1] == [f" 3 o,{found.lines[0]['samples'][0]['text'][0]},t two"]
    assert len(found.lines) == 3


def test_a_model_without_a_template_needs_one(talk: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chat"]) == 2
    assert (
        "this model has no chat template: give --chat-template FILE, or one of the names alpaca" in capsys.readouterr().err
    )


def test_help_lists_all_commands(talk: Chat) -> None:
    found = talk(["/help"])
    names = "help reset clear undo regenerate n choose save load system set stats exit".split()
    assert re.findall(r"^/(\w+) ", found.err, re.M) == names
    assert found.out == ""


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_conversation_is_saved_loaded_and_generated_from(
    talk: Chat, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my talk.json"
    saved = talk(["one", "two", f"/save {file}"], "--json", "--system", "S")
    texts = [line["samples"][0]["text"] for line in saved.lines]
    document = json.loads(file.read_text())
    assert document == {
        "messages": [
            {"role": "system", "content": "S"}, {"role": "user", "content": "one"}, {"role": "assistant", "content": texts[0]},
            {"role": "user", "content": "two"}, {"role": "assistant", "content": texts[1]},
        ]
    }  # fmt: skip
    expected = f" 6 S,o,{texts[0][0]},t,{texts[1][0]},t three"
    for found in (talk([f"/load {file}", "three"], "--json"), talk(["three"], "--messages", file, "--json")):
        assert found.answers == [[expected]]
    assert talk(["three"], "--messages", file, "--system", "T", "--json").answers == [[expected.replace("S", "T")]]
    ask = ["generate", "--chat-template", "chatml", "--messages", str(file), "-p", "three", "--json", "-n", "2"]
    capsys.readouterr()
    assert run(ask) == 0
    generated = json.loads(capsys.readouterr().out)["prompts"][0]["samples"]
    assert [sample["text"][1:] for sample in generated] == [expected] * 2
    document["messages"].pop()
    file.write_text(json.dumps(document["messages"]))  # a list, whose last message waits for its answer
    waiting = talk([f"/load {file}", "/regenerate"], "--json")
    assert waiting.answers == [[f" 4 S,o,{texts[0][0]},t two"]]
    assert "which waits for an answer: /regenerate" in waiting.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("{}", 'must hold a list of messages, or an object with "messages"'),
        ('["a"]', 'message 1: it must be an object with the texts "role" and "content"'),
        ('[{"role": "tool", "content": "x"}]', "message 1: role 'tool'; a chat in the terminal has system, user, assistant"),
        ('[{"role": "assistant", "content": "x"}]', "message 1: an answer without a message of the user before it"),
        (
            '[{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]',
            "message 2: the system's message comes first",
        ),
        ('[{"role": "user", "content": "\\ud800"}]', "message 1 of "),
    ],
)
def test_a_file_that_holds_no_conversation(talk: Chat, tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "talk.json"
    file.write_text(text)
    found = talk(["one", f"/load {file}", "two"], "--json")
    assert words in found.lines[1]["error"]["message"]
    assert found.answers[1][0].startswith(" 3 o,"), "the conversation is what it was"


# ── earlier turns are not computed again ────────────────────────────────────────────────────────────────────────────


def test_a_turn_computes_what_is_new(talk: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens as without the memory, by fewer tokens of the prompt."""
    models = runner(tiny_model("llama"), 1024), runner(tiny_model("llama"), 1024)
    monkeypatch.setattr(
        "shoal.cli.options.ModelSource.load",
        lambda self, prefix_memory=0: Shoal(*models, tiny_tokenizer(), max_batch=8, prefix_memory=prefix_memory),
    )
    ask = ["Tell me of the sea.", "And of ships.", "Who made them?"]
    options = ("--json", "--seed", 3, "--max-new-tokens", 12, "--k", 3, "--system", "You are brief.")
    keeping, plain = talk(ask, *options, "--prefix-memory", 0.001).lines, talk(ask, *options, "--prefix-memory", 0).lines
    for turn, (kept, computed) in enumerate(zip(keeping, plain, strict=True)):
        assert kept["samples"][0]["token_ids"] == computed["samples"][0]["token_ids"]
        assert computed["stats"]["restored_tokens"] == 0
        assert computed["stats"]["prefill_tokens"] == computed["prompt_tokens"] - 1
        assert kept["stats"]["prefill_tokens"] == kept["prompt_tokens"] - 1 - kept["stats"]["restored_tokens"]
        if turn:
            assert kept["stats"]["restored_tokens"] >= keeping[turn - 1]["prompt_tokens"]
    assert sum(line["stats"]["accepted"] for line in keeping) > 0
    assert keeping[2]["stats"]["prefill_tokens"] < keeping[2]["prompt_tokens"] / 2


# ── reasoning ───────────────────────────────────────────────────────────────────────────────────────────────────────


REASONS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n" \
    "{# </think> #}"  # fmt: skip


@pytest.fixture
def reasoning(talk: Chat, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Chat:
    """As `talk`, with a model that reasons before it answers, about what the prompt is."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["</think>"]})
    end = tokenizer.convert_tokens_to_ids("</think>")
    start, begin = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (BEGIN, f"{BEGIN}assistant\n"))

    def script(ids: tuple[int, ...]) -> torch.Tensor:
        at = max(i for i in range(len(ids) - len(begin) + 1) if ids[i : i + len(begin)] == begin) + len(begin)
        count = sum(ids[i : i + len(start)] == start for i in range(at))
        said = [*tokenizer.encode(f"<think>\nIt has {count}.\n"), end, *tokenizer.encode(f"\n\nYes {count}.{END}")]
        logits = torch.full((len(tokenizer),), UNSAID, dtype=torch.float64)
        logits[said[min(len(ids) - at, len(said) - 1)]] = 0
        return logits

    models = scripted(script, len(tokenizer), 2048), scripted(script, len(tokenizer), 2048)
    monkeypatch.setattr(
        "shoal.cli.options.ModelSource.load", lambda self, prefix_memory=0: Shoal(*models, tokenizer, max_batch=8)
    )
    file = tmp_path / "reasons.jinja"
    file.write_text(REASONS)
    return lambda lines, *options: talk(lines, "--stop", END, *options, "--chat-template", file)


def test_reasoning_is_apart_and_not_told_again(reasoning: Chat, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    found = reasoning(["one", f"/save {file}", "two"], "--json")
    printed_samples = [line["samples"][0] for line in found.lines]
    assert [(s["reasoning"], s["text"]) for s in printed_samples] == [("It has 2.", "Yes 2."), ("It has 4.", "Yes 4.")]
    assert printed_samples[0]["accepted"] > 0
    turn = len("<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n")
    assert [line["prompt_tokens"] for line in found.lines] == [turn, 2 * turn + len("Yes 2.<|im_end|>\n")]
    assert json.loads(file.read_text())["messages"][1] == {
        "role": "assistant", "content": "Yes 2.", "reasoning_content": "It has 2.",
    }  # fmt: skip
    assert reasoning(["one"]).out == "Yes 2.\n", "a pipe gets the answer"
    several = reasoning(["one"], "-n", 2).out
    assert several.count("Yes 2.") == 2
    assert "It has" not in several


def test_a_terminal_shows_reasoning_dim(reasoning: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=90, height=40, highlight=False)
    monkeypatch.setattr(chat_views, "stdout", lambda: console)
    reasoning(["one"])
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown) == "It has 2.\n\nYes 2.\n"
    assert "\x1b[2m" in shown.split("Yes")[0]
    assert "\x1b" not in shown.split("Yes")[1]


# ── Ctrl-C ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_ctrl_c_ends_a_pipe_with_what_has_come(talk: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = talk(["one and only"], "--seed", 2).out
    press_ctrl_c(monkeypatch, chat_session, 2)
    found = talk(["one and only", "two"], "--seed", 2, "--k", 2)
    assert found.code == 130
    assert whole.startswith(found.out[:-1])
    assert 1 < len(found.out) < len(whole)
    assert "interrupted" in found.err


@dataclass
class Terminal:
    """A chat whose lines a test enters."""

    session: ChatSession
    model: Shoal

    def enter(self, *lines: str | type[BaseException]) -> None:
        entered: Iterator[Any] = iter(lines)

        def read(_prompt: str) -> str:
            line = next(entered, EOFError)
            if isinstance(line, str):
                return line
            raise line

        _talk(self.session, TextView(quiet=False), read)


@pytest.fixture
def terminal() -> Terminal:
    target = runner(tiny_model("llama"), 1024)
    model = Shoal(target, target, tiny_tokenizer(), max_batch=8, prefix_memory=1 << 20)
    settings = ChatSettings(1, {"max_new_tokens": 30, "seed": 3, "lookahead": 2}, (END,))
    writer = ChatWriter(model.tokenizer, read_template(Path("chatml")))
    return Terminal(ChatSession(model, writer, Conversation(), settings, TextView(quiet=False)), model)


def test_ctrl_c_keeps_what_has_come_and_the_chat(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    press_ctrl_c(monkeypatch, chat_session, 3)
    terminal.enter("one", KeyboardInterrupt, "two")
    turns = terminal.session.conversation.turns
    assert [turn.text for turn in turns] == ["one", "two"]
    first, second = (turn.answer for turn in turns)
    assert first is not None
    assert second is not None
    assert (first.interrupted, second.interrupted) == (True, False)
    shown = capsys.readouterr()
    assert shown.out == f"{first.text}\n{second.text}\n"
    assert 0 < len(first.text) < len(second.text)
    assert terminal.session.conversation.document()["interrupted"] == [1]
    assert "/exit or Ctrl-D leaves" in shown.err


def test_ctrl_c_twice_drops_the_answer_and_what_was_kept_of_prompts(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second one cuts a round, so that nothing of it is relied on: the next answer computes its whole prompt."""
    terminal.enter("one")
    assert terminal.model.prefixes is not None
    press_ctrl_c(monkeypatch, chat_session, 3, times=2)
    terminal.enter("two", "three")
    assert [turn.text for turn in terminal.session.conversation.turns] == ["one", "three"]
    assert "stopped: nothing of this answer is kept" in capsys.readouterr().err
    assert terminal.session.stats is not None
    assert terminal.session.stats.restored_tokens == 0
    assert terminal.session.messages == 2


# ── what is entered ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("lines", "entry"),
    [
        (["", "  ", " a "], Entry("a")),
        (["/set seed  1 "], Entry("/set seed  1", is_command=True)),
        ([" /etc is a directory"], Entry("/etc is a directory")),
        (['"""', " a", "", "b ", '"""'], Entry(" a\n\nb ")),
        (['"""a', 'b"""'], Entry("a\nb")),
        (['"""a"""'], Entry("a")),
        (['""""""'], Entry("")),
        (["a\nb"], Entry("a\nb")),
    ],
)
def test_entries(lines: list[str], entry: Entry) -> None:
    left = iter(lines)
    assert next_entry(lambda _prompt: next(left)) == entry
    assert list(left) == []


@pytest.mark.parametrize("text", ["a\n", "a", ""])
def test_a_text_that_grows_ends_its_line_once(text: str) -> None:
    """An answer of a chat, and a sample of `shoal generate`."""
    console = Console(file=io.StringIO())
    views = [RunningAnswer(console, lambda text, _ended: ("", text))]
    if text:
        views.append(RunningText(console, lambda ids: "a" * len(ids)))
    for view in views:
        with view:
            view.add(Increment(0, 0, text, (1,), 0))
    assert console.file.getvalue() == ("a\n" * len(views) if text else "")  # type: ignore[attr-defined]


def test_a_value_that_is_refused_changes_nothing() -> None:
    settings = ChatSettings(1, {"temperature": 0.5})
    with pytest.raises(RequestError, match="temperature must be"):
        settings.set("temperature", "-1")
    assert settings.stream_options(0) == {"temperature": 0.5}
    settings.set("seed", "7")
    assert [settings.stream_options(attempt)["seed"] for attempt in (0, 2)] == [7, 9]
