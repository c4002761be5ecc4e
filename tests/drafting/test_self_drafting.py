"""A target that drafts for itself: what an exit drafts is what it says, in ragged batches over the target's own cache, which stays
as plain decoding leaves it; exact by the exit's q; refused where there is no such exit.

Tests of: drafting.early_exit, drafting.target_keys, models.target_models, drafting.model, drafting.draft.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from enumeration import chi_square
from exits import ALPHA, PASSES, V, difference_to_anew, model_of, run, runner_of, states_after
from laws import declared_law, joint
from proposals import p_of_two_tokens, recorded
from shoal.config import Limits, Sampling
from shoal.drafting.early_exit import EarlyExitDrafter, ExitChoice, best, candidates, tokens_per_layer
from shoal.drafting.model import ModelDrafter
from shoal.drafting.ngram import NGramDrafter
from shoal.drafting.protocol import DraftInputs, name_of
from shoal.drafting.suffix import SuffixDrafter
from shoal.drafting.sums import SumDrafter
from shoal.drafting.target_keys import self_drafter
from shoal.drafting.text import NOTHING, Guess
from shoal.engine.engine import Engine
from shoal.errors import RequestError, UnsupportedModel
from shoal.lookahead.controller import by_name
from shoal.models.loading import wrap
from shoal.models.runner import Runner
from shoal.models.target_models import first_layers, head_of
from shoal.native.build import missing
from shoal.sampling.acceptance import Coupled, Rejection
from shoal.testing import save_pair, tiny_model
from shoal.testing.drafters import check_drafter
from shoal.testing.scripted import hashed, scripted
from shoal.types.requests import Request
from shoal.types.trees import DraftTree


@pytest.fixture(scope="module", params=PASSES)
def target(request: pytest.FixtureRequest) -> Runner:
    """By its modules: slow, for few tests. By kernels in C, where they can be built."""
    return runner_of(request.param)


@pytest.fixture(scope="module")
def quick() -> Runner:
    return runner_of(PASSES[-1])


@pytest.fixture(scope="module")
def wide() -> Runner:
    """Layers that have copies in 4 bits."""
    return runner_of(PASSES[-1], model_of(intermediate_size=64))


@pytest.fixture(scope="module")
def shallow() -> Runner:
    """The last layer adds nothing."""
    return runner_of(PASSES[-1], model_of(share=0.0))


class Recorder(EarlyExitDrafter):
    """Leaves the target's cache as it was; `last`: the exit that drafted."""

    def _drafter(self, exit: int) -> ModelDrafter:
        self.last = exit
        return super()._drafter(exit)

    def propose(self, inputs: DraftInputs) -> DraftTree:
        lengths = [self._target.cache.lengths[row.slot] for row in inputs.rows]
        assert lengths == [len(row.tokens) - 1 for row in inputs.rows]
        tree = super().propose(inputs)
        assert [self._target.cache.lengths[row.slot] for row in inputs.rows] == lengths
        return tree


# ── what is drafted ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("exit", "sharing"), [(1, "copied"), (2, "shared")])
@torch.inference_mode()
def test_drafts_are_those_of_the_exit(target: Runner, exit: int, sharing: str) -> None:
    """q is norm and head on the states after so many layers, in ragged batches with joins, cancellations and moves."""
    drafter = Recorder(exit)
    proposals = recorded(drafter)
    engine, _ = run(target, drafter, Rejection(), 2.0, 4, sharing=sharing)
    assert 0 < engine.stats.accepted < engine.stats.drafted
    assert len(proposals) > 20
    others = 0.0
    for tokens, draft, q in proposals:
        states = states_after(target.hf, [*tokens, *draft[:-1]])
        right, other = ((head_of(target)(states[layer][len(tokens) - 1 :]) / 2.0).softmax(-1) for layer in (exit, 3 - exit))
        assert float((torch.stack(q) - right).abs().max()) < 1e-4
        others = max(others, float((right - other).abs().max()))
    assert others > 0.1


@torch.inference_mode()
def test_the_cache_is_as_if_nothing_was_drafted(target: Runner) -> None:
    """After each round the keys and values of all layers are those of the committed tokens, computed anew."""
    drafter = EarlyExitDrafter(1)
    engine = Engine(target, drafter, by_name(3), max_batch=3, rule=Coupled())
    rows = engine.submit(Request((5, 3, 8), 3, Sampling(temperature=1.5, seed=1), Limits(max_new_tokens=14)))
    compared = 0
    while engine.step():
        for row in rows:
            if row.finish_reason is None:
                compared += 1
                assert difference_to_anew(engine, row) < 1e-5
    assert compared > 10
    assert engine.stats.accepted > 0


