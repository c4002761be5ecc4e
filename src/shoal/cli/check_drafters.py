"""The drafters of `shoal check` where none is named: each is measured, and the one that pays told.

A drafter in the box, and a pair's own, drafts for a prompt of each kind at one draft length, beside
plain decoding of the same rows. The best of them is measured again, in turns with plain decoding,
at that draft length and at a shorter one. What was published for the model elsewhere is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shoal.bench import in_turns
from shoal.cli.check_case import DRAFTED, PLAIN, CheckCase, Effort
from shoal.cli.check_model import drafters_in_the_box
from shoal.cli.check_pair import WORTHWHILE
from shoal.cli.check_prompts import CheckResult, PromptSet, measured_on
from shoal.cli.options import display_name
from shoal.drafting.draft import BUNDLED, read_draft
from shoal.errors import ModelError, RequestError

if TYPE_CHECKING:
    from shoal.drafting.protocol import Drafter
    from shoal.types.stats import Stats

SHORT = 2
"""The second draft length of the best drafter: where passes grow dear, fewer drafts pay."""
CONFIRMED = 1 + 2 * DRAFTED
"""The time of the runs of a prompt that measure the best drafter again, in plain runs."""


@dataclass(frozen=True)
class Published:
    """A drafter that was published for the models of a family.

    Attributes:
        family: the model type of the text model.
        vocabulary: the number of its tokens, by which generations of a family differ.
        place: the Hub id.
        width: the width of the only targets that it drafts for; 0 = all wider than `above`.
        above: the width of a draft model itself.
        layers: the number of the only targets' layers, where models of that width have several;
            0 = any number.
        about: the kind of drafter.
    """

    family: str
    vocabulary: int
    place: str
    width: int = 0
    above: int = 0
    layers: int = 0
    about: str = "a smaller model of the family"

    def fits(self, family: str, vocabulary: int, width: int, layers: int) -> bool:
        """Returns True if it drafts for models of that shape."""
        right = width == self.width if self.width else width > self.above
        right = right and self.layers in (0, layers)
        return (family, vocabulary) == (self.family, self.vocabulary) and right


EAGLE3, DFLASH, GEMMA4 = "EAGLE-3 heads", "a DFlash drafter", "an assistant"
MEDUSA = "Medusa heads"
LLAMA3, QWEN3 = ("llama", 128256), ("qwen3", 151936)
PUBLISHED = (
    Published(*LLAMA3, "meta-llama/Llama-3.2-1B-Instruct", above=2048),
    Published(*LLAMA3, "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", 4096, about=EAGLE3),
    Published(*LLAMA3, "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3", 4096, about=EAGLE3),
    Published(*LLAMA3, "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat", 4096, about=DFLASH),
    Published(*LLAMA3, "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B", 8192, about=EAGLE3),
    Published("llama", 32000, "FasterDecoding/medusa-vicuna-7b-v1.3", 4096, about=MEDUSA),
    Published("llama", 32000, "yuhuili/EAGLE3-Vicuna1.3-13B", 5120, about=EAGLE3),
    Published("llama", 49152, "HuggingFaceTB/SmolLM2-135M-Instruct", above=576),
    Published("qwen2", 151936, "Qwen/Qwen2.5-0.5B-Instruct", above=896),
    Published("qwen2", 152064, "Qwen/Qwen2.5-0.5B-Instruct", above=896),
    Published(*QWEN3, "Qwen/Qwen3-0.6B", above=1024),
    Published(*QWEN3, "AngelSlim/Qwen3-1.7B_eagle3", 2048, about=EAGLE3),
    Published(*QWEN3, "AngelSlim/Qwen3-4B_eagle3", 2560, about=EAGLE3),
    Published(*QWEN3, "z-lab/Qwen3-4B-DFlash-b16", 2560, about=DFLASH),
    Published(*QWEN3, "z-lab/Qwen3-8B-DFlash-b16", 4096, about=DFLASH),
    Published(*QWEN3, "RedHatAI/Qwen3-8B-speculator.eagle3", 4096, about=EAGLE3),
    Published(*QWEN3, "RedHatAI/Qwen3-14B-speculator.eagle3", 5120, layers=40, about=EAGLE3),
    Published(*QWEN3, "RedHatAI/Qwen3-32B-speculator.eagle3", 5120, layers=64, about=EAGLE3),
    Published("qwen3_moe", 151936, "Qwen/Qwen3-0.6B", above=1024),
    Published("qwen3_moe", 151936, "AngelSlim/Qwen3-a3B_eagle3", 2048, about=EAGLE3),
    Published("qwen3_5_text", 248320, "Qwen/Qwen3.5-0.8B", above=1024),
    Published("qwen3_5_text", 248320, "z-lab/Qwen3.5-4B-DFlash", 2560, about=DFLASH),
    Published("qwen3_5_moe_text", 248320, "Qwen/Qwen3.5-0.8B", above=1024),
    Published("lfm2", 65536, "LiquidAI/LFM2-350M", above=1024),
    Published("granitemoehybrid", 100352, "ibm-granite/granite-4.0-h-350m", above=768),
    Published("mamba", 50280, "state-spaces/mamba-130m-hf", above=768),
    Published("gemma3_text", 262144, "google/gemma-3-270m-it", above=640),
    Published("gemma4_text", 262144, "google/gemma-4-E2B-it-assistant", 1536, about=GEMMA4),
    Published("gemma4_text", 262144, "google/gemma-4-31B-it-assistant", 5376, about=GEMMA4),
    Published("gpt2", 50257, "openai-community/gpt2", above=768),
    Published("opt", 50272, "facebook/opt-125m", above=768),
)
"""The well-known ones, by Hub id.

