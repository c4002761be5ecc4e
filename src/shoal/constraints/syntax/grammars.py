"""Grammars in lark's language, as rules over automata.

The language of a grammar is one of characters: any text that can be cut into terminals which its
rules allow, with ignored terminals between them. It is the language of lark's Earley parser with
`lexer="dynamic_complete"`. A lexer that takes the longest match, or keywords before names, refuses
some of these texts: see `shoal.constraints.syntax.middles`.

The terminals are regular expressions of Python, read as automata over the bytes of UTF-8.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

from shoal.constraints.syntax.automata import Automaton, determinize, follow, repeat
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
            followed character by character (`automaton`); or the start derives no text.
    """
    try:
        import lark
    except ImportError:
        raise RequestError("middles under a grammar need lark: pip install '.[syntax]'") from None
    try:
        earley = lark.Lark(text, parser="earley", lexer="dynamic_complete")
    except (lark.exceptions.LarkError, re.error, OSError) as error:
        raise RequestError(f"the grammar cannot be read: {error}") from None
    try:
        parser = lark.Lark(text, parser="lalr")
    except lark.exceptions.LarkError:
        parser = None
    ignored = [
        _matching(terminal)
        for terminal in earley.terminals
        if terminal.name in earley.ignore_tokens
    ]
    names = [
        terminal.name for terminal in earley.terminals if terminal.name not in earley.ignore_tokens
    ]
    own = {
        terminal.name: follow(_matching(terminal), ignored)
        for terminal in earley.terminals
        if terminal.name in names
    }
    rules = [
        (rule.origin.name, tuple((one.name, one.is_term) for one in rule.expansion))
        for rule in earley.rules
    ]
    return _compile(
        own, rules, repeat(ignored, 1) if ignored else None, earley.options.start[0], parser
    )


def _matching(terminal: Any) -> Automaton:
    terminal_automaton = automaton(terminal.pattern.to_regexp())
    if 0 in terminal_automaton.accepts:
        raise RequestError(f"the terminal {terminal.name} of the grammar matches the empty text")
    return terminal_automaton


