"""The checks of `benchmarks/clients.py`: each client library that is installed, against a live server with the bundled pair.

Tests of: benchmarks/clients.py, client_checks.py and client_requests.py.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

import client_checks
import client_requests
import clients
from serving import Served, served
from shoal.api import Shoal


@pytest.fixture(scope="module")
def server(bundled: Shoal) -> Iterator[Served]:
    with served(bundled, chat_template=clients.TEMPLATE, max_tokens=100) as running:
        yield running


def installed(client: str) -> bool:
    try:
        return bool(metadata.version(client_checks.CLIENTS[client][0]))
    except metadata.PackageNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("client", clients.PYTHON_CLIENTS)
def test_what_a_client_can_do_works(client: str, server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not installed(client) or (client == "lm-eval" and not importlib.util.find_spec("tenacity")):
        pytest.skip(f"{client} is not installed (extra clients)")
    monkeypatch.setattr(client_requests, "MODEL", "tiny")
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    checks = client_checks.CLIENTS[client][1](server.url)
    assert set(checks) == set(clients.FEATURES)
    found = {feature: client_checks.word_of(check) for feature, check in checks.items()}
    assert set(found.values()) <= {"yes", "-"}, found


def test_the_checks_of_both_languages_are_of_the_same_features(tmp_path: Path) -> None:
    text = clients.CHECKS.with_suffix(".mjs").read_text("utf-8")
    features = re.search(r"const FEATURES = (\[.*?\]);", text, re.DOTALL)
    assert features
    assert tuple(re.findall(r'"([^"]+)"', features[1])) == clients.FEATURES
    assert tuple(re.findall(r'"([^"]+)": \["[\w-]+", of\w+\]', text)) == clients.NODE_CLIENTS
    assert tuple(client_checks.CLIENTS) == clients.PYTHON_CLIENTS
    if shutil.which("node"):
        for client in clients.NODE_CLIENTS:  # where nothing is installed
            report = clients.checked("python", tmp_path, client, "http://127.0.0.1:9", tmp_path)
            assert report == {"client": client, "version": None, "found": {}}


def test_a_fault_is_shown_in_the_table() -> None:
    def fault() -> None:
        raise ValueError("two\nlines")

    assert client_checks.word_of(fault) == "ValueError: two lines"
    for call in (lambda: None, lambda: {}["x"]):
        with pytest.raises(AssertionError):
            client_requests.refused(call)
