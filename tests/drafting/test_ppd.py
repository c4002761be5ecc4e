"""Prompt tokens of PPD: what the drafter reads is what the target says behind them, and nothing else of the pass or the cache knows
of them; trees of the size that pays; refused where they do not fit.

Tests of: models.executor, drafting.ppd, drafting.shapes, models.cache.pass_plan, drafting.draft.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from drafts import decoded as decoded_by
from exits import PASSES, difference_to_anew, runner_of
from prompt_tokens import SHARES, scripted_tokens
from proposals import require_every_way_in
from shoal.config import Limits, Sampling
from shoal.drafting.ppd import PpdDrafter, PromptTokens, load_ppd, pass_times
from shoal.drafting.protocol import Drafter
from shoal.drafting.shapes import chosen, ends, placed, planned, reached
from shoal.engine.engine import Engine
from shoal.errors import ModelError, PairMismatch, RequestError, ShoalError, UnsupportedModel
from shoal.lookahead.controller import by_name
from shoal.models.cache import SlotCache, pass_plan
from shoal.models.loading import wrap
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.sampling.distributions import Scores
from shoal.testing import save_pair, tiny_model
from shoal.testing.drafters import check_drafter
from shoal.testing.scripted import History, hashed, scripted
from shoal.types.requests import Request, Row
from shoal.types.trees import Verdict

V, M = 5, 3
RULES = pytest.mark.parametrize("rule", [Rejection(), Coupled()], ids=["rejection", "coupled"])


def foretelling(script: History, vocab: int) -> History:
    """What a target says that knows prompt tokens: behind i of them what it says i positions on, if all before are most probable.
    A token that sees one makes it say something else."""

    def said(ids: tuple[int, ...]) -> Tensor:
        behind = sum(id >= vocab for id in ids)
        if ids[len(ids) - behind :] != tuple(range(vocab, vocab + behind)):
            return script(ids)
        ids = ids[: len(ids) - behind]
        for _ in range(behind):
            ids = (*ids, int(script(ids).argmax()))
        return script(ids)

    return said


def decoded(drafter: Drafter | None, rule: Rule, max_batch: int, temperature: float) -> tuple[Engine, list[list[int]]]:
    target = scripted(foretelling(hashed(V, spread=3.0), V), V)
    return decoded_by(drafter, rule, max_batch, temperature=temperature, target=target, prompts=(1, 4, 7))


# ── exactness ───────────────────────────────────────────────────────────────────────────────────────────────────────


@RULES
@pytest.mark.parametrize(("max_batch", "nodes"), [(1, 4), (3, 12), (9, 12)])
def test_tokens_are_those_of_plain_decoding(nodes: int, max_batch: int, rule: Rule) -> None:
    """In ragged batches with joins and cancellations; a scripted target says something else where a token sees a prompt token."""
    for temperature in (0.0, 0.7):
        plain, expected = decoded(None, rule, max_batch, temperature)
        engine, found = decoded(drafter := PpdDrafter(scripted_tokens(), nodes), rule, max_batch, temperature)
        assert found == expected
        stats = engine.stats
        assert 0 < stats.accepted <= stats.drafted
        assert stats.committed == stats.row_rounds + stats.accepted
        assert stats.row_rounds < plain.stats.row_rounds == plain.stats.committed
        assert (stats.draft_passes, stats.target_passes) == (0, stats.rounds)
        assert stats.acceptance_length > (1.6 if nodes == 4 else 2.2 if not temperature else 1.7)
        assert not drafter._known
        assert not drafter._placed


def test_the_protocol_is_kept() -> None:
    target = scripted(foretelling(hashed(V), V), V)
    for nodes in (3, 12):
        assert check_drafter(lambda nodes=nodes: PpdDrafter(scripted_tokens(), nodes), V, target=target) > 20  # type: ignore[misc]


def test_a_token_that_sees_a_prompt_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sabotage: the root sees the last column of its row, which is a prompt token wherever there are some."""
    target = wrap(tiny_model("llama", vocab_size=V), "tiny", checked=False)
    _, expected = decoded_by(None, Coupled(), 3, target=target, prompts=(1, 4))
    real = pass_plan.layout

    def seen(parents: Any, counts: Sequence[int]) -> Any:
        depths, words = real(parents, counts)
        words[:, 0] |= np.left_shift(1, np.array(counts) - 1)
        return depths, words

    engine, found = decoded_by(PpdDrafter(random_tokens(target), 8), Coupled(), 3, target=target, prompts=(1, 4))
    assert found == expected
    monkeypatch.setattr(pass_plan, "layout", seen)
    engine, found = decoded_by(PpdDrafter(random_tokens(target), 8), Coupled(), 3, target=target, prompts=(1, 4))
    assert engine.stats.drafted > 0
    assert found != expected


