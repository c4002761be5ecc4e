"""The evidence beside a timing: greedy identity, and the share of the machine's ceilings.

The check of greedy speculation against greedy plain decoding covers every configuration that will
be timed.

The ceilings of a machine are measured. The operations and bytes that the models must do are
counted, not those done for padding: two operations per parameter and position, four per attended
token, layer and channel; weights once per pass, the context's keys and values once per row and
pass. Prompts are left out, their operations and their time, where a method tells their time
apart: the share is that of decoding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.utils.benchmark import Timer

from shoal.api import Shoal
from shoal.bench.decoding_methods import PLAIN, Method
from shoal.bench.measure import Identity, compared, first_difference
from shoal.bench.report import Checked
from shoal.bench.work import Case, Ids, Run, Work
from shoal.drafting.early_exit import EarlyExitDrafter
from shoal.drafting.following import learner_of
from shoal.drafting.model import ModelDrafter
from shoal.drafting.reduced_cache import ReducedCacheDrafter
from shoal.errors import InternalError
from shoal.models.runner import Runner

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
        found: the findings by layout, batch size and draft length.
    """

    decode: Callable[[str], Method]
    dtype: str
    exact: bool
    step: Callable[[str], None]
    found: dict[tuple[str, int, str], Checked] = field(default_factory=dict)
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
            found = compared(work.by_prompt(plain.ids), work.by_prompt(run.ids), drafted)
            if self.exact and found.same < found.rows:
                raise self._difference(case, name, found.place)
            self.found[case.layout, case.batch, name] = Checked.of(found, control)

    def compare(self, case: Case, name: str, runs: Sequence[Run], plain: Sequence[Run]) -> None:
        """Compares timed runs that were greedy themselves: they must agree as well.

        Raises:
            InternalError: see `check`.
        """
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


@dataclass(frozen=True)
class Ceilings:
    """The measured ceilings.

    Attributes:
        flops: the operations per second of a large matrix product.
        bytes: the bytes per second of a large copy (read and written).
    """

    flops: float
    bytes: float


def ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measures both; a quiet machine repeats them, a busy one does not."""
    on_cpu = device.type == "cpu"
    size, count = (1024, 2**25) if on_cpu else (8192, 2**30)
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    source = torch.zeros(count, dtype=torch.uint8, device=device)
    return Ceilings(
        2 * size**3 / _seconds("a @ b", a=a, b=b),
        2
        * count
        / _seconds("target.copy_(source)", source=source, target=torch.empty_like(source)),
    )


def _seconds(statement: str, **names: torch.Tensor) -> float:
    timer = Timer(statement, globals=dict(names), num_threads=torch.get_num_threads())
    measured = timer.blocked_autorange(min_run_time=0.3)
    return float(min(measured.times))  # a ceiling: the best that was seen


@dataclass(frozen=True)
class Load:
    """The cost of a model's passes.

    Attributes:
        flops: the operations per position.
        attention_flops: the operations per position and token attended to.
        weights: the bytes per pass.
        kv: the bytes per token attended to.
        window: the number of tokens that are attended to at most.
    """

    flops: float
    attention_flops: float
    weights: float
    kv: float
    window: float = math.inf

    @staticmethod
    def of(runner: Runner) -> Load | None:
        """Computes the load of a model.

        It is None for mixtures of experts, whose positions do not use all parameters.
        """
        config = runner.hf.config.get_text_config()
        if getattr(config, "num_experts_per_tok", None):
            return None
        head, embedding = (
            runner.hf.get_output_embeddings().weight,
            runner.hf.get_input_embeddings().weight,
        )
        looked_up = 0 if head is embedding else embedding.numel()
        used = runner.parameter_count - looked_up
        channels = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        attention = 4.0 * config.num_hidden_layers * config.num_attention_heads * channels
        unread = looked_up * embedding.element_size()
        return Load(
            2.0 * used,
            attention,
            float(runner.parameter_bytes - unread),
            float(runner.memory.token_bytes),
        )

    @staticmethod
    def of_drafter(pair: Shoal) -> Load | None:
        """Computes the load of a pair's drafter; of heads, that of their own weights.

        It is None for drafters that read text, and for the target's own layers where their number
        is chosen from round to round.
        """
        drafter = pair.new_drafter()
        if isinstance(drafter, ModelDrafter):
            return Load.of(drafter.runner)
        if isinstance(drafter, EarlyExitDrafter):
            return None if drafter.exit is None else Load.of_exit(pair.target, drafter.exit)
        if isinstance(drafter, ReducedCacheDrafter):
            whole = Load.of_exit(pair.target, drafter.exit)
            return whole and replace(whole, window=drafter.window + drafter.sinks)
        if (learner := learner_of(drafter)) is None:
            return None
        theirs = {id(one) for one in pair.target.hf.parameters()}
        own = [one for one in learner.weights.parameters() if id(one) not in theirs]
        size = sum(one.numel() for one in own)
        return Load(2.0 * size, 0.0, float(sum(one.nbytes for one in own)), 0.0)

    @staticmethod
    def of_exit(runner: Runner, layers: int | None) -> Load | None:
        """Computes the load of a model's first layers and its head; None = all layers."""
        whole = Load.of(runner)
        if whole is None or layers is None:
            return whole
        share = layers / runner.hf.config.get_text_config().num_hidden_layers
        head = 2.0 * runner.hf.get_output_embeddings().weight.numel()
        flops = head + (whole.flops - head) * share
        attention, weights = whole.attention_flops * share, whole.weights * flops / whole.flops
        return Load(flops, attention, weights, whole.kv * share)

    def done(self, passes: int, positions: int, rows: int, context: float) -> tuple[float, float]:
        """Computes (operations, bytes) of passes over a number of positions.

        Args:
            rows: rows times passes.
        """
        context = min(context, self.window)
        return positions * (
            self.flops + self.attention_flops * context
        ), passes * self.weights + rows * context * self.kv


def rates(
    pair: Shoal, work: Work, run: Run, drafter: Load | None = None
) -> tuple[float, float] | None:
    """Computes (operations, bytes) per second of a run; None if its passes are not counted.

    A drafter with passes and without a known load makes it None: no share leaves a drafter out.
    The drafter is counted with a position per drafted token: catching up after a full acceptance is
    left out.
    """
    stats, target = run.stats, Load.of(pair.target)
    if stats is None or target is None:
        return None
    if drafter is None and stats.draft_passes:
        return None
    seconds = stats.seconds_rounds or run.seconds
    prefills, prompt = (0, 0) if stats.seconds_rounds else (stats.prefills, stats.prefill_tokens)
    context = sum(map(len, work.rows)) / len(work.rows) + run.committed / len(work.rows) / 2
    rows, drafted = stats.row_rounds, stats.drafted
    done = [target.done(stats.target_passes + prefills, rows + drafted, rows, context)]
    done.append((prompt * target.flops, 0.0))
    if drafter is not None and stats.draft_passes:
        done.append(drafter.done(stats.draft_passes + prefills, drafted + prompt, drafted, context))
    guides = [one for one in (pair.guide, pair.expert) if one is not None and stats.guide_passes]
    for one in guides:
        guide = Load.of(one)
        if guide is None:
            return None
        passes = stats.guide_passes // len(guides) + prefills
        done.append(guide.done(passes, rows + drafted + prompt, rows, context))
    flops, moved = map(sum, zip(*done, strict=True))
    return flops / seconds, moved / seconds
