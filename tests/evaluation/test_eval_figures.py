"""The figures of an evaluation on results made by hand, each against its definition: lines, curves, method against method, text."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest

import shoal
from shoal.config import LOSSY_RULES
from shoal.errors import RequestError
from shoal.evaluation import figure, journal
from shoal.evaluation.cuts import cuts, places
from shoal.evaluation.endings import ending
from shoal.evaluation.execution import ExecutionResult
from shoal.evaluation.exports import page
from shoal.evaluation.figure import columns, findings, legend, rows
from shoal.evaluation.problems import Problem
from shoal.evaluation.sampling import Sampler, SamplingConfig, spans
from shoal.evaluation.summary import (
    CURVE,
    RESAMPLES,
    SHUFFLES,
    Bootstrap,
    Results,
    SampleTable,
    pass_at,
    permutation_test,
    summarize,
)
from shoal.evaluation.tasks import Document, Grade, Task, grade_entries, read_documents, summary_tasks
from shoal.serve.responses import EMPTY
from shoal.testing import END, tiny_tokenizer

INF = math.inf
METHODS = ("plain", "single", "batched")
NAMES = ("a", "b", "c", "d")


def sample(dice: np.random.Generator, tokens: int) -> dict[str, Any]:
    return {
        "token_ids": list(map(int, dice.integers(0, 3, tokens))), "mean_logprob": None if tokens == 0 else -float(dice.random()),
        "finished": True, "finished_at": float(dice.uniform(1, 9)), "text": "xyz", "completion": "x", "error": None,
        "finish_reason": "eos", "rounds": 2, "accepted": 3, "drafted": 4, "spans": [("xy", True), ("z", False)],
    }  # fmt: skip


def results(seed: int = 0, score: str = "passed", n: int = 3) -> Results:
    """Random results; of each method one sample in six was not finished, and problem d was refused."""
    dice = np.random.default_rng(seed)
    attempts: dict[str, Any] = {"d": {"error": "too <long>", "attempts": {}}}
    grades: dict[str, Any] = {"d": {"grades": {}}}
    for name in NAMES[:3]:
        own: dict[str, Any] = {}
        given: dict[str, Any] = {}
        for method in METHODS:
            drawn = [sample(dice, int(dice.integers(0, 6))) for _ in range(n)]
            stats = {"acceptance_length": 1.5}
            own[method] = {"seconds": max(one["finished_at"] for one in drawn), "samples": drawn, "stats": stats}
            given[method] = [
                None if dice.random() < 1 / 6 else {
                    "scores": {score: float(value), "other": 0.5}, "outcome": ("syntax", "failed", "passed")[int(2 * value)],
                    "detail": "",
                }
                for value in dice.choice((0, 0.5, 1), n)
            ]  # fmt: skip
        attempts[name] = {"error": None, "attempts": own}
        grades[name] = {"grades": given}
    return Results(NAMES, METHODS, n, (score, "other"), attempts, grades)


def pairs(given: Results, name: str, method: str) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
    attempt = given.attempts[name]["attempts"].get(method)
    return [] if attempt is None else list(zip(attempt["samples"], given.grades[name]["grades"][method], strict=True))


def done(given: Results, name: str, method: str, budget: float) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(one, grade) for one, grade in pairs(given, name, method) if grade is not None and one["finished_at"] <= budget]


def first(given: Results, name: str, method: str, budget: float) -> float:
    ready = done(given, name, method, budget)
    rank = [-INF if one["mean_logprob"] is None else one["mean_logprob"] for one, _ in ready]
    return float(ready[rank.index(max(rank))][1]["scores"][given.scores[0]]) if ready else 0.0


def best(given: Results, name: str, method: str, budget: float) -> float:
    return max((grade["scores"][given.scores[0]] for _, grade in done(given, name, method, budget)), default=0.0)


def pass_k(given: Results, name: str, method: str, budget: float, k: int) -> float:
    passed = [grade["scores"]["passed"] == 1 for _, grade in done(given, name, method, budget)]
    passed += [False] * (given.n - len(passed))
    return mean(any(draw) for draw in combinations(passed, k))


def ratio(found: list[tuple[float, float]]) -> float | None:
    """A sum over problems divided by another one."""
    total = sum(count for _, count in found)
    return sum(value for value, _ in found) / total if total else None


@pytest.mark.parametrize("seed", range(4))
def test_lines_are_their_definitions(seed: int) -> None:
    given = results(seed)
    moments = sorted(one["finished_at"] for name in NAMES[:3] for one, _ in pairs(given, name, "single"))
    budgets = [moments[0] * 0.99, moments[2], moments[5], INF]  # some of them exactly when a sample was ready
    told = summarize(given, budgets)
    assert [(line["budget"], line["method"]) for line in told["lines"]] == [
        (None if budget == INF else budget, method) for budget in budgets for method in METHODS
    ]
    assert (told["problems"], told["samples_per_problem"], told["scores"]) == (4, 3, ["passed", "other"])
    for line in told["lines"]:
        method, budget = line["method"], INF if line["budget"] is None else line["budget"]
        ready = {name: done(given, name, method, budget) for name in NAMES}
        seconds = [given.attempts[name]["attempts"].get(method, {"seconds": 0})["seconds"] for name in NAMES]
        expected: dict[str, float | None] = {
            "passed_first": mean(first(given, name, method, budget) for name in NAMES),
            "passed_all": mean(best(given, name, method, budget) for name in NAMES),
            "other_all": mean(0.5 * bool(ready[name]) for name in NAMES),
            "finished": ratio([(len(own), given.n) for own in ready.values()]),
            "tokens": ratio([(sum(len(one["token_ids"]) for one, _ in own), len(own)) for own in ready.values()]),
            "syntax_errors": ratio([(sum(g["outcome"] == "syntax" for _, g in own), len(own)) for own in ready.values()]),
            "seconds": mean(min(each, budget) for each in seconds),
        }
        expected |= {f"pass@{k}": mean(pass_k(given, name, method, budget, k) for name in NAMES) for k in (1, 2, 3)}
        assert {name for name in line if name.startswith("pass@")} == {"pass@1", "pass@2", "pass@3"}
        for name, value in expected.items():
            assert line[name]["mean"] == (None if value is None else pytest.approx(value)), (name, method, budget)
            low, middle, high = (line[name][end] for end in ("low", "mean", "high"))
            assert low is high is None if value is None else low - 1e-12 <= middle <= high + 1e-12


def test_other_scores_have_no_pass_at_k() -> None:
    told = summarize(results(score="rougeL"), [INF])
    assert all(not name.startswith(("pass@", "syntax")) for name in (*told["lines"][0], *told["against"][0]))


def test_how_many_samples_k_is_of() -> None:
    for n, ks in ((1, [1]), (3, [1, 2, 3]), (4, [1, 2, 4]), (5, [1, 2, 4, 5])):
        (line, *_) = summarize(results(n=n), [INF])["lines"]
        assert [name for name in line if name.startswith("pass@")] == [f"pass@{k}" for k in ks]


@pytest.mark.parametrize("seed", range(3))
def test_methods_against_each_other_are_differences(seed: int) -> None:
    given = results(seed)
    told = summarize(given, [INF])
    assert [(pair["method"], pair["other"]) for pair in told["against"]] == [
        ("single", "plain"), ("batched", "plain"), ("batched", "single"),
    ]  # fmt: skip
    grid, bootstrap = told["curves"]["budgets"], Bootstrap(len(NAMES))
    times = [
        one["finished_at"] for name in NAMES for method in METHODS for one, grade in pairs(given, name, method) if grade
    ]
    assert len(grid) == CURVE
    assert (grid[0], grid[-1]) == (pytest.approx(0.9 * min(times)), pytest.approx(1.1 * max(times)))
    assert np.diff(np.log(grid)) == pytest.approx(np.log(grid[1] / grid[0]))
    for pair in told["against"]:
        mine, theirs = pair["method"], pair["other"]
        same = [
            one["token_ids"] == two["token_ids"]
            for name in NAMES
            for (one, _), (two, _) in zip(pairs(given, name, mine), pairs(given, name, theirs), strict=True)
        ]
        assert (pair["same_ids"], pair["samples"]) == (sum(same), 12)
        for which, metric in (("first", first), ("all", best)):
            values = [mean(metric(given, n, mine, b) - metric(given, n, theirs, b) for n in NAMES) for b in grid]
            bands = bootstrap.interval(
                np.array([[metric(given, n, mine, b) - metric(given, n, theirs, b) for b in grid] for n in NAMES])
            )
            assert (pair[which]["better"], pair[which]["worse"]) == ((bands[0] > 0).sum(), (bands[1] < 0).sum())
            assert told["curves"][mine][which]["mean"] == pytest.approx(
                [mean(metric(given, n, mine, b) for n in NAMES) for b in grid]
            )
            assert pair[which]["gain"]["difference"] == pytest.approx(max(values))
            assert pair[which]["loss"]["difference"] == pytest.approx(min(values))
            for end in ("gain", "loss"):
                assert values[grid.index(pair[which][end]["budget"])] == pytest.approx(pair[which][end]["difference"])
        for k in (1, 2, 3):
            value = mean(pass_k(given, n, mine, INF, k) - pass_k(given, n, theirs, INF, k) for n in NAMES)
            assert pair[f"pass@{k}"]["mean"] == pytest.approx(value)
            assert pair[f"pass@{k}"]["low"] <= value + 1e-12
            assert pair[f"pass@{k}"]["high"] >= value - 1e-12
            assert pair[f"pass@{k}"]["p"] == permutation_test(given.table(mine, "passed"), given.table(theirs, "passed"), k)


def test_a_method_that_is_better_at_every_problem_is_better() -> None:
    """Both intervals lie beyond 0 once it has finished, and never on the other side; equal methods are neither."""
    always = {"scores": {"passed": 1.0}, "outcome": "passed", "detail": ""}
    never = {"scores": {"passed": 0.0}, "outcome": "failed", "detail": ""}
    one = {"token_ids": [1], "mean_logprob": -1.0, "finished": True, "finished_at": 2.0}
    attempts = {
        name: {"error": None, "attempts": {m: {"seconds": 2.0, "samples": [one]} for m in METHODS}} for name in NAMES
    }
    grades = {name: {"grades": {"plain": [never], "single": [always], "batched": [always]}} for name in NAMES}
    told = summarize(Results(NAMES, METHODS, 1, ("passed",), attempts, grades), [INF])
    ready = sum(budget >= 2.0 for budget in told["curves"]["budgets"])
    better, also, equal = told["against"]
    assert 0 < ready < CURVE
    assert (better["first"]["better"], better["first"]["worse"]) == (also["all"]["better"], 0) == (ready, 0)
    assert (equal["first"]["better"], equal["first"]["worse"]) == (0, 0)
    assert better["pass@1"] == {"mean": 1.0, "low": 1.0, "high": 1.0, "p": pytest.approx(better["pass@1"]["p"])}
    turned = Results(NAMES, METHODS[::-1], 1, ("passed",), attempts, grades)
    assert summarize(turned, [INF])["against"][-1]["all"]["worse"] == ready


def test_intervals_hold_the_middle_95_per_cent() -> None:
    bootstrap = Bootstrap(40)
    assert bootstrap.weights.shape == (RESAMPLES, 40)
    assert bootstrap.weights.sum(axis=1) == pytest.approx(1)
    assert bootstrap.weights.mean(axis=0) == pytest.approx(0.025, abs=0.002)
    values = np.random.default_rng(0).normal(size=40)
    means = sorted((bootstrap.weights @ values).tolist())
    low, high = bootstrap.interval(values)
    assert sum(each < low for each in means) / RESAMPLES == pytest.approx(0.025, abs=0.001)
    assert sum(each > high for each in means) / RESAMPLES == pytest.approx(0.025, abs=0.001)
    assert bootstrap.interval(np.stack([values, values + 1], 1))[0] == pytest.approx([low, low + 1])
    assert (Bootstrap(40).weights == bootstrap.weights).all()  # the same for every estimate
    assert not (Bootstrap(40, 1).weights == bootstrap.weights).all()


def table(passed: list[list[float]]) -> SampleTable:
    score = np.array(passed)
    ones = np.ones_like(score)
    return SampleTable(ones, -ones, score, ones, ones, ones[:, 0])


def test_the_p_value_is_that_of_all_divisions() -> None:
    """One problem, of both methods' outcomes every division alike: two-sided, with the one that was seen counted."""
    ours, theirs = table([[1, 1, 1, 0]]), table([[0, 0, 1, 0]])
    both, seen = [1, 1, 1, 0, 0, 0, 1, 0], 2 / 4
    shares = [abs(sum(both[i] for i in draw) - (4 - sum(both[i] for i in draw))) / 4 for draw in combinations(range(8), 4)]
    exact = mean(share >= seen - 1e-12 for share in shares)
    assert permutation_test(ours, theirs, 1) == pytest.approx(exact, abs=0.02)
    assert permutation_test(theirs, ours, 1) == pytest.approx(exact, abs=0.02)
    far = table([[1] * 8] * 9), table([[0] * 8] * 9)
    assert permutation_test(*far, 1) == 1 / (1 + SHUFFLES)  # never 0


