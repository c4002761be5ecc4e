"""Reads the text behind a cursor from its end, to find where the grammar's symbols that end in it
begin.

Places are 0 (before the text) to its length; `GAP` is a place somewhere in the text that is still
to be written before it. The chart of the text before the cursor needs only the places where a
symbol of a parse tree that ends at a given place can begin. They come from the product of the
grammar with the automaton of "anything, then the text" (Bar-Hillel, Perles, Shamir 1961), of which
only the requested part is made.
"""

from __future__ import annotations

from collections.abc import Iterable

from shoal.constraints.syntax.grammars import SymbolGrammar

GAP = -1
Places = frozenset[int]
# Rule, number of symbols of its right side to the left, place, and the symbol with its end.
Item = tuple[int, int, int, tuple[int, int]]


class Behind:
    """A text and a cache of the symbols that derive its beginnings.

    Attributes:
        last: the places at which the whole may end.
    """

    def __init__(self, grammar: SymbolGrammar, text: bytes) -> None:
        self.grammar, self._text = grammar, text
        self.last = self._with_gap({len(text)})
        self._ends: dict[tuple[int, int], tuple[Places, Places]] = {}
        self._alive: dict[tuple[int, Places], tuple[Places, Places]] = {}
        self._found: dict[tuple[int, int], set[int]] = {}
        self._tails: dict[tuple[int, int, int], Places] = {}
        self._all_tails: dict[tuple[int, int, Places], Places] = {}

    @staticmethod
    def _with_gap(places: Iterable[int]) -> Places:
        """Adds `GAP` to places with place 0.

        A symbol that ends right before the text may as well end in the text that is still to be
        written, which may be empty.
        """
        reached = frozenset(places)
        return reached | {GAP} if 0 in reached else reached

    def ends(self) -> bool:
        """Returns True if some text of the language ends with this text."""
        return any(GAP in self._starts(self.grammar.start, place) for place in self.last)

    def tail(self, rule: int, dot: int, places: Places) -> Places:
        """Returns the places where a rule's symbols from `dot` on begin if they end at `places`."""
        key = rule, dot, places
        if key not in self._all_tails:
            self._all_tails[key] = frozenset().union(
                *(self.tail_at(rule, dot, place) for place in places)
            )
        return self._all_tails[key]

    def tail_at(self, rule: int, dot: int, place: int) -> Places:
        key = rule, dot, place
        if key not in self._tails:
            ends: Iterable[int] = (place,)
            for symbol in reversed(self.grammar.rules[rule][1][dot:]):
                ends = frozenset().union(*(self._starts(symbol, end) for end in ends))
            self._tails[key] = self._with_gap(ends)
        return self._tails[key]

    def alive(self, terminal: int, places: Places) -> tuple[Places, Places]:
        """Returns the states at the cursor of a terminal that ends at one of the places.

        Returns:
            The states if the text behind follows at once, and the states if more text may be
                written before it.
        """
        key = terminal, places
        if key not in self._alive:
            automaton = self.grammar.terminals[terminal]
            exact = frozenset().union(
                *(self._terminal(terminal, place)[1] for place in places if place != GAP)
            )
            gap = (
                frozenset(range(len(automaton.moves)))
                if GAP in places
                else automaton.leading(exact)
            )
            self._alive[key] = exact, gap
        return self._alive[key]

    def _starts(self, symbol: int, end: int) -> Iterable[int]:
        if end == GAP:
            return (GAP,)
        if symbol < len(self.grammar.terminals):
            return self._terminal(symbol, end)[0]
        if (symbol, end) not in self._found:
            self._derive(symbol, end)
        return self._found[symbol, end]

    def _terminal(self, terminal: int, end: int) -> tuple[Places, Places]:
        """Returns the places where a terminal that ends at `end` begins, and its states at 0."""
        key = terminal, end
        if key not in self._ends:
            automaton = self.grammar.terminals[terminal]
            states, place, places = automaton.accepts, end, set()
            while states and place:
                place -= 1
                states = automaton.back(states, self._text[place])
                if 0 in states:
                    places.add(place)
            exact = states if not place else frozenset()
            self._ends[key] = frozenset(places | ({GAP} if exact else set())), exact
        return self._ends[key]

    def _derive(self, symbol: int, end: int) -> None:
        """Finds the places where a nonterminal that ends at a place begins.

        Earley's algorithm runs backwards; it also finds the places of the symbols that this one
        needs.
        """
        grammar, goals = self.grammar, self._found
        agenda: list[Item] = []
        seen: set[Item] = set()
        waiting: dict[tuple[int, int], list[tuple[int, int, tuple[int, int]]]] = {}

        def ask(goal: tuple[int, int]) -> None:
            if goal not in goals:
                goals[goal] = set()
                agenda.extend(
                    (rule, len(grammar.rules[rule][1]), goal[1], goal)
                    for rule in grammar.of[goal[0]]
                )

        ask((symbol, end))
        while agenda:
            item = agenda.pop()
            if item in seen:
                continue
            seen.add(item)
            rule, dot, place, goal = item
            if dot == 0 or place == GAP:
                if place not in goals[goal]:
                    goals[goal].add(place)
                    agenda += [
                        (of, before, place, whose) for of, before, whose in waiting.get(goal, ())
                    ]
                continue
            own = grammar.rules[rule][1][dot - 1]
            if own < len(grammar.terminals):
                agenda += [(rule, dot - 1, begun, goal) for begun in self._terminal(own, place)[0]]
                continue
            ask((own, place))
            waiting.setdefault((own, place), []).append((rule, dot - 1, goal))
            agenda += [(rule, dot - 1, begun, goal) for begun in goals[own, place]]
