"""The command line: what it prints, what it refuses, and with which exit code.

Tests of: cli.generate, cli.demo, cli.check, cli.options, cli.option_groups, cli.views, cli.printed_samples, cli.console, cli.files,
bench.
"""

from __future__ import annotations

import errno
import importlib
import inspect
import io
import json
import math
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Optional

import pytest
import typer
import typer.main
from rich.console import Console
from rich.text import Text
from typer import rich_utils
from typer.testing import CliRunner

from commands import SAMPLE_KEYS, Answer, Command, Models, press_ctrl_c, shoal, tiny
from shoal import cli
from shoal.bench import Costs, first_difference, per_position, predicted_speedup
from shoal.cli import console as console_module
from shoal.cli import generate
from shoal.cli import option_groups as option_groups_module
from shoal.cli.console import plain_table, printable, stdout
from shoal.cli.conversation import ChatOptions, message
from shoal.cli.files import read_template, read_text, write_whole
from shoal.cli.option_groups import MODELS, OUTPUT, option_groups
from shoal.cli.options import ModelSource
from shoal.cli.printed_samples import describe, document, follow, sample_document, show_output
from shoal.cli.prompt_lines import PromptLine, lines_of, merged, with_ends
from shoal.cli.views import Board
from shoal.models.attention.methods import METHODS
from shoal.types.samples import Increment, Output, Result, Sample, TopLogprobs
from shoal.types.stats import Stats

__all__ = ["shoal", "tiny"]  # fixtures

STATS_KEYS = {
    "rounds", "target_passes", "draft_passes", "guide_passes", "prefills", "prefill_tokens", "restored_tokens",
    "prefill_chunks", "fused_chunks", "row_rounds", "pauses", "resampled", "restarted",
    "drafted", "accepted", "committed", "seconds_target", "seconds_draft", "seconds_prefill", "seconds_rounds",
    "seconds_propose", "seconds_verify", "seconds_accept", "seconds_commit", "seconds", "by_drafter", "executors", "loaded",
    "lossy", "updates_behind",
    "acceptance_length",
    "acceptance_rate", "bookkeeping", "tokens_per_second",
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# generate


def test_generate_json_has_exactly_these_keys(shoal: Command, tiny: Models) -> None:
    answer = shoal("generate", *tiny.pair, "-p", "ab", "-p", "c", "-n", 2, "--k", 4, "--max-new-tokens", 8, "--json")
    assert answer.code == 0
    assert set(answer.json) == {"prompts", "stats"}
    assert [set(prompt) for prompt in answer.json["prompts"]] == [{"prompt", "samples"}] * 2
    assert [prompt["prompt"] for prompt in answer.json["prompts"]] == ["ab", "c"]
    samples = [sample for prompt in answer.json["prompts"] for sample in prompt["samples"]]
    assert [set(sample) for sample in samples] == [SAMPLE_KEYS] * 4
    assert set(answer.json["stats"]) == STATS_KEYS


def test_generate_greedy_is_the_same_with_and_without_drafts(shoal: Command, tiny: Models) -> None:
    ask = ["generate", *tiny.pair, "-p", "def", "-n", 2, "--max-new-tokens", 12, "--json", "--greedy"]
    drafting, plain = shoal(*ask, "--k", 4).json, shoal(*ask, "--lookahead", "off", "--temperature", 0).json
    texts = [[sample["token_ids"] for sample in found["prompts"][0]["samples"]] for found in (drafting, plain)]
    assert texts[0] == texts[1]
    assert drafting["stats"]["drafted"] > 0
    assert (plain["stats"]["drafted"], plain["stats"]["acceptance_length"]) == (0, 1.0)


def test_generate_continues_prompts_that_end_inside_a_token(shoal: Command, tiny: Models) -> None:
    ask = ["generate", *tiny.pair, "-p", "def f", "--max-new-tokens", 8, "--seed", 3, "--json"]
    (aligned,), (plain,) = (shoal(*ask, *more).json["prompts"][0]["samples"] for more in (["--align"], []))
    assert len(plain["token_ids"]) == 8
    assert len(aligned["token_ids"]) == 8 + 3
    assert bytes(aligned["token_ids"][:3]) != bytes(plain["token_ids"][:3])


def test_generate_reports_logprobs_when_asked(shoal: Command, tiny: Models) -> None:
    answer = shoal(
        "generate", *tiny.pair, "-p", "x", "--max-new-tokens", 4, "--json", "--logprobs", "--top-logprobs", 2, "--top-k", 1
    )  # fmt: skip
    [sample] = answer.json["prompts"][0]["samples"]
    assert set(sample) == SAMPLE_KEYS | {"logprobs", "processed_logprobs", "top_logprobs"}
    count = len(sample["token_ids"])
    assert len(sample["logprobs"]) == len(sample["processed_logprobs"]) == len(sample["top_logprobs"]) == count
    assert {len(top["raw"]) for top in sample["top_logprobs"]} == {2}


def test_generate_ranked_puts_the_most_probable_first(shoal: Command, tiny: Models) -> None:
    answer = shoal("generate", *tiny.pair, "-p", "x", "-n", 5, "--max-new-tokens", 6, "--json", "--ranked", "--seed", 1)
    means = [sample["mean_logprob"] for sample in answer.json["prompts"][0]["samples"]]
    assert means == sorted(means, reverse=True)


def test_a_terminal_is_told_once_of_drafters_that_need_no_training(
    shoal: Command, tiny: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(console_module, "stderr", lambda: Console(file=screen, force_terminal=True, width=80))
    ask = ["-p", "def f", "-n", 2, "--max-new-tokens", 4]
    for given in (["--model", tiny.target, "--k", "off"], tiny.pair, ["--model", tiny.target, "--draft", "auto"]):
        assert shoal("generate", *given, *ask).code == 0
    assert "hint" not in screen.getvalue()
    assert shoal("generate", "--model", tiny.target, *ask).code == 0
    assert re.findall("hint: .*--draft auto.*", screen.getvalue()) != []
    assert screen.getvalue().count("hint") == 1
    monkeypatch.setattr(console_module, "stderr", lambda: Console(file=screen))
    assert shoal("generate", "--model", tiny.target, *ask).code == 0
    assert screen.getvalue().count("hint") == 1


def test_generate_prints_a_header_and_the_text(shoal: Command, tiny: Models) -> None:
    answer = shoal("generate", *tiny.pair, "-p", "x", "-n", 2, "--max-new-tokens", 6, "--k", 2)
    assert (answer.code, answer.err) == (0, "")  # no progress where stderr is no terminal
    headers = [line for line in answer.out.splitlines() if line.startswith("# sample ")]
    assert len(headers) == 2
    for word in ("rank ", "mean logprob ", " tokens", "/round"):
        assert all(word in header for header in headers)


TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }};{% endfor %}a"


