"""Prompts of both APIs as token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from shoal.constraints.dressing import Dressing
from shoal.constraints.fim import (
    MiddlePrompt,
    fill_in_middle,
    middle_prompt,
    middle_tokens,
    nearest,
    repository,
)
from shoal.constraints.members import SERVERS
from shoal.constraints.syntax import Syntax, language_of, syntax_by_name
from shoal.engine.detokenizer import special_tokens, whole_characters
from shoal.errors import RequestError
from shoal.serve.api_errors import ApiError, naming
from shoal.serve.message_models import InfillRequest, Message
from shoal.serve.request_models import BaseRequest
from shoal.types.arguments import MARK, as_plain_within, chat_template_of, encoded, encoded_plain
from shoal.types.requests import Request

Prompt = str | Sequence[int]
TAKEN = frozenset({"messages", "conversation", "chat_template", "tokenize"})
"""The variables that no request may give to a chat template: they are the prompt itself."""
RESERVED = 8
"""The number of tokens of the context that are kept for alignment, which adds tokens."""


class PromptEncoder:
    """An encoder of prompts; several threads may use it.

    Args:
        tokenizer: the target's.
        vocab_size: the size of the target's vocabulary.
        chat_template: replaces the tokenizer's.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, chat_template: str | None) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._given_template = chat_template

    @property
    def fills_in(self) -> bool:
        """True if the model is trained to fill in."""
        return middle_tokens(self._tokenizer) is not None

    def encode(self, prompt: Prompt, suffix: str | None) -> tuple[int, ...]:
        """Returns the ids of a text, or checked ids; with a suffix, of a fill-in-the-middle prompt.

        Raises:
            ApiError: an id is not in the vocabulary, or a suffix does not go with the prompt or the
                model.
        """
        if suffix is not None:
            if not isinstance(prompt, str):
                raise ApiError(400, "suffix needs a prompt that is a text", param="suffix")
            with naming("suffix"):
                return tuple(fill_in_middle(self._tokenizer, prompt, suffix))
        if isinstance(prompt, str):
            return encoded(self._tokenizer, prompt)
        if max(prompt) >= self._vocab_size:  # the tokenizer could not decode it for `echo`
            message = f"prompt ids must be in 0..{self._vocab_size - 1}, got {max(prompt)}"
            raise ApiError(400, message, param="prompt", code="invalid_value")
        return tuple(prompt)

    def encode_text(self, text: str, special: bool) -> tuple[int, ...]:
        """Returns the ids of a text, with or without the special tokens that the tokenizer adds."""
        if special:
            return encoded(self._tokenizer, text)
        return tuple(encoded_plain(partial(self._tokenizer.encode, add_special_tokens=False), text))

    def decode(self, ids: Sequence[int], field: str) -> str:
        """Returns a field's ids as text, with special tokens; raises ApiError for an unknown id."""
        if ids and max(ids) >= self._vocab_size:
            message = f"{field} must be in 0..{self._vocab_size - 1}, got {max(ids)}"
            raise ApiError(400, message, param=field, code="invalid_value")
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def shown_tokens(self, request: BaseRequest) -> frozenset[int]:
        """Returns the special tokens that the request's texts show.

        Raises:
            ApiError: the tokenizer cannot write them as the request wants.
        """
        if request.skip_special_tokens is not False:
            return frozenset()
        special = special_tokens(self._tokenizer)
        if request.spaces_between_special_tokens is False and special:
            token, name = next(iter(special.items()))
            if (
                self._tokenizer.decode([token, token], clean_up_tokenization_spaces=False)
                != 2 * name
            ):
                message = "this model's tokenizer writes spaces between special tokens"
                raise ApiError(
                    400, message, param="spaces_between_special_tokens", code="invalid_value"
                )
        return frozenset(special)

    def tokens_within(self, text: str) -> frozenset[int]:
        """Returns the special tokens whose names stand in a text."""
        return frozenset(
            token for token, name in special_tokens(self._tokenizer).items() if name in text
        )

    @property
    def special(self) -> dict[str, int]:
        """The numbers of the special tokens by name."""
        return {name: token for token, name in special_tokens(self._tokenizer).items()}

    def names(self, ids: Sequence[int]) -> list[str]:
        """Returns the tokens as the vocabulary writes them."""
        return [str(name) for name in self._tokenizer.convert_ids_to_tokens(list(ids))]

    def dressed(
        self,
        request: Request,
        asked: BaseRequest | InfillRequest,
        prompt: Prompt = "",
        suffix: str | None = None,
        end: int | None = None,
    ) -> Request:
        """Returns the request aligned, checked and weighted as its body asks.

        Args:
            request: a request of the engine.
            asked: the body.
            prompt: the text, or ids, before the new text.
            suffix: the text behind it; None = none.
            end: the place in the ids of the prompt behind which the new text stands; None = not
                known.

        Raises:
            ApiError: settings that do not go together, or a prompt that is no text.
        """
        if end is None and suffix is not None and isinstance(prompt, str):
            end = middle_prompt(self._tokenizer, prompt, suffix).end
        syntax = _syntax_of(asked)
        if syntax is not None:
            if not isinstance(prompt, str):
                field = "filename" if syntax.optional else "syntax" if syntax.parses else "members"
                raise ApiError(400, f"{field} needs a prompt that is a text", param=field)
            syntax = replace(syntax, left=prompt, right=suffix or "")
        dressing = Dressing(
            getattr(asked, "align", None), getattr(asked, "exact", None) or False, syntax
        )
        return dressing.apply(request, self._tokenizer, suffix, end, naming)

    def middle(self, request: InfillRequest, space: int) -> tuple[MiddlePrompt, bool]:
        """Returns the prompt of a text between two others, and True if text was left out.

        The prompt has at most `space` tokens. The text next to the cursor goes first, then the last
        of the other files.

        Raises:
            ApiError: the model cannot fill in.
        """
        space -= RESERVED
        prefix, suffix = request.before_cursor, request.input_suffix
        with naming("input_suffix"):
            left, right = nearest(self._tokenizer, prefix, suffix, max(space, 1))
            prompt = middle_prompt(self._tokenizer, left, right)
            excerpts = [(one.filename or "", one.text) for one in request.input_extra or ()]
            match = (
                middle_prompt(
                    self._tokenizer, left, right, repository(self._tokenizer, excerpts[i:])
                )
                for i in range(len(excerpts))
            )
            prompt = next((one for one in match if len(one.ids) <= space), prompt)
        return prompt, (left, right) != (prefix, suffix)

    def text(self, prompt: Prompt, goes_on: bool) -> str:
        """Returns the prompt's text, for `echo`.

        Args:
            prompt: the text or ids.
            goes_on: True if new text follows, which has the character that the prompt cuts.
        """
        if isinstance(prompt, str):
            return prompt
        ids = whole_characters(self._tokenizer, prompt) if goes_on else prompt
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def template(self, *, tools: bool) -> str | None:
        """Returns the template of chats with or without tools; see `chat_template_of`."""
        return self._given_template or chat_template_of(self._tokenizer, tools=tools)

    def write(
        self, messages: Sequence[Message], variables: dict[str, Any], special: bool = False
    ) -> str:
        """Returns a conversation as the chat template writes it, for `encode_text`.

        Args:
            messages: the conversation.
            variables: further variables of the template.
            special: True if the texts of users and tools may spell special tokens.

        Raises:
            RequestError: there is no template.
            ApiError: the template raised an error.
        """
        require_free(variables)
        template = self.template(tools=bool(variables.get("tools")))
        if template is None:
            raise RequestError(
                "this model has no chat template: use /v1/completions, or start the server with "
                "--chat-template NAME or FILE"
            )
        plain = [message.plain() for message in messages]
        if "developer" not in template:  # which would leave them out, or refuse them
            plain = _without_developers(plain)
        if not special:
            plain = [self._as_text(message) for message in plain]
            shown = {name: variables.get(name) for name in ("tools", "documents")}
            variables = {**variables, **self.spelled(shown)}
        try:
            text = self._tokenizer.apply_chat_template(
                plain,
                chat_template=template,
                tokenize=False,
                **{"add_generation_prompt": True, **variables},
            )
            str(text).encode()  # the template may have written half a character
            return str(text).replace(json.dumps(MARK)[1:-1], MARK)
        except Exception as error:  # a template is a program that may raise anything
            raise ApiError(
                400, f"the chat template refused the messages: {error}", param="messages"
            ) from error

    def _as_text(self, message: dict[str, Any]) -> dict[str, Any]:
        """Returns a message whose calls, and all that users and tools give, are texts."""
        given = ("content", "name", "tool_call_id") if message["role"] in ("user", "tool") else ()
        fields = (*given, "tool_calls")
        return message | {name: self.spelled(message[name]) for name in fields if name in message}

    def spelled(self, value: Any) -> Any:
        """Returns a JSON value whose texts spell no special tokens."""
        return as_plain_within(self._tokenizer, value)


