"""Assistants of Gemma 4: drafts by Transformers' definition in ragged batches, exact by their q; refused where they do not fit.

Tests of: models.target_models, drafting.target_keys, drafting.trained_heads, drafting.registry.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import shoal
from laws import ALPHA
from proposals import Proposal, decoded, largest_difference, p_of_two_tokens, recorded, require_tokens_of_plain_decoding
from shoal.config import Limits, Sampling
from shoal.drafting import trained_heads
from shoal.drafting.protocol import DraftInputs
from shoal.drafting.target_keys import AssistantDrafter
from shoal.engine.engine import Engine
from shoal.errors import ModelError, PairMismatch, UnsupportedModel
from shoal.lookahead.controller import Fixed
from shoal.models import target_models
from shoal.models.loading import wrap
from shoal.models.runner import Runner
from shoal.models.target_models import LentKeys
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.testing import save_pair
from shoal.types.requests import Request, Row
from shoal.types.trees import DraftTree

if not hasattr(transformers, "Gemma4AssistantForCausalLM") or not hasattr(transformers.cache_utils, "KVSharingDict"):
    pytest.skip("an older Transformers does not know them", allow_module_level=True)

from assistants import assistant, by_definition, save_assisted

PROMPTS = [[(7 * i * i + number) % 250 for i in range(length)] for number, length in enumerate((1, 5, 19))]


class Pair(NamedTuple):
    """A target, the directory of its assistant, and the assistant as Transformers loads it."""

    target: Runner
    place: str
    stock: Any

    def drafter(self) -> AssistantDrafter:
        return AssistantDrafter.for_target(self.target, directory=self.place)


def loaded(directory: Path, vocab: int = 260, **options: Any) -> Pair:
    target, place = save_assisted(directory, vocab, **options)
    runner = wrap(AutoModelForCausalLM.from_pretrained(target).eval(), "tiny")
    return Pair(runner, str(place), AutoModelForCausalLM.from_pretrained(place).eval())


KINDS = {"shared": {}, "dense": {"shared": 0}, "ordered": {"ordered": True}, "unified": {"unified": True}}
"""Targets some of whose layers read the keys of others; none, so that rows share stored prompts; an assistant of clusters; the pair
of the unified kind (`gemma4_unified_assistant`)."""


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return loaded(tmp_path_factory.mktemp(request.param), **KINDS[request.param])


def difference(pair: Pair, proposals: Sequence[Proposal], enough: float = math.inf) -> float:
    """Between the q that were proposed and those of the definition."""
    return largest_difference(proposals, functools.partial(by_definition, pair.target.hf, pair.stock), enough)


# ── what is drafted ─────────────────────────────────────────────────────────────────────────────────────────────────

REAL_KEYS, REAL_ATTEND, REAL_FORWARD = LentKeys.__getitem__, target_models._attend, target_models.AssistantModel.forward


def of_the_next_row(keys: LentKeys, kind: str) -> tuple[Tensor, Tensor]:
    own, values = REAL_KEYS(keys, kind)
    return own.roll(1, dims=0), values


def of_the_other_kind(keys: LentKeys, kind: str) -> tuple[Tensor, Tensor]:
    return REAL_KEYS(keys, kind)[0].flip(2), REAL_KEYS(keys, kind)[1]


def of_the_last_column(scores: Any, verdict: Any) -> Tensor:
    return trained_heads._hidden(scores)[:, -1]


def one_position_less(model: Any, tokens: Tensor, past_key_values: Any, use_cache: bool, position_ids: Tensor) -> Any:
    return REAL_FORWARD(model, tokens, past_key_values, use_cache, position_ids - 1)


def always_the_first_state(model: Any, tokens: Tensor, past_key_values: Any, use_cache: bool, position_ids: Tensor) -> Any:
    before = model.states
    found = REAL_FORWARD(model, tokens, past_key_values, use_cache, position_ids)
    model.states = before
    return found


SABOTAGES: list[tuple[Any, str, Any]] = [
    (LentKeys, "__getitem__", of_the_next_row),
    (LentKeys, "__getitem__", of_the_other_kind),
    (trained_heads, "last_kept", of_the_last_column),
    (target_models.AssistantModel, "forward", one_position_less),
    (target_models.AssistantModel, "forward", always_the_first_state),
]


@pytest.mark.slow(but=["shared"])
@torch.inference_mode()
def test_drafts_are_those_of_the_definition(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """In ragged batches with joins, cancellations and moves, beyond the window, after accepted and rejected drafts."""
    drafter = pair.drafter()
    proposals = recorded(drafter)
    engine, _ = decoded(pair.target, drafter, Rejection(), 2.0, PROMPTS)
    stats = engine.stats
    assert len(proposals) > 25
    assert 0 < stats.accepted < stats.drafted
    assert stats.draft_passes <= 3 * stats.rounds
    assert max(len(draft) for _, draft, _ in proposals) == 3
    assert max(len(tokens) for tokens, _, _ in proposals) > 25
    assert difference(pair, proposals) < 1e-4
    assert drafter.kept_bytes == 0
    first, second = (Row(Request((1,)), place, 0, 0, [1], frozenset(), 9) for place in range(2))
    drafter._last[first] = torch.ones(32)
    drafter.replace([(second, first)])
    assert torch.equal(drafter._last[second], torch.ones(32))
    assert drafter.kept_bytes == 2 * 32 * 4
    for owner, name, wrong in SABOTAGES:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, wrong)
            other = pair.drafter()
            proposals = recorded(other)
            decoded(pair.target, other, Rejection(), 2.0, PROMPTS)
            assert difference(pair, proposals, 1e-3) > 1e-3, wrong


@torch.inference_mode()
def test_a_first_draft_is_that_of_transformers(pair: Pair) -> None:
    """Greedy, by the generator of candidates that `generate(assistant_model=)` asks."""
    from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

    hf, prompt = pair.target.hf, PROMPTS[2]
    pair.stock.generation_config.num_assistant_tokens = 3
    generation = transformers.GenerationConfig(max_length=100)
    stock = SinglePositionMultiTokenCandidateGenerator(pair.stock, hf.get_input_embeddings(), generation)
    known = hf(torch.tensor([prompt[:-1]]), use_cache=True, output_hidden_states=True, return_shared_kv_states=True)
    candidates, _ = stock.get_candidates(torch.tensor([prompt]), {}, known, is_first_iteration=False, n_last_matches=0)

    drafter, found = pair.drafter(), []
    real = drafter.propose

    def propose(inputs: DraftInputs) -> DraftTree:
        tree = real(inputs)
        found.extend(list(draft) for row, draft in zip(inputs.rows, tree.drafts, strict=True) if row.tokens == prompt)
        return tree

    drafter.propose = propose  # type: ignore[method-assign]
    engine = Engine(pair.target, drafter, Fixed(3), max_batch=2, rule=Coupled())
    engine.submit(Request(tuple(prompt), 1, Sampling(temperature=0.0), Limits(max_new_tokens=12)))
    while engine.step():
        pass
    assert found == [candidates[0, len(prompt) :].tolist()]


@torch.inference_mode()
def test_a_row_says_the_same_whatever_is_beside_it(tmp_path: Path) -> None:
    """Tokens in no chosen cluster are as likely as the row's own least one allows, not the least one of all rows."""
    pair = loaded(tmp_path, ordered=True)
    drafter = pair.drafter()
    engine = Engine(pair.target, drafter, Fixed(1), max_batch=4, rule=Rejection())
    proposals = recorded(drafter)
    for prompt in PROMPTS[1:]:
        engine.submit(Request(tuple(prompt), 1, Sampling(temperature=2.0, seed=1), Limits(max_new_tokens=6)))
    while engine.step():
        pass
    assert max(len(q[0].unique()) for _, _, q in proposals) <= 31  # three clusters of ten, and all others alike
    assert difference(pair, proposals) < 1e-4


