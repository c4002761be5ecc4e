"""API keys: reading them, and comparing them in constant time."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable
from pathlib import Path

from shoal.errors import RequestError

VARIABLE = "SHOAL_API_KEY"


def read_keys(file: Path | None) -> tuple[str, ...]:
    """The keys in a file, one a line (empty lines and those that begin with # are skipped); without a file, `VARIABLE`'s.

    Raises:
        RequestError: the file cannot be read or has no key: the server must not start without the keys it was given.
    """
    if file is None:
        key = os.environ.get(VARIABLE, "").strip()
        return (key,) if key else ()
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read the API keys in {str(file)!r}: {error}") from error
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise RequestError(f"{str(file)!r} holds no API key: write one a line")
    return keys


def is_valid_key(keys: Iterable[str], given: str) -> bool:
    """Whether `given` is one of the keys. Every key is compared, whole and in constant time."""
    digest = _digest(given)
    matches = [hmac.compare_digest(_digest(key), digest) for key in keys]
    return any(matches)


def owner_of(key: str) -> str:
    """Names whoever has the key, without showing it."""
    return _digest(key).hex()


def _digest(key: str) -> bytes:
    """Has the same length for every key."""
    return hashlib.sha256(key.encode("utf-8", errors="surrogatepass")).digest()
