"""The sampling of every problem by every decoding method.

Each problem gets n samples, each with the time at which it was finished.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.api import Shoal
from shoal.config import require_lossless
from shoal.engine.detokenizer import Detokenizer
from shoal.errors import RequestError, ShoalError
from shoal.evaluation.tasks import Task
from shoal.types.arguments import split_options
from shoal.types.samples import Sample
from shoal.types.stats import as_dicts

COUNTS = (
    "rounds",
    "target_passes",
    "draft_passes",
    "guide_passes",
    "prefills",
    "row_rounds",
    "drafted",
    "accepted",
    "committed",
    "acceptance_length",
)
PLAIN, PLAIN_SINGLE, SINGLE, BATCHED = "plain", "plain-single", "single", "batched"
UNDRAFTED = (PLAIN, PLAIN_SINGLE)
KNOWN = (PLAIN, PLAIN_SINGLE, SINGLE, BATCHED)
"""The decoding methods.

They are plain decoding of n rows at once; plain decoding of one row, sample after sample;
speculation on one row, sample after sample; and speculation on n rows at once.
"""
METHODS = (PLAIN, SINGLE, BATCHED)
"""The methods that are compared where none is named."""


@dataclass(frozen=True)
class SamplingConfig:
    """The samples to draw of each problem.

    Attributes:
        n: the number of samples.
        options: the options of `Shoal.generate`, without stop strings, seed and draft length.
        lookahead: the draft length of the speculative methods.
        seed: the seed of every problem; None = fresh entropy.
        methods: some of `KNOWN`.
    """

    n: int
    options: Mapping[str, Any]
    lookahead: str | int = "auto"
    seed: int | None = None
    methods: tuple[str, ...] = METHODS

    def __post_init__(self) -> None:
        if unknown := [method for method in self.methods if method not in KNOWN]:
            raise RequestError(f"methods must be some of {', '.join(KNOWN)}, got {unknown[0]!r}")
        if not self.methods:
            raise RequestError(f"no method of decoding is left: give some of {', '.join(KNOWN)}")
        split_options(self.options)
        if len(self.methods) > 1:
            require_lossless(
                self.options.get("rule", "auto"), "a comparison of methods (give one of --methods)"
            )


class Sampler:
    """A sampler for the methods of an evaluation.

    Each method has its own `Shoal`, so that draft length control measures its costs separately.
    """

    def __init__(self, pair: Shoal, config: SamplingConfig) -> None:
        if pair.tokenizer is None:
            raise RequestError("an evaluation needs a tokenizer, and this model has none")
        self.config, self.tokenizer, self.loaded = config, pair.tokenizer, pair.loaded
        if pair.drafter_name is None and (
            missing := [method for method in config.methods if method not in UNDRAFTED]
        ):
            raise RequestError(
                f"the method {missing[0]!r} needs a drafter: give one, or --methods plain"
            )
        self.shoals = {
            method: pair.beside(max_batch=1 if method in (PLAIN_SINGLE, SINGLE) else pair.max_batch)
            for method in config.methods
        }

    def run(self, tasks: Sequence[Task]) -> Iterator[dict[str, Any]]:
        """Yields a journal entry per problem; the order of the methods rotates.

        The first problem is run twice, to warm up. A problem that is refused, for example because
        its prompt is too long, becomes an entry with an "error" and no attempts.

        Raises:
            RequestError: the tokenizer cannot make the tasks' prompts.
        """
        warm = False
        for place, task in enumerate(tasks):
            prompt = task.read(self.tokenizer)
            turn = place % len(self.config.methods)
            methods = self.config.methods[turn:] + self.config.methods[:turn]
            try:
                for method in () if warm else methods:
                    self.attempt(method, task, prompt)
                warm = True
                attempts = {method: self.attempt(method, task, prompt) for method in methods}
            except RequestError as error:
                yield {
                    "task_id": task.task_id,
                    "error": str(error),
                    "attempts": {},
                    "loaded": self.loaded,
                }
                continue
            by_method = {method: attempts[method] for method in self.config.methods}
            yield {
                "task_id": task.task_id,
                "error": None,
                "attempts": by_method,
                "loaded": self.loaded,
            }

    def attempt(self, method: str, task: Task, prompt: str | list[int]) -> dict[str, Any]:
        """Decodes one problem by one method.

        Times are seconds from its submission, prefill included.
        """
        lookahead = "off" if method in UNDRAFTED else self.config.lookahead
        options = {
            **self.config.options,
            "stop": task.stops,
            "seed": self.config.seed,
            "lookahead": lookahead,
        }
        try:
            result = self.shoals[method].generate(
                [prompt] if isinstance(prompt, list) else prompt, self.config.n, **options
            )
        except ShoalError as error:
            if error.result is None:
                raise
            result = error.result  # failed rows are not finished, the others count
        (output,) = result
        return {
            "seconds": result.stats.seconds,
            "prompt_tokens": len(output.prompt_ids),
            "stats": {name: getattr(result.stats, name) for name in COUNTS}
            | {"by_drafter": as_dicts(result.stats.by_drafter)}
            | ({"lossy": result.stats.lossy} if result.stats.lossy else {}),
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
            "by_drafter": as_dicts(sample.by_drafter),
        }


def spans(tokenizer: Any, prompt_ids: Sequence[int], sample: Sample) -> list[tuple[str, bool]]:
    """Splits a sample's text in spans of accepted drafts (True) or the target's draws (False).

    Joined, the spans are the text.
    """
    detokenizer = Detokenizer(tokenizer, prompt_ids)
    for token in sample.token_ids:
        detokenizer.push(token)
    ends = [*detokenizer.ends[:-1], len(sample.text)]
    pieces: list[tuple[str, bool]] = []
    start = 0
    for end, drafted in zip(ends, sample.from_draft, strict=False):
        text, start = sample.text[start:end], max(start, end)
        if pieces and pieces[-1][1] == drafted:
            pieces[-1] = (pieces[-1][0] + text, drafted)
        elif text:
            pieces.append((text, drafted))
    return pieces
