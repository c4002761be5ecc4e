"""The paths of the API, and the type of a JSON object."""

from __future__ import annotations

from typing import Any

COMPLETIONS, CHAT, RESPONSES, INFILL = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/infill",
)
Json = dict[str, Any]
