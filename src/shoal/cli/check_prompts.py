"""The prompts of `shoal check`, and its results: a status, a figure and advice for each check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shoal.types.arguments import chat_template_of, encoded

CheckStatus = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
        name: the name of the check.
        figure: the measured or observed figure.
        advice: the action to take; "" if there is none.
        data: the figures, for JSON.
        on: the prompts that they were measured on; "" if prompts do not matter.
    """

    name: str
    status: CheckStatus
    figure: str
    advice: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    on: str = ""

    @property
    def whole(self) -> str:
        """The figure and the prompts it was measured on."""
        return f"{self.figure}; on {self.on}" if self.on else self.figure

    def to_dict(self) -> dict[str, Any]:
        """Returns an object for JSON."""
        return {
            "name": self.name,
            "verdict": self.status,
            "figure": self.whole,
            "advice": self.advice,
            "data": self.data,
        }


def overall(results: list[CheckResult]) -> CheckStatus:
    """Returns the worst status."""
    statuses = {result.status for result in results}
    return "fail" if "fail" in statuses else "warn" if "warn" in statuses else "ok"


MOST = 8  # prompts of a set that are measured
FIRST_WORDS = 6
CODE, PROSE, CHAT = "Python code", "prose", "chat"
BUILT_IN = {
    CODE: (
        'def is_palindrome(text):\n    """Return True if text reads the same backwards."""\n',
        "class Stack:\n    def __init__(self):\n",
    ),
    PROSE: (
        "The old lighthouse had been dark for eleven years when, one evening in March, a light",
        "Bread is made of flour, water, salt and yeast. To bake a loaf at home, first",
    ),
    CHAT: (
        "Explain in a few sentences why the sky is blue.",
        "I have two days in Lisbon. What should I see?",
    ),
}
ADVICE = (
    "measure on your own prompts: --prompts FILE, JSON Lines of texts or of objects with "
    '"prompt", or --prompt TEXT'
)


@dataclass(frozen=True)
class PromptSet:
    """A set of prompts of one kind.

    Attributes:
        kind: the name of the kind; "" for the user's own.
        source: the place that they come from.
        given: the number of prompts, of which at most `MOST`, evenly spaced, are measured.
        texts: the measured prompts as texts.
        ids: the measured prompts as token ids.
    """

    kind: str
    source: str
    given: int
    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(kind: str, source: str, texts: Sequence[str], tokenizer: Any) -> PromptSet:
        """Encodes a part of the texts, as `Shoal.generate` does.

        Chat is encoded by the tokenizer's template if it has one.
        """
        count = min(MOST, len(texts))
        chosen = tuple(texts[i * len(texts) // count] for i in range(count))
        encode = _encode_chat if kind == CHAT else _encode
        return PromptSet(
            kind, source, len(texts), chosen, tuple(encode(tokenizer, text) for text in chosen)
        )

    @property
    def longest(self) -> int:
        """The number of tokens of the longest prompt."""
        return max(map(len, self.ids))

    @property
    def first_words(self) -> str:
        """The first words of the first prompt."""
        words = self.texts[0].split()
        return " ".join(words[:FIRST_WORDS]) + (" ..." if len(words) > FIRST_WORDS else "")

    @property
    def count(self) -> str:
        """The number of measured prompts, with the number of given ones if it differs."""
        if self.given == len(self.ids):
            return str(len(self.ids))
        return f"{len(self.ids)} of {self.given}"

    def within(self, tokens: int) -> PromptSet | None:
        """Returns the prompts of at most that many tokens; None if there are none."""
        kept = [
            (text, ids)
            for text, ids in zip(self.texts, self.ids, strict=True)
            if len(ids) <= tokens
        ]
        return (
            replace(self, texts=tuple(text for text, _ in kept), ids=tuple(ids for _, ids in kept))
            if kept
            else None
        )

    def first(self, count: int = 1) -> PromptSet:
        """Returns the set with its first prompts only."""
        return replace(self, texts=self.texts[:count], ids=self.ids[:count])

    def __str__(self) -> str:
        of = f" of {self.kind}" if self.kind else ""
        return (
            f"{self.count} prompt{'s' if self.given > 1 else ''}{of}, {self.source} "
            f'("{self.first_words}")'
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns an object for JSON."""
        return {
            "kind": self.kind or "own",
            "source": self.source,
            "given": self.given,
            "measured": len(self.ids),
            "first_words": self.first_words,
        }


def _encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    return encoded(tokenizer, text)


def _encode_chat(tokenizer: Any, text: str) -> tuple[int, ...]:
    template = chat_template_of(tokenizer)
    if template is None:
        return _encode(tokenizer, f"User: {text}\nAssistant:")
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(
        messages, chat_template=template, add_generation_prompt=True, tokenize=False
    )
    return tuple(tokenizer.encode(rendered, add_special_tokens=False))


def built_in(kinds: Sequence[str], tokenizer: Any) -> tuple[PromptSet, ...]:
    """Returns a set of each kind."""
    return tuple(PromptSet.of(kind, "built in", BUILT_IN[kind], tokenizer) for kind in kinds)


def named(name: str, one: PromptSet) -> str:
    """Returns the name of a check on one kind of prompts."""
    return f"{name}, {one.kind.split()[-1]}" if one.kind else name


def measured_on(result: CheckResult, *sets: PromptSet) -> CheckResult:
    """Returns the result with the prompts on which it was measured."""
    said = (
        str(sets[0])
        if len(sets) == 1
        else f"prompts of {', '.join(f'{one.kind} ({one.count})' for one in sets)}"
    )
    data = result.data | {"prompts": [one.to_dict() for one in sets]}
    return replace(result, on=said, data=data)


def check_prompts(sets: Sequence[PromptSet], bundled: bool) -> CheckResult:
    """Tells which prompts are measured.

    Built-in prompts predict little for other texts, so they give a warning, except with the bundled
    pair.
    """
    figure, data = "; ".join(map(str, sets)), {"sets": [one.to_dict() for one in sets]}
    if not any(one.kind for one in sets):
        return CheckResult("prompts", "ok", figure, data=data)
    if bundled:
        figure += (
            "; the bundled pair was trained on Python code, and no figure below holds for "
            "other texts"
        )
        return CheckResult("prompts", "ok", figure, ADVICE, data)
    figure += (
        "; acceptance and speed-up depend on the text, so the figures below may not hold for yours"
    )
    return CheckResult("prompts", "warn", figure, ADVICE, data)
