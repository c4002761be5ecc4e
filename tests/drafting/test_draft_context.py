"""A drafter of a shorter context: the target alone decides which prompts fit and where rows end.

Tests of: drafting.model, drafting.protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shoal
from by_pairs import by_pairs
from policies import auto
from shoal.api import Shoal
from shoal.cli import check_model
from shoal.cli.check_case import CheckCase
from shoal.cli.check_prompts import PromptSet
from shoal.config import Limits, Sampling
from shoal.drafting.protocol import DraftInputs
from shoal.engine.memory import grade
from shoal.errors import RequestError
from shoal.lookahead.acceptance import DraftOutcome
from shoal.lookahead.controller import Fixed, PairCosts, by_name
from shoal.models.loading import wrap
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Coupled
from shoal.testing import VOCABULARY, tiny_model, tiny_tokenizer
from shoal.testing.drafters import engine_of, runners_of
from shoal.testing.scripted import hashed, mixed, scripted
from shoal.types.requests import Request

CONTEXT, SHORT = 64, 24
POSITIONS = {"llama": "max_position_embeddings", "gpt2": "n_positions"}
EDGE = range(SHORT - 3, SHORT + 4)
"""Prompt lengths around the edge: the drafter holds the first four."""


@cache
def models(architecture: str) -> tuple[Any, Any]:
    """A target, and a drafter with its weights that has positions for `SHORT` tokens only."""
    target, drafter = (tiny_model(architecture, **{POSITIONS[architecture]: most}) for most in (CONTEXT, SHORT))
    weights = target.state_dict()
    drafter.load_state_dict({name: weights[name][: len(own)] for name, own in drafter.state_dict().items()})
    return target, drafter


def runners(architecture: str) -> tuple[Runner, Runner]:
    made = tuple(wrap(hf, name, checked=False) for hf, name in zip(models(architecture), ("long", "short"), strict=True))
    assert tuple(model.context for model in made) == (CONTEXT, SHORT)
    return made  # type: ignore[return-value]


def prompt(length: int) -> tuple[int, ...]:
    return tuple((7 * i + length) % 250 for i in range(length))


class Run:
    """Prompts decoded with a drafter, and what it was asked for.

    Attributes:
        proposed: of each row in each proposal, its tokens before it and its drafts.
    """

    def __init__(
        self, pair: tuple[Runner, Runner | None], lookahead: Any, lengths: Sequence[int], *, n: int = 1, new: int = 100,
        temperature: float = 1.0, sampling: dict[str, Any] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.engine = engine_of(*pair, lookahead, rule=Coupled(), **{"max_batch": 16, **options})
        self.proposed: list[tuple[int, int]] = []
        if self.engine.drafter is not None:
            self._watch(self.engine.drafter)
        requests = [
            Request(prompt(length), n, Sampling(temperature, seed=length, **(sampling or {})), Limits(new))
            for length in lengths
        ]
        self.rows = [row for request in requests for row in self.engine.submit(request)]
        while self.engine.step():
            pass
        assert self.engine.scheduler.idle

    def _watch(self, drafter: Any) -> None:
        propose = drafter.propose

        def watched(inputs: DraftInputs) -> Any:
            proposal = propose(inputs)
            self.proposed += [
                (len(row.tokens), len(drafts)) for row, drafts in zip(inputs.rows, proposal.drafts, strict=True)
            ]
            return proposal

        drafter.propose = watched

    @property
    def said(self) -> list[tuple[tuple[int, ...], str | None]]:
        return [(tuple(row.tokens[row.prompt_length :]), row.finish_reason) for row in self.rows]

    @property
    def before(self) -> int:
        """Tokens drafted for rows that the drafter could read."""
        return sum(drafts for tokens, drafts in self.proposed if tokens <= SHORT)

    @property
    def after(self) -> int:
        """Tokens drafted for others, and tokens drafted after more than it could read."""
        return sum(min(drafts, max(tokens + drafts - SHORT - 1, 0)) for tokens, drafts in self.proposed)


def plain(architecture: str, lengths: Sequence[int], **options: Any) -> Run:
    return Run((runners(architecture)[0], None), Fixed(0), lengths, **options)


LOOKAHEADS = {
    "1": lambda: Fixed(1), "7": lambda: Fixed(7), "bass": lambda: by_name("bass"), "heuristic": lambda: by_name("heuristic"),
    "auto": lambda: auto({1: 1.0, 64: 1.0}, 0.01, 0.9), "opening": lambda: by_name("auto"),
}  # fmt: skip


@by_pairs({"temperature": [0.0, 1.0], "lookahead": LOOKAHEADS, "architecture": POSITIONS})
def test_rows_go_on_to_the_end_of_the_targets_context(architecture: str, lookahead: str, temperature: float) -> None:
    """Ragged batches of prompts that the drafter holds, nearly holds and does not hold; rows cross the edge inside a draft."""
    lengths = [3, *EDGE, 50]
    run = Run(runners(architecture), LOOKAHEADS[lookahead](), lengths, temperature=temperature)
    assert run.said == plain(architecture, lengths, temperature=temperature).said
    assert [len(tokens) for tokens, _ in run.said] == [CONTEXT - length for length in lengths]
    assert {reason for _, reason in run.said} == {"length"}
    assert run.before > 0
    assert run.after == 0
    assert all(row.drafted == 0 for row in run.rows if row.prompt_length > SHORT)


@pytest.mark.parametrize("k", [1, 2, 5, 20])
def test_the_last_draft_is_the_one_after_all_that_the_drafter_can_read(k: int) -> None:
    """A drafter that is the target is right: all that can be drafted is, one token beyond its context included."""
    run = Run(runners("llama"), Fixed(k), [SHORT - 6], temperature=0)
    (row,) = run.rows
    reached = max(tokens + drafts for tokens, drafts in run.proposed)
    assert reached == SHORT + 1
    assert row.accepted == row.drafted == run.before
    assert Run(runners("llama"), Fixed(k), [SHORT]).before == 1
    assert Run(runners("llama"), Fixed(k), [SHORT + 1]).before == 0


@pytest.mark.parametrize("options", [
    {"prefix_sharing": "shared", "n": 3}, {"prefix_sharing": "copied", "n": 3},
    {"prefix_sharing": "copied", "n": 3, "max_batch": 2}, {"prefix_sharing": "shared", "n": 3, "max_batch": 2},
    {"chunk": 5}, {"chunk": 5, "prefix_sharing": "shared", "n": 2, "max_batch": 3},
    {"sampling": {"repetition_penalty": 1.2, "no_repeat_ngram": 3}}, {"max_batch": 1},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("architecture", ["llama"])
def test_in_every_arrangement_of_prompts(architecture: str, options: dict[str, Any]) -> None:
    """Rows that cross the edge leave their prompts in their slots for the rows of their group that come later."""
    lengths = [SHORT + 9, SHORT - 4, SHORT + 1, SHORT, 40]
    run = Run(runners(architecture), Fixed(4), lengths, new=14, **options)
    assert run.said == plain(architecture, lengths, new=14, **options).said
    assert run.before > 0
    assert run.after == 0
    read = [row.drafted for row in run.rows if row.prompt_length < SHORT]
    assert min(read) > 0


@pytest.mark.parametrize("prefix_sharing", ["shared", "copied"])
def test_nothing_is_computed_or_stored_of_a_prompt_that_only_the_target_holds(prefix_sharing: str) -> None:
    pair = runners("llama")
    run = Run(pair, Fixed(4), [SHORT + 1, 50], n=2, prefix_sharing=prefix_sharing)
    target, drafter = runners_of(run.engine)
    assert run.said == plain("llama", [SHORT + 1, 50], n=2).said
    assert (run.engine.stats.draft_passes, run.proposed) == (0, [])
    assert drafter.cache.nbytes() == 0  # no pass, so no layer
    assert (drafter.cache.capacity, drafter.cache.cells) == (0, 0)
    assert run.engine.stats.prefill_tokens == SHORT + 49
    assert target.cache.capacity > 10


def test_a_drafters_cache_is_no_longer_than_its_context() -> None:
    run = Run(runners("llama"), Fixed(4), [3, 50], prefix_sharing="copied")
    target, drafter = runners_of(run.engine)
    assert (target.cache.capacity, drafter.cache.capacity) == (grade(CONTEXT + 5), grade(SHORT + 5))
    assert run.before > 0


def test_memory_is_planned_by_what_each_model_reads() -> None:
    """Both prompts fit beside each other, as the drafter's cache has no room for what it cannot read."""
    pair = runners("llama")
    need = sum(model.context + 5 for model in pair) * 2
    free = Run(pair, Fixed(4), [3, 50], prefix_sharing="copied")
    per_token = free.engine.target.cache.bytes_per_token()
    tight = Run(pair, Fixed(4), [3, 50], prefix_sharing="copied", kv_bytes=need * per_token)
    assert tight.said == free.said
    assert tight.engine.stats.rounds == free.engine.stats.rounds
    assert tight.engine.memory.used <= need * per_token


