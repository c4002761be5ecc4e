"""A request that the server can serve: prompts, requests of the engine, and the answer's fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.serve.reasoning import ReasoningRules
from shoal.serve.tool_calls import CallRules
from shoal.types.requests import Request


@dataclass(frozen=True)
class ParsedRequest:
    """A request within the server's limits, made from a body.

    Attributes:
        prompts: the token ids of the prompts.
        requests: one per prompt, of `drawn` rows each; none if nothing is to be generated.
        drawn: samples drawn per prompt.
        returned: samples returned per prompt; fewer than `drawn` with `best_of`.
        top_logprobs: alternatives per token; None = no log-probabilities.
        echo: texts of the prompts, if they are returned.
        headers: headers of the answer: fields that were ignored or clamped.
        deadline: the end of the request's time, by `time.perf_counter`.
        rules: the rules for calls of tools; None = there are no calls.
        token_ids: True if ids of prompts and samples are returned.
        prompt_logprobs: alternatives per token of the prompts, if these are scored for the answer.
        grammar_field: the field of the request that its grammar came from.
        reasoning: the rules for the samples' reasoning; None = they do not reason.
        continuous_usage: True if each chunk has the usage so far, if there is usage at all.
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
    continuous_usage: bool = False

    @property
    def rows(self) -> int:
        """The number of samples of all prompts."""
        return self.drawn * len(self.prompts)

    @property
    def scored(self) -> int | None:
        """The number of alternatives per token for scoring the prompts; None = no scoring."""
        wanted = [self.prompt_logprobs, self.top_logprobs if self.echo is not None else None]
        return max((each for each in wanted if each is not None), default=None)
