"""The law of the samples through real models: Transformers forwards, unequal vocabularies, captured rounds, `auto`, 8 and 16 bits.

Each case draws N rows of two tokens and compares their counts with the law that the target's own logits give. All are
deterministic (fixed seeds, no clock in a decision): each would fail with probability ALPHA if the seeds were drawn anew.
Power: a law that is off by 7 % in total variation is noticed, see `test_the_power_of_these_tests`; one that is off by 3 %
is by `test_joint_law_at_full_power` of test_exact_distribution, over tables.

Tests of: engine.verify, sampling.distributions, types.rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import shoal
from enumeration import chi_square
from laws import joint, shifted
from recorder import Recorder
from shoal.config import Limits, Sampling
from shoal.engine.engine import Engine
from shoal.lookahead.controller import Auto, Controller, Fixed, PairCosts
from shoal.models import loading
from shoal.models.compiled import EXECUTORS
from shoal.models.quantize import quantized
from shoal.models.runner import Runner
from shoal.sampling.uniforms import UniformsAhead
from shoal.testing.drafters import engine_of
from shoal.types.requests import Request, Row
from shoal.types.rounds import Outcome

ALPHA = 1e-3
N = 4_000
VOCAB = 4
PROMPT = (1, 2, 3)


@cache
def llama(vocab: int, seed: int) -> Any:
    """A one-layer Llama whose next token is uncertain and follows from all before it."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, pad_token_id=0, bos_token_id=None, eos_token_id=None,
        initializer_range=0.4,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def runner(hf: Any, executor: str | None = None) -> Runner:
    made = loading.wrap(hf, "tiny", checked=False)
    made.capture_rounds(executor)
    return made


@cache
def law(vocab: int = VOCAB) -> Tensor:
    """The law of two new tokens by plain forwards of the target, [vocab, vocab] float64."""
    target = llama(vocab, 0)
    with torch.inference_mode():
        first = target(torch.tensor([PROMPT])).logits[0, -1].double().softmax(-1)
        second = target(torch.tensor([[*PROMPT, token] for token in range(vocab)])).logits[:, -1].double().softmax(-1)
    return first[:, None] * second


def sampled(drafter: Runner, controller: Controller | Fixed, target: Runner | None = None) -> tuple[Engine, list[Row]]:
    """N rows of two tokens by rejection sampling."""
    engine = engine_of(target or runner(llama(VOCAB, 0)), drafter, controller, max_batch=200)
    rows = engine.submit(Request(PROMPT, N, Sampling(seed=11), Limits(max_new_tokens=2)))
    while engine.step():
        pass
    assert 0 < engine.stats.accepted < engine.stats.drafted  # both ways of a round were taken
    return engine, rows


def test_the_power_of_these_tests() -> None:
    """Proportional shifts are the hardest to see at a given total variation; of 20 such samples each is found."""
    wrong = shifted(law(), 0.07)
    assert float((wrong - law()).abs().sum() / 2) == pytest.approx(0.07)
    for seed in range(20):
        drawn = torch.multinomial(wrong.flatten(), N, True, generator=torch.Generator().manual_seed(seed))
        assert chi_square(torch.bincount(drawn, minlength=VOCAB**2).view(VOCAB, VOCAB), law()) < ALPHA


@pytest.mark.slow(but=["7"])
@pytest.mark.parametrize("width", [VOCAB - 1, VOCAB, VOCAB + 3])
def test_drafters_of_unequal_vocabularies(width: int) -> None:
    """Too few ids are filled up, too many cut away before the softmax: q must be what was drawn from."""
    _, rows = sampled(runner(llama(width, 1)), Fixed(1))
    assert chi_square(joint(rows, VOCAB), law()) > ALPHA


@pytest.fixture
def _graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXECUTORS, "graphed", Recorder)


@pytest.mark.slow(but=["eager-4"])
@pytest.mark.usefixtures("_graphs")
@pytest.mark.parametrize("width", [VOCAB, VOCAB + 3])
@pytest.mark.parametrize("executor", ["eager", "graphed"])
def test_captured_steps_of_a_drafter(executor: str, width: int) -> None:
    """Rounds as functions of buffers, and captured ones that write each result over the last."""
    drafter = runner(llama(width, 1), executor)
    engine, rows = sampled(drafter, Fixed(1), runner(llama(VOCAB, 0), executor))
    assert drafter.captures is not None
    assert drafter.captures.failures == []
    assert drafter.captures.ran.total() >= engine.stats.draft_passes > 0
    assert chi_square(joint(rows, VOCAB), law()) > ALPHA