def test_nothing_is_copied_or_kept(target: Runner) -> None:
    """An exit has the target's weights, no memory, and computes no prompts."""
    exit = first_layers(target, 2)
    assert set(map(id, exit.hf.parameters())) < set(map(id, target.hf.parameters()))
    assert len(exit.hf.model.layers) == 2
    assert len(target.hf.model.layers) == 3
    assert exit.cache is target.cache
    drafter = EarlyExitDrafter(2)
    engine, _ = run(target, drafter, Coupled(), 1.0, 9)
    assert drafter.memory is None
    assert engine.stats.draft_passes <= 3 * engine.stats.rounds
    plain, _ = run(target, None, Coupled(), 1.0, 9)
    assert engine.stats.prefill_tokens == plain.stats.prefill_tokens


# ── exactness ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("max_batch", [1, 9])
def test_tokens_are_those_of_plain_decoding(quick: Runner, max_batch: int) -> None:
    for rule, temperature in ((Rejection(), 0.0), (Coupled(), 0.0), (Coupled(), 1.5)):
        _, expected = run(quick, None, rule, temperature, max_batch)
        for exit in (1, 2, None):
            engine, found = run(quick, EarlyExitDrafter(exit), rule, temperature, max_batch)
            assert found == expected
            assert engine.stats.drafted > engine.stats.accepted > 0 or exit is None


@pytest.mark.parametrize("nodes", [0, 6])
@pytest.mark.parametrize("own", [{"exit": 1}, {}, {"window": 3, "sinks": 1}])
def test_a_sum_with_text_writes_the_tokens_of_plain_decoding(quick: Runner, own: dict[str, Any], nodes: int) -> None:
    """Chains of text for some rows and the target's own for the others; or trees of text joined to its own drafts."""
    drafting: set[str] = set()
    for rule, temperature in ((Rejection(), 0.0), (Coupled(), 1.5)):
        _, expected = run(quick, None, rule, temperature, 4)
        drafter = SumDrafter([SuffixDrafter("engine", nodes=nodes)], self_drafter(quick, **own))
        engine, found = run(quick, drafter, rule, temperature, 4)
        assert found == expected
        drafting |= {name for name, counts in engine.stats.by_drafter.items() if counts.drafted}
    assert drafting == {"suffix", name_of(drafter.model)} or (not own and drafting)  # an exit may be found not to pay


def test_all_is_accepted_where_the_last_layer_adds_nothing(shallow: Runner) -> None:
    target = shallow
    for rule, temperature in ((Rejection(), 0.0), (Rejection(), 1.5), (Coupled(), 1.5)):
        engine, _ = run(target, EarlyExitDrafter(2), rule, temperature)
        assert engine.stats.accepted == engine.stats.drafted > 0
        other, _ = run(target, EarlyExitDrafter(1), rule, temperature)
        assert other.stats.accepted < other.stats.drafted


class WrongExit(EarlyExitDrafter):
    """A sabotage: tokens of one exit with the q of another."""

    def propose(self, inputs: DraftInputs) -> DraftTree:
        other = self._drafter(1).propose(inputs)
        for row in inputs.rows:
            self._target.cache.rollback(row.slot, len(row.tokens) - 1)
        tree = super().propose(inputs)
        assert other.q is not None
        return DraftTree(tree.tokens, tree.lengths, other.q, tree.drafts, tree.parents, tree.steps)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "exit"), [(EarlyExitDrafter, 2), (EarlyExitDrafter, None), (WrongExit, 2)])
def test_tokens_have_the_law_of_the_target(kind: type[EarlyExitDrafter], exit: int | None) -> None:
    """Two tokens by rejection sampling against the target's own logits; a q of another exit is noticed."""
    assert (p_of_two_tokens(model_of(4), kind(exit), (1, 2, 3), 2500) > ALPHA) == (kind is EarlyExitDrafter)


class Swapped(SumDrafter):
    """A sabotage: drafts have the q of other tokens."""

    def propose(self, inputs: DraftInputs) -> DraftTree:
        tree = super().propose(inputs)
        return tree if tree.q is None else replace(tree, q=[each.roll(1, -1) for each in tree.q])


