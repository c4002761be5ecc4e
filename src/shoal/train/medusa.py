"""Medusa heads learn what their target would say further on, from its own samples; the target stays as it is (Medusa-1).

Cai et al. 2024 (arXiv 2401.10774), section 2.2.1, with the target's distribution at each position in place of the token that was
sampled there: it says more per position. Head i counts 0.8^i of the first. Heads share the target's matrix to the vocabulary, which
keeps them small.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from shoal.drafting.medusa import FILES, MedusaHeads
from shoal.models.loading import bundled
from shoal.train.corpus import Windows
from shoal.train.loop import Schedule, Trainer
from shoal.train.own_samples import SEED, OwnSamples

DECAY = 0.8
"""Weight of a head's loss beside that of the head before."""


@dataclass(frozen=True)
class MedusaTraining:
    """How heads are trained.

    Attributes:
        heads, layers: how many heads, and residual blocks of each. samples, new_tokens, temperature: of the target's own texts.
        steps: of the optimiser. length, batch: tokens of a window, windows of a step. lr: times the usual learning rates.
    """

    heads: int = 4
    layers: int = 1
    samples: int = 2400
    new_tokens: int = 128
    temperature: float = 1.0
    steps: int = 160
    length: int = 256
    batch: int = 16
    lr: float = 1.0


@dataclass(frozen=True)
class HeadFigures:
    """Of one head, on samples of the target that it has not learned from.

    Attributes:
        accepted: the chance that its most probable token is the one that the target draws, given all tokens between.
        among_five: that the token is among its five most probable.
    """

    accepted: float
    among_five: float


class MedusaTrainer:
    """The stages of a training, which go on where they were stopped.

    Args:
        out: gets the heads; its folder `training` keeps samples and the checkpoint. source: see `OwnSamples`.
    """

    def __init__(
        self, out: Path, source: str | None, prompts: Sequence[str], training: MedusaTraining, device: str = "cpu"
    ) -> None:
        self.out, self.training, self._source, self._device = out, training, source, torch.device(device)
        own = {name: getattr(training, name) for name in ("new_tokens", "temperature")}
        self.samples = OwnSamples(out / "training", source, prompts, count=training.samples, **own)

    def prepare(self) -> None:
        """Samples, the target, and heads that say what the target says now."""
        self.samples.write()
        name = str(bundled("target")) if self._source is None else self._source
        target = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(self._device).eval()
        self.target = target.requires_grad_(False)
        self.width = target.config.get_text_config().hidden_size
        heads = MedusaHeads(self.training.heads, self.training.layers, self.width, 0, self.target.get_output_embeddings())
        self.trainer = Trainer(heads.to(self._device), self._loss, self.out / "training" / "heads.pt", self.training.lr)

    def train(self) -> None:
        """Raises KeyboardInterrupt: it was stopped, and has saved what it has."""
        windows = Windows(self.samples.tokens(held_out=False), self.training.length, self.training.batch, SEED)
        self.trainer.train(windows, Schedule(self.training.steps, warmup=max(1, self.training.steps // 10)))

    def _states(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Of tokens (batch, length): hidden states (batch, length, width), and the target's logits of what follows each."""
        with torch.no_grad():
            found = self.target(input_ids=tokens, use_cache=False, output_hidden_states=True)
        return found.hidden_states[-1], found.logits

    def _loss(self, heads: nn.Module, tokens: Tensor) -> Tensor:
        hidden, logits = self._states(tokens)
        total = torch.zeros((), device=hidden.device)
        for i, said in enumerate(heads(hidden[:, : -self.training.heads])):
            right = logits[:, i + 1 : i + 1 + said.shape[1]].softmax(-1)
            total = total + DECAY**i * F.cross_entropy(said.flatten(0, 1), right.flatten(0, 1))
        return total

    @torch.inference_mode()
    def figures(self) -> list[HeadFigures]:
        """Of each head."""
        windows = Windows(self.samples.tokens(held_out=True), self.training.length, self.training.batch, SEED)
        sums, count = torch.zeros(self.training.heads, 2), 0
        for step in range(len(windows.rows) // windows.batch_size):
            hidden, logits = self._states(torch.from_numpy(windows[step]).to(self._device))
            for i, said in enumerate(self.trainer.model(hidden[:, : -self.training.heads])):
                right = logits[:, i + 1 : i + 1 + said.shape[1]].softmax(-1)
                top = right.gather(-1, said.topk(min(5, said.shape[-1]), dim=-1).indices)
                sums[i] += torch.stack([top[..., 0].mean(), top.sum(-1).mean()]).cpu()
            count += 1
        return [HeadFigures(*row) for row in (sums / count).tolist()]

    def export(self, figures: Sequence[HeadFigures] = ()) -> None:
        """Writes the heads in bfloat16, as they are published; also half-trained ones."""
        tensors = {name: tensor.bfloat16().cpu().contiguous() for name, tensor in self.trainer.model.state_dict().items()}
        config: dict[str, Any] = {
            "model_type": "medusa", "medusa_num_heads": self.training.heads, "medusa_num_layers": self.training.layers,
            "hidden_size": self.width, "vocab_size": self.target.get_output_embeddings().weight.shape[0],
            "base_model_name_or_path": self._source or "bundled", "torch_dtype": "bfloat16",
            "steps": self.trainer.step, "accepted": [round(one.accepted, 4) for one in figures],
        }  # fmt: skip
        save_file(tensors, self.out / FILES[0])
        (self.out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
