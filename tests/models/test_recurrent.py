"""Models whose layers keep recurrent states: rows of unequal lengths, drafts that are taken back, and the faults that must show.

Tests of: models.mixers, models.cache.mixing, models.cache.states.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import shoal
from attention_paths import RECURRENT_HERE, greedy_ids, prompt
from dflash_layers import save_dflash
from eagle_heads import save_eagle3
from enumeration import chi_square
from laws import ALPHA, declared_law, joint
from laws import run as sampled
from shoal.cli.check_model import executors, family
from shoal.config import Limits, Sampling
from shoal.drafting.dflash import BlockDrafter
from shoal.drafting.eagle3 import Eagle3Drafter
from shoal.drafting.medusa import MedusaDrafter
from shoal.drafting.model import ModelDrafter
from shoal.drafting.ngram import NGramDrafter, TrigramDrafter
from shoal.drafting.protocol import Drafter, DraftInputs
from shoal.drafting.recycling import RecyclingDrafter
from shoal.drafting.suffix import SuffixDrafter
from shoal.drafting.sums import SumDrafter
from shoal.drafting.trained_heads import layers_and_width
from shoal.engine.engine import Engine
from shoal.errors import InternalError, PairMismatch, UnsupportedModel
from shoal.integrations.loglikelihoods import loglikelihoods
from shoal.lookahead.controller import Fixed, by_name
from shoal.models import mixers
from shoal.models.cache import SlotCache, states
from shoal.models.cache.mixing import Calls, EqualRows, RowStates
from shoal.models.cache.states import StateCache
from shoal.models.compiled.captures import CAPTURED
from shoal.models.executor import C_DECODER, TRITON_LAYERS, Modules
from shoal.models.loading import wrap
from shoal.models.passes import use_fused_layers, use_lean_passes
from shoal.models.runner import Runner
from shoal.models.tensor_parallel import lead
from shoal.models.vocabulary import compared
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.testing import RECURRENT, VOCABULARY, fill, save_pair, tiny_model, tiny_tokenizer
from shoal.testing.architectures import NAMES
from shoal.testing.scripted import adversary, mixed, says, scripted
from shoal.types.requests import Request
from shoal.types.trees import DraftTree
from tokenizers_of_models import large_tokenizer

pytestmark = pytest.mark.skipif(not RECURRENT_HERE, reason="an older Transformers keeps states in caches of many kinds")

FAMILIES = ("lfm2", "qwen3-next", "jamba", "granite-hybrid", "falcon-h1", "recurrent-gemma")
"""A convolution alone; a gated delta net among experts; a state-space model that must be fed token by token; one in blocks, with
a multiplier (Bamba's layers); attention and a state-space model side by side in every layer; states in the modules themselves."""
EVERY = [*FAMILIES, *(pytest.param(family, marks=pytest.mark.slow) for family in sorted({*RECURRENT} - {*FAMILIES}))]
"""All families: the six above in each run, the others among the slow tests."""
STEPWISE = {"mamba", "falcon-mamba", "jamba", "zamba", "zamba2", "nemotron-h", "recurrent-gemma"}
K, NEW = 3, 20


PROMPTS = (prompt(1), prompt(13), prompt(4), prompt(13, seed=1))


@cache
def target(family: str) -> Runner:
    return wrap(tiny_model(family), family)


def with_drafts(family: str) -> tuple[Runner, Tensor]:
    """A model of two slots and eight ids: the first slot holds three, and four of a pass that may be taken back."""
    runner, ids = target(family).fork(), torch.tensor([list(prompt(8))])
    runner.memory.reserve(2, 12)
    runner.feed([0], ids[:, :3], [3], want_logits=False)
    runner.feed([0], ids[:, 3:7], [4])
    return runner, ids


@cache
def stock_ids(family: str, ids: tuple[int, ...], new: int = NEW) -> list[int]:
    """What Transformers' own `generate` says, this prompt alone."""
    return list(greedy_ids(target(family).hf, ids, new))


def half_right(family: str) -> Runner:
    """A drafter that says the target's tokens in two places of three: without states, so that the target's alone are at stake."""
    right = says([ids + tuple(stock_ids(family, ids)) for ids in PROMPTS], VOCABULARY)
    return scripted(mixed(right, adversary(right, VOCABULARY), every=3), VOCABULARY, dtype=torch.float32)


def run(
    engine: Engine, prompts: Sequence[Sequence[int]] = PROMPTS, n: int = 1, new: int = NEW, **sampling: Any
) -> list[list[int]]:
    """The new tokens of all rows."""
    wanted = Sampling(**{"temperature": 0.0, **sampling})
    rows = [row for ids in prompts for row in engine.submit(Request(tuple(ids), n, wanted, Limits(max_new_tokens=new)))]
    while engine.step():
        pass
    return [row.tokens[row.prompt_length :] for row in rows]


def engine(family: str, drafter: Drafter | Runner | None, k: int = K, **options: Any) -> Engine:
    if isinstance(drafter, Runner):
        drafter = ModelDrafter(drafter.fork(), VOCABULARY)
    return Engine(target(family), drafter, Fixed(k if drafter else 0), **{"max_batch": 3, **options})


def expected(family: str) -> list[list[int]]:
    return [stock_ids(family, ids) for ids in PROMPTS]


# ── which modules keep states ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("family", sorted(RECURRENT))
def test_the_modules_that_keep_states_are_found(family: str) -> None:
    found = target(family).mixers
    assert found is not None
    layers = {name.split("layers.")[1].split(".")[0] for name in found.modules}
    assert "0" in layers
    assert found.stepwise == (family in STEPWISE)


def test_an_older_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixers, "KNOWN", False)
    with pytest.raises(UnsupportedModel, match="no common cache for recurrent states"):
        wrap(tiny_model("lfm2"), "lfm2")


