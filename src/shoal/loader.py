"""The loading of a pair: the target, the drafter and the guide, as one `Shoal`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from shoal.api import Shoal
from shoal.drafting.pair_loading import PairOptions, Source, load_pair
from shoal.drafting.protocol import Drafter
from shoal.models.load_report import LoadProgress, LoadStages, one_line
from shoal.models.loading import LoadOptions

LOG = logging.getLogger("shoal")


def load(
    target: Source | None = None,
    draft: Source | Drafter | None = None,
    *,
    guide: Source | None = None,
    expert: Source | None = None,
    tokenizer: Any = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    revision: str | None = None,
    draft_revision: str | None = None,
    attention: str = "auto",
    max_batch: int | str = "auto",
    compile: str = "auto",
    quantize: str | Mapping[str, str] = "off",
    strict: bool = False,
    kv: str = "off",
    prefix_sharing: str = "auto",
    prefix_memory: int = 0,
    tensor_parallel: bool = False,
    trust_remote_code: bool = False,
    local_files_only: bool = False,
    progress: LoadProgress | None = None,
) -> Shoal:
    """Loads a target and its drafter.

    The choices that were made are in `Shoal.loaded`, in `Result.stats.loaded` and in a line of the
    logger "shoal" (INFO). This logger also has a line as each stage begins, unless `progress` is
    given.

    Args:
        target: a Hub id, directory or Transformers model; None = the bundled pair. A model object
            is used as it is: it stays the caller's, and options for loading (dtype, device,
            revision, quantize) are refused.
        draft: a smaller model, given like the target, best with the same tokenizer
            (docs/how-to/drafters.md gives the cost of another one); or a drafter by its name and
            options ("suffix", "suffix:scope=engine", "medusa:DIR", "self:exit=6"), trees of a model
            ("DIR:tree=rsd-s") or a sum ("suffix+DIR"), see `shoal.drafting.draft`; or any object of
            `shoal.drafting.protocol.Drafter`, for one call at a time. None = plain decoding (unless
            bundled).
        guide: a second model with the target's tokenizer, given like the target, or "draft" for the
            draft model: samples with `guidance` are those of the target led away from it (see
            `shoal.sampling.guidance`). "target": the target itself, for samples with a
            `negative_prompt`. None = there is none.
        expert: a third such model, or "draft", or "target" (for a `positive_prompt`): samples with
            `guidance` are led from the guide towards it (proxy tuning). None = towards the target.
        tokenizer: a Transformers tokenizer; None = the one saved with the target. For a model
            object it is the one at hand (its `name_or_path`, read without network); without one
            there are only token ids.
        dtype: the number format of both: "auto" (on a CPU float32, or bfloat16 for a wide bfloat16
            checkpoint if the CPU multiplies it, see `shoal.models.formats`; elsewhere the
            checkpoint's own), "float32", "bfloat16", "float16".
        device: "auto", "cpu", "cuda", "cuda:1", ...
        revision: the target's revision on the Hub.
        draft_revision: the draft model's revision on the Hub.
        attention: "auto", "pad", "split", "fused" (CUDA), ... (see `shoal.models.attention`).
        max_batch: the most rows decoded together; more rows than that take turns. "auto": as many
            as memory holds and as raise tokens per second, by measured rounds (see
            `shoal.engine.batch_size.AutoBatchSize`). Rows then join at times that differ from run
            to run: in 16 bit, where tokens depend on the batch, give a number, or `strict`, for a
            seed's tokens to hold.
        compile: "on": CUDA graphs (see `shoal.models.compiled`), or on a CPU kernels in C (see
            `shoal.native`), carried or compiled once per machine; "off": neither; "auto": on, on a
            CPU only if there are kernels; "modules": as "auto", but the model's own modules compute
            all but attention.
        quantize: "target=int8,draft=int8" or a mapping; formats int8, fp8 (CUDA only), off. A
            quantised target is the model that is then decoded losslessly.
        strict: True = tokens do not depend on the composition of the batch, in 16 bit either
            (docs/explanation/exactness.md); CPU only.
        kv: "int8" rounds the target's keys and values once, as they are written, and takes about a
            quarter of the memory of float32, or half of bfloat16; CPU only. The model that rounds
            them is the one that is then decoded losslessly (docs/explanation/numerics.md). "off":
            they stay in the number format.
        prefix_sharing: "shared": a group's prompt is stored once; "copied":
            once per row; "auto": shared if that pays (see `shoal.engine.admission`).
        prefix_memory: the bytes for prompts of earlier calls, so that later calls that begin alike
            compute only the rest: a chat's next turn, a common system prompt (see
            `shoal.engine.prefix_cache`); `Stats.restored_tokens` counts the tokens that were not
            computed. 0 = none are kept. A call then begins with a small pass that tells if the
            weights are still the same.
        tensor_parallel: True = all processes that torchrun started share the target
            (docs/how-to/scale.md). `load` returns in the first one only; the others serve it within
            this call, and end when it does.
        trust_remote_code: True = runs code from the model's repository.
        local_files_only: True = never asks the Hub.
        progress: called with a `shoal.models.load_report.LoadStage` as each stage begins, as it
            ends, and when all is loaded.

    Raises:
        RequestError: a model or file was not found, or an option is wrong.
        UnsupportedModel, PairMismatch: with the reason.
    """
    stages = LoadStages(progress)
    load_options = LoadOptions(
        dtype=dtype,
        device=device,
        revision=revision,
        attention=attention,
        strict=strict,
        kv=kv,
        tensor_parallel=tensor_parallel,
        trust_remote_code=trust_remote_code,
        local_files_only=local_files_only,
        compile=compile,
    )
    options = PairOptions(load_options, draft_revision, quantize, tokenizer, guide, expert)
    loaded = load_pair(target, draft, options, stages)
    pair = Shoal(
        loaded.target,
        loaded.draft,
        loaded.tokenizer,
        max_batch=max_batch,
        prefix_sharing=prefix_sharing,
        prefix_memory=prefix_memory,
        drafting=loaded.drafting,
        proposable=loaded.proposable,
    )
    pair.guide, pair.expert = loaded.guides["guide"], loaded.guides["expert"]
    LOG.info(one_line(pair.loaded))
    stages.ready()
    return pair
