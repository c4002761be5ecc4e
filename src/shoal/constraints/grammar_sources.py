"""Grammars as llguidance reads them, that library, and a check without tokenizer or torch."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from shoal.config import Grammar
from shoal.constraints.json_schemas import prepare
from shoal.constraints.schema_checks import NO_SCHEMA
from shoal.errors import RequestError


def llguidance_or_refuse() -> Any:
    """Returns the library. Raises RequestError: it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise RequestError("grammars need llguidance: pip install '.[grammar]'") from error
    return llguidance


def as_lark(text: str) -> str:
    """Returns a grammar in Lark's syntax; a GBNF grammar (llama.cpp's, with `::=`) is converted.

    Raises:
        RequestError: it has `::=` and is no GBNF, or llguidance is not installed.
    """
    if "::=" not in text:
        return text
    llguidance_or_refuse()
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # whatever it meets in a text that is no grammar
        raise RequestError(f"the grammar is no GBNF: {error!s:.300}") from error


STACK = 2**28
"""The bytes of stack of the thread that compiles. llguidance recurses into rules, at some 3 KB each
and without a limit: on a stack of 8 MB a grammar of 20 KB ends the process."""


def source_of(grammar: Grammar, special: Mapping[str, int] | None = None) -> str:
    """Returns the grammar as llguidance reads it.

    Args:
        grammar: the grammar.
        special: the special tokens that stand for their names in the texts around the grammar's.

    Raises:
        RequestError: llguidance is not installed.
    """
    whole = not (grammar.before or grammar.instead or grammar.thought or around(grammar))
    return _without_surroundings(grammar) if whole else _surround(grammar, special or {})


def around(grammar: Grammar) -> str:
    """Returns the texts around those of a grammar, and of the grammars in its place."""
    own = grammar.opening + grammar.between + grammar.behind + grammar.again
    return own + (around(grammar.instead) if grammar.instead else "")


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


REWORDED = (
    (
        "Unsatisfiable schema: anyOf is empty",
        "no value fits an empty list of types, values or alternatives",
    ),
    ("Unsatisfiable schema: schema is false", "no value fits false"),
    (
        "Unsatisfiable schema: required property '(.*)' is unsat",
        r"no value fits the required property '\1'",
    ),
    (
        "Resource '(?:json-schema:///)?(.*?)' is not present in a registry",
        r'"$ref": "\1" is another document: copy it into $defs, and refer to that',
    ),
    (
        "patternProperty regexes /(.*)/ and /(.*)/ are not disjoint",
        r"a name may fit two patterns of patternProperties, \1 and \2: let each name fit one",
    ),
    (
        r"Unsatisfiable schema: minimum \(-?\d{16,}\) is greater than maximum \(-?\d{16,}\)",
        "no whole number that a double holds lies within minimum and maximum (beyond 2^53 not all "
        "are)",
    ),
    ("Unsatisfiable schema: (.*)", r"no value fits it: \1"),
    ("Expected f64 for '(.*)', got (.*)", r'"\1" must be a number, got \2'),
    (
        "Expected positive integer for '(.*)', got (.*)",
        r'"\1" must be a whole number, 0 or more, got \2',
    ),
    ("Expected (.*) for '(.*)', got (.*)", r'"\2" must be of the type \1, got \3'),
    ("schema must be an object or boolean", NO_SCHEMA),
    ("invalid multiple of", '"multipleOf" must be a number above 0'),
    (
        "Failed to generate regex for float range",
        "no number that is written here lies within minimum and maximum",
    ),
    (
        "(?:Anchor|Pointer) '(.*?)' does not exist",
        r'"$ref": "#\1" leads nowhere: the schema has no such part',
    ),
    (
        "Invalid type: (.*)",
        r'type "\1" is none of string, number, integer, boolean, array, object, null',
    ),
)
"""Patterns of messages of llguidance, and the same messages in JSON Schema's words."""


def short(text: str) -> str:
    """Returns an error message of llguidance, shortened: it may quote all of a grammar."""
    text = text.strip().removesuffix("<non-verbose/>").strip()
    if text == "NoExtensionBias":
        return "no text fits it"
    if keywords := re.match(r"Unimplemented keys: \[(.*?)\]", text):
        return f"{keywords[1]} cannot be kept: leave out what it says, or say it otherwise"
    if name := re.match("Unknown format: (.*)", text):
        return f'"format": "{name[1]}" cannot be kept: leave it out, or give a pattern'
    if text.startswith("oneOf constraints are not supported"):
        return (
            '"oneOf" cannot be kept, as a value might fit two of its alternatives: use "anyOf", or '
            'give each alternative another "type", or a required key with another "const"'
        )
    if text.startswith("Unsatisfiable schema: Regex is empty"):
        return "no text fits what it says of a string (pattern, format, enum, lengths)"
    for words, ours in REWORDED:
        if match := re.match(words, text):
            return match.expand(ours)
    pattern = re.search(r"regex parse error:\s+(.*)\n|in regex /(.*)/$", text)
    own = (pattern[1] or pattern[2])[:200] if pattern else "the pattern"
    if "look-around" in text or "lookarounds" in text:
        return (
            f"a pattern looks around (\\b, (?=, (?!), which cannot be kept: leave it out of {own}"
        )
    if pattern and (reason := re.search(r"\nerror: (.*)", text)):
        return f"the pattern {own} cannot be used: {reason[1]}"
    return text if len(text) <= 500 else f"{text[:500]} ..."