def test_a_module_without_states_is_none() -> None:
    runner = wrap(tiny_model("llama"), "llama")
    assert runner.mixers is None
    assert not isinstance(runner.cache, StateCache)


# ── greedy ids ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _noisy(family: str) -> Runner:
    hf = copy.deepcopy(tiny_model(family))
    head = hf.get_output_embeddings().weight.data
    head.add_(0.15 * float(head.std()) * torch.randn(head.shape, generator=torch.Generator().manual_seed(7)))
    return wrap(hf, family)


@torch.no_grad()
def _heads_that_know(family: str) -> Callable[[Tensor], Tensor]:
    """Three heads that say the tokens after the next one, of two tokens of three, by the target's last state."""
    states: list[Tensor] = []
    following: list[list[int]] = []
    for ids in PROMPTS:
        tokens = [*ids, *stock_ids(family, ids)]
        made = target(family).hf(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
        states.append(made.hidden_states[-1][0])
        right = [*(token if i % 3 else 0 for i, token in enumerate(tokens)), 0, 0, 0, 0]
        following += [right[i + 2 : i + 5] for i in range(len(tokens))]
    known, said = torch.cat(states), torch.tensor(following)

    def heads(seen: Tensor) -> Tensor:
        nearest = torch.cdist(seen, known).argmin(-1)
        return 99 * torch.nn.functional.one_hot(said[nearest], VOCABULARY).float().transpose(0, 1)

    return heads


def random_heads(kind: type[Eagle3Drafter], save: Callable[[Path], Path]) -> Callable[[str], Drafter]:
    """Heads with random weights: nearly all of their drafts are rejected."""

    def made(family: str) -> Drafter:
        with TemporaryDirectory() as place:
            return kind.for_target(target(family), directory=str(save(Path(place))))

    return made


DRAFTERS: dict[str, Callable[[str], Drafter | Runner | None]] = {
    "none": lambda family: None,
    "its own family": _noisy,
    "another family": lambda family: wrap(tiny_model("lfm2" if family != "lfm2" else "mamba2", seed=5), "draft"),
    "without states": half_right,
    "ngram": lambda family: NGramDrafter(),
    "suffix": lambda family: SuffixDrafter(),
    "recycling": lambda family: RecyclingDrafter.for_target(target(family)),
    "suffix+ngram": lambda family: SumDrafter([SuffixDrafter()], NGramDrafter()),
    "suffix+model": lambda family: SumDrafter([SuffixDrafter()], ModelDrafter(_noisy(family).fork(), VOCABULARY)),
    "medusa": lambda family: MedusaDrafter(_heads_that_know(family), layers_and_width(target(family))[0]),
    "trigrams": lambda family: TrigramDrafter.for_target(target(family)),
    "eagle3": random_heads(Eagle3Drafter, save_eagle3),
    "dflash": random_heads(BlockDrafter, save_dflash),
}


@pytest.mark.slow(
    but=[
        "lfm2-its own family",
        "jamba-without states",
        "qwen3-next-suffix+model",
        "recurrent-gemma-its own family",
        "falcon-h1-ngram",
    ]
)
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("family", EVERY)
def test_every_drafter_leaves_the_greedy_ids(family: str, kind: str) -> None:
    made = engine(family, DRAFTERS[kind](family))
    assert run(made, n=2) == [ids for ids in expected(family) for _ in range(2)]
    if kind in ("its own family", "without states", "suffix+model", "medusa"):
        assert 0 < made.stats.accepted < made.stats.drafted
    if kind in ("eagle3", "dflash"):
        assert made.stats.accepted < made.stats.drafted


@pytest.mark.slow(but=["lfm2"])
@pytest.mark.parametrize("family", EVERY)
def test_a_drafter_with_states_leaves_the_ids_of_a_target_without(family: str) -> None:
    plain = wrap(tiny_model("llama"), "llama")
    drafter = ModelDrafter(target(family).fork(), VOCABULARY)
    drafted = run(Engine(plain, drafter, Fixed(K), max_batch=3), n=2)
    assert drafted == run(Engine(plain, None, Fixed(0), max_batch=3), n=2)


@pytest.mark.slow(but=["lfm2-Rejection", "jamba-Coupled", "recurrent-gemma-Coupled"])
@pytest.mark.parametrize("rule", [Coupled, Rejection])
@pytest.mark.parametrize("family", EVERY)
def test_sampled_tokens_of_a_seed_are_those_of_plain_decoding(family: str, rule: type[Rule]) -> None:
    """The coupled rule says so; rejection sampling is equal where every draft is right."""
    draft = _noisy(family) if rule is Coupled else None
    made = engine(family, draft, rule=rule())
    seen = run(made, n=2, temperature=0.8, seed=3)
    assert seen == run(engine(family, None, rule=rule()), n=2, temperature=0.8, seed=3)
    assert (draft is None) == (not made.stats.drafted)


@pytest.mark.slow(but=["lfm2"])
@pytest.mark.parametrize("family", EVERY)
def test_a_text_longer_than_the_usual_context(family: str) -> None:
    hf = tiny_model(family, max_position_embeddings=512)
    runner = wrap(hf, family)
    drafter = ModelDrafter(_noisy(family).fork(), VOCABULARY)
    drafter.runner.context = 512
    made = Engine(runner, drafter, Fixed(K), max_batch=2)
    assert run(made, PROMPTS[1:2], n=2, new=300) == [list(greedy_ids(hf, PROMPTS[1], 300))] * 2
    assert 0 < made.stats.accepted < made.stats.drafted


def test_from_disk(tmp_path: Path) -> None:
    """With packed weights, through the public entry."""
    places = save_pair(tmp_path, "lfm2", draft_architecture="mamba")
    pair = shoal.load(*places)
    plain, drafted = (pair.generate("a b a b a", n=3, max_new_tokens=12, temperature=0, lookahead=k)[0] for k in ("off", 3))
    assert [s.token_ids for s in plain.samples] == [s.token_ids for s in drafted.samples]


@torch.no_grad()
@pytest.mark.parametrize("family", EVERY)
def test_loglikelihoods_are_those_of_the_model(family: str) -> None:
    """Continuations of a context are taken back, one after the other."""
    pairs = [
        ((1, 2, 3), (4, 5, 6)),
        ((1, 2, 3), (7,)),
        ((9, 8, 7, 6, 5), (4, 3, 2, 1)),
        ((1, 2, 3), (4, 4, 4, 4)),
        ((3,), (1,)),
    ]
    runner = target(family)
    steps = runner.mixers is not None and runner.mixers.stepwise and not runner.mixers.own
    for (before, after), (found, _) in zip(pairs, loglikelihoods(runner, pairs), strict=True):
        ids = torch.tensor(
            [[*before, *after]]
        )  # some families bound time steps where several tokens are computed, or one is
        plain = runner.bridge.stepped_logits(ids, max(1, len(before) - 1)) if steps else runner.plain_logits(ids)
        logprobs = plain[0].log_softmax(-1)
        assert found == pytest.approx(
            sum(float(logprobs[len(before) - 1 + i, token]) for i, token in enumerate(after)), abs=1e-3
        )


def test_the_text_half_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    spec = RECURRENT["qwen3.5"].options
    text = NAMES["llama"] | spec | {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "eos_token_id": None}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision | {"num_position_embeddings": 16})
    whole = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    fill(whole, 0)
    whole.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    pair = shoal.load(tmp_path, "suffix")
    ids = torch.tensor([pair.tokenizer.encode("abcabcabc")])
    out = whole.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    said = pair.generate("abcabcabc", n=2, max_new_tokens=12, temperature=0, lookahead=3)
    assert [list(sample.token_ids) for sample in said[0].samples] == [out[0, ids.shape[1] :].tolist()] * 2
    assert said.stats.drafted


