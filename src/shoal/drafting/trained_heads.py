"""The common part of drafters that are trained heads: their files, and the target's states.

The files are a directory in its published form, a config.json beside tensors. A directory that does
not fit raises one clear error.

The states are the target's hidden states of prompts, and of the paths that rounds keep.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from shoal.drafting.protocol import Drafter, Keeps
from shoal.drafting.registry import kind_of_heads, unsupported_kind
from shoal.errors import ModelError, PairMismatch, RequestError, UnsupportedModel
from shoal.models.runner import Runner
from shoal.models.structure import Belongings
from shoal.sampling.distributions import Scores
from shoal.types.requests import Request, Row
from shoal.types.rounds import PrefillChunk
from shoal.types.trees import Verdict

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
    return known[key]


def read_config(directory: Path) -> dict[str, Any]:
    """Returns the object in the directory's config.json; raises RequestError if there is none."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(
            f"no heads in {directory}: its config.json cannot be read ({error})"
        ) from error
    if not isinstance(config, dict):
        raise RequestError(f"no heads in {directory}: its config.json holds no object")
    return config


def require_kind(name: str, directory: Path, config: dict[str, Any]) -> None:
    """Checks that a directory holds heads of the drafter that is to read them.

    Args:
        name: the drafter's name.
        directory: the directory.
        config: the object in its config.json.

    Raises:
        UnsupportedModel: it is a published kind of drafter that shoal does not compute.
        RequestError: another drafter reads it.
    """
    other = unsupported_kind(config)
    if other is not None:
        raise UnsupportedModel(
            f"{directory} is a drafter of the kind {other.kind} ({other.reason} in its "
            f"config.json), which is not supported: take {other.instead}:DIR with a checkpoint of "
            f"that kind for the same target, or suffix, which needs no files"
        )
    kind = kind_of_heads(directory)
    if kind is not None and kind.name != name:
        raise RequestError(
            f"{directory} holds heads of {kind.name}, not of {name}: give {kind.name}:{directory}"
        )


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
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= (
                load_file(file)
                if file.suffix == ".safetensors"
                else torch.load(file, map_location="cpu", weights_only=True)
            )
        except (SafetensorError, OSError, RuntimeError, ValueError, EOFError) as error:
            raise ModelError(
                f"{file} is damaged ({str(error).splitlines()[0]:.200}); download or train it again"
            ) from error
    return tensors


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
            f"example {in_file(missing[0])}; download or train them again"
        )
    for name, parameter in wanted.items():
        if tensors[name].shape != parameter.shape:
            raise PairMismatch(
                f"{directory}: {name} is {list(tensors[name].shape)} and should be "
                f"{list(parameter.shape)}: heads of another target, or another config.json"
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


def require_width(directory: Path, what: str, width: int, target: Runner, expected: int) -> None:
    """Raises PairMismatch if the heads belong to a target of another size."""
    if width != expected:
        raise PairMismatch(
            f"{directory} cannot draft for {target.name}: {what} of {width} v {expected}: heads "
            f"of another target"
        )


def layers_and_width(target: Runner) -> tuple[int, int]:
    """Returns the number of a target's layers, and the width of its hidden states."""
    config = target.hf.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(text.num_hidden_layers), int(text.hidden_size)


def kept_states(scores: Scores, verdict: Verdict) -> list[Tensor]:
    """Returns the hidden states of each row's last token and of its accepted nodes.

    They have shape [accepted + 1, features]. The token that the round added behind them has no
    state yet: it is fed in the next round.
    """
    hidden = _hidden(scores)
    paths, _ = verdict.lists
    return [
        states[: 1 + len(path)]
        if isinstance(path, range)
        else states[[0, *(node + 1 for node in path)]]
        for states, path in zip(hidden, paths, strict=True)
    ]


def last_kept(scores: Scores, verdict: Verdict) -> Tensor:
    """Returns the hidden state of each row's deepest accepted node, or of its last token.

    They have shape [rows, features]. The token after the accepted ones was drawn from this state.
    """
    hidden = _hidden(scores)
    paths, _ = verdict.lists
    columns = torch.tensor([path[-1] + 1 if path else 0 for path in paths], device=hidden.device)
    return hidden[torch.arange(len(paths), device=hidden.device), columns]


def _hidden(scores: Scores) -> Tensor:
    assert scores.hidden is not None, "a drafter with `hidden_layers` is given hidden states"
    return scores.hidden


class PromptStates:
    """The hidden states of the prompts of requests that have rows left.

    Args:
        most: the number of positions of a prompt that are kept, its last ones; None = all.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        # By the identity of the request, which is held so that no other takes it.
        self._of: dict[int, tuple[Request, list[Tensor], int]] = {}
        self._left: dict[int, int] = {}

    def read(self, chunks: Sequence[PrefillChunk], hidden: Sequence[Tensor]) -> None:
        """Reads the arguments of `Drafter.read_prompts`.

        A chunk that does not follow the positions read so far is skipped.
        """
        for chunk, states in zip(chunks, hidden, strict=True):
            request = chunk.row.request
            _, pieces, count = (
                self._of.get(id(request), (request, [], 0)) if chunk.start else (request, [], 0)
            )
            if chunk.start == count < chunk.stop:
                kept = [*pieces, states]
                if self._most is not None:  # a copy: a view would keep all positions of the chunk
                    kept = [torch.cat(kept)[-self._most :].clone()]
                self._of[id(request)] = request, kept, chunk.stop

    def of(self, row: Row) -> Tensor | None:
        """Returns the hidden states of the row's prompt, [positions, features].

        The prompt's last token has none. Returns None if there are no states, or if some were not
        read.
        """
        _, pieces, count = self._of.get(id(row.request), (row.request, [], 0))
        return torch.cat(pieces) if pieces and count == row.prompt_length - 1 else None

    @property
    def bytes(self) -> int:
        """The bytes that are kept now."""
        return sum(
            piece.numel() * piece.element_size()
            for _, pieces, _ in self._of.values()
            for piece in pieces
        )

    def leave(self, rows: Iterable[Row]) -> None:
        """Notes that rows have left; the prompt of a request is forgotten with its last row."""
        for row in rows:
            key = id(row.request)
            self._left[key] = self._left.get(key, 0) + 1
            if self._left[key] == row.request.n:
                self._of.pop(key, None)
                del self._left[key]


def last_states(target: Runner) -> tuple[int, Keeps]:
    """Returns the arguments of `LastStateDrafter` for a target."""
    layers, width = layers_and_width(target)
    state = width * target.dtype.itemsize
    return layers, Keeps(state, per_row=state, tokens=1, on_device=True)


class LastStateDrafter(Drafter):
    """A drafter that reads the hidden state from which each row's last token was drawn.

    A row's first one is its prompt's.

    Args:
        layers: the number of the target's layers: its last hidden state is read.
        keeps: the bytes of hidden states, of a prompt and of each row.
    """

    def __init__(self, layers: int, keeps: Keeps) -> None:
        self.hidden_layers, self.keeps = (layers,), keeps
        self._prompts = PromptStates(most=1)
        self._last: dict[Row, Tensor] = {}
        """The states [width] of the rows that had a round."""

    def read_prompts(self, chunks: Sequence[PrefillChunk], hidden: Sequence[Tensor]) -> None:
        self._prompts.read(chunks, hidden)

    def state_of(self, row: Row) -> Tensor | None:
        """Returns the state of a row, [width]; None if there is none."""
        if row in self._last:
            return self._last[row]
        prompt = self._prompts.of(row)
        return None if prompt is None else prompt[-1]

    def observe(self, rows: Sequence[Row], scores: Scores, verdict: Verdict) -> None:
        self._last.update(zip(rows, last_kept(scores, verdict), strict=True))

    def replace(self, copies: Sequence[tuple[Row, Row]]) -> None:
        self._last |= {row: self._last[parent] for row, parent in copies}

    def end(self, rows: Sequence[Row]) -> None:
        self._prompts.leave(rows)
        for row in rows:
            self._last.pop(row, None)

    @property
    def kept_bytes(self) -> int:
        own = sum(state.numel() * state.element_size() for state in self._last.values())
        return self._prompts.bytes + own
