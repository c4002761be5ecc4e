"""The Transformers integration.

It is called by `model.generate(..., custom_generate=shoal.custom_generate, draft_model=...)`.
`generate` prepares prompts, processors and criteria as usual and returns its usual output; shoal
replaces the decoding loop. To a callable `generate` does not pass `tokenizer`,
`assistant_tokenizer`, `streamer` and `assistant_model`; `shoal.integrations.repository` receives
them.

`draft_model=` may be anything that drafts; models are kept between calls.
"""

from __future__ import annotations

import inspect
import logging
import sys
import weakref
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerationMixin

from shoal.config import LOSSY_RULES, Speculation
from shoal.drafting.captured_kinds import is_captured
from shoal.drafting.draft import BUNDLED, read_draft
from shoal.drafting.pair_loading import DraftModel, Tokenizers
from shoal.drafting.protocol import Drafter
from shoal.engine.batch_size import BatchSizes
from shoal.engine.engine import Engine
from shoal.engine.stream import Stream
from shoal.errors import RequestError
from shoal.integrations.generate_batch import GenerateBatch, evaluating
from shoal.lookahead import controller as controllers
from shoal.lookahead.controller import PairCosts
from shoal.models import loading, pretrained
from shoal.models.runner import Runner
from shoal.models.sources import require_source
from shoal.models.structure import Belongings
from shoal.sampling.acceptance import RULES
from shoal.sampling.processors import require_stateless


class KeptModel(NamedTuple):
    """A draft model of earlier calls, and the tokenizers that they gave."""

    model: DraftModel
    given: Tokenizers


_named: Belongings[KeptModel] = Belongings("draft models")
"""The draft models of a target, by name and attention."""
_given: Belongings[weakref.WeakKeyDictionary[nn.Module, KeptModel]] = Belongings("targets")
"""The uses of a draft model, by attention and target."""


def drafter_of(
    draft: Any, target: Runner, attention: str, tokenizers: Tokenizers
) -> Drafter | None:
    """Makes a drafter for one call.

    Args:
        draft: see `shoal.integrations.transformers.custom_generate`; None = nothing drafts.
        target: the model to draft for.
        attention: the attention method of a draft model.
        tokenizers: the tokenizers that the caller gives.

    Raises:
        RequestError: no drafter is meant.
        PairMismatch: it cannot propose for this target.
    """
    spec = read_draft(draft, "draft_model")
    if spec is None:
        return None
    if spec.source == BUNDLED:
        raise RequestError(
            "the bundled draft model fits the bundled target alone: give the directory of a "
            "draft model"
        )
    spec = spec.settled(target)
    if spec.has_files:
        spec.require_files(tokenizers.target or pretrained.tokenizer_at_hand(target.hf))
    model = None
    if spec.source is not None:
        model = _model_of(spec.source, target, attention, tokenizers).drafter(target)
    return spec.drafter(target, model)


def _model_of(source: Any, target: Runner, attention: str, tokenizers: Tokenizers) -> DraftModel:
    kept = kept_model(source, target, attention)
    if kept is None or kept.given != tokenizers:
        kept = KeptModel(_loaded(source, target, attention, tokenizers), tokenizers)
        if isinstance(source, nn.Module):
            _given.of(source).setdefault(attention, weakref.WeakKeyDictionary())[target.hf] = kept
        else:
            _named.of(target.hf)[source, attention] = kept
    return kept.model


def kept_model(source: Any, target: Runner, attention: str) -> KeptModel | None:
    """Returns the draft model that earlier calls made beside a target, by its name or object."""
    if isinstance(source, nn.Module):
        return _given.of(source).get(attention, {}).get(target.hf)
    return _named.of(target.hf).get((source, attention))


def _loaded(source: Any, target: Runner, attention: str, given: Tokenizers) -> DraftModel:
    at_hand = given.target or pretrained.tokenizer_at_hand(target.hf)
    if at_hand is None and given.draft is not None:
        raise RequestError(
            "a draft model's tokenizer says nothing without the target's: give tokenizer= beside it"
        )
    if isinstance(source, nn.Module):
        tokenizer = given.draft or pretrained.tokenizer_at_hand(source)
    else:
        require_source(source, local_files_only=True)
        tokenizer = given.draft or pretrained.load_tokenizer(source, local_files_only=True)

    def load(kept: Any) -> Runner:
        if isinstance(source, nn.Module):
            return loading.wrap(source, pretrained.name_of(source), attention)
        return loading.load_runner(
            source,
            loading.LoadOptions(
                device=target.device,
                attention=attention,
                local_files_only=True,
                target_dtype=target.dtype,
                kept=kept,
            ),
        )

    return DraftModel.load(source, target, Tokenizers(at_hand, tokenizer), load)


