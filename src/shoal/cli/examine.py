"""The checks of `shoal check`, each a function from what is examined to a `Finding`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any

from shoal.bench.measure import Costs, greedy_identity, interleave, per_position, predicted_speedup
from shoal.cli.findings import Finding
from shoal.cli.options import Source, display_name, dtype_name
from shoal.errors import ModelError, PairMismatch, RequestError

if TYPE_CHECKING:
    from shoal.api import Shoal
    from shoal.request import Result
    from shoal.runner import Runner

LONGEST = 8  # draft lengths 1..LONGEST are predicted
TEMPERATURE = 0.8
WORTHWHILE = 1.05  # a predicted speed-up below this is none
WARM_UP_TOKENS = 16


@dataclass
class Case:
    """What is examined: a model and the work it shall do."""

    model: Shoal
    prompts: list[str]
    n: int
    max_new_tokens: int
    k: int
    repeats: int
    say: Callable[[str], None] = field(repr=False)

    @property
    def draft(self) -> Runner:
        """The drafter; checks that need it run only where there is one."""
        assert self.model.draft_model is not None
        return self.model.draft_model

    def run(self, lookahead: str | int, prompts: list[str], **options: Any) -> Result:
        """Samples with a fixed seed."""
        defaults: dict[str, Any] = {"temperature": TEMPERATURE, "seed": 0, "rule": "rejection"}
        defaults["max_new_tokens"] = self.max_new_tokens
        return self.model.generate(prompts, self.n, lookahead=lookahead, **defaults | options)

    @cached_property
    def acceptance(self) -> dict[float, Result]:
        """Speculative runs by temperature."""
        self.say("measuring acceptance ...")
        return {t: self.run(self.k, self.prompts, temperature=t) for t in (TEMPERATURE, 0.0)}

    @cached_property
    def timed(self) -> dict[int, list[Result]]:
        """Interleaved runs by draft length, with all rows running to the end."""
        lengths = sorted({0, 1, self.k, LONGEST})
        self.say("warming up ...")
        for k in lengths:
            self.run(k, self.prompts[:1], eos=(), max_new_tokens=min(WARM_UP_TOKENS, self.max_new_tokens))
        ways = {f"draft length {k}": lambda k=k: self.run(k, self.prompts[:1], eos=()) for k in lengths}
        return dict(zip(lengths, interleave(ways, self.repeats, self.say).values(), strict=True))

    @cached_property
    def costs(self) -> Costs:
        """Milliseconds per round and per pass, medians over the runs."""
        stats = {k: [result.stats for result in results] for k, results in self.timed.items()}
        return Costs(
            rounds={k: median(_per(s.seconds_rounds, s.rounds) for s in runs) for k, runs in stats.items()},
            target={k: median(_per(s.seconds_target, s.target_passes) for s in runs) for k, runs in stats.items()},
            draft=median(_per(s.seconds_draft, s.draft_passes) for k, runs in stats.items() if k for s in runs),
        )


def _per(seconds: float, count: int) -> float:
    """Milliseconds each."""
    return 1000 * seconds / max(1, count)


def load(source: Source) -> tuple[Shoal | None, list[Finding]]:
    """Loads the pair; where that fails, finds out which half is at fault."""
    from shoal.load_report import described

    try:
        model = source.load()
    except (RequestError, ModelError) as error:
        return _load_target_alone(source, error)
    findings = [Finding("target", "ok", _size(model.target), data=described(model.target))]
    if model.draft_model is None:
        advice = "give --draft to speculate; a drafter is a smaller model with the same tokenizer"
        return model, [*findings, Finding("drafter", "skip", "none: plain decoding", advice)]
    share = model.draft_model.parameter_bytes / model.target.parameter_bytes
    size = f"{_size(model.draft_model)} ({share:.0%} of the target)"
    vocabulary = f"{model.target.vocab_size} tokens v {model.draft_model.vocab_size} of the drafter"
    drafter = Finding("drafter", "ok", size, data=described(model.draft_model))
    return model, [*findings, drafter, Finding("tokenizer", "ok", f"the same; {vocabulary}")]


def _load_target_alone(source: Source, error: Exception) -> tuple[Shoal | None, list[Finding]]:
    """Tells a bad target from a bad drafter and from two that do not fit."""
    if source.draft is None:
        return None, [Finding("target", "fail", str(error), _advice(error))]
    try:
        model = source.target_alone().load()
    except (RequestError, ModelError) as own:
        return None, [Finding("target", "fail", str(own), _advice(own))]
    name = "tokenizer" if isinstance(error, PairMismatch) else "drafter"
    return model, [Finding("target", "ok", _size(model.target)), Finding(name, "fail", str(error), _advice(error))]


def _advice(error: Exception) -> str:
    if isinstance(error, PairMismatch):
        return "take a drafter of the target's own family, with the same tokenizer"
    if isinstance(error, RequestError):
        return "check the name or the directory; a gated model needs a login with `hf auth login`"
    return "this model cannot be used; the message names the reason"


def _size(runner: Runner) -> str:
    count = sum(parameter.numel() for parameter in runner.hf.parameters())
    size = f"{display_name(runner)}: {_count(count)} parameters, {dtype_name(runner)} on {runner.device}"
    chosen = [f"{subject}: {found}" for subject, found in runner.notes.items() if subject != "dtype" and found != "off"]
    return "; ".join([size, *chosen])


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)


def _mib(size: float) -> str:
    return f"{size / 2**20:.0f} MiB" if size < 2**30 else f"{size / 2**30:.1f} GiB"


def self_check(runner: Runner, role: str) -> Finding:
    """Ragged against plain forward, as measured when the model was loaded."""
    error = runner.self_check_error
    name = f"{role} self-check"
    if error is None:
        return Finding(name, "skip", "not run")
    from shoal.selfcheck import TOLERANCE

    limit = TOLERANCE[runner.dtype]
    figure = f"ragged v plain forward: {error:.1e} of the logits' spread (limit {limit:g})"
    return Finding(name, "ok", figure, data={"error": error, "limit": limit})


def context(case: Case) -> Finding:
    """Whether the longest prompt and its continuation fit in the target, and how far the drafter can follow."""
    longest = max(len(case.model.tokenizer.encode(prompt)) for prompt in case.prompts)
    need, target = longest + case.max_new_tokens, case.model.target.context
    data = {"needed": need, "target": target}
    figure = f"{need} tokens needed (prompt {longest} + {case.max_new_tokens}); target {target}"
    if case.model.draft_model is not None:
        data["draft"] = case.draft.context
        figure += f", drafter {case.draft.context}"
    if longest >= target:
        return Finding("context", "fail", figure, "shorten the prompt or take a target with a longer context", data)
    if need > target:
        return Finding("context", "warn", figure, "samples will end early: lower --max-new-tokens", data)
    if longest > data.get("draft", longest):
        advice = "the drafter holds no prompt of that length: such rows are decoded plainly"
        return Finding("context", "warn", figure, advice, data)
    if need > data.get("draft", need):
        return Finding("context", "warn", figure, "beyond the drafter's context rows are decoded plainly", data)
    return Finding("context", "ok", figure, data=data)


def number_format(runner: Runner) -> Finding:
    """Which number format was chosen and why; whether a CPU has instructions for it."""
    import torch

    from shoal import formats

    name, figure = dtype_name(runner), runner.notes.get("dtype", "")
    data: dict[str, Any] = {"dtype": name, "reason": figure}
    if runner.device.type != "cpu":
        return Finding("dtype", "ok", f"{name} on {runner.device}", data=data)
    if runner.dtype not in (torch.bfloat16, torch.float16):
        return Finding("dtype", "ok", figure or name, data=data)
    data["instructions"] = formats.cpu().products.get(runner.dtype)
    figure += "; the tokens of a seed may change from call to call, --strict and --dtype float32 keep them"
    if data["instructions"] is None:
        return Finding("dtype", "warn", figure, f"this CPU has no {name} products: use --dtype float32", data)
    return Finding("dtype", "ok", figure, data=data)


def memory(case: Case) -> Finding:
    """Weights and caches against what is free now, the loaded weights not counted twice."""
    from shoal.prefill import policy_for
    from shoal.sharing import Store

    longest = max(len(case.model.tokenizer.encode(prompt)) for prompt in case.prompts)
    slots = min(case.n, case.model.max_batch)
    runners = [case.model.target] + ([case.draft] if case.model.draft_model else [])
    weights = sum(runner.parameter_bytes for runner in runners)
    prefix = Store(policy_for(case.model.prompts, runners)).admit(0, slots, longest - 1)
    shared = 0 if prefix is None else prefix.length
    caches = sum(
        runner.cache_bytes(slots, longest - shared + case.max_new_tokens + case.k + 1, shared) for runner in runners
    )
    free = _free_bytes(case.model.target)
    data = {"weights_bytes": weights, "cache_bytes": caches, "rows": slots, "free_bytes": free}
    figure = f"weights {_mib(weights)} + caches {_mib(caches)} for {slots} rows"
    if free is None:
        return Finding("memory", "ok", figure, data=data)
    figure += f"; {_mib(free)} free"
    if caches > free:
        return Finding("memory", "fail", figure, "lower -n, --max-new-tokens or max_batch", data)
    return Finding("memory", "ok", figure, data=data)


def _free_bytes(runner: Runner) -> int | None:
    """Memory that the caches may still take; None where the system does not say."""
    if runner.device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(runner.device)[0])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def acceptance(case: Case) -> Finding:
    """How much of what the drafter proposes the target keeps."""
    data: dict[str, Any] = {"k": case.k}
    parts = []
    for temperature, result in case.acceptance.items():
        stats = result.stats
        each = per_position(stats.acceptance_rate, case.k)
        parts.append(f"{stats.acceptance_length:.2f} at T={temperature:g} ({each:.0%} per position)")
        data[f"T={temperature:g}"] = {
            "acceptance_length": stats.acceptance_length,
            "per_position": each,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
        }
    figure = f"k={case.k}: length " + ", ".join(parts)
    if any(result.stats.drafted == 0 for result in case.acceptance.values()):
        return Finding("acceptance", "fail", figure, "nothing was drafted: raise --max-new-tokens or --k", data)
    if max(data[f"T={t:g}"]["per_position"] for t in case.acceptance) < 0.3:
        return Finding(
            "acceptance", "warn", figure, "the drafter guesses badly on these prompts: distil it on your own text", data
        )
    return Finding("acceptance", "ok", figure, data=data)


def costs(case: Case) -> Finding:
    """What passes cost at this batch size."""
    measured = case.costs
    passes = ", ".join(f"q={k + 1} {ms:.1f}" for k, ms in measured.target.items())
    overhead, plain_overhead = measured.overhead(case.k), measured.overhead(0)
    figure = (
        f"{case.n} rows, ms: target pass {passes}; draft pass {measured.draft:.1f}; "
        f"bookkeeping {overhead:.1f} per round at k={case.k}, {plain_overhead:.1f} at k=0"
    )
    data = {
        "rows": case.n,
        "round_ms": {str(k): ms for k, ms in measured.rounds.items()},
        "target_ms": {str(k + 1): ms for k, ms in measured.target.items()},
        "draft_ms": measured.draft,
        "overhead_ms": overhead,
        "plain_overhead_ms": plain_overhead,
    }
    return Finding("costs", "ok", figure, data=data)


def prediction(case: Case) -> Finding:
    """The speed-up to expect at each draft length, and the best one."""
    stats = case.acceptance[TEMPERATURE].stats
    chance = per_position(stats.acceptance_rate, case.k)
    by_length = {k: predicted_speedup(chance, k, case.costs) for k in range(1, LONGEST + 1)}
    best = max(by_length, key=lambda k: by_length[k])
    data = {"speedup": {str(k): value for k, value in by_length.items()}, "best_k": best}
    figure = f"predicted for k=1..{LONGEST}: " + " ".join(f"{value:.2f}" for value in by_length.values())
    figure += f"; best k={best}"
    if by_length[best] < WORTHWHILE:
        advice = "speculation does not pay at this batch: use --lookahead off, or a smaller or better drafter"
        return Finding("speed-up", "warn", figure, advice, data | {"best_k": 0})
    return Finding("speed-up", "ok", figure, f"use --lookahead {best}", data)


def identity(case: Case) -> Finding:
    """Greedy speculation against greedy plain decoding."""
    case.say("comparing greedy decoding ...")
    found = greedy_identity(case.model, case.prompts, case.n, case.k, max_new_tokens=case.max_new_tokens)
    data = {"rows": found.rows, "same": found.same, "drafted": found.drafted, "difference": found.difference}
    dtype = dtype_name(case.model.target)
    figure = f"{dtype}: {found.same} of {found.rows} rows have the same tokens, {found.drafted} tokens drafted"
    if found.holds:
        return Finding("greedy identity", "ok", figure, data=data)
    if dtype in ("float32", "float64"):
        advice = f"{found.verdict}; in float32 this must hold: please report it"
        return Finding("greedy identity", "fail", figure, advice, data)
    advice = "near-ties between two tokens explain this in 16 bit; --dtype float32 settles it"
    return Finding("greedy identity", "warn", figure, advice, data)
