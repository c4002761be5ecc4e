"""The program that runs a completion in one process and its tests in another.

The completion can reach neither the tests nor their result.

    python main.py            the tests: reads job.json, removes it, and starts
    python main.py DESCRIPTOR the completion, which is called through this socket

Both run in one sandbox. The tests call a proxy that sends its arguments as plain data (numbers,
text, dates, containers, arrays) and returns the plain data of the answer. Of an object whose class
the completion defines its attributes arrive, never a method. A function, class, generator or
coroutine stays in its process: the tests get one that asks it. The kernel hides the memory of the
tests' process from its user (PR_SET_DUMPABLE). Arguments that a call has changed are changed for
the tests too.

Copied into the working directory with plain_values.py, and run there by the Python of the
problems, 3.7 or newer: both import the standard library only.
"""

from __future__ import annotations

import array
import asyncio
import builtins
import collections
import contextlib
import ctypes
import enum
import functools
import inspect
import json
import linecache
import os
import socket
import struct
import sys
import traceback
import types
from typing import Any

if __package__:
    from shoal.evaluation.plain_values import NotSerializable, decode, encode
else:  # in the working directory
    from plain_values import (  # type: ignore[import-not-found,no-redef]
        NotSerializable,
        decode,
        encode,
    )

JOB = "job.json"
"""The file of the job.

It holds {"program": prompt and completion, "prompt": ..., "tests": ..., "entry_point": ...,
"marker": to be printed in the end}.
"""
SHARED = "arguments that only a shared process can pass"
"""The text printed behind the marker if the tests pass an argument that is not plain data.

A function is such an argument.
"""

_PR_SET_DUMPABLE = 4
_LENGTH = struct.Struct("=Q")


def _send(connection: socket.socket, message: Any) -> None:
    content = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(content)) + content)


def _receive(connection: socket.socket) -> Any:
    """Returns the next message; raises EOFError after the last."""
    return json.loads(_read(connection, *_LENGTH.unpack(_read(connection, _LENGTH.size))))


