"""The losses of training: of the next token, and of the distance to the target's distribution."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.train.loop import Loss

LABEL_WEIGHT = 0.05  # of the cross-entropy with the text itself
OVERLAP_WEIGHT = 0.5  # of the share of drafts that the target would reject


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Computes the logits of tokens (batch, length), the first excepted.

    They are (batch, length - 1, vocabulary).
    """
    result: Tensor = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return result


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Computes the mean cross-entropy, in nats, of tokens (batch, length)."""
    return F.cross_entropy(logits(model, tokens).flatten(0, 1), tokens[:, 1:].flatten())


def acceptance(p_logits: Tensor, q_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Computes sum_x min(p, q) over the last dimension: the chance that a drafted token is kept."""
    p = (p_logits / temperature).softmax(-1)
    q = (q_logits / temperature).softmax(-1)
    return torch.minimum(p, q).sum(-1)


def distillation_loss(teacher: nn.Module) -> Loss:
    """Makes a loss of KL(p||q) and shares of the rejection rate and of the cross-entropy.

    The rejection rate is 1 - sum min(p, q).
    """

    def loss(student: nn.Module, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            p = logits(teacher, tokens).flatten(0, 1)
        q = logits(student, tokens).flatten(0, 1)
        divergence = F.kl_div(
            q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="batchmean"
        )
        rejection = 1 - acceptance(p, q).mean()
        labels = F.cross_entropy(q, tokens[:, 1:].flatten())
        return divergence + OVERLAP_WEIGHT * rejection + LABEL_WEIGHT * labels

    return loss
