"""The options of `shoal serve`, by panel; `shoal batch` has some of them too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from shoal.cli.files import TEMPLATE_HELP
from shoal.cli.option_groups import (
    address_option,
    limits_option,
    machines_option,
    models_option,
    output_option,
    speed_option,
    tls_option,
)
from shoal.cli.options import Rule
from shoal.errors import RequestError

if TYPE_CHECKING:
    from shoal.serve.access import Tls

LogLevel = Literal["critical", "error", "warning", "info", "debug"]
LogFormat = Literal["text", "json"]
CpusOption = Annotated[
    float, machines_option("--cpus", min=0, help="With --ray: CPUs of each, and its threads.")
]
GpusOption = Annotated[
    float, machines_option("--gpus", min=0, help="With --ray: GPUs of each, or a part of one.")
]
ChatTemplateOption = Annotated[
    Path | None, models_option("--chat-template", metavar="NAME|FILE", help=TEMPLATE_HELP)
]
MaxNOption = Annotated[
    int, limits_option("--max-n", min=1, help="Samples of a prompt, best_of included.")
]
MaxTokensOption = Annotated[
    int, limits_option("--max-tokens", min=1, help="New tokens of a sample.")
]
KvMemoryOption = Annotated[
    float | None,
    limits_option(
        "--kv-memory",
        min=0.001,
        help="GiB that the keys and values of all samples may take; more wait.",
        show_default="half of what is free",
    ),
]
PrefixMemoryOption = Annotated[
    float | None,
    limits_option(
        "--prefix-memory",
        min=0,
        help="GiB of it for prompts that are kept for later requests of the same key; 0 = none.",
        show_default="an eighth, at most 1",
    ),
]


def lookahead_option(who: str) -> Any:
    """Returns the option of the draft lengths of many requests.

    Args:
        who: the beginning of a sentence: who may ask for shorter drafts.
    """
    return speed_option(
        "--lookahead",
        "--k",
        "-k",
        metavar="LENGTH",
        help="Tokens proposed per row and round: auto, a number, off, bass or heuristic. "
        f"{who} may ask for less.",
    )


@dataclass(frozen=True)
class NameOptions:
    """The names of the served model, and its chat template."""

    name: Annotated[
        list[str] | None,
        models_option(
            "--name",
            "--served-model-name",
            help="What clients call the model; repeatable. Without it, as --model (of a path "
            "its last part), or 'bundled'.",
        ),
    ] = None
    chat_template: ChatTemplateOption = None


@dataclass(frozen=True)
class AddressOptions:
    """The address of the server, and its callers."""

    host: Annotated[str, address_option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, address_option(min=0, max=65535, help="0 = any that is free.")] = 8000
    api_key_file: Annotated[
        Path | None,
        address_option(
            help="A file of API keys, one a line, a weight behind it or not. Without it, the "
            "key in SHOAL_API_KEY; without both, open to all."
        ),
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        address_option(help="A web page's origin that may call from a browser; repeatable."),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        address_option(
            help="A host name that requests may use, beside addresses and localhost; "
            "repeatable, * = any.",
            show_default="on a loopback address none, elsewhere any",
        ),
    ] = None


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
        from shoal.serve.access import Tls, read_password

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


@dataclass(frozen=True)
class LimitOptions:
    """The limits of requests."""

    max_n: MaxNOption = 256
    max_tokens: MaxTokensOption = 1024
    max_grammar: Annotated[
        int, limits_option(min=1, help="Characters of a grammar or JSON schema.")
    ] = 262144
    queue: Annotated[
        int, limits_option(min=0, help="Samples that may wait; requests beyond get 429.")
    ] = 256
    kv_memory: KvMemoryOption = None
    prefix_memory: PrefixMemoryOption = None
    generation_config: Annotated[
        Literal["auto", "none"],
        limits_option(
            help="auto: chats that do not say how they are sampled are sampled as the model's "
            "generation_config says."
        ),
    ] = "auto"
    members: Annotated[
        bool,
        limits_option(
            "--members",
            help="Requests may ask for members that jedi knows behind a dot. It needs jedi.",
        ),
    ] = False
    max_body: Annotated[int, limits_option(min=1, help="Bytes of a request.")] = 2 * 2**20
    timeout: Annotated[
        float,
        limits_option(min=0.001, help="Seconds; samples unfinished then are returned as they are."),
    ] = 600.0
    drain: Annotated[
        float,
        limits_option(min=0, help="Seconds for open requests to finish after SIGTERM or Ctrl-C."),
    ] = 20.0


@dataclass(frozen=True)
class ServedSpeculation:
    """The draft lengths and the acceptance rule of all requests."""

    lookahead: Annotated[str, lookahead_option("A request")] = "auto"
    rule: Annotated[
        Rule,
        speed_option(
            help="How drafts are accepted. coupled: a seed's tokens come again, whoever else is "
            "served. rejection: accepts more, and seeds are refused. auto = coupled."
        ),
    ] = "auto"


@dataclass(frozen=True)
class ReplicaOptions:
    """The replicas on Ray Serve."""

    ray: Annotated[
        bool,
        machines_option(
            "--ray",
            help="On Ray Serve: replicas on the cluster of RAY_ADDRESS, or on this machine.",
        ),
    ] = False
    replicas: Annotated[int, machines_option(min=1, help="With --ray: pairs at least.")] = 1
    max_replicas: Annotated[
        int | None,
        machines_option(
            min=1, help="With --ray: pairs at most, by demand.", show_default="as --replicas"
        ),
    ] = None
    target_requests: Annotated[
        float,
        machines_option(
            min=0.1,
            help="With --ray: requests, running and waiting, of a replica; beyond, there is one "
            "more.",
        ),
    ] = 4.0
    upscale_delay: Annotated[
        float,
        machines_option(
            min=0, help="With --ray: seconds of more demand before a replica is added."
        ),
    ] = 30.0
    downscale_delay: Annotated[
        float,
        machines_option(
            min=0, help="With --ray: seconds of less demand before a replica is removed."
        ),
    ] = 600.0
    cpus: CpusOption = 1.0
    gpus: GpusOption = 0.0


@dataclass(frozen=True)
class LogOptions:
    """The log that the server prints."""

    log_level: Annotated[LogLevel, output_option(help="What is logged on stderr.")] = "info"
    log_format: Annotated[LogFormat, output_option(help="Lines of text, or of JSON objects.")] = (
        "text"
    )
    json: Annotated[
        bool, output_option("--json", help="One JSON object on stdout once requests are answered.")
    ] = False
