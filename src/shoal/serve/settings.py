"""What a server allows: frozen, checked when made."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.errors import RequestError


@dataclass(frozen=True)
class Settings:
    """Limits and defaults of a server.

    Attributes:
        model: the name by which clients ask for it.
        queue: rows that may wait beyond those that run. max_n: most samples of a prompt, `best_of` included.
        max_tokens: most new tokens of a sample. max_logprobs: most alternatives per token. max_body: bytes of a request.
        max_grammar: characters of a grammar or schema; what it takes to read one may grow with their square.
        timeout: seconds from a request's arrival after which its unfinished rows are returned as they are.
        seeds: a seed's tokens come again, whoever else is served: the engine's rule is the coupled one.
        keys: any of them is_valid_key /v1; none = open to all. origins: of pages that may call from a browser (CORS).
        hosts: names to be asked under beside addresses and localhost, see `shoal.serve.hosts`; "*" = any.
        chat_template: in place of the tokenizer's.
    """

    model: str
    queue: int = 256
    max_n: int = 64
    max_tokens: int = 1024
    max_logprobs: int = 20
    max_body: int = 2 * 2**20
    max_grammar: int = 2**14
    timeout: float = 600.0
    seeds: bool = True
    keys: tuple[str, ...] = field(default=(), repr=False)  # a repr ends in logs and tracebacks
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ("*",)
    chat_template: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_n", "max_tokens", "max_logprobs", "max_body", "max_grammar", "timeout"):
            if getattr(self, name) <= 0:
                raise RequestError(f"{name} must be > 0, got {getattr(self, name)!r}")
        if self.queue < 0:
            raise RequestError(f"queue must be >= 0, got {self.queue!r}")
