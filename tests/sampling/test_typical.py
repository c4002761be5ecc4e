"""Typical acceptance: as published, exact for greedy rows, and named as lossy in every output.

Tests of: sampling.acceptance.one_sample, sampling.distributions, sampling.uniforms.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import shoal
from shoal.bench import report_views
from shoal.bench.decoding_methods import Job
from shoal.bench.report import Report
from shoal.cli import run
from shoal.config import LOSSY_RULES, Sampling
from shoal.drafting.recycling import RecyclingDrafter
from shoal.engine.stream import Stream
from shoal.errors import RequestError
from shoal.evaluation.sampling import SamplingConfig
from shoal.sampling.acceptance import RULES, Typical
from shoal.sampling.acceptance.one_sample import plausible
from shoal.sampling.distributions import Scores
from shoal.sampling.drawing import inverse_transform
from shoal.sampling.uniforms import round_uniforms
from shoal.testing import reference
from shoal.types.requests import Request, Row
from shoal.types.trees import DraftTree, Positions

LOSSY = LOSSY_RULES["typical"]


def test_the_threshold_is_the_published_one() -> None:
    """min(0.09, 0.3 exp(-H)): 0.09 where the target is sure, less where it is not."""
    p = torch.tensor([[0.9, 0.05, 0.05, 0.0], [0.25, 0.25, 0.25, 0.25], [0.0, 1.0, 0.0, 0.0], [0.085, 0.3, 0.3, 0.315]])
    limits = [min(0.09, 0.3 * math.exp(sum(x * math.log(x) for x in row if x > 0))) for row in p.tolist()]
    assert limits[2] == 0.09 > limits[1] == pytest.approx(0.075)
    for token in range(4):
        found = plausible(p, torch.full((4,), token), 0.09, 0.3)
        assert found.tolist() == [row[token] > limit for row, limit in zip(p.tolist(), limits, strict=True)]


def scores_of(p: torch.Tensor, tree: DraftTree, temperature: float = 1.0) -> Scores:
    rows = [
        Row(Request((1,), sampling=Sampling(temperature=temperature)), 0, i, i, [1], frozenset(), 99) for i in range(len(p))
    ]
    parents = tree.parents if tree.branches else None
    return Scores(p.log(), Positions(rows, tree.drafts, parents))


@pytest.mark.parametrize("branches", [False, True])
def test_of_a_tree_the_longest_plausible_path_is_kept(branches: bool) -> None:
    drafts = [[0, 1, 2], [3, 1]]
    parents: list[list[int]] = [[-1, 0, 1], [-1, 0]]
    if branches:
        drafts, parents = [[0, 1, 2, 0], [3, 1]], [[-1, -1, 1, 2], [-1, -1]]
    tree = DraftTree.of(drafts, parents, device=torch.device("cpu"))
    p = torch.full((2, tree.m + 1, 4), 0.01, dtype=torch.float64)
    p[:, :, 0], p[:, :, 1], p[:, :, 2] = 0.4, 0.3, 0.29  # token 3 is not plausible
    p[0, 2, 0] = 0.01  # nor is token 0 after column 2
    p /= p.sum(-1, keepdim=True)
    uniforms = torch.from_numpy(round_uniforms([0, 1], [1, 1], tree.m + 1, None))
    verdict = Typical().decide(tree, scores_of(p, tree), uniforms)
    paths, tokens = verdict.lists
    assert [list(path) for path in paths] == ([[1, 2, 3], [1]] if branches else [[0, 1, 2], []])
    for b, (path, token) in enumerate(zip(paths, tokens, strict=True)):
        kept = [*(drafts[b][node] for node in path), token]
        columns = [0, *(node + 1 for node in path)]
        expected = [float(p[b, column, token]) for column, token in zip(columns, kept, strict=True)]
        assert verdict.probs[b, : len(kept)].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("branches", [False, True])
def test_what_replaces_a_draft_is_drawn_by_another_number(branches: bool) -> None:
    """By the one of that position that no draft was drawn by."""
    parents = [[-1, -1] if branches else [-1, 0]] * 8
    tree = DraftTree.of([[3, 1]] * 8, parents, device=torch.device("cpu"))
    p = torch.rand(8, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p[..., 3] = 0.01
    if branches:
        p[..., 1] = 0.01
    p /= p.sum(-1, keepdim=True)
    uniforms = torch.from_numpy(round_uniforms(range(8), [1] * 8, 3, None))
    verdict = Typical().decide(tree, scores_of(p, tree), uniforms)
    assert verdict.accepted.tolist() == [0] * 8
    numbers = torch.from_numpy(round_uniforms(range(8), [1] * 8, 1, None))[:, 0]
    drawn, of_drafts = (inverse_transform(p[:, 0], each) for each in (numbers.flip(-1), numbers))
    assert torch.equal(verdict.token, drawn)
    assert not torch.equal(drawn, of_drafts)


@pytest.fixture(scope="module")
def pair(saved_pair: tuple[Path, Path]) -> Any:
    with shoal.load(*saved_pair, dtype="float32", max_batch=3) as found:
        yield found


def test_greedy_rows_are_those_of_plain_decoding(pair: Any) -> None:
    """Chains and trees; beside sampled rows as well; what is sampled is not what exact rules draw."""
    same: dict[str, Any] = {"max_new_tokens": 12, "seed": 0}
    plain = pair.generate(["a", "bc"], 2, temperature=0.0, lookahead="off", **same)
    for drafter in (None, "recycling"):
        with shoal.load(pair.target.hf, draft=drafter or pair.draft_model.hf, tokenizer=pair.tokenizer) as other:
            found = other.generate(["a", "bc"], 2, temperature=0.0, lookahead=3, rule="typical", **same)
            assert [s.token_ids for o in found for s in o.samples] == [s.token_ids for o in plain for s in o.samples]
            assert found.stats.drafted > 0
    sampled = Request((65,), sampling=Sampling(temperature=1.0, seed=0), limits=shoal.Limits(max_new_tokens=12))
    greedy = Request(plain[1].prompt_ids, sampling=Sampling(temperature=0.0), limits=shoal.Limits(max_new_tokens=12))
    for drafter in (None, RecyclingDrafter.for_target(pair.target)):
        stream = Stream(pair.engine(3, Typical(), drafter=drafter), [sampled, greedy])
        found = stream.run(False)
        assert found[1].samples[0].token_ids == plain[1].samples[0].token_ids
        assert found.stats.drafted > 0


def test_the_distribution_is_another_one(pair: Any) -> None:
    """It is lossy: the most plausible first draft is always kept, where an exact rule keeps it with its probability."""
    kept = [
        pair.generate("a", 24, temperature=1.0, lookahead=1, rule=rule, seed=3, max_new_tokens=6).stats for rule in RULES
    ]
    by_rule = dict(zip(RULES, (stats.acceptance_rate for stats in kept), strict=True))
    assert [bool(stats.lossy) for stats in kept] == [False, False, True]
    assert by_rule["typical"] != by_rule["rejection"]


def test_results_and_commands_name_it(saved_pair: tuple[Path, Path], pair: Any, capsys: pytest.CaptureFixture[str]) -> None:
    result = pair.generate("a", 2, rule="typical", max_new_tokens=4)
    assert result.stats.lossy == LOSSY
    assert LOSSY in repr(result)
    assert (result.stats + pair.generate("a", 1, max_new_tokens=2).stats).lossy == LOSSY
    assert pair.generate("a", 1, max_new_tokens=2).stats.lossy == ""
    command = f"generate -m {saved_pair[0]} -d {saved_pair[1]} -p a -n 2 --max-new-tokens 4 --json".split()
    assert run([*command, "--rule", "typical"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["stats"]["lossy"] == LOSSY
    assert LOSSY in printed.err


def test_answers_name_it(saved_pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`usage` of the server's answers, which are the lines of a batch; and its summary."""
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text(
        '{"id": "1", "prompt": "a", "max_tokens": 4}\n{"id": "2", "prompt": "b", "seed": 1, "max_tokens": 4}'
    )
    command = ["batch", str(requests), str(answers), "-m", str(saved_pair[0]), "-d", str(saved_pair[1])]
    assert run([*command, "--rule", "typical", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lossy"] == LOSSY
    lines = {line["id"]: line for line in map(json.loads, answers.read_text().splitlines())}
    assert lines["1"]["usage"]["lossy"] == LOSSY
    assert "cannot bring the same tokens" in json.dumps(lines["2"])
    answers.unlink()
    assert run([*command, "--rule", "coupled"]) == 0
    assert all("lossy" not in line["usage"] for line in map(json.loads, answers.read_text().splitlines()))


def test_what_needs_the_distribution_refuses_it(pair: Any) -> None:
    with pytest.raises(RequestError, match=r"comparison of methods .* typical is lossy"):
        SamplingConfig(2, {"rule": "typical"})
    assert SamplingConfig(2, {"rule": "typical"}, methods=("batched",)).methods == ("batched",)
    with pytest.raises(RequestError, match="imposed acceptance"):
        Job(rule="typical", acceptance=0.5)
    request = Request((65,), sampling=Sampling(temperature=1.0, seed=0), limits=shoal.Limits(max_new_tokens=2))
    with pytest.raises(RequestError, match="no reference here"):
        reference.decode(pair.target.hf, request, rule=Typical())
    greedy = Request((65,), sampling=Sampling(temperature=0.0), limits=shoal.Limits(max_new_tokens=2))
    assert len(reference.decode(pair.target.hf, greedy, rule=Typical())) == 2


def test_reports_name_it(saved_pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every heading of `shoal bench` and the line below its tables; the findings of `shoal eval`."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\n\nb")
    command = ["bench", "-m", str(saved_pair[0]), "-d", str(saved_pair[1]), "--prompts", str(prompts), "--batch-sizes", "1"]
    command += ["--lookahead", "2", "--baselines", "", "--max-new-tokens", "4", "--repeats", "1", "--wait", "0"]
    found = tmp_path / "bench.json"
    assert run([*command, "--rule", "typical", "--output", str(found)]) == 0
    capsys.readouterr()
    report = Report.from_dict(json.loads(found.read_text()))
    console = Console(width=400, record=True)
    report_views.show(report, console)
    shown = console.export_text()
    titles = [title for title, *_ in report_views.tables(report)]
    assert titles
    assert all("LOSSY: rule typical" in title for title in titles)
    assert LOSSY in shown
    assert "LOSSY" in report_views.markdown(report)
    from shoal.evaluation.figure import findings

    summary: dict[str, Any] = {"settings": {"rule": "typical"}, "against": [], "errors": {}}
    assert list(findings(summary)) == [f"All figures: {LOSSY}."]
    assert list(findings(summary | {"settings": {"rule": "auto"}})) == []
