"""`python benchmarks/peers.py`: what it asks of engines, checks, keeps and shows; on engines made up here, and on shoal.

Tests of: benchmarks/peers.py and benchmarks/engines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import typer
from transformers import LlamaConfig
from typer.testing import CliRunner

import peers
import shoal
from engines import models, process, tables
from engines.draws import Sampler, kept_drafts
from engines.process import Worker
from engines.results import Comparison, Results
from engines.rows import ROWS, cells_of, chosen
from engines.shoal_engine import Engine as ShoalEngine
from engines.tasks import PLAIN, Absent, Setup, Task, convert
from engines.transformers_engine import Engine as TransformersEngine
from shoal.bench.machine import Process, QuietGate
from shoal.errors import InternalError, RequestError

ROW = next(row for row in ROWS if row.name == "bundled-8")
TOKENS = 6
EVERY = list(cells_of(ROW))


# ── engines that are made up ────────────────────────────────────────────────────────────────────────────────────────


class FakeWorker:
    """Answers what `ids` says, at the speed that `seconds` says."""

    seconds: ClassVar[dict[str, float]] = {"openvino": 0.5}
    missing: ClassVar[dict[str, Exception]] = {}
    wrong: ClassVar[set[tuple[str, str, str]]] = set()  # engine, method, dtype: another last token
    short: ClassVar[set[str]] = set()
    interrupt_at: ClassVar[int] = -1
    asked: ClassVar[list[tuple[str, str, int, float]]] = []

    def __init__(self, python: str, setup: Setup, log: Path, *, preparing: bool = False) -> None:
        if setup.engine in self.missing:
            raise self.missing[setup.engine]
        self.setup, self.about = setup, {"version": "1.0", "settings": {}}

    def run(self, task: Task) -> dict[str, Any]:
        setup = self.setup
        self.asked.append((setup.engine, setup.method, task.seed, task.temperature))
        if len(self.asked) == self.interrupt_at:
            raise KeyboardInterrupt
        ids = [list(range(task.new_tokens)) for _ in task.prompts for _ in range(task.n)]
        if (setup.engine, setup.method, setup.dtype) in self.wrong:
            ids[-1][-1] += 1
        if setup.engine in self.short:
            ids[-1].pop()
        seconds = self.seconds.get(setup.engine, 1.0)
        return {"ids": ids, "seconds": seconds, "drafted": 0, "accepted": 0, "acceptance_length": 1.0}

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture(autouse=True)
def made_up(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeWorker]]:
    for name, empty in (("missing", {}), ("wrong", set()), ("short", set()), ("asked", []), ("interrupt_at", -1)):
        monkeypatch.setattr(FakeWorker, name, empty)
    monkeypatch.setattr(peers, "Worker", FakeWorker)
    monkeypatch.setattr(peers, "make_models", lambda *_: None)
    monkeypatch.setattr(peers, "prepare", lambda *_: None)
    return FakeWorker


def comparer(place: Path | None = None, **changes: Any) -> peers.Comparer:
    machine = {"commit": "0" * 12, "device": "x86_64", "date": "2026-01-01", "torch": "2"}
    results = Results.resume(place, {"threads": 2, "new_tokens": TOKENS}, machine)
    gate = QuietGate(0.0, read=lambda: {})
    options = {"python": "python", "cache": Path("cache"), "threads": 2, "repeats": 2, "check": False, "gate": gate}
    return peers.Comparer(results, place, **options | changes)


SHORT = replace(ROW, new_tokens=TOKENS)


def test_engines_take_turns_on_the_same_work(made_up: type[FakeWorker]) -> None:
    one = comparer()
    one.measure(SHORT, EVERY)
    timed = [(engine, method, seed) for engine, method, seed, temperature in made_up.asked if temperature]
    warm_up, first, second = timed[:9], timed[9:18], timed[18:]
    assert [key[:2] for key in warm_up] == [key[:2] for key in first] == EVERY
    assert [key[:2] for key in second] == EVERY[::-1]
    assert ([*{k[2] for k in warm_up}], [*{k[2] for k in first}], [*{k[2] for k in second}]) == ([0], [1], [2])
    for cell in one.results.cells.values():
        assert [run["tokens"] for run in cell.runs] == [8 * TOKENS] * 2
        assert cell.rates == [8 * TOKENS / (0.5 if cell.engine == "openvino" else 1.0)] * 2


def test_identity_is_checked_before_anything_is_timed(made_up: type[FakeWorker]) -> None:
    one = comparer()
    one.measure(SHORT, EVERY)
    greedy = [key for key in made_up.asked if key[3] == 0]
    assert made_up.asked[: len(greedy)] == greedy
    assert Counter(key[:2] for key in greedy) == {("transformers", PLAIN): 1, **dict.fromkeys(EVERY[:3], 1)}
    assert [cell.identity for cell in one.results.cells.values() if cell.engine == "shoal"] == [{"rows": 8, "same": 8}] * 3


@pytest.mark.parametrize("method", ["plain", "auto", "fixed:4"])
def test_a_wrong_id_of_any_method_ends_the_run(made_up: type[FakeWorker], method: str, tmp_path: Path) -> None:
    made_up.wrong.add(("shoal", method, "float32"))
    one = comparer(tmp_path / "a.json")
    with pytest.raises(InternalError, match=rf"shoal/{method}: greedy ids differ .* in 1 of 8 rows"):
        one.measure(SHORT, EVERY)
    assert not any(cell.runs for cell in one.results.cells.values())


def test_8_bit_weights_are_compared_with_their_own_plain_decoding(made_up: type[FakeWorker]) -> None:
    row = replace(SHORT, dtype="int8", name="llama-8-int8")
    one = comparer()
    one.measure(row, EVERY[:2])
    assert {key[0] for key in made_up.asked} == {"shoal"}
    made_up.wrong.add(("shoal", "auto", "int8-float32"))
    with pytest.raises(InternalError, match="shoal/auto"):
        comparer().measure(row, EVERY[:2])


def test_check_counts_the_leading_ids_of_peers(made_up: type[FakeWorker]) -> None:
    made_up.wrong.add(("llamacpp", PLAIN, "float32"))
    one = comparer(check=True)
    one.measure(SHORT, EVERY)
    leading = {(cell.engine, cell.method): cell.leading for cell in one.results.cells.values()}
    assert leading["llamacpp", PLAIN] == (TOKENS - 1, TOKENS)
    assert leading["openvino", "fixed:4"] == (TOKENS, TOKENS)
    assert leading["shoal", "auto"] is None


def test_engines_that_are_missing_are_named_and_the_others_measured(made_up: type[FakeWorker]) -> None:
    made_up.missing |= {"ctranslate2": Absent("No module named 'ctranslate2'"), "llamacpp": InternalError("at /home/me")}
    one = comparer()
    one.measure(SHORT, EVERY)
    assert len(one.results.measured("bundled-8")) == 6
    shown = " ".join(tables.pages(one.results).split())
    assert "CTranslate2 plain (bundled-8): No module named 'ctranslate2'" in shown
    assert "llama.cpp plain (bundled-8), llama.cpp drafted (4) (bundled-8): it failed" in shown
    assert "/home/me" not in shown
    made_up.missing["shoal"] = InternalError("out of memory")
    with pytest.raises(InternalError, match="out of memory"):
        comparer().measure(SHORT, EVERY)


def test_fewer_tokens_than_the_others_are_no_speed(made_up: type[FakeWorker]) -> None:
    made_up.short.add("openvino")
    with pytest.raises(InternalError, match=r"openvino decoded 8 rows of \[5, 6\] tokens, not 8 of 6"):
        comparer().measure(SHORT, EVERY)


def test_an_interrupted_run_goes_on_where_it_ended(made_up: type[FakeWorker], tmp_path: Path) -> None:
    place = tmp_path / "a.json"
    made_up.interrupt_at = 4 + 9 + 12  # greedy, warm-up, then the third run of the second turn
    with pytest.raises(KeyboardInterrupt):
        comparer(place).measure(SHORT, EVERY)
    kept = json.loads(place.read_text())["cells"]
    assert sum(len(cell["runs"]) for cell in kept) == 11
    made_up.asked.clear()
    again = comparer(place)
    again.measure(SHORT, EVERY)
    timed = Counter(key[:2] for key in made_up.asked if key[3])
    assert set(timed) == {key for key in EVERY if key not in (("transformers", PLAIN), ("llamacpp", "fixed:4"))}
    assert set(timed.values()) == {2}  # a warm-up and what was missing
    assert not [key for key in made_up.asked if key[3] == 0]  # identity was checked
    assert all(len(cell.runs) == 2 for cell in again.results.cells.values())
    made_up.asked.clear()
    comparer(place).measure(SHORT, EVERY)
    assert not made_up.asked


def test_a_file_of_another_commit_or_setting_is_not_gone_on_with(tmp_path: Path) -> None:
    place = tmp_path / "a.json"
    one = comparer(place)
    one.measure(SHORT, EVERY[:1])
    for config, machine in (
        ({"threads": 4, "new_tokens": TOKENS}, one.results.machine),
        (one.results.config, one.results.machine | {"commit": "1" * 12}),
        (one.results.config | {"isa": "avx2"}, one.results.machine),
    ):
        with pytest.raises(RequestError, match="name another file"):
            Results.resume(place, config, machine)
    place.write_text('{"format": 0}')
    with pytest.raises(RequestError, match="holds no results"):
        Results.read(place)


def test_engines_held_to_an_instruction_set_are_told_and_named(
    made_up: type[FakeWorker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[dict[str, str]] = []

    def started(*_: object, env: dict[str, str], **__: object) -> None:
        told.append(env)
        raise RuntimeError("enough")

    monkeypatch.setattr(process.subprocess, "Popen", started)
    for isa in ("", "avx2"):
        with pytest.raises(RuntimeError, match="enough"):
            Worker(sys.executable, replace(setup_of("shoal", PLAIN, ("a", "b")), isa=isa), tmp_path / "log.txt")
    held = process.HELD["avx2"]
    assert [held.items() <= env.items() for env in told] == [False, True]
    monkeypatch.undo()

    asked = comparer(isa="avx2")
    assert asked._setup(ROW, "llamacpp", PLAIN, "bfloat16").isa == "avx2"
    asked.results.config["isa"] = "avx2"
    asked.results.cell(ROW, *EVERY[0]).runs.append({"seconds": 1.0, "tokens": 8, "busy": None})
    assert "x86_64, engines held to avx2, 2 threads" in " ".join(tables.footer(asked.results))


def test_a_busy_machine_is_marked(made_up: type[FakeWorker]) -> None:
    looks = 0

    def read() -> dict[int, Process]:
        nonlocal looks
        looks += 1
        return {7: Process(1, "cc", 1.0, 1000.0 * looks if looks > 34 else 0.0)}

    one = comparer(gate=QuietGate(0.0, read=read))
    one.measure(SHORT, EVERY)
    disturbed = {(cell.engine, cell.method) for cell in one.results.cells.values() if cell.disturbed}
    assert disturbed == {EVERY[0]}  # the last run of the second turn
    assert "another process used more than 20%" in tables.pages(one.results)
    assert "48.0*" in tables.speeds(one.results)


# ── what is chosen ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("only", "rows", "cells"),
    [("", 14, 7 * 9 + 5 + 6 * 6), ("bundled-1", 1, 9), ("llama-8,qwen-8/openvino", 2, 9 + 1), ("*/shoal/auto", 13, 13)],
)
def test_only_names_rows_and_cells(only: str, rows: int, cells: int) -> None:
    found = chosen(only)
    assert (len(found), sum(map(len, found.values()))) == (rows, cells)
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_the_command_measures_renders_and_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    app, place = typer.Typer(), tmp_path / "a.json"
    app.command()(peers.main)
    arguments = ["--only", "bundled-1", "--repeats", "1", "--new-tokens", str(TOKENS), "--wait", "0", "--json", str(place)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.exception
    again = CliRunner().invoke(app, ["--render", str(place), "--plot", str(tmp_path / "a.png")])
    assert again.stdout == done.stdout
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "row 1 of 1: bundled pair" in done.stderr
    for wrong in (["--only", "vllm"], ["--isa", "avx3"]):
        assert isinstance(CliRunner().invoke(app, wrong).exception, RequestError)


def test_only_models_are_made_on_request(made_up: type[FakeWorker], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(peers, "prepare", lambda _python, setup, _log: made.append(setup.engine))
    comparer().prepare(SHORT, EVERY)
    assert Counter(made) == {"openvino": 2, "llamacpp": 2, "ctranslate2": 1}
    assert not made_up.asked


# ── figures ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_ratios_are_those_of_runs_of_the_same_turn(made_up: type[FakeWorker]) -> None:
    one = comparer()
    one.measure(SHORT, EVERY)
    cells = one.results.measured("bundled-8")
    taken_by = {("shoal", PLAIN): (2.0, 4.0), ("openvino", PLAIN): (1.0, 1.0), ("shoal", "auto"): (1.0, 1.0)}
    for key, seconds in taken_by.items():
        for run, taken in zip(cells[key].runs, seconds, strict=True):
            run["seconds"] = taken
    found = Comparison.of(ROW, cells)
    assert found.plain is not None
    assert found.drafted is not None
    assert found.own is not None
    assert (found.plain.spread, found.plain.against) == ((0.375, 0.25, 0.5), "openvino")
    assert found.drafted.spread.median == 0.5
    assert found.own.spread == (3.0, 2.0, 4.0)
    assert list(tables.lost(one.results)) == [
        f"{ROW.title}: plain against OpenVINO GenAI 0.38x",
        f"{ROW.title}: drafted against OpenVINO GenAI 0.50x",
    ]
    assert "**0.38x (0.25..0.50)** OpenVINO GenAI" in tables.ratios(one.results)


# ── the engines ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def places(saved_pair: tuple[Path, Path]) -> tuple[str, str]:
    return str(saved_pair[0]), str(saved_pair[1])


def setup_of(engine: str, method: str, places: tuple[str, str], dtype: str = "float32") -> Setup:
    draft = places[1] if method != PLAIN else None
    return Setup(engine, method, places[0], draft, dtype, torch.get_num_threads(), "cache", 4, 32)


def test_shoal_and_transformers_decode_the_same_work(places: tuple[str, str]) -> None:
    greedy = Task(((5, 6, 7, 8), (9, 10)), 2, 10, 0.0, 1.0, 0)
    expected = TransformersEngine(setup_of("transformers", PLAIN, places)).generate(greedy)
    for method in (PLAIN, "fixed:4"):
        engine = ShoalEngine(setup_of("shoal", method, places))
        found = engine.generate(greedy)
        assert [list(ids) for ids in found.ids] == [list(ids) for ids in expected.ids]
        assert bool(found.drafted) is (method != PLAIN)
        sampled = engine.generate(replace(greedy, temperature=0.8, top_p=0.9, seed=1))
        assert [len(ids) for ids in sampled.ids] == [10] * 4
    assert [len(ids) for ids in expected.ids] == [10] * 4
    with pytest.raises(Absent, match="8-bit"):
        TransformersEngine(setup_of("transformers", PLAIN, places, "int8"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")
def test_a_worker_is_stopped_between_tasks(places: tuple[str, str], tmp_path: Path) -> None:
    with Worker(sys.executable, setup_of("shoal", PLAIN, places), tmp_path / "log.txt") as worker:
        state = Path(f"/proc/{worker.process.pid}/stat")
        until = time.monotonic() + 200
        while (found := state.read_text(encoding="utf-8").rpartition(")")[2].split()[0]) != "T" and time.monotonic() < until:
            time.sleep(0.01)  # the signal is on its way
        assert found == "T"
        answer = worker.run(Task(((5, 6, 7),), 2, 4, 0.8, 1.0, 0))
        assert [len(ids) for ids in answer["ids"]] == [4, 4]
        assert answer["seconds"] > 0
        assert worker.about["version"]
        os.kill(worker.process.pid, 9)
        worker.process.wait()
        with pytest.raises(InternalError, match="shoal plain ended with code -9"):
            worker.run(Task(((5, 6, 7),), 2, 4, 0.8, 1.0, 0))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not end a child with its parent")
def test_a_killed_driver_takes_its_stopped_workers_with_it(places: tuple[str, str], tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from engines.process import Worker; from engines.tasks import Setup\n"
        f"worker = Worker(sys.executable, {setup_of('transformers', PLAIN, places)!r}, Path({str(tmp_path / 'log.txt')!r}))\n"
        "print(worker.process.pid, flush=True); time.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as driver:
        assert driver.stdout is not None
        worker = int(driver.stdout.readline())
        assert runs(worker)
        driver.kill()
    until = time.monotonic() + 100
    while runs(worker) and time.monotonic() < until:
        time.sleep(0.01)
    assert not runs(worker)


def runs(process: int) -> bool:
    """Whether a process is there, and no ended one that nobody has waited for."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_a_worker_says_which_package_is_missing(places: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(Absent, match=r"No module named 'engines\.vllm_engine'"):
        Worker(sys.executable, setup_of("vllm", PLAIN, places), tmp_path / "log.txt")


