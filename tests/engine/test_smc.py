"""Rows as particles: whatever becomes a copy of what, weighted samples keep the law of p given that the text is allowed.

Tests of: engine.joint_rows, constraints.dressing.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shoal
from eagle_heads import save_eagle3
from medusa_heads import save_medusa
from particles import EOS, NEW, PROMPT, REQUESTS, ROWS, SCRIPT, Asked, Masked, V, by_script, deviation, truth
from shoal.config import Grammar, Limits, Sampling
from shoal.constraints.dressing import add_weights
from shoal.engine import engine as engine_module
from shoal.engine import joint_rows
from shoal.engine.engine import Engine
from shoal.engine.joint_rows import systematic
from shoal.errors import RequestError
from shoal.lookahead.controller import Fixed
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.testing import save_pair
from shoal.testing.drafters import engine_of
from shoal.testing.scripted import hashed, mixed, scripted
from shoal.types.requests import Request, Row
from shoal.types.samples import effective, log_mean

# ── drawing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are resampled however equal their weights are."""
    monkeypatch.setattr(joint_rows, "LEAST", 0.999)


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.7, 0.2, 0.1, 0.0], [1e-9, 1.0], [3.0, 0.5, 0.25, 0.25, 2.0]])
def test_things_are_drawn_in_the_mean_by_their_weights(weights: list[float]) -> None:
    logs = [math.log(each) if each else -math.inf for each in weights]
    grid = 4000
    totals = [0] * len(weights)
    for step in range(grid):
        counts = systematic(logs, (step + 0.5) / grid)
        assert sum(counts) == len(weights)
        for place, (count, weight) in enumerate(zip(counts, weights, strict=True)):
            assert abs(count - len(weights) * weight / sum(weights)) < 1
            totals[place] += count
    for total, weight in zip(totals, weights, strict=True):
        assert total / grid == pytest.approx(len(weights) * weight / sum(weights), abs=2e-3)


def test_unequal_weights_alone_make_copies_by_the_numbers_of_their_round() -> None:
    def copies(logs: Sequence[float], round_: int = 1) -> list[tuple[int, int]]:
        rows: list[Any] = [SimpleNamespace(seed=5, rounds=round_, log_weight=log, place=i) for i, log in enumerate(logs)]
        return [(row.place, source.place) for row, source in joint_rows._copies(rows)]

    assert copies([0.0, 0.0, -math.inf, 0.0]) == []  # three of four count: more than half
    assert copies([0.0, -50.0, -50.0, -50.0]) == [(1, 0), (2, 0), (3, 0)]
    assert len({tuple(copies([0.0, -0.1, -50.0, -50.0, -50.0], round_)) for round_ in range(20)}) > 1


def test_effective_numbers_and_means_of_weights() -> None:
    assert effective([0.0, 0.0, 0.0, -math.inf]) == pytest.approx(3)
    assert effective([-700.0, -700.0]) == pytest.approx(2)
    assert effective([-math.inf]) == 0
    assert log_mean([math.log(0.5), -math.inf]) == pytest.approx(math.log(0.25))


# ── through the engine ──────────────────────────────────────────────────────────────────────────────────────────────


def ran(
    constraint: Any, k: int, rule: Rule, exact: str = "smc", max_batch: int = 240, rows: int = ROWS, requests: int = REQUESTS,
    seeds: Sequence[int] = (), penalty: float = 0.0,
) -> tuple[Engine, list[list[Row]]]:  # fmt: skip
    draft = scripted(mixed(SCRIPT, hashed(V, 9), every=2), V) if k else None
    engine = engine_of(scripted(SCRIPT, V), draft, Fixed(k), max_batch=max_batch, rule=rule, eos=[EOS])
    asked = [
        Request(PROMPT, rows, Sampling(seed=seed, frequency_penalty=penalty), Limits(max_new_tokens=NEW))
        for seed in seeds or range(requests)
    ]
    fields = {"constraints": (constraint,), "top_logprobs": int(penalty > 0)}
    asked = [add_weights(replace(request, **fields), exact) for request in asked]
    groups = engine.submit_all(asked)
    while engine.step():
        pass
    assert all(row.error is None for rows in groups for row in rows)
    return engine, groups


