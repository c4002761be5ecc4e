"""The plain data that passes between a completion and its tests, as JSON.

A value arrives as one of equal worth: of the type's base where a program made a type of its own.
A named tuple arrives with its names.

Imported in the working directory of a program, too, by Python 3.7 or newer: it imports the standard
library only.
"""

from __future__ import annotations

import array
import builtins
import collections
import collections.abc
import datetime
import decimal
import enum
import fractions
import ipaddress
import numbers
import pathlib
import re
import sys
import time
import types
import uuid
from contextlib import suppress
from typing import Any

_SEQUENCES: dict[str, Any] = {
    "tuple": tuple,
    "frozenset": frozenset,
    "iterator": iter,
    "range": lambda values: range(*values),
    "keys": lambda values: dict.fromkeys(values).keys(),
    "values": lambda values: dict(enumerate(values)).values(),
    "items": lambda values: dict(values).items(),
    "array": lambda values: array.array(values[0], values[1:]),
    "complex": lambda values: complex(*values),
    "timedelta": lambda values: datetime.timedelta(*values),
    "numpy": lambda values: _numpy_array(*values),
    "namedtuple": lambda values: _named_tuple(*values),
    "struct_time": lambda values: time.struct_time(values[0]),
    "slice": lambda values: slice(*values),
    "timezone": lambda values: datetime.timezone(*values),
    "Pattern": lambda values: re.compile(*values),
    "Match": lambda values: _match(*values),
    "SimpleNamespace": lambda values: types.SimpleNamespace(**dict(values)),
    "exception": lambda values: _builtin_type(values[0], Exception)(*values[1:]),
}
"""The values that are made of their finished parts."""

_CONTAINERS: dict[str, Any] = {
    "list": list,
    "set": set,
    "dict": dict,
    "Counter": collections.Counter,
    "OrderedDict": collections.OrderedDict,
    "defaultdict": collections.defaultdict,
    "deque": collections.deque,
    "UserList": collections.UserList,
    "UserDict": collections.UserDict,
}
"""The values that are made empty, and get their parts later: these may contain themselves."""

_MAPPINGS = ("dict", "Counter", "OrderedDict", "defaultdict", "UserDict")
_ADDRESSES: tuple[Any, ...] = (
    ipaddress.IPv4Interface,  # an address, too
    ipaddress.IPv6Interface,
    ipaddress.IPv4Address,
    ipaddress.IPv6Address,
    ipaddress.IPv4Network,
    ipaddress.IPv6Network,
)
_CONSTANTS = {"Ellipsis": Ellipsis, "NotImplemented": NotImplemented}

_TEXTS: dict[str, Any] = {
    "int": lambda text: int(text, 16),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "Decimal": decimal.Decimal,
    "Fraction": fractions.Fraction,
    "UserString": collections.UserString,
    "UUID": uuid.UUID,
    "PurePath": pathlib.PurePath,
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "type": lambda text: _builtin_type(text),
    "constant": _CONSTANTS.__getitem__,
    **{kind.__name__: kind for kind in _ADDRESSES},
}
_TEXT_TYPES: tuple[tuple[Any, str, Any], ...] = (
    (bytes, "bytes", bytes.hex),
    (bytearray, "bytearray", bytearray.hex),
    (memoryview, "bytes", memoryview.hex),
    (decimal.Decimal, "Decimal", lambda value: str(decimal.Decimal(value))),
    (fractions.Fraction, "Fraction", lambda value: str(fractions.Fraction(value))),
    (collections.UserString, "UserString", lambda value: str(value.data)),
    (uuid.UUID, "UUID", str),
    (pathlib.PurePath, "PurePath", str),
    (datetime.datetime, "datetime", datetime.datetime.isoformat),
    (datetime.date, "date", datetime.date.isoformat),
    (datetime.time, "time", datetime.time.isoformat),
    *((kind, kind.__name__, kind.__str__) for kind in _ADDRESSES),
    (tuple(map(type, _CONSTANTS.values())), "constant", repr),
)
"""Types, their kinds, and their texts: the contents, whatever a subclass says that it is."""

_PART_TYPES: tuple[tuple[Any, str, Any], ...] = (
    (list, "list", iter),
    (time.struct_time, "struct_time", lambda value: (tuple(value),)),
    (tuple, "tuple", iter),
    (set, "set", iter),
    (frozenset, "frozenset", iter),
    (collections.deque, "deque", lambda value: (value.maxlen, *value)),
    (collections.UserList, "UserList", iter),
    (collections.UserDict, "UserDict", lambda value: value.items()),
    (collections.Counter, "Counter", lambda value: dict.items(value)),
    (collections.OrderedDict, "OrderedDict", lambda value: value.items()),
    (collections.abc.Mapping, "dict", lambda value: value.items()),
    (collections.abc.KeysView, "keys", iter),
    (collections.abc.ValuesView, "values", iter),
    (collections.abc.ItemsView, "items", iter),
    (collections.abc.Set, "set", iter),
    (complex, "complex", lambda value: (complex.real.__get__(value), complex.imag.__get__(value))),
    (array.array, "array", lambda value: [value.typecode, *value]),
    (
        datetime.timedelta,
        "timedelta",
        lambda value: (value.days, value.seconds, value.microseconds),
    ),
    (range, "range", lambda value: (value.start, value.stop, value.step)),
    (slice, "slice", lambda value: (value.start, value.stop, value.step)),
    (datetime.timezone, "timezone", lambda value: (value.utcoffset(None), value.tzname(None))),
    (type(re.compile("")), "Pattern", lambda value: (value.pattern, value.flags)),
    (
        type(re.match("", "")),
        "Match",
        lambda value: (value.re, value.string, value.pos, value.endpos, value.regs),
    ),
    (types.SimpleNamespace, "SimpleNamespace", lambda value: vars(value).items()),
    (collections.abc.Iterator, "iterator", iter),
)
"""Types, their kinds, and their parts."""


