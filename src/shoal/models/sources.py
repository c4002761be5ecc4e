"""The meaning of a model's name: a directory with a model, a GGUF file, or a Hub id within reach.

The meaning is found before torch is imported. A model also has a name for outputs that must not
show its path, and a short identifier that depends on its files.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import threading
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from shoal.errors import ModelError, RequestError

SECONDS = 3.0
"""The seconds that the Hub has to accept a connection."""
PROXIES = ("https_proxy", "http_proxy", "all_proxy")


GGUF = ".gguf"
MAGIC = b"GGUF"
PARTS = re.compile(r"-00001-of-(\d{5})\.gguf$")
"""The pattern at the end of the name of the first of several parts of a model."""
CACHED = re.compile(r"/models--([^/]+)/snapshots/[^/]+$")
"""The pattern at the end of the path of a model's directory in the cache of the Hub."""
OWN_SUFFIXES = (".bin", ".jinja", ".json", ".model", ".py", ".safetensors", ".txt")
"""The files of a model's directory that determine its logits and its tokenization."""
END_BYTES = 2**16
"""The bytes read at both ends of a file: reading all weights would take as long as loading them."""


def bundled(part: str) -> Path:
    """Returns the directory of the bundled "target" or "drafter"."""
    return Path(__file__).parents[1] / "data" / "pair" / part


def gguf_of(
    source: str | Path, revision: str | None = None, local_files_only: bool = False
) -> Path | None:
    """Returns the GGUF file that a name means, or None for other names.

    Args:
        source: a path, or HUB-ID:FILE; the file is then downloaded, with the other parts of its
            model.

    Raises:
        RequestError: the file does not exist or cannot be read.
        ModelError: it is no GGUF file.
    """
    if not str(source).endswith(GGUF):
        return None
    path = Path(source).expanduser()
    hub, separator, name = str(source).partition(":")
    if separator and not path.exists() and not hub.startswith((".", "/", "~")):
        return _downloaded(hub, name, revision, local_files_only)
    if not path.is_file():
        raise RequestError(
            f"GGUF file {source} does not exist; of the Hub's it is HUB-ID:FILE.gguf"
        )
    require_magic(path)
    return path


def parts_of(name: str) -> list[str]:
    """Returns the names of all parts of a model, given a GGUF file or the first of its parts."""
    parts = PARTS.search(name)
    last = int(parts[1]) if parts else 1
    return [PARTS.sub(f"-{i:05}-of-{last:05}.gguf", name) for i in range(1, last + 1)]


def require_magic(file: Path) -> None:
    """Raises ModelError for a file that does not begin as GGUF files do."""
    try:
        with file.open("rb") as stream:
            start = stream.read(len(MAGIC))
    except OSError as error:
        raise RequestError(f"cannot read {str(file)!r}: {error.strerror}") from error
    if start != MAGIC:
        raise ModelError(
            f"{file} is no GGUF file: it does not begin with 'GGUF'; download it again"
        )


@cache
def _downloaded(hub: str, name: str, revision: str | None, local_files_only: bool) -> Path:
    """Returns a file of the Hub, or the first of a model's parts."""
    from huggingface_hub import constants, hf_hub_download

    names = parts_of(name)
    local = local_files_only or bool(constants.HF_HUB_OFFLINE) or _unreachable(constants.ENDPOINT)
    try:
        files = [
            hf_hub_download(hub, one, revision=revision, local_files_only=local) for one in names
        ]
    except (OSError, ValueError) as error:
        raise RequestError(
            f"cannot get {name} of {hub} from the Hub: {str(error).splitlines()[0]}"
        ) from error
    return Path(files[0])


def directory_of(source: str | Path) -> Path | None:
    """Returns the directory that a name means, or None for a Hub id or a GGUF file.

    Raises:
        RequestError: the name is a path, but neither of a directory with a config.json nor of a
            GGUF file.
    """
    path = Path(source).expanduser()
    if path.suffix == GGUF and not path.is_dir():
        if ":" not in str(source):
            gguf_of(source)
        return None
    if (
        not isinstance(source, Path)
        and not source.startswith((".", "/", "~"))
        and not path.exists()
    ):
        return None
    if not path.is_dir():
        raise RequestError(f"model directory {source} does not exist or is not a directory")
    if not (path / "config.json").is_file():
        files = sorted(file.name for file in path.glob(f"*{GGUF}"))
        hint = f"; it has a GGUF file: give {path / files[0]}" if files else ""
        raise RequestError(
            f"no config.json in {source}: it is not the directory of a Transformers model{hint}"
        )
    return path


def name_of(source: str) -> str:
    """Returns the name by which people call a model, without any path.

    The name of a directory is its last part as it is given, links included. The name of a directory
    in the Hub's cache is the Hub id. The name of a GGUF file lacks its ending and the number of its
    part. A Hub id stays as it is.
    """
    if source.endswith(GGUF):
        name = Path(source.rpartition(":")[2]).name
        return PARTS.sub("", name).removesuffix(GGUF)
    place = Path(source).expanduser()
    if not place.is_dir():
        return source
    path = Path(os.path.normpath(place.absolute()))
    cached = CACHED.search(str(path))
    return cached[1].replace("--", "/") if cached else path.name