@pytest.mark.slow(but=["1-shared"])
@pytest.mark.parametrize(
    ("lookahead", "prefix_sharing"), [("1", "shared"), ("7", "copied"), ("auto", "shared"), ("opening", "copied")]
)
def test_the_target_alone_decides_what_memory_holds(lookahead: str, prefix_sharing: str) -> None:
    """Memory for one row of the target alone: it is served to its end, whatever is drafted; a byte less, and it is refused."""
    pair = runners("llama")
    per_token = plain("llama", [3]).engine.target.cache.bytes_per_token()
    most = (CONTEXT + 1) * per_token
    for length in (3, 50):
        run = Run(pair, LOOKAHEADS[lookahead](), [length, length], n=2, prefix_sharing=prefix_sharing, kv_bytes=most)
        assert run.said == plain("llama", [length, length], n=2).said
        assert (run.engine.stats.drafted, run.engine.stats.draft_passes) == (0, 0)
        assert run.engine.memory.used <= most
        with pytest.raises(RequestError, match=f"takes {most} bytes of KV cache, and there are {most - 1}"):
            Run(pair, LOOKAHEADS[lookahead](), [length], kv_bytes=most - 1)


@pytest.mark.parametrize("executor", [None, "eager"], ids=["ordinary", "captured"])
@pytest.mark.parametrize("held", [1, 9, 10, 17, SHORT, 40])
def test_drafts_go_as_far_as_memory_holds_the_drafters_keys(held: int, executor: str | None) -> None:
    """Beside one row of the target there is memory for `held` tokens of the drafter."""
    pair = runners("llama")
    for model in pair:
        model.capture_rounds(executor)
    lone = engine_of(*pair, Fixed(4), kv_bytes=1 << 40)
    most = runners_of(lone)[0].memory.cache_bytes(1, CONTEXT + 1) + runners_of(lone)[1].memory.cache_bytes(1, held + 1)
    run = Run(pair, Fixed(4), [9], temperature=0, kv_bytes=most)
    assert run.said == plain("llama", [9], temperature=0).said
    (row,) = run.rows
    assert row.draft_context >= min(held, SHORT)
    if executor is None:
        assert row.draft_context == min(held, SHORT)
        reached = max((tokens + drafts for tokens, drafts in run.proposed if drafts), default=None)
        assert reached == (min(held, SHORT) + 1 if held >= 9 else None)
        assert row.accepted == row.drafted
    assert run.engine.memory.used <= most