@pytest.mark.slow
@pytest.mark.parametrize(
    ("constraint", "k", "rule"),
    [(Masked(), 0, Rejection()), (Asked(), 1, Rejection()), (Masked(), 1, Coupled())],
    ids=["plain", "drafts", "coupled"],
)
def test_weights_of_texts_are_those_of_p_in_the_mean(often: None, constraint: Any, k: int, rule: Rule) -> None:
    engine, groups = ran(constraint, k, rule)
    assert deviation(groups) < 4.2
    assert engine.stats.resampled > 100
    assert 0 < engine.stats.accepted < engine.stats.drafted or not k


@pytest.mark.slow
def test_rows_that_take_turns_keep_the_law(often: None) -> None:
    """Fewer slots than rows of all requests: those of a request that run are resampled among themselves."""
    engine, groups = ran(Masked(), 1, Rejection(), max_batch=50)
    assert deviation(groups) < 4.2
    assert engine.stats.resampled > 100


def test_a_seed_gives_the_same_samples_in_any_company(often: None) -> None:
    """Rows of other requests that end give their slots to rows of this one, so that those change their order."""

    def texts(groups: Sequence[Sequence[Row]]) -> list[list[list[int]]]:
        return [[row.tokens for row in rows] for rows in groups]

    alone = [ran(Masked(), 1, Coupled(), seeds=[seed])[1][0] for seed in range(40)]
    together = ran(Masked(), 1, Coupled(), seeds=range(40))[1]
    assert texts(together) == texts(alone)


@pytest.mark.slow
def test_samples_are_worth_more_than_weighted_ones() -> None:
    def effective_number(exact: str) -> float:
        _, groups = ran(Masked(), 0, Rejection(), exact, requests=100)
        return statistics.mean(effective([row.log_weight for row in rows]) for rows in groups)

    assert effective_number("smc") > 1.1 * effective_number("weights")


@pytest.mark.slow
def test_errors_fall_as_rows_are_added() -> None:
    """Mean distance in total variation of how a request's weighted samples begin from p given that the text is allowed."""
    expected: dict[tuple[int, ...], float] = defaultdict(float)
    for text, p in truth().items():
        expected[text[:2]] += p / sum(truth().values())

    def distance(rows: int) -> float:
        found = []
        for group in ran(Masked(), 0, Rejection(), rows=rows, requests=40)[1]:
            law: dict[tuple[int, ...], float] = defaultdict(float)
            for row in group:
                law[tuple(row.tokens[2:4])] += math.exp(row.log_weight)
            total = sum(law.values())
            found.append(sum(abs(law[text] / total - p) for text, p in expected.items()) / 2)
        return statistics.mean(found)

    assert distance(36) < distance(4) / 2  # a third by the square root


@pytest.mark.slow
def test_a_copy_goes_on_as_its_source_would(often: None) -> None:
    """Its tokens have the probabilities that the script gives them, so that cache, states and reports are its source's."""
    _, groups = ran(Masked(), 1, Rejection(), penalty=0.7)
    for rows in groups:
        assert len({row.seed for row in rows}) == len(rows)
        for row in rows:
            assert len(row.logprobs) == len(row.processed_logprobs) == len(row.drafters) == row.new_tokens
            assert sum(row.logprobs) == pytest.approx(by_script(row), abs=1e-4)
            assert sum(row.processed_logprobs) + row.log_allowed == pytest.approx(by_script(row, 0.7), abs=1e-4)
            best = [int(SCRIPT(tuple(row.tokens[:place])).argmax()) for place in range(2, len(row.tokens))]
            assert [top.raw[0][0] for top in row.top_logprobs] == best
            assert sum(row.drafted_by.values()) == row.drafted


# ── what it must catch ──────────────────────────────────────────────────────────────────────────────────────────────


def kept_weights(become: Callable[..., None]) -> Callable[..., None]:
    """A copy keeps the weight of its source, not the mean."""

    def wrong(self: Row, other: Row, seed: int) -> None:
        become(self, other, seed)
        self.log_weight = other.log_allowed

    return wrong


def own_states(become: Callable[..., None]) -> Callable[..., None]:
    """Constraints go on from what the row itself had written."""

    def wrong(self: Row, other: Row, seed: int) -> None:
        checks, constraints = self.checks, self.constraints
        become(self, other, seed)
        self.checks, self.constraints = checks, constraints

    return wrong


