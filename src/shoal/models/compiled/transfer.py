"""The transfers between host and device in a round: one copy each way, of many parts.

The results of a round are packed on the device, and unpacked on the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.models.device import event_for
from shoal.types.trees import Verdict

Numbers = npt.NDArray[np.int64]


class Upload:
    """The named parts of one buffer of 64-bit numbers, copied to the device at once.

    The parts are filled on the host. The copy is not waited for. The host's buffer is written again
    only after results that were sent later have come back; by then the copy is complete.

    Args:
        sizes: number of each part's numbers.
    """

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        self._host = host_buffer(sum(sizes.values()), device)
        self._device = torch.zeros(len(self._host), dtype=torch.long, device=device)
        self._event = event_for(device)
        names, lengths = list(sizes), list(sizes.values())
        self._parts = dict(zip(names, self._device.split(lengths), strict=True))
        self._host_parts = dict(
            zip(names, np.split(self._host.numpy(), np.cumsum(lengths)[:-1]), strict=True)
        )

    def __getitem__(self, name: str) -> Tensor:
        """Returns a part on the device, [size] int64."""
        return self._parts[name]

    def reals(self, name: str) -> Tensor:
        """Returns a part on the device that holds reals, [size] float64."""
        return self._parts[name].view(torch.float64)

    def on_host(self, name: str) -> Numbers:
        """Returns a part on the host, [size] int64; values written there stay until `send`."""
        return self._host_parts[name]

    def reals_on_host(self, name: str) -> npt.NDArray[np.float64]:
        """Returns a part on the host that holds reals, [size] float64."""
        return self._host_parts[name].view(np.float64)

    def send(self) -> None:
        """Copies all parts."""
        self._device.copy_(self._host, non_blocking=True)
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device.device))

    def reuse(self) -> None:
        """Waits until the last copy is over, if no results that came later have."""
        if self._event is not None:
            self._event.synchronize()

    @property
    def buffer(self) -> Tensor:
        """The buffer of all parts on the device, [numbers] int64."""
        return self._device


def host_buffer(size: int, device: torch.device) -> Tensor:
    """Returns zeros [size] int64 on the host, pinned where that makes copies faster."""
    return torch.zeros(size, dtype=torch.long, pin_memory=device.type == "cuda")


def packed(*parts: Tensor) -> Tensor:
    """Packs tensors [rows, ...] side by side as 64-bit numbers, [rows, columns] int64.

    The tensors hold integers or reals.
    """
    return torch.cat(
        [_as_numbers(part.flatten(1) if part.dim() > 1 else part[:, None]) for part in parts], dim=1
    )


def _as_numbers(part: Tensor) -> Tensor:
    return part.double().view(torch.long) if part.is_floating_point() else part.long()


class Arrival:
    """Results on their way to the host.

    Args:
        numbers: the buffer on the host that they are copied to, [rows, columns] int64.
        device: the device that they come from.
    """

    def __init__(self, numbers: Tensor, device: torch.device) -> None:
        self._numbers, self._device = numbers, device
        self._event = event_for(device) if numbers.is_pinned() else None
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> Numbers:
        """Returns the results, good until the next but one are sent. A round waits here."""
        if self._event is not None:
            self._event.synchronize()
        elif self._numbers.is_pinned():
            torch.cuda.current_stream(self._device).synchronize()
        return self._numbers.numpy()


class Download:
    """The transfer of results to the host; those of two rounds may be under way."""

    def __init__(self) -> None:
        self._hosts: list[Tensor | None] = [None, None]
        self._next = 0

    def start(self, results: Tensor) -> Arrival:
        """Sends results [rows, columns] int64 as soon as they are there; does not wait."""
        place, self._next = self._next, 1 - self._next
        host = self._hosts[place]
        if host is None or len(host) < results.numel():
            host = self._hosts[place] = host_buffer(results.numel(), results.device)
        arriving = host[: results.numel()].view(results.shape)
        arriving.copy_(results, non_blocking=True)
        return Arrival(arriving, results.device)

    def __call__(self, results: Tensor) -> Numbers:
        """Returns the results on the host, and waits for them."""
        return self.start(results).wait()


_TOO_FEW = 2
"""A number added to `sound` of a row whose verdict would need more candidates."""


class RoundResults(NamedTuple):
    """The results of a round, of its real rows.

    Attributes:
        drafts: [rows, k], -1 where the drafter has no distribution.
        accepted: numbers of accepted drafts, [rows].
        tokens: the verdict's tokens, [rows].
        sound: [rows], True if the target's logits are sound and the verdict is by the declared
            distributions.
        too_few: True if candidates were too few for some row; the next round looks at more.
        probs: the verdict's probabilities, [rows, k + 1].
        logprobs: log-probabilities of the tokens, [rows, k + 1].
        logits: logits of the target, [rows, k + 1, vocab], on the device, good until the next
            round.
        drafting: seconds of the drafter on the device.
        verifying: seconds of the target on the device.
    """

    drafts: Numbers
    accepted: Numbers
    tokens: Numbers
    sound: npt.NDArray[np.bool_]
    too_few: bool
    probs: npt.NDArray[np.float64]
    logprobs: npt.NDArray[np.float64]
    logits: Tensor
    drafting: float
    verifying: float


def packed_results(
    logits: Tensor, fed: Tensor, drawn: Sequence[Tensor], verdict: Verdict, listed: Tensor | None
) -> Tensor:
    """Packs all results of a round but its logits, [rows, columns] int64; a function of tensors.

    Args:
        logits: logits of the target, [rows, k + 1, vocab].
        fed: the drafts that the target was fed, [rows, k].
        drawn: the tokens that the drafter drew, k times [rows].
        listed: True for rows whose verdict is by the declared distributions, [rows] bool; None =
            all.
    """
    inside = torch.arange(fed.shape[1], device=fed.device) < verdict.accepted[:, None]
    path = torch.cat(
        [torch.where(inside, fed, verdict.token[:, None]), verdict.token[:, None]], dim=1
    )
    width = torch.promote_types(logits.dtype, torch.float32)
    logprobs = logits.log_softmax(-1, dtype=width).gather(-1, path[..., None]).squeeze(-1)
    sound = (logits.amax(-1).abs().amax(-1) < torch.inf).long()
    if listed is not None:
        sound = torch.where(listed, sound, sound + _TOO_FEW)
    drafts = [tokens[:, None] for tokens in drawn]
    return packed(verdict.accepted, verdict.token, sound, verdict.probs, logprobs, *drafts)


def unpacked(numbers: Numbers, logits: Tensor, drafting: float, verifying: float) -> RoundResults:
    """Unpacks the results [rows, columns] on the host; the logits are those of the same rows."""
    columns, reals, sound = logits.shape[1], numbers.view(np.float64), numbers[:, 2]
    return RoundResults(
        numbers[:, 3 + 2 * columns :],
        numbers[:, 0],
        numbers[:, 1],
        sound=sound == 1,
        too_few=bool(sound.max() >= _TOO_FEW),
        probs=reals[:, 3 : 3 + columns],
        logprobs=reals[:, 3 + columns : 3 + 2 * columns],
        logits=logits,
        drafting=drafting,
        verifying=verifying,
    )