# ── negative controls: what these tests would see ───────────────────────────────────────────────────────────────────


def keeps_rejected(self: StateCache, slot: int, length: int) -> None:
    """The state of a rejected draft is kept."""
    SlotCache.rollback(self, slot, length)
    row = self._row_states[slot]
    self._row_states[slot] = RowStates(length, {length: row.sides.get(max(row.sides, default=0), 0)})


def loses_accepted(self: StateCache, slot: int, length: int) -> None:
    """Accepted tokens never enter the state."""
    SlotCache.rollback(self, slot, length)
    self._row_states[slot] = RowStates(length, {length: self._row_states[slot].side})


def padded(plan: Any, *rest: Any) -> Calls:
    """Padding enters the states."""
    wider = copy.copy(plan)
    wider.counts = [plan.q] * plan.rows
    return Calls(wider, *rest)


def other_rows(self: StateCache, group: EqualRows, *rest: Any) -> Tensor:
    """Rows begin with the states of their neighbours."""
    read = group.read
    return THROUGH(self, group if read is None else replace(group, read=read.roll(1)), *rest)


def one_too_many(self: Calls, count: int, *rest: Any) -> EqualRows:
    """A token more than the accepted ones enters the state."""
    return REPLAY(self, count + 1, *rest)


def one_too_few(self: Calls, count: int, *rest: Any) -> EqualRows:
    return REPLAY(self, max(count - 1, 1), *rest)


