"""`shoal bench` measures what it says: identity first, equal work for every method, figures that follow from counts.

Tests of: bench.job_runner, bench.decoding_methods, bench.report, bench.report_views, bench.random_pairs,
bench.work, bench.quick, cli.bench.
"""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open

import regret
import stages
from bench_runs import POOL, measured, pair, printed, quick_ceilings
from medusa_heads import save_medusa
from never_slower import shuffled
from shoal import bench
from shoal.api import Shoal
from shoal.bench import decoding_methods, machine, quick, random_pairs, report_views
from shoal.bench import job_runner as bench_runner
from shoal.bench.decoding_methods import Job
from shoal.bench.job_runner import BenchmarkRunner, peak_tensor_bytes
from shoal.bench.random_pairs import Imposed, imposing
from shoal.bench.report import Report, ReportLine, Spread, line
from shoal.bench.work import Case, Load, Run, Work, rates, work_of
from shoal.cli import bench as cli_bench
from shoal.cli import run as command_line
from shoal.errors import InternalError
from shoal.loader import load
from shoal.models.load_report import described
from shoal.sampling.acceptance import RULES
from shoal.sampling.distributions import Scores
from shoal.testing import save_pair
from shoal.types import stats
from shoal.types.trees import DraftTree, Verdict

__all__ = ["pair", "quick_ceilings"]  # fixtures
TOKENS = 8
JOB = Job(
    batches=(1, 3), lookaheads=("off", "fixed:3", "bass"), baselines=("hf",), temperatures=(0.8, 0.0),
    layouts=("different", "same"), max_new_tokens=TOKENS, repeats=2,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def quiet_machine() -> Iterator[None]:
    """Whatever runs beside the tests: none of them waits for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "processes", lambda: {})
        yield


@pytest.fixture(scope="module")
def report(pair: Shoal) -> Report:
    return measured(pair, JOB)


# ── figures ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_combination_has_a_line_of_equal_work(report: Report, pair: Shoal) -> None:
    found = {(one.layout, one.temperature, one.batch, one.setting) for one in report.lines}
    settings = ("off", "fixed:3", "bass", "hf")
    assert found == {(x, t, b, s) for x in JOB.layouts for t in JOB.temperatures for b in JOB.batches for s in settings}
    assert len(report.lines) == len(found)
    assert report.complete
    assert not report.unavailable
    weights = pair.target.parameter_bytes + pair.draft_model.parameter_bytes if pair.draft_model else 0
    for one in report.lines:
        assert one.committed == TOKENS * one.batch
        assert len(one.runs) == JOB.repeats
        for run in one.runs:
            assert run["tokens"] == [TOKENS] * one.batch
            assert max(run["ended"]) <= run["seconds"]
        assert min(one.flops or 0, one.bytes or 0) > 0
        assert (one.peak_bytes or 0) > weights


def test_figures_follow_from_the_runs(report: Report) -> None:
    for one in report.lines:
        rates = [sum(run["tokens"]) / run["seconds"] for run in one.runs]
        assert one.tokens_per_second == pytest.approx(Spread.of(rates))
        plain = next(p for p in report.lines if p.case == one.case and p.batch == one.batch and p.setting == "off")
        ratios = [rate * p["seconds"] / sum(p["tokens"]) for rate, p in zip(rates, plain.runs, strict=True)]
        assert one.speedup == pytest.approx(Spread.of(ratios))
        assert one.ms_first <= one.ms_last * 1.001  # rows of equal length
        if one.baseline:
            assert one.rounds is one.acceptance_length is one.identity is one.decoding is None
            continue
        stats = [run["stats"] for run in one.runs]
        for run in stats:
            assert run["committed"] == run["accepted"] + run["row_rounds"]
        assert one.acceptance_length == pytest.approx(sum(s["committed"] / s["row_rounds"] for s in stats) / len(stats))
        assert one.decoding == pytest.approx(median(s["committed"] / s["seconds_rounds"] for s in stats))
        assert one.decoding >= one.tokens_per_second.median  # prompts take time
        assert set(one.stages) == {"draft", "verify", "accept", "commit", "other"}
        assert min(one.stages.values()) >= 0
        drafts = one.setting != "off"
        assert bool(one.drafted) is drafts
        assert (one.rounds == TOKENS) is not drafts or one.accepted == 0


def test_rates_of_plain_decoding_by_hand(pair: Shoal) -> None:
    work = Work(((1, 2, 3, 4),), 2, 0.8, 6, seed=0)
    counts = stats.Stats(target_passes=6, prefills=1, prefill_tokens=4, row_rounds=12, committed=12)
    load = Load.of(pair.target)
    assert load is not None
    config = pair.target.hf.config
    matrices = sum(p.numel() for p in pair.target.hf.parameters())  # embedding and head are one matrix here
    assert load.flops == 2 * matrices
    assert load.attention_flops == 4 * config.num_hidden_layers * config.hidden_size
    assert load.kv == 2 * 4 * config.num_hidden_layers * config.hidden_size
    run = Run(2.0, (2.0, 2.0), ((0,) * 6,) * 2, counts)
    context = 4 + 3
    flops = (12 * (load.flops + load.attention_flops * context) + 4 * load.flops) / 2.0
    weights = pair.target.parameter_bytes  # a packed head that is tied keeps the table of the embedding beside it
    assert weights in (4 * matrices, 4 * (matrices + config.vocab_size * config.hidden_size))
    moved = (7 * weights + 12 * context * load.kv) / 2.0
    assert rates(pair, work, run) == pytest.approx((flops, moved))
    # prompts whose time is known are left out
    apart = Run(2.0, (2.0, 2.0), ((0,) * 6,) * 2, replace(counts, seconds_rounds=1.5, seconds_prefill=0.5))
    flops = 12 * (load.flops + load.attention_flops * context) / 1.5
    assert rates(pair, work, apart) == pytest.approx((flops, (6 * weights + 12 * context * load.kv) / 1.5))


def test_rates_count_the_drafter(pair: Shoal) -> None:
    work = Work(((1, 2, 3, 4),), 2, 0.8, 6, seed=0)
    counts = stats.Stats(target_passes=3, row_rounds=6, committed=12, draft_passes=9, drafted=18, seconds_rounds=1.0)
    run = Run(1.0, (1.0, 1.0), ((0,) * 6,) * 2, counts)
    target, drafter = Load.of(pair.target), Load.of_drafter(pair)
    assert target is not None and drafter is not None  # noqa: PT018
    assert pair.draft_model is not None
    assert drafter == Load.of(pair.draft_model) != target
    context = 4 + 3
    with_drafts = rates(pair, work, run, drafter)
    alone = target.done(3, 24, 6, context)
    assert with_drafts == pytest.approx([a + b for a, b in zip(alone, drafter.done(9, 18, 18, context), strict=True)])
    assert rates(pair, work, run) is None  # no share leaves passes of a drafter out
    text = replace(run, stats=replace(counts, draft_passes=0))
    assert rates(pair, work, text) == pytest.approx(alone)  # a drafter of counts alone


def test_the_load_of_the_targets_own_layers_by_hand(tmp_path: Path) -> None:
    target, _ = save_pair(tmp_path)
    with load(target, dtype="float32") as plain:
        whole = Load.of(plain.target)
        layers = plain.target.hf.config.num_hidden_layers
        head = plain.target.hf.lm_head.weight.numel()
        one = sum(each.numel() for each in plain.target.hf.model.layers[0].parameters())
        norm = plain.target.hf.model.norm.weight.numel()
    assert whole is not None
    loads = {}
    for draft in ("self:exit=1", "self:window=5,sinks=2", "self:window=5,sinks=2,exit=1", "self", "suffix"):
        with load(target, draft=draft, dtype="float32") as model:
            loads[draft] = Load.of_drafter(model)
    first = loads["self:exit=1"]
    assert first is not None
    assert first.flops == pytest.approx(2 * (head + one), abs=2 * norm)
    assert (first.attention_flops, first.kv) == (whole.attention_flops / layers, whole.kv / layers)
    assert first.weights == pytest.approx(whole.weights * first.flops / whole.flops)
    assert loads["self:window=5,sinks=2"] == replace(whole, window=7)
    assert loads["self:window=5,sinks=2,exit=1"] == replace(first, window=7)
    assert loads["self"] is loads["suffix"] is None  # chosen from round to round; reads text
    assert replace(whole, window=7).done(1, 3, 2, 100.0) == whole.done(1, 3, 2, 7.0)


def test_the_load_of_heads_is_that_of_their_own_weights(tmp_path: Path) -> None:
    heads = save_medusa(tmp_path / "medusa")
    target, _ = save_pair(tmp_path)
    with load(target, draft=f"medusa:{heads}", dtype="float32") as model:
        own = Load.of_drafter(model)
    with safe_open(heads / "medusa_lm_head.safetensors", "pt") as file:
        size = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    assert own == Load(2.0 * size, 0.0, 4.0 * size, 0.0)


def test_shares_are_of_the_higher_ceiling(report: Report) -> None:
    one = replace(report.lines[0], flops=50.0, bytes=3.0)
    machine = report.machine | {"ceilings_before": {"flops": 100, "bytes": 9}, "ceilings_after": {"flops": 200, "bytes": 6}}
    shown = printed(replace(report, lines=[one], machine=machine))
    assert any("25.0%  33.3%" in row for row in shown)


def test_rows_are_counted_up_to_their_end(pair: Shoal) -> None:
    work = Work(((5, 6, 7), (8, 9, 10, 11)), 2, 0.0, 12, seed=0)
    whole = decoding_methods.baseline_method(pair, "hf").run(work)
    assert list(map(len, whole.ids)) == [12] * 4
    eos = whole.ids[0][4]
    first = {row: ids.index(eos) + 1 if eos in ids else 12 for row, ids in enumerate(whole.ids)}
    for method in (
        decoding_methods.shoal_method(pair, "off"),
        decoding_methods.shoal_method(pair, "3"),
        decoding_methods.baseline_method(pair, "hf"),
    ):
        run = method.run(replace(work, eos=(eos,)))
        assert list(map(len, run.ids)) == list(first.values()), method.name
        assert run.committed == sum(first.values()) < 48


def test_times_of_rows_are_in_the_order_of_their_ends() -> None:
    """The first row to end took the most time per token here, the last one less than the row before it."""
    run = Run(3.0, (3.0, 1.0, 2.0), ((0,) * 6, (0,), (0,) * 3))
    assert run.row_ms == pytest.approx((1000.0, (500 + 1000 + 2000 / 3) / 3, 500.0))
    ended = [SimpleNamespace(finished_at=at, token_ids=ids) for at, ids in zip(run.ended, run.ids, strict=True)]
    assert bench._row_times([SimpleNamespace(samples=ended)]) == pytest.approx(run.row_ms)  # type: ignore[arg-type]


def test_a_row_that_ends_earlier_differs() -> None:
    found = bench.compared([[(1, 2, 3), (4, 5)]], [[(1, 2, 3), (4,)]], drafted=1)
    assert (found.same, found.rows, found.place, found.holds) == (1, 2, "prompt 1, row 2, token 2", False)
    assert not bench.compared([[(1,)]], [[(1,)]], drafted=0).holds


def test_stages_are_of_rounds_and_leave_prompts_out() -> None:
    spent = stats.Stats(rounds=4, target_passes=2, seconds=1.0, seconds_prefill=0.5, seconds_verify=0.2, seconds_accept=0.1)
    run = Run(1.0, (1.0,), ((0,),), spent)
    busy = replace(run, busy=(machine.BusyProcess("x", 1.0),))
    case = Case.of("different", 0.0, 1, 1)
    made = line(case, "off", False, [run, replace(run, busy=()), busy], [run] * 3)
    assert made.stages == pytest.approx({"draft": 0.0, "verify": 50.0, "accept": 25.0, "commit": 0.0, "other": 50.0})
    assert made.disturbed == 1


def test_plain_decoding_is_measured_once() -> None:
    assert replace(JOB, lookaheads=("2", "off", "2")).lookaheads == ("off", "2")


def test_work_of_a_repeat() -> None:
    different, same, grouped = (Case.of(name, 0.8, 4, n=2) for name in ("different", "same", "grouped"))
    found = [work_of(case, POOL, 1, max_new_tokens=1).prompts for case in (different, same)]
    assert found == [tuple(POOL[4:8]), (POOL[1],)]
    work = work_of(grouped, POOL, 0, max_new_tokens=1)
    assert work.rows == [POOL[0], POOL[0], POOL[1], POOL[1]]
    assert work_of(grouped, POOL, 1, max_new_tokens=1).seed != work.seed


# ── identity ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_identity_is_checked_on_every_configuration(report: Report) -> None:
    for one in report.lines:
        if one.setting in ("off", "hf"):
            assert one.identity is None
        else:
            assert one.identity is not None
            assert one.identity.same == one.identity.rows == one.batch
            assert one.identity.drafted > 0


def spoiled(
    good: Callable[..., decoding_methods.Method], applies: Callable[[Work], bool]
) -> Callable[..., decoding_methods.Method]:
    """Speculation whose last row gets one token wrong."""

    def make(pair: Shoal, lookahead: str, *options: Any) -> decoding_methods.Method:
        method = good(pair, lookahead, *options)

        def run(work: Work) -> Run:
            found = method.run(work)
            if lookahead == "off" or not applies(work):
                return found
            *rows, last = found.ids
            return replace(found, ids=(*rows, (*last[:3], last[3] + 1, *last[4:])))

        return decoding_methods.Method(lookahead, run)

    return make


def test_a_wrong_token_ends_everything(pair: Shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        bench_runner, "shoal_method", spoiled(decoding_methods.shoal_method, lambda work: len(work.rows) == 3)
    )
    runner = BenchmarkRunner(pair, replace(JOB, layouts=("different",)), POOL)
    with pytest.raises(
        InternalError, match=r"lookahead fixed:3 .* float32, 3 rows, layout different: first at prompt 3, row 1, token 4"
    ):
        runner.check()
    assert not runner.report.lines


def test_greedy_timed_runs_are_compared_too(pair: Shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        bench_runner, "shoal_method", spoiled(decoding_methods.shoal_method, lambda work: work.seed > 0)
    )  # not the first repeat
    runner = BenchmarkRunner(pair, replace(JOB, layouts=("same",), temperatures=(0.0,)), POOL)
    runner.check()
    runner.warm_up()
    with pytest.raises(InternalError, match="repeat 2, row 1, token 4"):
        list(runner.measure())
    assert not runner.report.lines


def test_the_command_refuses_and_prints_no_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_runner, "shoal_method", spoiled(decoding_methods.shoal_method, lambda _: True))
    file = tmp_path / "out.json"
    assert command_line([*COMMAND, "--output", str(file)]) == 1
    answer = capsys.readouterr()
    assert "differs from plain decoding" in answer.err
    assert "Speed" not in answer.out
    assert not file.exists()


@pytest.mark.parametrize("when", ["warming up", "measuring"])
def test_no_times_are_shown_once_captured_rounds_have_ended(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordinary passes go on in their place, and their times would stand under the name of captured ones."""
    pair = random_pairs.shaped_pair("tiny", dtype="float32", device="cpu", max_batch=8, attention="pad")
    pair.target.capture_rounds("eager")
    runner = BenchmarkRunner(pair, replace(JOB, layouts=("same",)), POOL)

    def fail(name: str) -> None:
        if name.startswith(when) and pair.target.captures is not None:
            pair.target.captures.failed.end = "RuntimeError: an operation that is not permitted while capturing"

    runner.step = fail
    if when == "measuring":
        runner.warm_up()
    with pytest.raises(
        InternalError, match=r"modules .no captured rounds: RuntimeError: an operation .* no times are shown"
    ):
        list(runner.measure()) if when == "measuring" else runner.warm_up()
    assert runner.report.lines == []
    assert described(pair.target)["passes"].startswith("modules (no captured rounds: RuntimeError")


def test_rounds_that_were_left_to_their_stages_are_shown() -> None:
    """Other kinds of rounds are captured, so times are shown, with the reason: in the report, its file and on the terminal."""
    pair = random_pairs.shaped_pair("tiny", dtype="float32", device="cpu", max_batch=8, attention="pad")
    pair.target.capture_rounds("eager")
    runner = BenchmarkRunner(pair, replace(JOB, layouts=("same",), repeats=1), POOL)

    def fail(name: str) -> None:
        if pair.target.captures is not None:
            pair.target.captures.failed.note("a kind", ArithmeticError("logits differ"))

    runner.step = fail
    runner.warm_up()
    assert list(runner.measure())
    reason = "some kinds of rounds are not captured: ArithmeticError: logits differ"
    assert runner.report.config["target"]["passes"] == f"captured rounds of modules, {reason}"
    assert Report.from_dict(json.loads(json.dumps(runner.report.to_dict()))).config["target"]["failures"] == [reason]
    assert f"target, {reason}" in report_views.markdown(runner.report)


def test_in_16_bit_a_control_stands_beside_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    half = random_pairs.shaped_pair("tiny", dtype="bfloat16", device="cpu", max_batch=4)
    monkeypatch.setattr(bench_runner, "shoal_method", spoiled(decoding_methods.shoal_method, lambda _: True))
    found = measured(half, replace(JOB, batches=(3,), baselines=(), temperatures=(0.8,), repeats=1))
    checked = [one.identity for one in found.lines if one.identity is not None]
    assert len(checked) == 4
    assert all(one.same < one.rows for one in checked)
    assert {one.control_rows for one in checked} == {3, 1}  # one row of each prompt
    assert any("2/3 (" in row for row in printed(found))


# ── an imposed acceptance ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8, 1.0])
def test_an_imposed_rate_is_kept(pair: Shoal, rate: float) -> None:
    loaded = imposing(pair, rate)
    trials = 0

    class Counting(Imposed):
        def decide(self, tree: DraftTree, scores: Scores, uniforms: torch.Tensor) -> Verdict:
            nonlocal trials
            verdict = super().decide(tree, scores, uniforms)
            trials += int((verdict.accepted + (verdict.accepted < tree.lengths)).sum())
            return verdict

    loaded.rule = Counting(rate)
    found = loaded.generate([POOL[0]], 8, lookahead=4, max_new_tokens=80, eos=(), seed=3).stats
    assert found.committed == 80 * 8
    assert trials > 400
    assert abs(found.accepted - rate * trials) <= 4 * math.sqrt(trials * rate * (1 - rate))
    assert pair.rule is None


def test_imposed_tokens_follow_the_real_rule_after_the_accepted_ones(pair: Shoal) -> None:
    """At rate 0 every token is a replacement, and a greedy row's replacement is the target's own choice."""
    greedy: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 20, "eos": ()}
    plain = pair.generate(POOL[:3], 1, lookahead="off", **greedy)
    never = imposing(pair, 0.0).generate(POOL[:3], 1, lookahead=3, **greedy)
    always = imposing(pair, 1.0).generate(POOL[:3], 1, lookahead=3, **greedy)
    assert [o.samples[0].token_ids for o in never] == [o.samples[0].token_ids for o in plain]
    assert never.stats.accepted == 0 < never.stats.drafted
    assert always.stats.rounds == 5
    assert always.stats.accepted == always.stats.drafted == 3 * 15


