"""The rollouts by shoal for the trainers of TRL.

`GRPOTrainer(..., rollout_func=shoal.integrations.trl.rollout_func(pair))` uses them. A trainer
hands its prompts to the function, each as often as it wants samples of it, and gets ids and
log-probabilities back. The policy that is trained is the pair's target, or is copied into it before
each batch of rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import groupby
from typing import Any

import numpy as np
from torch import Tensor, nn

from shoal.api import Shoal
from shoal.config import Sampling
from shoal.errors import RequestError
from shoal.integrations.loglikelihoods import token_logprobs
from shoal.types.arguments import SETTINGS, Integer, split_options, with_token_ids
from shoal.types.samples import Sample

RolloutFunc = Callable[[list[Any], Any], dict[str, list[Any]]]
"""A function of (prompts, trainer) that returns prompt_ids, completion_ids and logprobs.

Each is a list per sample.
"""
CONSTRAINTS = {"suffix", "constraints", "align", "exact", "syntax"}
"""The arguments of `Shoal.generate` under which some tokens are impossible."""


def rollout_func(pair: Shoal, *, realign: Integer = 0, **options: Any) -> RolloutFunc:
    """Makes the `rollout_func` of TRL's `GRPOTrainer`.

    Temperature, truncation, the repetition penalty, the number of new tokens, the tokens that end a
    sample and the entries of `generation_kwargs` are the trainer's. Each call has a seed of its
    own, made of the trainer's, with which its rollouts are the same however many tokens are
    drafted; `seed=None` accepts more drafts.

    Args:
        pair: from `shoal.load(policy, draft=...)` with the very model that is trained, whose
            changed weights are read as they are; or with another one of the same shape, also in 8
            bits, into which they are copied before each batch of rollouts, merged with their
            adapters.
        realign: the steps of `Shoal.realign` on each batch of rollouts in training; 0 = the drafter
            stays as it is.
        options: the options of `Shoal.generate`, in place of the trainer's.

    Returns:
        The function. Its `logprobs` are those that the trainer's loss computes: the policy's at the
        trainer's temperature, before truncation and penalties. Where either is asked for and the
        temperature is not 1, they take one more pass over the samples.

    Raises:
        RequestError: when called: the pair's target does not have the weights of the policy, or
            `generation_kwargs` of the trainer has a name that is no option of `Shoal.generate`.
    """

    seeds = _Seeds()

    def rollouts(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        policy = trainer.accelerator.unwrap_model(trainer.model)
        _follow(pair.target.hf, policy)
        groups = [(prompt, len(list(same))) for prompt, same in groupby(prompts)]
        n = groups[0][1] if groups else 1
        if any(count != n for _, count in groups):
            groups, n = [(prompt, 1) for prompt in prompts], 1
        asked = [_ids(prompt, trainer.processing_class) for prompt, _ in groups]
        named = _options(trainer, seeds.next(trainer), options)
        result = pair.generate(asked, n, **named)
        if realign and trainer.model.training:
            pair.realign(result.tensors(0), steps=realign)
        samples = [
            (list(output.prompt_ids), sample) for output in result for sample in output.samples
        ]
        return {
            "prompt_ids": [prompt for prompt, _ in samples],
            "completion_ids": [list(sample.token_ids) for _, sample in samples],
            "logprobs": _logprobs(pair, samples, named, float(trainer.args.temperature)),
        }

    return rollouts


def _logprobs(
    pair: Shoal,
    samples: Sequence[tuple[list[int], Sample]],
    named: Mapping[str, Any],
    temperature: float,
) -> list[list[float]]:
    """Returns the policy's log-probabilities of the samples' tokens at the trainer's temperature.

    After truncation a token's probability is larger, by the mass that was left out: the ratio of
    the loss would be too small by it.
    """
    if temperature == 1:
        return [list(sample.logprobs) for _, sample in samples]
    names = {"sampling", *(each.name for each in fields(Sampling))}
    asked = with_token_ids({name: named[name] for name in names & named.keys()}, pair.tokenizer)
    sampling, *_ = split_options(asked)
    scaled = replace(sampling, seed=None) == Sampling(temperature=temperature)
    if scaled and named.keys().isdisjoint(CONSTRAINTS):
        return [list(sample.processed_logprobs) for _, sample in samples]
    pairs = [(prompt, sample.token_ids) for prompt, sample in samples]
    return token_logprobs(pair.target, pairs, temperature)


def _options(trainer: Any, seed: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a call: the trainer's and the seed, unless others are given.

    What a trainer leaves out is None there. An object such as `Sampling` replaces all of the
    trainer's options that it has, and gets the seed if it has none.
    """
    given = trainer.args
    own = {**(given.generation_kwargs or {}), **options}
    named = {
        "temperature": given.temperature,
        "top_p": given.top_p,
        "top_k": 0 if given.top_k == -1 else given.top_k,  # as vLLM writes it
        "min_p": given.min_p,
        "repetition_penalty": given.repetition_penalty,
        "max_new_tokens": given.max_completion_length,
        "eos": trainer.eos_token_ids,
        "seed": seed,
    }
    kinds = [kind for name, kind in SETTINGS.items() if own.get(name) is not None]
    replaced = {each.name for kind in kinds for each in fields(kind)}
    sampling = own.get("sampling")
    if isinstance(sampling, Sampling) and sampling.seed is None and "seed" not in own:
        own["sampling"] = replace(sampling, seed=seed)
    return {k: v for k, v in named.items() if v is not None and k not in replaced} | own


