"""`model.generate(..., custom_generate=shoal.custom_generate, draft_model=...)`: the door for Transformers users.

`generate` prepares prompts, processors and criteria as ever and returns what it always returns; the loop in between is shoal's. It
drops `tokenizer`, `streamer` and `assistant_model` before our code runs and refuses the last with `num_return_sequences > 1`,
hence our own argument names.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from shoal import lookahead as controllers
from shoal import models
from shoal.accept import Coupled
from shoal.api import Stream
from shoal.config import Limits, Sampling, Speculation
from shoal.engine import Engine
from shoal.errors import RequestError
from shoal.lookahead import Knowledge
from shoal.request import Request, Row
from shoal.runner import Runner

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
        lookahead: see `shoal.Speculation`. attention: see `shoal.attention`. max_batch: most rows decoded together.
        model_kwargs: what `generate` prepared; of it only `attention_mask` [rows, length] is used: padding on either side is cut
            off, so processors see prompts without it. (As a named parameter `generate` would pass it twice.)

    Returns:
        Sequences [rows, length + new] int64 padded with the pad token, or a `GenerateDecoderOnlyOutput` with `scores` and `logits`
        as asked (zeros after a row's end) and `past_key_values` None. Random numbers follow `torch.manual_seed`: the same
        seed gives the same tokens, whatever is drafted.

    Raises:
        RequestError: beam search, or outputs shoal does not have (attentions, hidden states).
    """
    _refuse(generation_config)
    target = _runner(model, attention)
    drafter = _runner(draft_model, attention) if draft_model is not None else None
    if drafter is not None:
        models.check_pair(target, drafter)
    knowledge = _knowledge.setdefault(model, Knowledge(packed=target.packs))
    controller = controllers.by_name(Speculation().lookahead if lookahead is None else lookahead, knowledge)
    engine = Engine(target, drafter, controller, max_batch=min(max_batch, len(input_ids)), rule=Coupled())
    groups = _groups(input_ids, model_kwargs.get("attention_mask"))
    requests = _requests(groups, input_ids, logits_processor, stopping_criteria, generation_config)
    stream = Stream(engine, requests, text=False)
    stream.run()
    rows: list[Row] = [row for _, row in sorted(_placed(groups, stream), key=lambda pair: pair[0])]
    return _returned(rows, input_ids, logits_processor, generation_config)


def _refuse(config: Any) -> None:
    if (config.num_beams or 1) > 1:
        raise RequestError(f"shoal samples or decodes greedily: num_beams must be 1, got {config.num_beams}")
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        raise RequestError(
            "shoal returns sequences, scores and logits; output_attentions and output_hidden_states must be off"
        )


def _runner(model: Any, attention: str) -> Runner:
    """The checked runner of a model object; the self-check runs once per model."""
    known = _runners.setdefault(model, {})
    if attention not in known:
        known[attention] = models.wrap(model, model.config.name_or_path or type(model).__name__, attention)
    return known[attention]


def _groups(input_ids: Tensor, mask: Tensor | None) -> dict[tuple[int, ...], list[int]]:
    """Equal prompts, without padding -> the rows that asked for them."""
    keep = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
    groups: dict[tuple[int, ...], list[int]] = {}
    for i in range(len(input_ids)):
        groups.setdefault(tuple(input_ids[i][keep[i]].tolist()), []).append(i)
    return groups


def _requests(
    groups: dict[tuple[int, ...], list[int]], input_ids: Tensor, processors: Any, criteria: Any, config: Any
) -> list[Request]:
    eos = config._eos_token_tensor
    budget = next((c.max_time for c in criteria if isinstance(c, MaxTimeCriteria)), None)
    limits = Limits(
        max_new_tokens=config.max_length - input_ids.shape[1],
        eos=() if eos is None else tuple(eos.tolist()),
        time_budget=budget,
    )
    others = [c for c in criteria if not isinstance(c, (MaxLengthCriteria, EosTokenCriteria, MaxTimeCriteria))]
    keep = bool(config.return_dict_in_generate and (config.output_scores or config.output_logits))
    requests = []
    for prompt, rows in groups.items():
        seed = int(torch.randint(1 << 62, ()))
        sampling = Sampling(temperature=1.0 if config.do_sample else 0.0, processors=tuple(processors), seed=seed)
        requests.append(Request(prompt, len(rows), sampling, limits, criteria=others, keep_logits=keep))
    return requests


def _placed(groups: dict[tuple[int, ...], list[int]], stream: Stream) -> list[tuple[int, Row]]:
    return [
        (i, row)
        for places, rows in zip(groups.values(), stream.rows, strict=True)
        for i, row in zip(places, rows, strict=True)
    ]


def _returned(rows: Sequence[Row], input_ids: Tensor, processors: Any, config: Any) -> Any:
    """What `generate` returns."""
    pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    width = max(row.new_tokens for row in rows)
    new = [row.tokens[row.prompt_length :] + [pad] * (width - row.new_tokens) for row in rows]
    sequences = torch.cat([input_ids, torch.tensor(new, dtype=input_ids.dtype, device=input_ids.device)], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    logits = _by_step([row.logits for row in rows], width) if config.output_logits else None
    scores = _by_step([_scores(row, processors) for row in rows], width) if config.output_scores else None
    return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits)


def _scores(row: Row, processors: Any) -> list[Tensor]:
    """Processed scores [vocab] of each committed token."""
    ids = torch.tensor([row.tokens])
    start = row.prompt_length
    return [
        processors(ids[:, : start + t].to(logits.device), logits[None].float())[0] for t, logits in enumerate(row.logits)
    ]


def _by_step(rows: Sequence[Sequence[Tensor]], width: int) -> tuple[Tensor, ...]:
    """Per row and step -> per step [rows, vocab] float32."""
    blank = torch.zeros_like(rows[0][0], dtype=torch.float32)
    return tuple(torch.stack([row[t].float() if t < len(row) else blank for row in rows]) for t in range(width))
