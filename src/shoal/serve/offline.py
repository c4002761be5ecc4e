"""Answers without HTTP: lines of a file take the way of requests, from the fields to the objects that come back."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from shoal.api import Shoal
from shoal.engine import Engine
from shoal.errors import InternalError
from shoal.serve.faults import Fault, fault_of
from shoal.serve.forms import Chat, Completions, Form
from shoal.serve.lines import Json, Line, is_id
from shoal.serve.metrics import Metrics
from shoal.serve.replies import Reply
from shoal.serve.schema import ChatRequest, CompletionRequest
from shoal.serve.settings import Settings
from shoal.serve.translate import Order, Translator, require_model
from shoal.serve.worker import Worker


class Offline:
    """A pair that answers lines as `shoal serve` answers requests.

    Args:
        make_engine: engines of `shoal`, see `Worker`. settings: what a line may ask; `queue` means nothing here.
    """

    def __init__(self, shoal: Shoal, make_engine: Callable[[], Engine], settings: Settings) -> None:
        self.shoal, self.settings = shoal, replace(settings, queue=sys.maxsize)
        self._make_engine = make_engine

    def answer(self, lines: Iterable[Line], done: Callable[[Json], None]) -> None:
        """Answers all lines; so many are open at a time that all slots of a batch are used.

        Args:
            done: called with each answer as it is there: that of the API with the line's id, or {"id", "error"}.

        Raises:
            InternalError: the engine's thread has ended. Exception: what `done` raised.
        """
        asyncio.run(self._answer_all(lines, done))

    async def _answer_all(self, lines: Iterable[Line], done: Callable[[Json], None]) -> None:
        worker = Worker(self._make_engine, self.settings.queue, Metrics())
        engine = worker.engine
        translator = Translator(
            self.shoal.tokenizer, self.shoal.eos, engine.target.vocab_size, engine.context, worker.capacity, self.settings
        )
        waiting = iter(lines)

        async def work() -> None:
            for line in waiting:
                done(await self._answer(line, worker, translator))

        worker.start(asyncio.get_running_loop())
        try:
            await asyncio.gather(*(work() for _ in range(worker.engine.scheduler.capacity)))
        finally:
            worker.stop()

    async def _answer(self, line: Line, worker: Worker, translator: Translator) -> Json:
        try:
            form, order = self._order(line, translator)
            answer = await Reply(worker, self.shoal.tokenizer, self.settings.model, form, order).whole()
        except Exception as error:
            if not worker.alive:
                raise InternalError(f"the engine's thread has ended: {worker.failure!r}") from error
            answer = fault_of(error).body()
        return {**answer, "id": line.id}

    def _order(self, line: Line, translator: Translator) -> tuple[Form, Order]:
        body = _body(line)
        form: Form
        try:
            if "messages" in body:
                conversation = ChatRequest.model_validate(body)
                require_model(conversation.model or self.settings.model, self.settings)
                form, order = Chat(), translator.chat(conversation)
            else:
                text = CompletionRequest.model_validate(body)
                require_model(text.model or self.settings.model, self.settings)
                form, order = Completions(), translator.completion(text)
        except ValidationError as error:
            found = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]  # as FastAPI says it
            raise RequestValidationError(found, body=body) from error
        if order.stream:
            raise Fault(400, "an answer in a file cannot be streamed", param="stream")
        return form, order


def _body(line: Line) -> Json:
    """The API's fields of a line."""
    try:
        body = json.loads(line.text)
    except (ValueError, RecursionError) as error:
        raise Fault(400, f"the line is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise Fault(400, "the line must be a JSON object", code="invalid_json")
    if not is_id(body.pop("id", "")):
        raise Fault(400, "id must be a text or an integer", param="id", code="invalid_value")
    return body