class NotSerializable(TypeError):
    """A value that is not plain data."""


def encode(value: Any, own: str = "", handles: Any = None) -> Any:
    """Encodes plain data as JSON: [value, node, ...].

    A value is a scalar of JSON, or [number of a node]. A node is [kind, value, ...]. Values of
    any depth can be encoded, also values that contain one object twice, or themselves. Subclasses
    become their base type. Iterators are read to their end.

    Args:
        value: the value.
        own: the module of the classes whose objects may be sent by their attributes; empty = none.
        handles: gives the kind and parts of a value that stays in its process, or None.

    Raises:
        NotSerializable: the value is no plain data.
    """
    nodes: list[Any] = []
    places: dict[int, list[int]] = {}
    waiting: list[tuple[list[Any], Any]] = []  # (node, parts)
    held = []  # nothing ends that a place stands for

    def place(part: Any) -> Any:
        scalar, simple = _scalar(part)
        if simple:
            return scalar
        if id(part) not in places:
            kind, parts = (handles and handles.node(part)) or _node(part, own)
            held.append(part)
            places[id(part)] = [len(nodes)]
            nodes.append([kind])
            waiting.append((nodes[-1], parts))
        return places[id(part)]

    root = place(value)
    while waiting:
        node, parts = waiting.pop()
        if node[0] in _MAPPINGS:
            parts = (each for pair in parts for each in pair)
        node.extend(map(place, parts))
    return [root, *nodes]


def _scalar(value: Any) -> tuple[Any, bool]:
    """Returns a value as a scalar of JSON, and whether it is one."""
    if value is None or isinstance(value, bool) or type(value) in (str, float):
        return value, True
    if isinstance(value, str):  # the base type's own methods: an enumeration writes its name
        return str.__str__(value), True
    if isinstance(value, float):
        return float.__float__(value), True
    if isinstance(value, numbers.Integral):
        number = _integer(value)
        return number, abs(number) < 2**53
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.bool_):
        return bool(value), True
    return None, False


_DEFAULTS = collections.defaultdict


def _with_factory(value: Any) -> tuple[str, Any]:
    """Returns the kind and parts of a `defaultdict`: of a `dict`, if a program made its factory."""
    factory = value.default_factory
    if factory is None or getattr(builtins, getattr(factory, "__name__", ""), None) is factory:
        return "defaultdict", ((_FACTORY, factory), *value.items())
    return "dict", value.items()


_FACTORY = None
"""The key in a message's `defaultdict` that stands before its factory; the first one."""


def _integer(value: Any) -> int:
    return int.__int__(value) if isinstance(value, int) else int(value)


def _attributes(value: Any, own: str) -> Any:
    """Returns the parts of an object of a program's own class.

    These are the class's name, whether the class compares by worth, the constants and
    properties of the class, the object's texts, and names and values of its
    attributes in turns.
    """
    kind: Any = type(value)
    if isinstance(value, enum.Enum):
        return (kind.__name__, True, (), None, "name", value.name, "value", value.value)
    attributes, added = {}, {}
    for base in reversed(kind.__mro__[:-1]):
        for name, each in vars(base).items():
            method = callable(each) or hasattr(each, "__func__")
            if isinstance(each, types.MemberDescriptorType) and hasattr(value, name):
                attributes[name] = getattr(value, name)
            elif name[:2] != "__" and not method:
                with suppress(Exception):  # a property's
                    added[name] = getattr(value, name)
    attributes.update(getattr(value, "__dict__", {}))
    kept, more = (
        tuple(each for pair in pairs.items() if _sendable(pair[1], own) for each in pair)
        for pairs in (attributes, added)
    )
    texts = None
    if kind.__str__ is not object.__str__ or kind.__repr__ is not object.__repr__:
        with suppress(Exception):
            texts = (str(value)[:LONGEST_TEXT], repr(value)[:LONGEST_TEXT])
    by_worth = kind.__eq__ is not object.__eq__
    return (kind.__name__, by_worth, more, texts, *kept)


def _sendable(value: Any, own: str) -> bool:
    """Tells whether an attribute can be sent, as far as it can be seen from outside."""
    try:
        return type(value).__module__ == own or _scalar(value)[1] or bool(_node(value, ""))
    except NotSerializable:
        return False


