"""The main entry: `load` a pair, `generate` or `stream` many samples."""

from __future__ import annotations

import gc
import logging
import os
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.config import Grammar, Sampling, Speculation
from shoal.constraints.dressing import Dressing
from shoal.constraints.filters import Filter
from shoal.constraints.fim import read_middles
from shoal.constraints.protocol import Check, Constraint
from shoal.constraints.syntax.requests import Syntax
from shoal.drafting.distillation import Follower, Realignment, require_rollouts
from shoal.drafting.draft import Draft
from shoal.drafting.draft_model import DraftModel
from shoal.drafting.pair_loading import PairOptions, Source, load_pair
from shoal.drafting.protocol import Drafter
from shoal.engine.batch_size import FIRST, BatchSizes, require_max_batch
from shoal.engine.engine import PREPARED_TOKENS, Engine
from shoal.engine.prefix_cache import PrefixMemory
from shoal.engine.prefix_store import check_policy
from shoal.engine.scheduler import CHUNK
from shoal.engine.stream import Stream
from shoal.errors import RequestError
from shoal.lookahead import controller as controllers
from shoal.models import pretrained
from shoal.models.load_report import load_report, one_line
from shoal.models.loading import LoadOptions
from shoal.models.runner import Runner
from shoal.models.trimming import Proposable
from shoal.models.weights.versions import Updates
from shoal.sampling.acceptance import RULES, Rule
from shoal.types.keyword_options import Integer, Options, list_of, split_for_each, split_options
from shoal.types.load_stages import LoadProgress, LoadStages
from shoal.types.prompt_forms import Prompts, read_prompts, with_token_ids
from shoal.types.requests import Request, occurrences
from shoal.types.rollouts import Rollouts
from shoal.types.samples import Result
from shoal.values import plain

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self, Unpack

LOG = logging.getLogger("shoal")

AnyConstraint = Constraint[Any] | Check[Any] | Filter | Grammar
"""A constraint of a request, of any kind."""


