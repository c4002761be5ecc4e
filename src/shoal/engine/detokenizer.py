"""Token ids -> text, in increments that never split a character."""

from __future__ import annotations

import copy
import weakref
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any

from shoal.engine.stop_strings import NO_STOPS, RowStops, Stops

CONTEXT = 8
"""The number of prompt tokens that are decoded together with new ones.

Tokenizers may write a token's space depending on its neighbours.
"""
REPLACEMENT = "\ufffd"
"""The character for bytes that are no character, or none yet.

Byte fallback writes it once for each byte of a whole run of byte tokens, if the run holds a byte
that belongs to no character.
"""
LONGEST = 4
"""The bytes of the longest character, and so the most tokens of one character."""


class MarkedText:
    """A row's text that spells special tokens out.

    Args:
        special: the special tokens that the row's own text leaves out, and their names.

    Attributes:
        text: the marked text.
    """

    def __init__(self, special: Mapping[int, str]) -> None:
        self._special, self.text = special, ""
        self._names: list[tuple[int, int]] = []
        """The positions of special tokens in the text, and their lengths."""

    def copy(self) -> MarkedText:
        """Returns a copy of the text, which goes on by itself."""
        other = copy.copy(self)
        other._names = list(self._names)
        return other

    def add(self, text: str, token: int) -> None:
        """Adds the new text of a token, and a special token itself."""
        self.text += text
        name = self._special.get(token, "")
        if name:
            self._names.append((len(self.text), len(name)))
            self.text += name

    def position_without_names(self, position: int) -> int:
        """Returns the position in the row's own text of a position in the text with names."""
        return position - sum(
            min(position - start, length) for start, length in self._names if start < position
        )


