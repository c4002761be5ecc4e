"""The main entry: `generate` or `stream` many samples from a pair."""

from __future__ import annotations

import gc
import logging
import os
import time
import weakref
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypedDict

from torch import Tensor

from shoal.config import Grammar
from shoal.constraints.dressing import Dressing
from shoal.constraints.filters import Filter
from shoal.constraints.protocol import Check, Constraint
from shoal.constraints.syntax import Syntax
from shoal.drafting.following import (
    Follower,
    Realignment,
    learner_of,
    require_rollouts,
    require_steps,
)
from shoal.drafting.protocol import Drafter
from shoal.engine.batch_size import FIRST
from shoal.engine.engine import PREPARED_TOKENS, Engine
from shoal.engine.pair import Pair
from shoal.engine.stream import Stream
from shoal.engine.validation import GenerateCall, rule_of
from shoal.errors import RequestError
from shoal.models.runner import Runner
from shoal.models.weights.parameter import Updates
from shoal.types.arguments import Integer, Options, Prompts, split_options
from shoal.types.rollouts import Rollouts
from shoal.types.samples import Result
from shoal.values import plain

if TYPE_CHECKING:
    from typing_extensions import Unpack

LOG = logging.getLogger("shoal")

AnyConstraint = Constraint[Any] | Check[Any] | Filter | Grammar
"""A constraint of a request, of any kind."""


class CallOptions(TypedDict, total=False):
    """The options of a call of `generate` or `stream` beside its settings.

    Attributes:
        drafter: a drafter in place of the pair's own, any object of
            `shoal.drafting.protocol.Drafter`; for one call at a time.
        top_logprobs: the number of most probable tokens per position that are reported as well.
        suffix: the text behind the new text, one for all prompts or one for each, where the prompts
            are the texts before it: the model fills in between, if it was trained to
            (`shoal.constraints.fim`).
        constraints: limits of the tokens that may follow, beside `grammar`: further grammars,
            filters (`shoal.constraints.filters`), constraints of one's own
            (`shoal.constraints.protocol`), and checks of single tokens
            (`shoal.constraints.protocol`). All of them hold.
        align: True = the prompts may end inside a token: up to three tokens are taken back and
            every sample writes their bytes again, in tokens of the model's choice; texts begin
            where the prompts ended, while `token_ids`, `logprobs` and counts include these tokens
            (`shoal.constraints.alignment`). None = with a suffix, unless there is a grammar or
            filter.
        exact: True = samples have a `log_weight` and are ranked by it: weighted so, they are
            samples of p given that the whole text is allowed, by `align`, a grammar, constraints or
            `syntax` (`shoal.constraints.dressing`). "smc": also, rows of small weight become copies
            of others while they run (`shoal.engine.joint_rows`): the copies depend on the length of
            rounds, so that a seed gives the same samples only with fixed draft lengths. A stream
            then has a row's text in its last increment. "asap": also, rows draw by estimates of how
            the beginnings of their prompt's texts go on, learned from its other rows
            (`shoal.constraints.estimates`), so that weights become equal. "asap+smc": both.
            "distinct": no two samples of a prompt have the same tokens: whole texts are drawn
            without replacement, also without limits (`shoal.engine.joint_rows`), with weights for
            averages under p. A stream then has a row's text in its last increment.
        syntax: "python", "json", a grammar in lark's language or the path of one (.lark): no token
            is written after which the text between prompt and suffix cannot be completed to a
            program, document or text of the grammar, and a text ends by itself only if the whole
            parses; otherwise it is cut, see `Sample.syntax`. Other languages
            (`shoal.constraints.syntax`): ends and cuts alone. The text of a stream then
            comes with a row's last increment.
        shown_tokens: the ids of special tokens that texts show; without it they show none.
    """

    drafter: Drafter | None
    top_logprobs: Integer
    suffix: str | Sequence[str] | None
    constraints: Sequence[AnyConstraint]
    align: bool | None
    exact: bool | str
    syntax: str | Syntax | None
    shown_tokens: Collection[int]


class GenerateOptions(CallOptions, Options, total=False):
    """The keyword options of `generate` and `stream`: those of the call, and of its settings."""