def test_an_interrupted_conversion_is_made_again(tmp_path: Path) -> None:
    calls: list[Path] = []

    def write(out: Path) -> None:
        calls.append(out)
        out.mkdir()
        if len(calls) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "model", write)
    for _ in range(2):
        convert(tmp_path / "model", write)
    assert len(calls) == 2
    assert [place.name for place in tmp_path.iterdir()] == ["model"]


# ── random models ───────────────────────────────────────────────────────────────────────────────────────────────────


def tiny(width: int, layers: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, intermediate_size=2 * width,
        vocab_size=200, tie_word_embeddings=False, max_position_embeddings=512,
    )  # fmt: skip


@pytest.mark.parametrize(("acceptance", "least", "most"), [(0.5, 0.38, 0.62), (0.8, 0.73, 0.87)])
def test_a_random_pair_accepts_as_many_drafts_as_wanted(acceptance: float, least: float, most: float) -> None:
    target, drafter = models.agreeing_pair(tiny(64, 3), tiny(32, 1), acceptance)
    pair = shoal.load(target, draft=drafter)
    prompts = torch.randint(200, (8, models.START), generator=torch.Generator().manual_seed(0)).tolist()
    options: dict[str, Any] = {"temperature": models.TEMPERATURE, "eos": (), "rule": "rejection", "seed": 0}
    found = pair.generate(prompts, 4, max_new_tokens=models.LENGTH - models.START, lookahead=1, **options).stats
    assert least < found.accepted / found.drafted < most


