"""The optimiser Muon: momentum with an update of each matrix that is made nearly orthogonal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

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
    result: Tensor = x.mT if tall else x
    return result


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
