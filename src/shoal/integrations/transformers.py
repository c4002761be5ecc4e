"""`model.generate(..., custom_generate=shoal.custom_generate, draft_model=...)`: the door for Transformers users.

`generate` prepares prompts, processors and criteria as ever and returns what it always returns; the loop in between is shoal's.
From a callable it keeps `tokenizer`, `streamer` and `assistant_model`; `shoal.integrations.repository` is the form that gets them.
"""

from __future__ import annotations

import copy
import inspect
import sys
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin

from shoal.config import Limits, Sampling, Speculation
from shoal.engine.engine import Engine
from shoal.engine.stream import Stream
from shoal.errors import RequestError
from shoal.lookahead import controller as controllers
from shoal.lookahead.controller import Knowledge
from shoal.models import loading
from shoal.models.dropout import evaluating
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Coupled
from shoal.sampling.penalties import position_independent
from shoal.sampling.purity import require_stateless
from shoal.types.requests import Request, Row, occurrences

MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION)
PREPARED = ("attention_mask", "position_ids", "cache_position")
"""Tensors among `generate`'s arguments that say nothing that the ids and the mask do not."""
PER_ROW = ("prompt_ignore_length", "encoder_input_ids", "generated_ngrams")
"""What some of Transformers' processors hold for each row, or each prompt, of the batch."""
KEPT = ("streamer", "assistant_model", "synced_gpus")
"""What `generate` keeps from a callable without a word. `tokenizer` is only used for `stop_strings`, and missed there by name."""

_runners: weakref.WeakKeyDictionary[Any, dict[str, Runner]] = weakref.WeakKeyDictionary()
_knowledge: weakref.WeakKeyDictionary[Any, Knowledge] = weakref.WeakKeyDictionary()


def custom_generate(
    model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, draft_model: Any = None,
    lookahead: Any = None, attention: str = "auto", max_batch: int = 64, **model_kwargs: Any,
) -> Any:  # fmt: skip
    """Batched speculative decoding as `generate`'s decoding method.

    Args:
        input_ids: [rows, length], `num_return_sequences` already expanded; equal prompts are found again and computed once.
        draft_model: a Transformers model with the same vocabulary; None = plain decoding.
        lookahead: see `shoal.Speculation`. attention: see `shoal.models.attention`. max_batch: most rows decoded together.
        model_kwargs: what `generate` prepared; of it only `attention_mask` [rows, length] is used: models do not see padding, on
            either side; processors and criteria do, as in `generate`. (As a named parameter `generate` would pass it twice.)

    `generate` keeps `streamer`, `assistant_model` and `tokenizer` from a callable: the first two are refused here by name, and
    `generate` itself refuses `stop_strings` then. All three work with `custom_generate=shoal.custom_generate_dir(),
    trust_remote_code=True`. A model may be in training mode if all its dropouts are 0.

    Returns:
        Sequences [rows, length + new] int64 padded with the pad token, or a `GenerateDecoderOnlyOutput` with `scores` and `logits`
        as asked (zeros after a row's end) and `past_key_values` None. One number is taken from torch's generator and
        used as `Sampling.seed`: after the same `torch.manual_seed` a prompt gets the same tokens, whatever is drafted and whatever
        other prompts are in the batch.

    Raises:
        RequestError: beam search and other methods, inputs that are no ids, outputs shoal does not have (attentions, hidden
            states), arguments that `generate` keeps from a callable, or training mode with dropout.
    """
    _refuse_kept()
    return decode(
        model, input_ids, logits_processor, stopping_criteria, generation_config, draft_model, lookahead, attention, max_batch,
        **model_kwargs,
    )  # fmt: skip


