"""A target shared by two processes decodes what it decodes in one; the first process decides, the second only computes.

Tests of: models.ranks, models.tensor_parallel.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import httpx
import pytest
import torch

import sharded_pair
import shoal
from serving import eventually
from shoal.cli import run
from shoal.errors import OutOfStep, RequestError
from shoal.models import loading
from shoal.models.ranks import PASS_SECONDS, VARIABLE, Ranks, pass_seconds
from shoal.models.tensor_parallel import capture_obstacle, require_ranks
from shoal.testing import save_pair

SIZE = 2
SECONDS = 600  # servers import Transformers, twice
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={SIZE}")
TWO = torch.distributed.is_available() and torch.distributed.is_gloo_available() and find_spec("accelerate")


def needs_two(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test of several processes, which take long to start."""
    return pytest.mark.slow(pytest.mark.skipif(not TWO, reason="needs torch.distributed with gloo, and accelerate")(test))


needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes by /proc")


@contextmanager
def copies(job: Callable[[], object], folder: Path) -> Iterator[list[int]]:
    """Two processes as torchrun starts them, but copies of this one, which need not import Transformers again. They are killed at
    the end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": str(SIZE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    children = []
    for rank in range(SIZE):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # this process has other threads
            child = os.fork()
        if not child:
            _end(job, folder, common | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        children.append(child)
    try:
        yield children
    finally:
        for child in children:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def code_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def forked(job: Callable[[], object], folder: Path, *, ends: bool = True) -> str:
    """stdout of two processes.

    Args:
        ends: each of them ends by itself. Else the second is killed once the first has ended.
    """
    with copies(job, folder) as children:
        codes = [code_of(child) for child in (children if ends else children[:1])]
    assert not any(codes), (folder / "err0").read_text()[-3000:] + (folder / "err1").read_text()[-3000:]
    return "".join((folder / f"out{rank}").read_text() for rank in range(SIZE))


def _end(job: Callable[[], object], folder: Path, environment: dict[str, str]) -> NoReturn:
    """Runs the job in a copy of this process, and ends that."""
    os.environ |= environment
    atexit._clear()  # what this process does at its end is not for its copy
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / (name + environment["RANK"]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False, buffering=1) for number in (1, 2))  # noqa: SIM115
    code = 1
    try:
        torch.set_num_threads(1)
        code = int(job() or 0)  # type: ignore[call-overload]
        atexit._run_exitfuncs()  # rank 0 lets the others go
    except SystemExit as ended:
        print(ended, file=sys.stderr)
        code = int(bool(ended.code))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sharded")
    save_pair(place)
    return place


@pytest.fixture(scope="module")
def ranks(directory: Path) -> list[dict[str, Any]]:
    """What each of two processes did."""
    forked(lambda: sharded_pair.main(directory), directory)
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(SIZE)]


@pytest.fixture(scope="module")
def alone(directory: Path) -> shoal.Shoal:
    return sharded_pair.load(directory)


@pytest.fixture(scope="module")
def whole(alone: shoal.Shoal) -> dict[str, Any]:
    """What one process did."""
    return sharded_pair.everything(alone)


@needs_two
def test_two_processes_verify_trees(ranks: list[dict[str, Any]], alone: shoal.Shoal) -> None:
    """And both move the cells of the accepted path."""
    expected = torch.tensor(sharded_pair.tree_logits(alone.target))
    torch.testing.assert_close(torch.tensor(ranks[0]["tree"]), expected, rtol=0, atol=1e-4)
    assert ranks[1]["heard"]["gather"] == 1


@needs_two
@pytest.mark.parametrize("case", [*sharded_pair.CASES, "shared-prompts"])
def test_two_processes_give_the_tokens_of_one(case: str, ranks: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    assert ranks[0][case]["ids"] == whole[case]["ids"]
    if case != "sampled-auto":  # whose draft lengths follow from time; a seed's tokens do not
        assert ranks[0][case]["counts"] == whole[case]["counts"]


@needs_two
def test_speculation_took_part(ranks: list[dict[str, Any]]) -> None:
    plain, speculative = (ranks[0][f"greedy-{way}"]["counts"] for way in ("plain", "speculative"))
    assert plain["drafted"] == 0
    assert plain["committed"] == speculative["committed"] == len(sharded_pair.PROMPTS) * sharded_pair.ROWS * 24
    assert speculative["accepted"] == speculative["drafted"] > 0
    assert speculative["target_passes"] < plain["target_passes"] / 3


@needs_two
def test_every_pass_was_made_by_both(ranks: list[dict[str, Any]]) -> None:
    assert ranks[1]["heard"]["pass"] == ranks[0]["passes"] > 100
    assert ranks[1]["heard"]["copy"] > 0


@needs_two
def test_captures_are_refused_by_name_and_the_stages_do_the_work(ranks: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    """An executor that would capture gloo's sums would fail on a device only, and in the middle of a run."""
    refused, expected = ranks[0]["refused"], whole["greedy-speculative"]
    assert refused["said"] == f"modules (no captured rounds: {capture_obstacle('gloo')})"
    assert refused["said"].startswith("modules (no captured rounds: gloo joins the sums of several processes on the host")
    assert (refused["ids"], refused["counts"]) == (expected["ids"], expected["counts"])
    assert capture_obstacle("cpu:gloo,cuda:nccl") is None