What is loaded decides: one that does not fit is refused.
"""


def published(case: CheckCase) -> Iterator[CheckResult]:
    """Yields a result if drafters were published for models of the target's shape."""
    target = case.model.target
    if not target.has_modules:
        return
    config = target.hf.config.get_text_config()
    sizes = (getattr(config, name, 0) for name in ("hidden_size", "num_hidden_layers"))
    shape = config.model_type, config.vocab_size, *sizes
    drafters = [one for one in PUBLISHED if one.fits(*shape) and one.place != target.name]
    if drafters:
        figure = "; ".join(f"{one.place} ({one.about})" for one in drafters)
        data = {"drafters": [{"id": one.place, "kind": one.about} for one in drafters]}
        advice = f"{_command('check', case)} --draft {drafters[0].place} measures one; heads and "
        advice += "assistants are downloaded first, and named by their directory"
        yield CheckResult("published", "ok", f"for this shape: {figure}", advice, data)


def candidates(case: CheckCase) -> list[str]:
    """Returns the drafters to measure: the pair's own, and those in the box."""
    own = [] if case.model.drafter_name is None else [BUNDLED]
    named = drafters_in_the_box(case.model.target)
    return [*own, *(name for name in named if name != "self"), "self:int4"]


def runs_of(case: CheckCase, effort: Effort) -> int:
    """Returns the time of an effort's runs, in runs of plain decoding."""
    each = 1 + DRAFTED * len(candidates(case)) + CONFIRMED
    return effort.kinds * effort.repeats * each


@dataclass(frozen=True)
class MeasuredDrafter:
    """A drafter that was measured.

    Attributes:
        name: the drafter, as `--draft` takes it.
        length: the draft length.
        tokens: the tokens per target pass and row.
        ratio: tokens per second over those of plain decoding.
    """

    name: str
    length: int
    tokens: float
    ratio: float

    @staticmethod
    def of(name: str, length: int, run: Stats, plain: Stats) -> MeasuredDrafter:
        """Compares the counts and seconds of two runs of the same rows.

        A round with drafts takes no less than one without: more than the tokens per pass is noise.
        """
        tokens = run.acceptance_length
        return MeasuredDrafter(name, length, tokens, min(_speed(run) / _speed(plain), tokens))

    def __str__(self) -> str:
        return (
            f"{self.tokens:.2f} tokens per pass, {self.ratio:.2f}x plain decoding at draft "
            f"length {self.length}"
        )