LOG = logging.getLogger("shoal")

MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION)
IGNORED_TENSORS = ("attention_mask", "position_ids", "cache_position")
"""The tensors among `generate`'s arguments that add nothing to the ids and the attention mask."""
NOT_PASSED = ("streamer", "assistant_model", "synced_gpus")
"""The arguments that `generate` silently does not pass to a callable.

`tokenizer` is needed for `stop_strings` only, and `generate` itself raises an error then.
"""

_runners: Belongings[Runner] = Belongings("runners")
"""The runners of a model, by attention."""
_batch_sizes = BatchSizes()
_pair_costs: Belongings[PairCosts] = Belongings("pair costs")
"""The costs of a target, by its drafter.

The key is a name, a class, a weak reference to a draft model, or None.
"""


def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    draft_model: Any = None,
    lookahead: Any = None,
    attention: str = "auto",
    max_batch: int | str = "auto",
    rule: str = "coupled",
    tokenizer: Any = None,
    assistant_tokenizer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Decodes by batched speculation, as `generate`'s decoding method.

    `generate` does not pass `streamer`, `assistant_model` and `tokenizer` to a callable: the first
    two raise an error here, and `stop_strings` raise one in `generate`. All three work with
    `custom_generate=shoal.custom_generate_dir(), trust_remote_code=True`. A model may be in
    training mode if all its dropouts are 0.

    Args:
        input_ids: [rows, length] int64, `num_return_sequences` already expanded; equal prompts are
            computed once.
        draft_model: a Transformers model; or any `draft=` of `shoal.load`: a drafter's name, the
            directory of a draft model (or a Hub id that is in the cache), also with trees
            ("DIR:tree=rsd-s") or in a sum ("suffix+DIR"), or an object. A drafter with a name is
            loaded once. None = plain decoding.
        lookahead, rule: see `shoal.Speculation`; a lossy rule is also said in a warning.
        attention: see `shoal.models.attention`.
        max_batch: see `shoal.load`.
        tokenizer: the target's tokenizer; with `assistant_tokenizer` it tells whether the two
            differ. None = the tokenizer beside the model's files; without both the sizes of the
            vocabularies decide. `generate` does not pass it to a callable: bind it with
            `functools.partial`.
        assistant_tokenizer: the draft model's tokenizer, likewise.
        model_kwargs: the arguments that `generate` prepared. Only `attention_mask` [rows, length]
            is used, to remove the padding of either side from the prompts; processors and criteria
            see it, as in `generate`. (`generate` passes a named parameter twice.)

    Returns:
        Sequences [rows, length + new] int64 padded with the pad token, or a
        `GenerateDecoderOnlyOutput` with `scores` and `logits` if they were requested (zeros after a
        row's end) and `past_key_values` None. One number is taken from torch's generator and used
        as `Sampling.seed`: after the same `torch.manual_seed` a prompt gets the same tokens,
        whatever the drafts and the other prompts of the batch are (by another rule than "coupled"
        they depend on the drafts).

    Raises:
        RequestError: beam search and other methods, inputs that are not ids, outputs that shoal
            does not have (attentions, hidden states), arguments that `generate` does not pass to a
            callable, training mode with dropout, or no such drafter or rule.
        PairMismatch: the draft model cannot propose for this target.
    """
    _reject_arguments_not_passed()
    tokenizers = Tokenizers(tokenizer, assistant_tokenizer)
    method = DecodingMethod(draft_model, lookahead, attention, max_batch, rule, tokenizers)
    batch = logits_processor, stopping_criteria, generation_config
    return decode(method, model, input_ids, *batch, **model_kwargs)


METHOD_OPTIONS = ("lookahead", "attention", "max_batch", "rule")
"""The options of `custom_generate` that have the same name and default in `DecodingMethod`."""


@dataclass(frozen=True)
class DecodingMethod:
    """The options of `custom_generate` by its names, and a streamer.

    Attributes:
        streamer: receives the prompt [1, length], then every token [1]. The caller calls its `end`.
    """

    draft_model: Any = None
    lookahead: Any = None
    attention: str = "auto"
    max_batch: int | str = "auto"
    rule: str = "coupled"
    tokenizers: Tokenizers = field(default_factory=Tokenizers)
    streamer: Any = None


def decode(
    method: DecodingMethod,
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **model_kwargs: Any,
) -> Any:
    """Decodes like `custom_generate`, with a streamer.

    Raises:
        RequestError: see `custom_generate`; a streamer and more than one row.
    """
    _validate(generation_config, model_kwargs)
    require_stateless(logits_processor)
    lookahead, streamer, draft_model = method.lookahead, method.streamer, method.draft_model
    speculation = Speculation() if lookahead is None else Speculation(lookahead=lookahead)
    speculation = replace(speculation, rule="coupled" if method.rule == "auto" else method.rule)
    if streamer is not None and len(input_ids) > 1:
        raise RequestError(
            f"a streamer follows one row, and here are {len(input_ids)}: use "
            f"shoal.load(model).stream for several"
        )
    mask = model_kwargs.get("attention_mask")
    batch = GenerateBatch(input_ids, mask, logits_processor, stopping_criteria, generation_config)
    with evaluating(
        *((m, pretrained.name_of(m)) for m in (model, draft_model) if isinstance(m, nn.Module))
    ):
        engine = _engine(model, method, speculation)
        if speculation.rule in LOSSY_RULES:
            LOG.warning(LOSSY_RULES[speculation.rule])
        stream = Stream(engine, batch.requests(), text=False)
        if streamer is not None:
            _feed(streamer, stream, input_ids)
        stream.run()
    return batch.output(stream.rows)


def _engine(model: Any, method: DecodingMethod, speculation: Speculation) -> Engine:
    draft_model, target = method.draft_model, _runner(model, method.attention)
    drafter = drafter_of(draft_model, target, method.attention, method.tokenizers)
    # An object of the protocol by its class: it may be made anew for each call, and need not be
    # hashable.
    key: Any = (
        draft_model if draft_model is None or isinstance(draft_model, str) else type(draft_model)
    )
    key = weakref.ref(draft_model) if isinstance(draft_model, nn.Module) else key
    pair_costs = _pair_costs.of(model).setdefault(key, PairCosts(packed=target.skips_padding))
    captured = is_captured(target, drafter)
    controller = controllers.by_name(speculation.lookahead, pair_costs, drafter, captured=captured)
    size = _batch_sizes.of(method.max_batch, model, speculation.lookahead)
    return Engine(target, drafter, controller, max_batch=size, rule=RULES[speculation.rule]())


def _runner(model: Any, attention: str) -> Runner:
    """Returns the checked runner of a model object; the self-check runs once per model."""
    known = _runners.of(model)
    if attention not in known:
        known[attention] = loading.wrap(model, pretrained.name_of(model), attention)
    return known[attention]


def _feed(streamer: Any, stream: Stream, input_ids: Tensor) -> None:
    """Runs the stream and calls the streamer as `generate` does."""
    streamer.put(input_ids.cpu())
    for increment in stream:
        for token in increment.token_ids:
            streamer.put(torch.tensor([token]))


def _reject_arguments_not_passed() -> None:
    """Refuses arguments of `generate` that it does not pass to a callable.

    They are read from the frame of the calling `generate`: a callable has no other way to see them.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    arguments = {} if frame is None else frame.f_locals
    given = {
        name: arguments[name]
        for name in NOT_PASSED
        if arguments.get(name) is not None and arguments[name] is not False
    }
    if "streamer" in given:
        given["streamer"].end()  # a thread that reads the streamer would block for ever
    if given:
        raise RequestError(
            f"generate keeps {' and '.join(given)} from a callable: use "
            "custom_generate=shoal.custom_generate_dir(), trust_remote_code=True (a drafter alone "
            "may also be given as draft_model)"
        )


def _validate(config: Any, model_kwargs: dict[str, Any]) -> None:
    """Raises RequestError for a decoding method, outputs or inputs that shoal does not have."""
    mode = config.get_generation_mode()
    if mode not in MODES:
        raise RequestError(
            f"shoal samples or decodes greedily, it does no {mode.value}: num_beams must be 1, "
            f"penalty_alpha and dola_layers unset"
        )
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        raise RequestError(
            "shoal returns sequences, scores and logits; output_attentions and "
            "output_hidden_states must be off"
        )
    others = [
        name
        for name, value in model_kwargs.items()
        if isinstance(value, Tensor) and name not in IGNORED_TENSORS
    ]
    if others:
        raise RequestError(
            f"shoal continues token ids alone: give input_ids, and no {' or '.join(others)}"
        )