def test_generate_answers_messages(shoal: Command, tiny: Models, tmp_path: Path) -> None:
    """By a template the prompt is what the template writes, the system's message first."""
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    ask = ["generate", *tiny.pair, "--max-new-tokens", 6, "--greedy", "--json"]
    chat = [*ask, "-p", "bc", "--chat-template", tmp_path / "chat.jinja"]
    for options, text in (([], "ubc;a"), (["--chat"], "ubc;a"), (["--system", "de"], "sde;ubc;a")):
        answer, plain = shoal(*chat, *options), shoal(*ask, "-p", text)
        assert answer.code == plain.code == 0
        (told,), (same,) = answer.json["prompts"], plain.json["prompts"]
        assert told["prompt"] == "bc"
        assert told["samples"][0]["token_ids"] == same["samples"][0]["token_ids"]
    refused = shoal(*ask, "-p", "bc", "--system", "de")
    assert refused.code == 2
    assert "this model has no chat template" in refused.json["error"]["message"]
    prompt, named = (
        "<|im_start|>user\nbc<|im_end|>\n<|im_start|>assistant\n",
        [*ask, "-p", "bc", "--chat-template", "chatml"],
    )
    answer, plain = shoal(*named), shoal(*ask, "-p", prompt, "--stop", "<|im_end|>")
    assert answer.json["prompts"][0]["samples"][0]["token_ids"] == plain.json["prompts"][0]["samples"][0]["token_ids"]
    refused = shoal(*ask, "-p", "bc", "--chat-template", "llama4")
    assert refused.code == 2
    assert "give a file, or one of the names alpaca, chatml" in refused.json["error"]["message"]
    (tmp_path / "wrong.jinja").write_text("{{ raise_exception('no users here') }}")
    refused = shoal(*ask, "-p", "bc", "--chat-template", tmp_path / "wrong.jinja")
    assert refused.code == 2
    assert "no users here" in refused.json["error"]["message"]


def test_generate_takes_penalties(shoal: Command, tiny: Models) -> None:
    ask = ["generate", *tiny.pair, "-p", "ab", "--max-new-tokens", 16, "--greedy", "--json"]

    def repeated(*options: object) -> int:
        ids = shoal(*ask, *options).json["prompts"][0]["samples"][0]["token_ids"]
        return len(ids) - len(set(ids))

    assert repeated() > 0
    for name in ("--presence-penalty", "--frequency-penalty"):
        assert repeated(name, 100) == 0
    assert repeated("--repetition-penalty", 50) < repeated()
    assert shoal(*ask, "--repetition-penalty", 0).code == 2


