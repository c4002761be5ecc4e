"""A training loop that can be stopped at any step and continued exactly from there.

The optimiser Muon is momentum with an update of each matrix that is made nearly orthogonal.
"""

from __future__ import annotations

import json
import logging
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from signal import SIGINT, SIGTERM
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from shoal.train.own_samples import Windows

LOG = logging.getLogger(__name__)
# Coefficients of the quintic that pulls every singular value towards one.
A, B, C = 3.4445, -4.7750, 2.0315
ITERATIONS = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """Computes roughly the nearest (semi-)orthogonal matrices of a stack (count, rows, columns)."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """The optimiser Muon for the matrices of a model, all of one shape in one stack.

    It computes in float32: `torch.optim.Muon` iterates in bfloat16, slow on processors without it.
    """

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for matrix in matrices:
            by_shape[matrix.shape].append(matrix)
        groups: list[dict[str, Any]] = [{"params": stack} for stack in by_shape.values()]
        super().__init__(groups, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Makes one update; every parameter must have a gradient."""
        for group in self.param_groups:
            params: list[nn.Parameter] = group["params"]
            gradient = torch.stack([p.grad for p in params if p.grad is not None])
            state = self.state[params[0]]
            velocity = state.setdefault("velocity", torch.zeros_like(gradient))
            velocity.lerp_(gradient, 1 - group["momentum"])
            update = orthogonalise(gradient.lerp(velocity, group["momentum"]))
            rows, columns = params[0].shape
            scale = group["lr"] * max(1.0, rows / columns) ** 0.5
            for p, change in zip(params, update, strict=True):
                p.sub_(change, alpha=scale)


def optimizers(
    model: nn.Module, matrix_lr: float = 0.02, vector_lr: float = 3e-3
) -> list[torch.optim.Optimizer]:
    """Makes Muon for the matrices inside the layers, AdamW for embeddings and norms."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = [
        p
        for name, p in named.items()
        if p.ndim == 2 and "embed" not in name and id(p) not in tables
    ]
    chosen = {id(p) for p in matrices}
    others = [p for p in named.values() if id(p) not in chosen]
    adam = torch.optim.AdamW(others, lr=vector_lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [Muon(matrices, lr=matrix_lr), adam] if matrices else [adam]


Loss = Callable[[nn.Module, Tensor], Tensor]  # (model, tokens (batch, length)) -> scalar

CLIP = 1.0  # norm of the gradient
LOG_EVERY = 10  # steps


@dataclass(frozen=True)
class Schedule:
    """A schedule of warm-up, plateau and linear decay to 0, in shares of the peak learning rate."""

    steps: int
    warmup: int = 40
    decay: float = 0.35  # share of the steps

    def factor(self, step: int) -> float:
        """Returns the learning rate of a step as a share of the peak."""
        left = (self.steps - step) / max(1.0, self.decay * self.steps)
        return min(1.0, (step + 1) / self.warmup, left)


class Trainer:
    """A model, its optimisers and the number of steps done, kept in one checkpoint file."""

    def __init__(self, model: nn.Module, loss: Loss, checkpoint: Path, lr: float = 1.0) -> None:
        self.model = model
        self.loss = loss
        self.checkpoint = checkpoint
        self.optimizers = optimizers(model, 0.02 * lr, 3e-3 * lr)
        self.step = 0
        self.peaks = [[group["lr"] for group in o.param_groups] for o in self.optimizers]
        if checkpoint.exists():
            self._load()

    def _load(self) -> None:
        saved: dict[str, Any] = torch.load(self.checkpoint, map_location="cpu")
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.step = saved["step"]

    def save(self) -> None:
        """Replaces the checkpoint atomically."""
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "step": self.step,
            },
            partial,
        )
        partial.replace(self.checkpoint)

    def advance(self, tokens: Tensor, factor: float) -> float:
        """Makes one optimiser step on tokens (batch, length); returns the loss before it."""
        for optimizer, peaks in zip(self.optimizers, self.peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.model, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        return loss.item()

    def train(self, windows: Windows, schedule: Schedule, save_every: float = 180.0) -> None:
        """Trains to the end of the schedule; saves every `save_every` seconds and at the end.

        On SIGINT or SIGTERM it finishes the step, saves, and raises `KeyboardInterrupt`.
        """
        device = next(self.model.parameters()).device
        meter = _Meter(self, schedule.steps)
        saved = time.monotonic()
        with meter.progress, _Interrupt() as interrupt:
            while self.step < schedule.steps and not interrupt.requested:
                tokens = torch.from_numpy(windows[self.step]).to(device)
                factor = schedule.factor(self.step)
                meter.update(self.advance(tokens, factor), tokens.numel(), factor)
                if time.monotonic() - saved > save_every:
                    self.save()
                    saved = time.monotonic()
        self.save()
        if interrupt.requested:
            raise KeyboardInterrupt


class _Interrupt:
    """A context that turns SIGINT and SIGTERM into a flag while the block runs."""

    def __init__(self) -> None:
        self.requested = False

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def __enter__(self) -> _Interrupt:
        self._before = {n: signal.signal(n, self._request) for n in (SIGINT, SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class _Meter:
    """The progress bar, log records, and a line of JSON beside the checkpoint every few steps."""

    def __init__(self, trainer: Trainer, steps: int) -> None:
        columns = "{task.description} {task.completed}/{task.total}", "loss {task.fields[loss]:.3f}"
        rate = TextColumn("{task.fields[rate]:,.0f} tok/s")
        console = Console(stderr=True)
        self.progress = Progress(
            TextColumn(columns[0]),
            BarColumn(),
            TextColumn(columns[1]),
            rate,
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,  # there log records say it
        )
        self.trainer, self.steps, self.rate = trainer, steps, ""
        self.log = trainer.checkpoint.with_suffix(".jsonl")
        self.task = self.progress.add_task(
            trainer.checkpoint.stem,
            total=steps,
            completed=trainer.step,
            loss=float("nan"),
            rate=0.0,
        )
        self.losses: list[float] = []
        self.tokens = 0
        self.since = time.monotonic()

    def update(self, loss: float, tokens: int, factor: float) -> None:
        self.losses.append(loss)
        self.tokens += tokens
        self.progress.update(self.task, completed=self.trainer.step, loss=loss)
        LOG.info(
            "%s: step %d of %d, loss %.3f%s",
            self.trainer.checkpoint.stem,
            self.trainer.step,
            self.steps,
            loss,
            self.rate,
        )
        if len(self.losses) < LOG_EVERY:
            return
        mean = sum(self.losses) / len(self.losses)
        rate = self.tokens / (time.monotonic() - self.since)
        self.progress.update(self.task, loss=mean, rate=rate)
        self.rate = f", {rate:,.0f} tokens/s"
        row = {"step": self.trainer.step, "loss": mean, "tokens_per_second": rate, "lr": factor}
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.losses, self.tokens, self.since = [], 0, time.monotonic()
