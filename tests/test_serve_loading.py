"""A server answers from its start: while its model is loaded it lives and is not ready."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import openai
import pytest
import uvicorn

from serving import PROTOCOL, TIMEOUT_SECONDS, application, pair, served
from shoal.serve.loading import answered
from shoal.serve.run import bind


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


def test_a_failure_to_load_passes_through() -> None:
    with bind("127.0.0.1", 0) as listening:
        with pytest.raises(ValueError, match="no such model"), answered(listening):
            raise ValueError("no such model")
        assert "shoal-loading" not in {thread.name for thread in threading.enumerate()}
        assert listening.fileno() >= 0


def test_the_command_ends_with_the_error_of_loading(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "shoal",
        "serve",
        "--model",
        str(tmp_path / "missing"),
        "--port",
        "0",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert ended.returncode == 2
    assert "missing" in ended.stderr
    assert ended.stdout == ""


def test_figures_of_the_dashboard_are_served() -> None:
    dashboard = json.loads((Path(__file__).parents[1] / "deploy" / "grafana.json").read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    names = {name for text in asked for name in re.findall(r"\b(?:shoal|process)_\w+", text)}
    with served(pair(), prefix_bytes=1 << 20) as server:
        server.post(n=2, max_tokens=4, seed=1)
        text = httpx.get(f"{server.url}/metrics").text
    told = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    assert len(names) > 10
    assert names <= told


def test_every_figure_is_documented() -> None:
    with served(pair()) as server:
        server.post(n=2, max_tokens=4, seed=1)
        text = httpx.get(f"{server.url}/metrics").text
    page = (Path(__file__).parents[1] / "docs" / "reference" / "http-api.md").read_text(encoding="utf-8")
    told = set(re.findall(r"shoal_\w+", page.split("## Metrics")[1].split("\n## ")[0]))
    families = re.findall(r"^# TYPE (shoal_\w+) (\w+)$", text, flags=re.MULTILINE)
    names = {name for name, _ in families if not name.endswith("_created")}
    assert names <= told, names - told
    assert told <= names, told - names
