"""Reasoning in the texts of chat models: the text between two marks before the answer, as
templates write it.

The marks are `<think>` and `</think>` of most models, the channels of gpt-oss (harmony), and those
of Gemma 4, Mistral, Muse, Seed-OSS, Cohere, Solar, Apertus, Kimi and
EXAONE.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import NamedTuple

from shoal.config import Grammar
from shoal.types.requests import Closing


class Marks(NamedTuple):
    """The marks around the reasoning of a family of models.

    Attributes:
        opening: the text before it.
        closing: the text behind it, before the answer.
        answer: the text before an answer without reasoning; empty if there is none.
    """

    opening: str
    closing: str
    answer: str = ""


THINK = Marks("<think>", "</think>")
FINAL = "<|channel|>final<|message|>"
MARKS = (
    Marks("<|channel|>analysis<|message|>", f"<|end|><|start|>assistant{FINAL}", FINAL),
    Marks(
        "to=self<|message|>", "<|eom|><|start|>assistant to=user<|message|>", "to=user<|message|>"
    ),
    Marks("[THINK]", "[/THINK]"),
    Marks("<|channel>thought", "<channel|>"),
    Marks("<seed:think>", "</seed:think>"),
    Marks("<|START_THINKING|>", "<|END_THINKING|>"),
    Marks("<|think:start|>", "<|think:end|>"),
    Marks("<|inner_prefix|>", "<|inner_suffix|>"),
    Marks("◁think▷", "◁/think▷"),
    Marks("<thought>", "</thought>"),
    Marks("<longcat_think>", "</longcat_think>"),
    THINK,
)
"""The marks of all families; the first whose opening or closing stands in a template decides."""
_TURN = r"<\|end\|><\|start\|>assistant<\|channel\|>"
_FORM = r"[^<\n]*(?:<\|constrain\|>[^<\n]*)?<\|message\|>"
ANSWER_CHANNEL = re.compile(rf"{_TURN}final{_FORM}")
NEXT_CHANNEL = re.compile(rf"{_TURN}(final|analysis){_FORM}")
"""The beginning of gpt-oss' next message: its answer, of which it may name a form, or a thought."""
BEGUN_CHANNEL = re.compile(rf"{_TURN}(?:[a-z]{{0,8}}|(?:final|analysis)[^\n]{{0,80}})\Z")
"""A part of such a beginning at the end of a text that may go on."""
CUT_CHANNEL = re.compile(r"<\|end\|>(?:<\|start\|>(?:[a-z]*(?:<\|channel\|>[^\n]*)?)?)?\Z")
"""A part of such a beginning at the end of a text that is over."""
LINE_FEEDS = "\\n{0,2}"
"""A regular expression of the blanks between the reasoning and a text under a grammar."""


@dataclass(frozen=True)
class ReasoningRules:
    """The place where the samples of one request may reason.

    Attributes:
        opened: True if the opening stands in the prompt, so samples begin inside of it. Otherwise
            they reason if they begin with it.
        marks: the marks around the reasoning.
    """

    opened: bool
    marks: Marks = THINK

    @property
    def unstopped(self) -> tuple[tuple[str, Closing], ...]:
        """The reasoning, and the mark of an answer without it, as `Request.unstopped` has them."""
        opening, closing, answer = self.marks
        behind_thoughts: Closing = ANSWER_CHANNEL if answer == FINAL else closing
        if self.opened:
            return ((r"\A", behind_thoughts),)
        direct: Closing = None
        marks = ((opening, behind_thoughts), *(((answer, direct),) if answer else ()))
        return tuple((rf"\A\s*{re.escape(mark)}", behind) for mark, behind in marks)

    def allowed_before(
        self, grammar: Grammar, opening: str = "", *, special: bool = False
    ) -> Grammar:
        """Returns the grammar of a sample whose answer alone is of a grammar.

        Args:
            grammar: the grammar of the answer.
            opening: stands before the answer, literally.
            special: True if there are special tokens in the marks.
        """
        grammar, (begin, end, answer) = opened(grammar, opening), self.marks
        if special:
            return replace(grammar, thought=("" if self.opened else begin, end, answer))
        inside = _up_to(end) + LINE_FEEDS
        before = inside if self.opened else f"(?:{_escaped(begin)}{inside})?"
        if grammar.kind == "regex":
            return replace(grammar, text=f"{before}(?:{grammar.text})")
        return replace(grammar, before=before)


