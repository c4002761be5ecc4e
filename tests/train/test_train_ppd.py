"""`shoal train ppd`: prompt tokens learn from the target's own samples what it says further on, and draft for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import shoal
from shoal.cli import run
from shoal.testing import save_pair
from shoal.train import own_samples
from shoal.train.heads import HeadsTraining
from shoal.train.ppd import PpdTrainer, hidden_but_own

PROMPTS = ["def f(x):", "import"]
TRAINING = HeadsTraining(heads=2, samples=24, new_tokens=40, steps=30, length=32, batch=8)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pair(tmp_path_factory.mktemp("pair"))[0]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_samples, "PART", 8)


def test_what_is_compared(place: Path, tmp_path: Path) -> None:
    """Prompt tokens see a window up to their place and those before them there; each is compared with as many positions on."""
    trainer = PpdTrainer(tmp_path / "a", str(place), PROMPTS, TRAINING)
    trainer.prepare()
    tokens = torch.from_numpy(trainer.samples.tokens(held_out=False)[:64].astype("int64")).view(2, 32)
    said = trainer.said(tokens)
    embedding, vectors = trainer.target.get_input_embeddings(), trainer.model.weight
    with torch.no_grad():
        right = trainer.target(input_ids=tokens, use_cache=False).logits
        for place_ in (0, 7, 29):
            given = torch.cat([embedding(tokens[:, : place_ + 1]), vectors[None].expand(2, -1, -1)], dim=1)
            found = trainer.target(inputs_embeds=given, use_cache=False).logits[:, -2:]
            for i, (q, p) in enumerate(said):
                assert q.shape == p.shape == (2, 30, 260)
                assert torch.allclose(q[:, place_], found[:, i], atol=1e-4)
                assert torch.equal(p[:, place_], right[:, place_ + 1 + i])
    seen = hidden_but_own(torch.tensor([0, 2]), 2, 4)[0, 0] == 0
    assert seen.int().tolist() == [
        [1, 0, 0, 0, 1, 0, 0, 0],
        [1, 0, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 0, 1, 0],
        [1, 1, 1, 0, 0, 0, 1, 1],
    ]


def test_prompt_tokens_learn_and_draft(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = PpdTrainer(tmp_path / "a", str(place), PROMPTS, TRAINING)
    trainer.prepare()
    tokens = torch.from_numpy(trainer.samples.tokens(held_out=False)[:256].astype("int64")).view(8, 32)
    before = float(trainer.loss(trainer.trainer.model, tokens).detach())
    weights = {name: tensor.clone() for name, tensor in trainer.target.state_dict().items()}
    trainer.train()
    assert float(trainer.loss(trainer.trainer.model, tokens).detach()) < before
    assert all(torch.equal(weights[name], tensor) for name, tensor in trainer.target.state_dict().items())
    out, prompts = tmp_path / "b", tmp_path / "prompts.jsonl"
    prompts.write_text('"def f(x):"\n{"prompt": "import"}\n')
    command = ["train", "ppd", "-m", str(place), "-o", str(out), "--samples", "24", "--new-tokens", "64", "--ahead", "2"]
    command += ["--prompts", str(prompts)]
    assert run([*command, "--steps", "2"]) == 0
    assert "accepted" in capsys.readouterr().out
    assert {file.name for file in out.iterdir()} == {"config.json", "prompt_tokens.safetensors", "training"}
    config = json.loads((out / "config.json").read_text())
    assert [len(row) for row in config["accuracies"]] == [10, 10]
    assert all(0 <= chance <= 1 for row in config["accuracies"] for chance in row)
    with shoal.load(place, f"ppd:{out},nodes=6", dtype="float32") as pair:
        found = pair.generate("def f(x):", 2, max_new_tokens=8, temperature=0.0, lookahead=2)
        plain = pair.generate("def f(x):", 2, max_new_tokens=8, temperature=0.0, lookahead="off")
        assert [s.token_ids for s in found[0].samples] == [s.token_ids for s in plain[0].samples]