def _speed(stats: Stats) -> float:
    """Returns tokens per second of the rounds; prompts are not counted."""
    return stats.committed / max(stats.seconds_rounds, math.ulp(1.0))


def compared_drafters(case: CheckCase) -> Iterator[CheckResult]:
    """Measures plain decoding and each drafter on the first prompt of each kind, and names one."""
    sets = [one.first() for one in case.sets]
    case.say("measuring plain decoding ...")
    plain = _total(case, sets, PLAIN, None)
    tried = []
    for name in candidates(case):
        case.say(f"measuring {name} ...")
        try:
            run = _drafted(case, sets, name, case.k)
        except (RequestError, ModelError) as error:
            yield CheckResult(f"drafter {name}", "skip", str(error))
            continue
        tried.append(MeasuredDrafter.of(name, case.k, run, plain))
        data = vars(tried[-1]) | {"drafted": run.drafted, "accepted": run.accepted}
        result = CheckResult(f"drafter {name}", "ok", str(tried[-1]), data=data)
        yield measured_on(result, *sets)
    if tried:
        yield measured_on(_choice(case, sets, max(tried, key=lambda one: one.ratio)), *sets)


def _choice(case: CheckCase, sets: Sequence[PromptSet], best: MeasuredDrafter) -> CheckResult:
    """Measures the best drafter again, and tells the command to use."""
    totals: dict[str, Stats] = {}
    once = replace(case, repeats=1)
    lengths = {str(k): k for k in sorted({min(SHORT, case.k), case.k})}
    for _, length in in_turns([PLAIN, *lengths], case.repeats):
        case.say(f"measuring {best.name} again ...")
        name = None if length == PLAIN else best.name
        run = _total(once, sets, lengths.get(length, PLAIN), name)
        totals[length] = totals[length] + run if length in totals else run
    again = [
        MeasuredDrafter.of(best.name, k, totals[name], totals[PLAIN]) for name, k in lengths.items()
    ]
    best = max(again, key=lambda one: one.ratio)
    data: dict[str, Any] = {"measured": [vars(one) for one in again], "drafter": None}
    command, drafts = _command("generate", case), f" --draft {best.name}"
    if best.name == BUNDLED and case.model.draft_model is not None:
        drafts = ""
    if best.ratio < WORTHWHILE:
        figure = f"no drafter pays here; the best is {best.name}, {best}, measured again"
        advice = f"decode plainly: {command} --lookahead off; on your own prompts: --prompts FILE"
        return CheckResult("choice", "ok", figure, advice, data | {"command": f"{command}"})
    figure = f"{best.name} pays: {best}, measured again in turns with it"
    data |= {"drafter": best.name, "length": best.length, "command": command + drafts}
    return CheckResult("choice", "ok", figure, f"use {command}{drafts}", data)


def _command(name: str, case: CheckCase) -> str:
    shown = display_name(case.model.target)
    return f"shoal {name}" + (f" --model {shown}" if shown == case.model.target.name else "")


def _drafted(case: CheckCase, sets: Sequence[PromptSet], name: str, length: int) -> Stats:
    """Runs a drafter, once for a few tokens before it is measured."""
    short = replace(case, max_new_tokens=min(case.max_new_tokens, length + 1))
    _total(replace(short, repeats=1), sets[:1], length, name)
    return _total(case, sets, length, name)


def _total(
    case: CheckCase, sets: Sequence[PromptSet], lookahead: str | int, name: str | None
) -> Stats:
    """Returns the counts of all runs of each prompt; all rows run to the end."""
    runs = [
        case.run(lookahead, one.ids, eos=(), drafter=_drafter(case, name)).stats
        for one in [*sets] * case.repeats
    ]
    return sum(runs[1:], runs[0])


def _drafter(case: CheckCase, name: str | None) -> Drafter | None:
    """Makes a drafter that has seen no text yet; None = the pair's own."""
    draft = None if name in (None, BUNDLED) else read_draft(name)
    return None if draft is None else draft.settled(case.model.target).drafter(case.model.target)
