"""The access to the server: allowed host names, API keys, certificates, and bodies within limits.

The names are checked against DNS rebinding. The owner of another name can point it to this server,
and a browser then takes pages under that name for pages of the server. The Host header of their
requests still has that name. Keys are compared in constant time.

By TLS the server shows its certificate, and may ask for those of its clients; uvicorn encrypts.

The body of a request is limited in size and time, and parsed on another thread. The routes'
handlers read it after the key has been checked.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import ssl
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal, TypeVar

import anyio
from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.errors import RequestError
from shoal.serve.api_errors import ApiError, read_json

ANY = "*"


def hosts_of(bound: str, given: Sequence[str]) -> tuple[str, ...]:
    """Returns the allowed names: the given ones, if there are any.

    Otherwise only the loopback address itself is allowed if the server is bound to one, else all
    names are.
    """
    return tuple(given) or ((bound,) if is_loopback(bound) else (ANY,))


def is_loopback(host: str) -> bool:
    """Returns True if only this machine reaches that address."""
    return host == "localhost" or (_is_address(host) and ip_address(host).is_loopback)


class HostCheck:
    """A middleware (ASGI) that answers requests under other names with 403.

    Addresses, localhost and a missing name are always allowed: rebinding needs a name that the
    attacker owns.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self.app, self.hosts = app, {host.lower().rstrip(".") for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forwards requests under allowed names to the application."""
        if scope["type"] == "http" and not self._knows(name := _name(_asked_host(scope))):
            message = (
                f"this server is not asked under the name {name!r}; start it with "
                f"--allowed-host {name} if it should be"
            )
            await ApiError(403, message, code="host_not_allowed").response()(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _knows(self, name: str) -> bool:
        return (
            ANY in self.hosts
            or name in self.hosts
            or name in ("", "localhost")
            or _is_address(name)
        )


def _asked_host(scope: Scope) -> str:
    """Returns the host that a request is sent to.

    A request to a proxy has it in its target, `GET http://host/path`, where it counts before the
    Host header (RFC 9112 3.2.2); the path alone is left in the scope.
    """
    if scope["path"].startswith("/") or "://" not in scope["path"]:
        return Headers(scope=scope).get("host", "")
    host, _, path = scope["path"].partition("://")[2].partition("/")
    raw = scope["raw_path"].partition(b"://")[2].partition(b"/")[2]
    scope["path"], scope["raw_path"] = f"/{path}", b"/" + raw
    return str(host).rpartition("@")[2]


def _name(host: str) -> str:
    """Returns the name of a Host header without the port, normalised for comparison."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return (host.rpartition(":")[0] if host.count(":") == 1 else host).lower().rstrip(".")


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


VARIABLE = "SHOAL_API_KEY"
LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1000.0


def read_keys(file: Path | None) -> dict[str, float]:
    """Returns the keys in a file with their weights; without a file, the key of `VARIABLE`.

    A line has a key, and a weight unless the weight is 1. Empty lines and lines that begin with #
    are skipped.

    Raises:
        RequestError: the file cannot be read, has no key or a wrong weight: the server must not
            start without its keys.
    """
    if file is None:
        key = os.environ.get(VARIABLE, "").strip()
        return {key: 1.0} if key else {}
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read the API keys in {str(file)!r}: {error}") from error
    keys = dict(
        _key(line, f"{file}:{i}")
        for i, line in enumerate(lines, 1)
        if line and not line.startswith("#")
    )
    if not keys:
        raise RequestError(f"{str(file)!r} holds no API key: write one a line")
    return keys


def _key(line: str, where: str) -> tuple[str, float]:
    """Returns a key and its weight. Raises RequestError, which does not show the key."""
    key, *rest = line.split()
    try:
        weight = float(rest[0]) if rest else 1.0
    except ValueError:
        weight = 0.0
    if len(rest) > 1 or not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
        wanted = f"a number from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}"
        raise RequestError(f"{where}: behind a key there may be a space and its weight, {wanted}")
    return key, weight


def weights_of(keys: Mapping[str, float]) -> dict[str, float]:
    """Returns the weights other than 1 of the owners of keys."""
    return {owner_of(key): weight for key, weight in keys.items() if weight != 1}


def is_valid_key(keys: Iterable[str], given: str) -> bool:
    """Returns True if `given` is one of the keys, all compared whole and in constant time."""
    digest = _digest(given)
    matches = [hmac.compare_digest(_digest(key), digest) for key in keys]
    return any(matches)


def owner_of(key: str) -> str:
    """Returns a name for the owner of the key, without showing the key."""
    return _digest(key).hex()


def _digest(key: str) -> bytes:
    """Returns a digest, of the same length for every key."""
    return hashlib.sha256(key.encode("utf-8", errors="surrogatepass")).digest()


PASSWORD_VARIABLE = "SHOAL_SSL_KEYFILE_PASSWORD"

ClientCertificates = Literal["none", "optional", "required"]
_MODES = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}


