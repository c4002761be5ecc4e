"""The models in GGUF files: weights in llama.cpp, and facts as a Transformers model has them.

Passes are computed by llama.cpp, or by the kernels in C (`own`, of the tensors that `contents`
reads). For llama.cpp a row of the cache is a sequence of its memory (`sequences`,
`state_sequences`), and `gguf_runner` joins them. `tokenizer` is made of the file's vocabulary.

The library is used by the low-level functions of llama-cpp-python, the extra `gguf`. A copy of the
model in 4 bits is a file in the cache folder. Another process writes it, which can be ended at any
time: on Ctrl-C, and when a disk is full, nothing is left of it.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from collections import deque
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from shoal.durable import cache_folder, sync
from shoal.errors import ModelError, RequestError, UnsupportedModel
from shoal.models.load_report import LOG
from shoal.models.sources import parts_of

INSTALL = (
    "GGUF files need llama.cpp: pip install '.[gguf]'. Where there is no wheel for this "
    "machine, pip compiles it for some minutes with a C++ compiler"
)
WARNING = 3
"""The level of `ggml_log_level` from which on lines are kept."""

_complaints: deque[str] = deque(maxlen=4)
_callbacks: list[Any] = []  # llama.cpp calls them for as long as the process lives


@cache
def library() -> ModuleType:
    """Returns the module `llama_cpp`, which from now on writes nothing to stderr.

    Raises:
        RequestError: it is not installed, or does not load; the message says how to install it.
    """
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError) as error:
        raise RequestError(f"{INSTALL} ({error})") from error

    @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator, unused-ignore]
    def hear(level: int, text: bytes, _: Any) -> None:
        if level >= WARNING and text.strip():
            _complaints.append(text.decode("utf-8", "replace").strip())

    _callbacks.append(hear)
    llama_cpp.llama_log_set(hear, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp


def complaint(otherwise: str) -> str:
    """Returns llama.cpp's last warning or error, or `otherwise`, and forgets all lines."""
    text = _complaints[-1] if _complaints else otherwise
    _complaints.clear()
    return text


CAUSAL_ONLY = "shoal decodes causal language models"
HALF = 2
"""The number of bytes of a number in llama.cpp's cache, float16."""