def test_only_whole_scores_pass() -> None:
    assert table([[0.5, 1, 0.99]]).passed(INF).tolist() == [[False, True, False]]
    assert pass_at(np.array([0, 1, 2, 3]), 3, 2).tolist() == pytest.approx([0, 2 / 3, 1, 1])


# ── in words ────────────────────────────────────────────────────────────────────────────────────────────────────────


def estimate(value: float | None, width: float = 0.1) -> dict[str, float | None]:
    return {"mean": value, "low": None if value is None else value - width, "high": None if value is None else value + width}


def told(**changes: Any) -> dict[str, Any]:
    line = {
        "method": "batched", "budget": 1.5, "passed_first": estimate(0.5), "passed_all": estimate(0.75), "pass@1": estimate(0.25),
        "syntax_errors": estimate(None), "finished": estimate(0.875), "tokens": estimate(12.25), "seconds": estimate(1.0625),
    }  # fmt: skip
    ends = {"gain": {"budget": 2.0, "difference": 0.25}, "loss": {"budget": 3.0, "difference": -0.125}}
    against = {
        "method": "batched", "other": "plain", "samples": 9, "same_ids": 8, "all": {"budgets": 0},
        "first": {"budgets": 96, "better": 5, "worse": 7, **ends},
        "pass@1": {"mean": 0.125, "low": -0.25, "high": 0.5, "p": 0.0421},
    }  # fmt: skip
    summary = {
        "scores": ["passed"], "lines": [line, {**line, "method": "plain", "budget": None}], "against": [against],
        "errors": {"x": "too long"}, "settings": {},
    }  # fmt: skip
    return {**summary, **changes}


