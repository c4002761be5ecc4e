"""Suffix decoding: looks up the longest end of a row elsewhere, and proposes the tokens after it.

It looks in the row's prompt, in the row itself, in the other rows of its group, in earlier answers
and in a corpus, and follows the most frequent tokens. After Oliaro et al., "SuffixDecoding" (2024,
arXiv 2411.04975), with suffix automata instead of trees. A draft goes on while the frequencies give
its path a probability of `shoal.drafting.text.FLOOR`.

Scopes: "row", the row and its prompt; "group", also the other rows of its request, while all of
them grow; "engine", also earlier answers of the engine, of all users; with a file, also the answers
of earlier engines. The texts of a request's rows are forgotten when the last of them has left.
Answers are the texts of rows that came to their end: rows that were cancelled, or cut for time or
an error, leave none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from shoal.drafting.answers import AnswerFile, Answers, require_answers
from shoal.drafting.automaton import ROOT, TOKEN_BYTES, Place, SuffixAutomaton
from shoal.drafting.corpus import Corpus, fitting_index, open_index
from shoal.drafting.protocol import Keeps
from shoal.drafting.text import Guess, TextDrafter, probable
from shoal.errors import RequestError
from shoal.models.runner import Runner
from shoal.models.vocabulary import fingerprint
from shoal.types.requests import Request, Row

UNSEEN = 0.5
"""The occurrences that count for tokens never seen."""
ENDS = ("eos", "stop", "length")
"""The finish reasons of rows that came to their end."""


class SuffixDrafter(TextDrafter):
    """A drafter that looks up the longest suffix of a row that has been continued before.

    Args:
        scope: "row", "group" or "engine".
        least: the fewest tokens that must match.
        nodes: the nodes of a tree; 0 = chains.
        limit: the tokens of each automaton: one for each request (or row) that is drafted for, and
            one for all earlier answers. A full one is made anew from the last half.
        corpus: a corpus that is looked up as well; the longest match counts, and of equal ones the
            match in the rows' texts.
        answers: a file of earlier answers, which are looked up, and to which the answers of all
            rows are added, in any scope.
    """

    name = "suffix"

    def __init__(
        self,
        scope: str = "group",
        least: int = 1,
        nodes: int = 0,
        limit: int = 1 << 16,
        corpus: Corpus | None = None,
        answers: AnswerFile | None = None,
    ) -> None:
        super().__init__()
        self._corpus = corpus
        self.max_nodes = nodes
        self._scope, self._least, self._limit = scope, least, limit
        self._texts: dict[int, GrowingTexts] = {}  # by the identity of the request or row
        remembers = scope == "engine" or answers is not None
        self._answers = Answers(limit, answers) if remembers else None
        self.keeps = Keeps(
            TOKEN_BYTES, tokens=limit, always=Answers.most_bytes(limit) if remembers else 0
        )

    @classmethod
    def for_target(
        cls,
        target: Runner,
        *,
        min: int = 1,
        index: str = "",
        answers: str = "",
        limit: int = 1 << 16,
        **options: Any,
    ) -> SuffixDrafter:
        size = target.vocab_size
        corpus = Corpus(fitting_index(index, size)) if index else None
        kept = AnswerFile(answers, limit, size) if answers else None
        return cls(least=min, limit=limit, corpus=corpus, answers=kept, **options)

    @classmethod
    def require_files(
        cls, tokenizer: Any, *, index: str = "", answers: str = "", **options: Any
    ) -> None:
        known = None if tokenizer is None else fingerprint(tokenizer)
        if answers:
            require_answers(answers, known)
        if index and open_index(index).tokenizer != known and known is not None:
            raise RequestError(
                f"index {index!r} is one of another tokenizer: build it with `shoal index` for "
                f"this target's"
            )

    def _texts_of(self, row: Row) -> GrowingTexts:
        key = id(row) if self._scope == "row" else id(row.request)
        if key not in self._texts:
            self._texts[key] = GrowingTexts(row.request, self._limit)
        return self._texts[key]

    def read(self, rows: Sequence[Row]) -> int:
        texts = {id(known): known for known in map(self._texts_of, rows)}
        for row in rows:
            self._texts_of(row).enter(row)
        read = sum(known.read() for known in texts.values())
        return read if self._answers is None else read + self._answers.read(rows)

    def guess(self, row: Row, length: int) -> Guess:
        place: Match = self._texts_of(row).place(row)
        if self._answers is not None:
            place = max(place, self._answers.place(row), key=lambda one: one.length)
        if self._corpus is not None:
            place = max(place, self._corpus.place(row.tokens), key=lambda one: one.length)
        return probable(place, partial(likeliest, least=self._least), length, self.max_nodes)

    def replace(self, copies: Sequence[tuple[Row, Row]]) -> None:
        for row, _ in copies:
            self._texts_of(row).forget(row)
            if self._answers is not None:
                self._answers.leave(row, False)

    def end(self, rows: Sequence[Row]) -> None:
        for row in rows:
            texts = self._texts_of(row)
            texts.leave(row)
            if self._scope == "row" or texts.left == row.request.n:
                del self._texts[id(row) if self._scope == "row" else id(row.request)]
            if self._answers is not None:
                self._answers.leave(row, row.finish_reason in ENDS)

    @property
    def table_bytes(self) -> int:
        own = sum(texts.automaton.bytes for texts in self._texts.values())
        return own if self._answers is None else own + self._answers.bytes


class GrowingTexts:
    """The rows of one request, and their places in their common automaton.

    Attributes:
        request: the request, held so that no other takes its identity.
        left: the number of its rows that have left.
    """

    def __init__(self, request: Request, limit: int) -> None:
        self.request, self.left = request, 0
        self.automaton = SuffixAutomaton()
        self._limit = limit
        self._prompt: int | None = None  # the state of the prompt, once it was read
        self._rows: dict[Row, tuple[int, int]] = {}  # the state and the number of tokens read

    def enter(self, row: Row) -> None:
        """Adds a row that is to be drafted for; the prompt of all rows is read once."""
        if row in self._rows:
            return
        if self._prompt is None:
            self._prompt = self.automaton.read(ROOT, self.request.prompt_ids[-self._limit // 2 :])
        self._rows[row] = self._prompt, row.prompt_length

    def read(self) -> int:
        """Reads the new tokens of all rows; returns the number that the automaton has gained."""
        automaton, before = self.automaton, self.automaton.tokens
        for row, (state, known) in self._rows.items():
            if known < len(row.tokens):
                self._rows[row] = automaton.read(state, row.tokens[known:]), len(row.tokens)
        if automaton.tokens <= self._limit:
            return automaton.tokens - before
        self.automaton, self._prompt = SuffixAutomaton(), None
        kept = max(self._limit // (2 * len(self._rows)), 1)
        self._rows = {
            row: (self.automaton.read(ROOT, row.tokens[-kept:]), len(row.tokens))
            for row in self._rows
        }
        return self.automaton.tokens

    def place(self, row: Row) -> Place:
        """Returns the place of a row that was read."""
        state = self._rows[row][0]
        return Place(self.automaton, state, self.automaton.length[state]).continued()

    def forget(self, row: Row) -> None:
        """Forgets the place of a row whose tokens will change; tokens that were read stay."""
        self._rows.pop(row, None)

    def leave(self, row: Row) -> None:
        """Removes a row; the rest of its text is read for the rows that go on."""
        self.left += 1
        if row in self._rows:
            if row.finish_reason in ENDS:
                self.read()
            del self._rows[row]


class Match(Protocol):
    """A place of the end of a text in other texts: in an automaton, or in a corpus."""

    @property
    def length(self) -> int:
        """The number of tokens that match."""
        ...

    def continued(self) -> Match:
        """Returns the longest match, this one included, after which some text goes on."""
        ...

    def counts(self) -> Sequence[tuple[float, int]]:
        """Returns (count, token) for each next token; of equal counts the first is taken."""
        ...

    def after(self, token: int) -> Match: ...


def likeliest(place: Match, least: int) -> Iterator[tuple[int, float, Match]]:
    """Yields the tokens that have followed the longest match, the most frequent first.

    Of equally frequent tokens, the one that was first seen latest comes first. The probability of c
    occurrences in n, after a match of m tokens, is c / (n + UNSEEN) * m / (m + 1). Short matches
    are often by chance.
    """
    place = place.continued()
    if place.length < least:
        return
    counts = place.counts()
    share = place.length / (place.length + 1) / (sum(seen for seen, _ in counts) + UNSEEN)
    for seen, token in sorted(counts, key=lambda pair: -pair[0]) if len(counts) > 1 else counts:
        yield token, share * seen, place.after(token)
