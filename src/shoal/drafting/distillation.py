"""The distillation of a target into what drafts for it, in training and beside reinforcement.

Training (`shoal.train`) writes the texts itself and makes many steps. `Follower` makes a few steps
on rollouts that are there anyway, so that a draft model follows a target that is being trained:
the texts are the ones that it will draft next, and the target's logits are those of its loss.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.errors import RequestError, UnsupportedModel
from shoal.models.runner import Runner
from shoal.models.trimming import Proposable
from shoal.models.weights import LINEARS
from shoal.types.rollouts import Rollouts

LABEL_WEIGHT = 0.05  # of the cross-entropy with the text itself
OVERLAP_WEIGHT = 0.5  # of the share of drafts that the target would reject
CLIP = 1.0  # norm of the gradient


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


def distance(p_logits: Tensor, q_logits: Tensor, tokens: Tensor) -> Tensor:
    """Computes KL(p||q) and shares of the rejection rate and of the cross-entropy.

    The rejection rate is 1 - sum min(p, q).

    Args:
        p_logits: the target's logits, [tokens, vocabulary].
        q_logits: the drafter's logits, [tokens, vocabulary].
        tokens: the tokens of the text, [tokens].
    """
    divergence = F.kl_div(
        q_logits.log_softmax(-1), p_logits.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    rejection = 1 - acceptance(p_logits, q_logits).mean()
    labels = F.cross_entropy(q_logits, tokens)
    return divergence + OVERLAP_WEIGHT * rejection + LABEL_WEIGHT * labels


def distillation_loss(teacher: nn.Module) -> Callable[[nn.Module, Tensor], Tensor]:
    """Makes a loss of windows of tokens (batch, length): their mean `distance` to a teacher."""

    def loss(student: nn.Module, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            p = logits(teacher, tokens).flatten(0, 1)
        return distance(p, logits(student, tokens).flatten(0, 1), tokens[:, 1:].flatten())

    return loss


@dataclass(frozen=True)
class Realignment:
    """The result of `Shoal.realign`.

    Attributes:
        accepted: sum min(p, q) in each step, before its update: the chance that a draft of the
            tokens of its rollouts is kept, at temperature 1.
        tokens: the tokens of samples in all steps.
    """

    accepted: tuple[float, ...]
    tokens: int


class Follower:
    """A draft model that follows its target, in float32, with the optimiser's state.

    The draft model itself may have 16 bits, in which small updates would be lost: it is given the
    rounded weights after each call.

    Args:
        target: the target.
        draft: the draft model, whose weights are written in place.
        proposable: the tokens that it may propose.

    Raises:
        UnsupportedModel: the weights of the draft model cannot be trained here.
    """

    def __init__(self, target: Runner, draft: Runner, proposable: Proposable) -> None:
        require_trainable(target, draft, proposable)
        self._target, self._draft = target, draft
        with torch.inference_mode(False):
            self._model: Any = copy.deepcopy(draft.hf).float().eval().requires_grad_(True)
        self._width = min(target.vocab_size, draft.known_ids)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), betas=(0.9, 0.95), weight_decay=0.0
        )
        self._order = torch.Generator().manual_seed(0)

    def align(
        self, rollouts: Rollouts, *, said: Tensor | None, steps: int, rows: int, rate: float
    ) -> Realignment:
        """Makes optimiser's steps on rollouts, and writes the draft model.

        Args:
            rollouts: the samples of the target as it is.
            said: see `Shoal.realign`.
            steps: the number of steps.
            rows: the number of samples in a step.
            rate: the learning rate.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        found: list[float] = []
        written = rollouts.completion_mask.any(1).nonzero()[:, 0].tolist()
        tokens, order = 0, list[int]()
        with torch.inference_mode(False), torch.enable_grad():
            for _ in range(steps):
                while len(order) < min(rows, len(written)):
                    places = torch.randperm(len(written), generator=self._order).tolist()
                    order += [written[place] for place in places]
                chosen, order = order[:rows], order[rows:]
                accepted, count = self._step(rollouts, chosen, said)
                found.append(accepted)
                tokens += count
        with torch.no_grad():
            for own, trained in zip(
                self._draft.hf.parameters(), self._model.parameters(), strict=True
            ):
                own.copy_(trained)
        return Realignment(tuple(found), tokens)

    def _step(
        self, rollouts: Rollouts, chosen: Sequence[int], said: Tensor | None
    ) -> tuple[float, int]:
        """Makes one step on some rows; returns sum min(p, q) before it, and the tokens."""
        ids, mask = unpadded(rollouts, chosen)
        if said is None:
            with torch.no_grad():
                p = self._target.plain_logits(ids[:, :-1])[mask[:, 1:]].clone()
        else:
            p = said[list(chosen)][rollouts.completion_mask[list(chosen)]]
        p = p[..., : self._width].detach().float()
        q = logits(self._model, ids)[mask[:, 1:]][..., : self._width]
        loss = distance(p, q, ids[:, 1:][mask[:, 1:]])
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), CLIP)
        self._optimizer.step()
        return float(acceptance(p, q.detach()).mean()), len(p)


def unpadded(rollouts: Rollouts, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns prompts and samples of some rows without padding between or before them.

    Causal models compute such rows without a mask.

    Returns:
        ids: [rows, longest], 0 behind a row's end.
        mask: [rows, longest] bool, True at the tokens of samples.
    """
    texts, marks = [], []
    for row in chosen:
        prompt = rollouts.prompt_ids[row][rollouts.prompt_mask[row]]
        sample = rollouts.completion_ids[row][rollouts.completion_mask[row]]
        texts.append(torch.cat([prompt, sample]))
        marks.append(torch.cat([torch.zeros_like(prompt), torch.ones_like(sample)]).bool())
    pad = nn.utils.rnn.pad_sequence
    return pad(texts, batch_first=True), pad(marks, batch_first=True)


def require_trainable(target: Runner, draft: Runner, proposable: Proposable) -> None:
    """Raises UnsupportedModel if the weights of a draft model cannot be trained here."""
    reason = None
    if not target.has_modules or not draft.has_modules:
        reason = "it or its target is no Transformers model in this process"
    elif proposable.vocabularies is not None:
        reason = "it has another tokenizer"
    elif proposable.shared is not None:
        reason = "its head was trimmed to some tokens"
    elif not all(
        isinstance(one, LINEARS)
        for one in draft.hf.modules()
        if hasattr(one, "in_features") and hasattr(one, "out_features")
    ):
        reason = "its weights are quantised"
    if reason is not None:
        raise UnsupportedModel(f"{draft.name} cannot be realigned: {reason}")


def require_rollouts(rollouts: Rollouts, said: Tensor | None, target: Runner) -> None:
    """Raises RequestError if there are no tokens to learn from, or logits of another shape."""
    if not bool(rollouts.completion_mask.any()):
        raise RequestError("realign needs rollouts with at least one token")
    wanted = [*rollouts.completion_ids.shape, target.vocab_size]
    if said is not None and list(said.shape) != wanted:
        raise RequestError(
            f"logits must have the shape {wanted}, [rows, longest sample, vocabulary], got "
            f"{list(said.shape)}"
        )
