"""The batch of a `generate` call, and the evaluation mode that its models are put in.

Its rows become requests of the engine, and the decoded rows become the output of `generate`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from shoal.config import Limits, Sampling
from shoal.errors import RequestError
from shoal.sampling.penalties import position_independent
from shoal.types.requests import Request, Row, occurrences

ROW_ATTRIBUTES = ("prompt_ignore_length", "encoder_input_ids", "generated_ngrams")
"""The attributes in which processors of Transformers keep one value per row of the batch.

Some keep one per prompt.
"""


@dataclass(frozen=True)
class GenerateBatch:
    """The arguments that `generate` hands to its decoding method.

    Attributes:
        input_ids: [rows, length] int64, `num_return_sequences` expanded.
        attention_mask: [rows, length], 0 = padding, or None.
        processors: the logits processors.
        criteria: the stopping criteria.
        config: the GenerationConfig.
    """

    input_ids: Tensor
    attention_mask: Tensor | None
    processors: Sequence[Any]
    criteria: Sequence[Any]
    config: Any

    @cached_property
    def groups(self) -> Sequence[tuple[tuple[int, ...], Sequence[int]]]:
        """The prompts without padding, each with the rows of the batch that have it.

        A group is computed once. `prefix_allowed_tokens_fn` may be called with a row's index, so
        with it every row has a group of its own.
        """
        mask = self.attention_mask
        keep = torch.ones_like(self.input_ids, dtype=torch.bool) if mask is None else mask.bool()
        prompts = [
            tuple(ids[kept].tolist()) for ids, kept in zip(self.input_ids, keep, strict=True)
        ]
        if any(map(_prefix_function, self.processors)):
            return [(prompt, [row]) for row, prompt in enumerate(prompts)]
        groups: dict[tuple[int, ...], list[int]] = {}
        for row, prompt in enumerate(prompts):
            groups.setdefault(prompt, []).append(row)
        return list(groups.items())

    def requests(self) -> list[Request]:
        """Makes one request per group; one number from torch's generator is the seed of all."""
        temperature, seed = 1.0 if self.config.do_sample else 0.0, int(torch.randint(1 << 62, ()))
        limits = self._limits()
        keep_logits = self._returns("output_scores") or self._returns("output_logits")
        return [
            Request(
                prompt,
                len(rows),
                Sampling(
                    temperature=temperature, processors=self._processors(prompt, rows[0]), seed=seed
                ),
                limits,
                occurrence=occurrence,
                criteria=self._criteria(prompt, rows[0]),
                keep_logits=keep_logits,
            )
            for (prompt, rows), occurrence in zip(
                self.groups, occurrences(prompt for prompt, _ in self.groups), strict=True
            )
        ]

    def output(self, decoded: Sequence[Sequence[Row]]) -> Tensor | GenerateDecoderOnlyOutput:
        """Makes the output of `generate`.

        Args:
            decoded: the rows of each group.
        """
        by_index = dict(
            pair
            for (_, indices), rows in zip(self.groups, decoded, strict=True)
            for pair in zip(indices, rows, strict=True)
        )
        rows = [by_index[i] for i in range(len(self.input_ids))]
        pad = 0 if self.config._pad_token_tensor is None else int(self.config._pad_token_tensor)
        width = max(row.new_tokens for row in rows)
        new = [row.tokens[row.prompt_length :] + [pad] * (width - row.new_tokens) for row in rows]
        sequences = torch.cat(
            [
                self.input_ids,
                torch.tensor(new, dtype=self.input_ids.dtype, device=self.input_ids.device),
            ],
            1,
        )
        if not self.config.return_dict_in_generate:
            return sequences
        logits = (
            _by_step([row.logits for row in rows], width) if self.config.output_logits else None
        )
        scores = (
            _by_step([_scores(row) for row in rows], width) if self.config.output_scores else None
        )
        return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits)

    def _returns(self, name: str) -> bool:
        return bool(self.config.return_dict_in_generate and getattr(self.config, name))

    def _limits(self) -> Limits:
        eos = self.config._eos_token_tensor
        return Limits(
            max_new_tokens=self.config.max_length - self.input_ids.shape[1],
            eos=() if eos is None else tuple(eos.tolist()),
            time_budget=next(
                (c.max_time for c in self.criteria if isinstance(c, MaxTimeCriteria)), None
            ),
        )

    def _processors(self, prompt: tuple[int, ...], row: int) -> list[Any]:
        padded, rows = self.input_ids[row : row + 1], len(self.input_ids)
        return [
            step
            if position_independent(step)
            else _WithPadding(_for_row(step, row, rows), padded, len(prompt))
            for step in self.processors
        ]

    def _criteria(self, prompt: tuple[int, ...], row: int) -> list[Any]:
        """Returns the stopping criteria that the engine's own limits do not cover."""
        others = [
            c
            for c in self.criteria
            if not isinstance(c, (MaxLengthCriteria, EosTokenCriteria, MaxTimeCriteria))
        ]
        return [
            _WithPadding(criterion, self.input_ids[row : row + 1], len(prompt))
            for criterion in others
        ]


