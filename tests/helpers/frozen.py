"""Runs whose tokens and counts are kept in tests/data, so that a refactoring can be seen to change nothing.

    python tests/helpers/frozen.py counts    # writes the counts anew: where drafts are planned otherwise, and that is said
    python tests/helpers/frozen.py tokens    # writes the tokens anew: only where a change of behaviour is meant, and said

Models are tiny and random, in float64: no rounding of another CPU reaches their tokens. Rounds, drafted and accepted tokens and
passes are kept too, so a run that stops drafting shows as well as one whose tokens change.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from shoal.api import Shoal
from shoal.config import Grammar, Limits, Sampling
from shoal.drafting import recycling
from shoal.engine.engine import Engine
from shoal.lookahead.controller import by_name
from shoal.models import loading
from shoal.sampling.acceptance import RULES
from shoal.testing import tiny_model, tiny_tokenizer
from shoal.types.requests import Request, Row

FILES = {part: Path(__file__).parents[1] / "data" / f"frozen_{part}.json" for part in ("tokens", "counts")}
TOKENS = ("ids", "ends")
PROMPTS: tuple[tuple[int, ...], ...] = ((72, 101, 108, 108, 111), (40,), (9, 9, 9, 33, 41, 59, 26, 53, 58, 97, 93, 23))
NEW = 14
Json = dict[str, Any]

ARCHITECTURES = (
    "llama", "qwen2-sliding", "qwen3-moe", "gpt2", "opt", "gpt-neox", "gemma2", "gemma3", "phi3", "cohere2", "gpt-oss",
    "deepseek-v3", "mpt",
)  # fmt: skip
SINGLE = ("qwen3-moe", "gpt-oss", "deepseek-v3")
"""Their experts are multiplied by a kernel that knows no float64."""
DECODING: dict[str, Json] = {
    "greedy": {"temperature": 0.0, "lookahead": 3},
    "seeded": {"seed": 5, "lookahead": 4},
    "rejection": {"seed": 6, "lookahead": "bass", "rule": "rejection", "temperature": 0.8},
}
CONTROLS: dict[str, Json] = {
    "plain": {"seed": 1, "lookahead": "off"},
    "heuristic": {"seed": 1, "lookahead": "heuristic", "rule": "rejection"},
    "top-p": {"seed": 1, "top_p": 0.9, "temperature": 0.7},
    "top-k and min-p": {"seed": 1, "top_k": 20, "min_p": 0.02, "rule": "rejection"},
    "typical": {"seed": 1, "typical_p": 0.8},
    "repetition penalty": {"seed": 1, "repetition_penalty": 1.4, "rule": "rejection"},
    "presence and frequency": {"seed": 1, "presence_penalty": 0.7, "frequency_penalty": 0.9},
    "greedy penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "no repeated n-grams": {"temperature": 0.0, "no_repeat_ngram": 2},
    "bias and bans": {"seed": 1, "logit_bias": {65: 3.0, 66: -5.0}, "bad_words": [[67], [68, 69]]},
    "late end": {"seed": 1, "min_new_tokens": 6, "eos": list(range(0, 128))},
    "early end": {"seed": 1, "eos": list(range(0, 32))},
    "stop strings": {"seed": 1, "stop": [chr(code) for code in range(64, 80)], "max_new_tokens": 30},
    "regex": {"seed": 1, "grammar": Grammar("regex", "[a-f]{3,9}(-[0-9]{2})?")},
    "regex by rejection": {"seed": 1, "grammar": Grammar("regex", "(ab|cd|ef)+"), "rule": "rejection"},
    "JSON": {"seed": 1, "grammar": Grammar("json_schema", '{"enum": ["yes", "no", [1, 2]]}'), "max_new_tokens": 30},
}
ENGINES: dict[str, Json] = {
    "shared prompts": {"prefix_sharing": "shared"},
    "copied prompts": {"prefix_sharing": "copied"},
    "three slots": {"max_batch": 3},
    "one slot": {"max_batch": 1},
    "chunks of four": {"chunk": 4, "max_batch": 4},
    "static": {"static": "eager"},
    "strict": {"strict": True},
    **{f"attention {name}": {"attention": name} for name in ("pad", "split", "bifurcated", "reference")},
}


@cache
def runners(architecture: str, attention: str = "auto", static: str | None = None, strict: bool = False) -> tuple[Any, Any]:
    """A target, and a drafter that agrees with it now and then: the same, every weight disturbed."""
    target, drafter = (tiny_model(architecture, seed=0) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight += 0.1 * weight.std(correction=0) * torch.randn(weight.shape, generator=generator)
    dtype = torch.float32 if architecture in SINGLE else torch.float64
    made = [loading.wrap(hf.to(dtype), "tiny", attention, strict=strict) for hf in (target, drafter)]
    for runner in made:
        runner.capture_rounds(static)
    return made[0], made[1]


def decoded(architecture: str, options: Json, engine: Json | None = None) -> Json:
    """Two samples of each prompt through `Shoal.generate`, by a model without habits."""
    recycling._habits.clear()
    asked, built = {"lookahead": 4, "max_new_tokens": NEW, **options}, dict(engine or {})
    wrapped = {name: built.pop(name) for name in ("attention", "static", "strict") if name in built}
    target, drafter = runners(architecture, **wrapped)
    chunk = built.pop("chunk", None)
    pair = Shoal(target, drafter, tiny_tokenizer(), **{"max_batch": 6, **built})
    if chunk is not None:
        return _joined(pair, chunk)
    result = pair.generate([list(ids) for ids in PROMPTS], 2, **asked)
    samples = [sample for output in result for sample in output.samples]
    ends = [sample.finish_reason for sample in samples]
    return _record([list(sample.token_ids) for sample in samples], ends, result.stats)


def _joined(pair: Shoal, chunk: int) -> Json:
    """Prompts that join while others run, and one row that is cancelled."""
    engine = pair.engine(by_name(3), RULES["coupled"](), chunk=chunk)
    rows: list[Row] = []
    for i, prompt in enumerate([*PROMPTS, PROMPTS[2] * 2]):
        rows += engine.submit(Request(prompt, 2, Sampling(seed=i), Limits(max_new_tokens=NEW + 3 * i)))
        for _ in range(2):
            engine.step()
    engine.cancel(rows[-1:])
    while engine.step():
        pass
    return _of_rows(engine, rows)


def _of_rows(engine: Engine, rows: Sequence[Row]) -> Json:
    return _record([row.tokens[row.prompt_length :] for row in rows], [row.finish_reason for row in rows], engine.stats)


def _record(ids: list[list[int]], ends: list[Any], stats: Any) -> Json:
    counts = ("rounds", "drafted", "accepted", "committed", "target_passes", "draft_passes", "prefills", "prefill_tokens")
    return {"ids": ids, "ends": ends, **{name: getattr(stats, name) for name in counts}}


def runs() -> dict[str, Callable[[], Json]]:
    """Every run by its name."""
    found: dict[str, Callable[[], Json]] = {}
    for architecture in ARCHITECTURES:
        for name, options in DECODING.items():
            found[f"{architecture}: {name}"] = lambda a=architecture, o=options: decoded(a, o)  # type: ignore[misc]
    for name, options in CONTROLS.items():
        found[f"controls: {name}"] = lambda o=options: decoded("llama", o)  # type: ignore[misc]
    for name, engine in ENGINES.items():
        found[f"engine: {name}"] = lambda e=engine: decoded("llama", {"seed": 2}, e)  # type: ignore[misc]
    return found


@cache
def kept() -> Json:
    """The files, as one record of each run."""
    tokens, counts = (json.loads(FILES[part].read_text(encoding="utf-8")) for part in ("tokens", "counts"))
    assert list(tokens) == list(counts)
    return {name: tokens[name] | counts[name] for name in tokens}


if __name__ == "__main__":
    for part in sys.argv[1:]:
        records = {name: run() for name, run in runs().items()}
        own = {
            name: {key: record[key] for key in record if (key in TOKENS) == (part == "tokens")}
            for name, record in records.items()
        }
        lines = [f"{json.dumps(name)}: {json.dumps(record)}" for name, record in own.items()]
        FILES[part].write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
