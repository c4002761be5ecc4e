"""The options of TLS."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from shoal.cli.option_groups import tls_option
from shoal.errors import RequestError

if TYPE_CHECKING:
    from shoal.serve.tls import Tls


@dataclass(frozen=True)
class TlsOptions:
    """The options for HTTPS by the server itself."""

    ssl_certfile: Annotated[
        Path | None,
        tls_option(
            help="The server's certificate, PEM, with those between it and the authority: "
            "serves HTTPS, and only that."
        ),
    ] = None
    ssl_keyfile: Annotated[
        Path | None,
        tls_option(help="Its private key, PEM.", show_default="in the certificate's file"),
    ] = None
    ssl_password_file: Annotated[
        Path | None,
        tls_option(
            help="A file with the password of an encrypted key.",
            show_default="the password in SHOAL_SSL_KEYFILE_PASSWORD",
        ),
    ] = None
    ssl_ca_certs: Annotated[
        Path | None,
        tls_option(help="Authorities, PEM: clients have to show a certificate of one of them."),
    ] = None
    ssl_cert_reqs: Annotated[
        Literal["optional", "required"] | None,
        tls_option(
            help="With --ssl-ca-certs: whether clients without a certificate are served too.",
            show_default="required",
        ),
    ] = None

    def read(self) -> Tls | None:
        """Reads the certificate and the key; None = HTTP.

        Raises:
            RequestError: a file does not hold the certificate, key or password that it should.
        """
        from shoal.serve.tls import Tls, read_password

        if self.ssl_certfile is None:
            others = {
                "--ssl-keyfile": self.ssl_keyfile,
                "--ssl-password-file": self.ssl_password_file,
                "--ssl-ca-certs": self.ssl_ca_certs,
                "--ssl-cert-reqs": self.ssl_cert_reqs,
            }
            given = [name for name, value in others.items() if value is not None]
            if given:
                raise RequestError(
                    f"{given[0]} needs --ssl-certfile: without a certificate there is no TLS"
                )
            return None
        if self.ssl_cert_reqs is not None and self.ssl_ca_certs is None:
            raise RequestError(
                "--ssl-cert-reqs needs --ssl-ca-certs: whose certificates are accepted"
            )
        password = read_password(self.ssl_password_file)
        clients = "none" if self.ssl_ca_certs is None else self.ssl_cert_reqs or "required"
        return Tls(self.ssl_certfile, self.ssl_keyfile, password, self.ssl_ca_certs, clients)