class GgufModel(nn.Module):
    """A model whose weights llama.cpp holds, in the place of a Transformers model.

    Args:
        file: the GGUF file, or the first of its parts.
        device: "auto" for the devices that this build of llama.cpp has, or "cpu".

    Attributes:
        asked_device: the device.
        handle: llama.cpp's pointer to the model.
        vocab: llama.cpp's pointer to the model's vocabulary.
        config: facts that other code reads of a Transformers model.
        generation_config: facts that other code reads of a Transformers model.
        vocab_size: entries of the logits.
        context: positions that the model was trained for.
        recurrent: True if layers keep a recurrent state.
        token_bytes: bytes of the keys and values of a token, over all layers.
        parameter_bytes: bytes of the weights.
        parameter_count: number of the weights.

    Raises:
        ModelError: the file is damaged, or there is no memory.
        RequestError: no such device.
        UnsupportedModel: the model is an encoder, or no language model, or keeps recurrent states
            beside sliding windows.
    """

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, file: Path, device: str = "auto") -> None:
        super().__init__()
        self.file, self.asked_device = file, device
        lib = library()
        self.handle = _loaded(lib, file, device)
        weakref.finalize(self, lib.llama_model_free, self.handle)
        self.recurrent = bool(
            lib.llama_model_is_recurrent(self.handle) or lib.llama_model_is_hybrid(self.handle)
        )
        _require_rows(lib, self.handle, file, self.metadata("general.architecture"))
        if "longrope" in self.metadata(
            f"{self.metadata('general.architecture')}.rope.scaling.type"
        ):
            raise UnsupportedModel(
                f"{file} is not supported: llama.cpp chooses its rotary positions by the room "
                f"of all rows together"
            )
        self.vocab = lib.llama_model_get_vocab(self.handle)
        self.vocab_size = int(lib.llama_vocab_n_tokens(self.vocab))
        self.context = int(lib.llama_model_n_ctx_train(self.handle))
        self.parameter_bytes = int(lib.llama_model_size(self.handle))
        self.parameter_count = int(lib.llama_model_n_params(self.handle))
        self.config = self._config(lib)
        ends = [i for i in range(self.vocab_size) if lib.llama_vocab_is_eog(self.vocab, i)]
        self.generation_config = SimpleNamespace(eos_token_id=ends or None)
        self.eval()

    def metadata(self, key: str) -> str:
        """Returns a value of the file's metadata as text; empty if the file lacks the key."""
        text = ctypes.create_string_buffer(1 << 16)
        name = key.encode()
        size = library().llama_model_meta_val_str(self.handle, name, text, len(text))
        return "" if size < 0 else text.value.decode("utf-8", "replace")

    @property
    def description(self) -> str:
        """The architecture, the size and the format of the weights, in llama.cpp's words."""
        text = ctypes.create_string_buffer(128)
        library().llama_model_desc(self.handle, text, len(text))
        words = text.value.decode("utf-8", "replace")
        return words.replace(" ?B", "").replace(" (guessed)", "")  # llama.cpp's, of other sizes

    @property
    def token_bytes(self) -> int:
        """The number of bytes of a token's keys and values over all layers.

        All layers are taken to be like the first, unless the file tells each one's heads.
        """
        config, architecture = self.config, self.metadata("general.architecture")
        heads = config.num_hidden_layers * (
            config.num_key_value_heads or config.num_attention_heads
        )
        listed = self.metadata(f"{architecture}.attention.head_count_kv")
        if listed.startswith("["):
            heads = sum(map(int, listed.strip("[]").split(",")))
        return int(heads * sum(self._head_sizes()) * HALF)

    def _head_sizes(self) -> tuple[int, int]:
        """Returns the features of a head's keys and of its values."""
        architecture, config = self.metadata("general.architecture"), self.config
        usual = config.hidden_size // max(config.num_attention_heads, 1)
        keys, values = (
            int(self.metadata(f"{architecture}.attention.{kind}_length") or usual)
            for kind in ("key", "value")
        )
        return keys, values

    def _config(self, lib: Any) -> PretrainedConfig:
        config = PretrainedConfig(name_or_path=str(self.file))
        config.hidden_size = int(lib.llama_model_n_embd(self.handle))
        config.num_hidden_layers = int(lib.llama_model_n_layer(self.handle))
        config.num_attention_heads = int(lib.llama_model_n_head(self.handle))
        config.num_key_value_heads = int(lib.llama_model_n_head_kv(self.handle))
        config.vocab_size = self.vocab_size
        config.max_position_embeddings = self.context
        config.model_type = self.metadata("general.architecture")
        return config

    def in_4_bits(self) -> GgufModel:
        """Returns the model of a copy of the file in 4 bits, which is written where it is missing.

        Raises:
            ModelError: llama.cpp cannot write it, or there is no room for it.
            UnsupportedModel: the file is as small already, or there is no folder for the copy.
        """
        bits = 8 * self.parameter_bytes / self.parameter_count
        if bits < LEAST_BITS:
            raise UnsupportedModel(no_smaller_copy(str(self.file), bits))
        place = _place_of_copy(self.file)
        if place.is_file():
            with suppress(ModelError):  # damaged since it was written
                return GgufModel(place, self.asked_device)
        try:
            _write_copy(self, place)
        except OSError as error:
            raise ModelError(f"{self.file}: a copy in 4 bits cannot be written: {error}") from error
        return GgufModel(place, self.asked_device)

    # ── the interface of a Transformers model ─────────────────────────────────────────────────────

    def get_output_embeddings(self) -> Any:
        """Returns an object with the shape of the head; the head's weights are not at hand."""
        return SimpleNamespace(weight=torch.empty(self.vocab_size, 0))

    def forward(self, tokens: Tensor, past_key_values: Any = None, position_ids: Any = None) -> Any:
        """Raises UnsupportedModel: `shoal.models.gguf.gguf_runner` computes the passes."""
        raise UnsupportedModel(f"{self.file} is computed by llama.cpp, and not by modules")


def _loaded(lib: Any, file: Path, device: str) -> Any:
    """Returns llama.cpp's pointer to the model of a file."""
    params = lib.llama_model_default_params()
    if device == "cpu":
        params.n_gpu_layers = 0
    elif device != "auto":
        raise RequestError(
            f"a GGUF file is computed on 'cpu', or with 'auto' on the devices that llama.cpp "
            f"was built for, got {device!r}"
        )
    # llama.cpp 0.3.36 ends the process at a pass of two tokens by its kernels for AMX.
    params.use_extra_bufts = b"AMX_INT8 = 1" not in lib.llama_print_system_info()
    handle = lib.llama_model_load_from_file(str(file).encode(), params)
    if not handle:
        reason = complaint("llama.cpp says no reason")
        raise ModelError(
            f"llama.cpp cannot load {file}: {reason}; if it is damaged, download it again"
        )
    return handle


