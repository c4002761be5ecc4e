"""n samples of every problem by every way of decoding, with the moment at which each was ready."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.api import Shoal
from shoal.engine.detokenizer import Detokenizer
from shoal.errors import RequestError, ShoalError
from shoal.evaluation.tasks import Task
from shoal.types.options import split_options
from shoal.types.samples import Sample

COUNTS = (
    "rounds", "target_passes", "draft_passes", "prefills", "row_rounds", "drafted", "accepted", "committed", "acceptance_length",
)  # fmt: skip
PLAIN, SINGLE, BATCHED = "plain", "single", "batched"
WAYS = (PLAIN, SINGLE, BATCHED)
"""Plain decoding of n rows at once; speculation on one row, sample after sample; speculation on n rows at once."""


@dataclass(frozen=True)
class Plan:
    """What is asked for each problem.

    Attributes:
        n: samples. options: of `Shoal.generate`, without stop strings, seed and lookahead.
        lookahead: of the speculative ways. seed: of every problem; None = fresh entropy.
        ways: some of `WAYS`.
    """

    n: int
    options: Mapping[str, Any]
    lookahead: str | int = "auto"
    seed: int | None = None
    ways: tuple[str, ...] = WAYS

    def __post_init__(self) -> None:
        if unknown := [way for way in self.ways if way not in WAYS]:
            raise RequestError(f"ways must be some of {', '.join(WAYS)}, got {unknown[0]!r}")
        if not self.ways:
            raise RequestError(f"no way of decoding is left: give some of {', '.join(WAYS)}")
        split_options(self.options)


class Sampler:
    """Draws attempts. Each way has a `Shoal` of its own, so that each learns its own prices."""

    def __init__(self, pair: Shoal, plan: Plan) -> None:
        if pair.tokenizer is None:
            raise RequestError("an evaluation needs a tokenizer, and this model has none")
        self.plan, self.tokenizer, self.loaded = plan, pair.tokenizer, pair.loaded
        if pair.draft_model is None and (missing := [way for way in plan.ways if way != PLAIN]):
            raise RequestError(f"the way {missing[0]!r} needs a drafter: give one, or --ways plain")
        self.shoals = {
            way: Shoal(
                pair.target, pair.draft_model, pair.tokenizer, max_batch=1 if way == SINGLE else pair.max_batch,
                prefix_sharing=pair.prefix_sharing,
            )
            for way in plan.ways
        }  # fmt: skip

    def run(self, tasks: Sequence[Task]) -> Iterator[dict[str, Any]]:
        """An entry for the journal per problem, ways in turns; the first one that can be asked is run twice, to warm up.

        A problem that is refused (its prompt is too long, say) becomes an entry with an "error" and no attempts.

        Raises:
            RequestError: if the tokenizer cannot make the tasks' prompts.
        """
        warm = False
        for place, task in enumerate(tasks):
            prompt = task.read(self.tokenizer)
            turn = place % len(self.plan.ways)
            ways = self.plan.ways[turn:] + self.plan.ways[:turn]
            try:
                for way in () if warm else ways:
                    self.attempt(way, task, prompt)
                warm, attempts = True, {way: self.attempt(way, task, prompt) for way in ways}
            except RequestError as error:
                yield {"task_id": task.task_id, "error": str(error), "attempts": {}, "loaded": self.loaded}
                continue
            found = {way: attempts[way] for way in self.plan.ways}
            yield {"task_id": task.task_id, "error": None, "attempts": found, "loaded": self.loaded}

    def attempt(self, way: str, task: Task, prompt: str | list[int]) -> dict[str, Any]:
        """One problem by one way; times are seconds from its submission, the prompt's pass included."""
        lookahead = "off" if way == PLAIN else self.plan.lookahead
        options = {**self.plan.options, "stop": task.stops, "seed": self.plan.seed, "lookahead": lookahead}
        try:
            result = self.shoals[way].generate([prompt] if isinstance(prompt, list) else prompt, self.plan.n, **options)
        except ShoalError as error:
            if error.result is None:
                raise
            result = error.result  # some rows failed: they are not finished, the others count
        (output,) = result
        return {
            "seconds": result.stats.seconds,
            "prompt_tokens": len(output.prompt_ids),
            "stats": {name: getattr(result.stats, name) for name in COUNTS},
            "samples": [self._entry(task, output.prompt_ids, sample) for sample in output.samples],
        }

    def _entry(self, task: Task, prompt_ids: Sequence[int], sample: Sample) -> dict[str, Any]:
        return {
            "text": sample.text,
            "completion": task.complete(sample.text, sample.finish_reason == "stop"),
            "token_ids": list(sample.token_ids),
            "spans": spans(self.tokenizer, prompt_ids, sample),
            "mean_logprob": None if math.isnan(sample.mean_logprob) else sample.mean_logprob,
            "finish_reason": sample.finish_reason,
            "error": sample.error,
            "finished": sample.finished,
            "finished_at": sample.finished_at,
            "rounds": sample.rounds,
            "drafted": sample.drafted,
            "accepted": sample.accepted,
        }


def spans(tokenizer: Any, prompt_ids: Sequence[int], sample: Sample) -> list[tuple[str, bool]]:
    """A sample's text in pieces that were accepted drafts (True) or drawn from the target (False); joined, they are the text."""
    detokenizer = Detokenizer(tokenizer, prompt_ids)
    for token in sample.token_ids:
        detokenizer.push(token)
    ends = [*detokenizer.ends[:-1], len(sample.text)]
    found: list[tuple[str, bool]] = []
    start = 0
    for end, drafted in zip(ends, sample.from_draft, strict=False):
        piece, start = sample.text[start:end], max(start, end)
        if found and found[-1][1] == drafted:
            found[-1] = (found[-1][0] + piece, drafted)
        elif piece:
            found.append((piece, drafted))
    return found
