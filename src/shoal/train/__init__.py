"""The training of draft models and heads for any target, and the base of all trainers.

The base has the target's samples, stages that go on where they were stopped, and measuring. The
trainers of all heads have one stage, and write heads in one way.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from shoal.drafting.distillation import Learner, decaying
from shoal.errors import RequestError
from shoal.models.sources import bundled
from shoal.train.loop import Loss, Schedule, Trainer
from shoal.train.own_samples import SEED, OwnSamples, Tokens, Windows

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Training:
    """The settings of a training for a target.

    Attributes:
        samples: the number of the target's own texts.
        new_tokens: the most tokens of such a text.
        temperature: the temperature of these texts.
        steps: the number of the optimiser's steps.
        length: the tokens of a window.
        batch: the windows of a step.
        lr: the factor on the usual learning rates.
    """

    samples: int = 2400
    new_tokens: int = 128
    temperature: float = 1.0
    steps: int = 320
    length: int = 256
    batch: int = 16
    lr: float = 1.0


@dataclass(frozen=True)
class Figures:
    """The figures of one drafted position, given all tokens before.

    They are taken on samples of the target that were not learned from.

    Attributes:
        accepted: the chance that the drafted token is accepted, at temperature 1.
        greedy: the share of positions at which the most probable token is the target's.
        among_five: the chance that the target's draw is among the five most probable.
    """

    accepted: float
    greedy: float
    among_five: float


@dataclass(frozen=True)
class Stage:
    """A part of a training: a loss, and the tokens for it.

    Attributes:
        name: the name of its checkpoint, and in reports.
        lr: the factor on the usual learning rates.
    """

    name: str
    loss: Loss
    tokens: Callable[[], Tokens]
    steps: int
    lr: float = 1.0


MOST_LOGITS = 2**28
"""The most logits of a step: a large vocabulary makes batches smaller."""
Report = Callable[[Stage, Sequence[Figures]], None]


class StagedTrainer(ABC):
    """The stages of a training, which go on where they were stopped.

    Args:
        out: the directory of the trained model; its folder `training` keeps samples and
            checkpoints.
        source: see `OwnSamples`.
        fixed: further settings that must be the same when the training goes on, by name.
    """

    def __init__(
        self,
        out: Path,
        source: str | None,
        prompts: Sequence[str],
        training: Training,
        device: str = "cpu",
        **fixed: object,
    ) -> None:
        self.out = out
        self.training = training
        self.source = source
        self.device = torch.device(device)
        own = {name: getattr(training, name) for name in ("new_tokens", "temperature")}
        self.samples = OwnSamples(
            out / "training", source, prompts, count=training.samples, fixed=fixed, **own
        )

    @property
    def source_name(self) -> str:
        """The directory or Hub id of the target."""
        return str(bundled("target")) if self.source is None else self.source

    def prepare(self) -> None:
        """Prepares the samples, the target, and the model as far as it was trained."""
        self.samples.write()
        LOG.info("reading the weights of the target, which teaches ...")
        target: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            self.source_name, dtype=torch.float32
        )
        self.target = target.to(self.device).eval().requires_grad_(False)  # type: ignore[arg-type]
        self.width = target.config.get_text_config().hidden_size
        head: Any = target.get_output_embeddings()
        self.vocab_size = head.weight.shape[0]
        self.model = self.make_model().to(self.device)
        self.stages = self.planned()
        self.trainer = self._trainer(self.stages[0])

    def _trainer(self, stage: Stage) -> Trainer:
        return Trainer(
            self.model,
            stage.loss,
            self.out / "training" / f"{stage.name}.pt",
            self.training.lr * stage.lr,
        )

    def train(self, report: Report | None = None) -> None:
        """Trains all stages, and measures and reports each at its end if `report` is given.

        Raises:
            KeyboardInterrupt: it was stopped, and has saved its progress.
        """
        for stage in self.stages:
            self.trainer = self._trainer(stage)
            LOG.info("%s: reading its texts ...", stage.name)
            windows = self._windows(stage.tokens())
            self.trainer.train(windows, Schedule(stage.steps, warmup=max(1, stage.steps // 10)))
            if report is not None:
                report(stage, self._known_figures(stage))

    def _known_figures(self, stage: Stage) -> list[Figures]:
        """Returns a stage's figures, measured once: later stages change the model."""
        file = self.out / "training" / f"{stage.name}.json"
        if (
            file.exists()
            and (known := json.loads(file.read_text(encoding="utf-8")))["steps"]
            == self.trainer.step
        ):
            return [Figures(**row) for row in known["figures"]]
        LOG.info("%s: measuring what is accepted ...", stage.name)
        figures = self.figures()
        rows = {"steps": self.trainer.step, "figures": [asdict(one) for one in figures]}
        file.write_text(json.dumps(rows), encoding="utf-8")
        return figures

    def _windows(self, tokens: Tokens) -> Windows:
        length, batch = self.window
        if len(tokens) < length:
            raise RequestError(f"{len(tokens)} tokens of text are too few: a window is {length}")
        return Windows(tokens, length, batch, SEED)

    @property
    def window(self) -> tuple[int, int]:
        """The number of tokens of a window, and of windows of a step.

        They are no more than the target's positions, or than memory holds for logits.
        """
        length = min(
            self.training.length,
            getattr(self.target.config.get_text_config(), "max_position_embeddings", 1 << 30),
        )
        return length, max(1, min(self.training.batch, MOST_LOGITS // (length * self.vocab_size)))

    @abstractmethod
    def make_model(self) -> nn.Module:
        """Makes the model that is trained, before its first step."""

    @abstractmethod
    def planned(self) -> Sequence[Stage]:
        """Returns the stages in order."""

    @abstractmethod
    def logit_pairs(self, tokens: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
        """Returns the logits of each drafted position over windows of tokens, and the target's.

        The windows are (batch, length); both logits are (batch, places, ids).
        """

    @abstractmethod
    def accepted(self, q_logits: Tensor, p_logits: Tensor) -> Tensor:
        """Computes the chance at temperature 1 that a draft by these logits is accepted, [...]."""

    @abstractmethod
    def export(self, figures: Sequence[Figures] = ()) -> None:
        """Writes the trained model in its published form; also a half-trained one."""

    @torch.inference_mode()
    def figures(self) -> list[Figures]:
        """Measures each drafted position."""
        windows = self._windows(self.samples.tokens(held_out=True))
        steps = range(len(windows.rows) // windows.batch_size)
        rows = [
            self._measured(torch.from_numpy(windows[step]).to(self.device)).cpu() for step in steps
        ]
        return [Figures(*row) for row in torch.stack(rows).mean(0).tolist()]

    def _measured(self, tokens: Tensor) -> Tensor:
        """Computes `Figures` of each drafted position, [positions, 3]."""
        rows = []
        for q, p in self.logit_pairs(tokens):
            five = q.topk(min(5, q.shape[-1]), dim=-1).indices
            greedy = (five[..., 0] == p.argmax(-1)).float()
            among = p.softmax(-1).gather(-1, five).sum(-1)
            rows.append(torch.stack([self.accepted(q, p).mean(), greedy.mean(), among.mean()]))
        return torch.stack(rows)


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

    def learner(self, heads: Any) -> Learner:
        """Returns the heads with the passes in which they learn."""
        raise NotImplementedError

    def compared(self, heads: nn.Module, tokens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields drafted positions' logits and the target's, (batch, positions, ids) each."""
        learner = self.learner(heads)
        with torch.no_grad():
            output = self.target(input_ids=tokens, use_cache=False, output_hidden_states=True)
            states = torch.cat([output.hidden_states[layer] for layer in learner.reads], dim=-1)
        for q, p, _ in learner.compared(heads, tokens, output.logits, states):
            yield q, p

    def loss(self, heads: nn.Module, tokens: Tensor) -> Tensor:
        """Computes the loss of windows of tokens (batch, length)."""
        losses = [
            F.cross_entropy(q.flatten(0, 1), p.flatten(0, 1).softmax(-1))
            for q, p in self.compared(heads, tokens)
        ]
        return decaying(losses)

    def logit_pairs(self, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
        return list(self.compared(self.model, tokens))

    def accepted(self, q_logits: Tensor, p_logits: Tensor) -> Tensor:
        return self.learner(self.model).kept(p_logits, q_logits)

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
