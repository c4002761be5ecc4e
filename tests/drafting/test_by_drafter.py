"""What users see of drafters: which one proposed each token, and counts by drafter, in every answer.

Tests of: drafting.ngram, drafting.sums, drafting.model.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from serving import Served, legible, served
from shoal.api import Shoal
from shoal.config import Limits, Sampling
from shoal.drafting.model import ModelDrafter
from shoal.drafting.ngram import NGramDrafter
from shoal.drafting.protocol import Drafter, DraftInputs
from shoal.drafting.sums import SumDrafter
from shoal.engine.engine import Engine
from shoal.evaluation.sampling import BATCHED, PLAIN, Sampler, SamplingConfig
from shoal.evaluation.tasks import Task
from shoal.lookahead.controller import Fixed
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.testing import VOCABULARY, tiny_tokenizer
from shoal.testing.drafters import RandomTrees
from shoal.testing.scripted import hashed, mixed, scripted
from shoal.types.requests import Request, Row
from shoal.types.samples import Sample
from shoal.types.stats import DraftCounts, Stats, as_dicts, total_by_drafter
from shoal.types.trees import DraftTree

V = 6


class ByToken(Drafter):
    """Another drafter's trees, in which each token has a drafter of its own."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.max_nodes = inner, inner.max_nodes
        self.proposed: Counter[str] = Counter()

    def propose(self, inputs: DraftInputs) -> DraftTree:
        tree = self.inner.propose(inputs)
        names = [[f"of {token}" for token in draft] for draft in tree.drafts]
        self.proposed.update(name for row in names for name in row)
        return replace(tree, drafters=names)


def trees() -> Drafter:
    target = hashed(V)
    return RandomTrees(V, guess=lambda tokens: int(target(tuple(tokens)).argmax()))


def samples_of(drafter: Drafter, rule: Rule, lookahead: int = 4) -> tuple[list[Sample], Stats]:
    """Rows that join in turn and end at lengths of their own; the last one is cancelled in between."""
    engine = Engine(scripted(hashed(V), V), drafter, Fixed(lookahead), max_batch=3, rule=rule)
    found, rows = [], []
    for length in range(1, 6):
        rows += engine.submit(Request((length % V,), 2, Sampling(seed=length), Limits(max_new_tokens=9 * length, eos=(2,))))
        found += engine.step()
    found += engine.cancel(rows[-1:])
    while done := engine.step():
        found += done
    return [one.sample for one in found if one.sample is not None], engine.stats


def require_names(samples: Sequence[Sample], stats: Stats, proposed: Mapping[str, int]) -> None:
    """Every accepted token has the name of the drafter that proposed it, and all counts agree."""
    for sample in samples:
        assert len(sample.drafters) == len(sample.token_ids)
        assert all(name in (None, f"of {token}") for name, token in zip(sample.drafters, sample.token_ids, strict=True))
        assert sample.from_draft == tuple(name is not None for name in sample.drafters)
        assert sum(counts.drafted for counts in sample.by_drafter.values()) == sample.drafted
        assert Counter({name: one.accepted for name, one in sample.by_drafter.items()}) == Counter(
            filter(None, sample.drafters)
        )
    assert stats.by_drafter == total_by_drafter(sample.by_drafter for sample in samples)
    assert {name: one.drafted for name, one in stats.by_drafter.items()} == dict(proposed)
    assert 0 < sum(one.accepted for one in stats.by_drafter.values()) == stats.accepted < stats.drafted


@pytest.mark.parametrize("rule", [Rejection, Coupled])
def test_every_token_is_its_drafters(rule: type[Rule]) -> None:
    for inner in (NGramDrafter(1, 2), trees()):
        drafter = ByToken(inner)
        require_names(*samples_of(drafter, rule()), drafter.proposed)


def test_names_of_other_nodes_would_show() -> None:
    """Negative control."""

    class Shifted(ByToken):
        def propose(self, inputs: DraftInputs) -> DraftTree:
            tree = super().propose(inputs)
            return replace(tree, drafters=[[*names[1:], *names[:1]] for names in tree.drafters or ()])

    drafter = Shifted(trees())
    with pytest.raises(AssertionError):
        require_names(*samples_of(drafter, Coupled()), drafter.proposed)


def test_one_drafter_has_one_name_and_sums_have_two() -> None:
    samples, stats = samples_of(NGramDrafter(1, 2), Coupled())
    assert stats.by_drafter == {"ngram": DraftCounts(stats.drafted, stats.accepted)}
    assert {name for sample in samples for name in sample.drafters} == {"ngram", None}

    class Own(NGramDrafter):
        name = ""

    assert set(samples_of(Own(1, 2), Coupled())[1].by_drafter) == {"Own"}
    model = ModelDrafter(scripted(mixed(hashed(V), hashed(V, 1)), V), V)
    samples, stats = samples_of(SumDrafter([NGramDrafter(1, 2)], model), Coupled())
    assert all(one.drafted for one in stats.by_drafter.values())
    assert set(stats.by_drafter) <= {"ngram", "model"}
    both = [DraftCounts(sum(getattr(one, what) for one in stats.by_drafter.values()), 0) for what in ("drafted", "accepted")]
    assert [one.drafted for one in both] == [stats.drafted, stats.accepted]


