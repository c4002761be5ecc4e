"""What the trainings of all heads have in common: samples of the target, its hidden states, a checkpoint, measuring, export."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from shoal.models.loading import bundled
from shoal.train.corpus import Windows
from shoal.train.loop import Schedule, Trainer
from shoal.train.own_samples import SEED, OwnSamples

DECAY = 0.8
"""Weight of the loss of a position beside that of the position before."""


@dataclass(frozen=True)
class HeadsTraining:
    """How heads are trained.

    Attributes:
        heads: positions ahead that they learn. layers: residual blocks of a Medusa head.
        samples, new_tokens, temperature: of the target's own texts.
        steps: of the optimiser. length, batch: tokens of a window, windows of a step. lr: times the usual learning rates.
    """

    heads: int = 4
    layers: int = 2
    samples: int = 2400
    new_tokens: int = 128
    temperature: float = 1.0
    steps: int = 320
    length: int = 256
    batch: int = 16
    lr: float = 1.0


@dataclass(frozen=True)
class HeadFigures:
    """Of one position ahead, on samples of the target that the heads have not learned from; given all tokens before.

    Attributes:
        accepted: the chance that what is drafted there is accepted, at temperature 1.
        among_five: that what the target draws is among the five most probable.
    """

    accepted: float
    among_five: float


class HeadsTrainer:
    """The stages of a training, which go on where they were stopped.

    Args:
        out: gets the heads; its folder `training` keeps samples and the checkpoint. source: see `OwnSamples`.
    """

    file: str
    """Name of the tensors' file."""

    def __init__(
        self, out: Path, source: str | None, prompts: Sequence[str], training: HeadsTraining, device: str = "cpu"
    ) -> None:
        self.out, self.training, self.source, self.device = out, training, source, torch.device(device)
        own = {name: getattr(training, name) for name in ("new_tokens", "temperature")}
        self.samples = OwnSamples(out / "training", source, prompts, count=training.samples, **own)

    def prepare(self) -> None:
        """Samples, the target, and heads as far as they were trained."""
        self.samples.write()
        name = str(bundled("target")) if self.source is None else self.source
        target = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(self.device).eval()
        self.target = target.requires_grad_(False)
        self.width = target.config.get_text_config().hidden_size
        self.vocab_size = target.get_output_embeddings().weight.shape[0]
        heads = self.made().to(self.device)
        self.trainer = Trainer(heads, self.loss, self.out / "training" / "heads.pt", self.training.lr)

    def train(self) -> None:
        """Raises KeyboardInterrupt: it was stopped, and has saved what it has."""
        windows = self._windows(held_out=False)
        self.trainer.train(windows, Schedule(self.training.steps, warmup=max(1, self.training.steps // 10)))

    def _windows(self, *, held_out: bool) -> Windows:
        return Windows(self.samples.tokens(held_out=held_out), self.training.length, self.training.batch, SEED)

    @abstractmethod
    def made(self) -> nn.Module:
        """Heads before their first step."""

    @abstractmethod
    def loss(self, heads: nn.Module, tokens: Tensor) -> Tensor:
        """Of windows of tokens (batch, length)."""

    @abstractmethod
    def measured(self, tokens: Tensor) -> Tensor:
        """The figures of each position ahead over windows of tokens (batch, length): [heads, 2], see `HeadFigures`."""

    @property
    @abstractmethod
    def config(self) -> dict[str, Any]:
        """What config.json says of the heads."""

    def tensors(self) -> dict[str, Tensor]:
        """What is stored, by published names."""
        return dict(self.trainer.model.state_dict())

    @torch.inference_mode()
    def figures(self) -> list[HeadFigures]:
        """Of each position ahead."""
        windows = self._windows(held_out=True)
        steps = range(len(windows.rows) // windows.batch_size)
        found = [self.measured(torch.from_numpy(windows[step]).to(self.device)).cpu() for step in steps]
        return [HeadFigures(*row) for row in torch.stack(found).mean(0).tolist()]

    def export(self, figures: Sequence[HeadFigures] = ()) -> None:
        """Writes the heads in bfloat16, as they are published; also half-trained ones."""
        tensors = {
            name: (tensor.bfloat16() if tensor.is_floating_point() else tensor).cpu().contiguous()
            for name, tensor in self.tensors().items()
        }
        config = self.config | {
            "base_model_name_or_path": self.source or "bundled", "torch_dtype": "bfloat16", "steps": self.trainer.step,
            "accepted": [round(one.accepted, 4) for one in figures],
        }  # fmt: skip
        save_file(tensors, self.out / self.file)
        (self.out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