OWN: list[dict[str, Any]] = [{"exit": 1}, {"window": 3, "sinks": 1}, *([] if missing() else [{"int4": True}])]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SumDrafter, Swapped])
@pytest.mark.parametrize("text", [SuffixDrafter, NGramDrafter])
@pytest.mark.parametrize("own", OWN, ids=str)
def test_a_sum_has_the_law_of_the_target(own: dict[str, Any], text: Any, kind: type[SumDrafter], wide: Runner) -> None:
    """By rejection sampling: rows of a round have text with a one-hot q, or the target's own drafts with theirs."""
    vocab, horizon = (V, 2) if "int4" in own else (4, 3)  # the kernels take no head of 4 tokens
    made = wide if "int4" in own else runner_of("modules", model_of(vocab))
    prompt, samples = (1, 2, 3) * 6, 2500

    def step(tokens: tuple[int, ...]) -> Tensor:
        with torch.inference_mode():
            return made.hf(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, -1].double().div(2).softmax(-1)

    law = declared_law(step, vocab, horizon)
    drafter = kind([text()], self_drafter(made, **own))
    engine = Engine(made, drafter, by_name(2), max_batch=200, rule=Rejection())
    rows = engine.submit(Request(prompt, samples, Sampling(temperature=2.0, seed=11), Limits(max_new_tokens=horizon)))
    while engine.step():
        pass
    counts, first = joint(rows, vocab), tuple(range(1, horizon)) if vocab == V else ()  # too many pairs to see much
    seen = chi_square(counts.sum(first), law.sum(first)) if first else chi_square(counts, law)
    assert (seen > ALPHA) == (kind is SumDrafter)
    assert all(0 < counts.accepted < counts.drafted for counts in engine.stats.by_drafter.values())
    assert len(engine.stats.by_drafter) == 2


def test_a_sum_drafts_nothing_where_no_exit_pays() -> None:
    """`self` without an exit chooses the draft length too: 0 if plain decoding brings more tokens per layer, fixed lengths or
    not. So a sum is left with the rows of which its text is sure; with an exit it drafts for the others."""
    drafted, made = {}, runner_of("modules", model_of(share=8.0))
    for exit in (None, 1):
        own = EarlyExitDrafter(exit)
        engine, _ = run(made, SumDrafter([Unsure()], own), Rejection(), 0.0, k=3)
        drafted[exit] = engine.stats.drafted
        if own.choice is not None:
            assert own.choice.best(3) == (0, 0)
            assert own.choice.acceptances  # it was measured
    assert drafted[None] == 0 < drafted[1]


class Unsure(SuffixDrafter):
    """Text that is sure of no row."""

    def guesses(self, inputs: DraftInputs) -> list[Guess]:
        return [NOTHING] * len(inputs.rows)


def test_the_protocol_is_kept(shallow: Runner) -> None:
    for exit in (1, None):
        assert check_drafter(lambda exit=exit: EarlyExitDrafter(exit), V, target=shallow) > 20  # type: ignore[misc]


@pytest.mark.parametrize("architecture", ["gpt2", "gemma2", "opt", "falcon", "mixtral"])
@torch.inference_mode()
def test_other_architectures(architecture: str) -> None:
    """Their modules are found, with learned positions, scaled embeddings, windows, capped logits or experts."""
    target = wrap(tiny_model(architecture, vocab_size=V), architecture)
    drafter = Recorder(1)
    proposals = recorded(drafter)
    _, expected = run(target, None, Coupled(), 1.5)
    engine, found = run(target, drafter, Coupled(), 1.5)
    assert found == expected
    assert engine.stats.drafted > 0
    if architecture != "gemma2":  # which caps its logits
        run(target, drafter, Rejection(), 1.5)
        tokens, draft, q = next(each for each in proposals if len(each[0]) > 6 and each[2])
        states = states_after(target.hf, [*tokens, *draft[:-1]])[1][len(tokens) - 1 :]
        assert float((torch.stack(q) - (head_of(target)(states) / 1.5).softmax(-1)).abs().max()) < 1e-4


def test_a_draft_that_is_not_finite(target: Runner) -> None:
    """It ends the draft; the row goes on as in plain decoding, and what the target computed of it stays."""

    class Broken(EarlyExitDrafter):
        def _drafter(self, exit: int) -> ModelDrafter:
            made = super()._drafter(exit)
            runner = made.runner
            runner.lean, feed = None, type(runner).feed

            def broken(*args: Any, **options: Any) -> Tensor:
                logits = feed(runner, *args, **options)
                return logits.masked_fill(torch.tensor(runner.cache.lengths[0] % 3 == 0), torch.nan)

            runner.feed = broken  # type: ignore[method-assign]
            return made

    _, expected = run(target, None, Coupled(), 1.0)
    engine, found = run(target, Broken(1), Coupled(), 1.0)
    assert found == expected
    assert engine.stats.drafted > 0