# ── exactness ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow(but=["shared"])
def test_tokens_are_those_of_plain_decoding(pair: Pair) -> None:
    require_tokens_of_plain_decoding(pair.target, pair.drafter, PROMPTS)


@pytest.mark.slow(but=["2-rejection", "2-coupled"])
@pytest.mark.parametrize("rule", [Rejection(), Coupled()], ids=["rejection", "coupled"])
@pytest.mark.parametrize("shared", [2, 0])
def test_two_tokens_have_their_law(shared: int, rule: Rule, tmp_path: Path) -> None:
    """By enumeration; it would fail with probability 1e-6 if its seeds were drawn anew."""
    pair = loaded(tmp_path, 5, shared=shared)
    pair.target.shares = False  # right behind a stored prompt nothing is drafted
    assert p_of_two_tokens(pair.target, pair.drafter(), (1, 4, 2), 1200, rule) > ALPHA


# ── the way in ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_way_in(tmp_path: Path) -> None:
    target, place = save_assisted(tmp_path)
    AutoModelForCausalLM.from_pretrained(place).bfloat16().save_pretrained(place)  # computes as its target does
    for spec, name in ((f"assistant:{place}", "assistant"), (str(place), "assistant"), (f"suffix+{place}", "suffix")):
        with shoal.load(target, spec, dtype="float32") as made:
            assert str(made.drafter_name).startswith(name)
            found = made.generate(PROMPTS, 2, max_new_tokens=6, lookahead=2, temperature=0.0, eos=())
            assert found.stats.draft_passes > 0
            assert found.stats.drafted > 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"vocab": 250}, "a vocabulary of 250 v 260"),
        ({"width": 48}, "hidden states of 48 v 32"),
        ({"head_dim": 16}, "head_dim of sliding_attention of 16 v 8"),
        ({"num_key_value_heads": 1}, "num_key_value_heads of sliding_attention of 1 v 2"),
    ],
    ids=lambda given: "" if isinstance(given, str) else next(iter(given)),
)
def test_an_assistant_of_another_target_is_refused(options: dict[str, int], reason: str, tmp_path: Path) -> None:
    target, place = save_assisted(tmp_path)
    assistant(**options).save_pretrained(place)
    with pytest.raises(PairMismatch, match=f"cannot draft for .*: {reason}: the assistant of another target"):
        shoal.load(target, str(place), dtype="float32")


def test_what_it_cannot_draft_for_or_be_is_refused(tmp_path: Path) -> None:
    target, place = save_assisted(tmp_path)
    llama, _ = save_pair(tmp_path / "llama")
    with pytest.raises(UnsupportedModel, match=r"\(llama\) lends no keys and values: such assistants draft for Gemma 4"):
        shoal.load(llama, str(place), dtype="float32")
    with pytest.raises(
        UnsupportedModel, match=r"\(gemma4_assistant\) is not supported: it drafts from the keys and values of its own"
    ):
        shoal.load(place, dtype="float32")
    tensors = load_file(place / "model.safetensors")
    del tensors["post_projection.weight"]
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 of its tensors, for example post_projection\.weight"):
        shoal.load(target, str(place), dtype="float32")
