"""`model.generate(custom_generate=shoal.custom_generate)` returns what `generate` returns.

Tests of: integrations.transformers, integrations.generate_batch.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor
from transformers.generation.stopping_criteria import StoppingCriteria, StopStringCriteria

import shoal
from medusa_heads import save_medusa
from shoal.engine.engine import Engine
from shoal.errors import RequestError, UnsupportedModel
from shoal.integrations import transformers
from shoal.integrations.generate_batch import _for_row
from shoal.testing import tiny_tokenizer
from shoal.types.stats import Stats

VOCAB = 61


def llama(seed: int, layers: int) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=None, eos_token_id=None,
        initializer_range=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    return llama(0, 2), llama(1, 1)


PROMPT = torch.tensor([[5, 6, 7, 8], [9, 3, 4, 4]])


def test_greedy_equals_generate(pair: tuple[Any, Any], ran: list[Stats]) -> None:
    target, drafter = pair
    plain = target.generate(PROMPT, max_new_tokens=20, do_sample=False, num_return_sequences=1)
    ours = target.generate(
        PROMPT, max_new_tokens=20, do_sample=False, custom_generate=shoal.custom_generate, draft_model=drafter, lookahead=3
    )
    assert torch.equal(plain, ours)
    assert ran[0].drafted > 0
    assert ran[0].prefills == 2


def test_left_padding_and_several_samples_of_one_prompt(pair: tuple[Any, Any], ran: list[Stats]) -> None:
    target, drafter = pair
    ids = torch.tensor([[0, 0, 7, 8], [9, 3, 4, 4]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    ours = target.generate(
        ids, attention_mask=mask, max_new_tokens=12, do_sample=True, top_k=0, num_return_sequences=3,
        custom_generate=shoal.custom_generate, draft_model=drafter, lookahead="bass",
    )  # fmt: skip
    assert ours.shape == (6, 16)
    assert torch.equal(ours[:, :4], ids.repeat_interleave(3, dim=0))
    assert ran[0].prefills == 2  # once per prompt, not per sample
    alone = target.generate(torch.tensor([[7, 8]]), max_new_tokens=12, do_sample=False)
    greedy = target.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=12,
        do_sample=False,
        custom_generate=shoal.custom_generate,
        draft_model=drafter,
    )
    assert torch.equal(greedy[0, 4:], alone[0, 2:])


PADDED = torch.tensor([[0, 0, 0, 7], [9, 3, 4, 4], [0, 5, 9, 7], [0, 5, 9, 7]])
MASK = torch.tensor([[0, 0, 0, 1], [1, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1]])
ENDS = {"eos_token_id": list(range(1, 40)), "pad_token_id": 0}
STEPS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"no_repeat_ngram_size": 2},
    {"encoder_repetition_penalty": 1.5},
    {"encoder_no_repeat_ngram_size": 1},
    {"exponential_decay_length_penalty": (3, 1.5), **ENDS},
    {"min_new_tokens": 9, **ENDS},
    {"min_length": 11, **ENDS},
    {"forced_eos_token_id": 50},
    {"begin_suppress_tokens": list(range(30))},
    {"prefix_allowed_tokens_fn": lambda row, ids: [10 + row, 20 + ids.shape[-1], 40 + row]},
    {"stopping_criteria": [StopStringCriteria(tiny_tokenizer(), ["P(5", "9"])], "eos_token_id": 60, "pad_token_id": 0},
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: next(iter(step)))
def test_steps_that_read_ids_see_what_generate_shows_them(
    pair: tuple[Any, Any], ran: list[Stats], step: dict[str, Any]
) -> None:
    """Rows with padding before them: lengths are counted from the whole prompt, and what is held per row is its own."""
    target, drafter = pair
    asked: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 16, "do_sample": False, **step}
    plain = target.generate(PADDED, **asked)
    ours = target.generate(PADDED, **asked, custom_generate=shoal.custom_generate, draft_model=drafter, lookahead=3)
    assert torch.equal(plain, ours)
    assert ran[0].drafted > 0
    without = target.generate(PADDED, attention_mask=MASK, max_new_tokens=16, do_sample=False)
    assert not torch.equal(plain, without)  # the step changes something


def test_the_function_of_prefixes_gets_the_index_that_generate_gives(pair: tuple[Any, Any], ran: list[Stats]) -> None:
    """The row's index before Transformers 5.24, the prompt's from there on; one token is allowed, so that nothing is random."""
    target, drafter = pair
    asked: dict[str, Any] = {
        "do_sample": True, "num_return_sequences": 2, "max_new_tokens": 6, "attention_mask": MASK,
        "prefix_allowed_tokens_fn": lambda index, ids: [10 + index],
    }  # fmt: skip
    plain = target.generate(PADDED, **asked)
    ours = target.generate(PADDED, **asked, custom_generate=shoal.custom_generate, draft_model=drafter, lookahead=3)
    assert torch.equal(plain, ours)
    assert len(set(plain[:, -1].tolist())) in (4, 8)
    assert ran[0].drafted > 0


@pytest.mark.parametrize("beams", [1, 2])
def test_prefixes_by_row_and_by_prompt(beams: int) -> None:
    """Either version's processor, whichever is installed: the index is the row's over the rows that belong to a prompt."""
    processor = PrefixConstrainedLogitsProcessor(lambda index, ids: [10 + index], beams)
    scores = _for_row(processor, 3, 4)(PROMPT[:1], torch.zeros(1, VOCAB))
    assert scores.isfinite().nonzero().tolist() == [[0, 10 + 3 // beams]]


def test_scores_of_padded_rows(pair: tuple[Any, Any]) -> None:
    target, drafter = pair
    asked: dict[str, Any] = {
        "attention_mask": MASK, "max_new_tokens": 12, "do_sample": False, "min_new_tokens": 5, "repetition_penalty": 1.5, **ENDS,
        "return_dict_in_generate": True, "output_scores": True,
    }  # fmt: skip
    plain = target.generate(PADDED, **asked)
    ours = target.generate(PADDED, **asked, custom_generate=shoal.custom_generate, draft_model=drafter, lookahead=3)
    assert torch.equal(ours.sequences, plain.sequences)
    assert len(ours.scores) == len(plain.scores)
    for t, (mine, theirs) in enumerate(zip(ours.scores, plain.scores, strict=True)):
        running = mine.any(dim=-1)  # after its end a row has none
        assert t > 5 or running.all()
        torch.testing.assert_close(mine[running], theirs[running], atol=1e-4, rtol=1e-4)


def test_time_that_is_over_at_once(pair: tuple[Any, Any]) -> None:
    options: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "max_time": 1e-9, "max_new_tokens": 5}
    ours = pair[0].generate(PROMPT, custom_generate=shoal.custom_generate, **options)
    assert torch.equal(ours.sequences, PROMPT)
    assert ours.scores == ()


def test_return_dict_scores_and_logits(pair: tuple[Any, Any]) -> None:
    target, drafter = pair
    options: dict[str, Any] = dict(
        max_new_tokens=10,
        do_sample=False,
        repetition_penalty=1.3,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    plain = target.generate(PROMPT, **options)
    ours = target.generate(PROMPT, custom_generate=shoal.custom_generate, draft_model=drafter, **options)
    assert type(ours) is type(plain)
    assert torch.equal(ours.sequences, plain.sequences)
    for name in ("scores", "logits"):
        mine, theirs = getattr(ours, name), getattr(plain, name)
        assert len(mine) == len(theirs) == 10
        torch.testing.assert_close(torch.stack(mine), torch.stack(theirs), atol=1e-4, rtol=1e-4)


def test_eos_pads_and_manual_seed_repeats(pair: tuple[Any, Any]) -> None:
    target, drafter = pair
    options: dict[str, Any] = dict(
        max_new_tokens=30, do_sample=True, top_k=0, eos_token_id=[11, 12, 13, 14, 15], pad_token_id=0, num_return_sequences=8,
        custom_generate=shoal.custom_generate, draft_model=drafter,
    )  # fmt: skip
    torch.manual_seed(3)
    first = target.generate(PROMPT[:1], **options)
    torch.manual_seed(3)
    assert torch.equal(first, target.generate(PROMPT[:1], **options))
    for row in first[:, 4:].tolist():
        ends = [i for i, token in enumerate(row) if 11 <= token <= 15]
        if ends:
            assert all(token == 0 for token in row[ends[0] + 1 :])


class Seven(StoppingCriteria):
    """Stops a row once it holds seven new tokens."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 11, dtype=torch.bool)


