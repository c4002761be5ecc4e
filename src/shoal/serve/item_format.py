"""The items of an answer of /v1/responses, and their events: a message of text, calls of
functions."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

from shoal.serve.api_errors import Json
from shoal.serve.api_formats import ChatFormat
from shoal.serve.tool_calls import Call
from shoal.serve.worker import RowUpdate


class ItemFormat(ChatFormat):
    """The reader of a sample's updates, with the log-probabilities and details of a chat's choice.

    Attributes:
        details: the details so far.
    """

    prompt_field, id_prefix, object_name = "input", "resp_", "response"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.details: Json | None = None

    def pieces(self, update: RowUpdate) -> list[str | Call | Reasoning]:
        """Returns reasoning, texts and calls in their order, and notes the details so far."""
        if self._parsed.details:
            new, before = self._details.of(update), self.details or {}
            joined = {
                name: [*before.get(name, ()), *new[name]]
                for name in ("tokens", "by_round")
                if name in new
            }
            self.details = new | joined
        ended = update.sample is not None
        reasoning, text = self._without_reasoning(update.text, ended)
        self._note_starts(update.tokens)
        thoughts = [Reasoning(reasoning)] if reasoning else []
        if self._calls is not None:
            return [*thoughts, *self._calls.pieces(text, ended)]
        return [*thoughts, *([text] if text or (update.tokens and self._reasoning is None) else [])]

    def logprobs(self, update: RowUpdate) -> list[Json]:
        """Returns the log-probabilities of an update's tokens; empty if they were not asked for."""
        entries = (self._logprobs(self._reported(update)) or {"content": []})["content"]
        return [
            _with_bytes(one) | {"top_logprobs": [*map(_with_bytes, one["top_logprobs"])]}
            for one in entries
        ]


class Reasoning(NamedTuple):
    """A piece of reasoning."""

    text: str


def _with_bytes(entry: Json) -> Json:
    return {**entry, "bytes": entry["bytes"] or []}


class ItemWriter:
    """The writer of one answer's items. A message ends where a call begins.

    Args:
        key: makes the ids of the items.

    Attributes:
        items: the items that have begun; the last one may be open.
    """

    def __init__(self, key: str) -> None:
        self._key, self._sent = key, 0
        self.items: list[Json] = []
        self._is_open = self._reasons = False

    def event(self, kind: str, **fields: Any) -> Json:
        """Returns the next event."""
        number, self._sent = self._sent, self._sent + 1
        return {"type": f"response.{kind}", "sequence_number": number, **fields}

    def add(self, pieces: Sequence[str | Call | Reasoning], logprobs: Sequence[Json]) -> list[Json]:
        """Returns the events of a sample's next pieces; `logprobs` belong to the first text."""
        events = []
        for piece in pieces:
            if isinstance(piece, Call):
                events += [*self._close("completed"), *self._call(piece)]
            elif isinstance(piece, Reasoning):
                events += self._reason(piece.text)
            else:
                events += [*self._end_reasoning(), *self._open(), self._delta(piece, logprobs)]
                logprobs = ()
        return events

    def end(self, status: str) -> list[Json]:
        """Returns the last events. An answer without a call has a message, which may be empty."""
        reasoned = self._close(status) if self._reasons else []
        begun = [] if self.items else self._open()
        return reasoned + begun + self._close(status)

    # ── reasoning ─────────────────────────────────────────────────────────────────────────────────

    def _reason(self, text: str) -> list[Json]:
        events = []
        if not self._is_open:
            self._is_open = self._reasons = True
            self.items.append(
                {
                    "id": self._id("rs"),
                    "type": "reasoning",
                    "summary": [],
                    "status": "in_progress",
                    "content": [],
                }
            )
            events.append(self._about("output_item.added", item=dict(self.items[-1])))
            self.items[-1]["content"] = [{"type": "reasoning_text", "text": ""}]
            events.append(
                self._about_part("content_part.added", part=dict(self.items[-1]["content"][0]))
            )
        self.items[-1]["content"][0]["text"] += text
        return [*events, self._about_part("reasoning_text.delta", delta=text)]

    def _end_reasoning(self) -> list[Json]:
        return self._close("completed") if self._reasons else []

    # ── messages ──────────────────────────────────────────────────────────────────────────────────

    def _open(self) -> list[Json]:
        if self._is_open:
            return []
        self._is_open = True
        self.items.append(
            {
                "id": self._id("msg"),
                "type": "message",
                "role": "assistant",
                "status": "in_progress",
                "content": [],
            }
        )
        added = self._about("output_item.added", item=dict(self.items[-1]))
        self.items[-1]["content"] = [
            {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        ]
        return [added, self._about_part("content_part.added", part=self._part())]

    def _delta(self, text: str, logprobs: Sequence[Json]) -> Json:
        part = self.items[-1]["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        return self._about_part("output_text.delta", delta=text, logprobs=list(logprobs))

    def _close(self, status: str) -> list[Json]:
        if not self._is_open:
            return []
        self._is_open = False
        self.items[-1]["status"] = status
        if self._reasons:
            self._reasons, part = False, dict(self.items[-1]["content"][0])
            return [
                self._about_part("reasoning_text.done", text=part["text"]),
                self._about_part("content_part.done", part=part),
                self._about("output_item.done", item=self.items[-1]),
            ]
        part = self._part()
        return [
            self._about_part("output_text.done", text=part["text"], logprobs=part["logprobs"]),
            self._about_part("content_part.done", part=part),
            self._about("output_item.done", item=self.items[-1]),
        ]

    def _part(self) -> Json:
        part = self.items[-1]["content"][0]
        return {**part, "logprobs": list(part["logprobs"])}

    # ── calls ─────────────────────────────────────────────────────────────────────────────────────

    def _call(self, call: Call) -> list[Json]:
        """Returns the events of a whole call, its id of nine characters as Mistral wants it."""
        item = {
            "id": self._id("fc"),
            "type": "function_call",
            "call_id": secrets.token_hex(5)[:9],
            "name": call.name,
        }
        self.items.append({**item, "arguments": call.arguments, "status": "completed"})
        where = {"item_id": item["id"]}
        return [
            self._about(
                "output_item.added", item={**item, "arguments": "", "status": "in_progress"}
            ),
            self._about("function_call_arguments.delta", **where, delta=call.arguments),
            self._about(
                "function_call_arguments.done", **where, name=call.name, arguments=call.arguments
            ),
            self._about("output_item.done", item=self.items[-1]),
        ]

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._key}{len(self.items)}"

    def _about(self, kind: str, **fields: Any) -> Json:
        """Returns an event of the last item."""
        return self.event(kind, output_index=len(self.items) - 1, **fields)

    def _about_part(self, kind: str, **fields: Any) -> Json:
        """Returns an event of the text of the last item."""
        return self._about(kind, item_id=self.items[-1]["id"], content_index=0, **fields)
