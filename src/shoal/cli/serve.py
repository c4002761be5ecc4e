"""`shoal serve`: an OpenAI-compatible server."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from shoal.cli.files import TEMPLATE_HELP, read_template, turn_ends
from shoal.cli.option_groups import (
    address_option,
    limits_option,
    machines_option,
    models_option,
    option_groups,
    output_option,
    speed_option,
)
from shoal.cli.options import ModelSource, Rule, parse_lookahead
from shoal.cli.tls import TlsOptions
from shoal.config import LOSSY_RULES
from shoal.errors import RequestError
from shoal.models.sources import name_of

if TYPE_CHECKING:
    from shoal.serve.settings import Settings
    from shoal.serve.tls import Tls

LOOPBACK = ("127.", "localhost", "[::1]")
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
            "key in SHOAL_API_KEY; without both, "
            "open to all."
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

    lookahead: Annotated[
        str,
        speed_option(
            "--lookahead",
            "--k",
            "-k",
            metavar="LENGTH",
            help="Tokens proposed per row and round: auto, a number, off, bass or heuristic. A "
            "request may ask for less.",
        ),
    ] = "auto"
    rule: Annotated[
        Rule,
        speed_option(
            help="How drafts are accepted. coupled: a seed's tokens come again, whoever else is "
            "served. rejection: accepts more, "
            "and seeds are refused. auto = coupled."
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


@option_groups()
def serve(
    speculation: ServedSpeculation,
    source: ModelSource,
    naming: NameOptions,
    address: AddressOptions,
    tls: TlsOptions,
    limits: LimitOptions,
    machines: ReplicaOptions,
    output: LogOptions,
) -> None:
    """Serve a pair over HTTP, as OpenAI's API: /v1/completions, /v1/chat/completions,
    /v1/responses.

    Many samples per request is what it is for. /health, /ready and /metrics (Prometheus) are for
    those who run it. SIGTERM or Ctrl-C lets open requests finish. Fields, figures and faults:
    docs/reference/http-api.md. In a checkout of shoal it needs [bold]pip install '.\\[serve]'[/],
    and --ray [bold]pip install '.\\[ray]'[/].
    """
    controller = parse_lookahead(speculation.lookahead)
    if source.tensor_parallel:
        _check_with_tensor_parallel(machines, limits)
    try:
        from shoal.serve import logs, run, serve_config
    except ImportError as error:
        raise RequestError(
            f"shoal serve needs more packages ({error}): pip install '.[serve]'"
        ) from error
    rule = "coupled" if speculation.rule == "auto" else speculation.rule
    allowed = _settings(
        naming.name or [name_of(source.model or "bundled")],
        naming.chat_template,
        rule,
        address,
        limits,
    )
    if rule in LOSSY_RULES:
        _say(LOSSY_RULES[rule], "yellow")
    memory = (
        in_bytes(limits.kv_memory),
        in_bytes(0 if source.tensor_parallel else limits.prefix_memory),
    )
    served = serve_config.ServeConfig(source.load, allowed, controller, rule, *memory)
    encryption = tls.read()
    ready = partial(_print_address, address.host, allowed, output.json, encryption)
    if machines.ray:
        if encryption is not None:
            raise RequestError("--ray has no TLS: put a proxy with the certificate before it")
        from shoal.engine.batch_size import most_rows

        cluster = ray_cluster()
        replicas = cluster.Replicas(
            machines.replicas,
            machines.max_replicas or machines.replicas,
            machines.target_requests,
            open=limits.queue + most_rows(source.max_batch),
            drain=limits.drain,
            up_after=machines.upscale_delay,
            down_after=machines.downscale_delay,
        )
        cluster.run(
            served,
            address.host,
            address.port,
            replicas=replicas,
            share=cluster.Share(machines.cpus, machines.gpus),
            ready=ready,
            log=cluster.LogConfig(output.log_level, output.log_format),
        )
        return
    if source.tensor_parallel and os.environ.get("RANK", "0") != "0":
        source.load()  # computes the passes that rank 0 asks for, and ends with rank 0
    # bind raises for a port in use before a model is loaded
    with (
        run.bind(address.host, address.port) as listening,
        logs.written(output.log_level, output.log_format),
    ):
        with run.answered(listening, encryption):
            app = served.app()
        run.run(
            app,
            listening,
            drain=limits.drain,
            log_level=output.log_level,
            ready=partial(ready, listening.getsockname()[1]),
            tls=encryption,
            log_format=output.log_format,
        )


def _check_with_tensor_parallel(machines: ReplicaOptions, limits: LimitOptions) -> None:
    """Refuses options that do not go with --tensor-parallel.

    Raises:
        RequestError: there is such an option.
    """
    if machines.ray:
        raise RequestError("--tensor-parallel does not go with --ray: a replica is one process")
    if limits.prefix_memory:
        raise RequestError(
            "--tensor-parallel keeps no prompts for later requests: leave --prefix-memory out, "
            "or give 0"
        )


def _settings(
    names: Sequence[str],
    chat_template: Path | None,
    rule: str,
    address: AddressOptions,
    limits: LimitOptions,
) -> Settings:
    """Returns the settings that the server allows.

    Raises:
        RequestError: a file cannot be read, or a host is wrong.
    """
    from shoal.serve import access, settings

    given = access.read_keys(address.api_key_file)
    return settings.Settings(
        model=names[0],
        aliases=tuple(names[1:]),
        queue=limits.queue,
        max_n=limits.max_n,
        max_tokens=limits.max_tokens,
        max_body=limits.max_body,
        max_grammar=limits.max_grammar,
        timeout=limits.timeout,
        seeds=rule == "coupled",
        keys=tuple(given),
        weights=access.weights_of(given),
        origins=tuple(address.cors_origin or ()),
        hosts=access.hosts_of(address.host, address.allowed_host or ()),
        chat_template=read_template(chat_template),
        turn_ends=turn_ends(chat_template),
        generation_config=limits.generation_config == "auto",
        members=limits.members,
    )


def _print_address(
    host: str, settings: Settings, json_output: bool, tls: Tls | None, port: int
) -> None:
    """Prints the address, and a warning if everybody may use it."""
    url = f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}/v1"
    if json_output:
        print(json.dumps({"url": url, "model": settings.model}), flush=True)
    _say(
        f"shoal serves {settings.model} at {url} (Ctrl-C stops)\na page to try it: "
        f"{url.removesuffix('v1')}"
    )
    closed = settings.keys or (tls is not None and tls.client_certificates == "required")
    if not closed and not any(f"//{place}" in url for place in LOOPBACK):
        _say("no API key is set: whoever reaches this address may use it", "yellow")


def _say(text: str, style: str | None = None) -> None:
    """Prints on stderr, and goes on where that is a file on a full disk, as the log does."""
    from shoal.cli.console import stderr

    with suppress(OSError):
        stderr().print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def in_bytes(gib: float | None) -> int | None:
    """Converts GiB to bytes; None = no limit."""
    return None if gib is None else int(gib * 2**30)


def ray_cluster() -> Any:
    """Returns the module for --ray.

    Raises:
        RequestError: its packages are missing.
    """
    try:
        from shoal.serve import cluster
    except ImportError as error:
        raise RequestError(f"--ray needs more packages ({error}): pip install '.[ray]'") from error
    return cluster