def test_imposed_is_written_on_every_output(pair: Shoal, tmp_path: Path) -> None:
    job = replace(JOB, acceptance=0.5, layouts=("same",), temperatures=(0.8,), repeats=1)
    found = measured(pair, job)
    for one in found.lines:
        assert one.imposed == (0.5 if one.setting in ("fixed:3", "bass") else None)
        assert one.label == (f"{one.setting} imposed" if one.imposed else one.setting)
    shown = printed(found)
    assert any("IMPOSED acceptance 0.5" in row for row in shown)
    assert any("fixed:3 imposed" in row for row in shown)
    data = found.to_dict()
    assert data["config"]["acceptance"] == 0.5
    assert [one["imposed"] for one in data["lines"] if one["setting"] == "bass"] == [0.5, 0.5]
    checked = [one.identity for one in found.lines if one.identity]
    assert checked
    assert all(one.same == one.rows for one in checked)  # by the real rule


# ── baselines ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["hf", "hf-continuous", "hf-assisted"])
def test_greedy_baselines_decode_what_plain_does(pair: Shoal, name: str) -> None:
    work = Work((POOL[0], POOL[3]), 2, 0.0, 10, seed=0)
    expected = decoding_methods.shoal_method(pair, "off").run(work)
    found = decoding_methods.baseline_method(pair, name).run(work)
    assert found.ids == expected.ids
    assert len(found.ended) == 4
    assert 0 < max(found.ended) <= found.seconds