def one_seed(become: Callable[..., None]) -> Callable[..., None]:
    """Copies go on by the seed of their source, and write the same."""
    return lambda self, other, seed: become(self, other, other.seed)


def same_serial(become: Callable[..., None]) -> Callable[..., None]:
    """Uniforms that were made ahead for the row stay in use."""

    def wrong(self: Row, other: Row, seed: int) -> None:
        serial = self.serial
        become(self, other, seed)
        self.serial = serial

    return wrong


@pytest.mark.slow
def test_copies_that_keep_a_weight_show_in_the_weights_of_texts(often: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Row, "become", kept_weights(Row.become))
    assert deviation(ran(Masked(), 0, Rejection())[1]) > 6


def test_states_that_are_not_copied_show_in_the_texts(often: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Row, "become", own_states(Row.become))
    _, groups = ran(Masked(), 0, Rejection(), requests=60)
    assert any(tuple(row.tokens[2:]) not in truth() for rows in groups for row in rows)


@pytest.mark.slow
def test_unequal_weights_that_are_not_made_equal_show(often: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources keep their weight, and copies have it too: texts of large weight count twice."""
    right = joint_rows._copies

    def wrong(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
        logs = [row.log_weight for row in rows]
        found = right(rows)
        for row, log in zip(rows, logs, strict=True):
            row.log_weight = log
        for row, source in found:
            row.log_weight = source.log_weight
        return found

    monkeypatch.setattr(joint_rows, "_copies", wrong)
    assert deviation(ran(Masked(), 0, Rejection())[1]) > 6


def test_caches_of_others_show(often: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy's slot gets the length of its source's, and not what is in it."""

    class LengthsOnly:
        def __init__(self, cache: Any) -> None:
            self.cache, self.lengths = cache, cache.lengths

        def copy(self, source: int, target: int, length: int) -> None:
            self.cache.lengths[target] = length

    right = engine_module.resample
    monkeypatch.setattr(engine_module, "resample", lambda rows, cache, drafter: right(rows, LengthsOnly(cache), drafter))
    _, groups = ran(Masked(), 0, Rejection(), requests=60)
    assert sum(abs(sum(row.logprobs) - by_script(row)) > 1e-3 for rows in groups for row in rows) > 20


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [one_seed, same_serial])
def test_copies_that_share_their_numbers_write_the_same(often: None, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By each copy's seed, what it writes next is its source's, or what it would have written itself."""

    def repeated() -> int:
        """Pairs of rows of a request that wrote the same text."""
        _, groups = ran(Masked(), 0, Coupled(), requests=100)
        pairs = [(one, other) for rows in groups for place, one in enumerate(rows) for other in rows[:place]]
        return sum(one.tokens == other.tokens for one, other in pairs)

    right = repeated()
    monkeypatch.setattr(Row, "become", wrong(Row.become))
    found = repeated()
    assert found > 1.2 * right if wrong is one_seed else found != right


# ── for users ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_samples_of_a_grammar_are_resampled(bundled: shoal.Shoal) -> None:
    pair = bundled
    options: Any = {"temperature": 1.0, "seed": 3, "max_new_tokens": 12, "grammar": Grammar("regex", "[a-z]{2}[0-9]{3} x*;")}
    result = pair.generate("value = ", 8, exact="smc", lookahead=3, **options)
    (output,) = result
    assert result.stats.resampled > 0
    assert output.effective_samples is not None
    assert 1 <= output.effective_samples <= 8
    assert output.log_mass is not None
    assert output.log_mass < 0
    for sample in output.samples:
        assert sample.log_allowed is not None
        mean = (sum(sample.processed_logprobs) + sample.log_allowed) / len(sample.token_ids)
        assert sample.ranking_logprob == pytest.approx(mean)
    again = pair.generate("value = ", 8, exact="smc", lookahead=3, **options)[0]
    assert [sample.text for sample in again.samples] == [sample.text for sample in output.samples]


def test_tokens_behind_a_stop_string_have_no_weight(bundled: shoal.Shoal) -> None:
    """A block may bring some: weights are those of rows without drafts."""
    options: Any = {"seed": 3, "max_new_tokens": 12, "grammar": Grammar("regex", "[a-z]{2}[0-9]{3} x*;"), "stop": " "}
    plain, drafted = (bundled.generate("value = ", 8, exact=True, lookahead=length, **options) for length in ("off", 6))
    assert drafted.stats.accepted > 0
    for one, other in zip(plain[0].samples, drafted[0].samples, strict=True):
        assert (one.text, one.finish_reason) == (other.text, "stop")
        assert one.log_allowed == pytest.approx(other.log_allowed, abs=1e-4)
        assert one.log_weight == pytest.approx(other.log_weight, abs=1e-4)


class Small(Asked):
    """After an even token only tokens below 100, so that beginnings differ in what they are worth."""

    def after(self, state: tuple[int, ...], token: int) -> tuple[int, ...] | None:
        return None if state and state[0] % 2 == 0 and token >= 100 else (token,)

    def may_end(self, state: tuple[int, ...]) -> bool:
        return True


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of a target, a draft model, and heads of both kinds."""
    folder = tmp_path_factory.mktemp("smc")
    target, drafter = save_pair(folder)
    return {
        "target": str(target), "model": str(drafter), "medusa": f"medusa:{save_medusa(folder / 'medusa')}",
        "eagle3": f"eagle3:{save_eagle3(folder / 'eagle3')}",
    }  # fmt: skip


@pytest.mark.slow(but=["suffix"])
@pytest.mark.parametrize(
    "draft",
    ["model", "suffix", "suffix:scope=engine", "recycling", "trigrams", "self:exit=1", "medusa", "eagle3", "suffix+model"],
)
def test_drafters_go_on_from_copies_and_from_the_prompt(often: None, places: dict[str, str], draft: str) -> None:
    """Each row's log-probabilities are those that the target gives to its tokens, whatever it was before."""
    spec = draft.replace("model", places["model"]) if "model" in draft else places.get(draft, draft)
    with shoal.load(places["target"], spec, dtype="float32", max_batch=8, compile="off") as pair:
        options: Any = {"max_new_tokens": 10, "seed": 3, "lookahead": 3, "eos": []}
        copied = pair.generate([[1, 2, 3], [4, 5]], 6, exact="smc", constraints=[Small()], **options)
        again = pair.generate([[1, 2, 3], [4, 5]], 6, exact="distinct", temperature=0.02, **options)
        assert copied.stats.resampled > 0
        assert again.stats.restarted > 0
        assert min(copied.stats.drafted, again.stats.drafted) > 0
        assert all(len({sample.token_ids for sample in output.samples}) == 6 for output in again)
        for output in [*copied, *again]:
            for sample in output.samples:
                ids = torch.tensor([[*output.prompt_ids, *sample.token_ids]])
                with torch.no_grad():
                    logits = pair.target.hf(ids).logits[0, len(output.prompt_ids) - 1 : -1].log_softmax(-1)
                expected = logits.gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0]
                torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("exact", "pattern"), [("smc", "[a-z]{2}[0-9]{3}x*;"), ("distinct", "[ab][0-9]?x?;")])
