"""The samples of a run as padded tensors for training loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.errors import RequestError
from shoal.values import plain

if TYPE_CHECKING:
    from shoal.types.samples import Output


@dataclass(frozen=True)
class Rollouts:
    """The samples of a run, one per row, in the order of prompts and of their rows.

    Attributes:
        prompt_ids: [rows, longest prompt] int64, padded on the left.
        prompt_mask: [rows, longest prompt] bool, True at tokens.
        completion_ids: [rows, longest sample] int64, padded on the right.
        completion_mask: [rows, longest sample] bool, True at tokens.
        logprobs: [rows, longest sample] float32: `Sample.logprobs`, the log-probabilities of the
            policy itself, at temperature 1; 0.0 at padding.
        sampling_logprobs: [rows, longest sample] float32: `Sample.processed_logprobs`, the
            log-probabilities of the distribution that was sampled from; 0.0 at padding.
        prompts: [rows] int64: the number of each row's prompt, which is the row's group.
        finished: [rows] bool: `Sample.finished`, True also for a row that reached `max_new_tokens`.
        truncated: [rows] bool: the row did not end by an end-of-text token, a stop string or a
            complete grammar.
        log_weights: [rows] float32: `Sample.log_weight`, 0.0 if no weights were asked for.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    logprobs: Tensor
    sampling_logprobs: Tensor
    prompts: Tensor
    finished: Tensor
    truncated: Tensor
    log_weights: Tensor

    @property
    def input_ids(self) -> Tensor:
        """The prompts and samples, [rows, longest prompt + longest sample], for a forward pass."""
        return torch.cat([self.prompt_ids, self.completion_ids], dim=1)

    @property
    def attention_mask(self) -> Tensor:
        """The attention mask of `input_ids`, [rows, longest prompt + longest sample] int64."""
        return torch.cat([self.prompt_mask, self.completion_mask], dim=1).long()

    def __repr__(self) -> str:
        shapes = (
            f"prompt_ids {list(self.prompt_ids.shape)}, completion_ids "
            f"{list(self.completion_ids.shape)}"
        )
        tokens, truncated = int(self.completion_mask.sum()), int(self.truncated.sum())
        return (
            f"Rollouts({shapes}, {tokens} tokens, {truncated} rows truncated, "
            f"{self.logprobs.device})"
        )


def rollouts(outputs: Sequence[Output], pad_id: int, device: torch.device | str) -> Rollouts:
    """Returns the samples of these outputs on a device; no rows if there are no outputs.

    Args:
        pad_id: the id where a row has no token.

    Raises:
        RequestError: `pad_id` is no integer.
    """
    pad_id = plain(pad_id)
    if isinstance(pad_id, bool) or not isinstance(pad_id, int):
        hint = (
            "; a tokenizer without a pad token has None: its EOS token does as well"
            if pad_id is None
            else ""
        )
        raise RequestError(f"pad_id must be a token id, got {pad_id!r}{hint}")
    rows = [
        (number, output.prompt_ids, sample)
        for number, output in enumerate(outputs)
        for sample in output.samples
    ]
    prompt_ids, prompt_mask = _padded([list(ids) for _, ids, _ in rows], pad_id, left=True)
    completion_ids, completion_mask = _padded(
        [list(sample.token_ids) for *_, sample in rows], pad_id
    )
    logprobs, _ = _padded([list(sample.logprobs) for *_, sample in rows], 0.0)
    sampling_logprobs, _ = _padded([list(sample.processed_logprobs) for *_, sample in rows], 0.0)
    made = Rollouts(
        prompt_ids.long(),
        prompt_mask,
        completion_ids.long(),
        completion_mask=completion_mask,
        logprobs=logprobs.float(),
        sampling_logprobs=sampling_logprobs.float(),
        prompts=torch.tensor([number for number, *_ in rows], dtype=torch.int64),
        finished=torch.tensor([sample.finished for *_, sample in rows], dtype=torch.bool),
        truncated=torch.tensor(
            [sample.finish_reason not in ("eos", "stop") for *_, sample in rows], dtype=torch.bool
        ),
        log_weights=torch.tensor(
            [sample.log_weight or 0.0 for *_, sample in rows], dtype=torch.float32
        ),
    )
    return Rollouts(**{name: tensor.to(device) for name, tensor in vars(made).items()})


def _padded(
    rows: Sequence[Sequence[float]], value: float, *, left: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns rows padded to one length, [rows, longest], and a mask that is True at values."""
    longest = max(map(len, rows), default=0)
    filled = [[value] * (longest - len(row)) for row in rows]
    every = [
        [*fill, *row] if left else [*row, *fill] for row, fill in zip(rows, filled, strict=True)
    ]
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)[:, None]
    places = torch.arange(longest)
    mask = places >= longest - lengths if left else places < lengths
    dtype = torch.int64 if isinstance(value, int) else torch.float64
    return torch.tensor(every, dtype=dtype).reshape(len(rows), longest), mask
