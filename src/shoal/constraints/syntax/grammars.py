"""Grammars in lark's language, as rules over automata.

The language of a grammar is one of characters: any text that can be cut into terminals which its
rules allow, with ignored terminals between them. It is the language of lark's Earley parser with
`lexer="dynamic_complete"`. A lexer that takes the longest match, or keywords before names, refuses
some of these texts: see `shoal.constraints.syntax.middles`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from shoal.constraints.syntax.automata import Automaton, followed, repeated
from shoal.constraints.syntax.expressions import automaton
from shoal.errors import RequestError


@dataclass(frozen=True)
class SymbolGrammar:
    """A grammar whose symbols are numbers: terminals, then nonterminals, the start last.

    Attributes:
        terminals: for each terminal, the automaton of its texts with ignored text behind them.
        rules: the left side and the right side of each rule.
        of: for each nonterminal, the numbers of its rules.
        nullable: the symbols that derive the empty text.
        parser: lark's LALR parser of the grammar; None if the grammar is not LALR.
    """

    terminals: tuple[Automaton, ...]
    rules: tuple[tuple[int, tuple[int, ...]], ...]
    of: dict[int, tuple[int, ...]]
    nullable: frozenset[int]
    parser: Any

    @property
    def start(self) -> int:
        return self.rules[-1][0]

    def parses(self, text: str) -> bool:
        """Returns True if lark's LALR parser takes a text, or if the grammar is not LALR."""
        import lark

        try:
            if self.parser is not None:
                self.parser.parse(text)
        except lark.exceptions.LarkError:
            return False
        return True


@lru_cache(maxsize=16)
def read_grammar(text: str) -> SymbolGrammar:
    """Returns a grammar from its text in lark's language.

    Raises:
        RequestError: lark is not installed, or refuses the grammar; or a terminal cannot be
            followed character by character (`expressions.automaton`); or the start derives no text.
    """
    try:
        import lark
    except ImportError:
        raise RequestError("middles under a grammar need lark: pip install '.[syntax]'") from None
    try:
        found = lark.Lark(text, parser="earley", lexer="dynamic_complete")
    except (lark.exceptions.LarkError, re.error, OSError) as error:
        raise RequestError(f"the grammar cannot be read: {error}") from None
    try:
        parser = lark.Lark(text, parser="lalr")
    except lark.exceptions.LarkError:
        parser = None
    ignored = [
        _matching(terminal) for terminal in found.terminals if terminal.name in found.ignore_tokens
    ]
    names = [
        terminal.name for terminal in found.terminals if terminal.name not in found.ignore_tokens
    ]
    own = {
        terminal.name: followed(_matching(terminal), ignored)
        for terminal in found.terminals
        if terminal.name in names
    }
    rules = [
        (rule.origin.name, tuple((one.name, one.is_term) for one in rule.expansion))
        for rule in found.rules
    ]
    return _compiled(
        own, rules, repeated(ignored, 1) if ignored else None, found.options.start[0], parser
    )


def _matching(terminal: Any) -> Automaton:
    found = automaton(terminal.pattern.to_regexp())
    if 0 in found.accepts:
        raise RequestError(f"the terminal {terminal.name} of the grammar matches the empty text")
    return found


def _compiled(
    own: dict[str, Automaton],
    named: Sequence[tuple[str, tuple[tuple[str, bool], ...]]],
    lead: Automaton | None,
    start: str,
    parser: Any,
) -> SymbolGrammar:
    terminals = [*own.values(), *([lead] if lead else [])]
    numbers = {(name, True): place for place, name in enumerate(own)}
    for name, _ in named:
        numbers.setdefault((name, False), len(terminals) + len(numbers) - len(own))
    root = len(terminals) + len(numbers) - len(own)
    begun = numbers[start, False]
    rules = [
        (numbers[name, False], tuple(numbers[one] for one in expansion))
        for name, expansion in named
    ]
    rules += [(root, (len(own), begun))] if lead else []
    rules.append((root, (begun,)))
    finite = _closed(rules, set(range(len(terminals))))
    if root not in finite:
        raise RequestError("the grammar derives no text")
    rules = [rule for rule in rules if finite.issuperset(rule[1])]
    of: dict[int, list[int]] = {}
    for number, (left, _) in enumerate(rules):
        of.setdefault(left, []).append(number)
    kept = {left: tuple(found) for left, found in of.items()}
    return SymbolGrammar(
        tuple(terminals), tuple(rules), kept, frozenset(_closed(rules, set())), parser
    )


def _closed(rules: Sequence[tuple[int, tuple[int, ...]]], known: set[int]) -> set[int]:
    """Adds the left sides of all rules whose right sides are known, until there are no more."""
    while more := {left for left, right in rules if left not in known and known.issuperset(right)}:
        known |= more
    return known