def test_own_stopping_criteria_inside_a_block(pair: tuple[Any, Any]) -> None:
    target, _ = pair
    ours = target.generate(
        PROMPT, max_new_tokens=30, do_sample=False, stopping_criteria=[Seven()], custom_generate=shoal.custom_generate,
        draft_model=target, lookahead=4,
    )  # fmt: skip
    assert ours.shape[1] == 11


def test_the_model_is_its_owners_again(pair: tuple[Any, Any]) -> None:
    target, drafter = pair
    before = target.config._attn_implementation
    target.generate(PROMPT, max_new_tokens=3, custom_generate=shoal.custom_generate, draft_model=drafter)
    assert target.config._attn_implementation == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "num_beams must be 1"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "no contrastive_search"),
        ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor is not supported"),
        ({"inputs_embeds": torch.zeros(2, 4, 32)}, "no inputs_embeds"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "must be off"),
        ({"lookahead": "soon"}, "lookahead must be"),
        ({"attention": "magic"}, "attention must be one of"),
    ],
)
def test_what_is_refused(pair: tuple[Any, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        pair[0].generate(PROMPT, max_new_tokens=3, custom_generate=shoal.custom_generate, draft_model=pair[1], **options)


def test_training_mode_with_dropout_is_refused() -> None:
    model = llama(5, 1)
    model.generate(PROMPT, max_new_tokens=3, custom_generate=shoal.custom_generate)
    model.config.attention_dropout = 0.1  # the model is known and checked by now
    with pytest.raises(RequestError, match="training mode"):
        model.train().generate(PROMPT, max_new_tokens=3, custom_generate=shoal.custom_generate)
    model.eval().generate(PROMPT, max_new_tokens=3, custom_generate=shoal.custom_generate)


def test_the_self_check_runs_once_per_model(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(6, 1)
    model.generate(PROMPT, max_new_tokens=2, custom_generate=shoal.custom_generate)
    monkeypatch.setattr(transformers.loading, "wrap", lambda *a: pytest.fail("checked twice"))
    model.generate(PROMPT, max_new_tokens=2, custom_generate=shoal.custom_generate)
    assert issubclass(UnsupportedModel, shoal.ModelError)


USES = [None, "model", "suffix", "self:exit=1", "medusa"]


def freed(use: str | None, tmp_path: Path) -> tuple[bool, bool]:
    """Whether a draft model is freed beside its target, and a target after it was used twice, nothing else being freed by hand."""
    target, draft = llama(0, 2), llama(1, 1)
    if use == "medusa":
        save_medusa(tmp_path, vocab=VOCAB)
    drafter = {"model": draft, "medusa": f"medusa:{tmp_path}"}.get(str(use), use)
    for _ in range(2):
        target.generate(PROMPT, max_new_tokens=4, lookahead=2, custom_generate=shoal.custom_generate, draft_model=drafter)
    held = weakref.ref(draft), weakref.ref(target)
    del draft, drafter
    gc.collect()
    without_draft = held[0]() is None
    del target
    gc.collect()
    return without_draft, held[1]() is None


@pytest.mark.parametrize("use", USES)
def test_models_are_freed(use: str | None, tmp_path: Path) -> None:
    """Though what is made for them once is kept from call to call."""
    assert freed(use, tmp_path) == (True, True)


def test_a_target_is_freed_while_its_draft_model_is_used(pair: tuple[Any, Any]) -> None:
    target = llama(0, 2)
    target.generate(PROMPT, max_new_tokens=4, custom_generate=shoal.custom_generate, draft_model=pair[1], lookahead=2)
    held = weakref.ref(target)
    del target
    gc.collect()
    assert held() is None


def test_a_dictionary_with_weak_keys_would_hold_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A sabotage: a runner holds the model that it is kept by."""

    class Table:
        def __init__(self) -> None:
            self.known: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()

        def of(self, model: Any) -> dict[Any, Any]:
            return self.known.setdefault(model, {})

    monkeypatch.setattr(transformers, "_runners", Table())
    assert freed(None, tmp_path) == (True, False)
    monkeypatch.undo()
    monkeypatch.setattr(transformers, "_given", Table())
    assert freed("model", tmp_path) == (False, True)


def test_copies_of_a_model_begin_anew() -> None:
    """Deep or shallow, and what is saved: a copy with the runner of its original would run the original's weights."""
    model = llama(0, 2)
    runner = transformers._runner(model, "auto")
    for made in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))):
        assert transformers._runner(made, "auto").hf is made
    assert transformers._runner(model, "auto") is runner


