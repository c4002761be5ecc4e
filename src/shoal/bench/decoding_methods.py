"""The decoding methods that are compared, the combinations to measure (`Job`), and their identity.

The methods are shoal at a draft length, and Transformers' own on the same model object. The check
of greedy speculation against greedy plain decoding covers every configuration that will be timed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import CompileConfig, ContinuousBatchingConfig

from shoal.api import Shoal
from shoal.bench import Identity, compared, first_difference
from shoal.bench.report import GreedyIdentity
from shoal.bench.work import Case, Ids, Run, Work, timed
from shoal.config import require_lossless
from shoal.errors import InternalError, RequestError
from shoal.types.stats import Stats

PLAIN = "off"
PAGE = 256  # tokens of a page of Transformers' continuous batching


@dataclass(frozen=True)
class Method:
    """A decoding method, which is a setting of the table.

    Attributes:
        name: the name as the user writes it.
        baseline: the method is not shoal's.
        countable: its allocations can be counted on a CPU; they cannot if a compiler or another
            thread makes them.
    """

    name: str
    run: Callable[[Work], Run]
    baseline: bool = False
    countable: bool = True


def shoal_method(
    pair: Shoal, lookahead: str, rule: str = "rejection", guided: Mapping[str, float] | None = None
) -> Method:
    """Makes the method of shoal at that draft length; "off" is plain batched decoding.

    Args:
        rule: see `shoal.Speculation`.
        guided: the options of guidance; None = there is none.
    """

    def run(work: Work) -> Run:
        options: dict[str, Any] = {
            "temperature": work.temperature,
            "max_new_tokens": work.max_new_tokens,
            "eos": work.eos,
            **(guided or {}),
        }
        options["rule"] = (
            # "auto" would be coupled: the seed is there for new noise, not for the same tokens
            # again
            rule
        )
        with timed(pair.target.device) as watch:
            result = pair.generate(
                work.prompts, work.n, lookahead=lookahead, seed=work.seed, **options
            )
        samples = [sample for output in result for sample in output.samples]
        ended = tuple(sample.finished_at for sample in samples)
        return Run(
            watch.seconds, ended, tuple(sample.token_ids for sample in samples), result.stats
        )

    return Method(lookahead, run)


def baseline_method(pair: Shoal, name: str) -> Method:
    """Makes one of `BASELINES`; raises RequestError for another name."""
    if name not in BASELINES:
        raise RequestError(f"baseline must be one of {', '.join(BASELINES)}, got {name!r}")
    return Method(
        name,
        lambda work: BASELINES[name](pair, work),
        baseline=True,
        countable=name in ("hf", "hf-assisted"),
    )


def _batched(pair: Shoal, work: Work, **options: Any) -> Run:
    """Runs `generate` on all rows at once, padded on the left; rows are handed over together."""
    rows, hf = work.rows, pair.target.hf
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=hf.device)
    mask = torch.tensor(
        [[0] * (width - len(row)) + [1] * len(row) for row in rows], device=hf.device
    )
    torch.manual_seed(work.seed)
    with timed(hf.device) as watch:
        out = hf.generate(ids, attention_mask=mask, **_controls(work), **options)
    ends = cut_at_eos(out[:, width:].tolist(), work.eos)
    steps, committed = out.shape[1] - width, sum(map(len, ends))
    stats = Stats(
        rounds=steps,
        target_passes=steps,
        prefills=len(rows),
        prefill_tokens=sum(map(len, rows)),
        row_rounds=committed,
        committed=committed,
        seconds=watch.seconds,
    )
    return Run(watch.seconds, (watch.seconds,) * len(rows), ends, stats)


def _static(pair: Shoal, work: Work) -> Run:
    """Runs `_batched` with a static cache and the forward pass compiled, on a CPU too."""
    on_cpu = pair.target.device.type == "cpu"
    compiling = CompileConfig(mode="default" if on_cpu else "reduce-overhead")
    compiling._compile_all_devices = on_cpu
    return _batched(pair, work, cache_implementation="static", compile_config=compiling)


def _continuous(pair: Shoal, work: Work) -> Run:
    """Runs `generate_batch`; its start-up and shut-down are not counted.

    Its pool is no larger than the work needs.
    """
    rows = work.rows
    pages = sum(-(-(len(row) + work.max_new_tokens) // PAGE) for row in rows)
    known = ContinuousBatchingConfig.__dataclass_fields__
    size = "page_size" if "page_size" in known else "block_size"  # until Transformers 5.17
    pool = ContinuousBatchingConfig(
        **{size: PAGE},
        num_blocks=2 * pages + 2,
        max_batch_tokens=max(PAGE, sum(map(len, rows))),
        seed=work.seed,
    )
    logging.getLogger("ContinuousBatchingLogger").setLevel(
        logging.CRITICAL
    )  # failures are raised below
    controls = _controls(work)
    config = GenerationConfig(**controls | {"eos_token_id": controls["eos_token_id"] or -1})
    with timed(pair.target.device):
        out = pair.target.hf.generate_batch(
            [list(row) for row in rows], generation_config=config, continuous_batching_config=pool
        )
    outputs = list(out.values())
    errors = [output.error for output in outputs if output.error is not None]
    if errors or len(outputs) < len(rows):
        raise RuntimeError(
            f"{len(rows) - len(outputs) + len(errors)} of {len(rows)} rows failed: {errors[:1]}"
        )
    started = min(output.created_time for output in outputs)
    ended = tuple(output.lifespan[1] - started for output in outputs)
    return Run(
        max(ended), ended, cut_at_eos([output.generated_tokens for output in outputs], work.eos)
    )


def _assisted(pair: Shoal, work: Work) -> Run:
    """Runs `generate` with the drafter as `assistant_model`, which takes one row at a time."""
    if pair.draft_model is None:
        raise RequestError("there is no draft model to assist")
    hf, ids, ended, seconds = pair.target.hf, [], [], 0.0
    torch.manual_seed(work.seed)
    for row in work.rows:
        prompt = torch.tensor([row], device=hf.device)
        with timed(hf.device) as watch:
            out = hf.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                assistant_model=pair.draft_model.hf,
                **_controls(work),
            )
        seconds += watch.seconds
        ended.append(seconds)
        ids += out[:, len(row) :].tolist()
    return Run(seconds, tuple(ended), cut_at_eos(ids, work.eos))


BASELINES: dict[str, Callable[[Shoal, Work], Run]] = {
    "hf": _batched,
    "hf-static": _static,
    "hf-continuous": _continuous,
    "hf-assisted": _assisted,
}


def _controls(work: Work) -> dict[str, Any]:
    """Returns the settings of Transformers for this distribution and these ends."""
    sampling = (
        {"temperature": work.temperature, "top_k": 0, "top_p": 1.0} if work.temperature else {}
    )
    return {
        "do_sample": bool(work.temperature),
        **sampling,
        "max_new_tokens": work.max_new_tokens,
        "eos_token_id": list(work.eos) or None,
        "pad_token_id": 0,
    }


def cut_at_eos(rows: Sequence[Sequence[int]], eos: Ids) -> tuple[Ids, ...]:
    """Cuts every row behind its first EOS, as padding follows it."""
    ends = []
    for row in rows:
        end = next((i for i, token in enumerate(row, 1) if token in eos), len(row))
        ends.append(tuple(row[:end]))
    return tuple(ends)


@dataclass(frozen=True)
class Job:
    """The combinations of batch size, layout, temperature and method.

    Attributes:
        batches: the numbers of rows.
        n: the rows per prompt of the layout "grouped".
        layouts: the layouts to measure.
        temperatures: the temperatures to measure.
        lookaheads: the draft lengths to measure.
        baselines: the baselines to measure.
        eos: the ids that end a row; () = every row runs to `max_new_tokens`.
        rule: the acceptance rule.
        acceptance: the rate to impose, None for the real rule.
        guidance: see `shoal.Sampling`.
        plausibility: see `shoal.Sampling`.
    """

    batches: tuple[int, ...] = (1, 2, 4, 8)
    n: int = 8
    layouts: tuple[str, ...] = ("different",)
    temperatures: tuple[float, ...] = (0.8,)
    lookaheads: tuple[str, ...] = ("auto",)
    baselines: tuple[str, ...] = ()
    max_new_tokens: int = 128
    repeats: int = 3
    seed: int = 0
    eos: Ids = ()
    rule: str = "rejection"
    acceptance: float | None = None
    guidance: float = 0.0
    plausibility: float = 0.0

    def __post_init__(self) -> None:
        if min(self.repeats, self.max_new_tokens) < 1:
            raise RequestError("repeats and max_new_tokens must be >= 1")
        if self.acceptance is not None:
            require_lossless(
                self.rule, "an imposed acceptance, which stands for that of an exact rule,"
            )
        if self.guidance and self.baselines:
            raise RequestError(
                "Transformers' own methods take no guide: give --baselines '' beside --guidance"
            )
        object.__setattr__(
            self, "lookaheads", tuple(dict.fromkeys((PLAIN, *self.lookaheads)))
        )  # plain is the denominator

    @property
    def guided(self) -> dict[str, float]:
        """The options of `Shoal.generate` for guidance."""
        return {"guidance": self.guidance, "plausibility": self.plausibility}

    @property
    def cases(self) -> list[Case]:
        """The cases by layout, temperature and batch size."""
        chosen = product(self.layouts, self.temperatures, self.batches)
        return [
            Case.of(layout, temperature, batch, self.n) for layout, temperature, batch in chosen
        ]


CONTROL_ROWS = 8  # rows that the 16-bit control decodes one by one


@dataclass
class IdentityCheck:
    """A check of token ids; in an exact format a difference ends everything.

    Args:
        decode: returns the method of a draft length, by the real rule.
        dtype: the number format as messages write it.
        exact: the format is float32 or float64.
        step: called before every run, with its name.

    Attributes:
        findings: the findings by layout, batch size and draft length.
    """

    decode: Callable[[str], Method]
    dtype: str
    exact: bool
    step: Callable[[str], None]
    findings: dict[tuple[str, int, str], GreedyIdentity] = field(default_factory=dict)
    _single: dict[Ids, Ids] = field(default_factory=dict)

    def check(self, case: Case, work: Work, lookaheads: Sequence[str]) -> None:
        """Checks the greedy identity of these draft lengths on this work.

        Raises:
            InternalError: for a difference in float32 or float64, with its place.
        """
        self.step(f"greedy identity, {case.name}: plain")
        plain = self.decode(PLAIN).run(work)
        control = None if self.exact else self._control(work, plain)
        for name in lookaheads:
            self.step(f"greedy identity, {case.name}: {name}")
            run = self.decode(name).run(work)
            drafted = run.stats.drafted if run.stats else 0
            comparison = compared(work.by_prompt(plain.ids), work.by_prompt(run.ids), drafted)
            if self.exact and comparison.same < comparison.rows:
                raise self._difference(case, name, comparison.place)
            self.findings[case.layout, case.batch, name] = GreedyIdentity.of(comparison, control)

    def compare(self, case: Case, name: str, runs: Sequence[Run], plain: Sequence[Run]) -> None:
        """Compares timed runs that were greedy themselves and must agree as well (see `check`)."""
        for repeat, (one, other) in enumerate(zip(plain, runs, strict=False)):
            for row, (a, b) in enumerate(zip(one.ids, other.ids, strict=True)):
                position = first_difference(a, b)
                if position is not None:
                    raise self._difference(
                        case, name, f"repeat {repeat + 1}, row {row + 1}, token {position + 1}"
                    )

    def _difference(self, case: Case, name: str, place: str) -> InternalError:
        return InternalError(
            f"greedy decoding with lookahead {name} differs from plain decoding, {self.dtype}, "
            f"{case.name}: first at {place}; nothing that follows would be worth measuring"
        )

    def _control(self, work: Work, plain: Run) -> Identity:
        """Compares some rows of the plain run with the same rows decoded one by one.

        In 16 bit, batching changes ties by itself.
        """
        first = {prompt: row for row, prompt in reversed(list(enumerate(work.rows)))}
        rows = sorted(first.values())[:CONTROL_ROWS]
        single = [
            self._decoded_by_itself(replace(work, prompts=(work.rows[row],), n=1)) for row in rows
        ]
        return compared([[ids] for ids in single], [[plain.ids[row]] for row in rows], drafted=0)

    def _decoded_by_itself(self, work: Work) -> Ids:
        """Decodes one prompt greedily by itself, once."""
        (prompt,) = work.prompts
        if prompt not in self._single:
            (self._single[prompt],) = self.decode(PLAIN).run(work).ids
        return self._single[prompt]
