"""A real checkpoint as its owner treats it: long prompts, weights that change in place, saved and loaded again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.drafting.draft import read_draft

pytestmark = [pytest.mark.real, pytest.mark.limit(900)]

TEXT = "The river was wide and slow, and the ferry crossed it twice a day, at nine and at five. " * 500


def long_prompt(tokenizer: Any, length: int) -> list[int]:
    ids = tokenizer(TEXT)["input_ids"][:length]
    assert len(ids) == length
    return ids


@torch.inference_mode()
def chosen(hf: Any, prompt: list[int], new: tuple[int, ...]) -> tuple[list[int], torch.Tensor]:
    """The tokens with the highest logits where the new ones are, and the log-probabilities of the new ones."""
    logits = hf(torch.tensor([[*prompt, *new]]), use_cache=False, logits_to_keep=len(new) + 1).logits[0, :-1]
    return logits.argmax(dim=1).tolist(), logits.log_softmax(dim=1).gather(1, torch.tensor(new)[:, None])[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize("length", [2000, 7900])
def test_long_prompts(few_layers: Path, pair: Any, stock: Callable[[str], Any], length: int) -> None:
    """2,000 tokens through all layers; 7,900, near the end of the context, through the first ones."""
    from transformers import AutoModelForCausalLM

    if length < 4000:
        hf, model = stock("float32"), pair("float32", "auto")
    else:
        hf = AutoModelForCausalLM.from_pretrained(few_layers, dtype=torch.float32).eval()
        model = shoal.load(few_layers, dtype="float32")
    prompt = long_prompt(model.tokenizer, length)
    drafter = read_draft("suffix").drafter(model.target)  # type: ignore[union-attr]
    options = {"temperature": 0, "max_new_tokens": 12, "lookahead": 4, "eos": ()}
    result = model.generate([prompt, prompt[-40:]], 2, drafter=drafter, **options)
    assert result.stats.executors["target"].keys() <= {"C decoder", "C layers"}
    sample = result[0].samples[0]
    best, logprobs = chosen(hf, prompt, sample.token_ids)
    assert list(sample.token_ids) == best
    torch.testing.assert_close(torch.tensor(sample.logprobs), logprobs, rtol=0, atol=1e-4)
    assert result[0].samples[1].token_ids == sample.token_ids
    assert 0 < result.stats.accepted <= result.stats.drafted
    assert result.stats.rounds < 12


@pytest.mark.slow
def test_weights_change_in_place_are_saved_and_loaded(few_layers: Path, tmp_path: Path) -> None:
    """Tied and packed as they are: writes count from the next call on, and a saved copy is the changed model."""
    from transformers import AutoModelForCausalLM

    prompt, options = "The lighthouse keeper", {"temperature": 0, "max_new_tokens": 8, "eos": ()}
    with shoal.load(few_layers, dtype="float32") as model:
        before = model.generate(prompt, **options)[0].samples[0].token_ids
        hf = model.target.hf
        with torch.no_grad():
            hf.model.layers[1].mlp.down_proj.weight.mul_(-1.5)
            hf.model.embed_tokens.weight[100:200].mul_(1.25)
        after = model.generate(prompt, **options)[0].samples[0].token_ids
        ids = model.tokenizer(prompt)["input_ids"]
        assert before != after
        hf.save_pretrained(tmp_path / "saved")
        model.tokenizer.save_pretrained(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32).eval()
    assert chosen(saved, ids, after)[0] == list(after)
    with shoal.load(tmp_path / "saved", dtype="float32") as again:
        result = again.generate(prompt, **options)
        assert result.stats.executors["target"].keys() <= {"C decoder", "C layers"}
        assert result[0].samples[0].token_ids == after
