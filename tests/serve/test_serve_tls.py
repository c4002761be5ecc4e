"""HTTPS by the server itself: who is answered, who is not, and what is said about files that do not fit.

Tests of: serve.access, serve.run, cli.serve_options.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
import uvicorn
from cryptography.hazmat.primitives import serialization

from serving import TIMEOUT_SECONDS, Served, eventually, pair, served, status
from serving_faults import asking, connect_narrowly, narrow
from shoal import cli
from shoal.api import Shoal
from shoal.cli import serve
from shoal.cli.options import ModelSource
from shoal.errors import RequestError
from shoal.serve import run
from shoal.serve.access import PASSWORD_VARIABLE, Tls, read_password

__all__ = ["narrow"]  # a fixture
PASSWORD = "correct horse"
BODY: dict[str, Any] = {"prompt": "hello", "n": 4, "max_tokens": 40, "seed": 3, "logprobs": 5}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """server.pem, server.key, the key encrypted, both in one file; authority.pem; another's key; a client's certificate."""
    place = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(place / "authority.pem")
    certificate, client = authority.issue_cert("127.0.0.1", "localhost"), authority.issue_cert("client@example.org")
    for name, issued in {"server": certificate, "client": client}.items():
        issued.cert_chain_pems[0].write_to_path(place / f"{name}.pem")
        issued.private_key_pem.write_to_path(place / f"{name}.key")
        issued.private_key_and_cert_chain_pem.write_to_path(place / f"{name}-both.pem")
    key = serialization.load_pem_private_key(certificate.private_key_pem.bytes(), None)
    encryption = serialization.BestAvailableEncryption(PASSWORD.encode())
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    (place / "encrypted.key").write_bytes(pem)
    (place / "password").write_text(f"{PASSWORD}\n")
    (place / "text").write_text("neither a key nor a certificate\n")
    (place / "folder").mkdir()
    return place


def trusting(files: Path, client: str = "") -> ssl.SSLContext:
    """What a client needs that knows the authority, and may show a certificate."""
    context = ssl.create_default_context(cafile=files / "authority.pem")
    if client:
        context.load_cert_chain(files / client)
    return context


@pytest.fixture(scope="module")
def shoal() -> Shoal:
    return pair()


@pytest.fixture(scope="module")
def server(files: Path, shoal: Shoal) -> Iterator[Served]:
    with served(shoal, Tls(files / "server.pem", files / "server.key")) as running:
        yield running


def test_answers_are_those_of_http(server: Served, files: Path, shoal: Shoal) -> None:
    with httpx.Client(verify=trusting(files), timeout=TIMEOUT_SECONDS, base_url=server.url) as client:
        encrypted = client.post("/v1/completions", json=BODY)
        page = client.get("/")
        assert client.get("/ready").json() == {"status": "ok"}
    with served(shoal) as other:
        plain = httpx.post(f"{other.url}/v1/completions", json=BODY, timeout=TIMEOUT_SECONDS)
        assert page.content == httpx.get(other.url).content
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert encrypted.json()["choices"] == plain.json()["choices"]
    assert encrypted.json()["usage"] == plain.json()["usage"]
    assert all(0 < took["accepted"] < took["drafted"] for took in encrypted.json()["usage"]["choices"])


@pytest.mark.slow(but=["asyncio"])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_writes_pause_and_go_on(loop: str, files: Path, shoal: Shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and answers in one piece, larger and smaller than a connection's buffers."""
    factory = pytest.importorskip(loop).new_event_loop
    monkeypatch.setattr(uvicorn.Config, "get_loop_factory", lambda self: factory)
    large = {**BODY, "max_tokens": 100, "logprobs": 20}
    with (
        served(shoal, Tls(files / "server-both.pem")) as server,
        httpx.Client(verify=trusting(files), timeout=TIMEOUT_SECONDS, base_url=server.url) as client,
    ):
        for _ in range(2):
            with client.stream("POST", "/v1/completions", json={**large, "stream": True}) as answer:
                assert [line for line in answer.iter_lines() if line][-1] == "data: [DONE]"
            assert len(client.post("/v1/completions", json=large).content) > 200_000


def test_who_does_not_read_is_cut_off(files: Path, shoal: Shoal, narrow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "READ_TIMEOUT_SECONDS", 0.2)
    with (
        served(shoal, Tls(files / "server-both.pem")) as server,
        connect_narrowly(server) as connection,
        trusting(files).wrap_socket(connection, server_hostname="127.0.0.1") as encrypted,
    ):
        encrypted.sendall(asking(prompt="hello", n=4, max_tokens=80, logprobs=20, stream=True))
        assert status(encrypted) == 200
        eventually(lambda: not server.worker._submissions)
        assert server.worker.rows == 0


def test_http_and_strangers_certificates_are_refused(server: Served) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(server.url.replace("https", "http"), timeout=TIMEOUT_SECONDS)
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(server.url, timeout=TIMEOUT_SECONDS)


