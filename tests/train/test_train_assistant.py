"""The script that trains a Gemma 4 with its assistant: it computes what Transformers computes, and what it saves is what is loaded.

Tests of: models.target_models, drafting.target_keys.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

if not hasattr(transformers, "Gemma4AssistantForCausalLM") or not hasattr(transformers.cache_utils, "KVSharingDict"):
    pytest.skip("an older Transformers does not know them", allow_module_level=True)

import shoal
import train_assistant
from assistants import by_definition


def pair_of(seed: int, spread: float = 0.02) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    configs = train_assistant.target_config(), train_assistant.assistant_config()
    for config in (configs[0], configs[1], configs[1].text_config):
        config.initializer_range = spread
    classes = transformers.Gemma4ForCausalLM, transformers.Gemma4AssistantForCausalLM
    first, second = (one(config).eval() for one, config in zip(classes, configs, strict=True))
    return first, second


LENGTHS = (2, 30, 63, 64, 65, 66, 80, 98)


@torch.inference_mode()
def test_all_drafts_of_a_text_in_one_pass_are_those_of_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token ahead and two, within the window and beyond it; a window of one key more or less would be seen."""
    model, assistant = pair_of(0, 0.1)
    tokens = torch.arange(100).square().remainder(2003)[None] + 5
    text = tokens[0].tolist()
    right = [torch.stack(by_definition(model, assistant, text[:end], text[end : end + 2])) for end in LENGTHS]

    def differences() -> list[float]:
        _, *both = train_assistant.said(model, assistant, tokens)
        at = torch.stack([torch.stack([one[0, end - 2] for one in both]) for end in LENGTHS])
        return (at - torch.stack(right)).abs().amax((1, 2)).tolist()

    assert max(differences()) < 1e-3
    for wrong in (63, 65):
        monkeypatch.setattr(train_assistant, "WINDOW", wrong)
        assert max(differences()) > 1e-2


@pytest.mark.slow
def test_a_pair_that_was_trained_is_loaded_and_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses are of the right tokens, and the target learns nothing of the assistant's."""
    text = torch.arange(40).remainder(7)[None] + 5
    model, assistant = pair_of(1)
    first = train_assistant.losses(model, assistant, text)
    assert all(7.0 < float(one.detach()) < 8.5 for one in first)
    (first[1] + first[2]).backward()
    assert all(one.grad is None for one in model.parameters())
    assert all(one.grad is not None for name, one in assistant.named_parameters() if "embed_tokens" not in name)
    windows = [text.numpy()] * 40
    monkeypatch.setattr("train_mtp.Windows", lambda *_: windows)
    monkeypatch.setattr("train_mtp.build_corpus", lambda *_: type("Corpus", (), {"train": []}))
    monkeypatch.setattr("train_mtp.pack", lambda *_: None)
    rows: list[dict[str, Any]] = []

    def measure(target: Path, draft: str) -> list[dict[str, Any]]:
        with shoal.load(target, draft, dtype="float32") as pair:
            stats = pair.generate(text[0, :15].tolist(), 2, max_new_tokens=20, lookahead=3, temperature=0.0).stats
        rows.append({"drafted": stats.drafted, "accepted": stats.accepted})
        return rows

    monkeypatch.setattr("train_mtp.measure", measure)
    monkeypatch.setattr("train_mtp.p_values", lambda target, draft: [{"draft": draft}])
    train_assistant.main(tmp_path, 40, to=tmp_path / "counts.json")
    counts = json.loads((tmp_path / "counts.json").read_text())
    assert isinstance(counts["machine"]["commit"], str)
    assert (counts["training steps"], counts["rows"]) == (40, rows)
    assert counts["laws"] == [{"draft": f"assistant:{tmp_path / 'assistant'}"}]
    assert rows[0]["accepted"] > 0.8 * rows[0]["drafted"] > 0
