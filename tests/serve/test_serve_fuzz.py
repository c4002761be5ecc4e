"""Whatever fits the server's own description of itself, or just does not, is answered as described, and never with a crash.

Tests of: serve.app, serve.request_models, serve.item_models, serve.message_models; the description at /openapi.json.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import positive_data_acceptance

from serving import Served, pair, served
from shoal.constraints import fim
from shoal.serve.item_models import ResponsesRequest
from shoal.serve.message_models import InfillRequest
from shoal.serve.request_models import ChatRequest, CompletionRequest

CASES = [
    ("/v1/completions", "POST", 40), ("/v1/chat/completions", "POST", 20), ("/v1/responses", "POST", 15), ("/infill", "POST", 15),
    ("/tokenize", "POST", 15), ("/detokenize", "POST", 15),
    ("/tokenizer_info", "GET", 1), ("/v1/models", "GET", 5), ("/v1/models/{name}", "GET", 10),
    ("/health", "GET", 1), ("/ready", "GET", 1), ("/metrics", "GET", 1),
]  # fmt: skip
KEY = "sesame"
MODELS = (CompletionRequest, ChatRequest, ResponsesRequest, InfillRequest)
FIELDS = sorted({name for model in MODELS for name in model.model_fields})
NEEDED = {"prompt", "tokens", "messages", "input", "input_prefix", "input_suffix"}
load_all_checks()
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    template = "{{ messages[0].content }}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fim, "TOKENS", (("Q", "W", "Z"),))  # makes tokens of the tiny tokenizer those for filling in
        with served(pair(), max_n=3, max_tokens=8, timeout=1.0, chat_template=template, keys=(KEY,)) as running:
            yield running


@pytest.fixture(scope="module")
def description(server: Served) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_every_operation_is_tried(description: Any) -> None:
    found = [operation.ok() for operation in description.get_all_operations()]
    assert {(operation.path, operation.method.upper()) for operation in found} == {
        (path, method) for path, method, _ in CASES
    }


def fuzzed(description: Any, path: str, method: str, examples: int, mode: GenerationMode) -> set[int]:
    """Tries that many requests; returns the statuses of the answers, each of which was as described."""
    statuses: set[int] = set()

    # All fields at once nearly always hold one that is too much for this server: every other request has but few of them.
    @given(
        description[path][method].as_strategy(generation_mode=mode), st.none() | st.sets(st.sampled_from(FIELDS), max_size=3)
    )
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    def answered(case: schemathesis.Case, kept: set[str] | None) -> None:
        if mode == GenerationMode.POSITIVE and isinstance(case.body, dict) and kept is not None:
            case.body = {name: value for name, value in case.body.items() if name in kept | NEEDED}
            if path == "/tokenize":
                case.body = {"prompt": "x"}  # one of two fields that need not be there
            elif isinstance(said := case.body.get("messages"), list):  # calls hold JSON as texts, and a prompt is not empty
                case.body["messages"] = [{"role": one["role"], "content": one.get("content") or "x"} for one in said]
        headers = {"authorization": f"Bearer {KEY}"}
        response = case.call(headers=headers)
        statuses.add(response.status_code)
        if response.status_code == 503 and response.json()["error"]["code"] == "grammar_timeout":
            return  # a request may allow itself no time at all
        # What fits may still be more than the server takes: an empty prompt, too many samples, a grammar that is none.
        case.validate_response(response, excluded_checks=[positive_data_acceptance], headers=headers)

    answered()
    return statuses


@pytest.mark.parametrize(("path", "method", "examples"), CASES)
def test_what_fits_the_description(description: Any, server: Served, path: str, method: str, examples: int) -> None:
    statuses = fuzzed(description, path, method, examples, GenerationMode.POSITIVE)
    assert (200 in statuses) or path in ("/v1/models/{name}", "/detokenize")  # names and ids are hard to guess
    assert server.worker.thread.alive


@pytest.mark.parametrize(("path", "method", "examples"), CASES[:6])
def test_what_does_not(description: Any, server: Served, path: str, method: str, examples: int) -> None:
    assert 400 in fuzzed(description, path, method, examples, GenerationMode.NEGATIVE)
    assert server.worker.thread.alive