def test_generate_reads_stdin_and_whole_files(
    shoal: Command, tiny: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = ["generate", "--model", tiny.target, "--max-new-tokens", 2, "--json"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert [prompt["prompt"] for prompt in shoal(*ask).json["prompts"]] == ["two\nlines\n"]
    (tmp_path / "a.txt").write_text("first\n\nprompt\n")
    (tmp_path / "b.txt").write_text("second")
    answer = shoal(*ask, "--prompt-file", tmp_path / "a.txt", "-f", tmp_path / "b.txt")
    assert [prompt["prompt"] for prompt in answer.json["prompts"]] == ["first\n\nprompt\n", "second"]
    mark = b"\xef\xbb\xbf"  # as editors on Windows begin a file, and with their ends of lines
    (tmp_path / "a.txt").write_bytes(mark + b"first\r\nline")
    (tmp_path / "c.jsonl").write_bytes(mark + b'{"prompt": "third"}\r\n')
    for option, file, prompt in (("-f", "a.txt", "first\nline"), ("--prompts", "c.jsonl", "third")):
        assert shoal(*ask, option, tmp_path / file).json["prompts"][0]["prompt"] == prompt
    monkeypatch.setattr(sys, "stdin", io.StringIO("\ufefftwo"))
    assert [prompt["prompt"] for prompt in shoal(*ask).json["prompts"]] == ["two"]
    assert read_text(tmp_path / "a.txt", newline="") == "\ufefffirst\r\nline"
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    refused = shoal("generate")
    assert (refused.code, refused.out, "stdin is empty" in refused.err) == (2, "", True)


def test_generate_writes_a_file_instead_of_stdout(shoal: Command, tiny: Models, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    answer = shoal("generate", *tiny.pair, "-p", "x", "--max-new-tokens", 2, "--json", "--output", file)
    assert (answer.code, answer.out) == (0, "")
    assert set(json.loads(file.read_text())) == {"prompts", "stats"}
    assert os.listdir(tmp_path) == ["out.json"]


def test_a_prompt_has_as_many_samples_as_its_line_says() -> None:
    lines = [PromptLine("a", 1), PromptLine("b"), PromptLine("c", 5)]
    assert merged(lines, 3, {})["n"] == [1, 3, 5]


def test_stop_strings_of_a_template_stand_beside_those_given() -> None:
    assert with_ends({"stop": "x"}, ["end"]) == {"stop": ["x", "end"]}
    assert with_ends({"eos": ()}, ["end"]) == {"eos": ()}  # nothing is to end samples


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "out.txt"
    file.write_text("before")
    file.chmod(0o640)
    with pytest.raises(UnicodeEncodeError):
        write_whole(file, "half" * 100_000 + "\ud800")  # a lone surrogate cannot be written
    assert file.read_text() == "before"
    assert os.listdir(tmp_path) == ["out.txt"]
    write_whole(file, "after")
    assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == ("after", 0o640)


def test_a_link_is_followed_and_a_pipe_is_no_file_to_replace(tmp_path: Path) -> None:
    file, link, pipe = (tmp_path / name for name in ("file", "link", "pipe"))
    link.symlink_to(file)
    write_whole(link, "through")
    assert (link.is_symlink(), file.read_text()) == (True, "through")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "passed on")
    assert os.read(reader, 100) == b"passed on"
    os.close(reader)
    assert pipe.is_fifo()
    assert sorted(os.listdir(tmp_path)) == ["file", "link", "pipe"]


def test_a_disk_that_is_full_is_one_line(
    shoal: Command, tiny: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("shoal.cli.files.os.replace", fail)
    file = tmp_path / "out.txt"
    answer = shoal("generate", *tiny.pair, "-p", "x", "--max-new-tokens", 2, "--output", file)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == f"error: cannot write {str(file)!r}: No space left on device\n"
    assert not list(tmp_path.iterdir())


def test_a_prompt_of_stray_bytes(shoal: Command, tiny: Models) -> None:
    """What is no UTF-8 on a command line reaches Python as halves of surrogate pairs."""
    for command in ("generate", "demo", "check"):
        answer = shoal(command, *tiny.pair, "-p", os.fsdecode(b"a\xff"), "--json")
        assert answer.code == 2
        assert answer.json["error"]["message"].endswith("is not text: U+DCFF at position 1 stands for no character")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-p", ""], "prompt from --prompt is empty"),
        (["-p", "x", "--output", "."], "cannot write '.': it is a directory"),
        (["-p", "x", "--max-batch", "0"], "--max-batch"),
        (["-p", "x", "--top-logprobs", "-1"], "--top-logprobs"),
        (["-p", "x", "-n", "0"], "'-n' / '--samples': it must be greater than or equal to 1"),
        (["-p", "x", "--temperature", "-1"], "temperature must be >= 0"),
        (["-p", "x", "--lookahead", "psychic"], "psychic"),
        (["-p", "x", "--k", "-1"], "-1"),
        (["-p", "x", "--top-p", "0"], "top_p"),
        (["-p", "x", "--max-new-tokens", "0"], "max_new_tokens"),
        (["-p", "x", "--dtype", "int4"], "'--dtype': 'int4' is not one of"),
        (["-f", "no-such-file.txt"], "no-such-file.txt"),
        (["-p", "x", "--greedy", "--temperature", "0.5"], "--greedy"),
        (["-p", "x", "--model", "./no-such-model"], "no-such-model"),
        (["-p", "x", "--draft", "./no-target"], "--draft DIR needs --model"),
        (["-p", "x", "--output", "no-such-folder/out.json"], "no-such-folder"),
        (["-p", "x", "--no-such-option"], "--no-such-option"),
    ],
)
def test_generate_refuses(shoal: Command, arguments: list[str], words: str) -> None:
    answer = shoal("generate", *arguments, "--json")
    assert answer.code == 2
    assert set(answer.json) == {"error"}
    assert set(answer.json["error"]) == {"type", "message"}
    assert words in answer.json["error"]["message"]
    assert answer.err == f"error: {answer.json['error']['message']}\n"


# ---------------------------------------------------------------------------------------------------------------------
# Failures of ours, and interruptions


def _fail(*_: object) -> None:
    raise ZeroDivisionError("spilt\nmilk")


@pytest.mark.parametrize(("command", "name"), [("batch", "input"), ("batch", "output"), ("complete", "file")])
def test_an_argument_is_no_option(capsys: pytest.CaptureFixture[str], command: str, name: str) -> None:
    """Options that sound like it are no help."""
    assert cli.run([command, f"--{name}", "x"]) == 2
    assert capsys.readouterr().err == f"error: --{name} is no option: give {name.upper()} itself, without a name\n"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["gen"], "there is no command 'gen'; did you mean 'generate'?"),
        (["benhc"], "there is no command 'benhc'; did you mean 'bench'?"),
        (["xyz"], "there is no command 'xyz'; there are demo, generate, "),
        (["train", "draft"], "there is no command 'draft'; did you mean 'drafter'?"),
        (["eval", "--data", "f"], "jsonschema; usage: shoal eval [OPTIONS] SET"),
        (["batch", "x"], "Missing argument 'OUTPUT'; usage: shoal batch [OPTIONS] INPUT OUTPUT"),
    ],
)
def test_a_wrong_command_line_is_told_the_nearest(capsys: pytest.CaptureFixture[str], given: list[str], said: str) -> None:
    assert cli.run(given) == 2
    assert said in capsys.readouterr().err


