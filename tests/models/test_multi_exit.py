"""A draft model with several exits: each token is drawn from the first exit that is sure, and its q is that exit's; the cache
between rounds is that of all layers.

Tests of: models.target_models, drafting.multi_exit, train.drafter.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from exits import ALPHA, PASSES, V, model_of, run, runner_of, states_after
from proposals import p_of_two_tokens
from shoal.config import Limits, Sampling
from shoal.drafting.distillation import logits, next_token_loss
from shoal.drafting.model import ModelDrafter
from shoal.drafting.multi_exit import MultiExitDrafter, exits_of
from shoal.drafting.protocol import DraftInputs
from shoal.engine.engine import Engine
from shoal.errors import RequestError
from shoal.lookahead.controller import by_name
from shoal.models.loading import wrap
from shoal.models.runner import Runner
from shoal.models.target_models import head_of
from shoal.sampling.acceptance import Coupled, Rejection
from shoal.testing import save_pair
from shoal.testing.drafters import check_drafter
from shoal.train import own_samples
from shoal.train.drafter import DrafterTrainer, DrafterTraining
from shoal.types.requests import Request
from shoal.types.trees import DraftTree

EXITS = [1, 2]


def draft_model(vocab_size: int = V) -> Any:
    """The target's, with sharper logits, so that exits are sure now and then."""
    hf = model_of(vocab_size, share=1.0)
    hf.lm_head.weight.data *= 3
    return hf


@pytest.fixture(scope="module")
def target() -> Runner:
    return runner_of(PASSES[-1])


@pytest.fixture(scope="module", params=PASSES)
def model(request: pytest.FixtureRequest) -> Runner:
    return runner_of(request.param, draft_model())


@pytest.fixture(scope="module")
def quick() -> Runner:
    return runner_of(PASSES[-1], draft_model())


class Recorder(MultiExitDrafter):
    """Keeps of each draft the row's tokens, the draft and its q."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.proposals: list[tuple[list[int], list[int], Tensor]] = []

    def propose(self, inputs: DraftInputs) -> DraftTree:
        fresh = not len(self.runner.cache)
        tree = super().propose(inputs)
        for b, (row, draft) in enumerate(zip(inputs.rows, tree.drafts, strict=True)):
            if draft and tree.q is not None and not fresh:  # the first pass makes the layers of the cache, all of them
                q = torch.stack([own[b] for own, _ in zip(tree.q, draft, strict=False)])
                self.proposals.append((list(row.tokens), list(draft), q))
        return tree


def drafter_of(model: Runner, enough: float, kind: type[MultiExitDrafter] = MultiExitDrafter) -> Any:
    return kind(model.fork(), model.vocab_size, EXITS, enough)


# ── what is drafted ─────────────────────────────────────────────────────────────────────────────────────────────────


@torch.inference_mode()
def test_drafts_are_those_of_the_first_exit_that_is_sure(target: Runner, model: Runner) -> None:
    """By its definition on the whole row, in ragged batches with joins, cancellations and moves."""
    drafter = drafter_of(model, 0.7, Recorder)
    engine, _ = run(target, drafter, Rejection(), 2.0, 4, k=4, sharing="copied")
    assert 0 < engine.stats.accepted < engine.stats.drafted
    assert len(drafter.proposals) > 20
    used = dict.fromkeys([*EXITS, 3], 0)
    for tokens, draft, q in drafter.proposals:
        states = states_after(model.hf, [*tokens, *draft[:-1]])
        said = {layers: head_of(model)(states[layers])[len(tokens) - 1 :] for layers in EXITS}
        said[3] = model.hf(torch.tensor([[*tokens, *draft[:-1]]])).logits[0, len(tokens) - 1 :]
        for place, own in enumerate(q):
            exit = next((layers for layers in EXITS if float(said[layers][place].softmax(-1).max()) >= 0.7), 3)
            used[exit] += 1
            assert float((own - (said[exit][place] / 2.0).softmax(-1)).abs().max()) < 1e-4
    assert min(used.values()) > 0
    assert all(drafter.used[layers] >= count for layers, count in used.items())


def test_thresholds_are_the_models_between(target: Runner, quick: Runner) -> None:
    """Exits that are never sure make the model itself; the first exit that always is, that exit: by counts and tokens."""
    whole, found = run(target, drafter := drafter_of(quick, 1.1), Rejection(), 1.5)
    model, expected = run(target, ModelDrafter(quick.fork(), V), Rejection(), 1.5)
    assert found == expected
    assert (whole.stats.drafted, whole.stats.accepted) == (model.stats.drafted, model.stats.accepted)
    assert [drafter.used[layers] for layers in EXITS] == [0, 0]
    assert whole.stats.draft_passes > 2 * model.stats.draft_passes
    first, _ = run(target, drafter := drafter_of(quick, 0.0), Rejection(), 1.5)
    assert drafter.used[2] == 0
    assert drafter.used[3] <= 9  # whose first pass makes the layers of the cache
    assert drafter.used[1] > 30
    some = [run(target, drafter_of(quick, enough), Rejection(), 1.5)[0].stats for enough in (0.0, 0.6, 0.8, 1.1)]
    assert all(a.draft_passes < b.draft_passes for a, b in pairwise(some))
    assert first.stats.draft_passes / first.stats.rounds < 1.1 * model.stats.draft_passes / model.stats.rounds


# ── exactness ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("max_batch", [1, 9])
def test_tokens_are_those_of_plain_decoding(target: Runner, quick: Runner, max_batch: int) -> None:
    for rule, temperature in ((Rejection(), 0.0), (Coupled(), 0.0), (Coupled(), 1.5)):
        engine, found = run(target, drafter := drafter_of(quick, 0.7), rule, temperature, max_batch)
        assert found == run(target, None, rule, temperature, max_batch)[1]
        assert engine.stats.drafted > engine.stats.accepted > 0
        assert min(drafter.used[layers] for layers in (1, 2, 3)) > 0


class WrongExit(MultiExitDrafter):
    """A sabotage: the q of the first exit for tokens that the whole model drew."""

    def propose(self, inputs: DraftInputs) -> DraftTree:
        enough, self.enough = self.enough, 0.0
        first = super().propose(inputs)
        self.enough = enough
        tree = super().propose(inputs)
        return DraftTree(tree.tokens, tree.lengths, first.q, tree.drafts, tree.parents, tree.steps)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [MultiExitDrafter, WrongExit])
def test_tokens_have_the_law_of_the_target(kind: type[MultiExitDrafter]) -> None:
    """Two tokens by rejection sampling against the target's own logits; a q of another exit is noticed."""
    drafter = drafter_of(wrap(draft_model(4), "draft", checked=False), 0.9, kind)
    assert (p_of_two_tokens(model_of(4), drafter, (1, 2, 3), 1200) > ALPHA) == (kind is MultiExitDrafter)


