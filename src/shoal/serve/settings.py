"""The limits and defaults of a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.constraints.members import jedi_analyser
from shoal.errors import RequestError


@dataclass(frozen=True)
class Settings:
    """The limits and defaults of a server, validated on creation.

    Attributes:
        model: the name of the model in requests and answers.
        aliases: further names under which requests may ask for it.
        queue: the number of rows that may wait beside the decoded ones.
        max_n: the most samples of a prompt, `best_of` included.
        max_tokens: the most new tokens of a sample.
        max_logprobs: the most alternatives per token.
        max_body: the most bytes of a request.
        max_grammar: the most characters of a grammar or schema. The time and the memory to read one
            are bounded by themselves (`shoal.serve.compiled_grammars`).
        timeout: seconds from a request's arrival after which its unfinished rows are returned as
            they are.
        seeds: True if seeds are accepted: with the coupled rule the same seed gives the same
            tokens, whatever else is served.
        keys: valid API keys of /v1; empty = no key is needed.
        weights: the weights of the keys' owners (`shoal.serve.access`), if other than 1.
        origins: origins of pages that may send requests from a browser (CORS).
        hosts: allowed names beside addresses and localhost, see `shoal.serve.access`; "*" = any.
        chat_template: replaces the tokenizer's.
        turn_ends: stop strings of all chats, beside their own.
        generation_config: True if the sampling parameters of the model's generation config hold
            for chats that do not say them.
        members: True if requests may ask for `shoal.constraints.members`. This analyses the texts
            of requests together with the packages of this environment, and the other rows wait
            meanwhile.
    """

    model: str
    queue: int = 256
    max_n: int = 256
    max_tokens: int = 1024
    max_logprobs: int = 20
    max_body: int = 2 * 2**20
    max_grammar: int = 2**18
    timeout: float = 600.0
    seeds: bool = True
    keys: tuple[str, ...] = field(default=(), repr=False)  # a repr may be logged
    weights: Mapping[str, float] = field(default_factory=dict, repr=False)
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ("*",)
    chat_template: str | None = None
    turn_ends: tuple[str, ...] = ()
    generation_config: bool = True
    members: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model, its own first."""
        return tuple(dict.fromkeys((self.model, *self.aliases)))

    def __post_init__(self) -> None:
        if self.members:
            jedi_analyser()
        for name in ("max_n", "max_tokens", "max_logprobs", "max_body", "max_grammar", "timeout"):
            if getattr(self, name) <= 0:
                raise RequestError(f"{name} must be > 0, got {getattr(self, name)!r}")
        if self.queue < 0:
            raise RequestError(f"queue must be >= 0, got {self.queue!r}")
