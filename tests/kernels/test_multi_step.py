"""Several plain rounds in one go: tokens, log-probabilities and counts are those of the same rounds one by one.

Tests of: engine.multi_step, engine.commit, models.lean.steps, models.runner_parts, models.runner, sampling.uniforms.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lean_passes import PROMPTS
from native_kernels import needs_compiler
from shoal import Shoal
from shoal.config import Grammar, Limits, Sampling
from shoal.engine import multi_step
from shoal.engine.engine import Engine
from shoal.engine.multi_step import MOST_ROUNDS, MultiStep
from shoal.lookahead.auto import TOGETHER, Auto
from shoal.lookahead.controller import Controller, PairCosts
from shoal.models import formats, weights
from shoal.models.lean import steps
from shoal.models.loading import wrap
from shoal.models.passes import use_lean_passes
from shoal.models.runner import Runner
from shoal.models.weights.matrix import PACKED
from shoal.sampling.acceptance import Rejection
from shoal.sampling.uniforms import UniformsAhead
from shoal.testing import tiny_model, tiny_tokenizer
from shoal.types.requests import Request, Row
from shoal.types.rounds import Outcome

pytestmark = needs_compiler
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def _panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "cpu", lambda: formats.Cpu(packs=frozenset(DTYPES)))


def packed(dtype: torch.dtype = torch.float32, architecture: str = "llama") -> Runner:
    hf = tiny_model(architecture, max_position_embeddings=512).to(dtype)
    weights.lay_out(hf, lambda keys: dict.fromkeys(keys, PACKED))
    made = wrap(hf, architecture, checked=False)
    use_lean_passes(made)
    return made


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rounds of the runs so far."""
    found: list[int] = []
    inner = MultiStep.run

    def noted(self: MultiStep, rows: Sequence[Row], *, may_change: bool) -> Any:
        run = inner(self, rows, may_change=may_change)
        found.extend([] if run is None else [run.rounds])
        return run

    monkeypatch.setattr(MultiStep, "run", noted)
    return found


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MultiStep, "run", lambda *_, **options: None)


def generated(shoal: Shoal, prompts: Any = PROMPTS, n: int = 2, **options: Any) -> Any:
    """All that is said and counted, times left out."""
    result = shoal.generate(prompts, n, **{"max_new_tokens": 21, "lookahead": "off", **options})
    samples = [sample for output in result for sample in output.samples]
    said = [(each.token_ids, each.logprobs, each.processed_logprobs, each.finish_reason, each.text) for each in samples]
    counted = {name: count for name, count in dataclasses.asdict(result.stats).items() if isinstance(count, int)}
    return said, counted, [(each.rounds, each.target_passes) for each in samples]


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 3},
    "rejection": {"seed": 3, "rule": "rejection", "temperature": 0.7},
    "truncated": {"seed": 4, "top_p": 0.8, "top_k": 40, "min_p": 0.01},
    "stop strings": {"seed": 5, "stop": ["e", "\x00"]},
    "one token": {"seed": 5, "max_new_tokens": 1},
    "more rows than slots": {"seed": 6, "n": 5},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", OPTIONS)
def test_runs_say_and_count_what_rounds_do(case: str, dtype: torch.dtype, runs: list[int], monkeypatch: Any) -> None:
    shoal = Shoal(packed(dtype), None, tiny_tokenizer(), max_batch=4)
    found = [generated(shoal, **OPTIONS[case])]
    assert (max(runs, default=0) > 1) == (case != "one token")
    assert all(rounds <= MOST_ROUNDS for rounds in runs)
    one_by_one(monkeypatch)
    found.append(generated(shoal, **OPTIONS[case]))
    assert found[0] == found[1]


def test_the_prompt_of_several_samples_is_kept(runs: list[int]) -> None:
    shoal = Shoal(packed(), None, tiny_tokenizer(), prefix_memory=1 << 20)
    restored = [generated(shoal, PROMPTS[2:])[1]["restored_tokens"] for _ in range(2)]
    assert restored == [0, len(PROMPTS[2]) - 1]
    assert min(runs) > 1