def opened(grammar: Grammar, opening: str) -> Grammar:
    """Returns the grammar with an opening before its texts, and before the alternatives' texts."""
    instead = opened(grammar.instead, opening) if grammar.instead else None
    return replace(grammar, opening=opening + grammar.opening, instead=instead)


def marks_of(template: str | None) -> Marks | None:
    """Returns the marks that stand in a chat template; None if its models do not reason."""
    text = template or ""
    marks = next((one for one in MARKS if one.closing in text or one.opening in text), None)
    # The channels of gpt-oss are put together from parts, and only the first one is sure.
    return None if marks is THINK and THINK.closing not in text else marks


def begun_thought(template: str | None, text: str) -> str | None:
    """Returns the thought that a message to go on with begins; None if it is not inside of one."""
    marks = marks_of(template)
    if marks is None or marks.closing in text or not text.lstrip().startswith(marks.opening):
        return None
    return text.lstrip()[len(marks.opening) :]


def rules_of(template: str | None, prompt: str, begun: str = "") -> ReasoningRules | None:
    """Returns the rules for reasoning behind a prompt that a chat template wrote.

    None if the template's models do not reason, or have reasoned already.

    Args:
        template: the chat template.
        prompt: its text.
        begun: the text of the message that the samples go on with; empty if there is none.
    """
    written, marks = prompt.rstrip(), marks_of(template)
    if marks is None:
        return None
    if written.endswith((marks.closing, marks.answer or marks.closing)) or marks.closing in begun:
        return None
    inside = marks.opening in begun or written.endswith(marks.opening)
    return None if begun and not inside else ReasoningRules(inside, marks)


class ReasoningReader:
    """A reader that takes one sample's text piece by piece, and separates reasoning from the rest.

    Blanks around the reasoning, and before the text that follows, belong to neither.

    Attributes:
        characters: the number of characters of the reasoning, the words around it included; the
            number so far while it goes on.
    """

    def __init__(self, rules: ReasoningRules) -> None:
        self._marks = rules.marks
        self._inside, self._over, self._begun = rules.opened, False, False
        self._waiting, self._read = "", 0
        self.characters = 0

    def feed(self, text: str, ended: bool) -> tuple[str, str]:
        """Returns the reasoning and the other text that a piece adds; `ended`: the last piece."""
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
        start, (opening, _, answer) = self._waiting.lstrip(), self._marks
        if start.startswith(opening):
            self._inside, self._waiting = True, start[len(opening) :]
        elif answer and start.startswith(answer):
            self._over, self._waiting = True, start[len(answer) :]
        elif ended or not (opening.startswith(start) or answer.startswith(start)):
            self._over = True

    def _reasoned(self, ended: bool) -> str:
        """Returns reasoning; blanks and a possible beginning of the closing wait."""
        closing, begun = self._marks.closing, None
        if self._marks.answer == FINAL:
            self._waiting = NEXT_CHANNEL.sub(
                lambda one: "\n" if one[1] == "analysis" else closing, self._waiting
            )
            begun = (CUT_CHANNEL if ended else BEGUN_CHANNEL).search(self._waiting)
        place = self._waiting.find(closing)
        self.characters = self._read
        if place >= 0:
            shown = self._waiting[:place].rstrip()
            self._waiting = self._waiting[place + len(closing) :]
            self.characters -= len(self._waiting)
            self._inside, self._over = False, True
        else:
            partial = len(self._waiting) - begun.start() if begun else 0
            if not (ended or partial):
                partial = max(k for k in range(len(closing)) if self._waiting.endswith(closing[:k]))
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
        again = f"(?:{first}|{character}{again})"
        away = f"(?:[^{first}{character}]|{character}{away})"
    begin = f"{first}{again}*"
    return f"(?:[^{first}]|{begin}{away})*{begin}{''.join(rest)}"