class _WithPadding:
    """A wrapper that calls a processor or criterion with the prompt that `generate` passes.

    The prompt includes padding: some compare lengths with it.
    """

    def __init__(self, wrapped: Any, padded: Tensor, prompt_length: int) -> None:
        self.wrapped, self._padded, self._prompt_length = wrapped, padded, prompt_length

    def __call__(self, ids: Tensor, scores: Any) -> Any:
        return self.wrapped(
            torch.cat([self._padded.to(ids.device), ids[:, self._prompt_length :]], dim=1), scores
        )


def _prefix_function(processor: Any) -> Any:
    """Returns the `prefix_allowed_tokens_fn` that a processor calls; None for other processors."""
    return getattr(processor, "_prefix_allowed_tokens_fn", None)


def _for_row(processor: Any, row: int, rows: int) -> Any:
    """Returns a copy of the processor with the values of one row of the batch.

    It returns the processor itself if it has none.
    """
    held = {
        name: values
        for name in ROW_ATTRIBUTES
        if isinstance(values := getattr(processor, name, None), (Tensor, list))
    }
    allowed = _prefix_function(processor)
    if not held and allowed is None:
        return processor
    own = copy.copy(processor)
    for name, values in held.items():
        index = row * len(values) // rows
        setattr(own, name, values[index : index + 1])
    if "generated_ngrams" in held:
        own.batch_size = 1
    if allowed is not None:
        # Transformers calls the function with the prompt's index from 5.24 on, and with the row's
        # before.
        index = row // getattr(processor, "_num_beams", 1)
        own._prefix_allowed_tokens_fn, own._num_beams = (lambda _, ids: allowed(index, ids)), 1
    return own


def _scores(row: Row) -> Iterator[Tensor]:
    """Yields the processed scores [vocab] float32 of each committed token."""
    ids = torch.tensor([row.tokens])
    processors = LogitsProcessorList(row.request.sampling.processors)
    for t, logits in enumerate(row.logits):
        yield processors(
            ids[:, : row.prompt_length + t].to(logits.device),
            logits[None].to(torch.float32, copy=True),
        )[0]


def _by_step(rows: Sequence[Sequence[Tensor] | Iterator[Tensor]], width: int) -> tuple[Tensor, ...]:
    """Turns [vocab] of each row and step into [rows, vocab] float32 of each step.

    Zeros stand after a row's end.
    """
    steps = [list(row) for row in rows]
    first_step = next((step for row in steps for step in row), None)
    if first_step is None:  # the time was over before the first round
        return ()
    zeros = torch.zeros_like(first_step, dtype=torch.float32)
    return tuple(
        torch.stack([row[t].float() if t < len(row) else zeros for row in steps])
        for t in range(width)
    )


RANDOM = re.compile(r"drop|jitter", re.IGNORECASE)
"""The pattern of the names of settings that make a model random.

They are a probability of dropout (`attention_dropout`, `resid_pdrop`, `layerdrop`, ...) or an
amount of noise (`router_jitter_noise`).
"""
UNUSED = re.compile(r"classif|summary", re.IGNORECASE)
"""The pattern of the names of dropouts in a head for classification.

A language model does not have such a head.
"""


def random_settings(hf: nn.Module) -> list[str]:
    """Returns the settings ("name=value") that make a model random in training mode."""
    settings = {
        f"{name}.p={m.p:g}": None
        for name, m in hf.named_modules()
        if isinstance(m, _DropoutNd) and m.p > 0
    }
    for owner in (getattr(hf, "config", None), *hf.modules()):
        settings |= {f"{name}={value:g}": None for name, value in _numbers(owner) if value > 0}
    return list(settings)


def _numbers(owner: Any) -> Iterator[tuple[str, float]]:
    """Yields the attributes of a module or a config that are numbers and named like a dropout."""
    values: Mapping[str, Any] = vars(owner) if owner is not None else {}
    for name, value in values.items():
        if (
            RANDOM.search(name)
            and not UNUSED.search(name)
            and isinstance(value, (int, float))
            and not isinstance(value, bool)
        ):
            yield name, value


@contextmanager
def evaluating(*models: tuple[Any, str]) -> Iterator[None]:
    """Puts (model, name) pairs in evaluation mode within the context.

    Afterwards each module is in its former mode. Without dropout both modes compute the same
    logits, except with gradient checkpointing: in training mode it takes the cache away from the
    layers.

    Raises:
        RequestError: a model in training mode has a dropout above 0, so its logits are random.
    """
    training = [module for model, _ in models for module in model.modules() if module.training]
    for model, name in models:
        settings = (
            random_settings(model) if any(module.training for module in model.modules()) else []
        )
        if settings:
            raise RequestError(
                f"{name} is in training mode, where dropout makes its logits random "
                f"({', '.join(settings[:3])}): call model.eval() first, or set every dropout to 0"
            )
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
