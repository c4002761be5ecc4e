"""The checks of `shoal check` about drafting, and about a drafter that cannot propose all tokens.

Such a drafter has another tokenizer, or a trimmed head. Each check is a generator of
`CheckResult`s that name the prompts they were measured on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from shoal.bench import Identity, compared, per_position, predicted_speedup, token_ids
from shoal.cli.check_case import (
    BASELINE_TOKENS,
    DRAFTED,
    LONGEST,
    PLAIN,
    TEMPERATURE,
    TRANSFORMERS,
    CheckCase,
    Effort,
    MethodTimings,
)
from shoal.cli.check_model import training_command
from shoal.cli.check_prompts import CheckResult, measured_on, named
from shoal.cli.options import dtype_name
from shoal.errors import RequestError
from shoal.models.sources import directory_of

if TYPE_CHECKING:
    from shoal.types.samples import Result


GREEDY = "greedy identity"
BASELINE_RUNS = 3  # that take as long as Transformers' generate
WORTHWHILE = 1.05  # a speed-up below this is none


def runs_of(effort: Effort) -> int:
    """Returns the time of an effort's runs, in runs of plain decoding."""
    prompts = effort.kinds * effort.prompts
    turns = -(-effort.repeats // prompts)
    identity = 2 + DRAFTED  # greedy drafts are those of acceptance
    of_prompt = 2 * DRAFTED + identity + turns * (1 + DRAFTED)
    lengths = 1 + 3 * DRAFTED
    return prompts * of_prompt + effort.repeats * lengths + BASELINE_RUNS


def acceptance(case: CheckCase) -> Iterator[CheckResult]:
    """Measures the share of the drafted tokens that the target keeps, by kind of prompts."""
    for place, one in enumerate(case.sets):
        results = case.acceptance_on(place)
        yield measured_on(_accepted(named("acceptance", one), case, results), one)


def _accepted(name: str, case: CheckCase, results: dict[float, Result]) -> CheckResult:
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


def costs(case: CheckCase) -> Iterator[CheckResult]:
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


def speed_up(case: CheckCase) -> Iterator[CheckResult]:
    """Predicts the speed-up at each draft length, and measures the best one, by kind of prompts."""
    for one, results in zip(case.sets, case.acceptance, strict=True):
        chance = per_position(results[TEMPERATURE].stats.acceptance_rate, case.k)
        predicted = {k: predicted_speedup(chance, k, case.costs) for k in range(1, LONGEST + 1)}
        best = max(predicted, key=lambda k: predicted[k])
        yield measured_on(
            _speed_up(named("speed-up", one), predicted, case.measured(one, best)), one
        )


def _speed_up(name: str, predicted: dict[int, float], measured: MethodTimings) -> CheckResult:
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
    figure += f" ({measured.runs} x {measured.rows} rows of {measured.tokens} tokens each"
    figure += f"; generate {measured.rows} of {BASELINE_TOKENS})" if transformers else ")"
    if plain < WORTHWHILE:
        advice = (
            "speculation does not pay at this batch: --lookahead auto, the default, then makes no "
            "drafts; or take a smaller or better drafter"
        )
        return CheckResult(name, "warn", figure, advice, data | {"best_k": 0})
    return CheckResult(name, "ok", figure, f"use --lookahead {measured.k}", data)


def identity(case: CheckCase) -> Iterator[CheckResult]:
    """Compares speculation with plain decoding token by token: greedily, and with a seed."""
    case.say("comparing greedy decoding ...")
    runs = [results[0.0] for results in case.acceptance]
    plain = [case.run(PLAIN, one.ids, temperature=0.0) for one in case.sets]
    rows = [[each for run in part for each in token_ids(run)] for part in (plain, runs)]
    greedy = compared(rows[0], rows[1], sum(run.stats.drafted for run in runs))
    yield measured_on(_compared(case, GREEDY, greedy), *case.sets)
    case.say("comparing seeded sampling ...")
    alone, drafted = (
        case.run(lookahead, case.prompts, rule="coupled") for lookahead in (PLAIN, case.k)
    )
    seeded = compared(token_ids(alone), token_ids(drafted), drafted.stats.drafted)
    yield measured_on(_compared(case, "seeded identity", seeded), *case.sets)


def _compared(case: CheckCase, name: str, identity: Identity) -> CheckResult:
    data = {
        "rows": identity.rows,
        "same": identity.same,
        "drafted": identity.drafted,
        "difference": identity.difference,
    }
    dtype = dtype_name(case.model.target)
    figure = (
        f"{dtype}: {identity.same} of {identity.rows} rows have the tokens of plain decoding, "
        f"{identity.drafted} tokens drafted"
    )
    if identity.holds:
        return CheckResult(name, "ok", figure, data=data)
    if dtype not in ("float32", "float64"):
        advice = "near-ties between two tokens explain this in 16 bit; --dtype float32 settles it"
        return CheckResult(name, "warn", figure, advice, data)
    if name == GREEDY:
        advice = f"{identity.summary}; in float32 this must hold: please report it"
        return CheckResult(name, "fail", figure, advice, data)
    advice = (
        f"{identity.summary}; in float32 rounding decides about one position in 100,000: "
        f"please report more than that"
    )
    return CheckResult(name, "warn", figure, advice, data)


PIECE = 64
"""The number of tokens that go together to one half or the other."""
LEAST = 0.95
"""A share of the tokens below which a trimmed head gives away more than it saves."""
LOST = 0.25
"""A share of the target's tokens that TLI cannot propose from which it is worth a word."""


def written(case: CheckCase) -> list[Sequence[int]]:
    """Returns the target's tokens of each sample, from the runs that measured acceptance."""
    results = [result for by_temperature in case.acceptance for result in by_temperature.values()]
    return [one.token_ids for result in results for output in result for one in output.samples]


def trim(case: CheckCase, k: int, texts: Sequence[str]) -> CheckResult:
    """Writes which k tokens the drafter's head is to keep (`shoal.models.vocabulary`).

    They are the tokens that the target writes most, or, with texts, the tokens that the texts hold
    most. The reported share is the part of one half of these tokens that the k most used tokens of
    the other half cover.

    Raises:
        RequestError: there is no draft model, or none in a directory; or it is trimmed already.
    """
    from shoal.models import vocabulary
    from shoal.models.pretrained import load_tokenizer

    model = case.model
    draft = model.draft_model
    place = None if draft is None else directory_of(draft.name)
    if draft is None or place is None:
        raise RequestError(
            "--trim writes a file beside the drafter: give --draft a model's directory"
        )
    if draft.known_ids != draft.vocab_size:
        raise RequestError(
            f"the drafter is trimmed already: delete {place / vocabulary.TRIM_FILE} first"
        )
    tokenizer = load_tokenizer(place)
    if not texts and model.vocabularies is not None:
        texts = [model.tokenizer.decode(row, skip_special_tokens=True) for row in written(case)]
    rows = (
        [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        if texts
        else written(case)
    )
    pieces = [row[at : at + PIECE] for row in rows for at in range(0, len(row), PIECE)]
    halves = [Counter(token for piece in pieces[half::2] for token in piece) for half in (0, 1)]
    size = (
        draft.vocab_size
        if model.vocabularies is not None
        else min(draft.vocab_size, model.target.vocab_size)
    )
    always = [i for i in (tokenizer.eos_token_id,) if i is not None and i < size]
    half = set(vocabulary.most_used(halves[0], k, size, always))
    share = sum(count for token, count in halves[1].items() if token in half) / max(
        halves[1].total(), 1
    )
    counts = halves[0] + halves[1]
    kept = vocabulary.most_used(counts, k, size, always)
    path = vocabulary.save_trim(place, kept, tokenizer)
    figure = (
        f"{path} keeps {len(kept)} of the {draft.vocab_size} tokens of the drafter's head, and the "
        f"next load reads it; chosen by one half of {counts.total()} tokens, as many hold "
        f"{share:.1%} of the other"
    )
    data = {"kept": len(kept), "of": draft.vocab_size, "share": share, "counted": counts.total()}
    advice = "give more text (--trim-text), or a larger K" if share < LEAST else ""
    return CheckResult("trim", "warn" if advice else "ok", figure, advice, data)


def vocabulary(case: CheckCase) -> Iterator[CheckResult]:
    """Yields a result if the drafter cannot propose all tokens."""
    vocabularies, choice, shared_tokens = (
        case.model.vocabularies,
        case.model.choice,
        case.model.shared,
    )
    if vocabularies is None and shared_tokens is None:
        return
    counts = Counter(token for row in written(case) for token in row)
    shared = set() if shared_tokens is None else set(shared_tokens.target)
    if vocabularies is not None and vocabularies.trie is not None:
        shared = set(
            vocabularies.trie.sequences
        )  # a drafter of bytes or characters writes the others
    share = sum(count for token, count in counts.items() if token in shared) / max(
        counts.total(), 1
    )
    size = f"{len(shared)} of {case.model.target.vocab_size} ids"
    figure = f"the drafter can propose {share:.1%} of the tokens that the target wrote ({size})"
    data: dict[str, Any] = {"share": share, "shared": len(shared)}
    if choice is not None:
        rates = {method: tally.rate for method, tally in choice.methods.items() if tally.cost}
        said = ", ".join(f"{method} {rate:.2f}" for method, rate in rates.items())
        figure += f"; tokens per cost of a target pass: {said}; drafts by {choice.best}"
        data |= {"rates": rates, "method": choice.best}
    advice = (
        "SLEM loses less of the others than TLI; a drafter with the target's tokenizer loses none"
        if 1 - share > LOST
        else ""
    )
    yield measured_on(CheckResult("vocabulary", "ok", figure, advice, data), *case.sets)