@pytest.mark.parametrize("separate", [False, True], ids=["grouped", "separate"])
def test_no_two_rows_share_their_random_numbers(
    pair: tuple[Any, Any], separate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one prompt, of several, and equal prompts that are not grouped because a function is called with the row's index."""
    rows: list[Any] = []
    submit_all = Engine.submit_all

    def spy(self: Engine, *args: Any, **kwargs: Any) -> Any:
        made = submit_all(self, *args, **kwargs)
        rows.extend(row for group in made for row in group)
        return made

    monkeypatch.setattr(Engine, "submit_all", spy)
    asked: dict[str, Any] = {"prefix_allowed_tokens_fn": lambda row, ids: list(range(VOCAB))} if separate else {}
    ids = torch.tensor([[5, 6, 7, 8], [9, 3, 4, 4], [5, 6, 7, 8]])
    for seed in (0, 1):
        torch.manual_seed(seed)
        pair[0].generate(
            ids, do_sample=True, top_k=0, max_new_tokens=8, num_return_sequences=5, custom_generate=shoal.custom_generate,
            draft_model=pair[1], lookahead=3, **asked,
        )  # fmt: skip
    assert len(rows) == 30
    assert len({row.seed for row in rows}) == 30
    assert len({tuple(row.tokens) for row in rows}) > 25  # two may be equal by chance