def decode(
    model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, draft_model: Any = None,
    lookahead: Any = None, attention: str = "auto", max_batch: int = 64, streamer: Any = None, **model_kwargs: Any,
) -> Any:  # fmt: skip
    """`custom_generate`, also with a streamer: it gets the prompt [1, length], then every token [1]; `end` is the caller's to call.

    Raises:
        RequestError: see `custom_generate`; more than one row and a streamer.
    """
    _refuse(generation_config, model_kwargs)
    require_stateless(logits_processor)
    if streamer is not None and len(input_ids) > 1:
        raise RequestError(
            f"a streamer follows one row, and here are {len(input_ids)}: use shoal.load(model).stream for several"
        )
    with evaluating(*((m, loading.name_of(m)) for m in (model, draft_model) if m is not None)):
        stream, groups = _stream(
            model, input_ids, logits_processor, stopping_criteria, generation_config, draft_model, lookahead, attention,
            max_batch, model_kwargs.get("attention_mask"),
        )  # fmt: skip
        if streamer is not None:
            _put(stream, input_ids, streamer)
        stream.run()
    rows: list[Row] = [row for _, row in sorted(_placed(groups, stream), key=lambda pair: pair[0])]
    return _returned(rows, input_ids, generation_config)


def _stream(
    model: Any, input_ids: Tensor, processors: Any, criteria: Any, config: Any, draft_model: Any, lookahead: Any, attention: str,
    max_batch: int, mask: Tensor | None,
) -> tuple[Stream, Groups]:  # fmt: skip
    """The run, and which row of the batch each of its rows is."""
    target = _runner(model, attention)
    drafter = _runner(draft_model, attention) if draft_model is not None else None
    if drafter is not None:
        loading.check_pair(target, drafter)
    knowledge = _knowledge.setdefault(model, Knowledge(packed=target.packs))
    controller = controllers.by_name(Speculation().lookahead if lookahead is None else lookahead, knowledge)
    engine = Engine(target, drafter, controller, max_batch=min(max_batch, len(input_ids)), rule=Coupled())
    groups = _groups(input_ids, mask, apart=any(map(_allowed_by_place, processors)))
    return Stream(engine, _requests(groups, input_ids, processors, criteria, config), text=False), groups


def _put(stream: Stream, input_ids: Tensor, streamer: Any) -> None:
    """Runs the stream, and feeds the streamer as `generate` does it."""
    streamer.put(input_ids.cpu())
    for increment in stream:
        for token in increment.token_ids:
            streamer.put(torch.tensor([token]))


def _refuse_kept() -> None:
    """Looks into the frame of the `generate` that has called: there is no other way to learn what it was given."""
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    asked = {} if frame is None else frame.f_locals
    given = {name: asked[name] for name in KEPT if asked.get(name) is not None and asked[name] is not False}
    if "streamer" in given:
        given["streamer"].end()  # or whoever reads it would wait for ever
    if given:
        raise RequestError(
            f"generate keeps {' and '.join(given)} from a callable: use custom_generate=shoal.custom_generate_dir(), "
            "trust_remote_code=True (a drafter alone may also be given as draft_model)"
        )


def _refuse(config: Any, model_kwargs: dict[str, Any]) -> None:
    mode = config.get_generation_mode()
    if mode not in MODES:
        raise RequestError(
            f"shoal samples or decodes greedily, it does no {mode.value}: num_beams must be 1, penalty_alpha and dola_layers unset"
        )
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        raise RequestError(
            "shoal returns sequences, scores and logits; output_attentions and output_hidden_states must be off"
        )
    others = [name for name, value in model_kwargs.items() if isinstance(value, Tensor) and name not in PREPARED]
    if others:
        raise RequestError(f"shoal continues token ids alone: give input_ids, and no {' or '.join(others)}")


def _runner(model: Any, attention: str) -> Runner:
    """The checked runner of a model object; the self-check runs once per model."""
    known = _runners.setdefault(model, {})
    if attention not in known:
        known[attention] = loading.wrap(model, loading.name_of(model), attention)
    return known[attention]


Groups = Sequence[tuple[tuple[int, ...], Sequence[int]]]
"""Prompts without padding, each with the rows that asked for it."""


def _groups(input_ids: Tensor, mask: Tensor | None, apart: bool) -> Groups:
    """Equal prompts are put together, but for rows that must stay apart."""
    keep = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
    prompts = [tuple(ids[kept].tolist()) for ids, kept in zip(input_ids, keep, strict=True)]
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(row)
    return [(prompt, [row]) for row, prompt in enumerate(prompts)] if apart else list(groups.items())


def _allowed_by_place(processor: Any) -> Any:
    """`prefix_allowed_tokens_fn`, if that is what it calls: it is told a row's place in the batch."""
    return getattr(processor, "_prefix_allowed_tokens_fn", None)