def test_rows_of_the_table() -> None:
    assert columns(told()) == [
        "budget", "method", "Pass@First", "Pass@All", "pass@1", "syntax err.", "finished", "tokens", "s",
    ]  # fmt: skip
    assert list(rows(told())) == [
        ["1.5 s", "batched", "50.0 [40, 60]", "75.0 [65, 85]", "25.0 [15, 35]", "–", "87.5 [78, 98]", "12.2", "1.062"],
        ["none", "plain", "50.0 [40, 60]", "75.0 [65, 85]", "25.0 [15, 35]", "–", "87.5 [78, 98]", "12.2", "1.062"],
    ]
    scores = ["rougeL", "rouge1"]
    line = {name: estimate(i / 10) for i, name in enumerate(("rougeL_first", "rougeL_all", "rouge1_first", "rouge1_all"))}
    summary = told(scores=scores, lines=[{**told()["lines"][0], **line}])
    assert columns(summary)[2:6] == ["ROUGE-L@First", "ROUGE-L@All", "ROUGE-1@First", "ROUGE-1@All"]
    assert [cell.split()[0] for cell in next(rows(summary))[2:7]] == ["0.0", "10.0", "20.0", "30.0", "87.5"]
    assert "syntax" not in legend(summary)
    assert "syntax err." in legend(told())
    assert legend(told()).index("batched: speculative, all at once") < legend(told()).index("plain: no drafter")