def test_the_protocol_is_kept(target: Runner, quick: Runner) -> None:
    assert check_drafter(lambda: drafter_of(quick, 0.7), V, target=target) > 20


def test_rows_that_always_leave_early_are_brought_up_to_date(target: Runner, quick: Runner) -> None:
    """What the later layers lack is bounded, also where no row ever asks for them."""
    drafter = drafter_of(quick, 0.0, Recorder)
    engine = Engine(target, drafter, by_name(2), max_batch=2, rule=Coupled())
    rows = engine.submit(Request((5, 3), 2, Sampling(temperature=1.0, seed=1), Limits(max_new_tokens=60)))
    lags = []
    while engine.step():
        slots = drafter._slots.with_slots(rows)
        lags += [len(row.tokens) - drafter.runner.cache.lengths[drafter._slots.of(row)] for row in slots]
    assert 10 < max(lags) < 24
    assert drafter.seconds_preparing > 0


# ── configs and training ────────────────────────────────────────────────────────────────────────────────────────────


def test_exits_are_named_by_the_config() -> None:
    hf = draft_model()
    runner = wrap(hf, "tiny", checked=False)
    assert exits_of(runner) == ([], 0.7)
    for found, enough, message in (
        ([2, 1], 0.5, "rising numbers of layers"),
        ([1], 1.5, "a probability for draft_exit_confidence"),
        ("1", 0.5, "rising numbers"),
        ([3], 0.5, r"tiny has 3 layers: exit must be in 1\.\.2, got 3"),
    ):
        hf.config.draft_exits, hf.config.draft_exit_confidence = found, enough
        with pytest.raises(RequestError, match=message):
            exits_of(runner)
    hf.config.draft_exits, hf.config.draft_exit_confidence = [1, 2], 0.5
    assert exits_of(runner) == ([1, 2], 0.5)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_samples, "PART", 8)


def test_a_drafter_is_trained_with_exits(small: None, tmp_path: Path) -> None:
    place = save_pair(tmp_path, layers=4)[0]
    out = tmp_path / "drafter"
    training = DrafterTraining(
        samples=16, new_tokens=24, steps=2, corpus_steps=2, length=32, batch=8, layers=3, exits=(1, 2)
    )  # fmt: skip

    def trainer(exits: Sequence[int], out: Path = out) -> DrafterTrainer:
        given = {**vars(training), "exits": tuple(exits)}
        return DrafterTrainer(out, str(place), ["def f(x):"], ["x = 1\n" * 60], DrafterTraining(**given))

    own = trainer((1, 2))
    own.prepare()
    tokens = torch.from_numpy(own.samples.tokens(held_out=False)[:64].astype("int64")).view(2, 32)
    loss = own.stages[0].loss(own.model, tokens)
    said = own.logit_pairs(tokens)
    by_hand = [torch.nn.functional.cross_entropy(q.flatten(0, 1), tokens[:, 1:].flatten()) for q, _ in said]
    assert len(said) == 3
    assert float(loss.detach()) == pytest.approx(float(torch.stack(by_hand).mean().detach()), abs=1e-4)
    assert torch.equal(said[2][0], logits(own.model, tokens))
    assert float(next_token_loss(own.model, tokens).detach()) == pytest.approx(float(by_hand[2].detach()), abs=1e-4)
    own.train()
    own.export()
    assert json.loads((out / "config.json").read_text())["draft_exits"] == [1, 2]
    with shoal.load(place, out, dtype="float32") as pair:
        assert isinstance(pair.new_drafter(), MultiExitDrafter)
        options: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0.0}
        found = pair.generate("def f(x):", 2, lookahead=2, **options)
        assert [s.token_ids for s in found[0].samples] == [
            s.token_ids for s in pair.generate("def f(x):", 2, lookahead="off", **options)[0].samples
        ]
        assert found.stats.drafted > 0
    for exits in ((3,), (2, 1)):
        with pytest.raises(RequestError, match=r"exits must be rising numbers of layers in 1\.\.2"):
            trainer(exits, tmp_path / f"other{len(exits)}").prepare()
