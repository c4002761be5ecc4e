"""More than one process: nothing lost, nothing doubled, and with seeds the tokens of one, though a worker is killed.

Tests of: serve.cluster, serve.pool, serve.relay, serve.prometheus_metrics.
"""

from __future__ import annotations

import asyncio
import errno
import io
import ipaddress
import json
import logging
import os
import re
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from shoal import load
from shoal.api import Shoal
from shoal.errors import ModelError, RequestError
from shoal.serve.app import ServeConfig
from shoal.serve.batch_lines import BatchLine
from shoal.serve.settings import Settings
from shoal.testing import save_pair

ray = pytest.importorskip("ray", reason="needs ray: pip install '.[ray]'")

import psutil  # noqa: E402
from ray import serve as ray_serve  # noqa: E402
from ray._private.authentication.authentication_utils import is_token_auth_enabled  # noqa: E402

from shoal.serve import cluster, logs, pool, relay  # noqa: E402

SECONDS = 240
"""The longest that anything is waited for."""
pytestmark = [
    pytest.mark.limit(600),  # many processes that each import torch
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
]
THIN = cluster.Share(cpus=0.5)  # so that two fit into two CPUs beside what Ray itself runs


@pytest.fixture(scope="module", autouse=True)
def two_cpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A small cluster as the commands start one; what is defined here travels to it by value."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            patch.delenv(name)
        patch.setenv("RAY_ADDRESS", "local")
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))  # where the token is kept
        small = {"num_cpus": 2, "object_store_memory": 80 * 2**20, "configure_logging": False}
        patch.setattr(cluster, "OPTIONS", cluster.OPTIONS | small)
        with cluster.connected():
            yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Directories of a tiny pair."""
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def alone(pair: tuple[Path, Path]) -> Shoal:
    """The pair in this process."""
    return loaded(pair)


def test_a_cluster_of_our_own_listens_on_loopback_and_asks_for_a_token() -> None:
    ray.get(ray.remote(lambda: 1).remote())
    found = [psutil.Process(), *psutil.Process().children(recursive=True)]
    places = [place.laddr.ip for process in found for place in process.net_connections("inet") if place.status == "LISTEN"]
    assert len(places) > 5
    addresses = [ipaddress.ip_address(place.removeprefix("::ffff:")) for place in places]
    assert all(address.is_loopback for address in addresses), addresses
    assert is_token_auth_enabled()


# ── batches ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def loaded(pair: tuple[Path, Path]) -> Shoal:
    return load(*pair, dtype="float32", quantize="off", max_batch=4)


def load_and_mark(pair: tuple[Path, Path], marks: Path) -> Shoal:
    """Loads the pair, and leaves the process's number."""
    (marks / str(os.getpid())).touch()
    return loaded(pair)


def load_to_die(pair: tuple[Path, Path], marks: Path) -> Shoal:
    """The same; but the process that is first is killed in the fourth round of its second task."""
    shoal = load_and_mark(pair, marks)
    try:
        (marks / "victim").open("x").close()
    except FileExistsError:
        return shoal
    engine, tasks = shoal.engine, iter(range(99))

    def mortal(*arguments: Any, **options: Any) -> Any:
        made = engine(*arguments, **options)
        if next(tasks) == 1:
            step = made.step
            made.step = lambda: os.kill(os.getpid(), signal.SIGKILL) if made.stats.rounds == 3 else step()
        return made

    shoal.engine = mortal  # type: ignore[method-assign]
    return shoal


def processes(marks: Path) -> int:
    """How many loaded."""
    return sum(file.name.isdigit() for file in marks.iterdir())


def serve_config(load: Any, *arguments: Any) -> ServeConfig:
    return ServeConfig(partial(load, *arguments), Settings("tiny"), lookahead=3)