# ── draws ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_draws_have_the_distribution_of_the_logits() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], dtype=np.float32))
    sampler = Sampler(1.0, 1.0, np.random.default_rng(0))
    p = sampler.probabilities(logits)
    drawn = np.bincount([sampler.draw(p)[0] for _ in range(4000)], minlength=4) / 4000
    assert drawn == pytest.approx(p[0], abs=0.03)
    assert Sampler(1.0, 0.9, sampler.random).probabilities(logits)[0] == pytest.approx(
        [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]
    )
    assert Sampler(1.0, 0.75, sampler.random).probabilities(logits)[0] == pytest.approx([0.625, 0.375, 0, 0])
    assert Sampler(0.0, 1.0, sampler.random).probabilities(logits)[0].tolist() == [1, 0, 0, 0]
    assert Sampler(0.0, 1.0, sampler.random).draw(logits).tolist() == [0]


@pytest.mark.parametrize("sabotage", [False, True])
def test_accepted_drafts_and_what_follows_have_the_targets_distribution(sabotage: bool) -> None:
    sampler = Sampler(1.0, 1.0, np.random.default_rng(1))
    p = np.array([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6]], dtype=np.float32)
    q = np.array([[0.2, 0.2, 0.6]], dtype=np.float32)
    given = np.ones_like(q) if sabotage else q  # a drafter that is not the one that drew
    first = []
    for _ in range(6000):
        proposed = sampler.draw(q)
        kept, extra = kept_drafts(p, given, proposed, sampler)
        first.append(int(proposed[0]) if kept else extra)
    found = np.bincount(first, minlength=3) / len(first)
    assert bool(np.abs(found - p[0]).max() < 0.025) is not sabotage


def test_names_and_order_of_a_gguf_file() -> None:
    pytest.importorskip("gguf")
    from engines import gguf_file

    assert gguf_file.gguf_name("model.layers.3.self_attn.q_proj.bias") == "blk.3.attn_q.bias"
    assert gguf_file.gguf_name("model.embed_tokens.weight") == "token_embd.weight"
    rows = np.arange(8)[:, None]
    turned = gguf_file._interleaved("model.layers.0.self_attn.q_proj.weight", rows, {"num_attention_heads": 2})
    assert turned[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