def test_a_prompt_token_that_stays_in_the_cache_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sabotage: of a path that ends at the root, the prompt token behind it is kept in place of it."""
    real = SlotCache.keep

    def kept(self: SlotCache, slot: int, length: int, columns: Sequence[int]) -> None:
        real(self, slot, length, [1] if list(columns) == [0] and self.lengths[slot] > length + 1 else columns)

    monkeypatch.setattr(SlotCache, "keep", kept)
    with pytest.raises(AssertionError, match="sees in cell"):
        decoded(PpdDrafter(scripted_tokens(), 12), Coupled(), 3, 0.7)


class Recorder(PpdDrafter):
    """Keeps after each round the row's tokens and what prompt tokens said."""

    def __init__(self, tokens: PromptTokens, nodes: int) -> None:
        super().__init__(tokens, nodes)
        self.said: list[tuple[list[int], list[Any]]] = []

    def observe(self, rows: Sequence[Row], scores: Scores, verdict: Verdict) -> None:
        super().observe(rows, scores, verdict)
        self.said += [(list(row.tokens), self._known[row]) for row in rows if row in self._known]


def random_tokens(runner: Runner, count: int = M) -> PromptTokens:
    """Vectors as large as embeddings are."""
    weight = runner.hf.get_input_embeddings().weight
    noise = torch.randn(count, weight.shape[1], generator=torch.Generator().manual_seed(1))
    return PromptTokens((noise * weight.float().std()).to(runner.dtype), SHARES[:count])


@torch.inference_mode()
def by_definition(runner: Runner, tokens: Sequence[int], vectors: Tensor) -> Tensor:
    """What the target says behind each of the vectors, which stand behind these tokens: by its own attention, [vectors, vocab]."""
    known = runner.hf.get_input_embeddings()(torch.tensor([list(tokens)]))
    logits = runner.hf(inputs_embeds=torch.cat([known, vectors[None]], dim=1), use_cache=False).logits
    return torch.as_tensor(logits[0, -len(vectors) :])


def generated(target: Runner, drafter: Drafter | None, rule: Rule, temperature: float) -> tuple[Engine, list[list[int]]]:
    engine = Engine(target, drafter, by_name(3 if drafter else "off"), max_batch=3, rule=rule, prefix_sharing="shared")
    rows: list[Row] = []
    for number, length in enumerate((2, 6)):
        prompt = tuple((3 * i * i + 1) % target.vocab_size for i in range(length))
        limits = Limits(max_new_tokens=10 + 4 * number)
        rows += engine.submit(Request(prompt, 3, Sampling(temperature=temperature, seed=number), limits))
        engine.step()
    while engine.step():
        running = [row for row in rows[:2] if row.finish_reason is None and row.slot >= 0]
        if drafter is not None:
            assert all(difference_to_anew(engine, row) < 1e-4 for row in running)
    return engine, [row.tokens for row in rows]


@pytest.fixture(scope="module", params=PASSES)
def target(request: pytest.FixtureRequest) -> Runner:
    """By its modules, and by kernels in C."""
    return runner_of(request.param)


def test_what_is_read_is_what_the_target_says_behind_prompt_tokens(target: Runner) -> None:
    """Over shared prompts, behind roots and nodes; the cache stays that of plain decoding."""
    tokens = random_tokens(target)
    for rule, temperature in ((Coupled(), 1.5), (Rejection(), 0.0)):
        _, expected = generated(target, None, rule, temperature)
        engine, found = generated(target, drafter := Recorder(tokens, 12), rule, temperature)
        assert found == expected
        assert engine.stats.drafted > 0
        require_said(target, tokens, drafter)


def require_said(target: Runner, tokens: PromptTokens, drafter: Recorder) -> None:
    assert len(drafter.said) > 10
    assert len({len(known) for _, known in drafter.said}) > 1
    for row, known in drafter.said[::3]:
        right = by_definition(target, row[:-1], tokens.vectors[: len(known)]).softmax(-1)
        for own, choices in zip(right, known, strict=True):
            assert [float(own[token]) for token, _ in choices] == pytest.approx([chance for _, chance in choices], abs=1e-4)


@pytest.mark.parametrize("architecture", ["gpt2", "gemma2", "opt", "mixtral"])
def test_other_architectures(architecture: str) -> None:
    """With learned positions, scaled embeddings and windows, or experts."""
    target = wrap(tiny_model(architecture, vocab_size=29), architecture)
    tokens = random_tokens(target)
    _, expected = generated(target, None, Coupled(), 1.5)
    engine, found = generated(target, drafter := Recorder(tokens, 12), Coupled(), 1.5)
    assert found == expected
    assert engine.stats.drafted > 0
    if architecture != "gemma2":  # whose own passes cap scores otherwise than the eager ones
        require_said(target, tokens, drafter)