def test_a_batch_without_ray_makes_no_output(shoal: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answers = tmp_path / "asked.jsonl", tmp_path / "answers.jsonl"
    asked.write_text('{"id": "a", "prompt": "x"}\n')
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "shoal.serve.cluster", raising=False)
    monkeypatch.delattr(importlib.import_module("shoal.serve"), "cluster", raising=False)  # other tests have loaded it
    answer = shoal("batch", asked, answers, "--ray")
    assert (answer.code, answers.exists()) == (2, False)
    assert "--ray needs more packages" in answer.err
    assert "pip install '.[ray]'" in answer.err


def test_a_group_without_one_of_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["train"]) == 2
    said = capsys.readouterr()
    assert ("medusa" in said.out, said.err) == (True, "error: a command is missing, see the list above\n")


def test_our_failure_is_one_line_and_a_hint(shoal: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.cli.options.ModelSource.load", _fail)
    monkeypatch.delenv("SHOAL_DEBUG", raising=False)
    answer = shoal("generate", "-p", "x")
    assert answer.code == 1
    assert answer.err.startswith("error: ZeroDivisionError: spilt milk")
    assert (answer.err.count("\n"), "SHOAL_DEBUG=1" in answer.err) == (1, True)
    monkeypatch.setenv("SHOAL_DEBUG", "1")
    assert "Traceback" in shoal("generate", "-p", "x").err


def test_interrupt_cancels_and_keeps_what_finished(shoal: Command, tiny: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    press_ctrl_c(monkeypatch, generate, 10)
    ask = ["generate", "--model", tiny.target, "-p", "x", "-n", 3, "--seed", 0, "--rule", "rejection"]
    ask += ["--max-new-tokens", 60]
    answer = shoal(*ask, "--json")
    assert answer.code == 130
    samples = answer.json["prompts"][0]["samples"]
    assert "cancelled" in {sample["finish_reason"] for sample in samples}
    assert all(sample["token_ids"] for sample in samples)
    assert "interrupted: 0 of 3 samples finished" in answer.err
    press_ctrl_c(monkeypatch, generate, 10)
    assert "# sample" not in shoal(*ask).out


def test_an_interrupted_run_writes_no_file(
    shoal: Command, tiny: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    press_ctrl_c(monkeypatch, generate, 1)
    answer = shoal("generate", "--model", tiny.target, "-p", "x", "-n", 2, "--output", tmp_path / "out.txt")
    assert answer.code == 130
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------------------------------
# option groups


@dataclass(frozen=True)
class Size:
    width: Annotated[int, typer.Option("--width", min=1, rich_help_panel=OUTPUT)] = 3
    hidden: Annotated[int, typer.Option("--hidden", rich_help_panel=OUTPUT)] = 7


@dataclass(frozen=True)
class Work:
    file: Annotated[str, typer.Argument()]
    steps: Annotated[int, typer.Option("--steps", rich_help_panel=MODELS)] = 1


def test_groups_are_options_by_panel_and_come_back_as_groups() -> None:
    calls: list[tuple[Size, Work, bool]] = []

    @option_groups(without={"hidden"})
    def command(size: Size, work: Work, quiet: Annotated[bool, typer.Option("--quiet")] = False) -> None:
        """A command."""
        calls.append((size, work, quiet))

    assert list(inspect.signature(command).parameters) == ["file", "quiet", "steps", "width"]
    app = typer.Typer()
    app.command()(command)
    assert CliRunner().invoke(app, ["a", "--width", "5", "--quiet"]).exit_code == 0
    assert CliRunner().invoke(app, ["b", "--steps", "2"]).exit_code == 0
    assert calls == [(Size(5), Work("a"), True), (Size(), Work("b", 2), False)]
    assert CliRunner().invoke(app, ["a", "--hidden", "1"]).exit_code == CliRunner().invoke(app, []).exit_code == 2


def test_options_whose_default_is_none_on_python_3_10(monkeypatch: pytest.MonkeyPatch) -> None:
    """There `get_type_hints` puts Optional around an annotation, `Annotated` and all, whose parameter defaults to None."""

    def hints_of_3_10(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
        hints = typing.get_type_hints(function, **options)
        if not isinstance(function, type):
            for parameter in inspect.signature(function).parameters.values():
                if parameter.default is None:
                    hints[parameter.name] = Optional[hints[parameter.name]]  # noqa: UP045
        return hints

    monkeypatch.setattr(option_groups_module, "get_type_hints", hints_of_3_10)
    calls: list[tuple[Size, str | None]] = []

    @option_groups()
    def command(size: Size, name: Annotated[str | None, typer.Option("--name", rich_help_panel=MODELS)] = None) -> None:
        """A command."""
        calls.append((size, name))

    assert list(inspect.signature(command).parameters) == ["name", "width", "hidden"]
    app = typer.Typer()
    app.command()(command)
    assert CliRunner().invoke(app, []).exit_code == CliRunner().invoke(app, ["--name", "x"]).exit_code == 0
    assert calls == [(Size(), None), (Size(), "x")]


# ---------------------------------------------------------------------------------------------------------------------
# demo


def test_demo_json_finds_greedy_decoding_identical(shoal: Command, tiny: Models) -> None:
    answer = shoal("demo", *tiny.pair, "-p", "def", "-n", 3, "--max-new-tokens", 12, "--repeats", 2, "--json", "--k", 4)
    assert answer.code == 0
    found = answer.json
    assert found["greedy_identical"] is True
    assert found["greedy"]["drafted"] > 0
    assert (found["greedy"]["rows"], found["greedy"]["same"]) == (3, 3)
    assert found["speculative"]["drafted"] > 0
    assert found["plain"]["drafted"] == 0
    assert found["plain"]["acceptance_length"] == 1.0
    assert found["dtype"] == "float32"
    assert len(found["samples"]) == 3


def test_demo_prints_a_table_without_escapes(shoal: Command, tiny: Models) -> None:
    ask = ["demo", *tiny.pair, "-p", "def", "-n", 2, "--repeats", 1]
    answer = shoal(*ask, "--max-new-tokens", 8, "--k", 2)
    assert answer.code == 0
    assert "\x1b" not in answer.out
    for words in ("tokens/s", "acceptance length", "target passes", "drafted tokens", "speed-up: "):
        assert words in answer.out
    assert "greedy identical: yes (float32, 2 rows)" in answer.out
    undrafted = shoal(*ask, "--max-new-tokens", 1)
    assert "no speed-up: " in undrafted.out
    assert not re.search(r"speed-up: \d", undrafted.out)


def test_demo_sees_a_difference(shoal: Command, tiny: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control: a speculative run that ends early must not pass for identical."""
    from shoal import Shoal

    generate = Shoal.generate

    def shortened(self: Shoal, prompts: Any, n: int, **options: Any) -> Any:
        cut = 1 if options["lookahead"] != "off" else 0
        return generate(self, prompts, n, **{**options, "max_new_tokens": options["max_new_tokens"] - cut})

    monkeypatch.setattr(Shoal, "generate", shortened)
    answer = shoal("demo", *tiny.pair, "-p", "def", "-n", 2, "--max-new-tokens", 8, "--repeats", 1, "--k", 3)
    assert answer.code == 1
    assert "greedy identical: no (first difference: prompt 1, row 1, token 8)" in answer.out


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--k", "0", "-p", "x"], "nothing was drafted"),
        (["--lookahead", "psychic"], "psychic"),
        (["-p", ""], "empty"),
        ([], "--draft"),
    ],
)
def test_demo_refuses(shoal: Command, tiny: Models, extra: list[str], words: str) -> None:
    models = tiny.pair if extra else ("--model", str(tiny.target))
    answer = shoal("demo", *models, "--max-new-tokens", 4, *extra)
    assert (answer.code, words in answer.err) == (2, True)


def test_board_colours_accepted_tokens_and_shows_all_text(tiny: Models) -> None:
    from shoal import load

    pair = load(tiny.target, tiny.target)  # a drafter equal to its target: nearly everything is accepted
    stream = pair.stream("def", 3, max_new_tokens=12, temperature=0.0, lookahead=3)
    board = Board(stdout(), [3], lambda ids: str(pair.tokenizer.decode(ids, skip_special_tokens=True)))
    result, interrupted = follow(stream, board.add)
    assert not interrupted
    for row, sample in zip(board.rows, result[0].samples, strict=True):
        assert row.text.plain == printable(sample.text)
        assert {span.style for span in row.text.spans} == {"green", "yellow"}
        assert row.rounds == sample.rounds
    length = f"acceptance length {result.stats.acceptance_length:.2f}"
    assert length in str(board._counters())


def test_a_board_beside_a_table_of_other_runs_shows_no_acceptance_length() -> None:
    board = Board(Console(width=60, height=9, file=io.StringIO()), [1], lambda ids: "")
    board.add(Increment(0, 0, "x", (1,) * 4, 0))
    assert "round 4   acceptance length 1.00   4 tokens" in str(board._counters())
    board.acceptance = False
    assert "acceptance" not in str(board._counters())


def test_a_narrow_terminal_loses_words_before_figures() -> None:
    table = plain_table("", "plain", "speculative")
    table.add_row("milliseconds per token, mean over rows", "123.45", "67.89")
    console = Console(width=40, file=io.StringIO())
    console.print(table)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(word in shown for word in ("plain", "speculative", "123.45", "67.89"))
    board = Board(Console(width=40, height=10, file=io.StringIO()), [8], str)
    board.console.print(board.render())
    lines = board.console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line[:5] for line in lines[:8]] == [f"row {row}" for row in range(1, 9)]


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[31mb\r\x9b\tc\n") == "a\ufffd[31mb\ufffd\ufffd\tc\n"


def test_a_row_that_has_ended_shows_text_to_its_last_line() -> None:
    """Line breaks at the end of a sample are no lines of its panel, which has few."""
    board = Board(Console(width=60, height=9, file=io.StringIO()), [1], lambda ids: "")
    board.rows[0].add(Increment(0, 0, "one\ntwo\nthree\nfour\n\n", (1, 2), 0, "eos"), board.decode)
    board.console.print(board.render())
    shown = board.console.file.getvalue()  # type: ignore[attr-defined]
    assert re.findall("one|two|three|four", shown) == ["two", "three", "four"]
    assert board.rows[0].rounds == 2  # plain ones, computed together
    assert [Increment(0, 0, "", (1,) * tokens, kept).rounds for tokens, kept in ((3, 2), (3, 3), (0, 0))] == [1, 1, 0]


def test_the_header_of_a_sample_fits_a_terminal() -> None:
    sample = Sample(
        "x", (0,) * 128, (-2.5,) * 128, (-2.5,) * 128, -12.345, "length", 1.0, rounds=100, drafted=60, accepted=28,
        target_passes=100, drafters=(None,) * 128,
    )  # fmt: skip
    console = Console(width=80, file=io.StringIO(), force_terminal=True, no_color=True)
    show_output(console, Output("x", (1,), (sample,) * 16), None, by_rank=False)
    headers = [line for line in Text.from_ansi(console.file.getvalue()).plain.splitlines() if line.startswith("# ")]  # type: ignore[attr-defined]
    assert len(headers) == 16
    assert max(map(len, headers)) <= 80
    assert headers[-1].endswith("mean logprob -12.345, length, 128 tokens, 1.28/round")
    cut = replace(sample, syntax="cut", in_time=False)  # tokens that a check cut off were committed all the same
    assert (
        describe(replace(cut, token_ids=(0,))) == "mean logprob -12.345, length after the time budget, 1 token, 1.28/round"
    )
    assert "after" not in describe(replace(cut, finish_reason="time"))


def test_an_object_of_a_sample_has_each_figure_in_its_place() -> None:
    tops = TopLogprobs(((5, -1.0), (6, -2.0)), ((5, -0.5), (6, -math.inf)))
    sample = Sample("x", (5,), (-1.0,), (-0.5,), -1.0, "length", 1.0, 1, 0, 0, 1, (None,), (tops,), log_weight=-math.inf)
    one = sample_document(sample, logprobs=True, top_logprobs=True)
    assert (one["logprobs"], one["processed_logprobs"]) == ([-1.0], [-0.5])
    assert one["top_logprobs"] == [{"raw": [[5, -1.0], [6, -2.0]], "processed": [[5, -0.5], [6, None]]}]
    result = Result((Output("x", (1,), (sample,)),), Stats())
    [prompt] = document(result, [PromptLine("x", id=0)], sample_document)["prompts"]
    assert (prompt["id"], prompt["effective_samples"], prompt["log_mass"]) == (0, 0.0, None)


def test_an_option_of_a_line_may_be_0(tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text('{"prompt": "x", "temperature": 0, "min_p": 0.0, "top_k": null}\n')
    assert [line.options for line in lines_of([file])] == [{"temperature": 0, "min_p": 0.0}]


def test_a_template_that_comes_along_goes_before_a_file_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chatml").write_text("own", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert "<|im_start|>" in str(read_template(Path("chatml")))
    assert read_template(tmp_path / "chatml") == "own"


def test_the_systems_message_of_the_options_replaces_that_of_a_file(tmp_path: Path) -> None:
    said = [message("user", "a"), message("assistant", "b")]
    (tmp_path / "talk.json").write_text(json.dumps({"messages": [message("system", "S"), *said]}), encoding="utf-8")
    assert ChatOptions(system="T", messages=tmp_path / "talk.json").before() == [message("system", "T"), *said]


# ---------------------------------------------------------------------------------------------------------------------
# check


def _verdicts(answer: Answer) -> dict[str, str]:
    return {check["name"]: check["verdict"] for check in answer.json["checks"]}


WORK = ("-n", 2, "--max-new-tokens", 10, "--k", 2, "--repeats", 1, "--json", "-p", "def")


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other processes of this machine are not seen by `check`."""
    monkeypatch.setattr("shoal.bench.machine.processes", lambda: None)


@pytest.mark.usefixtures("quiet")
def test_check_of_a_good_pair(shoal: Command, tiny: Models) -> None:
    answer = shoal("check", *tiny.pair, *WORK)
    assert answer.code == 0
    verdicts = _verdicts(answer)
    assert list(verdicts) == [
        "target", "drafter", "tokenizer", "target self-check", "family", "target passes", "drafter self-check", "prompts",
        "context", "dtype", "memory",
        "acceptance", "costs", "speed-up", "greedy identity", "seeded identity",
    ]  # fmt: skip
    assert set(verdicts.values()) <= {"ok", "warn"}
    assert verdicts["greedy identity"] == verdicts["seeded identity"] == verdicts["prompts"] == "ok"
    data = {check["name"]: check["data"] for check in answer.json["checks"]}
    assert set(data["costs"]["target_ms"]) == {"1", "2", "3", "9"}
    assert set(data["speed-up"]["speedup"]) == {str(k) for k in range(1, 9)}
    assert data["greedy identity"]["drafted"] > 0
    assert data["memory"]["cache_bytes"] > 0


def test_check_of_a_pair_with_two_tokenizers(shoal: Command, tiny: Models) -> None:
    """It fits, by what the two have in common."""
    answer = shoal("check", "--model", tiny.target, "--draft", tiny.stranger, *WORK)
    assert answer.code == 0
    verdicts = _verdicts(answer)
    assert verdicts["vocabulary"] in ("ok", "warn")
    assert verdicts["tokenizer"] == verdicts["greedy identity"] == verdicts["seeded identity"] == "ok"
    assert next(check["data"]["shared"] for check in answer.json["checks"] if check["name"] == "tokenizer") == 260


def test_check_of_a_pair_that_does_not_fit(shoal: Command, tiny: Models, tmp_path: Path) -> None:
    """The drafter's tokenizer changes what it reads."""
    drafter = shutil.copytree(tiny.drafter, tmp_path / "drafter")
    tokenizer = json.loads((drafter / "tokenizer.json").read_text(encoding="utf-8"))
    changed = json.dumps(tokenizer | {"normalizer": {"type": "Lowercase"}})
    (drafter / "tokenizer.json").write_text(changed, encoding="utf-8")
    answer = shoal("check", "--model", tiny.target, "--draft", drafter, "--json")
    assert answer.code == 2
    assert answer.json["verdict"] == "fail"
    verdicts = _verdicts(answer)
    assert verdicts["target"] == "ok"
    assert verdicts["tokenizer"] == "fail"
    assert "greedy identity" not in verdicts
    [failure] = [check for check in answer.json["checks"] if check["verdict"] == "fail"]
    assert failure["advice"]


def test_check_names_the_half_that_does_not_load(shoal: Command, tiny: Models, tmp_path: Path) -> None:
    shutil.copy(tiny.drafter / "config.json", tmp_path)  # a directory without it is refused before anything is loaded
    assert _verdicts(shoal("check", "--model", tmp_path, "--json")) == {"target": "fail"}
    assert _verdicts(shoal("check", "--model", tmp_path, "--draft", tiny.drafter, "--json")) == {"target": "fail"}
    answer = shoal("check", "--model", tiny.target, "--draft", tmp_path, "--json")
    assert answer.code == 2
    assert (_verdicts(answer)["target"], _verdicts(answer)["drafter"]) == ("ok", "fail")


@pytest.mark.usefixtures("quiet")
def test_check_without_a_drafter_looks_at_the_target(shoal: Command, tiny: Models) -> None:
    answer = shoal("check", "--model", tiny.target, "-p", "def", "--max-new-tokens", 8)
    assert answer.code == 0
    assert "none: those that need no model are measured below" in " ".join(answer.out.split())
    assert answer.out.rstrip().endswith("verdict: ok")
    answer = shoal("check", *tiny.pair, "-p", "x" * 200, "--json")  # a prompt that does not fit
    assert (answer.code, _verdicts(answer)["context"]) == (2, "fail")


# ---------------------------------------------------------------------------------------------------------------------
# Figures


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_per_position_acceptance_is_found_from_the_rate(chance: float, k: int) -> None:
    rate = sum(chance**i for i in range(1, k + 1)) / k
    assert per_position(rate, k) == pytest.approx(chance, abs=1e-6)


def test_predicted_speedup() -> None:
    free = Costs(rounds={0: 10.0, 4: 10.0}, target={}, draft=0.0)
    assert predicted_speedup(1.0, 4, free) == pytest.approx(5.0)  # five tokens for the price of one
    assert predicted_speedup(0.0, 4, free) == pytest.approx(1.0)
    dear = Costs(rounds={0: 10.0, 4: 30.0}, target={}, draft=0.0)
    assert predicted_speedup(0.5, 2, dear) == pytest.approx(1.75 * 10.0 / 20.0)
    costs = Costs(rounds={0: 1.0, 1: 2.0, 5: 4.0}, target={0: 0.5, 1: 1.0, 5: 1.5}, draft=0.25)
    assert [costs.round(k) for k in (0, 1, 3, 5, 7)] == pytest.approx([1.0, 2.0, 3.0, 4.0, 5.0])  # between and beyond
    assert [costs.overhead(k) for k in (0, 1, 5)] == pytest.approx([0.5, 0.75, 1.25])
    assert [first_difference([1, 2], other) for other in ([1, 2], [1, 3], [1])] == [None, 1, 1]


# ---------------------------------------------------------------------------------------------------------------------
# The program


def test_version_and_help(shoal: Command) -> None:
    import shoal as package

    assert shoal("--version").out == f"shoal {package.__version__}\n"
    for page in ([], ["--help"], ["demo", "-h"]):
        answer = shoal(*page)
        assert (answer.code, answer.err) == (0, "")
        assert "Usage: shoal" in answer.out
    unknown = shoal("generat")
    assert (unknown.code, "'generate'" in unknown.err) == (2, True)  # the nearest


@pytest.mark.parametrize(
    ("closed", "arguments", "code"),
    [
        ("<&-", "generate --prompt-file nowhere", 2), (">&-", "--version", 0), ("2>&-", "generate --prompt-file nowhere", 2),
        ("<&- >&- 2>&-", "--version", 0),
    ],
)  # fmt: skip
def test_streams_that_the_caller_closed_are_empty(closed: str, arguments: str, code: int) -> None:
    line = f"{shlex.quote(sys.executable)} -m shoal {arguments} {closed}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr


@pytest.mark.slow
def test_the_module_runs_and_its_arguments_and_files_are_utf8_in_a_locale_of_ascii(tiny: Models, tmp_path: Path) -> None:
    """Where Python's own UTF-8 mode, which LC_ALL=C brings, is off. stdout is for the result alone."""
    options = [*tiny.pair, "--max-new-tokens", "2", "--json"]
    texts = ["-p", "é😀".encode(), "-f", "ß.txt".encode()]  # bytes: this process may have that locale, too
    command = [sys.executable, "-m", "shoal", "generate", *options, *texts]
    (tmp_path / os.fsdecode("ß.txt".encode())).write_text("ß", encoding="utf-8")
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert set(printed) == {"prompts", "stats"}
    assert [output["prompt"] for output in printed["prompts"]] == ["é😀", "ß"]


# ── help pages and pipes ────────────────────────────────────────────────────────────────────────────────────────────


def test_help_pages_have_all_options_whole_at_80_columns(monkeypatch: pytest.MonkeyPatch, shoal: Command) -> None:
    """Their names, the kinds of their values, and every word of what they say."""
    monkeypatch.setattr(rich_utils, "MAX_WIDTH", 80)
    for name, command in typer.main.get_command(cli.app).commands.items():  # type: ignore[attr-defined]
        page = shoal(name, "--help").out
        assert max(map(len, page.splitlines())) <= 80
        for option in (parameter for parameter in command.params if parameter.param_type_name == "option"):
            text = re.sub(r"\[/?\w*\]", "", option.help or "")
            assert [word for word in (*option.opts, option.metavar or "", *text.split()) if word not in page] == []
        assert name not in ("generate", "check", "bench", "serve") or not re.search(r"<(bool|str|path|list\[)", page), name
    words = set(re.findall(r"\w+", shoal("generate", "--help").out))
    assert words >= {*METHODS, "auto", "float32", "bfloat16", "float16"}  # the values of choices
    train = shoal("train", "drafter", "--help").out
    assert re.search(r"--corpus +PATH", train)


def test_a_reader_that_leaves_is_no_error() -> None:
    """As `shoal generate | head -1` does."""
    command = [sys.executable, "-m", "shoal", "generate", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, err = process.communicate()
    assert err == b""


def test_a_wrong_path_or_option_is_found_before_torch_is_imported(tmp_path: Path) -> None:
    """Of every command, and draft lengths and sampling, all in one process that has not imported it yet."""
    work = {
        "generate": ["-p", "x"],
        "serve": [],
        "check": [],
        "bench": [],
        "batch": [__file__, "out"],
        "eval": ["functions"],
    }
    work["complete"] = [__file__, "--at", "1:1"]
    lines = [[command, *arguments, "--model", str(tmp_path / "nowhere")] for command, arguments in work.items()]
    lines.append(["batch", str(tmp_path / "nowhere.jsonl"), "out"])
    drafting = {name: work.get(name, []) for name in ("generate", "complete", "batch", "serve", "chat", "demo")}
    lengths = [[command, *arguments, "--lookahead", "of"] for command, arguments in drafting.items()]
    lines += [*lengths, ["generate", "-p", "x", "--temperature", "-1"], ["chat", "--top-p", "2"]]
    code = (
        "import json, sys; from shoal.cli import run; codes = [run(line) for line in json.loads(sys.argv[1])]; "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules; print(codes)"
    )
    ended = subprocess.run([sys.executable, "-c", code, json.dumps(lines)], capture_output=True, text=True)
    assert json.loads(ended.stdout) == [2] * len(lines), ended.stderr
    assert ended.stderr.count("nowhere does not exist") == len(work), ended.stderr
    assert ended.stderr.count("cannot read") == 1
    assert ended.stderr.count("lookahead must be 'auto'") == len(drafting), ended.stderr


def test_a_prompt_that_is_too_long_names_the_bundled_model(capsys: pytest.CaptureFixture[str]) -> None:
    """Not the place where the package lies."""
    assert cli.run(["generate", "-p", "x " * 1200, "-n", "1"]) == 2
    assert "tokens; bundled target holds 1024, the first new token included" in capsys.readouterr().err


@pytest.mark.slow
def test_serving_in_one_process_does_without_ray() -> None:
    modules = "shoal.serve.app, shoal.serve.batch_lines, shoal.serve.output_file"
    code = f"import sys; sys.modules['ray'] = None; import {modules}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_progress_bars_of_loading_are_off_before_transformers_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "HF_HUB_DISABLE_PROGRESS_BARS"
    for model, value in ((None, "1"), ("some/target", None)):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
        ModelSource(model=model)
        assert os.environ.get(name) == value  # bars are shown where something may be downloaded
