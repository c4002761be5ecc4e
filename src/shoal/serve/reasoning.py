"""Reasoning in the texts of chat models: the text between `<think>` and `</think>` before the
answer, as templates write it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.config import Grammar

OPENING, CLOSING = "<think>", "</think>"
LINE_FEEDS = "\\n{0,2}"
"""A regular expression of the blanks between the reasoning and a text under a grammar."""


@dataclass(frozen=True)
class ReasoningRules:
    """The place where the samples of one request may reason.

    Attributes:
        opened: True if the opening stands in the prompt, so samples begin inside of it. Otherwise
            they reason if they begin with it.
    """

    opened: bool

    @property
    def unstopped(self) -> tuple[str, str]:
        """The reasoning, as `Request.unstopped` has it."""
        return r"\A" if self.opened else rf"\A\s*{OPENING}", CLOSING

    def allowed_before(self, grammar: Grammar, opening: str = "") -> Grammar:
        """Returns the grammar of a sample whose answer alone is of a grammar.

        Args:
            grammar: the grammar of the answer.
            opening: stands before the answer, literally.
        """
        inside = _up_to(CLOSING) + LINE_FEEDS
        before = (inside if self.opened else f"(?:{_escaped(OPENING)}{inside})?") + _escaped(
            opening
        )
        if grammar.kind == "regex":
            return replace(grammar, text=f"{before}(?:{grammar.text})")
        return replace(grammar, before=before)


def rules_of(template: str | None, prompt: str) -> ReasoningRules | None:
    """Returns the rules for reasoning behind a prompt that a chat template wrote.

    None if the template's models do not reason, or have reasoned already.
    """
    written = prompt.rstrip()
    if template is None or CLOSING not in template or written.endswith(CLOSING):
        return None
    return ReasoningRules(written.endswith(OPENING))


class ReasoningReader:
    """A reader that takes one sample's text piece by piece, and separates reasoning from the rest.

    Blanks around the reasoning, and before the text that follows, belong to neither.

    Attributes:
        characters: the number of characters of the reasoning, the words around it included; the
            number so far while it goes on.
    """

    def __init__(self, rules: ReasoningRules) -> None:
        self._inside, self._over, self._begun = rules.opened, False, False
        self._waiting, self._read = "", 0
        self.characters = 0

    def feed(self, text: str, ended: bool) -> tuple[str, str]:
        """Returns the reasoning and the other text that a piece adds.

        Args:
            ended: True if it is the last piece.
        """
        self._waiting += text
        self._read += len(text)
        if not self._inside and not self._over:
            self._open(ended)
        reasoning = self._reasoned(ended) if self._inside else ""
        if self._over and self._begun:  # blanks behind the reasoning
            self._waiting = self._waiting.lstrip()
            self._begun = not self._waiting
        rest, self._waiting = (self._waiting, "") if self._over else ("", self._waiting)
        return reasoning, rest

    def _open(self, ended: bool) -> None:
        """Decides whether the text begins with reasoning."""
        start = self._waiting.lstrip()
        if start.startswith(OPENING):
            self._inside, self._waiting = True, start[len(OPENING) :]
        elif ended or not OPENING.startswith(start):
            self._over = True

    def _reasoned(self, ended: bool) -> str:
        """Returns reasoning, without an end that may become the closing, or stand before it."""
        found = self._waiting.find(CLOSING)
        self.characters = self._read
        if found >= 0:
            shown, self._waiting = (
                self._waiting[:found].rstrip(),
                self._waiting[found + len(CLOSING) :],
            )
            self.characters -= len(self._waiting)
            self._inside, self._over = False, True
        else:
            partial = (
                0
                if ended
                else max(k for k in range(len(CLOSING)) if self._waiting.endswith(CLOSING[:k]))
            )
            shown = self._waiting[: len(self._waiting) - partial].rstrip()
            self._waiting = "" if ended else self._waiting[len(shown) :]
        shown = shown if self._begun else shown.lstrip()
        self._begun = self._begun or bool(shown) or self._over
        return shown


def _escaped(text: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _up_to(word: str) -> str:
    """Returns a regular expression of texts that end with a word and hold it nowhere else.

    The word's first character is nowhere else in it. Behind the first character, `again` leads to
    it once more, and `away` leads to the state where nothing of the word has been read.
    """
    first, *rest = map(_escaped, word)
    again, away = first, f"[^{first}{rest[-1]}]"
    for character in reversed(rest[:-1]):
        again, away = (
            f"(?:{first}|{character}{again})",
            f"(?:[^{first}{character}]|{character}{away})",
        )
    begin = f"{first}{again}*"
    return f"(?:[^{first}]|{begin}{away})*{begin}{''.join(rest)}"
