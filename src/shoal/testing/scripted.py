"""The scripted models: their next token is a pure function of the row's token history.

They quack like a Transformers model as far as `Runner` looks, and they know their history only
through the cache they are given: token ids are stored as keys and positions as values, so a cell
that is stale, lost or another row's changes their logits. Beyond a row's own tokens their logits
are NaN, so that reading them is found out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.models.attention import Masks
from shoal.models.runner import Runner

History = Callable[[tuple[int, ...]], Tensor]
"""A function of all tokens of a row so far; it returns the logits [vocab] of the next one."""

UNSAID = -50.0
"""The logit of all tokens but a one-hot script's token, which has 0.

It is below any uniform's resolution, and still finite.
"""


class ScriptedModel(torch.nn.Module):
    """A causal LM that follows a script.

    Args:
        script: returns the logits after a history. It is called once per history and remembered.
        vocab_size: the width of the logits.
        dtype: the data type of the logits. The kernels in C decide on those in float32, torch on
            those in float64.
        features: returns the hidden state after a history, of any layer; None = the logits.

    Attributes:
        forwards: the number of calls of `forward` so far.
    """

    def __init__(
        self,
        script: History,
        vocab_size: int,
        dtype: torch.dtype = torch.float32,
        features: History | None = None,
    ) -> None:
        super().__init__()
        self.script = functools.cache(script)
        self.features = None if features is None else ScriptedModel(features, vocab_size, dtype)
        self.head = torch.nn.Linear(1, vocab_size, bias=False, dtype=dtype)
        self.config = SimpleNamespace(
            _attn_implementation="eager", eos_token_id=None, model_type="scripted"
        )
        # Numbers, also in lists, would be settings, whose change is another model.
        self._forwards = SimpleNamespace(count=0)
        self.eval()

    @property
    def forwards(self) -> int:
        return self._forwards.count

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def get_input_embeddings(self) -> Callable[[Tensor], Tensor]:
        """Returns the ids as their own embeddings, one number each."""
        return lambda ids: ids[..., None].to(self.dtype)

    def forward(
        self,
        tokens: Tensor | None,
        past_key_values: Any = None,
        use_cache: bool = False,
        position_ids: Tensor | None = None,
        logits_to_keep: int = 0,
        output_hidden_states: bool = False,
        inputs_embeds: Tensor | None = None,
    ) -> Any:
        """Computes the logits after each token.

        With a cache the rest of the history comes from it. Hidden states come from `features` for
        any layer.

        Args:
            tokens: [rows, q], or None with `inputs_embeds`.

        Returns:
            An object with `logits` [rows, q, vocab].
        """
        self._forwards.count += 1
        if inputs_embeds is not None:
            tokens = inputs_embeds[..., 0].long()
        assert tokens is not None
        if past_key_values is None:
            positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
            return SimpleNamespace(logits=self._logits(tokens, positions))
        assert use_cache
        assert position_ids is not None
        ids, places = past_key_values.update(_as_states(tokens), _as_states(position_ids), 0)
        plan = past_key_values.plan
        if plan.shares:
            pairs = zip((ids, places), past_key_values.shared(), strict=True)
            ids, places = (plan.repeated(tail, shared) for tail, shared in pairs)
        ids, places = ids[:, 0, :, 0].long(), places[:, 0, :, 0].long()
        states = (
            _Same(self.features or self, ids, places, position_ids, plan)
            if output_hidden_states
            else None
        )
        if logits_to_keep:  # the pass of a prompt: its logits are not read
            _check_places(places, position_ids, _own(plan))
            unread = torch.full((len(tokens), logits_to_keep, self.head.out_features), torch.nan)
            return SimpleNamespace(logits=unread, hidden_states=states)
        return SimpleNamespace(
            logits=self._block(ids, places, position_ids, plan), hidden_states=states
        )

    def _block(self, ids: Tensor, places: Tensor, positions: Tensor, plan: Any) -> Tensor:
        """Returns the logits after each column's tokens, [rows, q, vocab]; NaN in unused ones."""
        own = _own(plan)
        if plan.parents is not None:
            return self._logits_in_trees(ids, places, plan).masked_fill(~own[..., None], torch.nan)
        _check_places(places, positions, own)
        return self._logits(ids, positions).masked_fill(~own[..., None], torch.nan)

    def _logits_in_trees(self, ids: Tensor, places: Tensor, plan: Any) -> Tensor:
        """Returns the logits [rows, q, vocab] of a draft tree.

        They follow the tokens that each column of the tree sees.

        Args:
            ids: [rows, kv] long.
            places: [rows, kv] long.
        """
        whole = plan.without_prefixes()
        logits_of_path: dict[tuple[int, int], Tensor] = {}
        for row, seen in enumerate(Masks(whole).visible(width=ids.shape[1])):
            for column in range(plan.counts[row]):
                path, at = ids[row, seen[column]][None], places[row, seen[column]][None]
                _check_places(
                    at,
                    plan.positions[row : row + 1, column : column + 1],
                    torch.ones(1, 1, dtype=torch.bool),
                )
                if path.shape[1] != int(plan.positions[row, column]) + 1:
                    raise AssertionError(
                        f"column {column} of row {row} sees {path.shape[1]} tokens"
                    )
                logits_of_path[row, column] = self._logits(
                    path, torch.tensor([[path.shape[1] - 1]])
                )[0, 0]
        logits = torch.full(
            (plan.rows, plan.q, *logits_of_path[0, 0].shape), torch.nan, dtype=self.dtype
        )
        for place, said in logits_of_path.items():
            logits[place] = said
        return logits

    def _logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Returns the logits [rows, q, vocab] after the tokens up to each position.

        Args:
            ids: [rows, kv] long.
            positions: [rows, q].
        """
        rows = [
            torch.stack([self.script(tuple(history[: place + 1])) for place in places])
            for history, places in zip(ids.tolist(), positions.tolist(), strict=True)
        ]
        return torch.stack(rows).to(self.dtype)


class TableModel(ScriptedModel):
    """A Markov chain of any order, vectorised.

    A history that is too short is taken as preceded by token 0.

    Args:
        table: the probabilities of the next token given the last `order` ones, [vocab] * order +
            [vocab]. Zeros are allowed.
    """

    def __init__(
        self, table: Tensor, dtype: torch.dtype = torch.float32, features: History | None = None
    ) -> None:
        super().__init__(self._after, table.shape[-1], dtype, features)
        self.table = table.log().to(dtype)

    def _after(self, ids: tuple[int, ...]) -> Tensor:
        return self._logits(torch.tensor([ids]), torch.tensor([[len(ids) - 1]]))[0, 0]

    def _logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        order = self.table.dim() - 1
        last = []
        for back in range(order - 1, -1, -1):
            token = ids.gather(1, (positions - back).clamp(min=0))
            last.append(torch.where(positions >= back, token, 0))
        return self.table[tuple(last)]


class _Same:
    """The hidden states of every layer: one model's, computed when they are asked for."""

    def __init__(self, model: ScriptedModel, *block: Any) -> None:
        self._model, self._block = model, block

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, layer: int) -> Tensor:
        return self._model._block(*self._block)