def settled_by(tokens: int) -> Callable[[RowStates, int], RowStates]:
    """The state of so many tokens more is taken for the one after the accepted tokens, where there is one."""

    def settled(self: RowStates, length: int) -> RowStates:
        right, wrong = SETTLED(self, length), self.sides.get(length + tokens)
        return right if wrong is None or right.base != length else replace(right, sides={length: wrong})

    return settled


THROUGH, REPLAY, SETTLED, PLACES = StateCache.through, Calls._replay, RowStates.settled, EqualRows.positions.func
SABOTAGES: dict[str, list[tuple[Any, str, Any]]] = {
    "a rejected draft stays": [(StateCache, "rollback", keeps_rejected)],
    "an accepted draft is lost": [(StateCache, "rollback", loses_accepted)],
    "padding enters": [(states, "Calls", padded)],
    "another row's state": [(StateCache, "through", other_rows)],
    "one step too many": [(Calls, "_replay", one_too_many), (RowStates, "settled", settled_by(1))],
    "one step too few": [(Calls, "_replay", one_too_few), (RowStates, "settled", settled_by(-1))],
}


def break_states(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    for place, name, wrong in SABOTAGES[fault]:
        monkeypatch.setattr(place, name, wrong)


@pytest.fixture(params=sorted(SABOTAGES))
def sabotage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Breaks the states when called."""
    return lambda: break_states(monkeypatch, request.param)


@pytest.mark.slow(but=["a rejected draft stays-bamba"])
@pytest.mark.parametrize("family", sorted(RECURRENT))
def test_a_wrong_state_is_seen(family: str, sabotage: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(family, half_right(family), max_batch=4)
    monkeypatch.setattr(made.target, "packs", False)
    right = expected(family)
    assert run(made) == right
    sabotage()
    try:
        seen = run(made)
    except (InternalError, RuntimeError):
        return
    assert seen != right


def test_the_self_check_sees_a_wrong_state(sabotage: Callable[[], None], request: pytest.FixtureRequest) -> None:
    """All but those that need rows of equal counts, or a pass after the check's last one."""
    hf = tiny_model("lfm2")
    sabotage()
    if request.node.callspec.params["sabotage"] in ("padding enters", "another row's state"):
        return
    with pytest.raises((UnsupportedModel, InternalError)):
        wrap(hf, "lfm2")


def test_positions_that_are_not_those_of_the_tokens_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """RecurrentGemma begins without a state at position 0."""
    made = engine("recurrent-gemma", half_right("recurrent-gemma"), max_batch=4)
    monkeypatch.setattr(EqualRows, "positions", property(lambda group: PLACES(group) * 0))
    assert run(made) != expected("recurrent-gemma")


def test_states_in_modules_stay_their_owners() -> None:
    hf = tiny_model("recurrent-gemma")
    block = hf.model.layers[0].temporal_block
    made = Engine(wrap(hf, "recurrent-gemma"), NGramDrafter(), Fixed(K), max_batch=3)
    hf.generate(torch.tensor([PROMPTS[1]]), max_new_tokens=4, do_sample=False)
    before = block.conv1d_state, block.rg_lru.recurrent_states
    assert run(made) == expected("recurrent-gemma")
    assert (block.conv1d_state is before[0], block.rg_lru.recurrent_states is before[1]) == (True, True)


# ── the law ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow(but=["lfm2-None", "qwen3-next-a rejected draft stays"])
@pytest.mark.parametrize(
    ("family", "fault"),
    [("qwen3-next", "a rejected draft stays"), *((family, None) for family in FAMILIES)]
    + [pytest.param(family, None, marks=pytest.mark.slow) for family in sorted({*RECURRENT} - {*FAMILIES})]
    + [
        pytest.param(family, "a rejected draft stays", marks=pytest.mark.slow)
        for family in sorted({*RECURRENT} - {"qwen3-next"})
    ],
)
def test_the_law_of_three_tokens(family: str, fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By enumeration: the third token follows a round that took drafts back.

    Each would fail with probability 1e-6 if its seeds were drawn anew.
    """
    hf, draft = (tiny_model(family, vocab_size=4, seed=seed) for seed in (0, 3))
    runner, drafter = wrap(hf, "target"), wrap(draft, "draft")

    def step(tokens: tuple[int, ...]) -> Tensor:
        with torch.inference_mode():
            logits = hf(torch.tensor([[0, 0, *tokens]]), use_cache=False).logits[0, -1]
        return (logits.double() / 2).softmax(-1)

    law = declared_law(step, 4, 3)
    if fault is not None:
        break_states(monkeypatch, fault)
    samples = 4500 if fault and family == "recurrent-gemma" else 1500  # a recurrence that forgets soon
    made, rows = sampled(runner, drafter, by_name(2), horizon=3, samples=samples, temperature=2.0)
    assert 0 < made.stats.accepted < made.stats.drafted
    assert (chi_square(joint(rows, 4), law) > ALPHA) == (fault is None)


# ── rows come and go ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("family", EVERY)
def test_paused_rows_go_on(family: str) -> None:
    made = engine(family, half_right(family), max_batch=2, quantum=4)
    first = made.submit(Request(PROMPTS[1], 2, Sampling(temperature=0.0), Limits(max_new_tokens=NEW)))
    made.step()
    late = run(made, PROMPTS[2:3])
    assert made.stats.pauses > 0
    assert [row.tokens[row.prompt_length :] for row in first] == [stock_ids(family, PROMPTS[1])] * 2
    assert late == [stock_ids(family, PROMPTS[2])]


def test_a_prompt_of_several_passes() -> None:
    """The chunks of a prompt follow each other's states, and rows run in between."""
    ids = prompt(40)
    made = engine("qwen3-next", None, chunk=7)
    made.submit(Request(PROMPTS[0], 1, Sampling(temperature=0.0), Limits(max_new_tokens=60)))
    made.step()
    assert run(made, [ids]) == [stock_ids("qwen3-next", ids)]
    assert made.stats.prefill_chunks > 3


@pytest.mark.parametrize("family", EVERY)
def test_a_prompt_is_computed_once_for_all_its_rows(family: str) -> None:
    """Also for those that join when its first rows have gone on: the states after it are held until then."""
    made = engine(family, half_right(family), max_batch=3)
    assert run(made, PROMPTS[1:3], n=7) == [stock_ids(family, ids) for ids in PROMPTS[1:3] for _ in range(7)]
    assert made.stats.prefill_tokens == 12 + 3


def test_held_states_of_another_length_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = StateCache.hold

    def later(self: StateCache, slot: int) -> None:
        row = self._row_states[slot]
        self._row_states[slot] = replace(row, sides={row.base: 1 - row.side})
        real(self, slot)
        self._row_states[slot] = replace(row, held=self._row_states[slot].held)

    monkeypatch.setattr(StateCache, "hold", later)
    made = engine("lfm2", None, max_batch=3)
    assert run(made, PROMPTS[1:2], n=7) != [stock_ids("lfm2", PROMPTS[1])] * 7


def test_a_prompt_whose_states_are_gone_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateCache, "hold", lambda self, slot: None)
    made = engine("lfm2", None, max_batch=3)
    assert run(made, PROMPTS[1:2], n=7) == [stock_ids("lfm2", PROMPTS[1])] * 7
    assert made.stats.prefill_tokens > 2 * 12


class Says(Drafter):
    """Proposes one token again and again."""

    def __init__(self, token: int) -> None:
        self.token = token

    def propose(self, inputs: DraftInputs) -> DraftTree:
        return DraftTree.of([[self.token] * length for length in inputs.lengths], device=inputs.uniforms.device)


@pytest.mark.parametrize("family", EVERY)
def test_a_row_whose_states_are_nan_ends_alone(family: str) -> None:
    """And the rows that take its slot begin without them."""
    hf = copy.deepcopy(target(family).hf)
    unused = range(8, VOCABULARY)  # those before find the modules that keep states
    damaged = next(i for i in unused if all(i not in (*ids, *stock_ids(family, ids)) for ids in PROMPTS))
    head = hf.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())  # which may be the table itself
    hf.get_input_embeddings().weight.data[damaged] = torch.nan
    made = Engine(wrap(hf, family), Says(PROMPTS[0][0]), Fixed(K), max_batch=2)
    ended, *others = run(made, [(5, damaged, 6), *PROMPTS])
    assert not ended
    assert others == expected(family)