def test_a_stream_has_the_text_of_rows_once_they_have_ended(bundled: shoal.Shoal, exact: str, pattern: str) -> None:
    pair = bundled
    options: Any = {"grammar": Grammar("regex", pattern), "max_new_tokens": 12, "seed": 2}
    stream = pair.stream("value = ", 6, exact=exact, lookahead=2, **options)
    texts = defaultdict(str)
    for increment in stream:
        texts[increment.sample] += increment.text
        assert not increment.text or increment.result is not None
    stats = stream.result().stats
    assert (stats.resampled > 0, stats.restarted > 0) == (exact == "smc", exact == "distinct")
    assert [texts[row] for row in range(6)] == [sample.text for sample in stream.result()[0].samples]


def test_what_cannot_be_resampled_is_refused(bundled: shoal.Shoal) -> None:
    pair = bundled
    options: Any = {"grammar": Grammar("regex", "[0-9]+"), "max_new_tokens": 4}
    with pytest.raises(RequestError, match="n >= 2"):
        pair.generate("1", 1, exact="smc", **options)
    with pytest.raises(RequestError, match="one of weights, smc"):
        pair.generate("1", 4, exact="all", **options)
    (output,) = pair.generate("1", 2, **options)
    assert output.effective_samples is None
    assert output.log_mass is None