@dataclass(frozen=True)
class Tls:
    """The encryption of connections. On creation the files are read as uvicorn will read them.

    Attributes:
        certfile: the server's certificate and the certificates between it and the authority, PEM.
        keyfile: its private key; None = in `certfile`.
        password: opens an encrypted key.
        ca_certs: authorities whose clients are accepted, PEM.
        client_certificates: "none", "optional" or "required": the rule for clients' certificates of
            `ca_certs`.

    Raises:
        RequestError: a file cannot be read, or does not hold the expected data.
    """

    certfile: Path
    keyfile: Path | None = None
    password: str | None = field(default=None, repr=False)  # a repr may be logged
    ca_certs: Path | None = None
    client_certificates: ClientCertificates = "none"

    def __post_init__(self) -> None:
        if (self.ca_certs is None) != (self.client_certificates == "none"):
            raise RequestError(
                "clients' certificates are checked against ca_certs: give both or neither"
            )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        for file in (self.certfile, self.keyfile, self.ca_certs):
            if file is not None:
                _readable(file)
        self._load_certificate(context)
        if self.ca_certs is not None:
            try:
                context.load_verify_locations(self.ca_certs)
            except ssl.SSLError as error:
                raise RequestError(
                    f"{str(self.ca_certs)!r} holds no certificate in PEM format: {error}"
                ) from error

    def uvicorn_options(self) -> dict[str, Any]:
        """Returns keyword arguments of `uvicorn.Config`."""
        return {
            "ssl_certfile": self.certfile,
            "ssl_keyfile": self.keyfile,
            "ssl_keyfile_password": self.password,
            "ssl_ca_certs": None if self.ca_certs is None else str(self.ca_certs),
            "ssl_cert_reqs": _MODES[self.client_certificates],
        }

    def _load_certificate(self, context: ssl.SSLContext) -> None:
        key = str(self.keyfile or self.certfile)
        asked = False

        def password() -> str:  # without it OpenSSL would ask at the terminal
            nonlocal asked
            asked = True
            return self.password or ""

        try:
            context.load_cert_chain(self.certfile, self.keyfile, password)
        except (ssl.SSLError, ValueError) as error:  # ValueError: a password that is too long
            if asked and not self.password:
                message = (
                    f"the key in {key!r} is encrypted: its password belongs in a file or "
                    f"in {PASSWORD_VARIABLE}"
                )
            elif asked:
                message = f"the password does not open the key in {key!r}"
            elif getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
                message = (
                    f"the key in {key!r} does not belong to the certificate in "
                    f"{str(self.certfile)!r}"
                )
            elif self.keyfile is not None:
                message = (
                    f"{str(self.certfile)!r} and {key!r} are no certificate and private "
                    f"key in PEM format: {error}"
                )
            else:
                message = (
                    f"{key!r} does not hold a certificate and its private key in PEM "
                    f"format: {error}"
                )
            raise RequestError(message) from error


def read_password(file: Path | None) -> str | None:
    """Returns the password in the first line of a file.

    Without a file it returns the one in `PASSWORD_VARIABLE`, or None.

    Raises:
        RequestError: the file cannot be read.
    """
    if file is None:
        return os.environ.get(PASSWORD_VARIABLE)
    try:
        return file.read_text(encoding="utf-8").partition("\n")[0].rstrip("\r")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read the key's password in {str(file)!r}: {error}") from error


def _readable(file: Path) -> None:
    try:
        with file.open("rb"):
            pass
    except OSError as error:
        raise RequestError(f"cannot read {str(file)!r}: {error.strerror or error}") from error


T = TypeVar("T", bound=BaseModel)
MAX_DISCARDED_BYTES = 64 * 2**20
"""The most bytes of a too large body that are read and dropped: a client that is still sending when
the connection closes never reads the answer."""
BODY_TIMEOUT_SECONDS = 60.0
"""The time within which a body must arrive."""
CLIENT_GONE = 499
"""The status of requests whose client disconnected before the answer."""
CLOSE = {"connection": "close"}


async def read_body(request: Request, max_bytes: int) -> dict[str, Any]:
    """Returns the JSON object of the body.

    Raises:
        ApiError: larger than `max_bytes` (413), too slow (408), compressed (415), not a JSON object
            (400).
    """
    try:
        with anyio.fail_after(BODY_TIMEOUT_SECONDS):
            body = await _received(request, max_bytes)
    except TimeoutError as error:
        message = f"the body did not arrive within {BODY_TIMEOUT_SECONDS:g} seconds"
        raise ApiError(408, message, code="request_timeout", headers=CLOSE) from error
    except ClientDisconnect as error:
        raise ApiError(CLIENT_GONE, "the client has gone") from error
    if not _is_json(request.headers.get("content-type", "")):
        raise _not_an_object()
    coding = request.headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):
        message = f"the body is compressed ({coding[:40]}): send it as it is, in UTF-8"
        headers = {"accept-encoding": "identity"}
        raise ApiError(415, message, code="unsupported_encoding", headers=headers)
    return await run_in_threadpool(parse, body)


def parse(body: bytes) -> dict[str, Any]:
    """Returns the JSON object of a body. Raises ApiError (400): the body is no JSON object."""
    try:
        fields = read_json(body)
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from error
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise _not_an_object()
    return fields


def validated(model: type[T], fields: dict[str, Any]) -> T:
    """Returns an object as a `model`. Raises RequestValidationError, as FastAPI does."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        raise RequestValidationError(
            [{**one, "loc": ("body", *one["loc"])} for one in errors], body=fields
        ) from error


def _not_an_object() -> ApiError:
    return ApiError(
        400, "the body must be a JSON object, sent as application/json", code="invalid_json"
    )


def _is_json(content_type: str) -> bool:
    """Returns True for types of JSON.

    Browsers send these types to another origin only if the server allows it (CORS).
    """
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )


async def _received(request: Request, max_bytes: int) -> bytes:
    """Returns the body. Raises ApiError if it is too large, whatever its Content-Length says."""
    body, size = bytearray(), 0
    async for part in request.stream():
        size += len(part)
        if size <= max_bytes:
            body += part
        elif size > MAX_DISCARDED_BYTES:
            break
    if size > max_bytes:
        raise ApiError(
            413, f"the body is larger than {max_bytes} bytes", code="body_too_large", headers=CLOSE
        )
    return bytes(body)