@pytest.mark.slow
def test_an_int8_drafter() -> None:
    copy, how = quantized(llama(VOCAB, 1), "int8")
    assert how == "int8"
    _, rows = sampled(runner(copy), Fixed(1))
    assert chi_square(joint(rows, VOCAB), law()) > ALPHA


@pytest.mark.slow
def test_a_bfloat16_drafter() -> None:
    drafter = LlamaForCausalLM(llama(VOCAB, 1).config).eval()
    drafter.load_state_dict(llama(VOCAB, 1).state_dict())
    _, rows = sampled(runner(drafter.to(torch.bfloat16)), Fixed(1))
    assert chi_square(joint(rows, VOCAB), law()) > ALPHA


class Timed(Auto):
    """`auto` on a clock of its own, so that its decisions are the same in every run: a position costs 1, a drafter step 0.2."""

    def learn(self, outcome: Outcome) -> None:
        positions = sum(1 + drafted for drafted in outcome.drafted)
        drafting = 0.2 * outcome.steps
        super().learn(Outcome(outcome.drafted, outcome.accepted, outcome.steps, 1 + 1e-4 * positions + drafting, drafting))


def test_auto_under_rejection() -> None:
    """Rows stop drafting by their confidence, and numbers of drafts thrown away are never used again."""
    engine, rows = sampled(runner(llama(VOCAB, 1)), Timed(PairCosts(packed=True)))
    assert engine.lookahead.adaptive
    assert 0 < engine.stats.drafted < N  # some rows drafted, some were stopped
    assert chi_square(joint(rows, VOCAB), law()) > ALPHA


def test_the_noise_of_auto_is_numbered_by_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of plain rounds come from a table, those of rounds with drafts from the rule."""
    engine = engine_of(runner(llama(VOCAB, 0)), runner(llama(VOCAB, 1)), Auto(PairCosts(packed=True)), max_batch=4)
    widths, read = set(), UniformsAhead.of_round

    def numbered(self: UniformsAhead, rows: Sequence[Row], width: int, numbered: bool, later: int = 0) -> torch.Tensor:
        found = read(self, rows, width, numbered, later)
        firsts, rounds = [len(row.tokens) for row in rows], [row.rounds for row in rows]
        assert torch.equal(found, engine.rule.uniforms([row.seed for row in rows], firsts, width, rounds))
        widths.add(width)
        return found

    monkeypatch.setattr(UniformsAhead, "of_round", numbered)
    engine.submit(Request(PROMPT, 4, Sampling(seed=1), Limits(max_new_tokens=6)))
    while engine.step():
        pass
    assert min(widths) == 1 < max(widths)


# ── through Transformers' own `generate` ────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_generate_with_custom_generate() -> None:
    """`do_sample=True` really samples, by the coupled rule there."""
    torch.manual_seed(0)
    ids = llama(VOCAB, 0).generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, 3, dtype=torch.long), do_sample=True, top_k=0, max_new_tokens=2,
        num_return_sequences=N, custom_generate=shoal.custom_generate, draft_model=llama(VOCAB + 3, 1), lookahead=1, max_batch=200,
    )  # fmt: skip
    counts = torch.bincount(ids[:, 3] * VOCAB + ids[:, 4], minlength=VOCAB**2).view(VOCAB, VOCAB)
    assert chi_square(counts, law()) > ALPHA


# ── what a drafter says of itself ───────────────────────────────────────────────────────────────────────────────────


class Listening(Controller):
    """A controller of drafts of one token that notes the confidences it is told."""

    limit = 1
    adaptive = True

    def __init__(self) -> None:
        self.told: list[list[float]] = []

    def lengths(self, rows: Any, waiting: int) -> list[int]:
        return [min(self.limit, row.max_draft_length) for row in rows]

    def shorten(self, position: int, confidence: Any) -> list[int]:
        self.told.append(list(confidence))
        return [self.limit] * len(confidence)

    def learn(self, outcome: Outcome) -> None:
        """Nothing."""


@pytest.fixture(params=[None, "eager"], ids=["stages", "captured"])
def executor(request: pytest.FixtureRequest) -> Iterator[str | None]:
    return request.param


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_confidence_is_the_highest_probability_not_that_of_the_drawn_token(executor: str | None, temperature: float) -> None:
    drafter = llama(VOCAB, 1)
    with torch.inference_mode():
        highest = float(drafter(torch.tensor([PROMPT])).logits[0, -1].softmax(-1).max())
    controller = Listening()
    engine = engine_of(runner(llama(VOCAB, 0), executor), runner(drafter, executor), controller, max_batch=200)
    engine.submit(Request(PROMPT, 64, Sampling(seed=2, temperature=temperature), Limits(max_new_tokens=2)))
    engine.step()
    assert controller.told[0] == pytest.approx([highest] * 64, rel=1e-5)
