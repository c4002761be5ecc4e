"""Middles under any grammar, as a check of tokens (`shoal.constraints.protocol`).

The check refuses a token only if no text of the grammar's language begins with the text up to the
token and ends with the text behind: both quotients of Melcer, Fulton, Gouda and Qian (arXiv
2402.17988), over bytes, so a terminal may begin before the cursor and end behind it.

Limit: the check follows the language of characters (`shoal.constraints.syntax.grammars`). If the
grammar is LALR, a text ends only if lark's LALR parser takes the whole as well. If the lexer of
that parser is stricter than the terminals (a keyword that is also a name, two names without space
between them), the check may take a text for completable although the parser takes none of its
completions; the text then never ends.

The quotients are a chart of Earley's algorithm over the text before the cursor, kept as a graph
of stacks whose nodes never change: the next byte needs only the last column. Each node knows the
places of the text behind at which it may end (`shoal.constraints.syntax.behind`), found from the
root down. So the states of terminals alone tell whether the whole can be completed, and a byte
costs as much as its column holds, whatever the lengths of the texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.constraints.protocol import Cutting
from shoal.constraints.syntax.behind import GAP, Behind, Places
from shoal.constraints.syntax.grammars import SymbolGrammar, read_grammar
from shoal.constraints.syntax.python import end_places
from shoal.constraints.token_bytes import bytes_at, token_bytes
from shoal.errors import RequestError
from shoal.types.requests import Row


class GrammarText:
    """A middle up to some token; its text never changes.

    The states behind it are computed once, for all rows and drafts that come here.

    Attributes:
        column: its column of the chart.
        written: the middle.
        healing: the number of bytes of the text before the cursor that are still to be written
            again.
        after: the state behind each token, filled on demand; None = the token may not follow.
        ends: `may_end`, once known.
    """

    __slots__ = ("after", "column", "ends", "healing", "written")

    def __init__(self, column: Column, written: bytes, healing: int) -> None:
        self.column, self.written, self.healing = column, written, healing
        self.after: dict[int, GrammarText | None] = {}
        self.ends: bool | None = None


class GrammarMiddle(Cutting):
    """A check that the whole of two texts and the middle between them is of a grammar's language.

    Args:
        tokenizer: the target's.
        left: the text before the middle.
        right: the text behind the middle.
        grammar: in lark's language, with a rule `start`.
        healing: the number of bytes of `left`'s end that the new tokens write again.
        name: the name of the grammar in messages.

    Raises:
        RequestError: the grammar cannot be followed (`read_grammar`); no text of its language
            begins with `left`, none ends with `right`, or none does both.
    """

    def __init__(
        self,
        tokenizer: Any,
        left: str,
        right: str,
        grammar: str,
        healing: int = 0,
        name: str = "grammar",
    ) -> None:
        self._grammar = read_grammar(grammar)
        self._bytes = token_bytes(tokenizer)
        self._left, self._right = (text.encode(errors="surrogatepass") for text in (left, right))
        behind = Behind(self._grammar, self._right)
        if not behind.ends():
            raise RequestError(
                f"syntax={name!r}: the text behind the cursor is not the end of a text of the "
                f"grammar"
            )
        self._quotients = Quotients(behind)
        column = _read(self._quotients, self._quotients.start(), self._left)
        if column is None:
            raise RequestError(f"syntax={name!r}: {_reason(self._grammar, self._left)}")
        self._start = GrammarText(column, b"", healing)

    def start(self, row: Row) -> GrammarText:
        return self._start

    def after(self, state: GrammarText, token: int) -> GrammarText | None:
        if token not in state.after:
            state.after[token] = self._token(state, token)
        return state.after[token]

    def may_end(self, state: GrammarText) -> bool:
        if state.ends is None:
            state.ends = not state.healing and self._is_complete(state.column, state.written)
        return state.ends

    def best_end(
        self, tokens: Sequence[int], scores: Sequence[float], most: int
    ) -> tuple[int, int] | None:
        """Returns the best end; see `Cutting`. The places of highest score are tried first."""
        own = [bytes_at(self._bytes, token) or b"" for token in tokens]
        places, text = end_places(own, self._start.healing, scores, most)
        columns: list[Column | None] = [self._start.column]
        for character in text:
            columns.append(
                _read(self._quotients, columns[-1], character.encode(errors="surrogatepass"))
            )
        for _, size, count in places:
            column = columns[size]
            if column is not None and self._is_complete(
                column, text[:size].encode(errors="surrogatepass")
            ):
                return size, count
        return None

    def _token(self, state: GrammarText, token: int) -> GrammarText | None:
        own = bytes_at(self._bytes, token)
        if own is None:
            return None
        new = own[state.healing :]
        column = _read(self._quotients, state.column, new)
        if column is None:
            return None
        return GrammarText(column, state.written + new, max(0, state.healing - len(own)))

    def _is_complete(self, column: Column, written: bytes) -> bool:
        """Returns True if the chart, and lark's own parser if there is one, take the whole."""
        if not self._quotients.may_end(column):
            return False
        return self._grammar.parses((self._left + written + self._right).decode())


