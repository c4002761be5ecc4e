"""`python benchmarks/clients.py`: a table of client libraries and features, each tried against a live server with the bundled pair.

The clients (`pip install '.[clients,lm-eval]'`) belong into an environment of their own: `--python` names its interpreter. Those of
Node.js (`npm install openai ai @ai-sdk/openai-compatible zod`) lie in the `node_modules` of the directory `--node`. The server is
started here; `client_checks.py` and `client_checks.mjs` run there, one process per client, and print what each check found.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

import command
from provenance import require_place, write_results
from shoal.bench.machine import machine
from shoal.errors import RequestError

PYTHON_CLIENTS = (
    "openai", "langchain-openai", "llama-index", "instructor", "llm", "litellm", "lm-eval", "pydantic-ai", "haystack", "dspy",
    "outlines", "evalplus",
)  # fmt: skip
NODE_CLIENTS = ("openai (Node.js)", "Vercel AI SDK")
CLIENTS = (*PYTHON_CLIENTS, *NODE_CLIENTS)
FEATURES = (
    "completion", "chat", "responses", "stream", "n", "logprobs", "stop", "tools", "JSON schema", "seed", "refusal of embeddings",
)  # fmt: skip
CHECKS = Path(__file__).resolve().with_name("client_checks.py")
LOADING_SECONDS, CLIENT_SECONDS = 600, 600
TEMPLATE = """{% if tools %}<tools>{{ tools | tojson }}</tools>
{% endif %}{% for m in messages %}<|{{ m.role }}|>
{{ m.content or '' }}{% for call in m.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}
{% endfor %}<|assistant|>
"""
"""The bundled target was not trained on chats; what is checked is the interface. Its calls are of Hermes' format."""

Found = dict[str, str]
"""By feature: "yes", "-" (the client has no such thing), or what went wrong."""


@contextmanager
def running(directory: Path, port: int) -> Iterator[str]:
    """A server by the command line, until the block ends. Its URL. Raises RequestError: it did not start."""
    template = directory / "template.jinja"
    template.write_text(TEMPLATE, "utf-8")
    url, log = f"http://127.0.0.1:{port}", (directory / "server.log").open("w+", encoding="utf-8")
    words = ["serve", "--port", str(port), "--chat-template", str(template), "--max-batch", "8"]
    server = subprocess.Popen([sys.executable, "-m", "shoal", *words], stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + LOADING_SECONDS
        while not _is_up(url):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RequestError(f"the server did not start: {(directory / 'server.log').read_text('utf-8')[-500:]}")
            time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait(30)
        log.close()


def _is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def checked(python: str, node: Path, client: str, url: str, directory: Path) -> Mapping[str, object]:
    """What the checks of one client print: its version and a word per feature."""
    if client in NODE_CLIENTS and shutil.which("node") is None:
        return {"client": client, "version": None, "found": {}, "error": "there is no node on PATH"}
    program = ["node", str(CHECKS.with_suffix(".mjs"))] if client in NODE_CLIENTS else [python, str(CHECKS)]
    environment = {
        **os.environ,
        "LLM_USER_PATH": str(directory),
        "HF_HOME": str(directory),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    try:
        done = subprocess.run(
            [*program, client, url],
            cwd=node if client in NODE_CLIENTS else None,
            capture_output=True,
            encoding="utf-8",
            timeout=CLIENT_SECONDS,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"client": client, "version": None, "found": {}, "error": f"not ready in {CLIENT_SECONDS} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"client"')]
    if not lines:
        return {"client": client, "version": None, "found": {}, "error": done.stderr[-300:]}
    return dict(json.loads(lines[-1]))


def main(
    python: Annotated[str, typer.Option(help="interpreter of the environment that has the clients")] = sys.executable,
    node: Annotated[Path, typer.Option(help="directory whose node_modules has the clients of Node.js")] = Path(),
    port: Annotated[int, typer.Option(help="of the server, on the loopback address")] = 8765,
    only: Annotated[list[str] | None, typer.Option("--client", help="of these clients alone; repeatable")] = None,
    to: Annotated[Path | None, typer.Option("--json", help="write what was found")] = None,
) -> None:
    """Prints a table. Exit code 1: something went wrong in a client that is installed."""
    require_place(to)
    table, reports, console = Table("client", "version", *FEATURES), [], Console(width=180)
    with tempfile.TemporaryDirectory() as place, running(Path(place), port) as url:
        for client in only or CLIENTS:
            report = checked(python, node, client, url, Path(place))
            reports.append(report)
            found: Found = report["found"]  # type: ignore[assignment]
            table.add_row(
                client, str(report["version"] or "not installed"), *(found.get(feature, "") for feature in FEATURES)
            )
            if "error" in report:
                console.print(f"{client}: {report['error']}", markup=False)
    console.print(table)
    if to is not None:
        write_results(to, {"machine": machine(torch.device("cpu")), "clients": reports})
    wrong = [word for report in reports for word in report["found"].values() if word not in ("yes", "-")]  # type: ignore[attr-defined]
    raise SystemExit(bool(wrong) or any(report["version"] and "error" in report for report in reports))


if __name__ == "__main__":
    command.run(main)