# ── captured rounds; gloo's collectives run on the host, so that functions stand in for graphs ──────────────────────────────


@needs_two
@pytest.mark.parametrize(("executor", "case"), sharded_pair.ROUNDS)
def test_captured_rounds_give_the_tokens_of_one_process(
    executor: str, case: str, ranks: list[dict[str, Any]], whole: dict[str, Any]
) -> None:
    """Also where one rank could not build its part, or computes something else: then all of them leave rounds to their stages. What
    is "recorded" asks nothing of the host, on any rank."""
    found = ranks[0][f"{executor} {case}"]
    assert found["ids"] == whole[case]["ids"]
    if case != "sampled-auto":
        assert found["counts"] == whole[case]["counts"]
    if executor in ("eager", "recorded", "remembered"):
        assert (found["failures"], found["said"]) == ([], [])
        assert found["captured"] == found["counts"]["rounds"]
        return
    reason = "logits diverge" if executor == "wrong-1" else "a host read while recording"
    assert all(reason in failure for failure in found["failures"])
    assert "no more captured rounds" in found["said"][0]


@needs_two
def test_rounds_are_built_ahead_on_both_and_again_after_growth(ranks: list[dict[str, Any]], alone: shoal.Shoal) -> None:
    """The row that comes late needs a larger cache while the others run: both ranks keep what is in theirs."""
    found, expected = ranks[0]["prepared"], sharded_pair.prepared(alone, ahead=False)
    assert found["ids"] == expected["ids"]
    assert found["grew"]
    assert found["functions"] > 4
    assert not found["in_rounds"]


@needs_two
def test_both_build_and_run_the_same_and_let_go_of_it(ranks: list[dict[str, Any]]) -> None:
    heard = ranks[1]["heard"]
    assert heard["run"] > 2 * heard["build"] > 0
    assert 4 < ranks[1]["functions"] < heard["build"]


@needs_two
def test_a_rank_that_is_lost_gives_one_clear_error(ranks: list[dict[str, Any]]) -> None:
    """It fails in a captured round; nothing is tried by stages, and nothing goes on afterwards."""
    found = ranks[0]["lost"]
    first, second = found["errors"]
    assert first == "OutOfStep: a process of the model has failed or ended, its own message says why: start them all again"
    assert second.startswith("OutOfStep: an earlier pass failed")
    assert found["warnings"] == []
    assert ranks[1]["said"].startswith("rank 1 of ")
    assert "KeyError" in ranks[1]["said"]
    assert ranks[1]["said"].endswith("start them all again")