def test_the_static_baseline_asks_for_a_static_cache_and_compilation(pair: Shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    generate = type(pair.target.hf).generate

    def eager(self: Any, ids: Any, *, compile_config: Any, **options: Any) -> Any:
        seen.update(options, compiles=compile_config._compile_all_devices)
        return generate(self, ids, **options, disable_compile=True)  # compiling takes a minute

    monkeypatch.setattr(type(pair.target.hf), "generate", eager)
    work = Work((POOL[0], POOL[3]), 1, 0.0, 6, seed=0)
    found = decoding_methods.baseline_method(pair, "hf-static").run(work)
    assert seen["cache_implementation"] == "static"
    assert seen["compiles"] is True
    monkeypatch.undo()
    assert found.ids == decoding_methods.shoal_method(pair, "off").run(work).ids


def test_a_baseline_that_cannot_run_is_listed(pair: Shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(pair: Shoal, work: Work) -> Run:
        if len(work.rows) > 1:
            raise RuntimeError("no such kernel\nand a long story")
        return decoding_methods._batched(pair, work)

    monkeypatch.setitem(decoding_methods.BASELINES, "hf-static", broken)
    job = replace(JOB, baselines=("hf-static",), lookaheads=("off",), layouts=("different",), temperatures=(0.8,))
    found = measured(pair, job)
    assert [(one.batch, one.setting) for one in found.lines] == [(1, "off"), (1, "hf-static"), (3, "off")]
    assert found.unavailable == [
        {"layout": "different", "temperature": 0.8, "batch": 3, "setting": "hf-static", "reason": "no such kernel"}
    ]
    assert "not available: hf-static (batch 3): no such kernel" in printed(found)


def test_assisted_needs_a_drafter(pair: Shoal) -> None:
    alone = Shoal(pair.target, max_batch=4)
    job = replace(JOB, baselines=("hf-assisted",), lookaheads=("off",), layouts=("same",), temperatures=(0.8,), repeats=1)
    assert {entry["reason"] for entry in measured(alone, job).unavailable} == {"there is no draft model to assist"}


# ── what is shown ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_tables_fit_and_hold_the_figures(report: Report) -> None:
    shown = printed(report)
    ruled = [row for row in shown if "─" in row]
    assert len(ruled) == 2 * len(report.tables())
    assert max(map(len, ruled)) <= report_views.WIDTH
    for one in report.lines:
        assert any(f"{one.speedup.median:.2f}x" in row and one.setting in row for row in shown)
    assert f"| {report.lines[0].tokens_per_second.median:.0f} |" in report_views.markdown(report)


def test_a_report_survives_json(report: Report) -> None:
    data = json.loads(json.dumps(report.to_dict()))
    again = Report.from_dict(data)
    assert again.lines == report.lines
    assert json.loads(json.dumps(again.to_dict())) == data
    with pytest.raises(ValueError, match="format"):
        Report.from_dict(data | {"format": 0})


METHODS = ("--lookahead", "2", "--baselines", "hf", "--repeats", "1")
COMMAND = (*"bench --shape tiny --prompt-tokens 6 --batch-sizes 1,2 --max-new-tokens 6".split(), *METHODS)


def test_guided_methods_are_compared_on_the_guided_target(pair: Shoal) -> None:
    guided = copy.copy(pair)
    guided.guide = pair.draft_model
    job = replace(
        JOB,
        batches=(2,),
        layouts=("different",),
        baselines=(),
        guidance=0.7,
        plausibility=0.01,
        temperatures=(0.8,),
        repeats=1,
    )
    report = measured(guided, job)
    assert all(one.identity.same == 2 for one in report.lines if one.identity)
    assert report.config["guide"]["name"] == report.config["draft"]["name"]
    assert "guidance 0.7 by " in " ".join(printed(report))
    own, other = (
        next(line for line in found.lines if line.setting == "off")
        for found in (report, measured(pair, replace(job, guidance=0.0, plausibility=0.0)))
    )
    assert own.flops is not None and other.flops is not None  # noqa: PT018
    per_run = [
        one.flops * one.runs[0]["stats"]["seconds_rounds"] for one in (own, other)
    ]  # of the only run, so that its time cancels out
    assert per_run[0] > 1.1 * per_run[1]  # the guide's operations count
    for name in job.lookaheads:
        runs = [
            decoding_methods.shoal_method(guided, name, "coupled", how).run(Work(tuple(POOL[:2]), 2, 0.8, TOKENS, 1))
            for how in (job.guided, None)
        ]
        assert runs[0].stats.guide_passes == runs[0].stats.rounds > runs[1].stats.guide_passes == 0
        assert runs[0].ids != runs[1].ids


def test_the_command_writes_json_plot_and_tables(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    data, picture = tmp_path / "out.json", tmp_path / "out.png"
    assert command_line([*COMMAND, "--output", str(data), "--plot", str(picture), "--results", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("Speed: all prompts different, T=0.8, 6 new tokens, float32") == 1
    assert "measuring will take about" in shown.err
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(data.read_text())
    assert [(one["batch"], one["setting"]) for one in found["lines"]] == [(b, s) for b in (1, 2) for s in ("off", "2", "hf")]
    assert found["complete"]
    assert {"torch", "transformers", "shoal", "commit", "threads", "ceilings_before", "ceilings_after"} <= set(
        found["machine"]
    )
    (named,) = set(tmp_path.glob("*.json")) - {data}
    assert json.loads(named.read_text()) == found
    assert named.name.startswith(found["machine"]["date"])
    assert command_line(["bench", "--replay", str(data)]) == 0
    assert capsys.readouterr().out == shown.out
    assert command_line(["bench", "--replay", str(data), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found


def test_quick_shows_figures_of_plain_and_auto(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = tmp_path / "out.json"
    small = ["--quick", "--max-new-tokens", "6", "--repeats", "1", "--wait", "0"]
    assert command_line(["bench", "--shape", "tiny", *small, "--output", str(data)]) == 0
    shown = capsys.readouterr()
    assert "plain tokens/s" in shown.out
    assert "Speed:" not in shown.out
    found = Report.from_dict(json.loads(data.read_text()))
    assert [(one.batch, one.setting) for one in found.lines] == [(b, s) for b in (1, 8) for s in ("off", "auto")]
    assert found.config["max_new_tokens"] == 6  # what is given stays
    assert command_line(["bench", "--shape", "tiny", *small, "--batch-sizes", "2", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    (figures,) = written["figures"]
    (plain, auto) = written["lines"]
    assert (figures["batch"], figures["plain"]) == (2, plain["tokens_per_second"][0])
    assert figures["auto"] == auto["tokens_per_second"][0]
    # The ceilings of these tests are 1e9 of each.
    assert figures["share"] == max(plain["flops"], plain["bytes"]) / 1e9
    assert plain[figures["bound"]] == pytest.approx(figures["share"] * 1e9)


def test_quick_without_a_drafter_is_plain(
    saved_pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_bench, "listed_prompts", lambda _: ["1 2"])
    small = ["--quick", "--max-new-tokens", "4", "--repeats", "1", "--wait", "0", "--batch-sizes", "1"]
    assert command_line(["bench", "--model", str(saved_pair[0]), *small]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["1"])
    assert row.split()[2:4] == ["-", "-"]


def test_quick_takes_smaller_values_for_what_is_not_given() -> None:
    options = quick.smaller(cli_bench.WorkOptions(batch_sizes="4"))
    assert (options.batch_sizes, options.lookahead, options.baselines) == ("4", "off,auto", "")
    assert options.max_new_tokens == quick.OPTIONS["max_new_tokens"]


def test_an_interrupted_run_shows_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    compute, calls = decoding_methods._batched, 0

    def interrupted(pair: Shoal, work: Work) -> Run:
        nonlocal calls
        calls += 1
        if calls == 6:  # two warm-ups, two for memory, then batch 1; then batch 2 is cut
            raise KeyboardInterrupt
        return compute(pair, work)

    monkeypatch.setitem(decoding_methods.BASELINES, "hf", interrupted)
    data = tmp_path / "out.json"
    assert command_line([*COMMAND, "--output", str(data)]) == 130
    assert "interrupted" in capsys.readouterr().out
    found = json.loads(data.read_text())
    assert not found["complete"]
    shown = [(one["batch"], one["setting"]) for one in found["lines"]]
    assert shown == [(1, "off"), (1, "2"), (1, "hf"), (2, "off"), (2, "2")]


def test_plots_without_matplotlib_are_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert command_line([*COMMAND, "--plot", "out.png"]) == 2
    assert "pip install '.[bench]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch-sizes", "2,x"], "--batch-sizes must be values separated by commas"),
        (["--batch-sizes", ""], "nothing to measure"),
        (["--layout", "odd"], "layout must be one of"),
        (["--layout", "grouped", "-n", "2", "--batch-sizes", "3"], "3 rows cannot be filled with groups of 2"),
        (["--baselines", "vllm"], "baseline must be one of"),
        (["--lookahead", "soon"], "lookahead must be"),
        (["--output", "no/such/place.json"], "no directory"),
        (["--json", "out.json"], "unexpected extra argument"),
        (["--json", "--markdown"], "--json prints no tables"),
        (["--prompts", "no-such-file"], "cannot read"),
        (["--guidance", "0.5"], "give --guide"),
        (["--guide", "draft", "--guidance", "0.5"], "Transformers' own methods take no guide"),
        (["--guide", "draft", "--guidance", "0.5", "--baselines", ""], "--shape makes no guide"),
        (["--replay", "no-such-file"], "cannot replay 'no-such-file': No such file or directory"),
        (["--replay", __file__], "it is no report, the .json that shoal bench wrote"),
    ],
)
def test_the_command_refuses(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert command_line([*COMMAND, *arguments]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


# ── regret, shapes, memory, stages ──────────────────────────────────────────────────────────────────────────────────


def _line(batch: int, setting: str, *rates: float) -> ReportLine:
    runs, plain = ([Run(100 / rate, (1.0,), ((0,) * 100,)) for rate in those] for those in (rates, [100.0] * len(rates)))
    return line(Case("same", 0.8, batch, batch), setting, True, runs, plain)


def test_regret_compares_with_the_best_fixed_length() -> None:
    lines = [
        _line(1, "off", 100, 100, 100), _line(1, "fixed:4", 210, 200, 190), _line(1, "fixed:8", 150, 150, 300),
        _line(1, "auto", 189, 190, 190), _line(1, "bass", 105, 100, 95),
        _line(8, "off", 100, 100, 100), _line(8, "fixed:4", 80, 80, 80), _line(8, "auto", 99, 99, 99),
    ]  # fmt: skip
    one, eight = regret.regrets(lines)
    assert (one.batch, one.best.setting) == (1, "fixed:4")
    assert one.regrets == pytest.approx({"auto": 0.05, "bass": 0.5})
    assert (eight.batch, eight.best.setting) == (8, "off")
    assert eight.regrets == pytest.approx({"auto": 0.01})
    assert eight.over_plain == pytest.approx({"auto": 0.99})


def test_the_regret_in_a_file_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    small = [*COMMAND, "--batch-sizes", "2", "--lookahead", "off,fixed:1,auto", "--baselines", "", "--output"]
    assert command_line([*small, str(tmp_path / "out.json")]) == 0
    capsys.readouterr()
    regret.main(tmp_path / "out.json")
    shown = capsys.readouterr().out
    assert shown.startswith("Regret: all prompts different")
    batch, best, _, lost, _ = shown.split()[-5:]
    assert (batch, best in ("off", "fixed:1"), lost[-1]) == ("2", True, "%")


def test_published_shapes_have_the_published_sizes() -> None:
    for name, (target, drafter) in random_pairs.SHAPES.items():
        if name == "tiny":
            continue
        sizes = [float(part[:-1]) * {"b": 1e9, "m": 1e6}[part[-1]] for part in name.split("/")]
        assert [_parameters(target), _parameters(drafter)] == pytest.approx(sizes, rel=0.02), name
        assert target.vocabulary == drafter.vocabulary


def _parameters(shape: random_pairs.LlamaShape) -> float:
    shared = (shape.kv_heads or shape.heads) / shape.heads  # of the width of keys and values
    layer = (2 + 2 * shared) * shape.width**2 + 3 * shape.width * shape.mlp
    return shape.layers * layer + shape.vocabulary * shape.width * (1 if shape.tied else 2)


def test_a_shape_is_what_its_config_says(pair: Shoal) -> None:
    shape = random_pairs.SHAPES["tiny"][0]
    matrices = sum(p.numel() for p in pair.target.hf.parameters() if p.dim() > 1)
    assert matrices == _parameters(shape)


def test_a_hopeless_drafter_keeps_its_numbers_and_loses_their_order() -> None:
    pair = random_pairs.shaped_pair("tiny", dtype="float32", device="cpu", max_batch=1)
    drafter = pair.draft_model
    assert drafter is not None
    ids = torch.tensor([POOL[0]])
    other = shuffled(drafter.hf)
    assert not torch.equal(drafter.hf(ids).logits, other(ids).logits)
    for old, new in zip(drafter.hf.parameters(), other.parameters(), strict=True):
        assert torch.equal(old.detach().flatten().sort().values, new.detach().flatten().sort().values)


@pytest.mark.skipif(sys.platform != "linux", reason="the profiler reports memory on Linux")
def test_peak_counts_what_is_alive_at_once() -> None:
    def work() -> None:
        first = torch.zeros(1_000_000)
        del first
        torch.zeros(2_000_000)

    assert 8_000_000 <= peak_tensor_bytes(work) < 9_000_000


@pytest.mark.skipif(sys.platform != "linux", reason="the profiler reports memory on Linux")
def test_peak_memory_is_what_weights_and_caches_come_to() -> None:
    bundled = load(max_batch=2, quantize="off")
    runners = [bundled.target, bundled.draft_model]
    ids, weights = POOL[0], sum(runner.parameter_bytes for runner in runners if runner)
    predicted = weights + sum(runner.memory.cache_bytes(2, len(ids) + 32) for runner in runners if runner)
    peak = weights + peak_tensor_bytes(lambda: bundled.generate([ids], 2, lookahead=4, max_new_tokens=32, eos=(), seed=0))
    assert weights < peak < 1.25 * predicted


def test_stages_counts_every_watched_function(capsys: pytest.CaptureFixture[str]) -> None:
    stages.main(n=2, max_new_tokens=8, lookahead="3", repeats=1)
    shown = capsys.readouterr().out
    for name in (*stages.WATCHED, "whole round"):
        assert name in shown


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_every_speculative_way_judges_by_the_rule_that_was_asked_for(
    pair: Shoal, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, used = Shoal.engine, []

    def engine(self: Shoal, lookahead: Any, rule: Any, **options: Any) -> Any:
        made = make(self, lookahead, rule, **options)
        used.append((lookahead, type(made.rule)))
        return made

    monkeypatch.setattr(Shoal, "engine", engine)
    report = measured(pair, replace(JOB, rule=rule, baselines=(), layouts=("different",), temperatures=(0.8,), batches=(2,)))
    assert {kind for _, kind in used} == {RULES[rule]}
    assert {lookahead for lookahead, _ in used} == {"off", "fixed:3", "bass"}
    assert report.config["rule"] == rule
    assert any(f"rule {rule}" in line for line in report_views.footer(report))