@pytest.mark.parametrize("architecture", ["qwen2-sliding", "qwen3"])
def test_runs_of_other_families(architecture: str, runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    shoal = Shoal(packed(architecture=architecture), None, tiny_tokenizer(), max_batch=8)
    found = [generated(shoal, seed=1)]
    assert sum(runs) == found[0][1]["rounds"] - runs.count(1)
    one_by_one(monkeypatch)
    assert found == [generated(shoal, seed=1)]


def test_a_run_ends_with_its_last_row(runs: list[int]) -> None:
    """No pass is computed for rows that have all ended."""
    target = packed()
    (said,) = finished(engine(target), 1, temperature=0.0)
    runs.clear()
    made = engine(target)
    (row,) = made.submit(Request((5, 6, 7), 1, Sampling(temperature=0.0), Limits(20, eos=(said[8],))))
    while made.step():
        pass
    assert row.finish_reason == "eos"
    assert row.tokens == said[: 1 + said.index(said[8], 3)]
    assert row.rounds == made.stats.rounds == made.stats.target_passes == sum(runs) <= 6


@pytest.mark.parametrize(
    "options",
    [
        {"top_logprobs": 2},
        {"repetition_penalty": 1.2},
        {"typical_p": 0.9},
        {"grammar": Grammar("regex", "[a-z]+")},
        {"rule": "typical"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_reads_each_round_gets_each_round(options: dict[str, Any], runs: list[int]) -> None:
    shoal = Shoal(packed(), None, tiny_tokenizer(), max_batch=8)
    shoal.generate(PROMPTS, 2, max_new_tokens=6, lookahead="off", seed=1, **options)
    assert runs == []


def test_a_guide_reads_each_round(runs: list[int]) -> None:
    """Rows with guidance, and rows beside them, go round by round; alone, rows without it do not."""
    shoal = Shoal(packed(), None, tiny_tokenizer())
    shoal.guide = packed(torch.float32, "llama")
    settings = [Sampling(seed=3, guidance=0.0 if place else 0.7) for place in range(len(PROMPTS))]
    result = shoal.generate(PROMPTS, 2, sampling=settings, max_new_tokens=12, lookahead="off")
    assert runs == []
    assert result.stats.guide_passes == result.stats.rounds
    shoal.generate(PROMPTS, 2, seed=3, max_new_tokens=12, lookahead="off")
    assert runs


class Own(Rejection):
    """A decision of a user's own."""

    def decide(self, *arguments: Any, **options: Any) -> Any:
        return super().decide(*arguments, **options)


def test_a_rule_that_decides_by_itself_decides_each_round(runs: list[int]) -> None:
    finished(engine(packed(), rule=Own()), 2)
    assert runs == []


def test_kept_logits_are_those_of_each_round(runs: list[int]) -> None:
    made = engine(packed())
    (row,) = made.submit(Request((5, 6, 7), 1, Sampling(seed=2), Limits(4, eos=()), keep_logits=True))
    while made.step():
        pass
    assert len(row.logits) == 4
    assert runs == []


def engine(target: Runner, **options: Any) -> Engine:
    return Engine(target, None, options.pop("lookahead", Off()), max_batch=32, **options)


class Off(Controller):
    """No drafts, ever; tells what it learned."""

    limit = 0

    def __init__(self) -> None:
        self.learned: list[Outcome] = []

    def lengths(self, rows: Sequence[Row], waiting: int) -> list[int]:
        return [0] * len(rows)

    def learn(self, outcome: Outcome) -> None:
        self.learned.append(outcome)


def finished(made: Engine, rows: int, tokens: int = 20, **sampling: Any) -> list[list[int]]:
    own = made.submit(Request((5, 6, 7), rows, Sampling(seed=2, **sampling), Limits(max_new_tokens=tokens, eos=())))
    while made.step():
        pass
    return [row.tokens for row in own]


def test_the_most_tokens_and_bytes_of_a_run(runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    target = packed()
    finished(engine(target), 32)
    assert max(runs) == MOST_ROUNDS
    runs.clear()
    monkeypatch.setattr(multi_step, "MOST_TOKENS", 32 * 3 + 31)
    finished(engine(target), 32)
    assert max(runs) == 3
    assert target.lean is not None
    assert target.lean.whole is not None
    runs.clear()
    monkeypatch.setattr(steps, "BYTES_AT_ONCE", 3 * target.lean.whole.weight_bytes)
    finished(engine(target), 1)
    assert max(runs) == 3


def test_a_controller_learns_of_rounds(runs: list[int]) -> None:
    controller = Off()
    finished(engine(packed(), lookahead=controller), 2)
    assert [outcome.rounds for outcome in controller.learned if outcome.rounds > 1] == runs
    assert sum(outcome.rounds for outcome in controller.learned) == 20


class Numbered(Off):
    """As rounds are numbered under a controller that learns."""

    adaptive = True


def test_numbered_rounds_keep_their_numbers(runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    target, found = packed(), []
    for change in (lambda: None, lambda: one_by_one(monkeypatch)):
        change()
        found.append(finished(engine(target, lookahead=Numbered(), rule=Rejection()), 3))
    assert found[0] == found[1]
    assert runs


def test_wrong_numbers_of_rounds_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    target, inner = packed(), UniformsAhead.of_rounds
    right = finished(engine(target, lookahead=Numbered(), rule=Rejection()), 3)
    monkeypatch.setattr(UniformsAhead, "of_rounds", lambda self, rows, rounds, numbered: inner(self, rows, rounds, False))
    assert finished(engine(target, lookahead=Numbered(), rule=Rejection()), 3) != right


def test_a_row_without_a_distribution_ends_alone(runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its round is computed by itself, and the rounds before it stay: the same as one by one."""
    target, found = packed(), []
    (said,) = finished(engine(target), 1, temperature=0.0)
    with torch.no_grad():
        target.lean.decoder.embedding[said[9]] = torch.nan  # type: ignore[union-attr]
    for change in (lambda: None, lambda: one_by_one(monkeypatch)):
        change()
        made = engine(target)
        rows = [made.submit(Request((5, 6, 7), 1, Sampling(temperature=0.0), Limits(20, eos=())))[0]]
        rows += made.submit(Request((9, 8), 2, Sampling(seed=4), Limits(20, eos=())))
        while made.step():
            pass
        found.append([(row.tokens, row.finish_reason, row.logprobs) for row in rows])
    assert found[0] == found[1]
    assert found[0][0][1] == "error"
    assert len(found[0][0][0]) == 10
    assert max(runs) > 1


def test_a_deadline_ends_a_run(runs: list[int]) -> None:
    ticks = itertools.count()
    made = engine(packed(), clock=lambda: float(next(ticks)))
    made.submit(Request((5, 6, 7), 1, Sampling(seed=2), Limits(20, eos=(), time_budget=12.0), submitted_at=0.0))
    commits = [commit for _ in range(20) for commit in made.step()]
    assert commits[-1].sample is not None
    assert commits[-1].sample.finish_reason == "time"
    assert runs
    assert len(commits[-1].sample.token_ids) < 12


def test_the_next_deadline_of_all_rows_ends_a_run(runs: list[int]) -> None:
    """The first row is patient; the other ends when its own time is up, not at the end of a run."""
    ticks = itertools.count()
    made = engine(packed(), clock=lambda: float(next(ticks)))
    for budget in (1000.0, 8.0):
        limits = Limits(20, eos=(), time_budget=budget)
        made.submit(Request((5, 6, 7), 1, Sampling(seed=2), limits, submitted_at=0.0))
    ended = [commit.sample for _ in range(20) for commit in made.step() if commit.sample is not None]
    assert [sample.finish_reason for sample in ended] == ["time", "length"]
    assert len(ended[0].token_ids) < MOST_ROUNDS < len(ended[1].token_ids) == 20
    assert max(runs) > 1


# ── beside a drafter ────────────────────────────────────────────────────────────────────────────────────────────────


def test_auto_lets_runs_stand_for_rounds() -> None:
    """Runs count as their rounds: about as many trials in as many rounds, and the first and due plain rounds are runs as well."""
    rows = [Row(Request((0, 0), 1, Sampling(), Limits(max_new_tokens=1000)), 0, 0, 0, [0, 0], frozenset(), 1002)]
    found = []
    for together in (False, True):
        controller, drafted, said = Auto(PairCosts(packed=True)), [], []
        while len(drafted) < 4000:
            lengths = controller.lengths(rows, 0)
            rounds = controller.plain_rounds if together and not any(lengths) else 1
            said.append(rounds)
            drafted += [max(lengths)] * rounds
            steps = max(lengths)
            controller.learn(Outcome(list(lengths), [0], steps, 1.0 + steps, float(steps), rounds=rounds))
        found.append(sum(length > 0 for length in drafted))
        assert said[0] == (TOGETHER if together else 1)
        assert TOGETHER == MOST_ROUNDS  # else a plain round seems to cost more than one of plain decoding
        assert (max(said) > 8) == together
    assert found[1] == pytest.approx(found[0], abs=2)


def test_a_drafter_beside_runs_catches_up(runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of `auto` that do not draft are runs; then the drafter goes on with tokens that it never saw."""

    class Turns(Numbered):
        limit = 4
        turn = 0

        @property
        def plain_rounds(self) -> int:
            return 3

        def lengths(self, rows: Sequence[Row], waiting: int) -> list[int]:
            self.turn += 1
            return [0 if self.turn % 2 else min(3, row.max_draft_length) for row in rows]

    class Asked(Turns):
        """As an own controller is that says nothing of plain rounds."""

        plain_rounds = Controller.plain_rounds

    target, found = packed(), []
    Shoal(target, packed(), tiny_tokenizer()).generate(PROMPTS, 2, max_new_tokens=30, seed=3, lookahead=Asked())
    assert runs == []
    for change in (lambda: None, lambda: one_by_one(monkeypatch)):
        change()
        shoal = Shoal(target, packed(), tiny_tokenizer(), max_batch=8)
        result = shoal.generate(PROMPTS, 2, max_new_tokens=30, seed=3, lookahead=Turns())
        assert result.stats.accepted > 0
        found.append([sample.token_ids for output in result for sample in output.samples])
    assert found[0] == found[1]
    assert max(runs) == 3


def test_rows_that_have_ended_are_kept_by_nothing(runs: list[int]) -> None:
    """A server that is idle would hold the rows of its last round, with their matchers, until the next request."""

    def rows() -> int:
        gc.collect()
        return sum(type(one) is Row for one in gc.get_objects())

    before, engine = rows(), Engine(packed(), None, Off())
    engine.submit(Request((1, 2, 3), n=4))
    while engine.step():
        pass
    assert runs
    assert rows() <= before
