"""A chat with a model: its messages are asked, and its answers become part of the conversation.

The options that a chat passes to `Shoal.stream` beside its messages are changed by /set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.cli.chat_views import ChatView, MessageAnswers
from shoal.cli.conversation import Candidate, ChatWriter, Conversation
from shoal.cli.options import parse_lookahead
from shoal.cli.printed_samples import follow
from shoal.cli.prompt_lines import OPTIONS, with_ends
from shoal.cli.views import decoder
from shoal.errors import RequestError
from shoal.types.arguments import split_options
from shoal.values import require_samples, require_text

if TYPE_CHECKING:
    from shoal.api import Shoal
    from shoal.cli.chat_views import Split
    from shoal.serve.reasoning import ReasoningRules
    from shoal.types.samples import Result, Sample
    from shoal.types.stats import Stats


SHORT = {"max_tokens": "max_new_tokens"}
"""The other names of options."""
NAMES = ("n", *(name for name in OPTIONS if name != "logit_bias"), "lookahead", "rule")
"""The names of the options that /set changes."""


class ChatSettings:
    """The candidates per message, and the options of `Shoal.stream`.

    Args:
        options: the options of the command line.
        ends: stop strings beside these, see `with_ends`.

    Raises:
        RequestError: an option is out of range.
    """

    def __init__(self, n: int, options: Mapping[str, Any], ends: Sequence[str] = ()) -> None:
        self.values: dict[str, Any] = {"n": n, **options}
        self._ends, self._first = tuple(ends), dict(self.values)
        split_options(options)

    @property
    def n(self) -> int:
        """The number of candidates of a message."""
        return int(self.values["n"])

    def stream_options(self, attempt: int) -> dict[str, Any]:
        """Returns the options of `Shoal.stream`.

        With a seed, each later attempt at a message has the next seed, so that it differs.
        """
        options = with_ends(
            {name: value for name, value in self.values.items() if name != "n"}, self._ends
        )
        if options.get("seed") is not None:
            options["seed"] += attempt
        return options

    def adopt(self, own: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """Takes a model's own values of the options that the command line does not give."""
        settings = {name: value for name, value in own.items() if name not in given}
        self.values, self._first = self.values | settings, self._first | settings

    def set(self, name: str, text: str) -> str:
        """Changes an option, and returns its name.

        The text is a value as JSON writes it, a text, or "default" for the command line's value.

        Raises:
            RequestError: the name is unknown, or the value out of range.
        """
        name = SHORT.get(name.replace("-", "_"), name.replace("-", "_"))
        if name not in NAMES:
            raise RequestError(f"there is no option {name!r}; there are {', '.join(NAMES)}")
        values = {**self.values}
        if text == "default":
            values.pop(name, None)
            values |= {name: self._first[name]} if name in self._first else {}
        else:
            values[name] = parse_lookahead(text) if name == "lookahead" else _value(text)
        require_samples(values["n"])
        split_options(
            {name: value for name, value in values.items() if name not in ("n", "bad_words")}
        )
        self.values = values
        return name


def _value(text: str) -> Any:
    """Reads the value of an option: a number, a list or a text."""
    if text == "none":
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


class ChatSession:
    """A conversation, and the model that it is with.

    Args:
        view: shows answers.

    Attributes:
        stats: the sum over all answers, those that were taken back included; None before the first.
        messages: times that the model was asked.
        interrupted: Ctrl-C ended the last answer.
    """

    def __init__(
        self,
        model: Shoal,
        writer: ChatWriter,
        conversation: Conversation,
        settings: ChatSettings,
        view: ChatView,
    ) -> None:
        self.conversation, self.settings = conversation, settings
        self.stats: Stats | None = None
        self.messages, self.interrupted = 0, False
        self._model, self._writer, self._view = model, writer, view

    def say(self, text: str) -> None:
        """Answers a message; one that gets no answer is no part of the conversation.

        Raises:
            RequestError, KeyboardInterrupt: see `answer`.
        """
        require_text(text, "the message")
        self.conversation.say(text)
        try:
            self.answer()
        finally:
            if not self.conversation.last.answers:
                self.conversation.undo()

    def answer(self) -> None:
        """Asks for answers to the last message, and takes the first of them.

        They join the answers that the message has.

        Raises:
            RequestError: there is no message, the template refuses the conversation, or it is
                longer than the model's context; or all answers failed.
            KeyboardInterrupt: Ctrl-C was pressed before any text came, or twice; nothing is kept.
        """
        turn = self.conversation.last
        written = self._writer.text(self.conversation.messages())
        rules, ids = _reasoning(self._writer.template, written), self._writer.ids(written)
        self._require_context(ids)
        result = self._run(ids, rules, turn.attempts)
        turn.attempts += 1
        answers = [
            (sample, _answer(sample, rules))
            for sample in result[0].samples
            if self._is_answer(sample)
        ]
        if not answers and self.interrupted:
            raise KeyboardInterrupt
        if not answers:
            raise RequestError(f"there is no answer: {result[0].samples[0].error}")
        answered = MessageAnswers(
            turn.text, len(turn.answers) + 1, answers, result, self.interrupted
        )
        turn.chosen = len(turn.answers)
        turn.answers += [answer for _, answer in answers]
        self._view.answered(answered)

    def _run(self, ids: Sequence[int], rules: ReasoningRules | None, attempt: int) -> Result:
        n, model = self.settings.n, self._model
        shown = _ends_of_reasoning(model, rules) if rules is not None else ()
        stream = model.stream(
            [list(ids)], n, shown_tokens=shown, **self.settings.stream_options(attempt)
        )
        try:
            with self._view.growing(n, decoder(model.tokenizer), _split(rules)) as growing:
                result, self.interrupted = follow(stream, growing.add)
        except KeyboardInterrupt:  # inside a round, which may have kept a prompt in part
            if model.prefixes is not None:
                model.prefixes.clear()
            raise
        self.messages += 1
        self.stats = result.stats if self.stats is None else self.stats + result.stats
        return result

    def _require_context(self, ids: Sequence[int]) -> None:
        most = self._model.target.context
        if len(ids) >= most:
            raise RequestError(
                f"the conversation has {len(ids)} tokens, and this model holds {most}, those of an "
                "answer included: /undo takes a message back, /reset begins anew"
            )

    def _is_answer(self, sample: Sample) -> bool:
        """Tells whether a sample is an answer: it did not fail, and has text unless interrupted."""
        return sample.finish_reason != "error" and bool(sample.token_ids or not self.interrupted)


def _answer(sample: Sample, rules: ReasoningRules | None) -> Candidate:
    reasoning, text = _split(rules)(sample.text, True)
    return Candidate(text, reasoning, interrupted=sample.finish_reason == "cancelled")


def _reasoning(template: str | None, written: str) -> ReasoningRules | None:
    from shoal.serve.reasoning import rules_of

    return rules_of(template, written)


def _split(rules: ReasoningRules | None) -> Split:
    from shoal.serve.reasoning import ReasoningReader

    return (lambda text, _ended: ("", text)) if rules is None else ReasoningReader(rules).feed


def _ends_of_reasoning(model: Shoal, rules: ReasoningRules) -> list[int]:
    """Returns the ids of the special tokens that enclose reasoning.

    Texts show these tokens, so that reasoning can be told from an answer.
    """
    from shoal.engine.detokenizer import special_tokens

    around, names = "".join(rules.marks), special_tokens(model.tokenizer)
    return [token for token, name in names.items() if name in around]