def _read(quotients: Quotients, column: Column | None, text: bytes) -> Column | None:
    for byte in text:
        if column is None:
            return None
        column = quotients.read(column, byte)
    return column


def _reason(grammar: SymbolGrammar, left: bytes) -> str:
    """Returns the reason why no text fits between the two texts.

    The text behind the cursor alone ends texts of the language.
    """
    alone = Quotients(Behind(grammar, b""))
    if _read(alone, alone.start(), left) is None:
        return "the text before the cursor is not the beginning of a text of the grammar"
    return "no text between that before and that behind the cursor makes a text of the grammar"


class SymbolNode:
    """A symbol that begins at some place before the cursor.

    Attributes:
        ends: the places where it may end.
        waiters: the items that go on behind it: rule, place in its right side, and the node of its
            left side.
        exact: for a terminal, the states if the text behind follows at once, see `Behind.alive`.
        gap: for a terminal, the states if more text may come first, see `Behind.alive`.
    """

    __slots__ = ("ends", "exact", "gap", "waiters")

    def __init__(self, ends: Places) -> None:
        self.ends = ends
        self.waiters: list[tuple[int, int, SymbolNode]] = []
        self.exact: Places = frozenset()
        self.gap: Places = frozenset()


@dataclass(frozen=True)
class Column:
    """The chart at a place.

    Attributes:
        scans: terminals that are being read: terminal, state and node.
        ended: True if the text so far is in the language.
        after: the column behind each byte, filled on demand; None = the byte may not follow.
    """

    scans: tuple[tuple[int, int, SymbolNode], ...]
    ended: bool
    after: dict[int, Column | None]


@dataclass(frozen=True)
class Closure:
    """The prediction behind certain items, for any nodes that they belong to.

    Attributes:
        ends: for each new node, the places where it may end.
        waiters: for each new node, its waiters: rule, place and owner. The owner is an item (from 0
            on) or a new node (-1 - number).
        scans: terminals that begin, each with its node and its `Behind.alive`.
    """

    ends: list[Places]
    waiters: list[list[tuple[int, int, int]]]
    scans: list[tuple[int, int, Places, Places]]


