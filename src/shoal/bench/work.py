"""The task that every decoding method is given, the result of one run, and its share of ceilings.

The ceilings of a machine are measured. The operations and bytes that the models must do are
counted, not those done for padding: two operations per parameter and position, four per attended
token, layer and channel; weights once per pass, the context's keys and values once per row and
pass. Prompts are left out, their operations and their time, where a method tells their time
apart: the share is that of decoding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch.utils.benchmark import Timer

from shoal.api import Shoal
from shoal.bench.machine import BusyProcess
from shoal.drafting.early_exit import EarlyExitDrafter
from shoal.drafting.following import learner_of
from shoal.drafting.model import ModelDrafter
from shoal.drafting.target_keys import ReducedCacheDrafter
from shoal.errors import RequestError
from shoal.models.runner import Runner
from shoal.types.stats import Stats

LAYOUTS = ("different", "same", "grouped")
"""The layouts: a prompt per row; one prompt for all rows; groups with n rows each."""

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A group of lines of the table: `batch` rows, `samples` of each prompt."""

    layout: str
    temperature: float
    batch: int
    samples: int

    @staticmethod
    def of(layout: str, temperature: float, batch: int, n: int) -> Case:
        """Makes a case of a layout.

        Raises:
            RequestError: the layout is unknown, or groups of n rows do not fill the batch.
        """
        if layout not in LAYOUTS:
            raise RequestError(
                f"layout must be one of {', '.join(LAYOUTS)} or both, got {layout!r}"
            )
        samples = {"different": 1, "same": batch, "grouped": min(n, batch)}[layout]
        if batch < 1 or samples < 1 or batch % samples:
            raise RequestError(f"a batch of {batch} rows cannot be filled with groups of {samples}")
        return Case(layout, temperature, batch, samples)

    @property
    def name(self) -> str:
        """The name for messages and progress."""
        return f"{self.batch} rows, layout {self.layout}"


@dataclass(frozen=True)
class Work:
    """The task of one run: n samples of each prompt.

    Attributes:
        prompts: the token ids of each prompt.
        eos: the ids that end a row; () lets every row run to `max_new_tokens`.
    """

    prompts: tuple[Ids, ...]
    n: int
    temperature: float
    max_new_tokens: int
    seed: int
    eos: Ids = ()

    @property
    def rows(self) -> list[Ids]:
        """The prompt of every row, in order."""
        return [prompt for prompt in self.prompts for _ in range(self.n)]

    def greedy(self) -> Work:
        """Returns the work, decoded greedily."""
        return replace(self, temperature=0.0)

    def by_prompt(self, ids: Sequence[Ids]) -> list[Sequence[Ids]]:
        """Groups the rows' ids by prompt."""
        return [ids[i : i + self.n] for i in range(0, len(ids), self.n)]


def work_of(
    case: Case,
    pool: Sequence[Ids],
    repeat: int,
    *,
    max_new_tokens: int,
    seed: int = 0,
    eos: Ids = (),
) -> Work:
    """Makes the task of one repeat: it takes the next prompts of the pool and a seed of its own."""
    count = case.batch // case.samples
    if count > len(pool):
        raise RequestError(
            f"{count} different prompts are needed for {case.batch} rows, and {len(pool)} were "
            f"given"
        )
    prompts = tuple(pool[(repeat * count + i) % len(pool)] for i in range(count))
    return Work(prompts, case.samples, case.temperature, max_new_tokens, seed + 1000 * repeat, eos)


@dataclass(frozen=True)
class Run:
    """The outcome of a run.

    Attributes:
        seconds: the seconds from submission until everything was there.
        ended: the seconds from submission until each row was there.
        ids: the tokens of every row up to its end, EOS included.
        stats: the counts of passes and positions, if they are known.
        busy: other processes that were busy meanwhile; None: not known.
    """

    seconds: float
    ended: tuple[float, ...]
    ids: tuple[Ids, ...]
    stats: Stats | None = None
    busy: tuple[BusyProcess, ...] | None = None

    @property
    def committed(self) -> int:
        """The number of tokens over all rows, each counted up to its end."""
        return sum(map(len, self.ids))

    @property
    def tokens_per_second(self) -> float:
        return self.committed / self.seconds

    @property
    def row_ms(self) -> tuple[float, float, float]:
        """The milliseconds per token of the first row to end, the mean row, and the last to end."""
        order = sorted(range(len(self.ids)), key=lambda row: self.ended[row])
        times = [1000 * self.ended[row] / max(1, len(self.ids[row])) for row in order]
        return times[0], fmean(times), times[-1]

    def to_dict(self) -> dict[str, Any]:
        """Returns an object for JSON, without tokens and `loaded`, which a report has once."""
        counts = replace(self.stats, loaded={}).to_dict() if self.stats else None
        busy = None if self.busy is None else [vars(one) for one in self.busy]
        tokens = list(map(len, self.ids))
        return {
            "seconds": self.seconds,
            "ended": list(self.ended),
            "tokens": tokens,
            "stats": counts,
            "busy": busy,
        }


class TimedBlock:
    """The seconds of a block, set when the `timed` block is left."""

    seconds: float = 0.0


@contextmanager
def timed(device: torch.device) -> Iterator[TimedBlock]:
    """Measures the wall clock of a block, with the device's queue empty at both ends."""
    watch = TimedBlock()
    _synchronise(device)
    started = time.perf_counter()
    yield watch
    _synchronise(device)
    watch.seconds = time.perf_counter() - started


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
        """Computes the load of a model; it is None for mixtures of experts.

        Positions of such models do not use all parameters.
        """
        config = runner.hf.config.get_text_config()
        if getattr(config, "num_experts_per_tok", None):
            return None
        head = runner.hf.get_output_embeddings().weight
        embedding = runner.hf.get_input_embeddings().weight
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