def _compile(
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
    finite = _close(rules, set(range(len(terminals))))
    if root not in finite:
        raise RequestError("the grammar derives no text")
    rules = [rule for rule in rules if finite.issuperset(rule[1])]
    of: dict[int, list[int]] = {}
    for number, (left, _) in enumerate(rules):
        of.setdefault(left, []).append(number)
    kept = {left: tuple(alternatives) for left, alternatives in of.items()}
    return SymbolGrammar(
        tuple(terminals), tuple(rules), kept, frozenset(_close(rules, set())), parser
    )


def _close(rules: Sequence[tuple[int, tuple[int, ...]]], known: set[int]) -> set[int]:
    """Adds the left sides of all rules whose right sides are known, until there are no more."""
    while more := {left for left, right in rules if left not in known and known.issuperset(right)}:
        known |= more
    return known


Ranges = tuple[tuple[int, int], ...]
# The parser of `re` itself.
_parser: Any = import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
_SURROGATES = (0xD800, 0xDFFF)
_CATEGORIES = {
    "CATEGORY_" + name: code
    for name, code in zip(
        ("DIGIT", "NOT_DIGIT", "SPACE", "NOT_SPACE", "WORD", "NOT_WORD"),
        (r"\d", r"\D", r"\s", r"\S", r"\w", r"\W"),
        strict=True,
    )
}


@lru_cache(maxsize=1024)
def automaton(pattern: str) -> Automaton:
    """Returns the automaton of the texts that a regular expression matches as a whole.

    If a repetition is lazy (`.*?`), the texts are the shortest ones, without a beginning that
    matches too: a lexer takes the first match.

    Raises:
        RequestError: the pattern is no regular expression, or looks ahead, looks behind at more
            than one character, refers back or tests for the ends of words or lines; or the
            automaton is too large.
    """
    try:
        tree = _parser.parse(pattern)
        nfa = _Nfa()
        last = nfa.sequence(tree, nfa.new(), tree.state.flags)
    except (re.error, OverflowError, RecursionError) as error:
        raise RequestError(
            f"the regular expression {pattern!r} of the grammar cannot be read: {error}"
        ) from None
    result = nfa.determinize(last)
    return result.shortest() if nfa.lazy else result


class _Nfa:
    """A nondeterministic automaton over characters.

    States are numbers. A state behind a condition on the character before is reached only if the
    condition holds.

    Attributes:
        reads: for each state, the characters that lead to another state.
        free: for each state, the states reached without reading.
        asked: for each state, conditions on the character before: the number of a class in
            `looked`, True if the character has to be in it, and the state that is reached.
        looked: the classes that are looked behind at.
        lazy: True if a repetition is lazy.
    """

    def __init__(self) -> None:
        self.reads: list[list[tuple[Ranges, int]]] = []
        self.free: list[list[int]] = []
        self.asked: list[list[tuple[int, bool, int]]] = []
        self.looked: list[Ranges] = []
        self.lazy = False

    def new(self) -> int:
        self.reads.append([])
        self.free.append([])
        self.asked.append([])
        return len(self.reads) - 1

    def sequence(self, tree: Iterable[tuple[Any, Any]], state: int, flags: int) -> int:
        """Adds the states of a parsed expression behind a state; returns the last one."""
        for operator, value in tree:
            state = self._one(str(operator), value, state, flags)
        return state

    def _one(self, name: str, value: Any, state: int, flags: int) -> int:
        after = self.new()
        if name in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            self.reads[state].append(
                (_ranges(_class(name, value), flags & (re.I | re.S | re.A)), after)
            )
        elif name == "SUBPATTERN":
            _group, added, removed, tree = value
            self.free[self.sequence(tree, state, (flags | added) & ~removed)].append(after)
        elif name == "BRANCH":
            for tree in value[1]:
                begun = self.new()
                self.free[state].append(begun)
                self.free[self.sequence(tree, begun, flags)].append(after)
        elif name in ("MAX_REPEAT", "MIN_REPEAT"):
            self.lazy = self.lazy or name == "MIN_REPEAT"
            self._repeat(value, state, after, flags)
        elif name in ("ASSERT", "ASSERT_NOT") and value[0] < 0 and len(value[1]) == 1:
            (operator, inner), *_ = value[1]
            if str(operator) not in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
                raise re.error("it looks behind at more than one character")
            self.looked.append(_ranges(_class(str(operator), inner), flags & (re.I | re.S | re.A)))
            self.asked[state].append((len(self.looked) - 1, name == "ASSERT", after))
        else:
            raise re.error(f"{name.lower()} cannot be followed character by character")
        return after

    def _repeat(self, value: tuple[int, Any, Any], state: int, after: int, flags: int) -> None:
        least, most, tree = value
        for _ in range(least):
            state = self.sequence(tree, state, flags)
        self.free[state].append(after)
        if most is _parser.MAXREPEAT:
            begun = self.new()
            self.free[state].append(begun)
            self.free[self.sequence(tree, begun, flags)] += [begun, after]
            return
        for _ in range(most - least):
            state = self.sequence(tree, state, flags)
            self.free[state].append(after)

    def determinize(self, last: int) -> Automaton:
        """Returns the deterministic automaton whose texts lead to the state `last`.

        A state here has three parts: the bytes of a character that are still to be read, the state
        behind them, and the classes of the character.
        """

        def closure(states: set[Any]) -> set[Any]:
            open_ = list(states)
            while open_:
                rest, state, classes = open_.pop()
                if not rest:
                    free = [
                        *self.free[state],
                        *(to for of, within, to in self.asked[state] if (of in classes) is within),
                    ]
                    open_ += (more := {((), to, classes) for to in free} - states)
                    states |= more
            return states

        def edges(item: Any) -> Iterator[tuple[int, int, Any]]:
            rest, state, classes = item
            if rest:
                yield (*rest[0], (rest[1:], state, classes))
                return
            for ranges, after in self.reads[state]:
                for own, numbers in self._split(ranges):
                    for first, *others in map(tuple, encode(own)):
                        yield (*first, (tuple(others), after, numbers))

        start: Any = ((), 0, frozenset())
        return determinize([start], closure, edges, lambda item: item[:2] == ((), last))

    def _split(self, ranges: Ranges) -> list[tuple[Ranges, frozenset[int]]]:
        """Splits a class of characters by the looked-behind classes that contain them."""
        parts: list[tuple[Ranges, frozenset[int]]] = [(ranges, frozenset())]
        for number, looked in enumerate(self.looked):
            within = [(_common(own, looked), numbers | {number}) for own, numbers in parts]
            beyond = [(_common(own, _others(looked)), numbers) for own, numbers in parts]
            parts = [part for part in (*within, *beyond) if part[0]]
        return parts


def _class(name: str, value: Any) -> str:
    """Returns the source of a class of characters."""
    if name == "ANY":
        return "."
    if name == "IN":
        negated = "^" if str(value[0][0]) == "NEGATE" else ""
        return f"[{negated}{''.join(_member(str(operator), own) for operator, own in value)}]"
    return f"[{'^' if name == 'NOT_LITERAL' else ''}{_member('LITERAL', value)}]"


def _member(name: str, value: Any) -> str:
    if name == "LITERAL":
        return rf"\U{value:08x}"
    if name == "RANGE":
        return rf"\U{value[0]:08x}-\U{value[1]:08x}"
    return _CATEGORIES[str(value)] if name == "CATEGORY" else ""


@lru_cache(maxsize=4096)
def _ranges(source: str, flags: int) -> Ranges:
    """Returns the characters of a class, as `re` finds them."""
    if re.fullmatch(r"\[\\U\w{8}\]", source) and not flags & re.I:
        return ((int(source[3:11], 16),) * 2,)
    text = _all()
    spans = (match.span() for match in re.finditer(source + "+", text, flags))
    return tuple((ord(text[first]), ord(text[end - 1])) for first, end in spans)


@cache
def _all() -> str:
    """Returns all characters in their order; a quarter of a second, so not before it is needed."""
    first, last = _SURROGATES
    return "".join(map(chr, (*range(first), *range(last + 1, 0x110000))))


def _common(one: Ranges, other: Ranges) -> Ranges:
    both = ((max(low, begun), min(high, end)) for low, high in one for begun, end in other)
    return tuple((low, high) for low, high in both if low <= high)


def _others(ranges: Ranges) -> Ranges:
    edges = [-1, *(edge for low, high in ranges for edge in (low, high)), 0x110000]
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return tuple((last + 1, first - 1) for last, first in gaps if last + 1 < first)


@lru_cache(maxsize=4096)
def encode(ranges: Ranges) -> tuple[Ranges, ...]:
    """Returns the UTF-8 of characters, as sequences of ranges of bytes."""
    sequences: list[Ranges] = []
    open_ = list(reversed(ranges))
    while open_:
        low, high = open_.pop()
        end = _piece_end(low, high)
        if end < high:
            open_.append((end + 1, high))
        if not _SURROGATES[0] <= low <= _SURROGATES[1]:
            sequences.append(tuple(zip(chr(low).encode(), chr(end).encode(), strict=True)))
    return tuple(sequences)


def _piece_end(low: int, high: int) -> int:
    """Returns the last character of a range that UTF-8 encodes as one product of byte ranges.

    Up to this character each byte takes every value between that of the first character and that of
    the last.
    """
    for last in (0x7F, 0x7FF, _SURROGATES[0] - 1, _SURROGATES[1], 0xFFFF):
        if low <= last:
            high = min(high, last)
            break
    if low <= 0x7F:
        return high
    for bits in (6, 12, 18):
        within = (1 << bits) - 1
        if low & ~within != high & ~within:
            if low & within:
                return low | within
            if high & within != within:
                high = (high & ~within) - 1
    return high
