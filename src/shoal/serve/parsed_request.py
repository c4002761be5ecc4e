"""A request that the server can serve: prompts, requests of the engine, and what the answer shall
hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.serve.reasoning import ReasoningRules
from shoal.serve.tool_calls import CallRules
from shoal.types.requests import Request


@dataclass(frozen=True)
class ParsedRequest:
    """What a body has become, within the server's limits.

    Attributes:
        prompts: their token ids.
        requests: one per prompt, of `drawn` rows each; none if nothing is to be generated.
        drawn, returned: samples per prompt; fewer are returned than drawn with `best_of`.
        top_logprobs: alternatives per token; None = no log-probabilities.
        echo: texts of the prompts, if they are returned.
        headers: of the answer: what was ignored or clamped.
        deadline: end of the request's time, by `time.perf_counter`.
        rules: what counts as a call of a tool; None = nothing does.
        token_ids: whether ids of prompts and samples are returned.
        prompt_logprobs: alternatives per token of the prompts, if these are scored for the answer.
        grammar_field: of the request, which its grammar came from.
        reasoning: where samples reason; None = they do not.
    """

    prompts: Sequence[tuple[int, ...]]
    requests: Sequence[Request]
    drawn: int
    returned: int
    top_logprobs: int | None
    echo: Sequence[str] | None
    stream: bool
    include_usage: bool
    details: bool
    rounds: bool
    headers: Mapping[str, str]
    deadline: float
    rules: CallRules | None = None
    token_ids: bool = False
    prompt_logprobs: int | None = None
    grammar_field: str = "grammar"
    reasoning: ReasoningRules | None = None

    @property
    def rows(self) -> int:
        """Samples of all prompts."""
        return self.drawn * len(self.prompts)

    @property
    def scored(self) -> int | None:
        """Alternatives per token that the prompts are scored for; None = they need not be."""
        wanted = [self.prompt_logprobs, self.top_logprobs if self.echo is not None else None]
        return max((each for each in wanted if each is not None), default=None)