def essence(entry: dict[str, Any]) -> tuple[Any, ...]:
    """What an answer says and took; means of log-probabilities may be rounded otherwise beside other rows."""
    took = [
        [choice[name] for name in ("completion_tokens", "drafted", "accepted", "rounds", "ended_by")]
        for choice in entry.get("usage", {}).get("choices", ())
    ]
    return [choice["text"] for choice in entry.get("choices", ())], took, entry.get("error")


@pytest.mark.slow
def test_a_killed_worker_loses_and_doubles_nothing(alone: Shoal, pair: tuple[Path, Path], tmp_path: Path) -> None:
    bodies = [{"id": i, "prompt": f"line {i}", "seed": i, "n": 2, "max_tokens": 24} for i in range(48)]
    bodies[5] |= {"prompt": None}
    lines = [BatchLine(number, json.dumps(body), body["id"], True) for number, body in enumerate(bodies, 1)]
    expected: list[Any] = []
    serve_config(lambda: alone).offline().answer(lines, expected.append)
    together: list[Any] = []
    pool.answer(lines, serve_config(load_to_die, pair, tmp_path), together.append, 2, THIN)
    assert sorted(entry["id"] for entry in together) == list(range(48))
    assert {entry["id"]: essence(entry) for entry in together} == {entry["id"]: essence(entry) for entry in expected}
    assert sum("error" in entry for entry in together) == 1
    took = [choice for entry in together for choice in entry.get("usage", {}).get("choices", ())]
    assert len(took) == 47 * 2
    assert sum(choice["drafted"] for choice in took) > sum(choice["accepted"] for choice in took) > 0
    assert (tmp_path / "victim").exists()
    assert processes(tmp_path) == 3, "two workers, and one in the killed one's place"


class Frail:
    """In the place of a `ServeConfig`: a worker without models, which starts fast."""

    def __init__(self, marks: Path, load: Callable[[], object] = object) -> None:
        self._marks, self._load = marks, load

    def offline(self) -> Any:
        (self._marks / str(os.getpid())).touch()
        self._load()
        return self

    def answer(self, lines: list[BatchLine], done: Callable[[Any], None]) -> None:
        for line in lines:
            if "poison" in line.text:
                os.kill(os.getpid(), signal.SIGKILL)
            done({"id": line.id})


@pytest.mark.slow
def test_a_line_that_kills_its_worker_has_an_error_and_the_others_their_answers(tmp_path: Path) -> None:
    lines = [BatchLine(number, "poison" if number == 5 else "", number, True) for number in range(16)]
    got: list[Any] = []
    pool.answer(lines, Frail(tmp_path), got.append, 1, THIN)  # type: ignore[arg-type]
    assert sorted(entry["id"] for entry in got) == list(range(16))
    (failed,) = [entry for entry in got if "error" in entry]
    assert (failed["id"], failed["error"]["code"]) == (5, "worker_died")
    assert "each of them died" in failed["error"]["message"]
    assert processes(tmp_path) == 1 + 1 + 3, "blocks of four and of two lines, and three tries alone"


def die() -> None:
    """As if there were no memory for the weights."""
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_workers_that_die_while_they_load_are_no_lines_fault(tmp_path: Path) -> None:
    done: list[Any] = []
    with pytest.raises(ModelError, match="3 workers in succession died while they loaded"):
        pool.answer([BatchLine(1, "{}", 1)], Frail(tmp_path, die), done.append, 1, THIN)  # type: ignore[arg-type]
    assert (done, processes(tmp_path)) == ([], 3)


def load_nothing() -> None:
    raise ModelError("no such pair")


@pytest.mark.slow
def test_an_error_of_a_worker_is_raised_here(tmp_path: Path) -> None:
    done: list[Any] = []
    with pytest.raises(ModelError, match=r"^no such pair$"):
        pool.answer([BatchLine(1, "{}", 1)], Frail(tmp_path, load_nothing), done.append, 1, THIN)  # type: ignore[arg-type]
    assert not done


