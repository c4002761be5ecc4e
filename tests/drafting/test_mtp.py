"""The multi-token-prediction layer of a checkpoint: its drafts are Transformers' definition in ragged batches, exact by their q,
right where they must be, refused by name.

Tests of: models.mtp_layer, drafting.mtp, drafting.eagle3, drafting.draft.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import shoal
from laws import ALPHA, joint
from mtp_layers import HYBRID, PLAIN, by_definition, save_mtp
from shoal.config import Limits, Sampling
from shoal.drafting import eagle3, hidden
from shoal.drafting.draft import read_draft
from shoal.drafting.eagle3 import Eagle3Drafter
from shoal.drafting.mtp import MtpDrafter
from shoal.drafting.protocol import DraftInputs
from shoal.engine.engine import Engine
from shoal.errors import UnsupportedModel
from shoal.lookahead.fixed import Fixed
from shoal.models.loading import wrap
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.testing import tiny_tokenizer
from shoal.testing.significance import chi_square
from shoal.types.requests import Request, Row
from shoal.types.trees import DraftTree


def loaded(place: Path) -> Runner:
    return wrap(AutoModelForCausalLM.from_pretrained(place).eval(), place.name)


@pytest.fixture(scope="module", params=PLAIN + HYBRID)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return loaded(save_mtp(tmp_path_factory.mktemp(request.param), request.param))


Proposal = tuple[list[int], list[int], list[Tensor]]
"""A row's tokens, its draft, and the q of each drafted token."""


def recorded(drafter: Eagle3Drafter) -> list[Proposal]:
    """What the drafter proposes from now on."""
    found: list[Proposal] = []
    real = drafter.propose

    def propose(inputs: DraftInputs) -> DraftTree:
        before = [list(row.tokens) for row in inputs.rows]
        tree = real(inputs)
        for b, (tokens, draft) in enumerate(zip(before, tree.drafts, strict=True)):
            if draft and tree.q is not None and len(tokens) > 1:  # a first token has no state
                found.append((tokens, list(draft), [q[b] for q in tree.q[: len(draft)]]))
        return tree

    drafter.propose = propose  # type: ignore[method-assign]
    return found


PROMPTS = [[(7 * i * i + number) % 260 for i in range(length)] for number, length in enumerate((1, 5, 11))]


def decoded(
    target: Runner, drafter: Any, rule: Rule, temperature: float, prompts: Sequence[Sequence[int]] = PROMPTS
) -> tuple[Engine, list[Row]]:
    """Groups that join one after the other and fill a batch of four rows, a row of which is cancelled; the others."""
    engine = Engine(target, drafter, Fixed(3 if drafter else 0), max_batch=4, rule=rule, chunk=4)
    rows: list[Row] = []
    for number, prompt in enumerate(prompts):
        limits = Limits(max_new_tokens=9 + number)
        rows += engine.submit(Request(tuple(prompt), 3, Sampling(temperature=temperature, seed=number), limits))
        engine.step()
    engine.cancel(rows[2:3])
    while engine.step():
        pass
    return engine, rows[:2] + rows[3:]


def largest_difference(target: Runner, drafter: Eagle3Drafter, proposals: Sequence[Proposal]) -> float:
    """Between the q that were proposed and those of the definition, at T = 2."""
    worst = 0.0
    for tokens, draft, q in proposals:
        right = [(logits / 2.0).softmax(-1) for logits in by_definition(target.hf, drafter._heads.layer, tokens, draft)]
        worst = max(worst, *(float((a - b).abs().max()) for a, b in zip(q, right, strict=True)))
    return worst


# ── what is drafted ─────────────────────────────────────────────────────────────────────────────────────────────────


def of_rejected_drafts(scores: Any, verdict: Any) -> list[Tensor]:
    """Hidden states of the last columns of a block, whatever was rejected."""
    return [states[-len(own) :] for states, own in zip(hidden._hidden(scores), hidden.kept(scores, verdict), strict=True)]


def of_another_row(scores: Any, verdict: Any) -> list[Tensor]:
    own = hidden.kept(scores, verdict)
    return [other[: len(one)] for one, other in zip(own, hidden._hidden(scores).roll(1, dims=0), strict=True)]


