"""API keys: where they come from, and comparing them without telling by the time how much was right."""

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
        RequestError: for a file that cannot be read or holds no key: a server meant to be locked must not open.
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


def _digest(key: str) -> bytes:
    """Of equal length whatever the key's."""
    return hashlib.sha256(key.encode("utf-8", errors="surrogatepass")).digest()