@pytest.mark.slow
def test_waiting_for_a_machine_that_is_not_there_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []  # asked of the logger itself: what Ray does to the handlers of a process is its own affair
    monkeypatch.setattr(cluster.LOG, "warning", lambda text, *values: said.append(text % values))
    cluster.warn_if_too_small(THIN)
    cluster.warn_if_too_small(cluster.Share(cpus=1, gpus=64))
    assert said == ["no machine of this cluster has 1 CPUs and 64 GPUs: waiting for one"]


# ── a server ────────────────────────────────────────────────────────────────────────────────────────────────────────


def load_to_wait(pair: tuple[Path, Path], marks: Path) -> Shoal:
    """The same; but a prompt that begins with "wait" is not read until there is a file "open" of that name."""
    shoal = load_and_mark(pair, marks)
    encode = shoal.tokenizer.encode

    def held(text: str, *arguments: Any, **options: Any) -> Any:
        if text.startswith("wait"):
            (marks / f"{text}|{os.getpid()}").touch()
            while not (marks / f"open {text}").exists():
                time.sleep(0.01)
        return encode(text, *arguments, **options)

    shoal.tokenizer.encode = held
    return shoal


def until(holds: Callable[[], object]) -> None:
    """Waits, and fails after `SECONDS`."""
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


@ray_serve.deployment(ray_actor_options={"num_cpus": 0})
class Neighbour:
    """An application of somebody else."""

    def __call__(self) -> str:
        return "mine"