def test_findings_in_sentences() -> None:
    assert list(findings(told())) == [
        "batched against plain, Pass@First: better at 5 and worse at 7 of 96 budgets (95 % interval of the difference); "
        "from -12.5 points at 3 s to +25.0 points at 2 s.",
        "batched against plain: the same token ids in 8 of 9 samples.",
        "batched against plain, pass@1 without a budget: +12.50 points [-25.00, +50.00], p = 0.0421 (permutation within problems).",
        "x could not be asked, and counts as failed: too long",
    ]
    same = {**told()["against"][0], "same_ids": 9, "first": {"budgets": 0}}
    assert list(findings(told(against=[same], errors={}))) == [
        "batched against plain: the same token ids in 9 of 9 samples."
    ]  # nothing else is to be said of equal samples
    assert next(findings(told(settings={"rule": "typical"}))) == f"All figures: {LOSSY_RULES['typical']}."


def test_the_page_ranks_samples_and_dims_what_was_cut() -> None:
    given = results(1, n=4)
    ready = {"scores": {"passed": 1.0, "other": 0.5}, "outcome": "passed", "detail": "<bad>"}
    drawn = [
        {**given.attempts["a"]["attempts"]["batched"]["samples"][0], "mean_logprob": value}
        for value in (-3.0, -1.0, None, -0.5)
    ]
    given.attempts["a"]["attempts"]["batched"]["samples"] = drawn
    given.grades["a"]["grades"]["batched"] = [
        ready,
        {**ready, "scores": {"passed": 0.0, "other": 0.5}, "outcome": "failed"},
        ready,
        None,
    ]
    summary = {**summarize(given, [INF]), "settings": {"set": "s", "temperature": 0.5, "top_p": 1.0, "empty": None}}
    text = page(summary, given, dict.fromkeys(NAMES, "p<"), None)
    part = text[text.index("<summary>a ") :]
    assert '<span class="failed">✗</span><span class="passed">✓</span><span class="passed">✓</span>–' in part[:400]
    ranks = [part.index(f"rank {rank}, sample {place}:") for rank, place in ((1, 2), (2, 1), (3, 3), (4, 4))]
    assert ranks == sorted(ranks)
    assert part.index("speculative, all at once") < part.index("no drafter")
    assert '<span class="accepted">x</span><span class="accepted cut">y</span><span class="drawn cut">z</span>' in part
    assert "too &lt;long&gt;" in text
    assert "&lt;bad&gt;" in text
    assert "<bad>" not in text
    assert "empty" not in text
    other = replace(given, scores=("other", "passed"))
    assert ">0.50 0.50 0.50 –<" in page({**summary, "scores": ["other"]} | {
        "lines": [line | {f"other_{which}": estimate(0.5) for which in ("first", "all")} for line in summary["lines"]],
    }, other, dict.fromkeys(NAMES, "p"), None)  # fmt: skip


