"""Forty JSON schemas of the kinds that clients send, made for this benchmark: what pydantic and zod write, and what people do."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def record(optional: str = "", closed: bool = True, **properties: Any) -> Json:
    """An object with these properties, all required but those named in `optional`."""
    made = {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional.split()],
    }
    return {**made, "additionalProperties": False} if closed else made


def array(items: Any, **bounds: Any) -> Json:
    return {"type": "array", "items": items, **bounds}


def one_of(*values: Any) -> Json:
    return {"enum": list(values)}


def ref(name: str) -> Json:
    return {"$ref": f"#/$defs/{name}"}


TEXT, WHOLE, NUMBER, FLAG = ({"type": name} for name in ("string", "integer", "number", "boolean"))
SHORT = {"type": "string", "maxLength": 24}
NULLABLE_TEXT = {"anyOf": [TEXT, {"type": "null"}]}
STAMP, DAY, CLOCK = ({"type": "string", "format": name} for name in ("date-time", "date", "time"))
MONEY = record(amount=NUMBER, currency=one_of("EUR", "USD", "JPY"))
CARD = record(method={"const": "card"}, last_digits={"type": "string", "pattern": "^[0-9]{4}$"})
TRANSFER = record(method={"const": "transfer"}, account=SHORT)
CIRCLE, BOX = record(shape={"const": "circle"}, radius=NUMBER), record(shape={"const": "box"}, width=NUMBER, height=NUMBER)

SCHEMAS: dict[str, Json] = {
    # a value or two
    "verdict": record(ok=FLAG),
    "sentiment": record(label=one_of("positive", "neutral", "negative"), score={**NUMBER, "minimum": 0, "maximum": 1}),
    "answer": record(answer=TEXT),
    "count": record(count=WHOLE),
    "temperature": record(celsius=NUMBER),
    "rating": record(stars={**WHOLE, "minimum": 1, "maximum": 5}, comment=SHORT),
    "percentage": record(value={**NUMBER, "exclusiveMinimum": 0, "exclusiveMaximum": 100}),
    "price": record(cents={**WHOLE, "minimum": 0}, tax={**NUMBER, "multipleOf": 0.01, "minimum": 0}),
    "point": record(x=WHOLE, y=WHOLE),
    "position": record(
        latitude={**NUMBER, "minimum": -90, "maximum": 90}, longitude={**NUMBER, "minimum": -180, "maximum": 180}
    ),
    # texts
    "person": record(name=TEXT, age=WHOLE),
    "contact": record("phone", name=SHORT, email={"type": "string", "format": "email"}, phone=NULLABLE_TEXT),
    "title": record(title={"type": "string", "minLength": 3, "maxLength": 40}, language=one_of("en", "de", "fr")),
    "plate": record(plate={"type": "string", "pattern": "^[A-Z]{1,3}-[A-Z]{2} [1-9][0-9]{0,3}$"}),
    "translation": record(source=TEXT, target=TEXT),
    "book": record(
        "subtitle",
        title=TEXT,
        subtitle=NULLABLE_TEXT,
        pages={**WHOLE, "minimum": 1},
        isbn={"type": "string", "pattern": "^[0-9]{13}$"},
    ),
    # formats
    "event": record(starts=STAMP, ends=STAMP, all_day=FLAG),
    "birthday": record(name=SHORT, day=DAY),
    "alarm": record(at=CLOCK, days=array(one_of("mon", "tue", "wed", "thu", "fri", "sat", "sun"), maxItems=7)),
    "session": record(id={"type": "string", "format": "uuid"}, host={"type": "string", "format": "ipv4"}, opened=STAMP),
    "timer": record(duration={"type": "string", "format": "duration"}, repeat=FLAG),
    "server": record(host={"type": "string", "format": "hostname"}, port={**WHOLE, "minimum": 1, "maximum": 65535}),
    # arrays
    "tags": record(tags=array(SHORT, maxItems=5)),
    "scores": record(scores=array(NUMBER, minItems=1, maxItems=8)),
    "matrix": record(rows=array(array(WHOLE, minItems=2, maxItems=2), minItems=2, maxItems=2)),
    "colour": {"type": "array", "prefixItems": [{**WHOLE, "minimum": 0, "maximum": 255}] * 3, "items": False, "minItems": 3},
    "steps": record(steps=array(record(title=SHORT, minutes={**WHOLE, "minimum": 1}), minItems=1, maxItems=3)),
    "cart": record(
        items=array(record(sku={"type": "string", "pattern": "^[A-Z]{2}[0-9]{4}$"}, quantity=WHOLE), maxItems=3), total=MONEY
    ),
    # nested, optional, open
    "address": record(
        "unit",
        street=SHORT,
        number=WHOLE,
        unit=NULLABLE_TEXT,
        place=record(town=SHORT, code={"type": "string", "pattern": "^[0-9]{5}$"}),
    ),
    "settings": record(
        "theme size wrap", theme=one_of("light", "dark"), size={**WHOLE, "minimum": 8, "maximum": 72}, wrap=FLAG
    ),
    "profile": record("bio", closed=False, name=SHORT, bio=TEXT, admin={**FLAG, "default": False}),
    "weather": record(
        place=SHORT,
        now=record(celsius=NUMBER, sky=one_of("clear", "cloudy", "rain")),
        tomorrow=record(low=NUMBER, high=NUMBER),
    ),
    "labels": {"type": "object", "additionalProperties": WHOLE, "maxProperties": 3},
    "call": record(
        name=one_of("search", "open"), arguments=record("limit", query=SHORT, limit={**WHOLE, "minimum": 1, "maximum": 50})
    ),
    # references and unions
    "order": {
        **record(id=WHOLE, payment={"oneOf": [ref("Card"), ref("Transfer")], "discriminator": {"propertyName": "method"}}),
        "$defs": {"Card": CARD, "Transfer": TRANSFER},
    },
    "drawing": {
        "type": "object",
        "properties": {"shape": one_of("circle", "box")},
        "required": ["shape"],
        "oneOf": [CIRCLE, BOX],
    },
    "invoice": {**record(number=WHOLE, due=DAY, net=ref("Money"), gross=ref("Money")), "$defs": {"Money": MONEY}},
    "tree": {
        **record(root=ref("Node")),
        "$defs": {"Node": record("left right", value=WHOLE, left=ref("Node"), right=ref("Node"))},
    },
    "value": record(value={"anyOf": [WHOLE, FLAG, {"type": "null"}]}, unit={"type": ["string", "null"], "maxLength": 8}),
    "reply": {
        **record(result={"oneOf": [record(ok={"const": True}, data=NUMBER), record(ok={"const": False}, error=SHORT)]}),
    },
}