class Shoal(Pair):
    """A loaded pair, ready to generate; as a context manager it closes itself."""

    def __init__(
        self,
        target: Runner,
        draft_model: Runner | None = None,
        tokenizer: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(target, draft_model, tokenizer, **options)
        self._updates = Updates(target.hf)
        self._follower: Follower | None = None
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._executors: dict[int, ThreadPoolExecutor] = {}

    def beside(self, max_batch: int | str, prefix_memory: int = 0) -> Shoal:
        """Returns another `Shoal` of these models, which measures costs of its own.

        Args:
            max_batch: see `shoal.loader.load`.
            prefix_memory: see `shoal.loader.load`.
        """
        other = Shoal(
            self.target,
            self.draft_model,
            self.tokenizer,
            max_batch=max_batch,
            prefix_sharing=self.prefix_sharing,
            prefix_memory=prefix_memory,
            drafting=self.drafting,
            proposable=self.proposable,
        )
        other.guide, other.expert = self.guide, self.expert
        return other

    @property
    def _executor(self) -> ThreadPoolExecutor:
        """The one thread of this process that computes streams, which take turns.

        It is started when needed. A forked child does not have its parent's.
        """
        return self._executors.setdefault(os.getpid(), ThreadPoolExecutor(1, "shoal"))

    def close(self) -> None:
        """Cancels the streams that still run, and frees caches and models.

        A model object that was given to `load` stays its owner's. Later calls raise RequestError.
        Closing twice has no further effect.
        """
        self._executor.shutdown()
        for stream in list(self._streams):
            stream.close()
        self._follower = None
        super().close()

    def __repr__(self) -> str:
        if self._models is None:
            return "Shoal(closed)"
        place = f"{self.target.dtype} on {self.target.device}".removeprefix("torch.")
        return (
            f"Shoal(target={self.target.name!r}, draft={self.drafter_name!r}, {place}, "
            f"max_batch={self.max_batch})"
        )

    def generate(
        self,
        prompts: Prompts,
        n: Integer | Sequence[Integer] = 1,
        *,
        progress: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> Result:
        """Returns n samples of each prompt.

        If a row fails (a model gave NaN, or the row's controls leave no token possible), the others
        are finished first; then its error is raised, with all samples in its `result`. `stream`
        does not raise such errors: such rows end with "error".

        Args:
            prompts: one text, several texts, or several lists of token ids; also as NumPy arrays,
                tensors ([length], or [rows, length] without padding), tuples or generators.
            n: the number of samples per prompt, or a list with a number for each.
            progress: True = shows a bar on stderr, in a terminal or a notebook.
            options: `drafter`, `top_logprobs`, `suffix`, `constraints`, `align`, `exact`, `syntax`
                and `shown_tokens`, see `shoal.api.CallOptions`; and fields of `Sampling`, `Limits`
                and `Speculation` by name, or these whole as `sampling=`, `limits=` and
                `speculation=`. `sampling=` and `limits=` may also be lists with a setting, or None,
                for each prompt. `bad_words` may also be strings, and `negative_prompt` a text.
                NumPy's numbers are as good as Python's.

        Returns:
            One `Output` per prompt in order; `result[0].ranked` is best first.

        Raises:
            RequestError: the request cannot be served, which is raised before any computation, or a
                row fails; a field is given beside its whole setting; or this is closed.
            BadLogits: the model returned NaN.
        """
        return self._stream(prompts, n, options, text=False).run(progress)

    def stream(
        self,
        prompts: Prompts,
        n: Integer | Sequence[Integer] = 1,
        **options: Unpack[GenerateOptions],
    ) -> Stream:
        """Generates like `generate`, but yields an `Increment` per row and round as text grows.

        The stream is read by `for`, or by `async for`.
        """
        return self._stream(prompts, n, options, text=True)

    def _stream(
        self,
        prompts: Prompts,
        n: Integer | Sequence[Integer],
        options: GenerateOptions,
        *,
        text: bool,
    ) -> Stream:
        self._open()
        now = time.perf_counter()
        drafter, dressing = options.get("drafter"), _dressing(options)
        settings = {
            name: value
            for name, value in options.items()
            if name not in CallOptions.__optional_keys__
        }
        call = GenerateCall.of(prompts, n, options.get("suffix"), settings, self.tokenizer)
        if self.prefixes is not None:
            self.prefixes.recognise(self.target)
        engine = self.engine(call.speculation.lookahead, self.rule or call.rule, drafter=drafter)
        if drafter is None:
            self._count_updates(engine)
        requests = call.requests(
            submitted_at=now,
            top_logprobs=plain(options.get("top_logprobs", 0)),
            constraints=tuple(options.get("constraints", ())),
            shown_tokens=frozenset(plain(options.get("shown_tokens", ()))),
        )
        if dressing.exact and engine.rule.lossy:
            raise RequestError(
                "exact=True weighs samples of p, and this rule draws others: leave out "
                "rule='typical'"
            )
        requests = call.dress(requests, dressing, self.tokenizer)
        stream = Stream(engine, requests, text=text, executor=self._executor)
        self._streams.add(stream)
        return stream

    def _count_updates(self, engine: Engine) -> None:
        """Notes in an engine's counts how far its drafter's weights are behind the target's."""
        drafter, before = engine.drafter, self._updates.behind
        own = None if drafter is None else drafter.weights
        engine.stats.updates_behind = self._updates.count(self.target.hf, own)
        if before == 0 < engine.stats.updates_behind and self._follower is None:
            LOG.warning(
                "%s was updated, and %s has weights of its own, which stay: drafts are accepted "
                "less, samples are exact; Shoal.realign(rollouts) lets it follow",
                self.target.name,
                self.drafter_name,
            )

    def realign(
        self,
        rollouts: Rollouts,
        *,
        logits: Tensor | None = None,
        steps: Integer = 4,
        rows: Integer = 16,
        rate: float = 1e-3,
    ) -> Realignment:
        """Lets the drafter follow a target that has been updated, by rollouts of the target.

        A draft model, Medusa or EAGLE-3 heads, or the layers in the target's checkpoint (`mtp`)
        learn the target's distribution at each token of the samples, by the distillation of `shoal
        train`. Samples are exact before and after; drafts are accepted more. The first call makes a
        copy of the weights in float32, which learns, and an optimiser. Not to be called while a
        stream runs.

        Args:
            rollouts: samples of the target as it is now, from `Result.tensors`.
            logits: the target's logits for each token of the samples, [rows, longest sample,
                vocabulary], which the policy's loss has computed anyway, for a draft model; None =
                the target computes them.
            steps: the number of the optimiser's steps.
            rows: the number of samples in a step, chosen in turns.
            rate: the learning rate.

        Returns:
            The share of drafts that would have been accepted, step by step.

        Raises:
            RequestError: the drafter has no such weights, or is the guide; no sample has a token;
                `logits` has another shape, or is given for heads, which read hidden states of the
                target; or a number is not positive.
            UnsupportedModel: the drafter has another tokenizer, a trimmed head or quantised
                weights, or one of the models is no Transformers model.
        """
        target, draft = self._open()
        learner = learner_of(self.new_drafter())
        if learner is None:
            raise RequestError(
                f"realign is for draft models, Medusa and EAGLE-3 heads and mtp, and "
                f"{self.drafter_name or 'plain decoding'} is none of them"
            )
        if draft is not None and draft in (self.guide, self.expert):
            raise RequestError(
                "realign would change the distribution of samples with guidance, as the draft "
                "model is the guide or the expert: load another one"
            )
        counts = require_steps(steps, rows, rate)
        require_rollouts(rollouts, logits, target, learner)
        if self._follower is None:
            self._follower = Follower(target, learner, self.drafter_name or "")
        realignment = self._follower.align(
            rollouts, given_logits=logits, steps=counts[0], rows=counts[1], rate=rate
        )
        if self.prefixes is not None:
            self.prefixes.clear()  # the draft model's keys are those of its old weights
        return realignment

    def prepare(
        self, rows: Integer = FIRST, tokens: Integer = PREPARED_TOKENS, **options: Unpack[Options]
    ) -> int:
        """Captures the rounds of `generate` with these options on a GPU, before the first call.

        Otherwise the first calls capture them, round by round. Does nothing on a CPU, where no
        rounds are captured. It is never called by itself: rows, lengths and settings are the
        caller's, and the captures of a call are kept for the next one anyway.

        Args:
            rows: the number of rows.
            tokens: the tokens of each row, prompts included.
            options: see `generate`.

        Returns:
            The number of captured functions; 0 if memory cannot hold such rows.

        Raises:
            RequestError.
        """
        self._open()
        sampling, _, speculation = split_options(options)
        engine = self.engine(speculation.lookahead, self.rule or rule_of(speculation, [sampling]))
        engine.prepare(plain(rows), plain(tokens), [sampling])
        captured = 0
        while engine.build_ahead():
            captured += 1
        del engine
        gc.collect()  # the next engine gets its caches, with what is captured over them
        return captured


def _dressing(options: CallOptions) -> Dressing:
    """Returns the values of `align`, `exact` and `syntax` of a call."""
    exact, syntax = options.get("exact", False), options.get("syntax")
    return Dressing(options.get("align"), exact, syntax)