def load(
    target: Source | None = None,
    draft: Source | Drafter | None = None,
    *,
    guide: Source | None = None,
    expert: Source | None = None,
    tokenizer: Any = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    revision: str | None = None,
    draft_revision: str | None = None,
    attention: str = "auto",
    max_batch: int | str = "auto",
    compile: str = "auto",
    quantize: str | Mapping[str, str] = "off",
    strict: bool = False,
    prefix_sharing: str = "auto",
    prefix_memory: int = 0,
    tensor_parallel: bool = False,
    trust_remote_code: bool = False,
    local_files_only: bool = False,
    progress: LoadProgress | None = None,
) -> Shoal:
    """Loads a target and its drafter.

    The choices that were made are in `Shoal.loaded`, in `Result.stats.loaded` and in a line of the
    logger "shoal" (INFO). This logger also has a line as each stage begins, unless `progress` is
    given.

    Args:
        target: a Hub id, directory or Transformers model; None = the bundled pair. A model object
            is used as it is: it stays the caller's, and options for loading (dtype, device,
            revision, quantize) are refused.
        draft: a smaller model, given like the target, best with the same tokenizer
            (docs/how-to/drafters.md gives the cost of another one); or a drafter by its name and
            options ("suffix", "suffix:scope=engine", "medusa:DIR", "self:exit=6"), trees of a model
            ("DIR:tree=rsd-s") or a sum ("suffix+DIR"), see `shoal.drafting.draft`; or any object of
            `shoal.drafting.protocol.Drafter`, for one call at a time. None = plain decoding (unless
            bundled).
        guide: a second model with the target's tokenizer, given like the target, or "draft" for the
            draft model: samples with `guidance` are those of the target led away from it (see
            `shoal.sampling.guidance`). "target": the target itself, for samples with a
            `negative_prompt`. None = there is none.
        expert: a third such model, or "draft": samples with `guidance` are led from the guide
            towards it (proxy tuning). None = towards the target.
        tokenizer: a Transformers tokenizer; None = the one saved with the target. For a model
            object it is the one at hand (its `name_or_path`, read without network); without one
            there are only token ids.
        dtype: the number format of both: "auto" (on a CPU float32, or bfloat16 for a wide bfloat16
            checkpoint if the CPU multiplies it, see `shoal.models.formats`; elsewhere the
            checkpoint's own), "float32", "bfloat16", "float16".
        device: "auto", "cpu", "cuda", "cuda:1", ...
        revision: the target's revision on the Hub.
        draft_revision: the draft model's revision on the Hub.
        attention: "auto", "pad", "split", "fused" (CUDA), ... (see `shoal.models.attention`).
        max_batch: the most rows decoded together; more rows than that take turns. "auto": as many
            as memory holds and as raise tokens per second, by measured rounds (see
            `shoal.engine.batch_size.AutoBatchSize`). Rows then join at times that differ from run
            to run: in 16 bit, where tokens depend on the batch, give a number, or `strict`, for a
            seed's tokens to hold.
        compile: "on": CUDA graphs (see `shoal.models.compiled`), or on a CPU kernels in C (see
            `shoal.native`), compiled once per machine in about two seconds; "off": neither; "auto":
            on, on a CPU only if there is a C compiler; "modules": as "auto", but the model's own
            modules compute all but attention.
        quantize: "target=int8,draft=int8" or a mapping; formats int8, fp8 (CUDA only), off. A
            quantised target is the model that is then decoded losslessly.
        strict: True = tokens do not depend on the composition of the batch, in 16 bit either
            (docs/explanation/exactness.md); CPU only.
        prefix_sharing: "shared": a group's prompt is stored once; "copied":
            once per row; "auto": shared if that pays (see `shoal.engine.prefix_store`).
        prefix_memory: the bytes for prompts of earlier calls, so that later calls that begin alike
            compute only the rest: a chat's next turn, a common system prompt (see
            `shoal.engine.prefix_cache`); `Stats.restored_tokens` counts the tokens that were not
            computed. 0 = none are kept. A call then begins with a small pass that tells if the
            weights are still the same.
        tensor_parallel: True = all processes that torchrun started share the target
            (docs/how-to/scale.md). `load` returns in the first one only; the others serve it within
            this call, and end when it does.
        trust_remote_code: True = runs code from the model's repository.
        local_files_only: True = never asks the Hub.
        progress: called with a `shoal.types.load_stages.LoadStage` as each stage begins, as it
            ends, and when all is loaded.

    Raises:
        RequestError: a model or file was not found, or an option is wrong.
        UnsupportedModel, PairMismatch: with the reason.
    """
    stages = LoadStages(progress)
    asked = LoadOptions(
        dtype=dtype,
        device=device,
        revision=revision,
        attention=attention,
        strict=strict,
        tensor_parallel=tensor_parallel,
        trust_remote_code=trust_remote_code,
        local_files_only=local_files_only,
        compile=compile,
    )
    options = PairOptions(asked, draft_revision, quantize, tokenizer, guide, expert)
    loaded = load_pair(target, draft, options, stages)
    pair = Shoal(
        loaded.target,
        loaded.draft,
        loaded.tokenizer,
        max_batch=max_batch,
        prefix_sharing=prefix_sharing,
        prefix_memory=prefix_memory,
        drafting=loaded.drafting,
        proposable=loaded.proposable,
    )
    pair.guide, pair.expert = loaded.guides["guide"], loaded.guides["expert"]
    LOG.info(one_line(pair.loaded))
    stages.ready()
    return pair