@torch.inference_mode()
def test_drafts_are_those_of_the_definition(target: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """In ragged batches with joins, cancellations and moves, after accepted and rejected drafts; wrong states are noticed."""
    drafter = MtpDrafter.for_target(target)
    proposals = recorded(drafter)
    engine, _ = decoded(target, drafter, Rejection(), 2.0)
    assert len(proposals) > 25
    assert 0 < engine.stats.accepted < engine.stats.drafted
    assert largest_difference(target, drafter, proposals) < 1e-4
    assert not drafter._own
    assert not drafter._prompts._of
    for wrong in (of_rejected_drafts, of_another_row):
        monkeypatch.setattr(eagle3, "kept", wrong)
        other = MtpDrafter.for_target(target)
        proposals = recorded(other)
        decoded(target, other, Rejection(), 2.0)
        assert largest_difference(target, other, proposals) > 1e-3, wrong


@pytest.mark.parametrize("architecture", ["deepseek-v3", "qwen3-next"])
def test_a_layer_that_knows_is_always_accepted(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target says turn[t] after t, and the layer turn[turn[t]] from the state of t: a state of another place is never right."""
    cycle = torch.randperm(32, generator=torch.Generator().manual_seed(1))
    target = loaded(
        save_mtp(tmp_path, architecture, vocab=32, turn=torch.empty_like(cycle).scatter(0, cycle, cycle.roll(-1)))
    )
    prompts = [cycle[first : first + length].tolist() for first, length in ((0, 2), (3, 5), (9, 11))]
    engine, rows = decoded(target, MtpDrafter.for_target(target), Coupled(), 0.0, prompts)
    stats = engine.stats
    whole = [*cycle.tolist(), *cycle.tolist()]
    assert all(row.tokens == whole[(start := whole.index(row.tokens[0])) : start + len(row.tokens)] for row in rows)
    assert stats.committed == stats.row_rounds + stats.accepted
    assert (stats.drafted, stats.accepted, stats.row_rounds) == (63, 63, 27)
    real = hidden._hidden
    monkeypatch.setattr(hidden, "_hidden", lambda scores: real(scores).roll(1, dims=1))
    shifted, _ = decoded(target, MtpDrafter.for_target(target), Coupled(), 0.0, prompts)
    assert (shifted.stats.drafted, shifted.stats.accepted) == (132, 28)


# ── exactness ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tree", ["", "rsd-s"])
def test_tokens_are_those_of_plain_decoding(target: Runner, tree: str) -> None:
    """Greedy by both rules, those of Transformers' `generate`; under the coupled rule at T > 0 as well."""
    for rule, temperature in ((Rejection(), 0.0), (Coupled(), 0.0), (Coupled(), 2.0)):
        drafter = MtpDrafter.for_target(target, tree=tree)
        assert bool(drafter.max_nodes) == bool(tree and target.takes_trees)
        if tree and not target.takes_trees:
            return  # chains, as without
        plain, expected = decoded(target, None, rule, temperature)
        engine, found = decoded(target, drafter, rule, temperature)
        assert [row.tokens for row in found] == [row.tokens for row in expected]
        stats = engine.stats
        assert stats.committed == stats.row_rounds + stats.accepted
        assert plain.stats.row_rounds == plain.stats.committed
        assert stats.drafted > stats.row_rounds
        assert 0 < stats.draft_passes <= 3 * stats.rounds
        for row in [] if temperature else found:
            ids = torch.tensor([row.request.prompt_ids])
            said = target.hf.generate(ids, max_new_tokens=row.new_tokens, do_sample=False)
            assert row.tokens == said[0].tolist()


@pytest.mark.parametrize("rule", [Rejection(), Coupled()], ids=["rejection", "coupled"])
@pytest.mark.parametrize("architecture", ["deepseek-v3", "qwen3-next"])
def test_two_tokens_have_their_law(architecture: str, rule: Rule, tmp_path: Path) -> None:
    """By enumeration; it would fail with probability 1e-6 if its seeds were drawn anew."""
    target = loaded(save_mtp(tmp_path, architecture, vocab=5))
    prompt = (1, 4, 2)
    with torch.inference_mode():
        every = target.hf(torch.tensor([[*prompt, first] for first in range(5)]), use_cache=False).logits / 2.0
    law = every[:, 2].softmax(-1).diagonal()[:, None] * every[:, 3].softmax(-1)
    engine = Engine(target, MtpDrafter.for_target(target), Fixed(2), max_batch=120, rule=rule)
    rows = engine.submit(Request(prompt, 1200, Sampling(temperature=2.0, seed=3), Limits(max_new_tokens=2)))
    while engine.step():
        pass
    assert chi_square(joint(rows, 5), law) > ALPHA
    assert 0 < engine.stats.accepted < engine.stats.drafted


# ── the way in ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_checkpoint_decides(tmp_path: Path) -> None:
    """`auto` takes the layer where there is one; sums join it; others are refused by name."""
    one, two = save_mtp(tmp_path / "one", "qwen3.5"), save_mtp(tmp_path / "two", "deepseek-v3", layers=2)
    none = save_mtp(tmp_path / "none", "deepseek-v3", layers=0)
    for place, draft, name in (
        (one, "auto", "mtp"),
        (none, "auto", "suffix"),
        (two, "auto", "suffix"),
        (one, "suffix+mtp", "suffix"),
    ):
        with shoal.load(place, draft, dtype="float32") as pair:
            assert pair.drafter_name is not None
            assert pair.drafter_name.startswith(name)
            found = pair.generate([1, 2, 3], 2, max_new_tokens=6, lookahead=2, temperature=0.0)
            assert (found.stats.draft_passes > 0) == ("mtp" in pair.drafter_name)
    draft = read_draft("mtp")
    assert draft is not None
    for place, message in ((none, "no multi-token-prediction layer"), (two, "has 2 multi-token-prediction layers: one is")):
        with pytest.raises(UnsupportedModel, match=message):
            draft.require_fit(loaded(place))


@pytest.mark.parametrize("kind", ["gemma4_assistant", "gemma4_unified_assistant", "muse_glimmer_assistant"])
def test_assistants_are_refused_by_name(kind: str, saved_pair: tuple[Path, Path], tmp_path: Path) -> None:
    config: dict[str, Any] = {"model_type": kind}
    if kind.startswith("gemma4"):
        config["text_config"] = {
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 30,
        }
    (tmp_path / "config.json").write_text(json.dumps(config))
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=rf"\({kind}\) is not supported: it drafts from the keys and values"):
        shoal.load(saved_pair[0], str(tmp_path), dtype="float32")
