"""Names under which a server may be asked. A page elsewhere can have its own name point here (DNS rebinding), and is then of the
server's origin to the browser that shows it; but its requests still say that name in their Host header."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.serve.api_errors import ApiError

ANY = "*"


def hosts_of(bound: str, given: Sequence[str]) -> tuple[str, ...]:
    """Names to be asked under: those given, and without any, on a loopback address the machine's own only, elsewhere all."""
    return tuple(given) or ((bound,) if is_loopback(bound) else (ANY,))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that address."""
    return host == "localhost" or (_is_address(host) and ip_address(host).is_loopback)


class HostCheck:
    """ASGI middleware that answers 403 to requests under other names.

    Addresses, localhost and no name at all are always fine: rebinding needs a name of the attacker's.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self.app, self.hosts = app, {host.lower().rstrip(".") for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes everything else on."""
        if scope["type"] == "http" and not self._knows(name := _name(Headers(scope=scope).get("host", ""))):
            message = (
                f"this server is not asked under the name {name!r}; start it with --allowed-host {name} if it should be"
            )
            await ApiError(403, message, code="host_not_allowed").response()(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _knows(self, name: str) -> bool:
        return ANY in self.hosts or name in self.hosts or name in ("", "localhost") or _is_address(name)


def _name(host: str) -> str:
    """Without the port, as names are compared."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return (host.rpartition(":")[0] if host.count(":") == 1 else host).lower().rstrip(".")


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
