"""`shoal train drafter`: a small model of the target's architecture learns from it, goes on where it was stopped, and drafts.

Tests of: train.drafter, train.own_samples, train.loop, cli.train.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from shoal.cli import run
from shoal.cli.check import checks_of
from shoal.cli.console import StatusLine
from shoal.errors import RequestError
from shoal.testing import tiny_model
from shoal.train import own_samples
from shoal.train.drafter import DrafterTrainer, DrafterTraining, shrunk, small_model
from shoal.train.loop import Trainer
from trainable import PROMPTS, assert_drafts, learnable, small

__all__ = ["small"]  # a fixture
TRAINING = DrafterTraining(samples=24, new_tokens=24, steps=12, corpus_steps=6, length=16, batch=4, layers=1, width=16)
CORPUS = ["def g(y):\n    return y\n" * 8, "import os\n" * 8]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return learnable(tmp_path_factory.mktemp("pair"))


def trainer(place: Path, out: Path) -> DrafterTrainer:
    made = DrafterTrainer(out, str(place), PROMPTS, CORPUS, TRAINING)
    made.prepare()
    return made


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "opt", "qwen3-moe", "mpt"])
@pytest.mark.parametrize("width", [16, None])
def test_a_shrunk_config_is_a_model_of_the_same_vocabulary(architecture: str, width: int | None) -> None:
    target = tiny_model(architecture)
    small = small_model(target, 1, width, seed=0)
    config = small.config
    assert type(config) is type(target.config)
    assert (config.num_hidden_layers, config.hidden_size) == (1, width or 32)
    assert small.get_input_embeddings().weight is small.get_output_embeddings().weight  # type: ignore[union-attr]
    tokens = torch.randint(0, 100, (2, 9))
    assert small(input_ids=tokens).logits.shape == target(input_ids=tokens).logits.shape
    kept = torch.equal(small.get_input_embeddings().weight, target.get_input_embeddings().weight)  # type: ignore[union-attr]
    assert kept == (width is None)
    repeated = small_model(target, 1, width, seed=0).state_dict()
    assert all(torch.equal(tensor, repeated[name]) for name, tensor in small.state_dict().items())


def test_defaults_follow_the_size_of_the_target() -> None:
    config = tiny_model("llama").config
    sizes = ((256, 12, 4, (1, 256, 4)), (1024, 28, 16, (3, 512, 8)), (4096, 32, 32, (4, 1024, 8)))
    for hidden, depth, heads, expected in sizes:
        config.hidden_size, config.num_hidden_layers, config.num_attention_heads = hidden, depth, heads
        config.num_key_value_heads, config.intermediate_size = 2, 4 * hidden
        made = shrunk(config)
        assert (made.num_hidden_layers, made.hidden_size, made.num_attention_heads) == expected
        assert made.intermediate_size == 4 * made.hidden_size
    with pytest.raises(RequestError, match="multiple of 128"):
        shrunk(config, width=100)
    with pytest.raises(RequestError, match="at most 32"):
        shrunk(config, layers=33)


def test_a_width_that_an_architecture_cannot_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError("heads are counted by four")

    target = tiny_model("llama")
    monkeypatch.setattr(AutoModelForCausalLM, "from_config", refuse)
    with pytest.raises(RequestError, match="LlamaForCausalLM cannot have this --width: heads are counted by four"):
        small_model(target, 1, 16, seed=0)


@pytest.mark.slow(but=["corpus-3"])
@pytest.mark.parametrize(("stage", "stop"), [("corpus", 3), ("distillation", 5)])
def test_an_interrupted_training_ends_at_the_same_weights(
    stage: str, stop: int, place: Path, whole: DrafterTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever stage was interrupted; and what was half-trained loads and drafts."""
    real = Trainer.advance

    def interrupted(self: Trainer, *given: Any) -> float:
        if (self.checkpoint.stem, self.step) == (stage, stop):
            self.save()  # as the loop does when it is asked to stop
            raise KeyboardInterrupt
        return real(self, *given)

    part = trainer(place, tmp_path)
    monkeypatch.setattr(Trainer, "advance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        part.train()
    part.export()
    monkeypatch.setattr(Trainer, "advance", real)
    assert_drafts(place, tmp_path)
    again = trainer(place, tmp_path)
    again.train()
    assert again.trainer.step == TRAINING.steps
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], tensor)


