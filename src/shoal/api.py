"""The main entry: `load` a pair, `generate` or `stream` many samples."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Any

import torch

from shoal import lookahead, models
from shoal.accept import RULES, Rule
from shoal.config import Limits, Sampling, Speculation, require_text, split_options
from shoal.engine import Engine
from shoal.errors import RequestError
from shoal.load_report import load_report, one_line
from shoal.quantize import parse as parse_formats
from shoal.request import Increment, Output, Request, Result, Sample, occurrences
from shoal.round import Commit
from shoal.runner import Runner
from shoal.scheduler import CHUNK
from shoal.sharing import check_policy
from shoal.sources import require_source
from shoal.static import executor_for

LOG = logging.getLogger("shoal")

Prompts = str | Sequence[str] | Sequence[Sequence[int]]


def load(
    target: str | Path | None = None, draft: str | Path | None = None, *, dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto", revision: str | None = None, draft_revision: str | None = None, attention: str = "auto",
    max_batch: int = 16, compile: str = "auto", quantize: str | Mapping[str, str] = "off", strict: bool = False,
    prompts: str = "auto", tensor_parallel: bool = False, trust_remote_code: bool = False, local_files_only: bool = False,
) -> Shoal:  # fmt: skip
    """Loads a target and its drafter.

    What was chosen is in `Shoal.loaded`, in `Result.stats.loaded` and in a line of the logger "shoal" (INFO).

    Args:
        target: hub id or directory; None = the bundled pair.
        draft: hub id or directory of a smaller model with the same tokenizer; None = plain decoding (unless bundled).
        dtype: of both: "auto" (on a CPU float32, or bfloat16 for a wide bfloat16 checkpoint where the CPU multiplies it, see
            `shoal.formats`; elsewhere the checkpoint's own), "float32", "bfloat16", "float16".
        device: "auto", "cpu", "cuda", "cuda:1", ...
        attention: "auto", "pad", "split", "fused" (CUDA), ... (see `shoal.attention`).
        max_batch: most rows decoded together; more rows than that take turns.
        compile: "on": passes of fixed shapes (see `shoal.static`), as CUDA graphs or, on a CPU, compiled, which takes many seconds
            for each shape; "off"; "auto": on for CUDA.
        quantize: "target=int8,draft=int8" or a mapping; formats int8, fp8 (CUDA only), off. A quantised target is what is then
            decoded losslessly.
        strict: tokens do not depend on the composition of the batch, in 16 bit too (docs/numerics.md); on a CPU, and slower.
        prompts: "shared": a group's prompt is stored, and read by each pass, once; "copied": by each row; "auto": shared where that
            pays (see `shoal.sharing`).
        tensor_parallel: the target is shared by all processes that torchrun started (docs/scaling.md). `load` returns in the first
            one only; the others serve it within this call, and end when it does.
        trust_remote_code: run code from the model's repository. local_files_only: never ask the hub.

    Raises:
        RequestError: not found, or a wrong option. UnsupportedModel, PairMismatch: with the reason.
    """
    if target is None:
        if draft is not None:
            raise RequestError("a drafter was given without a target model")
        target, draft = models.bundled("target"), models.bundled("drafter")
    named = ((target, revision), (draft, draft_revision))
    local = [require_source(name, version, local_files_only) for name, version in named if name is not None]
    common: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": any(local)}
    tokenizer = models.load_tokenizer(target, revision=revision, **common)
    placed: dict[str, Any] = {"dtype": dtype, "device": device, "attention": attention, "strict": strict, **common}
    formats = parse_formats(quantize)
    runner = models.load_runner(
        target, revision=revision, quantize=formats["target"], tensor_parallel=tensor_parallel, **placed
    )
    draft_runner = None
    if draft is not None:
        draft_tokenizer = models.load_tokenizer(draft, revision=draft_revision, **common)
        draft_runner = models.load_runner(
            draft, revision=draft_revision, quantize=formats["draft"], target_dtype=runner.dtype, **placed
        )
        models.check_pair(runner, draft_runner, tokenizer, draft_tokenizer)
    for model in (runner, draft_runner):
        if model is not None:
            model.use_static_passes(executor_for(compile, model.device))
    pair = Shoal(runner, draft_runner, tokenizer, max_batch=max_batch, prompts=prompts)
    LOG.info(one_line(pair.loaded))
    return pair


class Shoal:
    """A loaded pair, ready to generate.

    Attributes:
        target, draft_model: `Runner`s (draft_model None = plain decoding). tokenizer: Transformers' (None: ids only).
        max_batch: most rows decoded together. prompts: see `load`.
        rule: None, or one for all runs, whatever they ask for (experiments).
    """

    def __init__(
        self, target: Runner, draft_model: Runner | None = None, tokenizer: Any = None, *, max_batch: int = 16,
        prompts: str = "auto",
    ) -> None:  # fmt: skip
        self.target, self.draft_model, self.tokenizer = target, draft_model, tokenizer
        if not isinstance(max_batch, int) or max_batch < 1:
            raise RequestError(f"max_batch must be an integer >= 1, got {max_batch!r}")
        check_policy(prompts)
        self.max_batch, self.prompts = max_batch, prompts
        self.rule: Rule | None = None
        self.knowledge = lookahead.Knowledge(packed=target.packs)
        self.eos = models.eos_ids(target.hf, tokenizer)

    def generate(self, prompts: Prompts, n: int = 1, *, top_logprobs: int = 0, **options: Any) -> Result:
        """n samples of each prompt.

        If a row fails (a model gave NaN, or the row's controls leave no token possible), the others are finished first; then its
        error is raised, with all samples in its `result`. `stream` raises nothing of that kind: such rows end with "error".

        Args:
            prompts: one text, several texts, or several lists of token ids.
            n: samples per prompt. top_logprobs: also report that many of the most probable tokens per position.
            options: fields of `Sampling`, `Limits` and `Speculation` by name. `bad_words` may also be strings.

        Returns:
            One `Output` per prompt in order; `result[0].ranked` is best first.

        Raises:
            RequestError: before anything is computed, or for a row. BadLogits: the model returned NaN.
        """
        return self._stream(prompts, n, top_logprobs, options, text=False).run()

    def stream(self, prompts: Prompts, n: int = 1, *, top_logprobs: int = 0, **options: Any) -> Stream:
        """Like `generate`, but yields an `Increment` per row and round as text grows."""
        return self._stream(prompts, n, top_logprobs, options, text=True)

    def _stream(self, prompts: Prompts, n: int, top_logprobs: int, options: Mapping[str, Any], *, text: bool) -> Stream:
        sampling, limits, speculation = split_options(self._encoded(options))
        engine = self.engine(speculation.lookahead, self.rule or _rule(speculation, sampling))
        return Stream(engine, self._requests(prompts, n, top_logprobs, sampling, limits), text=text)

    def engine(self, lookahead_name: object, rule: Rule, *, chunk: int = CHUNK, kv_bytes: int | None = None) -> Engine:
        """An engine for this pair, with caches of its own; for those who submit requests one by one, as `shoal serve` does.

        Args:
            chunk, kv_bytes: see `shoal.engine.Engine`.

        Raises:
            RequestError: for an unknown lookahead.
        """
        controller = lookahead.by_name(lookahead_name, self.knowledge)
        engine = Engine(
            self.target, self.draft_model, controller, max_batch=self.max_batch, tokenizer=self.tokenizer, eos=self.eos,
            rule=rule, prompts=self.prompts, chunk=chunk, kv_bytes=kv_bytes,
        )  # fmt: skip
        engine.stats.loaded = self.loaded
        return engine

    @property
    def loaded(self) -> dict[str, dict[str, str] | None]:
        """What was chosen for "target" and "draft" when they were loaded, see `shoal.load_report`."""
        return load_report(self.target, self.draft_model)

    def _requests(self, prompts: Prompts, n: int, top_logprobs: int, sampling: Sampling, limits: Limits) -> list[Request]:
        items: Sequence[Any] = [prompts] if isinstance(prompts, str) else prompts
        if isinstance(items, Sequence) and items and isinstance(items[0], int):
            items = [items]
        if not isinstance(items, Sequence) or not items:
            raise RequestError(f"prompts must be a text, texts or lists of token ids, at least one, got {prompts!r}")
        now = time.perf_counter()
        ids = [self._ids(item) for item in items]
        texts = [item if isinstance(item, str) else None for item in items]
        return [
            Request(prompt, n, sampling, limits, text, top_logprobs, occurrence=occurrence, submitted_at=now)
            for prompt, text, occurrence in zip(ids, texts, occurrences(ids), strict=True)
        ]

    def _ids(self, item: Any) -> tuple[int, ...]:
        if not isinstance(item, str):
            if isinstance(item, (bytes, bytearray)):  # a sequence of numbers, but none of tokens
                raise RequestError(f"a prompt must be a text or a list of token ids, got {item!r:.80}")
            try:
                return tuple(index(token) for token in item)
            except TypeError:
                raise RequestError(f"a prompt must be a text or a list of token ids, got {item!r}") from None
        if self.tokenizer is None:
            raise RequestError("a text prompt needs a tokenizer, and this model was given none")
        require_text(item, "the prompt")
        return tuple(self.tokenizer.encode(item))

    def _encoded(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Options with `bad_words` that are texts as token ids."""
        words = options.get("bad_words")
        words = [words] if isinstance(words, str) else words
        if not isinstance(words, Sequence) or not any(isinstance(word, str) for word in words):
            return dict(options)
        spelled = [ids for word in words for ids in (self._spellings(word) if isinstance(word, str) else [word])]
        return {**options, "bad_words": spelled}

    def _spellings(self, word: str) -> list[list[int]]:
        """A word's ids, without and with a space before it."""
        if self.tokenizer is None:
            raise RequestError("bad_words that are texts need a tokenizer, and this model was given none")
        require_text(word, "a bad word")
        return [self.tokenizer.encode(text, add_special_tokens=False) for text in (word, f" {word}")]


def _rule(speculation: Speculation, sampling: Sampling) -> Rule:
    """A seed asks for the same tokens again, which only the coupled rule gives whatever the draft lengths."""
    chosen = "rejection" if sampling.seed is None else "coupled"
    return RULES[chosen if speculation.rule == "auto" else speculation.rule]()


class Stream(Iterator[Increment]):
    """A run in progress: iterate it to drive it.

    Dropping it leaves nothing behind; `result()` is complete once it is exhausted or cancelled. `rows`: the rows of each prompt.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request], *, text: bool = True) -> None:
        self._engine, self._requests = engine, list(requests)
        self._started = time.perf_counter()
        self.rows = engine.submit_all(self._requests, stream=text)
        self._prompt = {id(row): i for i, rows in enumerate(self.rows) for row in rows}
        self._samples: dict[int, Sample] = {}
        self._queue: deque[Increment] = deque()

    def __next__(self) -> Increment:
        while not self._queue:
            commits = self._engine.step()
            if not commits:
                raise StopIteration
            self._take(commits)
        return self._queue.popleft()

    def run(self) -> Result:
        """Everything at once.

        Raises:
            ShoalError: that of the first row that failed, after all others are done; its `result` has them.
        """
        for _ in self:
            pass
        result = self.result()
        failed = next((row.error for rows in self.rows for row in rows if row.error is not None), None)
        if failed is not None:
            failed.result = result
            raise failed
        return result

    def cancel(self, prompt: int | None = None, sample: int | None = None) -> None:
        """Ends all rows, one prompt's, or one row; what they have stays, marked "cancelled"."""
        chosen = [
            row
            for i, rows in enumerate(self.rows) if prompt in (None, i)
            for row in rows if sample in (None, row.index)
        ]  # fmt: skip
        self._take(self._engine.cancel(chosen))

    def result(self) -> Result:
        """All samples, prompt by prompt, and what the run took.

        Raises:
            RequestError: while rows are still running.
        """
        running = sum(map(len, self.rows)) - len(self._samples)
        if running:
            raise RequestError(f"{running} rows are still running: exhaust the stream or cancel it first")
        outputs = tuple(
            Output(request.prompt, request.prompt_ids, tuple(self._samples[id(row)] for row in rows))
            for request, rows in zip(self._requests, self.rows, strict=True)
        )
        return Result(outputs, self._engine.stats)

    def _take(self, commits: Sequence[Commit]) -> None:
        self._engine.stats.seconds = time.perf_counter() - self._started
        for c in commits:
            if c.sample is not None:
                self._samples[id(c.row)] = c.sample
            ended = c.row.finish_reason
            self._queue.append(
                Increment(self._prompt[id(c.row)], c.row.index, c.text, tuple(c.tokens), c.accepted, ended, c.sample)
            )
