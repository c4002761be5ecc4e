"""The script that trains a hybrid target with a layer for further tokens: its losses are of the right tokens, and what it saves is
what is loaded.

Tests of: models.mtp_layer.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3_5ForCausalLM
from transformers.modeling_layers import MtpModel

import shoal
import train_mtp
from shoal.drafting.mtp import MtpDrafter
from shoal.errors import RequestError
from shoal.models.mtp_layer import Beside


@pytest.mark.slow
def test_a_saved_layer_is_the_trained_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model: Any = Qwen3_5ForCausalLM(train_mtp.config())
    layer = MtpModel(Beside(model, tmp_path), 1)
    tokens = torch.arange(40).remainder(7)[None] + 5
    optimizer = torch.optim.Adam({id(one): one for one in [*model.parameters(), *layer.parameters()]}.values(), lr=3e-3)
    first = train_mtp.losses(model, layer, tokens)
    for _ in range(25):
        optimizer.zero_grad()
        torch.stack(train_mtp.losses(model, layer, tokens)).sum().backward()
        optimizer.step()
    last = train_mtp.losses(model, layer, tokens)
    assert all(7.0 < float(one.detach()) < 8.5 for one in first)
    assert all(float(one.detach()) < 0.5 for one in last)
    train_mtp.save(model.eval(), layer, tmp_path)
    with shoal.load(tmp_path, "auto", dtype="float32") as pair:
        drafter = MtpDrafter.for_target(pair.target)
        for name, tensor in layer.layers.state_dict().items():
            assert torch.equal(drafter._heads.layer.layers.state_dict()[name], tensor), name
        stats = pair.generate(tokens[0, :15].tolist(), 2, max_new_tokens=20, lookahead=3, temperature=0.0).stats
        assert stats.accepted > 0.8 * stats.drafted > 0
    problems = train_mtp.generate(1, 12, "constants")[:1]
    for name, value in {"NEW": 4, "CALLS": 40, "generate": lambda *_: problems}.items():
        monkeypatch.setattr(train_mtp, name, value)
    rejection, coupled = train_mtp.p_values(tmp_path)
    assert min(rejection["p-value"], coupled["p-value"]) > 1e-6
    assert max(rejection["p-value of another law"], coupled["p-value of another law"]) < 1e-6
    assert (coupled["prompts"], coupled["prompts with the sampled ids of plain decoding"]) == (1, 1)
    assert rejection["drafted"] > 0


def test_a_law_is_that_of_the_model_up_to_the_end_of_the_text() -> None:
    torch.manual_seed(0)
    model: Any = Qwen3_5ForCausalLM(train_mtp.config()).eval()
    first = train_mtp.law(model, [5, 6], 1.5)
    assert len(first) == train_mtp.TOP_K**train_mtp.TOKENS
    model.config.eos_token_id = end = next(iter(first))[0]
    law = train_mtp.law(model, [5, 6], 1.5)
    assert len(law) == 1 + (train_mtp.TOP_K - 1) * train_mtp.TOP_K**2
    assert law[(end,)] == pytest.approx(sum(share for path, share in first.items() if path[0] == end))
    assert sum(law.values()) == pytest.approx(1)
    with torch.inference_mode():
        said = model(torch.tensor([[5, 6]]), use_cache=False).logits[0, -1].double()
    assert law[(end,)] == pytest.approx(float((said.topk(train_mtp.TOP_K).values / 1.5).softmax(-1)[0]))


def test_samples_of_another_law_do_not_fit() -> None:
    law = {(0,): 0.5, (1, 0): 0.3, (1, 1): 0.199, (1, 2): 0.001}
    right = Counter({(0,): 505, (1, 0): 295, (1, 1): 199, (1, 2): 1})
    assert train_mtp.fit_of(right, law) > 0.5
    assert train_mtp.fit_of(right + Counter({(0,): 150}), law) < 1e-3
    assert train_mtp.fit_of(right + Counter({(2,): 1}), law) == 0


def test_counts_become_a_file_that_names_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that takes none of a changed tree is refused before the training."""
    trained, rows = [], [{"lookahead": 1, "rounds": 3}]
    monkeypatch.setattr(train_mtp, "train", lambda directory, steps: trained.append((directory, steps)))
    laws = [{"rule": "rejection", "p-value": 0.5}]
    monkeypatch.setattr(train_mtp, "measure", lambda *_: rows)
    monkeypatch.setattr(train_mtp, "p_values", lambda *_: laws)
    train_mtp.main(tmp_path, 2, to=tmp_path / "counts.json")
    found = json.loads((tmp_path / "counts.json").read_text())
    assert isinstance(found["machine"]["commit"], str)
    assert (found["training steps"], found["rows"], found["laws"], trained) == (2, rows, laws, [(tmp_path, 2)])
    train_mtp.main(tmp_path, trained=True, to=tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text())["training steps"] is None
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    monkeypatch.setattr("shoal.bench.machine.commit", lambda: "0123456789ab-dirty")
    with pytest.raises(RequestError, match="must name the commit"):
        train_mtp.main(tmp_path, 2, to=tmp_path / "benchmarks" / "results" / "a.json")
    assert len(trained) == 1