def test_sums_and_differences_of_statistics() -> None:
    one = Stats(drafted=3, accepted=1, committed=10, row_rounds=5, target_passes=2, updates_behind=1, loaded={"target": {}})
    one.seconds_rounds, one.seconds_target, one.seconds_draft, one.seconds = 4.0, 1.0, 2.0, 5.0
    other = Stats(drafted=4, updates_behind=2, lossy="typical")
    assert (one.acceptance_length, one.acceptance_rate, one.tokens_per_second, one.bookkeeping) == (2.0, 1 / 3, 2.0, 0.25)
    for added in (one + other, other + one):
        assert (added.updates_behind, added.lossy, added.loaded) == (2, "typical", {"target": {}})
    one.count_drafts("a", 3, 1)
    other.count_drafts("b", 4, 0)
    other.count_drafts("b", 0, 0)
    total = one + other
    assert total.by_drafter == {"a": DraftCounts(3, 1), "b": DraftCounts(4, 0)}
    assert (total - one).by_drafter == other.by_drafter
    assert json.loads(json.dumps(total.to_dict()))["by_drafter"] == as_dicts(total.by_drafter)


# ── every way out ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Named:
    """A drafting whose drafts are named by their tokens' last bit."""

    name: str = "named"
    is_model: ClassVar[bool] = False

    def drafter(self, target: Runner, model: Drafter | None = None) -> Drafter:
        class Two(ModelDrafter):
            def propose(self, inputs: DraftInputs) -> DraftTree:
                tree = super().propose(inputs)
                return replace(tree, drafters=[[("even", "odd")[token % 2] for token in draft] for draft in tree.drafts])

        assert isinstance(model, ModelDrafter)
        return Two(model.runner, model.vocab_size)


def two_drafters() -> Shoal:
    script = legible(0)
    models = [scripted(spoken, VOCABULARY) for spoken in (script, mixed(script, legible(1), every=3))]
    return Shoal(*models, tiny_tokenizer(), max_batch=8, drafting=Named())


@pytest.fixture(scope="module")
def server() -> Any:
    with served(two_drafters()) as running:
        yield running


def test_usage_and_metrics(server: Served) -> None:
    result = server.shoal.generate("hello", 3, seed=7, lookahead=4, max_new_tokens=30, temperature=1.0)
    expected = [as_dicts(sample.by_drafter) for sample in result[0].samples]
    before = {name: server.metric(f'shoal_drafter_accepted_total{{drafter="{name}"}}') for name in ("even", "odd")}
    body: dict[str, Any] = {"n": 3, "seed": 7, "max_tokens": 30, "temperature": 1.0, "shoal": {"details": True}}
    answer = server.post(**body).json()
    assert [choice["by_drafter"] for choice in answer["usage"]["choices"]] == expected
    assert answer["usage"]["by_drafter"] == as_dicts(result.stats.by_drafter)
    assert all(counts["accepted"] > 0 for counts in answer["usage"]["by_drafter"].values())
    for choice, sample in zip(answer["choices"], result[0].samples, strict=True):
        tokens = choice["shoal"]["tokens"]
        assert [token["drafter"] for token in tokens] == list(sample.drafters)
        assert [token["from_draft"] for token in tokens] == list(sample.from_draft)
    for name, counts in answer["usage"]["by_drafter"].items():
        assert server.metric(f'shoal_drafter_accepted_total{{drafter="{name}"}}') == before[name] + counts["accepted"]
    streamed = server.post(**body, stream=True, stream_options={"include_usage": True}).text.split("\n\n")
    assert json.loads(streamed[-3].removeprefix("data: "))["usage"] == answer["usage"]


def test_an_evaluation() -> None:
    config = SamplingConfig(2, {"max_new_tokens": 40, "temperature": 0.3}, 3, 1, (PLAIN, BATCHED))
    task = Task("one", "abcabc", (), lambda _: "abcabc", lambda text, _: text)
    (entry,) = Sampler(two_drafters(), config).run([task])
    plain, batched = (entry["attempts"][method] for method in (PLAIN, BATCHED))
    assert plain["stats"]["by_drafter"] == {}
    found = batched["stats"]["by_drafter"]
    assert set(found) == {"even", "odd"}
    for what in ("drafted", "accepted"):
        assert sum(counts[what] for counts in found.values()) == batched["stats"][what]
        for sample in batched["samples"]:
            assert sum(counts[what] for counts in sample["by_drafter"].values()) == sample[what]


# ── what was rejected ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("drafter", ["chains", "trees"])
def test_drafts_after_the_token_that_ends_a_row_are_rejected(drafter: str) -> None:
    """Rows that end by EOS inside accepted drafts: what is told of each round adds up to the counts of the row."""
    proposer = trees() if drafter == "trees" else ModelDrafter(scripted(hashed(V), V), V)
    engine = Engine(scripted(hashed(V), V), proposer, Fixed(4), max_batch=4, rule=Rejection())
    rows, rejected, cut = [], Counter[Row](), 0
    for seed in range(12):
        rows += engine.submit(Request((0, seed % V), 1, Sampling(seed=seed), Limits(max_new_tokens=12, eos=(V - 1,))))
    while not engine.scheduler.idle:
        for done in engine.step():
            rejected[done.row] += len(done.rejected)
            assert [token for token, _ in done.rejected] == [
                token for node, token in enumerate(done.drafts) if node not in done.path
            ]
            assert [done.drafts[node] for node in done.path] == done.tokens[: done.accepted]
            cut += done.sample is not None and done.accepted == len(done.tokens) and len(done.drafts) > done.accepted
    assert cut > 2
    assert all(rejected[row] == row.drafted - row.accepted for row in rows)
