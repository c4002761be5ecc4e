"""`shoal train`: heads learn from the target's own samples, go on where they were stopped, and draft for it.

Tests of: train, train.heads, train.loop, cli.train.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eagle_heads import by_definition
from shoal.cli import run
from shoal.drafting.draft import read_draft
from shoal.drafting.medusa import MedusaHeads
from shoal.testing import VOCABULARY, save_pair
from shoal.train import HeadsTraining
from shoal.train import heads as trained
from shoal.train.heads import MedusaTrainer, PpdTrainer, hidden_but_own
from shoal.train.loop import Trainer
from trainable import PROMPTS, assert_drafts, learnable, small

__all__ = ["small"]  # a fixture
TRAINING = HeadsTraining(heads=2, samples=32, new_tokens=40, steps=40, length=32, batch=8)
PPD = replace(TRAINING, samples=24, steps=30)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return learnable(tmp_path_factory.mktemp("pair"), sharper=4)


def loss(trainer: MedusaTrainer | PpdTrainer) -> float:
    tokens = torch.from_numpy(trainer.samples.tokens(held_out=False)[:256].astype("int64")).view(8, 32)
    return float(trainer.loss(trainer.trainer.model, tokens).detach())


def test_heads_learn_and_are_the_same_after_an_interruption(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is stopped goes on from its checkpoint to the same weights; what was exported half-trained can be loaded."""
    whole = MedusaTrainer(tmp_path / "a", str(place), PROMPTS, TRAINING)
    whole.prepare()
    before = loss(whole)
    whole.train()
    assert loss(whole) < 0.8 * before
    after = whole.figures()
    assert len(after) == 2
    assert all(0 < one.accepted <= one.among_five < 1 and 0 < one.greedy <= 1 for one in after)

    real = Trainer.advance

    def interrupted(self: Trainer, *given: Any) -> float:
        if self.step == 5:
            raise KeyboardInterrupt
        return real(self, *given)

    part = MedusaTrainer(tmp_path / "b", str(place), PROMPTS, TRAINING)
    part.prepare()
    assert (part.samples.tokens(held_out=False) == whole.samples.tokens(held_out=False)).all()
    monkeypatch.setattr(Trainer, "advance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        part.train()
    part.trainer.save()  # as the loop does when it is asked to stop
    part.export()
    monkeypatch.setattr(Trainer, "advance", real)
    assert json.loads((tmp_path / "b" / "config.json").read_text())["steps"] == 5
    assert read_draft(f"medusa:{tmp_path / 'b'}") is not None
    again = MedusaTrainer(tmp_path / "b", str(place), PROMPTS, TRAINING)
    again.prepare()
    assert again.trainer.step == 5
    again.train()
    trained = again.trainer.model.state_dict()
    assert all(torch.equal(trained[name], tensor) for name, tensor in whole.trainer.model.state_dict().items())


FILES = {"medusa": "medusa_lm_head.safetensors", "eagle3": "model.safetensors", "ppd": "prompt_tokens.safetensors"}


@pytest.mark.slow(but=["medusa"])
@pytest.mark.parametrize("kind", FILES)
def test_the_command(kind: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "heads"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"def f(x):"\n{"prompt": "import"}\n')
    command = ["train", kind, "-m", str(place), "-o", str(out), "--samples", "24", "--new-tokens", "64"]
    command += ["--prompts", str(prompts), "--steps", "2", *(("--ahead", "2") if kind == "ppd" else ())]
    assert run(command) == 0
    assert "accepted" in capsys.readouterr().out
    assert {file.name for file in out.iterdir()} == {"config.json", FILES[kind], "training"}
    assert_drafts(place, f"{kind}:{out}" + (",nodes=6" if kind == "ppd" else ""), drafts=kind != "ppd")
    if kind == "ppd":
        accuracies = json.loads((out / "config.json").read_text())["accuracies"]
        assert [len(row) for row in accuracies] == [10, 10]
        assert all(0 <= chance <= 1 for row in accuracies for chance in row)
        return
    assert run([*command, "--samples", "32"]) == 2
    assert "was begun with" in capsys.readouterr().err
    assert run(["train", kind, "-m", str(place), "-o", str(place)]) == 2


def test_untrained_heads_say_what_the_target_says_now() -> None:
    heads = MedusaHeads(2, 1, 8, 0, torch.nn.Linear(8, 5, bias=False))
    x = torch.randn(3, 8)
    shared = heads._shared[0]
    assert shared is not None
    assert torch.equal(heads(x), shared(x).expand(2, 3, 5))
    assert [name for name, _ in heads.named_parameters()][:2] == ["0.0.linear.weight", "0.0.linear.bias"]


@pytest.mark.parametrize("ids", [None, 100], ids=["all ids", "some ids"])
def test_eagle3_heads_are_trained_on_what_they_will_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ids: int | None
) -> None:
    """Pass n of a window says of each position what a draft would say whose last n tokens are the window's."""
    source = save_pair(tmp_path)[0]
    monkeypatch.setattr(trained, "MOST_DRAFTED", ids or 32_000)
    trainer = trained.Eagle3Trainer(tmp_path / "out", str(source), PROMPTS, replace(TRAINING, heads=3, samples=16))
    trainer.prepare()
    heads = trainer.trainer.model
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    assert trainer.reads == (0, 1, 2)
    assert len(heads.target_ids) == (ids or VOCABULARY)  # type: ignore[arg-type]
    window = torch.from_numpy(trainer.samples.tokens(held_out=False)[:10].astype("int64"))
    target = SimpleNamespace(hf=trainer.target)
    with torch.no_grad():
        for drafted, (said, right) in enumerate(trainer.compared(heads, window[None])):
            assert said.shape == right.shape == (1, 9 - drafted, len(heads.target_ids))  # type: ignore[arg-type]
            for place in range(9 - drafted):
                tokens = window.tolist()
                known, draft = tokens[: place + 2], [*tokens[place + 2 : place + 2 + drafted], 0]
                expected = by_definition(target, trainer.tensors(), known, draft, eps=1e-6)[-1]  # type: ignore[arg-type]
                assert torch.allclose(said[0, place], expected[heads.target_ids], atol=1e-4)  # type: ignore[index]
                assert torch.allclose(
                    right[0, place], trainer.target(window[None]).logits[0, place + drafted + 1][heads.target_ids], atol=1e-4
                )


def test_what_prompt_tokens_are_compared_with(saved_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Prompt tokens see a window up to their place and those before them there; each is compared with as many positions on."""
    trainer = PpdTrainer(tmp_path / "a", str(saved_pair[0]), PROMPTS, PPD)
    trainer.prepare()
    tokens = torch.from_numpy(trainer.samples.tokens(held_out=False)[:64].astype("int64")).view(2, 32)
    said = trainer.logit_pairs(tokens)
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


def test_prompt_tokens_learn_and_leave_their_target_as_it_is(saved_pair: tuple[Path, Path], tmp_path: Path) -> None:
    trainer = PpdTrainer(tmp_path / "a", str(saved_pair[0]), PROMPTS, PPD)
    trainer.prepare()
    before, weights = loss(trainer), {name: tensor.clone() for name, tensor in trainer.target.state_dict().items()}
    trainer.train()
    assert loss(trainer) < before
    assert all(torch.equal(weights[name], tensor) for name, tensor in trainer.target.state_dict().items())
