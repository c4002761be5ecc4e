"""Middles under any grammar, as a check of tokens (`shoal.constraints.check`).

The check refuses a token only if no text of the grammar's language begins with the text up to the
token and ends with the text behind: both quotients of Melcer, Fulton, Gouda and Qian (arXiv
2402.17988), over bytes, so a terminal may begin before the cursor and end behind it.

Limit: the check follows the language of characters (`shoal.constraints.syntax.grammars`). If the
grammar is LALR, a text ends only if lark's LALR parser takes the whole as well. If the lexer of
that parser is stricter than the terminals (a keyword that is also a name, two names without space
between them), the check may take a text for completable although the parser takes none of its
completions; the text then never ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.constraints.check import Cutting
from shoal.constraints.syntax.behind import Behind
from shoal.constraints.syntax.endings import end_places
from shoal.constraints.syntax.grammars import SymbolGrammar, read_grammar
from shoal.constraints.syntax.quotients import Column, Quotients
from shoal.constraints.token_bytes import token_bytes
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
        own = [
            (self._bytes[token] if token < len(self._bytes) else None) or b"" for token in tokens
        ]
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
        own = self._bytes[token] if token < len(self._bytes) else None
        if own is None:
            return None
        new = own[state.healing :]
        column = _read(self._quotients, state.column, new)
        return (
            None
            if column is None
            else GrammarText(column, state.written + new, max(0, state.healing - len(own)))
        )

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
