"""Compiles grammars for a tokenizer by llguidance (the extra `grammar`), each once, on a thread with a large stack.

The end of a text is one more symbol of llguidance's alphabet, beyond the tokenizer's own.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from concurrent.futures import Future
from typing import Any

import tokenizers

from shoal.config import Grammar
from shoal.constraints.grammar import GrammarConstraint
from shoal.constraints.json_schemas import numbers
from shoal.constraints.library import llguidance_or_refuse
from shoal.constraints.sources import reader, source_of, unusable
from shoal.errors import RequestError

_END = "<|end of a text|>"
KEPT = 32
"""Compiled grammars that are kept, the most recently used ones: a large one takes a second to compile."""


class Grammars:
    """Compiles grammars for one tokenizer.

    Args:
        tokenizer: a fast Transformers tokenizer. vocab_size: of the target; may be wider than the tokenizer, or narrower.

    Raises:
        RequestError: if llguidance is missing, or cannot read the tokenizer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._library = llguidance_or_refuse()
        try:
            backend = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
            backend.no_padding()
            backend.no_truncation()
            backend.add_special_tokens([_END])
            self._end = int(backend.token_to_id(_END) or 0)
            width = max(vocab_size, self._end + 1)
            spelled = backend.to_str()
            self._alphabet = self._library.LLTokenizer(spelled, n_vocab=width, eos_token=self._end)
        except (AttributeError, ValueError) as error:
            raise RequestError(f"a grammar needs a fast tokenizer that llguidance can read: {error}") from error
        self.description = {"tokenizer": spelled, "width": width, "end": self._end}
        self._lock = threading.Lock()
        self._bounds: dict[str, Any] = {}
        self._reading: OrderedDict[Grammar, Future[GrammarConstraint]] = OrderedDict()
        self._alive: weakref.WeakValueDictionary[Grammar, GrammarConstraint] = weakref.WeakValueDictionary()

    def constraint(self, grammar: Grammar, **limits: int) -> GrammarConstraint:
        """The grammar compiled; any thread may ask. It is compiled once, however many threads ask at a time, and not again for as
        long as anybody keeps it.

        Args:
            limits: of llguidance's work, now and in rounds, by the names of its `LLParserLimits`; it has its own for the others.

        Raises:
            RequestError: for a schema, expression or grammar that is wrong, has something llguidance does not know, or is too
                much for it from the start.
        """
        with self._lock:
            known = self.known(grammar)
            if known is not None:
                if grammar in self._reading:
                    self._reading.move_to_end(grammar)
                return known
            reading = self._reading.get(grammar) or reader().submit(self._read, grammar, **limits)
            self._reading[grammar] = reading
            self._reading.move_to_end(grammar)
            if len(self._reading) > KEPT:
                self._reading.popitem(last=False)
        return reading.result()

    def known(self, grammar: Grammar) -> GrammarConstraint | None:
        """The same, if it has been compiled."""
        return self._alive.get(grammar)

    def _read(self, grammar: Grammar, **limits: int) -> GrammarConstraint:
        """Compiles a grammar: its matcher, and for JSON that of the numbers."""
        starts = [self._started(grammar, source_of(grammar), **limits)]
        if grammar.kind not in ("regex", "lark"):
            starts.append(self._numbers(grammar.before).deep_copy())
        constraint = GrammarConstraint(starts, self._end, self._alphabet.vocab_size)
        self._alive[grammar] = constraint
        return constraint

    def _numbers(self, before: str) -> Any:
        """The matcher of the numbers, behind what stands before; used on the one thread that compiles."""
        if before not in self._bounds:
            if len(self._bounds) == KEPT:
                self._bounds.clear()
            text = f"(?:{before}){numbers()}" if before else numbers()
            self._bounds[before] = self._started(Grammar("regex", text), self._library.LLMatcher.grammar_from_regex(text))
        return self._bounds[before]

    def _started(self, grammar: Grammar, source: str, **limits: int) -> Any:
        """A matcher, tried on the first token."""
        bounds = self._library.LLParserLimits(verbose_errors=False, **limits)
        made = self._library.LLMatcher(self._alphabet, source, log_level=0, limits=bounds)
        if not made.is_error():
            made.compute_bitmask()
        if made.is_error():
            raise unusable(grammar, made.get_error())
        return made


_known: weakref.WeakKeyDictionary[Any, dict[int, Grammars]] = weakref.WeakKeyDictionary()


def grammars_of(tokenizer: Any, vocab_size: int) -> Grammars:
    """The `Grammars` of a tokenizer, made once, as that takes a second for a large vocabulary. Raises RequestError."""
    made = _known.setdefault(tokenizer, {})
    if vocab_size not in made:
        made[vocab_size] = Grammars(tokenizer, vocab_size)
    return made[vocab_size]
