"""The trainers of all heads: they have one stage, and write heads in one way."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from shoal.train.stages import Figures, Stage, StagedTrainer, Training

DECAY = 0.8
"""The weight of a position's loss beside the loss of the position before."""


@dataclass(frozen=True)
class HeadsTraining(Training):
    """The settings of the heads' training.

    Attributes:
        heads: the number of positions ahead that they learn.
        layers: the number of residual blocks of a Medusa head.
    """

    heads: int = 4
    layers: int = 2


class HeadsTrainer(StagedTrainer):
    """A trainer of heads that read the target's hidden states."""

    training: HeadsTraining
    file: str
    """The name of the tensors' file."""

    def planned(self) -> Sequence[Stage]:
        return [
            Stage(
                "heads", self.loss, lambda: self.samples.tokens(held_out=False), self.training.steps
            )
        ]

    @abstractmethod
    def loss(self, heads: nn.Module, tokens: Tensor) -> Tensor:
        """Computes the loss of windows of tokens (batch, length)."""

    @property
    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The entries of config.json about the heads."""

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors to store, by published names."""
        return dict(self.model.state_dict())

    def export(self, figures: Sequence[Figures] = ()) -> None:
        """Writes the heads in bfloat16, as they are published; also half-trained ones."""
        tensors = {
            name: (tensor.bfloat16() if tensor.is_floating_point() else tensor).cpu().contiguous()
            for name, tensor in self.tensors().items()
        }
        config = self.config | {
            "base_model_name_or_path": self.source or "bundled",
            "torch_dtype": "bfloat16",
            "steps": self.trainer.step,
            "accepted": [round(one.accepted, 4) for one in figures],
        }
        save_file(tensors, self.out / self.file)
        (self.out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
