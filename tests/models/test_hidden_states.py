"""Hidden states of the target for drafters that ask for them: the right ones at every committed position, and none otherwise.

Tests of: models.passes, drafting.trained_heads, sampling.distributions.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from shoal.config import Limits, Sampling
from shoal.drafting import trained_heads
from shoal.drafting.trained_heads import PromptStates, kept_states, last_kept
from shoal.engine.engine import Engine
from shoal.lookahead.controller import Fixed
from shoal.models import prompt_passes
from shoal.models.loading import wrap
from shoal.models.passes import choose_passes
from shoal.models.runner import Runner
from shoal.native.build import missing
from shoal.sampling.acceptance import Coupled
from shoal.sampling.distributions import Scores
from shoal.testing import tiny_model
from shoal.testing.drafters import RandomTrees
from shoal.types.requests import Request, Row
from shoal.types.rounds import PrefillChunk
from shoal.types.trees import Verdict

V = 260
LAYERS = (0, 1, 2)
"""Of a model of two: its embeddings, the output of the first, what the head gets."""
KINDS = ("llama modules", "llama native", "gpt2", "gemma2", "codegen")


class Recorder(RandomTrees):
    """Proposes random trees, some of whose nodes are what a greedy target says, and keeps the hidden states of every row."""

    hidden_layers = LAYERS

    def __init__(self, target: Runner) -> None:
        def greedy(history: Sequence[int]) -> int:
            return int(target.hf(torch.tensor([list(history)]), use_cache=False).logits[0, -1].argmax())

        super().__init__(V, seed=1, max_nodes=6, guess=greedy)
        self.max_nodes = 6 if target.takes_trees else 0
        self.prompts, self.of_rows = PromptStates(), dict[Row, list[Tensor]]()

    def read_prompts(self, chunks: Sequence[PrefillChunk], hidden: Sequence[Tensor]) -> None:
        self.prompts.read(chunks, hidden)

    def observe(self, rows: Sequence[Row], scores: Scores, verdict: Verdict) -> None:
        for row, states, last in zip(rows, kept_states(scores, verdict), last_kept(scores, verdict), strict=True):
            if row not in self.of_rows:
                prompt = self.prompts.of(row)
                self.of_rows[row] = [] if prompt is None else [prompt]
            self.of_rows[row].append(states)
            assert torch.equal(states[-1], last)

    def end(self, rows: Sequence[Row]) -> None:
        self.prompts.leave(rows)


def target_of(kind: str) -> Runner:
    name, _, how = kind.partition(" ")
    model = tiny_model(name)
    runner = wrap(model.float() if how == "native" else model.double(), "tiny", "auto")
    choose_passes(runner, {"modules": "modules", "native": "on", "": "auto"}[how], owned=True)
    return runner


def recorded(target: Runner, sharing: str = "auto", lookahead: int = 3) -> tuple[Engine, Recorder, list[Row]]:
    """Groups that join one after the other, with rows that are cancelled, prompts of one token and of several chunks."""
    drafter = Recorder(target)
    engine = Engine(target, drafter, Fixed(lookahead), max_batch=3, rule=Coupled(), prefix_sharing=sharing, chunk=4)
    rows: list[Row] = []
    for number, length in enumerate((1, 5, 11)):
        prompt = tuple((7 * i * i + number) % V for i in range(length))
        sampling = Sampling(temperature=0.0 if number else 0.5, seed=number)
        rows += engine.submit(Request(prompt, 2, sampling, Limits(max_new_tokens=9 + number)))
        engine.step()
    engine.cancel(rows[2:4])
    while engine.step():
        pass
    return engine, drafter, rows


def largest_difference(target: Runner, drafter: Recorder) -> float:
    """Between what was kept of rows and what a pass over the whole row computes."""
    worst = 0.0
    for row in drafter.of_rows:
        found = torch.cat(drafter.of_rows[row])
        states = target.hf(torch.tensor([row.tokens]), use_cache=False, output_hidden_states=True).hidden_states
        right = torch.cat([states[layer][0] for layer in LAYERS], dim=-1)[: len(row.tokens) - 1]
        assert len(found) >= len(right)  # a row may end before what was accepted
        worst = max(worst, float((found[: len(right)] - right).abs().max() / right.std()))
    return worst


@pytest.mark.parametrize("sharing", ["copied", "shared"])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_every_committed_position_has_its_hidden_states(kind: str, sharing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of four tokens take two passes each."""
    if kind.endswith("native") and missing():
        pytest.skip(f"needs compiler: {missing()}")
    if kind not in ("llama modules", "llama native") and sharing == "shared":
        return  # said by the tests of shared prompts
    monkeypatch.setattr(prompt_passes, "MAX_PASS_WIDTH", 3)
    target = target_of(kind)
    engine, drafter, rows = recorded(target, sharing)
    assert largest_difference(target, drafter) < (1e-4 if kind.endswith("native") else 1e-5)
    assert len(drafter.of_rows) == len(rows) - 1  # one was cancelled before its first round
    assert engine.stats.accepted >= 8
    assert not drafter.prompts._of
    assert not drafter.prompts._left


@torch.inference_mode()
def test_a_shifted_hidden_state_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sabotage: the column before the one that was kept, as if the block did not begin with the last token."""
    real = trained_heads._hidden
    monkeypatch.setattr(trained_heads, "_hidden", lambda scores: real(scores).roll(1, dims=1))
    target = target_of("llama modules")
    _, drafter, _ = recorded(target)
    assert largest_difference(target, drafter) > 0.1


@torch.inference_mode()
def test_none_are_kept_unless_they_are_asked_for() -> None:
    """Neither by a runner, nor by an engine without such a drafter, nor by the runner that engines are forked from."""
    target = target_of("llama modules")
    for drafter in (None, RandomTrees(V)):
        engine = Engine(target, drafter, Fixed(2), rule=Coupled())
        engine.submit(Request((1, 2, 3), 2, Sampling(seed=0), Limits(max_new_tokens=4)))
        engine.step()
        assert engine.target.hidden is None
    engine, _, _ = recorded(target)
    assert engine.target.hidden is not None
    assert (target.hidden_layers, target.hidden, target.fork().hidden_layers) == ((), None, ())
    off = Engine(target, Recorder(target), Fixed(0))  # which never drafts
    assert off.target.hidden_layers == ()


@torch.inference_mode()
def test_passes_that_have_none_step_aside() -> None:
    """Captured rounds, and passes in one call; the load report names it."""
    target = target_of("llama modules")
    target.capture_rounds("eager")
    engine, drafter, _ = recorded(target)
    assert largest_difference(target, drafter) < 1e-9
    assert engine.target.captures is not None
    assert not engine.target.captures.ran
    assert engine.target.capture_failure == "a drafter reads hidden states"
    assert target.capture_failure is None