def require_source(
    source: str | Path, revision: str | None = None, local_files_only: bool = False
) -> bool:
    """Checks that a model is available. A GGUF file of the Hub is then on this machine.

    Returns:
        True if only local files are to be read: the caller said so, or the Hub is out of reach and
            its cache has the model. Transformers itself would try again and again to reach the Hub,
            for most of a minute.

    Raises:
        RequestError: the path is wrong, or a Hub id is not in the cache while there is no network.
    """
    if directory_of(source) is not None or gguf_of(source, revision, local_files_only) is not None:
        return local_files_only
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = isinstance(
            try_to_load_from_cache(str(source), "config.json", revision=revision), str
        )
    except HFValidationError as error:
        raise RequestError(
            f"{source} is neither a directory nor a Hub id: {str(error).splitlines()[0]}"
        ) from error
    if local_files_only or constants.HF_HUB_OFFLINE:
        why = (
            "the network is not to be used (local_files_only, or HF_HUB_OFFLINE in the environment)"
        )
    elif _unreachable(constants.ENDPOINT):
        why = f"{constants.ENDPOINT} cannot be reached"
    else:
        return False
    if not cached:
        raise RequestError(
            f"{source} is no directory here and not in the Hub's cache, and {why}: give a directory"
        )
    return True


def weight_files(
    source: str | Path, revision: str | None = None, local_files_only: bool = False
) -> list[Path]:
    """Returns the files of a model's weights on this machine; raises as `require_source` does."""
    require_source(source, revision, local_files_only)
    file = gguf_of(source, revision, local_files_only)
    if file is not None:
        return [file]
    place = directory_of(source)
    if place is None:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(str(source), "config.json", revision=revision)
        if not isinstance(cached, str):
            return []
        place = Path(cached).parent
    return sorted(place.glob("*.safetensors"))


def quieten_transformers(models: Iterable[str]) -> None:
    """Keeps the warnings of Transformers off stderr.

    Also keeps its progress bars off, unless one of these models may be downloaded. Transformers
    reads both settings in the environment when it is imported; settings that are already there
    stay.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if all(Path(name).is_dir() for name in models):
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _unreachable(endpoint: str) -> bool:
    """Returns True if no connection to the Hub can be opened; trusts a proxy without a trial."""
    if any(os.environ.get(name) or os.environ.get(name.upper()) for name in PROXIES):
        return False
    place = urlsplit(endpoint)
    opened: list[bool] = []

    def connect() -> None:
        try:
            socket.create_connection(
                (place.hostname or "", place.port or 443), timeout=SECONDS
            ).close()
            opened.append(True)
        except OSError:
            pass

    # A thread, as looking a name up has no timeout of its own.
    trial = threading.Thread(target=connect, daemon=True)
    trial.start()
    trial.join(SECONDS)
    return not opened


def identity(model: str | Path, revision: str | None = None) -> str:
    """Returns an identifier of a model.

    For a directory, or a GGUF file, it is a digest of the files' sizes and ends; for a Hub id it is
    the id and the revision. Two training runs of one model differ in nearly all weights, so also in
    the weights at the ends of the files. A branch of the Hub may move to another commit; a revision
    that is a commit does not.
    """
    directory = directory_of(model)
    file = Path(model) if directory is None and Path(model).is_file() else None
    if file is not None:
        digest = hashlib.sha256(f"{file.stat().st_size} ".encode() + _ends(file))
        return f"sha256:{digest.hexdigest()[:16]}"
    if directory is None:
        return f"{model}@{revision or 'main'}"
    hasher = hashlib.sha256()
    for file in sorted(
        file for file in directory.iterdir() if file.suffix in OWN_SUFFIXES and file.is_file()
    ):
        hasher.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        hasher.update(_ends(file))
    return f"sha256:{hasher.hexdigest()[:16]}"


def people_call(model: str) -> str:
    """Returns the name of a model or drafter without any path.

    A directory has its last part, the bundled pair "bundled target" and "bundled drafter". A
    drafter comes without its options, which may name files; a Hub id is unchanged.
    """
    from shoal.models.sources import bundled

    for part in ("target", "drafter"):
        if Path(model) == bundled(part):
            return f"bundled {part}"
    if Path(model).is_dir() or model.endswith(GGUF):
        return name_of(model)
    return "+".join(part.partition(":")[0] for part in model.split("+"))


def _ends(file: Path) -> bytes:
    with file.open("rb") as content:
        first = content.read(END_BYTES)
        content.seek(max(len(first), content.seek(0, os.SEEK_END) - END_BYTES))
        return first + content.read()
