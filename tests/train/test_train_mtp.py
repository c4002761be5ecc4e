"""The script that trains a hybrid target with a layer for further tokens: its losses are of the right tokens, and what it saves is
what is loaded.

Tests of: models.mtp_layer.
"""

from __future__ import annotations

import json
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


def test_a_saved_layer_is_the_trained_one(tmp_path: Path) -> None:
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


def test_counts_become_a_file_that_names_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that takes none of a changed tree is refused before the training."""
    trained, rows = [], [{"lookahead": 1, "rounds": 3}]
    monkeypatch.setattr(train_mtp, "train", lambda directory, steps: trained.append((directory, steps)))
    monkeypatch.setattr(train_mtp, "measure", lambda directory: rows)
    train_mtp.main(tmp_path, 2, to=tmp_path / "counts.json")
    found = json.loads((tmp_path / "counts.json").read_text())
    assert isinstance(found["machine"]["commit"], str)
    assert (found["training steps"], found["rows"], trained) == (2, rows, [(tmp_path, 2)])
    train_mtp.main(tmp_path, trained=True, to=tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text())["training steps"] is None
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    monkeypatch.setattr("shoal.bench.machine.commit", lambda: "0123456789ab-dirty")
    with pytest.raises(RequestError, match="must name the commit"):
        train_mtp.main(tmp_path, 2, to=tmp_path / "benchmarks" / "results" / "a.json")
    assert len(trained) == 1