def _read(connection: socket.socket, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        piece = connection.recv(min(size - len(content), 2**20))
        if not piece:
            raise EOFError
        content += piece
    return bytes(content)


def serve(descriptor: int) -> None:
    """Runs the program in the first message, then answers one call of its function per message."""
    connection = socket.socket(fileno=descriptor)
    program, entry_point = _receive(connection)
    module = types.ModuleType("solution")  # so that `if __name__ == "__main__":` in it does not run
    sys.modules["solution"], sys.argv = module, ["main.py"]
    with open("solution.py", "w", encoding="utf-8") as file:
        file.write(program)  # for processes that the completion spawns, which import it
    exec(_compiled(program, "main.py"), module.__dict__)
    handles = Handles(getattr(module, entry_point))
    _send(connection, "ready")
    while True:
        try:
            number, message = _receive(connection)
        except EOFError:
            return
        arguments, named = decode(message, handles)
        try:
            value = handles.calls[number](*arguments, **named)
            answer = {"value": encode(value, module.__name__, handles)}
        except Exception as error:
            answer = {"raised": [kind.__name__ for kind in type(error).__mro__], "text": str(error)}
            answer["arguments"] = _encode_or_none(error.args, module.__name__)
            answer["trace"] = "".join(
                traceback.format_exception(type(error), error, error.__traceback__)
            )
        given = (*arguments, *named.values())
        changed = [_encode_or_none(value, module.__name__) for value in given]
        _send(connection, {**answer, "changed": changed})


class Handles:
    """The values that stay in the completion's process, and are called there.

    Attributes:
        calls: the functions that the tests may call; the first is the entry point.
    """

    def __init__(self, function: Any) -> None:
        self.calls: list[Any] = [function]

    def node(self, value: Any) -> Any:
        """Returns the kind and parts of a function, generator or coroutine; None for others."""
        kind, call = "function", value
        if inspect.iscoroutine(value):
            kind, call = "coroutine", functools.partial(asyncio.run, value)
        elif inspect.isgenerator(value) or type(value).__module__ == "itertools":  # maybe endless
            kind, call = "generator", functools.partial(_step, value)
        elif not callable(value) or (isinstance(value, type) and value.__module__ == "builtins"):
            return None
        self.calls.append(call)
        name = getattr(value, "__name__", type(value).__name__)
        return "remote", (kind, len(self.calls) - 1, name)

    def remote(self, _kind: str, number: int, _name: str) -> Any:
        """Returns a value that the tests give back."""
        return self.calls[number]


def _step(iterator: Any, sent: Any) -> Any:
    """Returns the next item in a list; in a tuple the value that the iterator ended with."""
    try:
        return [next(iterator) if sent is None else iterator.send(sent)]
    except StopIteration as end:
        return (end.value,)


def _encode_or_none(value: Any, own: str) -> Any:
    try:
        return encode(value, own)
    except NotSerializable:
        return None


def _compiled(source: str, name: str) -> types.CodeType:
    """Compiles code whose source lines appear in tracebacks although there is no file."""
    code = compile(source, name, "exec")
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    return code


class RemoteTraceback(Exception):
    """The traceback of an exception in the process of the completion."""


def run_tests() -> None:
    """Runs the tests; prints the marker if they reach their end."""
    with open(JOB, encoding="utf-8") as file:
        job = json.load(file)
    os.remove(JOB)
    sys.path.pop(0)  # the completion can write there
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    names = _names(job["prompt"])
    own = {
        name: kind
        for name, kind in names.items()
        if isinstance(kind, type) and kind.__module__ == "__main__"
    }
    completion = CompletionProcess(job["program"], job["entry_point"], Objects(own))
    names[job["entry_point"]] = completion.objects.remote("function", 0, job["entry_point"])
    try:
        exec(_compiled(job["tests"], "tests.py"), names)
    except NotSerializable:
        print(job["marker"], SHARED)
        raise
    print(job["marker"])


class SentRecord:
    """An object of a class that the completion defines: its attributes, and none of its methods.

    It equals no plain value, and another record of that class if the class compares by worth, and
    the attributes are equal.
    """

    _by_worth = False
    _texts: Any = None

    def __eq__(self, other: object) -> bool:
        alike = isinstance(other, SentRecord) and type(self).__name__ == type(other).__name__
        if self is other or not (self._by_worth and alike):
            return self is other
        mine, others = ({**vars(each), "_texts": None} for each in (self, other))
        return mine == others

    def __hash__(self) -> int:
        return hash(type(self).__name__) if self._by_worth else id(self)

    def __str__(self) -> str:
        return str(self._texts[0] if self._texts else object.__repr__(self))

    def __repr__(self) -> str:
        return str(self._texts[1] if self._texts else object.__repr__(self))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name!r} of a value of the type {type(self).__name__!r}, which the completion "
            f"defines, is no data, and cannot reach the tests"
        )


class Objects:
    """The maker of a completion's objects: of the prompt's `classes`, by name, or records."""

    def __init__(self, classes: dict[str, Any]) -> None:
        self._classes = classes
        self._remote: dict[int, tuple[Any, int]] = {}
        self.call: Any = None

    def remote(self, kind: str, number: int, name: str) -> Any:
        """Returns a function, generator or coroutine that asks the completion's process."""
        call = functools.partial(self.call, number)

        def function(*arguments: Any, **named: Any) -> Any:
            return call(arguments, named)

        async def awaited() -> Any:
            return call((), {})

        made: Any = function
        if kind != "function":
            made = awaited() if kind == "coroutine" else _generated(call)
        with contextlib.suppress(AttributeError):
            made.__name__ = made.__qualname__ = name
        self._remote[id(made)] = made, number
        return made

    def node(self, value: Any) -> Any:
        """Returns the kind and parts of a function that the completion's process has."""
        made, number = self._remote.get(id(value), (None, 0))
        return None if made is None else ("remote", ("function", number, ""))

    def blank(self, name: str, by_worth: bool, _more: Any, _texts: Any, *attributes: Any) -> Any:
        """Returns an object without attributes, or a member of an enumeration."""
        kind = self._classes.get(name)
        if isinstance(kind, enum.EnumMeta):
            return kind[attributes[1]]  # behind "name"
        return object.__new__(kind or type(name, (SentRecord,), {"_by_worth": by_worth}))

    def equip(self, made: Any, more: Any, texts: Any, *attributes: Any) -> None:
        """Gives an object its attributes; no method gives way.

        Args:
            made: the object.
            more: names and values that its class adds; a class of the prompt adds its own.
            texts: `str` and `repr` of the object, or None.
            attributes: names and values.

        Raises:
            TypeError: an attribute is a method of the object's class.
        """
        if isinstance(made, enum.Enum):
            return
        kind = type(made)
        if isinstance(made, SentRecord):
            attributes = (*more, *attributes, "_texts", texts)
        for name, value in zip(attributes[::2], attributes[1::2]):  # noqa: B905 - Python 3.7
            if name[:2] == "__" or callable(getattr(kind, name, None)):
                raise TypeError(f"{name!r} of a {kind.__name__!r} is no attribute, or a method")
            object.__setattr__(made, name, value)