def _own(plan: Any) -> Tensor:
    """Tells which columns of a pass are tokens, [rows, q] bool."""
    return torch.arange(plan.q) < torch.tensor(plan.counts)[:, None]


def _as_states(values: Tensor) -> Tensor:
    """Reshapes [rows, q] to [rows, 1 head, q, 1 dim]; float32 holds ids and positions exactly."""
    return values[:, None, :, None].float()


def _check_places(places: Tensor, positions: Tensor, own: Tensor) -> None:
    """Checks that every cell that a row's own queries see was written at its own position."""
    reach = torch.where(own, positions, 0).amax(dim=1)
    cells = torch.arange(places.shape[1])
    wrong = (places != cells) & (cells <= reach[:, None])
    if bool(wrong.any()):
        row, cell = wrong.nonzero()[0].tolist()
        raise AssertionError(
            f"row {row} of the pass sees in cell {cell} what was written at position "
            f"{int(places[row, cell])}"
        )


# ── scripts ───────────────────────────────────────────────────────────────────────────────────────


def one_hot(token: int, vocab_size: int) -> Tensor:
    """Returns logits [vocab] float64 that leave room for one token only."""
    logits = torch.full((vocab_size,), UNSAID, dtype=torch.float64)
    logits[token] = 0.0
    return logits