def _require_rows(lib: Any, handle: Any, file: Path, architecture: str) -> None:
    """Raises UnsupportedModel for a model whose rows cannot be decoded alone or cannot go back."""
    reasons = {
        "it keeps recurrent states beside sliding windows, which llama.cpp writes down together": (
            lib.llama_model_is_hybrid(handle) and lib.llama_model_n_swa(handle)
        ),
        f"it is an encoder; {CAUSAL_ONLY}": lib.llama_model_has_encoder(handle),
        f"it is a diffusion model; {CAUSAL_ONLY}": lib.llama_model_is_diffusion(handle),
    }
    for reason, holds in reasons.items():
        if holds:
            lib.llama_model_free(handle)
            raise UnsupportedModel(f"{file} ({architecture}) is not supported: {reason}")


# ── the copy in 4 bits ──────────────────────────────────────────────────────────────────────────

LEAST_BITS = 6
"""The bits of a weight from which on a copy in 4 bits takes much less time to read."""
COPY_BITS = 5
"""The most bits of a weight of a copy: 4.5 of Q4_0, and a head in more."""
WRITER = """
import ctypes, os, signal, sys
import llama_cpp as lib
signal.signal(signal.SIGINT, signal.SIG_DFL)
asked = lib.llama_model_quantize_default_params()
asked.ftype, asked.allow_requantize = lib.LLAMA_FTYPE_MOSTLY_Q4_0, True
asked.nthread = int(sys.argv[3])
source, copy = map(os.fsencode, sys.argv[1:3])
sys.exit(lib.llama_model_quantize(source, copy, ctypes.byref(asked)) != 0)
"""
"""The program of the process that writes a copy. Its lines on stderr begin with "[n/tensors]"."""
EDITION = "1"
"""The edition of the copies, to be changed with the program."""
PACE = 2.0
"""The seconds from one line of progress to the next."""
ABANDONED = 3600.0
"""The seconds without a write after which an unfinished copy is removed."""


def no_smaller_copy(name: str, bits: float) -> str:
    """Returns the sentence that refuses a copy of weights that are as small."""
    return (
        f"{name} has no copy in 4 bits to draft for it: its weights take {bits:.1f} bits each "
        f"already, so that the copy would be the target itself"
    )


def _place_of_copy(file: Path) -> Path:
    """Returns the place of a file's copy, which changes with the file and with llama.cpp."""
    folder = cache_folder()
    if folder is None:
        raise UnsupportedModel(f"{file} has no copy in 4 bits: there is no cache folder for it")
    stats = [Path(part).stat() for part in parts_of(str(file))]
    facts = [f"{stat.st_size} {stat.st_mtime_ns}" for stat in stats]
    facts += [EDITION, str(library().__version__)]
    name, state = (
        hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        for text in (str(file.resolve()), " ".join(facts))
    )
    return folder / "copies" / f"{file.stem}-{name}" / f"{state}.gguf"


def _write_copy(model: GgufModel, place: Path) -> None:
    """Writes a copy under another name, then under its own; copies of earlier states go.

    Raises:
        ModelError, OSError: it cannot be written; nothing is left of it.
    """
    folder, need = place.parent, COPY_BITS * model.parameter_count // 8
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < need:
        raise ModelError(
            f"{model.file}: its copy in 4 bits takes {need >> 20} MiB, and {folder} has "
            f"{free >> 20} MiB left"
        )
    LOG.info("writing a copy of %s in 4 bits, once: %d MiB in %s", model.file, need >> 20, folder)
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as stream:
        unfinished = Path(stream.name)
    try:
        _run_writer(model.file, unfinished)
        with unfinished.open("r+b") as stream:
            sync(stream)
        unfinished.replace(place)
    finally:
        unfinished.unlink(missing_ok=True)
    for other in folder.iterdir():
        with suppress(OSError):
            age = time.time() - other.stat().st_mtime
            if other != place and (other.suffix != ".part" or age > ABANDONED):
                other.unlink()


def _run_writer(source: Path, copy: Path) -> None:
    program = [sys.executable, "-c", WRITER, str(source), str(copy), str(torch.get_num_threads())]
    piped: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    line, told_at = "", time.monotonic()
    with subprocess.Popen(program, text=True, errors="replace", **piped) as writer:
        try:
            for line in writer.stderr or ():
                progress = re.match(r"\[ *(\d+)/ *(\d+)\]", line)
                if progress and time.monotonic() - told_at > PACE:
                    told_at = time.monotonic()
                    LOG.info("writing a copy in 4 bits: %s of %s tensors", *progress.groups())
            code = writer.wait()
        finally:
            writer.kill()
    if code:
        reason = line.strip() or f"its process ended with {code}"
        raise ModelError(f"{source}: llama.cpp cannot write a copy in 4 bits: {reason}")
