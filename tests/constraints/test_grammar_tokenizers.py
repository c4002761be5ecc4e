"""Grammars, schemas and alignment over "▁", byte fallback, added tokens and 150,000 entries.

Tests of: constraints.compiler, constraints.grammar, constraints.alignment, serve.grammar_probe.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

pytest.importorskip("llguidance")

from shoal.config import Grammar
from shoal.constraints.compiler import grammars_of
from shoal.constraints.token_bytes import token_bytes
from shoal.errors import RequestError
from shoal.serve.compiled_grammars import Probe
from shoal.testing import TAGS
from shoal.types.arguments import encoded
from shoal.types.requests import Request, Row
from tokenizers_of_models import KINDS, PIECES, SMALL, chatty, plain, tokenizer, written

REGEX = Grammar("regex", "[a-z]{2,5} é[🙂🙃]{2} [0-9]{2}")
SCHEMA = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object", "required": ["a", "b"], "additionalProperties": False,
            "properties": {"a": {"enum": ["naïve 🙂", "<think>"]}, "b": {"type": "integer", "maximum": 99, "minimum": 0}},
        }
    ),
)  # fmt: skip


def allowed(kind: str, grammar: Grammar, *texts: tuple[int, ...]) -> torch.Tensor:
    """The tokens that may follow each of these texts, [texts, vocabulary] bool."""
    size = len(tokenizer(kind))
    constraint = grammars_of(tokenizer(kind), size).constraint(grammar)
    states = []
    for ids in texts:
        state = constraint.begin(Row(Request((1,)), 0, 0, 0, [1], frozenset(), 99))
        for token in ids:
            state = constraint.advance(state, token)
        states.append(state)
    return constraint.mask(states, size, torch.device("cpu")).tokens


@pytest.mark.slow(but=["llama"])
@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_texts_of_the_grammar(kind: str) -> None:
    for k in (0, 3) if kind != "large" else (3,):
        result = chatty(kind).generate("the text", 3 if k == 0 else 2, grammar=REGEX, lookahead=k, max_new_tokens=60, seed=1)
        assert (result.stats.accepted > 0) is (k > 0)
        for sample in result[0].samples:
            assert re.fullmatch("[a-z]{2,5} é[🙂🙃]{2} [0-9]{2}", sample.text), sample.text
            assert sample.finish_reason == "eos"


@pytest.mark.parametrize("kind", SMALL)
def test_samples_are_documents_of_the_schema(kind: str) -> None:
    for sample in chatty(kind).generate("the text", 4, grammar=SCHEMA, max_new_tokens=90, seed=2)[0].samples:
        found = json.loads(sample.text)
        assert found["a"] in ("naïve 🙂", "<think>")
        assert 0 <= found["b"] <= 99


@pytest.mark.parametrize("kind", KINDS)
def test_any_text_may_be_of_all_tokens_that_write_characters(kind: str) -> None:
    """Those that were added and are not special, too, whatever they look like; behind the first byte of a character all others."""
    spelled = token_bytes(tokenizer(kind))
    (found,) = allowed(kind, Grammar("regex", "(?s:.*)"), ())
    right = []
    for raw in spelled:
        try:
            right.append(bool(raw) and (raw or b"").decode(errors="strict") is not None)
        except UnicodeDecodeError:
            right.append(None)  # bytes that another token may complete
    wrong = [i for i, is_text in enumerate(right) if is_text is not None and bool(found[i]) is not is_text]
    assert not wrong, [tokenizer(kind).convert_ids_to_tokens(i) for i in wrong[:5]]


@pytest.mark.parametrize("kind", PIECES)
def test_bytes_complete_characters(kind: str) -> None:
    names = tokenizer(kind).get_vocab()
    first, second = names["<0xE6>"], names["<0x97>"]
    masks = allowed(kind, Grammar("regex", "日"), (), (first,), (first, second))
    for mask, token in zip(masks, (first, second, names["<0xA5>"]), strict=True):
        assert mask.nonzero().flatten().tolist() == [token]


def test_tags_are_text_to_grammars() -> None:
    """A grammar that ends reasoning, or a call, can be followed in the tokens that the model was trained on."""
    tag, end = plain("tagged", "<think>")[0], plain("tagged", "</think>")[0]
    masks = allowed("tagged", Grammar("regex", "(?s:<think>[^<]*</think>|[a-z<]*)"), (), (tag,))
    assert bool(masks[0][tag])
    assert bool(masks[1][end])
    assert not bool(masks[0][end])
    strings = allowed("tagged", Grammar("json_schema", '{"type": "string"}'), plain("tagged", '"'))
    assert all(bool(strings[0][plain("tagged", name)[0]]) for name in TAGS)


def test_tags_may_be_named_in_a_grammar_as_special_tokens_are() -> None:
    grammar = Grammar("lark", 'start: <think> WORD </think> // <tool_call>\nWORD: "<think>" | /[a-z]+/')
    tag, end = plain("tagged", "<think>")[0], plain("tagged", "</think>")[0]
    masks = allowed("tagged", grammar, (), (tag, *plain("tagged", "add")))
    assert masks[0].nonzero().flatten().tolist() == [tag]
    assert bool(masks[1][end])
    special = allowed("tagged", Grammar("lark", 'start: <|im_start|> "a"'), ())
    assert special[0].nonzero().flatten().tolist() == [tokenizer("tagged").convert_tokens_to_ids("<|im_start|>")]
    with pytest.raises(RequestError, match="unknown special token"):
        allowed("tagged", Grammar("lark", "start: <tool>"), ())


@pytest.mark.parametrize("kind", SMALL)
def test_a_text_may_spell_the_names_of_special_tokens(kind: str) -> None:
    """Where it is the only text that may follow, too: it is written in the tokens of other texts."""
    name = tokenizer(kind).eos_token
    schema = {
        "type": "object",
        "properties": {name: {"const": f"a{name}"}},
        "required": [name],
        "additionalProperties": False,
    }
    only = Grammar("json_schema", json.dumps(schema), "compact")
    for grammar, text in (
        (Grammar("regex", re.escape(name)), name),
        (only, json.dumps({name: f"a{name}"}).replace(": ", ":")),
    ):
        result = chatty(kind).generate("the text", 2, grammar=grammar, max_new_tokens=60, seed=3)
        assert [(one.text, one.finish_reason) for one in result[0].samples] == [(text, "eos")] * 2
        assert tokenizer(kind).eos_token_id not in result[0].samples[0].token_ids[:-1]


@pytest.mark.parametrize("kind", ["llama", "tagged"])
def test_a_probe_reads_what_the_engine_reads(kind: str) -> None:
    grammars = grammars_of(tokenizer(kind), len(tokenizer(kind)))
    probe = Probe(grammars.description)
    try:
        for grammar in (REGEX, SCHEMA, Grammar("lark", 'start: "日<think>" /[a-z]+/')):
            probe.check(grammar, grammars.source(grammar))
        wrong = Grammar("lark", "start: <nothing>")
        with pytest.raises(RequestError, match="unknown special token"):
            probe.check(wrong, grammars.source(wrong))
    finally:
        probe.close()


# ── alignment ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow(but=["the te-llama"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", ["the te", "the text ", "the", "a 🙂", " x\n    ret", "<|user|> the te"])
def test_aligned_samples_go_on_from_the_prompt(kind: str, prompt: str) -> None:
    """Every sample writes the bytes again that were taken back, and its text begins where the prompt ended."""
    result = chatty(kind).generate(prompt, 3, align=True, seed=3, max_new_tokens=12)
    given = encoded(tokenizer(kind), prompt)
    kept = result[0].prompt_ids
    assert given[: len(kept)] == kept or prompt.startswith("<|")
    for sample in result[0].samples:
        whole = written(kind, (*kept, *sample.token_ids))
        assert whole == written(kind, given) + sample.text
        assert sample.text == written(kind, (*kept, *sample.token_ids))[len(written(kind, given)) :]


@pytest.mark.parametrize("kind", PIECES)
def test_a_prompt_cut_in_a_character_is_completed(kind: str) -> None:
    ids = list(encoded(tokenizer(kind), "the 🙂"))[:-2]
    result: Any = chatty(kind).generate([ids], 2, align=True, seed=3, max_new_tokens=12)
    raw = b"".join(token_bytes(tokenizer(kind))[token] or b"" for token in ids)
    for sample in result[0].samples:
        tokens = (*result[0].prompt_ids, *sample.token_ids)
        assert b"".join(token_bytes(tokenizer(kind))[token] or b"" for token in tokens).startswith(raw)