def test_spans_of_a_text_are_those_of_its_drafts() -> None:
    """A token of no text, as an end is, belongs to none."""
    tokenizer = tiny_tokenizer()
    tokens, drafters = tokenizer.encode("abcd"), ("ngram", "ngram", None, "ngram", None)
    sample = replace(EMPTY, text="abcd", token_ids=(*tokens, END), drafters=drafters)
    assert spans(tokenizer, tokenizer.encode("x"), sample) == [("ab", True), ("c", False), ("d", True)]


# ── grades and files of others ──────────────────────────────────────────────────────────────────────────────────────


def test_equal_completions_are_graded_once_and_unfinished_ones_not() -> None:
    def of(*texts: str) -> dict[str, Any]:
        return {"samples": [{"completion": text.strip("!"), "finished": not text.endswith("!")} for text in texts]}

    entries = [
        {"task_id": "1", "attempts": {"plain": of("a", "b!", "a"), "batched": of("c", "a", "b!")}},
        {"task_id": "2", "attempts": {"plain": of("a!", "d"), "batched": of("d", "a")}},
    ]
    asked: list[tuple[str, str]] = []

    def grader(wanted: Any) -> Any:
        for task, text in wanted:
            asked.append((task, text))
            yield Grade({"passed": float(len(asked))}, text)

    found = list(grade_entries(entries, grader))
    assert asked == [("1", "a"), ("1", "c"), ("2", "d"), ("2", "a")]
    outcomes = [[grade and grade["outcome"] for grade in grades] for one in found for grades in one["grades"].values()]
    assert outcomes == [["a", None, "a"], ["c", "a", None], [None, "d"], ["d", "a"]]
    assert [one["task_id"] for one in found] == ["1", "2"]


# ── cuts and endings ────────────────────────────────────────────────────────────────────────────────────────────────