class _Seeds:
    """A maker of a seed for each call.

    No other call of a run has the seed, nor a call of a run with another seed of the trainer. Calls
    are counted within a step, for training and evaluation apart: a step may take several batches of
    rollouts, and a run that goes on from a checkpoint, or is evaluated in between, has the seeds
    that it would have had.
    """

    def __init__(self) -> None:
        self.calls: dict[bool, tuple[int, int]] = {}

    def next(self, trainer: Any) -> int:
        training, step = bool(trainer.model.training), int(trainer.state.global_step)
        last, calls = self.calls.get(training, (step, 0))
        number = calls if last == step else 0
        self.calls[training] = step, number + 1
        key = (step, trainer.accelerator.process_index, int(training), number)
        return int(
            np.random.SeedSequence(trainer.args.seed, spawn_key=key).generate_state(1, np.uint64)[0]
        )


def _ids(prompt: Any, tokenizer: Any) -> Sequence[int]:
    """Returns a prompt's tokens: of a text, or of the messages of a conversation."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    return list(
        tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    )


def _follow(target: nn.Module, policy: Any) -> None:
    """Copies the weights of the policy into a target.

    It copies nothing if the target is the policy, or the model that adapters were put into.
    """
    if any(module is target for module in policy.modules()):
        return
    merges = hasattr(policy, "merge_adapter")
    if merges:
        policy.merge_adapter()
    try:
        missing, unexpected = target.load_state_dict(
            _own_names(policy.state_dict(), merges), strict=False
        )
    except RuntimeError as error:
        raise RequestError(
            f"the pair's target is another model than the policy: {error}"
        ) from error
    finally:
        if merges:
            policy.unmerge_adapter()
    if missing or unexpected:
        raise RequestError(
            f"the pair's target is another model than the policy: it misses {missing[:3]}, and "
            f"does not know {unexpected[:3]}"
        )


def _own_names(state: Mapping[str, Tensor], adapted: bool) -> dict[str, Tensor]:
    """Returns the weights of a model with merged adapters, by their names without adapters."""
    if not adapted:
        return dict(state)
    names = {
        name: name.removeprefix("base_model.model.").replace(".base_layer.", ".") for name in state
    }
    return {names[name]: value for name, value in state.items() if ".lora_" not in name}