@torch.inference_mode()
def test_zeros_for_states_and_inputs_that_are_not_finite() -> None:
    """The inputs, too, which follow the base state again once a draft is taken back."""
    runner, _ = with_drafts("lfm2")
    cache_ = runner.cache
    assert isinstance(cache_, StateCache)
    both = [*cache_.states_of(0), *cache_._row_states[0].inputs.values()]
    for value, tensor in zip((torch.nan, torch.inf), both, strict=True):
        tensor[-1, -1] = value
    cache_.zero_non_finite(0)
    assert all(bool(tensor.isfinite().all()) and tensor.any() for tensor in both)


# ── what it costs ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_pass_calls_a_mixer_once_for_rows_of_equal_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """And once more for each number of accepted tokens that rejected drafts came after."""
    counts: list[tuple[int, int]] = []

    def through(self: StateCache, group: EqualRows, *rest: Any) -> Tensor:
        counts.append((len(group.slots), group.count))
        return THROUGH(self, group, *rest)

    made = engine("lfm2", None, max_batch=4)  # before passes are counted: a first load makes some
    monkeypatch.setattr(StateCache, "through", through)
    run(made, PROMPTS[1:2], n=4)
    assert counts == [(1, 12)] + [(4, 1)] * NEW
    counts.clear()
    made = engine("lfm2", Says(stock_ids("lfm2", PROMPTS[1])[0]), 2, max_batch=4)
    made.submit(Request(PROMPTS[1], 4, Sampling(temperature=0.0), Limits(max_new_tokens=9)))
    made.step()
    made.step()
    assert made.stats.committed == 4 * 3  # one draft of two was right, then none
    assert counts == [(1, 12), (4, 3), (4, 2), (4, 3)]


