"""Requests of /infill as requests of the engine."""

from __future__ import annotations

from dataclasses import replace

from shoal.serve.bodies import validated
from shoal.serve.infill_models import InfillRequest
from shoal.serve.parsed_request import ParsedRequest
from shoal.serve.request_builder import RequestBuilder
from shoal.serve.request_models import CompletionRequest


def parsed_infill(builder: RequestBuilder, request: InfillRequest) -> tuple[ParsedRequest, bool]:
    """The request, and whether text was left out that the context does not hold.

    Raises:
        ApiError, RequestError: what cannot be served.
    """
    builder.require_members(request)
    wanted = request.n_predict if request.n_predict is not None and request.n_predict >= 0 else builder.settings.max_tokens
    max_tokens = min(wanted, builder.settings.max_tokens, builder.context // 2)
    prompt, truncated = builder.encoder.middle(request, builder.context - max_tokens)
    fields = {"prompt": "", "max_tokens": max_tokens, **request.completion()}
    headers = {"x-shoal-clamped": f"n_predict={max_tokens}"} if max_tokens < wanted and request.n_predict is not None else {}
    if ignored := ", ".join(request.ignored):
        headers["x-shoal-ignored"] = ignored
    top_logprobs = min(request.n_probs, builder.settings.max_logprobs) if request.n_probs else None
    completion = validated(CompletionRequest, fields)
    parsed = builder.build(
        completion, [prompt.ids], max_tokens, 1, 1, top_logprobs, () if max_tokens == 0 else None, headers
    )
    before, behind = request.before_cursor, request.input_suffix
    requests = [builder.encoder.dressed(one, request, before, behind, prompt.end) for one in parsed.requests]
    return replace(parsed, requests=requests), truncated