@needs_two
def test_weights_and_caches_are_really_shared_out(ranks: list[dict[str, Any]], alone: shoal.Shoal) -> None:
    full = sharded_pair.local_shapes(alone.target)
    for rank in ranks:
        for name, shape in full.items():
            axis = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 0, "up_proj": 0, "o_proj": 1, "down_proj": 1}.get(
                name.split(".")[-2], 0 if name.endswith(("embed_tokens.weight", "lm_head.weight")) else None
            )
            assert rank["shapes"][name] == [size // SIZE if i == axis else size for i, size in enumerate(shape)], name
    assert ranks[0]["kv_heads"] == alone.target.hf.config.num_key_value_heads // SIZE


@needs_two
def test_what_is_not_told_is_missed(ranks: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    untold, expected = ranks[0]["untold"]["ids"], whole["greedy-plain"]["ids"]
    assert untold[0] == expected[0]  # the row in whose slot the prompt was computed
    assert untold[1] != expected[1]


@needs_two
def test_after_a_failure_nothing_goes_on(ranks: list[dict[str, Any]]) -> None:
    assert "start them all again" in ranks[0]["out_of_step"]


@needs_two
@pytest.mark.limit(SECONDS)
def test_the_command_line_prints_once(tmp_path: Path) -> None:
    target, draft = save_pair(tmp_path, "gemma2")
    options = (
        f"-p fish -n 2 --max-new-tokens 12 --seed 3 -k 2 --dtype float32 --json --model {target} --draft {draft}".split()
    )
    said = forked(lambda: run(["generate", *options, "--tensor-parallel"]), tmp_path)
    alone = shoal.load(target, draft, dtype="float32").generate("fish", 2, max_new_tokens=12, seed=3, lookahead=2)
    printed = json.loads(said)
    assert [tuple(sample["token_ids"]) for sample in printed["prompts"][0]["samples"]] == [
        s.token_ids for s in alone[0].samples
    ]
    assert printed["stats"]["drafted"] == alone.stats.drafted > 0


# ── a server ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def serve_options(directory: Path) -> list[str]:
    models = f"--model {directory / 'target'} --draft {directory / 'target'} --dtype float32"
    return f"{models} --max-batch 4 --drain {SECONDS} -k 3 --port 0 --json --tensor-parallel".split()


@contextmanager
def served(directory: Path, **environment: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """torchrun with a server of two processes, which it may start once more, and a client; who is left at the end is killed."""
    with (directory / "stderr").open("w") as said:
        running = subprocess.Popen(
            [*TORCHRUN, "--max-restarts=1", "-m", "shoal", "serve", *serve_options(directory)],
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment, text=True, stdout=subprocess.PIPE, stderr=said,
        )  # fmt: skip
    try:
        assert running.stdout is not None
        line = running.stdout.readline()
        assert line, (directory / "stderr").read_text()[-3000:]
        with httpx.Client(base_url=json.loads(line)["url"].removesuffix("/v1"), timeout=SECONDS) as client:
            yield running, client
    finally:
        for process in ranks_of(running):
            os.kill(process, signal.SIGKILL)
        running.kill()
        running.communicate()


def ranks_of(running: subprocess.Popen[str], rank: int | None = None) -> list[int]:
    """The processes that torchrun started and that are still there."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            wanted = b"RANK=" if rank is None else b"RANK=%d" % rank
            if parent == running.pid and any(
                entry.startswith(wanted) for entry in (place / "environ").read_bytes().split(b"\0")
            ):
                found.append(int(place.name))
    return found


LONG = {"prompt": "def shoal", "n": 12, "max_tokens": 100, "temperature": 0.8, "speculation": "off", "stream": True}
TOOK = ("completion_tokens", "drafted", "accepted", "rounds")


@needs_two
@pytest.mark.limit(SECONDS)
def test_a_server_of_two_processes_answers_as_one_does_and_drains(
    directory: Path, alone: shoal.Shoal, tmp_path: Path
) -> None:
    """Greedy and seeded, drafted and plain; scored prompts go through both processes, too."""
    cases = [(temperature, speculation) for temperature in (0.0, 0.8) for speculation in (None, "off")]
    with copies(lambda: run(["serve", *serve_options(directory)]), tmp_path) as ranks:
        eventually(lambda: (tmp_path / "out0").exists() and (tmp_path / "out0").read_text().endswith("\n"))
        client = httpx.Client(
            base_url=json.loads((tmp_path / "out0").read_text())["url"].removesuffix("/v1"), timeout=SECONDS
        )
        for temperature, speculation in cases:
            body = {"prompt": "def shoal", "n": 2, "seed": 7, "max_tokens": 24, "temperature": temperature}
            answer = client.post("/v1/completions", json=body | ({"speculation": speculation} if speculation else {})).json()
            lookahead = "off" if speculation else 3
            result = alone.generate("def shoal", 2, max_new_tokens=24, temperature=temperature, seed=7, lookahead=lookahead)
            samples = result[0].samples
            assert [choice["text"] for choice in answer["choices"]] == [sample.text for sample in samples]
            took = [[choice[name] for name in TOOK] for choice in answer["usage"]["choices"]]
            assert took == [[len(s.token_ids), s.drafted, s.accepted, s.rounds] for s in samples]
            assert all((drafted > 0) == (speculation is None) for _, drafted, _, _ in took)
        scored = client.post(
            "/v1/completions", json={"prompt": "def shoal", "echo": True, "logprobs": 0, "max_tokens": 0}
        ).json()
        ids = alone.tokenizer.encode("def shoal")
        logits = alone.target.plain_logits(torch.tensor([ids]))[0].detach().log_softmax(-1)
        expected = [float(logits[i, token]) for i, token in enumerate(ids[1:])]
        assert scored["choices"][0]["logprobs"]["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)
        assert "shoal_" in client.get("/metrics").text
        with client.stream("POST", "/v1/completions", json=LONG) as stream:
            lines = stream.iter_lines()
            assert "choices" in next(lines)
            for rank in ranks:  # as torchrun does when it is told to end
                os.kill(rank, signal.SIGTERM)
            rest = list(filter(None, lines))
        ends = [choice["finish_reason"] for line in rest[:-1] for choice in json.loads(line[6:])["choices"]]
        whole = rest[-1] == "data: [DONE]" and sum(end in ("stop", "length") for end in ends) == LONG["n"]
        assert whole, rest[-1] + "".join((tmp_path / f"err{rank}").read_text()[-3000:] for rank in range(SIZE))
        assert [code_of(rank) for rank in ranks] == [0, 0]
        client.close()


def cut_short(url: str, end: Callable[[], None]) -> str:
    """What is left of a stream once its first event has come and `end` was called."""
    with httpx.stream("POST", f"{url}/completions", json=LONG, timeout=SECONDS) as stream:
        lines = stream.iter_lines()
        assert "choices" in next(lines)
        end()
        return "".join(lines)


@needs_two
@needs_proc
@pytest.mark.limit(SECONDS)
def test_a_server_that_loses_a_process_fails_what_it_has_and_ends(directory: Path) -> None:
    """First the process is stopped, not dead: its connections stay. torchrun starts all again, as often as it may; then it ends. A
    server that nobody asks waits for longer."""
    ask = {"prompt": "def shoal", "n": 2, "max_tokens": 24, "temperature": 0}
    options = {"SHOAL_RANK_TIMEOUT": "5", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with served(directory, **options) as (running, client):
        before = client.post("/v1/completions", json=ask).json()
        (follower,) = ranks_of(running, 1)
        time.sleep(6)
        assert client.get("/ready").status_code == 200
        rest = cut_short(str(client.base_url.join("/v1")), lambda: os.kill(follower, signal.SIGSTOP))
        assert "engine_stopped" in rest
        os.kill(follower, signal.SIGCONT)  # so that torchrun need not wait before it kills
        assert running.stdout is not None
        said = map(json.loads, running.stdout)  # the first server tells why it ended
        url = next(line["url"] for line in said if "url" in line)
        after = httpx.post(f"{url}/completions", json=ask, timeout=SECONDS).json()
        assert after["choices"] == before["choices"]
        assert [[choice[name] for name in TOOK] for choice in after["usage"]["choices"]] == [
            [choice[name] for name in TOOK] for choice in before["usage"]["choices"]
        ]
        assert "engine_stopped" in cut_short(url, lambda: os.kill(*ranks_of(running, 1), signal.SIGKILL))
        assert running.wait(SECONDS) != 0
        assert not ranks_of(running)
    told = (directory / "stderr").read_text()
    assert "has not answered for 5 seconds (SHOAL_RANK_TIMEOUT)" in told
    assert "OutOfStep" in told


def hear_one() -> None:
    torch.distributed.init_process_group("gloo")
    if torch.distributed.get_rank():
        time.sleep(4)  # as if it loaded for longer
    ranks = Ranks()
    if torch.distributed.get_rank():
        print("heard", ranks.hear()[:2])
        time.sleep(1000)
    with ranks.broadcast("pass", 1):
        pass
    try:
        with ranks.broadcast("pass", 2):
            print("a pass that the other did not hear of")
    except OutOfStep as error:
        print(error)


@needs_two
def test_a_process_that_hangs_between_passes_is_found_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits until the others take its message. One that loads for longer than the others does not hang."""
    monkeypatch.setenv(VARIABLE, "3")
    assert forked(hear_one, tmp_path, ends=False).splitlines() == [
        f"a process of the model has not answered for 3 seconds ({VARIABLE}): start them all again",
        "heard ('pass', 1)",
    ]


@pytest.mark.parametrize("given", ["soon", "0", "-1", "nan", "inf"])
def test_a_wrong_time_to_wait_is_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(RequestError, match=r"SHOAL_RANK_TIMEOUT must be a number of seconds, greater than 0: got"):
        pass_seconds()
    monkeypatch.delenv(VARIABLE)
    assert pass_seconds() == PASS_SECONDS


@pytest.mark.parametrize(("options", "said"), [(["--ray"], "--ray"), (["--prefix-memory", "1"], "--prefix-memory")])
def test_what_a_shared_target_cannot_serve_is_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", "--tensor-parallel", *options]) == 2
    assert said in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# Refused before anything is loaded


def _config(**heads: int) -> SimpleNamespace:
    return SimpleNamespace(**heads)


@pytest.mark.parametrize("started", [{}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_one_process_is_told_how_to_start_more(monkeypatch: pytest.MonkeyPatch, started: dict[str, str]) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RequestError, match="torchrun --nproc-per-node"):
        require_ranks("m", _config(num_key_value_heads=2))


@needs_two
def test_heads_that_cannot_be_shared_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    require_ranks("m", _config(num_key_value_heads=8, num_attention_heads=32))
    with pytest.raises(RequestError, match="m has 2 heads of keys and values, which 4 processes"):
        require_ranks("m", _config(num_key_value_heads=2, num_attention_heads=32))


@pytest.mark.parametrize("option", [{"strict": True}, {"quantize": "int8"}, {"device": "cpu"}])
def test_options_that_do_not_go_with_it(directory: Path, option: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="tensor_parallel wants device 'auto'"):
        loading.load_runner(directory / "target", loading.LoadOptions(tensor_parallel=True, **option))