def _generated(call: Any) -> Any:
    """Yields the items of an iterator in the completion's process."""
    sent = None
    while type(step := call((sent,), {})) is list:
        sent = yield step[0]
    return step[0]


class CompletionProcess:
    """The process of a completion, whose functions `objects` makes proxies of.

    Args:
        program: the prompt and the completion.
        entry_point: the name of the function.
        objects: makes the objects that a call returns anew of their attributes.
    """

    def __init__(self, program: str, entry_point: str, objects: Objects) -> None:
        self.connection, other = socket.socketpair()
        other.set_inheritable(True)
        self.pid = os.spawnv(
            os.P_NOWAIT, sys.executable, [sys.executable, "main.py", str(other.fileno())]
        )
        other.close()
        self._ask([program, entry_point])

        self.objects, objects.call = objects, self._call

    def _call(self, number: int, arguments: Any, named: Any) -> Any:
        answer = self._ask([number, encode((arguments, named), "", self.objects)])
        given = (*arguments, *named.values())
        for old, changed in zip(given, answer["changed"]):  # noqa: B905 - Python 3.7
            if changed is not None:
                _change(old, decode(changed, self.objects))
        if "value" in answer:
            return decode(answer["value"], self.objects)
        raise _exception(answer) from RemoteTraceback(answer["trace"])

    def _ask(self, message: Any) -> Any:
        try:
            _send(self.connection, message)
            return _receive(self.connection)
        except (EOFError, OSError):
            self._exit_like_child()

    def _exit_like_child(self) -> None:
        """Ends this process by the signal or with the exit code of the completion's process."""
        _, status = os.waitpid(self.pid, 0)
        sys.stdout.flush()
        if os.WIFSIGNALED(status):
            os.kill(os.getpid(), os.WTERMSIG(status))
        os._exit(os.WEXITSTATUS(status))


def _change(old: Any, new: Any) -> None:
    """Copies the contents of a container into another that is sent as the same kind."""
    sequences: tuple[Any, ...] = (list, bytearray, array.array, collections.UserList)
    for kind in sequences:
        if isinstance(old, kind) and isinstance(new, kind):
            old[:] = new
    containers: tuple[Any, ...] = (dict, set, collections.deque, collections.UserDict)
    for kind in containers:
        if isinstance(old, kind) and isinstance(new, kind):
            old.clear()
            (old.extend if kind is collections.deque else old.update)(new)
    if type(old).__module__ == type(new).__module__ == "numpy" and old.shape:
        old[...] = new


def _names(prompt: str) -> dict[str, Any]:
    """Returns the definitions of a prompt, which tests may use."""
    names = {"__name__": "__main__"}
    for ending in ("", "\n    pass\n"):
        try:
            exec(compile(prompt + ending, "prompt.py", "exec"), names)
            break
        except Exception:
            continue
    return names


def _exception(answer: dict[str, Any]) -> Exception:
    """Returns the builtin exception of that name, or the nearest builtin base class.

    It has the arguments of the exception that was raised, if they make the same text.
    """
    text, sent = answer["text"], answer["arguments"]
    for name in answer["raised"]:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            for arguments in ((text,) if sent is None else decode(sent), (text,)):
                try:
                    made = kind(*arguments)
                except TypeError:  # UnicodeDecodeError takes more than a text
                    continue
                if str(made) == text or arguments == (text,):
                    return made
    return Exception(text)


if __name__ == "__main__":
    serve(int(sys.argv[1])) if len(sys.argv) > 1 else run_tests()
