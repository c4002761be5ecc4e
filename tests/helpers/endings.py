"""Requests that end at stop strings and tokens, and what their streams say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.api import Shoal
from shoal.engine.stream import Stream
from shoal.models.runner import Runner
from shoal.testing import END, VOCABULARY, tiny_tokenizer
from shoal.testing.scripted import adversary, mixed, says, scripted
from shoal.types.samples import FINISH_REASONS, Result, Sample

TOKENIZER = tiny_tokenizer()
PROMPT = "Say it:"
DRAFTERS = ("plain", "oracle", "adversarial", "sometimes")


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def pair(ids: Sequence[int], kind: str, context: int = 4096, draft_context: int = 4096) -> tuple[Runner, Runner | None]:
    """A target that continues the prompt with these ids, and a drafter."""
    said = says([[*encode(PROMPT), *ids]], VOCABULARY, otherwise=encode("?")[0])
    wrong = adversary(said, VOCABULARY)
    scripts = {"oracle": said, "adversarial": wrong, "sometimes": mixed(said, wrong)}
    target = scripted(said, VOCABULARY, context)
    return target, None if kind == "plain" else scripted(scripts[kind], VOCABULARY, draft_context)


def stream_of(text: str | Sequence[int], kind: str, k: int = 4, n: int = 1, **options: Any) -> Stream:
    target, drafter = pair(encode(text) if isinstance(text, str) else text, kind)
    shoal = Shoal(target, drafter, TOKENIZER, max_batch=4)
    return shoal.stream(PROMPT, n, **{"temperature": 0, "lookahead": k, "max_new_tokens": 40, "eos": END, **options})


def result_of(text: str | Sequence[int], kind: str, k: int = 4, n: int = 1, **options: Any) -> Result:
    """The same without asking for text on the way."""
    target, drafter = pair(encode(text) if isinstance(text, str) else text, kind)
    shoal = Shoal(target, drafter, TOKENIZER, max_batch=4)
    return shoal.generate(PROMPT, n, **{"temperature": 0, "lookahead": k, "max_new_tokens": 40, "eos": END, **options})


def assert_consistent(sample: Sample) -> None:
    """Text, ids and log-probabilities cover the same tokens."""
    assert sample.finish_reason in FINISH_REASONS
    assert len(sample.logprobs) == len(sample.processed_logprobs) == len(sample.from_draft) == len(sample.token_ids)
    assert sample.text == TOKENIZER.decode(sample.token_ids, skip_special_tokens=True)
    assert sample.finished == (sample.finish_reason in ("eos", "stop", "length"))


def only(text: str | Sequence[int], kind: str, k: int = 4, **options: Any) -> Sample:
    """The one sample, streamed and not: the same, and the increments join to it."""
    stream = stream_of(text, kind, k, **options)
    increments = list(stream)
    sample, other = stream.result()[0].samples[0], result_of(text, kind, k, **options)[0].samples[0]
    assert (sample.text, sample.token_ids, sample.finish_reason) == (other.text, other.token_ids, other.finish_reason)
    assert "".join(i.text for i in increments) == sample.text
    assert [i.finish_reason for i in increments] == [None] * (len(increments) - 1) + [sample.finish_reason]
    assert increments[-1].result is sample
    assert_consistent(sample)
    return sample