class Detokenizer:
    """The text of one row, which grows token by token.

    Text is decoded without special tokens, except the tokens of `shown`. Stop strings that contain
    a special token which the text does not show are searched for in the *marked* text, which spells
    these tokens out; cuts are counted in characters of the text without them.

    Args:
        prompt: the prompt's ids.
        stops: the stop strings.
        visible_from: the number of characters of the new text that the user has already.
        shown: the special tokens that the text shows.
        hidden: other tokens that the text does not show.
        shows_cut: True if the text begins with a character that the prompt cuts, completed or not.

    Attributes:
        visible_from: the number of characters of the new text that the user has already; stop
            strings are looked for behind them.
        text: the new text so far, these characters included, without incomplete characters.
        ends: the length of the text after each token pushed.
        stopped: True from the first token on whose text completes a stop string; `text` is cut
            before the stop string, or behind it if it is to be shown.
        token_count: the number of tokens that cover the cut text, once it is stopped.
        shown: the number of characters returned by `take` so far.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int],
        stops: Stops = NO_STOPS,
        visible_from: int = 0,
        shown: frozenset[int] = frozenset(),
        hidden: frozenset[int] = frozenset(),
        shows_cut: bool = False,
    ) -> None:
        self.visible_from = visible_from
        self._rules = RowStops(stops)
        special = special_tokens(tokenizer)
        if shown:
            special = {token: name for token, name in special.items() if token not in shown}
        silent = special.keys() | hidden if hidden else special.keys()
        self._is_silent = partial(_is_silent, tokenizer, silent)
        self._decode = partial(
            _decode, tokenizer, self._is_silent, skip_special_tokens=not shown and not hidden
        )
        self._stops = {stop: any(name in stop for name in special.values()) for stop in stops.texts}
        self._marked = MarkedText(special) if any(self._stops.values()) else None
        self._ids = list(prompt[-CONTEXT - LONGEST + 1 :])
        self._prompt_length = len(self._ids)
        self._prefix, self._read = -1, 0  # nothing is decoded yet
        self._cut_prompt: str | None = None
        self.ends: list[int] = []
        self.text = ""
        self.shown = visible_from
        self.stopped = False
        self.token_count: int | None = None
        if shows_cut:
            self._begin()
            self._cut_prompt = None

    def copy(self) -> Detokenizer:
        """Returns another detokenizer that has read the same tokens, and goes on by itself."""
        other = copy.copy(self)
        other._ids, other.ends = list(self._ids), list(self.ends)
        other._marked = None if self._marked is None else self._marked.copy()
        other._rules = self._rules.copy()
        return other

    def push(self, token: int) -> None:
        """Adds one token."""
        before, held_back = len(self.text), ""
        if not self._is_silent(token):  # thousands would be decoded again and again
            self._ids.append(token)
            held_back = self._extend(final=False)
        self.ends.append(len(self.text))
        if self._stops and not self.stopped:
            marked = 0
            if self._marked is not None:
                marked = len(self._marked.text)
                self._marked.add(self.text[before:], token)
            if len(self.ends) > self._rules.stops.least:
                self._look_for_stop(before, marked, held_back)

    def final_text(self, tokens: Sequence[int], count: int) -> tuple[str, int]:
        """Returns the text of a row that has ended, and how many of its tokens cover it.

        Args:
            tokens: the tokens that were not pushed, decoded at once. An incomplete character is
                shown as the tokenizer shows it.
            count: the number of the row's tokens.
        """
        if not self.stopped and (tokens or self._prefix >= 0):  # many are cut before they begin
            self._finish(tokens)
        count = count if self.token_count is None else self.token_count
        return self.text[self.visible_from :], count

    def _finish(self, tokens: Sequence[int]) -> None:
        """Decodes the last tokens.

        They are decoded at once. If they hold bytes that are no character, they are decoded one by
        one, because byte fallback decodes such bytes differently by their neighbours. So a text is
        the same whether it was shown while it grew or not.
        """
        text, ids, state = self.text, len(self._ids), (self._prefix, self._read, self._cut_prompt)
        self._ids += tokens
        self._extend(final=True)
        if REPLACEMENT in self.text[len(text) :]:
            self.text, self._ids[ids:] = text, []
            self._prefix, self._read, self._cut_prompt = state
            for token in tokens:
                if not self._is_silent(token):
                    self._ids.append(token)
                    self._extend(final=False)
            self._extend(final=True)

    def _extend(self, *, final: bool) -> str:
        """Decodes the new ids together with those before them.

        Returns:
            The text held back, because its last character is incomplete.
        """
        if self._prefix < 0:
            self._begin()
        before = self._decode(self._ids[self._prefix : self._read])
        grown = self._decode(self._ids[self._prefix :])
        if self._cut_prompt is not None and grown.startswith(self._cut_prompt):
            before = self._cut_prompt  # the new tokens did not complete the character
        if not final and grown.endswith(REPLACEMENT):
            flushed = len(self._ids) - self._read > 2 * LONGEST and self._flush(before, grown)
            return self._extend(final=False) if flushed else grown[len(before) :]
        if len(grown) > len(before):
            self.text += grown[len(before) :]
            self._prefix, self._read, self._cut_prompt = self._read, len(self._ids), None
        return ""

    def _flush(self, before: str, grown: str) -> bool:
        """Adds the text of bytes that can no longer become a character; False if there are none.

        The last ones wait: they may be the beginning of one. Byte fallback also writes whole
        characters as replacement characters if they are in one run with invalid bytes.
        """
        last = len(self._ids) - LONGEST
        for cut in range(last + 1, last - LONGEST, -1):
            text = self._decode(self._ids[self._prefix : cut])
            own = self._decode(self._ids[cut:]), REPLACEMENT * (len(self._ids) - cut)
            if len(text) > len(before) and grown in (text + own[0], text + own[1]):
                self.text += text[len(before) :]
                # Not even as context: beside further bytes they may be read as characters.
                self._prefix, self._read, self._cut_prompt = cut, cut, None
                return True
        return False

    def _begin(self) -> None:
        """Finds the places in the prompt where decoding begins, and where the user's text ends.

        Both are at whole characters. A character that the prompt begins and new tokens complete
        belongs to the new text.
        """
        end = self._prompt_length
        first = max(end - CONTEXT, 0)
        self._prefix, self._read = first, end
        for start in range(first, max(first - LONGEST, -1), -1):
            for read in range(end, max(end - LONGEST, start - 1), -1):
                text = self._decode(self._ids[start:read])
                if not text.startswith(REPLACEMENT) and not text.endswith(REPLACEMENT):
                    self._prefix, self._read = start, read
                    self._cut_prompt = None if read == end else self._decode(self._ids[start:end])
                    return

    def _look_for_stop(
        self, before: int, marked: int, held_back: str, *, final: bool = False
    ) -> None:
        """Cuts the text if the last token completed a stop string.

        Args:
            before: the length of the text before the token.
            marked: the length of the marked text before the token.
            held_back: the text that is held back, because its last character is incomplete.
            final: True if no text follows.
        """
        places = list[tuple[int, int, bool]]()  # begin and end in the text, and whether it is shown
        for stop, is_marked in self._stops.items():
            spelled = self._marked if is_marked else None
            own, start = (self.text, before) if spelled is None else (spelled.text, marked)
            within, unstopped = own + held_back, self._rules.passages[stop]
            # No special token writes text that the user has already, so `visible_from` counts
            # alike in both texts.
            first = max(self.visible_from, start - len(stop) + 1)
            at = within.find(stop, self._rules.waiting.pop(stop, first))
            covered: bool | None = True
            while at >= 0 and (covered := unstopped.cover(within, len(own), at, at + len(stop))):
                at = within.find(stop, at + 1)
            if at >= 0 and covered is None and not final:
                self._rules.waiting[stop] = at
            elif at >= 0:
                cut, end = self._own_position(stop, at), self._own_position(stop, at + len(stop))
                places.append((cut, end, stop in self._rules.stops.shown))
        if places:
            cut, end, is_shown = min(places, key=lambda one: one[0])
            text = self.text + held_back
            self.text, self.ends[-1] = text[: end if is_shown else cut], len(text)
            self.token_count = self.covering(end if is_shown else cut)
            self.stopped = True

    def settle(self) -> bool:
        """Cuts a text that is over at the first stop string that waits; returns True if it is cut.

        The stop string was in what might have become the opening of a part without stop strings.
        """
        if self._rules.waiting and not self.stopped:
            marked = 0 if self._marked is None else len(self._marked.text)
            self._look_for_stop(len(self.text), marked, "", final=True)
        return self.stopped

    def _own_position(self, stop: str, position: int) -> int:
        """Returns the position in the text of a position where a stop string is looked for."""
        if self._marked is None or not self._stops[stop]:
            return position
        return self._marked.position_without_names(position)

    def covering(self, characters: int) -> int:
        """Returns how many of the pushed tokens write the first `characters` of the text."""
        return min(bisect_left(self.ends, characters) + 1, len(self.ends)) if characters else 0

    def piece(self, index: int) -> str:
        """Returns the part of the user's text that a pushed token adds.

        Once the row is over, all pieces together are the user's text.
        """
        start = max(self.ends[index - 1] if index else 0, self.visible_from)
        if index == len(self.ends) - 1:
            return self.text[start:]
        return self.text[start : self.ends[index]]

    def take(self, *, final: bool) -> str:
        """Returns the text not taken before, without an end that may become a stop string."""
        safe = len(self.text)
        if not final:
            ends = dict(self._rules.waiting)
            for stop in self._stops.keys() - ends.keys() - self._rules.stops.shown:
                marked = self._marked if self._stops[stop] else None
                text = self.text if marked is None else marked.text
                ends[stop] = len(text) - _overlap(text, stop)
            safe = min([safe, *(self._own_position(stop, at) for stop, at in ends.items())])
        text = self.text[self.shown : safe]
        self.shown = max(self.shown, safe)
        return text


def _is_silent(tokenizer: Any, silent: Set[int], token: int) -> bool:
    """Returns True for a token without a text of its own: a hidden one, or a padded row of the
    model's head, whose id the tokenizer does not have."""
    if token in silent:
        return True
    try:
        return tokenizer.convert_ids_to_tokens(token) is None
    except IndexError:  # of tokenizers in Python
        return True