LONGEST_TEXT = 1000
"""The number of characters of an object's `str` and `repr` that are sent."""


def _node(value: Any, own: str) -> tuple[str, Any]:
    """Returns the kind of a value and its parts."""
    if isinstance(value, numbers.Integral):
        return "int", (f"{_integer(value):x}",)
    name: str = getattr(value, "__name__", "") if isinstance(value, type) else ""
    if name and getattr(builtins, name, None) is value:
        return "type", (name,)
    if isinstance(value, Exception) and vars(builtins).get(type(value).__name__) is type(value):
        return "exception", (type(value).__name__, *value.args)
    names: Any = getattr(type(value), "_fields", None)
    if isinstance(value, tuple) and isinstance(names, tuple) and len(names) == len(value):
        return "namedtuple", (type(value).__name__, names, tuple(value))
    for kinds, name, text in _TEXT_TYPES:
        if isinstance(value, kinds):
            return name, (text(value),)
    for kinds, name, parts in _PART_TYPES:
        if isinstance(value, kinds):
            return _with_factory(value) if type(value) is _DEFAULTS else (name, parts(value))
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        whole = numpy.asarray(value)
        if not (whole.dtype.hasobject or whole.dtype.names):
            scalar = not isinstance(value, numpy.ndarray)
            return "numpy", (whole.dtype.str, scalar, whole.tobytes().hex(), *whole.shape)
    if own and type(value).__module__ == own:
        return "own", _attributes(value, own)
    raise NotSerializable(
        f"a value of the type {type(value).__name__!r} cannot pass between a completion and its "
        f"tests"
    )


def decode(message: Any, objects: Any = None) -> Any:
    """Returns the value that was encoded.

    It has only types that `encode` knows, and those that `objects` makes, for any message.

    Args:
        message: the message.
        objects: makes the objects of a program's own classes; None = nothing does.

    Raises:
        TypeError: there is an object that cannot be made.
    """
    root, *nodes = message
    made: dict[int, Any] = {}

    def value(part: Any) -> Any:
        return made[part[0]] if isinstance(part, list) else part

    for number, (kind, *parts) in enumerate(nodes):
        if kind in _CONTAINERS:
            bound = {"maxlen": parts[0]} if kind == "deque" else {}
            made[number] = _CONTAINERS[kind](**bound)
        elif kind in ("own", "remote") and objects is None:
            raise TypeError("objects of a program's own classes cannot be sent this way")
    waiting = [number for number in range(len(nodes)) if number not in made]
    while waiting:  # from the end, as the parts of a node mostly stand behind it
        number = waiting[-1]
        kind, *parts = nodes[number]
        if kind == "own" and number not in made:
            made[number] = objects.blank(*parts)  # it may contain itself
        missing = [part[0] for part in parts if isinstance(part, list) and part[0] not in made]
        if missing and (kind == "own" or number not in made):
            waiting.append(missing[0])
            if len(waiting) > 2 * len(nodes):
                raise ValueError("a value that contains itself and cannot")
        else:
            if kind == "remote":
                made[number] = objects.remote(*map(value, parts))
            elif kind == "own":
                objects.equip(made[number], *map(value, parts[2:]))
            elif number not in made:
                made[number] = _finished(kind, [*map(value, parts)])
            waiting.pop()
    for number, (kind, *parts) in enumerate(nodes):
        if kind in _CONTAINERS:
            _fill(made[number], [*map(value, parts[kind == "deque" :])])
    return value(root)


def _finished(kind: str, parts: list[Any]) -> Any:
    return _TEXTS[kind](*parts) if kind in _TEXTS else _SEQUENCES[kind](parts)


def _fill(container: Any, parts: list[Any]) -> None:
    """Puts the parts into an empty container."""
    if isinstance(container, (dict, collections.UserDict)):
        pairs = zip(parts[::2], parts[1::2])  # noqa: B905 - Python 3.7
        if isinstance(container, _DEFAULTS):
            container.default_factory = next(pairs)[1]
        for key, value in pairs:
            container[key] = value
    else:
        (container.update if isinstance(container, set) else container.extend)(parts)


def _match(pattern: Any, text: Any, start: int, end: int, spans: Any) -> Any:
    """Returns the match of a pattern that has these spans."""
    whole = (pattern.fullmatch(text, start, end), pattern.match(text, start, end))
    made = (*whole, *pattern.finditer(text, start, end))
    return next(match for match in made if match and match.regs == spans)


def _named_tuple(name: str, fields: Any, values: Any) -> Any:
    return collections.namedtuple(name, fields)(*values)  # type: ignore[misc]


def _builtin_type(name: str, base: Any = object) -> Any:
    """Returns Python's type of that name and base, or raises TypeError."""
    kind = getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise TypeError(f"{name!r} is no type of Python")
    return kind


def _numpy_array(dtype: str, scalar: bool, content: str, *shape: int) -> Any:
    """Returns an array, or a scalar of NumPy, which is loaded only where one arrives."""
    import numpy

    whole = numpy.frombuffer(bytes.fromhex(content), dtype).reshape(shape).copy()
    return whole[()] if scalar else whole
