"""The access to the server: allowed host names, and API keys compared in constant time.

The names are checked against DNS rebinding. The owner of another name can point it to this server,
and a browser then takes pages under that name for pages of the server. The Host header of their
requests still has that name.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.errors import RequestError
from shoal.serve.api_errors import ApiError

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
        if scope["type"] == "http" and not self._knows(
            name := _name(Headers(scope=scope).get("host", ""))
        ):
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
    """Returns True if `given` is one of the keys.

    It compares every key, whole and in constant time.
    """
    digest = _digest(given)
    matches = [hmac.compare_digest(_digest(key), digest) for key in keys]
    return any(matches)


def owner_of(key: str) -> str:
    """Returns a name for the owner of the key, without showing the key."""
    return _digest(key).hex()


def _digest(key: str) -> bytes:
    """Returns a digest, of the same length for every key."""
    return hashlib.sha256(key.encode("utf-8", errors="surrogatepass")).digest()