class Quotients:
    """The quotients for one grammar and one text behind the cursor."""

    def __init__(self, behind: Behind) -> None:
        self._behind, self._grammar = behind, behind.grammar
        self._closures: dict[tuple[tuple[int, int, Places], ...], Closure] = {}
        self._root = SymbolNode(behind.last)

    def start(self) -> Column | None:
        """Returns the chart before the first byte.

        None: no text of the language ends with the text behind.
        """
        return self._column(
            {(rule, 0, self._root) for rule in self._grammar.of[self._grammar.start]}, []
        )

    def read(self, column: Column, byte: int) -> Column | None:
        """Returns the chart one byte further; None if no text then leads to the language."""
        if byte not in column.after:
            column.after[byte] = self._read(column, byte)
        return column.after[byte]

    def may_end(self, column: Column) -> bool:
        """Returns True if the text so far and the text behind it together are in the language."""
        return (column.ended and 0 in self._root.ends) or any(
            state in node.exact for _, state, node in column.scans
        )

    def _read(self, column: Column, byte: int) -> Column | None:
        scans, complete = [], []
        for terminal, state, node in column.scans:
            automaton = self._grammar.terminals[terminal]
            state = automaton.moves[state][byte]
            if state >= 0 and state in node.gap:
                scans.append((terminal, state, node))
                if state in automaton.accepts and GAP in node.ends:
                    complete.append(node)
        if not complete:
            return Column(tuple(scans), False, {}) if scans else None
        items: set[tuple[int, int, SymbolNode]] = set()
        done = set(complete)
        ended = False
        for node in complete:  # grows
            ended = ended or node is self._root
            for rule, dot, left in node.waiters:
                if dot == len(self._grammar.rules[rule][1]):
                    if left not in done:
                        done.add(left)
                        complete.append(left)
                else:
                    items.add((rule, dot, left))
        return self._column(items, scans, ended)

    def _column(
        self,
        items: set[tuple[int, int, SymbolNode]],
        scans: list[tuple[int, int, SymbolNode]],
        ended: bool = False,
    ) -> Column | None:
        """Returns a column with the prediction behind items of nodes that began before."""
        items, ended = self._over_nullable(items, ended)
        groups: dict[tuple[int, int, Places], list[SymbolNode]] = {}
        for rule, dot, node in items:
            if GAP in self._behind.tail(rule, dot, node.ends):
                groups.setdefault((rule, dot, node.ends), []).append(node)
        keys = tuple(sorted(groups, key=lambda key: (key[0], key[1], hash(key[2]))))
        if keys:
            if keys not in self._closures:
                self._closures[keys] = self._closure(keys)
            scans = scans + self._make_nodes(self._closures[keys], [groups[key] for key in keys])
        return (
            Column(tuple(scans), ended, {}) if scans or (ended and 0 in self._root.ends) else None
        )

    def _over_nullable(
        self, items: set[tuple[int, int, SymbolNode]], ended: bool
    ) -> tuple[set[tuple[int, int, SymbolNode]], bool]:
        """Adds the items behind symbols that may be empty; an item at its end completes a node."""
        closure, open_ = set(items), list(items)
        while open_:
            rule, dot, node = open_.pop()
            right = self._grammar.rules[rule][1]
            more: Iterable[tuple[int, int, SymbolNode]] = ()
            if dot == len(right):
                ended, more = ended or node is self._root, node.waiters
            elif right[dot] in self._grammar.nullable:
                more = [(rule, dot + 1, node)]
            for item in more:
                if item not in closure:
                    closure.add(item)
                    open_.append(item)
        return {item for item in closure if item[1] < len(self._grammar.rules[item[0]][1])}, ended

    def _make_nodes(
        self, closure: Closure, groups: list[list[SymbolNode]]
    ) -> list[tuple[int, int, SymbolNode]]:
        nodes = [SymbolNode(ends) for ends in closure.ends]
        for node, waiters in zip(nodes, closure.waiters, strict=True):
            for rule, dot, whose in waiters:
                if whose >= 0:
                    node.waiters += [(rule, dot, left) for left in groups[whose]]
                else:
                    node.waiters.append((rule, dot, nodes[-1 - whose]))
        for _, number, exact, gap in closure.scans:
            nodes[number].exact, nodes[number].gap = exact, gap
        return [(terminal, 0, nodes[number]) for terminal, number, _, _ in closure.scans]

    def _closure(self, keys: tuple[tuple[int, int, Places], ...]) -> Closure:
        """Returns the symbols that may begin behind items, with the places where they may end."""
        numbers: dict[int, int] = {}
        waiters: list[list[tuple[int, int, int]]] = []
        open_ = [(rule, dot, whose) for whose, (rule, dot, _) in enumerate(keys)]
        for rule, dot, whose in open_:  # grows
            right = self._grammar.rules[rule][1]
            if dot == len(right):
                continue
            symbol = right[dot]
            if symbol not in numbers:
                numbers[symbol] = len(waiters)
                waiters.append([])
                open_ += [
                    (own, 0, -1 - numbers[symbol]) for own in self._grammar.of.get(symbol, ())
                ]
            waiters[numbers[symbol]].append((rule, dot + 1, whose))
            if whose < 0 and symbol in self._grammar.nullable:
                open_.append((rule, dot + 1, whose))
        ends = self._ends(keys, waiters)
        scans = []
        for symbol, number in numbers.items():
            if symbol < len(self._grammar.terminals):
                exact, gap = self._behind.alive(symbol, ends[number])
                if 0 in gap:
                    scans.append((symbol, number, exact, gap))
        return Closure(ends, waiters, scans)

    def _ends(
        self, keys: tuple[tuple[int, int, Places], ...], waiters: list[list[tuple[int, int, int]]]
    ) -> list[Places]:
        """Returns the places where new nodes may end: the places where their waiters begin.

        A waiter may itself belong to a new node.
        """
        ends: list[set[int]] = [set() for _ in waiters]
        below: list[list[tuple[int, int, int]]] = [[] for _ in waiters]
        open_: list[tuple[int, int]] = []

        def add(number: int, places: Iterable[int]) -> None:
            new = set(places) - ends[number]
            ends[number] |= new
            open_.extend((number, place) for place in new)

        for number, own in enumerate(waiters):
            for rule, dot, whose in own:
                if whose >= 0:
                    add(number, self._behind.tail(rule, dot, keys[whose][2]))
                else:
                    below[-1 - whose].append((rule, dot, number))
        while open_:
            number, place = open_.pop()
            for rule, dot, whose in below[number]:
                add(whose, self._behind.tail_at(rule, dot, place))
        return [frozenset(places) for places in ends]
