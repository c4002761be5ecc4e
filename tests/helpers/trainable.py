"""Models that tests train: a target that can be learned, and what trained drafters must do."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

import shoal
from shoal.testing import save_pair
from shoal.train import own_samples

PROMPTS = ["def f(x):", "import"]


def learnable(folder: Path, sharper: float = 1.0) -> Path:
    """Saves a target whose layers do nothing, so that what follows depends on the last token alone.

    Args:
        sharper: factor of the head's weights.
    """
    found = save_pair(folder)[0]
    model = LlamaForCausalLM.from_pretrained(found)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.zero_()
        if "lm_head" in name:
            parameter.data *= sharper
    model.save_pretrained(found)
    return found


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few samples of the target at a time."""
    monkeypatch.setattr(own_samples, "PART", 8)


def assert_drafts(place: Path, drafter: Path | str, drafts: bool = True) -> None:
    """A trained drafter drafts, and changes no token.

    Args:
        drafts: False for one that has learned so little that it may leave drafting be.
    """
    with shoal.load(place, drafter, dtype="float32") as pair:
        for temperature in (0.0, 0.8):
            same = {"max_new_tokens": 8, "temperature": temperature, "seed": 1}
            found, plain = (pair.generate("def f(x):", 2, lookahead=k, **same) for k in (2, "off"))
            assert [s.token_ids for s in found[0].samples] == [s.token_ids for s in plain[0].samples]
            assert found.stats.drafted > 0 or not drafts
