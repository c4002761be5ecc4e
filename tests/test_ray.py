"""More than one process: nothing lost, nothing doubled, and with seeds the tokens of one, though a worker is killed."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal import load
from shoal.api import Shoal
from shoal.errors import ModelError, RequestError
from shoal.serve.batch_lines import BatchLine
from shoal.serve.run import bind
from shoal.serve.serve_config import ServeConfig
from shoal.serve.settings import Settings
from shoal.testing import save_pair

ray = pytest.importorskip("ray", reason="needs ray: pip install '.[ray]'")

from ray import serve as ray_serve  # noqa: E402

from shoal.serve import cluster, pool  # noqa: E402

TIMEOUT_SECONDS = 300
pytestmark = [
    pytest.mark.limit(600),  # many processes that each import torch
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
]
THIN = cluster.Share(cpus=0.5)  # so that two fit into two CPUs beside what Ray itself runs


@pytest.fixture(scope="module")
def two_cpus() -> Iterator[None]:
    """A small cluster on this machine alone; what is defined here travels to it by value."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20, configure_logging=False,
    )  # fmt: skip
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Directories of a tiny pair."""
    return save_pair(tmp_path_factory.mktemp("pair"))


def load_and_mark(pair: tuple[Path, Path], marks: Path) -> Shoal:
    """Loads the pair, and leaves the process's number."""
    (marks / str(os.getpid())).touch()
    return load(*pair, dtype="float32", quantize="off", max_batch=4)


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
    """How many loaded, this one aside."""
    return len({file.name for file in marks.iterdir()} - {str(os.getpid()), "victim"})


def serve_config(load: Any, pair: tuple[Path, Path], marks: Path) -> ServeConfig:
    return ServeConfig(partial(load, pair, marks), Settings("tiny"), lookahead=3)


def essence(entry: dict[str, Any]) -> tuple[Any, ...]:
    """What an answer says and took; means of log-probabilities may be rounded otherwise beside other rows."""
    took = [
        [choice[name] for name in ("completion_tokens", "drafted", "accepted", "rounds", "ended_by")]
        for choice in entry.get("usage", {}).get("choices", ())
    ]
    return [choice["text"] for choice in entry.get("choices", ())], took, entry.get("error")


def test_a_killed_worker_loses_and_doubles_nothing(two_cpus: None, pair: tuple[Path, Path], tmp_path: Path) -> None:
    bodies = [{"id": i, "prompt": f"line {i}", "seed": i, "n": 2, "max_tokens": 24} for i in range(48)]
    bodies[5] |= {"prompt": None}
    lines = [BatchLine(number, json.dumps(body), body["id"], True) for number, body in enumerate(bodies, 1)]
    alone: list[Any] = []
    serve_config(load_and_mark, pair, tmp_path).offline().answer(lines, alone.append)
    together: list[Any] = []
    pool.answer(lines, serve_config(load_to_die, pair, tmp_path), together.append, 2, THIN)
    assert sorted(entry["id"] for entry in together) == list(range(48))
    assert {entry["id"]: essence(entry) for entry in together} == {entry["id"]: essence(entry) for entry in alone}
    assert sum("error" in entry for entry in together) == 1
    took = [choice for entry in together for choice in entry.get("usage", {}).get("choices", ())]
    assert len(took) == 47 * 2
    assert sum(choice["drafted"] for choice in took) > sum(choice["accepted"] for choice in took) > 0
    assert (tmp_path / "victim").exists()
    assert processes(tmp_path) == 3, "two workers, and one in the killed one's place"


def load_with_poison(pair: tuple[Path, Path], marks: Path) -> Shoal:
    """The same; but each process dies that is asked for the letters "poison"."""
    shoal = load_and_mark(pair, marks)
    encode = shoal.tokenizer.encode

    def fatal(text: str, *arguments: Any, **options: Any) -> Any:
        if "poison" in text:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(text, *arguments, **options)

    shoal.tokenizer.encode = fatal
    return shoal