@pytest.fixture(scope="module")
def whole(place: Path, tmp_path_factory: pytest.TempPathFactory) -> DrafterTrainer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_samples, "PART", 8)
        made = trainer(place, tmp_path_factory.mktemp("whole"))
        before = made.figures()[0]
        reports = []
        made.train(lambda stage, figures: reports.append((stage.name, figures[0])))
        made.export()
    assert [name for name, _ in reports] == ["corpus", "distillation"]
    accepted = [before.accepted, *(one.accepted for _, one in reports)]
    assert accepted[2] > max(accepted[:2])
    return made


def test_what_is_written_loads_in_transformers(whole: DrafterTrainer, place: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(whole.out, dtype=torch.float32)
    assert model.config.num_hidden_layers == 1
    trained = whole.model.state_dict()
    assert all(torch.equal(tensor, trained[name].bfloat16().float()) for name, tensor in model.state_dict().items())
    assert_drafts(place, whole.out)


def test_the_command(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(StatusLine, "say", lambda _line, text, now=True: said.append(text))
    out = tmp_path / "drafter"
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"text": CORPUS[0] * 8}) + "\n" + json.dumps(CORPUS[1] * 8))
    command = ["train", "drafter", "-m", str(place), "-o", str(out), "--samples", "16", "--new-tokens", "64", "--steps", "1"]
    command += ["--corpus", str(corpus), "--corpus-steps", "1", "--prompts", str(place / "config.json")]
    (place / "prompts.txt").write_text("def f(x):\n\nimport")
    command[-1] = str(place / "prompts.txt")
    (tmp_path / "file").touch()
    assert run(["train", "drafter", "-o", str(tmp_path / "file" / "drafter")]) == 2
    assert capsys.readouterr().err == f"error: cannot make {str(tmp_path / 'file' / 'drafter')!r}: Not a directory\n"
    assert run([*command, "--layers", "1", "--width", "16"]) == 0
    printed = capsys.readouterr()
    assert "after corpus" in printed.out
    told = [text for text in said if re.search("writes|step|measuring", text)]  # in a pipe, too
    assert [re.sub(r"\d\.\d+", "x", text) for text in dict.fromkeys(told)] == [
        "the target writes: 0 of 16 samples",
        "the target writes: 8 of 16 samples",
        "corpus: step 1 of 1, loss x",
        "corpus: measuring what is accepted ...",
        "distillation: step 1 of 1, loss x",
        "distillation: measuring what is accepted ...",
    ]
    assert "after distillation" in printed.out
    assert f"--draft {out}" in printed.err
    assert run([*command, "--layers", "1", "--width", "16", "--json"]) == 0  # nothing is left to do
    found = json.loads(capsys.readouterr().out)
    assert [stage["stage"] for stage in found["stages"]] == ["corpus", "distillation"]
    assert 0 < found["stages"][1]["positions"][0]["accepted"] < 1
    assert run([*command, "--layers", "2", "--width", "16"]) == 2
    assert "was begun with" in capsys.readouterr().err
    corpus.write_text("{}")
    assert run(command) == 2
    assert 'a text "text"' in capsys.readouterr().err


def test_check_names_the_command(place: Path) -> None:
    from shoal.cli.check import MeasureOptions
    from shoal.cli.options import ModelSource

    measuring = MeasureOptions(n=2, max_new_tokens=8, k=2)
    given = ("from --prompt", ["def f(x):"])
    found = {one.name: one.advice for one in checks_of(ModelSource(str(place)), given, measuring, 1, lambda _: None)}
    assert f"shoal train drafter --model {place} --output DIR" in found["drafter"]
    source = ModelSource(str(place), str(place.parent / "drafter"))
    checks = checks_of(source, given, measuring, 1, lambda _: None)
    advice = next(one.advice for one in checks if one.name.startswith("acceptance"))
    assert f"shoal train drafter --model {place} --output DIR --prompts FILE" in advice
