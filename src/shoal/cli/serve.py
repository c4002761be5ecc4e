"""`shoal serve`: an OpenAI-compatible server."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.console import hint_drafter, imports_shown, stderr
from shoal.cli.files import read_template, turn_ends
from shoal.cli.option_groups import option_groups
from shoal.cli.options import ModelSource, parse_lookahead
from shoal.cli.serve_options import (
    AddressOptions,
    LimitOptions,
    LogOptions,
    NameOptions,
    ReplicaOptions,
    ServedSpeculation,
    TlsOptions,
)
from shoal.config import LOSSY_RULES
from shoal.errors import RequestError
from shoal.models.sources import name_of

if TYPE_CHECKING:
    import socket

    from shoal.serve.access import Tls
    from shoal.serve.app import ServeConfig
    from shoal.serve.settings import Settings

LOOPBACK = ("127.", "localhost", "[::1]")


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

    It is made for many samples per request. /health, /ready and /metrics (Prometheus) are for
    those who run it. SIGTERM or Ctrl-C lets open requests finish. Fields, figures and faults:
    docs/reference/http-api.md. In a checkout of shoal it needs [bold]pip install '.\\[serve]'[/],
    and --ray [bold]pip install '.\\[ray]'[/].
    """
    controller = parse_lookahead(speculation.lookahead)
    if source.tensor_parallel:
        _check_with_tensor_parallel(machines, limits)
    try:
        with imports_shown():
            from shoal.serve import app, run
    except ImportError as error:
        raise RequestError(
            f"shoal serve needs more packages ({error}): pip install "
            f"'.[{'ray' if machines.ray else 'serve'}]'"
        ) from error
    rule = "coupled" if speculation.rule == "auto" else speculation.rule
    names = naming.name or [name_of(source.model or "bundled")]
    allowed = _settings(names, naming.chat_template, rule, address, limits)
    if rule in LOSSY_RULES:
        _say(LOSSY_RULES[rule], "yellow")
    memory = (
        in_bytes(limits.kv_memory),
        in_bytes(0 if source.tensor_parallel else limits.prefix_memory),
    )
    hint_drafter(source, speculation.lookahead)
    served = app.ServeConfig(source.load, allowed, controller, rule, *memory)
    encryption = tls.read()
    ready = partial(_print_address, address.host, allowed, output.json, encryption)
    if machines.ray:
        if encryption is not None:
            raise RequestError("--ray has no TLS: put a proxy with the certificate before it")
        from shoal.engine.batch_size import most_rows

        most_open = limits.queue + most_rows(source.max_batch)
        _serve_on_ray(served, machines, address, output, ready, open=most_open, drain=limits.drain)
        return
    if source.tensor_parallel and os.environ.get("RANK", "0") != "0":
        source.load()  # computes the passes that rank 0 asks for, and ends with rank 0
    # bind raises for a port in use before a model is loaded
    with run.bind(address.host, address.port) as listening:
        _serve_here(listening, served, output, ready, encryption, drain=limits.drain)


def _serve_on_ray(
    served: ServeConfig,
    machines: ReplicaOptions,
    address: AddressOptions,
    output: LogOptions,
    ready: Callable[[int], None],
    *,
    open: int,
    drain: float,
) -> None:
    """Serves by replicas on Ray until a signal.

    Args:
        served: the configuration of each replica.
        machines: the replicas, and the share of a machine that each takes.
        address: the address of the server.
        output: the log.
        ready: called with the port once requests are answered.
        open: the requests that a replica may have open, running and waiting.
        drain: seconds for open requests to finish.

    Raises:
        RequestError: Ray is missing.
    """
    cluster = ray_cluster()
    replicas = cluster.Replicas(
        machines.replicas,
        machines.max_replicas or machines.replicas,
        machines.target_requests,
        open=open,
        drain=drain,
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


def _serve_here(
    listening: socket.socket,
    served: ServeConfig,
    output: LogOptions,
    ready: Callable[[int], None],
    encryption: Tls | None,
    *,
    drain: float,
) -> None:
    """Serves by this process until a signal, and answers 503 until the model is loaded."""
    from shoal.serve import logs, run

    with logs.written(output.log_level, output.log_format):
        with run.answered(listening, encryption):
            app = served.app()
        run.run(
            app,
            listening,
            drain=drain,
            log_level=output.log_level,
            ready=partial(ready, listening.getsockname()[1]),
            tls=encryption,
            log_format=output.log_format,
        )


def _check_with_tensor_parallel(machines: ReplicaOptions, limits: LimitOptions) -> None:
    """Raises RequestError for options that do not go with --tensor-parallel."""
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
    """Returns the settings that the server allows; raises RequestError for a bad file or host."""
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
    with suppress(OSError):
        stderr().print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def in_bytes(gib: float | None) -> int | None:
    """Converts GiB to bytes; None = no limit."""
    return None if gib is None else int(gib * 2**30)


def ray_cluster() -> Any:
    """Returns the module for --ray; raises RequestError if its packages are missing."""
    try:
        from shoal.serve import cluster
    except ImportError as error:
        raise RequestError(f"--ray needs more packages ({error}): pip install '.[ray]'") from error
    return cluster
