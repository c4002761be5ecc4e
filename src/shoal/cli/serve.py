"""`shoal serve`: an OpenAI-compatible server."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shoal.cli.options import (
    MODELS,
    OUTPUT,
    SPEED,
    AttentionOption,
    CompileOption,
    DeviceOption,
    DraftOption,
    DraftRevisionOption,
    DtypeOption,
    LocalOption,
    MaxBatchOption,
    ModelOption,
    QuantizeOption,
    RevisionOption,
    Rule,
    Source,
    StrictOption,
    TrustOption,
    parse_lookahead,
)
from shoal.errors import RequestError

if TYPE_CHECKING:
    from shoal.api import Shoal
    from shoal.serve.settings import Settings

ADDRESS, LIMITS = "Address and access", "Limits"
LOOPBACK = ("127.", "localhost", "[::1]")
LogLevel = Literal["critical", "error", "warning", "info", "debug"]


def serve(
    model: ModelOption = None,
    draft: DraftOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    revision: RevisionOption = None,
    draft_revision: DraftRevisionOption = None,
    local_files_only: LocalOption = False,
    trust_remote_code: TrustOption = False,
    quantize: QuantizeOption = "auto",
    name: Annotated[
        str | None,
        typer.Option(help="What clients call the model. Without it, as --model, or 'bundled'.", rich_help_panel=MODELS),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="A file with a chat template, for a tokenizer without.", rich_help_panel=MODELS)
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=ADDRESS)] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 = any that is free.", rich_help_panel=ADDRESS)] = 8000,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="A file of API keys, one a line. Without it, the key in SHOAL_API_KEY; without both, open to all.",
            rich_help_panel=ADDRESS,
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="A web page's origin that may call from a browser; repeatable.", rich_help_panel=ADDRESS),
    ] = None,
    max_n: Annotated[int, typer.Option(min=1, help="Samples of a prompt, best_of included.", rich_help_panel=LIMITS)] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens of a sample.", rich_help_panel=LIMITS)] = 1024,
    queue: Annotated[
        int, typer.Option(min=0, help="Samples that may wait; beyond, requests are told to come again.", rich_help_panel=LIMITS)
    ] = 256,
    kv_memory: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="GiB that the keys and values of all samples may take; more wait.", show_default="no limit",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    max_body: Annotated[int, typer.Option(min=1, help="Bytes of a request.", rich_help_panel=LIMITS)] = 2 * 2**20,
    timeout: Annotated[
        float,
        typer.Option(min=0.001, help="Seconds; samples unfinished then are returned as they are.", rich_help_panel=LIMITS),
    ] = 600.0,
    drain: Annotated[
        float, typer.Option(min=0, help="Seconds for open requests to finish after SIGTERM or Ctrl-C.", rich_help_panel=LIMITS)
    ] = 30.0,
    lookahead: Annotated[
        str,
        typer.Option(
            "--lookahead", "--k", "-k", metavar="auto|K|off|bass|heuristic",
            help="Draft length: tokens proposed per row and round. A request may ask for less.", rich_help_panel=SPEED,
        ),
    ] = "auto",
    rule: Annotated[
        Rule,
        typer.Option(
            help="How drafts are judged. coupled: a seed's tokens come again, whoever else is served. rejection: more drafts are "
            "accepted, and seeds refused. auto = coupled.",
            rich_help_panel=SPEED,
        ),
    ] = "auto",
    attention: AttentionOption = "auto",
    max_batch: MaxBatchOption = 16,
    compile_passes: CompileOption = "auto",
    strict: StrictOption = False,
    log_level: Annotated[LogLevel, typer.Option(help="What is logged on stderr.", rich_help_panel=OUTPUT)] = "info",
    json_output: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout once requests are answered.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:  # fmt: skip
    """Serve a pair over HTTP, as OpenAI's API: /v1/completions, /v1/chat/completions, /v1/models.

    Many samples per request is what it is for. /health, /ready and /metrics (Prometheus) are for those who run it.
    SIGTERM or Ctrl-C lets open requests finish. Fields, figures and faults: docs/serving.md.
    It needs [bold]pip install 'shoal\\[serve]'[/].
    """
    source = Source(
        model, draft, dtype, device, revision, draft_revision, attention, max_batch, trust_remote_code, local_files_only,
        compile_passes, quantize, strict,
    )  # fmt: skip
    parse_lookahead(lookahead)
    try:
        from shoal.serve import keys, run, settings
    except ImportError as error:
        raise RequestError(f"shoal serve needs more packages ({error}): pip install 'shoal[serve]'") from error
    allowed = settings.Settings(
        model=name or model or "bundled", queue=queue, max_n=max_n, max_tokens=max_tokens, max_body=max_body, timeout=timeout,
        seeds=rule != "rejection", keys=keys.read_keys(api_key_file), origins=tuple(cors_origin or ()),
        chat_template=None if chat_template is None else _read(chat_template),
    )  # fmt: skip
    listening = run.bind(host, port)  # a port that is taken is found before a model is loaded
    with listening:
        kv_bytes = None if kv_memory is None else int(kv_memory * 2**30)
        app = _app(source.load(), parse_lookahead(lookahead), rule, kv_bytes, allowed)
        url = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}/v1"
        run.run(app, listening, drain, log_level, ready=partial(_tell, url, allowed, json_output))


def _tell(url: str, settings: Settings, json_output: bool) -> None:
    """Where the server is, and whether it is open to all."""
    from shoal.cli.views import stderr

    if json_output:
        print(json.dumps({"url": url, "model": settings.model}), flush=True)
    said = f"shoal serves {settings.model} at {url}, with a page to try it at {url.removesuffix('v1')} (Ctrl-C stops)"
    stderr().print(said, markup=False, highlight=False, soft_wrap=True)
    if not settings.keys and not any(f"//{place}" in url for place in LOOPBACK):
        stderr().print("no API key is set: whoever reaches this address may use it", style="yellow")


def _read(template: Path) -> str:
    try:
        return template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read the chat template {str(template)!r}: {error}") from error


def _app(shoal: Shoal, lookahead: str | int, rule: str, kv_bytes: int | None, settings: Settings) -> Any:
    from shoal.accept import RULES
    from shoal.serve.app import make_app

    chosen = RULES["coupled" if rule == "auto" else rule]
    return make_app(shoal, lambda: shoal.engine(lookahead, chosen(), kv_bytes=kv_bytes), settings)
