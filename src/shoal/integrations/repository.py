"""The function `custom_generate` as a repository.

It is called by `model.generate(..., custom_generate=shoal.custom_generate_dir(),
trust_remote_code=True)`. To the function of a repository `generate` passes every argument, also
`streamer`, `assistant_model` and `tokenizer`, which a callable does not receive.
"""

from __future__ import annotations

from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.generation.stopping_criteria import StopStringCriteria

from shoal.drafting.pair_loading import Tokenizers
from shoal.errors import RequestError
from shoal.integrations.transformers import METHOD_OPTIONS, DecodingMethod, decode


def custom_generate_dir() -> str:
    """Returns the directory that holds `custom_generate/generate.py`.

    The file may also be copied into a model's own repository.
    """
    return str(Path(str(resources.files("shoal"))) / "data" / "repository")


def generate(
    inputs: Tensor | None = None,
    generation_config: Any = None,
    *,
    model: Any,
    stopping_criteria: Any = None,
    streamer: Any = None,
    assistant_model: Any = None,
    tokenizer: Any = None,
    synced_gpus: bool | None = None,
    **options: Any,
) -> Any:
    """Generates as `generate` does, with shoal as its decoding method.

    Args:
        streamer: receives the prompt [1, length] and then every token [1], as from `generate`; for
            one row only. Its `end` is called even if the call fails, so that a thread that reads it
            stops.
        assistant_model: the drafter, with `num_return_sequences` of any size; the same as
            `draft_model`.
        tokenizer: for `stop_strings`, and with `assistant_tokenizer` for a drafter with another
            tokenizer, as in Transformers' universal assisted generation.
        options: `assistant_tokenizer`, the drafter's tokenizer if it has another one;
            `draft_model`, `lookahead`, `attention`, `max_batch` and `rule`, see
            `shoal.custom_generate`; and other arguments of `generate`.

    Returns:
        See `shoal.custom_generate`.

    Raises:
        RequestError: several rows and a streamer, or a reason that `shoal.custom_generate` names.
    """
    try:
        draft_model = options.pop("draft_model", None)
        _validate(assistant_model, draft_model, synced_gpus)
        drafter = draft_model if assistant_model is None else assistant_model
        tokenizers = Tokenizers(tokenizer, options.pop("assistant_tokenizer", None))
        own = {name: options.pop(name) for name in METHOD_OPTIONS if name in options}
        method = DecodingMethod(drafter, tokenizers=tokenizers, streamer=streamer, **own)
        criteria, rest = _stop_strings(
            model, generation_config, stopping_criteria, tokenizer, options
        )
        # Not `model.generate`: if the model's own repository has this function, `model.generate` is
        # this function.
        return type(model).generate(
            model,
            inputs,
            generation_config,
            stopping_criteria=criteria,
            custom_generate=partial(decode, method),
            **rest,
        )
    finally:
        if streamer is not None:
            streamer.end()


def _validate(assistant: Any, drafter: Any, synced_gpus: bool | None) -> None:
    if assistant is not None and drafter is not None:
        raise RequestError("assistant_model and draft_model are the same thing: give one of them")
    if synced_gpus:
        raise RequestError("shoal decodes with one process per model: synced_gpus is not supported")


def _stop_strings(
    model: Any, config: Any, criteria: Any, tokenizer: Any, options: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Returns the criteria with one for the stop strings, and the options without them.

    `generate` would need the tokenizer for `stop_strings`, and does not pass it to the callable
    that it is given here.
    """
    owners = (
        getattr(config, "stop_strings", None),
        getattr(model.generation_config, "stop_strings", None),
    )
    strings = options.get("stop_strings") or next(filter(None, owners), None)
    if not strings:
        return list(criteria or []), options
    if tokenizer is None:
        raise RequestError("stop_strings need the model's tokenizer: give tokenizer=...")
    return [*(criteria or []), StopStringCriteria(tokenizer, strings)], {
        **options,
        "stop_strings": None,
    }