def test_columns_that_are_nan_propose_nothing() -> None:
    """What they wrote goes; rows go on as in plain decoding."""
    script = hashed(V)
    broken = scripted(lambda ids: script(ids) * (torch.nan if ids[-1] >= V else 1.0), V)
    _, expected = decoded_by(None, Coupled(), 3, target=broken, prompts=(1, 4))
    engine, found = decoded_by(PpdDrafter(scripted_tokens(), 6), Coupled(), 3, target=broken, prompts=(1, 4))
    assert found == expected
    assert engine.stats.drafted == 0


def test_captured_rounds_step_aside() -> None:
    target = wrap(tiny_model("llama", vocab_size=29), "tiny", checked=False)
    _, expected = generated(target, None, Coupled(), 1.5)
    target.capture_rounds("eager")
    engine, found = generated(target, PpdDrafter(random_tokens(target), 12), Coupled(), 1.5)
    assert found == expected
    assert engine.target.capture_failure == "a drafter feeds vectors"
    assert target.capture_failure is None
    assert (target.vectors, engine.target.fork().vectors) == (None, None)


# ── sizes of trees ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_plans_by_hand() -> None:
    """One prompt token that is right 8 times of 10. With 2 columns it stands behind the candidate: rounds of 1.8 tokens, and of 1
    after each candidate that was wrong, 5 of 6. With 3 columns it stands behind the root, too: each round has 1.8."""
    two, three = planned(((0.8,),), 2), planned(((0.8,),), 3)
    assert (two.candidates, three.candidates) == ((0, 1), (0, 1))
    assert two.tokens == pytest.approx(1 / 6 + 1.8 * 5 / 6)
    assert three.tokens == pytest.approx(1.8)
    assert planned(((0.04,),), 4).tokens == pytest.approx(1.0)  # paths so improbable are not proposed
    perfect = planned(((1.0,), (1.0,), (1.0,)), 12)
    assert perfect.tokens == pytest.approx(4.0, abs=1e-2)
    for shares in (SHARES, ((0.3, 0.1), (0.1, 0.05))):
        found = [planned(tuple(shares), columns).tokens for columns in range(1, 25)]
        assert all(a <= b + 1e-9 for a, b in pairwise(found))
        assert 1.0 <= found[0] < found[-1]


def test_where_paths_end() -> None:
    reach = reached([-1, 0, -1], [0.5, 0.6, 0.3])
    assert reach == pytest.approx([1.0, 0.5, 0.3, 0.3])
    assert ends([-1, 0, -1], reach) == pytest.approx([0.2, 0.2, 0.3, 0.3])
    assert placed([0.1, 0.3, 0.6], [1.0, 0.4], 3, [2, 2, 2]) == [0, 1, 2]
    assert placed([0.1, 0.3, 0.6], [1.0, 0.4], 9, [2, 0, 1]) == [2, 0, 1]
    assert placed([0.001, 0.999], [1.0], 9, [1, 1]) == [0, 1]
    assert placed([1.0], [], 9, [3]) == [0]