def alive(url: str) -> dict[str, float]:
    """`shoal_up` by replica, as one answer of /metrics has it."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=SECONDS).text)
    return {
        sample.labels["replica"]: sample.value
        for family in families
        for sample in family.samples
        if family.name == "shoal_up"
    }


def nobody_listens(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


@dataclass
class Scaled:
    """What was seen while the demand rose and fell: answers by prompt, replicas by state, processes of replicas."""

    answers: dict[str, Any] = field(default_factory=dict)
    both: list[Any] = field(default_factory=list)
    states: list[dict[str, int]] = field(default_factory=list)
    held_by: dict[str, int] = field(default_factory=dict)
    alive: dict[str, float] = field(default_factory=dict)
    kept: dict[int, str] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    ids: list[list[str]] = field(default_factory=list)
    refused: Any = None
    stream: str = ""
    at_the_end: Any = None
    log: list[dict[str, Any]] = field(default_factory=list)
    processes: int = 0
    url: str = ""
    port: int = 0


BODY = {"n": 2, "temperature": 0, "max_tokens": 24, "return_token_ids": True}


@pytest.fixture(scope="module")
def scaled(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Scaled:
    """One replica, a second one for requests that wait, and one again while both still have one that is not answered.

    Ray Serve is started for it, and stays for the application of somebody else.
    """
    marks, seen = tmp_path_factory.mktemp("scaled"), Scaled()
    served = serve_config(load_to_wait, pair, marks)
    clients = ThreadPoolExecutor(64)

    def post(prompt: str, **more: Any) -> httpx.Response:
        headers = {"x-request-id": prompt.replace(" ", "-")}
        return httpx.post(
            f"{seen.url}/v1/completions", json={"prompt": prompt, **BODY, **more}, headers=headers, timeout=SECONDS
        )

    def states() -> dict[str, int]:
        (application,) = ray_serve.status().applications.values()
        return {str(state): many for state, many in application.deployments["shoal"].replica_states.items() if many}

    def holders() -> dict[str, int]:
        return {text: int(process) for text, _, process in (f.name.partition("|") for f in marks.glob("wait*|*"))}

    def hold(asked: dict[str, Future[httpx.Response]], many: int) -> None:
        """Asks for so many more, and waits until all of them are in a replica."""
        for _ in range(many):
            prompt = f"wait {len(asked)}"
            asked[prompt] = clients.submit(post, prompt)
        until(lambda: len(holders()) == len(asked))

    def collect(asked: dict[str, Future[httpx.Response]], prompts: list[str]) -> None:
        for prompt in prompts:
            (marks / f"open {prompt}").touch()
        seen.answers |= {prompt: asked[prompt].result(SECONDS) for prompt in prompts}

    def use(port: int) -> None:
        seen.port, seen.url, asked = port, f"http://127.0.0.1:{port}", {}
        seen.states.append(states())
        hold(asked, 6)
        until(lambda: states().get("RUNNING") == 2)
        seen.states.append(states())
        for _ in range(16):  # new requests go where fewer are, once the proxy knows of the second replica
            if len(set(holders().values())) == 2:
                break
            hold(asked, 2)
        seen.held_by = holders()
        until(lambda: len(alive(seen.url)) == 2)
        seen.alive = alive(seen.url)
        seen.kept = {process: prompt for prompt, process in seen.held_by.items()}  # one of each replica stays
        seen.both = [post("hello").json() for _ in range(8)]
        seen.refused = post("wrong", nn=1)
        seen.stream = "".join(post("stream", stream=True, return_token_ids=False).text)
        seen.ids = [httpx.get(f"{seen.url}/health", timeout=SECONDS).headers.get_list("x-request-id")]
        seen.ids.append(seen.refused.headers.get_list("x-request-id"))
        collect(asked, [prompt for prompt in asked if prompt not in seen.kept.values()])
        until(lambda: "STOPPING" in states())
        seen.states.append(states())
        collect(asked, list(seen.kept.values()))
        seen.answers |= {prompt: post(prompt) for prompt in ("after", "and on")}
        until(lambda: states() == {"RUNNING": 1})
        seen.states.append(states())
        until(lambda: not all(psutil.pid_exists(process) for process in seen.kept))
        seen.ended = [process for process in seen.kept if not psutil.pid_exists(process)]
        last = dict(asked)
        hold(last, 1)
        seen.at_the_end = last.popitem()[1]
        ray_serve.run(Neighbour.options(name="other").bind(), name="other", route_prefix="/other")
        os.kill(os.getpid(), signal.SIGTERM)

    wanted = cluster.Replicas(least=1, most=2, wanted=2, drain=8, up_after=0, down_after=3)
    with redirect_stderr(io.StringIO()) as stderr:
        cluster.run(served, "127.0.0.1", 0, wanted, THIN, use, cluster.LogConfig("info", "json"))
    seen.at_the_end = seen.at_the_end.exception(SECONDS) or seen.at_the_end.result().status_code
    clients.shutdown()
    seen.log = [json.loads(line) for line in stderr.getvalue().splitlines() if line.startswith("{")]
    seen.processes = processes(marks)
    return seen


@pytest.mark.slow
def test_a_replica_is_added_and_removed_by_demand(scaled: Scaled) -> None:
    first, grown, shrinking, last = scaled.states
    assert (first, grown, last) == ({"RUNNING": 1}, {"RUNNING": 2}, {"RUNNING": 1})
    assert shrinking == {"RUNNING": 1, "STOPPING": 1}
    assert len(scaled.kept) == scaled.processes == 2
    assert len(scaled.ended) == 1, "the process of the replica that was removed"


@pytest.mark.slow
def test_nothing_is_lost_with_a_replica_and_all_answers_are_those_of_one_process(scaled: Scaled, alone: Shoal) -> None:
    """Also the request that the removed replica had not answered when it began to stop. What ends with the server is lost."""
    assert scaled.kept[scaled.ended[0]] in scaled.answers
    assert len(scaled.answers) == len(scaled.held_by) + 2
    answers = {prompt: response.json() for prompt, response in scaled.answers.items()}
    prompts = list(dict.fromkeys([*answers, "hello"]))
    result = alone.generate(prompts, 2, temperature=0, max_new_tokens=24, lookahead=3)
    expected = {prompt: output.samples for prompt, output in zip(prompts, result, strict=True)}
    for prompt, answer in [*answers.items(), *(("hello", answer) for answer in scaled.both)]:
        samples = expected[prompt]
        assert [tuple(choice["token_ids"]) for choice in answer["choices"]] == [s.token_ids for s in samples], prompt
        took = [[choice[name] for name in ("drafted", "accepted", "rounds")] for choice in answer["usage"]["choices"]]
        assert took == [[s.drafted, s.accepted, s.rounds] for s in samples], prompt
        assert all(drafted > 0 for drafted, _, _ in took)
    assert isinstance(scaled.at_the_end, httpx.HTTPError) or scaled.at_the_end >= 500, "it was not waited for"


@pytest.mark.slow
def test_replicas_answer_as_one_server(scaled: Scaled) -> None:
    assert scaled.refused.json()["error"]["code"] == "unknown_field"
    assert scaled.stream.strip().endswith("data: [DONE]")
    assert [len(ids) for ids in scaled.ids] == [1, 1], "Ray's proxy and ours would each send one"
    assert scaled.ids[1] == ["wrong"]


@pytest.mark.slow
def test_one_answer_has_the_metrics_of_both_replicas(scaled: Scaled) -> None:
    assert list(scaled.alive.values()) == [1, 1]
    assert set(scaled.alive) == {line["replica"] for line in scaled.log if "replica" in line}


@pytest.mark.slow
def test_replicas_log_as_one_server(scaled: Scaled) -> None:
    """One line per request, whichever replica answered; none of probes."""
    lines = {line["request_id"]: line for line in scaled.log if line.get("status") == 200}
    for prompt, response in scaled.answers.items():
        line, took = lines[prompt.replace(" ", "-")], response.json()["usage"]
        assert (line["prompt_tokens"], line["completion_tokens"]) == (took["prompt_tokens"], took["completion_tokens"])
        assert (line["path"], line["samples"], line["level"]) == ("/v1/completions", 2, "info")
        assert line["seconds"] > 0
    counts = Counter(line["request_id"] for line in scaled.log if "request_id" in line)
    assert [counts.pop(name) for name in ("hello", "wrong", "stream")] == [8, 1, 1]
    assert set(counts.values()) == {1}
    assert len({line["replica"] for line in lines.values()}) == 2
    assert {line["replica"] for line in scaled.log if line["logger"] != "shoal.requests"} == {
        line["replica"] for line in lines.values()
    }
    (wrong,) = [line for line in scaled.log if line.get("request_id") == "wrong"]
    assert (wrong["status"], wrong["level"]) == (400, "info")
    assert "nn" in wrong["reason"]
    assert not [line for line in scaled.log if line.get("path") == "/health"]


@dataclass
class Beside:
    """What was seen of a server beside an application of somebody else."""

    refusals: list[str] = field(default_factory=list)
    served_at: int = 0
    statuses: list[int] = field(default_factory=list)
    flood: list[int] = field(default_factory=list)
    applications: list[list[str]] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    gone: bool = False
    log: str = ""


@pytest.fixture(scope="module")
def beside(scaled: Scaled, pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Beside:
    """Asks for the other's port and route in vain, then serves at a route beside it, and is flooded."""
    marks, seen = tmp_path_factory.mktemp("beside"), Beside()
    served = serve_config(load_to_wait, pair, marks)
    url, ask = scaled.url, partial(httpx.get, timeout=SECONDS)

    def use(port: int) -> None:
        seen.served_at = port
        seen.statuses.append(ask(f"{url}/health").status_code)
        seen.applications.append(list(ray_serve.status().applications))
        body = {"prompt": "wait", "max_tokens": 2, "temperature": 0}  # drawn, it may end after one
        with ThreadPoolExecutor(24) as clients:
            asked = [clients.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=SECONDS) for _ in range(24)]
            for one in as_completed(asked):  # the first to be answered is one that was refused
                (marks / "open wait").touch()
                seen.flood.append(one.result().status_code)
        os.kill(os.getpid(), signal.SIGTERM)

    run, log = partial(cluster.run, served, "127.0.0.1"), cluster.LogConfig("debug")
    try:
        seen.applications.append(list(ray_serve.status().applications))
        ray_serve.run(Neighbour.bind(), name="first", route_prefix="/")
        for port in (scaled.port + 1, scaled.port):
            with pytest.raises(RequestError) as refused:
                run(port, cluster.Replicas(), THIN, lambda port: None)
            seen.refusals.append(str(refused.value))
        seen.others.append(ask(url).text)
        ray_serve.delete("first")
        with redirect_stderr(io.StringIO()) as stderr:
            run(0, cluster.Replicas(open=2), THIN, use, log)
        seen.log = stderr.getvalue()
        seen.applications.append(list(ray_serve.status().applications))
        seen.others.append(ask(f"{url}/other").text)
        cluster._withdraw("other", 1, ours=True)  # the last application takes Ray Serve along
        until(lambda: nobody_listens(scaled.port))
        seen.gone = True
    finally:
        ray_serve.shutdown()
    return seen


