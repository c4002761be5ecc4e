"""The prompts and settings of a call, and the requests of the engine that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.config import Limits, Sampling, Speculation
from shoal.constraints.dressing import Dressing
from shoal.constraints.fim import read_middles
from shoal.sampling.acceptance import RULES, Rule
from shoal.types.keyword_options import Integer, list_of, split_for_each
from shoal.types.prompt_forms import Prompts, read_prompts, with_token_ids
from shoal.types.requests import Request, occurrences
from shoal.values import plain


def rule_of(speculation: Speculation, samplings: Sequence[Sampling]) -> Rule:
    """Returns the rule of a run.

    A seed asks for the same tokens again, which only the coupled rule gives with any draft lengths.
    """
    chosen = "rejection" if all(sampling.seed is None for sampling in samplings) else "coupled"
    return RULES[chosen if speculation.rule == "auto" else speculation.rule]()


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
            found = read_prompts(prompts, tokenizer)
        else:
            found, ends = read_middles(prompts, suffix, tokenizer)
        samplings, limits, speculation = split_for_each(
            with_token_ids(options, tokenizer), len(found)
        )
        counts = (
            list_of("n", n, len(found)) if isinstance(n := plain(n), Sequence) else [n] * len(found)
        )
        behind = [suffix] * len(found) if suffix is None or isinstance(suffix, str) else suffix
        ends = ends or [None] * len(found)
        return cls(
            prompts=found,
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

    def dressed(
        self, requests: Sequence[Request], dressing: Dressing, tokenizer: Any
    ) -> list[Request]:
        """Returns the requests with the options of the call beside sampling and constraints."""
        return [
            dressing.applied(one, tokenizer, own, end)
            for one, own, end in zip(requests, self.suffixes, self.ends, strict=True)
        ]
