"""Compiles grammars for a tokenizer by llguidance (the extra `grammar`), each once, on threads with
large stacks.

The end of a text is one more symbol of llguidance's alphabet, beyond the tokenizer's and the
model's own. llguidance gets the alphabet in bytes (`shoal.constraints.token_bytes`): if it reads a
tokenizer by itself, it takes every added token that looks like `<think>` for a token that writes
nothing, whether it is special or not, and no text could then hold the token.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import tokenizers

from shoal.config import Grammar
from shoal.constraints.grammar import GrammarConstraint
from shoal.constraints.grammar_sources import (
    around,
    llguidance_or_refuse,
    reader,
    source_of,
    thought_of,
    unusable,
)
from shoal.constraints.json_schemas import numbers
from shoal.constraints.token_bytes import token_bytes
from shoal.errors import RequestError
from shoal.types.arguments import encoded_inside, encoded_spelled, special_names

_END = b"<|end of a text|>"
PROBE = "def f(x):\n    return 'a b'"
"""A text that tests an alphabet: its tokens must write it."""
LARK = re.compile(
    r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*|(?P<name><[^<>\s"\[\]]+>)'
)
"""The strings, expressions and comments of a grammar in Lark's syntax, and the names of tokens
outside of them."""
KEPT = 32
"""The number of compiled grammars that are kept, the most recently used ones: a large one takes a
second to compile."""


@dataclass(frozen=True)
class Alphabet:
    """A vocabulary in the form that llguidance takes.

    Attributes:
        tokens: the bytes of each symbol; for symbols that write nothing, their names.
        special_token_ids: the ids of the symbols that write nothing.
        eos_token_id: the symbol for the end of a text.
        backend: the tokenizer's library.
        names: an expression of the names of special tokens, which texts may spell.
    """

    tokens: Sequence[bytes]
    special_token_ids: Sequence[int]
    eos_token_id: int
    backend: tokenizers.Tokenizer
    names: re.Pattern[str]
    bos_token_id: int | None = None

    @staticmethod
    def of(tokenizer: Any, vocab_size: int) -> Alphabet:
        """Returns the alphabet of a fast Transformers tokenizer.

        Raises:
            ValueError: its tokens do not write its texts.
        """
        spelled = token_bytes(tokenizer)
        backend = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        backend.no_padding()
        backend.no_truncation()
        ids = backend.encode(PROBE, add_special_tokens=False).ids
        written = b"".join(spelled[i] or b"" for i in ids)
        if backend.decode(ids).encode() not in (written, written.removeprefix(b" ")):
            raise ValueError("its tokens do not write its texts")
        names = tokenizer.added_tokens_decoder
        tokens = [
            str(names.get(i, "")).encode() if text is None else text
            for i, text in enumerate(spelled)
        ]
        special = [i for i, text in enumerate(spelled) if text is None and i in names]
        end = max(len(tokens), vocab_size)
        tokens += [b""] * (end - len(tokens)) + [_END]
        return Alphabet(tokens, [*special, end], end, backend, special_names(tokenizer))

    def __call__(self, text: str) -> list[int]:
        """Returns the tokens that llguidance takes if only one text can follow."""
        if isinstance(text, bytes):
            raise TypeError("llguidance asks whether bytes are taken as well")
        return list(encoded_inside(self._encode, text))

    def _encode(self, text: str) -> list[int]:
        return encoded_spelled(self._split, text, self.names)

    def _split(self, text: str) -> list[int]:
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    @property
    def description(self) -> dict[str, Any]:
        """The alphabet in JSON, for a process that has no tokenizer."""
        tokens = [text.decode("latin-1") for text in self.tokens]
        return {"tokens": tokens, "special": self.special_token_ids, "end": self.eos_token_id}


class Grammars:
    """A compiler of grammars for one tokenizer.

    Args:
        tokenizer: a fast Transformers tokenizer.
        vocab_size: the size of the target's vocabulary, which may be wider than the tokenizer's, or
            narrower.

    Raises:
        RequestError: llguidance is missing, or cannot read the tokenizer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._library = llguidance_or_refuse()
        try:
            alphabet = Alphabet.of(tokenizer, vocab_size)
            self._alphabet = self._library.LLTokenizer(
                self._library.TokenizerWrapper(alphabet), eos_token=alphabet.eos_token_id
            )
        except (AttributeError, ValueError) as error:
            raise RequestError(
                f"a grammar needs a fast tokenizer that llguidance can read: {error}"
            ) from error
        self._end, self.description = alphabet.eos_token_id, alphabet.description
        self._numbers_of = {
            str(token): i
            for i, token in tokenizer.added_tokens_decoder.items()
            if alphabet.tokens[i] and not token.special
        }
        self._special = {
            token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self._lock, self._bounds_lock = threading.Lock(), threading.Lock()
        self._bounds: dict[Any, Any] = {}
        self._reading: OrderedDict[Grammar, Future[GrammarConstraint]] = OrderedDict()
        self._alive: weakref.WeakValueDictionary[Grammar, GrammarConstraint] = (
            weakref.WeakValueDictionary()
        )

    def constraint(self, grammar: Grammar, **limits: int) -> GrammarConstraint:
        """Returns the compiled grammar; any thread may call this method.

        A grammar is compiled once, however many threads ask at a time, and not again while anything
        holds a reference to it.

        Args:
            limits: limits of llguidance's work, now and in rounds, by the names of its
                `LLParserLimits`; the others keep llguidance's defaults.

        Raises:
            RequestError: a schema, expression or grammar is wrong, has a part that llguidance does
                not know, or exceeds the limits from the start.
        """
        while True:
            with suppress(CancelledError):
                made = self.compilation(grammar, limits)
                return made if isinstance(made, GrammarConstraint) else made.result()

    def compilation(
        self, grammar: Grammar, limits: Mapping[str, int], hard: bool = False
    ) -> GrammarConstraint | Future[GrammarConstraint]:
        """Returns the compiled grammar, or its compilation, which can be cancelled until it begins.

        Args:
            grammar: the grammar.
            limits: see `constraint`.
            hard: it takes long, and waits with others of its kind for a thread of their own.
        """
        with self._lock:
            known = self.known(grammar)
            if known is not None:
                if grammar in self._reading:
                    self._reading.move_to_end(grammar)
                return known
            reading = self._reading.get(grammar)
            if reading is None or reading.cancelled():
                reading = reader(hard).submit(self._read, grammar, **limits)
            self._reading[grammar] = reading
            self._reading.move_to_end(grammar)
            if len(self._reading) > KEPT:
                self._reading.popitem(last=False)
            return reading

    def known(self, grammar: Grammar) -> GrammarConstraint | None:
        """Returns the compiled grammar, or None if it has not been compiled."""
        return self._alive.get(grammar)

    def source(self, grammar: Grammar) -> str:
        """Returns the grammar as llguidance reads it.

        The number of an added token that is not special replaces its name: llguidance knows only
        the names of special tokens.

        Raises:
            RequestError: llguidance is not installed.
        """
        if grammar.kind == "lark" and self._numbers_of:
            grammar = replace(grammar, text=LARK.sub(self._number_of, grammar.text))
        return source_of(grammar, self._special)

    def _number_of(self, match: re.Match[str]) -> str:
        number = self._numbers_of.get(match["name"] or "")
        return match[0] if number is None else f"<[{number}]>"

    def _read(self, grammar: Grammar, **limits: int) -> GrammarConstraint:
        """Compiles a grammar: its matcher, and for JSON the matcher of the numbers."""
        starts = [self._new_matcher(grammar, self.source(grammar), **limits)]
        if grammar.kind not in ("regex", "lark"):
            with self._bounds_lock:
                starts.append(self._numbers(grammar).deep_copy())
        constraint = GrammarConstraint(starts, self._end, self._alphabet.vocab_size)
        self._alive[grammar] = constraint
        return constraint

    def _numbers(self, grammar: Grammar) -> Any:
        """Returns the matcher of the numbers, behind the text before the grammar.

        Between the numbers may stand the special tokens of the texts around the grammar's. One
        thread at a time calls this method.
        """
        special = sorted(i for name, i in self._special.items() if name in around(grammar))
        key = (grammar.before, grammar.thought, *special)
        if key not in self._bounds:
            if len(self._bounds) == KEPT:
                self._bounds.clear()
            text = f"(?:{grammar.before}){numbers()}" if grammar.before else numbers()
            source = self._library.LLMatcher.grammar_from_regex(text)
            if special or grammar.thought:
                begun, rules = thought_of(grammar, self._special)
                marks = " | ".join(f"<[{token}]>" for token in special)
                first, more = (part.replace("/", r"\/") for part in (text, numbers()))
                again = f"(({marks}) /{more}/)*" if special else ""
                source = f"start: {begun} /{first}/ {again}\n{rules}"
            self._bounds[key] = self._new_matcher(Grammar("regex", text), source)
        return self._bounds[key]

    def _new_matcher(self, grammar: Grammar, source: str, **limits: int) -> Any:
        """Returns a matcher, tried on the first token."""
        bounds = self._library.LLParserLimits(verbose_errors=False, **limits)
        made = self._library.LLMatcher(self._alphabet, source, log_level=0, limits=bounds)
        if not made.is_error():
            made.compute_bitmask()
        if made.is_error():
            raise unusable(grammar, made.get_error())
        return made


_known: weakref.WeakKeyDictionary[Any, dict[int, Grammars]] = weakref.WeakKeyDictionary()


def grammars_of(tokenizer: Any, vocab_size: int) -> Grammars:
    """Returns a tokenizer's `Grammars`, made once: a large vocabulary takes a second."""
    made = _known.setdefault(tokenizer, {})
    if vocab_size not in made:
        made[vocab_size] = Grammars(tokenizer, vocab_size)
    return made[vocab_size]
