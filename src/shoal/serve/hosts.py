"""Allowed host names, against DNS rebinding.

The owner of another name can point it to this server, and a browser then takes pages under that
name for pages of the server. The Host header of their requests still has that name.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

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