@pytest.mark.parametrize("columns", [4, 12])
def test_rounds_bring_what_was_planned(columns: int) -> None:
    """A target whose prompt tokens guess right in 6 of 10 cases each, independently: the Markov chain is that of the engine."""
    script, share = hashed(V), 0.6
    right = foretelling(script, V)

    def said(ids: tuple[int, ...]) -> Tensor:
        if ids[-1] < V:
            return script(ids)
        logits, draw = right(ids), np.random.default_rng((7, *ids)).random()
        best = (int(logits.argmax()) + (draw >= share)) % V
        others = torch.full((V,), (1 - share) / (V - 1), dtype=torch.float64)
        return others.index_fill(0, torch.tensor(best), share).log()

    drafter = PpdDrafter(scripted_tokens(shares=((share,),) * M), columns)
    engine = Engine(scripted(said, V), drafter, by_name(M), max_batch=13, rule=Coupled())
    for prompt in range(0, V * V, 2):
        engine.submit(Request((prompt % V, prompt // V), 1, Sampling(temperature=0.0), Limits(max_new_tokens=40)))
    while engine.step():
        pass
    expected = planned(((share,),) * M, columns).tokens
    assert engine.stats.acceptance_length == pytest.approx(expected, rel=0.08)
    assert expected > 1.5


def test_the_size_that_pays_is_taken() -> None:
    flat = chosen(SHARES, lambda columns: 1.0)
    assert flat is not None
    assert flat.columns == 32
    some = chosen(SHARES, lambda columns: 1.0 + 0.05 * columns)
    assert some is not None
    assert 2 <= some.columns <= 12
    assert chosen(SHARES, lambda columns: 1.0 + columns) is None
    asked: list[int] = []

    def dear(rows: int) -> Callable[[int], float]:
        asked.append(rows)
        return lambda columns: 1.0 + (columns if rows > 4 else 0.02 * columns)

    plain = decoded(None, Coupled(), 9, 0.7)[1]
    engine, found = decoded(PpdDrafter(scripted_tokens(), 0, dear), Coupled(), 9, 0.7)
    assert found == plain
    assert len(asked) == len({*asked})
    assert {*asked} <= {1, 2, 4, 8, 16}
    assert engine.stats.drafted > 0  # while at most 4 rows run
    never, _ = decoded(PpdDrafter(scripted_tokens(), 0, lambda rows: lambda columns: 1.0 + columns), Coupled(), 9, 0.7)
    assert (never.stats.drafted, never.stats.row_rounds) == (0, never.stats.committed)


def test_passes_are_timed_once_and_leave_nothing() -> None:
    target = wrap(tiny_model("llama", vocab_size=29), "tiny", checked=False)
    tokens = random_tokens(target)
    for _ in range(2):
        engine, found = generated(target, PpdDrafter(tokens), Coupled(), 1.5)
        assert found == generated(target, None, Coupled(), 1.5)[1]
        assert engine.stats.target_passes == engine.stats.rounds
    own = target.fork()
    own.memory.reserve(2, 64)
    own.feed([0, 1], torch.ones(2, 3, dtype=torch.long), [3, 2])
    own.counts.take()
    seconds = pass_times(own, [(0, 1, 3), (1, 1, 2)], 2, 8)
    assert all(0 < seconds(columns) < 10 for columns in range(9))
    assert pass_times(own, [(0, 1, 3), (1, 1, 2)], 2, 8)(5) == seconds(5)
    assert own.cache.lengths[:2] == [3, 2]
    assert own.counts.take()[0] == 0


# ── directories ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pair(tmp_path_factory.mktemp("pair"))[0]


@cache
def noise(width: int) -> Tensor:
    return torch.randn(M, width, generator=torch.Generator().manual_seed(0)) * 0.02


def save_ppd(directory: Path, width: int = 32, **config: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file({"prompt_tokens": noise(width)}, directory / "prompt_tokens.safetensors")
    known: dict[str, Any] = {"vocab_size": 260, "accuracies": SHARES}
    (directory / "config.json").write_text(json.dumps(known | config))
    return directory


def test_every_way_in(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = require_every_way_in(place, f"ppd:{save_ppd(tmp_path / 'tokens')},nodes=9", capsys)
    assert loaded["draft"] == {"drafter": "ppd:nodes=9"}


@pytest.mark.parametrize(
    ("tensors", "config", "error", "message"),
    [
        ({"prompt_tokens": torch.zeros(3, 16)}, {}, PairMismatch, "prompt tokens of 16 v 32: heads of another target"),
        ({}, {"vocab_size": 99}, PairMismatch, "a vocabulary of 99 v 260"),
        ({"other": torch.zeros(3, 32)}, {}, ModelError, "lacks prompt_tokens, 1 to 16 vectors"),
        ({"prompt_tokens": torch.full((3, 32), torch.inf)}, {}, ModelError, "holds NaN or infinite numbers"),
        ({}, {"accuracies": [[0.5], [0.2]]}, RequestError, "needs accuracies, a list of shares for each of 3 prompt tokens"),
        ({}, {"accuracies": [[0.5], [0.2], [2.0]]}, RequestError, "needs accuracies"),
        ({}, {"accuracies": None}, RequestError, "needs accuracies"),
    ],
)
def test_what_does_not_fit(
    tmp_path: Path, tensors: dict[str, Tensor], config: dict[str, Any], error: type[ShoalError], message: str
) -> None:
    save_ppd(tmp_path, **config)
    if tensors:
        save_file(tensors, tmp_path / "prompt_tokens.safetensors")
    with pytest.raises(error, match=message):
        load_ppd(tmp_path, wrap(tiny_model("llama").float(), "tiny", checked=False))


def test_targets_that_take_neither_trees_nor_vectors() -> None:
    target = wrap(tiny_model("mpt", vocab_size=29).float(), "tiny", checked=False)
    with pytest.raises(UnsupportedModel, match="takes no position for each token"):
        Engine(target, PpdDrafter(scripted_tokens(), 4), by_name(2))
    given = scripted(hashed(V), V)
    given.hf.forward = lambda tokens, past_key_values, use_cache, position_ids: None
    with pytest.raises(UnsupportedModel, match="takes ids of tokens alone"):
        Engine(given, PpdDrafter(scripted_tokens(), 4), by_name(2))
