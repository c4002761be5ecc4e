"""The rows of the table: which work is measured, with which engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache

from engines.models import ACCEPTANCE, TEMPERATURE, smollm2_checkpoint
from engines.tasks import PLAIN, Task
from shoal.errors import RequestError

DRAFTED = 4  # tokens per round of peers, and of "fixed:4"


@dataclass(frozen=True)
class Row:
    """One row: n samples of each prompt, with one pair of models.

    Attributes:
        model: a name of `engines.models.MAKERS`.
        prompt_tokens: of random prompts; 0: texts.
        drafter: whether there is a draft model.
        own: a spec of a drafter without weights, which shoal takes where there is no draft model.
    """

    name: str
    title: str
    model: str
    dtype: str
    prompts: int
    n: int
    new_tokens: int
    prompt_tokens: int = 0
    top_p: float = 1.0
    drafter: bool = True
    own: str | None = None

    @property
    def rows(self) -> int:
        return self.prompts * self.n

    def task(self, seed: int, *, greedy: bool = False) -> Task:
        """Every repeat decodes the same prompts with another seed."""
        temperature, top_p = (0.0, 1.0) if greedy else (TEMPERATURE, self.top_p)
        return Task(
            prompt_ids(self.model, self.prompts, self.prompt_tokens), self.n, self.new_tokens, temperature, top_p, seed
        )


BUNDLED = "bundled pair (8.8 M), float32"
LLAMA = "Llama shape, 349 M"
SMOLLM2 = "SmolLM2-135M-Instruct"
AGREED = f"drafts accepted at {ACCEPTANCE:g} by construction"
ROWS = (
    Row("bundled-8", f"{BUNDLED}, batch 8", "bundled", "float32", 1, 8, 128),
    Row("bundled-1", f"{BUNDLED}, batch 1", "bundled", "float32", 1, 1, 128),
    Row("llama-8", f"{LLAMA}, bfloat16, batch 8; {AGREED}", "llama", "bfloat16", 1, 8, 64, 100),
    Row("llama-1", f"{LLAMA}, bfloat16, batch 1; {AGREED}", "llama", "bfloat16", 1, 1, 64, 100),
    Row(
        "qwen-8", "Qwen2 shape, 0.5 B, vocabulary 151,936, bfloat16, batch 8, top-p 0.95", "qwen", "bfloat16", 1, 8, 64, 100,
        top_p=0.95, drafter=False,
    ),
    Row("bundled-128", f"{BUNDLED}, 16 prompts of 8 rows", "bundled", "float32", 16, 8, 64),
    Row("llama-8-int8", f"{LLAMA}, 8-bit weights, batch 8; {AGREED}", "llama", "int8", 1, 8, 64, 100),
    Row("llama-1-int8", f"{LLAMA}, 8-bit weights, batch 1; {AGREED}", "llama", "int8", 1, 1, 64, 100),
    *(
        Row(f"smollm2-{n}{name}", f"{SMOLLM2}, {title}, batch {n}", "smollm2", dtype, 1, n, 128, drafter=False, own=own)
        for name, title, dtype, own in (
            ("", "bfloat16", "bfloat16", "self:int4"),
            ("-q8", "Q8_0 file", "Q8_0", "suffix"),
            ("-q4", "Q4_0 file", "Q4_0", "suffix"),
        )
        for n in (8, 1)
    ),
)  # fmt: skip

OWN = (("shoal", PLAIN), ("shoal", "auto"), ("shoal", f"fixed:{DRAFTED}"))
PEERS = (
    ("openvino", PLAIN), ("openvino", f"fixed:{DRAFTED}"), ("ctranslate2", PLAIN), ("llamacpp", PLAIN),
    ("llamacpp", f"fixed:{DRAFTED}"), ("transformers", PLAIN),
)  # fmt: skip
LOCAL = ("shoal", "transformers")
"""Run by this Python; the others by that of `--python`."""


def cells_of(row: Row) -> Iterator[tuple[str, str]]:
    """(engine, method) of a row's cells, in the order of the table."""
    for engine, method in OWN + PEERS:
        if row.drafter or method == PLAIN or (row.own and (engine, method) == ("shoal", "auto")):
            yield engine, method


def chosen(only: str) -> dict[Row, list[tuple[str, str]]]:
    """The cells that are named, all for "". Raises RequestError if there is none."""
    patterns = [part.strip() for part in only.split(",") if part.strip()] or ["*"]
    found: dict[Row, list[tuple[str, str]]] = {}
    for row in ROWS:
        names = {key: "/".join((row.name, *key)) for key in cells_of(row)}
        keys = [key for key, name in names.items() if any(fnmatch(name, p) or fnmatch(name, f"{p}/*") for p in patterns)]
        if keys:
            found[row] = keys
    if not found:
        raise RequestError(f"--only {only!r} names no cell; rows are {', '.join(row.name for row in ROWS)}")
    return found


@cache
def prompt_ids(model: str, count: int, length: int) -> tuple[tuple[int, ...], ...]:
    """The prompt of `shoal demo`, held-out problems, or random ids."""
    if length:
        import random

        vocabulary = {"llama": 32000, "qwen": 151936}[model]
        generator = random.Random(0)
        return tuple(tuple(generator.choices(range(vocabulary), k=length)) for _ in range(count))
    from held_out import problems
    from shoal.cli.demo import PROMPT
    from shoal.models.pretrained import load_tokenizer
    from shoal.models.sources import bundled

    if model == "smollm2":
        return (tuple(load_tokenizer(smollm2_checkpoint()).encode(PROMPT)),)
    texts = [PROMPT] if count == 1 else [problem.prompt for problem in problems(count)]
    tokenizer = load_tokenizer(bundled("target"))
    return tuple(tuple(tokenizer.encode(text)) for text in texts)
