"""Directories of trained heads in their published form: a config.json beside tensors.

A directory that does not fit raises one clear error.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from shoal.errors import ModelError, PairMismatch, RequestError, UnsupportedModel
from shoal.models.runner import Runner
from shoal.models.structure import Belongings

Heads = TypeVar("Heads")
_loaded: Belongings[Any] = Belongings("heads")


def once(target: Runner, directory: str, load: Callable[[Path, Runner], Heads]) -> Heads:
    """Returns the heads in a directory, loaded once for each target.

    Raises:
        UnsupportedModel: the target gives no hidden states.
    """
    if not target.has_modules:
        raise UnsupportedModel(
            f"trained heads read hidden states, which {target.name} does not give"
        )
    known = _loaded.of(target.hf)
    key = f"{load.__qualname__} {Path(directory).resolve()}"
    if key not in known:
        known[key] = load(Path(directory), target)
    found: Heads = known[key]
    return found


def read_config(directory: Path) -> dict[str, Any]:
    """Returns the object in the directory's config.json.

    Raises:
        RequestError: there is no config.json, or it holds no object.
    """
    try:
        found = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(
            f"no heads in {directory}: its config.json cannot be read ({error})"
        ) from error
    if not isinstance(found, dict):
        raise RequestError(f"no heads in {directory}: its config.json holds no object")
    return found


def whole_number(
    config: dict[str, Any], directory: Path, *names: str, default: int | None = None
) -> int:
    """Returns the first of these numbers that a config has, at least 1.

    Raises:
        RequestError: the config has none of them, or the value is no whole number >= 1.
    """
    value = next((config[name] for name in names if config.get(name) is not None), default)
    if value is None:
        raise RequestError(
            f"no such heads in {directory}: its config.json has no {' and no '.join(names)}"
        )
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RequestError(
            f"{directory}/config.json needs a whole number >= 1 for {names[0]}, got {value!r}"
        )
    return value


def read_tensors(directory: Path, *names: str) -> dict[str, Tensor]:
    """Returns the tensors in the first of these files that exists, or in numbered safetensors.

    Files named .bin and .pt are read as tensors alone, never as code.

    Raises:
        RequestError: none of the files exists.
        ModelError: the file is damaged.
    """
    places = [directory / name for name in names]
    parts = sorted(directory.glob("model-*-of-*.safetensors"))  # of a checkpoint in several files
    files = [file for file in places if file.is_file()][:1] or parts
    if not files:
        raise RequestError(
            f"no heads in {directory}: expected {' or '.join(names)} beside config.json"
        )
    found: dict[str, Tensor] = {}
    for file in files:
        try:
            found |= (
                load_file(file)
                if file.suffix == ".safetensors"
                else torch.load(file, map_location="cpu", weights_only=True)
            )
        except (SafetensorError, OSError, RuntimeError, ValueError, EOFError) as error:
            raise ModelError(
                f"{file} is damaged ({str(error).splitlines()[0]:.200}); download or train it again"
            ) from error
    return found


def fill(
    module: nn.Module,
    tensors: dict[str, Tensor],
    directory: Path,
    in_file: Callable[[str], str] = str,
) -> None:
    """Copies tensors into the parameters of the same names.

    Args:
        module: the module with the parameters.
        tensors: the tensors by the parameters' names.
        directory: the place of the tensors, for errors.
        in_file: returns a parameter's name in the file, for errors.

    Raises:
        ModelError: some tensors are missing.
        PairMismatch: a tensor has another shape than its parameter.
    """
    wanted = dict(module.named_parameters())
    missing = sorted(name for name in wanted if name not in tensors)
    if missing:
        raise ModelError(
            f"{directory} lacks {len(missing)} of the {len(wanted)} tensors of its heads, for "
            f"example {in_file(missing[0])}; "
            "download or train them again"
        )
    for name, parameter in wanted.items():
        if tensors[name].shape != parameter.shape:
            raise PairMismatch(
                f"{directory}: {name} is {list(tensors[name].shape)} and should be "
                f"{list(parameter.shape)}: "
                "heads of another target, or another config.json"
            )
        parameter.data.copy_(tensors[name])


def in_format(heads: Heads, target: Runner) -> Heads:
    """Moves layers to the target's device and number format, and returns them.

    The frequencies of rotary embeddings keep their bits: in 16 of them far positions would be
    others.
    """
    module: Any = heads
    rotary = copy.deepcopy(module.rotary)
    module.to(target.device, target.dtype).eval().requires_grad_(False)
    module.rotary = rotary.to(target.device)
    return heads


def require_width(directory: Path, what: str, found: int, target: Runner, wanted: int) -> None:
    """Raises PairMismatch if the heads belong to a target of another size."""
    if found != wanted:
        raise PairMismatch(
            f"{directory} cannot draft for {target.name}: {what} of {found} v {wanted}: heads "
            f"of another target"
        )


def layers_and_width(target: Runner) -> tuple[int, int]:
    """Returns the number of a target's layers, and the width of its hidden states."""
    config = target.hf.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(text.num_hidden_layers), int(text.hidden_size)
