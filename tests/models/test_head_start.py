"""Weights are read, and memory is found for them, before a command imports the classes of models.

Tests of: models.head_start, models.sources (weight_files), cli.options (ModelSource.load).
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shoal.errors import RequestError
from shoal.models import head_start
from shoal.models.head_start import CHUNK, HeadStart, mapping
from shoal.models.sources import weight_files

needs_huge_pages = pytest.mark.skipif(head_start.HUGE is None, reason="needs huge pages: this system has none")
SIZE = 2 * CHUNK + 5
UNUSED = (
    "fastapi", "uvicorn", "llguidance", "matplotlib", "pandas", "datasets", "peft", "trl", "ray", "lm_eval", "tree_sitter",
    "llama_cpp", "torchao", "scipy", "sklearn", "torch._inductor", "torch.distributed.fsdp",
    "torch.distributed.checkpoint", "shoal.serve", "shoal.train", "shoal.evaluation", "shoal.integrations",
)  # fmt: skip
"""What `shoal generate` does without."""
GENERATE = """
import json, os, sys
seen = []

def hook(event, arguments):
    name = str(arguments[0]).replace(os.sep, "/").rpartition("/")[2] if event == "open" else ""
    if name == "model.safetensors":
        seen.append("weights")
    if name.startswith("modeling_utils."):  # of Transformers
        seen.append("classes")

sys.addaudithook(hook)
from shoal.cli import main
sys.argv[1:] = ["generate", "-p", "1 2", "--max-new-tokens", "1", "--json", "--model", sys.argv[1]]
try:
    main()
except SystemExit as end:
    code = end.code
print(json.dumps([code, seen, sorted(sys.modules)]))
"""


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A file of two chunks and some bytes, of which the disk has none."""
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.truncate(SIZE)
    return file


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "shoal-head-start"]


@needs_huge_pages
def test_each_chunk_that_is_read_makes_memory_for_one(weights: Path) -> None:
    with HeadStart([weights]) as begun:
        begun.wait()
        assert begun.bytes_read == SIZE
        ready = list(begun.ready)
        assert [len(one) for one in ready] == [CHUNK, CHUNK]
        assert mapping(CHUNK // 2) not in ready
        taken = [mapping(CHUNK), mapping(CHUNK)]
        assert taken[0] is ready[1]
        assert taken[1] is ready[0]
        assert len(mapping(CHUNK)) == CHUNK  # none is left
        assert taken[0][:2] == b"\0\0"
    assert threads() == []


@needs_huge_pages
def test_what_was_not_taken_is_given_back(weights: Path) -> None:
    with HeadStart([weights]) as begun:
        begun.wait()
        (*_, last) = begun.ready
    assert begun.ready == []
    assert mapping(CHUNK) is not last


@pytest.mark.parametrize("reason", ["size", "device"])
def test_files_are_read_where_no_memory_is_to_be_found(reason: str, weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason == "size":
        monkeypatch.setattr(head_start, "MOST", SIZE - 1)
    with HeadStart([weights], memory=reason != "device") as begun:
        begun.wait()
        assert (begun.bytes_read, begun.ready) == (SIZE, [])


def test_a_file_that_is_not_there_is_left_to_the_load(weights: Path) -> None:
    with HeadStart([weights.parent / "nothing", weights]) as begun:
        begun.wait()
    assert begun.bytes_read == SIZE


def test_a_load_that_fails_ends_the_thread(weights: Path) -> None:
    with pytest.raises(KeyError), HeadStart([weights]):
        raise KeyError
    assert threads() == []
    assert head_start._running is None


def test_the_files_of_a_name(saved_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = saved_pair[0]
    assert weight_files(place) == [place / "model.safetensors"]
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF")
    assert weight_files(str(file)) == [file]
    with pytest.raises(RequestError, match="does not exist"):
        weight_files(str(tmp_path / "nowhere"))
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: str(place / "config.json"))
    assert weight_files("somebody/something", local_files_only=True) == [place / "model.safetensors"]


@pytest.mark.slow
def test_generate_reads_weights_before_it_imports_the_classes(saved_pair: tuple[Path, Path]) -> None:
    ended = subprocess.run([sys.executable, "-c", GENERATE, str(saved_pair[0])], capture_output=True, text=True)
    code, seen, modules = json.loads(ended.stdout.splitlines()[-1])
    assert code == 0, ended.stderr
    assert seen[0] == "weights"
    assert "classes" in seen
    assert not [name for name in UNUSED if name in modules]
