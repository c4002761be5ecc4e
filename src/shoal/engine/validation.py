"""The prompts and settings of a call -> requests, and requests -> rows.

A request that cannot be served is refused here, before any computation.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from shoal.config import GUIDES_PROMPTS, Grammar, Limits, Sampling, Speculation
from shoal.constraints import masks
from shoal.constraints.compiler import grammars_of
from shoal.constraints.dressing import Dressing
from shoal.constraints.filters import Filter, conjunction, matching
from shoal.constraints.fim import read_middles
from shoal.constraints.protocol import Check, Constraint, Cutting
from shoal.engine.detokenizer import Detokenizer, characters
from shoal.engine.guide import Guide
from shoal.engine.memory import Memory
from shoal.engine.stop_strings import Stops
from shoal.errors import RequestError
from shoal.models.runner import Runner
from shoal.models.sources import people_call
from shoal.sampling.acceptance import RULES, Rule
from shoal.sampling.penalties import require_ids
from shoal.sampling.processors import require_pure
from shoal.sampling.uniforms import group_seed, row_seeds
from shoal.types.arguments import (
    Integer,
    Prompts,
    list_of,
    read_prompts,
    split_for_each,
    with_token_ids,
)
from shoal.types.requests import Request, Row, occurrences
from shoal.values import is_int, plain, require_samples


def rule_of(speculation: Speculation, samplings: Sequence[Sampling]) -> Rule:
    """Returns the rule of a run.

    A seed asks for the same tokens again, which only the coupled rule gives with any draft lengths.
    """
    default = "rejection" if all(sampling.seed is None for sampling in samplings) else "coupled"
    return RULES[default if speculation.rule == "auto" else speculation.rule]()


@dataclass(frozen=True)
class GenerateCall:
    """A call of `generate` or `stream`, as it is read.

    Attributes:
        prompts: the text of each prompt, if it was given as text, and its ids.
        suffixes: the text behind the new text of each prompt; None = there is none.
        ends: the place in each prompt behind which the new text stands; None = its end.
        counts: the number of samples of each prompt.
        samplings: the settings of each prompt.
        limits: the limits of each prompt.
        speculation: the draft length and the rule of all.
    """

    prompts: Sequence[tuple[str | None, tuple[int, ...]]]
    suffixes: Sequence[str | None]
    ends: Sequence[int | None]
    counts: Sequence[int]
    samplings: Sequence[Sampling]
    limits: Sequence[Limits]
    speculation: Speculation

    @classmethod
    def of(
        cls,
        prompts: Prompts,
        n: Integer | Sequence[Integer],
        suffix: str | Sequence[str] | None,
        options: Mapping[str, Any],
        tokenizer: Any,
    ) -> GenerateCall:
        """Reads a call.

        Args:
            prompts: see `shoal.api.Shoal.generate`.
            n: see `shoal.api.Shoal.generate`.
            suffix: see `shoal.api.Shoal.generate`.
            options: see `shoal.api.Shoal.generate`.
            tokenizer: the target's; None = there is none.

        Raises:
            RequestError: the call cannot be read.
        """
        ends: Sequence[int | None] = ()
        if suffix is None:
            prompt_pairs = read_prompts(prompts, tokenizer)
        else:
            prompt_pairs, ends = read_middles(prompts, suffix, tokenizer)
        samplings, limits, speculation = split_for_each(
            with_token_ids(options, tokenizer), len(prompt_pairs)
        )
        counts = (
            list_of("n", n, len(prompt_pairs))
            if isinstance(n := plain(n), Sequence)
            else [n] * len(prompt_pairs)
        )
        behind = (
            [suffix] * len(prompt_pairs) if suffix is None or isinstance(suffix, str) else suffix
        )
        ends = ends or [None] * len(prompt_pairs)
        return cls(
            prompts=prompt_pairs,
            suffixes=behind,
            ends=ends,
            counts=counts,
            samplings=samplings,
            limits=limits,
            speculation=speculation,
        )

    @property
    def rule(self) -> Rule:
        """The rule that the call asks for."""
        return rule_of(self.speculation, self.samplings)

    def requests(self, **fields: Any) -> list[Request]:
        """Returns the requests, with these further fields, before they are dressed."""
        numbers = occurrences(
            (ids, sampling.seed)
            for (_, ids), sampling in zip(self.prompts, self.samplings, strict=True)
        )
        return [
            Request(ids, count, sampling, limit, prompt=own, occurrence=number, **fields)
            for (own, ids), count, sampling, limit, number in zip(
                self.prompts, self.counts, self.samplings, self.limits, numbers, strict=True
            )
        ]

    def dress(
        self, requests: Sequence[Request], dressing: Dressing, tokenizer: Any
    ) -> list[Request]:
        """Returns the requests with the options of the call beside sampling and constraints."""
        return [
            dressing.apply(one, tokenizer, own, end)
            for one, own, end in zip(requests, self.suffixes, self.ends, strict=True)
        ]


class RequestValidator:
    """A maker of rows from requests, for one engine.

    Args:
        target: the target; it alone decides which prompts fit and where rows end.
        memory: the limit of their caches.
        tokenizer: the tokenizer for text, stop strings and grammars; None = there is none.
        eos: the model's own EOS ids, for requests that name none.
        guides: the guide and the expert, which must read the rows with guidance, too.
    """

    def __init__(
        self,
        target: Runner,
        memory: Memory,
        tokenizer: Any,
        eos: Sequence[int],
        guides: Sequence[Guide] = (),
    ) -> None:
        self._target, self._memory, self._guides = target, memory, guides
        self.tokenizer, self._eos = tokenizer, tuple(eos)
        self.vocab_size, self._device = self._target.vocab_size, self._target.device
        self._groups = 0

    def rows(self, request: Request, needs_text: bool) -> list[Row]:
        """Returns the request's n rows, which are a group.

        Args:
            needs_text: True if their text is needed as it grows.

        Raises:
            RequestError: the request cannot be served.
        """
        self._check(request)
        constraints = self._constraints(request)
        limits, prompt = request.limits, request.prompt_ids
        number = secrets.randbits(64) if request.sampling.seed is None else request.sampling.seed
        seed = group_seed(number, request.asked_ids, request.occurrence)
        deadline = request.submitted_at + limits.time_budget if limits.time_budget else None
        eos, draft_context = self._ends(request), self._memory.draft_context(request)
        group, self._groups = self._groups, self._groups + 1
        most_new = min(model.context - len(read) for model, read, _ in self._readers(request))
        shown = request.shown_tokens if request.shows_end else request.shown_tokens - eos
        visible_from, stops = self._visible_from(request, shown), self._stops(request)
        text = partial(Detokenizer, shown=shown, hidden=request.ends, shows_cut=request.shows_cut)
        rows = [
            Row(
                request,
                group,
                i,
                seed=own,
                tokens=list(prompt),
                eos=eos,
                max_length=len(prompt) + most_new,
                deadline=deadline,
                detokenizer=None
                if self.tokenizer is None
                else text(self.tokenizer, prompt, stops, visible_from),
                needs_text=self.tokenizer is not None and (needs_text or bool(limits.stop)),
                visible_from=visible_from,
                draft_context=draft_context,
            )
            for i, own in enumerate(row_seeds(seed, 0, request.n))
        ]
        for row in rows:
            masks.begin(row, constraints)
            row.checks = [
                (check, masks.first_state(row, check.start))
                for check in request.constraints
                if isinstance(check, Check)
            ]
            row.cutting = next(
                (check for check, _ in row.checks if isinstance(check, Cutting)), None
            )
        self._require_a_beginning(rows[0])
        return rows

    @staticmethod
    def _stops(request: Request) -> Stops:
        return Stops(
            request.limits.stop,
            request.sampling.min_new_tokens,
            tuple(request.unstopped),
            request.shown_stops,
        )

    def _visible_from(self, request: Request, shown: frozenset[int]) -> int:
        before = request.prompt_ids[: request.removed_from]
        return characters(self.tokenizer, before, request.removed, shown) if request.removed else 0

    def _ends(self, request: Request) -> frozenset[int]:
        own = self._eos if request.limits.eos is None else request.limits.eos
        return frozenset(own) | request.ends

    def _check(self, request: Request) -> None:
        require_samples(request.n)
        self._check_prompt(request)
        if request.limits.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this engine has none")
        self._memory.check(request)
        require_ids(request.sampling, self.vocab_size)
        require_pure(
            request.sampling.processors,
            request.prompt_ids,
            self._ends(request),
            self.vocab_size,
            self._device,
        )
        top, most = request.top_logprobs, request.max_draft
        if not is_int(top) or not 0 <= top <= self.vocab_size:
            raise RequestError(
                f"top_logprobs must be an integer in 0..{self.vocab_size}, got {top!r}"
            )
        if most is not None and (not is_int(most) or most < 0):
            raise RequestError(f"max_draft must be an integer >= 0 or None, got {most!r}")

    def _readers(self, request: Request) -> list[tuple[Runner, Sequence[int], str]]:
        """Returns the models that read all of a row, each with its prompt and the prompt's name.

        Raises:
            RequestError: the request has guidance, and there is no guide; or an option
                that goes with guidance alone, or with an expert; or prompts of the guides that are
                to be aligned.
        """
        sampling, prompt = request.sampling, request.prompt_ids
        readers: list[tuple[Runner, Sequence[int], str]] = [(self._target, prompt, "prompt")]
        own = [name for name in GUIDES_PROMPTS.values() if getattr(sampling, name)]
        if not sampling.guidance:
            if sampling.plausibility:
                raise RequestError(
                    "plausibility goes with guidance: set guidance, or use min_p alone"
                )
            for name in own:
                raise RequestError(f"{name} goes with guidance: set guidance")
            if sampling.posterior:
                raise RequestError("posterior goes with guidance: set guidance")
            return readers
        if not self._guides:
            raise RequestError(
                "guidance needs a guide, and there is none: load the model with guide=MODEL "
                "(--guide), or guide='draft' for its draft model"
            )
        if own and request.removed:
            raise RequestError(f"{own[0]} does not go with align: leave one out")
        if sampling.positive_prompt and all(one.role == "guide" for one in self._guides):
            raise RequestError(
                "positive_prompt needs an expert, which reads it, and there is none: load the "
                "model with expert=MODEL (--expert)"
            )
        for one in self._guides:
            other, name = one.own_prompt(sampling), GUIDES_PROMPTS[one.role].replace("_", " ")
            readers.append((one.runner, other or prompt, name if other else "prompt"))
        return sorted(readers, key=lambda reader: reader[0].context)

    def _check_prompt(self, request: Request) -> None:
        ids = request.prompt_ids
        if not ids:
            raise RequestError("the prompt is empty: at least one token is needed to continue from")
        if not all(0 <= token < self.vocab_size for token in ids):
            raise RequestError(
                f"prompt ids must be in 0..{self.vocab_size - 1}, got {min(ids)}..{max(ids)}"
            )
        for model, read, role in self._readers(request):
            if len(read) >= model.context:
                raise RequestError(
                    f"the {role} has {len(read)} tokens; {people_call(model.name)} holds "
                    f"{model.context}, the first new token included"
                )
            if max(read) >= model.vocab_size:
                raise RequestError(
                    f"{role} ids must be in 0..{model.vocab_size - 1} for {model.name}, got "
                    f"{max(read)}"
                )

    def _constraints(self, request: Request) -> list[Constraint[Any]]:
        """Returns the constraints of a request.

        These are the constraints of its grammars, the one of all filters and regular expressions
        together, then the request's own.

        Raises:
            RequestError: a grammar cannot be compiled, or not here; filters and expressions fit no
                text; or an object is no constraint.
        """
        for constraint in request.constraints:
            if not isinstance(constraint, Constraint | Check | Filter | Grammar):
                raise RequestError(
                    f"constraints must be of shoal.constraints.protocol.Constraint, got "
                    f"{constraint!r:.80}"
                )
        own = [
            constraint for constraint in request.constraints if isinstance(constraint, Constraint)
        ]
        every = [request.sampling.grammar, *request.constraints]
        grammars = [grammar for grammar in every if isinstance(grammar, Grammar)]
        filters = [each for each in request.constraints if isinstance(each, Filter)]
        if not grammars and not filters:
            return own
        if self.tokenizer is None:
            raise RequestError("a grammar needs a tokenizer, and this engine has none")
        compiled = grammars_of(self.tokenizer, self.vocab_size)
        constraints: list[Constraint[Any]] = [
            compiled.constraint(grammar) for grammar in grammars
        ]  # each by itself first: errors then name the right one
        regular = [
            *filters,
            *(matching(grammar.text) for grammar in grammars if grammar.kind == "regex"),
        ]
        if len(regular) > 1 or filters:
            constraints = [
                one
                for one, grammar in zip(constraints, grammars, strict=True)
                if grammar.kind != "regex"
            ]
            constraints.append(self._together(regular))
        return [*constraints, *own]

    def _together(self, filters: Sequence[Filter]) -> Constraint[Any]:
        """Returns one constraint for all filters.

        Making it shows if no text fits all of them.
        """
        every = conjunction(filters)
        try:
            return grammars_of(self.tokenizer, self.vocab_size).constraint(every.grammar)
        except RequestError as error:
            raise RequestError(f"the filter {every.name} cannot be used: {error}") from error

    def _require_a_beginning(self, row: Row) -> None:
        """Raises RequestError if constraints that each allow a first token together allow none."""
        every = [row.request.sampling.grammar, *row.request.constraints]
        ours = any(isinstance(each, Grammar | Filter) for each in every)
        if ours and len(row.constraints) > 1 and not masks.may_begin(row, self.vocab_size):
            names = ", ".join(
                f"{each!r:.80}" for each in every if isinstance(each, Grammar | Filter | Constraint)
            )
            raise RequestError(
                f"no token may begin a text under all constraints of the request, {names}; "
                f"leave one out"
            )