class Shoal:
    """A loaded pair, ready to generate. As a context manager it closes itself.

    Attributes:
        target: the target's `Runner`.
        draft_model: the draft model's `Runner`; None = there is no second model.
        tokenizer: the Transformers tokenizer; None = ids only.
        max_batch: see `load`.
        prefix_sharing: see `load`.
        prefixes: the prefixes of earlier calls; None = none are kept.
        drafting: makes drafters other than that of the draft model; None = there are none.
        proposable: the tokens that a draft model may propose.
        vocabularies: the vocabularies of a pair whose draft model has another tokenizer.
        choice: the choice of the method by which it drafts, by counts; None with the same
            tokenizer.
        shared: the tokens that a draft model may propose, if these are not all.
        rule: a rule for all runs, in place of the one that they ask for (experiments); None =
            theirs.
        guide: the `Runner` of the guide; None = there is none.
        expert: the `Runner` of the expert; None = the target.
    """

    def __init__(
        self,
        target: Runner,
        draft_model: Runner | None = None,
        tokenizer: Any = None,
        *,
        max_batch: int | str = "auto",
        prefix_sharing: str = "auto",
        prefix_memory: int = 0,
        drafting: Draft | None = None,
        proposable: Proposable | None = None,
    ) -> None:
        self._models: tuple[Runner, Runner | None] | None = (target, draft_model)
        check_policy(prefix_sharing)
        self.tokenizer, self.max_batch, self.prefix_sharing = (
            tokenizer,
            require_max_batch(plain(max_batch)),
            prefix_sharing,
        )
        self.drafting = None if drafting is None or drafting.is_model else drafting
        self.proposable = proposable or Proposable()
        self.vocabularies, self.shared = self.proposable.vocabularies, self.proposable.shared
        self._draft = (
            None if draft_model is None else DraftModel.of(draft_model, target, self.proposable)
        )
        self.choice = None if self._draft is None else self._draft.choice
        self.rule: Rule | None = None
        self.guide: Runner | None = None
        self.expert: Runner | None = None
        self.pair_costs = controllers.PairCosts(packed=target.skips_padding)
        self._batch_sizes, self._updates = BatchSizes(), Updates(target.hf)
        self._follower: Follower | None = None
        self._costs_of: weakref.WeakKeyDictionary[Drafter, controllers.PairCosts] = (
            weakref.WeakKeyDictionary()
        )
        self.eos = pretrained.eos_ids(target.hf, tokenizer)
        self.prefixes = self._prefix_memory(_require_bytes("prefix_memory", plain(prefix_memory)))
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._executors: dict[int, ThreadPoolExecutor] = {}

    def beside(self, max_batch: int | str, prefix_memory: int = 0) -> Shoal:
        """Returns another `Shoal` of these models, which measures costs of its own.

        Args:
            max_batch: see `load`.
            prefix_memory: see `load`.
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
    def target(self) -> Runner:
        """The target's `Runner`. Raises RequestError once this is closed."""
        return self._open()[0]

    @property
    def draft_model(self) -> Runner | None:
        """The draft model's `Runner`; None = there is none.

        Raises RequestError once this is closed.
        """
        return self._open()[1]

    @property
    def drafter_name(self) -> str | None:
        """The name of the draft model, or of a drafter without a model, with its options.

        None = plain decoding.
        """
        if self.drafting is not None:
            return self.drafting.name
        return None if self.draft_model is None else self.draft_model.name

    @property
    def _executor(self) -> ThreadPoolExecutor:
        """The one thread of this process that computes streams, which take turns.

        It is started when needed. A forked child does not have its parent's.
        """
        return self._executors.setdefault(os.getpid(), ThreadPoolExecutor(1, "shoal"))

    def _open(self) -> tuple[Runner, Runner | None]:
        if self._models is None:
            raise RequestError("this Shoal is closed: load the pair again")
        return self._models

    def close(self) -> None:
        """Cancels the streams that still run, and frees caches and models.

        A model object that was given to `load` stays its owner's. Later calls raise RequestError.
        Closing twice has no further effect.
        """
        self._executor.shutdown()
        for stream in list(self._streams):
            stream.close()
        self._models = self.prefixes = self._draft = self._follower = None
        self.guide = self.expert = None
        gc.collect()  # engines and models hold each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

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
        drafter: Drafter | None = None,
        top_logprobs: Integer = 0,
        suffix: str | Sequence[str] | None = None,
        constraints: Sequence[AnyConstraint] = (),
        align: bool | None = None,
        exact: bool | str = False,
        syntax: str | Syntax | None = None,
        shown_tokens: Collection[int] = (),
        progress: bool = False,
        **options: Unpack[Options],
    ) -> Result:
        """Returns n samples of each prompt.

        If a row fails (a model gave NaN, or the row's controls leave no token possible), the others
        are finished first; then its error is raised, with all samples in its `result`. `stream`
        does not raise such errors: such rows end with "error".

        Args:
            prompts: one text, several texts, or several lists of token ids; also as NumPy arrays,
                tensors ([length], or [rows, length] without padding), tuples or generators.
            n: the number of samples per prompt, or a list with a number for each.
            drafter: a drafter in place of the pair's own, any object of
                `shoal.drafting.protocol.Drafter`; for one call at a time.
            top_logprobs: the number of most probable tokens per position that are reported as well.
            suffix: the text behind the new text, one for all prompts or one for each, where the
                prompts are the texts before it: the model fills in between, if it was trained to
                (`shoal.constraints.fim`).
            constraints: limits of the tokens that may follow, beside `grammar`: further grammars,
                filters (`shoal.constraints.filters`), constraints of one's own
                (`shoal.constraints.protocol`), and checks of single tokens
                (`shoal.constraints.protocol`). All of them hold.
            align: True = the prompts may end inside a token: up to three tokens are taken back and
                every sample writes their bytes again, in tokens of the model's choice; texts begin
                where the prompts ended, while `token_ids`, `logprobs` and counts include these
                tokens (`shoal.constraints.alignment`). None = with a suffix, unless there is a
                grammar or filter.
            exact: True = samples have a `log_weight` and are ranked by it: weighted so, they are
                samples of p given that the whole text is allowed, by `align`, a grammar,
                constraints or `syntax` (`shoal.constraints.dressing`). "smc": also, rows of small
                weight become copies of others while they run (`shoal.engine.joint_rows`): the
                copies depend on the length of rounds, so that a seed gives the same samples only
                with fixed draft lengths. A stream then has a row's text in its last increment.
                "asap": also, rows draw by estimates of how the beginnings of their prompt's texts
                go on, learned from its other rows (`shoal.constraints.estimates`), so that weights
                become equal. "asap+smc": both. "distinct": no two samples of a prompt have the same
                tokens: whole texts are drawn without replacement, also without limits
                (`shoal.engine.joint_rows`), with weights for averages under p. A stream then has a
                row's text in its last increment.
            syntax: "python", "json", a grammar in lark's language or the path of one (.lark): no
                token is written after which the text between prompt and suffix cannot be completed
                to a program, document or text of the grammar, and a text ends by itself only if the
                whole parses; otherwise it is cut, see `Sample.syntax`. Other languages
                (`shoal.constraints.syntax.requests`): ends and cuts alone. The text of a stream
                then comes with a row's last increment.
            shown_tokens: the ids of special tokens that texts show; without it they show none.
            progress: True = shows a bar on stderr, in a terminal or a notebook.
            options: fields of `Sampling`, `Limits` and `Speculation` by name, or these whole as
                `sampling=`, `limits=` and `speculation=`. `sampling=` and `limits=` may also be
                lists with a setting, or None, for each prompt. `bad_words` may also be strings,
                and `negative_prompt` a text.
                NumPy's numbers are as good as Python's.

        Returns:
            One `Output` per prompt in order; `result[0].ranked` is best first.

        Raises:
            RequestError: the request cannot be served, which is raised before any computation, or a
                row fails; a field is given beside its whole setting; or this is closed.
            BadLogits: the model returned NaN.
        """
        dressing = Dressing(align, exact, syntax)
        fields = _fields(top_logprobs, constraints, shown_tokens)
        stream = self._stream(prompts, n, suffix, drafter, options, dressing, text=False, **fields)
        return stream.run(progress)

    def stream(
        self,
        prompts: Prompts,
        n: Integer | Sequence[Integer] = 1,
        *,
        drafter: Drafter | None = None,
        top_logprobs: Integer = 0,
        suffix: str | Sequence[str] | None = None,
        constraints: Sequence[AnyConstraint] = (),
        align: bool | None = None,
        exact: bool | str = False,
        syntax: str | Syntax | None = None,
        shown_tokens: Collection[int] = (),
        **options: Unpack[Options],
    ) -> Stream:
        """Generates like `generate`, but yields an `Increment` per row and round as text grows.

        The stream is read by `for`, or by `async for`.
        """
        dressing = Dressing(align, exact, syntax)
        fields = _fields(top_logprobs, constraints, shown_tokens)
        return self._stream(prompts, n, suffix, drafter, options, dressing, text=True, **fields)

    def _stream(
        self,
        prompts: Prompts,
        n: Integer | Sequence[Integer],
        suffix: str | Sequence[str] | None,
        drafter: Drafter | None,
        options: Mapping[str, Any],
        dressing: Dressing,
        *,
        text: bool,
        **request_fields: Any,
    ) -> Stream:
        self._open()
        now = time.perf_counter()
        ends: Sequence[int | None] = ()
        if suffix is None:
            found = read_prompts(prompts, self.tokenizer)
        else:
            found, ends = read_middles(prompts, suffix, self.tokenizer)
        samplings, limits, speculation = split_for_each(
            with_token_ids(options, self.tokenizer), len(found)
        )
        counts = (
            list_of("n", n, len(found)) if isinstance(n := plain(n), Sequence) else [n] * len(found)
        )
        if self.prefixes is not None:
            self.prefixes.recognise(self.target)
        engine = self.engine(
            speculation.lookahead, self.rule or _rule(speculation, samplings), drafter=drafter
        )
        if drafter is None:
            self._count_updates(engine)
        asked: dict[str, Any] = {"submitted_at": now, **request_fields}
        numbers = occurrences(
            (ids, sampling.seed) for (_, ids), sampling in zip(found, samplings, strict=True)
        )
        requests = [
            Request(ids, count, sampling, limit, prompt=own, occurrence=number, **asked)
            for (own, ids), count, sampling, limit, number in zip(
                found, counts, samplings, limits, numbers, strict=True
            )
        ]
        if dressing.exact and engine.rule.lossy:
            raise RequestError(
                "exact=True weighs samples of p, and this rule draws others: leave out "
                "rule='typical'"
            )
        behind = [suffix] * len(requests) if suffix is None or isinstance(suffix, str) else suffix
        requests = [
            dressing.applied(one, self.tokenizer, own, end)
            for one, own, end in zip(requests, behind, ends or [None] * len(requests), strict=True)
        ]
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
                "less, samples are exact; Shoal.realign(rollouts) lets a draft model follow",
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
        """Lets the draft model follow a target that has been updated, by rollouts of the target.

        It learns the target's distribution at each token of the samples, by the distillation of
        `shoal train drafter`. Samples are exact before and after; drafts are accepted more. The
        first call makes a copy of the draft model in float32, which learns, and an optimiser. Not
        to be called while a stream runs.

        Args:
            rollouts: samples of the target as it is now, from `Result.tensors`.
            logits: the target's logits for each token of the samples, [rows, longest sample,
                vocabulary], which the policy's loss has computed anyway; None = the target computes
                them.
            steps: the number of the optimiser's steps.
            rows: the number of samples in a step, chosen in turns.
            rate: the learning rate.

        Returns:
            The share of drafts that would have been accepted, step by step.

        Raises:
            RequestError: there is no draft model, or it is the guide; no sample has a token;
                `logits` has another shape; or a number is not positive.
            UnsupportedModel: the draft model has another tokenizer, a trimmed head or quantised
                weights, or one of the models is no Transformers model.
        """
        target, draft = self._open()
        if draft is None:
            raise RequestError(
                f"realign is for draft models, and {self.drafter_name or 'plain decoding'} has "
                f"none: load the pair with draft=DIR, or train heads anew by shoal train"
            )
        if draft in (self.guide, self.expert):
            raise RequestError(
                "realign would change the distribution of samples with guidance, as the draft "
                "model is the guide or the expert: load another one"
            )
        counts = plain(steps), plain(rows)
        if not all(isinstance(one, int) and one > 0 for one in counts) or not rate > 0:
            raise RequestError(
                f"steps, rows and rate must be positive, got {steps!r}, {rows!r} and {rate!r}"
            )
        require_rollouts(rollouts, logits, target)
        if self._follower is None:
            self._follower = Follower(target, draft, self.proposable)
        found = self._follower.align(
            rollouts, said=logits, steps=counts[0], rows=counts[1], rate=rate
        )
        if self.prefixes is not None:
            self.prefixes.clear()  # the draft model's keys are those of its old weights
        return found

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
        engine = self.engine(speculation.lookahead, self.rule or _rule(speculation, [sampling]))
        engine.prepare(plain(rows), plain(tokens), [sampling])
        captured = 0
        while engine.build_ahead():
            captured += 1
        del engine
        gc.collect()  # the next engine gets its caches, with what is captured over them
        return captured

    def engine(
        self,
        lookahead_name: object,
        rule: Rule,
        *,
        drafter: Drafter | None = None,
        chunk: int = CHUNK,
        kv_bytes: int | None = None,
        prefix_bytes: int | None = None,
        quantum: int | None = None,
    ) -> Engine:
        """Returns an engine for this pair, with caches of its own.

        It is for callers that submit requests one by one, as `shoal serve` does.

        Args:
            lookahead_name: the draft length, see `shoal.lookahead.controller.by_name`.
            rule: the rule by which drafts are drawn and judged.
            drafter: a drafter in place of the pair's own.
            chunk: see `shoal.engine.engine.Engine`.
            kv_bytes: see `shoal.engine.engine.Engine`.
            prefix_bytes: the bytes for prompts of earlier requests of this engine alone; None = the
                pair's memory, if it has one.
            quantum: see `shoal.engine.engine.Engine`.

        Raises:
            RequestError: the lookahead is unknown.
        """
        costs = self.pair_costs
        max_batch = self._batch_sizes.of(
            self.max_batch, costs if drafter is None else drafter, lookahead_name
        )
        if drafter is not None:
            costs = self._costs_of.setdefault(
                drafter, controllers.PairCosts(packed=self.target.skips_padding)
            )
        else:
            drafter = self.new_drafter()
        controller = controllers.by_name(lookahead_name, costs, drafter)
        engine = Engine(
            self.target,
            drafter,
            controller,
            max_batch=max_batch,
            tokenizer=self.tokenizer,
            eos=self.eos,
            rule=rule,
            prefix_sharing=self.prefix_sharing,
            chunk=chunk,
            kv_bytes=kv_bytes,
            prefixes=self.prefixes if prefix_bytes is None else self._prefix_memory(prefix_bytes),
            quantum=quantum,
            guide=self.guide,
            expert=self.expert,
        )
        engine.stats.loaded = self.loaded
        return engine

    def _prefix_memory(self, nbytes: int) -> PrefixMemory | None:
        """Returns a memory for prefixes of this pair.

        Returns None if `nbytes` is 0, or if the target cannot keep prefixes.
        """
        possible = nbytes and self.target.can_keep_prefixes
        return PrefixMemory(self.target, self.draft_model, nbytes) if possible else None

    def new_drafter(self) -> Drafter | None:
        """Returns a drafter of the pair for a new engine; None = plain decoding."""
        model = None if self._draft is None else self._draft.drafter(self.target)
        return model if self.drafting is None else self.drafting.drafter(self.target, model)

    @property
    def loaded(self) -> dict[str, dict[str, str] | None]:
        """The choices that were made for "target", "draft", "guide" and "expert" at loading.

        See `shoal.models.load_report`.
        """
        drafter = None if self.drafting is None else self.drafting.name
        guides = {"guide": self.guide, "expert": self.expert}
        return load_report(self.target, self.draft_model, drafter, guides)


def _require_bytes(name: str, value: object) -> int:
    """Raises RequestError if the value is no number of bytes."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise RequestError(f"{name} must be a number of bytes, 0 for none, got {value!r}")
    return value


def _rule(speculation: Speculation, samplings: Sequence[Sampling]) -> Rule:
    """Returns the rule of a run.

    A seed asks for the same tokens again, which only the coupled rule gives with any draft lengths.
    """
    chosen = "rejection" if all(sampling.seed is None for sampling in samplings) else "coupled"
    return RULES[chosen if speculation.rule == "auto" else speculation.rule]()


def _fields(
    top_logprobs: Integer, constraints: Sequence[AnyConstraint], shown_tokens: Collection[int]
) -> dict[str, Any]:
    """Returns the fields of every `Request` of a call that are arguments of the call."""
    return {
        "top_logprobs": plain(top_logprobs),
        "constraints": tuple(constraints),
        "shown_tokens": frozenset(plain(shown_tokens)),
    }
