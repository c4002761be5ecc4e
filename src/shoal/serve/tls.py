"""TLS: the server's certificate, and the authorities of its clients. uvicorn encrypts."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shoal.errors import RequestError

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