class NotingVerdicts(Fixed):
    """A fixed draft length that notes the drafts of each round and those accepted, of a single row."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.noted: list[tuple[int, int]] = []

    def update(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        self.noted += zip(drafted, accepted, strict=True)


@pytest.mark.parametrize("family", EVERY)
def test_what_rejected_drafts_cost_in_calls_of_a_mixer(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By counts, whatever the draft length: one call a round and one again, or one for each token and none again.

    A call again takes the last token and the accepted ones. Mixers that take single tokens repeat those alone that were
    accepted beyond the drafts whose states are kept. No state is copied.
    """
    calls: list[int] = []

    def through(self: StateCache, group: EqualRows, *rest: Any) -> Tensor:
        tokens: Tensor = THROUGH(self, group, *rest)
        calls.append(group.count if stepwise and group.read is not None else 1)
        return tokens

    monkeypatch.setattr(StateCache, "through", through)
    stepwise = family in STEPWISE
    for k in (1, K, 7):
        noting = NotingVerdicts(k)
        made = Engine(target(family), ModelDrafter(half_right(family).fork(), VOCABULARY), noting, max_batch=1)
        mixers_, cache_ = made.target.mixers, made.target.cache
        assert mixers_ is not None
        assert isinstance(cache_, StateCache)
        counted = mixers_.counts
        calls.clear()
        counted.clear()
        assert run(made, PROMPTS[1:2]) == [stock_ids(family, PROMPTS[1])]
        rejected = [1 + accepted for drafted, accepted in noting.noted[:-1] if accepted < drafted]
        assert rejected
        again = [max(0, one - states.KEPT_DRAFTS) for one in rejected] if stepwise else rejected
        assert sum(calls) == len(mixers_.modules) * (
            1 + (sum(again) + sum(1 + k for k, _ in noting.noted) if stepwise else len(noting.noted) + len(again))
        )
        assert counted == (Counter({"replayed tokens": sum(again)}) if sum(again) else Counter())
        assert cache_.sides == (2 + min(k, states.KEPT_DRAFTS) if stepwise else 2)
        assert cache_.bytes_per_slot() == (cache_.sides + 1) * sum(one[0].nbytes for one in cache_.states_of(0))


