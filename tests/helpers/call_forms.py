"""The forms in which models write calls: templates that tell them, marks that may be tokens, texts of given calls, and samples."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import numpy as np
from transformers import AddedToken

from shoal.config import Grammar
from shoal.constraints.compiler import Grammars
from shoal.serve.call_grammars import own_calls
from shoal.serve.call_reader import CallReader
from shoal.serve.tool_calls import Call, CallFormat, CallRules, format_of
from shoal.testing import tiny_tokenizer

TEMPLATES = {
    "qwen": "<tool_call><function=x><parameter=y>",
    "seed": "<seed:tool_call><function=x><parameter=y>",
    "minimax": "<minimax:tool_call>",
    "glm": "<tool_call>x<arg_key>",
    "mistral": "[TOOL_CALLS]x[ARGS]",
    "llama": "<function=x>{}</function>",
    "gemma": "<|tool_call>call:",
    "lfm": "<|tool_call_start|>[",
    "listed": "[func_name1(params_name1=params_value1)]",
}
MARKS = {
    "qwen": ("<tool_call>", "</tool_call>"),
    "seed": ("<seed:tool_call>", "</seed:tool_call>"),
    "minimax": ("<minimax:tool_call>", "</minimax:tool_call>"),
    "glm": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "gemma": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "lfm": ("<|tool_call_start|>", "<|tool_call_end|>"),
}
TOKENS = [(form, kind) for form in TEMPLATES for kind in (("text", "added", "special") if form in MARKS else ("text",))]
"""The forms, and what their marks are: text, added tokens that are not special, special tokens."""
PIECES = (
    *("\n</parameter>\n", "</parameter>", "<parameter=a>", "</function>\n", "</tool_call>", "</arg_value>\n"),
    *("</arg_value>", "<arg_value>"),
    *("<tool_call|>", '<|"|>', "</seed:tool_call>", "</minimax:tool_call>", "</invoke>\n", "<function=f>\n", "<", "</"),
    "<|tool_call_end|>",
    *("}", "]", ")", "{", "[", '"', "'", ", ", ",", "\\", "\n", " ", "true", "null", "None", "1", "0", ".5", "-"),
    *("e3", "é", "\u2028", "a"),
)  # fmt: skip
"""Pieces of texts that a grammar or a reader might take for something else."""


def form_of(form: str) -> CallFormat:
    found = format_of("{# " + TEMPLATES[form] + " #}")
    assert found is not None
    return found


@cache
def tokenizer_of(form: str, kind: str) -> Any:
    """A tokenizer whose marks of calls are text, added tokens, or special ones."""
    made = tiny_tokenizer()
    if kind != "text":
        made.add_tokens([AddedToken(name, special=kind == "special", normalized=False) for name in MARKS[form]])
    return made


@cache
def grammars(form: str, kind: str) -> Grammars:
    tokenizer = tokenizer_of(form, kind)
    return Grammars(tokenizer, len(tokenizer))


class Forced:
    """The grammar of forced calls in a form, and the reader of such samples."""

    def __init__(self, form: str, kind: str, tools: dict[str, Any], several: bool = True) -> None:
        self.tokenizer, self._grammars = tokenizer_of(form, kind), grammars(form, kind)
        special = {token.content: i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        grammar = own_calls(form_of(form), tools, several, special)
        assert grammar is not None, "the form cannot hold what a schema says"
        self.grammar: Grammar = grammar
        self._start = self._grammars.constraint(grammar).starts[0]
        self.rules = CallRules(form_of(form), frozenset(tools), True, several, schemas=tools)

    def sample(self, rng: random.Random, most: int = 500) -> str | None:
        """A random text of the grammar, full of pieces that may mislead; None if it is too long."""
        matcher, ids, end = self._start.deep_copy(), list[int](), self._start_end
        pieces = [self.tokenizer.encode(piece, add_special_tokens=False) for piece in PIECES]
        while len(ids) < most:
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
            assert not matcher.is_error(), matcher.get_error()
            possible = [int(i) for i in np.flatnonzero(bits)]
            assert possible, "nothing may follow"
            if end in possible and (len(possible) == 1 or rng.random() < 0.7):
                return str(self.tokenizer.decode(ids))
            tokens = [i for i in possible if i != end]
            more = [rng.choice([i for i in tokens if i < 94] or tokens) if rng.random() < 0.8 else rng.choice(tokens)]
            for piece in rng.sample(pieces, 4) if rng.random() < 0.6 else ():
                if matcher.validate_tokens(piece) == len(piece):
                    more = piece
                    break
            assert matcher.consume_tokens(more)
            ids += more
        return None

    @property
    def _start_end(self) -> int:
        return int(self._grammars._end)

    def accepts(self, text: str) -> bool:
        """True if the grammar has the text, by the tokenizer's own tokens."""
        matcher, ids = self._start.deep_copy(), self.tokenizer.encode(text, add_special_tokens=False)
        return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()

    def read(self, text: str, size: int = 10**6) -> tuple[str, list[Call]]:
        reader, shown, calls = CallReader(self.rules), "", list[Call]()
        for start in range(0, max(len(text), 1), size):
            more, found = reader.feed(text[start : start + size], start + size >= len(text))
            shown, calls = shown + more, calls + found
        return shown, calls


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return f"[{','.join(map(_gemma, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_gemma(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


def _python(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_python, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k, ensure_ascii=False)}: {_python(v)}" for k, v in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def written(form: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """The calls as a model of that form writes them, behind what begins a call."""
    if form in ("qwen", "seed"):
        mark, line = ("tool_call", "\n") if form == "qwen" else ("seed:tool_call", "")
        bodies = [
            f"<function={name}>\n"
            + "".join(f"<parameter={k}>{line}{_plain(v)}{line}</parameter>\n" for k, v in given.items())
            + "</function>\n"
            for name, given in calls
        ]
        return f"</{mark}>\n<{mark}>\n".join(bodies) + f"</{mark}>"
    if form == "minimax":
        parts = [
            f'<invoke name="{name}">\n'
            + "".join(f'<parameter name="{k}">{_plain(v)}</parameter>\n' for k, v in given.items())
            + "</invoke>\n"
            for name, given in calls
        ]
        return "".join(parts) + "</minimax:tool_call>"
    if form == "glm":
        pairs = [
            f"{name}\n" + "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{_plain(v)}</arg_value>\n" for k, v in given.items())
            for name, given in calls
        ]
        return "</tool_call>\n<tool_call>".join(pairs) + "</tool_call>"
    if form == "mistral":
        return "[TOOL_CALLS]".join(f"{name}[ARGS]{json.dumps(given, ensure_ascii=False)}" for name, given in calls)
    if form == "llama":
        ((name, given),) = calls
        return f"{name}>{json.dumps(given, ensure_ascii=False)}</function>"
    if form == "gemma":
        return "<tool_call|><|tool_call>".join(f"call:{name}{_gemma(given)}" for name, given in calls) + "<tool_call|>"
    lists = ", ".join(f"{name}({', '.join(f'{k}={_python(v)}' for k, v in given.items())})" for name, given in calls)
    return f"[{lists}]" + ("<|tool_call_end|>" if form == "lfm" else "")