@pytest.mark.slow
def test_applications_of_others_stay_and_their_proxy_is_respected(scaled: Scaled, beside: Beside) -> None:
    other_port, other_route = beside.refusals
    assert re.search(f"listens at 127.0.0.1:{scaled.port} already .* give --host 127.0.0.1 --port {scaled.port}", other_port)
    assert "has an application already" in other_route
    assert (beside.served_at, beside.statuses) == (scaled.port, [200])
    before, between, after = beside.applications
    assert (before, after, len(between)) == (["other"], ["other"], 2)
    assert beside.others == ["mine", "mine"], "neither replaced nor deleted nor shut down"
    assert beside.gone


@pytest.mark.slow
def test_a_flood_is_told_to_come_again(beside: Beside) -> None:
    assert (beside.flood[0], set(beside.flood), len(beside.flood)) == (503, {200, 503}, 24)


@pytest.mark.slow
def test_a_log_of_text_has_what_replicas_say(beside: Beside) -> None:
    """Probes, too, at the level debug."""
    lines = beside.log.splitlines()
    time = r"\d{4}-\d\d-\d\dT\S+"
    assert [re.fullmatch(time + r" DEBUG +GET /health 200 \S+ s id \S+", line) is not None for line in lines].count(
        True
    ) == 1
    answered = [
        line for line in lines if re.match(time + r" INFO +POST /v1/completions 200 \S+ s 4\+2 tokens, 1 samples", line)
    ]
    assert len(answered) == beside.flood.count(200)
    assert any("prompts that are kept for later requests" in line for line in lines)


@pytest.mark.slow
def test_lines_that_wait_when_the_relay_is_closed_are_taken() -> None:
    async def taken() -> list[list[str] | None]:
        lines = relay.Relay()
        for line in ("one", "the last"):
            await lines.put(line)
        await lines.close()
        return [await lines.take(), await lines.take()]

    assert asyncio.run(taken()) == [["one", "the last"], None]


class SlowRelay:
    """An actor that takes half a second for a line."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    async def put(self, line: str) -> None:
        await asyncio.sleep(0.5)
        self.lines.append(line)

    async def kept(self) -> list[str]:
        return self.lines


@pytest.mark.slow
def test_a_replica_that_ends_has_sent_its_last_line(two_cpus: None) -> None:
    actor: Any = ray.remote(SlowRelay).options(name="slow", namespace=relay.NAMESPACE, num_cpus=0).remote()
    ray.get(actor.kept.remote())
    relay.send_logs("slow", "replica 1", "info", "text")
    try:
        logging.getLogger("shoal.serve").info("the last line")
        cluster.Replica().__del__()
        assert [line.split(maxsplit=2)[2] for line in ray.get(actor.kept.remote())] == ["the last line"]
    finally:
        logs.restore()
        ray.kill(actor)
