"""The checks of `shoal check` that need no drafter.

Each is a function from a `CheckCase` or a model to a `CheckResult`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shoal.cli.check_case import CheckCase
from shoal.cli.check_prompts import CheckResult
from shoal.cli.options import ModelSource, display_name, dtype_name
from shoal.drafting.draft import BUNDLED
from shoal.drafting.registry import MTP, SUFFIX, kinds
from shoal.errors import ModelError, PairMismatch, RequestError

if TYPE_CHECKING:
    from shoal.api import Shoal
    from shoal.models.runner import Runner

PROMPT_TOKENS = 512
"""The length of the prompt for whose pass the executor is explained."""


def load(source: ModelSource) -> tuple[Shoal | None, list[CheckResult]]:
    """Loads the pair; where that fails, finds out which half is at fault."""
    from shoal.models.load_report import described

    try:
        model = source.load()
    except (RequestError, ModelError) as error:
        return _load_target_alone(source, error)
    results = [CheckResult("target", "ok", _size(model.target), data=described(model.target))]
    if model.drafter_name is None:
        advice = "give --draft to measure another: a smaller model, best with the same tokenizer"
        advice += f"; to make one: {training_command(model.target)}"
        return model, [
            *results,
            CheckResult(
                "drafter", "skip", "none: those that need no model are measured below", advice
            ),
        ]
    if model.draft_model is None:
        return model, [
            *results,
            CheckResult(
                "drafter", "ok", f"{model.drafter_name}: no model", data=model.loaded["draft"] or {}
            ),
        ]
    share = model.draft_model.parameter_bytes / model.target.parameter_bytes
    size = f"{_size(model.draft_model)} ({share:.0%} of the target)"
    drafter = CheckResult("drafter", "ok", size, data=described(model.draft_model))
    return model, [*results, drafter, _tokenizers(model, model.draft_model)]


def training_command(target: Runner) -> str:
    """Returns the command that trains a draft model for a target."""
    name = display_name(target)
    return f"shoal train drafter --model {BUNDLED if name != target.name else name} --output DIR"


def _tokenizers(model: Shoal, draft: Runner) -> CheckResult:
    trimmed = (
        "" if draft.known_ids == draft.vocab_size else f", whose head keeps {draft.vocab_size}"
    )
    figure = f"{model.target.vocab_size} tokens v {draft.known_ids} of the drafter{trimmed}"
    data: dict[str, Any] = {
        "target": model.target.vocab_size,
        "draft": draft.known_ids,
        "head": draft.vocab_size,
    }
    if model.vocabularies is None:
        return CheckResult("tokenizer", "ok", f"the same; {figure}", data=data)
    shared = 0 if model.shared is None else len(model.shared.target)
    return CheckResult(
        "tokenizer",
        "ok",
        f"another one; {figure}; they share {shared}",
        data=data | {"shared": shared},
    )


def _load_target_alone(
    source: ModelSource, error: Exception
) -> tuple[Shoal | None, list[CheckResult]]:
    """Tells a bad target from a bad drafter and from two that do not fit."""
    if source.draft_model is None:
        return None, [CheckResult("target", "fail", str(error), _advice(error))]
    try:
        model = source.target_alone().load()
    except (RequestError, ModelError) as own:
        return None, [CheckResult("target", "fail", str(own), _advice(own))]
    name = "tokenizer" if isinstance(error, PairMismatch) else "drafter"
    return model, [
        CheckResult("target", "ok", _size(model.target)),
        CheckResult(name, "fail", str(error), _advice(error)),
    ]


def _advice(error: Exception) -> str:
    if isinstance(error, PairMismatch):
        return (
            "take a drafter of the target's own family, or one whose tokenizer keeps texts "
            "as they are"
        )
    if isinstance(error, RequestError):
        return "check the name or the directory; a gated model needs a login with `hf auth login`"
    return "this model cannot be used; the message names the reason"


def _size(runner: Runner) -> str:
    count = runner.parameter_count
    size = (
        f"{display_name(runner)}: {_count(count)} parameters, {dtype_name(runner)} on "
        f"{runner.device}"
    )
    chosen = [
        f"{subject}: {note}"
        for subject, note in runner.notes.items()
        if subject != "dtype" and note != "off"
    ]
    return "; ".join([size, *chosen])


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)


def _mib(size: float) -> str:
    return f"{size / 2**20:.0f} MiB" if size < 2**30 else f"{size / 2**30:.1f} GiB"


def self_check(runner: Runner, role: str) -> CheckResult:
    """Compares the ragged and the plain forward pass, as measured when the model was loaded.

    A result that an earlier load has kept is computed again.
    """
    error = runner.self_check_error
    name = f"{role} self-check"
    if error is None:
        return CheckResult(name, "skip", "not run")
    from shoal.models import selfcheck
    from shoal.models.load_checks import KeptChecks

    if runner.kept_checks.read(selfcheck.SELF_CHECK) is not None:
        fresh = runner.fork()
        fresh.kept_checks = KeptChecks()
        error = selfcheck.self_check(fresh)
    limit = selfcheck.tolerance(runner)
    figure = f"ragged v plain forward: {error:.1e} nats of divergence (limit {limit:g})"
    return CheckResult(name, "ok", figure, data={"error": error, "limit": limit})


def turn_end(model: Shoal) -> Iterator[CheckResult]:
    """Yields a result if the tokenizer ends texts by another token than the model's configs."""
    from shoal.models.pretrained import named_eos

    own, named = model.tokenizer.eos_token_id, named_eos(model.target.hf) or ()
    if own is None or own in named or not named:
        return
    first, others = (model.tokenizer.convert_ids_to_tokens(ids) for ids in (own, list(named)))
    both = "; both end texts" if own in model.eos else ""
    yield CheckResult(
        "end of text",
        "warn",
        f"{first} by the tokenizer, {', '.join(map(str, others))} by generation_config{both}",
        f"add {own} to eos_token_id in generation_config.json: other programs go on behind it",
        {"tokenizer": own, "generation_config": list(named)},
    )


