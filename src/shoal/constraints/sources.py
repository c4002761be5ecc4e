"""Grammars as llguidance reads them, and a check that needs no tokenizer. Without torch."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from shoal.config import Grammar
from shoal.constraints.json_schemas import prepared
from shoal.constraints.library import llguidance_or_refuse
from shoal.errors import RequestError

STACK = 2**28
"""The bytes of stack of the thread that compiles. llguidance recurses into rules, at some 3 KB each
and without a limit: on a stack of 8 MB a grammar of 20 KB ends the process."""


def source_of(grammar: Grammar) -> str:
    """Returns the grammar as llguidance reads it.

    Raises:
        RequestError: llguidance is not installed.
    """
    source = _without_surroundings(grammar)
    return (
        source
        if not (grammar.before or grammar.between or grammar.behind)
        else _surrounded(grammar, source)
    )


def require_readable(grammar: Grammar) -> None:
    """Refuses a grammar that llguidance cannot read, before a model is loaded.

    This check does not find special tokens that do not exist, nor grammars that no text fits: these
    are known only after compilation.

    Raises:
        RequestError: with the message of `Grammars.constraint`; or llguidance is not installed.
    """
    error = (
        reader()
        .submit(llguidance_or_refuse().LLMatcher.validate_grammar, source_of(grammar))
        .result()
    )
    if error:
        raise unusable(grammar, error)


def unusable(grammar: Grammar, error: str) -> RequestError:
    """Returns the error to raise for a grammar and an error message of llguidance."""
    return RequestError(f"the {grammar.kind} grammar cannot be used: {short(error)}")


def short(text: str) -> str:
    """Returns an error message of llguidance, shortened: it may quote all of a grammar."""
    text = text.strip().removesuffix("<non-verbose/>").strip()
    if text == "NoExtensionBias":
        return "no text fits it"
    return text if len(text) <= 500 else f"{text[:500]} ..."


@cache
def reader() -> ThreadPoolExecutor:
    """Returns an executor of one thread with a stack of `STACK` bytes."""
    usual = threading.stack_size(STACK)
    try:
        pool = ThreadPoolExecutor(1, "shoal-grammars")
        pool.submit(int).result()  # its thread begins with the first job
    finally:
        threading.stack_size(usual)
    return pool


if hasattr(os, "register_at_fork"):  # a forked child does not have the thread
    os.register_at_fork(after_in_child=reader.cache_clear)


def _without_surroundings(grammar: Grammar) -> str:
    matcher = llguidance_or_refuse().LLMatcher
    if grammar.kind == "regex":
        return str(matcher.grammar_from_regex(grammar.text))
    if grammar.kind == "lark":
        return str(matcher.grammar_from_lark(grammar.text))
    schema, options = prepared(grammar.text or '{"type": "object"}', grammar.whitespace)
    return str(matcher.grammar_from_json_schema(schema, defaults=options or None))


def _surrounded(grammar: Grammar, source: str) -> str:
    """Returns the source with the parts before, between and behind its texts."""
    between, behind = (
        json.dumps(text, ensure_ascii=False) for text in (grammar.between, grammar.behind)
    )
    texts = (
        "@text"
        + (f" ({between} @text)*" if grammar.between else "")
        + (f" {behind}" if grammar.behind else "")
    )
    parts = [
        {"lark_grammar": f"start: {'@before ' if grammar.before else ''}{texts}"},
        _part("text", source),
    ]
    if grammar.before:
        parts.append(
            _part("before", llguidance_or_refuse().LLMatcher.grammar_from_regex(grammar.before))
        )
    return json.dumps({"grammars": parts})


def _part(name: str, source: str) -> dict[str, Any]:
    """Returns a grammar of llguidance as a named part of another grammar, which refers to it."""
    own = json.loads(source)["grammars"][0] if source.startswith("{") else {"lark_grammar": source}
    return {**own, "name": name}
