"""Members by a language server, spoken to over stdio: an analyser for languages beyond Python
(`shoal.constraints.members`), with pygls (the extra `servers`).

The server runs in a process of its own. An answer that comes too late counts as names that are not
known, and so does every answer of a server that cannot be started, that ends, or that was late too
often: it is not asked again.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import re
import shutil
import sys
import threading
from collections.abc import Collection, Coroutine, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from shoal.errors import RequestError

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
        asked = types.InitializeParams(capabilities=types.ClientCapabilities(), root_uri=None)
        await self._client.initialize_async(asked)
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
        asked = types.CompletionParams(types.TextDocumentIdentifier(uri), place)
        found = await self._client.text_document_completion_async(asked)
        items = getattr(found, "items", found) or []
        words = any(item.kind in _OTHER for item in items)  # no members: words of the text, headers
        if words or getattr(found, "is_incomplete", False):
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
    found = _NAME.match(written)
    return found[0] if found else ""


@cache
def _library() -> tuple[Any, Any]:
    """Returns pygls' client and the types of the protocol."""
    from lsprotocol import types
    from pygls.lsp.client import BaseLanguageClient

    return BaseLanguageClient, types


@cache
def server_of(language: str) -> LanguageServer:
    """Returns the server of a language, which all requests of the process share.

    Raises:
        RequestError: pygls or the server is not installed.
    """
    command = SERVERS[language]
    beside = str(Path(sys.executable).parent)  # where packages that bring servers put them
    program = shutil.which(command[0], path=beside) or shutil.which(command[0])
    if program is None or find_spec("pygls") is None:
        raise RequestError(
            f"members of {language} need pygls and {command[0]}: pip install '.[servers]'"
        )
    return LanguageServer([program, *command[1:]], language)
