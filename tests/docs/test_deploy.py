"""The files under deploy/, the Dockerfile and docs/deploy.md agree with the server: options, ports, probes, times, users.

Tests of: cli.serve, serve.run, serve.app; deploy/.
"""

from __future__ import annotations

import inspect
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from readme import ROOT, blocks, shoal_commands
from serving import application, pair
from shoal.cli import run as command
from shoal.cli.serve import serve
from shoal.serve import run

DEPLOY, PAGE = ROOT / "deploy", ROOT / "docs" / "deploy.md"
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
DEFAULTS = {name: option.default for name, option in inspect.signature(serve).parameters.items()}
LONGEST_STOP = run.NOTICE_SECONDS + DEFAULTS["drain"] + run.GRACE_SECONDS


def compose() -> dict[str, Any]:
    service: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]["shoal"]
    return service


def pod() -> dict[str, Any]:
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
    template = deployment["spec"]["template"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    spec: dict[str, Any] = template["spec"]
    return spec


def unit() -> dict[str, str]:
    """The settings of the unit; each is there once."""
    lines = (DEPLOY / "shoal.service").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("=", 1) for line in lines if re.match(r"[A-Z]\w+=", line)]
    assert len({name for name, _ in pairs}) == len(pairs)
    return dict(map(tuple, pairs))  # type: ignore[arg-type]


def instruction(name: str) -> list[str]:
    """The arguments of the Dockerfile's last instruction of that name, written as a list."""
    found: list[str] = yaml.safe_load(re.findall(rf"^ *{name} (\[.*\])$", DOCKERFILE, flags=re.MULTILINE)[-1])
    return found


def image_commands(console: str) -> list[list[str]]:
    """The arguments that `docker run` gives to `shoal` in the image, in a console block."""
    lines = console.replace("\\\n", " ").splitlines()
    words = [shlex.split(line) for line in lines if "docker run" in line]
    return [line[next(i for i, word in enumerate(line) if re.fullmatch(r"shoal(:cuda)?", word)) + 1 :] for line in words]


def commands() -> dict[str, list[str]]:
    """Every command of shoal that the files and the page run, by where it stands."""
    started = shlex.split(unit()["ExecStart"])
    assert Path(started[0]).name == "shoal"
    options = [word for word in started[1:] if word != "$SHOAL_ARGS"]
    found = {"Dockerfile": instruction("CMD"), "compose": compose()["command"], "unit": options}
    found["kubernetes"] = pod()["containers"][0]["args"]
    page = PAGE.read_text(encoding="utf-8")
    for line, block in blocks(page, "console"):
        shown = [*image_commands(block), *shoal_commands(block)]
        found.update({f"page {line}.{number}": words for number, words in enumerate(shown)})
    found["page: --allowed-host"] = re.findall(r"# shoal (serve .*)$", page, flags=re.MULTILINE)[0].split()
    return found


@pytest.mark.parametrize("where", commands())
def test_commands_parse(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = commands()[where]
    assert words[0] in ("serve", "demo")
    assert command([words[0], "--help", *words[1:]]) == 0, capsys.readouterr().err


def test_an_option_that_is_not_there_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    (words,) = image_commands("$ docker run --rm --volume a:b \\\n    shoal serve --no-such-option\n")
    assert command([words[0], "--help", *words[1:]]) == 2
    assert "--no-such-option" in capsys.readouterr().err


def test_probes_ask_paths_of_the_server_at_its_port() -> None:
    container, port = pod()["containers"][0], DEFAULTS["port"]
    asked = {container[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    asked |= set(re.findall(rf"http://127.0.0.1:{port}(/\w+)", DOCKERFILE))
    assert asked <= set(application(pair()).openapi()["paths"])
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert [one["containerPort"] for one in container["ports"]] == [port]
    assert all(one.endswith(f":{port}") for one in compose()["ports"])
    assert f"EXPOSE {port}\n" in DOCKERFILE


def test_nothing_is_killed_before_it_has_finished() -> None:
    page = PAGE.read_text(encoding="utf-8")
    grace = [
        int(compose()["stop_grace_period"].removesuffix("s")), pod()["terminationGracePeriodSeconds"],
        int(unit()["TimeoutStopSec"]), *map(int, re.findall(r"--stop-timeout (\d+)", page)),
    ]  # fmt: skip
    assert min(grace) >= LONGEST_STOP + 5
    assert unit()["KillMode"] == "mixed"  # processes that try grammars are not stopped before the server


def test_nobody_is_root_and_writes_lie_in_the_cache() -> None:
    """One folder of the image is mounted and written, and no root writes it."""
    (user,) = re.findall(r"^USER (\d+):\d+$", DOCKERFILE, flags=re.MULTILINE)
    assert int(user) > 0
    assert pod()["securityContext"]["runAsNonRoot"] is True
    assert pod()["securityContext"]["fsGroup"] == int(user)
    assert unit()["DynamicUser"] == "yes"
    caches = set(re.findall(r"(\w+)=/var/cache/shoal", DOCKERFILE))
    assert caches <= set(re.findall(r"(\w+)=%C/shoal", unit()["Environment"]))
    mounts = [mount["mountPath"] for mount in pod()["containers"][0]["volumeMounts"] if not mount.get("readOnly")]
    assert "/var/cache/shoal" in mounts
    assert [volume.partition(":")[2] for volume in compose()["volumes"]] == ["/var/cache/shoal"]


def test_the_image_is_built_of_files_that_are_there() -> None:
    """And all of them are let in by .dockerignore."""
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line.startswith("!")}
    lines = re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, flags=re.MULTILINE)
    copied = {source for line in lines for source in line.split()[:-1]}
    assert copied <= kept
    assert all((ROOT / name).exists() for name in copied)


# ── programs that read these files ──────────────────────────────────────────────────────────────────────────────────


def hadolint(file: Path) -> subprocess.CompletedProcess[str]:
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed")
    return subprocess.run([program, str(file)], capture_output=True, text=True)


@pytest.mark.slow
def test_the_dockerfile_is_clean(tmp_path: Path) -> None:
    ended = hadolint(ROOT / "Dockerfile")
    assert (ended.returncode, ended.stdout) == (0, "")
    wrong = tmp_path / "Dockerfile"
    wrong.write_text(DOCKERFILE.replace("ENTRYPOINT [", "ENTRYPOINT tini [").replace("rm -rf /var/lib/apt/lists/*", "true"))
    assert {"DL3025", "DL3009"} <= set(re.findall(r"DL\d+", hadolint(wrong).stdout))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_the_unit_is_clean(tmp_path: Path) -> None:
    text = (DEPLOY / "shoal.service").read_text(encoding="utf-8").replace("/opt/shoal/bin/shoal", sys.executable)
    answers = []
    for name, content in {"right": text, "wrong": text.replace("KillMode=mixed", "KillMode=gentle")}.items():
        (tmp_path / name).mkdir()
        file = tmp_path / name / "shoal.service"
        file.write_text(content)
        ended = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True)
        answers.append([line for line in (ended.stdout + ended.stderr).splitlines() if "shoal.service" in line])
    assert answers[0] == []
    assert "gentle" in answers[1][0]