# ── which exit ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_objective() -> None:
    """The figures of the paper's method, checked numerically: 1.18x in units of layers."""
    found = {8: 0.45, 12: 0.62, 16: 0.75, 20: 0.82}
    assert best(found, 32, 8) == (12, 1)
    assert tokens_per_layer(0.62, 12, 1, 32) * 32 == pytest.approx(1.18, abs=0.005)
    assert tokens_per_layer(0.0, 0, 0, 32) * 32 == 1.0
    assert best(dict.fromkeys(found, 0.1), 32, 8) == (0, 0)
    assert best({1: 1.0}, 32, 5) == (1, 5)
    assert best(found, 32, 8, head=10.0) == (16, 1)  # a dear head favours exits that are accepted more often
    assert best(found, 32, 8, head=40.0) == (0, 0)
    assert best({}, 32, 8) == (0, 0)


def test_what_is_known_of_exits_fades() -> None:
    choice = ExitChoice([1, 2], 3, 0.0)
    assert choice.best(4) == (0, 0)
    assert [choice.due() for _ in range(32)] == [place < 4 or place in (15, 31) for place in range(32)]
    choice.learn([9.0, 9.9], 10)
    assert choice.acceptances == {1: 0.9, 2: 0.99}
    assert choice.best(4) == (1, 4)
    for _ in range(60):
        choice.learn([0.0, 5.0], 10)
    assert choice.acceptances == pytest.approx({1: 0.0, 2: 0.5}, abs=0.01)
    assert choice.best(4) == (0, 0)


def test_candidates() -> None:
    assert candidates(2) == [1]
    assert candidates(4) == [1, 2, 3]
    assert candidates(32) == [4, 7, 11, 14, 18, 21, 25, 28]


def test_the_exit_that_agrees_is_chosen(shallow: Runner) -> None:
    """From the second round on; exits are compared on what was committed."""
    target = shallow
    for rule, temperature in ((Coupled(), 1.0), (Rejection(), 0.0)):
        drafter = Recorder()
        engine, found = run(target, drafter, rule, temperature, 9)
        assert found == run(target, None, rule, temperature, 9)[1]
        assert drafter.choice is not None
        assert drafter.choice.acceptances[2] == pytest.approx(1.0)
        assert drafter.choice.acceptances[1] < 0.9
        assert drafter.last == 2
        assert engine.stats.accepted == engine.stats.drafted > 0
        assert engine.target.hidden_layers == ()


# ── names and entries ───────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_refused(target: Runner) -> None:
    for exit in (0, 3, 99):
        with pytest.raises(RequestError, match=rf"tiny has 3 layers: exit must be in 1\.\.2, got {exit}"):
            self_drafter(target, exit)
    with pytest.raises(UnsupportedModel, match=r"scripted \(scripted\) cannot draft for itself: its layers are no list"):
        self_drafter(scripted(hashed(5), 5), 1)
    hf = copy.deepcopy(model_of())
    hf.model.norm, hf.model.last = torch.nn.Identity(), hf.model.norm
    del hf.model.norm
    nameless = target.fork()
    nameless.hf = hf
    with pytest.raises(UnsupportedModel, match="cannot be compared: name one, as in self:exit=2"):
        head_of(nameless)


def test_transformers_generate() -> None:
    model, ids, found = tiny_model("llama", layers=3), torch.tensor([[5, 6, 7]]), []
    for draft in (None, "self:exit=2", "self", "self:window=4"):
        torch.manual_seed(0)
        options = {"custom_generate": shoal.custom_generate, "draft_model": draft, "lookahead": 2}
        found.append(model.generate(ids, max_new_tokens=9, do_sample=True, **options).tolist())
    assert found == found[:1] * 4


def test_load_and_generate(tmp_path: Path) -> None:
    place, _ = save_pair(tmp_path, layers=3)
    with pytest.raises(RequestError, match=r"exit must be in 1\.\.2, got 3"):
        shoal.load(place, "self:exit=3", dtype="float32")
    for draft in ("self:exit=1", "self", "self:window=4,sinks=1"):
        with shoal.load(place, draft, dtype="float32") as pair:
            assert pair.drafter_name == draft
            options = {"max_new_tokens": 12, "seed": 1, "temperature": 1.5}
            plain = pair.generate("def f(x):", 3, lookahead="off", **options)  # type: ignore[arg-type]
            for lookahead in (3, "auto"):
                found = pair.generate("def f(x):", 3, lookahead=lookahead, **options)  # type: ignore[arg-type]
                assert [s.token_ids for s in found[0].samples] == [s.token_ids for s in plain[0].samples]