def require_free(variables: Mapping[str, Any]) -> None:
    """Raises ApiError if a chat template's variables have one that the request says itself."""
    if taken := TAKEN.intersection(variables):
        message = f"chat_template_kwargs cannot have {min(taken)!r}, which the request says itself"
        raise ApiError(400, message, param="chat_template_kwargs", code="invalid_value")


def _without_developers(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages in which developers speak as the system.

    They go on with the system's first message where they follow it: many templates take one.
    """
    merged = list[dict[str, Any]]()
    for message in messages:
        developer = message["role"] == "developer"
        if developer and len(merged) == 1 and merged[0]["role"] == "system":
            merged[0]["content"] += f"\n\n{message['content']}"
        else:
            merged.append({**message, "role": "system"} if developer else message)
    return merged


def _syntax_of(request: BaseRequest | InfillRequest) -> Syntax | None:
    """Returns the syntax that a body asks for by its name, or by that of a file."""
    language, members = getattr(request, "syntax", None), getattr(request, "members", None) is True
    named = getattr(request, "filename", None)
    if members and (language or (named and language_of(named))) in SERVERS:
        message = (
            "members over HTTP are those of Python: a language server would read the files of this "
            "machine that a text names"
        )
        raise ApiError(400, message, param="members")
    if language is not None:
        return Syntax(language, members=members)
    weighed = getattr(request, "exact", None)
    return syntax_by_name(None if weighed else named, members=members)