def _decode(
    tokenizer: Any,
    is_silent: Callable[[int], bool],
    ids: Sequence[int],
    *,
    skip_special_tokens: bool,
) -> str:
    """Returns the text of the ids that have one."""
    spoken = [token for token in ids if not is_silent(token)]
    return str(
        tokenizer.decode(
            spoken, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
    )


def whole_characters(tokenizer: Any, ids: Sequence[int]) -> Sequence[int]:
    """Returns the ids without those at their end that begin a character and do not complete it."""
    read = Detokenizer(tokenizer, ids)
    read._begin()
    return ids[: len(ids) - read._prompt_length + read._read]


def characters(
    tokenizer: Any,
    prompt: Sequence[int],
    tokens: Sequence[int],
    shown: frozenset[int] = frozenset(),
) -> int:
    """Returns how many characters tokens add to a prompt, without an incomplete last one.

    Args:
        prompt: the prompt's ids.
        shown: see `Detokenizer`.
    """
    detokenizer = Detokenizer(tokenizer, prompt, shown=shown)
    detokenizer._ids += tokens
    held_back = detokenizer._extend(final=False)
    return len(detokenizer.text) + len(held_back.rstrip(REPLACEMENT))


_special: weakref.WeakKeyDictionary[Any, dict[int, str]] = weakref.WeakKeyDictionary()


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Returns the ids that decoding leaves out, and their names; found once per tokenizer."""
    if tokenizer not in _special:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        always = set(getattr(tokenizer, "all_special_ids", ()))
        _special[tokenizer] = {
            i: token.content for i, token in added.items() if token.special or i in always
        }
    return _special[tokenizer]


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` that is a proper beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