def test_rows_with_and_without_memory_for_drafts_side_by_side() -> None:
    """Short rows are drafted for, and run beside each other; the one that fills the memory is decoded plainly."""
    pair = runners("llama")
    per_token = plain("llama", [3]).engine.target.cache.bytes_per_token()
    for prefix_sharing in ("shared", "copied"):
        for most in (CONTEXT + 1, CONTEXT + 20, 2 * (CONTEXT + 5), 200):
            lengths, new = [50, 3, 4, 5, 50, 6], 14
            run = Run(pair, Fixed(4), lengths, n=2, new=new, prefix_sharing=prefix_sharing, kv_bytes=most * per_token)
            assert run.said == plain("llama", lengths, n=2, new=new).said
            assert run.engine.memory.used <= most * per_token
            assert all((row.drafted > 0) == (row.prompt_length < 50) for row in run.rows)


def test_the_target_alone_refuses_prompts() -> None:
    for lookahead in (Fixed(0), Fixed(4), by_name("auto")):
        with pytest.raises(RequestError, match="the prompt has 64 tokens; long holds 64, the first new token included"):
            Run(runners("llama"), lookahead, [CONTEXT])
        assert Run(runners("llama"), lookahead, [CONTEXT - 1]).said[0][1] == "length"


def test_what_auto_has_learned_does_not_move_the_ends_of_rows() -> None:
    """A pair known to be hopeless is run without its drafter."""
    hopeless = auto({1: 1.0, 64: 1.0}, 0.01, 0.0)
    assert not hopeless.may_speculate
    lengths = [3, *EDGE]
    runs = [Run(runners("llama"), controller, lengths) for controller in (hopeless, by_name("auto", PairCosts(True)))]
    assert runs[0].engine.drafter is None
    assert runs[0].said == runs[1].said == plain("llama", lengths).said
    assert {run.engine.context for run in runs} == {CONTEXT}