def says(sequences: Iterable[Sequence[int]], vocab_size: int, otherwise: int = 0) -> History:
    """Makes a script that continues each sequence (prompt and continuation) wherever it is in one.

    Elsewhere it says `otherwise`.
    """
    following = {tuple(s[:i]): s[i] for s in sequences for i in range(1, len(s))}
    return lambda ids: one_hot(following.get(ids, otherwise), vocab_size)


def hashed(vocab_size: int, seed: int = 0, spread: float = 1.5) -> History:
    """Makes a script of logits N(0, spread²) that any token of the history changes completely."""

    drawn = _remembered_normals if vocab_size <= 512 else _normals
    return lambda ids: torch.from_numpy(drawn((seed, *ids), spread, vocab_size).copy())


def _normals(seeds: tuple[int, ...], spread: float, size: int) -> Any:
    """Draws N(0, spread²), [size] float64."""
    return np.random.default_rng(seeds).normal(scale=spread, size=size)


_remembered_normals = functools.lru_cache(1 << 14)(_normals)
"""A script is asked again about the same histories by each model that follows it."""


def mixed(first: History, second: History, every: int = 2) -> History:
    """Makes a script of two.

    It is `first`, but `second` after every history with a sum of tokens that is a multiple of
    `every`.
    """
    return lambda ids: (second if sum(ids) % every == 0 else first)(ids)


def oracle(target: History, vocab_size: int) -> History:
    """Makes a script that says the token that a greedy target will say."""
    return lambda ids: one_hot(int(target(ids).argmax()), vocab_size)


def ahead(target: History, positions: int) -> History:
    """Makes hidden states that know the future, [positions * vocab].

    They are the target's logits of the next `positions` positions if each token is the most
    probable one, side by side.
    """

    def features(ids: tuple[int, ...]) -> Tensor:
        said = []
        for _ in range(positions):
            said.append(target(ids))
            ids = (*ids, int(said[-1].argmax()))
        return torch.cat(said)

    return features


def adversary(target: History, vocab_size: int) -> History:
    """Makes a script that never says the token that a greedy target will say."""
    return lambda ids: one_hot((int(target(ids).argmax()) + 1) % vocab_size, vocab_size)


# ── runners ───────────────────────────────────────────────────────────────────────────────────────


def runner(
    model: Any, context: int = 4096, name: str = "scripted", attention: str = "auto"
) -> Runner:
    """Makes a runner around a scripted (or any other) model, without checks.

    It is padded, so that unused columns are seen to be NaN.
    """
    made = Runner(model, name, "interface", context, attention)
    made.packs = False
    return made


def scripted(
    script: History,
    vocab_size: int,
    context: int = 4096,
    dtype: torch.dtype = torch.float32,
    features: History | None = None,
) -> Runner:
    """Makes the runner of a `ScriptedModel`.

    It shares prompts alike with a compiler and without one: kernels for attention have no part.
    """
    return runner(ScriptedModel(script, vocab_size, dtype, features), context, attention="pad")


def table_model(
    table: Tensor,
    context: int = 4096,
    dtype: torch.dtype = torch.float32,
    features: History | None = None,
) -> Runner:
    """Makes the runner of a `TableModel`, which shares prompts as that of `scripted`."""
    return runner(TableModel(table, dtype, features), context, attention="pad")
