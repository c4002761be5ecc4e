"""Grammars of strangers: what takes all the time or memory there is holds nobody up, and what comes again is read once.

Tests of: serve.compiled_grammars, serve.grammar_probe, serve.settings, constraints.compiler.
"""

from __future__ import annotations

import ast
import asyncio
import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import serving
from serving import TIMEOUT_SECONDS, Served, eventually, pair
from serving_faults import asking, assert_all_given_back, in_background
from shoal.config import Grammar
from shoal.constraints import compiler as reading
from shoal.constraints.compiler import grammars_of
from shoal.constraints.grammar_sources import source_of
from shoal.errors import RequestError
from shoal.serve import compiled_grammars, grammar_probe
from shoal.serve.compiled_grammars import GrammarReader, Probe
from shoal.testing import VOCABULARY, tiny_tokenizer

pytest.importorskip("llguidance")
PRIMES = (97, 89, 83, 79)
ENDLESS = {"allOf": [{"type": "integer", "multipleOf": prime} for prime in PRIMES]}
"""llguidance multiplies the automata of the factors, minutes long, whatever its own limits are."""


def schema(body: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": body}}


def regex(text: str) -> dict[str, str]:
    return {"type": "regex", "text": text}


@pytest.fixture
def fresh() -> Any:
    """A tokenizer for which nothing has been read before."""
    return tiny_tokenizer()


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[str]]:
    """Those that are started to read grammars."""
    started: list[subprocess.Popen[str]] = []
    real = subprocess.Popen

    def start(*arguments: Any, **options: Any) -> Any:
        started.append(real(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(compiled_grammars.subprocess, "Popen", start)
    return started


@pytest.fixture
def server(fresh: Any) -> Iterator[Served]:
    with serving.served(pair(tokenizer=fresh)) as running:
        yield running


# ── what takes too much ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_forty_endless_grammars_stop_nobody(server: Served) -> None:
    """They are admitted, wait for the two threads of their own, and leave with their clients; others are served meanwhile."""
    with ExitStack() as clients:
        for number in range(40):
            client = clients.enter_context(server.connect())
            body = {"allOf": [*ENDLESS["allOf"], {"maximum": 10**9 + number}]}
            client.sendall(asking(prompt="hello", response_format=schema(body)))
        eventually(lambda: server.worker.rows == 40)
        for _ in range(3):
            assert server.post(seed=1, max_tokens=4).status_code == 200
        assert server.worker.rows > 30
    eventually(lambda: server.worker.rows == 0)
    assert_all_given_back(server)


def test_an_endless_grammar_is_refused_once_and_for_all(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_grammars, "CPU_SECONDS", 1)
    checks = counted(monkeypatch, Probe, "check")
    for _ in range(2):
        refused = server.post(response_format=schema(ENDLESS))
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "response_format"
        assert "make it smaller" in refused.json()["error"]["message"]
    assert len(checks) == 1
    assert server.post(response_format=schema({"type": "integer"}), max_tokens=4).status_code == 200
    assert_all_given_back(server)


def test_of_refused_grammars_a_digest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 of them at 256 KiB each would be 64 MiB."""
    checks = counted(monkeypatch, Probe, "check")
    reader, wrong = GrammarReader(tiny_tokenizer(), VOCABULARY), Grammar("regex", "(" * 50_000)

    async def refused() -> None:
        for _ in range(2):
            with pytest.raises(RequestError):
                await reader.read(wrong, None)

    asyncio.run(refused())
    reader.close()
    assert len(checks) == 1
    assert [len(key) for key in reader._refused] == [32]


def test_of_refused_grammars_the_last_ones_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_grammars, "MAX_REMEMBERED_REFUSALS", 2)
    asked: list[str] = []

    def refuse(self: GrammarReader, grammar: Grammar, reading: Any) -> Any:
        asked.append(grammar.text)
        raise RequestError("no")

    monkeypatch.setattr(GrammarReader, "_tried", refuse)
    reader = GrammarReader(tiny_tokenizer(), VOCABULARY)

    async def refused() -> None:
        for text in "abcbca":
            with pytest.raises(RequestError):
                await reader.read(Grammar("regex", text), None)

    asyncio.run(refused())
    reader.close()
    assert asked == [*"abca"]


def counted(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[Any]:
    """The calls of a method from now on."""
    calls: list[Any] = []
    real = getattr(owner, name)

    def noting(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments[1:])
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, noting)
    return calls


PROBING = f"""
import os, sys, time
sys.path.insert(0, {str(Path(grammar_probe.__file__).parent)!r})
import grammar_probe
grammar_probe.WALL_SECONDS_PER_CPU_SECOND = 3 if "sleep" in sys.argv[1] else 1000
print(grammar_probe.probed(lambda text: eval(text), sys.argv[1], 1, 2**27, 2**24))
"""


@pytest.mark.slow(but=["len(bytearray(10**9))"])
@pytest.mark.parametrize(
    ("work", "outcome", "why"),
    [
        ("any(iter(int, 1))", "slow", ""),
        ("time.sleep(99)", "slow", ""),
        ("len(bytearray(10**9))", "large", ""),
        ("os.abort()", "large", ""),
        ("''", "ok", ""),
        ("'no'", "refused", "no"),
        ("open('/proc/self/oom_score_adj').read().strip()", "refused", "1000"),  # the first to go when memory runs out
    ],
)
def test_a_process_that_takes_too_much_is_ended(work: str, outcome: str, why: str) -> None:
    """By processor time, by the clock if it only waits, by memory, or by itself."""
    ended = subprocess.run(
        [sys.executable, "-c", PROBING, work], check=True, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    result = ast.literal_eval(ended.stdout)
    seconds = result.pop("seconds")
    assert result == {"outcome": outcome, "why": why}
    assert (seconds > 0.9) == ("iter" in work)


def test_a_reading_that_nobody_waits_for_is_ended(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends its work with the last client, and reads the next grammar."""
    outcomes: list[str] = []
    real, asked = Probe.outcome, threading.Semaphore(0)

    def noting(probe: Probe, written: str, number: int) -> dict[str, str] | None:
        asked.release()
        found = real(probe, written, number)
        outcomes.append((found or {"outcome": "none"})["outcome"])
        return found

    monkeypatch.setattr(Probe, "outcome", noting)
    monkeypatch.setattr("shoal.serve.compiled_grammars.CPU_SECONDS", 500)
    hard = Grammar("json_schema", json.dumps(ENDLESS))

    async def abandoned() -> None:
        reader = GrammarReader(fresh, VOCABULARY)
        await reader.read(Grammar("regex", "a"), None)
        clients = [asyncio.ensure_future(reader.read(hard, None)) for _ in range(2)]
        for _ in range(2):
            await asyncio.to_thread(asked.acquire)  # the reading has begun
        clients[0].cancel()
        await asyncio.sleep(0.1)
        assert outcomes == ["ok"], "another client waits"
        clients[1].cancel()
        await reader.read(Grammar("regex", "b"), None)
        deadline = asyncio.get_running_loop().time() + TIMEOUT_SECONDS
        while "left" not in outcomes and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        again = reader.read(Grammar("regex", "c"), None)
        assert (await again).starts
        reader.close()

    asyncio.run(abandoned())
    assert sorted(outcomes) == ["left", "ok", "ok", "ok"]


SIEVE = {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (97, 89, 7)]}
"""It takes some tenths of a second to compile."""


class Compilations:
    """The compilations behind the trials: those of multiples wait for `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.begun, self.threads = threading.Event(), list[str](), dict[str, int]()
        real = reading.Grammars._read

        def read(grammars: Any, grammar: Grammar, **limits: int) -> Any:
            self.begun.append(grammar.text)
            self.threads[grammar.text] = threading.get_ident()
            if "multipleOf" in grammar.text:
                assert self.go.wait(2 * TIMEOUT_SECONDS)
            return real(grammars, grammar, **limits)

        monkeypatch.setattr(reading.Grammars, "_read", read)


def test_abandoned_compilations_delay_no_quick_one(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of hard schemas end, and their clients leave while they are compiled in the server's own process."""
    compilations = Compilations(monkeypatch)
    hard = [Grammar("json_schema", json.dumps({**SIEVE, "maximum": 10**9 + number})) for number in range(4)]
    easy = [Grammar("json_schema", json.dumps({"type": "integer", "maximum": number})) for number in (5, 6)]
    tried = counted(monkeypatch, reading.Grammars, "compilation")

    async def abandoned() -> None:
        reader = GrammarReader(fresh, VOCABULARY)
        clients = [asyncio.ensure_future(reader.read(grammar, None)) for grammar in hard]
        while len(tried) < len(hard):
            await asyncio.sleep(0.01)
        assert (await reader.read(easy[0], TIMEOUT_SECONDS)).starts, "behind compilations that others wait for"
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        assert (await reader.read(easy[1], TIMEOUT_SECONDS)).starts, "behind compilations that nobody waits for"
        assert not compilations.go.is_set()
        compilations.go.set()
        assert (await reader.read(hard[-1], TIMEOUT_SECONDS)).starts, (
            "one that was cancelled is compiled for the next client"
        )
        reader.close()

    try:
        asyncio.run(abandoned())
    finally:
        compilations.go.set()
    assert len(compilations.begun) == 4, "of the abandoned ones only that which had begun goes on"
    assert compilations.begun[1:] == [easy[0].text, easy[1].text, hard[-1].text]
    threads = compilations.threads
    assert threads[easy[0].text] == threads[easy[1].text] != threads[hard[-1].text]


def test_a_caller_outlives_the_client_that_cancels_its_compilation(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compilations, known = Compilations(monkeypatch), grammars_of(fresh, VOCABULARY)
    first, second = (Grammar("json_schema", json.dumps({"type": "integer", "multipleOf": number})) for number in (2, 3))
    running: Any = known.compilation(first, {}, hard=True)
    queued: Any = known.compilation(second, {}, hard=True)
    waiting, made = in_background(lambda: known.constraint(second))
    eventually(lambda: bool(queued._condition._waiters))
    assert queued.cancel()
    compilations.go.set()
    waiting.join(TIMEOUT_SECONDS)
    assert made[0].starts
    assert running.result().starts


def test_a_trial_ends_with_its_server() -> None:
    ours, theirs = os.pipe()
    os.close(theirs)
    assert grammar_probe.Leaves(ours).tell(1)
    os.close(ours)


def test_who_leaves_meets_no_other_trial(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the process that starts, nor the trial behind the one that is left."""
    monkeypatch.setattr("shoal.serve.compiled_grammars.CPU_SECONDS", 500)
    known, outcomes = grammars_of(fresh, VOCABULARY), []
    hard, easy = (known.source(each) for each in (Grammar("json_schema", json.dumps(ENDLESS)), Grammar("regex", "a")))
    one = Probe(known.description)
    one._running()
    try:
        for written, number, left in ((hard, 1, [1]), (easy, 2, [1, 12]), (hard, 3, [2, 3]), (easy, 4, [])):
            for each in left:
                one.leave(each)
            found = one.outcome(written, number)
            outcomes.append(found and found["outcome"])
    finally:
        one.close()
    assert outcomes == ["left", "ok", "left", "ok"]


@pytest.mark.parametrize("kind", ["regex", "lark", "json_schema"])
def test_what_is_wrong_is_said_in_the_same_words(kind: str, fresh: Any) -> None:
    """Whoever finds it first: the process that reads it first, or the library."""
    wrong = Grammar(kind, {"regex": "(", "lark": "start: nothing", "json_schema": '{"type": "nothing"}'}[kind])
    known = grammars_of(fresh, VOCABULARY)
    with pytest.raises(RequestError) as here:
        known.constraint(wrong)
    one = Probe(known.description)
    try:
        with pytest.raises(RequestError) as there:
            one.check(wrong, source_of(wrong))
    finally:
        one.close()
    assert str(there.value) == str(here.value)


def test_a_killed_process_is_started_again(processes: list[subprocess.Popen[str]], server: Served) -> None:
    assert server.post(grammar=regex("a+"), max_tokens=4).status_code == 200
    (first,) = processes
    first.kill()
    first.wait()
    assert server.post(grammar=regex("b+"), max_tokens=4).status_code == 200
    assert_all_given_back(server)


def test_no_process_is_left_behind(processes: list[subprocess.Popen[str]], fresh: Any) -> None:
    with serving.served(pair(tokenizer=fresh)) as server:
        assert server.post(grammar=regex("c+|never seen before"), max_tokens=4).status_code == 200
    assert processes
    assert all(process.returncode is not None for process in processes)


# ── admission ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Grammars are not read until this is set."""
    go, real = threading.Event(), compiled_grammars.grammars_of

    def late(*arguments: Any) -> Any:
        assert go.wait(2 * TIMEOUT_SECONDS)  # longer than a test waits for what must come before
        return real(*arguments)

    monkeypatch.setattr(compiled_grammars, "grammars_of", late)
    yield go
    go.set()


def test_rows_are_admitted_before_their_grammar_is_read(held: threading.Event, fresh: Any) -> None:
    """What there is no place for is refused before anything is read for it."""
    with serving.served(pair(tokenizer=fresh, max_batch=2), queue=2) as server:
        asking, got = in_background(lambda: server.post(n=4, grammar=regex("d+"), max_tokens=4))
        eventually(lambda: server.worker.rows == 4)
        refused = server.post(grammar=regex("e+"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        held.set()
        asking.join(TIMEOUT_SECONDS)
        assert got[0].status_code == 200
        assert_all_given_back(server)


def test_too_many_grammars_at_a_time(held: threading.Event, fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_grammars, "MAX_WAITING", 2)
    with serving.served(pair(tokenizer=fresh)) as server:
        asked = [in_background(lambda text=text: server.post(grammar=regex(text), max_tokens=4)) for text in ("f+", "g+")]
        eventually(lambda: server.worker.rows == 2)
        refused = server.post(grammar=regex("h+"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "grammar_queue_full")
        assert server.post(max_tokens=4).status_code == 200
        held.set()
        for thread, got in asked:
            thread.join(TIMEOUT_SECONDS)
            assert got[0].status_code == 200
        assert_all_given_back(server)


def test_a_time_budget_holds_for_the_wait_too(held: threading.Event, fresh: Any) -> None:
    with serving.served(pair(tokenizer=fresh)) as server:
        late = server.post(grammar=regex("i+"), time_budget=0.2)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "grammar_timeout")
        held.set()
        assert_all_given_back(server)


def test_what_nobody_waits_for_is_not_read(held: threading.Event, fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving.served(pair(tokenizer=fresh)) as server:
        for text in ("j+", "k+", "l+", "m+"):
            assert server.post(grammar=regex(text), time_budget=0.1).status_code == 503
        checks = counted(monkeypatch, Probe, "check")
        held.set()
        assert server.post(grammar=regex("n+"), max_tokens=4).status_code == 200
        assert len(checks) <= 3  # the two that were begun, and this one


HELLO = {"messages": [{"role": "user", "content": "hello"}]}
ANSWER = {"type": "json_schema", "name": "x", "schema": {"type": "integer"}}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
READ_FIRST = {
    "grammar": ("/v1/completions", {"prompt": "a", "n": 2, "grammar": regex("p+")}),
    "schema": ("/v1/chat/completions", {**HELLO, "response_format": schema({"type": "integer"})}),
    "call": ("/v1/chat/completions", {**HELLO, "tools": [TOOL], "tool_choice": "required"}),
    "item": ("/v1/responses", {"input": "hello", "text": {"format": ANSWER}}),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", READ_FIRST)
def test_a_client_that_leaves_before_its_grammar_is_read(kind: str, stream: bool, held: threading.Event, fresh: Any) -> None:
    """Its place is free at once, whether it waits for a whole answer or for the first event of a stream."""
    path, body = READ_FIRST[kind]
    with serving.served(pair(tokenizer=fresh), chat_template="{{ messages[-1]['content'] }}") as server:
        with server.connect() as client:
            client.sendall(asking(path, stream=stream, **body))
            eventually(lambda: server.worker.rows > 0)
        eventually(lambda: server.worker.rows == 0)
        held.set()
        assert_all_given_back(server)


# ── once ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_requests_at_a_time_have_a_grammar_read_once(
    held: threading.Event, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving.served(pair(tokenizer=fresh)) as server:
        read = counted(monkeypatch, reading.Grammars, "_read")
        checks = counted(monkeypatch, Probe, "check")
        asked = [in_background(lambda: server.post(n=2, grammar=regex("o+"), max_tokens=4)) for _ in range(5)]
        eventually(lambda: server.worker.rows == 10)
        held.set()
        for thread, got in asked:
            thread.join(TIMEOUT_SECONDS)
            assert got[0].status_code == 200
        assert server.post(grammar=regex("o+"), max_tokens=4).status_code == 200
        assert (len(read), len(checks)) == (1, 1)


def test_a_grammar_costs_no_process_of_its_own_to_start(
    processes: list[subprocess.Popen[str]], fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is started once per thread forks for each grammar that is new, and for none that is known."""
    checks = counted(monkeypatch, Probe, "check")
    with serving.served(pair(tokenizer=fresh)) as server:
        assert server.post(max_tokens=4).status_code == 200
        assert not processes
        for text in ("s+", "t+", "u+", "s+", "t+", "v+"):
            assert server.post(grammar=regex(text), n=2, max_tokens=4).status_code == 200
    assert len(checks) == 4
    assert 1 <= len(processes) <= compiled_grammars.READER_THREADS


def test_a_servers_limits_hold_in_rounds_and_not_for_the_library(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[dict[str, Any]] = []
    real = reading.Grammars._read

    def read(self: reading.Grammars, grammar: Grammar, **limits: int) -> Any:
        known.append(limits)
        return real(self, grammar, **limits)

    monkeypatch.setattr(reading.Grammars, "_read", read)
    with serving.served(pair(tokenizer=fresh)) as server:
        assert server.post(grammar=regex("w+"), max_tokens=4).status_code == 200
    grammars_of(fresh, VOCABULARY).constraint(Grammar("regex", "x+"))
    assert known == [compiled_grammars.LIMITS, {}]


def test_threads_that_ask_at_a_time_have_a_grammar_read_once(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read = counted(monkeypatch, reading.Grammars, "_read")
    known = grammars_of(fresh, VOCABULARY)
    threads = [threading.Thread(target=known.constraint, args=(Grammar("regex", "p{1,500}"),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read) == 1


def test_a_grammar_that_is_kept_is_not_read_again(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many others come between its reading and its use; after that, memory is bounded."""
    read = counted(monkeypatch, reading.Grammars, "_read")
    known = grammars_of(fresh, VOCABULARY)
    kept = known.constraint(Grammar("regex", "q+"))
    for number in range(reading.KEPT + 1):
        known.constraint(Grammar("regex", f"r{number}"))
    before = len(read)
    known.constraint(Grammar("regex", "q+"))
    assert len(read) == before
    del kept
    gc.collect()
    assert sum(known.known(Grammar("regex", f"r{number}")) is not None for number in range(reading.KEPT + 1)) == reading.KEPT
    known.constraint(Grammar("regex", "q+"))
    assert len(read) == before + 1


@pytest.mark.parametrize("field", [{"grammar": {"type": "regex", "text": "ab"}}, {"guided_choice": ["yes", "no"]}])
def test_an_error_of_the_engine_speaks_of_the_request(server: Served, field: dict[str, Any]) -> None:
    """Not of rows, draft positions and the names of the library."""
    error = server.post(min_tokens=40, max_tokens=60, **field).json()["error"]
    assert error["message"] == "no token is left possible by min_tokens=40, the grammar; relax one of them"


def test_a_schema_of_thousands_of_names_is_read(server: Served) -> None:
    """Lists of tools reach that easily; time and memory bound the reading, and the message names the option."""
    schema = {"enum": [f"name_{i:05d}_{'x' * 10}" for i in range(2000)]}
    answer = server.post(guided_json=schema, max_tokens=40)
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.json()["choices"][0]["text"]) in schema["enum"]
    refused = server.post(guided_json={"enum": ["x" * 2**18]})
    assert (refused.status_code, "--max-grammar" in refused.json()["error"]["message"]) == (400, True)


def test_a_choice_of_any_characters(server: Served) -> None:
    """Those that JSON does not escape, too."""
    for text in ("a\x7f", "\x00b", "\x1f\x85\u2028", 'q"\\\n'):
        assert server.post(guided_choice=[text], max_tokens=20).json()["choices"][0]["text"] == text
    for fields in ({"guided_grammar": 'root ::= "a\x7f"'}, {"grammar": {"type": "lark", "text": 'start: "a\x7f"'}}):
        assert server.post(**fields, max_tokens=20).json()["choices"][0]["text"] == "a\x7f"


def test_formats_that_say_nothing_are_named(server: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "format": "int64"}, "b": {"format": "é\n"}}}
    answer = server.post(guided_json=schema, max_tokens=1)
    assert answer.headers["x-shoal-ignored"] == "guided_json.format=int64, guided_json.format=??"
