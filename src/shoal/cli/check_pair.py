"""The checks of `shoal check` about drafting.

Each is a generator of `CheckResult`s that name the prompts they were measured on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shoal.bench.measure import (
    Identity,
    compared,
    greedy_identity,
    per_position,
    predicted_speedup,
    token_ids,
)
from shoal.cli.check_case import LONGEST, PLAIN, TEMPERATURE, TRANSFORMERS, Case, Measured
from shoal.cli.check_model import training_command
from shoal.cli.check_prompts import measured_on, named
from shoal.cli.check_result import CheckResult
from shoal.cli.options import dtype_name

if TYPE_CHECKING:
    from shoal.types.samples import Result

GREEDY = "greedy identity"
WORTHWHILE = 1.05  # a speed-up below this is none


def acceptance(case: Case) -> Iterator[CheckResult]:
    """Measures the share of the drafted tokens that the target keeps, by kind of prompts."""
    for one, results in zip(case.sets, case.acceptance, strict=True):
        yield measured_on(_accepted(named("acceptance", one), case, results), one)


def _accepted(name: str, case: Case, results: dict[float, Result]) -> CheckResult:
    k = case.k
    data: dict[str, Any] = {"k": k}
    parts = []
    for temperature, result in results.items():
        stats = result.stats
        each = per_position(stats.acceptance_rate, k)
        parts.append(
            f"{stats.acceptance_length:.2f} at T={temperature:g} ({each:.0%} per position)"
        )
        data[f"T={temperature:g}"] = {
            "acceptance_length": stats.acceptance_length,
            "per_position": each,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
        }
    figure = f"k={k}: length " + ", ".join(parts)
    if any(result.stats.drafted == 0 for result in results.values()):
        return CheckResult(
            name, "fail", figure, "nothing was drafted: raise --max-new-tokens or --k", data
        )
    if max(data[f"T={t:g}"]["per_position"] for t in results) < 0.3:
        command = f"{training_command(case.model.target)} --prompts FILE"
        advice = f"the drafter guesses badly on these prompts; to train one on them: {command}"
        return CheckResult(name, "warn", figure, advice, data)
    return CheckResult(name, "ok", figure, data=data)


def costs(case: Case) -> Iterator[CheckResult]:
    """Measures the time of a target pass and of a draft pass at this batch size."""
    measured = case.costs
    passes = ", ".join(f"q={k + 1} {ms:.1f}" for k, ms in measured.target.items())
    overhead, plain_overhead = measured.overhead(case.k), measured.overhead(0)
    figure = (
        f"{case.n} rows, ms: target pass {passes}; draft pass {measured.draft:.1f}; "
        f"bookkeeping {_tenths(overhead)} per round at k={case.k}, {_tenths(plain_overhead)} at k=0"
    )
    data = {
        "rows": case.n,
        "round_ms": {str(k): ms for k, ms in measured.rounds.items()},
        "target_ms": {str(k + 1): ms for k, ms in measured.target.items()},
        "draft_ms": measured.draft,
        "overhead_ms": overhead,
        "plain_overhead_ms": plain_overhead,
    }
    yield measured_on(CheckResult("costs", "ok", figure, data=data), case.sets[0].first())


def _tenths(milliseconds: float) -> str:
    """Writes milliseconds to tenths.

    Less than a tenth, also below zero, is not told from zero: the number is the difference of two
    medians of measured times.
    """
    return "< 0.1" if milliseconds < 0.1 else f"{milliseconds:.1f}"


def speed_up(case: Case) -> Iterator[CheckResult]:
    """Predicts the speed-up at each draft length, and measures the best one, by kind of prompts."""
    for one, results in zip(case.sets, case.acceptance, strict=True):
        chance = per_position(results[TEMPERATURE].stats.acceptance_rate, case.k)
        predicted = {k: predicted_speedup(chance, k, case.costs) for k in range(1, LONGEST + 1)}
        best = max(predicted, key=lambda k: predicted[k])
        yield measured_on(
            _speed_up(named("speed-up", one), predicted, case.measured(one, best)), one
        )


def _speed_up(name: str, predicted: dict[int, float], measured: Measured) -> CheckResult:
    """Judges by the measured run whether speculation pays; the prediction chose the length."""
    plain, transformers = measured.over(PLAIN), measured.over(TRANSFORMERS)
    assert plain is not None  # our own methods always run
    data = {
        "speedup": {str(k): value for k, value in predicted.items()},
        "best_k": measured.k,
        "measured": vars(measured) | {"over_plain": plain, "over_transformers": transformers},
    }
    figure = f"predicted for k=1..{LONGEST}: " + " ".join(
        f"{value:.2f}" for value in predicted.values()
    )
    figure += f"; best k={measured.k}, measured there: {plain:.2f}x plain decoding, "
    if transformers is None:
        figure += f"Transformers' generate could not run ({measured.unavailable[TRANSFORMERS]})"
    else:
        figure += f"{transformers:.2f}x Transformers' batched generate"
    figure += f" ({measured.runs} x {measured.rows} rows of {measured.tokens} tokens each)"
    if plain < WORTHWHILE:
        advice = (
            "speculation does not pay at this batch: use --lookahead off, or a smaller or "
            "better drafter"
        )
        return CheckResult(name, "warn", figure, advice, data | {"best_k": 0})
    return CheckResult(name, "ok", figure, f"use --lookahead {measured.k}", data)


def identity(case: Case) -> Iterator[CheckResult]:
    """Compares speculation with plain decoding token by token: greedily, and with a seed."""
    case.say("comparing greedy decoding ...")
    greedy = greedy_identity(
        case.model, case.prompts, case.n, case.k, max_new_tokens=case.max_new_tokens
    )
    yield measured_on(_compared(case, GREEDY, greedy), *case.sets)
    case.say("comparing seeded sampling ...")
    plain, drafted = (
        case.run(lookahead, case.prompts, rule="coupled") for lookahead in (PLAIN, case.k)
    )
    seeded = compared(token_ids(plain), token_ids(drafted), drafted.stats.drafted)
    yield measured_on(_compared(case, "seeded identity", seeded), *case.sets)


def _compared(case: Case, name: str, found: Identity) -> CheckResult:
    data = {
        "rows": found.rows,
        "same": found.same,
        "drafted": found.drafted,
        "difference": found.difference,
    }
    dtype = dtype_name(case.model.target)
    figure = (
        f"{dtype}: {found.same} of {found.rows} rows have the tokens of plain decoding, "
        f"{found.drafted} tokens drafted"
    )
    if found.holds:
        return CheckResult(name, "ok", figure, data=data)
    if dtype not in ("float32", "float64"):
        advice = "near-ties between two tokens explain this in 16 bit; --dtype float32 settles it"
        return CheckResult(name, "warn", figure, advice, data)
    if name == GREEDY:
        advice = f"{found.summary}; in float32 this must hold: please report it"
        return CheckResult(name, "fail", figure, advice, data)
    advice = (
        f"{found.summary}; in float32 rounding decides about one position in 100,000: "
        f"please report more than that"
    )
    return CheckResult(name, "warn", figure, advice, data)