def test_padding_of_silent_rows_teaches_auto_nothing() -> None:
    """Their confidences are those of no text; only rows that were drafted for move the estimates."""
    target, drafter = (scripted(hashed(12, 0), 12, context) for context in (40, 8))
    controller = auto({1: 1.0, 64: 1.0}, 0.01, 0.9)
    learned: list[DraftOutcome] = []
    acceptance = controller.costs.acceptance
    learn = acceptance.learn
    acceptance.learn = lambda rows, rounds: (learned.extend(rounds), learn(rows, rounds))  # type: ignore[method-assign, assignment, func-returns-value]
    engine = engine_of(target, drafter, controller, rule=Coupled())
    for ids in ((1, 2), (1,) * 20):
        engine.submit(Request(ids, 1, Sampling(seed=1), Limits(12)))
    while engine.step():
        pass
    looked = [tried for tried in learned if tried.confidence and len(tried.drafted) == 2]
    assert looked
    assert all(tried.drafted[1] == 0 and all(sure[1] != sure[1] for sure in tried.confidence) for tried in looked)


def test_the_transformers_entry_does_the_same() -> None:
    target, drafter = models("llama")
    ids = torch.tensor([prompt(SHORT - 2), prompt(SHORT - 2)[::-1]])
    asked: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    ours = target.generate(ids, **asked, custom_generate=shoal.custom_generate, draft_model=drafter, lookahead=3)
    assert torch.equal(target.generate(ids, **asked), ours)
    longer = torch.tensor([prompt(SHORT + 9)])
    ours = target.generate(longer, **asked, custom_generate=shoal.custom_generate, draft_model=drafter, lookahead=3)
    assert torch.equal(target.generate(longer, **asked), ours)


def test_the_server_offers_the_targets_context() -> None:
    from serving import application

    pair = Shoal(
        scripted(hashed(VOCABULARY, 0), VOCABULARY, 90), scripted(hashed(VOCABULARY, 1), VOCABULARY, 30), tiny_tokenizer()
    )
    for lookahead in (0, 4):
        app = application(pair, lookahead)
        assert app.state.worker.thread.engine.context == 90


@pytest.mark.parametrize(
    ("length", "new", "said"),
    [
        (5, 10, "ok None"),
        (20, 10, "warn beyond the drafter's context rows are decoded plainly"),
        (30, 10, "warn the drafter holds no prompt of that length: such rows are decoded plainly"),
        (30, 80, "warn samples will end early: lower --max-new-tokens"),
    ],
)
def test_check_says_how_far_the_drafter_goes(length: int, new: int, said: str) -> None:
    models = SimpleNamespace(target=SimpleNamespace(context=64), draft_model=SimpleNamespace(context=24))
    prompts = PromptSet.of("", "", ["x" * length], tiny_tokenizer())
    case = CheckCase(models, [prompts], 1, new, 4, 1, print)  # type: ignore[arg-type]
    result = check_model.context(case)
    assert f"{result.status} {result.advice or None}" == said


def test_scripted_rows_that_go_silent_leave_their_neighbours_alone() -> None:
    """A scripted drafter sees every cell that a pass reads: padding of silent rows included, none of it is another row's."""
    script = hashed(12, 0)
    target, drafter = scripted(script, 12, 40), scripted(mixed(script, hashed(12, 1), 3), 12, 10)
    for lookahead in (Fixed(5), by_name("heuristic")):
        engines = [engine_of(target, other, lookahead, rule=Coupled(), max_batch=3) for other in (drafter, None)]
        said = []
        for engine in engines:
            rows = [row for ids in ((1, 2), (3,) * 12, (4,) * 7) for row in engine.submit(Request(ids, 3, Sampling(seed=2)))]
            while engine.step():
                pass
            said.append([(row.tokens, row.finish_reason) for row in rows])
        assert said[0] == said[1]
        assert engines[0].stats.drafted > engines[0].stats.accepted > 0