def test_a_line_that_kills_its_worker_has_an_error_and_the_others_their_answers(
    two_cpus: None, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    bodies = [{"id": i, "prompt": "poison" if i == 5 else f"line {i}", "seed": i, "max_tokens": 4} for i in range(16)]
    lines = [BatchLine(number, json.dumps(body), body["id"], True) for number, body in enumerate(bodies, 1)]
    got: list[Any] = []
    pool.answer(lines, serve_config(load_with_poison, pair, tmp_path), got.append, 1, THIN)
    assert sorted(entry["id"] for entry in got) == list(range(16))
    (failed,) = [entry for entry in got if "error" in entry]
    assert (failed["id"], failed["error"]["code"]) == (5, "worker_died")
    assert "each of them died" in failed["error"]["message"]
    assert processes(tmp_path) == 1 + 1 + 3, "blocks of four and of two lines, and three tries alone"


def load_and_die(pair: tuple[Path, Path], marks: Path) -> Shoal:
    """As if there were no memory for the weights."""
    load_and_mark(pair, marks)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def test_workers_that_die_while_they_load_are_no_lines_fault(
    two_cpus: None, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    done: list[Any] = []
    with pytest.raises(ModelError, match="3 workers in succession died while they loaded"):
        pool.answer([BatchLine(1, "{}", 1)], serve_config(load_and_die, pair, tmp_path), done.append, 1, THIN)
    assert (done, processes(tmp_path)) == ([], 3)


@ray_serve.deployment(ray_actor_options={"num_cpus": 0})
class Neighbour:
    """An application of somebody else."""

    def __call__(self) -> str:
        return "mine"


def test_applications_of_others_stay_and_their_proxy_is_respected(
    two_cpus: None, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    with bind("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
    ray_serve.start(http_options={"host": "127.0.0.1", "port": port})
    served, url = serve_config(load_and_mark, pair, tmp_path), f"http://127.0.0.1:{port}"
    try:
        ray_serve.run(Neighbour.options(name="shoal").bind(), name="shoal", route_prefix="/")
        with pytest.raises(
            RequestError, match=f"listens at 127.0.0.1:{port} already .* give --host 127.0.0.1 --port {port}"
        ):
            cluster.run(served, "127.0.0.1", port + 1, cluster.Replicas(), THIN, lambda port: None)
        with pytest.raises(RequestError, match="has an application already"):
            cluster.run(served, "127.0.0.1", port, cluster.Replicas(), THIN, lambda port: None)
        assert httpx.get(url, timeout=TIMEOUT_SECONDS).text == "mine"
        ray_serve.delete("shoal")
        ray_serve.run(Neighbour.options(name="shoal").bind(), name="shoal", route_prefix="/other")
        seen: list[Any] = []

        def use(port: int) -> None:
            seen.append((port, httpx.get(f"{url}/health", timeout=TIMEOUT_SECONDS).status_code))
            seen.append(len(ray_serve.status().applications))
            os.kill(os.getpid(), signal.SIGTERM)

        cluster.run(served, "127.0.0.1", 0, cluster.Replicas(drain=1), THIN, use)
        assert seen == [(port, 200), 2]
        assert list(ray_serve.status().applications) == ["shoal"]
        assert httpx.get(f"{url}/other", timeout=TIMEOUT_SECONDS).text == "mine", (
            "neither replaced nor deleted nor shut down"
        )
    finally:
        ray_serve.shutdown()


def load_to_wait(pair: tuple[Path, Path], marks: Path) -> Shoal:
    """The same; but a prompt "wait" is not read until there is a file "open"."""
    shoal = load_and_mark(pair, marks)
    encode = shoal.tokenizer.encode

    def held(text: str, *arguments: Any, **options: Any) -> Any:
        while text == "wait" and not (marks / "open").exists():
            time.sleep(0.01)
        return encode(text, *arguments, **options)

    shoal.tokenizer.encode = held
    return shoal


def test_a_flood_is_told_to_come_again(two_cpus: None, pair: tuple[Path, Path], tmp_path: Path) -> None:
    codes: list[int] = []

    def use(port: int) -> None:
        url, body = f"http://127.0.0.1:{port}/v1/completions", {"prompt": "wait", "max_tokens": 2}
        with ThreadPoolExecutor(24) as clients:
            asked = [clients.submit(httpx.post, url, json=body, timeout=60) for _ in range(24)]
            for one in as_completed(asked):  # the first to be answered is one that was refused
                (tmp_path / "open").touch()
                codes.append(one.result().status_code)
        os.kill(os.getpid(), signal.SIGTERM)

    many = cluster.Replicas(open=2, drain=1)
    cluster.run(serve_config(load_to_wait, pair, tmp_path), "127.0.0.1", 0, many, THIN, use)
    assert (codes[0], set(codes)) == (503, {200, 503})


LOCAL = """
import json, psutil, ray
from shoal.serve.cluster import connected
from ray._private.authentication.authentication_utils import is_token_auth_enabled
with connected():
    ray.get(ray.remote(lambda: 1).remote())
    found = [psutil.Process(), *psutil.Process().children(recursive=True)]
    places = [place.laddr.ip for process in found for place in process.net_connections("inet") if place.status == "LISTEN"]
    print(json.dumps([sorted(set(places)), len(places), is_token_auth_enabled()]))
"""


def test_a_cluster_of_our_own_listens_on_loopback_and_asks_for_a_token(tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = {**clean, "HOME": str(tmp_path), "RAY_ADDRESS": "local"}
    done = subprocess.run(
        [sys.executable, "-c", LOCAL], env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    assert done.returncode == 0, done.stderr
    places, many, token = json.loads(done.stdout.splitlines()[-1])
    assert many > 5
    assert {ipaddress.ip_address(place.removeprefix("::ffff:")).is_loopback for place in places} == {True}, places
    assert token is True


def test_replicas_answer_as_one_server(two_cpus: None, pair: tuple[Path, Path], tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
    url, served = f"http://127.0.0.1:{port}", serve_config(load_and_mark, pair, tmp_path)
    ready, got, many = threading.Event(), [], cluster.Replicas(least=2, most=2, drain=5)
    body = {"prompt": "hello", "n": 2, "seed": 3, "max_tokens": 24}

    def use() -> None:
        assert ready.wait(TIMEOUT_SECONDS)
        try:
            got.extend(httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_SECONDS).json() for _ in range(16))
            got.append(httpx.post(f"{url}/v1/completions", json={**body, "nn": 1}, timeout=TIMEOUT_SECONDS).json())
            with httpx.stream(
                "POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=TIMEOUT_SECONDS
            ) as stream:
                got.append("".join(stream.iter_lines()))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    client = threading.Thread(target=use, daemon=True)
    client.start()
    cluster.run(served, "127.0.0.1", port, many, THIN, lambda port: ready.set())
    client.join()
    samples = served.load().generate("hello", 2, seed=3, max_new_tokens=24, lookahead=3)[0].samples
    *answers, refused, stream = got
    assert len(answers) == 16
    for answer in answers:
        assert [choice["text"] for choice in answer["choices"]] == [sample.text for sample in samples]
        assert [took["drafted"] for took in answer["usage"]["choices"]] == [sample.drafted for sample in samples]
    assert refused["error"]["code"] == "unknown_field"
    assert stream.endswith("data: [DONE]")
    assert processes(tmp_path) == 2
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def load_nothing() -> Shoal:
    raise ModelError("no such pair")


def test_an_error_of_a_worker_is_raised_here(two_cpus: None) -> None:
    done: list[Any] = []
    with pytest.raises(ModelError, match=r"^no such pair$"):
        pool.answer([BatchLine(1, "{}", 1)], ServeConfig(load_nothing, Settings("tiny")), done.append, 1, THIN)
    assert not done


def test_waiting_for_a_machine_that_is_not_there_is_logged(two_cpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []  # asked of the logger itself: what Ray does to the handlers of a process is its own affair
    monkeypatch.setattr(cluster.LOG, "warning", lambda text, *values: said.append(text % values))
    cluster.warn_if_too_small(THIN)
    cluster.warn_if_too_small(cluster.Share(cpus=1, gpus=64))
    assert said == ["no machine of this cluster has 1 CPUs and 64 GPUs: waiting for one"]