def drafters_in_the_box(target: Runner) -> list[str]:
    """Returns the drafters that need no second model and no training, that of `auto` first."""
    from shoal.drafting.mtp import has_layer

    drafters = [MTP.name] if has_layer(target) else []
    drafters += sorted(
        (one.name for one in kinds() if one.reads_text and one.maker and not one.about),
        key=lambda name: name != SUFFIX.name,
    )
    return drafters + (["self"] if target.has_modules and target.cut_obstacle is None else [])


def family(target: Runner) -> CheckResult:
    """Tells the family of a model, the layers that keep states, and the drafters in the box."""
    config = target.hf.config.get_text_config()
    kind, layers = config.model_type, _layers_with_states(target)
    shown = kind if target.has_modules else f"{kind}, a GGUF file"
    states = f"layer{'s' * (len(layers) != 1)} {_ranges(layers)} of {config.num_hidden_layers}"
    states = states if layers else "no layer"
    drafters = drafters_in_the_box(target)
    figure = f"{shown}; {states} with recurrent states; drafters in the box: {', '.join(drafters)}"
    data = {"family": kind, "layers_with_states": layers, "drafters": drafters}
    return CheckResult("family", "ok", figure, data=data)


def _layers_with_states(target: Runner) -> list[int]:
    """Returns the numbers of the layers that keep recurrent states."""
    if not target.has_modules and target.keeps_states:
        from shoal.models.gguf.contents import layers_with_states

        return layers_with_states(target.hf.file)
    names = () if target.mixers is None else target.mixers.modules
    return sorted({int(match[1]) for name in names if (match := re.search(r"\.(\d+)\.", name))})


def _ranges(numbers: list[int]) -> str:
    """Returns sorted numbers in short: 0-2, 4."""
    first = [number for number in numbers if number - 1 not in numbers]
    last = [number for number in numbers if number + 1 not in numbers]
    pairs = zip(first, last, strict=True)
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)


def executors(runner: Runner, role: str, draft_length: int) -> CheckResult:
    """Tells who computes the passes of a model, and why no faster executor does.

    Names the modules that keep recurrent states, if there are any.
    """
    fork = runner.fork()
    longest = min(PROMPT_TOKENS, runner.context)
    fork.memory.reserve(2, longest)
    kinds = {
        "a token": fork.explain([0], [1]),
        f"a block of {1 + draft_length}": fork.explain([0], [1 + draft_length]),
        f"a prompt of {longest}": fork.explain([0], [longest], want_logits=False),
    }
    by_answer: dict[str, list[str]] = {}
    for kind, explanation in kinds.items():
        by_answer.setdefault(str(explanation), []).append(kind)
    figure = "; ".join(f"{', '.join(names)}: {answer}" for answer, names in by_answer.items())
    if runner.keeps_states:
        place = runner.mixers or "layers that llama.cpp knows"
        figure += f"; recurrent states in {place}: chains only"
        figure += "" if runner.can_keep_prefixes else ", no prefixes are kept"
    data = {
        kind: {"executor": explanation.executor, "refusals": dict(explanation.refusals)}
        for kind, explanation in kinds.items()
    }
    return CheckResult(f"{role} passes", "ok", figure, data=data)


