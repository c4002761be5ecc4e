"""A server answers from its start: while its model is loaded it lives and is not ready.

Tests of: serve.run, cli.serve; deploy/grafana.json.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from serving import PROTOCOL, TIMEOUT_SECONDS, application, pair, served
from shoal.api import Shoal
from shoal.cli import run
from shoal.cli.options import ModelSource
from shoal.errors import ModelError
from shoal.serve import run as run_module
from shoal.serve.access import Tls
from shoal.serve.run import answered, bind


def test_what_is_answered_until_there_is_a_model() -> None:
    with bind("127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with answered(listening):
            health, ready = httpx.get(f"{url}/health"), httpx.get(f"{url}/ready")
            assert (health.status_code, ready.status_code) == (200, 503)
            assert health.json() == ready.json() == {"status": "a model is being loaded"}
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            with pytest.raises(openai.InternalServerError) as told:
                client.completions.create(model="x", prompt="y")
            assert (told.value.status_code, told.value.code) == (503, "loading")
            assert told.value.response.headers["retry-after"] == "5"
        server = uvicorn.Server(uvicorn.Config(application(pair()), log_level="critical", **PROTOCOL))
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        try:
            answer = httpx.post(f"{url}/v1/completions", json={"prompt": "hello", "max_tokens": 3}, timeout=TIMEOUT_SECONDS)
            assert (answer.status_code, httpx.get(f"{url}/ready").status_code) == (200, 200)
        finally:
            server.should_exit = True
            thread.join(TIMEOUT_SECONDS)


def health_while_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command answers /health before its model is loaded: loading itself asks."""
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    asked: list[int] = []

    def load(self: ModelSource) -> Shoal:
        asked.append(httpx.get(f"http://127.0.0.1:{port}/health").status_code)
        raise ModelError("there is no model")

    monkeypatch.setattr(ModelSource, "load", load)
    run(["serve", "--port", str(port)])
    assert asked == [200]


@contextmanager
def opened_after(listening: socket.socket, tls: Tls | None = None) -> Iterator[None]:
    """The socket answers once there is a model."""
    yield
    with answered(listening, tls):
        pass


@contextmanager
def not_yet_alive(listening: socket.socket, tls: Tls | None = None) -> Iterator[None]:
    """It answers before, but /health as all else."""
    answer = run_module.answer

    async def unready(scope: Scope, receive: Receive, send: Send) -> None:
        await answer({**scope, "path": "/ready"}, receive, send)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "answer", unready)
        with answered(listening, tls):
            yield


@pytest.mark.parametrize(("sabotage", "told"), [(None, [200]), (opened_after, []), (not_yet_alive, [503])])
def test_health_is_answered_while_the_model_is_loaded(
    sabotage: Any, told: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if sabotage:
        monkeypatch.setattr(run_module, "answered", sabotage)
    with pytest.raises(AssertionError, match=re.escape(f"assert {told} == [200]")) if sabotage else nullcontext():
        health_while_loading(monkeypatch)


def test_a_failure_to_load_passes_through() -> None:
    with bind("127.0.0.1", 0) as listening:
        with pytest.raises(ValueError, match="no such model"), answered(listening):
            raise ValueError("no such model")
        assert "shoal-loading" not in {thread.name for thread in threading.enumerate()}
        assert listening.fileno() >= 0


def test_figures_are_served_and_documented() -> None:
    """Those that the dashboard asks for, and those of the page on the API, which names all."""
    root = Path(__file__).parents[2]
    dashboard = json.loads((root / "deploy" / "grafana.json").read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    with served(pair(), prefix_bytes=1 << 20) as server:
        server.post(n=2, max_tokens=4, seed=1)
        text = httpx.get(f"{server.url}/metrics").text
    told = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    names = {name for text in asked for name in re.findall(r"\b(?:shoal|process)_\w+", text)}
    assert len(names) > 10
    assert names <= told
    page = (root / "docs" / "reference" / "http-api.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"shoal_\w+", page.split("## Metrics")[1].split("\n## ")[0]))
    families = re.findall(r"^# TYPE (shoal_\w+) (\w+)$", text, flags=re.MULTILINE)
    assert {name for name, _ in families if not name.endswith("_created")} == documented