@cache
def reader(hard: bool = False) -> ThreadPoolExecutor:
    """Returns an executor of one thread with a stack of `STACK` bytes.

    Args:
        hard: the thread of grammars that take long: llguidance cannot be interrupted.
    """
    usual = threading.stack_size(STACK)
    try:
        pool = ThreadPoolExecutor(1, "shoal-grammars")
        pool.submit(int).result()  # its thread begins with the first job
    finally:
        threading.stack_size(usual)
    return pool


if hasattr(os, "register_at_fork"):  # a forked child has no such threads
    os.register_at_fork(after_in_child=reader.cache_clear)


def _without_surroundings(grammar: Grammar) -> str:
    matcher = llguidance_or_refuse().LLMatcher
    if grammar.kind == "regex":
        return str(matcher.grammar_from_regex(grammar.text))
    if grammar.kind == "lark":
        return str(matcher.grammar_from_lark(grammar.text.replace("\x7f", "\\u007f")))
    schema, options = prepare(grammar.text or '{"type": "object"}', grammar.whitespace)
    return str(matcher.grammar_from_json_schema(schema, defaults=options or None))


def _surround(grammar: Grammar, special: Mapping[str, int]) -> str:
    """Returns the grammar and those in its place, with the parts around their texts."""
    parts = list[dict[str, Any]]()
    choices = _choices(grammar, special, parts)
    if grammar.before:
        parts.append(
            _part("before", llguidance_or_refuse().LLMatcher.grammar_from_regex(grammar.before))
        )
    begun, rules = thought_of(grammar, special)
    start = f"start: {'@before ' if grammar.before else ''}{begun} ({choices})"
    return json.dumps({"grammars": [{"lark_grammar": f"{start}\n{rules}"}, *parts]})


def _choices(grammar: Grammar, special: Mapping[str, int], parts: list[dict[str, Any]]) -> str:
    """Returns the texts of a grammar and of those in its place, and adds the grammars to a list."""
    name = f"text{len(parts)}"
    parts.append(_part(name, _without_surroundings(grammar)))
    opening, between, behind, again = (
        literal(text, special)
        for text in (grammar.opening, grammar.between, grammar.behind, grammar.again)
    )
    more = f"({between} @{name})*" if between else ""
    choices = f"{opening} @{name} {more} {behind}"
    if grammar.instead is not None:
        choices += f" | {_choices(grammar.instead, special, parts)}"
    return f"({choices}) ({again} ({choices}))*" if again else choices


def thought_of(grammar: Grammar, special: Mapping[str, int]) -> tuple[str, str]:
    """Returns the thought before a grammar in Lark's syntax, and the rules that it refers to.

    The thought ends where the text behind it first occurs: the thought does not contain that text,
    in whatever tokens it is spelled.
    """
    if grammar.thought is None:
        return "", ""
    opening, closing, answer = grammar.thought
    at = min((closing.find(name) for name in special if name in closing), default=len(closing))
    spelled = "".join(f"\\x{{{ord(character):x}}}" for character in closing)
    text = f"THOUGHT: (/(?s:.*)/ & ~/(?s:.*){spelled}(?s:.*)/) {literal(closing[:at], special)}"
    whole = f"THOUGHT? {literal(closing[at:], special)} (/\\n{{1,2}}/)?"
    if not opening:
        return whole, text
    begun = f"/[ \\n]?/? {literal(opening, special)} {whole}"
    return (f"({begun} | /[ \\n]?/? {literal(answer, special)})" if answer else f"({begun})?"), text


def literal(text: str, special: Mapping[str, int]) -> str:
    """Returns a text in Lark's syntax, with the numbers of special tokens for their names."""
    name = next((name for name in special if name in text), None)
    if name is None:
        return quote(text) if text else ""
    head, _, rest = text.partition(name)
    return f"{literal(head, special)} <[{special[name]}]> {literal(rest, special)}"


def quote(text: str) -> str:
    """Returns a text as a string of Lark's syntax."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _part(name: str, source: str) -> dict[str, Any]:
    """Returns a grammar of llguidance as a named part of another grammar, which refers to it."""
    own = json.loads(source)["grammars"][0] if source.startswith("{") else {"lark_grammar": source}
    return {**own, "name": name}