def context(case: CheckCase) -> CheckResult:
    """Checks that the longest prompt and its continuation fit in the target.

    It also tells how far the drafter can follow.
    """
    longest = case.longest
    need, target = longest + case.max_new_tokens, case.model.target.context
    data = {"needed": need, "target": target}
    figure = f"{need} tokens needed (prompt {longest} + {case.max_new_tokens}); target {target}"
    if case.model.draft_model is not None:
        data["draft"] = case.draft_context
        figure += f", drafter {case.draft_context}"
    if longest >= target:
        return CheckResult(
            "context",
            "fail",
            figure,
            "shorten the prompt or take a target with a longer context",
            data,
        )
    if need > target:
        return CheckResult(
            "context", "warn", figure, "samples will end early: lower --max-new-tokens", data
        )
    if longest > data.get("draft", longest):
        advice = "the drafter holds no prompt of that length: such rows are decoded plainly"
        return CheckResult("context", "warn", figure, advice, data)
    if need > data.get("draft", need):
        return CheckResult(
            "context", "warn", figure, "beyond the drafter's context rows are decoded plainly", data
        )
    return CheckResult("context", "ok", figure, data=data)


def number_format(runner: Runner) -> CheckResult:
    """Tells which number format was chosen and why.

    It also tells whether a CPU has instructions for it, and whether seeds hold in it.
    """
    import torch

    from shoal.models import formats

    name, on_cpu = dtype_name(runner), runner.device.type == "cpu"
    figure = runner.notes.get("dtype", name) if on_cpu else f"{name} on {runner.device}"
    if runner.kv != "off":
        figure += f", keys and values in {runner.kv}, rounded once: the declared model"
    strict, short = "strict" in runner.notes, runner.dtype in (torch.bfloat16, torch.float16)
    kernels = runner.lean is not None and runner.lean.whole is not None
    holds = strict or kernels or not short
    data: dict[str, Any] = {"dtype": name, "reason": figure, "seeds_hold": holds}
    if not short:
        return CheckResult("dtype", "ok", figure, data=data)
    if holds:
        passes = "Strict passes" if strict else "Kernels in C"
        figure += f". {passes}: a seed gives the same tokens in every call"
        if kernels:
            return CheckResult("dtype", "ok", figure, data=data)
    else:
        figure += (
            f". In {name} the same call with the same seed may give other tokens each time: "
            "rounding depends on the shapes of the passes, and these on batch and draft lengths"
        )
    advice = (
        ""
        if holds
        else "to make a seed's tokens hold: --dtype float32"
        + (", or --strict (slower)" if on_cpu else "")
    )
    if on_cpu:
        data["instructions"] = formats.cpu().products.get(runner.dtype)
        if data["instructions"] is None:
            slow = f"this CPU has no {name} products: use --dtype float32"
            return CheckResult(
                "dtype",
                "warn",
                figure,
                slow + ("" if holds else ", which makes seeds hold too"),
                data,
            )
    return CheckResult("dtype", "ok", figure, advice, data)


def memory(case: CheckCase) -> CheckResult:
    """Compares weights and caches with the memory that is free beside the loaded weights."""
    from shoal.drafting.protocol import Keeps, KeyValueMemory
    from shoal.engine.admission import PrefixStore
    from shoal.engine.batch_size import most_rows
    from shoal.engine.prefix_cache import policy_for
    from shoal.types.requests import token_slots

    longest = case.longest
    slots, drafter = min(case.n, most_rows(case.model.max_batch)), case.model.new_drafter()
    runners = [case.model.target] + ([case.model.draft_model] if case.model.draft_model else [])
    weights = sum(runner.parameter_bytes for runner in runners)
    memories: list[KeyValueMemory] = [case.model.target.memory]
    memories += [drafter.memory] if drafter is not None and drafter.memory is not None else []
    store = PrefixStore(policy_for(case.model.prefix_sharing, memories)).add(0, slots, longest - 1)
    shared = token_slots(store.prefixes.values())
    beyond = case.k + 1 + (0 if drafter is None else drafter.max_nodes)
    caches = sum(
        memory.cache_bytes(
            slots, min(longest + case.max_new_tokens, memory.context) - shared + beyond, shared
        )
        for memory in memories
        if longest <= memory.context  # a drafter keeps nothing of a longer prompt
    )
    keeps = Keeps() if drafter is None else drafter.keeps
    kept = keeps.always + keeps.of_request(longest + slots * case.max_new_tokens, slots)
    if not keeps.on_device and case.model.target.device.type != "cpu":
        kept = 0
    free = _free_bytes(case.model.target)
    data = {
        "weights_bytes": weights,
        "cache_bytes": caches,
        "kept_bytes": kept,
        "rows": slots,
        "free_bytes": free,
    }
    figure = f"weights {_mib(weights)} + caches {_mib(caches)} for {slots} rows"
    figure += f" + at most {_mib(kept)} that the drafter keeps" if kept else ""
    if free is None:
        return CheckResult("memory", "ok", figure, data=data)
    figure += f"; {_mib(free)} free"
    if caches + kept > free:
        return CheckResult(
            "memory", "fail", figure, "lower -n, --max-new-tokens or max_batch", data
        )
    return CheckResult("memory", "ok", figure, data=data)


def _free_bytes(runner: Runner) -> int | None:
    """Returns the bytes that caches may still take; None if the system does not report them."""
    if runner.device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(runner.device)[0])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
