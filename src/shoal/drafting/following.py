"""The drafters with weights of their own that follow a target which is trained, beside that.

`Follower` makes a few steps of distillation on rollouts that are there anyway: the texts are the
ones that the drafter will draft next, and the target's logits are those of its loss. A drafter says
by `Drafter.learner` which weights learn and in which passes: draft models, Medusa and
EAGLE-3 heads and the layers in a target's checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.drafting.distillation import Learner, decaying, distance, model_learner
from shoal.drafting.model import ModelDrafter
from shoal.drafting.other_vocabulary import OtherVocabularyDrafter
from shoal.drafting.protocol import Drafter
from shoal.drafting.sums import SumDrafter
from shoal.errors import RequestError, UnsupportedModel
from shoal.models.runner import Runner
from shoal.models.weights import LINEARS
from shoal.models.weights.parameter import tensors
from shoal.types.rollouts import Rollouts
from shoal.values import plain

CLIP = 1.0  # norm of the gradient


@dataclass(frozen=True)
class Realignment:
    """The result of `Shoal.realign`.

    Attributes:
        accepted: the chance in each step, before its update, that a draft of the tokens of its
            rollouts is kept, at temperature 1: sum min(p, q), or p of the one token that is
            proposed without a q; of heads the mean over the tokens that they draft.
        tokens: the tokens of samples in all steps.
    """

    accepted: tuple[float, ...]
    tokens: int


class Follower:
    """A drafter's weights that follow its target, in float32, with the optimiser's state.

    The weights themselves may have 16 bits, in which small updates would be lost: they are given
    the rounded weights after each call.

    Args:
        target: the target.
        learner: the weights, which are written in place, and their passes.
        name: the name of the drafter, for errors.

    Raises:
        UnsupportedModel: the weights cannot be trained here.
    """

    def __init__(self, target: Runner, learner: Learner, name: str) -> None:
        require_trainable(target, learner, name)
        self._target, self._learner = target, learner
        with torch.inference_mode(False):
            self._weights = copy_beside(learner.weights, target.hf)
        shared = {id(one) for one in tensors(target.hf)}
        self._pairs = [
            (own, trained.requires_grad_(True))
            for own, trained in zip(
                learner.weights.parameters(), self._weights.parameters(), strict=True
            )
            if id(own) not in shared
        ]
        self._optimizer = torch.optim.AdamW(
            [trained for _, trained in self._pairs], betas=(0.9, 0.95), weight_decay=0.0
        )
        self._order = torch.Generator().manual_seed(0)

    def align(
        self, rollouts: Rollouts, *, given_logits: Tensor | None, steps: int, rows: int, rate: float
    ) -> Realignment:
        """Makes optimiser's steps on rollouts, and writes the drafter's weights.

        Args:
            rollouts: the samples of the target as it is.
            given_logits: see `Shoal.realign`.
            steps: the number of steps.
            rows: the number of samples in a step.
            rate: the learning rate.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        logprobs: list[float] = []
        written = rollouts.completion_mask.any(1).nonzero()[:, 0].tolist()
        tokens, order = 0, list[int]()
        with torch.inference_mode(False), torch.enable_grad():
            for _ in range(steps):
                while len(order) < min(rows, len(written)):
                    places = torch.randperm(len(written), generator=self._order).tolist()
                    order += [written[place] for place in places]
                chosen, order = order[:rows], order[rows:]
                accepted, count = self._step(rollouts, chosen, given_logits)
                logprobs.append(accepted)
                tokens += count
        with torch.no_grad():
            for own, trained in self._pairs:
                own.copy_(trained)
        return Realignment(tuple(logprobs), tokens)

    def _step(
        self, rollouts: Rollouts, chosen: Sequence[int], given_logits: Tensor | None
    ) -> tuple[float, int]:
        """Makes one step on some rows; returns the chance of drafts before it, and the tokens."""
        ids, mask = unpadded(rollouts, chosen)
        right, states = self._teach(ids[:, :-1], mask[:, 1:], rollouts, chosen, given_logits)
        losses, kept = list[Tensor](), list[Tensor]()
        passes = self._learner.compared(self._weights, ids[:, :-1], right, states)
        for q_logits, p_logits, places in passes:
            written = mask[:, 1:][:, places]
            q, p = q_logits[written].float(), p_logits[written]
            if len(p):
                losses.append(distance(p, q, self._labels(ids[:, 1:][:, places][written])))
                kept.append(self._learner.kept(p, q.detach()).mean())
        if losses:
            self._optimizer.zero_grad(set_to_none=True)
            learning = [trained for _, trained in self._pairs]
            decaying(losses).backward(inputs=learning)  # not the target's own, which it passes
            nn.utils.clip_grad_norm_(learning, CLIP)
            self._optimizer.step()
        return float(torch.stack(kept).mean()) if kept else 0.0, int(mask.sum())

    def _teach(
        self,
        ids: Tensor,
        mask: Tensor,
        rollouts: Rollouts,
        chosen: Sequence[int],
        given_logits: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the target's logits for texts, and the hidden states that the learner reads.

        Args:
            ids: the texts, [rows, length].
            mask: the positions that say a token of a sample, [rows, length].
            rollouts: see `align`.
            chosen: the numbers of the rows.
            given_logits: see `align`; at other positions than those of samples the logits are then
                zeros.
        """
        if given_logits is None:
            with torch.no_grad():
                logits, states = self._target.bridge.plain_states(ids, self._learner.reads)
            return logits.clone().float(), states if states is None else states.clone()
        own = given_logits[list(chosen)][rollouts.completion_mask[list(chosen)]].detach().float()
        logits = own.new_zeros(*ids.shape, own.shape[-1])
        logits[mask] = own
        return logits, None

    def _labels(self, tokens: Tensor) -> Tensor:
        """Returns the numbers of tokens among the ids that are drafted; -100 for no such id."""
        ids = self._learner.ids
        if ids is None:
            return tokens
        number = tokens.new_full((self._target.vocab_size,), -100)
        number[ids] = torch.arange(len(ids), device=ids.device)
        return number[tokens]


def learner_of(drafter: Drafter | None) -> Learner | None:
    """Returns the learning part of a drafter, of a sum's last drafter; None if there is none."""
    if isinstance(drafter, SumDrafter):
        return learner_of(drafter.model)
    own = None if drafter is None else drafter.learner()
    if own is not None or not isinstance(drafter, ModelDrafter) or drafter.weights is None:
        return own
    refusal = None if drafter.shared is None else "its head was trimmed to some tokens"
    if isinstance(drafter, OtherVocabularyDrafter):
        refusal = "it has another tokenizer"
    if not drafter.runner.has_modules:
        refusal = "it is no Transformers model in this process"
    width = min(drafter.vocab_size, drafter.runner.known_ids)
    return model_learner(drafter.runner.hf, width, refusal)


def require_steps(steps: object, rows: object, rate: float) -> tuple[int, int]:
    """Returns the numbers of steps and rows. Raises RequestError if one is not positive."""
    counts = plain(steps), plain(rows)
    if not all(isinstance(one, int) and one > 0 for one in counts) or not rate > 0:
        raise RequestError(
            f"steps, rows and rate must be positive, got {steps!r}, {rows!r} and {rate!r}"
        )
    return counts


def copy_beside(weights: nn.Module, target: nn.Module) -> nn.Module:
    """Copies a drafter's weights in float32; those of the target stay the target's."""
    theirs = {id(one): one for one in (*target.modules(), *tensors(target))}
    copied = copy.deepcopy(weights, dict(theirs)).eval().requires_grad_(False)
    for module in copied.modules():
        if id(module) not in theirs:
            module._apply(
                lambda one: one.float() if one.is_floating_point() else one, recurse=False
            )
    return copied


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


def require_trainable(target: Runner, learner: Learner, name: str) -> None:
    """Raises UnsupportedModel if a drafter's weights cannot be trained here."""
    reason = learner.refusal
    used = list(learner.weights.modules())
    if not target.has_modules:
        reason = "its target is no Transformers model in this process"
    elif learner.reads:
        used.append(target.hf.get_output_embeddings())
    if reason is None and not all(
        isinstance(one, LINEARS)
        for one in used
        if hasattr(one, "in_features") and hasattr(one, "out_features")
    ):
        reason = "its weights are quantised"
    if reason is not None:
        raise UnsupportedModel(f"{name} cannot be realigned: {reason}")


def require_rollouts(
    rollouts: Rollouts, given_logits: Tensor | None, target: Runner, learner: Learner
) -> None:
    """Raises RequestError if there are no tokens to learn from, or logits that do not serve."""
    if not bool(rollouts.completion_mask.any()):
        raise RequestError("realign needs rollouts with at least one token")
    if given_logits is not None and learner.reads:
        raise RequestError(
            "heads read the target's hidden states, so that the target computes its logits as "
            "well: leave out logits"
        )
    wanted = [*rollouts.completion_ids.shape, target.vocab_size]
    if given_logits is not None and list(given_logits.shape) != wanted:
        raise RequestError(
            f"logits must have the shape {wanted}, [rows, longest sample, vocabulary], got "
            f"{list(given_logits.shape)}"
        )
