"""A target that drafts with a part of its cache: drafts are what it says of the first and the most recent tokens at their true
positions, in ragged batches; the output is that of the whole cache.

Tests of: drafting.target_keys, drafting.draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from exits import ALPHA, PASSES, V, model_of, run, runner_of
from proposals import p_of_two_tokens, recorded
from shoal.config import Limits, Sampling
from shoal.drafting.target_keys import ROOM, ReducedCacheDrafter, self_drafter
from shoal.engine.engine import Engine
from shoal.errors import RequestError, UnsupportedModel
from shoal.lookahead.controller import by_name
from shoal.models.cache import SlotCache
from shoal.models.loading import wrap
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Coupled, Rejection
from shoal.testing import tiny_model
from shoal.testing.drafters import check_drafter
from shoal.types.requests import Request


@pytest.fixture(scope="module", params=PASSES)
def target(request: pytest.FixtureRequest) -> Runner:
    return runner_of(request.param)


@pytest.fixture(scope="module")
def quick() -> Runner:
    return runner_of(PASSES[-1])


@torch.inference_mode()
def by_definition(target: Runner, tokens: Sequence[int], draft: Sequence[int], window: int, sinks: int) -> Tensor:
    """Logits [drafts, vocab]: committed tokens but the last see all before them, the others the first ones, the most recent
    committed ones, and each other."""
    fed, known = [*tokens, *draft[:-1]], len(tokens) - 1
    seen = torch.ones(len(fed), len(fed), dtype=torch.bool).tril()
    seen[known:, sinks : max(sinks, known - window)] = False
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    return target.hf(torch.tensor([fed]), attention_mask=mask, use_cache=False).logits[0, known:]  # type: ignore[no-any-return]


@pytest.mark.parametrize("sharing", ["copied", "shared"])
def test_drafts_are_those_of_the_part(target: Runner, sharing: str) -> None:
    """In ragged batches with joins, cancellations and moves, over prompts of their own and shared ones."""
    drafter = ReducedCacheDrafter(3, 2)
    proposals = recorded(drafter)
    engine, _ = run(target, drafter, Rejection(), 2.0, 4, sharing=sharing)
    assert 0 < engine.stats.accepted < engine.stats.drafted
    assert len(proposals) > 20
    assert max(len(tokens) for tokens, _, _ in proposals) > 15
    others = 0.0
    for tokens, draft, q in proposals:
        right, other = ((by_definition(target, tokens, draft, window, 2) / 2.0).softmax(-1) for window in (3, 4))
        assert float((torch.stack(q) - right).abs().max()) < 1e-4
        others = max(others, float((right - other).abs().max()))
    assert others > 0.01


@pytest.mark.parametrize("max_batch", [1, 9])
def test_tokens_are_those_of_plain_decoding(quick: Runner, max_batch: int) -> None:
    target = quick
    for rule, temperature in ((Rejection(), 0.0), (Coupled(), 1.5)):
        _, expected = run(target, None, rule, temperature, max_batch)
        for window, sinks, exit in ((3, 2, None), (1, 0, None), (4, 1, 2)):
            engine, found = run(target, ReducedCacheDrafter(window, sinks, exit), rule, temperature, max_batch)
            assert found == expected
            assert engine.stats.drafted > engine.stats.accepted > 0


def test_all_is_accepted_where_the_part_is_the_whole(quick: Runner) -> None:
    target = quick
    for rule, temperature in ((Rejection(), 0.0), (Rejection(), 1.5), (Coupled(), 1.5)):
        for window, sinks in ((64, 0), (12, 12)):
            engine, _ = run(target, ReducedCacheDrafter(window, sinks), rule, temperature)
            assert engine.stats.accepted == engine.stats.drafted > 0


def test_a_window_off_by_one_costs_drafts_alone(quick: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sabotage: the most recent token that was computed is not seen. Tokens stay what they are, and fewer are accepted."""
    target = quick
    engine, expected = run(target, ReducedCacheDrafter(30, 4), Coupled(), 1.0)
    take = SlotCache.take

    def shifted(self: SlotCache, *arguments: object) -> None:
        take(self, *arguments)  # type: ignore[arg-type]
        for slot, length in enumerate(self.lengths):
            if length:
                self.gaps[slot] += 1
                self.lengths[slot] -= 1

    monkeypatch.setattr(SlotCache, "take", shifted)
    other, found = run(target, ReducedCacheDrafter(30, 4), Coupled(), 1.0)
    assert found == expected
    assert engine.stats.accepted == engine.stats.drafted
    assert other.stats.accepted < 0.9 * other.stats.drafted


@pytest.mark.slow
def test_tokens_have_the_law_of_the_target() -> None:
    """Two tokens by rejection sampling against the target's own logits."""
    assert p_of_two_tokens(model_of(4), ReducedCacheDrafter(1, 1), (1, 2, 3, 0, 2, 1), 1200) > ALPHA


def test_the_protocol_is_kept(quick: Runner) -> None:
    assert check_drafter(lambda: ReducedCacheDrafter(4, 1), V, target=quick) > 100


@pytest.mark.parametrize("architecture", ["gpt2", "gemma2", "mistral-sliding", "deepseek-v3"])
def test_other_architectures(architecture: str) -> None:
    """Learned positions, windows of their own, values narrower than keys: with the whole as the part all is accepted."""
    target = wrap(tiny_model(architecture, vocab_size=V), architecture)
    _, expected = run(target, None, Coupled(), 1.5)
    for window in (3, 64):
        engine, found = run(target, ReducedCacheDrafter(window, 1), Coupled(), 1.5)
        assert found == expected
        assert (engine.stats.accepted == engine.stats.drafted > 0) == (window == 64)


def test_memory_is_that_of_the_part(quick: Runner) -> None:
    """However long the rows are; and no prompt is computed."""
    drafter = ReducedCacheDrafter(8, 2)
    engine = Engine(quick, drafter, by_name(3), max_batch=2)
    rows = engine.submit(Request(tuple(i % V for i in range(90)), 2, Sampling(seed=1), Limits(max_new_tokens=20)))
    engine.step()
    assert drafter.memory is not None
    held = drafter.memory.allocated_bytes
    assert held <= 4 * (8 + 2 + ROOM) * engine.target.memory.token_bytes < engine.target.memory.cache_bytes(4, 110)
    while engine.step():
        pass
    assert drafter.memory.allocated_bytes == held
    assert all(len(row.tokens) == 110 for row in rows)
    assert engine.stats.prefill_tokens == 89


def test_what_is_refused(quick: Runner) -> None:
    target = quick
    with pytest.raises(RequestError, match=r"exit must be in 1\.\.2, got 3"):
        self_drafter(target, 3, 8)
    positionless = target.fork()
    positionless.takes_trees = False
    with pytest.raises(UnsupportedModel, match="takes no position for each token"):
        self_drafter(positionless, window=8)