class _AsInGenerate:
    """A processor or a criterion called as `generate` calls it: with the prompt as it came. From there it may count lengths."""

    def __init__(self, step: Any, prompt: Tensor, kept: int) -> None:
        self.wrapped, self._prompt, self._kept = step, prompt, kept

    def __call__(self, ids: Tensor, scores: Any) -> Any:
        return self.wrapped(torch.cat([self._prompt.to(ids.device), ids[:, self._kept :]], dim=1), scores)


def _alone(processor: Any, row: int, rows: int) -> Any:
    """The processor of one row of the batch."""
    held = {name: values for name in PER_ROW if isinstance(values := getattr(processor, name, None), (Tensor, list))}
    allowed = _allowed_by_place(processor)
    if not held and allowed is None:
        return processor
    own = copy.copy(processor)
    for name, values in held.items():
        place = row * len(values) // rows
        setattr(own, name, values[place : place + 1])
    if "generated_ngrams" in held:
        own.batch_size = 1
    if allowed is not None:
        own._prefix_allowed_tokens_fn = lambda _, ids: allowed(row, ids)
    return own


def _requests(groups: Groups, input_ids: Tensor, processors: Any, criteria: Any, config: Any) -> list[Request]:
    eos = config._eos_token_tensor
    budget = next((c.max_time for c in criteria if isinstance(c, MaxTimeCriteria)), None)
    limits = Limits(
        max_new_tokens=config.max_length - input_ids.shape[1],
        eos=() if eos is None else tuple(eos.tolist()),
        time_budget=budget,
    )
    others = [c for c in criteria if not isinstance(c, (MaxLengthCriteria, EosTokenCriteria, MaxTimeCriteria))]
    keep = bool(config.return_dict_in_generate and (config.output_scores or config.output_logits))
    temperature, seed = 1.0 if config.do_sample else 0.0, int(torch.randint(1 << 62, ()))
    requests = []
    for (prompt, rows), occurrence in zip(groups, occurrences(prompt for prompt, _ in groups), strict=True):
        whole, first = input_ids[rows[:1]], rows[0]
        own = [
            step if position_independent(step) else _AsInGenerate(_alone(step, first, len(input_ids)), whole, len(prompt))
            for step in processors
        ]
        ends = [_AsInGenerate(criterion, whole, len(prompt)) for criterion in others]
        sampling = Sampling(temperature=temperature, processors=own, seed=seed)
        requests.append(Request(prompt, len(rows), sampling, limits, occurrence=occurrence, criteria=ends, keep_logits=keep))
    return requests


def _placed(groups: Groups, stream: Stream) -> list[tuple[int, Row]]:
    return [
        (i, row) for (_, places), rows in zip(groups, stream.rows, strict=True) for i, row in zip(places, rows, strict=True)
    ]


def _returned(rows: Sequence[Row], input_ids: Tensor, config: Any) -> Any:
    """What `generate` returns."""
    pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    width = max(row.new_tokens for row in rows)
    new = [row.tokens[row.prompt_length :] + [pad] * (width - row.new_tokens) for row in rows]
    sequences = torch.cat([input_ids, torch.tensor(new, dtype=input_ids.dtype, device=input_ids.device)], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    logits = _by_step([row.logits for row in rows], width) if config.output_logits else None
    scores = _by_step([_scores(row) for row in rows], width) if config.output_scores else None
    return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits)


def _scores(row: Row) -> list[Tensor]:
    """Processed scores [vocab] of each committed token."""
    ids, processors = torch.tensor([row.tokens]), LogitsProcessorList(row.request.sampling.processors)
    return [
        processors(ids[:, : row.prompt_length + t].to(logits.device), logits[None].to(torch.float32, copy=True))[0]
        for t, logits in enumerate(row.logits)
    ]


def _by_step(rows: Sequence[Sequence[Tensor]], width: int) -> tuple[Tensor, ...]:
    """Per row and step -> per step [rows, vocab] float32."""
    found = next((step for row in rows for step in row), None)
    if found is None:  # the time was over before the first round
        return ()
    blank = torch.zeros_like(found, dtype=torch.float32)
    return tuple(torch.stack([row[t].float() if t < len(row) else blank for row in rows]) for t in range(width))