@pytest.mark.parametrize(("mode", "without"), [("required", False), ("optional", True)])
def test_clients_show_certificates(mode: Any, without: bool, files: Path, shoal: Shoal) -> None:
    tls = Tls(files / "server.pem", files / "server.key", ca_certs=files / "authority.pem", client_certificates=mode)
    stranger = trusting(files)
    trustme.CA().issue_cert("stranger@example.org").configure_cert(stranger)
    with served(shoal, tls) as server:
        clients = trusting(files, "client-both.pem"), trusting(files), stranger
        assert [is_answered(server.url, context) for context in clients] == [True, without, False]


def is_answered(url: str, context: ssl.SSLContext) -> bool:
    """Whether a client gets an answer."""
    try:
        return httpx.get(f"{url}/health", verify=context, timeout=TIMEOUT_SECONDS).status_code == 200
    except httpx.TransportError:
        return False


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_command_serves_https(
    shoal: Shoal, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    statuses: list[int] = []

    def ask(url: str) -> None:
        try:
            with httpx.Client(verify=trusting(files), timeout=TIMEOUT_SECONDS) as client:
                statuses.append(client.get(f"{url}/models").status_code)
                statuses.append(client.get(url.removesuffix("v1")).status_code)
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(ModelSource, "load", lambda self: shoal)
    said = serve._print_address

    def ready(*arguments: Any) -> None:
        said(*arguments)
        url = json.loads(capsys.readouterr().out)["url"]
        assert url.startswith("https://127.0.0.1:")
        threading.Thread(target=ask, args=(url,)).start()

    monkeypatch.setattr(serve, "_print_address", ready)
    monkeypatch.setenv(PASSWORD_VARIABLE, "another")  # the file goes before it
    options = ["--ssl-certfile", "server.pem", "--ssl-keyfile", "encrypted.key", "--ssl-password-file", "password"]
    monkeypatch.chdir(files)
    code = cli.run(["serve", "--port", "0", "--json", *options])
    assert (code, statuses) == (130, [200, 200])


CERTIFICATE = ["--ssl-certfile", "server.pem"]
WRONG = {
    "no file": ([*CERTIFICATE, "--ssl-keyfile", "gone.key"], "cannot read 'gone.key': No such file or directory"),
    "a folder": (["--ssl-certfile", "folder"], "cannot read 'folder': Is a directory"),
    "no key": (CERTIFICATE, "'server.pem' does not hold a certificate and its private key"),
    "text": (["--ssl-certfile", "text", "--ssl-keyfile", "server.key"], "'text' and 'server.key' are no certificate"),
    "another's key": ([*CERTIFICATE, "--ssl-keyfile", "client.key"], "'client.key' does not belong to the certificate in"),
    "encrypted": ([*CERTIFICATE, "--ssl-keyfile", "encrypted.key"], "'encrypted.key' is encrypted: its password belongs"),
    "wrong password": (
        [*CERTIFICATE, "--ssl-keyfile", "encrypted.key", "--ssl-password-file", "text"],
        "the password does not open the key in 'encrypted.key'",
    ),
    "no password": (
        [*CERTIFICATE, "--ssl-keyfile", "encrypted.key", "--ssl-password-file", "gone"],
        "cannot read the key's password in 'gone'",
    ),
    "no authority": (
        ["--ssl-certfile", "server-both.pem", "--ssl-ca-certs", "text"],
        "'text' holds no certificate in PEM format",
    ),
    "key alone": (["--ssl-keyfile", "server.key"], "--ssl-keyfile needs --ssl-certfile"),
    "authority alone": (["--ssl-ca-certs", "authority.pem"], "--ssl-ca-certs needs --ssl-certfile"),
    "mode alone": (["--ssl-certfile", "server-both.pem", "--ssl-cert-reqs", "optional"], "needs --ssl-ca-certs"),
    "Ray": (["--ssl-certfile", "server-both.pem", "--ray"], "--ray has no TLS"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_said(
    case: str, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a model is loaded, and without asking at the terminal."""
    options, message = WRONG[case]
    monkeypatch.chdir(files)
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    assert cli.run(["serve", "--port", "0", *options]) == 2
    assert message in capsys.readouterr().err


def test_passwords_come_from_a_file_or_the_environment(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    assert read_password(None) == read_password(files / "password") == PASSWORD
    tls = Tls(files / "server.pem", files / "encrypted.key", read_password(None))
    assert PASSWORD not in repr(tls)
    with pytest.raises(RequestError, match="give both or neither"):
        Tls(files / "server-both.pem", client_certificates="required")


def test_unreadable_keys_are_named(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(file: Path, *arguments: Any) -> Any:  # root, who may run this, reads files of any mode
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))

    monkeypatch.setattr(Path, "open", closed)
    with pytest.raises(RequestError, match=r"cannot read .*server\.pem': Permission denied"):
        Tls(files / "server.pem", files / "server.key")
