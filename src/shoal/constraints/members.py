"""Members after a dot by static analysis: monitor-guided decoding (Agrawal et al., NeurIPS 2023,
arXiv 2306.10763), for Python, or by a language server for other languages.

When the text has a dot that an attribute or module must follow, jedi (the extra `members`) is asked
once for the possible names, and the next identifier must be one of them, up to the first character
that no identifier has. If jedi knows no names, any name may follow. A dot and the names around it
may be divided among tokens in any way.

This is a check: a token's distribution is p given that the token passes
(`shoal.constraints.protocol`).

For languages beyond Python the analyser is a language server, spoken to over stdio with pygls (the
extra `servers`). It runs in a process of its own. An answer that comes too late counts as names
that are not known, and so does every answer of a server that cannot be started, that ends, or that
was late too often: it is not asked again.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import re
import shutil
import sys
import threading
from bisect import bisect_left
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from shoal.constraints.protocol import Check
from shoal.constraints.token_bytes import token_bytes
from shoal.errors import RequestError
from shoal.types.requests import Row

Analyser = Callable[[str, str], Collection[str]]
"""A function: source up to a dot and the text behind the new text -> the names that may follow the
dot; no names: they are not known, or no name follows."""
DOT, ARROW = ".", "->"
_TAIL = re.compile(r"\w*")
_FREE = ("self", "cls", "from", ".", "...")
"""The texts before a dot that any name may follow: methods define members by writing to them, and
relative imports."""


class State(NamedTuple):
    """A new text with the names that its end may become.

    Attributes:
        text: the bytes so far.
        names: the possible identifiers at its end, sorted; None if any identifier is possible.
        part: the bytes of the identifier so far.
        healing: the number of bytes of the text before the cursor that are still to be written
            again (`shoal.constraints.alignment`).
    """

    text: bytes
    names: tuple[bytes, ...] | None = None
    part: bytes = b""
    healing: int = 0


class Members(Check[State]):
    """A check that lets only known members follow a dot.

    Args:
        tokenizer: the model's.
        left: the text before the new text.
        right: the text behind the new text.
        analyser: asked at each dot; None = jedi.
        healing: the number of bytes of `left`'s end that the new tokens write again.
        marks: the texts that a member follows.

    Attributes:
        queries: the number of calls of the analyser: one for each text that ends with a dot, for
            all rows and drafts together.

    Raises:
        RequestError: jedi is asked for and not installed.
    """

    def __init__(
        self,
        tokenizer: Any,
        left: str = "",
        right: str = "",
        *,
        analyser: Analyser | None = None,
        healing: int = 0,
        marks: Sequence[str] = (DOT,),
    ) -> None:
        self._marks = tuple(mark.encode() for mark in marks)
        self._part = re.compile(rf"(?:{'|'.join(map(re.escape, marks))})(\w*)\Z")
        self._spelled = token_bytes(tokenizer)
        self._left, self._right, self._healing = left, right, healing
        self._analyser = analyser or jedi_analyser()
        self._known: dict[bytes, tuple[bytes, ...] | None] = {}
        tail = _TAIL.match(right)
        self._tail = b"" if tail is None else tail[0].encode()
        self._start: State | None = None
        self.queries = 0

    def start(self, row: Row) -> State:
        if self._start is None:
            self._start = self._first()
        return self._start

    def _first(self) -> State:
        free, part = State(b"", healing=self._healing), self._part.search(self._left)
        if part is None:
            return free
        names = self._ask(self._left[: part.start(1)])
        written = part[1].encode()
        return (
            free._replace(names=names, part=written) if names and _begins(names, written) else free
        )

    def after(self, state: State, token: int) -> State | None:
        own = (self._spelled[token] if token < len(self._spelled) else None) or b""
        state, own = state._replace(healing=max(0, state.healing - len(own))), own[state.healing :]
        for byte in own:
            following = self._next(state, bytes([byte]))
            if following is None:
                return None
            state = following
        return state

    def may_end(self, state: State) -> bool:
        return state.names is None or state.part + self._tail in state.names

    def _next(self, state: State, byte: bytes) -> State | None:
        text = state.text + byte
        if state.names is not None and _extends(byte):
            part = state.part + byte
            return State(text, state.names, part) if _begins(state.names, part) else None
        if state.names is not None and state.part not in state.names:
            return None
        return State(text, self._members(text) if self._follows(text) else None)

    def _follows(self, text: bytes) -> bool:
        """Returns True if a member follows a new text."""
        if text.endswith(self._marks):
            return True
        whole = self._left.encode()[-1:] + text
        return len(text) == 1 and whole.endswith(self._marks)

    def _members(self, text: bytes) -> tuple[bytes, ...] | None:
        """Returns the names after a text that ends with a dot; the analyser is asked once."""
        if text not in self._known:
            self._known[text] = self._ask(self._left + text.decode(errors="replace"))
        return self._known[text]

    def _ask(self, source: str) -> tuple[bytes, ...] | None:
        self.queries += 1
        return tuple(sorted(name.encode() for name in self._analyser(source, self._right))) or None


def _extends(byte: bytes) -> bool:
    """Returns True if a byte may belong to an identifier.

    All bytes of characters beyond ASCII are taken for parts of one.
    """
    return byte.isalnum() or byte == b"_" or byte >= b"\x80"


def _begins(names: tuple[bytes, ...], part: bytes) -> bool:
    """Returns True if a name begins with `part`; the names are sorted."""
    at = bisect_left(names, part)
    return at < len(names) and names[at].startswith(part)


def jedi_analyser() -> Analyser:
    """Returns jedi as an analyser. Raises RequestError: jedi is not installed.

    The analyser gives no names for numbers, strings and comments, for relative imports, and for
    members of `self` and `cls`, which methods define by writing to them. If jedi fails, the names
    count as not known.
    """
    try:
        import jedi
        import parso
    except ImportError as error:
        raise RequestError("members after a dot need jedi: pip install '.[members]'") from error

    def names(before: str, behind: str) -> Collection[str]:
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n") - 1
        leaf = parso.parse(before + behind).get_leaf_for_position(
            (line, column), include_prefixes=True
        )
        if leaf is None or leaf.value != "." or leaf.start_pos != (line, column - 1):
            return ()
        receiver = leaf.get_previous_leaf()
        if receiver is None or receiver.value in _FREE:
            return ()
        try:
            return {
                completion.name
                for completion in jedi.Script(before + behind).complete(line, column)
                if completion.type != "keyword"
            }
        except Exception:  # of source that is being written jedi fails in many ways
            return ()

    return names


LOG = logging.getLogger("shoal")
Value = TypeVar("Value")

SECONDS = 1.0
"""The longest that a round waits for the names after a dot."""
STARTING = 10.0
"""The longest that the first one waits, for which the server reads the headers."""
LATE = 3
"""The number of late answers after which a server is not asked again."""
_NAME = re.compile(r"[^\W\d]\w*")
_OTHER = (None, 1, 17)
"""The kinds of completions that are no names: none, words of a text, and files."""

_CLANGD = ("clangd", "--limit-results=0", "--completion-parse=always", "--log=error")
SERVERS = dict.fromkeys(("c", "cpp"), (*_CLANGD, "--background-index=false"))
"""The command of the server of each language."""


class LanguageServer:
    """A language server, asked for the names that may follow a dot or an arrow.

    Args:
        command: the program and its arguments; it speaks the protocol on stdin and stdout.
        language: the language's name in the protocol.
        seconds: the longest wait for an answer.
        starting: the longest wait for the first one.

    Attributes:
        fault: the reason why the server is not asked any more; None = it is.
        late: the number of answers that came too late.
    """

    def __init__(
        self,
        command: Sequence[str],
        language: str,
        *,
        seconds: float = SECONDS,
        starting: float = STARTING,
    ) -> None:
        self._command, self._language = list(command), language
        self._seconds, self._starting = seconds, starting
        self._client: Any = None
        self._loop = asyncio.new_event_loop()
        self._lock, self._version = threading.Lock(), 0
        self.fault: str | None = None
        self.late = 0

    def __call__(self, before: str, behind: str) -> Collection[str]:
        """Returns the names that may follow `before`; none if they are not known."""
        with self._lock:
            if self.fault is not None:
                return ()
            try:
                if self._client is None:
                    self._start()
                wait = self._seconds if self._version else self._starting
                return self._run(self._names(before, behind), wait)
            except (TimeoutError, asyncio.TimeoutError):  # two until Python 3.11
                self.late += 1
                if self.late >= LATE:
                    self._give_up(f"{self.late} answers came later than {self._seconds:g} s")
            except Exception as error:  # a program of others, which may fail in any way
                self._give_up(str(error) or type(error).__name__)
            return ()

    def close(self) -> None:
        """Ends the server."""
        with self._lock:
            self._give_up("it was closed")

    def _start(self) -> None:
        client, _ = _library()
        self._client = client("shoal", "1")
        self._client.feature("textDocument/publishDiagnostics")(lambda _: None)
        threading.Thread(target=self._loop.run_forever, name="language server", daemon=True).start()
        atexit.register(self.close)
        self._run(self._begin(), self._starting)

    def _run(self, work: Coroutine[Any, Any, Value], seconds: float) -> Value:
        """Runs something on the loop's thread. Raises TimeoutError, then it is cancelled."""
        return asyncio.run_coroutine_threadsafe(
            asyncio.wait_for(work, seconds), self._loop
        ).result()

    async def _begin(self) -> None:
        _, types = _library()
        await self._client.start_io(*self._command)
        params = types.InitializeParams(capabilities=types.ClientCapabilities(), root_uri=None)
        await self._client.initialize_async(params)
        self._client.initialized(types.InitializedParams())

    async def _names(self, before: str, behind: str) -> Collection[str]:
        (_, types), uri = _library(), f"file:///shoal/text.{self._language}"
        self._version += 1
        if self._version == 1:
            opened = types.TextDocumentItem(uri, self._language, 1, before + behind)
            self._client.text_document_did_open(types.DidOpenTextDocumentParams(opened))
        else:
            whole = types.TextDocumentContentChangeWholeDocument(before + behind)
            named = types.VersionedTextDocumentIdentifier(self._version, uri)
            changed = types.DidChangeTextDocumentParams(named, [whole])
            self._client.text_document_did_change(changed)
        line, start = before.count("\n"), before.rfind("\n") + 1
        place = types.Position(line, len(before[start:].encode("utf-16-le")) // 2)
        params = types.CompletionParams(types.TextDocumentIdentifier(uri), place)
        completions = await self._client.text_document_completion_async(params)
        items = getattr(completions, "items", completions) or []
        words = any(item.kind in _OTHER for item in items)  # no members: words of the text, headers
        if words or getattr(completions, "is_incomplete", False):
            return ()
        return {name for item in items if (name := _name(item))}

    def _give_up(self, why: str) -> None:
        if self.fault is None:
            self.fault = why
            LOG.info("%s is not asked for members any more: %s", self._command[0], why)
        server = getattr(self._client, "_server", None)
        if server is not None and server.returncode is None:
            server.kill()
        self._loop.call_soon_threadsafe(self._loop.stop)


def _name(item: Any) -> str:
    """Returns the name that a completion writes; "" if it begins otherwise."""
    written = item.text_edit.new_text if item.text_edit else item.insert_text or item.label
    match = _NAME.match(written)
    return match[0] if match else ""


@cache
def _library() -> tuple[Any, Any]:
    """Returns pygls' client and the types of the protocol."""
    from lsprotocol import types
    from pygls.lsp.client import BaseLanguageClient

    return BaseLanguageClient, types


@cache
def server_of(language: str) -> LanguageServer:
    """Returns a language's server for all requests; raises RequestError if it is not installed."""
    command = SERVERS[language]
    beside = str(Path(sys.executable).parent)  # where packages that bring servers put them
    program = shutil.which(command[0], path=beside) or shutil.which(command[0])
    if program is None or find_spec("pygls") is None:
        raise RequestError(
            f"members of {language} need pygls and {command[0]}: pip install '.[servers]'"
        )
    return LanguageServer([program, *command[1:]], language)