@pytest.mark.parametrize("family", EVERY)
def test_the_other_way_to_take_drafts_back_would_cost_more_calls(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state after each draft where accepted tokens follow their base again, or the other way round: by counted calls."""
    calls: list[int] = []
    modules = len(target(family).mixers.modules)

    def through(self: StateCache, group: EqualRows, *rest: Any) -> Tensor:
        calls.append(group.count if self.mixers.stepwise and group.read is not None else 1)
        return THROUGH(self, group, *rest)

    def counted(k: int, batch: int, other: bool) -> float:
        runner = target(family).fork()
        if other and family not in STEPWISE:
            runner.mixers = replace(runner.mixers, stepwise=True)
        monkeypatch.setattr(states, "KEPT_DRAFTS", 0 if other and family in STEPWISE else 4)
        runner.cache = runner.new_cache()
        made = Engine(runner, ModelDrafter(half_right(family), VOCABULARY), Fixed(k), max_batch=batch)
        calls.clear()
        assert run(made, new=8) == [ids[:8] for ids in expected(family)]
        assert 0 < made.stats.accepted < made.stats.drafted
        return sum(calls) / modules

    monkeypatch.setattr(StateCache, "through", through)
    for k, batch in ((1, 1), (3, 1), (3, 4)):
        ours, others = (counted(k, batch, other) for other in (False, True))
        assert ours <= others
        assert k == 1 or ours < others


def test_states_are_copied_for_the_rows_of_a_prompt_alone() -> None:
    made = engine("lfm2", None, max_batch=4)
    made.target.mixers.counts.clear()
    run(made, PROMPTS[1:2], n=4)
    assert made.target.mixers.counts == Counter({"copied states": 3})  # three other rows


def test_states_are_counted_in_memory() -> None:
    runner = target("lfm2").fork()
    state = 3 * 32 * 3 * 4  # three states of 32 features and 3 inputs in float32
    assert runner.memory.cache_bytes(2, 10) - runner.memory.cache_bytes(1, 10) == 10 * runner.memory.token_bytes + state
    runner = target("mamba").fork()
    assert runner.memory.token_bytes == 0
    state = 3 * 2 * 64 * (4 + 8) * 4  # two layers
    assert (runner.memory.cache_bytes(3, 10), runner.memory.cache_bytes(3, 1000)) == (3 * state, 3 * state)
    runner.memory.reserve(3, 10)
    assert runner.memory.allocated_bytes == 3 * state


def test_the_model_is_its_owners_again_after_a_pass() -> None:
    hf = target("lfm2").hf
    assert not any("forward" in vars(module) for module in hf.modules())
    mine = hf.model.layers[0].conv
    mine.forward = own = mine.forward
    try:
        assert run(engine("lfm2", None)) == expected("lfm2")
        assert vars(mine)["forward"] is own
    finally:
        del mine.forward


def test_check_names_the_modules() -> None:
    assert family(target("zamba")).data["drafters"] == ["suffix", "ngram", "recycling", "trigrams"]
    assert family(target("zamba")).data["layers_with_states"] == [0, 1]
    assert family(target("zamba")).figure.startswith("zamba; layers 0-1 of 2 with recurrent states; drafters in the box: ")
    assert family(target("lfm2")).figure.startswith("lfm2; layer 0 of 2 with recurrent states; ")
    said = executors(target("zamba"), "target", 3).figure
    kinds = "1 of model.layers.*.mamba, 1 of model.layers.*.mamba_decoder.mamba"
    assert said.endswith(f"; recurrent states in {kinds}: chains only")


def test_a_copy_of_a_row_whose_drafts_were_taken_back() -> None:
    """It goes on as its source does, though neither has the state of its tokens yet."""
    runner, ids = with_drafts("qwen3-next")
    runner.cache.rollback(0, 5)
    runner.cache.copy(0, 1, 5)
    both = runner.feed([0, 1], ids[:, 5:7].expand(2, -1), [2, 2])
    assert torch.equal(both[0], both[1])
    apart = [runner.feed([slot], ids[:, 7:], [1]) for slot in (1, 0)]
    plain = runner.plain_logits(ids)[0, 7]
    assert all(torch.allclose(logits[0, 0], plain, atol=1e-3) for logits in apart)


# ── refused by name ─────────────────────────────────────────────────────────────────────────────────────────────────

STATES = "its layers keep recurrent states"


class Branches(Says):
    max_nodes = 4


_another_tokenizer = cache(large_tokenizer)  # whose 150,000 entries take a second


@pytest.mark.parametrize("family", sorted(RECURRENT))
def test_what_is_refused_says_why(family: str) -> None:
    runner = target(family)
    with pytest.raises(UnsupportedModel, match=f"cannot verify draft trees: {STATES}"):
        engine(family, Branches(1))
    with pytest.raises(UnsupportedModel, match=f"{family} cannot be strict: {STATES}"):
        wrap(runner.hf, family, strict=True)
    with pytest.raises(UnsupportedModel, match=f"{family} cannot be shared by processes: {STATES}"):
        lead(runner)
    with pytest.raises(PairMismatch, match="its layers keep recurrent states, which cannot go back"):
        compared(wrap(tiny_model("llama"), "llama"), runner, _another_tokenizer(), tiny_tokenizer())


@pytest.mark.parametrize("family", sorted(RECURRENT))
def test_no_fused_executor_computes_layers_with_states(family: str) -> None:
    fork = target(family).fork()
    fork.memory.reserve(1, 4)
    use_lean_passes(fork)
    use_fused_layers(fork)
    fork.capture_rounds("eager")
    explanation = fork.explain([0], [1])
    others = f"{type(fork.hf).__name__} is none of LlamaForCausalLM, "
    assert explanation.executor == Modules.name
    assert [refusal.executor for refusal in explanation.refusals] == [C_DECODER, TRITON_LAYERS, CAPTURED]
    assert [refusal.reason.startswith(others) for refusal in explanation.refusals] == [True, True, False]
    assert explanation.refusals[-1].reason == STATES


@pytest.mark.parametrize("family", EVERY)
def test_a_target_with_states_does_not_draft_for_itself(family: str, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=f"cannot draft for itself: {STATES}"):
        shoal.load(tmp_path, "self:exit=1")


def test_a_model_that_says_it_keeps_states_and_shows_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hf = tiny_model("llama")
    monkeypatch.setattr(hf, "_is_stateful", True)
    with pytest.raises(UnsupportedModel, match="keep their states neither in the cache nor in themselves"):
        wrap(hf, "llama")


def test_a_state_that_is_gone_is_not_made_up() -> None:
    runner = target("lfm2").fork()
    runner.memory.reserve(2, 8)
    runner.feed([0], torch.tensor([[1, 2, 3]]), [3], want_logits=False)
    with pytest.raises(InternalError, match="states of 3 tokens and none of 2"):
        runner.cache.rollback(0, 2)
    with pytest.raises(InternalError, match="states of 3 tokens and none of 2"):
        runner.cache.copy(0, 1, 2)


def test_a_mixer_that_takes_more_than_its_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hf = tiny_model("lfm2")
    conv = hf.model.layers[0].conv
    real = type(hf.model.layers[0]).forward

    def forward(self: Any, hidden_states: Tensor, **options: Any) -> Any:
        return real(self, hidden_states, extra=hidden_states, **options)

    monkeypatch.setattr(type(hf.model.layers[0]), "forward", forward)
    with pytest.raises(
        UnsupportedModel, match=r"recurrent module model\.layers\.0\.conv takes more than the states of its tokens"
    ):
        wrap(hf, "lfm2")
    assert conv is hf.model.layers[0].conv
