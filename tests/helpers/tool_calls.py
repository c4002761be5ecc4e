"""Requests with tools, and answers that call them."""

from __future__ import annotations

from typing import Any

import torch

from shoal.testing import tiny_tokenizer
from shoal.testing.scripted import History, one_hot

TOKENIZER = tiny_tokenizer()
BODY = """{% for t in tools or [] %}({{ t.function.name }}){% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}\
{% for c in m.tool_calls or [] %}{{ c.function.name }}:{{ c.function.arguments.city }}{% endfor %}{% endfor %}<assistant>"""


def tool(name: str, **properties: Any) -> Any:
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


WEATHER, TIME = tool("weather", city={"enum": ["Rome", "Oslo", "Lima"]}), tool("time", zone={"type": "integer"})


def speaks(text: str, begin: str = "<assistant>", tokenizer: Any = TOKENIZER, ends: bool = True) -> History:
    """Says the text behind a beginning, and then the end, or its last token again and again."""
    mark, said = tuple(tokenizer.encode(begin)), [*tokenizer.encode(text), *[tokenizer.eos_token_id] * ends]

    def script(ids: tuple[int, ...]) -> torch.Tensor:
        at = max(i for i in range(len(ids) - len(mark) + 1) if ids[i : i + len(mark)] == mark) + len(mark)
        return one_hot(said[min(len(ids) - at, len(said) - 1)], len(tokenizer))

    return script
