"""The distributions, draws and verdicts by the kernels in C: one call for all positions.

Torch takes some ten operations for each. A position's bits depend on its own scores, settings and
uniforms alone, not on the positions beside it. The bits differ from torch's, which rounds
differently: rows of the same settings are always computed by one of the two.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.config import Sampling
from shoal.native import BlockStruct, DrawsStruct, SettingStruct, VerdictsStruct
from shoal.native.build import SUFFIXES, library, missing
from shoal.types.trees import DraftTree

_COLDEST, _HOTTEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


class Drawn(NamedTuple):
    """The tokens that were drawn at positions [rows, q].

    Attributes:
        tokens: the tokens, int64; 0 if none was drawn, -1 if there is no distribution.
        probs: the probabilities of the tokens, float32.
        highest: the highest probabilities, for greedy rows those at temperature 1, float32; None
            unless asked for.
        p: the distributions, [rows, q, vocab] float32; None unless asked for.
        impossible: the number of positions without a distribution.
    """

    tokens: Tensor
    probs: Tensor
    highest: Tensor | None
    p: Tensor | None
    impossible: int


class Verified(NamedTuple):
    """The verdict on chains.

    Attributes:
        accepted: the number of accepted drafts, [rows] int64.
        token: the token that follows them, [rows] int64; -1 if there is no distribution.
        probs: the probabilities of the drafts and the token, [rows, m + 1] float32.
        logprobs: the natural logarithms of their probabilities by the scores alone, shaped like
            `probs`.
        impossible: the number of rows without a token.
    """

    accepted: Tensor
    token: Tensor
    probs: Tensor
    logprobs: Tensor
    impossible: int


def takes(scores: Tensor, samplings: Sequence[Sampling]) -> bool:
    """Returns True if the kernels compute these distributions."""
    return (
        scores.device.type == "cpu"
        and scores.dtype in SUFFIXES
        and knows(samplings)
        and not missing()
    )


def knows(samplings: Sequence[Sampling]) -> bool:
    """Returns True if the kernels know all of these settings."""
    return all(
        sampling.typical_p >= 1 for sampling in {id(each): each for each in samplings}.values()
    )


def draw(
    scores: Tensor,
    samplings: Sequence[Sampling],
    uniforms: Tensor | None = None,
    *,
    race: bool = False,
    want_p: bool = False,
    want_highest: bool = False,
) -> Drawn:
    """Draws tokens from the distributions after temperature, top_k, top_p and min_p.

    Args:
        scores: the scores after all other controls, [rows, q, vocab] float32 or bfloat16. Not
            modified.
        samplings: the settings of the rows, or one for all.
        uniforms: [rows, q, ...] float64, for an exponential race, or the first of each position for
            an inverse transform (`shoal.sampling.drawing`); None draws only the tokens of greedy
            rows.
        race: True draws by an exponential race.
        want_p: True to return the distributions beside the tokens.
        want_highest: True to return the highest probabilities beside the tokens.

    Raises:
        MemoryError: the memory does not suffice for the scores of a position.
    """
    rows, columns, vocab = scores.shape
    tokens, probs = torch.empty(rows, columns, dtype=torch.long), torch.empty(rows, columns)
    p = torch.empty(rows, columns, vocab) if want_p else None
    highest = torch.empty(rows, columns) if want_highest else None
    block, owners = block_of(scores, settings_of(samplings), uniforms, race)
    work = DrawsStruct(block, tokens.data_ptr(), probs.data_ptr(), _address(highest), _address(p))
    impossible = _require_memory(library().draw(ctypes.byref(work)))
    del owners  # the block has the addresses of these tensors
    return Drawn(tokens, probs, highest, p, impossible)


def verify(
    scores: Tensor,
    samplings: Sequence[Sampling],
    tree: DraftTree,
    uniforms: Tensor,
    *,
    race: bool,
    rejection: bool,
) -> Verified:
    """Decides on chains by rejection sampling, or by the tokens that the target draws itself.

    Args:
        scores: see `draw`, [rows, m + 1, vocab].
        uniforms: [rows, m + 1, ...].
        race: True draws by an exponential race.
        rejection: True for rejection sampling with the tree's q, except for greedy rows.

    Raises:
        MemoryError: the memory does not suffice for the scores of a position.
    """
    rows, columns, _ = scores.shape
    accepted, token = torch.empty(2, rows, dtype=torch.long)
    probs, logprobs = torch.empty(2, rows, columns)
    block, owners = block_of(scores, settings_of(samplings), uniforms, race)
    drafts, lengths = tree.tokens.contiguous(), tree.lengths.contiguous()
    q = [_dense(each) for each in tree.q or ()] if rejection else []
    addresses = (ctypes.c_void_p * len(q))(*(each.data_ptr() for each in q))
    work = VerdictsStruct(
        block,
        q_row=q[0].stride(0) if q else 0,
        drafts=drafts.data_ptr(),
        lengths=lengths.data_ptr(),
        q=ctypes.addressof(addresses) if q else None,
        accepted=accepted.data_ptr(),
        tokens=token.data_ptr(),
        chosen=probs.data_ptr(),
        logprobs=logprobs.data_ptr(),
    )
    impossible = _require_memory(library().verify(ctypes.byref(work)))
    del owners
    return Verified(accepted, token, probs, logprobs, impossible)


def block_of(
    scores: Tensor, settings: Any, uniforms: Tensor | None, race: bool
) -> tuple[BlockStruct, Any]:
    """Makes the kernels' struct of positions [rows, q, vocab].

    Returns the struct, and the objects that must live as long as it is used.

    Args:
        settings: see `settings_of`.
        uniforms: see `draw`.
        race: see `draw`.
    """
    scores = scores if scores.stride(-1) == 1 else scores.contiguous()
    uniforms = uniforms if uniforms is None or uniforms.stride(-1) == 1 else uniforms.contiguous()
    rows, columns, vocab = scores.shape
    uniforms_row, uniforms_column = (0, 0) if uniforms is None else uniforms.stride()[:2]
    buckets = uniforms.shape[-1] - 1 if race and uniforms is not None else 0
    block = BlockStruct(
        rows=rows,
        columns=columns,
        vocab=vocab,
        threads=torch.get_num_threads(),
        bfloat16=scores.dtype == torch.bfloat16,
        buckets=buckets,
        settings_row=len(settings) > 1,
        scores_row=scores.stride(0),
        scores_column=scores.stride(1),
        uniforms_row=uniforms_row,
        uniforms_column=uniforms_column,
        settings=ctypes.addressof(settings),
        scores=scores.data_ptr(),
        uniforms=_address(uniforms),
    )
    return block, (scores, uniforms, settings)


def settings_of(samplings: Sequence[Sampling]) -> Any:
    """Returns the rows' settings as the kernels read them; one row's if all rows have the same."""
    first = samplings[0]
    return _settings(
        (_key(first),) if all(each is first for each in samplings) else tuple(map(_key, samplings))
    )


def _key(sampling: Sampling) -> tuple[float, float, float, int]:
    temperature = 0.0 if sampling.greedy else min(max(sampling.temperature, _COLDEST), _HOTTEST)
    return temperature, sampling.top_p, sampling.min_p, sampling.top_k


@lru_cache(maxsize=256)
def _settings(keys: tuple[tuple[float, float, float, int], ...]) -> Any:
    """Makes an array of `SettingStruct`."""
    keys = keys[:1] if len(set(keys)) == 1 else keys
    return (SettingStruct * len(keys))(*(SettingStruct(*key) for key in keys))


def _dense(q: Tensor) -> Tensor:
    return q.to(torch.float32, memory_format=torch.contiguous_format).contiguous()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _require_memory(impossible: int) -> int:
    if impossible < 0:
        raise MemoryError("no memory for the scores of a position")
    return impossible