class Pieces:
    """A tokenizer of a few pieces, the longest first."""

    texts = ("f(", "a", "ab", ")", "))", ":", "\n", "    ", "  ", "x", "y", " ==", " sum", "((", "(")

    def get_vocab(self) -> dict[str, int]:
        return {text: i for i, text in enumerate(self.texts)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        found = []
        while text:
            piece = max((piece for piece in self.texts if text.startswith(piece)), key=len)
            found.append(self.texts.index(piece))
            text = text[len(piece) :]
        return found


PROMPT, SOLUTION = "f(a):\n", "    x  y == sum((ab)\n"


def test_places_of_each_kind_of_cut() -> None:
    """Ends of what is left, and beginnings of the tokens that are cut."""
    expected = {
        "word": [(19, 17), (20, 17), (24, 23)], "space": [(15, 14), (18, 17)], "punctuation": [(16, 14), (22, 21)],
        "prefix-sep": [(26, 26)], "prefix-indent": [(7, 6), (8, 6), (9, 6)],
    }  # fmt: skip
    assert places(Pieces(), PROMPT + SOLUTION, len(PROMPT)) == expected
    inside = {kind: [place for place in found if place[1] >= 15] for kind, found in expected.items()}
    assert places(Pieces(), PROMPT + SOLUTION, 15) == inside  # a token that begins in the prompt is no place


def test_each_problem_has_a_place_of_its_own() -> None:
    problems = [Problem(str(i), "python", PROMPT, "", "f", SOLUTION) for i in range(12)]
    assert {cut.end for cut in cuts(problems, Pieces(), ["word"])} == {19, 20, 24}


def test_stop_strings_are_no_beginnings_of_names() -> None:
    stops = ending("python").stops
    for kept in ("\nprinted = 1", "\niffy = 1", "\nclassy = 1", "\ndefault = 1", "\nasserted = 1", "    print(1)"):
        assert not any(stop in kept for stop in stops), kept
    for ended in ("\nprint(1)", "\nif x:", "\nclass A:", "\ndef f():", "\n@a", "\n# so", "\nassert f() == 1"):
        assert any(stop in ended for stop in stops), ended


# ── which samples ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_methods_take_turns_in_being_first_and_the_first_problem_warms_up() -> None:
    asked: list[tuple[str, str]] = []
    sampler = object.__new__(Sampler)
    sampler.config, sampler.tokenizer, sampler.loaded = SamplingConfig(1, {}), None, {"target": None, "draft": None}

    def attempt(method: str, task: Task, prompt: Any) -> dict[str, Any]:
        if prompt == "wrong":
            raise RequestError("refused")
        asked.append((method, prompt))
        return {"method": method}

    sampler.attempt = attempt  # type: ignore[method-assign]
    tasks = [Task(name, name, (), lambda _, name=name: name, lambda text, _: text) for name in ("wrong", "a", "b", "c")]
    entries = list(sampler.run(tasks))
    turns = [("single", "batched", "plain"), ("batched", "plain", "single"), ("plain", "single", "batched")]
    assert asked == [
        (m, p) for p, turn in (("a", turns[0]), ("a", turns[0]), ("b", turns[1]), ("c", turns[2])) for m in turn
    ]
    assert [entry["error"] for entry in entries] == ["refused", None, None, None]
    assert all(list(entry["attempts"]) == ["plain", "single", "batched"] for entry in entries[1:])
    assert entries[0]["attempts"] == {}


def test_methods_differ_in_drafts_and_in_rows(bundled: shoal.Shoal) -> None:
    """Plain decoding sample after sample has a row in each round and no drafts; the ids of a seed are those of all methods."""
    config = SamplingConfig(
        2, {"max_new_tokens": 8, "temperature": 0.8}, 3, 1, ("plain", "plain-single", "single", "batched")
    )
    sampler = Sampler(bundled, config)
    task = Task("a", "a", (), lambda _: "def is_even(n):\n", lambda text, _: text)
    attempts = {method: sampler.attempt(method, task, "def is_even(n):\n") for method in config.methods}
    counts = {method: attempt["stats"] for method, attempt in attempts.items()}
    one_row = {method: one["rounds"] == one["row_rounds"] for method, one in counts.items()}
    assert one_row == {"plain": False, "plain-single": True, "single": True, "batched": False}
    drafts = {method: one["drafted"] > 0 for method, one in counts.items()}
    assert drafts == {"plain": False, "plain-single": False, "single": True, "batched": True}
    assert counts["plain-single"]["rounds"] == counts["plain-single"]["committed"] == 16
    assert len({str([sample["token_ids"] for sample in attempt["samples"]]) for attempt in attempts.values()}) == 1


def test_whatever_did_not_pass_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = ("passed", "failed", "syntax", "time", "memory", "output", "crash", "passed")
    pairs = [(Problem(f"p{i // 2}", "python", "", "", "f"), "") for i in range(len(outcomes))]
    found = [ExecutionResult(outcome, "why", 0.1) for outcome in outcomes]  # type: ignore[arg-type]
    monkeypatch.setattr(
        journal, "execute_all", lambda given, *_: (found[len(outcomes) - len(given) + i] for i in range(len(given)))
    )
    own = journal.Solutions(tmp_path / "out", pairs, {})
    own.execute(None, None, lambda _, results, __: results)  # type: ignore[arg-type, misc]
    summary = own.report([problem for problem, _ in pairs[::2]], {})
    assert [failure["outcome"] for failure in summary["failures"]] == list(outcomes[1:-1])
    assert (summary["judged"], summary["solutions"]) == (8, 8)
    names = [json.loads(line)["task_id"] for line in (tmp_path / "out" / journal.RESULTS).read_text().splitlines()]
    assert names == [name for i in range(4) for name in (f"p{i}", f"p{i} (2)")]


def test_documents_and_their_tasks(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"document": "d", "summary": "s", "id": 5}\n\n{"article": "a", "highlights": "h"}\n')
    one, two = read_documents(path)
    assert (one, two) == (Document("5", "d", "s"), Document("1", "a", "h"))
    (task,) = summary_tasks([one])
    assert (task.stops, task.read(None), task.complete(" so \n", True)) == (("\n",), "d\n\nTL;DR:", "so")
    assert summary_tasks([one], chat=True)[0].stops == ()
    path.write_text('{"document": "d", "summary": "s", "id": 1}\n{"document": "d", "summary": "s", "id": "1"}\n')
    with pytest.raises(RequestError, match="line 2: the id '1' was used before"):
        read_documents(path)


def curves(highest: float, *methods: str) -> dict[str, Any]:
    """A summary of two budgets whose bands reach this high."""
    bands = {metric: {"mean": [0, 0.01], "low": [0, 0], "high": [0.02, highest]} for metric in ("first", "all")}
    settings = {"set": "humaneval", "temperature": 0.2, "top_p": 0.95}
    drawn = {"budgets": [0.1, 1.0], **dict.fromkeys(methods, bands)}
    return {"scores": ["passed"], "problems": 2, "samples_per_problem": 8, "settings": settings, "curves": drawn}


def test_the_scale_follows_what_passes_where_that_is_little() -> None:
    """A weak model's curves would lie on the axis; all rows have one scale, so that of the highest."""
    low, high = curves(0.12, "plain"), curves(0.4, "plain")
    assert figure._top([low]) == pytest.approx(0.15)
    assert figure._top([curves(0.6, "plain"), low]) == 1.0
    assert figure._top([{**low, "scores": ["rouge2"]}]) is None
    assert [axes.get_ylim() for axes in figure.draw([high, low]).axes] == [(0, pytest.approx(0.5))] * 4


def test_bands_of_more_than_three_methods_are_those_of_two() -> None:
    """Six bands blend to one grey, and a legend of six lines hides a weak model's curves."""
    for methods, bands in ((("plain", "single", "batched"), 3), (("plain", "plain-single", "single", "batched"), 2)):
        drawn = figure.draw([curves(0.12, *methods)])
        drawn.draw_without_rendering()
        for axes in drawn.axes:
            assert (len(axes.get_lines()), len(axes.collections)) == (len(methods), bands)
        legend = drawn.axes[1].get_legend()
        assert len(legend.get_texts()) == len(methods)
        assert legend.get_window_extent().x0 >= drawn.axes[1].get_window_extent().x1
        assert ("two methods" in drawn.axes[1].get_title("left")) == (bands == 2)
